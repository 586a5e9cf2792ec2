package s3_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore/s3"
	"pando/internal/testing/servertest"
	"pando/internal/testing/testfs"
)

func TestURLs(t *testing.T) {
	for _, c := range []struct {
		url  string
		want string // String, "" if it is refused
	}{
		{"s3://bucket", "s3://bucket"},
		{"s3://bucket/", "s3://bucket"},
		{"s3://bucket/a/b", "s3://bucket/a/b"},
		{"s3://bucket//a/b//", "s3://bucket/a/b"},
		{"s3://bucket/Some%20Where", "s3://bucket/Some%20Where"},
		{"s3://my.bucket.example", "s3://my.bucket.example"},
		{"s3://bucket/a?endpoint=http://10.0.0.1:9000&region=eu-west-1",
			"s3://bucket/a?endpoint=http://10.0.0.1:9000&region=eu-west-1"},
		{"s3://bucket?endpoint=https://[::1]:9000/&path-style=false",
			"s3://bucket?endpoint=https://[::1]:9000/&path-style=false"},
		{"s3://bucket?profile=backup&insecure-skip-verify=true", "s3://bucket?profile=backup&insecure-skip-verify=true"},
		{"gs://bucket", ""},
		{"s3:bucket", ""},
		{"s3:///a", ""},
		{"s3://Bucket", ""},
		{"s3://b", ""},
		{"s3://bucket:9000/a", ""},
		{"s3://user:password@bucket/a", ""},
		{"s3://bucket/a//b", ""},
		{"s3://bucket/a/../b", ""},
		{"s3://bucket/a%5Cb", ""},
		{"s3://bucket/a%0Ab", ""},
		{"s3://bucket/a%FFb", ""},
		{"s3://bucket/" + strings.Repeat("a", 300), ""},
		{"s3://bucket/a#b", ""},
		{"s3://bucket?nonsense=1", ""},
		{"s3://bucket?region=", ""},
		{"s3://bucket?region=a&region=b", ""},
		{"s3://bucket?region=a%20b", ""},
		{"s3://bucket?profile=", ""},
		{"s3://bucket?path-style=perhaps", ""},
		{"s3://bucket?insecure-skip-verify=perhaps", ""},
		{"s3://bucket?ca-file=relative.pem", ""},
		{"s3://bucket?ca-file=/no/such/file", ""},
		{"s3://bucket?endpoint=10.0.0.1:9000", ""},
		{"s3://bucket?endpoint=ftp://host", ""},
		{"s3://bucket?endpoint=http://", ""},
		{"s3://bucket?endpoint=http://host/path", ""},
		{"s3://bucket?endpoint=http://user:password@host", ""},
		{"s3://bucket?a=%zz", ""},
	} {
		u, err := url.Parse(c.url)
		if err != nil {
			t.Errorf("%s: %v", c.url, err)
			continue
		}
		s, err := s3.Open(t.Context(), u, access)
		switch {
		case c.want == "" && err == nil:
			t.Errorf("%s: is taken, as %s", c.url, s)
		case c.want == "":
			if k := errs.KindOf(err); k != errs.Invalid && k != errs.NotFound {
				t.Errorf("%s: kind %q: %v", c.url, k, err)
			}
			if strings.Contains(err.Error()+errs.HintOf(err), "password") {
				t.Errorf("%s: there is a password in %v", c.url, err)
			}
		case err != nil:
			t.Errorf("%s: %v", c.url, err)
		case s.String() != c.want:
			t.Errorf("%s: is called %s, want %s", c.url, s, c.want)
		}
	}
}

