package mount

import (
	"strings"

	"golang.org/x/sys/unix"
)

// Entry is a line of a mount table: see proc_pid_mountinfo(5).
type Entry struct {
	ID, Parent uint64
	Dev        uint64 // st_dev of its files, except on btrfs, where each subvolume has a number of its own
	Root       string // the mounted directory of the filesystem
	Point      string // mount point, as the process sees it
	Options    string // of the mount: "rw,noatime"
	FSType     string // "ext4"; for FUSE "fuse.NAME"
	Source     string // "/dev/vda1", "tank/home", "overlay", ...
	Super      string // options of the filesystem: "rw,nobarrier"
}

// Has reports whether the mount or its filesystem has the option opt, such as "nobarrier" or "barrier=0".
func (e Entry) Has(opt string) bool {
	for _, list := range []string{e.Options, e.Super} {
		for o := range strings.SplitSeq(list, ",") {
			if o == opt {
				return true
			}
		}
	}
	return false
}

// dropsSyncs lists, by filesystem type, the options that make a filesystem complete syncs without
// flushing its disk; "" is for all other types. data=writeback of ext4 is not among them, because it
// affects only the order of data and names. (fs/overlayfs/params.c, f2fs.rst, jfs.rst, ext4.rst,
// btrfs(5) and, before Linux 4.19, xfs(5).)
var dropsSyncs = map[string][]string{
	"overlay": {"volatile", "fsync=volatile"}, // of older and of newer kernels
	"f2fs":    {"nobarrier", "fsync_mode=nobarrier"},
	"jfs":     {"nointegrity"},
	"":        {"nobarrier", "barrier=0", "barrier=none", "barrier=off"},
}

// DropsSyncs returns the option that makes the filesystem complete syncs without flushing its
// disk, "" if it has none.
func (e Entry) DropsSyncs() string {
	options, known := dropsSyncs[e.FSType]
	if !known {
		options = dropsSyncs[""]
	}
	for _, o := range options {
		if e.Has(o) {
			return o
		}
	}
	return ""
}

// Table reads the mount table of a process ("self", or a number), in order: later
// entries hide earlier ones at the same mount point. Its cost grows with the number of
// mounts, so do not call it often. It skips lines that it cannot parse.
func Table(process string) ([]Entry, error) {
	t, err := readMountTable("/proc/" + process + "/mountinfo")
	return exported(t), err
}

func exported(t []tableEntry) []Entry {
	out := make([]Entry, len(t))
	for i, m := range t {
		out[i] = Entry{ID: m.id, Parent: m.parent, Dev: m.dev, Root: m.root, Point: m.point, Options: m.options,
			FSType: m.fstype, Source: m.source, Super: m.super}
	}
	return out
}

// At returns the entry of the mount that contains path. It compares mount IDs, which
// distinguishes bind mounts and stacked mounts. The path must exist.
func At(table []Entry, path string) (Entry, bool) {
	id, err := mountID(path)
	if err != nil {
		return Entry{}, false
	}
	for _, e := range table {
		if e.ID == id {
			return e, true
		}
	}
	return Entry{}, false
}

// mountID returns the ID, as in mount tables, of the mount that contains path. It follows
// symbolic links.
func mountID(path string) (uint64, error) {
	var st unix.Statx_t
	// Ask for the old kind of ID, because mount tables do not have the unique one.
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, unix.STATX_MNT_ID,
		&st); err != nil {
		return 0, err
	}
	if st.Mask&unix.STATX_MNT_ID == 0 { // before Linux 5.8
		return 0, unix.ENOSYS
	}
	return st.Mnt_id, nil
}
