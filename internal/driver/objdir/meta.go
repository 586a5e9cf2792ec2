package objdir

import (
	"errors"
	"io/fs"
	"os"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/durable"

	"golang.org/x/sys/unix"
)

// Modes of the file with an identity.
const (
	uncommitted fs.FileMode = 0o600
	committed   fs.FileMode = 0o400
)

// attrName is the extended attribute that has the identity as well, where that saves time.
// A data block of its own makes a durable clone on a pool in a sparse file half as slow
// again; attributes go through the log of XFS, as names do. The kernel writes the file's
// content back later: it is for users, and for copies without attributes.
const attrName = "trusted.pando.identity"

// Logs makes identities durable by the filesystem's log alone. The log must keep the order
// of all changes, as that of XFS does.
func (d *Dir) Logs() { d.logs = true }

// Until says how durable an identity is when Put returns.
type Until int

const (
	InMemory Until = iota // it survives the process, but maybe not a power loss
	InNext                // the next commit of the filesystem makes it durable, content and name
	// it is durable, and so is everything made before in the same directory, except the data of other files
	OnDisk
)

// DurabilityOf returns how durable the identity of an object is made that depends on no later step.
func DurabilityOf(id driver.Identity) Until {
	if id.Ephemeral {
		return InMemory
	}
	return OnDisk
}

// Put writes the identity, which makes the object whole. The caller has made the
// data, or makes it next. Exists if there is one already, Invalid if it could not be
// read back. On error nothing remains.
func (d *Dir) Put(id driver.Identity, until Until) error {
	f, logged, err := d.writeNew(id, uncommitted)
	if err != nil {
		return errs.Wrap("write identity", string(id.ID), err)
	}

	defer f.Close()

	err = d.commitMeta(id.ID)
	if err != nil {
		_ = os.Remove(f.Name())
		return errs.Wrap("write identity", string(id.ID), err)
	}

	switch until {
	case InNext:
		if !logged {
			err = durable.WriteOut(f)
		}
	case OnDisk:
		if !logged {
			err = f.Sync()
		}
		if err == nil {
			err = d.f.Sync()
		}
	}
	if err != nil {
		_ = os.Remove(d.metaPath(id.ID))
	}

	return errs.Wrap("write identity", string(id.ID), err)
}

// Check reports whether Put could write the identity, as far as that can be told
// before. Invalid.
func (d *Dir) Check(id driver.Identity) error {
	_, err := Encode(id, d.pool)
	return err
}

// writeNew writes an identity under a temporary name, which contains the ID, so that Remove
// and List recognize it. logged reports whether the filesystem's log has it: then the file
// needs no sync.
func (d *Dir) writeNew(id driver.Identity, mode fs.FileMode) (f *os.File, logged bool, err error) {
	b, err := Encode(id, d.pool)
	if err != nil {
		return nil, false, err
	}

	path := d.metaPath(id.ID) + newExt
	f, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if errors.Is(err, fs.ErrExist) { // left by a process that was killed
		if err = os.Remove(path); err == nil {
			f, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
		}
	}
	if err != nil {
		return nil, false, err
	}

	// Give the file to the owner of the pool, even if root writes it.
	if err = durable.KeepOwner(f, d.st); err == nil {
		logged = d.logs && unix.Fsetxattr(int(f.Fd()), attrName, b, 0) == nil
		_, err = f.Write(append(b, '\n'))
	}
	if err != nil {
		f.Close()
		_ = os.Remove(path)
		return nil, false, err
	}

	return f, logged, nil
}

// commitMeta renames the identity that writeNew has written to its final name. Exists if there is one already.
func (d *Dir) commitMeta(id driver.ObjectID) error {
	from, to := d.metaPath(id)+newExt, d.metaPath(id)
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if !errors.Is(err, unix.EINVAL) { // a filesystem that knows no flags
		return err
	}
	if _, err := os.Lstat(to); err == nil {
		return unix.EEXIST
	}
	return os.Rename(from, to)
}

// Replace replaces the identity of an object, atomically and durably. It keeps the note
// that the object is committed, and fields that only a newer version knows. NotFound if
// there was no identity.
func (d *Dir) Replace(id driver.Identity) error {
	if _, err := d.Get(id.ID); err != nil && !errs.Is(err, errs.Damaged) {
		return err
	}
	return d.Force(id)
}

