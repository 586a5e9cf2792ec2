package service

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/engine"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
)

// How often the stream looks for events, and sends a comment if there are none. Tests use less.
var (
	lookInterval      = 100 * time.Millisecond
	heartbeatInterval = 15 * time.Second
)

// Limits of the streams of events that are open at a time.
const (
	maxStreams       = 500
	maxStreamsOfUser = 20 // of one user without root's rights
)

// streams counts the streams that are open.
type streams struct {
	mu   sync.Mutex
	all  int
	user map[uint32]int
}

// count returns how many streams there are.
func (s *streams) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all
}

// begin counts a stream. The caller calls end. InUse.
func (s *streams) begin(c Caller) (end func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	most := maxStreams
	busy := s.all >= most
	if !busy && !c.trusted() {
		most = maxStreamsOfUser
		busy = s.user[c.UID] >= most
	}
	if busy {
		return nil, errs.New(errs.InUse, "events", "", "%d streams of events are open, and no more may", most).
			WithHint("close one of them")
	}

	count := func(n int) {
		s.all += n
		if c.trusted() {
			return
		}
		if s.user == nil {
			s.user = map[uint32]int{}
		}
		if s.user[c.UID] += n; s.user[c.UID] == 0 {
			delete(s.user, c.UID)
		}
	}
	count(1)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		count(-1)
	}, nil
}

type eventsInput struct {
	After string `header:"Last-Event-ID" doc:"ID of the last event that was received: continue after it"`
	From  string `query:"after" doc:"The same, in place of the header; 0: from the oldest event that is known"`
}

func (s *Service) addEventRoutes() {
	add(s, route{id: "list-events", access: reads, method: "GET", path: "/v1/history", tag: "events",
		summary: "List who did what, the oldest event first"}, s.history)

	add(s, route{id: "follow-events", access: reads, method: "GET", path: "/v1/events", tag: "events",
		summary: "Follow what happens in the pool",
		about: "Server-sent events, also of what other processes do with the pool: the data of each is an event as in " +
			"/v1/history. Without Last-Event-ID the stream begins now. The event gap says that events are missing between the " +
			"one before and the one after it, because they are no longer known. Comments keep the connection alive.",
		answer: &huma.Response{Description: "The events", Content: map[string]*huma.MediaType{
			"text/event-stream": {Schema: &huma.Schema{Type: "string"}}}}}, s.follow)
}

func (s *Service) follow(ctx context.Context, in *eventsInput) (*huma.StreamResponse, error) {
	after := in.After
	if after == "" {
		after = in.From
	}
	end, err := s.streams.begin(callerOf(ctx))
	if err != nil {
		return nil, err
	}

	tail, err := engine.FollowHistory(s.e.Dir(), after)
	if err != nil {
		end()
		return nil, err
	}

	return &huma.StreamResponse{Body: func(hc huma.Context) {
		defer end()
		defer tail.Close()
		hc.SetHeader("Content-Type", "text/event-stream")
		hc.SetHeader("Cache-Control", "no-store")
		hc.SetStatus(http.StatusOK)
		_, w := humago.Unwrap(hc)
		s.sendEvents(ctx, w, tail)
	}}, nil
}

// sendEvents sends events until the client goes away, or the service ends.
func (s *Service) sendEvents(ctx context.Context, w http.ResponseWriter, tail *engine.HistoryTail) {
	look := time.NewTicker(lookInterval)
	defer look.Stop()

	out := http.NewResponseController(w)
	send := func(b []byte) bool {
		_, err := w.Write(b)
		return err == nil && out.Flush() == nil
	}
	if !send(fmt.Appendf(nil, ": following\nid: %s\n\n", tail.Position())) {
		return
	}

	last := time.Now()
	for {
		// The policy may have changed in the meantime.
		ctx, err := s.still(ctx, "follow-events", reads)
		var events []engine.NumberedEvent
		var gap bool
		if err == nil {
			events, gap, err = tail.Next()
		}
		var lines []byte
		if err == nil {
			lines, err = s.eventLines(ctx, events, gap)
		}
		if err != nil {
			send(fmt.Appendf(nil, "event: error\ndata: %s\n\n", eventJSON(problemOf(err).in(httpWords{}))))
			return
		}

		if len(lines) > 0 {
			if !send(lines) {
				return
			}
			last = time.Now()
		}
		if len(events) > 0 {
			continue // there may be more
		}

		if time.Since(last) >= heartbeatInterval {
			if !send(fmt.Appendf(nil, ": heartbeat\nid: %s\n\n", tail.Position())) { // past events of others, too
				return
			}
			last = time.Now()
		}

		select {
		case <-ctx.Done():
			return
		case <-s.closing:
			return
		case <-look.C:
		}
	}
}

// eventLines formats the events that the caller may see for the stream.
func (s *Service) eventLines(ctx context.Context, events []engine.NumberedEvent, gap bool) ([]byte, error) {
	var b bytes.Buffer
	keep := keepsEvent(ctx)
	if gap {
		b.WriteString("event: gap\ndata: {}\n\n")
	}
	for _, e := range events {
		if keep != nil && !keep(e.Event) {
			continue
		}
		v, err := s.redacted(ctx, e.Event)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&b, "id: %s\nevent: %s\ndata: %s\n\n", e.ID, e.Verb, eventJSON(v))
	}
	return b.Bytes(), nil
}
