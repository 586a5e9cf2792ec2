// Package web is the HTTP client of the stores that need one. Its timeouts depend on
// progress, so that no transfer hangs and none is cut off for being long, and its errors
// say what a person can do.
package web

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// Stall is how long a connection may make no progress, in either direction.
const Stall = 60 * time.Second

// Floor is the number of bytes that a connection must transfer in twice [Stall] of waiting for the server, so that a
// server that sends a byte now and then cannot hold a request for days. It allows lines of 300 bytes per second and
// connection.
const Floor = 32 << 10

// dialWait is how long a host may take to accept a connection: enough for three packets to be lost.
const dialWait = 8 * time.Second

// Options of a Client. The zero value has useful defaults.
type Options struct {
	InsecureSkipVerify bool                                  // takes any certificate
	CAFile             string                                // certificates (PEM) to trust besides those of the system
	Stall              time.Duration                         // 0: the constant
	Floor              int64                                 // 0: the constant
	Proxy              func(*http.Request) (*url.URL, error) // nil: none
}

// Set sets an option from a parameter of a remote's URL. known is false if there is no
// such option; wrong says what is wrong with the value.
func (o *Options) Set(name, value string) (known bool, wrong string) {
	var err error
	switch name {
	case "insecure-skip-verify":
		if o.InsecureSkipVerify, err = strconv.ParseBool(value); err != nil {
			return true, "it must be true or false"
		}
	case "ca-file":
		if o.CAFile = value; !filepath.IsAbs(value) {
			return true, "it must be the absolute path of a file"
		}
	default:
		return false, ""
	}

	return true, ""
}

// Endpoint parses the URL of a server, which consists of a scheme and a host only. wrong
// says what is wrong with it.
func Endpoint(text string) (host string, secure bool, wrong string) {
	e, err := url.Parse(text)
	switch {
	case err != nil:
		return "", false, "it is not a URL"
	case e.Scheme != "http" && e.Scheme != "https":
		return "", false, "it must begin with https:// or http://"
	case e.User != nil:
		return "", false, "a URL must not contain credentials"
	case e.Hostname() == "":
		return "", false, "it names no host"
	case strings.Trim(e.Path, "/") != "" || e.RawQuery != "" || e.Fragment != "":
		return "", false, "it must consist of a scheme, a host and a port only"
	}

	return e.Host, e.Scheme == "https", ""
}

// BaseURL returns the URL of a server as [Endpoint] describes it.
func BaseURL(host string, secure bool) string {
	if secure {
		return "https://" + host
	}
	return "http://" + host
}

// Client is an http.RoundTripper over HTTP/1.1: many connections are faster than one
// that all transfers share. It may be used by several goroutines at once. It never
// repeats a request of which the server may have seen any part.
type Client struct {
	t    *http.Transport
	skew atomic.Int64 // how far this host's clock is ahead of the server's, in nanoseconds
}

// New returns a Client. Invalid: the file of certificates contains none.
func New(o Options) (*Client, error) {
	if o.Stall <= 0 {
		o.Stall = Stall
	}
	if o.Floor <= 0 {
		o.Floor = Floor
	}

	config := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: o.InsecureSkipVerify}
	if o.CAFile != "" {
		pem, err := os.ReadFile(o.CAFile)
		if err != nil {
			return nil, errs.Wrap("read certificates", o.CAFile, err)
		}
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		if !pool.AppendCertsFromPEM(pem) {
			return nil, errs.New(errs.Invalid, "read certificates", o.CAFile, "it contains no certificate").
				WithHint("use a file with certificates in PEM format")
		}
		config.RootCAs = pool
	}

	dialer := &net.Dialer{Timeout: dialWait, KeepAlive: 15 * time.Second}
	return &Client{t: &http.Transport{
		Proxy: o.Proxy,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := dialer.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return watchConn(c, o.Stall, o.Floor), nil
		},
		TLSClientConfig:     config,
		TLSHandshakeTimeout: 15 * time.Second,
		MaxIdleConnsPerHost: 64,
		IdleConnTimeout:     o.Stall / 2, // before the connection itself gives up
		// Objects come as they are stored.
		DisableCompression: true,
		TLSNextProto:       map[string]func(string, *tls.Conn) http.RoundTripper{}, // no HTTP/2
	}}, nil
}

// RoundTrip implements http.RoundTripper.
func (c *Client) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := c.t.RoundTrip(watchRequest(r))
	if err != nil {
		// Some libraries replace errors whose text contains "EOF" by their own text.
		if errs.IsAny(err, io.EOF, io.ErrUnexpectedEOF) {
			err = &closedConn{err}
		}
		return nil, err
	}

	if date, err := http.ParseTime(answer.Header.Get("Date")); err == nil {
		c.skew.Store(int64(time.Since(date)))
	}

	return answer, nil
}

// Close closes idle connections. The Client can still be used.
func (c *Client) Close() { c.t.CloseIdleConnections() }

