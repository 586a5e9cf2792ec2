package testfs

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"pando/internal/linux/loopdev"
	"pando/internal/linux/run"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// minZpoolBytes is the smallest device that ZFS takes.
const minZpoolBytes = 64 << 20

// Zpool is an imported ZFS pool.
type Zpool struct {
	t     testing.TB
	name  string
	top   string // temporary directory that holds its image
	image string
	loop  int
	cuts  int
}

// ZFS makes a fresh ZFS pool on a device of at least size bytes and returns its
// name. See NewZpool.
func ZFS(t testing.TB, size int64) string { t.Helper(); return NewZpool(t, size).Name() }

// NewZpool makes a fresh ZFS pool on a device of at least size bytes, some 30 MB
// and a thirtieth of which ZFS keeps to itself. Its root dataset is not mounted,
// nor are those below it by themselves. When the test ends the pool is destroyed,
// and the test fails if something in it is still mounted or in use, or if that
// leaves a device of the pool behind.
//
// The test is skipped where the kernel has no ZFS. That is a failure in the guest
// of `make test-zfs`, which sets PANDO_TEST_ZFS.
func NewZpool(t testing.TB, size int64) *Zpool {
	t.Helper()
	needZFS(t)
	p := &Zpool{t: t, name: "pandotest-" + strings.ToLower(rand.Text()[:12]), top: t.TempDir()}
	p.image = filepath.Join(p.top, "image")
	LeakCheck(t, p.top)
	f, err := os.OpenFile(p.image, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}

	defer f.Close()
	if err := f.Truncate(max(size, minZpoolBytes)); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(p.destroy)
	dev := p.attach(f)
	defer dev.Close() // the pool holds it now

	// No cache file: a pool of a killed test must not come back after a reboot.
	p.zpool("create", "-o", "cachefile=none", "-o", "ashift=12", "-O", "mountpoint=none", "-O", "atime=off", p.name,
		dev.Path)
	return p
}

// needZFS skips the test, or fails it where it must not be skipped.
func needZFS(t testing.TB) {
	t.Helper()
	b, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		t.Fatal(err)
	}

	if !slices.Contains(strings.Fields(string(b)), "zfs") {
		if os.Getenv("PANDO_TEST_ZFS") != "" {
			t.Fatal("this kernel has no ZFS, and PANDO_TEST_ZFS says that it has")
		}
		t.Skip("does not apply: this kernel has no ZFS (`make test-zfs` runs it in a guest)")
	}

	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: making a ZFS pool needs root: run the tests as root")
	}

	if _, err := run.Look("zpool"); err != nil {
		t.Skipf("SKIPPED: %v: install zfsutils-linux", err)
	}
}

// ZFSHasOverlays reports whether overlayfs can keep changes in the datasets of this OpenZFS, which it can since 2.2.
func ZFSHasOverlays() bool {
	b, err := os.ReadFile("/sys/module/zfs/version")
	return err == nil && !strings.HasPrefix(string(b), "2.1.")
}

// Name is the pool's name, which is that of its root dataset, too.
func (p *Zpool) Name() string { return p.name }

// attach makes the image a block device. Whatever has it open keeps it.
func (p *Zpool) attach(image *os.File) *loopdev.Device {
	p.t.Helper()
	dev, err := loopdev.Attach(p.t.Context(), image, loopdev.Options{})
	if err != nil {
		p.t.Fatal(err)
	}
	p.loop = dev.Index
	return dev
}

func (p *Zpool) zpool(args ...string) {
	p.t.Helper()
	if _, err := run.Program(p.t.Context(), "zpool", args...); err != nil {
		p.t.Fatalf("zpool %s: %v", strings.Join(args, " "), err)
	}
}

// Flushes is how many cache flushes the pool's device has been given and has
// completed. Besides those that somebody waits for, ZFS writes all it has in
// memory every zfs_txg_timeout seconds: see Quiet.
func (p *Zpool) Flushes() int64 { p.t.Helper(); return flushes(p.t, p.loop) }

const txgTimeout = "/sys/module/zfs/parameters/zfs_txg_timeout"

// Quiet makes ZFS write, until the test ends, only what somebody waits for or what
// there is no room for in memory: for tests of what was synced and what was not.
// It is a setting of the kernel, for all pools: no test in parallel.
func (p *Zpool) Quiet() {
	p.t.Helper()
	before, err := os.ReadFile(txgTimeout)
	if err == nil {
		err = os.WriteFile(txgTimeout, []byte("36000"), 0)
	}
	if err != nil {
		p.t.Fatal(err)
	}

	p.t.Cleanup(func() {
		if err := os.WriteFile(txgTimeout, before, 0); err != nil {
			p.t.Error(err)
		}
	})

	p.zpool("sync", p.name) // what had begun
}

