// Package viaservice reaches a pool through the service that has opened it: it sends the calls of the command line as
// requests, and returns what the engine would. Errors have the kinds, operations, references and hints that the same
// calls of the engine have.
package viaservice

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/user"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"pando/client"
	"pando/internal/base/errs"
	"pando/internal/base/warnings"
	"pando/internal/driver"
)

// patience is how long requests are repeated while a service that was reached before cannot be: it may be restarting.
const patience = 10 * time.Second

// pause is the time between two attempts.
const pause = 100 * time.Millisecond

// Pool is a pool that a service has opened. It may be used concurrently.
type Pool struct {
	socket string
	client *client.Client
	lease  time.Duration // of the volume of a run: see Run

	reached atomic.Bool // the service has accepted a connection, so it exists
}

// Open returns the pool of the service that listens on a socket. It does not connect yet: the first call that does
// returns NotFound (no service listens), Permission or IO if it cannot. The caller closes the pool.
func Open(socket string) (*Pool, error) {
	c, err := client.New(client.Options{Socket: socket})
	return &Pool{socket: socket, client: c, lease: runLease}, errs.Wrap("connect", socket, err)
}

// Close closes the connections.
func (p *Pool) Close() { p.client.Close() }

// header returns the headers of a request, with an Idempotency-Key unless that is "".
func header(key string) http.Header {
	h := http.Header{"Pando-Words": {"command-line"}}
	if key != "" {
		h.Set("Idempotency-Key", key)
	}
	return h
}

// repeat says whether a request may be sent again if its answer was lost.
type repeat int

const (
	ifUnsent repeat = iota // only if it was not sent: a repetition of what was done would do something else
	harmless               // a repetition has the same result
	withAKey               // so has one with the same Idempotency-Key
)

// request is a request of a route.
type request struct {
	method string
	path   []string // segments
	query  map[string][]string
	body   any
	repeat repeat
	key    string // with withAKey; "": a new one

	contentType string          // of a body that is a reader
	giveUp      <-chan struct{} // nil, or closed when it is no longer wanted, unless it was sent
	repeated    *bool           // nil, or set if it was sent more than once
}

