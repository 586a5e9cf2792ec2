package content

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// CheckUserPlace checks that a user may have a volume mounted on dir, and returns its path without symbolic links. dir
// must be below one of the directories in below, which root has chosen. From there on, it leads through directories of
// the user's alone, so that a mount neither hides files of others nor tells what others have. Symbolic links and other
// mounts on this part of the way are refused. The path may change as soon as this returns: whoever mounts there opens
// it without following links, which leads to other directories of the user's at worst. Invalid, Permission, NotFound.
func CheckUserPlace(op string, o driver.Owner, below []string, dir string) (string, error) {
	if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir {
		return "", errs.New(errs.Invalid, op, dir, "the mount point must be an absolute path without . and ..")
	}
	if !utf8.ValidString(dir) || strings.ContainsFunc(dir, func(r rune) bool { return !unicode.IsPrint(r) }) {
		// Root's terminal will show it.
		return "", errs.New(errs.Invalid, op, strconv.Quote(dir), "the mount point must consist of printable characters")
	}
	base := ""
	for _, b := range below {
		if strings.HasPrefix(dir, b+"/") {
			base = b
		}
	}
	if base == "" {
		return "", errs.New(errs.Permission, op, dir, "the policy allows no mount point there").
			WithHint("choose a directory below %s", strings.Join(below, " or "))
	}

	// Find the directory that root has chosen.
	if base == UserDir(o) {
		if _, err := UserMountDir(o); err != nil {
			return "", err
		}
	}
	real, err := mount.Resolve(base)
	if errs.Is(err, errs.NotFound) {
		return "", errs.New(errs.NotFound, op, base, "the directory for mount points does not exist").
			WithHint("create it: `mkdir %s`", errs.ShellWord(base))
	}
	if err != nil {
		return "", err
	}
	at, err := mount.OpenDir(real)
	if err != nil {
		return "", err
	}
	defer func() { at.Close() }()

	// Walk on from there.
	names := strings.Split(dir[len(base)+1:], "/")
	for i, name := range names {
		next, err := openOwned(at, name, o)
		last := i == len(names)-1
		switch {
		case last && errs.IsAny(err, unix.ENOENT, unix.EXDEV): // to be made; something is mounted, maybe the volume itself
			continue
		case errors.Is(err, unix.ENOENT):
			return "", errs.New(errs.Invalid, op, dir, "the directory above the mount point does not exist").
				WithHint("create it: `mkdir -p %s`", errs.ShellWord(filepath.Dir(dir)))
		case errs.IsAny(err, unix.ELOOP, unix.ENOTDIR, unix.EXDEV):
			return "", errs.New(errs.Permission, op, dir, "%q on the way is a symbolic link, a mount, or not a directory", name).
				WithHint("choose a directory that is reached without links")
		case err != nil:
			return "", errs.Wrap(op, dir, err)
		}
		_ = at.Close() // only a base for the next step
		at = next
	}
	return filepath.Join(append([]string{real}, names...)...), nil
}

// openOwned opens a directory of the user's (O_PATH). Permission if it is another's; otherwise errors of the system.
func openOwned(at *os.File, name string, o driver.Owner) (*os.File, error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV | unix.RESOLVE_BENEATH}
	fd, err := unix.Openat2(int(at.Fd()), name, &how)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)

	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && st.Uid != o.UID {
		err = errs.New(errs.Permission, "mount", name, "this directory belongs to another user").
			WithHint("choose a directory of yours")
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}
