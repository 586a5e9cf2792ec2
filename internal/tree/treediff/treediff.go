// Package treediff finds the differences between two directory trees ([Compare]), applies
// them to another tree ([Apply]), and finds differences that conflict with each other
// ([Conflicts]). It knows filesystems, but nothing about Pando.
//
// # How Compare works
//
// In two trees that are copy-on-write copies of one origin (Options.SameOrigin),
// a file has the same inode number. So Compare recognizes moved files, except
// files so new that they may have been made after the trees parted: from then on, both trees give
// the same numbers to their new files. A file with the same number, size, times,
// owner and mode has not changed and is not read. In other trees, files with the same path
// are the same file, and Compare compares all of them.
//
// It reads the content of the remaining files, except ranges that are known to be in
// the same blocks (Options.SameBlocks). So Compare is exact: a file rewritten with
// the same bytes has no changed content.
//
// Without Hints, it has to read all directories and stat all files. With Hints, it reads only
// what may have changed. So does [CompareOverlay], for the layers of an overlay.
//
// # What Compare compares
//
// Type, size, content, mode, owner, device number, target of a symbolic link,
// extended attributes and ACLs, flags (chattr) and project IDs, names and hard links.
// Modification times count only with Options.Times. Access times and filesystems mounted
// in the trees do not count. Nested subvolumes count if they are part of both trees.
//
// # Errors
//
// All errors are *errs.Error. Conflict: a tree changed while it was read. IO, Canceled, and
// NoSpace from Apply.
package treediff

import (
	"context"
	"os"
	"strings"
	"time"
)

// Op is the kind of a change.
type Op string

// The kinds of changes.
const (
	Added    Op = "added"
	Modified Op = "modified"
	Deleted  Op = "deleted"
	Renamed  Op = "renamed" // and possibly modified: see Change.Content and Metadata
)

// Type is the type of a file, in words for users.
type Type string

// The types.
const (
	File    Type = "file"
	Dir     Type = "directory"
	Symlink Type = "symlink"
	Char    Type = "char device"
	Block   Type = "block device"
	Fifo    Type = "fifo"
	Socket  Type = "socket"
)

// Range is a range of bytes of a file, [From, To).
type Range struct{ From, To int64 }

// Change is one changed path. Paths are relative to the root of the tree, which
// is "."; they are the bytes that the filesystem stores, not always UTF-8.
type Change struct {
	Op         Op
	Path       string // in the second tree; for Deleted in the first
	From       string // for Renamed: the path in the first tree
	Type       Type   // in the second tree; for Deleted in the first
	TypeBefore Type   // for Modified: the old type, if it was different
	Link       string // another path of the same file in the second tree, whose change describes the content

	SizeBefore int64 // bytes; 0 except for regular files and symbolic links
	SizeAfter  int64

	// ChangedBytes is how much data of the second tree's file is not in the first:
	// blocks of 4 KiB in which a byte differs, and data behind the old end, without
	// holes. For an added file, it is all its data. Of several
	// hard links, one has it.
	ChangedBytes int64

	Content  bool // bytes, length, the target of a link or a device number differ
	Metadata bool // mode, owner, attributes, ACLs or flags differ
	Times    bool // the modification time differs

	ranges   []Range // the ranges that ChangedBytes counts; nil: unknown
	replaced bool    // for Modified: another file took its place
}

// TimesOnly reports whether only the modification time has changed.
func (c *Change) TimesOnly() bool {
	return c.Op == Modified && !c.Content && !c.Metadata
}

// Options are the options of Compare. The zero value suits any two trees.
type Options struct {
	// SameOrigin says that both trees are copy-on-write copies of one origin, so that
	// inode numbers mean the same in both.
	SameOrigin bool

	// Younger is when the trees parted, or earlier: when the younger tree was
	// made from the other, or when the first copy of their common origin was made. Files changed
	// after this time, or shortly before it, are compared even if their times are equal, because the
	// clock ticks slower than a program writes. Zero: unknown, and times are trusted.
	Younger time.Time

	// SameBlocks reports whether the bytes at the physical addresses a and b (see
	// internal/linux/extent) are known to be the same in both trees, and for how many
	// of n bytes, at least 1, that answer holds. nil: never known. It is called
	// concurrently.
	SameBlocks func(a, b, n int64) (same bool, bytes int64)

	// Hints limit what may have changed. nil: anything.
	Hints *Hints

	// Times makes a different modification time a change.
	Times bool

	// Progress is called with the numbers of files and bytes compared since its last call, and
	// concurrently.
	Progress func(files, bytes int64)

	placesOnly bool // moved directories of an overlay are not recognized, for tests
}

// Hints limit what may have changed. They need Options.SameOrigin.
type Hints struct {
	Method string // for Stats

	// Parted is a transaction number, on filesystems that have them: whatever this or an
	// older transaction made existed when the trees parted. 0: unknown.
	Parted uint64

	// Changed contains the number of each inode that differs between the trees or
	// is in only one of them. Additional inodes do no harm. A directory has
	// changed if one of its entries has.
	Changed map[uint64]Links

	// Index, if set, finds the names of inodes without reading directories.
	Index Index
}

// Links is the number of names that an inode has in each tree (1 for a directory).
type Links struct{ A, B int }

// Name is one name of an inode.
type Name struct {
	Dir  uint64 // inode number of the directory
	Name string
}

// Index finds paths by inode number. One goroutine at a time uses it.
type Index interface {
	// Names returns the names of an inode that is not a directory, none if it does not exist.
	Names(inB bool, ino uint64) ([]Name, error)
	// DirPath returns the path of a directory relative to the root, which is "". ok is
	// false if the directory does not exist.
	DirPath(inB bool, ino uint64) (path string, ok bool, err error)
}

// Stats are the costs of a comparison.
type Stats struct {
	Method    string // "walk", "overlay", or Hints.Method
	DirsRead  int64  // directories, counted in each tree
	Statted   int64  // calls of stat, counted in each tree
	FilesRead int64  // pairs of files whose content was compared
	BytesRead int64  // read from both trees together
}

// Result of Compare.
type Result struct {
	Changes []Change // in order of path
	Stats   Stats
}

// Compare compares the trees below the open directories a and b, which nobody
// may change until it returns. It may be called concurrently.
func Compare(ctx context.Context, a, b *os.File, o Options) (Result, error) {
	c, err := newComparer(ctx, a, b, o)
	if err != nil {
		return Result{}, err
	}
	return c.compareAll()
}

func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

// shown returns the path for a Change, in which the root is ".".
func shown(path string) string {
	if path == "" {
		return "."
	}
	return path
}

// split cuts a path into its directory and its last component.
func split(path string) (dir, name string) {
	if i := strings.LastIndexByte(path, '/'); i >= 0 {
		return path[:i], path[i+1:]
	}
	return "", path
}

func depth(path string) int { return strings.Count(path, "/") }

// below reports whether path is strictly below dir.
func below(path, dir string) bool {
	if dir == "" || dir == "." {
		return path != "" && path != "."
	}
	return len(path) > len(dir) && path[len(dir)] == '/' && path[:len(dir)] == dir
}
