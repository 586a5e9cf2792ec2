package web

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"pando/client"
)

// How long changes are gathered, and how often operations are looked at: more seldom while none is running.
const (
	gatherFor  = 100 * time.Millisecond
	lookEvery  = 500 * time.Millisecond
	lookSeldom = 4 // times lookEvery
	stillAlive = 15 * time.Second
)

// stream is a stream of server-sent events to a browser.
type stream struct {
	out http.ResponseWriter
	c   *http.ResponseController
}

func newStream(out http.ResponseWriter) stream {
	out.Header().Set("Content-Type", "text/event-stream")
	return stream{out, http.NewResponseController(out)}
}

// send sends lines that end with an empty one, and reports whether the browser is still there.
func (s stream) send(format string, args ...any) bool {
	_, err := fmt.Fprintf(s.out, format, args...)
	return err == nil && s.c.Flush() == nil
}

// live tells a page that something has changed that its user may see: the page then asks for itself again. It does not
// say what: the views do, with the rights of the user.
func (w *Web) live(out http.ResponseWriter, v *visit) error {
	ctx, cancel := context.WithCancel(v.Context())
	defer cancel()
	changes := make(chan error)
	go followEvents(ctx, v, changes)

	s := newStream(out)
	if !s.send("retry: 1000\n\n") {
		return nil
	}
	look, alive := time.NewTicker(lookEvery), time.NewTicker(stillAlive)
	defer look.Stop()
	defer alive.Stop()
	seen, running := operationsNow(v)

	for n := 0; ; {
		ok := true
		select {
		case <-ctx.Done():
			return nil
		case <-w.api.Closing():
			return nil
		case err := <-changes:
			if err != nil || w.sessions.of(v.Request) == nil {
				s.send("event: end\ndata: {}\n\n")
				return nil
			}
			ok = s.send("event: change\ndata: {}\n\n")
		case <-look.C:
			if n++; !running && n%lookSeldom != 0 {
				continue
			}
			var now string
			if now, running = operationsNow(v); now != seen {
				seen = now
				ok = s.send("event: change\ndata: {}\n\n")
			}
		case <-alive.C:
			if w.sessions.of(v.Request) == nil {
				s.send("event: end\ndata: {}\n\n")
				return nil
			}
			ok = s.send(": alive\n\n")
		}
		if !ok {
			return nil
		}
	}
}

// followEvents sends to changes when the user may see new events, many of them as one, and an error at the end.
func followEvents(ctx context.Context, v *visit, changes chan<- error) {
	pending := make(chan struct{}, 1)
	failed := make(chan error, 1)
	go func() {
		for _, err := range v.c.Events(ctx, "") {
			if err != nil {
				failed <- err
				return
			}
			select {
			case pending <- struct{}{}:
			default: // it is known already
			}
		}
	}()

	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case err = <-failed:
		case <-pending:
			select { // more may follow at once
			case <-ctx.Done():
				return
			case <-time.After(gatherFor):
			}
			select {
			case <-pending:
			default:
			}
		}
		select {
		case changes <- err:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// operationsNow describes the operations that the user may see, to compare them with later ones, and reports whether
// one is running.
func operationsNow(v *visit) (text string, running bool) {
	all, err := v.c.Operations(v.Context())
	if err != nil {
		return "", false
	}

	type state struct {
		ID, State string
		client.Progress
	}
	var out []state
	for _, op := range all {
		out = append(out, state{op.ID, op.State, op.Progress})
		running = running || op.Running()
	}
	b, _ := json.Marshal(out) // of plain values
	return string(b), running
}

// io passes on what a volume writes, and how long its syncs take.
func (w *Web) io(out http.ResponseWriter, v *visit) error {
	resp, err := v.c.Do(v.Context(), client.Request{Method: http.MethodGet,
		Path: client.Path("volumes", v.PathValue("name"), "iostat"), Query: url.Values{"interval_seconds": {"1"}}})
	if err != nil {
		return err
	}
	defer resp.Body.Close()

	s := newStream(out)
	b := make([]byte, 16<<10)
	for {
		n, err := resp.Body.Read(b)
		if n > 0 && !s.send("%s", b[:n]) || err != nil || w.sessions.of(v.Request) == nil {
			return nil // the browser sees the end of the stream
		}
	}
}
