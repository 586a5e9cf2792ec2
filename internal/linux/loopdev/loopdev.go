// Package loopdev attaches image files as block devices.
//
// A device made here is configured in one step (LOOP_CONFIGURE, Linux 5.8) and
// clears itself when its last user closes it (autoclear): a process that is
// killed between attaching and mounting leaks nothing.
package loopdev

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Options of Attach.
type Options struct {
	ReadOnly    bool
	DirectIO    bool   // bypass the page cache of the image's filesystem; where it cannot, buffered (see Device.DirectIO)
	SectorBytes uint32 // logical sector size; 0 is 512
	KeepOpen    bool   // no autoclear: the device lives until Clear
}

// Device is an attached loop device. Close it as soon as something else (a
// mount) holds it, or when done: with autoclear it then vanishes.
type Device struct {
	Index    int
	Path     string // "/dev/loop3"
	DirectIO bool   // what the kernel really does
	f        *os.File
}

const (
	ctlPath = "/dev/loop-control"
	// attachTries bounds the retries when other processes take the same free
	// device first. Each failure means that somebody else succeeded.
	attachTries = 2000
	// noNodeTries is how long a device node may be missing: somebody may have
	// removed the device between the two calls, but not time and again.
	noNodeTries = 20
)

// Attach makes image a block device. InUse if it is one already or no device
// could be had, Unsupported if the kernel has no loop devices, Permission
// without root.
//
// The image is locked (fcntl, open file description lock) through the
// descriptor given here, which the loop device then shares: the lock lasts as
// long as the device, whoever made it and in whichever namespace it is mounted,
// and until the caller has closed image, which it may do at once. Two devices
// on one image would corrupt the filesystem inside. On error nothing is locked.
func Attach(ctx context.Context, image *os.File, o Options) (_ *Device, err error) {
	defer runtime.KeepAlive(image)

	if err := lock(image, o.ReadOnly); err != nil {
		return nil, err
	}

	defer func() {
		if err != nil {
			_ = unix.FcntlFlock(image.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK})
		}
	}()

	ctl, err := os.OpenFile(ctlPath, os.O_RDWR, 0)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, errs.New(errs.Unsupported, "attach loop device", image.Name(), "%w",
				err).WithHint("load the loop driver of the kernel with `modprobe loop`")
		}
		return nil, errs.Wrap("attach loop device", image.Name(), err)
	}

	defer ctl.Close()

	noNode := 0 // tries in a row that found no device node
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

	for try := range attachTries {
		if err := ctx.Err(); err != nil {
			return nil, err
		}

		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, errs.Wrap("attach loop device", image.Name(), fmt.Errorf("LOOP_CTL_GET_FREE: %w", err))
		}

		d, err := configure(n, &cfg)
		if err == nil {
			return d, nil
		}

		if noNode++; !errors.Is(err, os.ErrNotExist) {
			noNode = 0
		}

		if noNode == noNodeTries {
			return nil, errs.New(errs.Unsupported, "attach loop device", image.Name(),
				"the kernel offers %s, but there is no such file", DevicePath(n)).
				WithHint("create it with `mknod %s b 7 %d`; in a container, share the host's /dev", DevicePath(n), n)
		}

		if !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENXIO) && !errors.Is(err, os.ErrNotExist) {
			return nil, errs.Wrap("attach loop device", image.Name(), err)
		}

		// Somebody else took it between the two calls: they all get the same
		// answer from GET_FREE, so spread out before asking again.
		if try > 2 {
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-time.After(rand.N(200 * time.Microsecond * time.Duration(min(try, 50)))):
			}
		}
	}

	return nil, errs.New(errs.InUse, "attach loop device", image.Name(), "no free loop device after %d tries", attachTries)
}

// lock takes the lock that goes over to the loop device. Being one of fcntl, not
// of flock, it can be asked for without taking it: see Attached.
func lock(image *os.File, readOnly bool) error {
	l := unix.Flock_t{Type: unix.F_WRLCK} // from the beginning to any end
	if readOnly {
		l.Type = unix.F_RDLCK
	}

	err := unix.FcntlFlock(image.Fd(), unix.F_OFD_SETLK, &l)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EACCES):
		return errs.New(errs.InUse, "attach loop device", image.Name(), "already attached")
	case errors.Is(err, unix.EBADF):
		return errs.New(errs.Invalid, "attach loop device", image.Name(), "the image is not open for writing")
	}

	return errs.Wrap("attach loop device", image.Name(), fmt.Errorf("F_OFD_SETLK: %w", err))
}

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

