// Package zfs keeps each volume as a dataset of its own, a filesystem or a zvol.
// All of them are in one dataset, the root, that a zpool's owner gives to Pando.
// Clones are ZFS clones. The package works only through the programs zfs and zpool.
//
// # Layout
//
//	tank/pando                  the root; pando:pool has the ID of its pool
//	tank/pando/<id>             the data of an object: a filesystem (native) or a zvol
//	tank/pando/<id>@<id>        the content of an immutable object (snapshot, generation)
//	tank/pando/graveyard/<id>   destroyed, kept because something that is not Pando's depends on it
//
// A volume is a dataset with its identity in the user property pando:identity. An
// immutable object is the snapshot with the same name as its dataset, and has the
// identity there; the dataset only carries the snapshot. So the snapshot to clone
// follows from an ID, without asking ZFS. Identities are set in the same call that
// makes the dataset or snapshot: an object is whole, or not, at every moment.
//
// # Ties
//
// ZFS ties a clone to its snapshot, and a snapshot to its dataset. To take a
// snapshot S of a volume V is therefore three steps: snapshot V@S, clone it to
// S, promote S. Then S@S is on a dataset of its own and V, which is now a clone of
// it, can be destroyed at any time, in one step. Older snapshots of V move to S
// with it, even those that are not Pando's. A clone C of a volume V has its origin
// on the volume, as V@C, marked to be destroyed together with C (deferred).
//
// Destroying an object that has clones marks its snapshot, so that it is no longer
// an object, promotes one of the clones, to which the snapshot then moves, and
// destroys the dataset. ZFS removes the snapshot with the last clone: nothing has
// to be cleaned up. Only if something that is not Pando's depends on the dataset (a
// snapshot with another name, a hold, a clone elsewhere), the dataset is renamed
// into the graveyard, until nothing does: see Reap.
//
// # Interruptions
//
// While an object is being made in several steps, DIR/making has a file with its name,
// so that Destroy knows, without asking ZFS, that parts of it may be on other datasets.
package zfs

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/zfs"

	"golang.org/x/sys/unix"
)

// Name of the driver.
const Name = "zfs"

// Link is the name of the symbolic link in the driver's directory whose target is
// the name of the root dataset.
const Link = "dataset"

// User properties.
const (
	propPool     = "pando:pool"     // of the root: the pool's ID
	propMade     = "pando:made"     // of the root: "on" if Pando made it
	propIdentity = "pando:identity" // JSON
	propKey      = "pando:key"      // of a dataset: keyOwn if it may have another key than the root
)

// keyOwn marks datasets that were received raw, and so have the key of the place they came from, and copies of them.
const keyOwn = "own"

// graveyard is the dataset in the root for destroyed datasets that something foreign still depends on.
const graveyard = "graveyard"

// patience is how long an operation on a busy dataset is retried: udev's probes
// and other processes may hold a dataset for a moment.
const patience = 2 * time.Second

// Driver is a driver.Driver.
type Driver struct {
	dir  string // where the link is
	root string // dataset
	zp   string // zpool of root
	pool string // ID of the pool
	memo memo
	step func(args []string) // before each program that changes something, for tests
}

var (
	_ driver.Driver     = (*Driver)(nil)
	_ driver.Rewriter   = (*Driver)(nil)
	_ driver.Finisher   = (*Driver)(nil)
	_ driver.LiveCopier = (*Driver)(nil)
	_ driver.Activator  = (*Driver)(nil)
	_ driver.Spacer     = (*Driver)(nil)
	_ driver.Measurer   = (*Driver)(nil)
	_ driver.Tied       = (*Driver)(nil)
	_ driver.Flattener  = (*Driver)(nil)
	_ driver.Inspector  = (*Driver)(nil)
	_ driver.Unmaker    = (*Driver)(nil)
	_ driver.Syncer     = (*Driver)(nil)
	_ driver.Opener     = Open
)

// Open is a driver.Opener. DIR/dataset must be a symbolic link to the name of the
// root dataset. Without create it runs no program, and only checks that the zpool
// is imported. Unsupported without ZFS, IO if the zpool is not imported, each with
// a hint: neither means that data is lost.
func Open(ctx context.Context, dir, poolID string, create bool) (driver.Driver, error) {
	const op = "open pool"
	root, err := os.Readlink(filepath.Join(dir, Link))
	if err != nil {
		return nil, errs.Wrap(op, dir, err)
	}

	if err := zfs.CheckDataset(root); err != nil {
		return nil, err
	}

	if zfs.ParentOf(root) == "" {
		return nil, errs.New(errs.Invalid, op, root, "it is a zpool, not a dataset in one").
			WithHint("give Pando a dataset of its own: %s/pando", root)
	}

	d := &Driver{dir: dir, root: root, zp: zfs.PoolOf(root), pool: poolID}
	if create {
		if err := zfs.Available(); err != nil {
			return nil, err
		}
	}

	if err := d.checkImported(); err != nil {
		return nil, err
	}

	if create {
		if err := d.layOutRoot(ctx); err != nil {
			return nil, err
		}
	}

	return d, nil
}

