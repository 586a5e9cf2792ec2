package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// FromBeginning is the place of Events before the oldest event that is known.
const FromBeginning = "0"

// Pauses before a stream of events is opened again.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 10 * time.Second
)

// Events follows what happens in the pool, also by other processes: after the event with an ID, or from now on if after
// is "". It continues where it was when the connection is lost or the service restarts; an Event with Gap says that
// events are missing. It ends when ctx does, or when the service refuses it.
func (c *Client) Events(ctx context.Context, after string) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		pause := firstPause
		for {
			at, got, err := c.streamEvents(ctx, after, yield)
			var refused *Error
			switch {
			case errors.Is(err, errStopped):
				return
			case ctx.Err() != nil:
				yield(Event{}, ctx.Err())
				return
			case errors.As(err, &refused) && refused.Kind != InUse && refused.Kind != Canceled:
				yield(Event{}, err)
				return
			}
			if after = at; got {
				pause = firstPause
			}

			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
			pause = min(2*pause, lastPause)
		}
	}
}

// errStopped says that the caller of Events wants no more.
var errStopped = errors.New("stopped")

// maxLine limits a line of the stream.
const maxLine = 1 << 20

// streamEvents yields the events of one connection. It returns the ID of the last one, and whether it was connected.
func (c *Client) streamEvents(
	ctx context.Context, after string, yield func(Event, error) bool,
) (at string, connected bool, err error) {
	h := http.Header{"Accept": {"text/event-stream"}}
	if after != "" {
		h.Set("Last-Event-ID", after)
	}
	resp, err := c.send(ctx, request{method: http.MethodGet, path: "/v1/events", header: h})
	if err != nil {
		return after, false, err
	}
	defer resp.Body.Close()

	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxLine)
	kind, data := "", ""
	for lines.Scan() {
		field, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case lines.Text() == "":
			if err := dispatch(kind, data, after, yield); err != nil {
				return after, true, err
			}
			kind, data = "", ""
		case field == "id":
			after = value
		case field == "event":
			kind = value
		case field == "data":
			data = value
		}
	}
	if err := lines.Err(); err != nil {
		return after, true, err
	}
	return after, true, io.EOF
}

// dispatch yields one event of the stream.
func dispatch(kind, data, id string, yield func(Event, error) bool) error {
	e := Event{}
	switch {
	case data == "":
		return nil // only a comment or an ID
	case kind == "gap":
		e.Gap = true
	case kind == "error":
		problem := &Error{}
		if err := json.Unmarshal([]byte(data), problem); err != nil {
			return err
		}
		return problem
	default:
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			return err
		}
	}
	e.ID = id
	if !yield(e, nil) {
		return errStopped
	}
	return nil
}

// HistoryFilter selects events of the past.
type HistoryFilter struct {
	Ref   string // only events of what had this name
	Since time.Time
	Limit int // only the newest; 0: 100
}

// History lists events, the oldest first.
func (c *Client) History(ctx context.Context, f HistoryFilter) ([]Event, error) {
	q := url.Values{}
	if f.Ref != "" {
		q.Set("ref", f.Ref)
	}
	if !f.Since.IsZero() {
		q.Set("since", f.Since.Format(time.RFC3339Nano))
	}
	if f.Limit > 0 {
		q.Set("limit", strconv.Itoa(f.Limit))
	}
	return list[Event](ctx, c, "/v1/history", q)
}
