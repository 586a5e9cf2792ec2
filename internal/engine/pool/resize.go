package pool

import (
	"context"
	"os"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"

	"golang.org/x/sys/unix"
)

const opResizePool = "pool resize"

// sizeUnit is what sizes of backing files are rounded up to, in bytes.
const sizeUnit = 1 << 20

// Resize enlarges a loop-backed pool while it is in use: its file, the block device, and the filesystem on it. A
// process that dies in between leaves a pool that works, of the old size or the new one, and the next call does the
// rest. It returns the size before, in bytes. Durable on return. Unsupported (the pool is not loop-backed), Invalid
// (smaller than it is), NoSpace (the filesystem below has less), InUse (see Lock).
func (p *Pool) Resize(ctx context.Context, size int64) (before int64, err error) {
	unlock, err := Lock(ctx, p.Dir)
	if err != nil {
		return 0, err
	}
	defer unlock()

	now, err := Read(p.Dir) // another process may have enlarged it
	if err != nil {
		return 0, err
	}

	size = (size + sizeUnit - 1) / sizeUnit * sizeUnit
	if err := now.checkResize(size); err != nil {
		return 0, err
	}

	f, err := os.OpenFile(now.BackingFile(), os.O_RDWR, 0)
	if err != nil {
		return 0, errs.Wrap(opResizePool, p.Dir, err)
	}
	defer f.Close()

	// Enlarge the file first, and the filesystem last: each is never larger than what it is on.
	before = now.Config.Backing.SizeBytes
	if err := now.enlargeFile(f, size); err != nil {
		return 0, errs.Wrap(opResizePool, p.Dir, err)
	}
	if err := now.enlargeDevice(f); err != nil {
		return 0, err
	}
	if err := now.enlargeFilesystem(size); err != nil {
		return 0, errs.Wrap(opResizePool, p.Dir, err)
	}

	now.Config.Backing.SizeBytes = size
	if err := now.writeConfig(); err != nil {
		return 0, errs.Wrap(opResizePool, p.Dir, err)
	}
	p.Config = now.Config
	return before, nil
}

func (p *Pool) checkResize(size int64) error {
	b := p.Config.Backing
	if b == nil {
		return errs.New(errs.Unsupported, opResizePool, p.Dir, "the pool has no size of its own: it uses the filesystem or "+
			"zpool that it is in").WithHint("enlarge that, and pando uses the room at once")
	}

	if size < b.SizeBytes {
		return errs.New(errs.Invalid, opResizePool, p.Dir, "the pool has %s and cannot shrink (got %s)",
			errs.FormatBytes(b.SizeBytes), errs.FormatBytes(size)).
			WithHint("its file is sparse: return what it does not use with %s", errs.Run("gc"))
	}

	free, err := p.HostFree()
	if err == nil && size-b.SizeBytes > free {
		err = errs.New(errs.NoSpace, opResizePool, p.Dir, "the filesystem below has only %s free for %s more",
			errs.FormatBytes(free), errs.FormatBytes(size-b.SizeBytes)).WithHint("choose a smaller size")
	}
	return err
}

func (p *Pool) enlargeFile(f *os.File, size int64) error {
	st, err := f.Stat()
	if err != nil || st.Size() >= size {
		return err
	}
	if err := f.Truncate(size); err != nil {
		return err
	}
	return f.Sync()
}

// enlargeDevice makes the block device as large as the file. It may be attached in another mount namespace.
func (p *Pool) enlargeDevice(f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return errs.Wrap(opResizePool, p.Dir, err)
	}
	all, err := loopdev.List()
	if err != nil {
		return err
	}

	for _, b := range all {
		if !b.SameFile(&st) {
			continue
		}
		dev, err := b.Hold()
		if err != nil {
			return err
		}
		defer dev.Close()
		return os.NewSyscallError("LOOP_SET_CAPACITY", unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_SET_CAPACITY, 0))
	}
	return errs.New(errs.Conflict, opResizePool, p.Dir, "the pool has just been unmounted").WithHint("try again")
}

func (p *Pool) enlargeFilesystem(size int64) error {
	data, err := os.Open(p.DataDir())
	if err != nil {
		return err
	}
	defer data.Close()

	if err := kernel.GrowXFS(data, size); err != nil {
		return err
	}
	return os.NewSyscallError("syncfs", unix.Syncfs(int(data.Fd())))
}