// ClockHint returns a hint for a clock that differs from the server's.
func (c *Client) ClockHint() string {
	hint := "set the clock of this host: signatures are valid for a few minutes only"
	skew := time.Duration(c.skew.Load()).Round(time.Second)
	switch {
	case skew >= time.Minute:
		hint += fmt.Sprintf("; it is %s ahead of the server's", skew)
	case skew <= -time.Minute:
		hint += fmt.Sprintf("; it is %s behind the server's", -skew)
	}
	return hint
}

// closedConn is the end of a connection in the middle of something.
type closedConn struct{ err error }

func (c *closedConn) Error() string { return "the server closed the connection" }
func (c *closedConn) Unwrap() error { return c.err }

// Error turns the error of a request, or of reading its answer, into an *errs.Error.
// It is for errors without an answer of the server. Most of them are temporary. server
// is the name of the server for people.
func Error(ctx context.Context, op, ref, server string, err error) error {
	if ended := objstore.Ended(ctx, op, ref); ended != nil {
		return ended
	}

	var known *errs.Error
	if errors.As(err, &known) {
		return err
	}

	e := &errs.Error{Kind: errs.IO, Op: op, Ref: ref, Err: withoutURL(err)}
	var (
		unknown x509.UnknownAuthorityError
		invalid x509.CertificateInvalidError
		host    x509.HostnameError
		check   *tls.CertificateVerificationError
		noTLS   tls.RecordHeaderError
		dns     *net.DNSError
	)
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return e.WithHint("renew the certificate of %s, or correct the clock of this host", server)
	case errors.As(err, &unknown), errors.As(err, &invalid), errors.As(err, &host), errors.As(err, &check):
		return e.WithHint("add the certificate authority of %s to those this host trusts, or add ca-file=FILE to the "+
			"remote's URL", server)
	case errors.As(err, &noTLS), strings.Contains(err.Error(), "server gave HTTP response to HTTPS client"):
		return e.WithHint("use http:// for %s, which does not speak TLS", server)
	case errors.As(err, &dns) && dns.IsNotFound:
		return e.WithHint("check the host name in the remote's URL, and the network of this host")
	}

	e.WithHint("check the network, and that %s is running", server)
	return objstore.TransientAnswer(e, answerOf(err))
}

// answerOf describes an error without an answer in a few words.
func answerOf(err error) objstore.Answer {
	var op *net.OpError
	var dns *net.DNSError
	var timeout net.Error
	var slow *tooSlow
	switch {
	case errors.As(err, &dns):
		return objstore.Answer{Words: "cannot resolve the server's name", Unreached: true}
	case errors.As(err, &op) && op.Op == "dial" && errors.Is(err, syscall.ECONNREFUSED):
		return objstore.Answer{Words: "server refuses connections", Unreached: true}
	case errors.As(err, &op) && op.Op == "dial":
		return objstore.Answer{Words: "server cannot be reached", Unreached: true}
	case errors.As(err, &slow):
		return objstore.Answer{Words: "server answers too slowly"}
	case errors.As(err, &timeout) && timeout.Timeout():
		return objstore.Answer{Words: "server does not answer"}
	}

	return objstore.Answer{Words: "connection broke off"}
}

// withoutURL removes the URL of the request from an error: it is long, and not for people.
func withoutURL(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}
	return err
}

// Temporary reports whether a server that answered with a status may succeed the next
// time.
func Temporary(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests,
		499, // nginx: it thinks that the client went away
		http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	case http.StatusNotImplemented, http.StatusHTTPVersionNotSupported, http.StatusInsufficientStorage:
		return false
	}
	return status >= 500
}

// ReadBody reads the bytes of an object from an answer, at the pace that ctx allows. The
// server has announced length bytes; -1: it did not say how many. An answer that ends
// early is an error.
func ReadBody(ctx context.Context, body io.Reader, length int64) ([]byte, error) {
	if length > objstore.MaxObjectBytes {
		return nil, errs.New(errs.Damaged, "", "", "it has %d bytes, but objects of a repository have at most %d", length,
			objstore.MaxObjectBytes)
	}

	body = objstore.PacedReader(ctx, body)
	if length < 0 {
		data, err := io.ReadAll(io.LimitReader(body, objstore.MaxObjectBytes+1))
		if err == nil && len(data) > objstore.MaxObjectBytes {
			err = errs.New(errs.Damaged, "", "", "it is larger than any object of a repository can be, %d bytes",
				objstore.MaxObjectBytes)
		}
		return data, err
	}

	data := make([]byte, length)
	if n, err := io.ReadFull(body, data); err != nil {
		if errs.IsAny(err, io.EOF, io.ErrUnexpectedEOF) {
			return nil, fmt.Errorf("the answer ended after %d of %d bytes", n, length)
		}
		return nil, err
	}

	return data, nil
}
