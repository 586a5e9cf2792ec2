// Package loopdev attaches image files as block devices.
//
// A device is configured in one step (LOOP_CONFIGURE, Linux 5.8) and detaches itself
// when its last user closes it (autoclear): a process that is killed between attaching
// and mounting leaks nothing.
package loopdev

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Options of Attach.
type Options struct {
	ReadOnly    bool
	DirectIO    bool   // bypass the page cache of the image's filesystem, if that supports it (see Device.DirectIO)
	SectorBytes uint32 // logical sector size; 0 is 512
	KeepOpen    bool   // no autoclear: the device stays attached until Clear
}

// Device is an attached loop device. Close it as soon as something else, such as a
// mount, holds it, or when done: with autoclear it is then detached.
type Device struct {
	Index    int
	Path     string // "/dev/loop3"
	DirectIO bool   // whether the kernel uses direct I/O
	f        *os.File
}

const (
	ctlPath = "/dev/loop-control"
	// attachTries bounds the retries when other processes take the same free
	// device first. Each failure means that another process succeeded.
	attachTries = 2000
	// noNodeTries is how many times in a row a device node may be missing. A
	// process may remove the device between the two calls, but not repeatedly.
	noNodeTries = 20
)

// Attach attaches image to a free loop device. InUse: it is already attached, or no
// device is free. Unsupported: the kernel has no loop devices. Permission without root.
//
// It locks the image (fcntl, open file description lock) through the given descriptor,
// which the loop device then shares. The lock lasts as long as the device, regardless of
// who attached it and in which namespace it is mounted, and until the caller closes
// image, which it may do at once. Two devices on one image would corrupt the filesystem
// inside. Devices that something else attached, such as losetup, have no lock: see Unlocked. On error nothing is
// locked.
func Attach(ctx context.Context, image *os.File, o Options) (_ *Device, err error) {
	defer runtime.KeepAlive(image)

	// Lock the image.
	if err := lock(image, o.ReadOnly); err != nil {
		return nil, err
	}

	defer func() {
		if err != nil {
			_ = unix.FcntlFlock(image.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK})
		}
	}()

	// Look for devices without a lock. Any number of devices may read.
	others, err := unlocked(image)
	if err != nil {
		return nil, err
	}
	for _, b := range others {
		if !o.ReadOnly || !b.ReadOnly {
			return nil, errs.New(errs.InUse, "attach loop device", image.Name(), "%s is attached to it", b.Path).
				WithHint("if nothing needs the device, detach it with `losetup -d %s`", b.Path)
		}
	}

	ctl, err := os.OpenFile(ctlPath, os.O_RDWR, 0)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, errs.New(errs.Unsupported, "attach loop device", image.Name(), "%w",
				err).WithHint("load the loop driver of the kernel with `modprobe loop`")
		}
		return nil, errs.Wrap("attach loop device", image.Name(), err)
	}

	defer ctl.Close()

	cfg := newConfig(image, o)
	return attachToFree(ctx, ctl, image.Name(), &cfg)
}

// newConfig returns the configuration of a device for image.
func newConfig(image *os.File, o Options) unix.LoopConfig {
	cfg := unix.LoopConfig{Fd: uint32(image.Fd()), Size: o.SectorBytes}
	if !o.KeepOpen {
		cfg.Info.Flags |= unix.LO_FLAGS_AUTOCLEAR
	}
	if o.ReadOnly {
		cfg.Info.Flags |= unix.LO_FLAGS_READ_ONLY
	}
	if o.DirectIO {
		cfg.Info.Flags |= unix.LO_FLAGS_DIRECT_IO
	}

	copy(cfg.Info.File_name[:len(cfg.Info.File_name)-1], image.Name())
	return cfg
}

// attachToFree configures the free device that the kernel offers, until no other process is faster.
func attachToFree(ctx context.Context, ctl *os.File, image string, cfg *unix.LoopConfig) (*Device, error) {
	noNode := 0 // consecutive attempts without a device node
	for try := range attachTries {
		if err := ctx.Err(); err != nil {
			return nil, err
		}

		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, errs.Wrap("attach loop device", image, fmt.Errorf("LOOP_CTL_GET_FREE: %w", err))
		}

		d, err := configure(n, cfg)
		if err == nil {
			return d, nil
		}

		if noNode++; !errors.Is(err, os.ErrNotExist) {
			noNode = 0
		}

		if noNode == noNodeTries {
			return nil, errs.New(errs.Unsupported, "attach loop device", image,
				"the kernel offers %s, but there is no such file", DevicePath(n)).
				WithHint("create it with `mknod %s b 7 %d`; in a container, share the host's /dev", DevicePath(n), n)
		}

		if !errs.IsAny(err, unix.EBUSY, unix.ENXIO, os.ErrNotExist) {
			return nil, errs.Wrap("attach loop device", image, err)
		}

		// Another process took the device between the two calls. GET_FREE gives all
		// processes the same answer, so wait for a random time before asking again.
		if try > 2 {
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-time.After(rand.N(200 * time.Microsecond * time.Duration(min(try, 50)))):
			}
		}
	}

	return nil, errs.New(errs.InUse, "attach loop device", image, "no free loop device after %d tries", attachTries)
}

