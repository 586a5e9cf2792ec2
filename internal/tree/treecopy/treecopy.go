// Package treecopy fills a fresh, private filesystem from a source: a
// directory ([CopyDir], or [CopyStable] for one that may be written to) or a tar
// stream ([Untar]). It keeps all properties of files, and it is
// fast, because importing is the one step of a golden's life whose cost grows
// with the number of its files.
//
// # The destination
//
// The destination is the open root directory of an empty filesystem or
// directory to which nobody else may write. It need not have a path: a
// detached mount is fine. Every access is relative to directory descriptors,
// and symbolic links are never followed, neither in the source nor in the
// destination. Extended attributes of objects that cannot be opened are accessed through
// /proc/self/fd, so /proc must be mounted.
//
// Nothing is durable and, on failure, nothing is removed. The caller owns the filesystem, and
// syncs or destroys it.
//
// # What is kept
//
// Owners, all mode bits, modification and access times in nanoseconds (of
// directories too), symbolic links with their owners, times and attributes,
// hard links, extended attributes of every namespace, POSIX ACLs, holes,
// device nodes, fifos and sockets; flags (chattr: immutable, append-only, no-dump,
// no-atime, sync, dirsync, inherited projects) and project IDs; and as far as the
// destination supports them, hints about storage (no copy-on-write, compression, sizes
// of extents). The root directory keeps its owner, times and attributes but always
// has mode 0755 and is never immutable, because it will be a mount point.
//
// Flags, project IDs, dates, device numbers and long targets of symbolic links that the
// destination does not support are not errors: [Totals.NotKept] counts them. Birth times are
// neither copied nor counted.
//
// # Errors
//
// All errors are [*errs.Error] with operation "import" and the file as
// reference. Callers may rely on these kinds: Conflict (the source changed
// while it was read), NoSpace (the volume is too small), Invalid (not a tar,
// or a hostile one), Damaged (a truncated or corrupt archive), Permission,
// Unsupported (the destination does not support an attribute), Canceled.
package treecopy

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
)

const op = "import"

// Hints for users.
const hintChanged = "it changed while it was read: stop the programs that write to it, or import a snapshot"

var hintNoSpace = errs.Messagef("the volume is too small: use a larger %s", errs.Param("size"))

// Inode identifies a file or directory of this host, as stat(2) does.
type Inode struct {
	Dev, Ino uint64
}

// Options are the options of copies. The zero value suits root.
type Options struct {
	// Progress, if set, is called after each piece of work, with the number of
	// entries of any type and of data bytes. The sum of all calls of a
	// successful CopyDir is what Measure returns for the same tree. It is
	// called concurrently and must be cheap.
	Progress func(files, bytes int64)

	// Resolved says that the path of the source is absolute and has no symbolic links. If one
	// appears in it, that is an error (Conflict), instead of leading to another directory.
	Resolved bool

	// Exclude lists directories of the source that are skipped,
	// wherever they are mounted, such as the pool itself.
	Exclude []Inode

	// Unprivileged is for callers without root. The caller becomes the owner of
	// everything, and files that only root can make are skipped; Totals.Skipped
	// counts both. Without Unprivileged, these are errors.
	Unprivileged bool

	// OwnRoot keeps the mode of the root directory, and its flags immutable and
	// append-only, for sources that are roots of volumes themselves.
	OwnRoot bool

	// Staging makes the tree below one temporary directory of the root and
	// moves it up at the end. ext4 spreads the directories made directly in its
	// root over the whole device and keeps everything below them close by, so
	// this gives a compact image. Ignored with Unprivileged.
	Staging bool

	// Before, if set, is a Stamp of the source that CopyStable uses as
	// the one before its first copy.
	Before *Stamp

	// Pass, if set, is called by CopyStable when it begins to copy changed directories
	// again, with the number of the copy, from 2, and the number of directories.
	Pass func(pass int, changed int64)

	// Workers is the number of concurrent workers; 0 means twice the
	// number of processors, within limits. Untar always has a single writer.
	Workers int

	losses *losses // of several copies together; nil: of this copy only
}

// Totals counts a tree, without its root directory.
type Totals struct {
	// Files is the number of directory entries of every type; each of several
	// hard links counts.
	Files int64
	// Bytes is the amount of data in regular files without holes. Each
	// hard-linked file counts once.
	Bytes int64
	// Inodes is the number of distinct files and directories. Only Measure sets it.
	Inodes int64
	// Allocated is a lower bound of the space that the tree takes on a
	// filesystem with blocks of 4 KiB, in bytes: whole blocks of data and of
	// directories, but neither inodes nor extended attributes. Only Measure
	// sets it.
	Allocated int64
	// Skipped counts what was not copied.
	Skipped Skipped
	// NotKept lists what the destination does not support, sorted by What.
	NotKept []NotKept
}

