package zfs

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestMigration is the way of a host that copied a directory for every session:
// the directory becomes a golden in a zvol with XFS inside, while sessions wait
// for it; killed in the middle, it begins anew; sessions are instant from then on;
// the old directory goes.
func TestMigration(t *testing.T) {
	h := newHost(t, 3<<30)
	golden := filepath.Join(h.tmp, "docker")
	const dirs, files = 40, 25
	for d := range dirs {
		for f := range files {
			h.write(filepath.Join(golden, fmt.Sprintf("layers/%02d/%02d", d, f)),
				strings.Repeat(fmt.Sprintf("%d/%d ", d, f), 2000))
		}
	}
	h.write(filepath.Join(golden, "index"), "first")
	imp := func() []string {
		return []string{"golden", "import", "docker", golden, "--adopt", "--fs", "xfs", "--size", "512M", "--no-progress"}
	}

	// Killed in the middle: nobody has a golden, nothing of it is left.
	cmd := h.command(imp()...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	h.eventually("the import has begun to copy", func() bool { return h.objects() > 0 })
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Fatal("the import was over before it could be killed: make the directory larger")
	}
	h.fails(exitNotFound, "docker", "clone", "docker", "too-early")
	h.pando("gc") // in a slow guest that is more than the second that a command spends on it
	if n := h.objects(); n != 0 {
		t.Errorf("LEAK: %d objects are left by an import that was killed", n)
	}
	h.wantFile(filepath.Join(golden, "index"), "first")

	// Again. Sessions that are asked for in the meantime wait, and then have all of it.
	cmd = h.command(imp()...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	h.eventually("the import has begun to copy", func() bool { return h.objects() > 0 })
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			name := fmt.Sprintf("session-%d", i)
			if err := h.patiently("clone", "docker", name, "--mount"); err != nil {
				t.Errorf("a session that waited for the golden: %v", err)
				return
			}
			h.wantFile(filepath.Join(h.dir, "mnt", name, "index"), "first")
		})
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("import: %v: %s", err, out.String())
	}
	wg.Wait()

	// From now on they are instant: no copy of the 12 MB, in the time of a command.
	h.pando("clone", "docker", "late", "--count", "4")
	var late1 thing
	if h.json(&late1, "show", "late-1"); late1.ExclusiveBytes > 64<<10 || late1.SharedBytes < 256<<10 {
		t.Errorf("a fresh session takes %+v", late1)
	}
	late := filepath.Join(h.dir, "mnt", "late-1")
	h.pando("mount", "late-1")
	if kind := h.run("stat", "-f", "-c", "%T", late); !strings.Contains(kind, "xfs") {
		t.Errorf("a session is on %s, wanted XFS", kind)
	}
	h.wantFile(filepath.Join(late, "layers/39/24"), strings.Repeat("39/24 ", 2000))
	h.write(filepath.Join(late, "index"), "mine")
	h.wantFile(filepath.Join(golden, "index"), "first")
	h.wantFile(filepath.Join(h.dir, "mnt/session-0/index"), "first")

	// The directory itself becomes a volume; what it was is collected.
	h.pando("golden", "import", "docker", golden, "--update", "--adopt", "--replace", "--as", "docker-live", "--fs", "xfs",
		"--size", "512M", "--no-progress")
	asides, err := filepath.Glob(golden + ".pando-old-*")
	if err != nil || len(asides) != 1 {
		t.Fatalf("the old directory: %q, %v", asides, err)
	}
	h.wantFile(filepath.Join(golden, "index"), "first")
	if err := os.RemoveAll(asides[0]); err != nil {
		t.Fatal(err)
	}
	h.wantFile(filepath.Join(golden, "layers/00/00"), strings.Repeat("0/0 ", 2000))

	// The first generation goes, although sessions come from it.
	h.pando("golden", "rm", "docker@1")
	h.pando("gc")
	h.wantFile(filepath.Join(late, "index"), "mine")
	h.pando("umount", "late-1")
	h.pando("mount", "late-1")
	h.wantFile(filepath.Join(late, "layers/39/24"), strings.Repeat("39/24 ", 2000))
	h.pando("destroy", "session-*", "late-*", "docker-live")
	h.pando("golden", "rm", "docker")
	h.pando("gc")
	if n := h.objects(); n != 0 {
		t.Errorf("LEAK: %d objects are left after everything was destroyed:\n%s", n,
			h.zfs("list", "-r", "-t", "all", h.dataset))
	}
	h.noDevices()
}

// patiently runs a command again for as long as it says that it has waited long enough
// for another one: in a slow guest an import may take longer than a clone waits.
func (h *host) patiently(args ...string) error {
	for deadline := time.Now().Add(5 * time.Minute); ; {
		_, err := h.try(args...)
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != exitInUse || time.Now().After(deadline) {
			return err
		}
	}
}

// objects counts what lies below the pool's dataset, the graveyard's own included.
func (h *host) objects() int {
	h.t.Helper()
	n := 0
	for line := range strings.Lines(h.zfs("list", "-H", "-r", "-t", "all", "-o", "name", h.dataset)) {
		if name := strings.TrimSpace(line); name != h.dataset && name != h.dataset+"/graveyard" {
			n++
		}
	}
	return n
}

// noDevices checks that no block device of the pool is there: idle zvols have none.
func (h *host) noDevices() {
	h.t.Helper()
	h.eventually("block devices of idle zvols have gone", func() bool {
		entries, err := os.ReadDir("/dev/zvol/" + h.dataset)
		return errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || len(entries) == 0
	})
}

func (h *host) eventually(what string, ok func() bool) {
	h.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			h.t.Fatalf("not in 30 s: %s", what)
		}
	}
}
