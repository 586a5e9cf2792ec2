//go:build linux && (amd64 || arm64)

package engine_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/engine/check"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/testfs"
)

// childVariable makes the test binary a program that receives something, for tests
// that kill it. Its value is the pool, the way of receiving, a name, and "tree" if it receives a tree.
const childVariable = "PANDO_TEST_RECEIVE"

func TestMain(m *testing.M) {
	engine.Helper(os.Args)
	if spec := os.Getenv(childVariable); spec != "" {
		f := strings.Split(spec, "|")
		if err := receiveInChild(f[0], f[1], f[2], f[3] == "tree"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if dir := os.Getenv("STOPPED_SNAPSHOT_OF"); dir != "" {
		if err := engine.SnapshotStopped(dir, drivers); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if dir := os.Getenv("KILLED_UMOUNT_OF"); dir != "" {
		fmt.Fprintln(os.Stderr, engine.UmountKilled(dir, drivers))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

const childBytes = 2 << 20

// childContent is what a child called name writes at the beginning.
func childContent(name string) []byte { return bytes.Repeat([]byte(name+" "), 4096)[:4096] }

func childRequest(way, name string, base driver.ObjectID) receipt {
	q := receipt{ReceiveRequest: engine.ReceiveRequest{Volume: ref.MustName("new-" + name), Snapshot: ref.MustName(name),
		FS:        driver.None,
		SizeBytes: childBytes, Links: []engine.Link{{Repo: "r", Manifest: name}}}}
	receipts[way](&q.ReceiveRequest, base)
	if q.Golden { // the current one cannot be removed: there is always a newer one
		_, _ = fmt.Sscanf(name, "n%d", &q.Generation)
		q.Generation += 10
	}
	q.Image = func(_ context.Context, to engine.Target) error {
		if _, err := to.WriteAt(childContent(name), 0); err != nil {
			return err
		}
		return to.Zero(1<<20, 8192)
	}
	return q
}

func receiveInChild(dir, way, name string, tree bool) error {
	ctx := context.Background()
	e, err := engine.Open(ctx, dir, drivers, engine.ShortLived)
	if err != nil {
		return err
	}
	base, err := e.Transfer().Point(ctx, ref.Ref{Name: "v", At: "s"})
	if err != nil {
		return err
	}
	q := childRequest(way, name, base.ID)
	if tree {
		if err := asTree(ctx, e, &q); err != nil {
			return err
		}
	}
	_, err = q.into(ctx, e)
	return err
}

// asTree makes a request one of what v@later is.
func asTree(ctx context.Context, e *engine.Engine, q *receipt) error {
	later, err := e.Transfer().Point(ctx, ref.Ref{Name: "v", At: "later"})
	if err != nil {
		return err
	}
	var b bytes.Buffer
	q.FS, q.SizeBytes, q.Image, q.Stream, q.Tree = driver.Native, 0, nil, &b, true
	return e.Transfer().SendTree(ctx, engine.ReadRequest{Point: later.ID, Base: q.Base}, &b)
}

// TestReceiveKilled: a receive that is killed, or whose disk fails, at any step has
// happened or has not, and the next command leaves nothing of it.
func TestReceiveKilled(t *testing.T) {
	if err := faulttest.Available(); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	ways := []string{"volume from base", "update", "snapshot only", "golden", "generation"}
	for _, plan := range []faulttest.Plan{
		{Mode: faulttest.KillBefore},
		{Mode: faulttest.Fail, Errno: syscall.ENOSPC},
		{Mode: faulttest.Fail, Errno: syscall.EIO},
	} {
		for _, way := range ways {
			t.Run(fmt.Sprint(plan.Mode, " ", plan.Errno, " ", way), func(t *testing.T) {
				top := testfs.XFS(t, 400<<20)
				e := newPool(t, top, engine.InitRequest{Driver: reflink.Name, MinFreePercent: 1})
				rawGolden(t, e, "g", childBytes)
				clone(t, e, "g", "v", false)
				snapshot(t, e, "v", "s")
				if _, err := e.Keep(t.Context(), engine.KeepRequest{Golden: ref.MustName("g"), Generations: 2}); err != nil {
					t.Fatal(err)
				}
				k := &killed{t: t, e: e, way: way, base: point(t, e, "v@s").ID}
				plan.PathPrefix = []string{top}
				s := faulttest.Sweep{Plan: plan, Every: 6}
				if plan.Mode == faulttest.Fail {
					s.Every = 12
				}
				last := s.Each(t, k.run, k.check)
				if last.ExitCode != 0 || last.Signal != 0 {
					t.Fatalf("in the end: %d %v %s", last.ExitCode, last.Signal, last.Stderr)
				}
				k.check(last)
				if !s.Sampled() && (k.runs < 8 || k.undone < 2 || k.done < 1) {
					t.Errorf("%d runs, %d undone, %d done: that tests little", k.runs, k.undone, k.done)
				}
				t.Logf("%d runs, of which %d changed nothing", k.runs, k.undone)
			})
		}
	}
}

// TestReceiveTreeKilled: as TestReceiveKilled, of trees that come from any driver.
func TestReceiveTreeKilled(t *testing.T) {
	if err := faulttest.Available(); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	for _, plan := range []faulttest.Plan{
		{Mode: faulttest.KillBefore},
		{Mode: faulttest.Fail, Errno: syscall.ENOSPC},
		{Mode: faulttest.Fail, Errno: syscall.EIO},
	} {
		for _, kind := range []string{plain.Name, btrfs.Name} {
			ways := []string{"volume from base", "update", "snapshot only", "golden", "generation"}
			if plan.Mode == faulttest.Fail {
				ways = ways[:2]
			}
			for _, way := range ways {
				t.Run(fmt.Sprint(plan.Mode, " ", plan.Errno, " ", kind, " ", way), func(t *testing.T) {
					top := testfs.Btrfs(t, 300<<20)
					e := newPool(t, top, engine.InitRequest{Driver: kind, MinFreePercent: 1})
					importTree(t, e, "g", source(t))
					clone(t, e, "g", "v", false)
					snapshot(t, e, "v", "s")
					edit(t, e, "v", func(dir string) { write(t, filepath.Join(dir, "file"), "received") })
					snapshot(t, e, "v", "later")
					if _, err := e.Keep(t.Context(), engine.KeepRequest{Golden: ref.MustName("g"), Generations: 2}); err != nil {
						t.Fatal(err)
					}
					k := &killed{t: t, e: e, way: way, base: point(t, e, "v@s").ID, tree: true}
					plan.PathPrefix = []string{top}
					s := faulttest.Sweep{Plan: plan, Every: 80}
					last := s.Each(t, k.run, k.check)
					if last.ExitCode != 0 || last.Signal != 0 {
						t.Fatalf("in the end: %d %v %s", last.ExitCode, last.Signal, last.Stderr)
					}
					k.check(last)
					t.Logf("%d runs, of which %d changed nothing", k.runs, k.undone)
				})
			}
		}
	}
}

type killed struct {
	tree   bool
	t      *testing.T
	e      *engine.Engine
	way    string
	base   driver.ObjectID
	name   string
	before []string
	runs   int
	undone int
	done   int
}

func (k *killed) run(p faulttest.Plan) faulttest.Result {
	k.t.Helper()
	k.runs++
	k.name = fmt.Sprintf("n%d", k.runs)
	k.before = dump(k.t, k.e.Dir())
	kind := ""
	if k.tree {
		kind = "tree"
	}
	env := append(os.Environ(), childVariable+"="+strings.Join([]string{k.e.Dir(), k.way, k.name, kind}, "|"))
	res, err := faulttest.Run(k.t.Context(), []string{os.Args[0]}, faulttest.Options{Plan: p, Env: env, KillGroup: true})
	if err != nil {
		k.t.Fatal(err)
	}
	return res
}

// treeOf is the directory of a tree in its pool.
func treeOf(t *testing.T, e *engine.Engine, what string) string {
	t.Helper()
	d, err := e.Show(t.Context(), reference(t, what))
	if err != nil {
		t.Fatal(err)
	}
	found, err := filepath.Glob(filepath.Join(e.Dir(), "data", "objects", d.ID+".*"))
	found = slices.DeleteFunc(found, func(p string) bool { return filepath.Ext(p) == ".meta" })
	if err != nil || len(found) != 1 {
		t.Fatalf("%s lies in %v, %v", what, found, err)
	}
	return found[0]
}

// check recovers, looks at what there is, and takes it away.
func (k *killed) check(res faulttest.Result) {
	t := k.t
	t.Helper()
	e, recovered := maintained(t, k.e.Dir())
	defer e.Close()
	if len(recovered.Warnings) > 0 {
		t.Errorf("recovery: %q", recovered.Warnings)
	}
	nothingLeft(t, e)
	r := fsck(t, e.Dir(), false)
	r.Findings = slices.DeleteFunc(r.Findings, func(f check.Finding) bool {
		return f.Code == "live" // an empty file, until the next gc
	})
	if len(r.Findings) > 0 {
		t.Fatalf("fsck: %s", findings(r))
	}
	q := childRequest(k.way, k.name, k.base)
	what := q.Volume.At(q.Snapshot)
	if q.Golden {
		what.At = fmt.Sprint(q.Generation)
	}
	p, err := e.Transfer().Point(t.Context(), what)
	if errs.Is(err, errs.NotFound) {
		k.undone++
		sameDump(t, "not received", k.before, dump(t, e.Dir()))
		if res.ExitCode == 0 {
			t.Error("the program says that it is there")
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	k.done++
	want := []string{what.String()}
	if !q.Golden && !q.SnapshotOnly {
		want = append(want, q.Volume.String())
	}
	for _, w := range want {
		if k.tree {
			if b, err := os.ReadFile(filepath.Join(treeOf(t, e, w), "file")); err != nil || string(b) != "received" {
				t.Errorf("%s does not hold what was received: %q, %v", w, b, err)
			}
			continue
		}
		b, err := os.ReadFile(imageFile(t, e, w))
		if err != nil || !bytes.HasPrefix(b, childContent(k.name)) || !bytes.Equal(b[1<<20:1<<20+8192], make([]byte, 8192)) {
			t.Errorf("%s does not hold what was received (%v)", w, err)
		}
	}
	if l, err := e.Transfer().Links(t.Context(), "r"); err != nil ||
		!slices.Contains(l, engine.Link{Repo: "r", Manifest: k.name, Object: p.ID}) {
		t.Errorf("links %v, %v", l, err)
	}
	k.reset(e, q.ReceiveRequest)
}

// reset makes the pool as it was.
func (k *killed) reset(e *engine.Engine, q engine.ReceiveRequest) {
	t := k.t
	t.Helper()
	switch {
	case q.Golden && q.Update:
		return // its retention bounds them
	case q.Golden:
		if _, err := e.RemoveGolden(t.Context(), q.Volume.Ref()); err != nil {
			t.Fatal(err)
		}
		return
	case !q.Update && !q.SnapshotOnly:
		destroy(t, e, q.Volume.String())
		return
	case q.Update:
		if _, err := e.Rewind(t.Context(), engine.RewindRequest{Volume: ref.MustName("v"),
			Snapshot: ref.MustName("s")}); err != nil {
			t.Fatal(err)
		}
	}
	names, err := pooltest.SnapshotNames(t.Context(), e, "v")
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		if n != "s" && n != "later" {
			destroy(t, e, "v@"+n)
		}
	}
}
