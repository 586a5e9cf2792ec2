package mask

import "testing"

func TestURLsAreMasked(t *testing.T) {
	for _, c := range []struct{ raw, masked string }{
		{"https://ghp_SECRET@github.com/a/b.git", "https://***@github.com/a/b.git"},
		{"HTTPS://user:SECRET@host/", "HTTPS://***@host/"},
		{"http://user:SEC@RET@host/x", "http://***@host/x"},
		{"https://user:%zzSECRET@host/", "https://***@host/"},
		{"s3://u:SEC RET@bucket/x", "s3://***@bucket/x"},
		{"ssh://git:SECRET@host/x", "ssh://git:***@host/x"},
		{"https://host/x.git?private_token=SECRET&depth=1", "https://host/x.git?private_token=***&depth=1"},
		{"s3://b/x?region=eu&X-Amz-Signature=SECRET#f", "s3://b/x?region=eu&X-Amz-Signature=***#f"},
		{"user:SECRET@host:b.git", "user:***@host:b.git"},
		// Nothing is secret in these.
		{"ssh://git@github.com/a/b.git", "ssh://git@github.com/a/b.git"},
		{"git@github.com:a/b.git", "git@github.com:a/b.git"},
		{"git@host:a@b/c.git", "git@host:a@b/c.git"},
		{"https://host/a@b?ref=v1&keyboard=us", "https://host/a@b?ref=v1&keyboard=us"},
		{"file:///srv/a@b", "file:///srv/a@b"},
		{"s3://bucket/prefix?endpoint=http://127.0.0.1:9000", "s3://bucket/prefix?endpoint=http://127.0.0.1:9000"},
	} {
		if got := URL(c.raw); got != c.masked {
			t.Errorf("URL(%q) = %q, want %q", c.raw, got, c.masked)
		}
		if HasSecret(c.raw) != (c.raw != c.masked) {
			t.Errorf("HasSecret(%q) = %v", c.raw, HasSecret(c.raw))
		}
	}

	text := `cannot push v@s: Get "https://u:SECRET@h/p?X-Goog-Signature=SECRET&a=b": EOF; see http://h/?token=SECRET: a@b`
	want := `cannot push v@s: Get "https://***@h/p?X-Goog-Signature=***&a=b": EOF; see http://h/?token=***: a@b`
	if got := Text(text); got != want {
		t.Errorf("Text:\n%s\nwant\n%s", got, want)
	}
}
