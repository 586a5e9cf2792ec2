package servertest

import (
	"bytes"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// Proxy stands before a server and passes everything on, but for what its faults say.
// It keeps the name of the host, so that signatures hold.
type Proxy struct {
	URL    string // where it listens
	CAFile string // certificate of a proxy with TLS

	t      testing.TB
	target string
	http   *httptest.Server
	onward *http.Transport

	mu       sync.Mutex
	faults   []*Fault
	requests []string
	down     bool
}

// Fault is what a Proxy does to some requests. Of Status, Drop, Lose, Cut and Hang at
// most one is set; with none of them the request is passed on.
type Fault struct {
	Match func(*http.Request) bool // nil: every request
	Times int                      // how many requests; 0: one; below 0: all

	Status int    // is the answer, with Body, and the server is not asked
	Body   string //
	Type   string // Content-Type of Body
	Drop   bool   // the connection is closed, and the server is not asked
	Lose   bool   // the server does what was asked, and its answer is lost
	Cut    int64  // the connection is closed after so many bytes of the answer's body
	Hang   bool   // nothing ever comes back; the server is not asked

	Request func(*http.Request, []byte) []byte  // changes what is passed on
	Answer  func(*http.Response, []byte) []byte // changes what comes back
	Before  func()                              // runs before anything else
	After   func()                              // runs when the server has answered
}

// Method matches requests with one of these methods.
func Method(methods ...string) func(*http.Request) bool {
	return func(r *http.Request) bool {
		for _, m := range methods {
			if r.Method == m {
				return true
			}
		}
		return false
	}
}

// NewProxy makes a proxy before a server.
func NewProxy(t testing.TB, s *Server, faults ...*Fault) *Proxy {
	t.Helper()
	p := prepare(t, s, faults)
	p.http.Start()
	p.URL = p.http.URL
	return p
}

// NewTLSProxy makes one that speaks TLS, with a certificate that only CAFile knows.
func NewTLSProxy(t testing.TB, s *Server, faults ...*Fault) *Proxy {
	t.Helper()
	p := prepare(t, s, faults)
	p.http.StartTLS()
	p.URL = p.http.URL
	p.CAFile = filepath.Join(t.TempDir(), "ca.pem")
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.http.Certificate().Raw})
	if err := os.WriteFile(p.CAFile, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

func prepare(t testing.TB, s *Server, faults []*Fault) *Proxy {
	p := &Proxy{t: t, target: s.Addr, faults: faults, onward: &http.Transport{DisableCompression: true}}
	p.http = httptest.NewUnstartedServer(http.HandlerFunc(p.serve))
	p.http.Config.ErrorLog = log.New(io.Discard, "", 0) // of clients that hang up
	t.Cleanup(func() {
		p.http.CloseClientConnections()
		p.http.Close()
		p.onward.CloseIdleConnections()
	})
	return p
}

// Add adds faults behind those that there are.
func (p *Proxy) Add(faults ...*Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = append(p.faults, faults...)
}

// Heal removes all faults.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = nil
}

// Down makes the proxy close all connections, and each new one when it sends a
// request, until it is up again.
func (p *Proxy) Down(down bool) {
	p.mu.Lock()
	p.down = down
	p.mu.Unlock()
	if down {
		p.http.CloseClientConnections()
	}
}

// Requests are those so far, as "PUT /path", and forgets them.
func (p *Proxy) Requests() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := p.requests
	p.requests = nil
	return all
}

// take notes a request, and finds the fault that strikes it.
func (p *Proxy) take(r *http.Request) Fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests = append(p.requests, r.Method+" "+r.URL.Path)
	if p.down {
		return Fault{Drop: true}
	}

	for i, f := range p.faults {
		if f.Match != nil && !f.Match(r) {
			continue
		}
		struck := *f
		if f.Times >= 0 {
			if f.Times--; f.Times <= 0 {
				p.faults = append(p.faults[:i:i], p.faults[i+1:]...)
			}
		}
		return struck
	}

	return Fault{}
}

func (p *Proxy) serve(w http.ResponseWriter, r *http.Request) {
	f := p.take(r)
	if f.Before != nil {
		f.Before()
	}

	switch {
	case f.Drop:
		hangUp(w)
		return
	case f.Hang:
		_, _ = io.Copy(io.Discard, r.Body)
		select {
		case <-r.Context().Done():
		case <-time.After(time.Minute):
		}
		return
	}

	body, err := io.ReadAll(r.Body)
	if err != nil {
		hangUp(w) // the client has gone
		return
	}

	if f.Status != 0 {
		if f.Type != "" {
			w.Header().Set("Content-Type", f.Type)
		}
		w.WriteHeader(f.Status)
		_, _ = io.WriteString(w, f.Body)
		return
	}

	out, err := http.NewRequestWithContext(r.Context(), r.Method, "http://"+p.target+r.URL.RequestURI(), nil)
	if err != nil {
		p.t.Errorf("proxy: %v", err)
		hangUp(w)
		return
	}

	out.Header = r.Header.Clone()
	out.Host = r.Host
	if f.Request != nil {
		body = f.Request(out, body)
	}

	if len(body) > 0 || r.Method == http.MethodPut || r.Method == http.MethodPost {
		out.Body, out.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		if len(body) == 0 {
			out.Body = http.NoBody
		}
	}

	answer, err := p.onward.RoundTrip(out)
	if err != nil {
		hangUp(w) // as if it were the server
		return
	}

	defer answer.Body.Close()

	got, err := io.ReadAll(answer.Body)
	if f.After != nil {
		f.After()
	}
	if err != nil || f.Lose {
		hangUp(w)
		return
	}

	if f.Answer != nil {
		before := len(got)
		if got = f.Answer(answer, got); len(got) != before {
			answer.Header.Del("Content-Length")
		}
	}

	for name, values := range answer.Header {
		w.Header()[name] = values
	}

	w.WriteHeader(answer.StatusCode)

	if f.Cut > 0 && f.Cut < int64(len(got)) {
		_, _ = w.Write(got[:f.Cut])
		if flusher, ok := w.(http.Flusher); ok {
			flusher.Flush()
		}
		hangUp(w)
		return
	}

	_, _ = w.Write(got)
}

// hangUp closes the connection of a request.
func hangUp(w http.ResponseWriter) {
	if c, _, err := http.NewResponseController(w).Hijack(); err == nil {
		if tcp, is := c.(*net.TCPConn); is {
			_ = tcp.SetLinger(0) // a reset, as of a server that has crashed
		}
		c.Close()
		return
	}
	panic(http.ErrAbortHandler)
}

// S3Error is a refusal as S3 writes it.
func S3Error(status int, code string) *Fault {
	return &Fault{Status: status, Type: "application/xml",
		Body: fmt.Sprintf("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>%s</Code><Message>made "+
			"up</Message></Error>", code)}
}

// GCSError is a refusal as Google's JSON API writes it.
func GCSError(status int, reason, message string) *Fault {
	quoted := strings.ReplaceAll(message, `"`, `\"`)
	return &Fault{Status: status, Type: "application/json",
		Body: fmt.Sprintf(`{"error":{"code":%d,"message":"%s","errors":[{"reason":"%s","message":"%s"}]}}`, status, quoted,
			reason, quoted)}
}
