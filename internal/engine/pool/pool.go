// Package pool knows the directory that a pool lives in: what it holds, how it
// is made, made usable after a reboot, and removed.
//
//	pool.json     what the pool is; its presence is what makes a pool
//	catalog.db    the catalogue (with -wal and -shm)
//	catalog.seen  how many commits it must have
//	live/ locks/  proofs of life and locks of running commands
//	remotes/      addresses of remotes, and this host's keys to them
//	writer/       who the pool is to volumes on remotes that it writes, and what it wrote last
//	mnt/          default mount points
//	data/         the driver's directory; of a loop-backed pool a mount point
//	backing.xfs   of a loop-backed pool: the file behind data/
//	data/dataset  of a zfs pool: a symbolic link to the name of its dataset
//	reserve       room for cleaning up when the disk is full; a loop-backed pool has data/.reserve too
//	lock          held while the pool is made, mounted or removed
package pool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/durable"
	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// Version is the version of the pool directory.
const Version = 1

// DefaultDir is the directory of the pool unless the user names another.
const DefaultDir = "/var/lib/pando"

// DefaultMinFreePercent is the part of the pool that new clones must leave free.
const DefaultMinFreePercent = 5

const (
	configName   = "pool.json"
	markerName   = ".pando-pool"       // in data/: a symbolic link to the pool's ID
	initingName  = "init.inprogress"   // an interrupted init left this
	removingName = "deinit.inprogress" // an interrupted deinit left this
	backingName  = "backing.xfs"
	remotesName  = "remotes"
	writerName   = "writer"
	outsideName  = "dataset" // in data/: a symbolic link to the name of what the driver keeps outside the directory
)

// Config is the content of pool.json.
type Config struct {
	Version        int       `json:"version"`
	ID             string    `json:"id"`
	Driver         string    `json:"driver"`
	Backing        *Backing  `json:"backing,omitempty"`
	MinFreePercent float64   `json:"min_free_percent"`
	MadeDir        bool      `json:"made_dir"` // init made the directory, so deinit removes it
	CreatedAt      time.Time `json:"created_at"`
	Why            string    `json:"why"` // the driver was chosen
}

// Backing describes the file behind a loop-backed pool.
type Backing struct {
	FS        string `json:"fs"`
	SizeBytes int64  `json:"size_bytes"`        // what the pool was created with, or its filesystem has grown to
	Growing   bool   `json:"growing,omitempty"` // a resize has begun; if it was interrupted, Open finishes it
}

// Pool is an open pool directory.
type Pool struct {
	Dir    string // absolute
	Config Config

	// Room measures a pool whose objects do not lie in the filesystem of its
	// directory; nil: they do.
	Room driver.Spacer
	// Hurry, if Room is set, makes the space of destroyed objects return sooner.
	Hurry func(context.Context) error
}

// DataDir is the directory of the driver.
func (p *Pool) DataDir() string { return filepath.Join(p.Dir, "data") }

// RemotesDir is the directory of the pool's remotes.
func (p *Pool) RemotesDir() string { return filepath.Join(p.Dir, remotesName) }

// Remotes lists the names of the pool's remotes.
func (p *Pool) Remotes() ([]string, error) {
	entries, err := os.ReadDir(p.RemotesDir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() {
			out = append(out, e.Name())
		}
	}
	return out, errs.Wrap("list remotes", p.Dir, err)
}

// MountDir is the directory of default mount points.
func (p *Pool) MountDir() string { return filepath.Join(p.Dir, "mnt") }

// BackingFile is the file behind a loop-backed pool.
func (p *Pool) BackingFile() string { return filepath.Join(p.Dir, backingName) }

