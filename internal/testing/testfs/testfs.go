// Package testfs makes real filesystems for tests: sparse image files, attached
// to loop devices and mounted, with a check at the end that nothing of them is
// left. Tests are skipped, saying what is missing, where that cannot be done.
package testfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/linux/run"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Smallest sizes that the mkfs programs accept, with some room.
const (
	minXFSBytes   = 320 << 20
	minBtrfsBytes = 128 << 20
)

// FS is a mounted filesystem.
type FS struct {
	t     testing.TB
	kind  string
	top   string // temporary directory that holds all of it
	dir   string
	image string // "" of tmpfs
	loop  int
	cuts  int

	options []string // of the mount
	mkfs    []string // more arguments of mkfs
}

// XFS mounts a fresh XFS of at least size bytes and returns its directory.
func XFS(t testing.TB, size int64) string { t.Helper(); return New(t, "xfs", size).Dir() }

// Btrfs mounts a fresh btrfs of at least size bytes and returns its directory.
func Btrfs(t testing.TB, size int64) string { t.Helper(); return New(t, "btrfs", size).Dir() }

// Ext4 mounts a fresh ext4 of size bytes and returns its directory.
func Ext4(t testing.TB, size int64) string { t.Helper(); return New(t, "ext4", size).Dir() }

// Ext4With mounts a fresh ext4 of size bytes, made with more arguments of mkfs ("-N", "512"), and returns its
// directory.
func Ext4With(t testing.TB, size int64, mkfs ...string) string {
	t.Helper()
	return newFS(t, "", "ext4", size, nil, mkfs).Dir()
}

// Tmpfs mounts a fresh tmpfs of size bytes and returns its directory.
func Tmpfs(t testing.TB, size int64) string { t.Helper(); return New(t, "tmpfs", size).Dir() }

// New mounts a fresh filesystem of a kind ("xfs", "btrfs", "ext4", "tmpfs").
// When the test ends it is unmounted, and the test fails if that leaves a mount
// or a loop device behind, or if something in the filesystem is still in use.
func New(t testing.TB, kind string, size int64) *FS {
	t.Helper()
	return NewIn(t, "", kind, size)
}

// NewIn is New with the image in a directory that is there until the test has ended
// ("": a temporary one), and with options of the mount: "nobarrier".
func NewIn(t testing.TB, in, kind string, size int64, options ...string) *FS {
	t.Helper()
	return newFS(t, in, kind, size, options, nil)
}