// lock takes the lock that the loop device inherits. It is an fcntl lock, because,
// unlike those of flock, these can be tested without taking them: see Attached.
func lock(image *os.File, readOnly bool) error {
	l := unix.Flock_t{Type: unix.F_WRLCK} // the whole file, however large
	if readOnly {
		l.Type = unix.F_RDLCK
	}

	err := unix.FcntlFlock(image.Fd(), unix.F_OFD_SETLK, &l)
	switch {
	case err == nil:
		return nil
	case errs.IsAny(err, unix.EAGAIN, unix.EACCES):
		return errs.New(errs.InUse, "attach loop device", image.Name(), "already attached")
	case errors.Is(err, unix.EBADF):
		return errs.New(errs.Invalid, "attach loop device", image.Name(), "the image is not open for writing")
	}

	return errs.Wrap("attach loop device", image.Name(), fmt.Errorf("F_OFD_SETLK: %w", err))
}

// configure attaches device n as cfg says. EBUSY, ENXIO or ENOENT: the device is not free or not there.
func configure(n int, cfg *unix.LoopConfig) (*Device, error) {
	d := &Device{Index: n, Path: DevicePath(n)}
	f, err := os.OpenFile(d.Path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}

	if err := unix.IoctlLoopConfigure(int(f.Fd()), cfg); err != nil {
		f.Close()
		return nil, fmt.Errorf("LOOP_CONFIGURE %s: %w", d.Path, err)
	}

	if cfg.Info.Flags&unix.LO_FLAGS_READ_ONLY == 0 {
		keepFlushes(n)
	}

	if cfg.Info.Flags&unix.LO_FLAGS_DIRECT_IO != 0 {
		// The kernel falls back to buffered I/O without an error.
		info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
		d.DirectIO = err == nil && info.Flags&unix.LO_FLAGS_DIRECT_IO != 0
	}

	d.f = f
	return d, nil
}

// DevicePath returns the path of loop device n.
func DevicePath(n int) string { return "/dev/loop" + strconv.Itoa(n) }

// keepFlushes resets a setting that may have been made for an earlier file on this
// device, and that the kernel keeps after detaching: that the device has no volatile write
// cache. The kernel would drop every flush, and a power loss would lose synced data. If
// the setting cannot be written, trying does no harm.
func keepFlushes(n int) {
	setting := fmt.Sprintf("/sys/block/loop%d/queue/write_cache", n)
	if b, err := os.ReadFile(setting); err == nil && strings.TrimSpace(string(b)) == "write through" {
		_ = os.WriteFile(setting, []byte("write back"), 0)
	}
}

// Close releases the device. With autoclear it is detached if nothing else uses it.
func (d *Device) Close() error {
	if d.f == nil {
		return nil
	}
	err := d.f.Close()
	d.f = nil
	return err
}

// Bound is a loop device that is attached to a file.
type Bound struct {
	Index int
	Path  string
	Dev   uint64 // st_dev of the file
	Ino   uint64
	File  string // path of the file when it was attached, possibly with " (deleted)"
	Auto  bool   // autoclear is set

	ReadOnly bool
}

// Lookup returns the file that loop device n is attached to, in O(1). NotFound: the
// device is not attached.
func Lookup(n int) (Bound, error) {
	f, err := os.Open(DevicePath(n))
	if errors.Is(err, unix.ENXIO) { // it is just being detached
		return Bound{}, errs.New(errs.NotFound, "look up loop device", DevicePath(n), "not attached")
	}
	if err != nil {
		return Bound{}, errs.Wrap("look up loop device", DevicePath(n), err)
	}

	defer f.Close()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	if errors.Is(err, unix.ENXIO) {
		return Bound{}, errs.New(errs.NotFound, "look up loop device", DevicePath(n), "not attached")
	}
	if err != nil {
		return Bound{}, errs.Wrap("look up loop device", DevicePath(n), err)
	}

	return Bound{
		Index: n, Path: DevicePath(n), Dev: info.Device, Ino: info.Inode,
		File: strings.TrimRight(string(info.File_name[:]), "\x00"),
		Auto: info.Flags&unix.LO_FLAGS_AUTOCLEAR != 0, ReadOnly: info.Flags&unix.LO_FLAGS_READ_ONLY != 0,
	}, nil
}

