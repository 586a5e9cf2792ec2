package service

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/client"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/engine/check"
	"pando/internal/observe/doctor"
	"pando/internal/remote/replicate"
)

func cloneOf(from, name string) engine.CloneRequest {
	return engine.CloneRequest{From: ref.Ref{Name: from}, Name: ref.MustName(name)}
}

// TestOperations runs every verb that is an operation.
func TestOperations(t *testing.T) {
	s := withGolden(t, reflink.Name)
	ctx, c := t.Context(), s.c
	v, err := c.Clone(ctx, client.CloneRequest{From: "web", Name: "job", Make: client.Make{Mount: true}})
	must(t, err)
	must(t, os.WriteFile(filepath.Join(v.Mountpoint, "own"), []byte("mine"), 0o644))

	op, err := c.Publish(ctx, "web", client.PublishRequest{Volume: "job"})
	if g := done[client.Object](s, op, err); g.Generation != 2 || g.Golden != "web" {
		t.Errorf("published %+v", g)
	}
	_, err = c.Clone(ctx, client.CloneRequest{From: "web@1", Name: "old"})
	must(t, err)
	op, err = c.Rebase(ctx, "old", "web", "")
	if r := done[client.Object](s, op, err); r.Generation != 2 {
		t.Errorf("rebased: %+v", r)
	}
	must(t, c.RemoveGeneration(ctx, "web", 1))
	if r, err := c.Resize(ctx, "old", 96<<20); err != nil || r.SizeBytes != 96<<20 {
		t.Errorf("resized: %+v, %v", r, err)
	}
	op, err = c.Flatten(ctx, "old")
	done[client.Object](s, op, err)
	op, err = c.GC(ctx)
	done[map[string]any](s, op, err)
	op, err = c.Prune(ctx, client.PruneRequest{IdleSeconds: 3600, DryRun: true})
	if r := done[map[string]any](s, op, err); r["dry_run"] != true {
		t.Errorf("prune: %v", r)
	}
	op, err = c.Fsck(ctx, nil, false)
	if r := done[map[string]any](s, op, err); r["ok"] != true {
		t.Errorf("fsck: %v", r)
	}
	op, err = c.Doctor(ctx, doctor.Checks()[0][0])
	if r := done[map[string]any](s, op, err); r["checks"] == nil {
		t.Errorf("doctor: %v", r)
	}
	op, err = c.Doctor(ctx, "nix")
	must(t, err)
	_, err = c.Wait(ctx, op.ID, nil)
	want(t, "an unknown check", err, client.Invalid, http.StatusBadRequest)

	// Remotes.
	store := t.TempDir()
	_, err = replicate.Add(ctx, s.e, replicate.AddRequest{Name: "backup", URL: "file://" + store, MustCreate: true})
	must(t, err)
	remotes, err := c.Remotes(ctx)
	if err != nil || len(remotes) != 1 || remotes[0].Name != "backup" {
		t.Errorf("remotes: %+v, %v", remotes, err)
	}
	op, err = c.Push(ctx, "backup", client.PushRequest{Refs: []string{"job"}})
	if r := done[[]map[string]any](s, op, err); len(r) == 0 {
		t.Errorf("push: %v", r)
	}
	op, err = c.Verify(ctx, "backup", client.VerifyRequest{ReadPercent: 100})
	if r := done[map[string]any](s, op, err); r["total_problems"] != 0.0 {
		t.Errorf("verify: %v", r)
	}
	op, err = c.Pull(ctx, "backup", client.PullRequest{Ref: "job", As: "back"})
	if r := done[client.Object](s, op, err); r.Name != "back" {
		t.Errorf("pull: %+v", r)
	}
	there, err := c.RemoteVolumes(ctx, "backup")
	must(t, err)
	if i := slices.IndexFunc(there, func(v client.RemoteVolume) bool { return v.Name == "job" }); i < 0 ||
		there[i].Points != 1 || there[i].NewestPoint == nil || there[i].NewestPoint.SizeBytes == 0 {
		t.Errorf("on the remote: %+v", there)
	}
	_, err = c.PruneRemote(ctx, "backup", client.RemotePruneRequest{Names: []string{"job"}})
	want(t, "a prune of one volume without a rule", err, client.Invalid, http.StatusBadRequest)
	_, err = c.Snapshot(ctx, "job", client.SnapshotRequest{Name: "newer"})
	must(t, err)
	op, err = c.Push(ctx, "backup", client.PushRequest{Refs: []string{"job@newer"}})
	done[[]map[string]any](s, op, err)
	op, err = c.PruneRemote(ctx, "backup", client.RemotePruneRequest{Names: []string{"job"}, KeepLast: 1})
	if r := done[replicate.Pruned](s, op, err); len(r.Points) != 1 || r.Points[0].Volume != "job" {
		t.Errorf("prune of a remote: %+v", r)
	}
	_, err = c.RemoteVolumes(ctx, "nix")
	want(t, "an unknown remote", err, client.NotFound, http.StatusNotFound)
	_, err = c.Push(ctx, "nix", client.PushRequest{All: true})
	want(t, "an unknown remote", err, client.NotFound, http.StatusNotFound)

	_, err = c.Bench(ctx, "clone", map[string]any{"golden": "nix"})
	want(t, "a measurement of nothing", err, client.NotFound, http.StatusNotFound)

	// What fails says why, and is remembered.
	op, err = c.Rebase(ctx, "nix", "web", "")
	must(t, err)
	ended, err := c.Wait(ctx, op.ID, nil)
	if !client.IsKind(err, client.NotFound) || ended.State != stateFailed || ended.By != userName(uint32(os.Getuid())) {
		t.Errorf("%+v, %v", ended, err)
	}
	all, err := c.Operations(ctx)
	must(t, err)
	if len(all) < 10 || all[0].ID != op.ID || all[0].Result != nil {
		t.Errorf("%d operations, the newest %+v", len(all), all[0])
	}
	_, err = c.Operation(ctx, "nix")
	want(t, "an unknown operation", err, client.NotFound, http.StatusNotFound)
}

