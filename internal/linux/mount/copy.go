package mount

import (
	"errors"
	"fmt"
	"runtime"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Take returns the mount as a Detached of its own: Close of d no longer has an effect.
func (d *Detached) Take() *Detached {
	out := &Detached{root: d.root}
	d.root = nil
	return out
}

// Copy makes another mount of what d mounts, detached, that a process in another mount namespace can attach there.
func (d *Detached) Copy() (*Detached, error) {
	defer runtime.KeepAlive(d)
	m, err := d.clone()
	if errors.Is(err, unix.EINVAL) { // before Linux 6.15 only what is attached can be copied
		return d.copyInNamespace()
	}
	return m, err
}

func (d *Detached) clone() (*Detached, error) {
	fd, err := unix.OpenTree(int(d.root.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, errs.Wrap("mount", d.root.Name(), fmt.Errorf("open_tree: %w", err))
	}
	return detached(fd, d.root.Name()), nil
}

// copyInNamespace attaches the mount in a mount namespace of a thread of its own, and makes two copies there: the
// namespace ends with the thread, and d becomes one of them.
func (d *Detached) copyInNamespace() (m *Detached, err error) {
	var own *Detached
	err = onOwnThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			return errs.Wrap("mount", d.root.Name(), fmt.Errorf("unshare: %w", err))
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return errs.Wrap("mount", d.root.Name(), fmt.Errorf("make mounts private: %w", err))
		}
		if _, err := d.MoveTo("/"); err != nil {
			return err
		}
		if own, err = d.clone(); err != nil {
			return err
		}
		m, err = d.clone()
		return err
	})
	if err != nil {
		if own != nil {
			own.Close()
		}
		return nil, err
	}

	d.Close()
	d.root, own.root = own.root, nil
	return m, nil
}
