package gcs_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/gcs"
	"pando/internal/testing/servertest"
	"pando/internal/testing/storetest"
)

// access is that of a program which reads its environment.
var access = objstore.Access{Setting: os.Getenv, Ambient: true}

// prefix is one that no other test uses.
func prefix(t *testing.T) string {
	t.Helper()
	return "t/" + strings.ToLower(rand.Text()[:10])
}

func open(t *testing.T, u *url.URL) objstore.Store {
	t.Helper()
	s, err := gcs.Open(t.Context(), u, access)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// behind makes the proxy the server that is asked.
func behind(t *testing.T, server *servertest.Server, p *servertest.Proxy, prefix string) objstore.Store {
	t.Helper()
	t.Setenv("STORAGE_EMULATOR_HOST", p.URL)
	defer t.Setenv("STORAGE_EMULATOR_HOST", server.Addr)
	return open(t, server.URL(prefix))
}

// retried tries again without the pauses that people need.
func retried(s objstore.Store) objstore.Store {
	return objstore.Retry(s, objstore.RetryOptions{First: time.Millisecond, Longest: 20 * time.Millisecond})
}

var calls = map[string]func(context.Context, objstore.Store) error{
	"put": func(ctx context.Context, s objstore.Store) error {
		_, err := s.Put(ctx, "a/put", []byte("x"), objstore.Always)
		return err
	},
	"put if absent": func(ctx context.Context, s objstore.Store) error {
		_, err := s.Put(ctx, "a/absent", []byte("x"), objstore.IfAbsent)
		return err
	},
	"get": func(ctx context.Context, s objstore.Store) error {
		_, _, err := s.Get(ctx, "a/there", 0, -1)
		return err
	},
	"stat": func(ctx context.Context, s objstore.Store) error {
		_, err := s.Stat(ctx, "a/there")
		return err
	},
	"list": func(ctx context.Context, s objstore.Store) error {
		for _, err := range s.List(ctx, "a/") {
			if err != nil {
				return err
			}
		}
		return nil
	},
	"delete": func(ctx context.Context, s objstore.Store) error { return s.Delete(ctx, "a/delete") },
}

// want says what an error must be.
type want struct {
	kind      errs.Kind
	hint      string // a part of it
	temporary bool
}

func (w want) check(t *testing.T, err error) {
	t.Helper()
	switch {
	case !errs.Is(err, w.kind):
		t.Errorf("kind %q, want %q: %v", errs.KindOf(err), w.kind, err)
	case objstore.Temporary(err) != w.temporary:
		t.Errorf("temporary %v, want %v: %v", objstore.Temporary(err), w.temporary, err)
	case !strings.Contains(errs.HintOf(err), w.hint):
		t.Errorf("hint %q, want one with %q: %v", errs.HintOf(err), w.hint, err)
	}
}

func TestConformance(t *testing.T) {
	server := servertest.FakeGCS(t)
	server.Setenv(t)
	storetest.Run(t, func(t *testing.T) objstore.Store { return open(t, server.URL(prefix(t))) })
}

// TestConformanceThroughABadNetwork: with Retry in front, a store behind a network that
// drops much is still one. Answers are not lost here: that a write was done although it
// got a Conflict is a thing that objstore.Retry permits, and the suite does not.
func TestConformanceThroughABadNetwork(t *testing.T) {
	server := servertest.FakeGCS(t)
	server.Setenv(t)
	n := 0
	every := func(k int) func(*http.Request) bool {
		return func(*http.Request) bool { n++; return n%k == 0 } // the proxy asks one at a time
	}
	tooFast := servertest.GCSError(http.StatusTooManyRequests, "rateLimitExceeded",
		"The rate of change requests is too high")
	tooFast.Match, tooFast.Times = every(37), -1
	proxy := servertest.NewProxy(t, server,
		&servertest.Fault{Match: every(29), Times: -1, Drop: true},
		&servertest.Fault{Match: func(r *http.Request) bool {
			return r.Method == http.MethodGet && every(11)(r)
		}, Times: -1, Cut: 20}, tooFast)
	storetest.Run(t, func(t *testing.T) objstore.Store { return retried(behind(t, server, proxy, prefix(t))) })
}

func TestURLs(t *testing.T) {
	for _, c := range []struct {
		url  string
		want string // String, "" if it is refused
	}{
		{"gs://bucket", "gs://bucket"},
		{"gs://bucket/", "gs://bucket"},
		{"gs://my_bucket.example.org/a/b/", "gs://my_bucket.example.org/a/b"},
		{"gs://bucket/a?endpoint=https://storage-x.p.googleapis.com",
			"gs://bucket/a?endpoint=https://storage-x.p.googleapis.com"},
		{"s3://bucket", ""},
		{"gs:bucket", ""},
		{"gs:///a", ""},
		{"gs://bucket:80/a", ""},
		{"gs://bu%2Fcket", ""},
		{"gs://Bucket", ""},
		{"gs://user:password@bucket", ""},
		{"gs://bucket/a//b", ""},
		{"gs://bucket/../b", ""},
		{"gs://bucket/a#b", ""},
		{"gs://bucket?nonsense=1", ""},
		{"gs://bucket?endpoint=a&endpoint=b", ""},
		{"gs://bucket?endpoint=https://user:password@host", ""},
		{"gs://bucket?ca-file=relative", ""},
		{"gs://bucket?insecure-skip-verify=perhaps", ""},
	} {
		u, err := url.Parse(c.url)
		if err != nil {
			if c.want != "" {
				t.Errorf("%s: %v", c.url, err)
			}
			continue
		}
		s, err := gcs.Open(t.Context(), u, access)
		switch {
		case c.want == "" && err == nil:
			t.Errorf("%s: is taken, as %s", c.url, s)
		case c.want == "":
			if !errs.Is(err, errs.Invalid) {
				t.Errorf("%s: kind %q: %v", c.url, errs.KindOf(err), err)
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

func TestWrongBucket(t *testing.T) {
	server := servertest.FakeGCS(t)
	server.Setenv(t)
	s := open(t, server.URLOf("no-such-bucket", prefix(t), server.Endpoint()))
	for _, name := range []string{"put", "put if absent", "list"} {
		t.Run(name, func(t *testing.T) {
			want{kind: errs.NotFound, hint: "create the bucket"}.check(t, calls[name](t.Context(), s))
		})
	}
	// This server does not say of the others what is not there. Google's does.
	google := servertest.GCSError(http.StatusNotFound, "notFound", "The specified bucket does not exist.")
	google.Times = -1
	s = behind(t, server, servertest.NewProxy(t, server, google), prefix(t))
	for name, call := range calls {
		t.Run("Google "+name, func(t *testing.T) {
			want{kind: errs.NotFound, hint: "create the bucket"}.check(t, call(t.Context(), s))
		})
	}
}

// TestAnswers: what each answer means, of every call; each is asked for once.
func TestAnswers(t *testing.T) {
	server := servertest.FakeGCS(t)
	server.Setenv(t)
	proxy := servertest.NewProxy(t, server)
	s := behind(t, server, proxy, prefix(t))
	temporary := want{kind: errs.IO, temporary: true}
	for _, c := range []struct {
		status  int
		reason  string
		message string
		want    want
	}{
		{500, "internalError", "We encountered an internal error", temporary},
		{502, "", "", temporary},
		{503, "backendError", "Backend Error", temporary},
		{504, "", "", temporary},
		{408, "", "", temporary},
		{409, "conflict", "The metadata for object was edited during the operation", temporary},
		{429, "rateLimitExceeded", "The object exceeded the rate limit for object mutation operations",
			want{kind: errs.IO, temporary: true, hint: "per second"}},
		{403, "rateLimitExceeded", "Too many requests", temporary},
		{403, "userRateLimitExceeded", "Too many requests", temporary},
		{403, "forbidden", "x@y does not have storage.objects.create access",
			want{kind: errs.Permission, hint: "roles/storage.objectUser"}},
		{401, "required", "Anonymous caller does not have access",
			want{kind: errs.Permission, hint: "GOOGLE_APPLICATION_CREDENTIALS"}},
		{401, "authError", "Invalid Credentials", want{kind: errs.Permission, hint: "GOOGLE_APPLICATION_CREDENTIALS"}},
		{400, "invalid", "Invalid argument", want{kind: errs.IO}},
		{400, "invalid", "Provided CRC32C \"AAAAAA==\" doesn't match calculated CRC32C \"BBBBBB==\"", temporary},
		{412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold", want{kind: errs.Conflict}},
		{307, "", "", want{kind: errs.IO, hint: "endpoint="}},
		{501, "notImplemented", "no", want{kind: errs.Unsupported}},
		{507, "", "", want{kind: errs.NoSpace}},
	} {
		for name, call := range calls {
			t.Run(fmt.Sprintf("%d %s %s", c.status, c.reason, name), func(t *testing.T) {
				proxy.Requests()
				fault := servertest.GCSError(c.status, c.reason, c.message)
				if c.reason == "" {
					fault.Body, fault.Type = "<html>a gateway</html>", "text/html"
				}
				proxy.Add(fault)
				err := call(t.Context(), s)
				c.want.check(t, err)
				if err != nil && !strings.Contains(err.Error(), "a/") {
					t.Errorf("it does not say of what: %v", err)
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
	server := servertest.FakeGCS(t)
	server.Setenv(t)
	p := prefix(t)
	direct := open(t, server.URL(p))
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	for key, data := range map[string][]byte{"a/there": []byte("there"), "a/big": big} {
		if _, err := direct.Put(t.Context(), key, data, objstore.Always); err != nil {
			t.Fatal(err)
		}
	}
	proxy := servertest.NewProxy(t, server)
	s := behind(t, server, proxy, p)
	temporary := want{kind: errs.IO, hint: "network", temporary: true}
	for name, call := range calls {
		for _, fault := range []*servertest.Fault{{Drop: true}, {Lose: true}} {
			t.Run(fmt.Sprintf("%s lose=%v", name, fault.Lose), func(t *testing.T) {
				proxy.Add(fault)
				proxy.Requests()
				temporary.check(t, call(t.Context(), s))
				if got := proxy.Requests(); len(got) != 1 {
					t.Errorf("requests: %q, want one", got)
				}
			})
		}
		t.Run(name+" canceled", func(t *testing.T) {
			proxy.Add(&servertest.Fault{Hang: true})
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
			defer cancel()
			want{kind: errs.Canceled}.check(t, call(ctx, s))
		})
	}
	t.Run("cut", func(t *testing.T) {
		for _, n := range []int64{1, int64(len(big)) - 1} {
			proxy.Add(&servertest.Fault{Cut: n}, &servertest.Fault{Cut: n})
			_, _, err := s.Get(t.Context(), "a/big", 0, -1)
			temporary.check(t, err)
			if data, _, err := retried(s).Get(t.Context(), "a/big", 5, -1); err != nil || !bytes.Equal(data, big[5:]) {
				t.Errorf("cut after %d, again: %d bytes, %v", n, len(data), err)
			}
		}
	})
	t.Run("garbage", func(t *testing.T) {
		for _, name := range []string{"put", "stat", "list"} {
			proxy.Add(&servertest.Fault{Answer: func(*http.Response, []byte) []byte { return []byte("<html>") }})
			temporary.check(t, calls[name](t.Context(), s)) // of a put nobody knows whether it was done
			if name != "list" {
				proxy.Add(&servertest.Fault{Answer: func(*http.Response, []byte) []byte { return []byte("{}") }})
				temporary.check(t, calls[name](t.Context(), s))
			}
		}
	})
	t.Run("server ends", func(t *testing.T) {
		slow := objstore.Limit(s, 2<<20)
		time.AfterFunc(100*time.Millisecond, server.Stop)
		_, err := slow.Put(t.Context(), "a/new", big, objstore.IfAbsent)
		temporary.check(t, err)
		for name, call := range calls {
			t.Run(name, func(t *testing.T) { temporary.check(t, call(t.Context(), direct)) })
		}
	})
}

// TestFlippedBits: what changes on the way is found, there or here, and sent again.
func TestFlippedBits(t *testing.T) {
	server := servertest.FakeGCS(t)
	server.Setenv(t)
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<12)
	flip := func(body []byte) []byte {
		i := bytes.LastIndex(body, []byte("0123456789abcdef"))
		body[i] ^= 1
		return body
	}
	proxy := servertest.NewProxy(t, server)
	s := behind(t, server, proxy, prefix(t))
	sending := func() {
		proxy.Add(&servertest.Fault{Match: servertest.Method(http.MethodPost),
			Request: func(_ *http.Request, body []byte) []byte {
				return flip(body)
			}})
	}
	sending()
	_, err := s.Put(t.Context(), "a", data, objstore.Always)
	want{kind: errs.IO, temporary: true}.check(t, err)
	if _, err := s.Stat(t.Context(), "a"); !errs.Is(err, errs.NotFound) {
		t.Errorf("what was damaged on the way is there: %v", err)
	}
	sending()
	if _, err := retried(s).Put(t.Context(), "a", data, objstore.IfAbsent); err != nil {
		t.Fatal(err)
	}
	reading := func() {
		proxy.Add(&servertest.Fault{Match: servertest.Method(http.MethodGet),
			Answer: func(_ *http.Response, body []byte) []byte {
				return flip(body)
			}})
	}
	reading()
	_, _, err = s.Get(t.Context(), "a", 0, -1)
	want{kind: errs.IO, temporary: true}.check(t, err)
	reading()
	if got, _, err := retried(s).Get(t.Context(), "a", 0, -1); err != nil || !bytes.Equal(got, data) {
		t.Errorf("again: %d bytes, %v", len(got), err)
	}
}

// TestLostAnswers: a conditional write whose answer was lost is found to be one's own,
// and somebody else's is not taken for it.
func TestLostAnswers(t *testing.T) {
	server := servertest.FakeGCS(t)
	server.Setenv(t)
	p := prefix(t)
	direct := open(t, server.URL(p))
	proxy := servertest.NewProxy(t, server)
	s := behind(t, server, proxy, p)
	for _, exists := range []bool{false, true} {
		for _, theirs := range []bool{false, true} {
			key := fmt.Sprintf("lost/%v-%v", exists, theirs)
			condition := objstore.IfAbsent
			if exists {
				v, err := direct.Put(t.Context(), key, []byte("before"), objstore.IfAbsent)
				if err != nil {
					t.Fatal(err)
				}
				condition = objstore.IfVersion(v)
			}
			fault := &servertest.Fault{Match: servertest.Method(http.MethodPost), Lose: true}
			if theirs {
				fault.After = func() {
					if _, err := direct.Put(t.Context(), key, []byte("theirs"), objstore.Always); err != nil {
						t.Error(err)
					}
				}
			}
			proxy.Add(fault)
			v, err := retried(s).Put(t.Context(), key, []byte("mine"), condition)
			info, statErr := direct.Stat(t.Context(), key)
			switch {
			case statErr != nil:
				t.Error(statErr)
			case theirs && !errs.Is(err, errs.Conflict):
				t.Errorf("%s: %q, %v; want a conflict", key, v, err)
			case !theirs && (err != nil || v != info.Version):
				t.Errorf("%s: %q, %v; want %q", key, v, err, info.Version)
			}
		}
	}
}