// send sends a request, and repeats it as it allows while the service cannot be reached. The caller closes the body of
// the response.
func (p *Pool) send(ctx context.Context, q request) (*http.Response, error) {
	if q.repeat == withAKey && q.key == "" {
		q.key = string(driver.NewID())
	}
	r := client.Request{Method: q.method, Path: client.Path(q.path...), Query: q.query, Header: header(q.key),
		Body: q.body, ContentType: q.contentType}

	deadline := time.Now().Add(patience)
	for again := false; ; again = true {
		resp, err := p.client.Do(ctx, r)
		if !isUnreachable(err) {
			p.reached.Store(true)
			q.giveUp = nil
		}
		if q.repeated != nil {
			*q.repeated = again
		}
		if err == nil {
			return resp, nil
		}

		// An error of the service is final, unless it is still busy with the request that was repeated.
		answer, answered := errors.AsType[*client.Error](err)
		busy := again && answered && q.repeat == withAKey && answer.Kind == client.Conflict
		unsent := isUnreachable(err) && p.reached.Load()
		lost := !answered && !isUnreachable(err) && (q.repeat == harmless || q.repeat == withAKey)
		if ctx.Err() != nil || time.Now().After(deadline) || !busy && !unsent && !lost {
			return nil, p.errorOf(ctx, err)
		}

		select {
		case <-time.After(pause):
		case <-q.giveUp:
			return nil, context.Canceled
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// isUnreachable reports whether a request was not sent, because no service listened.
func isUnreachable(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// finish decodes the body of a response.
func finish(resp *http.Response, out any) error {
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode == http.StatusNoContent {
		return err
	}
	return json.Unmarshal(b, out)
}

// call sends a request, and decodes its answer.
func call[T any](ctx context.Context, p *Pool, q request) (out T, err error) {
	resp, err := p.send(ctx, q)
	if err != nil {
		return out, err
	}
	return out, p.errorOf(ctx, finish(resp, &out))
}

// change is call of a request whose answer has warnings besides the result.
func change[T any](ctx context.Context, p *Pool, q request) (out T, err error) {
	text, err := call[json.RawMessage](ctx, p, q)
	if err != nil {
		return out, err
	}

	var also struct {
		Warnings []errs.Message `json:"warnings"`
	}
	if err := errors.Join(json.Unmarshal(text, &out), json.Unmarshal(text, &also)); err != nil {
		return out, p.errorOf(ctx, err)
	}
	for _, w := range also.Warnings {
		warnings.AddEach(ctx, "%s", w)
	}
	return out, nil
}

// making is change of a request that makes something. The end of ctx cancels the request, and does not break its
// connection: the answer says whether it was done before that.
func making[T any](ctx context.Context, p *Pool, q request) (T, error) {
	q.repeat, q.key, q.giveUp = withAKey, string(driver.NewID()), ctx.Done()
	alive, answered := context.WithCancel(context.WithoutCancel(ctx))
	defer answered()
	defer context.AfterFunc(ctx, func() { p.cancelRequest(alive, q.key) })()

	out, err := change[T](alive, p, q)
	if ctx.Err() != nil && errs.Is(err, errs.Canceled) {
		return out, ctx.Err()
	}
	return out, err
}

// cancelRequest cancels a request again and again until ctx ends, as it may not have arrived yet.
func (p *Pool) cancelRequest(ctx context.Context, key string) {
	q := request{method: http.MethodDelete, path: []string{"requests", key}, repeat: harmless}
	for ctx.Err() == nil {
		if resp, err := p.send(ctx, q); err == nil { // after an error, the next one may succeed
			_ = resp.Body.Close()
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
}

// Error is an error that a service has reported.
type Error struct {
	Socket string // of the service

	text  string
	cause *errs.Error
}

// Error returns the text that the same call of the engine has.
func (e *Error) Error() string { return e.text }

// Unwrap returns the error with its kind, operation, reference and hint.
func (e *Error) Unwrap() error { return e.cause }

// during returns the error of a request that was sent for another operation.
func (e *Error) during(op string) *Error {
	cause := *e.cause
	cause.Op = op
	return &Error{e.Socket, op + strings.TrimPrefix(e.text, e.cause.Op), &cause}
}

// errorOf returns the error of a request.
func (p *Pool) errorOf(ctx context.Context, err error) error {
	answer, answered := errors.AsType[*client.Error](err)
	switch {
	case err == nil:
		return nil
	case answered:
		return p.errorIn(answer)
	case ctx.Err() != nil:
		return ctx.Err()
	case isUnreachable(err):
		return p.unreachable(err)
	}
	return errs.New(errs.IO, "connect", p.socket, "the connection to the service was lost before its answer: %w", err).
		WithHint("see with %s and %s what was done, and repeat the command if necessary", errs.Run("ls"), errs.Run("history"))
}

// errorIn returns the error that an answer describes.
func (p *Pool) errorIn(a *client.Error) error {
	cause := &errs.Error{Kind: errs.Kind(a.Kind), Op: a.Op, Ref: a.Ref, Hint: errs.Messagef("%s", a.Hint)}
	begin := (&errs.Error{Op: a.Op, Ref: a.Ref}).Error() + ": "
	cause.Err = errors.New(strings.TrimPrefix(a.Detail, begin))
	return &Error{p.socket, a.Detail, cause}
}

// unreachable returns the error of a socket that does not accept connections.
func (p *Pool) unreachable(err error) error {
	const op = "connect"
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		start := errs.Run("serve")
		if p.socket != client.DefaultSocket {
			start = errs.Run("serve", errs.Param("socket", errs.ShellWord(p.socket)))
		}
		return errs.New(errs.NotFound, op, p.socket, "no service listens on this socket").
			WithHint("start it as root: %s", start)
	case errors.Is(err, fs.ErrPermission):
		return p.forbidden()
	}
	return errs.New(errs.IO, op, p.socket, "cannot connect to the service: %w", err)
}

// forbidden returns the error of a user who may not connect.
func (p *Pool) forbidden() error {
	e := errs.New(errs.Permission, "connect", p.socket, "only root may connect to the service")
	group := groupOf(p.socket)
	if group == "" || group == "root" {
		return e.WithHint("as root, make a group for its users with `groupadd pando`, and restart the service")
	}

	name := "USER"
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	e.Err = errors.New("only root and members of group " + group + " may connect to the service")
	return e.WithHint("join the group with `sudo usermod -aG %s %s`, and log in again", group, name)
}

// groupOf returns the name of the group that a file belongs to, or "".
func groupOf(path string) string {
	info, err := os.Stat(path)
	if err != nil {
		return ""
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	g, err := user.LookupGroupId(strconv.FormatUint(uint64(st.Gid), 10))
	if err != nil {
		return ""
	}
	return g.Name
}
