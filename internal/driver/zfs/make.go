package zfs

import (
	"cmp"
	"context"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/driver/imagefs"
	"pando/internal/driver/objdir"
	"pando/internal/linux/zfs"
)

// blockBytes is the block size of zvols, where their size allows it. It is the default
// of OpenZFS, a compromise between the cost of small writes and good compression.
const blockBytes = 16 << 10

// minBlockBytes is the smallest block size that ZFS supports, and sectorBytes the
// sector size of the block devices of zvols.
const (
	minBlockBytes = 512
	sectorBytes   = 512
)

// blockSize returns the block size for a zvol: the largest power of two, up to
// blockBytes, that divides its size. Invalid if there is none.
func blockSize(id driver.Identity) (int64, error) {
	for b := int64(blockBytes); b >= minBlockBytes; b /= 2 {
		if id.SizeBytes%b == 0 {
			return b, nil
		}
	}
	return 0, errs.New(errs.Invalid, "create", id.Ref(), "%d bytes is not a multiple of %d", id.SizeBytes, minBlockBytes).
		WithHint("use a size that is a multiple of 4 KiB")
}

// identityArg returns the user property with an identity, as an argument.
func (d *Driver) identityArg(id driver.Identity) (string, error) {
	b, err := objdir.Encode(id, d.pool)
	return propIdentity + "=" + string(b), err
}

// runChange runs a zfs command that changes something, and retries while another
// process holds the dataset for a moment.
func (d *Driver) runChange(ctx context.Context, args ...string) error {
	if d.step != nil {
		d.step(args)
	}
	return zfs.Patiently(ctx, patience, func() error { return zfs.ZFS.Do(ctx, args...) })
}

// destroyAnyway destroys an object even if ctx has ended.
func (d *Driver) destroyAnyway(ctx context.Context, id driver.ObjectID) {
	_ = d.Destroy(context.WithoutCancel(ctx), id)
}

// Create implements driver.Driver. zvols are sparse.
func (d *Driver) Create(ctx context.Context, id driver.Identity) error {
	const op = "create"
	if err := d.Caps().Check(ctx, op, id); err != nil {
		return err
	}

	if !id.FS.IsImage() {
		id.SizeBytes, id.Sector = 0, 0
		return d.createNative(ctx, id)
	}

	if err := imagefs.CheckSize(id); err != nil {
		return err
	}

	id.Sector = cmp.Or(id.Sector, sectorBytes)
	block, err := blockSize(id)
	if err != nil {
		return err
	}

	prop, err := d.identityArg(id)
	if err != nil {
		return err
	}

	args := []string{"create", "-s", "-b", strconv.FormatInt(block, 10), "-V", strconv.FormatInt(id.SizeBytes, 10)}
	if id.FS == driver.None {
		args = append(append(args, "-o", prop), options(syncProps(id))...)
		if id.Soon {
			args = append(args, "-o", "volmode=dev")
		}
		return d.finishCreate(ctx, id, d.runChange(ctx, append(args, d.dataset(id.ID))...))
	}

	if err := d.runChange(ctx, append(args, "-o", "volmode=dev", d.dataset(id.ID))...); err != nil {
		return d.finishCreate(ctx, id, err)
	}

	if err := d.formatNewZvol(ctx, id, prop); err != nil {
		d.destroyAnyway(ctx, id.ID)
		return err
	}

	return d.finishCreate(ctx, id, nil)
}

// createNative makes an empty filesystem.
func (d *Driver) createNative(ctx context.Context, id driver.Identity) error {
	prop, err := d.identityArg(id)
	if err != nil {
		return err
	}
	args := append([]string{"create", "-o", prop}, options(syncProps(id))...)
	return d.finishCreate(ctx, id, d.runChange(ctx, append(args, d.dataset(id.ID))...))
}

// syncProps returns the properties of an ephemeral volume: its syncs need not reach the disk. Copies of it do not
// inherit them, as its dataset is the parent of none. They have all of its data: a snapshot is part of a transaction
// group, and includes what was written before, synced or not.
func syncProps(id driver.Identity) []string {
	if id.Kind != driver.Volume || !id.Ephemeral {
		return nil
	}
	return []string{"sync=disabled"}
}

