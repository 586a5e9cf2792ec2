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

// deviceDir is where udev puts a symbolic link for each zvol that has a device.
const deviceDir = "/dev/zvol"

// slowPoll is how often the kernel's devices themselves are looked through while
// a device is awaited: links may be late, wrong, or nobody's job.
const slowPoll = 300 * time.Millisecond

// Device is the path of the block device of a zvol, which is there while the
// zvol's volmode is "dev" or "full", and somewhat later.
func Device(dataset string) string {
	return deviceDir + "/" + strings.ReplaceAll(dataset, " ", "+") // as zvol_id of udev does
}

// OpenDevice opens the block device of a zvol, if it is there. It believes the
// kernel, which knows whose a device is, and not the link: that may be one that
// was left behind and names another's. The file's name is that of the device
// itself (/dev/zd16), which stays this zvol's while it is open. NotFound if the
// link is not there or not right. Where no udev makes links it is FindDevice.
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

// udevRuns reports whether somebody makes links for devices.
func udevRuns() bool {
	_, err := os.Stat("/run/udev/control")
	return err == nil
}

func deviceError(dataset string, err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) {
		return &errs.Error{Kind: errs.NotFound, Op: "open device", Ref: dataset,
			Err: errors.New("it has no block device at the moment")}
	}
	return errs.Wrap("open device", dataset, err)
}

// openDeviceOf opens the block device at path if it is that of dataset; else nil.
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

// openBlock opens a block device, and nothing else that may be there.
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

// DatasetOf is the zvol whose block device is at path, as the kernel says. Permission
// without root.
func DatasetOf(path string) (string, error) {
	f, err := openBlock(path)
	if err != nil {
		return "", errs.Wrap("open device", path, err)
	}
	defer f.Close()
	name, err := kernel.ZvolName(f)
	return name, errs.Wrap("open device", path, err)
}

// FindDevice looks through the kernel's devices for that of a zvol, without
// believing any link: it opens each. NotFound.
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

// zdPaths are the devices of zvols, without those of partitions.
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

// AwaitDevice opens the block device of a zvol as OpenDevice does, and waits for
// it up to limit. It is woken by what happens in /dev/zvol; where no udev makes
// links, and where they are wrong, it finds the device among the kernel's.
// Unsupported if the device does not come.
func AwaitDevice(ctx context.Context, dataset string, limit time.Duration) (*os.File, error) {
	deadline := time.Now().Add(limit)
	w := newWatch()
	defer w.close()

	nextScan := time.Now().Add(slowPoll)
	for {
		w.watchDir(filepath.Dir(Device(dataset))) // before looking, so that nothing is missed
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

// AwaitNoDevice waits up to limit until the block device at path, which was that of
// a zvol, is so no more, and reports whether that is so.
func AwaitNoDevice(ctx context.Context, dataset, path string, limit time.Duration) bool {
	deadline := time.Now().Add(limit)
	w := newWatch()
	defer w.close()
	for {
		w.watchDir(filepath.Dir(path))
		f, err := openDeviceOf(path, dataset)
		if err == nil && f == nil {
			return true // another's by now
		}

		if errs.Is(err, errs.NotFound) {
			// Who has it open keeps a node that nobody else can open any more.
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

// HeldExclusively reports whether a filesystem on the block device is mounted, in
// whatever namespace, or somebody else has it open exclusively. For the moment
// of the call nobody else can have that.
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

// Devices are the names of the zvols directly in the dataset parent that have a
// block device. It asks nothing of others. Without udev it opens each device
// that the kernel has.
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
			// A link that is left behind names no device, or another's.
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
		if name, err := nameAt(p); err == nil { // else gone meanwhile
			add(name)
		}
	}

	return out, nil
}

// nameAt is the name of the zvol whose block device is at path.
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

// watch wakes up when names come and go in a directory. Without inotify it only
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

// watchDir watches dir, or the nearest directory above it that is there.
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

// waitForEvent returns when something happened, and at the latest after d.
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
