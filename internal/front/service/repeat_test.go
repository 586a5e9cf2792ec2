package service

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"pando/client"
	"pando/internal/base/progress"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
)

// TestRepetitions: a repeated request returns what the first one has made, also after a restart and in another service.
func TestRepetitions(t *testing.T) {
	dir := newPool(t, reflink.Name)
	s := serve(t, dir)
	ctx := t.Context()
	body := archive(t, map[string]string{"file": "v1"})
	first, err := s.c.Import(ctx, "web", body, client.ImportOptions{SizeBytes: 64 << 20, Key: "i"})
	must(t, err)
	again, err := s.c.Import(ctx, "web", strings.NewReader("not even a tar"),
		client.ImportOptions{SizeBytes: 64 << 20, Key: "i"})
	must(t, err)
	if again.ID != first.ID {
		t.Errorf("another golden: %+v", again)
	}
	_, err = s.c.Import(ctx, "web", archive(t, nil), client.ImportOptions{SizeBytes: 1, Key: "i"})
	want(t, "an import with other parameters", err, client.Invalid, http.StatusUnprocessableEntity)

	q := client.CloneRequest{From: "web", Name: "job", Key: "k"}
	job, err := s.c.Clone(ctx, q)
	must(t, err)
	same := func(what string, c *client.Client) {
		t.Helper()
		got, err := c.Clone(ctx, q)
		must(t, err)
		if got.ID != job.ID {
			t.Errorf("%s: another volume, %+v", what, got)
		}
	}
	same("at once", s.c)
	other := q
	other.Name = "job2"
	_, err = s.c.Clone(ctx, other)
	want(t, "another body", err, client.Invalid, http.StatusUnprocessableEntity)

	// Other verbs do not take the key for theirs.
	_, err = s.c.Snapshot(ctx, "job", client.SnapshotRequest{Key: "k"})
	want(t, "another verb", err, client.Invalid, http.StatusUnprocessableEntity)
	snap, err := s.c.Snapshot(ctx, "job", client.SnapshotRequest{Key: "s"})
	must(t, err)
	snap2, err := s.c.Snapshot(ctx, "job", client.SnapshotRequest{Key: "s"})
	must(t, err)
	if snap2.Name != snap.Name {
		t.Errorf("another snapshot: %s, %s", snap.Name, snap2.Name)
	}

	// A group of snapshots.
	for _, status := range []int{http.StatusCreated, http.StatusOK} {
		got, body := s.raw("POST", "/v1/snapshot-groups", `{"volumes":["job"],"name":"g"}`, "Idempotency-Key", "group")
		if got != status || !strings.Contains(body, `"name":"job@g"`) {
			t.Errorf("a group: %d %s, want %d", got, body, status)
		}
	}

	// A publish is an operation, and so is its repetition.
	p := client.PublishRequest{Volume: "job", Key: "p"}
	op, err := s.c.Publish(ctx, "site", p)
	published := done[client.Object](s, op, err)
	op, err = s.c.Publish(ctx, "site", p)
	if twice := done[client.Object](s, op, err); twice.ID != published.ID || twice.Generation != 1 {
		t.Errorf("published again: %+v", twice)
	}

	// After a rename, through a second service, and after a restart.
	_, err = s.c.Rename(ctx, "job", "task", "")
	must(t, err)
	second := serve(t, dir)
	same("in a second service", second.c)
	s.stop()
	second.stop()
	s = serve(t, dir)
	same("after a restart", s.c)

	// When it is destroyed, the key is free.
	must(t, s.c.Destroy(ctx, "task", ""))
	fresh, err := s.c.Clone(ctx, q)
	must(t, err)
	if fresh.ID == job.ID || fresh.Name != "job" {
		t.Errorf("after a destroy: %+v", fresh)
	}
}

// TestRepetitionsAtOnce: of many requests with one key, one makes the volume; the others get it, or are told to wait.
func TestRepetitionsAtOnce(t *testing.T) {
	s := withGolden(t, plain.Name)
	var ids sync.Map
	var waits atomic.Int64
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			v, err := s.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: "job", Key: "k"})
			if err != nil {
				want(t, "a repetition", err, client.Conflict, http.StatusConflict)
				waits.Add(1)
				return
			}
			ids.Store(v.ID, i)
		})
	}
	wg.Wait()
	n := 0
	ids.Range(func(any, any) bool { n++; return true })
	if n != 1 {
		t.Errorf("%d volumes, %d told to wait", n, waits.Load())
	}
}

