package replicate

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/plain"
	driverzfs "pando/internal/driver/zfs"
	"pando/internal/engine"
	"pando/internal/linux/zfs"
	"pando/internal/testing/testfs"
)

// zfsEngine makes a pool in a dataset.
func zfsEngine(t *testing.T, dataset string) *engine.Engine {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "pool")
	return initEngine(t, engine.InitRequest{Dir: dir, Driver: driverzfs.Name, Dataset: dataset, MinFreePercent: 1})
}

func zdo(t *testing.T, args ...string) {
	t.Helper()
	if err := zfs.ZFS.Do(t.Context(), args...); err != nil {
		t.Fatalf("zfs %q: %v", args, err)
	}
}

// rawPush pushes a volume and says whether it was raw, and full.
func (w *world) rawPush(volume string) (raw, full bool) {
	w.t.Helper()
	out := w.push(volume)
	last := out[len(out)-1]
	if last.Unchanged || last.ExpectedBytes < last.ReadBytes/2 || last.ExpectedBytes > 2*last.ReadBytes+mib {
		w.t.Errorf("%s: %+v", volume, last)
	}
	rp := w.open()
	h, _, err := rp.Head(w.t.Context(), volume)
	if err != nil {
		w.t.Fatal(err)
	}
	m, err := rp.Manifest(w.t.Context(), w.newest(rp, h).Manifest)
	if err != nil || m.Raw != last.Raw || m.Parent.IsZero() != last.Full {
		w.t.Errorf("%s: %+v is %+v there (%v)", volume, last, m, err)
	}
	return last.Raw, last.Full
}

// TestPushRawZFS: what is encrypted is pushed and pulled without its key, and can be read with it; points that were
// pushed in plain and raw never build on each other.
func TestPushRawZFS(t *testing.T) {
	zpool := testfs.ZFS(t, 1<<30)
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("a long passphrase"), 0o600); err != nil {
		t.Fatal(err)
	}
	enc := zpool + "/enc"
	zdo(t, "create", "-o", "encryption=on", "-o", "keyformat=passphrase", "-o", "pbkdf2iters=100000",
		"-o", "keylocation=file://"+key, enc)
	w := worldOf(t, zfsEngine(t, enc+"/pando"), "file:"+filepath.Join(t.TempDir(), "remote"))
	w.importTree("g", 2*mib)
	w.clone("g", "v")
	for i, text := range []string{"one", "two"} {
		w.edits("v", func(dir string) { writeFile(t, dir, text, text) })
		zdo(t, "unload-key", enc)
		if raw, full := w.rawPush("v"); !raw || full {
			t.Errorf("push %d: raw %v, full %v", i, raw, full)
		}
		if out := w.push("v"); !out[0].Unchanged {
			t.Errorf("nothing was written, and it was pushed: %+v", out)
		}
		zdo(t, "load-key", enc)
	}
	want := w.files("v")

	o := w.otherOf(t, zfsEngine(t, zpool+"/plain"))
	pulled := o.pull("v", PullRequest{})
	d, err := o.e.Show(t.Context(), ref.Ref{Name: "v"})
	if err != nil || d.Key == nil || d.Key.Loaded || !d.Key.Own {
		t.Fatalf("show: %+v, %v", d.Key, err)
	}
	load := "zfs load-key " + d.Key.Root
	if !slices.ContainsFunc(pulled.Notes, func(s string) bool { return strings.Contains(s, load) }) {
		t.Errorf("notes %q, want one with %q", pulled.Notes, load)
	}
	o.clone("g", "c") // that needs no key
	for _, v := range []string{"v", "c"} {
		_, err := o.e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName(v)})
		if !errs.Is(err, errs.Permission) || !strings.Contains(errs.HintOf(err), load) {
			t.Errorf("mount %s without the key: %v (hint %q), want %q", v, err, errs.HintOf(err), load)
		}
	}
	zdo(t, "load-key", "-L", "file://"+key, d.Key.Root)
	if got := o.files("v"); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	o.edits("c", func(dir string) { writeFile(t, dir, "c", "c") })

	_, err = w.other(t.TempDir(), plain.Name).tryPull("v", PullRequest{})
	wantKind(t, err, errs.Unsupported, "zfs")
}

