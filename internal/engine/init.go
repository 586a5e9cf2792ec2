package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/pool"

	"golang.org/x/sys/unix"
)

// Auto lets Init choose the driver.
const Auto = "auto"

// Names of the drivers that Init chooses among.
const (
	driverBtrfs   = "btrfs"
	driverReflink = "reflink"
	driverPlain   = "plain"
	driverZFS     = "zfs"
)

// InitRequest says what pool to create.
type InitRequest struct {
	Dir            string
	Driver         string // Auto or a name
	Dataset        string // of the zfs driver: dataset for the volumes, "tank/pando"
	SizeBytes      int64  // of a loop-backed pool; 0: a sensible default
	Loop           bool   // loop-backed even if the directory's filesystem could hold the pool
	MinFreePercent float64
}

// unmakePool is a pool.Unmake: it removes what the driver keeps outside the pool's directory. Only the zfs driver keeps
// anything there.
func (d Drivers) unmakePool(ctx context.Context, data, poolID string) error {
	open, ok := d[driverZFS]
	if !ok {
		return errs.New(errs.Unsupported, "deinit", data, "this build of pando has no driver %q", driverZFS)
	}

	drv, err := open(ctx, data, poolID, false)
	if err != nil {
		return err
	}

	if c, ok := drv.(io.Closer); ok {
		defer c.Close()
	}

	if u, ok := drv.(driver.Unmaker); ok {
		return u.Unmake(ctx)
	}

	return nil
}

// InitReport describes the pool that Init made, and why it chose that driver.
type InitReport struct {
	api.Pool
	Faster errs.Message   `json:"faster,omitempty"` // what would be faster than this pool
	Notes  []errs.Message `json:"notes,omitempty"`  // what should be known about this pool
}

const (
	defaultBackingBytes = 100 << 30
	magicBtrfs          = 0x9123683e
	magicTmpfs          = 0x01021994
	magicZFS            = 0x2fc12fc1
)

// Init creates a pool. If the requested driver cannot work here, that is an error: Init
// never falls back to another. On error, or if it is interrupted, nothing remains.
// Exists, Invalid, Unsupported, Permission, NoSpace.
func Init(ctx context.Context, q InitRequest, drivers Drivers) (*InitReport, error) {
	if q.Driver == "" {
		q.Driver = Auto
	}

	if err := q.validate(drivers); err != nil {
		return nil, err
	}

	// Create the pool's directory, and the pool in it.
	dir, madeDir, unlock, abort, err := pool.Prepare(ctx, q.Dir, drivers.unmakePool)
	if err != nil {
		return nil, err
	}

	defer unlock()

	p, report, err := makePool(ctx, q, dir, madeDir, drivers)
	if err != nil {
		abort()
		return nil, errs.Wrap("init", dir, err)
	}

	if err := p.MountData(ctx); err != nil {
		return nil, err // the pool exists; the next command retries
	}

	// Describe it.
	e, err := Open(ctx, dir, drivers)
	if err != nil {
		return nil, err
	}

	defer e.Close()

	e.refillReserve() // a pool in a file has been mounted only just now
	info, err := e.Pool(ctx, PoolRequest{})
	report.Pool = info
	if at := pool.Renamable(dir); at != "" {
		report.Notes = append(report.Notes,
			errs.Messagef("other users can write to %s, and so could replace the pool with another directory", at))
	}

	return report, err
}