// Read reads pool.json without making the pool usable. NotFound, Damaged,
// TooNew, Permission.
func Read(dir string) (*Pool, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, errs.Wrap("open pool", dir, err)
	}

	b, err := os.ReadFile(filepath.Join(dir, configName))
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
			return nil, errs.Wrap("open pool", dir, err)
		}
		e := errs.New(errs.NotFound, "open pool", dir, "there is no pool")
		switch {
		case exists(filepath.Join(dir, removingName)):
			return nil, e.WithHint("deletion of this pool was interrupted; finish it with %s", errs.Run("deinit"))
		case exists(filepath.Join(dir, initingName)):
			return nil, e.WithHint("creation of this pool was interrupted; run %s again", errs.Run("init"))
		}
		return nil, e.WithHint("create one with %s, or choose another with %s or %s", errs.Run("init"),
			errs.Param("pool", "DIR"),
			errs.Variable("PANDO_POOL"))
	}

	p := &Pool{Dir: dir}
	var v struct {
		Version int `json:"version"`
		Format  int `json:"format"` // instead, before there were releases
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return nil, errs.New(errs.Damaged, "open pool", dir, "%s: %w", configName, err).
			WithHint("restore %s from a copy: it is needed to find the pool's driver", configName)
	}

	switch {
	case v.Version > Version:
		return nil, errs.New(errs.TooNew, "open pool", dir,
			"the pool has format %d, but this pando supports formats up to %d", v.Version, Version).
			WithHint("upgrade pando")
	case v.Version == 0 && v.Format > 0:
		return nil, errs.New(errs.Unsupported, "open pool", dir,
			"the pool was made by a development version of pando, from before version 0.1.0").
			WithHint("with that version, write what you need to files with %s, and import them into a new pool",
				errs.Run("export"))
	}

	if err := json.Unmarshal(b, &p.Config); err != nil || v.Version < 1 || p.Config.ID == "" || p.Config.Driver == "" {
		if err == nil {
			err = errors.New("values are missing")
		}
		return nil, errs.New(errs.Damaged, "open pool", dir, "%s: %w", configName, err).
			WithHint("restore %s from a copy: it is needed to find the pool's driver", configName)
	}

	return p, nil
}

// Open reads the pool and makes it usable: it mounts a loop-backed pool that is not
// mounted (after a reboot), and finishes a resize that was interrupted. It returns the
// errors of Read and of mounting.
func Open(ctx context.Context, dir string) (*Pool, error) {
	p, err := Read(dir)
	if err != nil {
		return nil, err
	}
	if err := p.mountIfNeeded(ctx); err != nil {
		return nil, err
	}

	p.finishResize(ctx)
	return p, nil
}

// mountIfNeeded mounts a loop-backed pool that is not mounted.
func (p *Pool) mountIfNeeded(ctx context.Context) error {
	if p.IsMounted() {
		return nil
	}

	unlock, err := Lock(ctx, p.Dir)
	if err != nil {
		return err
	}

	defer unlock()
	return p.MountData(ctx)
}

// IsMounted reports whether the pool can be used as it is: it is not a loop-backed pool that is not mounted yet.
func (p *Pool) IsMounted() bool { return p.Config.Backing == nil || p.isMounted() }

// isMounted reports whether the pool's own filesystem is mounted on data/.
func (p *Pool) isMounted() bool {
	id, err := os.Readlink(filepath.Join(p.DataDir(), markerName))
	return err == nil && id == p.Config.ID
}

// mountData mounts the backing file on data/. The caller holds the lock.
func (p *Pool) mountData(ctx context.Context) error {
	if os.Geteuid() != 0 {
		return errs.New(errs.Permission, "open pool", p.Dir, "the pool is not mounted, and mounting it needs root").
			WithHint("run it as root")
	}

	if m, err := kernel.MountAt(unix.AT_FDCWD, p.DataDir()); err == nil && m.Root {
		return errs.New(errs.Damaged, "open pool", p.Dir, "something that is not this pool is mounted on %s", p.DataDir()).
			WithHint("unmount it")
	}

	d, err := p.mountBacking(ctx)
	if err != nil {
		return err
	}

	defer d.Close()
	_, err = d.MoveTo(p.DataDir())
	return err
}

