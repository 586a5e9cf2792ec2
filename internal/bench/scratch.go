package bench

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/engine/pool"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/linux/treewalk"

	"golang.org/x/sys/unix"
)

// Prefix begins the name of everything that a benchmark makes: volumes,
// goldens, and its two scratch directories.
const Prefix = "bench-"

const (
	lockName   = "lock"   // in the outer directory: held while the run lives
	sourceName = "source" // in the outer directory: a symbolic link to the generated tree
	tempPrefix = "pando-" // of a generated tree, before the name of the run
	mountsName = "mnt"    // in the outer directory: mount points of the floor
	imagesName = "img"    // in the inner directory: copies of the floor
)

// scratch is where one run keeps what is not a volume. A run called bench-xyz has
//
//	POOL/bench-xyz        its lock, the floor's rows and mount points
//	POOL/data/bench-xyz   the floor's copies and the trees that cp makes
//	TMPDIR/pando-bench-xyz  the generated tree, if there is one
//
// on ZFS the dataset bench-xyz, mounted on the second, and bench-xyz-N for copies of the
// floor, in Docker the image bench-xyz and containers bench-xyz-N, and volumes and goldens
// whose names begin with bench-xyz.
type scratch struct {
	name    string
	outer   string
	inner   string
	dataset string // on ZFS: mounted on inner
	lock    *os.File
}

// newScratch makes the directories of a new run.
func newScratch(ctx context.Context, p *pool.Pool) (*scratch, error) {
	s := scratchAt(p, Prefix+string(driver.NewID()[:6]))

	// The pool's lock keeps those who clean up from taking the directory for a
	// dead run's before it is locked.
	unlock, err := pool.Lock(ctx, p.Dir)
	if err != nil {
		return nil, err
	}

	defer unlock()

	for _, d := range []string{s.outer, s.inner, filepath.Join(s.outer, mountsName)} {
		if err := os.Mkdir(d, 0o700); err != nil {
			s.abandon()
			return nil, errs.Wrap("bench", d, err)
		}
	}

	if s.lock, err = tryLock(s.outer); err == nil && s.lock == nil {
		err = errs.New(errs.InUse, "bench", s.outer, "another benchmark has locked it")
	}
	if err == nil && s.dataset != "" {
		if err = s.mountDataset(ctx); err != nil {
			_ = s.removeDatasets(context.WithoutCancel(ctx))
		}
	}
	if err == nil {
		err = os.Mkdir(filepath.Join(s.inner, imagesName), 0o700)
	}
	if err != nil {
		s.abandon()
		return nil, errs.Wrap("bench", s.outer, err)
	}

	return s, nil
}

func scratchAt(p *pool.Pool, name string) *scratch {
	return &scratch{name: name, outer: filepath.Join(p.Dir, name), inner: filepath.Join(p.DataDir(), name),
		dataset: datasetOf(p, name)}
}

// abandon takes back what newScratch has made so far.
func (s *scratch) abandon() {
	_ = os.RemoveAll(s.inner) // empty directories
	_ = os.RemoveAll(s.outer)
}

// tryLock takes the lock in a scratch directory; nil if another process has it.
func tryLock(outer string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(outer, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}

	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, nil
		}
		return nil, err
	}

	return f, nil
}

// remove takes everything of the run away but its volumes and goldens: mounts,
// copies, trees, directories. The caller holds the lock.
func (s *scratch) remove(ctx context.Context) error {
	all := []error{s.removeContainers(ctx)}
	mounts := filepath.Join(s.outer, mountsName)
	entries, err := os.ReadDir(mounts)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		all = append(all, err)
	}

	for _, e := range entries {
		if err := mount.Unmount(filepath.Join(mounts, e.Name())); err != nil && !errs.Is(err, errs.NotFound) {
			all = append(all, err)
		}
	}

	if target, err := os.Readlink(filepath.Join(s.outer, sourceName)); err == nil &&
		filepath.Base(target) == tempPrefix+s.name {
		all = append(all, treewalk.Remove(ctx, target))
	}

	if s.dataset != "" {
		all = append(all, s.removeDatasets(ctx))
	} else {
		all = append(all, s.removeCopies(ctx))
	}

	if errors.Join(all...) == nil {
		all = append(all, treewalk.Remove(ctx, s.inner))
	}
	if errors.Join(all...) == nil { // else the lock file must stay: the next run tries again
		all = append(all, treewalk.Remove(ctx, s.outer))
	}

	if s.lock != nil {
		s.lock.Close()
		s.lock = nil
	}

	return errors.Join(all...)
}

