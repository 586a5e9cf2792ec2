package zfs

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// deviceDir is where udev creates a symbolic link for each zvol that has a device.
const deviceDir = "/dev/zvol"

// slowPoll is the interval of scans of the kernel's devices while waiting for one: links
// may be late or wrong, or udev may not run.
const slowPoll = 300 * time.Millisecond

// Device returns the path of the block device of a zvol, which exists while the zvol's
// volmode is "dev" or "full", and appears and disappears with some delay.
func Device(dataset string) string {
	return deviceDir + "/" + strings.ReplaceAll(dataset, " ", "+") // like zvol_id of udev
}

// OpenDevice opens the block device of a zvol, if it exists. It asks the kernel which
// zvol a device belongs to, and does not trust the link, which may be stale and lead to
// the device of another zvol. The file's name is that of the device itself (/dev/zd16),
// which belongs to this zvol while it is open. NotFound: the link is missing or wrong.
// Without udev it calls FindDevice.
func OpenDevice(dataset string) (*os.File, error) {
	path, err := filepath.EvalSymlinks(Device(dataset))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) && !udevRuns() {
			return FindDevice(dataset)
		}
		return nil, deviceError(dataset, err)
	}

	f, err := openDeviceOf(path, dataset)
	if err != nil {
		return nil, err
	}
	if f == nil {
		return nil, errs.New(errs.NotFound, "open device", dataset, "%s links to the device of another zvol", Device(dataset))
	}

	return f, nil
}

// udevRuns reports whether udev runs, which creates links for devices.
func udevRuns() bool {
	_, err := os.Stat("/run/udev/control")
	return err == nil
}

func deviceError(dataset string, err error) error {
	if errs.IsAny(err, fs.ErrNotExist, unix.ENXIO, unix.ENODEV) {
		return &errs.Error{Kind: errs.NotFound, Op: "open device", Ref: dataset,
			Err: errors.New("it has no block device at the moment")}
	}
	return errs.Wrap("open device", dataset, err)
}

// openDeviceOf opens the block device at path if it belongs to dataset. Nil without an error: it does not.
func openDeviceOf(path, dataset string) (*os.File, error) {
	f, err := openBlock(path)
	if err != nil {
		return nil, deviceError(dataset, err)
	}
	if name, err := kernel.ZvolName(f); err != nil || name != dataset {
		f.Close()
		return nil, nil
	}
	return f, nil
}

// openBlock opens path if it is a block device.
func openBlock(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		unix.Close(fd)
		return nil, &fs.PathError{Op: "open", Path: path, Err: unix.ENOTBLK}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// DatasetOf returns the zvol whose block device is at path, according to the kernel.
// Permission without root.
func DatasetOf(path string) (string, error) {
	f, err := openBlock(path)
	if err != nil {
		return "", errs.Wrap("open device", path, err)
	}
	defer f.Close()
	name, err := kernel.ZvolName(f)
	return name, errs.Wrap("open device", path, err)
}

// FindDevice finds the block device of a zvol among the kernel's devices, without using
// links: it opens each device. NotFound.
func FindDevice(dataset string) (*os.File, error) {
	paths, err := zdPaths()
	if err != nil {
		return nil, errs.Wrap("open device", dataset, err)
	}
	for _, p := range paths {
		if f, err := openDeviceOf(p, dataset); err == nil && f != nil {
			return f, nil
		}
	}
	return nil, deviceError(dataset, fs.ErrNotExist)
}

// zdPaths returns the paths of the devices of all zvols, without partitions.
func zdPaths() ([]string, error) {
	all, err := filepath.Glob("/dev/zd*")
	if err != nil {
		return nil, err
	}
	var out []string
	for _, p := range all {
		if strings.Trim(strings.TrimPrefix(p, "/dev/zd"), "0123456789") == "" {
			out = append(out, p)
		}
	}
	return out, nil
}

// AwaitDevice opens the block device of a zvol like OpenDevice, and waits for it up to
// limit. Changes in /dev/zvol wake it up; where links are missing or wrong, it scans the
// kernel's devices. Unsupported: the device does not appear.
func AwaitDevice(ctx context.Context, dataset string, limit time.Duration) (*os.File, error) {
	deadline := time.Now().Add(limit)
	w := newWatch()
	defer w.close()

	nextScan := time.Now().Add(slowPoll)
	for {
		w.watchDir(filepath.Dir(Device(dataset))) // before opening, so that no change is missed
		f, err := OpenDevice(dataset)
		if errs.Is(err, errs.NotFound) && time.Now().After(nextScan) {
			f, err = FindDevice(dataset)
			nextScan = time.Now().Add(slowPoll)
		}

		switch {
		case err == nil:
			return f, nil
		case !errs.Is(err, errs.NotFound):
			return nil, err
		case ctx.Err() != nil:
			return nil, errs.Wrap("open device", dataset, ctx.Err())
		case time.Now().After(deadline):
			return nil, errs.New(errs.Unsupported, "open device", dataset, "its block device did not appear within %v", limit).
				WithHint("check that udev is running, that /dev is the host's, and that the module parameter zvol_inhibit_dev " +
					"is 0")
		}

		w.waitForEvent(min(slowPoll, time.Until(deadline)))
	}
}

// AwaitNoDevice waits up to limit until the block device at path no longer belongs to
// the zvol, and reports whether that is so.
func AwaitNoDevice(ctx context.Context, dataset, path string, limit time.Duration) bool {
	deadline := time.Now().Add(limit)
	w := newWatch()
	defer w.close()

	for {
		w.watchDir(filepath.Dir(path))
		f, err := openDeviceOf(path, dataset)
		if err == nil && f == nil {
			return true // it belongs to another zvol now
		}

		if errs.Is(err, errs.NotFound) {
			// A process that has the device open keeps its node, which can no longer be opened.
			if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
				return true
			}
		}

		if f != nil {
			f.Close()
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			return false
		}

		w.waitForEvent(min(50*time.Millisecond, time.Until(deadline)))
	}
}

