// Package rest is the HTTP interface of the service: JSON over a unix socket, whose other end says who asks.
package rest

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/principal"
	"pando/internal/base/warnings"
	"pando/internal/linux/kernel"
	"pando/internal/service/users"
)

// Limits of a request. A client that is slower, or sends more, gets an error or loses the connection.
const (
	maxBody     = 1 << 20
	maxHeader   = 32 << 10
	headerTime  = 10 * time.Second
	requestTime = 30 * time.Second // longest time until the body has arrived
	answerTime  = 30 * time.Second // longest time from the first byte of an answer to the last
	idleTime    = 2 * time.Minute
)

// spec is the description of the interface, as OpenAPI 3.1. It is generated from the routes and the types: see package
// schematest.
//
//go:embed openapi.json
var spec []byte

// Server answers requests.
type Server struct {
	users *users.Users
	log   *slog.Logger
	http  http.Server
}

// New returns a server of what users do with a pool. It logs errors of its own.
func New(u *users.Users, log *slog.Logger) *Server {
	s := &Server{users: u, log: log}
	mux := http.NewServeMux()
	for _, r := range Routes() {
		mux.HandleFunc(r.Method+" "+r.Path, s.handler(r))
	}
	mux.HandleFunc("GET /v1/openapi.json", func(w http.ResponseWriter, _ *http.Request) {
		write(w, http.StatusOK, "application/json", json.RawMessage(spec))
	})
	mux.HandleFunc("/", s.unknown(mux))
	byItself := func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetWriteDeadline(time.Time{}) // the answer before has left one
		mux.ServeHTTP(w, r)
	}

	s.http = http.Server{
		Handler: http.HandlerFunc(byItself), MaxHeaderBytes: maxHeader,
		ReadHeaderTimeout: headerTime, ReadTimeout: requestTime, IdleTimeout: idleTime,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return principal.With(ctx, c.(*peerConn).who)
		},
	}
	return s
}

// Serve answers requests on a unix socket, which it closes, until Shutdown.
func (s *Server) Serve(l *net.UnixListener) error {
	err := s.http.Serve(&peerListener{UnixListener: l, log: s.log, open: map[uint32]int{}})
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return errs.Wrap("serve", l.Addr().String(), err)
}

// Shutdown takes no more requests, and waits for those that are being answered until ctx ends. Then their contexts end,
// too.
func (s *Server) Shutdown(ctx context.Context) error {
	if err := s.http.Shutdown(ctx); err != nil {
		return errs.Wrap("serve", "", errors.Join(err, s.http.Close()))
	}
	return nil
}

// maxConnections is how many connections a user may have at once.
const maxConnections = 512

// peerListener accepts connections of whom the kernel knows, as many as each may have.
type peerListener struct {
	*net.UnixListener
	log  *slog.Logger
	mu   sync.Mutex
	open map[uint32]int // connections, by user ID
}

// peerConn is a connection that says who is at its other end.
type peerConn struct {
	*net.UnixConn
	who    principal.Principal
	closed sync.Once
	l      *peerListener
}

// Accept returns the next connection. Connections that are not answered are closed.
func (l *peerListener) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		p, err := kernel.PeerOf(c)
		if err != nil {
			l.log.Warn("cannot tell who is at the other end", "error", err)
			c.Close()
			continue
		}
		if !l.admit(p.UID) {
			c.Close()
			continue
		}
		return &peerConn{UnixConn: c, who: principal.Principal{UID: p.UID, GIDs: p.GIDs}, l: l}, nil
	}
}

func (l *peerListener) admit(uid uint32) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open[uid] >= maxConnections {
		return false
	}
	l.open[uid]++
	return true
}

// Close closes the connection.
func (c *peerConn) Close() error {
	c.closed.Do(func() {
		c.l.mu.Lock()
		defer c.l.mu.Unlock()
		if c.l.open[c.who.UID]--; c.l.open[c.who.UID] == 0 {
			delete(c.l.open, c.who.UID)
		}
	})
	return c.UnixConn.Close()
}

// handler answers the requests of a route.
func (s *Server) handler(r Route) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		said := &warnings.List{}
		c := &call{Request: req.WithContext(warnings.Collect(req.Context(), said)), users: s.users}
		out, err := c.answer(w, r)
		for _, m := range said.Messages() {
			w.Header().Add("Pando-Warning", strconv.QuoteToASCII(m.String()))
		}
		if err != nil {
			s.fail(w, req, err)
			return
		}
		write(w, r.Status, "application/json", out)
	}
}