// validate checks whether the fields of a request fit together. Invalid.
func (q InitRequest) validate(drivers Drivers) error {
	switch {
	case q.Driver != Auto && drivers[q.Driver] == nil:
		return errs.New(errs.Invalid, "init", q.Dir, "unknown driver %q", q.Driver).
			WithHint("choose one of: auto, %s", drivers.names())
	case q.Driver == driverZFS && q.Dataset == "":
		return errs.New(errs.Invalid, "init", q.Dir, "the zfs driver needs a dataset of its own").
			WithHint("name a new dataset with %s (`zpool list` lists the ZFS pools)",
				errs.Param("zfs-dataset", "POOL/pando"))
	case q.Driver != driverZFS && q.Dataset != "":
		return errs.New(errs.Invalid, "init", q.Dataset, "only the zfs driver uses a dataset").
			WithHint("add %s", errs.Param("driver", "zfs"))
	case q.Driver == driverZFS && q.Loop:
		return errs.New(errs.Invalid, "init", q.Dir, "only the reflink driver supports a pool in a file of its own")
	case q.MinFreePercent < 0 || q.MinFreePercent >= 100:
		return errs.New(errs.Invalid, "init", q.Dir,
			"the percentage to keep free must be at least 0 and less than 100 (got %g)",
			q.MinFreePercent)
	case q.SizeBytes != 0 && q.SizeBytes < pool.MinBackingBytes:
		return errs.New(errs.Invalid, "init", q.Dir, "the pool size must be at least %s (got %s)",
			errs.FormatBytes(pool.MinBackingBytes), errs.FormatBytes(q.SizeBytes)).
			WithHint("use at least %s", errs.Param("size", fmt.Sprintf("%dM", pool.MinBackingBytes>>20)))
	}

	return nil
}

// makePool chooses a driver and creates the pool with its catalogue.
func makePool(
	ctx context.Context, q InitRequest, dir string, madeDir bool, drivers Drivers,
) (*pool.Pool, *InitReport, error) {
	plan, report, err := chooseDriver(ctx, q, dir, drivers)
	if err != nil {
		return nil, nil, err
	}

	plan.MinFree = q.MinFreePercent
	plan.Extra = func(ctx context.Context, dir, poolID string) error {
		if err := catalog.Create(ctx, dir, poolID, api.EventInit); err != nil {
			return err
		}

		c, err := catalog.Open(ctx, dir, poolID)
		if err != nil {
			return err
		}

		err = c.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error { return tx.SetSwept() })
		if cerr := c.Close(); err == nil {
			err = cerr
		}
		if err == nil {
			err = catalog.MakeSpares(dir)
		}

		return err
	}

	p, err := pool.Make(ctx, dir, madeDir, plan)
	return p, report, err
}

// chooseDriver chooses the driver. It finds out what the directory's filesystem supports
// by trying, not by the name of the filesystem.
func chooseDriver(ctx context.Context, q InitRequest, dir string, drivers Drivers) (pool.Plan, *InitReport, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return pool.Plan{}, nil, err
	}

	r := &InitReport{}
	own := func(name, why string) (pool.Plan, *InitReport, error) {
		if q.SizeBytes > 0 && name == driverZFS {
			r.Notes = append(r.Notes, errs.Messagef("%s does not apply: limit the pool with `zfs set quota=%d %s`",
				errs.Param("size"), q.SizeBytes, q.Dataset))
		} else if q.SizeBytes > 0 {
			r.Notes = append(r.Notes,
				errs.Messagef("%s does not apply: the pool shares the space of its filesystem (to get a pool of a fixed size, "+
					"use %s)",
					errs.Param("size"), errs.Param("loop")))
		}
		return pool.Plan{Driver: name, Outside: q.Dataset, Unmake: drivers.unmakePool, Open: drivers[name], Why: why}, r, nil
	}

	// Find out whether files can share blocks here.
	root := os.Geteuid() == 0
	onBtrfs, onZFS := int64(st.Type) == magicBtrfs, int64(st.Type) == magicZFS
	reflinkErr := errors.New("not tried")
	if !q.Loop && (q.Driver == Auto && !onBtrfs && !onZFS || q.Driver == driverReflink) {
		reflinkErr = tryDriver(ctx, drivers[driverReflink], dir)
		if reflinkErr != nil && errs.KindOf(reflinkErr) != errs.Unsupported {
			return pool.Plan{}, nil, reflinkErr
		}
	}

	// Choose the first driver that the request allows and that works here.
	switch {
	case q.Driver == driverPlain:
		if q.Loop {
			return pool.Plan{}, nil, errs.New(errs.Invalid, "init", dir,
				"only the reflink driver supports a pool in a file of its own")
		}
		r.Faster = errs.Messagef("clones are full copies here; for instant clones put the pool on XFS, btrfs or ZFS, or "+
			"run %s as root", errs.Run("init"))
		return own(driverPlain, "as requested")
	case !root:
		return pool.Plan{}, nil, errs.New(errs.Permission, "init", dir, "instant clones need root, to mount volumes").
			WithHint("run it as root, or choose %s, whose clones are full copies", errs.Param("driver", "plain"))
	case q.Driver == driverBtrfs && q.Loop:
		return pool.Plan{}, nil, errs.New(errs.Invalid, "init", dir,
			"only the reflink driver supports a pool in a file of its own")
	case q.Driver == driverBtrfs:
		return own(driverBtrfs, "as requested") // its opener checks
	case q.Driver == Auto && onBtrfs && !q.Loop && drivers[driverBtrfs] != nil:
		return own(driverBtrfs, "the directory is on btrfs: volumes are subvolumes, clones are snapshots")
	case q.Driver == Auto && onZFS && !q.Loop && drivers[driverZFS] != nil:
		return pool.Plan{}, nil, errs.New(errs.Invalid, "init", dir,
			"the directory is on ZFS, where volumes need a dataset of their own").
			WithHint("name a new dataset with %s %s, or choose %s, which is slower", errs.Param("driver", "zfs"),
				errs.Param("zfs-dataset", "POOL/pando"), errs.Param("loop"))
	case q.Driver != Auto && q.Driver != driverReflink:
		return own(q.Driver, "as requested")
	case reflinkErr == nil:
		return own(driverReflink,
			"files on this "+fsName(int64(st.Type))+" can share blocks: volumes are images, clones are reflinks")
	}

	return chooseLoop(q, dir, &st, r, drivers)
}