// TestKeysOfOthers: who does not send a key of somebody's does not get what it has made, even with the same text.
func TestKeysOfOthers(t *testing.T) {
	mine, err := requestOf(Caller{Local: true, UID: 1}, "k", "clone", nil)
	must(t, err)
	for _, c := range []Caller{{Local: true, UID: 2}, {Token: "1"}, {}} {
		other, err := requestOf(c, "k", "clone", nil)
		must(t, err)
		if other.Key == mine.Key {
			t.Errorf("%v has the keys of user 1", c)
		}
	}
	if len(mine.Key) != 2*hashBytes || len(mine.Sum) != 2*hashBytes {
		t.Errorf("%+v", mine)
	}
}

// TestPublishesAtOnce: many requests with one key make one generation, and none of their operations fails. While it
// runs, the key belongs to what it asks for.
func TestPublishesAtOnce(t *testing.T) {
	s := withGolden(t, plain.Name)
	_, err := s.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: "job"})
	must(t, err)
	for round := range 5 {
		q := client.PublishRequest{Volume: "job", Key: fmt.Sprint("key", round)}
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				op, err := s.c.Publish(t.Context(), "site", q)
				if err != nil {
					t.Error(err)
					return
				}
				var out client.Object
				if _, err := s.c.Wait(t.Context(), op.ID, &out); err != nil || out.Generation != round+1 {
					t.Errorf("generation %d, %v, want %d", out.Generation, err, round+1)
				}
			})
		}
		wg.Wait()
	}

	// Of one that runs.
	ctx := context.WithValue(t.Context(), callerKey{}, Caller{Token: "t"})
	release := make(chan struct{})
	start := func() (*operationAnswer, error) {
		return s.start(ctx, "publish", "site", func(context.Context, *progress.Tracker) (any, error) {
			<-release
			return nil, nil
		})
	}
	first, err := s.startOnce(ctx, Repeatable{"k"}, "publish site", "body", start)
	must(t, err)
	again, err := s.startOnce(ctx, Repeatable{"k"}, "publish site", "body", start)
	must(t, err)
	if again.Body.ID != first.Body.ID {
		t.Errorf("a repetition began another operation: %+v, %+v", first.Body, again.Body)
	}
	if _, err := s.startOnce(ctx, Repeatable{"k"}, "publish site", "other", start); problemOf(err).Status != 422 {
		t.Errorf("another body: %v", err)
	}
	close(release)
}

// TestExistsInAnotherProcess: a repetition that another process answers first finds what that has made.
func TestExistsInAnotherProcess(t *testing.T) {
	s := withGolden(t, plain.Name)
	other, err := engine.Open(context.Background(), s.e.Dir(), drivers)
	must(t, err)
	defer other.Close()
	ctx := context.WithValue(t.Context(), callerKey{}, Caller{Token: "t"})
	calls := 0
	r := Repeatable{"k"}
	made, repeated, err := s.makeOnce(ctx, r, "clone", "body", func(ctx context.Context) ([]engine.Info, error) {
		calls++
		if _, err := other.Clone(ctx, cloneOf("web", "job")); err != nil { // the faster one
			return nil, err
		}
		return s.e.Clone(ctx, cloneOf("web", fmt.Sprint("job", calls)))
	})
	if err != nil || !repeated || len(made) != 1 || made[0].Name != "job" {
		t.Errorf("%+v, %v, %v", made, repeated, err)
	}
}

// TestCancelRequest: a request that is canceled by its key makes nothing, and one that was done stays done. Nobody can
// cancel requests of others.
func TestCancelRequest(t *testing.T) {
	s := withGolden(t, plain.Name)
	begun := make(chan bool)
	ended := make(chan error, 1)
	ctx := context.WithValue(t.Context(), callerKey{}, Caller{Local: true, UID: uint32(os.Geteuid())})
	go func() {
		_, _, err := s.makeOnce(ctx, Repeatable{"k"}, "test", nil, func(ctx context.Context) ([]engine.Info, error) {
			close(begun)
			<-ctx.Done()
			return nil, ctx.Err()
		})
		ended <- err
	}()
	<-begun
	other, err := requestOf(Caller{Local: true, UID: alice.UID}, "k", "", nil)
	must(t, err)
	s.running.cancel(other.Key)
	if len(ended) > 0 {
		t.Fatal("another user has canceled it")
	}
	must(t, s.c.CancelRequest(t.Context(), "k"))
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}

	// One that was done.
	v, err := s.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: "job", Key: "k2"})
	must(t, err, s.c.CancelRequest(t.Context(), "k2"))
	again, err := s.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: "job", Key: "k2"})
	must(t, err)
	if again.ID != v.ID {
		t.Errorf("%s, then %s", v.ID, again.ID)
	}
}
