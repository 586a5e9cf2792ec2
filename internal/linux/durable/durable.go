// Package durable writes small files, and names, so that a power loss does not take
// them away.
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

// WriteFile makes a file of mode 0600 with this content, or replaces it: after a crash
// it is the old or the new one. Durable on return. If root replaces somebody's file, it
// stays theirs. Beside it there may be a PATH.new, which the next call removes. One call
// at a time for one path.
func WriteFile(path string, b []byte) error {
	fresh := path + ".new"
	if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}

	f, err := os.OpenFile(fresh, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}

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
	if err == nil {
		err = os.Rename(fresh, path)
	}
	if err != nil {
		_ = os.Remove(fresh) // of no use, and maybe what the disk is full of
		return err
	}

	return SyncDir(filepath.Dir(path))
}

// KeepOwner gives a file that root has just made to the owner of what it replaces, or of
// the directory that it is in: else whoever owns that could not read it any more. Of
// anybody else's files the owner stays.
func KeepOwner(f *os.File, like fs.FileInfo) error {
	st, ok := like.Sys().(*syscall.Stat_t)
	if !ok || os.Geteuid() != 0 || st.Uid == 0 {
		return nil
	}
	return f.Chown(int(st.Uid), int(st.Gid))
}

// SyncDir makes the names in a directory durable.
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

// SyncFS writes out all that the filesystem of a file or directory has in memory, and
// makes it durable. It reports errors that other programs' writes have met, too.
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

// WriteOut waits until the content of f is part of what the filesystem commits next, with
// the names that were made before. It commits nothing itself.
func WriteOut(f *os.File) error {
	defer runtime.KeepAlive(f)

	// To be able to say where the content lies, the filesystem must have put it there:
	// btrfs waits until its trees know (btrfs_fiemap in the kernel's fs/btrfs/fiemap.c).
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
