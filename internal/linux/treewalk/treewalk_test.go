package treewalk_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"
	"pando/internal/linux/treewalk"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// build makes directories ("d/") and files below dir.
func build(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, n := range names {
		p := filepath.Join(dir, n)
		if strings.HasSuffix(n, "/") {
			if err := os.MkdirAll(p, 0o755); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(n), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func exists(p string) bool { _, err := os.Lstat(p); return err == nil }

// walk collects the paths that are visited, and checks the order of visits.
func walk(t *testing.T, root *os.File, visit func(d *treewalk.Dir, names []string) error) ([]string, error) {
	t.Helper()
	var mu sync.Mutex
	var seen []string
	left := map[string]bool{}
	err := treewalk.Walk(t.Context(), root, treewalk.Funcs{
		Visit: func(d *treewalk.Dir, f *os.File) ([]string, error) {
			var subdirs, names []string
			entries, err := f.ReadDir(-1)
			if err != nil {
				return nil, err
			}
			for _, e := range entries {
				names = append(names, d.Join(e.Name()))
				if e.IsDir() {
					subdirs = append(subdirs, e.Name())
				}
			}
			mu.Lock()
			seen = append(seen, d.Path())
			if len(subdirs) == 0 {
				left[d.Path()] = true
			}
			mu.Unlock()
			if visit != nil {
				err = visit(d, names)
			}
			return subdirs, err
		},
		Leave: func(d *treewalk.Dir, subdirs []string) error {
			mu.Lock()
			defer mu.Unlock()
			for _, s := range subdirs {
				if !left[d.Join(s)] {
					t.Errorf("left %q before %q in it", d.Path(), s)
				}
			}
			left[d.Path()] = true
			return nil
		},
	})
	if err == nil && !left[""] {
		t.Error("the root was never left")
	}
	slices.Sort(seen)
	return seen, err
}

func TestWalk(t *testing.T) {
	dir := t.TempDir()
	want := []string{""}
	for i := range 20 {
		for j := range 20 {
			build(t, dir, fmt.Sprintf("a%d/b%d/c/d/file", i, j))
		}
	}
	if err := os.Symlink("/", filepath.Join(dir, "a0", "outside")); err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		a := fmt.Sprintf("a%d", i)
		want = append(want, a)
		for j := range 20 {
			b := fmt.Sprintf("%s/b%d", a, j)
			want = append(want, b, b+"/c", b+"/c/d")
		}
	}
	slices.Sort(want)
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	got, err := walk(t, root, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, want) {
		t.Errorf("visited %d directories, want %d", len(got), len(want))
	}

	// An error stops it.
	var visits atomic.Int64
	boom := errors.New("boom")
	if _, err := walk(t, root, func(*treewalk.Dir, []string) error {
		if visits.Add(1) == 5 {
			return boom
		}
		return nil
	}); !errors.Is(err, boom) {
		t.Errorf("error of a visit: %v", err)
	}
	if n := visits.Load(); n > 200 {
		t.Errorf("after an error %d more directories were visited", n-5)
	}
	// So does the end of the context.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err = treewalk.Walk(ctx, root, treewalk.Funcs{Visit: func(*treewalk.Dir, *os.File) ([]string, error) {
		return nil, nil
	}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("with a cancelled context: %v", err)
	}
}