// HeldExclusively reports whether a filesystem on the block device is mounted in any
// namespace, or another process has it open exclusively. During the call, nobody else
// can open it exclusively.
func HeldExclusively(dev *os.File) (bool, error) {
	fd, err := unix.Open(dev.Name(), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_EXCL, 0)
	if errors.Is(err, unix.EBUSY) {
		return true, nil
	}
	if err != nil {
		return false, errs.Wrap("open device", dev.Name(), err)
	}
	unix.Close(fd)
	return false, nil
}

// Devices returns the names of the zvols directly below the dataset parent that have a
// block device. It does not open devices of other parents, but without udev it opens all
// devices.
func Devices(parent string) ([]string, error) {
	var out []string
	prefix := parent + "/"
	add := func(name string) {
		if c, ok := strings.CutPrefix(name, prefix); ok && !strings.Contains(c, "/") {
			out = append(out, c)
		}
	}

	names, err := readNames(Device(parent))
	if err == nil {
		for _, n := range names {
			// A stale link leads to no device, or to that of another zvol.
			link := filepath.Join(Device(parent), n)
			if name, err := nameAt(link); err == nil && Device(name) == link {
				add(name)
			}
		}
		return out, nil
	}

	if !errors.Is(err, fs.ErrNotExist) {
		return nil, errs.Wrap("list devices", parent, err)
	}

	paths, err := zdPaths()
	if err != nil {
		return nil, errs.Wrap("list devices", parent, err)
	}

	for _, p := range paths {
		if name, err := nameAt(p); err == nil { // otherwise it has disappeared
			add(name)
		}
	}

	return out, nil
}

// nameAt returns the name of the zvol whose block device is at path.
func nameAt(path string) (string, error) {
	f, err := openBlock(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	return kernel.ZvolName(f)
}

func readNames(dir string) ([]string, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Readdirnames(-1)
}

// watch wakes up when names appear or disappear in a directory. Without inotify it only
// sleeps.
type watch struct {
	fd  int
	dir string
}

func newWatch() *watch {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		fd = -1
	}
	return &watch{fd: fd}
}

// watchDir watches dir, or its nearest existing parent.
func (w *watch) watchDir(dir string) {
	if w.fd < 0 || w.dir == dir {
		return
	}

	for ; dir != "/"; dir = filepath.Dir(dir) {
		if w.dir == dir {
			return
		}
		if _, err := unix.InotifyAddWatch(w.fd, dir,
			unix.IN_CREATE|unix.IN_MOVED_TO|unix.IN_DELETE|unix.IN_ONLYDIR); err == nil {
			w.dir = dir
			return
		}
	}
}

// waitForEvent returns after the next change, or after d.
func (w *watch) waitForEvent(d time.Duration) {
	if d <= 0 {
		return
	}

	if w.fd < 0 {
		time.Sleep(min(d, 20*time.Millisecond))
		return
	}

	fds := []unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLIN}}
	if n, err := unix.Poll(fds, int(max(d.Milliseconds(), 1))); err != nil || n == 0 {
		return
	}

	var buf [4096]byte
	for {
		if n, err := unix.Read(w.fd, buf[:]); err != nil || n < len(buf) {
			return
		}
	}
}

func (w *watch) close() {
	if w.fd >= 0 {
		unix.Close(w.fd)
	}
}
