package service

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/client"
	"pando/internal/base/errs"
	"pando/internal/driver/plain"
	"pando/internal/engine"
)

// TestErrorsHaveCodes: each kind has the status of the table beside the exit codes, and the client knows it.
func TestErrorsHaveCodes(t *testing.T) {
	known := []string{client.Internal, client.Invalid, client.NotFound, client.Exists, client.InUse, client.NoSpace,
		client.Permission, client.Unsupported, client.Conflict, client.Damaged, client.TooNew, client.IO, client.Canceled}
	for _, k := range errs.Kinds() {
		p := problemOf(errs.New(k, "op", "ref", "why").WithHint("run %s", errs.Run("umount", "web")))
		if p.Status != k.Codes().HTTP || p.Kind != string(k) || p.Type != "urn:pando:"+string(k) || p.Op != "op" ||
			p.Ref != "ref" || p.Detail != "op ref: why" || p.Title == "" {
			t.Errorf("%s: %+v", k, p)
		}
		if a, b := p.in(httpWords{}).Hint, p.in(errs.CommandLine{}).Hint; a != "run POST /v1/volumes/web/unmount" ||
			b != "run `pando umount web`" {
			t.Errorf("%s: hints %q and %q", k, a, b)
		}
		if !slices.Contains(known, string(k)) {
			t.Errorf("the client does not know %s", k)
		}
	}
	p := problemOf(errs.New(errs.Conflict, "label", "x", "%w", engine.ErrChanged))
	if p.Status != http.StatusPreconditionFailed {
		t.Errorf("changed: %d", p.Status)
	}
}

// TestWords renders hints as requests.
func TestWords(t *testing.T) {
	for _, c := range []struct {
		message errs.Message
		want    string
	}{
		{errs.Messagef("%s first", errs.Run("umount", "web")), "POST /v1/volumes/web/unmount first"},
		{errs.Messagef("%s", errs.Run("golden publish", "web", "job")), "POST /v1/goldens/web/publish"},
		{errs.Messagef("%s", errs.Run("clone", "REF", errs.Param("size", "1G"))),
			"POST /v1/volumes with the field size_bytes set to 1G"},
		{errs.Messagef("%s", errs.Run("mount")), "POST /v1/volumes/NAME/mount"},
		{errs.Messagef("%s", errs.Run("init", errs.Param("rebuild"))), "`pando init --rebuild` on the host of the service"},
		{errs.Messagef("%s", errs.Param("no-freeze")), `the field freeze set to "never"`},
		{errs.Messagef("%s", errs.Variable("X")), "the variable X of the service"},
	} {
		if got := c.message.Render(httpWords{}); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}

	// Requests in hints exist.
	s := serve(t, newPool(t, plain.Name))
	braces := regexp.MustCompile(`\{\w*\}`)
	routes := map[string]bool{}
	for path, item := range at(parseDocument(t, s.document), "paths").(node) {
		for method := range item.(node) {
			routes[strings.ToUpper(method)+" "+braces.ReplaceAllString(path, "{}")] = true
		}
	}
	for name, r := range requests {
		if !routes[r] {
			t.Errorf("%s: there is no %s", name, r)
		}
	}
}

