package engine_test

import (
	"bytes"
	"crypto/rand"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

// TestSandboxLosesNothing: the run fails if a full pool could not store what a sandboxed program wrote. The clone is
// mounted then, so that the data can still be read.
func TestSandboxLosesNothing(t *testing.T) {
	testfs.NotShort(t, "it is about space")
	p := newFullable(t, "xfs")
	tree := busyboxTree(t)
	sh, err := os.ReadFile(filepath.Join(tree, "bin", "sh"))
	must(t, err)
	must(t, testfs.WriteProgram(filepath.Join(tree, "bin", "cat"), sh))
	_, err = p.e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: tree, FS: driver.Ext4,
		SizeBytes: 320 << 20})
	must(t, err)

	// Let the program write while there is room, and end when there is none.
	in := pipe(t)
	var r engine.RunResult
	done := make(chan error, 1)
	go func() {
		var err error
		r, err = p.e.Run(t.Context(), engine.RunRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Keep: true,
			Sandbox: engine.Sandbox{Root: true}, Env: []string{"PATH=/bin"},
			Command: []string{"sh", "-c", "cat >/lost"}, Stdin: in[0]})
		done <- err
	}()
	content := make([]byte, 8<<20)
	_, _ = rand.Read(content)
	if _, err := in[1].Write(content); err != nil {
		t.Fatal(err)
	}
	p.fill()
	in[1].Close()
	err = <-done

	// The run says so, and the clone is where its data can be read.
	if !errs.Is(err, errs.NoSpace) && !errs.Is(err, errs.IO) || errs.HintOf(err) == "" || r.Exit != 0 {
		t.Errorf("%+v: %v (hint: %s)", r, err, errs.HintOf(err))
	}
	p.empty()
	vols, err := p.e.Volumes(t.Context(), false)
	if err != nil || len(vols) != 1 || vols[0].State != "mounted" || vols[0].Mountpoint == "" {
		t.Fatalf("%+v: %v", vols, err)
	}
	if b, err := os.ReadFile(filepath.Join(vols[0].Mountpoint, "lost")); err != nil || !bytes.Equal(b, content) {
		t.Errorf("%d of %d bytes can be read: %v", len(b), len(content), err)
	}
	_, _ = p.e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")}) // it may say once more what was lost
	_, err = p.e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
	must(t, err)
	destroy(t, p.e, "v")
	if left, err := os.ReadDir(filepath.Join(p.e.Dir(), "mnt")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
