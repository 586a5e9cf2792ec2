package s3_test

import (
	"bytes"
	"net/http"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/testing/servertest"
	"pando/internal/testing/storetest"
)

// TestLostAnswers: a conditional PUT whose answer was lost is found to be one's own,
// and somebody else's is not taken for it.
func TestLostAnswers(t *testing.T) {
	for name, start := range servers {
		t.Run(name, func(t *testing.T) {
			server := start(t)
			server.Setenv(t)
			p := prefix(t)
			direct := open(t, server.URL(p))
			proxy := servertest.NewProxy(t, server)
			s := open(t, server.URLOf(servertest.Bucket, p, proxy.URL))
			mine, theirs := []byte("mine"), []byte("theirs")
			for _, c := range []struct {
				name   string
				exists bool // before
				faults func(key string) []*servertest.Fault
				after  []byte // what is there in the end
				puts   int    // requests
			}{
				{"lost", false, func(string) []*servertest.Fault {
					return []*servertest.Fault{{Lose: true}}
				}, mine, 2},
				{"lost twice", false, func(string) []*servertest.Fault {
					return []*servertest.Fault{{Lose: true, Times: 2}}
				}, mine, 3},
				{"replaced, lost", true, func(string) []*servertest.Fault {
					return []*servertest.Fault{{Lose: true}}
				}, mine, 2},
				{"not done, then done", true, func(string) []*servertest.Fault {
					return []*servertest.Fault{{Drop: true}, servertest.S3Error(http.StatusServiceUnavailable, "SlowDown"),
						servertest.S3Error(http.StatusConflict, "ConditionalRequestConflict")}
				}, mine, 4},
				{"done, but 500", true, func(string) []*servertest.Fault {
					return []*servertest.Fault{{Answer: func(a *http.Response, _ []byte) []byte {
						a.StatusCode = http.StatusInternalServerError
						return nil
					}}}
				}, mine, 2},
				{"lost, then theirs", false, func(key string) []*servertest.Fault {
					return []*servertest.Fault{{Lose: true, After: func() {
						if _, err := direct.Put(t.Context(), key, theirs, objstore.Always); err != nil {
							t.Error(err)
						}
					}}}
				}, theirs, 2},
				{"not done, and theirs", false, func(key string) []*servertest.Fault {
					return []*servertest.Fault{{Drop: true, Before: func() {
						if _, err := direct.Put(t.Context(), key, theirs, objstore.Always); err != nil {
							t.Error(err)
						}
					}}}
				}, theirs, 2},
			} {
				t.Run(c.name, func(t *testing.T) {
					key := "lost/" + strings.NewReplacer(" ", "-", ",", "").Replace(c.name)
					condition := objstore.IfAbsent
					if c.exists {
						v, err := direct.Put(t.Context(), key, []byte("before"), objstore.IfAbsent)
						if err != nil {
							t.Fatal(err)
						}
						condition = objstore.IfVersion(v)
					}
					for _, f := range c.faults(key) {
						f.Match = path(http.MethodPut, key)
						proxy.Add(f)
					}
					proxy.Requests()
					v, err := retried(s).Put(t.Context(), key, mine, condition)
					puts := 0
					for _, r := range proxy.Requests() {
						if strings.HasPrefix(r, "PUT ") {
							puts++
						}
					}
					if puts != c.puts {
						t.Errorf("%d PUTs, want %d: the library tries again by itself", puts, c.puts)
					}
					there, info, getErr := direct.Get(t.Context(), key, 0, -1)
					if getErr != nil || !bytes.Equal(there, c.after) {
						t.Fatalf("there is %q, %v, want %q", there, getErr, c.after)
					}
					if bytes.Equal(c.after, mine) {
						if err != nil || v != info.Version {
							t.Errorf("Put says %q, %v; want %q", v, err, info.Version)
						}
					} else if !errs.Is(err, errs.Conflict) {
						t.Errorf("Put says %q, %v; want a conflict", v, err)
					}
				})
			}
		})
	}
}

// TestConformanceThroughABadNetwork: with Retry in front, a store behind a network that
// drops much is still one. Answers are not lost here: that a write was done although it
// got a Conflict is a thing that objstore.Retry permits, and the suite does not.
func TestConformanceThroughABadNetwork(t *testing.T) {
	server := servertest.GoFakeS3(t)
	server.Setenv(t)
	n := 0
	every := func(k int) func(*http.Request) bool {
		return func(*http.Request) bool { n++; return n%k == 0 } // the proxy asks one at a time
	}
	proxy := servertest.NewProxy(t, server,
		&servertest.Fault{Match: every(29), Times: -1, Drop: true},
		&servertest.Fault{Match: every(31), Times: -1, Cut: 20},
		&servertest.Fault{Match: every(37), Times: -1, Status: http.StatusServiceUnavailable})
	storetest.Run(t, func(t *testing.T) objstore.Store {
		return retried(open(t, server.URLOf(servertest.Bucket, prefix(t), proxy.URL)))
	})
}

