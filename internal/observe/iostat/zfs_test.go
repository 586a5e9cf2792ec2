package iostat

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"pando/internal/linux/mount"
	"pando/internal/linux/run"
	"pando/internal/linux/zfs"
	"pando/internal/testing/testfs"
)

// TestZFSDatasets: ZFS counts by dataset what programs write; the zpool's devices are
// shared.
func TestZFSDatasets(t *testing.T) {
	pool := testfs.NewZpool(t, 512*mib).Name()
	at := map[string]string{}
	for _, name := range []string{"a", "b"} {
		dir := filepath.Join(t.TempDir(), name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if _, err := run.Program(t.Context(), "zfs", "create", "-o", "compression=off", "-o", "mountpoint="+dir,
			pool+"/"+name); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := mount.Unmount(dir); err != nil {
				t.Error(err)
			}
		})
		at[name] = dir
	}
	w := watcher(t, Target{Name: "a", Path: at["a"], Only: true})
	const size = 8 * mib
	write(t, filepath.Join(at["a"], "f"), size, true)
	write(t, filepath.Join(at["b"], "f"), 2*size, true)
	if _, err := run.Program(t.Context(), "zpool", "sync", pool); err != nil {
		t.Fatal(err)
	}
	s := w.Sample()
	x := target(t, s, "a")
	if x.Own != nil || x.ApplicationBytes == nil || *x.ApplicationBytes != size || x.ApplicationSource != "zfs" {
		t.Fatalf("%+v", x)
	}
	if x.Syncs != nil && (x.Syncs.Source != "zil" || x.Syncs.Count < 1 || x.Syncs.Count > 10) {
		t.Errorf("syncs: %+v", x.Syncs)
	}
	for name, want := range map[string]int64{"a": size, "b": 2 * size} {
		if !slices.ContainsFunc(s.Layers[0].From, func(f From) bool {
			return f.Name == pool+"/"+name && f.WrittenBytes == want && f.Watched == (name == "a")
		}) {
			t.Errorf("%s is not among what wrote to the zpool: %+v", name, s.Layers[0].From)
		}
	}
	if x.Steps[0].OthersBytes != 2*size || x.Steps[0].Amplification == nil || *x.Steps[0].Amplification <= 0 {
		t.Errorf("amplification %v %s: %+v", x.Amplification, x.NoAmplification, x.Steps)
	}
}

// TestZvol: a volume's own device is what its filesystem writes to.
func TestZvol(t *testing.T) {
	pool := testfs.NewZpool(t, 512*mib).Name()
	if _, err := run.Program(t.Context(), "zfs", "create", "-s", "-V", "128M", "-b", "16k", "-o", "compression=off",
		pool+"/vol"); err != nil {
		t.Fatal(err)
	}
	f, err := zfs.AwaitDevice(t.Context(), pool+"/vol", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	node := f.Name()
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	w := watcher(t, Target{Name: "vol", Path: node})
	const size = 8 * mib
	write(t, node, size, true)
	if _, err := run.Program(t.Context(), "zpool", "sync", pool); err != nil {
		t.Fatal(err)
	}
	s := w.Sample()
	x := target(t, s, "vol")
	if x.Own == nil || x.Own.WrittenBytes != size || x.Steps[len(x.Steps)-1].WrittenBytes < size ||
		x.Steps[0].Amplification == nil {
		t.Errorf("%+v %+v %s", x.Own, x.Steps, x.NoAmplification)
	}
	if !slices.ContainsFunc(s.Layers[0].From, func(f From) bool {
		return f.Name == pool+"/vol" && f.Watched && f.Target == "vol"
	}) {
		t.Errorf("from: %+v", s.Layers[0].From)
	}
}