// Cut cuts the power: the pool that is then imported in the place of the old one,
// under the same name, has what its device had been given at this moment, and
// nothing that was only in memory. What was mounted of the old one no longer is,
// and nothing may be in use there.
func (p *Zpool) Cut() {
	p.t.Helper()
	p.cuts++
	image := fmt.Sprintf("%s.cut%d", filepath.Join(p.top, "image"), p.cuts)
	copyMoment(p.t, p.loop, image, p.image)

	// Two pools of one GUID cannot be imported at once. What the export writes, and
	// the unmounting that it does, goes into the old image.
	p.Export()
	if err := os.Remove(p.image); err != nil {
		p.t.Fatal(err)
	}

	p.image = image
	p.Import()
}

// Export takes the pool away, as if its disks were not there, until Import.
func (p *Zpool) Export() {
	p.t.Helper()
	p.busyUntil(func(ctx context.Context) error {
		_, err := run.Program(ctx, "zpool", "export", p.name)
		return err
	})
	if gone, err := loopdev.WaitDetached(p.t.Context(), p.image, patience); err != nil || !gone {
		p.t.Fatalf("testfs: %s is still attached after the export: %v", p.image, err)
	}
}

// Import undoes Export.
func (p *Zpool) Import() {
	p.t.Helper()
	f, err := os.OpenFile(p.image, os.O_RDWR, 0)
	if err != nil {
		p.t.Fatal(err)
	}
	defer f.Close()
	dev := p.attach(f)
	defer dev.Close()
	// -f: after a power cut it is in use still, to ZFS. -N: as after its creation,
	// nothing is mounted.
	p.zpool("import", "-f", "-N", "-o", "cachefile=none", "-d", dev.Path, p.name)
}

// patience is how long udev may look at the devices of a pool, which keeps the
// pool from going away, and how long they may take to go.
const patience = 20 * time.Second

// busyUntil does something for which the pool must not be busy, until it works.
func (p *Zpool) busyUntil(do func(context.Context) error) {
	p.t.Helper()

	// The test's own context has ended in its clean-up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.t.Context()), patience)
	defer cancel()
	for {
		err := do(ctx)
		if err == nil {
			return
		}
		if ctx.Err() != nil || !strings.Contains(err.Error(), "busy") {
			p.t.Errorf("testfs: something in the pool %s is still in use: %v", p.name, err)
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (p *Zpool) destroy() {
	p.t.Helper()
	if _, err := os.Stat(kstat(p.name)); err != nil {
		return // never made, or destroyed by the test
	}

	// Destroying would silently unmount what is idle.
	for _, m := range zfsMounts(p.t, p.name) {
		p.t.Errorf("LEAK: %s", m)
	}

	p.busyUntil(func(ctx context.Context) error {
		_, err := run.Program(ctx, "zpool", "destroy", "-f", p.name)
		return err
	})

	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		left := zpoolLeaks(p.t, p.name)
		if len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			p.t.Errorf("LEAK: of the pool %s, which is destroyed: %q", p.name, left)
			break
		}
	}

	// The leak check reports it if it does not go away.
	_, _ = loopdev.WaitDetached(context.Background(), p.image, patience)
}

// kstat exists while a pool is imported.
func kstat(name string) string { return "/proc/spl/kstat/zfs/" + name }

// zfsMounts lists what is mounted of a pool.
func zfsMounts(t testing.TB, name string) (out []string) {
	t.Helper()
	infos, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("zfs"))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range infos {
		if m.Source == name || strings.HasPrefix(m.Source, name+"/") || strings.HasPrefix(m.Source, name+"@") {
			out = append(out, fmt.Sprintf("%s mounted at %s", m.Source, m.Mountpoint))
		}
	}
	return out
}

// zpoolLeaks lists what there is of a pool on this machine.
func zpoolLeaks(t testing.TB, name string) []string {
	t.Helper()
	out := zfsMounts(t, name)
	for _, p := range []string{kstat(name), "/dev/zvol/" + name} {
		if _, err := os.Lstat(p); err == nil {
			out = append(out, p)
		}
	}

	devices, err := filepath.Glob("/sys/block/zd*")
	if err != nil {
		t.Fatal(err)
	}

	for _, d := range devices {
		if z := zvolName("/dev/" + filepath.Base(d)); strings.HasPrefix(z, name+"/") {
			out = append(out, fmt.Sprintf("/dev/%s is %s", filepath.Base(d), z))
		}
	}

	return out
}

// zvolName is the name of the volume behind a device, and "" if the device is
// gone in the meantime.
func zvolName(device string) string {
	f, err := os.OpenFile(device, os.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer f.Close()
	var name [256]byte
	const blkZname = 0x8100127d // of ZFS
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), blkZname, uintptr(unsafe.Pointer(&name[0]))); e != 0 {
		return ""
	}
	return unix.ByteSliceToString(name[:])
}
