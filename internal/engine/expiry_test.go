package engine_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

// TestExpiry: a watch destroys what has expired, tells when the next volume will, and leaves what is pinned or in use.
func TestExpiry(t *testing.T) {
	e := newPool(t, testfs.New(t, "xfs", 1<<30).Dir(), engine.InitRequest{Driver: reflink.Name})
	importTree(t, e, "g", source(t))
	ctx, watch := t.Context(), e.WatchExpiry()
	brief := func(name string, ttl time.Duration, mount bool) engine.Info {
		t.Helper()
		out, err := e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName(name), TTL: ttl,
			Mount: mount})
		must(t, err)
		return out[0]
	}
	round := func() engine.ExpiryRound {
		t.Helper()
		r, err := watch.DestroyDue(ctx)
		must(t, err)
		return r
	}

	if r := round(); !r.Next.IsZero() || !r.Again.IsZero() || len(r.Destroyed) > 0 {
		t.Errorf("nothing expires: %+v", r)
	}
	later := brief("later", time.Hour, false)
	brief("gone", time.Nanosecond, false)
	brief("pinned", time.Nanosecond, false)
	_, err := e.Pin(ctx, ref.Ref{Name: "pinned"}, time.Hour)
	must(t, err)
	used := brief("used", time.Nanosecond, true)
	busy, err := os.Open(used.Mountpoint)
	must(t, err)

	r := round()
	if strings.Join(r.Destroyed, " ") != "gone" || r.Waiting != 1 || !r.Next.Equal(*later.ExpiresAt) {
		t.Errorf("got %+v, want next at %v", r, later.ExpiresAt)
	}
	if in := time.Until(r.Again); in > time.Second || in < 0 {
		t.Errorf("the volume in use is tried again in %v", in)
	}

	// It is not tried in each round, and more and more rarely.
	first := r.Again
	if r = round(); !r.Again.Equal(first) || r.Waiting != 1 {
		t.Errorf("at once: %+v", r)
	}
	time.Sleep(time.Until(first))
	if r = round(); r.Again.Sub(first) < 2*time.Second || r.Waiting != 1 {
		t.Errorf("the second time: again after %v", r.Again.Sub(first))
	}
	must(t, busy.Close())
	time.Sleep(time.Until(r.Again))
	if r = round(); strings.Join(r.Destroyed, " ") != "used" || r.Waiting != 0 {
		t.Errorf("when it is free: %+v", r)
	}

	_, err = e.Unpin(ctx, ref.Ref{Name: "pinned"})
	must(t, err)
	if r = round(); strings.Join(r.Destroyed, " ") != "pinned" {
		t.Errorf("unpinned: %+v", r)
	}
}

// TestTaskRuns: one process at a time runs a task, and the next one knows when.
func TestTaskRuns(t *testing.T) {
	dir := testfs.New(t, "ext4", 256<<20).Dir()
	e := newPool(t, dir, engine.InitRequest{Driver: plain.Name})
	other, err := engine.Open(t.Context(), e.Dir(), drivers)
	must(t, err)
	defer other.Close()

	first, err := e.BeginTask(t.Context(), "nightly")
	must(t, err)
	if !first.Last.IsZero() {
		t.Errorf("the first run: last at %v", first.Last)
	}
	if r, err := other.BeginTask(t.Context(), "nightly"); r != nil || err != nil {
		t.Errorf("at the same time: %v, %v", r, err)
	}
	hourly, err := other.BeginTask(t.Context(), "hourly")
	must(t, err)
	hourly.End() // it has failed
	must(t, first.Done(t.Context()))
	first.End()

	second, err := other.BeginTask(t.Context(), "nightly")
	must(t, err)
	defer second.End()
	if age := time.Since(second.Last); age < 0 || age > time.Minute {
		t.Errorf("the second run: last %v ago", age)
	}
	hourly, err = e.BeginTask(t.Context(), "hourly")
	must(t, err)
	defer hourly.End()
	if !hourly.Last.IsZero() {
		t.Errorf("a run that has failed counts: %v", hourly.Last)
	}
}

// TestSnapshotsWith lists the snapshots of one volume with a label.
func TestSnapshotsWith(t *testing.T) {
	e := newPool(t, testfs.New(t, "ext4", 256<<20).Dir(), engine.InitRequest{Driver: plain.Name})
	importTree(t, e, "g", source(t))
	for _, v := range []string{"a", "b"} {
		clone(t, e, "g", v, false)
		for i, label := range []string{"x", "y", "x"} {
			labels, err := driver.NewLabels("test", map[string]string{"task": label})
			must(t, err)
			_, err = e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName(v),
				Name: ref.MustName(fmt.Sprint("s", i)), Labels: labels})
			must(t, err)
		}
	}
	only, err := driver.ParseLabelSelector("test", "task=x")
	must(t, err)
	all, err := e.SnapshotsWith(t.Context(), ref.MustName("a"), only)
	must(t, err)
	if len(all) != 2 || all[0].Name != "a@s0" || all[1].Name != "a@s2" || all[0].CreatedAt.After(all[1].CreatedAt) {
		t.Errorf("got %+v", all)
	}
	if _, err := e.SnapshotsWith(t.Context(), ref.MustName("none"), only); !errs.Is(err, errs.NotFound) {
		t.Errorf("no volume: %v", err)
	}
}
