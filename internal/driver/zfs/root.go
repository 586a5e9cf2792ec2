package zfs

import (
	"context"
	"os"
	"path/filepath"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/zfs"
)

// rootProps are the properties that the root dataset sets for all in it. dedup is
// set because another value could be inherited; clones do not need it.
var rootProps = []string{
	"mountpoint=legacy", // datasets are mounted by Pando alone
	"canmount=noauto",
	"atime=off", // reading a clone must not make it differ
	"dedup=off",
	"volmode=none",   // a zvol has a block device only while it is used
	"snapdev=hidden", //
	"xattr=sa",       //
	"acltype=posix",  //
	"com.sun:auto-snapshot=false",
}

// layOutRoot makes the root dataset, or takes over an empty one, and tries all operations
// that the driver needs. It may be repeated.
func (d *Driver) layOutRoot(ctx context.Context) error {
	const op = "init"
	parent := zfs.ParentOf(d.root)
	features, err := zfs.Features(ctx, d.zp)
	if err != nil {
		return err
	}

	// Check the version: draid came with 2.1.
	if _, ok := features["draid"]; !ok {
		return errs.New(errs.Unsupported, op, d.zp, "this OpenZFS (%s) is older than 2.1", zfs.Version()).
			WithHint("upgrade OpenZFS, both programs and module")
	}

	// Choose a compression, unless the parent has one.
	compression, err := zfs.ZFS.Rows(ctx, 1, "get", "-Hp", "-o", "value", "compression", parent)
	if zfs.Is(err, zfs.Absent) {
		return errs.New(errs.NotFound, op, parent, "no such dataset").
			WithHint("create the parent dataset first: `zfs create %s`", parent)
	}

	if err != nil {
		return err
	}

	props := append([]string(nil), rootProps...)
	if len(compression) == 1 && compression[0][0] == "off" {
		switch {
		case isUsable(features["zstd_compress"]):
			props = append(props, "compression=zstd")
		case isUsable(features["lz4_compress"]):
			props = append(props, "compression=lz4")
		default:
			props = append(props, "compression=on")
		}
	}

	// Make the dataset, or take over an existing one.
	props = append(props, propPool+"="+d.pool)
	args := []string{"create"}
	for _, p := range append(props, propMade+"=on") {
		args = append(args, "-o", p)
	}

	err = zfs.ZFS.Do(ctx, append(args, d.root)...)
	if zfs.Is(err, zfs.Taken) {
		err = d.adoptRoot(ctx, props)
	}
	if err != nil {
		return err
	}

	return d.tryOperations(ctx)
}

func isUsable(feature string) bool { return feature == "enabled" || feature == "active" }

// adoptRoot makes an existing dataset the root, if it is already this pool's, or empty.
func (d *Driver) adoptRoot(ctx context.Context, props []string) error {
	const op = "init"
	owner, err := zfs.ZFS.Rows(ctx, 2, "get", "-Hp", "-o", "value,source", propPool, d.root)
	if err != nil {
		return err
	}

	mine := len(owner) == 1 && owner[0][1] == "local" && owner[0][0] == d.pool
	if !mine {
		if len(owner) == 1 && owner[0][1] == "local" {
			return errs.New(errs.Exists, op, d.root, "it is the dataset of the pool %s", owner[0][0]).
				WithHint("choose another dataset")
		}
		if found, err := d.listContents(ctx); err != nil {
			return err
		} else if len(found) > 0 {
			return errs.New(errs.Exists, op, d.root, "the dataset is not empty: it holds %s", nameSome(found)).
				WithHint("choose a new name, or an empty dataset")
		}
	}

	rows, err := zfs.ZFS.Rows(ctx, 1, "get", "-Hp", "-o", "value", "type", d.root)
	if err != nil {
		return err
	}
	if len(rows) != 1 || rows[0][0] != "filesystem" {
		return errs.New(errs.Invalid, op, d.root, "it is not a filesystem").WithHint("choose a new name")
	}

	return zfs.ZFS.Do(ctx, append(append([]string{"set"}, props...), d.root)...)
}

// listContents returns the names of all datasets and snapshots below the root.
func (d *Driver) listContents(ctx context.Context) ([]string, error) {
	rows, err := zfs.ZFS.Rows(ctx, 1, "list", "-Hp", "-r", "-t", "all", "-o", "name", d.root)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, r := range rows {
		if r[0] != d.root {
			out = append(out, r[0])
		}
	}
	return out, nil
}

