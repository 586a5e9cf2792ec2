package replicate

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/remote/repo"
	"pando/internal/testing/testfs"
)

// TestPullWhatWasPushedAgain: what is here stays what it is when the same is pushed once more, under another manifest:
// in its place, or after it was removed from the remote.
func TestPullWhatWasPushedAgain(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	w.edit("v", func(f *os.File) { noise(t, f, 2, 2*mib, 65536) })
	w.push("v")
	o := w.other(testfs.XFS(t, 1<<30), reflink.Name)
	o.pull("v", PullRequest{})
	rp := w.open()

	for _, name := range []string{"g", "v@" + w.pushSnapshots("v")[0]} {
		volume, _, _ := strings.Cut(name, "@")
		for what, again := range map[string]func(){
			"whole": func() {
				if _, err := Push(t.Context(), w.e, w.r, PushRequest{Refs: []ref.Ref{refs(t, name)}, Full: true}); err != nil {
					t.Fatal(err)
				}
			},
			"after it was removed": func() {
				if _, err := RemoveVolume(t.Context(), w.r, refs(t, volume)); err != nil {
					t.Fatal(err)
				}
				if _, err := Prune(t.Context(), w.e, w.r, PruneRequest{}); err != nil {
					t.Fatal(err)
				}
				w.push(name)
			},
		} {
			was := w.newest(rp, head(t, rp, volume))
			again()
			if now := w.newest(rp, head(t, rp, volume)); now.Manifest == was.Manifest || now.Name != was.Name {
				t.Fatalf("%s, pushed again %s: %+v, was %+v", name, what, now, was)
			}
			if p := o.pull(volume, PullRequest{}); !p.Unchanged || p.ReadBytes > 0 {
				t.Errorf("%s, pushed again %s, is not known: %+v", name, what, p)
			}
		}
	}

	// What comes next builds upon it.
	w.edit("v", func(f *os.File) { noise(t, f, 3, 3*mib, 4096) })
	w.push("v")
	if p := o.pull("v", PullRequest{Update: true}); p.ReadBytes > 64<<10 || o.sum("v") != w.sum("v") {
		t.Errorf("the next point: %+v", p)
	}
}

func head(t *testing.T, rp *repo.Repo, name string) repo.Head {
	t.Helper()
	h, _, err := rp.Head(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// TestPullAnotherGeneration: a number that was given to something else says so, and its hint works.
func TestPullAnotherGeneration(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.push("g")
	o := w.other(testfs.XFS(t, 1<<30), reflink.Name)
	o.pull("g", PullRequest{})

	if _, err := w.e.RemoveGolden(t.Context(), refs(t, "g")); err != nil {
		t.Fatal(err)
	}
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 2, 0, mib) })
	if _, err := RemoveVolume(t.Context(), w.r, refs(t, "g")); err != nil {
		t.Fatal(err)
	}
	w.push("g")
	before := o.state()
	_, err := o.tryPull("g", PullRequest{})
	if !errs.Is(err, errs.Exists) || !strings.Contains(err.Error(), "pushed under its number") ||
		!strings.Contains(errs.HintOf(err), "keeps both") {
		t.Errorf("%v (hint: %s)", err, errs.HintOf(err))
	}
	if after := o.state(); after != before {
		t.Errorf("a refused pull changed the pool:\n%s\n%s", before, after)
	}

	was := o.sum("g@1")
	if o.pull("g", PullRequest{As: ref.MustName("g2")}); o.sum("g2@1") != w.sum("g@1") || o.sum("g@1") != was {
		t.Error("not both generations are here")
	}
}

// TestTakeOverOfMounted: a volume that is mounted cannot become what is pulled, and then its writer stays.
func TestTakeOverOfMounted(t *testing.T) {
	w := newWorld(t)
	golden := engine.ImportRequest{Name: ref.MustName("g"), Source: t.TempDir(), FS: driver.Ext4, SizeBytes: 64 * mib}
	if _, err := w.e.Import(t.Context(), golden); err != nil {
		t.Fatal(err)
	}
	w.clone("g", "v")
	w.push("v")
	o := w.other(testfs.XFS(t, 1<<30), reflink.Name)
	o.pull("v", PullRequest{})
	if err := os.Mkdir(filepath.Join(w.mount(ref.MustName("v")), "new"), 0o700); err != nil {
		t.Fatal(err)
	}
	w.push("v")
	o.mount(ref.MustName("v"))
	if _, err := o.tryPull("v", PullRequest{TakeOver: true, Update: true}); !errs.Is(err, errs.InUse) ||
		!strings.Contains(errs.HintOf(err), "umount") {
		t.Errorf("a take-over of a mounted volume: %v", err)
	}
	if h := head(t, w.open(), "v"); h.Epoch != 1 || h.Writer.Pool != w.e.PoolID() {
		t.Errorf("a refused take-over left epoch %d, writer %s", h.Epoch, h.Writer.Pool)
	}
}
