package s3_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/testing/servertest"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

// TestRefused: what a real server with users and policies says, people understand.
func TestRefused(t *testing.T) {
	reader := servertest.Account{Access: "reader", Secret: "reader-secret-1"}
	nobody := servertest.Account{Access: "nobody", Secret: "nobody-secret-1"}
	server := servertest.VersityGW(t, reader, nobody)
	server.Setenv(t)
	root, err := minio.New(server.Addr, &minio.Options{Creds: credentials.NewStaticV4(server.Access, server.Secret, "")})
	if err != nil {
		t.Fatal(err)
	}
	if err := root.SetBucketPolicy(t.Context(), servertest.Bucket, fmt.Sprintf(`{"Version":"2012-10-17","Statement":[
		{"Effect":"Allow","Principal":{"AWS":["reader"]},"Action":["s3:GetObject"],"Resource":["arn:aws:s3:::%[1]s/*"]},
		{"Effect":"Allow","Principal":{"AWS":["reader"]},"Action":["s3:ListBucket"],"Resource":["arn:aws:s3:::%[1]s"]}]}`,
		servertest.Bucket)); err != nil {
		t.Fatal(err)
	}
	u := server.URL(prefix(t))
	for _, key := range []string{"a/there", "a/delete"} {
		if _, err := open(t, u).Put(t.Context(), key, []byte("there"), objstore.Always); err != nil {
			t.Fatal(err)
		}
	}
	changes := func(call string) bool { return strings.HasPrefix(call, "put") || call == "delete" }
	good := want{}
	for _, c := range []struct {
		name           string
		access, secret string
		bucket         string
		want           func(call string) want
	}{
		{name: "read-only", access: reader.Access, secret: reader.Secret, want: func(call string) want {
			if changes(call) {
				return want{kind: errs.Permission, hint: "s3:PutObject"}
			}
			return good
		}},
		{name: "no rights", access: nobody.Access, secret: nobody.Secret, want: func(string) want {
			return want{kind: errs.Permission, hint: "s3:ListBucket"}
		}},
		{name: "unknown key", access: "stranger", secret: "x", want: func(call string) want {
			if call == "stat" { // its answer has no body that could say more
				return want{kind: errs.Permission}
			}
			return want{kind: errs.Permission, hint: "AWS_ACCESS_KEY_ID"}
		}},
		{name: "wrong secret", access: server.Access, secret: "wrong", want: func(call string) want {
			if call == "stat" {
				return want{kind: errs.Permission}
			}
			return want{kind: errs.Permission, hint: "AWS_SECRET_ACCESS_KEY"}
		}},
		{name: "wrong bucket", access: server.Access, secret: server.Secret, bucket: "no-such-bucket",
			want: func(call string) want {
				if call == "stat" {
					return want{kind: errs.NotFound}
				}
				return want{kind: errs.NotFound, hint: "create the bucket"}
			}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("AWS_ACCESS_KEY_ID", c.access)
			t.Setenv("AWS_SECRET_ACCESS_KEY", c.secret)
			mine := *u
			if c.bucket != "" {
				mine.Host = c.bucket
			}
			s := open(t, &mine)
			for call, do := range calls {
				err := do(t, s)
				if w := c.want(call); w == good && err != nil {
					t.Errorf("%s: %v", call, err)
				} else if w != good {
					t.Run(call, func(t *testing.T) { w.check(t, err) })
				}
				if err != nil && (strings.Contains(err.Error(), c.secret) && len(c.secret) > 1 ||
					strings.Contains(errs.HintOf(err), server.Secret)) {
					t.Errorf("%s: there is a secret in the error: %v", call, err)
				}
			}
		})
	}
	t.Run("probe", func(t *testing.T) {
		t.Setenv("AWS_ACCESS_KEY_ID", reader.Access)
		t.Setenv("AWS_SECRET_ACCESS_KEY", reader.Secret)
		want{kind: errs.Permission}.check(t, objstore.Probe(t.Context(), open(t, u)))
	})
}

