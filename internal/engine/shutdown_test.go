package engine_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/logs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/testfs"
)

// runUntil runs something in a clone called v that lasts until done is closed or it is cancelled. It returns when that
// has begun; the error comes later.
func runUntil(t *testing.T, e *engine.Engine, done <-chan bool) <-chan error {
	t.Helper()
	begun, ended := make(chan bool), make(chan error, 1)
	go func() {
		q := engine.RunRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v")}
		_, err := e.RunFunc(t.Context(), q, func(ctx context.Context, _ api.Object) error {
			close(begun)
			select {
			case <-done:
				// The call may do as much as it wants, by other calls, too.
				_, err := e.Import(ctx, engine.ImportRequest{Name: ref.MustName("h"), Source: source(t), Update: true})
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		ended <- err
	}()
	<-begun
	return ended
}

// isClosed reports whether a call is refused because the pool is being closed.
func isClosed(err error) bool {
	return errs.Is(err, errs.Canceled) && strings.HasSuffix(err.Error(), "the pool is being closed")
}

// TestShutdown: calls that have begun end, or are cancelled, before the pool is closed. No others begin, and nothing is
// left.
func TestShutdown(t *testing.T) {
	oneKind(t, func(t *testing.T, first *engine.Engine, _ string) {
		importTree(t, first, "g", source(t))
		first.Close()

		for _, patient := range []bool{true, false} {
			e := open(t, first.Dir())
			done := make(chan bool)
			running := runUntil(t, e, done)
			ctx, hurry := context.WithCancel(t.Context())
			closed := make(chan error, 1)
			go func() { closed <- e.Shutdown(ctx) }()

			// Others are refused from some moment on, and can read until it is over.
			pin := func() error {
				_, err := e.Pin(t.Context(), engine.PinRequest{Ref: ref.Ref{Name: "g"}})
				return err
			}
			err := pin()
			for err == nil {
				err = pin()
			}
			if !isClosed(err) {
				t.Errorf("another call: %v", err)
			}
			if _, err := e.Show(t.Context(), ref.Ref{Name: "v"}); err != nil {
				t.Errorf("cannot read: %v", err)
			}
			select {
			case err := <-closed:
				t.Errorf("did not wait for the call: %v", err)
			default:
			}

			if patient {
				close(done)
			} else {
				hurry()
			}
			ran, err := <-running, <-closed
			if patient && (ran != nil || err != nil) {
				t.Errorf("patient: the call %v, Shutdown %v", ran, err)
			}
			if !patient && (!errors.Is(ran, context.Canceled) || !errs.Is(err, errs.Canceled)) {
				t.Errorf("in a hurry: the call %v, Shutdown %v", ran, err)
			}
			hurry()

			if _, err := e.Volumes(t.Context(), engine.VolumesRequest{}); !errs.Is(err, errs.Canceled) {
				t.Errorf("a list afterwards: %v", err)
			}
			if err := pin(); !errs.Is(err, errs.Canceled) {
				t.Errorf("a call afterwards: %v", err)
			}
			if left := testfs.OpenFiles(t, e.Dir()); len(left) > 0 {
				t.Errorf("still open: %q", left)
			}
			again, r := maintained(t, e.Dir())
			if r.Undone+r.Reclaimed > 0 || len(r.Warnings) > 0 {
				t.Errorf("left to clean up: %+v", r)
			}
			_, err = again.Unpin(t.Context(), ref.Ref{Name: "g"})
			must(t, err)
			healthy(t, again)
			must(t, again.Shutdown(t.Context())) // nobody is at work
		}
	})
}

// TestMaintainGoesByItsClock: the time that Maintain is given decides what has expired, and which pins have ended.
func TestMaintainGoesByItsClock(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
		importTree(t, e, "g", source(t))
		for _, name := range []string{"v", "pinned", "for-ever"} {
			q := engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName(name), TTL: time.Hour}
			_, err := e.Clone(t.Context(), q)
			must(t, err)
		}
		_, err := e.Pin(t.Context(), engine.PinRequest{Ref: ref.Ref{Name: "pinned"}, For: 2 * time.Hour})
		must(t, err)
		_, err = e.Pin(t.Context(), engine.PinRequest{Ref: ref.Ref{Name: "for-ever"}})
		must(t, err)

		for _, step := range []struct {
			after   time.Duration
			expired int
			stay    string
		}{{0, 0, "for-ever pinned v"}, {59 * time.Minute, 0, "for-ever pinned v"},
			{61 * time.Minute, 1, "for-ever pinned"}, {3 * time.Hour, 1, "for-ever"},
			{180 * 365 * 24 * time.Hour, 0, "for-ever"}, {math.MaxInt64, 0, "for-ever"}} {
			r, err := e.Maintain(t.Context(), time.Now().Add(step.after))
			must(t, err)
			names, err := pooltest.VolumeNames(t.Context(), e)
			must(t, err)
			if got := strings.Join(names, " "); r.Expired != step.expired || got != step.stay || len(r.Warnings) > 0 {
				t.Errorf("after %v: %+v, %q stay", step.after, r, got)
			}
		}
	})
}

// TestLog: operations say in the log what they are and how they end, each once, whoever is called within them.
func TestLog(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
		importTree(t, e, "g", source(t))
		var out bytes.Buffer
		ctx := logs.With(t.Context(), slog.New(slog.NewJSONHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})))
		q := engine.RunRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v")}
		_, err := e.RunFunc(ctx, q, func(context.Context, api.Object) error { return nil })
		must(t, err)
		broken := errors.New("cannot get https://user:secret@host/x")
		if _, err = e.RunFunc(ctx, q, func(context.Context, api.Object) error { return broken }); !errors.Is(err, broken) {
			t.Fatal(err)
		}
		if _, err = e.Transfer().OpenImage(ctx, engine.ReadRequest{Point: "nothing"}); !errs.Is(err, errs.NotFound) {
			t.Fatal(err)
		}
		if _, err = e.Destroy(ctx, toDestroy("nothing")); !errs.Is(err, errs.NotFound) {
			t.Fatal(err)
		}
		lasting := engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("old"), TTL: time.Hour}
		_, err = e.Clone(t.Context(), lasting)
		must(t, err)
		_, err = e.Maintain(ctx, time.Now().Add(2*time.Hour))
		must(t, err)

		var got []string
		for line := range strings.Lines(out.String()) {
			var l struct {
				Level, Msg, Op, Kind, Error string
				Took, Expired               int64
			}
			must(t, json.Unmarshal([]byte(line), &l))
			if (l.Took > 0) != (l.Msg == "done" || l.Msg == "failed") || (l.Expired == 1) != (l.Msg == "cleaned up") {
				t.Errorf("logged %s", line)
			}
			said := strings.Join([]string{l.Level, l.Msg, l.Op, l.Kind, l.Error}, " ")
			got = append(got, strings.Join(strings.Fields(said), " "))
		}
		want := []string{"DEBUG begun run", "INFO done run",
			"DEBUG begun run", "ERROR failed run internal cannot get https://***@host/x",
			"DEBUG begun push", "INFO failed push not_found push nothing: there is no such object",
			"DEBUG begun destroy",
			"INFO failed destroy not_found destroy nothing: no volume has this name",
			"DEBUG begun recover", "INFO cleaned up", "INFO done recover"}
		if strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Errorf("logged\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	})
}
