package mount

import (
	"errors"
	"fmt"
	"path/filepath"
	"runtime"

	"pando/internal/errs"

	"golang.org/x/sys/unix"
)

// Swap exchanges the directory dir with the directory beside, on which something
// is mounted, in one step: whoever looks up dir finds the old directory before
// it and the mount after it, and at no moment nothing. Both paths are absolute,
// without symbolic links, and on one mount.
//
// A mount sits on a directory entry and goes where that goes. The kernel does
// not rename an entry that is a mount point in the caller's mount namespace
// (EBUSY); so a thread with a namespace of its own, in which it is none, does it.
//
// Unsupported: this filesystem cannot exchange two directories. On any error
// nothing was exchanged.
func Swap(dir, beside string) error {
	return onOwnThread(func() error {
		fail := func(call string, err error) error { return errs.Wrap("replace", dir, fmt.Errorf("%s: %w", call, err)) }
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			return fail("unshare", err)
		}
		// Else the umount would take the mount away from everybody.
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			if errors.Is(err, unix.EINVAL) {
				return errs.New(errs.Unsupported, "replace", dir, "the root directory is no mount point: this is a chroot").WithHint("run it outside")
			}
			return fail("mount --make-rprivate /", err)
		}
		// Lazily: that somebody uses it does not matter here.
		if err := unix.Unmount(beside, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fail("umount "+beside, err)
		}
		err := unix.Renameat2(unix.AT_FDCWD, beside, unix.AT_FDCWD, dir, unix.RENAME_EXCHANGE)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
			return errs.New(errs.Unsupported, "replace", dir, "the filesystem of %s cannot exchange two directories: %w", filepath.Dir(dir), err).
				WithHint("adopt it without --replace, and put a clone there when nobody uses the directory")
		}
		if err != nil {
			return fail("renameat2", err)
		}
		return nil
	})
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