// options returns properties as arguments of a command that makes a dataset.
func options(props []string) (args []string) {
	for _, p := range props {
		args = append(args, "-o", p)
	}
	return args
}

// finishCreate remembers an object that was made, or explains why it was not. It destroys what a canceled program may
// have made.
func (d *Driver) finishCreate(ctx context.Context, id driver.Identity, err error) error {
	switch {
	case err == nil:
		id.Version, id.Pool = driver.IdentityVersion, d.pool
		d.memo.remember(object{Object: driver.Object{ID: id.ID, Whole: true, Identity: id},
			node: &node{name: d.dataset(id.ID), volume: id.FS.IsImage(), size: id.SizeBytes}})
		return nil
	case zfs.Is(err, zfs.Taken):
		return errs.New(errs.Exists, "create", id.Ref(), "its dataset %s already exists", d.dataset(id.ID))
	case zfs.Is(err, zfs.NoParent, zfs.Absent):
		return d.rootErrorOr(ctx, err)
	case errs.Is(err, errs.Canceled), errs.Is(err, errs.IO):
		d.destroyAnyway(ctx, id.ID)
	}

	return err
}

// rootErrorOr returns what is wrong with the root, or else err.
func (d *Driver) rootErrorOr(ctx context.Context, err error) error {
	if e := d.checkRoot(ctx); e != nil {
		return e
	}
	return err
}

// formatNewZvol makes the filesystem in a new zvol, and then makes it whole.
func (d *Driver) formatNewZvol(ctx context.Context, id driver.Identity, prop string) error {
	f, err := zfs.AwaitDevice(ctx, d.dataset(id.ID), deviceLimit)
	if err != nil {
		return err
	}

	err = imagefs.Make(ctx, id.FS, f.Name(), id.SizeBytes)
	f.Close()
	if err != nil {
		return errs.Wrap("create", id.Ref(), err)
	}

	args := append([]string{"set", prop}, syncProps(id)...)
	if err := d.runChange(ctx, append(args, d.dataset(id.ID))...); err != nil || id.Soon {
		return err
	}

	return d.Deactivate(ctx, id.ID)
}

// Clone implements driver.Driver.
func (d *Driver) Clone(ctx context.Context, from driver.ObjectID, id driver.Identity) error {
	return d.clone(ctx, from, id, nil)
}

// Snapshot implements driver.Driver.
func (d *Driver) Snapshot(ctx context.Context, from driver.ObjectID, id driver.Identity) error {
	return d.snapshot(ctx, from, id, nil)
}

// CopyLive implements driver.LiveCopier. Only `zfs snapshot` needs quiet.
func (d *Driver) CopyLive(
	ctx context.Context, from driver.ObjectID, id driver.Identity, immutable bool, quiet func(func() error) error,
) error {
	if immutable {
		return d.snapshot(ctx, from, id, quiet)
	}
	return d.clone(ctx, from, id, quiet)
}

// readOrigin reads the object that id is to be made from, fills in the fields that id takes over from it, and refuses
// what cannot be made; a copy that will be tied to its origin is also refused if the origin has another key.
func (d *Driver) readOrigin(
	ctx context.Context, op string, from driver.ObjectID, id *driver.Identity, tied bool,
) (object, error) {
	if err := ctx.Err(); err != nil {
		return object{}, errs.Wrap(op, id.Ref(), err)
	}
	o, err := d.readWhole(ctx, op, from, false)
	if err != nil {
		return o, err
	}
	if err := d.Caps().Check(ctx, op, *id); err != nil {
		return o, err
	}
	return o, d.completeFromOrigin(op, o, id, tied)
}

// completeFromOrigin fills in what id takes over from its origin, and refuses what cannot be made from it.
func (d *Driver) completeFromOrigin(op string, o object, id *driver.Identity, tied bool) error {
	if id.FS.IsImage() != o.node.volume {
		return errs.New(errs.Invalid, op, id.Ref(), "its origin is %s, it cannot become %s", o.Identity.FS, id.FS)
	}

	if o.node.volume {
		id.SizeBytes = cmp.Or(id.SizeBytes, o.node.size)
		id.Sector = cmp.Or(id.Sector, o.Identity.Sector)
	} else {
		id.SizeBytes, id.Sector = 0, 0
	}

	if id.SizeBytes < o.node.size {
		return errs.New(errs.Invalid, op, id.Ref(), "%d bytes is smaller than its origin's %d", id.SizeBytes,
			o.node.size).WithHint("a volume can grow but not shrink")
	}

	if !tied {
		return nil
	}

	return d.sameKey(op, o, *id)
}

