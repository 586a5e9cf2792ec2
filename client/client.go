// Package client uses the service of Pando, which `pando serve` runs, from Go programs: through its unix socket on the
// same host, or through TLS with a token.
//
//	c, err := client.New(client.Options{})
//	v, err := c.Clone(ctx, client.CloneRequest{From: "web", Name: "job-17", Mount: true})
//
// Errors of the service are an *Error, with a kind, a reference and a hint.
package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"
)

// DefaultSocket is where the service listens unless it was told otherwise.
const DefaultSocket = "/run/pando/pando.sock"

// SocketVariable is the environment variable that names another socket.
const SocketVariable = "PANDO_SOCKET"

// Options say how to reach the service. The zero value is the socket in $PANDO_SOCKET, or DefaultSocket.
type Options struct {
	Socket string      // path of the unix socket
	URL    string      // in place of Socket: https://HOST:PORT, or http:// and a loopback address
	Token  string      // for URL
	TLS    *tls.Config // for URL; nil: the certificates that the system trusts

	Transport http.RoundTripper // in place of all this: passes requests to the service in another way
}

// Client is a client of a service. It may be used concurrently.
type Client struct {
	http  *http.Client
	base  string
	token string
}

// maxIdle is how many connections wait for further requests.
const maxIdle = 64

// New returns a client. It does not connect yet.
func New(o Options) (*Client, error) {
	if o.Transport != nil {
		return &Client{&http.Client{Transport: o.Transport}, "http://pando", ""}, nil
	}
	transport := &http.Transport{MaxIdleConns: maxIdle, MaxIdleConnsPerHost: maxIdle, IdleConnTimeout: time.Minute,
		TLSClientConfig: o.TLS}
	if o.URL != "" {
		u, err := url.Parse(o.URL)
		if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
			return nil, fmt.Errorf("pando: %q is not a URL of a service", o.URL)
		}
		if u.Scheme == "http" && !isLoopback(u.Hostname()) {
			return nil, fmt.Errorf("pando: a token must not be sent to %q without TLS: use https", o.URL)
		}
		return &Client{&http.Client{Transport: transport}, strings.TrimSuffix(o.URL, "/"), o.Token}, nil
	}

	socket := o.Socket
	if socket == "" {
		socket = os.Getenv(SocketVariable)
	}
	if socket == "" {
		socket = DefaultSocket
	}
	transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}
	return &Client{&http.Client{Transport: transport}, "http://pando", ""}, nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// Close closes connections that are idle.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Error is an error of the service.
type Error struct {
	Status int    `json:"status"` // of HTTP
	Kind   string `json:"kind"`   // not_found, exists, in_use, ...: see the constants
	Op     string `json:"op"`     // operation that failed
	Ref    string `json:"ref"`    // its object
	Detail string `json:"detail"` // what failed, and why
	Hint   string `json:"hint"`   // what to do next; may be ""
	Errors []struct {
		Location string `json:"location"`
		Message  string `json:"message"`
	} `json:"errors"` // fields of the request that are invalid
}

// The kinds of errors.
const (
	Internal    = "internal"
	Invalid     = "invalid"
	NotFound    = "not_found"
	Exists      = "exists"
	InUse       = "in_use"
	NoSpace     = "no_space"
	Permission  = "permission"
	Unsupported = "unsupported"
	Conflict    = "conflict"
	Damaged     = "damaged"
	TooNew      = "too_new"
	IO          = "io"
	Canceled    = "canceled"
)

// Error returns what failed, and the hint.
func (e *Error) Error() string {
	if e.Hint != "" {
		return e.Detail + " (" + e.Hint + ")"
	}
	return e.Detail
}

// IsKind reports whether err is an error of the service of a kind.
func IsKind(err error, kind string) bool {
	var e *Error
	return errors.As(err, &e) && e.Kind == kind
}

