package errs_test

import (
	"strings"
	"testing"

	"pando/internal/base/errs"
)

func TestMaskURLs(t *testing.T) {
	for text, want := range map[string]string{
		"nothing":                                            "nothing",
		"clone user:p/w@host:x.git: no":                      "clone user:***@host:x.git: no",
		"'user:p@w@[::1]:/x' (user@host:x:y)":                "'user:***@[::1]:/x' (user@host:x:y)",
		"pull nas:base@s-1: no; a:b@c: no":                   "pull nas:base@s-1: no; a:b@c: no",
		"cannot reach https://host/a@b/c.git: no":            "cannot reach https://host/a@b/c.git: no",
		"https://user:pw@host/x":                             "https://***@host/x",
		"https://ghp_TOKEN@host:8443/x and 'http://a:b@c/d'": "https://***@host:8443/x and 'http://***@c/d'",
		"https://user:p/w@host/x":                            "https://***@host/x",
		"https://user:/pw@host/x":                            "https://***@host/x",
		"https://user:p%zz@host/x":                           "https://***@host/x",
		"https://user:p@w@host/x":                            "https://***@host/x",
		"ssh://git@host/x":                                   "ssh://git@host/x",
		"git+ssh://git:pw@host/x":                            "git+ssh://git:***@host/x",
		"s3://key:secret@bucket/x?region=eu":                 "s3://***@bucket/x?region=eu",
		"s3://b/x?region=eu&secret_key=abc&x=1#y":            "s3://b/x?region=eu&secret_key=***&x=1#y",
		"https://h/x.git?private_token=abc":                  "https://h/x.git?private_token=***",
		"https://h/x?X-Amz-Signature=a&X-Amz-Date=b":         "https://h/x?X-Amz-Signature=***&X-Amz-Date=b",
		"https://h/x?x-credential=a;passwd=b":                "https://h/x?x-credential=***;passwd=***",
		"https://h/x?pwd=a&apikey=b&client_secret=c":         "https://h/x?pwd=***&apikey=***&client_secret=***",
		"https://h/x?oauth=a#b":                              "https://h/x?oauth=***#b",
		"file:///srv/a@b":                                    "file:///srv/a@b",
		"s3://b/x?endpoint=https://k:s@h":                    "s3://b/x?endpoint=https://***@h",
	} {
		if got := errs.MaskURLs(text); got != want {
			t.Errorf("%q is masked as %q, wanted %q", text, got, want)
		}
	}
}

// TestErrorsMaskURLs: no error shows a secret, wherever it is in it.
func TestErrorsMaskURLs(t *testing.T) {
	const secret = "https://token@host/x"
	err := errs.Wrap("push", "v", errs.New(errs.IO, "fetch", secret, "cannot read %s", secret).
		WithHint("try %s again", secret))
	for _, text := range []string{err.Error(), errs.HintOf(err), errs.Reason(err)} {
		if strings.Contains(text, "token") || !strings.Contains(text, "https://***@host/x") {
			t.Errorf("%q", text)
		}
	}
}
