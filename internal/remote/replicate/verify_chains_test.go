package replicate

import (
	"path/filepath"
	"slices"
	"testing"

	"pando/internal/driver/plain"
	"pando/internal/remote/objstore"
	"pando/internal/testing/testfs"
)

// TestVerifyNamesChains: what is wrong with a tree affects those that are the difference from it.
func TestVerifyNamesChains(t *testing.T) {
	w := worldOn(t, testfs.Ext4(t, 500<<20), plain.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	w.importTree("g", mib)
	w.clone("g", "v")
	var names []string
	for i := range 4 {
		w.write("v", "new", uint64(i), 64<<10)
		out := w.push("v")
		names = append(names, "v@"+out[len(out)-1].Point)
	}
	rp := w.open()
	h, _, err := rp.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	m, err := rp.Manifest(t.Context(), h.Recent[1].Manifest)
	if err != nil {
		t.Fatal(err)
	}

	segment := "segments/" + m.Stream[0].Segment.String()
	for _, c := range []struct {
		key   string
		spoil func([]byte) []byte // nil: it is lost
	}{{"manifests/" + m.ID.String(), nil}, {segment, nil}, {segment, func(b []byte) []byte { return b[:len(b)-1] }},
		{segment, func(b []byte) []byte { return append(b, 0) }}} {
		key := c.key
		was, _, err := w.store.Get(t.Context(), key, 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		if c.spoil == nil {
			err = w.store.Delete(t.Context(), key)
		} else {
			_, err = w.store.Put(t.Context(), key, c.spoil(slices.Clone(was)), objstore.Always)
		}
		if err != nil {
			t.Fatal(err)
		}
		out, err := Verify(t.Context(), nil, w.r, VerifyRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if len(out.Problems) != 1 {
			t.Fatalf("without %s: %+v", key, out.Problems)
		}
		if p := out.Problems[0]; p.Object != key || p.Points != 3 || p.Volumes != 1 || !slices.Equal(p.Affected, names[1:]) {
			t.Errorf("without %s: %+v", key, p)
		}
		if _, err := w.store.Put(t.Context(), key, was, objstore.Always); err != nil {
			t.Fatal(err)
		}
	}
	w.whole()
	w.noSessions(rp)
}
