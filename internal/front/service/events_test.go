package service

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/client"
	"pando/internal/driver/plain"
	"pando/internal/engine"
)

// follow follows events until the test ends.
func follow(t *testing.T, c *client.Client, after string) <-chan client.Event {
	ctx, cancel := context.WithCancel(context.Background())
	out, ended := make(chan client.Event, 1000), make(chan bool)
	go func() {
		defer close(ended)
		for e, err := range c.Events(ctx, after) {
			if err != nil {
				if ctx.Err() == nil {
					t.Errorf("events: %v", err)
				}
				return
			}
			out <- e
		}
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return out
}

func next(t *testing.T, events <-chan client.Event) client.Event {
	t.Helper()
	select {
	case e := <-events:
		return e
	case <-time.After(20 * time.Second):
		t.Fatal("no event in 20 s")
		return client.Event{}
	}
}

// TestEvents: the stream has what the service does, and what others do; it goes on after a restart without a gap, and
// says where there is one.
func TestEvents(t *testing.T) {
	shorter(t, &lookInterval, 5*time.Millisecond)
	dir := newPool(t, plain.Name)
	s := serve(t, dir)
	ctx := t.Context()
	_, err := s.c.Import(ctx, "web", archive(t, map[string]string{"f": "x"}), client.ImportOptions{})
	must(t, err)

	events := follow(t, s.c, client.FromBeginning)
	if e := next(t, events); e.Verb != "import" || e.Name != "web@1" || e.ID == "" {
		t.Errorf("%+v", e)
	}
	_, err = s.c.Clone(ctx, client.CloneRequest{From: "web", Name: "job"})
	must(t, err)
	if e := next(t, events); e.Verb != "clone" || e.Name != "job" || !strings.HasPrefix(e.Command, "pando serve") {
		t.Errorf("%+v", e)
	}

	// Another process.
	other, err := engine.Open(ctx, dir, drivers)
	must(t, err)
	_, err = other.Clone(ctx, cloneOf("web", "theirs"))
	must(t, err)
	e := next(t, events)
	if e.Name != "theirs" || e.ForUID != nil {
		t.Errorf("%+v", e)
	}

	// While nobody serves, one more, and then the client goes on at the same socket.
	s.stop()
	_, err = other.Clone(ctx, cloneOf("web", "between"))
	must(t, err)
	other.Close()
	again := serve(t, dir)
	resumed := follow(t, again.c, e.ID)
	if e = next(t, resumed); e.Name != "between" || e.Gap {
		t.Errorf("%+v", e)
	}

	// The log is gone.
	must(t, os.Remove(filepath.Join(dir, "history.log")))
	_, err = again.c.Clone(ctx, client.CloneRequest{From: "web", Name: "fresh"})
	must(t, err)
	late := follow(t, again.c, e.ID)
	if e = next(t, late); !e.Gap {
		t.Errorf("no gap: %+v", e)
	}
	if e = next(t, late); e.Name != "fresh" {
		t.Errorf("%+v", e)
	}
}

// TestHeartbeats: a stream without events has comments, and too many streams are refused.
func TestHeartbeats(t *testing.T) {
	shorter(t, &heartbeatInterval, 20*time.Millisecond)
	shorter(t, &lookInterval, 5*time.Millisecond)
	s := serve(t, newPool(t, plain.Name))
	resp, err := overSocket(s.socket).Get("http://pando/v1/events")
	must(t, err)
	defer resp.Body.Close()
	b := make([]byte, 4096)
	text := ""
	for !strings.Contains(text, "heartbeat") {
		n, err := resp.Body.Read(b)
		must(t, err)
		text += string(b[:n])
	}
	if resp.Header.Get("Content-Type") != "text/event-stream" || strings.Contains(text, "data:") {
		t.Errorf("%v: %q", resp.Header, text)
	}

	open := func(n int) int {
		s.streams.mu.Lock()
		defer s.streams.mu.Unlock()
		s.streams.all += n
		return s.streams.all
	}
	open(maxStreams - 1)
	if status, body := s.raw("GET", "/v1/events", ""); status != 409 {
		t.Errorf("one stream too many: %d %s", status, body)
	}
	open(1 - maxStreams)
	resp.Body.Close()
	for end := time.Now().Add(10 * time.Second); open(0) != 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(fmt.Sprint("streams: ", open(0)))
		}
	}
}