// DevicePath is the path of loop device n.
func DevicePath(n int) string { return "/dev/loop" + strconv.Itoa(n) }

// keepFlushes undoes what somebody may have set for an earlier file on this device, and
// which the kernel keeps after it was detached: that it has no volatile write cache. The
// kernel would drop every flush, and what is synced here would be lost with the power.
// Where the setting cannot be written, nothing is lost by trying.
func keepFlushes(n int) {
	setting := fmt.Sprintf("/sys/block/loop%d/queue/write_cache", n)
	if b, err := os.ReadFile(setting); err == nil && strings.TrimSpace(string(b)) == "write through" {
		_ = os.WriteFile(setting, []byte("write back"), 0)
	}
}

// Close gives up this process's hold on the device. With autoclear it vanishes
// if nothing else uses it.
func (d *Device) Close() error {
	if d.f == nil {
		return nil
	}
	err := d.f.Close()
	d.f = nil
	return err
}

// Bound is a loop device that has a file behind it.
type Bound struct {
	Index int
	Path  string
	Dev   uint64 // st_dev of the file behind it
	Ino   uint64
	File  string // path of the file when it was attached, maybe " (deleted)"
	Auto  bool   // clears itself
}

// Lookup says what is behind loop device n, in O(1). NotFound if nothing is.
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
		Auto: info.Flags&unix.LO_FLAGS_AUTOCLEAR != 0,
	}, nil
}

// LookupNumber is Lookup of the block device with number dev, in O(1). NotFound also if it is not a whole loop device.
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

// List returns all loop devices that have a file behind them. It reads sysfs:
// its cost grows with the number of loop devices, so it is for recovery only.
func List() ([]Bound, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, errs.Wrap("list loop devices", "", err)
	}

	var out []Bound
	for _, p := range files {
		name := strings.Split(p, "/")[3]
		n, err := strconv.Atoi(strings.TrimPrefix(name, "loop"))
		if err != nil {
			continue
		}

		b, err := Lookup(n)
		if errs.Is(err, errs.NotFound) {
			continue // gone meanwhile
		}
		if err != nil {
			return nil, err
		}

		if path, err := os.ReadFile(p); err == nil {
			b.File = strings.TrimSuffix(string(path), "\n") // not cut at 64 bytes as the ioctl's is
		}

		out = append(out, b)
	}

	return out, nil
}

// SameFile reports whether b has the file that st is about behind it. The
// kernel takes its device and inode numbers from the same place as stat(2), so
// that this holds in btrfs subvolumes too.
func (b Bound) SameFile(st *unix.Stat_t) bool { return b.Dev == st.Dev && b.Ino == st.Ino }

// Clear detaches loop device n from whatever file is behind it; if it is in use
// it clears when the last user is gone. NotFound if it was not attached. Where
// others come and go, n may be somebody else's by now: see Bound.Clear.
func Clear(n int) error { return detach(n, func(*unix.LoopInfo64) bool { return true }) }

// Clear is the function Clear, if the device has still the same file behind it.
// NotFound if it has not.
func (b Bound) Clear() error {
	return detach(b.Index, func(i *unix.LoopInfo64) bool { return i.Device == b.Dev && i.Inode == b.Ino })
}

// Keep undoes a Clear that found the device in use: it does not vanish any more when its last
// user closes it. NotFound if it has not the same file behind it.
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

// Attached reports whether the image at path is a block device now, in any
// namespace, in O(1). It is one also while whoever attaches it has it open.
// Asking disturbs nobody. NotFound.
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

// WaitDetached waits until the image at path is no block device any more, at
// most for the time given. It returns false if it still is: some mount or
// process, maybe in another mount namespace, holds it.
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

// DeviceNumber is the st_dev of filesystems on loop device n, and its own
// st_rdev; 0 if there is no such device. It is not always 7:n (loop.max_part).
func DeviceNumber(n int) uint64 {
	var st unix.Stat_t
	if unix.Stat(DevicePath(n), &st) != nil {
		return 0
	}
	return st.Rdev
}