// foreignKey reports whether an object has another encryption key than the pool.
func (d *Driver) foreignKey(o object) bool {
	r := o.node.encRoot
	return r != "" && r != d.root && !strings.HasPrefix(d.root, r+"/")
}

// sameKey refuses to make a copy that would stay under another encryption key
// than the pool's: ZFS leaves a clone under the key of its origin. A volume has
// another key only if the user gave it one with `zfs change-key`, which is an
// error here, or if it was received with it (ownKey), which is intended.
func (d *Driver) sameKey(op string, o object, id driver.Identity) error {
	r := o.node.encRoot
	if o.node.ownKey || !d.foreignKey(o) {
		return nil
	}
	return errs.New(errs.Permission, op, id.Ref(),
		"its origin has an encryption key of its own (encryption root %s), under which the copy would stay", r).
		WithHint("give it the pool's key first: `zfs change-key -i %s`", r)
}

// keyArgs returns arguments that mark copies of an object that may have a key of its own.
func (n *node) keyArgs() []string {
	if !n.ownKey {
		return nil
	}
	return []string{"-o", propKey + "=" + keyOwn}
}

// cloneArgs returns the arguments of the command that clones a snapshot of a node. n.size is
// the size of its zvol in bytes, or -1 if it is not known.
func (d *Driver) cloneArgs(of string, n *node, id driver.Identity) ([]string, error) {
	prop, err := d.identityArg(id)
	if err != nil {
		return nil, err
	}

	args := append([]string{"clone", "-o", prop}, n.keyArgs()...)
	args = append(args, options(syncProps(id))...)
	if id.FS.IsImage() {
		if id.SizeBytes != n.size { // setting the size that it has anyway takes time
			args = append(args, "-o", "volsize="+strconv.FormatInt(id.SizeBytes, 10))
		}
		if id.Soon {
			args = append(args, "-o", "volmode=dev")
		}
	}

	return append(args, of, d.dataset(id.ID)), nil
}

// cloneAhead makes a clone of an object that is probably immutable, and reads that object at the same time, because
// starting a program takes as long as cloning. done is false if the clone must be made in the usual order; then nothing
// remains.
func (d *Driver) cloneAhead(ctx context.Context, from driver.ObjectID, id driver.Identity) (done bool, err error) {
	const op = "clone"
	if _, read := d.memo.lookup(from); read || d.Caps().Check(ctx, op, id) != nil || !driver.ValidID(string(from)) {
		return false, nil
	}

	if id.FS.IsImage() && (id.SizeBytes < imagefs.MinBytes(id.FS) || id.Sector == 0) {
		return false, nil // these must be read from the origin
	}
	if !id.FS.IsImage() {
		id.SizeBytes, id.Sector = 0, 0
	}

	n, known := d.rememberedOrigin(from)
	if known = known && n.FS == id.FS && n.Size <= id.SizeBytes; !known {
		n.Size = -1
	}

	args, err := d.cloneArgs(d.ownSnapName(from), &node{size: n.Size}, id)
	if err != nil {
		return false, nil
	}

	// If there is a note on the origin, there is nothing to read.
	if known {
		err := d.runChange(ctx, args...)
		if !zfs.Is(err, zfs.Absent) {
			return true, d.finishCreate(ctx, id, err)
		}
		d.forgetOrigin(from)
	}

	// Read the origin while the clone is made.
	var o object
	var wrong error
	read := make(chan struct{})
	go func() {
		defer close(read)
		if o, wrong = d.readWhole(ctx, op, from, true); wrong == nil {
			wrong = d.completeFromOrigin(op, o, &id, true)
		}
	}()

	err = d.runChange(ctx, args...)
	<-read
	if wrong == nil && o.immutable && !o.node.ownKey && !zfs.Is(err, zfs.Absent) {
		d.rememberOrigin(o)
		return true, d.finishCreate(ctx, id, err)
	}

	// The clone is not what it should be: remove it.
	if err == nil || errs.Is(err, errs.Canceled, errs.IO) {
		d.destroyAnyway(ctx, id.ID)
	}

	return wrong != nil, wrong
}