// mountBacking mounts the backing file, detached. If it is already a block device (mounted in another mount namespace),
// that device is used: two of them on one file would corrupt it.
func (p *Pool) mountBacking(ctx context.Context) (*mount.Detached, error) {
	f, err := os.OpenFile(p.BackingFile(), os.O_RDWR, 0)
	if err != nil {
		e := errs.Wrap("open pool", p.Dir, err)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, errs.New(errs.Damaged, "open pool", p.Dir, "its backing file does not exist: %s", p.BackingFile())
		}
		return nil, e
	}

	defer f.Close()

	// A device that is just being detached no longer shows as one, but its file is still locked.
	for deadline := time.Now().Add(detachWait); ; {
		dev, err := loopdev.Attach(ctx, f, loopdev.Options{DirectIO: true, SectorBytes: backingSectorBytes})
		if err == nil {
			defer dev.Close()
			return mount.Device(p.Config.Backing.FS, dev.Path, nil, false)
		}

		if !errs.Is(err, errs.InUse) {
			return nil, err
		}

		if d, err := p.mountExistingDevice(f); d != nil || err != nil {
			return d, err
		}

		if _, err := loopdev.WaitDetached(ctx, p.BackingFile(), 10*time.Millisecond); err != nil {
			return nil, err
		}

		if time.Now().After(deadline) {
			return nil, errs.New(errs.InUse, "open pool", p.Dir, "another process has locked %s", p.BackingFile())
		}
	}
}

// detachWait is how long the kernel may take to detach an unused device: it writes the filesystem back first if its
// last mount was one in a mount namespace that has just ended, and disks may be slow. detachGrace is how long it may
// take before the reason is searched for.
const (
	detachWait  = time.Minute
	detachGrace = 5 * time.Second
)

// mountExistingDevice mounts the block device that the backing file is already attached to. It returns nil if there is
// none, or if it has just been detached.
func (p *Pool) mountExistingDevice(f *os.File) (*mount.Detached, error) {
	on, err := loopdev.On(f.Name())
	if err != nil {
		return nil, err
	}

	for _, b := range on {
		dev, err := b.Hold()
		if errs.Is(err, errs.NotFound) { // its last user has gone since
			continue
		}
		if err != nil {
			return nil, err
		}

		defer dev.Close()
		return mount.Device(p.Config.Backing.FS, b.Path, nil, false)
	}

	return nil, nil
}

// Space is room, in bytes.
type Space struct {
	TotalBytes int64 // of the filesystem of the driver
	FreeBytes  int64 // that can be written before something is full
	UsedBytes  int64
	HostFree   int64 // on the filesystem below a loop-backed pool, else FreeBytes
}

// Space measures the room, in O(1). The backing file of a loop-backed pool is
// sparse, so the filesystem below it counts too.
func (p *Pool) Space(ctx context.Context) (Space, error) { return p.space(ctx, false) }

// space is Space; rough: see driver.Spacer.
func (p *Pool) space(ctx context.Context, rough bool) (Space, error) {
	if p.Room != nil {
		r, err := p.Room.Space(ctx, rough)
		return Space{TotalBytes: r.TotalBytes, FreeBytes: r.FreeBytes, UsedBytes: r.UsedBytes, HostFree: r.FreeBytes}, err
	}

	var st unix.Statfs_t
	if err := unix.Statfs(p.DataDir(), &st); err != nil {
		return Space{}, errs.Wrap("measure pool", p.Dir, err)
	}

	s := Space{
		TotalBytes: int64(st.Blocks) * st.Bsize,
		FreeBytes:  int64(st.Bavail) * st.Bsize,
		UsedBytes:  int64(st.Blocks-st.Bfree) * st.Bsize,
	}

	s.HostFree = s.FreeBytes
	if p.Config.Backing != nil {
		var err error
		if s.HostFree, err = p.HostFree(); err != nil {
			return Space{}, err
		}
		s.FreeBytes = min(s.FreeBytes, s.HostFree)
	}

	return s, nil
}