// TestClock: a host whose clock is wrong is told so, and by how much.
func TestClock(t *testing.T) {
	for _, c := range []struct {
		ahead time.Duration
		hint  string
	}{{time.Hour, "it is (1h0m|59m)[0-9]+s behind"}, {-40 * time.Minute, "it is 40m[0-9]+s ahead"}} {
		server := servertest.GoFakeS3Ahead(t, c.ahead)
		server.Setenv(t)
		s := open(t, server.URL(prefix(t)))
		for name, call := range calls {
			if name == "stat" {
				continue // its answer has no body that could say why
			}
			t.Run(name, func(t *testing.T) {
				err := call(t, s)
				want{kind: errs.Permission, hint: "set the clock of this host"}.check(t, err)
				if hint := errs.HintOf(err); !regexp.MustCompile(c.hint).MatchString(hint) {
					t.Errorf("hint %q, want one with %q", hint, c.hint)
				}
			})
		}
	}
}

// TestRegion: a bucket elsewhere is found without asking, and where a wrong region was
// given, the right one is named.
func TestRegion(t *testing.T) {
	server := servertest.VersityGW(t) // is in us-east-1
	server.Setenv(t)
	u := server.URL(prefix(t))
	if _, err := open(t, u).Put(t.Context(), "a/there", []byte("there"), objstore.Always); err != nil {
		t.Fatal(err)
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			t.Setenv("AWS_REGION", "eu-central-1")
			err := call(t, open(t, u))
			if name == "stat" { // this server does not say it in the headers, Amazon does
				want{kind: errs.IO}.check(t, err)
				return
			}
			if err != nil {
				t.Error(err)
			}
			t.Setenv("AWS_REGION", "")
			want{kind: errs.Invalid, hint: "us-east-1"}.check(t, call(t, open(t, with(u, "region", "eu-west-1"))))
		})
	}
}

// TestRegionOfHead: what Amazon answers to a HEAD for a bucket that is elsewhere.
func TestRegionOfHead(t *testing.T) {
	server := servertest.GoFakeS3(t)
	server.Setenv(t)
	u := server.URL(prefix(t))
	if _, err := open(t, u).Put(t.Context(), "a/there", []byte("there"), objstore.Always); err != nil {
		t.Fatal(err)
	}
	elsewhere := func(r *http.Request) bool { return !strings.Contains(r.Header.Get("Authorization"), "/eu-west-3/s3/") }
	for _, status := range []int{http.StatusBadRequest, http.StatusMovedPermanently, http.StatusTemporaryRedirect} {
		proxy := servertest.NewProxy(t, server, &servertest.Fault{Match: elsewhere, Times: -1,
			Answer: func(a *http.Response, _ []byte) []byte {
				a.StatusCode = status
				a.Header = http.Header{"X-Amz-Bucket-Region": {"eu-west-3"}}
				return nil
			}})
		s := open(t, server.URLOf(servertest.Bucket, strings.Trim(u.Path, "/"), proxy.URL))
		for range 2 {
			if _, err := s.Stat(t.Context(), "a/there"); err != nil {
				t.Fatalf("%d: %v", status, err)
			}
		}
		if n := len(proxy.Requests()); n != 3 {
			t.Errorf("%d: %d requests, want one to the wrong region and two to the right one", status, n)
		}
	}
}

