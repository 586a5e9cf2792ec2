package treewalk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

const (
	readBatch = 1024
	opRemove  = "remove"
)

// Remove deletes path and everything below it. It succeeds if path does not exist, so it can be
// repeated and called concurrently, but nobody else may write below path while it runs. The removal is
// not durable.
//
// If something cannot be deleted, Remove deletes the rest and returns the first such error. InUse: a
// filesystem is mounted inside. Permission: the caller may not delete a file. It also deletes immutable
// and append-only files (chattr) if the caller has CAP_LINUX_IMMUTABLE. Without root, it makes directories
// writable for their owner first.
func Remove(ctx context.Context, path string) error { return RemoveCounted(ctx, path, func(int64) {}) }

// RemoveCounted is Remove, and calls removed with the number of entries that it has deleted since the last call, also
// concurrently.
func RemoveCounted(ctx context.Context, path string, removed func(n int64)) error {
	// Open the directory and its parent.
	dir, err := os.Open(filepath.Dir(path))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return errs.Wrap(opRemove, path, err)
	}

	defer dir.Close()

	name := filepath.Base(path)
	r := &remover{base: path, fixModes: os.Geteuid() != 0, removed: removed}
	root, err := r.open(dir, name)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case errs.IsAny(err, unix.ENOTDIR, unix.ELOOP):
		// Not a directory, or a symbolic link: remove only the name.
		if err := unlink(int(dir.Fd()), name, 0, false); err != nil && !errors.Is(err, unix.ENOENT) {
			return r.explain(int(dir.Fd()), name, path, err)
		}
		return nil
	case err != nil:
		return r.explain(int(dir.Fd()), name, path, err)
	}

	defer root.Close()

	// Delete the content, then the directory.
	if err := Walk(ctx, root, Funcs{Open: r.openDir, Visit: r.visit, Leave: r.leave}); err != nil {
		return errs.Wrap(opRemove, path, err)
	}

	if r.first != nil {
		return r.first
	}

	if err := unlink(int(dir.Fd()), name, unix.AT_REMOVEDIR, false); err != nil && !errors.Is(err, unix.ENOENT) {
		return r.explain(int(dir.Fd()), name, path, err)
	}

	return nil
}

// Unlink is unlinkat(2), but first clears the flags immutable and append-only of the entry and of
// its directory if they prevent the removal.
func Unlink(at int, name string, flags int) error { return unlink(at, name, flags, true) }

// unlink is Unlink. Without own, the flags of the directory do not change.
func unlink(at int, name string, flags int, own bool) error {
	err := unix.Unlinkat(at, name, flags)
	if err != unix.EPERM {
		return err
	}

	taken := kernel.Unprotect(at, name)
	if own {
		taken |= kernel.Unprotect(at, "")
	}
	if taken == 0 {
		return err
	}

	return unix.Unlinkat(at, name, flags)
}

type remover struct {
	base     string // for messages
	fixModes bool
	removed  func(n int64)

	mu     sync.Mutex
	first  error
	failed atomic.Bool
}

func (r *remover) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.first == nil {
		r.first = err
	}
	r.failed.Store(true)
}

// open opens the directory at path below at. With fixModes, it makes the directory readable,
// writable and searchable for its owner.
func (r *remover) open(at *os.File, path string) (*os.File, error) {
	f, err := Open(at, path)
	if errors.Is(err, unix.EACCES) && r.fixModes {
		var p *os.File
		if p, err = OpenFlags(at, path, unix.O_PATH|unix.O_DIRECTORY); err != nil {
			return nil, err
		}
		// Use the descriptor, because the path could be replaced by a link.
		err = unix.Chmod("/proc/self/fd/"+strconv.Itoa(int(p.Fd())), 0o700)
		p.Close()
		if err != nil {
			return nil, err
		}
		f, err = Open(at, path)
	}
	if err != nil {
		return nil, err
	}

	if r.fixModes {
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err == nil && st.Mode&0o700 != 0o700 {
			// If this fails, removing an entry fails later and reports the reason.
			_ = unix.Fchmod(int(f.Fd()), 0o700)
		}
	}

	return f, nil
}

