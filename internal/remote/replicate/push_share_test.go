package replicate

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/driver/btrfs"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

// pushAs pushes a volume under another name, or its own if that is "".
func (w *world) pushAs(volume, as string) Pushed {
	w.t.Helper()
	q := PushRequest{Refs: []ref.Ref{{Name: volume}}}
	if as != "" {
		q.As = ref.MustName(as)
	}
	out, err := Push(w.t.Context(), w.e, w.r, q)
	if err != nil {
		w.t.Fatal(err)
	}
	return out[len(out)-1]
}

// TestPushSharesWithAnyPoint: a volume that is pushed for the first time builds upon what is there of this pool and
// shares most with it, which need not be its golden; and it shares with that again where both are pulled to.
func TestPushSharesWithAnyPoint(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, 4*mib) })
	w.clone("g", "tw")
	w.edit("tw", func(f *os.File) { noise(t, f, 2, 10*mib, 30*mib) })
	w.push("tw")
	change := func(name string, n uint64) {
		w.edit(name, func(f *os.File) { noise(t, f, n, int64(n)*mib, 64<<10) })
	}
	check := func(what string, p Pushed) {
		t.Helper()
		if p.Full || p.ReadBytes > mib || p.UploadedBytes > mib {
			t.Errorf("%s: %+v", what, p)
		}
	}

	// Clones of clones, at several removes, and of one that is not on the remote itself.
	w.clone("tw", "tw3")
	change("tw3", 45)
	p := w.pushAs("tw3", "")
	check("a clone of a clone", p)
	w.clone("tw3", "tw4")
	w.clone("tw4", "tw5")
	change("tw5", 46)
	check("a clone of what was not pushed", w.pushAs("tw5", ""))

	// Under several names in turn.
	for i := range 3 {
		for k, as := range []string{"", "copy"} {
			change("tw3", uint64(47+2*i+k))
			check(fmt.Sprintf("round %d, as %q", i, as), w.pushAs("tw3", as))
		}
	}

	rp := w.open()
	for head, volume := range map[string]string{"tw": "tw", "copy": "tw3", "tw5": "tw5"} {
		w.checkPoint(rp, head, w.image(volume))
	}
	v, err := Verify(t.Context(), nil, w.r, VerifyRequest{ReadPercent: 100})
	if err != nil || v.Err() != nil {
		t.Fatal(err, v.Err())
	}

	o := w.other(testfs.XFS(t, 1<<30), "reflink")
	o.pull("tw", PullRequest{})
	before := o.used()
	for _, name := range []string{"tw3", "copy", "tw5"} {
		p := o.pull(name, PullRequest{})
		if p.ReadBytes > 2*mib {
			t.Errorf("pull of %s reads %d bytes", name, p.ReadBytes)
		}
		if p.Golden != "g" {
			t.Errorf("%s does not descend from its golden any more: %+v", name, p)
		}
	}
	if n := o.used() - before; n > 6*mib {
		t.Errorf("what was pulled takes %d bytes, though it shares nearly all", n)
	}
	if o.sum("copy") != w.sum("tw3") || o.sum("tw5") != w.sum("tw5") {
		t.Error("it is not what was pushed")
	}
}

// TestPushTreesShare is the same of trees: a volume that is pushed under two names in turn, and a clone of a clone, are
// sent as what they differ in.
func TestPushTreesShare(t *testing.T) {
	w := worldOn(t, testfs.Btrfs(t, 1<<30), btrfs.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	src := t.TempDir()
	big, err := os.Create(filepath.Join(src, "big"))
	if err != nil {
		t.Fatal(err)
	}
	noise(t, big, 1, 0, 30*mib)
	if err := big.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: src}); err != nil {
		t.Fatal(err)
	}
	w.clone("g", "tw")
	w.edits("tw", func(dir string) {
		f, err := os.Create(filepath.Join(dir, "more"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		noise(t, f, 2, 0, 20*mib)
	})
	w.push("tw")
	w.clone("tw", "tw3")
	for i := range 2 {
		for _, as := range []string{"", "copy"} {
			w.edits("tw3", func(dir string) { writeFile(t, dir, fmt.Sprint("step", i, as), "content") })
			if p := w.pushAs("tw3", as); p.UploadedBytes > mib {
				t.Errorf("round %d, as %q: %+v", i, as, p)
			}
		}
	}
	o := w.other(testfs.Btrfs(t, 1<<30), btrfs.Name)
	o.pull("copy", PullRequest{})
	if got, want := fmt.Sprint(o.files("copy")), fmt.Sprint(w.files("tw3")); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
