package treecopy

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/testing/treetest"
)

var bg = context.Background()

// needRoot skips a test that makes device nodes, owners, mounts.
func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: this test needs root")
	}
}

func needTool(t testing.TB, name string) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		t.Skipf("SKIPPED: %s is not installed", name)
	}
}

// mkdir makes a directory below a fresh temporary one.
func mkdir(t testing.TB, name string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	must(t, os.Mkdir(dir, 0o755))
	return dir
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func run(t testing.TB, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

func write(t testing.TB, name, content string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(name), 0o755))
	must(t, os.WriteFile(name, []byte(content), 0o644))
}

func read(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	must(t, err)
	return string(b)
}

func openFile(t testing.TB, dir string) *os.File {
	t.Helper()
	f, err := os.Open(dir)
	must(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

// mount mounts a filesystem for the time of the test.
func mount(t testing.TB, fstype, data string) string {
	t.Helper()
	dir := mkdir(t, "mnt")
	mountAt(t, fstype, data, dir)
	return dir
}

func mountAt(t testing.TB, fstype, data, dir string) {
	t.Helper()
	must(t, unix.Mount(fstype, dir, fstype, 0, data))
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// loopMount makes a filesystem in a file of the given size in MiB and mounts it.
func loopMount(t testing.TB, fstype string, mib int64) string {
	t.Helper()
	needTool(t, "mkfs."+fstype)
	needTool(t, "mount")
	img := filepath.Join(t.TempDir(), "img")
	f, err := os.Create(img)
	must(t, err)
	must(t, f.Truncate(mib<<20))
	must(t, f.Close())
	args := map[string][]string{"ext4": {"-q", "-F"}, "xfs": {"-q"}, "btrfs": {"-q"}}[fstype]
	run(t, "/", "mkfs."+fstype, append(args, img)...)
	dir := mkdir(t, "mnt")
	opts := map[string]string{"ext4": "loop,noinit_itable", "xfs": "loop", "btrfs": "loop"}[fstype]
	run(t, "/", "mount", "-o", opts, img, dir)
	t.Cleanup(func() { run(t, "/", "umount", dir) })
	return dir
}

// copyDir copies and fails the test on an error.
func copyDir(t testing.TB, src, dst string, opt Options) Totals {
	t.Helper()
	n, err := CopyDir(bg, src, openFile(t, dst), opt)
	if err != nil {
		t.Fatalf("CopyDir: %v (%s)", err, errs.HintOf(err))
	}
	return n
}

// wantErr fails the test unless err is of the kind and says all of the words,
// in its message or its hint.
func wantErr(t testing.TB, err error, kind errs.Kind, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error; want %s %q", kind, words)
	}
	if errs.KindOf(err) != kind {
		t.Errorf("kind is %s, want %s: %v", errs.KindOf(err), kind, err)
	}
	text := err.Error() + "\n" + errs.HintOf(err)
	for _, w := range words {
		if !strings.Contains(text, w) {
			t.Errorf("%q is not in %q", w, text)
		}
	}
	if !strings.HasPrefix(err.Error(), op) {
		t.Errorf("the error does not begin with the operation: %q", err)
	}
}

func openFDs(t testing.TB) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(list)
}

// noLeaks fails the test if, at its end, descriptors or goroutines are left.
func noLeaks(t testing.TB) {
	t.Helper()
	if r, w, err := os.Pipe(); err == nil { // the runtime's poller opens its own
		r.Close()
		w.Close()
	}
	fds, routines := openFDs(t), runtime.NumGoroutine()
	t.Cleanup(func() {
		for i := 0; ; i++ {
			f, g := openFDs(t), runtime.NumGoroutine()
			if f <= fds && g <= routines {
				return
			}
			if i == 200 {
				buf := make([]byte, 1<<16)
				t.Errorf("%d descriptors and %d goroutines, %d and %d before\n%s", f, g, fds, routines,
					buf[:runtime.Stack(buf, true)])
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
}

// build makes the nasty tree.
func build(t testing.TB) string {
	t.Helper()
	dir := mkdir(t, "src")
	treetest.Build(t, dir)
	return dir
}

// checkRoot compares what Compare leaves out of the root.
func checkRoot(t testing.TB, dst string) {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(dst, &st))
	if st.Mode != unix.S_IFDIR|0o755 {
		t.Errorf("the root's mode is %o", st.Mode)
	}
}

func listing(t testing.TB, dir string) string {
	t.Helper()
	var names []string
	must(t, filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if p != dir {
			names = append(names, strings.TrimPrefix(p, dir+"/"))
		}
		return err
	}))
	return fmt.Sprintf("%q", names)
}