// begun begins an operation that does what fn does.
func begun(t *testing.T, s *served, fn func(context.Context, *progress.Tracker) (any, error)) string {
	t.Helper()
	out, err := s.start(context.WithValue(t.Context(), callerKey{}, Caller{Token: "t"}), "test", "x", fn)
	must(t, err)
	return out.Body.ID
}

// untilCanceled is an operation that ends when it is canceled.
func untilCanceled(ctx context.Context, t *progress.Tracker) (any, error) {
	t.Start("waiting", 7, 0)
	<-ctx.Done()
	return nil, errs.Wrap("test", "x", ctx.Err())
}

// TestCancel: an operation that is canceled ends as canceled, and one that waits says how far it is.
func TestCancel(t *testing.T) {
	s := serve(t, newPool(t, plain.Name))
	id := begun(t, s, untilCanceled)
	for {
		op, err := s.c.Operation(t.Context(), id)
		must(t, err)
		if op.Progress.Stage == "waiting" {
			if op.Progress.TotalFiles != 7 || !op.Running() || op.By != "token t" {
				t.Errorf("%+v", op)
			}
			break
		}
		time.Sleep(time.Millisecond)
	}
	if status, body := s.raw("GET", "/v1/operations/"+id+"/wait?timeout_seconds=0.01", ""); status != 200 {
		t.Errorf("a wait that ends early: %d %s", status, body)
	}
	must(t, s.c.Cancel(t.Context(), id))
	op, err := s.c.Wait(t.Context(), id, nil)
	if op.State != stateCanceled || !client.IsKind(err, client.Canceled) {
		t.Errorf("%+v, %v", op, err)
	}
	must(t, s.c.Cancel(t.Context(), id)) // it has ended
}