// TestTLS: certificates are looked at, unless somebody does not want that.
func TestTLS(t *testing.T) {
	server := servertest.VersityGW(t)
	server.Setenv(t)
	proxy := servertest.NewTLSProxy(t, server)
	u := server.URLOf(servertest.Bucket, prefix(t), proxy.URL)
	want{kind: errs.IO, hint: "ca-file"}.check(t, calls["put"](t, open(t, u)))
	for _, good := range []*url.URL{with(u, "ca-file", proxy.CAFile), with(u, "insecure-skip-verify", "true")} {
		s := open(t, good)
		for _, name := range []string{"put", "list", "delete"} {
			if err := calls[name](t, s); err != nil {
				t.Errorf("%s: %s: %v", good, name, err)
			}
		}
	}
	t.Setenv("AWS_CA_BUNDLE", proxy.CAFile)
	if err := calls["put"](t, open(t, u)); err != nil {
		t.Error(err)
	}
	noName := strings.Replace(proxy.URL, "127.0.0.1", "localhost", 1) // the certificate is for 127.0.0.1 and example.com
	want{kind: errs.IO, hint: "certificate"}.check(t,
		calls["put"](t, open(t, server.URLOf(servertest.Bucket, prefix(t), noName))))
	empty := filepath.Join(t.TempDir(), "empty.pem")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s3.Open(t.Context(), with(u, "ca-file", empty), access); !errs.Is(err, errs.Invalid) {
		t.Errorf("a file without certificates: %v", err)
	}
}