func (r *remover) openDir(d *Dir) (*os.File, error) {
	f, err := r.open(d.Root(), d.Path())
	if err == nil {
		return f, nil
	}
	if !errors.Is(err, unix.ENOENT) {
		r.fail(r.explain(-1, "", r.path(d.Path()), err))
	}
	return nil, nil
}

// visit deletes all entries of d except directories.
func (r *remover) visit(d *Dir, f *os.File) ([]string, error) {
	var subdirs []string
	fd := int(f.Fd())
	for {
		entries, err := f.ReadDir(readBatch)
		files := int64(0)
		for _, e := range entries {
			if e.IsDir() {
				subdirs = append(subdirs, e.Name())
				continue
			}
			files++
			err := Unlink(fd, e.Name(), 0)
			if err != nil && !errors.Is(err, unix.ENOENT) {
				r.fail(r.explain(fd, e.Name(), r.path(d.Join(e.Name())), err))
			}
		}
		r.removed(files)
		if err == io.EOF || errors.Is(err, unix.ENOENT) { // or another Remove has deleted the directory
			return subdirs, nil
		}

		if err != nil {
			r.fail(errs.Wrap(opRemove, r.path(d.Path()), err))
			return subdirs, nil
		}
	}
}

// leave deletes the directories below d, which are empty now.
func (r *remover) leave(d *Dir, subdirs []string) error {
	f, err := Open(d.Root(), d.Path())
	if errors.Is(err, unix.ENOENT) {
		return nil
	}

	if err != nil {
		r.fail(r.explain(-1, "", r.path(d.Path()), err))
		return nil
	}

	defer f.Close()
	r.removed(int64(len(subdirs)))
	for _, name := range subdirs {
		err := Unlink(int(f.Fd()), name, unix.AT_REMOVEDIR)
		switch {
		case err == nil, errors.Is(err, unix.ENOENT):
		case errors.Is(err, unix.ENOTEMPTY) && r.failed.Load():
			// The error of the remaining entry has been recorded.
		default:
			r.fail(r.explain(int(f.Fd()), name, r.path(d.Join(name)), err))
		}
	}

	return nil
}

func (r *remover) path(rel string) string {
	if rel == "" {
		return r.base
	}
	return r.base + "/" + rel
}

// explain returns err, which concerns the entry name of the directory at, with its kind and a hint
// for the user.
func (r *remover) explain(at int, name, path string, err error) error {
	switch {
	case errs.IsAny(err, unix.EXDEV, unix.EBUSY):
		return (&errs.Error{Kind: errs.InUse, Op: opRemove, Ref: path, Err: errors.New("a filesystem is mounted on it")}).
			WithHint("run `umount %s` and retry", path)
	case errors.Is(err, unix.EPERM) && at >= 0:
		// The entry or its directory is immutable or append-only.
		if kernel.IsImmutable(at, name) {
			return (&errs.Error{Kind: errs.Permission, Op: opRemove, Ref: path, Err: fmt.Errorf("it is immutable: %w", err)}).
				WithHint("run `chattr -ia %s` and retry", path)
		}
		if parent := filepath.Dir(path); kernel.IsImmutable(at, "") {
			return (&errs.Error{Kind: errs.Permission, Op: opRemove, Ref: path,
				Err: fmt.Errorf("its parent directory is immutable: %w", err)}).
				WithHint("run `chattr -ia %s` and retry", parent)
		}
	case errors.Is(err, unix.ENOTEMPTY):
		return (&errs.Error{Kind: errs.InUse, Op: opRemove, Ref: path,
			Err: fmt.Errorf("another process keeps adding files: %w", err)}).
			WithHint("stop the processes that use it and retry")
	}

	return errs.Wrap(opRemove, path, err)
}