// removeCopies waits until no copy of the floor is a block device any more, and
// destroys those that are subvolumes.
func (s *scratch) removeCopies(ctx context.Context) error {
	dir, err := os.Open(filepath.Join(s.inner, imagesName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}

	defer dir.Close()

	entries, err := dir.ReadDir(-1)
	if err != nil {
		return err
	}

	var all []error
	for _, e := range entries {
		path := filepath.Join(dir.Name(), e.Name())
		if e.IsDir() {
			all = append(all, kernel.SubvolDestroy(dir, e.Name()))
			continue
		}
		if free, err := loopdev.WaitDetached(ctx, path, 10*time.Second); err != nil {
			all = append(all, err)
		} else if !free {
			all = append(all, errs.New(errs.InUse, "bench", path, "still a block device"))
		}
	}

	return errors.Join(all...)
}

// Cleaned is what Clean removed.
type Cleaned struct {
	Removed []string `json:"removed"` // what the names of leftovers began with
}

// Clean removes what killed runs have left in the pool: scratch directories,
// volumes, goldens. It returns the names of those runs. Runs that live are left
// alone, and so are volumes that a run was told to keep.
func Clean(ctx context.Context, e *engine.Engine) ([]string, error) {
	p, err := pool.Read(e.Dir())
	if err != nil {
		return nil, err
	}

	dead, err := deadRuns(ctx, p)
	if err != nil {
		return nil, err
	}

	var names []string
	var all []error
	for _, s := range dead {
		names = append(names, s.name)
		err := destroyRun(ctx, e, s.name)
		if err == nil { // the directory is how the next run finds the rest
			err = s.remove(ctx)
		} else {
			s.lock.Close()
		}
		all = append(all, err)
	}

	return names, errors.Join(all...)
}

// deadRuns finds the runs whose process is gone, and locks them.
func deadRuns(ctx context.Context, p *pool.Pool) ([]*scratch, error) {
	unlock, err := pool.Lock(ctx, p.Dir)
	if err != nil {
		return nil, err
	}

	defer unlock()

	var names []string
	for _, dir := range []string{p.Dir, p.DataDir()} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, errs.Wrap("bench", dir, err)
		}
		for _, e := range entries {
			if e.IsDir() && isRun(e.Name()) {
				names = append(names, e.Name())
			}
		}
	}

	slices.Sort(names)
	var out []*scratch
	for _, n := range slices.Compact(names) {
		s := scratchAt(p, n)
		if err := os.Mkdir(s.outer, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, errs.Wrap("bench", s.outer, err)
		}
		if s.lock, err = tryLock(s.outer); err != nil {
			return nil, errs.Wrap("bench", s.outer, err)
		}
		if s.lock != nil {
			out = append(out, s)
		}
	}

	return out, nil
}

// isRun reports whether a name is one that newScratch makes.
func isRun(name string) bool {
	id, ok := strings.CutPrefix(name, Prefix)
	return ok && len(id) == 6 && strings.Trim(id, "0123456789abcdefghijklmnopqrstuv") == ""
}

// destroyRun destroys the volumes and goldens of a run.
func destroyRun(ctx context.Context, e *engine.Engine, name string) error {
	var all []error
	report, err := e.Destroy(ctx, engine.DestroyRequest{What: []ref.Pattern{{Glob: name + "-*"}}})
	if err != nil && !errs.Is(err, errs.NotFound) {
		all = append(all, err)
	}
	if report != nil {
		all = append(all, report.Failed...)
	}

	goldens, err := e.Goldens(ctx)
	if err != nil {
		all = append(all, err)
	}

	for _, g := range goldens {
		if g.Name == name || strings.HasPrefix(g.Name, name+"-") {
			report, err := e.RemoveGolden(ctx, ref.Ref{Name: g.Name})
			all = append(all, err)
			if report != nil {
				all = append(all, report.Failed...)
			}
		}
	}

	return errors.Join(all...)
}
