// Package durable writes small files and directory entries so that they survive a power
// loss.
package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// WriteFile creates or replaces a file of mode 0600: after a crash it has either the old
// or the new content. Durable on return. If root replaces a file of another user, the
// owner stays the same. An interrupted call may leave PATH.new, which the next call
// removes. Only one call at a time may run for a path.
func WriteFile(path string, b []byte) error {
	fresh := path + ".new"
	if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}

	f, err := os.OpenFile(fresh, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}

	// Write the new content beside the file.
	if old, serr := os.Lstat(path); serr == nil {
		err = KeepOwner(f, old)
	}
	if err == nil {
		_, err = f.Write(b)
	}
	if err == nil {
		err = f.Sync()
	}

	if cerr := f.Close(); err == nil {
		err = cerr
	}

	// Replace the file.
	if err == nil {
		err = os.Rename(fresh, path)
	}
	if err != nil {
		_ = os.Remove(fresh) // useless, and the disk may be full
		return err
	}

	return SyncDir(filepath.Dir(path))
}

// KeepOwner changes the owner of a file that root has just created to the owner of like,
// the file that it replaces or its directory, who could not read it otherwise. It does
// nothing if the caller is not root.
func KeepOwner(f *os.File, like fs.FileInfo) error {
	st, ok := like.Sys().(*syscall.Stat_t)
	if !ok || os.Geteuid() != 0 || st.Uid == 0 {
		return nil
	}
	return f.Chown(int(st.Uid), int(st.Gid))
}

// SyncDir makes the entries of a directory durable.
func SyncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	err = d.Sync()
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	return err
}

// SyncFS writes out and makes durable everything that the filesystem of a file or
// directory has in memory. It also reports errors of other programs' writes.
func SyncFS(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}

	err = unix.Syncfs(int(f.Fd()))
	if err != nil {
		err = fmt.Errorf("syncfs %s: %w", path, err)
	}

	if cerr := f.Close(); err == nil {
		err = cerr
	}

	return err
}

// FIEMAP of linux/fiemap.h: the head of struct fiemap, without room for extents.
const (
	fsIocFiemap    = 0xc020660b
	fiemapFlagSync = 1
)

type fiemapHead struct {
	start, length         uint64
	flags, mapped, extent uint32
	_                     uint32
}

// WriteOut waits until the content of f is part of the next commit of the filesystem,
// with the directory entries created before. It commits nothing itself.
func WriteOut(f *os.File) error {
	defer runtime.KeepAlive(f)

	// To report where the content is, the filesystem must have written it: btrfs waits until
	// its trees contain it (btrfs_fiemap in the kernel's fs/btrfs/fiemap.c).
	head := fiemapHead{length: 1<<64 - 1, flags: fiemapFlagSync}
	_, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fsIocFiemap, uintptr(unsafe.Pointer(&head)))
	switch e {
	case 0:
		return nil
	case unix.EOPNOTSUPP, unix.ENOTTY:
		return f.Sync()
	}

	return os.NewSyscallError("FS_IOC_FIEMAP", e)
}
