package mount

import (
	"strings"

	"golang.org/x/sys/unix"
)

// Entry is a line of a mount table: see proc_pid_mountinfo(5).
type Entry struct {
	ID, Parent uint64
	Dev        uint64 // st_dev of files on it; not on btrfs, where each subvolume has its own
	Root       string // what of the filesystem is mounted
	Point      string // where, as the process sees it
	Options    string // of the mount: "rw,noatime"
	FSType     string // "ext4"; of FUSE "fuse.NAME"
	Source     string // "/dev/vda1", "tank/home", "overlay", ...
	Super      string // options of the filesystem: "rw,nobarrier"
}

// Has reports whether one of the options of the mount or of the filesystem is opt,
// in full: "nobarrier", "barrier=0".
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

// dropsSyncs are the options by which filesystems answer syncs without flushing their
// disk, by type; "" is for all others. data=writeback of ext4 is none: it is about the
// order of data and names. (fs/overlayfs/params.c, f2fs.rst, jfs.rst, ext4.rst, btrfs(5)
// and, before Linux 4.19, xfs(5).)
var dropsSyncs = map[string][]string{
	"overlay": {"volatile", "fsync=volatile"}, // the words of older kernels, and of newer
	"f2fs":    {"nobarrier", "fsync_mode=nobarrier"},
	"jfs":     {"nointegrity"},
	"":        {"nobarrier", "barrier=0", "barrier=none", "barrier=off"},
}

// DropsSyncs is the option by which the filesystem answers syncs without flushing its
// disk; "" if it has none.
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
// entries hide earlier ones at the same place. It costs by the number of mounts,
// so it is not for what is done often. Lines that it does not understand are left
// out: they are other people's.
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

// At finds the entry of the mount that path is on, by the mount's ID, so that
// bind mounts and mounts over each other are told apart. The path must exist.
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

// mountID is the ID, as in mount tables, of the mount that path is on; symbolic
// links are followed.
func mountID(path string) (uint64, error) {
	var st unix.Statx_t
	// The old kind of ID: the unique one is not in the table.
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, unix.STATX_MNT_ID,
		&st); err != nil {
		return 0, err
	}
	if st.Mask&unix.STATX_MNT_ID == 0 { // before Linux 5.8
		return 0, unix.ENOSYS
	}
	return st.Mnt_id, nil
}
