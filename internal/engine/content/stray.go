package content

import (
	"context"
	"path/filepath"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/loopdev"

	"golang.org/x/sys/unix"
)

// StrayDevice is a block device on an object of this pool that no record accounts for: of a raw volume whose process
// died before it could record it, or left by a reboot.
type StrayDevice struct {
	ID driver.ObjectID // of the object

	loop *loopdev.Bound // nil where the driver makes the block devices
}

// Loop is the index of the loop device, negative where the driver makes the block devices.
func (s StrayDevice) Loop() int {
	if s.loop == nil {
		return -1
	}
	return s.loop.Index
}

// Path is that of the loop device, or a description where the driver makes the block devices.
func (s StrayDevice) Path() string {
	if s.loop == nil {
		return "the block device"
	}
	return s.loop.Path
}

// StrayDevices lists block devices on objects of rows that no mount record accounts for. Those of running commands are
// among them.
func (acc *Access) StrayDevices(ctx context.Context, rows map[driver.ObjectID]catalog.Row,
	records map[driver.ObjectID]catalog.MountRecord) (strays []StrayDevice, err error) {

	a, ok := acc.drv.(driver.Activator)
	if !ok {
		return acc.strayLoops(ctx, rows, records)
	}

	active, err := a.Active(ctx)
	if err != nil {
		return nil, err
	}

	lowers := MountedLowers(rows, records)
	for _, id := range active {
		if _, has := records[id]; !has && !lowers[id] {
			strays = append(strays, StrayDevice{ID: id})
		}
	}

	return strays, nil
}

// MountedLowers returns the lower layers of overlays that have a mount record: their block devices are theirs.
func MountedLowers(
	rows map[driver.ObjectID]catalog.Row, records map[driver.ObjectID]catalog.MountRecord,
) map[driver.ObjectID]bool {
	out := map[driver.ObjectID]bool{}
	for id := range records {
		if lower := rows[id].Lower; lower != "" {
			out[lower] = true
		}
	}
	return out
}

// strayLoops is StrayDevices where images are files.
func (acc *Access) strayLoops(ctx context.Context, rows map[driver.ObjectID]catalog.Row,
	records map[driver.ObjectID]catalog.MountRecord) (strays []StrayDevice, err error) {

	loops, err := loopdev.List()
	if errs.Is(err, errs.Permission) {
		return nil, nil // not root: then this pool has no loop devices
	}
	if err != nil {
		return nil, err
	}

	loops = acc.unrecordedLoops(ctx, loops, rows, records)
	if len(loops) == 0 {
		return nil, nil
	}

	images, lowers := acc.imagesByFile(ctx, rows), MountedLowers(rows, records)
	for _, b := range loops {
		id, ours := images[fileID{b.Dev, b.Ino}]
		if a, has := records[id]; !ours || has && a.Loop == b.Index || lowers[id] {
			continue
		}
		strays = append(strays, StrayDevice{ID: id, loop: &b})
	}

	return strays, nil
}

// DetachStray detaches a stray device of an object that no other operation works on. InUse, and it stays, while
// something holds it.
func (acc *Access) DetachStray(ctx context.Context, s StrayDevice) (gone bool, err error) {
	if s.loop != nil {
		return detachStrayLoop(*s.loop)
	}
	err = acc.drv.(driver.Activator).Deactivate(ctx, s.ID)
	return err == nil, err
}

// detachStrayLoop is DetachStray for a loop device.
func detachStrayLoop(b loopdev.Bound) (gone bool, err error) {
	now, err := loopdev.Lookup(b.Index)
	switch {
	case errs.Is(err, errs.NotFound), err == nil && (now.Dev != b.Dev || now.Ino != b.Ino):
		return false, nil // gone since it was listed
	case err != nil:
		return false, err
	case now.Auto:
		return false, errs.New(errs.InUse, "detach", b.Path, "it is mounted")
	}

	err = b.Clear()
	if errs.Is(err, errs.NotFound) {
		return false, nil
	}

	return err == nil, err
}

// fileID is a file, whatever its path.
type fileID struct{ dev, ino uint64 }

// unrecordedLoops leaves out loop devices that are recorded, and those on files of other filesystems than the pool's:
// only for the rest every image is examined.
func (acc *Access) unrecordedLoops(ctx context.Context, loops []loopdev.Bound, rows map[driver.ObjectID]catalog.Row,
	records map[driver.ObjectID]catalog.MountRecord) []loopdev.Bound {

	dev, known := acc.imageDevice(ctx, rows)
	recorded := map[int]fileID{}
	for _, a := range records {
		recorded[a.Loop] = fileID{a.Dev, a.Ino}
	}
	return slices.DeleteFunc(loops, func(b loopdev.Bound) bool {
		return known && b.Dev != dev || recorded[b.Index] == fileID{b.Dev, b.Ino}
	})
}

// imageDevice is the device of the filesystem in which the images lie, if it can be found out.
func (acc *Access) imageDevice(ctx context.Context, rows map[driver.ObjectID]catalog.Row) (dev uint64, known bool) {
	for id := range rows {
		w, err := acc.drv.Attachment(ctx, id)
		var st unix.Stat_t
		if err == nil && w.Image != "" && unix.Stat(filepath.Dir(w.Image), &st) == nil {
			return st.Dev, true
		}
	}
	return 0, false
}

// imagesByFile finds the images of all rows.
func (acc *Access) imagesByFile(ctx context.Context, rows map[driver.ObjectID]catalog.Row) map[fileID]driver.ObjectID {
	images := map[fileID]driver.ObjectID{}
	for id := range rows {
		w, err := acc.drv.Attachment(ctx, id)
		if err != nil || w.Image == "" {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(w.Image, &st) == nil {
			images[fileID{st.Dev, st.Ino}] = id
		}
	}

	return images
}