// TestPushMixedZFS: a volume that was pushed in plain goes on in an encrypted pool.
func TestPushMixedZFS(t *testing.T) {
	zpool := testfs.ZFS(t, 1<<30)
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte(strings.Repeat("k", 32)), 0o600); err != nil {
		t.Fatal(err)
	}
	enc := zpool + "/enc"
	zdo(t, "create", "-o", "encryption=on", "-o", "keyformat=raw", "-o", "keylocation=file://"+key, enc)
	w := worldOf(t, zfsEngine(t, zpool+"/one"), "file:"+filepath.Join(t.TempDir(), "remote"))
	w.importTree("g", mib)
	w.clone("g", "v")
	if raw, full := w.rawPush("v"); raw || full {
		t.Errorf("of a pool without encryption: raw %v, full %v", raw, full)
	}

	c := w.otherOf(t, zfsEngine(t, enc+"/pando"))
	c.pull("v", PullRequest{TakeOver: true})
	for i, text := range []string{"one", "two"} {
		c.edits("v", func(dir string) { writeFile(t, dir, text, text) })
		if raw, full := c.rawPush("v"); !raw || full != (i == 0) {
			t.Errorf("push %d of an encrypted pool: raw %v, full %v", i, raw, full)
		}
	}

	w.pull("v", PullRequest{As: ref.MustName("back")})
	d, err := w.e.Show(t.Context(), ref.Ref{Name: "back"})
	if err != nil || d.Key == nil {
		t.Fatalf("show: %+v, %v", d.Key, err)
	}
	zdo(t, "load-key", "-L", "file://"+key, d.Key.Root)
	if got, want := w.files("back"), c.files("v"); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestPushOverlaysZFS: overlays on datasets and on zvols are pushed as what they change, and pulled as overlays, in the
// native form between pools of ZFS, and the portable one between all.
func TestPushOverlaysZFS(t *testing.T) {
	zpool := testfs.ZFS(t, 1<<30)
	for _, c := range []struct {
		fs       driver.FS
		to       string
		portable bool
	}{
		{driver.Native, driverzfs.Name, false},
		{driver.Ext4, driverzfs.Name, false},
		{driver.Native, plain.Name, true},
	} {
		t.Run(string(c.fs)+"-"+c.to, func(t *testing.T) {
			if c.fs == driver.Native && !testfs.ZFSHasOverlays() {
				t.Skip("does not apply: overlayfs cannot use datasets of OpenZFS before 2.2")
			}
			w := worldOf(t, zfsEngine(t, zpool+"/from"), "file:"+filepath.Join(t.TempDir(), "remote"))
			var o *world
			if c.to == plain.Name {
				o = w.otherIn(t, testfs.Ext4(t, 400<<20), plain.Name)
			} else {
				o = w.otherOf(t, zfsEngine(t, zpool+"/to"))
			}

			src := t.TempDir()
			for _, name := range []string{"changed", "gone", "kept"} {
				writeFile(t, src, name, name)
			}
			q := engine.ImportRequest{Name: ref.MustName("g"), Source: src, FS: c.fs, SizeBytes: 64 * mib}
			if c.fs == driver.Native {
				q.SizeBytes = 0
			}
			if _, err := w.e.Import(t.Context(), q); err != nil {
				t.Fatal(err)
			}
			w.overlay("g", "v")
			push := func() {
				t.Helper()
				q := PushRequest{Refs: []ref.Ref{{Name: "v"}}, Portable: c.portable}
				if _, err := Push(t.Context(), w.e, w.r, q); err != nil {
					t.Fatal(err)
				}
			}
			for i := range 3 {
				w.edits("v", func(dir string) {
					writeFile(t, dir, "changed", strings.Repeat("changed", i+1))
					_ = os.Remove(filepath.Join(dir, "gone"))
				})
				push()
				o.pull("v", PullRequest{Update: i > 0})
				sameOverlay(w, o, "v", "g@1")
			}

			// Without a golden in any of the three places.
			w.removeGolden("g")
			o.removeGolden("g")
			w.forget("g")
			w.edits("v", func(dir string) { writeFile(t, dir, "changed", "again") })
			push()
			if _, err := w.tryPrune(PruneRequest{}); err != nil {
				t.Fatal(err)
			}
			w.whole()
			o.pull("v", PullRequest{Update: true})
			sameOverlay(w, o, "v", "g@1")
		})
	}
}