// TestAnswers: what each answer means, of every call; each is asked for once.
func TestAnswers(t *testing.T) {
	server := servertest.GoFakeS3(t)
	server.Setenv(t)
	proxy := servertest.NewProxy(t, server)
	s := open(t, server.URLOf(servertest.Bucket, prefix(t), proxy.URL))
	temporary := want{kind: errs.IO, temporary: true}
	for _, c := range []struct {
		status int
		code   string
		want   want
	}{
		{500, "InternalError", temporary},
		{502, "", temporary},
		{503, "SlowDown", temporary},
		{503, "ServiceUnavailable", temporary},
		{504, "", temporary},
		{520, "", temporary},
		{429, "TooManyRequests", temporary},
		{408, "RequestTimeout", temporary},
		{409, "OperationAborted", temporary},
		{409, "ConditionalRequestConflict", temporary},
		{400, "RequestTimeout", temporary},
		{400, "BadDigest", temporary},
		{400, "IncompleteBody", temporary},
		{400, "InvalidArgument", want{kind: errs.IO}},
		{400, "ExpiredToken", want{kind: errs.Permission, hint: "expired"}},
		{403, "AccessDenied", want{kind: errs.Permission, hint: "s3:PutObject"}},
		{403, "RequestTimeTooSkewed", want{kind: errs.Permission, hint: "clock"}},
		{401, "", want{kind: errs.Permission}},
		{501, "NotImplemented", want{kind: errs.Unsupported}},
		{507, "XMinioStorageFull", want{kind: errs.NoSpace, hint: "prune"}},
		{507, "", want{kind: errs.NoSpace}},
		{404, "NoSuchBucket", want{kind: errs.NotFound}},
		{412, "PreconditionFailed", want{kind: errs.Conflict}},
		{301, "PermanentRedirect", want{kind: errs.Invalid, hint: "region"}},
	} {
		for name, call := range calls {
			t.Run(fmt.Sprintf("%d %s %s", c.status, c.code, name), func(t *testing.T) {
				proxy.Requests()
				fault := servertest.S3Error(c.status, c.code)
				if c.code == "" {
					fault.Body, fault.Type = "<html>a gateway</html>", "text/html"
				}
				proxy.Add(fault)
				err := call(t, s)
				w := c.want
				if name == "stat" { // only the status gets through
					switch {
					case c.status == 400:
						w = want{kind: errs.IO}
					case c.status/100 == 3, c.status == 403:
						w.hint = ""
					}
				}
				w.check(t, err)
				if err != nil && !strings.Contains(err.Error(), "a/") {
					if c.code != "NoSuchBucket" {
						t.Errorf("it does not say of what: %v", err)
					}
				}
				if got := proxy.Requests(); len(got) != 1 {
					t.Errorf("requests: %q, want one", got)
				}
			})
		}
	}
}

