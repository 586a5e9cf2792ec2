package service

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"pando/client"
	"pando/internal/driver/plain"
)

// TestBrokenRequests sends what no HTTP client sends. Each request is refused, none hangs, and the service goes on.
func TestBrokenRequests(t *testing.T) {
	shorter(t, &bodyTimeout, 300*time.Millisecond)
	shorter(t, &headerTimeout, 300*time.Millisecond)
	shorter(t, &streamTimeout, 300*time.Millisecond)
	s := withGolden(t, plain.Name)

	deep := strings.Repeat("[", 400_000)
	deepObject := `{"labels":` + strings.Repeat(`{"a":`, 100_000) + "1" + strings.Repeat("}", 100_001)
	post := func(path, headers, body string) string {
		return "POST " + path + " HTTP/1.1\r\nHost: x\r\n" + headers + "\r\n" + body
	}
	volumes := func(body string) string {
		return post("/v1/volumes", fmt.Sprintf("Content-Type: application/json\r\nContent-Length: %d\r\n", len(body)), body)
	}
	for name, c := range map[string]struct {
		request string
		status  int
	}{
		"half a request line":  {"GET /v1/vol", 400},
		"half a header":        {"GET /v1/volumes HTTP/1.1\r\nHost: x\r\nAcc", 400},
		"no HTTP":              {"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400},
		"large headers":        {"GET /v1/pool HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 2<<20) + "\r\n\r\n", 431},
		"many headers":         {"GET /v1/pool HTTP/1.1\r\nHost: x\r\n" + strings.Repeat("X: y\r\n", 300_000) + "\r\n", 431},
		"no Host":              {"GET /v1/pool HTTP/1.1\r\n\r\n", 400},
		"a NUL in a header":    {"GET /v1/pool HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n", 400},
		"a header in a header": {"GET /v1/pool HTTP/1.1\r\nHost: x\r\nX: a\rY: b\r\n\r\n", 400},
		"a bad escape":         {"GET /v1/volumes/%zz HTTP/1.1\r\nHost: x\r\n\r\n", 400},
		"an escaped NUL":       {"GET /v1/volumes/a%00b HTTP/1.1\r\nHost: x\r\n\r\n", 400},
		"a bad parameter":      {"GET /v1/volumes?limit=%zz HTTP/1.1\r\nHost: x\r\n\r\n", 400},
		"two lengths":          {post("/v1/gc", "Content-Length: 2\r\nContent-Length: 3\r\n", "{}"), 400},
		"a length below 0":     {post("/v1/gc", "Content-Length: -1\r\n", ""), 400},
		"a length that is too large": {post("/v1/volumes", "Content-Type: application/json\r\n"+
			"Content-Length: 99999999999999999999\r\n", "{}"), 400},
		"length and chunks": {post("/v1/volumes", "Content-Type: application/json\r\nContent-Length: 2\r\n"+
			"Transfer-Encoding: x\r\n", "{}"), 501},
		"bad chunks": {post("/v1/volumes", "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n",
			"zz\r\n{}\r\n0\r\n\r\n"), 400},
		"a chunk that does not come": {post("/v1/volumes", "Content-Type: application/json\r\n"+
			"Transfer-Encoding: chunked\r\n", "ff\r\n{}"), 408},
		"deep JSON":                   {volumes(deep), 400},
		"deeper JSON":                 {volumes(deepObject), 400},
		"invalid UTF-8":               {volumes("{\"from\":\"web\",\"name\":\"a\xff\"}"), 400},
		"a NUL":                       {volumes(`{"from":"web","name":"a\u0000"}`), 400},
		"two objects":                 {volumes(`{"from":"web","name":"a"}{"from":"web","name":"b"}`), 400},
		"a number that is too large":  {volumes(`{"from":"web","name":"a","size_bytes":1e400}`), 400},
		"a field twice, of two types": {volumes(`{"from":"web","name":"a","name":7}`), 400},
	} {
		conn, err := net.Dial("unix", s.socket)
		must(t, err)
		go func() { _, _ = io.WriteString(conn, c.request) }() // the service need not read all
		must(t, conn.SetReadDeadline(time.Now().Add(20*time.Second)))
		status, err := 0, error(nil)
		if resp, rerr := http.ReadResponse(bufio.NewReader(conn), nil); rerr == nil {
			status = resp.StatusCode
		} else if err = rerr; isTimeout(err) {
			t.Errorf("%s: it hangs", name)
		}
		if status != c.status {
			t.Errorf("%s: status %d, %v, want %d", name, status, err, c.status)
		}
		_ = conn.Close()
	}

	// Nothing happened, and the service goes on.
	for v, err := range s.c.Volumes(t.Context(), client.VolumeFilter{}) {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := s.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: "a"}); err != nil {
		t.Error(err)
	}
}

func isTimeout(err error) bool {
	e, ok := err.(net.Error)
	return ok && e.Timeout()
}

// TestEndlessImports: a body of 1 GB that is not an archive is refused at its start.
func TestEndlessImports(t *testing.T) {
	s := serve(t, newPool(t, plain.Name))
	for _, contentType := range tarTypes {
		r, err := http.NewRequest("POST", "http://pando/v1/goldens/x/import", io.LimitReader(endless{}, 1<<30))
		must(t, err)
		r.Header.Set("Content-Type", contentType)
		begin := time.Now()
		resp, err := overSocket(s.socket).Do(r)
		if err == nil { // or the server hung up on what is still being sent
			if resp.StatusCode != http.StatusBadRequest {
				t.Errorf("%s: %s", contentType, resp.Status)
			}
			resp.Body.Close()
		}
		t.Logf("%s: %s", contentType, time.Since(begin))
	}
	goldens, err := s.c.Goldens(t.Context())
	if err != nil || len(goldens) != 0 {
		t.Errorf("%+v, %v", goldens, err)
	}
}