// Attachment is a number that no other attachment of the same device has had since the host started; 0 before Linux
// 5.15, which does not count them.
func (b Bound) Attachment() uint64 {
	text, err := os.ReadFile(fmt.Sprintf("/sys/block/loop%d/diskseq", b.Index))
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return n
}

// LookupNumber is Lookup for the block device with number dev, in O(1). NotFound: it is not attached, or not a whole
// loop device.
func LookupNumber(dev uint64) (Bound, error) {
	const op = "look up loop device"
	number := fmt.Sprintf("%d:%d", unix.Major(dev), unix.Minor(dev))
	to, err := os.Readlink("/sys/dev/block/" + number)
	if err != nil {
		return Bound{}, errs.Wrap(op, number, err)
	}

	digits, ok := strings.CutPrefix(filepath.Base(to), "loop")
	n, err := strconv.Atoi(digits)
	if !ok || err != nil {
		return Bound{}, errs.New(errs.NotFound, op, number, "not a loop device")
	}

	return Lookup(n)
}

// A File is what a loop device is attached to: an absolute path, possibly with " (deleted)".
type File struct {
	Index int
	Path  string
}

// Files returns the files of all attached loop devices: none where sysfs is not mounted. It needs no root. It opens one
// file of sysfs for each loop device of the host, attached or not.
func Files() ([]File, error) {
	const block = "/sys/block/"
	devices, err := os.ReadDir(block)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, errs.Wrap("list loop devices", "", err)
	}

	var out []File
	for _, d := range devices {
		digits, ok := strings.CutPrefix(d.Name(), "loop")
		n, err := strconv.Atoi(digits)
		if !ok || err != nil {
			continue
		}
		if path, err := os.ReadFile(block + d.Name() + "/loop/backing_file"); err == nil {
			out = append(out, File{Index: n, Path: strings.TrimSuffix(string(path), "\n")})
		}
	}

	return out, nil
}

// List returns all attached loop devices. Its cost grows with the number of loop devices, so it is for recovery only.
func List() ([]Bound, error) {
	files, err := Files()
	if err != nil {
		return nil, err
	}

	var out []Bound
	for _, f := range files {
		b, err := Lookup(f.Index)
		if errs.Is(err, errs.NotFound) {
			continue // detached in the meantime
		}
		if err != nil {
			return nil, err
		}

		b.File = f.Path // complete, while the ioctl truncates it to 64 bytes
		out = append(out, b)
	}

	return out, nil
}

// On returns the loop devices that are attached to the image at path; none if there is no such file. See List for its
// cost.
func On(path string) ([]Bound, error) {
	var st unix.Stat_t
	if path == "" || unix.Stat(path, &st) != nil {
		return nil, nil
	}
	return on(&st)
}

func on(st *unix.Stat_t) ([]Bound, error) {
	loops, err := List()
	return slices.DeleteFunc(loops, func(b Bound) bool { return !b.SameFile(st) }), err
}

// SameFile reports whether b is attached to the file that st describes. The kernel takes
// the device and inode numbers from the same place as stat(2), so this works in btrfs
// subvolumes as well.
func (b Bound) SameFile(st *unix.Stat_t) bool { return b.Dev == st.Dev && b.Ino == st.Ino }

// Clear detaches loop device n from any file; if the device is in use, it is detached
// when its last user closes it. NotFound: it is not attached. If other processes attach
// devices at the same time, n may belong to one of them: see Bound.Clear.
func Clear(n int) error { return detach(n, func(*unix.LoopInfo64) bool { return true }) }

// Clear is the function Clear, if the device is still attached to the same file.
// NotFound otherwise.
func (b Bound) Clear() error {
	return detach(b.Index, func(i *unix.LoopInfo64) bool { return i.Device == b.Dev && i.Inode == b.Ino })
}