// checkImported fails, with a hint, if the zpool is not imported. Its error is never NotFound.
func (d *Driver) checkImported() error {
	_, err := zfs.PoolState(d.zp)
	if errs.Is(err, errs.NotFound) {
		return &errs.Error{Kind: errs.IO, Op: "open zpool", Ref: d.zp, Hint: errs.HintIn(err),
			Err: errors.New("it is not imported")}
	}
	return err
}

// Caps implements driver.Driver.
func (d *Driver) Caps() driver.Caps {
	return driver.Caps{
		Name:      Name,
		FS:        []driver.FS{driver.Native, driver.Ext4, driver.XFS, driver.None},
		CloneCost: driver.CostConstant,
		Sharing:   true,
		Atomic:    true,
		Unsynced:  true,
		NeedsRoot: true,
	}
}

// dataset returns the name of an object's dataset.
func (d *Driver) dataset(id driver.ObjectID) string { return d.root + "/" + string(id) }

// ownSnapName returns the name of the snapshot that holds an immutable object.
func (d *Driver) ownSnapName(id driver.ObjectID) string { return d.dataset(id) + "@" + string(id) }

func (d *Driver) graveyardDataset() string { return d.root + "/" + graveyard }

// Dataset returns the name of the root dataset, for users.
func (d *Driver) Dataset() string { return d.root }

// checkRoot makes sure that the root dataset exists and is this pool's. Only then does "does not exist" mean that an
// object is absent.
func (d *Driver) checkRoot(ctx context.Context) error {
	if err := d.checkImported(); err != nil {
		return err
	}

	rows, err := zfs.ZFS.Rows(ctx, 2, "get", "-Hp", "-o", "value,source", propPool, d.root)
	if zfs.Is(err, zfs.Absent) {
		return errs.New(errs.IO, "open dataset", d.root, "the pool's dataset does not exist").
			WithHint("if it was renamed, find it with `zfs get -r pando:pool` and update the link %s",
				filepath.Join(d.dir, Link))
	}

	if err != nil {
		return err
	}

	if len(rows) != 1 || rows[0][0] != d.pool || rows[0][1] != "local" {
		return errs.New(errs.Damaged, "open dataset", d.root, "it is not the dataset of this pool: its %s is %q", propPool,
			rows[0][0]).
			WithHint("find the right dataset with `zfs get -r pando:pool`")
	}

	return nil
}

// absentError returns the error for an object that ZFS says does not exist: NotFound, or
// what is wrong with the root dataset.
func (d *Driver) absentError(ctx context.Context, op string, id driver.ObjectID) error {
	if err := d.checkRoot(ctx); err != nil {
		return err
	}
	return errs.New(errs.NotFound, op, string(id), "no such object in the pool")
}

// making is the directory with the names of objects that are being made in several steps.
const making = "making"

// noteMaking notes that an object is being made; the returned func removes the note.
// The note need not survive a power loss.
func (d *Driver) noteMaking(id driver.ObjectID) (func(), error) {
	p := filepath.Join(d.dir, making, string(id))
	f, err := os.OpenFile(p, os.O_CREATE|os.O_WRONLY|unix.O_CLOEXEC, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.Mkdir(filepath.Dir(p), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, errs.Wrap("create", string(id), err)
		}
		f, err = os.OpenFile(p, os.O_CREATE|os.O_WRONLY|unix.O_CLOEXEC, 0o600)
	}
	if err != nil {
		return nil, errs.Wrap("create", string(id), err)
	}

	f.Close()
	return func() { d.forgetMaking(id) }, nil
}

func (d *Driver) forgetMaking(id driver.ObjectID) {
	_ = os.Remove(filepath.Join(d.dir, making, string(id))) // a stale note only costs a listing
}

// mayBeHalfMade reports whether making an object may have been interrupted.
func (d *Driver) mayBeHalfMade(id driver.ObjectID) bool {
	_, err := os.Lstat(filepath.Join(d.dir, making, string(id)))
	return !errors.Is(err, fs.ErrNotExist)
}