// TestOneMeasurementAtATime: a second one would be measured by the first, and is refused until that has ended.
func TestOneMeasurementAtATime(t *testing.T) {
	s := serve(t, newPool(t, plain.Name))
	begin := func(verb string) (*work, error) {
		return s.operations.begin(verb, "", Caller{Local: true}, func() {})
	}
	end := func(w *work) {
		w.finish(httpWords{}, nil, nil)
		s.operations.running.Done()
	}

	first, err := begin("bench sync")
	must(t, err)
	second, err := begin("bench clone")
	if !errs.Is(err, errs.InUse) || !strings.Contains(errs.HintOf(err), first.op.ID) {
		t.Errorf("a second one: %v", err)
	}
	if err == nil {
		end(second)
	}
	other, err := begin("gc")
	must(t, err)
	end(first)
	end(other)

	second, err = begin("bench clone")
	must(t, err)
	end(second)
}

// TestOperationsAreBounded: not too many run, and not too many are remembered.
func TestOperationsAreBounded(t *testing.T) {
	s := serve(t, newPool(t, plain.Name))
	var ids []string
	for range maxRunning {
		ids = append(ids, begun(t, s, untilCanceled))
	}
	_, err := s.c.GC(t.Context())
	want(t, "one more", err, client.InUse, http.StatusConflict)
	for _, id := range ids {
		must(t, s.c.Cancel(t.Context(), id))
		_, _ = s.c.Wait(t.Context(), id, nil) // canceled
	}

	for range maxFinished + 50 {
		w, err := s.operations.begin("test", "", Caller{Local: true}, func() {})
		must(t, err)
		w.finish(httpWords{}, nil, nil)
		s.operations.running.Done()
	}
	if n := len(s.operations.list(Caller{Local: true})); n > maxFinished || n < maxFinished-1 {
		t.Errorf("%d are remembered", n)
	}
	if len(s.operations.byID) != len(s.operations.order) {
		t.Errorf("%d and %d", len(s.operations.byID), len(s.operations.order))
	}

	// A result that is too long is not kept, and the operation says so.
	id := begun(t, s, func(context.Context, *progress.Tracker) (any, error) {
		return string(make([]byte, maxResult)), nil
	})
	op, err := s.c.Wait(t.Context(), id, nil)
	if err != nil || len(op.Result) != 0 || len(op.Warnings) != 1 {
		t.Errorf("%+v, %v", op, err)
	}
}

// TestResultsHaveNoCommands: messages in results speak of requests.
func TestResultsHaveNoCommands(t *testing.T) {
	s := serve(t, newPool(t, plain.Name))
	id := begun(t, s, func(context.Context, *progress.Tracker) (any, error) {
		return map[string]errs.Message{"m": errs.Messagef("run %s", errs.Run("gc"))}, nil
	})
	op, err := s.c.Wait(t.Context(), id, nil)
	must(t, err)
	var got map[string]string
	must(t, json.Unmarshal(op.Result, &got))
	if got["m"] != "run POST /v1/gc" {
		t.Errorf("%v", got)
	}
}

// TestShutDown: at its end the service lets short work finish, cancels long work after the grace period, ends streams
// and refuses new work.
func TestShutDown(t *testing.T) {
	dir := newPool(t, plain.Name)
	s := serve(t, dir, func(o *Options) { o.Grace = 500 * time.Millisecond })
	finished, canceled := make(chan bool, 1), make(chan bool, 1)
	begun(t, s, func(ctx context.Context, _ *progress.Tracker) (any, error) {
		time.Sleep(200 * time.Millisecond)
		finished <- ctx.Err() == nil
		return nil, nil
	})
	begun(t, s, func(ctx context.Context, _ *progress.Tracker) (any, error) {
		<-ctx.Done()
		time.Sleep(100 * time.Millisecond) // it cleans up
		canceled <- true
		return nil, ctx.Err()
	})
	streamEnded := make(chan error, 1)
	ready := make(chan bool)
	go func() {
		resp, err := overSocket(s.socket).Get("http://pando/v1/events")
		close(ready)
		if err == nil {
			_, err = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		}
		streamEnded <- err
	}()
	<-ready

	begin := time.Now()
	s.stop()
	if took := time.Since(begin); took > 8*time.Second {
		t.Errorf("it took %v", took)
	}
	select {
	case ok := <-finished:
		if !ok {
			t.Error("short work was canceled")
		}
	default:
		t.Error("short work was not waited for")
	}
	select {
	case <-canceled:
	default:
		t.Error("long work was not waited for")
	}
	if err := <-streamEnded; err != nil {
		t.Errorf("the stream: %v", err)
	}
	if _, err := s.start(context.Background(), "test", "", untilCanceled); !errs.Is(err, errs.Canceled) {
		t.Errorf("work after the end: %v", err)
	}
	if _, err := os.Lstat(s.socket); err == nil {
		t.Error("the socket is left")
	}
}

