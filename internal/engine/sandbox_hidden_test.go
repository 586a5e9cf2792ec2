package engine_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

// TestSandboxHidesClone: the host's mount table never has the clone of a run in a sandbox, whatever the kind of pool,
// and the clone is in use for other commands all the same.
func TestSandboxHidesClone(t *testing.T) {
	for _, c := range []struct {
		name, pool, driver string
		fs                 driver.FS
		overlay            bool
	}{
		{"image", "xfs", reflink.Name, driver.Ext4, false},
		{"overlay on an image", "xfs", reflink.Name, driver.Ext4, true},
		{"subvolume", "btrfs", btrfs.Name, "", false},
		{"overlay on a subvolume", "btrfs", btrfs.Name, "", true},
		{"directory", "ext4", plain.Name, "", false},
		{"overlay on a directory", "ext4", plain.Name, "", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newPool(t, testfs.New(t, c.pool, 800<<20).Dir(), engine.InitRequest{Driver: c.driver})
			importAs(t, e, "g", busyboxTree(t), c.fs)

			in, out := pipe(t), pipe(t)
			var r engine.RunResult
			done := make(chan error, 1)
			go func() {
				var err error
				r, err = e.Run(t.Context(), engine.RunRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Keep: true,
					Overlay: c.overlay, Sandbox: engine.Sandbox{Root: true}, Diff: true, Env: []string{"PATH=/bin"},
					Command: []string{"sh", "-c", "echo new >/file; echo on; read x"}, Stdin: in[0], Stdout: out[1]})
				done <- err
			}()
			if n, err := out[0].Read(make([]byte, 3)); err != nil || n == 0 {
				t.Fatal(err)
			}

			table, err := os.ReadFile("/proc/self/mountinfo")
			if err != nil || strings.Contains(string(table), filepath.Join(e.Dir(), "mnt", "v")) {
				t.Errorf("the host's mount table has the clone: %v\n%s", err, table)
			}
			vols, err := e.Volumes(t.Context(), false)
			if err != nil || len(vols) != 1 || vols[0].State != "mounted" || !vols[0].Sandboxed || vols[0].Mountpoint != "" {
				t.Errorf("%+v: %v", vols, err)
			}
			_, err = e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("v"), Name: ref.MustName("s")})
			if err != nil && !(c.overlay && errs.Is(err, errs.InUse) && errs.HintIn(err) != "") {
				t.Error(err)
			}

			in[1].Close()
			if err := <-done; err != nil || r.Exit != 1 || r.Held != nil || !r.Kept {
				t.Fatalf("%+v: %v", r, err)
			}
			if r.Diff == nil {
				t.Error("there is no difference")
			}

			// The volume is whole, and unmounted.
			v, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v")})
			if err != nil {
				t.Fatal(err)
			}
			if b, err := os.ReadFile(filepath.Join(v.Mountpoint, "file")); err != nil || string(b) != "new\n" {
				t.Errorf("%q: %v", b, err)
			}
			destroy(t, e, "v")
			if left, err := os.ReadDir(filepath.Join(e.Dir(), "mnt")); err != nil || len(left) > 0 {
				t.Errorf("left: %v, %v", left, err)
			}
		})
	}
}

func pipe(t *testing.T) [2]*os.File {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	return [2]*os.File{r, w}
}

func busyboxTree(t *testing.T) string {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal("install busybox-static: ", err)
	}
	b, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := testfs.WriteProgram(filepath.Join(dir, "bin", "sh"), b); err != nil {
		t.Fatal(err)
	}
	return dir
}