// TestBadRequests: whatever a client sends, it gets a problem that says what is wrong, and nothing happens.
func TestBadRequests(t *testing.T) {
	s := withGolden(t, plain.Name)
	const volumes = "/v1/volumes"
	for _, c := range []struct {
		method, path, body string
		status             int
		text               string
		headers            []string
	}{
		{"GET", "/", "", 404, "no such path", nil},
		{"GET", "/v1/nix", "", 404, "no such path", nil},
		{"PUT", volumes, "{}", 405, "no such method", nil},
		{"GET", volumes + "/..%2f..%2fetc", "", 400, "names have", nil},
		{"POST", volumes, "", 400, "", nil},
		{"POST", volumes, "{", 400, "", nil},
		{"POST", volumes, "[]", 400, "", nil},
		{"POST", volumes, "null", 400, "", nil},
		{"POST", volumes, `{"from":"web"}`, 400, "name", nil},
		{"POST", volumes, `{"from":"web","name":7}`, 400, "name", nil},
		{"POST", volumes, `{"from":"web","name":"a/b"}`, 400, "names have", nil},
		{"POST", volumes, `{"from":"web","name":"a","mout":true}`, 400, "mout", nil},
		{"POST", volumes, `{"from":"web","name":"a","ttl_seconds":-1}`, 400, "ttl_seconds", nil},
		{"POST", volumes, `{"from":"web","name":"a","ttl_seconds":1e300}`, 400, "ttl_seconds", nil},
		{"POST", volumes, `{"from":"web","name":"a","mount_dir":"/x"}`, 400, "need mount", nil},
		{"POST", volumes, `{"from":"web","name":"a","mount":true,"mount_dir":"x"}`, 400, "absolute", nil},
		{"POST", volumes, `{"from":"web","name":"a","labels":{"_":"x"}}`, 400, "label", nil},
		{"POST", volumes, `{"from":"web","name":"a","freeze":"x"}`, 400, "freeze", nil},
		{"POST", volumes, `a=b`, 415, "Content-Type: application/json", []string{"Content-Type", "text/plain"}},
		{"POST", volumes, `{"from":"web","name":"a"}`, 400, "", []string{"Idempotency-Key", strings.Repeat("x", 300)}},
		{"GET", volumes + "?limit=-1", "", 400, "limit", nil},
		{"DELETE", "/v1/goldens/web/generations/x", "", 400, "number", nil},
		{"DELETE", "/v1/goldens/web/generations/1", "", 204, "", nil}, // the only one goes with the golden
		{"POST", "/v1/goldens/x/import", "no tar", 400, "", []string{"Content-Type", "application/x-tar"}},
		{"POST", "/v1/goldens/x/import?preset=/etc/passwd", "", 400, "preset", []string{"Content-Type", "application/x-tar"}},
		{"POST", "/v1/goldens/x/publish", `{"volume":"job","preset":"../x"}`, 400, "preset", nil},
		{"POST", "/v1/destroy", `{}`, 400, "nothing to destroy", nil},
		{"POST", "/v1/prune", `{"keep_free_percent":101}`, 400, "keep_free_percent", nil},
		{"GET", "/v1/events?after=nix", "", 400, "not the ID of an event", nil},
		{"GET", "/v1/exports/web?format=zip", "", 400, "format", nil},
		{"GET", "/v1/diff?a=web", "", 400, "b", nil},
		{"GET", "/v1/diff?a=web&b=web&a=job", "", 400, "a is there more than once", nil},
		{"GET", volumes + "?limit=&limit=x", "", 400, "limit is there more than once", nil},
		{"GET", volumes + "?label=a&label=b", "", 200, "items", nil},
		{"GET", "/v1/history?since=x", "", 400, "since", nil},
	} {
		what := c.method + " " + c.path + " " + c.body
		status, body := s.raw(c.method, c.path, c.body, c.headers...)
		if status != c.status || !strings.Contains(body, c.text) {
			t.Errorf("%s: %d %s, want %d and %q", what, status, body, c.status, c.text)
		}
		var p Problem
		if status >= 400 && (json.Unmarshal([]byte(body), &p) != nil || p.Kind == "" || p.Hint == "" && p.Op == "" ||
			p.Status != status) {
			t.Errorf("%s: not a problem: %s", what, body)
		}
	}
}

// TestLargeBodies: a body without end is refused while it comes.
func TestLargeBodies(t *testing.T) {
	s := serve(t, newPool(t, plain.Name))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	r, err := http.NewRequest("POST", "http://pando/v1/volumes", io.LimitReader(endless{}, 1<<30))
	must(t, err)
	r.Header.Set("Content-Type", "application/json")
	resp, err := overSocket(s.socket).Do(r)
	if err == nil { // or the server hung up on what is still being sent
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusRequestEntityTooLarge {
			t.Errorf("%s", resp.Status)
		}
	}
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 64<<20 {
		t.Errorf("%d MiB for a body that was refused", grown>>20)
	}
	if status, _ := s.raw("GET", "/v1/service", ""); status != 200 {
		t.Errorf("after that: %d", status)
	}
}

// endless reads as spaces.
type endless struct{}

func (endless) Read(b []byte) (int, error) {
	copy(b, bytes.Repeat([]byte(" "), len(b)))
	return len(b), nil
}

// shorter sets a limit for a test.
func shorter(t *testing.T, limit *time.Duration, to time.Duration) {
	was := *limit
	*limit = to
	t.Cleanup(func() { *limit = was })
}

// talk opens a connection, sends text, and returns it.
func (s *served) talk(text string) net.Conn {
	s.t.Helper()
	c, err := net.Dial("unix", s.socket)
	must(s.t, err)
	s.t.Cleanup(func() { _ = c.Close() })
	_, err = io.WriteString(c, text)
	must(s.t, err)
	return c
}