// clone makes a clone; quiet runs the step that copies the content.
func (d *Driver) clone(
	ctx context.Context, from driver.ObjectID, id driver.Identity, quiet func(func() error) error,
) error {
	const op = "clone"
	if quiet == nil {
		if done, err := d.cloneAhead(ctx, from, id); done || err != nil {
			return err
		}
	}

	o, err := d.readOrigin(ctx, op, from, &id, true)
	if err != nil {
		return err
	}

	at := d.ownSnapName(from)
	if !o.immutable {
		at = d.dataset(from) + "@" + string(id.ID)
	}

	args, err := d.cloneArgs(at, o.node, id)
	if err != nil {
		return err
	}

	if o.immutable {
		made, err := d.takeContent(ctx, op, from, quiet, args...)
		switch {
		case err == nil, made == "" && !errs.Is(err, errs.NotFound):
			err = d.finishCreate(ctx, id, err)
			if o.node.ownKey { // finishCreate does not remember that
				d.memo.forget(id.ID)
			}
			return err
		case made != "":
			d.destroyAnyway(ctx, id.ID)
		}
		return err
	}

	// Clone a volume from a new snapshot, which ZFS destroys together with the clone.
	done, err := d.noteMaking(id.ID)
	if err != nil {
		return err
	}

	made, err := d.takeContent(ctx, op, from, quiet, "snapshot", at)
	if err == nil {
		err = d.runChange(ctx, args...)
	}
	if err == nil {
		err = d.runChange(ctx, "destroy", "-d", at)
	}

	return d.finishSteps(ctx, id, made, err, done)
}

// takeContent runs the program that copies the content of an object, within quiet. It returns the last of args, which
// is what that program makes, if it was made: quiet may refuse afterwards.
func (d *Driver) takeContent(
	ctx context.Context, op string, from driver.ObjectID, quiet func(func() error) error, args ...string,
) (made string, err error) {
	run := func() error {
		err := d.runChange(ctx, args...)
		if err == nil {
			made = args[len(args)-1]
		}
		return err
	}

	if quiet != nil {
		err = quiet(run)
	} else {
		err = run()
	}
	if zfs.Is(err, zfs.Absent) {
		d.memo.forget(from)
		err = d.absentError(ctx, op, from)
	}

	return made, err
}

// finishSteps ends what was made in several steps. On error it removes all of it, including the snapshot made of the
// origin ("" if none was) and the note that it was begun.
func (d *Driver) finishSteps(ctx context.Context, id driver.Identity, made string, err error, done func()) error {
	clean := context.WithoutCancel(ctx)
	switch {
	case err == nil:
		done()
	case zfs.Is(err, zfs.Taken):
		// Another object has the ID.
		if made != "" {
			_ = d.runChange(clean, "destroy", "-d", made)
		}
		done()
		return errs.New(errs.Exists, "create", id.Ref(), "its dataset %s already exists", d.dataset(id.ID))
	default:
		// If this fails too, the note and the leftovers remain for the caller's record.
		if d.Destroy(clean, id.ID) == nil {
			done()
		}
	}

	return err
}

// snapshot makes an immutable copy; quiet runs the step that copies the content.
func (d *Driver) snapshot(
	ctx context.Context, from driver.ObjectID, id driver.Identity, quiet func(func() error) error,
) error {
	const op = "snapshot"
	o, err := d.readOrigin(ctx, op, from, &id, true)
	if err != nil {
		return err
	}
	if id.SizeBytes != o.node.size {
		return errs.New(errs.Invalid, op, id.Ref(), "a snapshot has the size of its volume")
	}

	prop, err := d.identityArg(id)
	if err != nil {
		return err
	}

	done, err := d.noteMaking(id.ID)
	if err != nil {
		return err
	}

	asOrigin := append([]string{"clone", "-o", "readonly=on"}, o.node.keyArgs()...)
	if o.immutable {
		// Make a clone with a snapshot of its own. Promoting the clone would move the
		// origin's own snapshot away from the origin.
		_, err = d.takeContent(ctx, op, from, quiet, append(asOrigin, d.ownSnapName(from), d.dataset(id.ID))...)
		if err == nil {
			err = d.runChange(ctx, "snapshot", "-o", prop, d.ownSnapName(id.ID))
		}
		return d.finishSteps(ctx, id, "", err, done)
	}

	at := d.dataset(from) + "@" + string(id.ID)
	made, err := d.takeContent(ctx, op, from, quiet, "snapshot", "-o", prop, at)
	if err == nil {
		err = d.runChange(ctx, append(asOrigin, at, d.dataset(id.ID))...)
	}
	if err == nil {
		err = d.runChange(ctx, "promote", d.dataset(id.ID))
	}

	return d.finishSteps(ctx, id, made, err, done)
}