// HostFree is the room left on the filesystem of the pool's directory, in bytes: below a loop-backed pool.
func (p *Pool) HostFree() (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(p.Dir, &st); err != nil {
		return 0, errs.Wrap("measure pool", p.Dir, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// freedWait is how long Admit waits for space that was freed a moment ago.
const freedWait = 2 * time.Second

// Admit refuses new data if the space left after need bytes would be below the pool's watermark. NoSpace. It refuses
// only after filesystems that free space in the background (XFS, btrfs) have had time to do so.
func (p *Pool) Admit(ctx context.Context, op, what string, need int64) error {
	var s Space
	var least int64
	deadline := time.Now().Add(freedWait)
	for try := 0; ; try++ {
		var err error
		if s, err = p.space(ctx, try == 0); err != nil {
			return err
		}

		least = p.least(s)
		if s.FreeBytes-need >= least {
			return nil
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			break
		}
		if try%4 == 0 {
			p.hurryFreeing(ctx)
		}

		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}

	hint := errs.Messagef("free space with %s and %s", errs.Run("destroy"), errs.Run("gc"))
	if s.HostFree < least+need && p.Config.Backing != nil {
		hint = errs.Messagef("%s, or on the filesystem below the pool, which has %d MiB left", hint, s.HostFree>>20)
	}

	msg := fmt.Errorf("the pool has %d MiB free, and %.4g %% (%d MiB) must stay free for running volumes", s.FreeBytes>>20,
		p.Config.MinFreePercent, least>>20)
	if need > 0 {
		msg = fmt.Errorf("this needs about %d MiB, but the pool has %d MiB free, of which %.4g %% (%d MiB) must stay free "+
			"for "+
			"what runs",
			need>>20, s.FreeBytes>>20, p.Config.MinFreePercent, least>>20)
	}

	return (&errs.Error{Kind: errs.NoSpace, Op: op, Ref: what, Err: msg}).WithHint("%s", hint)
}

// least is how many bytes must stay free: the pool's watermark.
func (p *Pool) least(s Space) int64 {
	return int64(float64(s.TotalBytes) * p.Config.MinFreePercent / 100)
}

// Spare is how many bytes Admit admits.
func (p *Pool) Spare(s Space) int64 { return max(s.FreeBytes-p.least(s), 0) }

// hurryFreeing makes a btrfs return freed space, which takes one commit to begin and another to end. XFS does it by
// itself. It reports whether more is to come, as far as can be known.
func (p *Pool) hurryFreeing(ctx context.Context) bool {
	if p.Room != nil {
		if p.Hurry != nil {
			_ = p.Hurry(ctx)
		}
		more, err := p.Room.Reclaiming(ctx)
		return err == nil && more
	}

	f, err := os.Open(p.DataDir())
	if err != nil {
		return false
	}

	defer f.Close()
	_ = kernel.BtrfsSync(f)
	more, err := kernel.BtrfsDeleting(f)
	return err == nil && more
}

// WaitFreed hurries what the filesystem frees in the background, waits until no more space comes back, for at most
// patience, and measures the pool.
func (p *Pool) WaitFreed(ctx context.Context, patience time.Duration) (Space, error) {
	const step, quiet = 20 * time.Millisecond, 4
	more := p.hurryFreeing(ctx)
	least, err := p.Space(ctx)
	deadline := time.Now().Add(patience)
	for still := 0; err == nil && still < quiet && time.Now().Before(deadline); still++ {
		select {
		case <-ctx.Done():
			return least, nil
		case <-time.After(step):
		}

		was := more
		more = p.hurryFreeing(ctx)
		var s Space
		if s, err = p.Space(ctx); err == nil {
			if more || was || s.UsedBytes < least.UsedBytes {
				still = -1
			}
			least = s
		}
	}

	return least, err
}

// Sync makes the names in the pool's directory durable.
func (p *Pool) Sync() error { return errs.Wrap("sync", p.Dir, durable.SyncDir(p.Dir)) }

func (p *Pool) writeConfig() error {
	b, err := json.MarshalIndent(p.Config, "", "  ")
	if err != nil {
		return err
	}
	return durable.WriteFile(filepath.Join(p.Dir, configName), append(b, '\n'))
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