// chooseLoop plans a pool in a sparse file.
func chooseLoop(
	q InitRequest, dir string, st *unix.Statfs_t, r *InitReport, drivers Drivers,
) (pool.Plan, *InitReport, error) {
	free := int64(st.Bavail) * st.Bsize
	size := q.SizeBytes >> 20 << 20
	if size == 0 {
		size = min(defaultBackingBytes, free/10*9>>20<<20)
		if size < pool.MinBackingBytes {
			return pool.Plan{}, nil, errs.New(errs.NoSpace, "init", dir,
				"a pool needs at least %d MiB of free space, but only %d MiB is available", pool.MinBackingBytes>>20, free>>20).
				WithHint("free space, or choose a directory on another filesystem")
		}
	} else if size > free {
		r.Notes = append(r.Notes,
			errs.Messagef("the pool (%s) is larger than the free space of its filesystem (%s): new clones are refused when "+
				"that runs low", errs.FormatBytes(size), errs.FormatBytes(free)))
	}

	if int64(st.Type) == magicTmpfs {
		r.Notes = append(r.Notes, "the directory is on tmpfs: a reboot destroys the pool")
	}

	why := fmt.Sprintf("files on this %s cannot share blocks, so the pool is an XFS in a sparse file",
		fsName(int64(st.Type)))
	if q.Loop {
		why = "as requested, the pool is an XFS in a sparse file"
	}

	r.Faster = "a pool directly on an XFS, btrfs or ZFS disk: synchronous writes pass through one filesystem and one " +
		"loop device fewer"
	return pool.Plan{Driver: driverReflink, Open: drivers[driverReflink], BackingBytes: size, Why: why}, r, nil
}

// tryDriver reports by its error whether a driver can be opened in a directory inside dir.
func tryDriver(ctx context.Context, open driver.Opener, dir string) error {
	if open == nil {
		return errs.New(errs.Unsupported, "init", dir, "the driver is not part of this build of pando")
	}

	tmp := filepath.Join(dir, "data")
	if err := os.Mkdir(tmp, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}

	d, err := open(ctx, tmp, "probe", true)
	if err == nil {
		if c, ok := d.(io.Closer); ok {
			err = c.Close()
		}
	}

	return err
}

// fsName returns the name of a filesystem by its magic number.
func fsName(magic int64) string {
	names := map[int64]string{
		unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "XFS", magicBtrfs: "btrfs", magicTmpfs: "tmpfs",
		unix.OVERLAYFS_SUPER_MAGIC: "overlay", unix.NFS_SUPER_MAGIC: "NFS", 0xca451a4e: "bcachefs", magicZFS: "ZFS",
	}
	if n, ok := names[magic]; ok {
		return n
	}
	return fmt.Sprintf("filesystem (type %#x)", magic)
}
