package catalog

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/durable"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// A full disk must not keep anybody from freeing space, and freeing space means writing into the catalogue first. So
// the room for that is taken from the disk beforehand, where no other program can have it: blocks for the log, and
// files that become live files. Nothing is given back only to be taken again at that moment: on a full disk the
// writeback of other programs waits for every block that becomes free.

const (
	// logBytes is how much of the log is preallocated: room for some hundred transactions. A checkpoint may fail without
	// harm when there is no space, as the log then continues.
	logBytes = 4 << 20

	// pageBytes is the size of SQLite's pages.
	pageBytes = 4 << 10

	// indexBytes is what the index of the log takes for that. SQLite frees it and allocates it again when it opens the
	// catalogue and no other process has it open.
	indexBytes = 32 << 10

	// spares is how many processes at once can prove that they are alive on a disk without room for another file.
	spares      = 8
	sparePrefix = "spare-"
)

// Preallocate allocates what the catalogue of the pool in dir needs to be written on a full disk. Best effort: without
// it the pool's reserve has to do. It writes nothing into existing files, so it may be called while others use the
// catalogue. One call of stat if there is nothing to do.
func Preallocate(dir string) {
	path := filepath.Join(dir, "catalog.db-wal")
	var st unix.Stat_t
	if unix.Stat(path, &st) == nil && st.Blocks*512 >= logBytes {
		return
	}

	like, err := os.Lstat(filepath.Join(dir, "catalog.db"))
	if err != nil {
		return
	}

	preallocateFile(path, like, logBytes) // SQLite has no lock on the log

	ifClosed(dir, func() { preallocateFile(filepath.Join(dir, "catalog.db-shm"), like, indexBytes) })
}

// inodeWait is how long the last inodes of a disk may take to become free: those of files that this process has just
// removed are not while a child between fork and exec has them open.
const inodeWait = 128 * time.Millisecond

// waitForInode is time.Sleep. Tests set it.
var waitForInode = time.Sleep

// preallocateFile allocates blocks for a file, and makes it, empty, if it is missing.
func preallocateFile(path string, like fs.FileInfo, bytes int64) {
	f, err := openInPlace(path, like)
	for wait := time.Millisecond; errs.KindOf(err) == errs.NoSpace && wait <= inodeWait; wait *= 2 {
		waitForInode(wait)
		f, err = openInPlace(path, like)
	}
	if err != nil {
		return
	}
	defer f.Close()
	_ = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, bytes)
}

// openInPlace opens a file for writing, and makes it, empty, if it is missing. On btrfs a new file is overwritten in
// place: copy-on-write would need space for each write.
func openInPlace(path string, like fs.FileInfo) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	}
	if err != nil {
		return nil, err
	}

	if err := durable.KeepOwner(f, like); err != nil {
		f.Close()
		return nil, err
	}

	if flags, err := kernel.GetFlags(int(f.Fd())); err == nil {
		_ = kernel.SetFlags(int(f.Fd()), flags|kernel.FlagNoCow) // only btrfs knows it
	}

	return f, nil
}

// MakeSpares makes the missing spare files of the pool in dir. NoSpace.
func MakeSpares(dir string) error {
	like, err := os.Lstat(filepath.Join(dir, "live"))
	if err != nil {
		return errs.Wrap("make spares", dir, err)
	}

	for n := range spares {
		path := sparePath(dir, n)
		if _, err := os.Lstat(path); err == nil {
			continue
		}

		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
		if errors.Is(err, fs.ErrExist) {
			continue // another process was faster
		}

		if err == nil {
			err = durable.KeepOwner(f, like)
			f.Close()
		}
		if err != nil {
			return errs.Wrap("make spares", dir, err)
		}
	}

	return nil
}

func sparePath(dir string, n int) string {
	return filepath.Join(dir, "live", fmt.Sprintf("%s%d", sparePrefix, n))
}

func isSpare(name string) bool { return strings.HasPrefix(name, sparePrefix) }

// takeSpare makes a spare file the live file called token, and returns it locked: renaming
// needs neither a block nor an inode. NoSpace if none is left.
func takeSpare(dir, token string) (*os.File, error) {
	for n := range spares {
		if f, err := takeOneSpare(dir, n, token); err != nil || f != nil {
			return f, err
		}
	}
	return nil, errs.New(errs.NoSpace, "mark", dir, "no space for another file in %s",
		filepath.Join(dir, "live")).
		WithHint("free space or inodes on the filesystem of the pool directory")
}

// takeOneSpare takes one spare; nil if it is missing, or another process takes it now.
func takeOneSpare(dir string, n int, token string) (*os.File, error) {
	path := sparePath(dir, n)
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, nil // in use, under another name
	}

	free := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
	if free {
		free, err = isFile(f) // else another process took and replaced it
	}
	if !free || err != nil {
		f.Close()
		return nil, errs.Wrap("mark", path, err)
	}

	to := filepath.Join(dir, "live", token)
	err = unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if err != nil {
		f.Close()
		return nil, errs.Wrap("mark", to, err)
	}

	return f, nil
}

// returnSpare makes a live file that its process no longer needs a spare again. It reports whether it did: not if all
// spares exist.
func returnSpare(path string) bool {
	dir := filepath.Dir(filepath.Dir(path))
	for n := range spares {
		if unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, sparePath(dir, n), unix.RENAME_NOREPLACE) == nil {
			return true
		}
	}
	return false
}

// isFull reports whether the filesystem of a file has no room for another page, or another file. For some failures
// SQLite does not say that this was the reason.
func isFull(path string) bool {
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(path), &st); err != nil {
		return false
	}
	return int64(st.Bavail)*st.Bsize < 1<<20 || st.Files > 0 && st.Ffree == 0
}

// OnFull sets the func that is called, with the context of the transaction, when there is no space to write it. If it
// reports that it has made some, the transaction runs again.
func (c *Catalog) OnFull(fn func(context.Context) bool) { c.onFull = fn }

// TotalUsage adds up the last measurements: logical bytes, and an estimate of the bytes on disk. What an object shares
// is assumed to be shared with its origin, as far as that is as large, and is counted there. If the origin is gone, it
// is counted with the generation at its root, or for a generation with the one before; and if that is gone as well,
// what several objects made from the same origin share counts once.
func (t *Tx) TotalUsage() (logical, physical int64, err error) {
	err = t.queryRow(`WITH o AS (
		SELECT x.id, x.origin_id, x.exclusive, x.logical - x.exclusive AS shared,
		coalesce(origin.logical, base.logical) AS known
		FROM objects x
		LEFT JOIN objects origin ON origin.id = x.origin_id AND origin.id <> x.id
		LEFT JOIN objects base ON base.kind = 'generation' AND base.golden = x.golden AND base.generation = CASE x.kind
			WHEN 'generation' THEN (SELECT max(generation) FROM objects g
				WHERE g.kind = 'generation' AND g.golden = x.golden AND g.generation < x.generation)
			ELSE x.generation END
	) SELECT
		(SELECT coalesce(sum(logical), 0) FROM objects),
		(SELECT coalesce(sum(exclusive + max(0, shared - known)), 0) FROM o WHERE known IS NOT NULL) +
		(SELECT coalesce(sum(e + s), 0) FROM (SELECT sum(exclusive) e, max(shared) s FROM o WHERE known IS NULL
			GROUP BY CASE WHEN origin_id = '' THEN id ELSE origin_id END))`).Scan(&logical, &physical)

	return logical, physical, wrap("read catalogue", t.c.path, err)
}