func newFS(t testing.TB, in, kind string, size int64, options, more []string) *FS {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skipf("SKIPPED: mounting a %s needs root: run the tests as root", kind)
	}

	fs := &FS{t: t, kind: kind, top: t.TempDir(), loop: -1, options: options, mkfs: more}
	fs.dir = filepath.Join(fs.top, "mnt")
	LeakCheck(t, fs.top)
	if in != "" {
		LeakCheck(t, in)
	}

	if err := os.Mkdir(fs.dir, 0o755); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(fs.unmount)
	if kind == "tmpfs" {
		fs.mount("tmpfs", "size="+strconv.FormatInt(size, 10))
		return fs
	}

	var args []string
	switch kind {
	case "xfs":
		size, args = max(size, minXFSBytes), []string{"-q", "-m", "reflink=1"}
	case "btrfs":
		size, args = max(size, minBtrfsBytes), []string{"-q"}
	case "ext4":
		args = []string{"-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"}
	default:
		t.Fatalf("testfs: unknown kind of filesystem %q", kind)
	}

	if _, err := run.Look("mkfs." + kind); err != nil {
		t.Skipf("SKIPPED: %v: install the package with mkfs.%s", err, kind)
	}

	fs.image = filepath.Join(fs.top, "image")
	if in != "" {
		fs.image = filepath.Join(in, "image")
	}

	f, err := os.OpenFile(fs.image, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err == nil {
		err = errors.Join(f.Truncate(size), f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}

	if _, err := run.Program(t.Context(), "mkfs."+kind, slices.Concat(args, fs.mkfs, []string{fs.image})...); err != nil {
		t.Fatal(err)
	}

	fs.attach()
	return fs
}

// Device is the loop device that it is on: "loop3".
func (fs *FS) Device() string { return fmt.Sprintf("loop%d", fs.loop) }

// Dir is where it is mounted.
func (fs *FS) Dir() string { return fs.dir }

// attach mounts the image.
func (fs *FS) attach() {
	fs.t.Helper()
	f, err := os.OpenFile(fs.image, os.O_RDWR, 0)
	if err != nil {
		fs.t.Fatal(err)
	}

	defer f.Close()
	dev, err := loopdev.Attach(fs.t.Context(), f, loopdev.Options{})
	if err != nil {
		fs.t.Fatal(err)
	}

	defer dev.Close()
	fs.loop = dev.Index
	fs.mount(dev.Path, fs.options...)
}

func (fs *FS) mount(source string, options ...string) {
	fs.t.Helper()
	m, err := mount.Device(fs.kind, source, options, false)
	if err != nil {
		fs.t.Fatal(err)
	}
	defer m.Close()
	if _, err := m.MoveTo(fs.dir); err != nil {
		fs.t.Fatal(err)
	}
}

func (fs *FS) unmount() {
	fs.t.Helper()
	if !mounted(fs.dir) {
		return
	}

	if err := mount.Unmount(fs.dir); err != nil {
		fs.t.Errorf("testfs: something in %s is still in use: %v", fs.dir, err)
		_ = unix.Unmount(fs.dir, unix.MNT_DETACH) // the machine should not suffer for it
		return
	}

	if fs.image == "" {
		return
	}

	// Not the test's context, which has ended when this is its clean-up. The
	// leak check reports what does not go away.
	_, _ = loopdev.WaitDetached(context.Background(), fs.image, 2*time.Second)
}

func mounted(dir string) bool {
	is, err := mountinfo.Mounted(dir)
	return err == nil && is
}

// Flushes is how many cache flushes the device under the filesystem has been
// given and has completed.
func (fs *FS) Flushes() int64 {
	fs.t.Helper()
	return flushes(fs.t, fs.loop)
}

// flushes is how many flushes a loop device has completed.
func flushes(t testing.TB, loop int) int64 {
	t.Helper()
	n := loopStat(t, loop).Flushes
	if n < 0 {
		t.Skipf("SKIPPED: this kernel does not count flushes")
	}
	return n
}

// CopyTo writes to a new file what the device under the filesystem has been given
// at this moment, and nothing that was only in memory: as after a power loss.
func (fs *FS) CopyTo(image string) {
	fs.t.Helper()
	copyMoment(fs.t, fs.loop, image, fs.image)
}

// Cut cuts the power: the filesystem that is then mounted in the place of the
// old one has what its device had been given at this moment, and nothing that
// was only in memory. It returns the directory. Nothing may be open in the old
// one but what crashed.
func (fs *FS) Cut() string {
	fs.t.Helper()
	fs.cuts++
	image := fmt.Sprintf("%s.cut%d", filepath.Join(fs.top, "image"), fs.cuts)
	fs.CopyTo(image)
	fs.unmount()
	if err := os.Remove(fs.image); err != nil {
		fs.t.Fatal(err)
	}

	fs.image = image
	fs.attach()
	return fs.dir
}

// LeakCheck fails the test if, after all clean-ups registered later, anything
// is mounted below dir or a loop device has a file below dir behind it.
func LeakCheck(t testing.TB, dir string) {
	t.Helper()
	t.Cleanup(func() {
		for _, leak := range Leaks(dir, 10*time.Second) {
			t.Errorf("LEAK: %s", leak)
		}
	})
}

// Leaks lists mounts below dir and loop devices with files below dir behind
// them. It waits for up to the time given for them to go away: loop devices
// detach a moment after their last user.
func Leaks(dir string, patience time.Duration) []string {
	deadline := time.Now().Add(patience)
	for {
		found := leaks(dir)
		if len(found) == 0 || time.Now().After(deadline) {
			return found
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func leaks(dir string) []string {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return []string{err.Error()}
	}

	var out []string
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return []string{err.Error()}
	}

	for _, m := range infos {
		if m.Mountpoint == dir {
			continue
		}
		out = append(out, fmt.Sprintf("%s mounted at %s", m.FSType, m.Mountpoint))
	}

	files, err := loopdev.Files()
	if err != nil {
		return append(out, err.Error())
	}

	for _, f := range files {
		if strings.HasPrefix(f.Path, dir+"/") {
			out = append(out, fmt.Sprintf("loop%d has %s behind it", f.Index, f.Path))
		}
	}

	return out
}
