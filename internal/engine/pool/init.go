package pool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/durable"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/linux/run"

	"golang.org/x/sys/unix"
)

// backingSectorBytes is the sector size of the loop device under a loop-backed
// pool: XFS then writes its log in whole blocks of the filesystem below.
const backingSectorBytes = 4096

// MinBackingBytes is the smallest loop-backed pool: mkfs.xfs refuses less.
const MinBackingBytes = 300 << 20

// Plan describes the pool that init makes.
type Plan struct {
	Driver       string
	Outside      string // dataset that the driver uses outside the directory; "": none
	Unmake       Unmake // with Outside
	Open         driver.Opener
	BackingBytes int64 // 0: the driver lives in the directory's own filesystem
	MinFree      float64
	Why          string
	// Extra lays out what other packages keep in the pool's directory. Make calls it before the pool exists.
	Extra func(ctx context.Context, dir, poolID string) error
}

// Unmake removes what a driver has laid out outside the directory of a pool; data is its directory there.
type Unmake func(ctx context.Context, data, poolID string) error

// Prepare makes the directory of a pool, or checks that it can become one: it is missing, empty, or left by an
// interrupted init or deinit, whose leftovers Prepare removes. It returns with the lock held, and abort, which undoes
// everything that was made. Exists if there is a pool, Invalid if there is anything else.
func Prepare(
	ctx context.Context, dir string, unmake Unmake,
) (abs string, madeDir bool, unlock func(), abort func(), err error) {
	abs, err = filepath.Abs(dir)
	if err != nil {
		return "", false, nil, nil, errs.Wrap("init", dir, err)
	}

	if p, err := Read(abs); err == nil {
		return "", false, nil, nil, errs.New(errs.Exists, "init", abs, "a pool already exists here (driver %s)",
			p.Config.Driver).
			WithHint("use it, or choose another directory with %s", errs.Param("pool"))
	} else if k := errs.KindOf(err); k == errs.TooNew || k == errs.Damaged {
		return "", false, nil, nil, err
	}

	// Check the place, and make the directory.
	if err := checkSite(abs); err != nil {
		return "", false, nil, nil, err
	}

	madeDir, left, err := makeDir(abs)
	if err != nil {
		return "", false, nil, nil, err
	}

	// Lock it, and check again.
	unlock, err = Lock(ctx, abs)
	if err != nil {
		return "", false, nil, nil, err
	}

	if exists(filepath.Join(abs, configName)) {
		unlock()
		return "", false, nil, nil, errs.New(errs.Exists, "init", abs, "another process has just created a pool here")
	}

	// Remove what an interrupted init or deinit left.
	if left {
		if err := removeRemains(ctx, abs, unmake); err != nil {
			unlock()
			return "", false, nil, nil, err
		}
		if err := removeEntry(filepath.Join(abs, removingName)); err != nil {
			unlock()
			return "", false, nil, nil, err
		}
	}

	// From here on, undo everything on error.
	abort = func() {
		// Remove pool.json first: it may exist, but not be known to be durable.
		if removeEntry(filepath.Join(abs, configName)) != nil ||
			removeRemains(context.WithoutCancel(ctx), abs, unmake) != nil ||
			removeMarkers(abs) != nil {
			return // the marker still exists: the next init finishes
		}
		if madeDir {
			_ = os.Remove(abs)
		}
	}

	if err = os.Chmod(abs, 0o700); err == nil {
		err = os.WriteFile(filepath.Join(abs, initingName), nil, 0o600)
	}
	if err != nil {
		abort()
		unlock()
		return "", false, nil, nil, errs.Wrap("init", abs, err)
	}

	return abs, madeDir, unlock, abort, nil
}

// makeDir makes a pool's directory, or refuses one that holds anything but leftovers. left reports whether there are
// leftovers of an interrupted init or deinit. Invalid.
func makeDir(dir string) (made, left bool, err error) {
	st, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		made = true
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return false, false, errs.Wrap("init", dir, err)
		}
	case err != nil:
		return false, false, errs.Wrap("init", dir, err)
	case !st.IsDir():
		return false, false, errs.New(errs.Invalid, "init", dir, "it is not a directory")
	}

	entries, err := os.ReadDir(dir)
	if err != nil {
		return false, false, errs.Wrap("init", dir, err)
	}

	left = exists(filepath.Join(dir, initingName)) || exists(filepath.Join(dir, removingName))
	for _, e := range entries {
		// mkfs of a whole disk leaves lost+found; a lock alone is a race with
		// another init.
		if !left && e.Name() != "lost+found" && e.Name() != "lock" {
			return false, false, errs.New(errs.Invalid, "init", dir, "the directory is not empty (it holds %q)",
				e.Name()).
				WithHint("choose an empty or new directory with %s", errs.Param("pool"))
		}
	}

	return made, left, nil
}

