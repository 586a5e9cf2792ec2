package stack_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"
	"pando/internal/observe/stack"
	"pando/internal/testing/testfs"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if path := os.Getenv("PANDO_TEST_STACK_OF"); path != "" {
		os.Exit(child(path, os.Getenv("PANDO_TEST_STACK_COVER")))
	}
	os.Exit(m.Run())
}

// child hides a directory in its own mount namespace, puts another file at each path that
// was in it, and prints the stack of a path.
func child(path, cover string) int {
	err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	if err == nil && cover != "" {
		var names []string
		names, err = filepath.Glob(cover + "/*")
		if err == nil {
			err = unix.Mount("tmpfs", cover, "tmpfs", 0, "")
		}
		if os.Getenv("PANDO_TEST_STACK_OTHER") != "" && err == nil {
			for _, n := range names {
				err = os.WriteFile(n, []byte("another"), 0o600)
			}
		}
	}
	var s *stack.Stack
	if err == nil {
		s, err = stack.Of(context.Background(), path)
	}
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(s)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func of(t *testing.T, path string) *stack.Stack {
	t.Helper()
	s, err := stack.Of(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// line is what a test compares of a layer.
func line(l stack.Layer) string {
	return fmt.Sprintf("%d %s %s", l.Depth, l.Kind, l.Name)
}

func lines(layers []stack.Layer) (out []string) {
	for _, l := range layers {
		out = append(out, line(l))
	}
	return out
}

// want compares a stack with layers, and with those below a directory after them.
func want(t *testing.T, s *stack.Stack, above []string, below string) {
	t.Helper()
	var wanted []string
	for i, a := range above {
		wanted = append(wanted, fmt.Sprintf("%d %s", i, a))
	}
	hidden := ""
	if below != "" {
		rest := of(t, below)
		for _, l := range rest.Layers {
			l.Depth += len(above)
			wanted = append(wanted, line(l))
		}
		hidden = rest.Hidden
	}
	if got := lines(s.Layers); !slices.Equal(got, wanted) {
		t.Errorf("the stack of %s is\n%s\nwant\n%s", s.Path, strings.Join(got, "\n"), strings.Join(wanted, "\n"))
	}
	if below != "" && s.Hidden != hidden {
		t.Errorf("hidden: %q, want %q", s.Hidden, hidden)
	}
}

func TestOnLoop(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			fs := testfs.New(t, kind, 64<<20)
			file := filepath.Join(fs.Dir(), "f")
			if err := os.WriteFile(file, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			for _, path := range []string{fs.Dir(), file} {
				s := of(t, path)
				want(t, s, []string{"filesystem " + kind + " on " + fs.Dir(), "loop " + fs.Device()}, filepath.Dir(fs.Dir()))
				if s.Path != path || s.Layers[0].FSType != kind || s.Layers[0].Mount.Point != fs.Dir() {
					t.Errorf("%+v", s)
				}
				if d := s.Layers[1].Device; d == nil || !d.VolatileCache || filepath.Dir(d.Backing) != filepath.Dir(fs.Dir()) {
					t.Errorf("%+v", d)
				}
				if n := len(s.Devices()); n < 1 || s.Devices()[0].Name != fs.Device() {
					t.Errorf("%d devices", n)
				}
			}
			want(t, of(t, "/dev/"+fs.Device()), []string{"loop " + fs.Device()}, filepath.Dir(fs.Dir()))
		})
	}
}

func TestImageInImage(t *testing.T) {
	outer := testfs.New(t, "xfs", 320<<20)
	inner := testfs.NewIn(t, outer.Dir(), "ext4", 64<<20)
	want(t, of(t, inner.Dir()), []string{
		"filesystem ext4 on " + inner.Dir(), "loop " + inner.Device(),
		"filesystem xfs on " + outer.Dir(), "loop " + outer.Device(),
	}, filepath.Dir(outer.Dir()))
}

// TestTwoDevices: of a btrfs on two devices both are found, whichever was named.
func TestTwoDevices(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	var loops []string
	for i := range 2 {
		image := filepath.Join(dir, fmt.Sprint("image", i))
		if err := os.WriteFile(image, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(image, 256<<20); err != nil {
			t.Fatal(err)
		}
		loop := do(t, "losetup", "--show", "-f", image)
		t.Cleanup(func() { do(t, "losetup", "-d", loop) })
		loops = append(loops, loop)
	}
	do(t, "mkfs.btrfs", "-q", "-d", "raid1", "-m", "raid1", loops[0], loops[1])
	do(t, "btrfs", "device", "scan", loops[0], loops[1])
	for _, source := range loops {
		m := t.TempDir()
		if err := unix.Mount(source, m, "btrfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		s := of(t, m)
		unmount(t, m)
		below := of(t, dir)
		wanted := []string{"0 filesystem btrfs on " + m}
		for i, l := range slices.Sorted(slices.Values(loops)) {
			wanted = append(wanted, "1 loop "+filepath.Base(l))
			if i > 0 {
				continue // what is below both is there once
			}
			for _, b := range below.Layers {
				b.Depth += 2
				wanted = append(wanted, line(b))
			}
		}
		got := lines(s.Layers)
		slices.Sort(got)
		slices.Sort(wanted)
		if !slices.Equal(got, wanted) {
			t.Errorf("%q, want %q", got, wanted)
		}
	}
}

func TestElsewhere(t *testing.T) {
	tmpfs := testfs.Tmpfs(t, 16<<20)
	s := of(t, tmpfs)
	want(t, s, []string{"memory tmpfs on " + tmpfs}, "")
	if !strings.Contains(s.Hidden, "memory") || len(s.Devices()) != 0 || len(s.Bottom()) != 0 {
		t.Errorf("%+v", s)
	}
	inMemory := testfs.NewIn(t, tmpfs, "ext4", 8<<20)
	if b := of(t, inMemory.Dir()).Bottom(); len(b) != 1 || b[0].Name != inMemory.Device() {
		t.Errorf("at the bottom of a filesystem in a file in memory: %+v", b)
	}

	base := testfs.New(t, "ext4", 64<<20)
	for _, d := range []string{"lower", "upper", "work"} {
		if err := os.Mkdir(filepath.Join(base.Dir(), d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	merged := t.TempDir()
	if err := unix.Mount("overlay", merged, "overlay", 0,
		fmt.Sprintf("lowerdir=%[1]s/lower,upperdir=%[1]s/upper,workdir=%[1]s/work", base.Dir())); err != nil {
		skip(t, "no overlay: %v", err)
	}
	defer unmount(t, merged)
	want(t, of(t, merged), []string{"overlay overlay on " + merged, "filesystem ext4 on " + base.Dir(),
		"loop " + base.Device()}, filepath.Dir(base.Dir()))

	lower := t.TempDir()
	if err := unix.Mount("overlay", lower, "overlay", unix.MS_RDONLY,
		fmt.Sprintf("lowerdir=%[1]s/lower:%[1]s/upper", base.Dir())); err != nil {
		t.Fatal(err)
	}
	defer unmount(t, lower)
	if s := of(t, lower); !strings.Contains(s.Hidden, "without an upper directory") {
		t.Errorf("%+v", s)
	}
}

// TestOverlayOfDetachedLayers: the source of a mount says where an upper layer is that is mounted nowhere else.
func TestOverlayOfDetachedLayers(t *testing.T) {
	needRoot(t)
	base := testfs.New(t, "ext4", 64<<20)
	for _, d := range []string{mount.UpperDir, mount.WorkDir} {
		if err := os.Mkdir(filepath.Join(base.Dir(), d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	lower, err := mount.Tree(t.TempDir(), true)
	if err != nil {
		t.Fatal(err)
	}
	defer lower.Close()
	upper, err := mount.Device("ext4", "/dev/"+base.Device(), nil, false)
	if err != nil {
		t.Fatal(err)
	}
	defer upper.Close()
	m, err := mount.Overlay{Lower: lower, Upper: upper, Name: "test", UpperPath: "/dev/" + base.Device()}.Mount()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	merged := t.TempDir()
	if _, err := m.MoveTo(merged); err != nil {
		t.Fatal(err)
	}
	m.Close()
	defer unmount(t, merged)
	want(t, of(t, merged), []string{"overlay overlay on " + merged, "loop " + base.Device()}, filepath.Dir(base.Dir()))
}

func TestFUSE(t *testing.T) {
	needRoot(t)
	if _, err := os.Stat("/dev/fuse"); err != nil {
		skip(t, "no FUSE: %v", err)
	}
	root, err := fs.NewLoopbackRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	at := t.TempDir()
	server, err := fs.Mount(at, root,
		&fs.Options{MountOptions: fuse.MountOptions{DirectMount: true, FsName: "some program", Name: "passthrough"}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := server.Unmount(); err != nil {
			t.Error(err)
		}
		server.Wait()
	}()
	s := of(t, at)
	want(t, s, []string{"fuse fuse.passthrough on " + at}, "")
	if !strings.Contains(s.Hidden, "only the program knows the layers below") {
		t.Errorf("%q", s.Hidden)
	}
}

// TestBinds: bind mounts are what they are of, and a mount over another hides it.
func TestBinds(t *testing.T) {
	a, b := testfs.New(t, "ext4", 32<<20), testfs.New(t, "xfs", 320<<20)
	file := filepath.Join(a.Dir(), "f")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	dir, target := t.TempDir(), filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(target, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	bind := func(from, to string) {
		t.Helper()
		if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
	}
	bind(a.Dir(), dir)
	defer unmount(t, dir)
	bind(file, target)
	defer unmount(t, target)
	for _, at := range []string{dir, target} {
		want(t, of(t, at), []string{"filesystem ext4 on " + at, "loop " + a.Device()}, filepath.Dir(a.Dir()))
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if s := of(t, link); s.Path != dir {
		t.Errorf("the path behind the link is %s", s.Path)
	}
	bind(b.Dir(), dir)
	defer unmount(t, dir)
	want(t, of(t, dir), []string{"filesystem xfs on " + dir, "loop " + b.Device()}, filepath.Dir(b.Dir()))
}

// TestHidden: a loop device whose file cannot be seen ends the stack, and says why.
func TestHidden(t *testing.T) {
	fs := testfs.New(t, "ext4", 32<<20)
	above := []string{"filesystem ext4 on " + fs.Dir(), "loop " + fs.Device()}

	image := of(t, fs.Dir()).Layers[1].Device.Backing
	for _, c := range []struct{ other, words string }{
		{"", "is not visible from here"}, {"1", "is another file"},
	} {
		// The image is in a directory of its own, which the child covers.
		in := testfs.Ext4(t, 64<<20)
		inner := testfs.NewIn(t, in, "ext4", 16<<20)
		s := inNamespace(t, inner.Dir(), in, c.other)
		want(t, s, []string{"filesystem ext4 on " + inner.Dir(), "loop " + inner.Device()}, "")
		if !strings.Contains(s.Hidden, c.words) {
			t.Errorf("hidden: %q, want %q", s.Hidden, c.words)
		}
		// And where nothing is covered all is seen.
		if s := inNamespace(t, inner.Dir(), "", ""); len(s.Layers) < 4 || s.Hidden != of(t, in).Hidden {
			t.Errorf("%+v", s)
		}
	}

	if err := os.Remove(image); err != nil {
		t.Fatal(err)
	}
	s := of(t, fs.Dir())
	want(t, s, above, "")
	if !strings.Contains(s.Hidden, "has been deleted") {
		t.Errorf("hidden: %q", s.Hidden)
	}
}

// inNamespace is stack.Of in a mount namespace where a directory is covered.
func inNamespace(t *testing.T, path, cover, other string) *stack.Stack {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "PANDO_TEST_STACK_OF="+path, "PANDO_TEST_STACK_COVER="+cover,
		"PANDO_TEST_STACK_OTHER="+other)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var s stack.Stack
	if err := json.Unmarshal(out, &s); err != nil {
		t.Fatal(err)
	}
	return &s
}

func TestErrors(t *testing.T) {
	if _, err := stack.Of(t.Context(), "/no/such/path"); !errs.Is(err, errs.NotFound) {
		t.Errorf("%v", err)
	}
	if _, err := stack.Of(t.Context(), "/dev/null"); !errs.Is(err, errs.Unsupported) {
		t.Errorf("%v", err)
	}
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
}

func skip(t *testing.T, format string, args ...any) {
	t.Helper()
	if os.Getenv("PANDO_TEST_REQUIRE_ALL") != "" && os.Getuid() == 0 {
		t.Fatalf(format, args...)
	}
	t.Skipf("SKIPPED: "+format, args...)
}

func unmount(t *testing.T, dir string) {
	t.Helper()
	if err := unix.Unmount(dir, 0); err != nil {
		t.Error(err)
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	}
}

func do(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := exec.Command(program, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}
