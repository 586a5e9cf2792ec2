//go:build linux && (amd64 || arm64)

package crash

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// fullDisk is a kind of pool, and what of it is used up.
type fullDisk struct {
	kind
	room string // directory on the filesystem that becomes full: relative to the pool's parent

	inodes bool // it is inodes that are used up
}

// hostBytes is the size of the filesystems below the pools.
const hostBytes = 700 << 20

func on(make func(t *testing.T) string) func(t *testing.T) string {
	return func(t *testing.T) string { return filepath.Join(make(t), "pool") }
}

func ext4Host(t *testing.T) string { return testfs.Ext4(t, hostBytes) }

// fewInodes is a filesystem with room for a pool, but not for many more files.
func fewInodes(t *testing.T) string { return testfs.Ext4With(t, hostBytes, "-N", "512") }

func xfsHost(t *testing.T) string { return testfs.XFS(t, hostBytes) }

func btrfsHost(t *testing.T) string { return testfs.Btrfs(t, hostBytes) }

var (
	fileInit  = []string{"--driver", "reflink", "--loop", "--size", "400M"}
	imageSize = []string{"--size", "64M"}
)

var fullDisks = []fullDisk{
	{kind: kind{name: "file-pool", init: fileInit, size: imageSize, dir: on(ext4Host)}, room: "pool/data"},
	{kind: kind{name: "file-host", init: fileInit, size: imageSize, dir: on(ext4Host)}, room: "."},
	{kind: kind{name: "file-inodes", init: fileInit, size: imageSize, dir: on(fewInodes)}, room: ".", inodes: true},
	{kind: kind{name: "xfs", init: []string{"--driver", "reflink"}, size: imageSize, dir: on(xfsHost)}, room: "."},
	{kind: kind{name: "btrfs", init: []string{"--driver", "btrfs"}, dir: on(btrfsHost)}, room: "."},
	{kind: kind{name: "plain", init: []string{"--driver", "plain"}, dir: on(ext4Host)}, room: "."},
	{kind: kind{name: "plain-inodes", init: []string{"--driver", "plain"}, dir: on(fewInodes)}, room: ".", inodes: true},
}

// frees are the operations that must work on a full disk.
var frees = []string{"umount", "destroy", "destroy-mounted", "destroy-with-snapshots", "golden-rm", "prune", "gc"}

// fullWorld is a pool on a disk that can be filled.
type fullWorld struct {
	*world
	disk   fullDisk
	synced []byte // content of a file that was synced before the disk was full
}

func (w *fullWorld) filler() string {
	return filepath.Join(filepath.Dir(w.dir), w.disk.room, "filler")
}

// fill leaves nothing for anybody. It is called while the program under test stands still.
func (w *fullWorld) fill() error {
	dir := w.filler()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	for i := 0; w.disk.inodes; i++ {
		f, err := os.Create(filepath.Join(dir, strconv.Itoa(i)))
		if errs.KindOf(err) == errs.NoSpace {
			return nil
		}
		if err != nil {
			return err
		}
		f.Close()
	}
	f, err := os.Create(filepath.Join(dir, "blocks"))
	if err != nil {
		return err
	}
	defer f.Close()
	end := int64(0)
	for step := int64(256 << 20); step >= 4096; {
		switch err := unix.Fallocate(int(f.Fd()), 0, end, step); {
		case err == nil:
			end += step
		case errs.KindOf(err) == errs.NoSpace:
			step /= 2
		case !errors.Is(err, unix.EINTR):
			return err
		}
	}
	return nil
}

func (w *fullWorld) empty() {
	w.t.Helper()
	if err := os.RemoveAll(w.filler()); err != nil {
		w.t.Fatal(err)
	}
}

func (w *fullWorld) keepFile() string { return filepath.Join(w.dir, "mnt", "keep", "synced") }

// writeSynced writes a file into a volume that no operation touches, and syncs it.
func (w *fullWorld) writeSynced() {
	w.t.Helper()
	w.pando("clone", "g", "keep", "--mount")
	w.synced = bytes.Repeat([]byte("synced before the disk was full\n"), 32<<10)
	f, err := os.Create(w.keepFile())
	if err == nil {
		_, err = f.Write(w.synced)
	}
	if err == nil {
		err = unix.Syncfs(int(f.Fd()))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		w.t.Fatal(err)
	}
}

func (w *fullWorld) checkSynced() {
	w.t.Helper()
	b, err := os.ReadFile(w.keepFile())
	if err != nil || !bytes.Equal(b, w.synced) {
		w.t.Errorf("LOST: %d of %d synced bytes are there, or they are others (%v)", len(b), len(w.synced), err)
	}
}

// takeDown removes a pool with which a test has failed.
func (w *fullWorld) takeDown() {
	if _, err := os.Stat(w.dir); err == nil {
		_ = os.RemoveAll(w.filler())
		_, _ = w.try("deinit", "--force")
	}
}

// umount unmounts a volume, which may have to give up what could not be written.
func (w *fullWorld) umount(volume string) {
	w.t.Helper()
	if _, err := w.try("umount", volume); err != nil {
		w.pando("umount", volume)
	}
}