// deepen makes a chain of directories far longer than any path may be.
func deepen(t *testing.T, dir string, depth int) {
	t.Helper()
	name := strings.Repeat("n", 100)
	at, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range depth {
		if err := unix.Mkdirat(at, name, 0o755); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(at)
		at = next
	}
	fd, err := unix.Openat(at, "bottom", unix.O_CREAT|unix.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	unix.Close(at)
}

// TestDeep walks and removes a tree whose paths no system call takes, with few
// descriptors.
func TestDeep(t *testing.T) {
	const depth = 500
	dir := filepath.Join(t.TempDir(), "deep")
	build(t, dir, "x/")
	deepen(t, dir, depth)
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var bottom atomic.Bool
	var most atomic.Int64
	got, err := walk(t, root, func(_ *treewalk.Dir, names []string) error {
		for _, n := range names {
			if strings.HasSuffix(n, "/bottom") {
				bottom.Store(true)
			}
		}
		if fds, err := os.ReadDir("/proc/self/fd"); err == nil {
			most.Store(max(most.Load(), int64(len(fds))))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != depth+2 || !bottom.Load() {
		t.Errorf("visited %d directories, want %d; saw the file at the bottom: %v", len(got), depth+2, bottom.Load())
	}
	if most.Load() > 100 {
		t.Errorf("%d descriptors were open at once", most.Load())
	}
	if err := treewalk.Remove(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if exists(dir) {
		t.Error("it is still there")
	}
}

func TestOpenStaysInside(t *testing.T) {
	dir := t.TempDir()
	build(t, dir, "root/sub/inner/", "outside/file")
	for link, to := range map[string]string{"root/abs": filepath.Join(dir, "outside"), "root/rel": "../outside",
		"root/sub/here": "."} {
		if err := os.Symlink(to, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	root, err := os.Open(filepath.Join(dir, "root"))
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for _, p := range []string{"..", "sub/../..", "abs", "rel", "sub/here", "sub/here/here", "sub/here/inner", "/"} {
		if f, err := treewalk.Open(root, p); err == nil {
			f.Close()
			t.Errorf("Open(%q) left the tree or followed a link", p)
		}
	}
	for _, p := range []string{"", "sub", "sub/.."} {
		f, err := treewalk.Open(root, p)
		if err != nil {
			t.Errorf("Open(%q): %v", p, err)
			continue
		}
		f.Close()
	}
}

func TestRemove(t *testing.T) {
	dir := t.TempDir()
	victim := filepath.Join(dir, "victim")
	var names []string
	for i := range 3000 { // more than one batch of entries
		names = append(names, fmt.Sprintf("many/file%d", i))
	}
	for i := range 100 {
		names = append(names, fmt.Sprintf("dirs/d%d/e/", i))
	}
	build(t, victim, names...)
	build(t, dir, "outside/file", "outside/dir/file")
	for link, to := range map[string]string{"abs": filepath.Join(dir, "outside"), "rel": "../outside",
		"dangling": "nowhere", "dirs/up": "../../outside"} {
		if err := os.Symlink(to, filepath.Join(victim, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(victim, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(filepath.Join(dir, "outside/file"), filepath.Join(victim, "hardlink")); err != nil {
		t.Fatal(err)
	}
	for range 2 { // absent is success
		if err := treewalk.Remove(t.Context(), victim); err != nil {
			t.Fatal(err)
		}
	}
	if exists(victim) {
		t.Error("it is still there")
	}
	for _, p := range []string{"outside/file", "outside/dir/file"} {
		if b, err := os.ReadFile(filepath.Join(dir, p)); err != nil || string(b) != p {
			t.Errorf("%s, which links pointed to: %q, %v", p, b, err)
		}
	}
	// What is no directory goes by its name alone.
	link := filepath.Join(dir, "link")
	if err := os.Symlink("outside", link); err != nil {
		t.Fatal(err)
	}
	if err := treewalk.Remove(t.Context(), link); err != nil || exists(link) ||
		!exists(filepath.Join(dir, "outside/file")) {
		t.Errorf("removing a symbolic link: %v", err)
	}
	file := filepath.Join(dir, "outside/file")
	if err := treewalk.Remove(t.Context(), file); err != nil || exists(file) {
		t.Errorf("removing a file: %v", err)
	}
	if err := treewalk.Remove(t.Context(), filepath.Join(dir, "no/such/dir")); err != nil {
		t.Errorf("removing below a directory that is not there: %v", err)
	}
}

// TestRemoveTogether: who removes a tree finds it a success that others do the same.
func TestRemoveTogether(t *testing.T) {
	victim := filepath.Join(t.TempDir(), "victim")
	for range 5 {
		var names []string
		for i := range 300 {
			names = append(names, fmt.Sprintf("d%d/e/file", i))
		}
		build(t, victim, names...)

		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				if err := treewalk.Remove(t.Context(), victim); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if exists(victim) {
			t.Fatal("it is still there")
		}
	}
}

func TestRemoveCanceled(t *testing.T) {
	victim := filepath.Join(t.TempDir(), "victim")
	build(t, victim, "a/b/c", "a/d")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := treewalk.Remove(ctx, victim); !errs.Is(err, errs.Canceled) {
		t.Errorf("with a cancelled context: %v", err)
	}
	if err := treewalk.Remove(t.Context(), victim); err != nil || exists(victim) {
		t.Errorf("afterwards: %v", err)
	}
}

// TestRemoveMounts checks that nothing on another filesystem is touched,
// wherever it is mounted in the tree.
func TestRemoveMounts(t *testing.T) {
	dir := testfs.Tmpfs(t, 16<<20)
	build(t, dir, "victim/a/b/point/", "victim/a/file", "victim/other/file", "victim/filepoint", "precious/file",
		"precious/dir/file")
	mountAt := func(from, to string) func() {
		t.Helper()
		// The same filesystem: only the mount tells them apart.
		m, err := mount.Tree(filepath.Join(dir, from), false)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if _, err := m.MoveTo(filepath.Join(dir, to)); err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := mount.Unmount(filepath.Join(dir, to)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, point := range []string{"victim/a/b/point", "victim/filepoint", "victim"} {
		from := "precious"
		if strings.HasSuffix(point, "filepoint") {
			from = "precious/file"
		}
		build(t, dir, "victim/a/b/point/", "victim/other/file", "victim/filepoint")
		umount := mountAt(from, point)
		err := treewalk.Remove(t.Context(), filepath.Join(dir, "victim"))
		if !errs.Is(err, errs.InUse) || !strings.Contains(err.Error(), filepath.Join(dir, point)) || errs.HintOf(err) == "" {
			t.Errorf("with a mount at %s: %v with hint %q; want in_use, the path and a hint", point, err, errs.HintOf(err))
		}
		if point != "victim" && exists(filepath.Join(dir, "victim/other")) {
			t.Errorf("the mount at %s kept everything else from being removed", point)
		}
		umount()
		for _, p := range []string{"precious/file", "precious/dir/file"} {
			if b, err := os.ReadFile(filepath.Join(dir, p)); err != nil || string(b) != p {
				t.Errorf("with a mount at %s, %s was touched: %q, %v", point, p, b, err)
			}
		}
	}
	if err := treewalk.Remove(t.Context(), filepath.Join(dir, "victim")); err != nil ||
		exists(filepath.Join(dir, "victim")) {
		t.Errorf("when nothing is mounted any more: %v", err)
	}
}

// setFlags makes a file immutable or append-only, or neither, as chattr does.
func setFlags(t *testing.T, path string, flags uint32) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	have, err := kernel.GetFlags(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if err := kernel.SetFlags(int(f.Fd()), have&^(kernel.FlagImmutable|kernel.FlagAppend)|flags); err != nil {
		t.Fatal(err)
	}
}

// TestRemoveImmutable removes files and directories with flags that forbid it.
func TestRemoveImmutable(t *testing.T) {
	dir := testfs.Ext4(t, 16<<20)
	build(t, dir, "outside/victim/a/fixed", "outside/victim/a/log", "outside/victim/b/c/", "outside/victim/locked/inside",
		"outside/victim/grows/sub/x")
	victim := filepath.Join(dir, "outside/victim")
	for name, flags := range map[string]uint32{
		"a/fixed": kernel.FlagImmutable, "a/log": kernel.FlagAppend, "b/c": kernel.FlagImmutable,
		"locked": kernel.FlagImmutable,
		"grows":  kernel.FlagAppend, "grows/sub/x": kernel.FlagImmutable | kernel.FlagAppend, "": kernel.FlagImmutable,
	} {
		setFlags(t, filepath.Join(victim, name), flags)
	}
	// The directory that the tree is in is somebody else's.
	setFlags(t, filepath.Join(dir, "outside"), kernel.FlagImmutable)
	err := treewalk.Remove(t.Context(), victim)
	if !errs.Is(err, errs.Permission) || !strings.Contains(errs.HintOf(err), "chattr -ia "+filepath.Join(dir, "outside")) {
		t.Errorf("in an immutable directory: %v with hint %q", err, errs.HintOf(err))
	}
	setFlags(t, filepath.Join(dir, "outside"), 0)
	if err := treewalk.Remove(t.Context(), victim); err != nil || exists(victim) {
		t.Errorf("%v", err)
	}
}

// TestRemoveImmutableForbidden checks that the error names the file and helps where
// the flag cannot be taken away.
func TestRemoveImmutableForbidden(t *testing.T) {
	const variable = "PANDO_TEST_REMOVE"
	if path := os.Getenv(variable); path != "" {
		err := treewalk.Remove(t.Context(), path)
		fmt.Printf("kind %s\n%v\n%s\n", errs.KindOf(err), err, errs.HintOf(err))
		return
	}
	dir := testfs.Ext4(t, 16<<20)
	build(t, dir, "victim/a/kept", "victim/a/gone", "victim/b/c/")
	setFlags(t, filepath.Join(dir, "victim/a/kept"), kernel.FlagImmutable)
	// The child inherits what this thread may at most; the thread ends with it.
	var out []byte
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_LINUX_IMMUTABLE, 0, 0, 0)
		if err == nil {
			cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
			cmd.Env = append(os.Environ(), variable+"="+filepath.Join(dir, "victim"))
			out, err = cmd.CombinedOutput()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	kept := filepath.Join(dir, "victim/a/kept")
	for _, word := range []string{"kind permission", kept + ": it is immutable", "chattr -ia " + kept} {
		if !strings.Contains(string(out), word) {
			t.Errorf("%q is not in %q", word, out)
		}
	}
	if !exists(kept) || exists(filepath.Join(dir, "victim/b")) || exists(filepath.Join(dir, "victim/a/gone")) {
		t.Error("the wrong files are gone")
	}
	setFlags(t, kept, 0)
}

// TestCanceledAtTheEnd: a context may end in the moment in which the walk does. The race detector watches.
func TestCanceledAtTheEnd(t *testing.T) {
	dir := t.TempDir()
	build(t, dir, "a/", "a/b/")
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()

	for range 500 {
		ctx, cancel := context.WithCancel(t.Context())
		err := treewalk.Walk(ctx, root, treewalk.Funcs{Visit: func(d *treewalk.Dir, _ *os.File) ([]string, error) {
			switch d.Path() {
			case "":
				return []string{"a"}, nil
			case "a":
				return []string{"b"}, nil
			}
			go cancel()
			return nil, nil
		}})
		cancel()
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
}
