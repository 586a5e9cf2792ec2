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

// Swap exchanges the directory name in parent with the directory beside there, on which
// something is mounted, in one step: whoever looks up name finds the old directory before
// it and the mount after it, and at no moment nothing. parent is as OpenDir returns it.
//
// A mount sits on a directory entry and goes where that goes. The kernel does
// not rename an entry that is a mount point in the caller's mount namespace
// (EBUSY); so a thread with a namespace of its own, in which it is none, does it.
//
// Unsupported: this filesystem cannot exchange two directories. Conflict: the path of
// parent does not lead to it any more. On any error nothing was exchanged.
func Swap(parent *os.File, name, beside string) error {
	defer runtime.KeepAlive(parent)

	dir := filepath.Join(parent.Name(), name)
	return onOwnThread(func() error {
		fail := func(call string, err error) error { return errs.Wrap("replace", dir, fmt.Errorf("%s: %w", call, err)) }
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			return fail("unshare", err)
		}

		// Else the umount would take the mount away from everybody.
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			if errors.Is(err, unix.EINVAL) {
				return errs.New(errs.Unsupported, "replace", dir,
					"the root directory is not a mount point, because this is a chroot").
					WithHint("run pando outside of the chroot")
			}
			return fail("mount --make-rprivate /", err)
		}

		// The mount on beside is to be found in this namespace's tree.
		here, err := reopen(parent)
		if err != nil {
			return err
		}

		defer here.Close()

		// Lazily: that somebody uses it does not matter here.
		at := fmt.Sprintf("/proc/thread-self/fd/%d/%s", here.Fd(), beside)
		if err := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fail("umount "+beside, err)
		}

		err = unix.Renameat2(int(here.Fd()), beside, int(here.Fd()), name, unix.RENAME_EXCHANGE)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EOPNOTSUPP) ||
			errors.Is(err, unix.ENOSYS) {
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

// reopen opens the directory dir by its path, which may lead to it through other mounts now.
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

// onOwnThread runs fn on a thread of its own, which ends after it: so fn may
// change what belongs to a thread.
func onOwnThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The first thread never ends, and /proc/self is about it: another
			// one, while this goroutine keeps it.
			done <- onOwnThread(fn)
			runtime.UnlockOSThread()
			return
		}
		done <- fn()
		// Not unlocked: the thread ends with the goroutine.
	}()

	return <-done
}