// attachment describes a whole object.
func (d *Driver) attachment(o object) driver.Attachment {
	ro := o.immutable || o.Identity.Kind.Immutable()
	if !o.node.volume {
		return driver.Attachment{FS: driver.Native, Source: d.dataset(o.ID), Type: "zfs", ReadOnly: ro}
	}

	return driver.Attachment{
		Image:       zfs.Device(d.dataset(o.ID)),
		Block:       true,
		FS:          o.Identity.FS,
		Options:     imagefs.MountOptions(o.Identity.FS),
		NoSync:      imagefs.NoSyncOptions(o.Identity.FS),
		SectorBytes: o.Identity.Sector,
		ReadOnly:    ro,
	}
}

// Finish implements driver.Finisher.
func (d *Driver) Finish(ctx context.Context, id driver.Identity) error { return d.SetIdentity(ctx, id) }

// SetIdentity implements driver.Rewriter. An object that becomes immutable gets a snapshot that carries the identity;
// one that becomes a volume loses it.
func (d *Driver) SetIdentity(ctx context.Context, id driver.Identity) error {
	const op = "write identity"
	if err := d.Caps().Check(ctx, op, id); err != nil {
		return err
	}

	o, err := d.readObject(ctx, op, id.ID)
	if err != nil {
		return err
	}

	switch {
	case o.Whole, errs.Is(o.Err, errs.Damaged):
	case o.Err != nil:
		return o.Err
	default:
		return errs.New(errs.NotFound, op, string(id.ID), "it is incomplete")
	}

	if id.FS.IsImage() != o.node.volume {
		return errs.New(errs.Invalid, op, id.Ref(), "it is not %s", id.FS)
	}

	id.Extra = cmp.Or(id.Extra, o.Identity.Extra)
	return d.writeIdentity(ctx, o, id)
}

// writeIdentity gives an object an identity, and the form of its kind.
func (d *Driver) writeIdentity(ctx context.Context, o object, id driver.Identity) error {
	if o.node.volume {
		id.SizeBytes = cmp.Or(id.SizeBytes, o.node.size)
		id.Sector = cmp.Or(id.Sector, o.Identity.Sector, sectorBytes)
	}

	prop, err := d.identityArg(id)
	if err != nil {
		return err
	}

	defer d.memo.forget(id.ID)

	d.forgetOrigin(id.ID)
	ds, own := d.dataset(id.ID), d.ownSnapName(id.ID)
	switch to := id.Kind.Immutable(); {
	case to && o.immutable:
		if err := d.runChange(ctx, "set", prop, own); err != nil {
			return err
		}
	case to:
		err := d.runChange(ctx, "snapshot", "-o", prop, own)
		if zfs.Is(err, zfs.Taken) { // the object was immutable before, and its old snapshot stays for its clones
			if err = d.runChange(ctx, "rename", own, ds+"@"+string(driver.NewID())); err == nil {
				err = d.runChange(ctx, "snapshot", "-o", prop, own)
			}
		}
		if err != nil {
			return err
		}
	default:
		args := []string{"set", prop}
		if o.Identity.Kind != driver.Volume { // it becomes one
			args = append(args, syncProps(id)...)
		}
		if err := d.runChange(ctx, append(args, ds)...); err != nil {
			return err
		}
		if o.immutable {
			// From now on the dataset carries the identity, even if the snapshot has to stay for its clones.
			if err := d.runChange(ctx, "destroy", "-d", own); err != nil {
				return err
			}
		}
	}

	if o.node.readOnly == id.Kind.Immutable() {
		return nil
	}
	if id.Kind.Immutable() {
		return d.runChange(ctx, "set", "readonly=on", ds)
	}

	return d.runChange(ctx, "inherit", "readonly", ds)
}