// Skipped counts what a copy leaves out. Only KernelDirs and foreign
// attributes (see Xattrs) can be left out without Options.Unprivileged.
type Skipped struct {
	Owners  int64 // files that now belong to the caller instead of their owner; they lose setuid and setgid too
	Devices int64 // device nodes, and other special files that only root can make
	// Xattrs is the number of attributes: those that only root can set, those
	// that the destination does not support, and those that only have a meaning
	// on the source's filesystem (NFSv4 and CIFS ACLs, btrfs properties, EVM signatures).
	Xattrs int64
	// KernelDirs is the number of mount points of kernel filesystems (proc,
	// sysfs, cgroup, ...) in the source. They become empty directories.
	KernelDirs int64
}

// Any reports whether anything was left out.
func (s Skipped) Any() bool { return s != Skipped{} }

// counters is Totals for concurrent use.
type counters struct {
	files, bytes, inodes, allocated     atomic.Int64
	owners, devices, xattrs, kernelDirs atomic.Int64
	progress                            func(files, bytes int64)
	losses                              *losses
}

// countLoss counts that the copy of o lacks a property.
func (c *counters) countLoss(what string, o object, path func() string) {
	c.losses.addLoss(what, o.key, path())
}

func (c *counters) addProgress(files, bytes int64) {
	if files != 0 {
		c.files.Add(files)
	}
	if bytes != 0 {
		c.bytes.Add(bytes)
	}
	if c.progress != nil {
		c.progress(files, bytes)
	}
}

func (c *counters) totals() Totals {
	return Totals{
		Files: c.files.Load(), Bytes: c.bytes.Load(),
		Inodes: c.inodes.Load(), Allocated: c.allocated.Load(),
		Skipped: Skipped{
			Owners: c.owners.Load(), Devices: c.devices.Load(),
			Xattrs: c.xattrs.Load(), KernelDirs: c.kernelDirs.Load(),
		},
		NotKept: c.losses.list(nil),
	}
}

func newCounters(opt Options) *counters {
	c := &counters{progress: opt.Progress, losses: opt.losses}
	if c.losses == nil {
		c.losses = &losses{}
	}
	return c
}

// quote quotes and shortens a path for a message, if necessary: names may contain any character
// except NUL, and be very long.
func quote(path string) string {
	const most = 4096
	if len(path) > most {
		path = "..." + path[len(path)-most:]
	}
	if !utf8.ValidString(path) || strings.ContainsFunc(path, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(path)
	}
	return path
}

// srcErr returns the error of a failed system call on the source. It is a Conflict if a file no longer
// exists or has another type now.
func srcErr(path, call string, err error) error {
	switch {
	case errs.IsAny(err, unix.ENOENT, unix.ELOOP, unix.ENOTDIR, unix.ESTALE, unix.ENXIO),
		errors.Is(err, unix.EINVAL) && call == "readlink":
		e := errs.New(errs.Conflict, op, quote(path), "%s: %w", call, err)
		return e.WithHint("%s", hintChanged)
	}
	return sysErr(path, "reading: "+call, err)
}

// changed returns the error for a source that was modified while it was read; how says what changed, if known.
func changed(path string, how ...string) error {
	text := "it changed while it was read"
	if len(how) > 0 {
		text += " (" + strings.Join(how, ", ") + ")"
	}
	return errs.New(errs.Conflict, op, quote(path), "%s", text).WithHint("%s", hintChanged)
}

// dstErr returns the error of a failed system call on the destination.
func dstErr(path, call string, err error) error {
	e := sysErr(path, "writing: "+call, err)
	switch e.Kind {
	case errs.NoSpace:
		e.Hint = hintNoSpace
	case errs.Exists:
		e.Hint = "the destination must be empty, and tell all names of the source apart"
	case errs.NotFound:
		e.Kind = errs.Internal // nobody else has the destination open
	}
	if errors.Is(err, unix.EMLINK) {
		_ = e.WithHint("the volume's filesystem does not support so many hard links to one file; choose another %s",
			errs.Param("fs"))
	}
	return e
}

func sysErr(path, call string, err error) *errs.Error {
	e := errs.New(errs.KindOf(err), op, quote(path), "%s: %w", call, err)
	if e.Kind == errs.Permission && !errors.Is(err, unix.EROFS) {
		e.Hint = "run it as root"
	}
	return e
}

// retry repeats f while a signal interrupts it.
func retry[T any](f func() (T, error)) (T, error) {
	for {
		v, err := f()
		if err != unix.EINTR {
			return v, err
		}
	}
}

// retry0 is retry for calls that return nothing.
func retry0(f func() error) error {
	_, err := retry(func() (struct{}, error) { return struct{}{}, f() })
	return err
}

// openRoot opens the directory dst again.
func openRoot(dst *os.File) (int, error) {
	fd, err := retry(func() (int, error) {
		return unix.Openat(int(dst.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return -1, dstErr(dst.Name(), "open", err)
	}
	return fd, nil
}
