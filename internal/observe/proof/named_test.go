package proof_test

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"pando/internal/observe/proof"
	"pando/internal/observe/stack"
	"pando/internal/testing/testfs"
)

// TestCountedByName: what a program with a name of its own calls is counted by it, in all its threads, and
// that of another one, which does the same in the same place, is not.
func TestCountedByName(t *testing.T) {
	dir := testfs.Ext4(t, 64<<20)
	files := makeFiles(t, dir, 3)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program := func(link string, files ...string) (*exec.Cmd, io.Closer, *bytes.Buffer) {
		path := filepath.Join(t.TempDir(), link)
		if err := os.Symlink(self, path); err != nil {
			t.Fatal(err)
		}
		out := &bytes.Buffer{}
		cmd, input := loadCommand(t, path, "fdatasync", leastMS(), files...)
		cmd.Stdout, cmd.Stderr = out, os.Stderr
		return cmd, input, out
	}
	s, err := stack.Of(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	w, err := proof.New(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	// The kernel keeps 15 letters of a name, in which these two differ.
	cmd, input, out := program("load-number-one-long", files[:2]...)
	other, otherInput, _ := program("load-number-two-long", files[2])
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	if err := w.StartOne(cmd); err != nil {
		t.Fatal(err)
	}
	sampled(t, w, 100*time.Millisecond)
	for _, i := range []io.Closer{input, otherInput} {
		if err := i.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []*exec.Cmd{cmd, other} {
		if err := c.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	e, err := w.Stop()
	if err != nil {
		t.Fatal(err)
	}
	var l loaded
	if err := json.Unmarshal(out.Bytes(), &l); err != nil {
		t.Fatal(err)
	}
	p := e.Judge(proof.Load{Call: "fdatasync", Syncs: l.Syncs, Writers: 2, P50: l.P50, WritesPerSync: 1})
	show(t, p)
	if p.Method != proof.Tracepoints {
		t.Skipf("SKIPPED: %s", p.NoTraces)
	}
	if p.Calls.Counted != l.Syncs || p.Calls.Result != proof.OK || l.Syncs == 0 {
		t.Errorf("%+v, want %d calls", p.Calls, l.Syncs)
	}
	if p.Sample == nil || p.Sample.Syncs == 0 || len(p.Sample.Uncovered) > 0 {
		t.Errorf("sample %+v", p.Sample)
	}
}