// TestFullDiskAtEveryStep fills the disk before each step by which a verb changes anything: the
// verb ends with a success or because there is no space, in the old state or the new one; what
// frees space goes on working, with no space at all; and what was synced is there.
func TestFullDiskAtEveryStep(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: a filesystem that can be filled needs root: run the tests as root")
	}
	for _, d := range fullDisks {
		t.Run(d.name, func(t *testing.T) {
			t.Parallel()
			drawn, outer := fullOperations(t)
			for i, op := range drawn {
				t.Run(op.name, func(t *testing.T) {
					w := &fullWorld{world: newWorld(t, d.kind), disk: d}
					t.Cleanup(w.takeDown)
					w.initPool()
					w.importGolden("g")
					w.writeSynced()
					w.everyStep(t, op, outer[i])

					w.t = t
					w.umount("keep")
					w.pando("mount", "keep")
					w.checkSynced()
					w.pando("deinit", "--force")
					w.nothingLeft()
				})
			}
		})
	}
}

// fullOperations are all operations, or one that frees space, which is drawn, and one other. outer is of how many each
// is drawn.
func fullOperations(t *testing.T) (drawn []operation, outer []int) {
	isFree := func(op operation) bool { return slices.Contains(frees, op.name) }
	var free, others []operation
	for _, op := range operations {
		switch {
		case op.every > 1: // slow, and made of others
		case isFree(op):
			free = append(free, op)
		default:
			others = append(others, op)
		}
	}

	if testfs.Full() {
		return operations, slices.Repeat([]int{1}, len(operations))
	}
	drawn = []operation{free[faulttest.Draw(t, len(free), "free")], others[faulttest.Draw(t, len(others), "other")]}
	return drawn, []int{len(free), len(others)}
}

// everyStep strikes before each step, by default before one that is drawn.
func (w *fullWorld) everyStep(t *testing.T, op operation, outer int) {
	last := w.strike(t, op, -1)
	if last.ExitCode != 0 {
		t.Fatalf("undisturbed, it failed: %s", last.Stderr)
	}

	if at, err := strconv.Atoi(os.Getenv(faulttest.AtVariable)); err == nil {
		w.strike(t, op, at)
		return
	}
	steps := len(last.Steps)
	for at := faulttest.DrawInside(t, steps, outer); at < steps; at += faulttest.DrawStep(steps) {
		w.strike(t, op, at)
	}
}

// strike runs an operation with a disk that is full from a step on, and looks at what comes of it.
func (w *fullWorld) strike(t *testing.T, op operation, at int) (res faulttest.Result) {
	t.Helper()
	w.t = t
	w.prepareFull(op)
	before := w.visible()

	n, struck := 0, error(nil)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	res, err := faulttest.Run(ctx, append([]string{pando, "--pool", w.dir}, op.command(w.world)...), faulttest.Options{
		KillGroup: true,
		Plan: faulttest.Plan{Match: func(s faulttest.Step) bool {
			if n == at {
				struck = w.fill()
			}
			n++
			return true
		}}})
	if err = errors.Join(err, struck); err != nil {
		t.Fatal(err)
	}
	if at >= 0 {
		w.whileFull(op, res)
	}
	w.empty()
	w.afterwards(op, before, res)
	if t.Failed() {
		step := "none"
		if at >= 0 && at < len(res.Steps) {
			step = fmt.Sprint(res.Steps[at])
		}
		t.Fatalf("the disk was full from %s on; to repeat it: PANDO_SEED=%d %s=%d go test -run '^%s$'", step,
			faulttest.Seed(), faulttest.AtVariable, at, t.Name())
	}
	return res
}

// prepareFull makes the state that an operation begins with, whatever the last one has left.
func (w *fullWorld) prepareFull(op operation) {
	w.t.Helper()
	for _, v := range []string{"base", "victim"} {
		_, _ = w.try("unpin", v) // it may be missing
		w.gone(v)
		w.pando("clone", "g@1", v)
	}
	op.prepare(w.world)
	w.pando("ls", "-q")
}

// visible is the state without what is destroyed while the disk is full.
func (w *fullWorld) visible() string {
	return without(w.peek(), "volume victim ")
}

// whileFull checks that with no space at all an operation has ended as it must, and that others
// go on freeing some.
func (w *fullWorld) whileFull(op operation, res faulttest.Result) {
	w.t.Helper()
	noSpace := errs.NoSpace.Codes().Exit
	switch {
	case res.ExitCode == 0:
	case res.ExitCode != noSpace:
		w.t.Errorf("exit code %d, wanted 0 or %d: %s", res.ExitCode, noSpace, res.Stderr)
	case slices.Contains(frees, op.name) && op.name != "umount": // which reports, once, what cannot be written
		w.t.Errorf("it frees space, and failed: %s", res.Stderr)
	}
	if n := strings.Count(string(res.Stderr), "\n"); n > 12 {
		w.t.Errorf("it said %d lines: %s", n, res.Stderr)
	}
	free := [][]string{{"ls"}, {"destroy", "victim"}, {"gc"}}
	if op.name == "prune" { // which has taken it
		free = slices.Delete(free, 1, 2)
	}
	for _, args := range free {
		if err := w.fill(); err != nil { // also what has become free since
			w.t.Fatal(err)
		}
		if out, err := w.try(args...); err != nil {
			w.t.Errorf("pando %s on a full disk: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// afterwards checks what there is when there is space again.
func (w *fullWorld) afterwards(op operation, before string, res faulttest.Result) {
	w.t.Helper()
	w.pando("ls", "-q")
	after, wanted := w.visible(), w.outcome(op, before)
	switch {
	case after == wanted, res.ExitCode != 0 && (after == before || w.between(op, before, after)):
	default:
		w.t.Errorf("before:\n%safter:\n%swanted:\n%sexit %d: %s", before, after, wanted, res.ExitCode, res.Stderr)
	}
	w.checkSynced()
	w.check()
}
