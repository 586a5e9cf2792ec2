package replicate

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"pando/internal/api"
	"pando/internal/base/ref"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/storetest"
	"pando/internal/testing/testfs"
)

func init() { children["push"] = pushChild }

// pushChild pushes: POOL REF AT WHEN. If AT is not negative, the process is killed at
// that operation of the store, before or after its effect. It prints what was pushed,
// and the most memory it had.
func pushChild(args []string) error {
	name, err := ref.Parse("", args[1])
	if err != nil {
		return err
	}
	return killedAt([]string{args[0], args[2], args[3]}, func(ctx context.Context, e *engine.Engine, r *Remote) error {
		out, err := Push(ctx, e, r, PushRequest{Refs: []ref.Ref{name}})
		if err != nil {
			return err
		}
		peak, err := peakMemory()
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(childResult{Pushed: out, PeakBytes: peak})
	})
}

type childResult struct {
	Pushed    []Pushed
	PeakBytes int64
}

// peakMemory is the most memory that this process ever had.
func peakMemory() (int64, error) {
	f, err := os.Open("/proc/self/status")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if after, ok := strings.CutPrefix(s.Text(), "VmHWM:"); ok {
			n, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(after), " kB"), 10, 64)
			return n << 10, err
		}
	}
	return 0, errors.New("no VmHWM")
}

// TestPushKilled: a push is killed at each operation of the store. The next one goes
// on with its snapshot, uploads no segment again that was known to be there, and then
// pushes what was changed since.
func TestPushKilled(t *testing.T) {
	testfs.NotShort(t, "other processes do the work")
	w := newWorld(t)
	const size, data = 160 * mib, 40 * mib // three segments
	rp := w.open()
	n, resumed, spared := 0, 0, int64(0)
	for _, when := range []string{"before", "after"} {
		for at := faulttest.Draw(t, 3, when); ; at += faulttest.DrawStep(3) {
			n++
			golden := fmt.Sprintf("g%d", n)
			name := fmt.Sprintf("v%d", n)
			w.importImage(golden, size, func(f *os.File) { text(t, f, 5, 150*mib, mib) })
			w.clone(golden, name)
			w.edit(name, func(f *os.File) { noise(t, f, uint64(n), mib, data) })
			out, err := runChild(t, "push", w.dir, name, strconv.Itoa(at), when)
			var ended *exec.ExitError
			if err != nil && (!errors.As(err, &ended) || ended.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL) {
				t.Fatalf("the child failed: %v: %s", err, out)
			}
			killed := err != nil
			// What it knew.
			j, err := openJournal(t.Context(), w.r.dir, name)
			if err != nil {
				t.Fatal(err)
			}
			finished, covered := int64(len(j.finished)), int64(0)
			for _, p := range j.finishedParts() { // of what was changed: the last part goes on to the end of the volume
				covered += max(0, min(p.to, mib+data)-max(p.from, mib))
			}
			planned := j.plan
			j.releaseLock()
			w.edit(name, func(f *os.File) { noise(t, f, uint64(n)+1000, 100*mib, mib) })
			w.load()
			before := len(w.store.Calls())
			done := slices.DeleteFunc(w.push(name), func(p Pushed) bool { return p.Kind == api.KindGeneration })
			calls := w.store.Calls()[before:]
			last := done[len(done)-1]
			switch {
			case !killed && len(done) != 1:
				t.Fatalf("%s %d: nothing was killed, and %d points were pushed", when, at, len(done))
			case killed && planned != nil && len(done) != 2:
				t.Fatalf("%s %d: an unfinished push of %s, and then %d points", when, at, planned.Snapshot, len(done))
			case last.ReadBytes != mib && killed == (len(done) == 2):
				t.Fatalf("%s %d: the increment read %d bytes, 1 MiB was changed", when, at, last.ReadBytes)
			}
			if len(done) == 2 && finished > 0 {
				resumed++
				if !done[0].Resumed {
					t.Fatalf("%s %d: %d segments were there, and it was not gone on: %+v", when, at, finished, done[0])
				}
				if !done[0].Unchanged && done[0].Segments > 0 {
					left := data - covered
					if got := done[0].UploadedBytes; got > left+64<<10 {
						t.Fatalf("%s %d: %d bytes were dealt with, and %d uploaded of the %d left", when, at, covered, got, left)
					}
					if got := done[0].ReadBytes; got > left {
						t.Fatalf("%s %d: %d bytes were dealt with, and %d read of the %d left", when, at, covered, got, left)
					}
					spared += finished
				}
			}
			for _, c := range calls {
				if c.Op == storetest.Put && strings.HasPrefix(c.Key, "segments/") && c.Condition != objstore.IfAbsent {
					t.Fatalf("a segment is written over: %s", c)
				}
			}
			h := w.checkPoint(rp, name, w.image(name))
			for _, p := range h.Recent {
				checkWhole(t, rp, p.Manifest)
			}
			w.checkPoint(rp, golden, w.image(golden))
			if s := w.pushSnapshots(name); len(s) != 1 {
				t.Fatalf("%s %d: snapshots of pushes: %v", when, at, s)
			}
			if r, err := w.e.Destroy(t.Context(), toDestroy(name)); err != nil || len(r.Failed) > 0 {
				t.Fatal(err, r)
			}
			if _, err := w.e.RemoveGolden(t.Context(), ref.Ref{Name: golden}); err != nil {
				t.Fatal(err)
			}
			if !killed {
				break
			}
		}
	}
	t.Logf("%d pushes, %d resumed, %d segments not uploaded again", n, resumed, spared)
	if resumed == 0 || spared == 0 {
		t.Error("no push was resumed: nothing was tested")
	}
	w.clearLost(rp)
}

// checkWhole reads everything that a manifest refers to.
func checkWhole(t *testing.T, rp *repo.Repo, id repo.ID) {
	t.Helper()
	m, err := rp.Manifest(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	pieces, err := piecesBetween(t.Context(), rp.ReadNodes, &m, 0, repo.MaxVolumeBytes)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pieces {
		if _, err := rp.ReadFrames(t.Context(), []repo.Frame{p.Frame}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestPushMemory: however much there is to push, memory stays within bounds.
func TestPushMemory(t *testing.T) {
	testfs.NotShort(t, "it is about memory")
	w := worldOn(t, testfs.XFS(t, 6<<30), reflink.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	gib := int64(6) // its data are many times the buffers of a push
	if testfs.Full() {
		gib = 20
	}
	w.importImage("g", gib<<30, func(f *os.File) {
		for i := range gib {
			noise(t, f, uint64(i), i<<30, 40*mib)
			text(t, f, uint64(i+100), i<<30+200*mib, 20*mib)
			for k := range int64(500) { // small ones all over
				text(t, f, uint64(k), i<<30+300*mib+k*mib, 4096)
			}
		}
	})
	out, err := runChild(t, "push", w.dir, "g", "-1", "")
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var r childResult
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatal(err)
	}
	p := r.Pushed[0]
	t.Logf("%d MiB of data in a volume of %d GiB, %d MiB uploaded in %.1f s: at most %d MiB of memory", p.LogicalBytes/mib,
		gib, p.UploadedBytes/mib, p.Seconds, r.PeakBytes/mib)
	if r.PeakBytes > 256*mib {
		t.Errorf("a push took %d MiB of memory, more than 256", r.PeakBytes/mib)
	}
	w.checkPoint(w.open(), "g", w.image("g"))
}