// Hold opens the device and checks that it is still attached to the same file. Until the caller closes it, no process
// can attach another one. Hold a device that another process has attached before mounting, unmounting or reading it:
// once its last user closes it, its number may belong to another file. NotFound: it has been detached since.
func (b Bound) Hold() (*os.File, error) {
	const op = "open loop device"
	f, err := os.Open(b.Path)
	if errors.Is(err, unix.ENXIO) { // it is just being detached
		return nil, errs.New(errs.NotFound, op, b.Path, "not attached")
	}
	if err != nil {
		return nil, errs.Wrap(op, b.Path, err)
	}

	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	switch {
	case errors.Is(err, unix.ENXIO):
		err = errs.New(errs.NotFound, op, b.Path, "not attached")
	case err != nil:
		err = errs.Wrap(op, b.Path, err)
	case info.Device != b.Dev || info.Inode != b.Ino:
		err = errs.New(errs.NotFound, op, b.Path, "it is now attached to another file")
	}
	if err != nil {
		f.Close()
		return nil, err
	}

	return f, nil
}

// Keep undoes a Clear that found the device in use: the device stays attached when its last user
// closes it. NotFound: it is no longer attached to the same file.
func (b Bound) Keep() error {
	const op = "keep loop device"
	f, err := os.Open(b.Path)
	if err != nil {
		return errs.Wrap(op, b.Path, err)
	}

	defer f.Close()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	if errors.Is(err, unix.ENXIO) || err == nil && (info.Device != b.Dev || info.Inode != b.Ino) {
		return errs.New(errs.NotFound, op, b.Path, "it is now attached to another file, or to none")
	}

	if err == nil && info.Flags&unix.LO_FLAGS_AUTOCLEAR != 0 {
		info.Flags &^= unix.LO_FLAGS_AUTOCLEAR
		err = unix.IoctlLoopSetStatus64(int(f.Fd()), info)
	}

	return errs.Wrap(op, b.Path, err)
}

func detach(n int, is func(*unix.LoopInfo64) bool) error {
	f, err := os.Open(DevicePath(n)) // while this is open, nobody can attach another file
	if errors.Is(err, unix.ENXIO) {  // it is just being detached
		return errs.New(errs.NotFound, "detach loop device", DevicePath(n), "not attached")
	}
	if err != nil {
		return errs.Wrap("detach loop device", DevicePath(n), err)
	}

	defer f.Close()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	if err == nil && !is(info) {
		return errs.New(errs.NotFound, "detach loop device", DevicePath(n), "it is now attached to another file")
	}
	if err == nil {
		err = unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0)
	}
	if errors.Is(err, unix.ENXIO) {
		return errs.New(errs.NotFound, "detach loop device", DevicePath(n), "not attached")
	}

	return errs.Wrap("detach loop device", DevicePath(n), err)
}

// Attached reports whether the image at path is attached to a loop device, in any
// namespace, in O(1). It counts as attached while a process that attaches it has it open.
// The check has no side effects. NotFound.
func Attached(path string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, errs.Wrap("open", path, err)
	}
	defer f.Close()
	l := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &l); err != nil {
		return false, errs.Wrap("look up loop device of", path, fmt.Errorf("F_OFD_GETLK: %w", err))
	}
	return l.Type != unix.F_UNLCK, nil
}

// Unlocked returns the loop devices of the image at path, which is not Attached: something else than this package, such
// as losetup, has attached them. It is O(1) as long as nobody has the image open; else see List for its cost. NotFound.
func Unlocked(path string) ([]Bound, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, errs.Wrap("open", path, err)
	}
	defer f.Close()
	return unlocked(f)
}

func unlocked(image *os.File) ([]Bound, error) {
	if openOnce(image) {
		return nil, nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &st); err != nil {
		return nil, errs.Wrap("look up loop devices of", image.Name(), err)
	}
	return on(&st)
}

// openOnce reports whether a file is certainly open nowhere else, neither in a process nor as a loop device: only then
// the kernel grants a lease for writing (fcntl(2)), which is given back at once. Whoever opens the file in between
// waits for that.
func openOnce(f *os.File) bool {
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		return false
	}
	_, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
	return err == nil
}

// WaitDetached waits until the image at path is detached, for at most most. It returns
// false if it still is attached: a mount or process, perhaps in another mount namespace,
// holds it.
func WaitDetached(ctx context.Context, path string, most time.Duration) (bool, error) {
	deadline := time.Now().Add(most)
	for wait := 20 * time.Microsecond; ; wait = min(2*wait, 10*time.Millisecond) {
		attached, err := Attached(path)
		if err != nil || !attached {
			return !attached, err
		}
		if time.Now().After(deadline) {
			return false, nil
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(wait):
		}
	}
}

// DeviceNumber returns the st_dev of filesystems on loop device n, which is its own
// st_rdev; 0 if the device does not exist. It is not always 7:n (loop.max_part).
func DeviceNumber(n int) uint64 {
	var st unix.Stat_t
	if unix.Stat(DevicePath(n), &st) != nil {
		return 0
	}
	return st.Rdev
}