// TestCredentials: where they are looked for, and what is said if there are none. The
// server knows one user.
func TestCredentials(t *testing.T) {
	server := servertest.VersityGW(t)
	server.Setenv(t)
	u := server.URL(prefix(t))
	file := filepath.Join(t.TempDir(), "credentials")
	if err := os.WriteFile(file, fmt.Appendf(nil,
		"[default]\naws_access_key_id = nobody\naws_secret_access_key = nothing\n\n[good]\naws_access_key_id = "+
			"%s\naws_secret_access_key = %s\n\n[empty]\nregion = x\n\n[half]\naws_access_key_id = a\n",
		server.Access, server.Secret), 0o600); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(filepath.Dir(file), "config")
	if err := os.WriteFile(config, fmt.Appendf(nil, "[profile good]\naws_access_key_id = %s\naws_secret_access_key = %s\n",
		server.Access, server.Secret), 0o600); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "get keys")
	text := `{"Version": 1, "AccessKeyId": "` + server.Access + `", "SecretAccessKey": "` + server.Secret + `"}`
	if err := testfs.WriteProgram(program, []byte("#!/bin/sh\necho '"+text+"'\n")); err != nil {
		t.Fatal(err)
	}
	bare := filepath.Join(filepath.Dir(file), "getkeys")
	if err := os.Symlink(program, bare); err != nil {
		t.Fatal(err)
	}
	processes := filepath.Join(filepath.Dir(file), "processes")
	sections := "[profile plain]\ncredential_process = " + bare + "\n" +
		"[profile quoted]\ncredential_process = \"" + program + "\" --for \"a b\"\n" +
		"[profile failing]\ncredential_process = false\n"
	if err := os.WriteFile(processes, []byte(sections), 0o600); err != nil {
		t.Fatal(err)
	}
	byProcess := func(profile string) map[string]string {
		return map[string]string{
			"AWS_ACCESS_KEY_ID":     "",
			"AWS_SECRET_ACCESS_KEY": "",
			"AWS_CONFIG_FILE":       processes,
			"AWS_PROFILE":           profile,
		}
	}
	var asked atomic.Int32
	expires := time.Hour
	role := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		if r.URL.Path == "/broken" {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"AccessKeyId": server.Access, "SecretAccessKey": server.Secret,
			"Token": "", "Expiration": time.Now().Add(expires)})
	}))
	defer role.Close()
	for _, c := range []struct {
		name string
		env  map[string]string
		u    *url.URL
		want want // the zero value: it works
	}{
		{name: "environment"},
		{name: "half of the environment", env: map[string]string{"AWS_SECRET_ACCESS_KEY": ""},
			want: want{kind: errs.Permission, hint: "set both"}},
		{name: "none", env: map[string]string{"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
			want: want{kind: errs.Permission, hint: "~/.aws/credentials"}},
		{name: "default section", env: map[string]string{"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "",
			"AWS_SHARED_CREDENTIALS_FILE": file}, want: want{kind: errs.Permission, hint: "AWS_ACCESS_KEY_ID"}},
		{name: "AWS_PROFILE", env: map[string]string{"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "",
			"AWS_SHARED_CREDENTIALS_FILE": file, "AWS_PROFILE": "good"}},
		{name: "AWS_PROFILE that is not there", env: map[string]string{"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "",
			"AWS_SHARED_CREDENTIALS_FILE": file, "AWS_PROFILE": "bad"}, want: want{kind: errs.Permission, hint: "this section"}},
		{name: "AWS_PROFILE without keys", env: map[string]string{"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "",
			"AWS_SHARED_CREDENTIALS_FILE": file, "AWS_PROFILE": "empty"}, want: want{kind: errs.Permission,
			hint: "this section"}},
		{name: "AWS_PROFILE with one key", env: map[string]string{"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "",
			"AWS_SHARED_CREDENTIALS_FILE": file, "AWS_PROFILE": "half"}, want: want{kind: errs.Permission,
			hint: "this section"}},
		{name: "profile of the URL, before the environment",
			env: map[string]string{"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing",
				"AWS_SHARED_CREDENTIALS_FILE": file}, u: with(u, "profile", "good")},
		{name: "profile of the URL that is not there", env: map[string]string{"AWS_SHARED_CREDENTIALS_FILE": file},
			u: with(u, "profile", "bad"), want: want{kind: errs.Permission, hint: "this section"}},
		{name: "config file", env: map[string]string{"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "",
			"AWS_CONFIG_FILE": config, "AWS_PROFILE": "good"}},
		{name: "credential_process without arguments", env: byProcess("plain")},
		{name: "credential_process with quotes", env: byProcess("quoted")},
		{name: "credential_process that fails", env: byProcess("failing"),
			want: want{kind: errs.Permission, hint: "this section"}},
		{name: "endpoint of the environment", env: map[string]string{"AWS_ENDPOINT_URL": server.Endpoint()},
			u: without(u, "endpoint")},
		{name: "endpoint of the environment, for S3", u: without(u, "endpoint"),
			env: map[string]string{"AWS_ENDPOINT_URL": servertest.Closed(t), "AWS_ENDPOINT_URL_S3": server.Endpoint()}},
		{name: "endpoint of the URL, before the environment",
			env: map[string]string{"AWS_ENDPOINT_URL": servertest.Closed(t)}},
		{name: "role of a container", env: map[string]string{"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "",
			"AWS_CONTAINER_CREDENTIALS_FULL_URI": role.URL + "/role"}},
		{name: "role that does not answer", env: map[string]string{"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "",
			"AWS_CONTAINER_CREDENTIALS_FULL_URI": role.URL + "/broken"}, want: want{kind: errs.Permission,
			hint: "AWS_CONTAINER_CREDENTIALS"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for name, value := range c.env {
				t.Setenv(name, value)
			}
			if c.u == nil {
				c.u = u
			}
			begin := time.Now()
			err := calls["put"](t, open(t, c.u))
			if c.want == (want{}) {
				if err != nil {
					t.Error(err)
				}
			} else {
				c.want.check(t, err)
			}
			if d := time.Since(begin); d > 5*time.Second {
				t.Errorf("it took %s", d)
			}
		})
	}
	t.Run("of a role they are fetched again", func(t *testing.T) {
		t.Setenv("AWS_ACCESS_KEY_ID", "")
		t.Setenv("AWS_SECRET_ACCESS_KEY", "")
		t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", role.URL+"/role")
		for _, c := range []struct {
			expires time.Duration
			want    int32 // times for two requests
		}{{time.Hour, 1}, {-time.Hour, 2}} {
			expires = c.expires
			asked.Store(0)
			s := open(t, u)
			for range 2 {
				if err := calls["put"](t, s); err != nil {
					t.Fatal(err)
				}
			}
			if n := asked.Load(); n != c.want {
				t.Errorf("credentials that expire in %s were fetched %d times, want %d", c.expires, n, c.want)
			}
		}
	})
}

// without is a URL without one of its parameters.
func without(u *url.URL, name string) *url.URL {
	out := *u
	q := u.Query()
	q.Del(name)
	out.RawQuery = q.Encode()
	return &out
}

// TestSecretsStayOut of what people see of a store.
func TestSecretsStayOut(t *testing.T) {
	server := servertest.GoFakeS3(t)
	server.Setenv(t)
	s := open(t, server.URL("p"))
	if text := fmt.Sprintf("%v %s %+v", s, s, s); strings.Contains(text, server.Secret) {
		t.Error(text)
	}
}
