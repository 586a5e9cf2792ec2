// Package zfs holds the tests of the whole program on a real OpenZFS: what a person
// does with a pool on ZFS. `make test-zfs` runs them in a guest.
package zfs

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/testing/schematest"
	"pando/internal/testing/testfs"
)

var pando string // the binary

func TestMain(m *testing.M) {
	os.Exit(testfs.WithProgram(&pando, m.Run))
}

// Exit codes.
const (
	exitNotFound    = 3
	exitInUse       = 5
	exitPermission  = 7
	exitUnsupported = 8
)

// host is a machine with a pool on ZFS.
type host struct {
	t       *testing.T
	dir     string // of Pando's pool
	zpool   string
	disks   *testfs.Zpool
	dataset string
	tmp     string
}

// newHost makes a zpool of size bytes with Pando's pool on it, which is removed at
// the end with a check that nothing is left.
func newHost(t *testing.T, size int64) *host {
	t.Helper()
	return newHostIn(t, size, func(*host) {})
}

// newHostIn is newHost, after prepare has made what the pool is to be made in.
func newHostIn(t *testing.T, size int64, prepare func(h *host)) *host {
	t.Helper()
	disks := testfs.NewZpool(t, size)
	zpool := disks.Name()
	h := &host{t: t, zpool: zpool, disks: disks, dataset: zpool + "/pando", tmp: t.TempDir()}
	h.dir = filepath.Join(h.tmp, "pool")
	testfs.LeakCheck(t, h.tmp)
	prepare(h)
	before := h.zfs("list", "-H", "-r", "-t", "all", "-o", "name", zpool)
	h.pando("init", "--driver", "zfs", "--zfs-dataset", h.dataset)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s", h.zfs("list", "-r", "-t", "all", "-o", "name,origin,used,refer,defer_destroy", h.zpool))
		}
		h.pando("deinit", "--force")
		if _, err := os.Stat(h.dir); err == nil {
			t.Errorf("LEAK: %s is still there", h.dir)
		}
		if left := h.zfs("list", "-H", "-r", "-t", "all", "-o", "name", h.zpool); left != before {
			t.Errorf("LEAK: after deinit the zpool holds:\n%s", left)
		}
	})
	return h
}

// command is a pando that is about to be run.
func (h *host) command(args ...string) *exec.Cmd {
	return exec.Command(pando, append([]string{"--pool", h.dir}, args...)...)
}

// pando runs a command that must succeed, and returns its output.
func (h *host) pando(args ...string) string {
	h.t.Helper()
	out, err := h.try(args...)
	if err != nil {
		h.t.Fatalf("pando %s: %v", strings.Join(args, " "), err)
	}
	return out
}

func (h *host) try(args ...string) (string, error) {
	cmd := h.command(args...)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, stderr.String())
	}
	return stdout.String(), err
}

// fails runs a command that must fail with an exit code and say something.
func (h *host) fails(code int, says string, args ...string) {
	h.t.Helper()
	cmd := h.command(args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	err := cmd.Run()
	if cmd.ProcessState.ExitCode() != code || !strings.Contains(stderr.String(), says) {
		h.t.Errorf("pando %s: %v, wanted exit code %d and %q in: %s", strings.Join(args, " "), err, code, says,
			stderr.String())
	}
}

func (h *host) json(v any, args ...string) {
	h.t.Helper()
	args = append(args, "--json")
	out := []byte(h.pando(args...))
	if err := json.Unmarshal(out, v); err != nil {
		h.t.Fatal(err)
	}
	if err := schematest.Check(args, out, nil); err != nil {
		h.t.Error(err)
	}
}

// zfs runs a program of ZFS that must succeed.
func (h *host) zfs(args ...string) string { h.t.Helper(); return h.run("zfs", args...) }

func (h *host) run(name string, args ...string) string {
	h.t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		h.t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func (h *host) write(path, content string) {
	h.t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		h.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) wantFile(path, content string) {
	h.t.Helper()
	if b, err := os.ReadFile(path); err != nil || string(b) != content {
		h.t.Errorf("%s holds %.60q, %v; wanted %.60q", path, b, err, content)
	}
}