// nameSome lists names, but only the first three, so that an error does not get too long.
func nameSome(names []string) string {
	const most = 3
	if len(names) > most {
		return strings.Join(names[:most], ", ") + " and others"
	}
	return strings.Join(names, ", ")
}

// tryOperations tries each kind of operation once, with scratch datasets: permissions may be delegated in part.
func (d *Driver) tryOperations(ctx context.Context) (err error) {
	a, b := driver.NewID(), driver.NewID()
	defer func() {
		clean := context.WithoutCancel(ctx)
		for _, id := range []driver.ObjectID{a, b} {
			if e := d.Destroy(clean, id); err == nil {
				err = e
			}
		}
	}()

	for _, args := range [][]string{
		{"create", d.dataset(a)},
		{"snapshot", "-o", propIdentity + "={}", d.dataset(a) + "@" + string(b)},
		{"clone", "-o", "readonly=on", "-o", propIdentity + "={}", d.dataset(a) + "@" + string(b), d.dataset(b)},
		{"promote", d.dataset(b)},
		{"set", "volmode=none", propIdentity + "={}", d.dataset(b)},
	} {
		if err := zfs.ZFS.Do(ctx, args...); err != nil {
			return err
		}
	}

	return nil
}

// Foreign implements driver.Unmaker. It first destroys incomplete objects, which an
// init leaves that is killed in tryOperations, and what is left of destroyed objects.
func (d *Driver) Foreign(ctx context.Context) ([]string, error) {
	for o, err := range d.List(ctx) {
		if err != nil {
			return nil, err
		}
		if o.Whole || errs.Is(o.Err, errs.TooNew) {
			continue
		}
		if err := d.Destroy(ctx, o.ID); err != nil {
			return nil, err
		}
	}

	if _, err := d.Reap(ctx); err != nil {
		return nil, err
	}

	// Destroy the graveyard if it is empty.
	if err := zfs.ZFS.Do(ctx, "destroy", d.graveyardDataset()); err != nil &&
		!zfs.Is(err, zfs.Absent, zfs.HasChildren, zfs.HasClones) {
		return nil, err
	}

	return d.listContents(ctx)
}

// Unmake implements driver.Unmaker. A dataset that existed before Pando used it stays,
// and inherits the properties again that Pando had set.
func (d *Driver) Unmake(ctx context.Context) error {
	if err := d.unmakeRoot(ctx); err != nil {
		return err
	}
	for _, name := range []string{making, origins, deviceLocks, spaceFile} {
		if err := os.RemoveAll(filepath.Join(d.dir, name)); err != nil {
			return errs.Wrap("deinit", d.dir, err)
		}
	}
	return nil
}

// unmakeRoot destroys the root dataset if Pando made it, and otherwise resets its properties.
func (d *Driver) unmakeRoot(ctx context.Context) error {
	const op = "deinit"
	if err := d.checkImported(); err != nil {
		return err
	}

	rows, err := zfs.ZFS.Rows(ctx, 3, "get", "-Hp", "-o", "property,value,source", propPool+","+propMade, d.root)
	if zfs.Is(err, zfs.Absent) {
		return nil
	}
	if err != nil {
		return err
	}

	local := map[string]string{}
	for _, r := range rows {
		if r[2] == "local" {
			local[r[0]] = r[1]
		}
	}

	if local[propPool] != d.pool {
		return nil // given up before, or never this pool's
	}

	// Refuse if it contains anything foreign.
	found, err := d.Foreign(ctx)
	if err != nil {
		return err
	}

	if len(found) > 0 {
		return errs.New(errs.InUse, op, d.root, "it contains something that is not Pando's: %s", nameSome(found)).
			WithHint("list it with `zfs list -r -t all %s`, then move it to another dataset", d.root)
	}

	if local[propMade] == "on" {
		err := zfs.Patiently(ctx, patience, func() error { return zfs.ZFS.Do(ctx, "destroy", d.root) })
		if zfs.Is(err, zfs.Absent) {
			return nil
		}
		return err
	}

	// Reset the property with the pool's ID last.
	for _, p := range append(append([]string(nil), rootProps...), "compression", propPool) {
		name, _, _ := strings.Cut(p, "=")
		back := []string{"inherit", name}
		if name == "canmount" { // the only one that cannot be inherited
			back = []string{"set", "canmount=on"}
		}
		if err := zfs.ZFS.Do(ctx, append(back, d.root)...); err != nil {
			return err
		}
	}

	return nil
}
