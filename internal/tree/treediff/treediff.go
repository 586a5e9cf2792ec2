// Package treediff says in what two directory trees differ ([Compare]), makes one
// tree differ in the same way ([Apply]), and finds what two sets of differences
// cannot both have ([Conflicts]). It knows filesystems, and nothing of Pando.
//
// # How it finds out
//
// Of two trees that come from one origin as copies on write (Options.SameOrigin)
// a file has one inode number in both. So a file that was moved is recognised,
// unless it is so new that it may have been made after the trees parted: both give
// the same numbers to their new files then. And a file whose number, size, times,
// owner and mode are all the same has not been changed and is not read. Of other trees files are the same if they have
// the same path, and all of them are compared.
//
// What remains to be compared is read, but for ranges that are known to lie on
// the same blocks (Options.SameBlocks). So Compare is exact: a file rewritten with
// the same bytes has not changed in content.
//
// Without Hints the cost is that of reading all directories and asking for the
// inode of each file. With them only what may have changed is asked for.
//
// # What is compared
//
// Type, size, content, mode, owner, device number, target of a symbolic link,
// extended attributes and ACLs, flags (chattr) and project IDs, names and hard links.
// Times of modification count only with Options.Times. Times of access and what is
// mounted in the trees do not count. Subvolumes inside do, where they are part
// of both trees.
//
// # Errors
//
// All errors are *errs.Error: Conflict if a tree changes in the meantime, IO, Canceled,
// NoSpace (of Apply).
package treediff

import (
	"context"
	"os"
	"strings"
	"time"
)

// Op is what happened to a path.
type Op string

// The kinds of changes.
const (
	Added    Op = "added"
	Modified Op = "modified"
	Deleted  Op = "deleted"
	Renamed  Op = "renamed" // and perhaps modified too: see Change.Content and Metadata
)

// Type of a file, as people call it.
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
// is "."; they are bytes as the filesystem has them, not always UTF-8.
type Change struct {
	Op         Op
	Path       string // in the second tree; of Deleted in the first
	From       string // of Renamed: the path in the first tree
	Type       Type   // in the second tree; of Deleted in the first
	TypeBefore Type   // of Modified: set if it was something else
	Link       string // another path (in the second tree) that is the same file, whose change tells of the content

	SizeBefore int64 // bytes; of regular files and symbolic links, else 0
	SizeAfter  int64

	// ChangedBytes is how much of the second tree's file is not in the first:
	// blocks of 4 KiB in which a byte differs, and behind the old end what is
	// data and not a hole. Of an added file that is all its data. Of several
	// hard links one has it.
	ChangedBytes int64

	Content  bool // bytes, length, the target of a link or a device number differ
	Metadata bool // mode, owner, attributes, ACLs or flags differ
	Times    bool // the time of modification differs

	ranges   []Range // what ChangedBytes counts; nil: unknown
	replaced bool    // of Modified: by another file, so what was there goes
}

// TimesOnly reports whether nothing but the time of modification has changed.
func (c *Change) TimesOnly() bool {
	return c.Op == Modified && !c.Content && !c.Metadata
}

// Options say how to compare. The zero value is right for any two trees.
type Options struct {
	// SameOrigin: both trees come from one origin as copies on write, so that
	// inode numbers mean the same in both.
	SameOrigin bool

	// Younger is when the trees parted, or before: when the younger of the two was
	// made from the other, or the first copy of what both come from. Files changed
	// since shortly before that are compared whatever their times say: a clock
	// ticks slower than a program writes. Zero: unknown, and times are trusted.
	Younger time.Time

	// SameBlocks reports whether the bytes at the physical addresses a and b (see
	// internal/linux/extent) are known to be the same in both trees, and for how many
	// of n bytes, at least 1, that answer holds. nil: nobody knows. It is called
	// concurrently.
	SameBlocks func(a, b, n int64) (same bool, bytes int64)

	// Hints say what may have changed. nil: anything.
	Hints *Hints

	// Times: changes of the time of modification are changes.
	Times bool

	// Progress is told of files and bytes that have been compared. It is called
	// concurrently.
	Progress func(files, bytes int64)
}

// Hints narrow down what may have changed. They need Options.SameOrigin.
type Hints struct {
	Method string // for Stats

	// Parted is a transaction, on filesystems that number them: what that one or an
	// older one made was there when the trees parted. 0: unknown.
	Parted uint64

	// Changed holds every inode, by number, that differs between the trees or
	// is in only one of them. More than that does no harm. A directory has
	// changed if an entry of it has.
	Changed map[uint64]Links

	// Index, if set, finds the names of inodes without reading directories.
	Index Index
}

// Links is how many names an inode has in each tree (of a directory: 1).
type Links struct{ A, B int }

// Name is one name of an inode.
type Name struct {
	Dir  uint64 // inode number of the directory
	Name string
}

// Index finds paths by inode number. It is used by one goroutine at a time.
type Index interface {
	// Names are those of an inode that is not a directory. None if it is not there.
	Names(inB bool, ino uint64) ([]Name, error)
	// DirPath is the path of a directory relative to the root, which is "". ok is
	// false if it is not there.
	DirPath(inB bool, ino uint64) (path string, ok bool, err error)
}

// Stats say what a comparison cost.
type Stats struct {
	Method    string // "walk", or what Hints say
	DirsRead  int64  // directories, counted in each tree
	Statted   int64  // inodes asked for, counted in each tree
	FilesRead int64  // pairs of files whose content was compared
	BytesRead int64  // read from both trees together
}

// Result of Compare.
type Result struct {
	Changes []Change // in order of path
	Stats   Stats
}

// Compare compares the trees below the open directories a and b, which nobody
// changes in the meantime. It may be called concurrently.
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

// shown is how the root is called in a Change.
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
