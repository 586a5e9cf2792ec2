package proof_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"pando/internal/proof"
	"pando/internal/stack"
	"pando/internal/testfs"
)

// options of a run.
type options struct {
	call    string // "fdatasync" if empty
	writers int    // 1 if 0
	ms      int    // of the load
	sample  time.Duration
	env     []string
}

// calls are the names of Load.Call.
var calls = map[string]string{"fdatasync": "fdatasync", "fsync": "fsync", "dsync": "write (O_DSYNC)", "none": "fdatasync"}

// watch runs a load in dir and proves it.
func watch(t *testing.T, dir string, o options) proof.Proof {
	t.Helper()
	if o.call == "" {
		o.call = "fdatasync"
	}
	o.writers, o.ms = max(1, o.writers), max(400, o.ms)
	files := makeFiles(t, dir, o.writers)
	s, err := stack.Of(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	w, err := proof.New(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.Baseline(t.Context(), 100*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd := exec.Command("/proc/self/exe", append([]string{fmt.Sprint(o.ms)}, files...)...)
	cmd.Env = append(append(os.Environ(), "PANDO_TEST_LOAD="+o.call), o.env...)
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	if err := w.Start(cmd); err != nil {
		t.Fatal(err)
	}
	if o.sample > 0 {
		if err := w.Sample(t.Context(), o.sample); err != nil {
			t.Error(err)
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	e, err := w.Stop()
	if err != nil {
		t.Fatal(err)
	}
	var l loaded
	if err := json.Unmarshal(out.Bytes(), &l); err != nil {
		t.Fatal(err)
	}
	p := e.Judge(proof.Load{Call: calls[o.call], Syncs: l.Syncs, Writers: o.writers, P50: l.P50, WritesPerSync: 1})
	show(t, p)
	return p
}

// makeFiles makes files that are allocated and on disk.
func makeFiles(t *testing.T, dir string, n int) (files []string) {
	t.Helper()
	for i := range n {
		name := filepath.Join(dir, fmt.Sprintf("load%d", i))
		f, err := os.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write(make([]byte, 512<<10)); err != nil {
			t.Fatal(err)
		}
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
		f.Close()
		files = append(files, name)
	}
	return files
}

func show(t *testing.T, p proof.Proof) {
	t.Helper()
	b, err := json.MarshalIndent(p, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", b)
}

func TestHonest(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		for _, o := range []options{{}, {writers: 4}, {call: "fsync"}, {call: "dsync"}} {
			t.Run(fmt.Sprintf("%s %s %d", kind, o.call, o.writers), func(t *testing.T) {
				o.sample = 200 * time.Millisecond
				p := watch(t, testfs.New(t, kind, 128<<20).Dir(), o)
				if p.Result != proof.OK {
					t.Errorf("%s %q", p.Layer, p.Reasons)
				}
				if p.Method == proof.Tracepoints && (p.Sample == nil || p.Sample.Syncs < 10) {
					t.Errorf("sample %+v", p.Sample)
				}
			})
		}
	}
}
