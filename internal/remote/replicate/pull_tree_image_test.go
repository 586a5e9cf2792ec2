package replicate

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
)

// mounted is what the tree of a volume is, wherever it lies.
func (w *world) mounted(volume string) (out map[string]treetest.Entry) {
	w.t.Helper()
	i, err := w.e.Mount(w.t.Context(), engine.MountRequest{Volume: ref.MustName(volume)})
	if err != nil {
		w.t.Fatal(err)
	}
	if out, err = treetest.Fingerprint(i.Mountpoint); err != nil {
		w.t.Fatal(err)
	}
	if _, err := w.e.Umount(w.t.Context(), engine.UmountRequest{Volume: ref.MustName(volume)}); err != nil {
		w.t.Fatal(err)
	}
	return out
}

// TestTreesIntoImages: a pool of images pulls trees of files, as clones of what they were cloned from, and then what
// has
// changed. What it pushes itself are images, which a pool of trees refuses with a hint, and nothing of what was there
// suffers.
func TestTreesIntoImages(t *testing.T) {
	r := faulttest.Rand(t)
	w := worldOn(t, testfs.Tmpfs(t, 300<<20), plain.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	o := w.other(testfs.XFS(t, 800<<20), reflink.Name)
	e := &treetest.Editor{T: t, R: r}
	w.importDir("g", func(dir string) {
		e.Dir = dir
		e.Fill()
		f, err := os.Create(dir + "/large") // so that differences are worth it
		if err != nil {
			t.Fatal(err)
		}
		noise(t, f, 1, 0, 20*mib)
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	})
	w.clone("g", "v")
	change := func(name string) {
		e.Dir = w.image("v")
		for range 1 + r.IntN(20) {
			e.Edit()
		}
		w.write("v", name, 1, 4096) // the others may change nothing
	}
	same := func() {
		t.Helper()
		for _, d := range treetest.Diff(w.mounted("v"), o.mounted("v"), treetest.Atime|treetest.Holes) {
			t.Error(d)
		}
		if t.Failed() {
			t.FailNow()
		}
	}

	change("first")
	w.push("v")
	if got := o.pull("v", PullRequest{}); len(got.Origins) != 1 || got.FS != "ext4" || got.SharedBytes < 20*mib {
		t.Errorf("%+v", got)
	}
	same()
	for _, name := range []string{"second", "third"} {
		change(name)
		out := w.push("v")
		if out[0].Full {
			t.Fatalf("%+v", out)
		}
		// The large file may have been changed, too.
		got := o.pull("v", PullRequest{Update: true})
		if got.Base == "" || got.ReadBytes > out[0].UploadedBytes+mib {
			t.Errorf("%+v, of %+v", got, out)
		}
		same()
	}

	got := o.pull("v", PullRequest{Update: true, TakeOver: true})
	if len(got.Notes) == 0 || !strings.Contains(strings.Join(got.Notes, "\n"), "image") {
		t.Errorf("notes %q", got.Notes)
	}
	if out := o.push("v"); out[len(out)-1].Content != "block" || !out[len(out)-1].Full {
		t.Errorf("%+v", out)
	}
	before := w.state()
	_, err := w.tryPull("v", PullRequest{Update: true})
	wantKind(t, err, errs.Unsupported, "reflink")
	if w.state() != before {
		t.Errorf("a refused pull leaves\n%s", w.state())
	}
	w.whole()
}
