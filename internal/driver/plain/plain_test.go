package plain_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/driver/drivertest"
	"pando/internal/driver/plain"
	"pando/internal/linux/mount"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
)

func TestConformance(t *testing.T) {
	drivertest.Run(t, drivertest.Target{
		Open:  plain.Open,
		Dir:   func(t testing.TB) string { return t.TempDir() },
		Small: func(t testing.TB) string { return testfs.Ext4(t, 64<<20) },
		Power: func(t testing.TB) drivertest.Power { return testfs.New(t, "ext4", 256<<20) },
	})
}

func TestConformanceTmpfs(t *testing.T) {
	drivertest.Run(t, drivertest.Target{
		Open:  plain.Open,
		Dir:   func(t testing.TB) string { return testfs.Tmpfs(t, 1<<30) },
		Small: func(t testing.TB) string { return testfs.Tmpfs(t, 64<<20) },
	})
}

func TestConformanceXFS(t *testing.T) {
	drivertest.Run(t, drivertest.Target{
		Open:  plain.Open,
		Dir:   func(t testing.TB) string { return testfs.XFS(t, 2<<30) },
		Small: func(t testing.TB) string { return testfs.XFS(t, 320<<20) },
		Power: func(t testing.TB) drivertest.Power { return testfs.New(t, "xfs", 320<<20) },
	})
}

func TestConformanceBtrfs(t *testing.T) {
	drivertest.Run(t, drivertest.Target{
		Open:  plain.Open,
		Dir:   func(t testing.TB) string { return testfs.Btrfs(t, 2<<30) },
		Power: func(t testing.TB) drivertest.Power { return testfs.New(t, "btrfs", 256<<20) },
	})
}

// nobody is a user without any rights.
const nobody = 65534

// Environment of a child that runs without root: where it may write, and a
// small filesystem.
const (
	envDir   = "PANDO_TEST_UNPRIVILEGED_DIR"
	envSmall = "PANDO_TEST_UNPRIVILEGED_SMALL"
)

// unprivileged runs the calling test again in a child process without root, and
// returns false there. It returns true in the parent, when the child is done.
func unprivileged(t *testing.T) bool {
	t.Helper()
	if os.Geteuid() != 0 {
		return false
	}
	dir, small := t.TempDir(), testfs.Ext4(t, 64<<20)
	for _, d := range []string{dir, small} {
		if err := os.Chown(d, nobody, nobody); err != nil {
			t.Fatal(err)
		}
		// Temporary directories of tests are closed to others.
		for up := filepath.Dir(d); up != os.TempDir() && up != "/"; up = filepath.Dir(up) {
			if err := os.Chmod(up, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	binary := filepath.Join(filepath.Dir(dir), "tests")
	if err := copyFile(binary, "/proc/self/exe", 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), binary, "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), envDir+"="+dir, envSmall+"="+small, "TMPDIR="+dir, "HOME="+dir,
		faulttest.DrawnVariable+"=") // a file of root's
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("without root: %v\n%s", err, out)
	} else if !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("without root, the test did not run:\n%s", out)
	}
	return true
}

func copyFile(to, from string, mode os.FileMode) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Close(), os.Chmod(to, mode))
}

// TestConformanceUnprivileged runs the suite as a user without rights.
func TestConformanceUnprivileged(t *testing.T) {
	if unprivileged(t) {
		return
	}
	target := drivertest.Target{
		Open: plain.Open,
		Dir: func(t testing.TB) string {
			if dir := os.Getenv(envDir); dir != "" {
				return dir
			}
			return t.TempDir()
		},
	}
	if small := os.Getenv(envSmall); small != "" {
		target.Small = func(testing.TB) string { return small }
	}
	drivertest.Run(t, target)
}

