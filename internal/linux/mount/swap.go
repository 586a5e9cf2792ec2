package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Swap exchanges the directory name in parent with the mount point beside in parent, in one step:
// a lookup of name finds either the old directory or the mount, and never fails. parent must
// come from OpenDir.
//
// A mount belongs to a directory entry and moves with it. The kernel refuses to rename an entry
// that is a mount point in the caller's mount namespace (EBUSY), so a thread with a mount namespace
// of its own unmounts it there and renames.
//
// Unsupported: this filesystem cannot exchange two directories. Conflict: the path of
// parent now leads to another directory. On any error nothing was exchanged.
func Swap(parent *os.File, name, beside string) error {
	defer runtime.KeepAlive(parent)

	dir := filepath.Join(parent.Name(), name)
	return onOwnThread(func() error {
		fail := func(call string, err error) error { return errs.Wrap("replace", dir, fmt.Errorf("%s: %w", call, err)) }
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			return fail("unshare", err)
		}

		// Stop propagation: otherwise the umount would remove the mount in all namespaces.
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			if errors.Is(err, unix.EINVAL) {
				return errs.New(errs.Unsupported, "replace", dir,
					"the root directory is not a mount point, because this is a chroot").
					WithHint("run pando outside of the chroot")
			}
			return fail("mount --make-rprivate /", err)
		}

		// Open parent again, because its descriptor leads to the mounts of the old namespace.
		here, err := reopen(parent)
		if err != nil {
			return err
		}

		defer here.Close()

		// Unmount lazily, because the mount may be busy.
		at := fmt.Sprintf("/proc/thread-self/fd/%d/%s", here.Fd(), beside)
		if err := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fail("umount "+beside, err)
		}

		// Exchange the directories.
		err = unix.Renameat2(int(here.Fd()), beside, int(here.Fd()), name, unix.RENAME_EXCHANGE)
		if errs.IsAny(err, unix.EINVAL, unix.EXDEV, unix.EOPNOTSUPP, unix.ENOSYS) {
			return errs.New(errs.Unsupported, "replace", dir, "the filesystem of %s cannot exchange two directories: %w",
				filepath.Dir(dir), err).
				WithHint("adopt it without %s, and replace the directory with a clone while nothing uses it", errs.Param("replace"))
		}

		if err != nil {
			return fail("renameat2", err)
		}

		return nil
	})
}

// reopen opens the directory dir again by its path, in the current mount namespace. Conflict: the path
// leads to another directory.
func reopen(dir *os.File) (*os.File, error) {
	again, err := OpenDir(dir.Name())
	if err != nil {
		return nil, err
	}

	var was, is unix.Stat_t
	if err := errors.Join(unix.Fstat(int(dir.Fd()), &was), unix.Fstat(int(again.Fd()), &is)); err != nil {
		again.Close()
		return nil, errs.Wrap("open", dir.Name(), err)
	}

	if was.Dev != is.Dev || was.Ino != is.Ino {
		again.Close()
		return nil, errs.New(errs.Conflict, "open", dir.Name(), "another process replaced this directory in the meantime").
			WithHint("check who can write to its parent directories, then retry")
	}

	return again, nil
}

// onOwnThread runs fn on a new thread, which ends some time after fn returns, so fn may change
// attributes of its thread such as its namespaces. It is never the first thread of the process.
func onOwnThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The first thread cannot end, and /proc/self describes it. This goroutine occupies it
			// while another thread runs fn.
			done <- onOwnThread(fn)
			runtime.UnlockOSThread()
			return
		}
		done <- fn()
		// The thread stays locked, so it ends with the goroutine.
	}()

	return <-done
}
