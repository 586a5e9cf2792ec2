package s3_test

import (
	"crypto/rand"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/s3"
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
	s, err := s3.Open(t.Context(), u, access)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// with adds parameters, as name and value, to a URL.
func with(u *url.URL, parameters ...string) *url.URL {
	out := *u
	q := out.Query()
	for i := 0; i < len(parameters); i += 2 {
		q.Set(parameters[i], parameters[i+1])
	}
	out.RawQuery = q.Encode()
	return &out
}

// retried tries again without the pauses that people need.
func retried(s objstore.Store) objstore.Store {
	return objstore.Retry(s, objstore.RetryOptions{First: time.Millisecond, Longest: 20 * time.Millisecond})
}

// calls are all that a store can be asked, for an object that is there or not.
var calls = map[string]func(*testing.T, objstore.Store) error{
	"put": func(t *testing.T, s objstore.Store) error {
		_, err := s.Put(t.Context(), "a/put", []byte("x"), objstore.Always)
		return err
	},
	"put if absent": func(t *testing.T, s objstore.Store) error {
		_, err := s.Put(t.Context(), "a/absent", []byte("x"), objstore.IfAbsent)
		return err
	},
	"get": func(t *testing.T, s objstore.Store) error {
		_, _, err := s.Get(t.Context(), "a/there", 0, -1)
		return err
	},
	"get range": func(t *testing.T, s objstore.Store) error {
		_, _, err := s.Get(t.Context(), "a/there", 1, 2)
		return err
	},
	"stat": func(t *testing.T, s objstore.Store) error {
		_, err := s.Stat(t.Context(), "a/there")
		return err
	},
	"list": func(t *testing.T, s objstore.Store) error {
		for _, err := range s.List(t.Context(), "a/") {
			if err != nil {
				return err
			}
		}
		return nil
	},
	"delete": func(t *testing.T, s objstore.Store) error { return s.Delete(t.Context(), "a/delete") },
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

// path matches requests for an object.
func path(method, key string) func(*http.Request) bool {
	return func(r *http.Request) bool { return r.Method == method && strings.HasSuffix(r.URL.Path, key) }
}