// TestShutDownDuringWork: an import, a publish and a push that run when the service ends are finished or undone, and
// what they said is true.
func TestShutDownDuringWork(t *testing.T) {
	dir := newPool(t, reflink.Name)
	s := serve(t, dir, func(o *Options) { o.Grace = 50 * time.Millisecond })
	ctx := t.Context()
	_, err := s.c.Import(ctx, "web", archive(t, map[string]string{"file": "v1"}),
		client.ImportOptions{SizeBytes: 256 << 20})
	must(t, err)
	v, err := s.c.Clone(ctx, client.CloneRequest{From: "web", Name: "job", Make: client.Make{Mount: true}})
	must(t, err)
	noise := make([]byte, 128<<20)
	_, _ = rand.Read(noise) // never fails
	must(t, os.WriteFile(filepath.Join(v.Mountpoint, "noise"), noise, 0o644))
	_, err = replicate.Add(ctx, s.e, replicate.AddRequest{Name: "backup", URL: "file://" + t.TempDir(), MustCreate: true})
	must(t, err)

	// Begin long work: an archive that does not end, a push and a publish, and somebody who watches.
	body, archiver := io.Pipe()
	imported, watched := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := s.c.Import(ctx, "late", body, client.ImportOptions{SizeBytes: 64 << 20})
		imported <- err
	}()
	go func() { _, _ = io.CopyN(archiver, archive(t, map[string]string{"file": "v1"}), 512) }()
	resp, err := overSocket(s.socket).Get("http://pando/v1/events")
	must(t, err)
	defer resp.Body.Close()
	go func() {
		_, err := io.Copy(io.Discard, resp.Body)
		watched <- err
	}()
	push, err := s.c.Push(ctx, "backup", client.PushRequest{Refs: []string{"job"}})
	must(t, err)
	publish, err := s.c.Publish(ctx, "next", client.PublishRequest{Volume: "job"})
	must(t, err)
	for running := 0; running < 3 && !ended(s, push.ID) && !ended(s, publish.ID); time.Sleep(time.Millisecond) {
		service, err := s.c.Service(ctx)
		must(t, err)
		running = service.Running
	}

	s.stop()
	if err := <-imported; err == nil {
		t.Error("half an archive was imported")
	}
	if err := <-watched; err != nil {
		t.Errorf("the stream of events: %v", err)
	}
	after := map[string]string{}
	for _, id := range []string{push.ID, publish.ID} {
		w, err := s.operations.find(id, Caller{Token: "t"})
		must(t, err)
		op := w.describe()
		after[op.Verb] = op.State
		if op.State != stateDone && op.State != stateCanceled {
			t.Errorf("%s is %s: %+v", op.Verb, op.State, op.Error)
		}
	}
	t.Logf("at the end: %v", after)

	// The next service finds nothing to undo.
	e, err := engine.Open(ctx, dir, drivers)
	must(t, err)
	defer e.Close()
	r, err := e.Maintain(ctx)
	if err != nil || r.Undone != 0 {
		t.Errorf("left to undo: %+v, %v", r, err)
	}
	goldens, err := e.Goldens(ctx)
	must(t, err)
	if want := map[string]int{stateDone: 2, stateCanceled: 1}[after["publish"]]; len(goldens) != want {
		t.Errorf("the publish is %v, but there are %d goldens", after, len(goldens))
	}
	checked, err := engine.Fsck(ctx, dir, check.Request{}, drivers)
	if err != nil || !checked.OK {
		t.Errorf("fsck: %+v, %v", checked, err)
	}
}

// ended reports whether an operation has ended.
func ended(s *served, id string) bool {
	w, err := s.operations.find(id, Caller{Token: "t"})
	must(s.t, err)
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}
