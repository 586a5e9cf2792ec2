package replicate

import (
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver/reflink"
	"pando/internal/testing/testfs"
)

// TestFullRemote: of a remote in a directory whose disk is full points can be removed, though nothing can be pushed.
// The next push works.
func TestFullRemote(t *testing.T) {
	disk := testfs.Ext4(t, 64*mib)
	w := worldOn(t, testfs.XFS(t, 1024*mib), reflink.Name, "file:"+t.TempDir())
	_, err := Add(t.Context(), w.e, AddRequest{Name: "full", URL: "file:" + filepath.Join(disk, "remote")}, Access{})
	if err != nil {
		t.Fatal(err)
	}
	if w.r, err = Load(w.dir, "full", Access{}); err != nil {
		t.Fatal(err)
	}
	w.importImage("g", 64*mib, func(f *os.File) {})
	w.clone("g", "v")
	change := func(seed uint64) { w.edit("v", func(f *os.File) { noise(t, f, seed, 0, 4*mib) }) }
	for seed := range uint64(3) {
		change(seed)
		w.push("v")
	}

	// The disk is full for a push.
	filler := testfs.Fill(t, disk)
	change(3)
	if _, err := w.tryPush("v"); !errs.Is(err, errs.NoSpace) || errs.HintOf(err) == "" {
		t.Errorf("push onto a full disk: %v", err)
	}

	// A prune gets room.
	p, err := Prune(t.Context(), w.e, w.r, PruneRequest{Policy: Policy{Last: 1}})
	if err != nil || p.FreedBytes == 0 {
		t.Errorf("prune on a full disk: %+v, %v", p, err)
	}

	// It has made a new reserve, with which a volume is removed when the disk is full again.
	filler2 := testfs.Fill(t, filepath.Join(disk, "remote", ".pando"))
	if _, err := RemoveVolume(t.Context(), w.r, ref.Ref{Name: "v"}); err != nil {
		t.Errorf("remove a volume on a full disk: %v", err)
	}
	for _, f := range []string{filler, filler2} {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	w.push("v")
}
