package preset

import (
	"context"
	"errors"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/linux/treewalk"

	"golang.org/x/sys/unix"
)

const opClean = "clean"

// match is an entry of the tree that a pattern found.
type match struct {
	dir  *os.File // where it is; open only while the function that gets it runs
	name string
	rel  string // path from the root
}

// path returns a path of the entry that leads through no symbolic link except the entry itself.
func (m match) path() string { return "/proc/self/fd/" + strconv.Itoa(int(m.dir.Fd())) + "/" + m.name }

// CheckKind refuses a directory that is not of the preset's kind. Invalid.
func (r *Rules) CheckKind(op, ref string, root *os.File) error {
	for _, pattern := range r.needs {
		found := false
		err := eachMatch(root, pattern, func(match) error {
			found = true
			return nil
		})
		if err != nil {
			return errs.Wrap(op, ref, err)
		}
		if !found {
			return errs.New(errs.Invalid, op, ref, "preset %s is for %s, and there is no %q in it", r.Name, r.About, pattern).
				WithHint("choose the directory that holds it, or remove %s", errs.Param("preset"))
		}
	}
	return nil
}

// Clean removes from a tree what its clones must not have, and returns the paths, sorted. Nobody else may write to the
// tree. It follows no symbolic links.
func (r *Rules) Clean(ctx context.Context, root *os.File) (removed []string, err error) {
	for _, rule := range r.removals {
		err := eachMatch(root, rule.pattern, func(m match) error {
			if rule.filesOnly {
				var st unix.Stat_t
				if err := unix.Fstatat(int(m.dir.Fd()), m.name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
					return errs.Wrap(opClean, m.rel, err)
				}
				if st.Mode&unix.S_IFMT == unix.S_IFDIR {
					return nil
				}
			}

			removed = append(removed, m.rel)
			return errs.Wrap(opClean, m.rel, treewalk.Remove(ctx, m.path()))
		})
		if err != nil {
			return removed, err
		}
	}

	slices.Sort(removed)
	return removed, nil
}

// eachMatch calls fn for each entry below root that matches a pattern. Only a directory, not a link to one, is
// searched for the rest of a pattern.
func eachMatch(root *os.File, pattern string, fn func(match) error) error {
	return eachBelow(root, "", strings.Split(pattern, "/"), fn)
}

func eachBelow(dir *os.File, rel string, parts []string, fn func(match) error) error {
	names, err := namesIn(dir)
	if err != nil {
		return errs.Wrap(opClean, rel, err)
	}

	for _, name := range names {
		if ok, _ := path.Match(parts[0], name); !ok { // the pattern was checked
			continue
		}

		at := path.Join(rel, name)
		if len(parts) == 1 {
			if err := fn(match{dir: dir, name: name, rel: at}); err != nil {
				return err
			}
			continue
		}

		below, err := openIn(dir, name, unix.O_DIRECTORY)
		if errs.IsAny(err, unix.ENOTDIR, unix.ELOOP, unix.ENOENT) {
			continue
		}
		if err != nil {
			return errs.Wrap(opClean, at, err)
		}

		err = eachBelow(below, at, parts[1:], fn)
		below.Close()
		if err != nil {
			return err
		}
	}

	return nil
}

// namesIn lists a directory, sorted, and leaves the position of dir where it is.
func namesIn(dir *os.File) ([]string, error) {
	again, err := openIn(dir, ".", unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}

	defer again.Close()
	names, err := again.Readdirnames(-1)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	slices.Sort(names)
	return names, err
}

// openIn opens an entry of a directory for reading, but follows no link and waits for no fifo.
func openIn(dir *os.File, name string, flags int) (*os.File, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC|flags, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}