// answer does what a request wants, unless it has parameters or a body that the route does not take.
func (c *call) answer(w http.ResponseWriter, r Route) (any, error) {
	var err error
	if c.query, err = url.ParseQuery(c.URL.RawQuery); err != nil {
		return nil, errs.New(errs.Invalid, r.ID, c.URL.RawQuery, "not the parameters of a request: %w", err)
	}
	for name, values := range c.query {
		p := r.parameter(name)
		if p == nil {
			return nil, errs.New(errs.Invalid, r.ID, name, "there is no such parameter here").
				WithHint("see GET /v1/openapi.json")
		}
		if len(values) > 1 && !p.Many {
			return nil, errs.New(errs.Invalid, r.ID, name, "it is given %d times", len(values)).WithHint("give it once")
		}
	}

	if c.body, err = io.ReadAll(http.MaxBytesReader(w, c.Body, maxBody)); err != nil {
		return nil, errs.New(errs.Invalid, r.ID, "", "cannot read the body: %w", err)
	}
	if r.Body == nil && len(c.body) > 0 {
		return nil, errs.New(errs.Invalid, r.ID, "", "this request has no body").WithHint("send none")
	}

	// A read that waits longer than the deadline would end the request.
	if err := http.NewResponseController(w).SetReadDeadline(time.Time{}); err != nil {
		return nil, errs.Wrap(r.ID, "", err)
	}
	return r.do(c)
}

// call is a request that is being answered.
type call struct {
	*http.Request
	users *users.Users
	query url.Values
	body  []byte
}

// decode reads the body of a request. Invalid.
func (c *call) decode(op string, v any) error {
	if t := c.Header.Get("Content-Type"); t != "" {
		if kind, _, err := mime.ParseMediaType(t); err != nil || kind != "application/json" {
			return errs.New(errs.Invalid, op, "", "the body must be JSON, not %s", t).
				WithHint("send Content-Type: application/json")
		}
	}

	d := json.NewDecoder(bytes.NewReader(c.body))
	d.DisallowUnknownFields()
	err := d.Decode(v)
	if err == nil {
		if _, more := d.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("something follows the JSON value")
		}
	}
	if err != nil {
		return errs.New(errs.Invalid, op, "", "the body is not understood: %w", err).WithHint("see GET /v1/openapi.json")
	}
	return nil
}

// write writes an answer.
func write(w http.ResponseWriter, status int, kind string, v any) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerTime)) // every connection has one
	w.Header().Set("Content-Type", kind)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	_ = e.Encode(v) // the client may have gone
}

// fail answers with an error.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	var e *errs.Error
	hint := ""
	if errors.As(err, &e) {
		hint = e.Hint.String()
	}
	p := problemOf(api.ErrorOf(err, hint))
	if p.Kind == string(errs.Internal) {
		s.log.Error("internal error", "method", r.Method, "path", r.URL.Path, "error", p.Detail)
	}
	write(w, p.Status, "application/problem+json", p)
}

// problemOf describes an error as an answer.
func problemOf(e api.Error) api.Problem {
	status := e.Kind.Codes().HTTP
	title := http.StatusText(status)
	if title == "" {
		title = strings.ReplaceAll(string(e.Kind), "_", " ") // canceled has no status of its own
	}
	return api.Problem{Type: "about:blank", Title: title, Status: status, Detail: e.Message, Kind: string(e.Kind),
		Op: e.Op, Ref: e.Ref, Hint: e.Hint}
}

// unknown answers requests that have no route.
func (s *Server) unknown(mux *http.ServeMux) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var may []string
		for _, method := range []string{"GET", "POST", "PUT", "DELETE"} {
			other := &http.Request{Method: method, URL: r.URL, Host: r.Host}
			if _, pattern := mux.Handler(other); pattern != "/" && pattern != "" {
				may = append(may, method)
			}
		}
		e := errs.New(errs.NotFound, r.Method, r.URL.Path, "there is nothing here").WithHint("see GET /v1/openapi.json")
		if len(may) == 0 {
			s.fail(w, r, e)
			return
		}
		w.Header().Set("Allow", strings.Join(may, ", "))
		p := problemOf(api.ErrorOf(e, "use "+strings.Join(may, " or ")))
		p.Status, p.Title, p.Kind = http.StatusMethodNotAllowed, http.StatusText(http.StatusMethodNotAllowed),
			string(errs.Invalid)
		p.Detail = r.Method + " " + r.URL.Path + ": there is no such method here"
		write(w, p.Status, "application/problem+json", p)
	}
}