// Make makes the pool that plan describes in a prepared directory. The pool exists as soon as pool.json does.
func Make(ctx context.Context, dir string, madeDir bool, plan Plan) (*Pool, error) {
	p := &Pool{Dir: dir, Config: Config{
		Version: Version, ID: string(driver.NewID()), Driver: plan.Driver, MinFreePercent: plan.MinFree,
		MadeDir: madeDir, CreatedAt: time.Now().UTC().Truncate(time.Second), Why: plan.Why,
	}}
	for _, d := range []string{p.DataDir(), p.MountDir()} {
		if err := os.Mkdir(d, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, errs.Wrap("init", dir, err)
		}
	}

	// Make and mount the filesystem of a loop-backed pool.
	data := p.DataDir()
	if plan.BackingBytes > 0 {
		p.Config.Backing = &Backing{FS: "xfs", SizeBytes: plan.BackingBytes}
		m, err := p.makeBacking(ctx)
		if err != nil {
			return nil, err
		}

		defer m.Close()
		root, err := m.Open()
		if err != nil {
			return nil, err
		}

		defer root.Close()
		if err := root.Chmod(0o700); err != nil {
			return nil, errs.Wrap("init", dir, err)
		}

		// The mount is not in the namespace yet, so that a kill leaves only
		// files; its descriptor gives it a path for this process.
		data = fmt.Sprintf("/proc/self/fd/%d/.", root.Fd())
	}

	// Mark the directory as this pool's.
	if err := os.Symlink(p.Config.ID, filepath.Join(data, markerName)); err != nil {
		return nil, errs.Wrap("init", dir, err)
	}

	if plan.Outside != "" {
		// Write the link first: an interrupted init is undone by it.
		if err := os.Symlink(plan.Outside, filepath.Join(data, outsideName)); err != nil {
			return nil, errs.Wrap("init", dir, err)
		}
	}

	if err := p.layOut(ctx, data, plan); err != nil {
		return nil, err
	}

	// Add the rest. The pool exists once its config does.
	if err := plan.Extra(ctx, dir, p.Config.ID); err != nil {
		return nil, err
	}

	if err := p.MakeReserve(); err != nil {
		return nil, err
	}

	if err := p.writeConfig(); err != nil {
		return nil, errs.Wrap("init", dir, err)
	}

	if err := os.Remove(filepath.Join(dir, initingName)); err != nil {
		return nil, errs.Wrap("init", dir, err)
	}

	return p, nil
}

// layOut lets the driver lay out its directory data, durably.
func (p *Pool) layOut(ctx context.Context, data string, plan Plan) error {
	drv, err := plan.Open(ctx, data, p.Config.ID, true)
	if err != nil {
		if plan.Outside != "" {
			// Try to remove what it may have made. That may fail: the requested place may not even exist.
			_ = plan.Unmake(context.WithoutCancel(ctx), data, p.Config.ID)
			_ = os.Remove(filepath.Join(data, outsideName))
		}
		return err
	}

	if s, ok := drv.(driver.Syncer); ok {
		err = s.Sync(ctx)
	}

	if c, ok := drv.(io.Closer); ok { // even on error: an open directory keeps the mount
		if cerr := c.Close(); err == nil {
			err = cerr
		}
	}
	if err != nil {
		return errs.Wrap("init", p.Dir, err)
	}

	return errs.Wrap("init", p.Dir, syncFilesystem(data))
}

// MountData mounts a pool that Make has just made. The caller holds the lock.
func (p *Pool) MountData(ctx context.Context) error {
	if p.Config.Backing == nil || p.isMounted() {
		return nil
	}
	return p.mountData(ctx)
}

// makeBacking makes the file of a loop-backed pool with an XFS in it, and mounts it where no other process sees it.
func (p *Pool) makeBacking(ctx context.Context) (*mount.Detached, error) {
	path := p.BackingFile()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, errs.Wrap("init", p.Dir, err)
	}

	defer f.Close()
	if err := f.Truncate(p.Config.Backing.SizeBytes); err != nil {
		return nil, errs.Wrap("init", p.Dir, err)
	}

	if _, err := run.Program(ctx, "mkfs.xfs", "-q", "-f", "-K", "-m", "reflink=1", "-s",
		"size="+strconv.Itoa(backingSectorBytes), path); err != nil {
		return nil, err
	}

	if err := f.Sync(); err != nil {
		return nil, errs.Wrap("init", p.Dir, err)
	}

	return p.mountBacking(ctx)
}

// Remove removes the pool with everything in it. Volumes must be unmounted. The caller holds the lock. It may be
// interrupted and called again.
func Remove(ctx context.Context, dir string, unmake Unmake) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return errs.Wrap("deinit", dir, err)
	}

	// Rename pool.json, unless an earlier call did.
	madeDir := false
	if p, err := Read(dir); err == nil {
		madeDir = p.Config.MadeDir
		// From here on there is no pool, only leftovers.
		if err := os.Rename(filepath.Join(dir, configName), filepath.Join(dir, removingName)); err != nil {
			return errs.Wrap("deinit", dir, err)
		}
		if err := durable.SyncDir(dir); err != nil {
			return errs.Wrap("deinit", dir, err)
		}
	} else if b, e := os.ReadFile(filepath.Join(dir, removingName)); e == nil {
		madeDir = containsMadeDir(b)
	} else {
		return err
	}

	if err := removeRemains(ctx, dir, unmake); err != nil {
		return err
	}

	if err := removeMarkers(dir); err != nil {
		return err
	}

	if madeDir {
		if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
			return errs.Wrap("deinit", dir, err)
		}
	}

	return nil
}

