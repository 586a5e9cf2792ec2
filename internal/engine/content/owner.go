package content

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// A volume that belongs to a user is mounted so that the user owns what belongs on disk to the owner of the root
// directory of its origin, mostly root, and the reverse. Nothing on disk changes: golden, snapshots and what is
// published from the volume keep their owners, and no file is touched, however many there are.

// idsFor returns the map of owners in mounts for o, given a mount of the filesystem, or of the lower layer.
func idsFor(o driver.Owner, m *mount.Detached) (mount.IDMap, error) {
	uid, gid, err := m.Owner()
	return mount.IDMap{Users: mount.Exchange{A: uid, B: o.UID}, Groups: mount.Exchange{A: gid, B: o.GID}}, err
}

// giveTo maps the owners of files in a mount for the owner of the volume.
func giveTo(o driver.Owner, m *mount.Detached) error {
	if o.IsZero() {
		return nil
	}
	ids, err := idsFor(o, m)
	if err != nil {
		return err
	}
	return m.MapIDs(ids)
}

// giveLayersTo is giveTo for an overlay: the kernel refuses to map that itself, but takes mapped layers.
func giveLayersTo(o driver.Owner, lower, upper *mount.Detached) error {
	if o.IsZero() {
		return nil
	}
	ids, err := idsFor(o, lower)
	if err != nil {
		return err
	}
	if err := lower.MapIDs(ids); err != nil {
		return err
	}
	return upper.MapIDs(ids)
}

// CheckOwner refuses rights in the mount of a volume of a user, which could give that user control of the host, and
// volumes without files. Invalid.
func CheckOwner(op, name string, o driver.Owner, kind driver.FS, may Rights) error {
	switch {
	case o.IsZero():
		return nil
	case may.Dev || may.SUID:
		return errs.New(errs.Invalid, op, name, "a volume of another user is always mounted with nosuid and nodev").
			WithHint("remove %s and %s", errs.Param("dev"), errs.Param("suid"))
	case kind == driver.None:
		return errs.New(errs.Invalid, op, name, "a raw volume has no files that could belong to a user").
			WithHint("remove %s", errs.Param("owner"))
	case !CanMount():
		return errs.New(errs.Permission, op, name, "giving a volume to another user needs root").
			WithHint("run it as root, or remove %s", errs.Param("owner"))
	}
	return nil
}

// UsersDir has the default mount points of the volumes of users, a directory each, as the pool's own directory admits
// only root. Tests set it.
var UsersDir = "/run/pando"

// UserDir returns the directory of the default mount points of a user's volumes.
func UserDir(o driver.Owner) string {
	return filepath.Join(UsersDir, strconv.FormatUint(uint64(o.UID), 10))
}

// UserMountDir makes the directory of the default mount points of a user's volumes, and returns it. It belongs to root,
// and besides root only the user can enter and list it: what users could write there would not be limited, and /run is
// often in memory. On a filesystem without access control lists it belongs to the user.
func UserMountDir(o driver.Owner) (string, error) {
	dir := UserDir(o)
	if err := os.MkdirAll(UsersDir, 0o755); err != nil {
		return "", errs.Wrap("mount", UsersDir, err)
	}

	// Only root can write to the directory above, so nobody else can put something in its place.
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", errs.Wrap("mount", dir, err)
	}
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, unix.ELOOP) {
		return dir, nil // root has put a link there
	}
	if err != nil {
		return "", errs.Wrap("mount", dir, err)
	}
	defer f.Close()
	return dir, errs.Wrap("mount", dir, admitUser(f, o))
}

// admittedMode is the mode of a directory that admitUser has given to root: the bits of the group are the most that the
// access control list allows anybody.
const admittedMode = 0o750

// admitUser gives a directory to root, and lets one user enter and list it. Earlier versions gave it to the user.
func admitUser(dir *os.File, o driver.Owner) error {
	st, err := dir.Stat()
	if err != nil {
		return err
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if ok && sys.Uid == 0 && st.Mode().Perm() == admittedMode {
		return nil
	}

	if err := errors.Join(dir.Chown(0, 0), dir.Chmod(0o700)); err != nil {
		return err
	}
	err = unix.Fsetxattr(int(dir.Fd()), "system.posix_acl_access", userACL(o.UID), 0)
	if errors.Is(err, unix.ENOTSUP) {
		return dir.Chown(int(o.UID), int(o.GID))
	}
	return err
}

// userACL returns the access control list of a directory that root can change, and one user read and enter, as the
// kernel takes it (include/uapi/linux/posix_acl_xattr.h).
func userACL(uid uint32) []byte {
	const version, nobody = 2, ^uint32(0)
	acl := binary.LittleEndian.AppendUint32(nil, version)
	for _, e := range []struct {
		tag, perm uint16
		id        uint32
	}{{0x01, 7, nobody}, {0x02, 5, uid}, {0x04, 0, nobody}, {0x10, 5, nobody}, {0x20, 0, nobody}} {
		acl = binary.LittleEndian.AppendUint16(acl, e.tag) // owner, user, group, mask, others
		acl = binary.LittleEndian.AppendUint16(acl, e.perm)
		acl = binary.LittleEndian.AppendUint32(acl, e.id)
	}
	return acl
}