// pool opens a pool in dir with one volume, and returns its tree.
func pool(t testing.TB, dir string) (*plain.Driver, driver.ObjectID, string) {
	t.Helper()
	d, err := plain.Open(t.Context(), dir, "pool", true)
	if err != nil {
		t.Fatal(err)
	}
	p := d.(*plain.Driver)
	t.Cleanup(func() { p.Close() })
	id := identity(driver.Volume)
	if err := p.Create(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	return p, id.ID, treeOf(t, p, id.ID)
}

func identity(kind driver.Kind) driver.Identity {
	return driver.Identity{ID: driver.NewID(), Kind: kind, Name: "web", FS: driver.Native, CreatedAt: time.Now()}
}

func treeOf(t testing.TB, d *plain.Driver, id driver.ObjectID) string {
	t.Helper()
	a, err := d.Attachment(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return a.Tree
}

func write(t testing.TB, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// objects lists what lies in the pool.
func objects(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "objects"))
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// TestMountInside checks that what is mounted in a volume survives its
// destruction, and that this can be repeated.
func TestMountInside(t *testing.T) {
	dir := testfs.Tmpfs(t, 16<<20)
	precious := testfs.Tmpfs(t, 16<<20)
	write(t, filepath.Join(precious, "file"), "precious")
	d, vol, tree := pool(t, dir)
	write(t, filepath.Join(tree, "a/b/file"), "x")
	if err := os.Mkdir(filepath.Join(tree, "a/point"), 0o755); err != nil {
		t.Fatal(err)
	}
	m, err := mount.Tree(precious, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.MoveTo(filepath.Join(tree, "a/point")); err != nil {
		t.Fatal(err)
	}
	m.Close()
	err = d.Destroy(t.Context(), vol)
	if !errs.Is(err, errs.InUse) || !strings.Contains(err.Error(), "a/point") {
		t.Errorf("destroy with a mount inside: %v, want in_use and its path", err)
	}
	if b, err := os.ReadFile(filepath.Join(precious, "file")); err != nil || string(b) != "precious" {
		t.Errorf("what was mounted is %q, %v", b, err)
	}
	for o, err := range d.List(t.Context()) {
		if err != nil || o.ID != vol || o.Whole {
			t.Errorf("List yields %+v, %v; want the object, not whole", o, err)
		}
	}
	if err := mount.Unmount(filepath.Join(tree, "a/point")); err != nil {
		t.Fatal(err)
	}
	if err := d.Destroy(t.Context(), vol); err != nil {
		t.Error(err)
	}
	if left := objects(t, dir); len(left) != 0 {
		t.Errorf("destroying left %q", left)
	}
}

// TestClosedDirectories clones and destroys, without root, directories that
// their owner has closed to himself.
func TestClosedDirectories(t *testing.T) {
	if unprivileged(t) {
		return
	}
	dir := os.Getenv(envDir)
	if dir == "" {
		dir = t.TempDir()
	}
	d, vol, tree := pool(t, dir)
	modes := []os.FileMode{0o000, 0o100, 0o200, 0o300, 0o400, 0o500, 0o600}
	for _, outer := range modes {
		for _, inner := range modes {
			write(t, filepath.Join(tree, outer.String(), inner.String(), "d/file"), "x")
		}
	}
	// 0500 can be read, so this much can be cloned.
	readable := filepath.Join(tree, "readable")
	write(t, filepath.Join(readable, "d/file"), "x")
	for _, p := range []string{"d", "."} {
		if err := os.Chmod(filepath.Join(readable, p), 0o500); err != nil {
			t.Fatal(err)
		}
	}
	for _, outer := range modes {
		for _, inner := range modes {
			if err := os.Chmod(filepath.Join(tree, outer.String(), inner.String()), inner); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chmod(filepath.Join(tree, outer.String()), outer); err != nil {
			t.Fatal(err)
		}
	}
	before := objects(t, dir)
	clone := identity(driver.Volume)
	err := d.Clone(t.Context(), vol, clone)
	if !errs.Is(err, errs.Permission) {
		t.Errorf("cloning what the caller cannot read: %v, want permission", err)
	}
	if after := objects(t, dir); !slices.Equal(before, after) {
		t.Errorf("a clone that failed left %q instead of %q", after, before)
	}
	if _, err := d.Usage(t.Context(), vol); !errs.Is(err, errs.Permission) || !strings.Contains(err.Error(), tree) {
		t.Errorf("measuring what the caller cannot read: %v, want permission and a path", err)
	}
	if err := d.Destroy(t.Context(), vol); err != nil {
		t.Error(err)
	}
	if left := objects(t, dir); len(left) != 0 {
		t.Errorf("destroying left %q", left)
	}
}

// TestErrorNamesFile checks that a copy that fails says at which file, as what
// was asked for, and leaves nothing.
func TestErrorNamesFile(t *testing.T) {
	dir := testfs.Ext4(t, 32<<20)
	d, vol, tree := pool(t, dir)
	write(t, filepath.Join(tree, "some/large"), strings.Repeat("x", 16<<20))
	before := objects(t, dir)
	err := d.Clone(t.Context(), vol, identity(driver.Volume))
	if !errs.Is(err, errs.NoSpace) || !strings.HasPrefix(err.Error(), "clone ") ||
		!strings.Contains(err.Error(), "some/large") ||
		!strings.Contains(errs.HintOf(err), `operation "destroy"`) {
		t.Errorf("clone without room: %v with hint %q", err, errs.HintOf(err))
	}
	if after := objects(t, dir); !slices.Equal(before, after) {
		t.Errorf("it left %q instead of %q", after, before)
	}
}

func BenchmarkClone(b *testing.B) {
	d, vol, tree := pool(b, testfs.Ext4(b, 4<<30))
	const files = 5000
	for i := range files {
		write(b, filepath.Join(tree, fmt.Sprintf("d%d/f%d", i%100, i)), strings.Repeat("x", 3000))
	}
	if err := d.Sync(b.Context()); err != nil {
		b.Fatal(err)
	}
	for _, ephemeral := range []bool{false, true} {
		b.Run(fmt.Sprintf("%dfiles/ephemeral=%v", files, ephemeral), func(b *testing.B) {
			var destroying time.Duration
			for b.Loop() {
				id := identity(driver.Volume)
				id.Ephemeral = ephemeral
				if err := d.Clone(b.Context(), vol, id); err != nil {
					b.Fatal(err)
				}
				start := time.Now()
				if err := d.Destroy(b.Context(), id.ID); err != nil {
					b.Fatal(err)
				}
				destroying += time.Since(start)
			}
			b.ReportMetric(float64(destroying.Milliseconds())/float64(b.N), "destroy-ms/op")
		})
	}
}

// TestFlags copies and destroys a volume with files that are immutable or append-only,
// as its root is.
func TestFlags(t *testing.T) {
	d, vol, tree := pool(t, testfs.Ext4(t, 64<<20))
	treetest.BuildFlags(t, tree, treetest.Immutable|treetest.Append|treetest.NoDump, false)
	if err := errors.Join(os.Chmod(tree, 0o1770), treetest.SetFlags(tree, treetest.Immutable)); err != nil {
		t.Fatal(err)
	}
	clone, live, again := identity(driver.Volume), identity(driver.Snapshot), identity(driver.Volume)
	err := errors.Join(d.Clone(t.Context(), vol, clone), d.CopyLive(t.Context(), vol, live, true, nil),
		d.Clone(t.Context(), live.ID, again))
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []driver.ObjectID{clone.ID, live.ID, again.ID} {
		treetest.Compare(t, tree, treeOf(t, d, id), 0)
	}
	for _, id := range []driver.ObjectID{vol, clone.ID, live.ID, again.ID} {
		path := treeOf(t, d, id)
		if err := d.Destroy(t.Context(), id); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("after Destroy: %v", err)
		}
	}
}
