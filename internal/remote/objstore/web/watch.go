package web

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"sync"
	"time"
)

// watched is a connection that ends when it makes no progress, or too little. Both directions count together: the
// answer is not late while the request is still being sent.
//
// The connection ends when no byte moves for stall, or when less than floor bytes move in twice that time. Only time in
// which this side waits for the other counts: pauses of this side in sending (a limited rate) do not, and neither does
// the time between requests.
type watched struct {
	net.Conn
	stall time.Duration
	floor int64

	mu      sync.Mutex
	waiting int       // calls of Read and Write
	paused  int       // requests whose bodies this side is getting ready
	since   time.Time // when the clock of waited was last read, if it runs
	waited  time.Duration
	moved   int64 // bytes in that time
}

func watchConn(c net.Conn, stall time.Duration, floor int64) net.Conn {
	w := &watched{Conn: c, stall: stall, floor: floor}
	w.beginRequest()
	return w
}

// tooSlow is the error of a connection that ends because it makes too little progress.
type tooSlow struct{ err error }

func (s *tooSlow) Error() string { return "the connection is too slow" }
func (s *tooSlow) Unwrap() error { return s.err }
func (s *tooSlow) Timeout() bool { return true }

// window returns the time of waiting in which floor bytes must move.
func (w *watched) window() time.Duration { return 2 * w.stall }

// beginRequest resets the clocks at the beginning of a request.
func (w *watched) beginRequest() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.since, w.waited, w.moved = time.Now(), 0, 0
	w.extendDeadline()
}

// countWait adds the time since the last call if this side has waited for the other. The caller holds mu.
func (w *watched) countWait() {
	now := time.Now()
	if w.waiting > 0 && w.paused == 0 {
		w.waited += now.Sub(w.since)
	}
	w.since = now
}

// extendDeadline postpones the end of the connection, even for a Read that is already waiting. The caller holds mu.
func (w *watched) extendDeadline() {
	left := w.stall
	if w.paused == 0 {
		left = min(left, w.window()-w.waited)
	}
	_ = w.Conn.SetDeadline(time.Now().Add(left))
}

func (w *watched) Read(b []byte) (int, error)  { return w.transfer(w.Conn.Read, b, false) }
func (w *watched) Write(b []byte) (int, error) { return w.transfer(w.Conn.Write, b, true) }

// transfer calls Read or Write, and counts the bytes and the time. fresh: the connection may have been idle.
func (w *watched) transfer(call func([]byte) (int, error), b []byte, fresh bool) (int, error) {
	w.mu.Lock()
	w.countWait()
	w.waiting++
	if fresh {
		w.extendDeadline()
	}

	w.mu.Unlock()

	n, err := call(b)

	w.mu.Lock()
	defer w.mu.Unlock()

	w.countWait()
	w.waiting--
	if w.moved += int64(n); w.moved >= w.floor {
		w.waited, w.moved = 0, 0
	}

	if n > 0 {
		w.extendDeadline()
	}
	if errors.Is(err, os.ErrDeadlineExceeded) && w.waited >= w.window() {
		err = &tooSlow{err}
	}

	return n, err
}

// setPaused says that this side begins to prepare data to send, or, with -1, that it has finished.
func (w *watched) setPaused(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.countWait()
	w.paused += n
	w.extendDeadline()
}

// watchRequest returns a request that tells its connection when it begins, and when it waits for its own body.
func watchRequest(r *http.Request) *http.Request {
	var mu sync.Mutex
	var conn *watched
	out := r.WithContext(httptrace.WithClientTrace(r.Context(),
		&httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
			c := i.Conn
			if secure, is := c.(*tls.Conn); is {
				c = secure.NetConn()
			}
			if w, is := c.(*watched); is {
				w.beginRequest()
				mu.Lock()
				conn = w
				mu.Unlock()
			}
		}}))

	if r.Body == nil || r.Body == http.NoBody {
		return out
	}

	body := func(of io.ReadCloser) io.ReadCloser {
		return &watchedBody{of, func() *watched {
			mu.Lock()
			defer mu.Unlock()
			return conn
		}}
	}

	out.Body = body(r.Body)
	if r.GetBody != nil {
		out.GetBody = func() (io.ReadCloser, error) {
			again, err := r.GetBody()
			if err != nil {
				return nil, err
			}
			return body(again), nil
		}
	}

	return out
}

// watchedBody is the body of a request whose connection does not count the time for which it is waited for.
type watchedBody struct {
	io.ReadCloser
	conn func() *watched
}

func (b *watchedBody) Read(p []byte) (int, error) {
	if w := b.conn(); w != nil {
		w.setPaused(1)
		defer w.setPaused(-1)
	}
	return b.ReadCloser.Read(p)
}
