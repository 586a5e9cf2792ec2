package web_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/web"
)

const stall = 300 * time.Millisecond

// exchange sends a body and reads the answer.
func exchange(t *testing.T, c *web.Client, url string, body io.Reader) ([]byte, error) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPut, url, body)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := (&http.Client{Transport: c}).Do(r)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	return web.ReadBody(t.Context(), answer.Body, answer.ContentLength)
}

// trickle gives a byte after each pause.
type trickle struct {
	n     int
	pause time.Duration
}

func (r *trickle) Read(b []byte) (int, error) {
	if r.n == 0 {
		return 0, io.EOF
	}
	time.Sleep(r.pause)
	r.n--
	// More than the buffers before the connection, so that it is sent.
	n := min(len(b), 8<<10)
	clear(b[:n])
	return n, nil
}

// TestStall: what makes progress is never cut off, what makes none always is, wherever
// that happens.
func TestStall(t *testing.T) {
	hang := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		wait := func() {
			select {
			case <-hang:
			case <-r.Context().Done():
			}
		}
		if r.URL.Path == "/unread" {
			wait()
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		rc := http.NewResponseController(w)
		switch r.URL.Path {
		case "/silent":
			wait()
		case "/half":
			w.Header().Set("Content-Length", "1000")
			_, _ = w.Write(make([]byte, 500))
			_ = rc.Flush()
			wait()
		case "/slow":
			w.Header().Set("Content-Length", "10")
			for range 10 {
				_, _ = w.Write([]byte{'x'})
				_ = rc.Flush()
				time.Sleep(stall / 3)
			}
		}
	}))
	t.Cleanup(server.Close)
	t.Cleanup(func() { close(hang) })
	for _, c := range []struct {
		path string
		body func() io.Reader
		good bool
	}{
		{"/silent", func() io.Reader { return strings.NewReader("x") }, false},
		{"/half", func() io.Reader { return strings.NewReader("x") }, false},
		{"/unread", func() io.Reader { return bytes.NewReader(make([]byte, 64<<20)) }, false},
		{"/slow", func() io.Reader { return strings.NewReader("x") }, true},
		{"/", func() io.Reader { return &trickle{10, stall / 3} }, true}, // longer than stall in all
		{"/", func() io.Reader { return &trickle{1, 0} }, true},
	} {
		client, err := web.New(web.Options{Stall: stall, Floor: 3}) // of some 6 bytes that /slow sends in that time
		if err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		_, err = exchange(t, client, server.URL+c.path, c.body())
		took := time.Since(begin)
		switch {
		case c.good && err != nil:
			t.Errorf("%s: after %s: %v", c.path, took, err)
		case c.good:
		case err == nil:
			t.Errorf("%s: no error after %s", c.path, took)
		case took < stall/2 || took > 20*stall:
			t.Errorf("%s: took %s: %v", c.path, took, err)
		case !objstore.Temporary(web.Error(t.Context(), "op", "ref", "server", err)):
			t.Errorf("%s: not temporary: %v", c.path, err)
		}
		client.Close()
	}
}

// TestFloor: a server that sends a byte now and then does not hold a request for ever; what a limited rate makes slow
// on this side is not its fault.
func TestFloor(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.URL.Path != "/trickle" {
			return
		}
		tick := time.NewTicker(stall / 4)
		defer tick.Stop()
		for {
			select {
			case <-r.Context().Done():
				return
			case <-tick.C:
			}
			_, _ = w.Write([]byte{'x'})
			_ = http.NewResponseController(w).Flush()
		}
	}))
	t.Cleanup(server.Close)
	client, err := web.New(web.Options{Stall: stall, Floor: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)

	_, err = exchange(t, client, server.URL+"/trickle", strings.NewReader("x"))
	err = web.Error(t.Context(), "op", "ref", "server", err)
	if got := objstore.AnswerOf(err).Words; !objstore.Temporary(err) || got != "server answers too slowly" {
		t.Errorf("%q: %v", got, err)
	}
	if _, err := exchange(t, client, server.URL+"/", &trickle{20, stall / 4}); err != nil { // 20 * 8 KiB, in 5 stalls
		t.Errorf("a body that is slow in coming: %v", err)
	}
}

// TestIdle: a connection that was idle for long is not used again.
func TestIdle(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(server.Close)
	client, err := web.New(web.Options{Stall: stall})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for _, pause := range []time.Duration{0, stall / 4, stall/2 + 50*time.Millisecond, stall * 2} {
		time.Sleep(pause)
		if _, err := exchange(t, client, server.URL, strings.NewReader("x")); err != nil {
			t.Errorf("after %s: %v", pause, err)
		}
	}
}