// IsChanged reports whether a change was refused because the object had another ETag than IfMatch.
func IsChanged(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Status == http.StatusPreconditionFailed
}

// request is a request of the service.
type request struct {
	method, path string
	query        url.Values
	header       http.Header
	body         any // JSON; an io.Reader: a stream
	contentType  string
}

// send sends a request, and returns a response that is no error. The caller closes its body.
func (c *Client) send(ctx context.Context, q request) (*http.Response, error) {
	to := c.base + q.path
	if len(q.query) > 0 {
		to += "?" + q.query.Encode()
	}

	var body io.Reader
	contentType := q.contentType
	switch b := q.body.(type) {
	case nil:
	case io.Reader:
		body = b
	default:
		text, err := json.Marshal(b)
		if err != nil {
			return nil, fmt.Errorf("pando: %w", err)
		}
		body, contentType = bytes.NewReader(text), "application/json"
	}

	r, err := http.NewRequestWithContext(ctx, q.method, to, body)
	if err != nil {
		return nil, fmt.Errorf("pando: %w", err)
	}
	for k, v := range q.header {
		r.Header[k] = v
	}
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	if c.token != "" {
		r.Header.Set("Authorization", "Bearer "+c.token)
	}

	resp, err := c.http.Do(r)
	if err != nil {
		return nil, fmt.Errorf("pando: %w", err)
	}
	if resp.StatusCode >= http.StatusBadRequest {
		defer resp.Body.Close()
		return nil, errorOf(resp)
	}
	return resp, nil
}

// Request is a request of any route, for [Client.Do].
type Request struct {
	Method      string
	Path        string // with its segments escaped: see [Path]
	Query       url.Values
	Header      http.Header
	Body        any    // written as JSON; an io.Reader is sent as it is
	ContentType string // of a body that is a reader
}

// Do sends a request for which this package has no method, and returns the response. The caller closes its body. Errors
// of the service are an *Error; others wrap what the network has reported.
func (c *Client) Do(ctx context.Context, q Request) (*http.Response, error) {
	return c.send(ctx, request{method: q.Method, path: q.Path, query: q.Query, header: q.Header, body: q.Body,
		contentType: q.ContentType})
}

// Path returns the path of a route from its segments, which it escapes: Path("volumes", "job") is /v1/volumes/job.
func Path(segments ...string) string { return path(segments...) }

// maxError limits the bytes of an error that are read.
const maxError = 1 << 20

func errorOf(resp *http.Response) error {
	e := &Error{}
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxError))
	if err != nil || json.Unmarshal(b, e) != nil || e.Kind == "" {
		return fmt.Errorf("pando: the service answers %s", resp.Status)
	}
	e.Status = resp.StatusCode
	return e
}

// etagged is a result that has an ETag.
type etagged interface{ setETag(string) }

// call sends a request, and decodes the response.
func call[T any](ctx context.Context, c *Client, q request) (*T, error) {
	resp, err := c.send(ctx, q)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()

	out := new(T)
	if resp.StatusCode != http.StatusNoContent {
		if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
			return nil, fmt.Errorf("pando: %w", err)
		}
		_, _ = io.Copy(io.Discard, resp.Body) // so that the connection can be used again
	}
	if t, ok := any(out).(etagged); ok {
		t.setETag(resp.Header.Get("ETag"))
	}
	return out, nil
}

// path joins segments of a path, each escaped.
func path(segments ...string) string {
	var b strings.Builder
	b.WriteString("/v1")
	for _, s := range segments {
		b.WriteString("/" + url.PathEscape(s))
	}
	return b.String()
}

// headers returns the headers of a request that makes or changes something.
func headers(key, ifMatch string) http.Header {
	h := http.Header{}
	if key != "" {
		h.Set("Idempotency-Key", key)
	}
	if ifMatch != "" {
		h.Set("If-Match", ifMatch)
	}
	return h
}

// nothing is the result of what has none.
type nothing struct{}