// Force is Replace, but does not need an old identity, or a readable one.
func (d *Dir) Force(id driver.Identity) error {
	mode := uncommitted
	if old, was, err := d.readIdentity(id.ID); err == nil {
		if was {
			mode = committed
		}
		if id.Extra == "" {
			id.Extra = old.Extra
		}
	}

	f, logged, err := d.writeNew(id, mode)
	if err != nil {
		return errs.Wrap("write identity", string(id.ID), err)
	}

	defer f.Close()

	// Sync the content before the rename: after a power loss it is the old or the new one.
	if !logged {
		err = f.Sync()
	}
	if err == nil {
		err = os.Rename(f.Name(), d.metaPath(id.ID))
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return errs.Wrap("write identity", string(id.ID), err)
	}

	return d.Sync()
}

// Commit notes in its identity that an object is in the catalogue, or was. It does not
// wait for the disk: a power loss soon after may lose the note. Idempotent. NotFound.
func (d *Dir) Commit(id driver.ObjectID) error {
	fd, err := openMeta(d.metaPath(id))
	if err == nil {
		err = chmodFile(fd, committed)
		unix.Close(fd)
	}
	return errs.Wrap("write identity", string(id), err)
}

// openMeta opens the file with an identity safely, even if the owner of the pool has put
// something else in its place. ELOOP if it is a symbolic link.
func openMeta(path string) (int, error) {
	return unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
}

func chmodFile(fd int, mode fs.FileMode) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink != 1 {
		return damaged("it is not a file of its own")
	}
	return unix.Fchmod(fd, uint32(mode))
}

// Committed reports whether an object has the note of Commit. It returns the same kinds of
// errors as Get.
func (d *Dir) Committed(id driver.ObjectID) (bool, error) {
	_, is, err := d.readIdentity(id)
	return is, err
}

// Get reads the identity. NotFound, Damaged (not of this pool, not of this ID, not what
// was written), TooNew.
func (d *Dir) Get(id driver.ObjectID) (driver.Identity, error) {
	i, _, err := d.readIdentity(id)
	return i, err
}

func (d *Dir) readIdentity(id driver.ObjectID) (driver.Identity, bool, error) {
	i, isCommitted, err := d.readMeta(d.metaPath(id))
	if err == nil && (i.ID != id || i.Pool != d.pool) {
		err = damaged("it is that of object %q of pool %q", i.ID, i.Pool)
	}
	if err != nil {
		return driver.Identity{}, false, errs.Wrap("read identity", string(id), err)
	}
	return i, isCommitted, nil
}

func (d *Dir) readMeta(path string) (i driver.Identity, isCommitted bool, err error) {
	fd, err := openMeta(path)
	if errors.Is(err, unix.ELOOP) {
		return i, false, damaged("%s is a symbolic link", path)
	}
	if err != nil {
		return i, false, err
	}

	defer unix.Close(fd)

	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return i, false, err
	}

	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > driver.MaxIdentityBytes+1 {
		return i, false, damaged("%s is not a file with an identity", path)
	}

	// Copying without modes, or to a filesystem without them, changes the mode: such an object may be committed.
	isCommitted = fs.FileMode(st.Mode).Perm() != uncommitted
	text, err := readAll(fd, st.Size)
	if err != nil {
		return i, false, err
	}

	if i, err = Decode(text); !errs.Is(err, errs.Damaged) {
		return i, isCommitted, err
	}

	attr := make([]byte, driver.MaxIdentityBytes)
	if n, _ := unix.Fgetxattr(fd, attrName, attr); n > 0 {
		i, err = Decode(attr[:n]) // a power loss took the content, or damaged it
	} else if len(text) == 0 {
		err = fs.ErrNotExist // its name came to the disk before its content: it was never said to be there
	}

	return i, isCommitted, err
}

// readAll reads a file, which should have size bytes, but not much more than the longest
// identity.
func readAll(fd int, size int64) ([]byte, error) {
	b := make([]byte, size+1) // one more, to see the end
	for n := 0; ; {
		got, err := unix.Pread(fd, b[n:], int64(n))
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, err
		case got == 0:
			return b[:n], nil
		}

		n += got
		if n > driver.MaxIdentityBytes+1 {
			return b[:n], nil
		}
		if n == len(b) { // it has grown
			b = append(b, make([]byte, driver.MaxIdentityBytes)...)
		}
	}
}

// Remove removes the identity, so that the object is no longer whole. Absent is success.
func (d *Dir) Remove(id driver.ObjectID) error {
	for _, p := range []string{d.metaPath(id), d.metaPath(id) + newExt} {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return errs.Wrap("remove identity", string(id), err)
		}
	}
	return nil
}
