package replicate

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/btrfs"
	"pando/internal/engine"
	"pando/internal/remote/repo"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/storetest"
	"pando/internal/testing/testfs"
)

// importTree makes a golden of a directory.
func (w *world) importTree(name string, bytes int64) {
	w.t.Helper()
	src := w.t.TempDir()
	f, err := os.Create(filepath.Join(src, "file"))
	if err != nil {
		w.t.Fatal(err)
	}
	noise(w.t, f, 9, 0, bytes)
	if err := f.Close(); err != nil {
		w.t.Fatal(err)
	}
	if _, err := w.e.Import(w.t.Context(), engine.ImportRequest{Name: ref.MustName(name), Source: src,
		FS: driver.Native}); err != nil {
		w.t.Fatal(err)
	}
}

// write writes a file into a volume that is a tree.
func (w *world) write(volume, file string, seed uint64, length int64) {
	w.t.Helper()
	f, err := os.Create(filepath.Join(w.image(volume), file))
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	noise(w.t, f, seed, 0, length)
}

// stream reads the stream of a manifest.
func (w *world) stream(rp *repo.Repo, id repo.ID) (repo.Manifest, []byte) {
	w.t.Helper()
	m, err := rp.Manifest(context.Background(), id)
	if err != nil {
		w.t.Fatal(err)
	}
	var b bytes.Buffer
	for _, f := range m.Stream {
		c, err := rp.ReadFrames(context.Background(), []repo.Frame{f})
		if err != nil {
			w.t.Fatal(err)
		}
		b.Write(c[0])
	}
	for _, u := range m.Uses {
		if s, err := rp.StatSegment(context.Background(), u.Segment); err != nil || s.Bytes != int64(u.Size) {
			w.t.Errorf("segment %s has %d bytes, not %d: %v", u.Segment, s.Bytes, u.Size, err)
		}
	}
	return m, b.Bytes()
}

// TestPushTrees: trees of btrfs travel as streams: the golden whole, a clone as what
// differs from it, then what was changed. Long chains begin anew. Faults of the store
// leave nothing that is half.
func TestPushTrees(t *testing.T) {
	w := worldOn(t, testfs.Btrfs(t, 1<<30), btrfs.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	w.importTree("g", 30*mib)
	w.clone("g", "v")
	w.write("v", "new", 1, mib)
	out := w.push("v")
	rp := w.open()
	if len(out) != 2 || out[0].Content != "stream" || !out[0].Full || out[1].Full || out[1].Base != "g@1" ||
		out[1].UploadedBytes > 2*mib {
		t.Fatalf("%+v", out)
	}
	g, _, err := rp.Head(t.Context(), "g")
	if err != nil {
		t.Fatal(err)
	}
	gm, whole := w.stream(rp, g.Recent[0].Manifest)
	if int64(len(whole)) < 30*mib || !gm.Parent.IsZero() || gm.Logical != int64(len(whole)) ||
		!bytes.HasPrefix(whole, []byte("btrfs-stream\x00")) {
		t.Errorf("the golden's stream has %d bytes: %+v", len(whole), gm)
	}
	// What is there makes the tree again, on another filesystem.
	other := newEngine(t, testfs.Btrfs(t, 1<<30), btrfs.Name)
	last := map[repo.ID]driver.ObjectID{}
	receive := func(head string, p repo.Point) {
		t.Helper()
		m, stream := w.stream(rp, p.Manifest)
		q := engine.ReceiveRequest{Volume: ref.MustName(head), Snapshot: ref.MustName(p.Name), FS: driver.Native,
			Base: last[m.Parent]}
		if !m.Parent.IsZero() && q.Base == "" {
			t.Fatalf("%s@%s needs what is not there", head, p.Name)
		}
		if head == "g" {
			q.Golden, q.Generation, q.Snapshot = true, 1, ref.Name{}
		} else if _, err := pooltest.SnapshotNames(t.Context(), other, head); err == nil {
			q.Update = true
		}
		if _, err := other.Transfer().Receive(t.Context(), q, engine.Content{Stream: bytes.NewReader(stream)}); err != nil {
			t.Fatalf("%s@%s: %v", head, p.Name, err)
		}
		r := ref.Ref{Name: head, At: p.Name}
		pt, err := other.Transfer().Point(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		last[p.Manifest] = pt.ID
	}
	receive("g", g.Recent[0])
	for i := range maxChain + 4 {
		w.write("v", "new", uint64(10+i), 64<<10)
		if i%8 == 3 {
			w.store.Add(storetest.Fault{At: 2 + i/8, Times: -1})
			w.load()
			if _, err := w.tryPush("v"); err == nil {
				t.Error("a push succeeded whose store had vanished")
			}
			w.store.Heal()
			w.load()
		}
		w.push("v")
	}
	h, _, err := rp.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	full := 0
	for _, p := range h.Recent {
		if p.Parent.IsZero() {
			full++
		}
		receive("v", p)
	}
	if full == 0 {
		t.Errorf("a chain of %d differences", len(h.Recent))
	}
	want, err := os.ReadFile(filepath.Join(w.image("v"), "new"))
	if err != nil {
		t.Fatal(err)
	}
	o := &world{t: t, e: other, dir: other.Dir()}
	got, err := os.ReadFile(filepath.Join(o.image("v"), "new"))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("the tree is not what was pushed: %v", err)
	}
	w.clearLost(rp)
}
