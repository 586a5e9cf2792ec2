package pool

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// objectFile matches paths in the directory where a pool keeps its objects.
var objectFile = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`(^|/)objects/[0-9a-v]{26}\.[a-z]+(/|$)`)
})

// checkSite refuses a directory that cannot hold a pool: one of another user, who could go on changing its content, and
// one in another pool or in a volume of one, which would take this pool away with itself. The directory may be missing.
// Invalid.
func checkSite(dir string) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err == nil && int(st.Uid) != os.Geteuid() {
		return errs.New(errs.Invalid, "init", dir, "the directory belongs to another user (user ID %d)", st.Uid).
			WithHint("choose a new directory with %s", errs.Param("pool"))
	}

	real, err := nearestExisting(dir)
	if err != nil {
		return errs.Wrap("init", dir, err)
	}

	for d := real; ; d = filepath.Dir(d) {
		if d != dir && isPool(d) {
			return errs.New(errs.Invalid, "init", dir, "the directory is inside another pool (%s)", d).
				WithHint("choose a directory outside it with %s", errs.Param("pool"))
		}
		if d == "/" {
			break
		}
	}

	if volume := volumeAt(real); volume != "" {
		return errs.New(errs.Invalid, "init", dir, "the directory is inside a volume of another pool, which is mounted on %s",
			volume).
			WithHint("choose a directory outside it with %s", errs.Param("pool"))
	}

	return nil
}

// isPool reports whether dir holds a pool, of any version, or is a directory where a pool keeps its data, mounted
// somewhere else.
func isPool(dir string) bool {
	_, err := Read(dir)
	return err == nil || errs.Is(err, errs.TooNew) || exists(filepath.Join(dir, markerName))
}

// nearestExisting returns the real path of dir, or of the nearest directory above it that exists.
func nearestExisting(dir string) (string, error) {
	for {
		real, err := filepath.EvalSymlinks(dir)
		if !errors.Is(err, fs.ErrNotExist) || dir == "/" {
			return real, err
		}
		dir = filepath.Dir(dir)
	}
}

// volumeAt returns the mount point of the volume, of any pool, that contains path; "" if none does, or if that cannot
// be determined, as with ZFS volumes.
func volumeAt(path string) string {
	all, err := mount.Table("self")
	if err != nil {
		return ""
	}

	on, ok := mount.At(all, path)
	if !ok {
		return ""
	}
	if objectFile().MatchString(on.Root) {
		return on.Point
	}

	if loop, ok := strings.CutPrefix(on.Source, "/dev/loop"); ok {
		file, err := os.ReadFile("/sys/block/loop" + loop + "/loop/backing_file")
		if err == nil && objectFile().Match(bytes.TrimSpace(file)) {
			return on.Point
		}
	}

	return ""
}

// Renamable returns the nearest directory above dir in which users other than root and this process's user can replace
// the directory on the way to dir; "" if there is none.
func Renamable(dir string) string {
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return ""
	}

	for d := real; d != "/"; {
		d = filepath.Dir(d)
		var st unix.Stat_t
		if err := unix.Stat(d, &st); err != nil {
			return ""
		}
		foreign := st.Uid != 0 && int(st.Uid) != os.Geteuid()
		if foreign || st.Mode&0o002 != 0 && st.Mode&unix.S_ISVTX == 0 {
			return d
		}
	}

	return ""
}
