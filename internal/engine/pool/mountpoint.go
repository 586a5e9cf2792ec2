package pool

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// mountLink matches where the links in MountDir lead: to the block device of a raw volume,
// or to the tree of one that is not mounted. The pool may have been somewhere else when
// the link was made.
var mountLink = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(/dev/(loop[0-9]+|zd[0-9]+|zvol/.+)|/.*/data/objects/[0-9a-v]{26}\.[a-z]+)$`)
})

// IsMountLink reports whether a symbolic link in MountDir that says to is one that Pando
// makes.
func IsMountLink(to string) bool { return mountLink().MatchString(to) }

// objectName matches the names of files in data/objects, also of those in the making.
var objectName = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^[0-9a-v]{26}\.(meta(\.new)?|(img|subvol|tree)(\..*)?)$`)
})

// OnlyOurs fails if the pool holds something at which removing it would stop: see onlyMountPoints, and files that are
// not Pando's where the driver keeps its data. It does not look into a pool in a file, which goes with all that is in
// it, and not at what the driver keeps outside the directory. InUse.
func (p *Pool) OnlyOurs() error {
	if err := p.onlyMountPoints(); err != nil {
		return err
	}
	if p.Config.Backing != nil || exists(filepath.Join(p.DataDir(), outsideName)) {
		return nil
	}

	ours := []string{"objects", markerName, ".pando-probe"}
	if err := onlyEntries(p.DataDir(), func(name string) bool { return slices.Contains(ours, name) }); err != nil {
		return err
	}
	return onlyEntries(filepath.Join(p.DataDir(), "objects"), objectName().MatchString)
}

// onlyEntries fails if a directory has an entry whose name ours does not accept. InUse.
func onlyEntries(dir string, ours func(name string) bool) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.Wrap("deinit", dir, err)
	}

	for _, d := range entries {
		if !ours(d.Name()) {
			return foreignFileError(filepath.Join(dir, d.Name()))
		}
	}

	return nil
}

// onlyMountPoints fails if MountDir holds something at which removing the pool would stop: neither a link of Pando's,
// nor an empty directory, nor one on which something is mounted. InUse.
func (p *Pool) onlyMountPoints() error {
	entries, err := os.ReadDir(p.MountDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.Wrap("deinit", p.MountDir(), err)
	}

	for _, d := range entries {
		path := filepath.Join(p.MountDir(), d.Name())
		if to, err := os.Readlink(path); err == nil && IsMountLink(to) {
			continue
		}
		if m, err := kernel.MountAt(unix.AT_FDCWD, path); err == nil && m.Root {
			continue
		}
		inside, _ := os.ReadDir(path) // a volume whose filesystem has failed says nothing
		if !d.IsDir() || len(inside) > 0 {
			return foreignFileError(path)
		}
	}

	return nil
}

// removeMountPoint removes what Pando puts into MountDir: an empty directory, which may be immutable, or a link. InUse
// if there is anything else.
func removeMountPoint(dir, name string) error {
	path := filepath.Join(dir, "mnt", name)
	if to, err := os.Readlink(path); err == nil {
		if IsMountLink(to) {
			return removeEntry(path)
		}
		return foreignFileError(path)
	}

	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.ENOTDIR):
		return foreignFileError(path)
	case err != nil:
		return errs.Wrap("deinit", path, err)
	}

	defer f.Close()

	if m, err := kernel.MountAt(unix.AT_FDCWD, path); err == nil && m.Root {
		return foreignFileError(path) // not even a flag of what is mounted there is ours
	}

	if _, err := kernel.SetImmutable(f, false); err != nil {
		return errs.Wrap("deinit", path, err)
	}

	return removeEntry(path)
}

// foreignFileError is the error that a file does not belong to the pool, or is in use.
func foreignFileError(path string) error {
	return errs.New(errs.InUse, "deinit", path, "it contains something that does not belong to the pool, or is mounted").
		WithHint("move it away or unmount it, then run %s again", errs.Run("deinit"))
}

// IsDefaultMountpoint reports whether a path is the default mount point of a volume, whatever its name is or was.
func (p *Pool) IsDefaultMountpoint(path string) bool { return filepath.Dir(path) == p.MountDir() }

// DefaultMountpoint is where a volume is mounted unless the user chooses another directory.
func (p *Pool) DefaultMountpoint(name string) string { return filepath.Join(p.MountDir(), name) }