// DeinitInterrupted reports whether a deinit was begun in dir and not finished.
func DeinitInterrupted(dir string) bool { return exists(filepath.Join(dir, removingName)) }

// removeRemains removes everything of a pool except the directory, the lock, and the files that mark an interrupted
// init or deinit.
func removeRemains(ctx context.Context, dir string, unmake Unmake) error {
	// Remove what the driver keeps outside the directory.
	data := filepath.Join(dir, "data")
	if exists(filepath.Join(data, outsideName)) {
		id, err := os.Readlink(filepath.Join(data, markerName))
		if err != nil {
			return errs.Wrap("deinit", dir, err)
		}
		if err := unmake(ctx, data, id); err != nil {
			return err
		}
	}

	// Unmount data/, but only if it is a mount: without root umount(2) does not even check.
	if m, err := kernel.MountAt(unix.AT_FDCWD, data); err == nil && m.Root {
		if err := mount.Unmount(data); err != nil && !errs.Is(err, errs.NotFound) {
			return err
		}
	}

	// Wait until its loop device is detached.
	if b := filepath.Join(dir, backingName); exists(b) {
		if err := waitBackingDetached(ctx, dir, b); err != nil {
			return err
		}
	}

	return removeFiles(dir)
}

// waitBackingDetached waits for detachGrace, and longer if nobody is found who holds the backing file: the kernel is
// writing the filesystem back then. InUse, with the holders.
func waitBackingDetached(ctx context.Context, dir, backing string) error {
	gone, err := loopdev.WaitDetached(ctx, backing, detachGrace)
	if gone || err != nil {
		return err
	}

	on, err := loopdev.On(backing)
	if err != nil {
		return err
	}
	for _, b := range on {
		holders, _ := mount.Holders(ctx, mount.Query{Dev: loopdev.DeviceNumber(b.Index)}) // those that could be found
		if len(holders) > 0 {
			return errs.New(errs.InUse, "deinit", dir, "%s is still mounted: %s", backing, mount.FormatHolders(holders)).
				WithHint("end what holds it, then try again")
		}
	}

	gone, err = loopdev.WaitDetached(ctx, backing, detachWait)
	if gone || err != nil {
		return err
	}
	return errs.New(errs.InUse, "deinit", dir, "%s is still mounted, in another mount namespace or below another path",
		backing)
}

// removeFiles removes the files of a pool. It removes them one by one, never a tree: a volume that is mounted on
// mnt/NAME, or a file in data/ that is not Pando's, makes it stop, instead of being removed.
func removeFiles(dir string) error {
	for _, name := range []string{"live", "locks", "mnt"} {
		entries, err := os.ReadDir(filepath.Join(dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return errs.Wrap("deinit", dir, err)
		}
		for _, e := range entries {
			remove := func() error { return removeEntry(filepath.Join(dir, name, e.Name())) }
			if name == "mnt" {
				remove = func() error { return removeMountPoint(dir, e.Name()) }
			}
			if err := remove(); err != nil {
				return err
			}
		}
	}

	// Remove the addresses of remotes, the keys to them, and the record of writes. These may be removed as trees: all of
	// it is Pando's, and nothing is mounted there.
	for _, name := range []string{remotesName, writerName} {
		if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
			return errs.Wrap("deinit", dir, err)
		}
	}

	// Remove catalogues that a rebuild has set aside.
	old, err := filepath.Glob(filepath.Join(escapeGlob(dir), "catalog.damaged-*"))
	if err != nil {
		return errs.Wrap("deinit", dir, err)
	}

	for _, path := range old {
		if err := removeEntry(path); err != nil {
			return err
		}
	}

	// Remove the rest, and then the directories.
	for _, name := range []string{backingName, "catalog.db", "catalog.db-wal", "catalog.db-shm", "catalog.db-journal",
		"catalog.seen", reserveName, configName + ".new",
		"live", "locks", "mnt", "data/.pando-probe", "data/objects", "data/" + outsideName, "data/" + markerName, "data"} {
		if err := removeEntry(filepath.Join(dir, name)); err != nil {
			return err
		}
	}

	return nil
}

// removeMarkers removes, last of all, the lock and the files that mark an interrupted init or deinit.
func removeMarkers(dir string) error {
	for _, name := range []string{"lock", initingName, removingName} {
		if err := removeEntry(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

func syncFilesystem(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}

func containsMadeDir(config []byte) bool {
	var c Config
	return json.Unmarshal(config, &c) == nil && c.MadeDir
}

// removeEntry removes a file, a symbolic link or an empty directory.
func removeEntry(path string) error {
	err := os.Remove(path)
	switch {
	case err == nil, errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return nil
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EBUSY):
		return foreignFileError(path)
	}
	return errs.Wrap("deinit", path, err)
}

// escapeGlob escapes a path so that, as a pattern, it matches only itself.
func escapeGlob(path string) string {
	return strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`).Replace(path)
}