// TestSlowClients: who sends half a request, half a body or half a stream, or does not read, is given up.
func TestSlowClients(t *testing.T) {
	shorter(t, &bodyTimeout, 300*time.Millisecond)
	shorter(t, &streamTimeout, 300*time.Millisecond)
	shorter(t, &writeTimeout, 300*time.Millisecond)
	s := withGolden(t, plain.Name)

	// A body that stops.
	for name, request := range map[string]string{
		"body": "POST /v1/volumes HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 99\r\n" +
			"Host: x\r\n\r\n{\"from\"",
		"tar": "POST /v1/goldens/x/import HTTP/1.1\r\nContent-Type: application/x-tar\r\nContent-Length: 99999\r\n" +
			"Host: x\r\n\r\nxx",
	} {
		c := s.talk(request)
		must(t, c.SetReadDeadline(time.Now().Add(20*time.Second)))
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || resp.StatusCode < 400 || resp.StatusCode >= 500 {
			t.Errorf("half a %s: %v, %v", name, resp, err)
		}
	}

	// A connection that is half closed: the rest of the body does not come.
	c := s.talk("POST /v1/volumes HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{}")
	must(t, c.(*net.UnixConn).CloseWrite())
	must(t, c.SetReadDeadline(time.Now().Add(20*time.Second)))
	if b, err := io.ReadAll(c); err != nil || !strings.Contains(string(b), " 400 ") {
		t.Errorf("half closed: %q, %v", b, err)
	}

	// An export that nobody reads.
	_, err := s.c.Import(t.Context(), "big", archive(t, map[string]string{"big": strings.Repeat("x", 8<<20)}),
		client.ImportOptions{})
	must(t, err)
	c = s.talk("GET /v1/exports/big HTTP/1.1\r\nHost: x\r\n\r\n")
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		ops, err := s.c.Operations(t.Context())
		must(t, err)
		i := slices.IndexFunc(ops, func(o client.Operation) bool { return o.Verb == "export" })
		if i >= 0 && !ops[i].Running() {
			if ops[i].State == stateDone {
				t.Error("the export is done, though nobody has read it")
			}
			break
		}
		if time.Now().After(end) {
			t.Fatal("the export still runs")
		}
	}
	b, _ := io.ReadAll(c) // it is cut off
	if bytes.HasSuffix(b, []byte("0\r\n\r\n")) {
		t.Error("the body ends as if it were whole")
	}
}

// TestSlowImport: an archive that never stops, but comes too slowly, is refused.
func TestSlowImport(t *testing.T) {
	shorter(t, &streamTimeout, 300*time.Millisecond)
	s := serve(t, newPool(t, plain.Name))
	c := s.talk("POST /v1/goldens/x/import HTTP/1.1\r\nContent-Type: application/x-tar\r\nContent-Length: 99999\r\n" +
		"Host: x\r\n\r\n")
	tarball, err := io.ReadAll(archive(t, map[string]string{"f": "x"}))
	must(t, err)
	go func() {
		for i := range tarball {
			if _, err := c.Write(tarball[i : i+1]); err != nil {
				return // it was refused
			}
			time.Sleep(20 * time.Millisecond)
		}
	}()
	must(t, c.SetReadDeadline(time.Now().Add(20*time.Second)))
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	must(t, err)
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusRequestTimeout || !strings.Contains(string(b), "65536 bytes must") {
		t.Errorf("%s %s, %v", resp.Status, b, err)
	}
}

// TestLongCalls: a call may take longer than a body may take to arrive.
func TestLongCalls(t *testing.T) {
	shorter(t, &bodyTimeout, 100*time.Millisecond)
	s := withGolden(t, plain.Name)
	other, err := engine.Open(t.Context(), s.e.Dir(), drivers)
	must(t, err)
	defer other.Close()

	// A golden that is being built makes clones of it wait.
	reader, writer := io.Pipe()
	built := make(chan error, 1)
	go func() {
		_, err := s.c.Import(t.Context(), "slow", reader, client.ImportOptions{})
		built <- err
	}()
	tarball, err := io.ReadAll(archive(t, map[string]string{"f": "x"}))
	must(t, err)
	_, err = writer.Write(tarball[:512])
	must(t, err)
	time.Sleep(200 * time.Millisecond)
	cloned := make(chan error, 1)
	go func() {
		_, err := s.c.Clone(t.Context(), client.CloneRequest{From: "slow", Name: "job"})
		cloned <- err
	}()
	time.Sleep(500 * time.Millisecond)
	_, err = writer.Write(tarball[512:])
	must(t, err, writer.Close(), <-built, <-cloned)
}

// TestClientsThatGoAway: a call whose client went away is undone, and leaves nothing.
func TestClientsThatGoAway(t *testing.T) {
	s := withGolden(t, plain.Name)
	reader, writer := io.Pipe()
	r, err := http.NewRequest("POST", "http://pando/v1/goldens/gone/import", reader)
	must(t, err)
	r.Header.Set("Content-Type", "application/x-tar")
	h := overSocket(s.socket)
	go func() {
		tarball, _ := io.ReadAll(archive(t, map[string]string{"f": strings.Repeat("x", 1<<20)}))
		_, _ = writer.Write(tarball[:1<<19])
		_ = writer.CloseWithError(fmt.Errorf("the client dies"))
	}()
	if resp, err := h.Do(r); err == nil {
		resp.Body.Close()
	}

	for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		ops, err := s.c.Operations(t.Context())
		must(t, err)
		if len(ops) > 1 && !ops[0].Running() {
			if ops[0].State == stateDone {
				t.Errorf("%+v", ops[0])
			}
			break
		}
		if time.Now().After(end) {
			t.Fatal("the import still runs")
		}
	}
	goldens, err := s.c.Goldens(t.Context())
	if err != nil || len(goldens) != 1 {
		t.Errorf("%+v, %v", goldens, err)
	}
	op, err := s.c.Fsck(t.Context(), nil, false)
	if r := done[map[string]any](s, op, err); r["ok"] != true {
		t.Errorf("fsck: %v", r)
	}
}