// TestServersThatIgnore: what a server pretends to do is found out by the probe, and
// one that sends more than was asked for gives the right bytes anyway.
func TestServersThatIgnore(t *testing.T) {
	server := servertest.GoFakeS3(t) // does not look at signatures
	server.Setenv(t)
	strip := func(headers ...string) *servertest.Fault {
		return &servertest.Fault{Times: -1, Request: func(r *http.Request, body []byte) []byte {
			for _, h := range headers {
				r.Header.Del(h)
			}
			return body
		}}
	}
	store := func(t *testing.T, f *servertest.Fault) objstore.Store {
		return open(t, server.URLOf(servertest.Bucket, prefix(t), servertest.NewProxy(t, server, f).URL))
	}
	for _, header := range []string{"If-Match", "If-None-Match"} {
		t.Run(header, func(t *testing.T) {
			err := objstore.Probe(t.Context(), store(t, strip(header)))
			if !errs.Is(err, errs.Unsupported) {
				t.Errorf("the probe says %v", err)
			}
		})
	}
	t.Run("Range", func(t *testing.T) {
		s := store(t, strip("Range"))
		data := []byte("0123456789")
		if _, err := s.Put(t.Context(), "a", data, objstore.Always); err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			offset, length int64
			want           string
		}{{0, -1, "0123456789"}, {3, 4, "3456"}, {8, 5, "89"}, {9, -1, "9"}, {10, 1, ""}, {50, -1, ""}, {4, 0, ""}} {
			got, info, err := s.Get(t.Context(), "a", c.offset, c.length)
			if err != nil || string(got) != c.want || info.Bytes != 10 {
				t.Errorf("%d from %d: %q, %+v, %v; want %q", c.length, c.offset, got, info, err, c.want)
			}
		}
	})
	for name, header := range map[string]string{"another range": "bytes 0-3/10", "no numbers": "bytes a-b/c",
		"too long": "bytes 3-9/10", "beyond": "bytes 3-6/5"} {
		t.Run(name, func(t *testing.T) {
			s := store(t, &servertest.Fault{Match: servertest.Method(http.MethodGet), Times: -1,
				Answer: func(a *http.Response, body []byte) []byte {
					a.Header.Set("Content-Range", header)
					return body
				}})
			if _, err := s.Put(t.Context(), "a", []byte("0123456789"), objstore.Always); err != nil {
				t.Fatal(err)
			}
			data, _, err := s.Get(t.Context(), "a", 3, 4)
			if !errs.Is(err, errs.IO) {
				t.Errorf("%q, %v", data, err)
			}
		})
	}
	t.Run("no ETag", func(t *testing.T) {
		s := store(t, &servertest.Fault{Times: -1, Answer: func(a *http.Response, body []byte) []byte {
			a.Header.Del("Etag")
			return body
		}})
		_, err := s.Put(t.Context(), "a", []byte("x"), objstore.Always)
		want{kind: errs.Unsupported, hint: "ETag"}.check(t, err)
		_, err = s.Stat(t.Context(), "a")
		want{kind: errs.Unsupported, hint: "ETag"}.check(t, err)
		_, _, err = s.Get(t.Context(), "a", 0, -1)
		want{kind: errs.Unsupported, hint: "ETag"}.check(t, err)
	})
	t.Run("order", func(t *testing.T) {
		s := store(t, &servertest.Fault{Match: servertest.Method(http.MethodGet), Times: -1,
			Answer: func(a *http.Response, body []byte) []byte {
				return []byte(strings.ReplaceAll(string(body), "/b</Key>", "/z</Key>"))
			}})
		for _, key := range []string{"a", "b", "c"} {
			if _, err := s.Put(t.Context(), key, []byte("x"), objstore.Always); err != nil {
				t.Fatal(err)
			}
		}
		var last error
		for _, err := range s.List(t.Context(), "") {
			last = err
		}
		if !errs.Is(last, errs.IO) {
			t.Errorf("a listing that is out of order ends with %v", last)
		}
	})
}

// TestOneRequest: also the largest object is written by one request, to which alone a
// condition applies, and nothing else is asked before.
func TestOneRequest(t *testing.T) {
	server := servertest.VersityGW(t)
	server.Setenv(t)
	proxy := servertest.NewProxy(t, server)
	p := prefix(t)
	s := open(t, server.URLOf(servertest.Bucket, p, proxy.URL))
	data := bytes.Repeat([]byte("0123456789abcdef"), objstore.MaxObjectBytes/16)
	if _, err := s.Put(t.Context(), "large", data, objstore.IfAbsent); err != nil {
		t.Fatal(err)
	}
	if got := proxy.Requests(); len(got) != 1 || got[0] != "PUT /"+servertest.Bucket+"/"+p+"/large" {
		t.Errorf("requests: %q", got)
	}
	if got, _, err := s.Get(t.Context(), "large", 1<<20, 16<<20); err != nil || !bytes.Equal(got, data[:16<<20]) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if got := proxy.Requests(); len(got) != 1 {
		t.Errorf("requests: %q", got)
	}
}

// TestNotOurs: other objects in the bucket are left alone.
func TestNotOurs(t *testing.T) {
	server := servertest.GoFakeS3(t)
	server.Setenv(t)
	p := prefix(t)
	whole, part, beside := open(t, server.URL("")), open(t, server.URL(p)), open(t, server.URL(p+"x"))
	for i, s := range []objstore.Store{whole, part, beside} {
		if _, err := s.Put(t.Context(), "same/key", bytes.Repeat([]byte{'x'}, i+1), objstore.IfAbsent); err != nil {
			t.Fatal(err)
		}
	}
	for i, s := range []objstore.Store{whole, part, beside} {
		if info, err := s.Stat(t.Context(), "same/key"); err != nil || info.Bytes != int64(i+1) {
			t.Errorf("%d: %+v, %v", i, info, err)
		}
	}
	var keys []string
	for info, err := range part.List(t.Context(), "") {
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, info.Key)
	}
	if len(keys) != 1 || keys[0] != "same/key" {
		t.Errorf("listed: %q", keys)
	}
	if err := part.Delete(t.Context(), "same/key"); err != nil {
		t.Fatal(err)
	}
	if _, err := beside.Stat(t.Context(), "same/key"); err != nil {
		t.Error(err)
	}
}