// TestOnce: a request of which the server may have seen something is never sent again,
// even on a connection that was kept from before.
func TestOnce(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	requests := make(chan string, 10)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				in := bufio.NewReader(c)
				for i := 0; ; i++ {
					// The headers and the body of a request may arrive one after the other.
					r, err := http.ReadRequest(in)
					if err != nil {
						return
					}
					content, err := io.ReadAll(r.Body)
					if err != nil {
						return
					}
					requests <- r.Method + string(content)
					if i == 1 {
						return // of the second request it sees all, and closes
					}
					_, _ = c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"))
				}
			}()
		}
	}()
	for _, body := range []string{"", "content"} {
		client, err := web.New(web.Options{})
		if err != nil {
			t.Fatal(err)
		}
		send := func() error {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://"+l.Addr().String(), nil)
			if err != nil {
				t.Fatal(err)
			}
			if body != "" { // as the stores do it: a body that can be read once
				r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
			}
			answer, err := client.RoundTrip(r)
			if err == nil {
				answer.Body.Close()
			}
			return err
		}
		if err := send(); err != nil {
			t.Fatal(err)
		}
		err = send()
		if err == nil || strings.Contains(err.Error(), "EOF") {
			t.Errorf("body %q: %v", body, err)
		}
		if n := len(requests); n != 2 {
			t.Errorf("body %q: the server saw %d requests, want 2", body, n)
		}
		for len(requests) > 0 {
			<-requests
		}
		client.Close()
	}
}

func TestSpan(t *testing.T) {
	for _, c := range []struct {
		length, ranged string // headers
		offset, n      int64
		want           web.Span
		bad            bool
	}{
		{"10", "", 0, -1, web.Span{Offset: 0, Length: 10, Total: 10}, false},
		{"", "", 0, -1, web.Span{Offset: 0, Length: -1, Total: -1}, false},
		{"10", "", 3, 4, web.Span{Offset: 0, Length: 10, Total: 10}, false}, // the range was ignored
		{"4", "bytes 3-6/10", 3, 4, web.Span{Offset: 3, Length: 4, Total: 10}, false},
		{"", "bytes 3-6/10", 3, 4, web.Span{Offset: 3, Length: 4, Total: 10}, false},
		{"7", "bytes 3-9/10", 3, 400, web.Span{Offset: 3, Length: 7, Total: 10}, false},
		{"7", "bytes 3-9/10", 3, -1, web.Span{Offset: 3, Length: 7, Total: 10}, false},
		{"4", "bytes 3-6/10", 3, -1, web.Span{}, true},
		{"4", "bytes 2-5/10", 3, 4, web.Span{}, true},
		{"3", "bytes 3-6/10", 3, 4, web.Span{}, true},
		{"4", "bytes 3-6/*", 3, 4, web.Span{}, true},
		{"4", "bytes 3-6/5", 3, 4, web.Span{}, true},
		{"4", "words 3-6/10", 3, 4, web.Span{}, true},
		{"4", "bytes 6-3/10", 3, 4, web.Span{}, true},
		{"4", "nonsense", 3, 4, web.Span{}, true},
		{"-4", "", 0, -1, web.Span{}, true},
		{"four", "", 0, -1, web.Span{}, true},
	} {
		h := http.Header{}
		if c.length != "" {
			h.Set("Content-Length", c.length)
		}
		if c.ranged != "" {
			h.Set("Content-Range", c.ranged)
		}
		got, err := web.SpanOf(h, c.offset, c.n)
		if got != c.want || (err != nil) != c.bad {
			t.Errorf("%+v: %+v, %v", c, got, err)
		}
	}
}

// TestReadBody: what is too long or too short is not taken, and a size that a server
// claims does not decide how much memory is used.
func TestReadBody(t *testing.T) {
	for _, c := range []struct {
		n, claims int64
		kind      errs.Kind
	}{
		{100, 100, ""}, {100, -1, ""}, {0, 0, ""}, {0, -1, ""},
		{99, 100, errs.Internal},
		{objstore.MaxObjectBytes, -1, ""},
		{objstore.MaxObjectBytes + 1, -1, errs.Damaged},
		{10, objstore.MaxObjectBytes + 1, errs.Damaged},
		{10, 1 << 62, errs.Damaged},
	} {
		got, err := web.ReadBody(t.Context(), io.LimitReader(zeros{}, c.n), c.claims)
		if errs.KindOf(err) != c.kind || err == nil && int64(len(got)) != c.n {
			t.Errorf("%d bytes, %d claimed: %d, %v", c.n, c.claims, len(got), err)
		}
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func TestError(t *testing.T) {
	known := errs.New(errs.Permission, "op", "ref", "no")
	if err := web.Error(t.Context(), "op", "ref", "server", known); !errors.Is(err, known) || objstore.Temporary(err) {
		t.Errorf("a known error becomes %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := web.Error(ctx, "op", "ref", "server", io.ErrUnexpectedEOF); !errs.Is(err, errs.Canceled) ||
		objstore.Temporary(err) {
		t.Errorf("after the end of the context: %v", err)
	}
	if err := web.Error(t.Context(), "op", "ref", "server", &net.DNSError{IsNotFound: true}); objstore.Temporary(err) ||
		errs.HintOf(err) == "" {
		t.Errorf("no such host: %v", err)
	}
	if err := web.Error(t.Context(), "op", "ref", "server", &net.DNSError{IsTemporary: true}); !objstore.Temporary(err) {
		t.Errorf("no name server: %v", err)
	}
}

func TestTemporaryStatus(t *testing.T) {
	for status, want := range map[int]bool{200: false, 400: false, 403: false, 404: false, 408: true, 409: false,
		412: false, 425: true, 429: true, 499: true,
		500: true, 501: false, 502: true, 503: true, 504: true, 505: false, 507: false, 520: true, 529: true} {
		if got := web.Temporary(status); got != want {
			t.Errorf("%s: %v", strconv.Itoa(status), got)
		}
	}
}