// TestNoWay: what happens between this host and the server, of every call.
func TestNoWay(t *testing.T) {
	server := servertest.GoFakeS3(t)
	server.Setenv(t)
	p := prefix(t)
	direct := open(t, server.URL(p))
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<18)
	put := func(key string, data []byte) {
		t.Helper()
		if _, err := direct.Put(t.Context(), key, data, objstore.Always); err != nil {
			t.Fatal(err)
		}
	}
	put("a/there", []byte("there"))
	put("a/big", big)
	temporary := want{kind: errs.IO, hint: "network", temporary: true}

	t.Run("nothing listens", func(t *testing.T) {
		s := open(t, server.URLOf(servertest.Bucket, p, servertest.Closed(t)))
		for name, call := range calls {
			t.Run(name, func(t *testing.T) { temporary.check(t, call(t, s)) })
		}
	})
	t.Run("no such host", func(t *testing.T) {
		s := open(t, server.URLOf(servertest.Bucket, p, "http://no-such-host.invalid"))
		err := calls["get"](t, s)
		if errs.KindOf(err) != errs.IO || errs.HintOf(err) == "" {
			t.Errorf("%v, hint %q", err, errs.HintOf(err))
		}
	})
	t.Run("closed", func(t *testing.T) {
		proxy := servertest.NewProxy(t, server)
		s := open(t, server.URLOf(servertest.Bucket, p, proxy.URL))
		for name, call := range calls {
			for _, fault := range []*servertest.Fault{{Drop: true}, {Lose: true}} {
				t.Run(fmt.Sprintf("%s lose=%v", name, fault.Lose), func(t *testing.T) {
					put("a/delete", []byte("x"))
					_ = direct.Delete(t.Context(), "a/absent")
					proxy.Add(fault)
					proxy.Requests()
					temporary.check(t, call(t, s))
					if got := proxy.Requests(); len(got) != 1 {
						t.Errorf("requests: %q, want one", got)
					}
				})
			}
		}
	})
	t.Run("cut", func(t *testing.T) {
		proxy := servertest.NewProxy(t, server)
		s := open(t, server.URLOf(servertest.Bucket, p, proxy.URL))
		for _, n := range []int64{1, 1000, int64(len(big)) - 1} {
			proxy.Add(&servertest.Fault{Cut: n})
			_, _, err := s.Get(t.Context(), "a/big", 0, -1)
			temporary.check(t, err)
			proxy.Add(&servertest.Fault{Cut: n})
			data, _, err := retried(s).Get(t.Context(), "a/big", 5, -1)
			if err != nil || !bytes.Equal(data, big[5:]) {
				t.Errorf("cut after %d, again: %d bytes, %v", n, len(data), err)
			}
		}
		proxy.Add(&servertest.Fault{Cut: 100})
		temporary.check(t, calls["list"](t, s))
	})
	t.Run("canceled", func(t *testing.T) {
		proxy := servertest.NewProxy(t, server, &servertest.Fault{Hang: true, Times: -1})
		s := open(t, server.URLOf(servertest.Bucket, p, proxy.URL))
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := s.Put(ctx, "a/put", big, objstore.Always)
		want{kind: errs.Canceled}.check(t, err)
		for _, err := range s.List(ctx, "") {
			want{kind: errs.Canceled}.check(t, err)
		}
	})
	t.Run("no TLS there", func(t *testing.T) {
		s := open(t, server.URLOf(servertest.Bucket, p, "https://"+server.Addr))
		want{kind: errs.IO, hint: "http://"}.check(t, calls["get"](t, s))
	})
}

// TestVanishes: the server ends in the middle of transfers.
func TestVanishes(t *testing.T) {
	for _, call := range []string{"put", "get"} {
		t.Run(call, func(t *testing.T) {
			server := servertest.VersityGW(t)
			server.Setenv(t)
			s := open(t, server.URL(prefix(t)))
			data := bytes.Repeat([]byte("0123456789abcdef"), 1<<21)
			if _, err := s.Put(t.Context(), "a/there", data, objstore.Always); err != nil {
				t.Fatal(err)
			}
			slow := objstore.Limit(s, 16<<20) // two seconds, far more than the buffers of sockets
			time.AfterFunc(250*time.Millisecond, server.Stop)
			var err error
			if call == "put" {
				_, err = slow.Put(t.Context(), "a/new", data, objstore.IfAbsent)
			} else {
				_, _, err = slow.Get(t.Context(), "a/there", 0, -1)
			}
			want{kind: errs.IO, hint: "network", temporary: true}.check(t, err)
			if _, err := os.Stat(filepath.Join(server.Dir, servertest.Bucket, "a/new")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("half an object has been written: %v", err)
			}
		})
	}
}

// TestRidesOut: a server that is away for a moment costs time only.
func TestRidesOut(t *testing.T) {
	server := servertest.VersityGW(t)
	server.Setenv(t)
	proxy := servertest.NewProxy(t, server)
	s := open(t, server.URLOf(servertest.Bucket, prefix(t), proxy.URL))
	proxy.Down(true)
	time.AfterFunc(300*time.Millisecond, func() { proxy.Down(false) })
	pauses := 0
	again := objstore.Retry(s, objstore.RetryOptions{Attempts: 50, First: 20 * time.Millisecond,
		Longest: 40 * time.Millisecond,
		OnRetry: func(objstore.Waiting) { pauses++ }})
	if _, err := again.Put(t.Context(), "a/b", []byte("x"), objstore.IfAbsent); err != nil {
		t.Fatal(err)
	}
	if pauses == 0 {
		t.Error("it was never away")
	}
}
