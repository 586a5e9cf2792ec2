package check

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/content"
	"pando/internal/engine/mountpoint"
	"pando/internal/engine/pool"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// clearMountPoint removes what Pando has put at a default mount point.
func clearMountPoint(of *pool.Pool, path string) error {
	p, err := mountpoint.Open(path, of.MountDir())
	if err != nil {
		return err
	}
	defer p.Close()
	if m, ok := p.Mounted(); ok {
		if err := p.Unmount(m.ID, false); err != nil {
			return err
		}
	}
	return p.RemoveLeftover(pool.IsMountLink)
}

// DetachAll unmounts everything of a pool whose catalogue cannot say where it is mounted: at default mount points, and
// mounts that the kernel lists on images of the pool. InUse if something remains.
func DetachAll(ctx context.Context, p *pool.Pool, d driver.Driver) error {
	entries, err := os.ReadDir(p.MountDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.Wrap("detach", p.MountDir(), err)
	}

	for _, e := range entries {
		if err := clearMountPoint(p, filepath.Join(p.MountDir(), e.Name())); err != nil {
			return err
		}
	}

	if err := unmountOverlays(ctx, d); err != nil {
		return err
	}

	if err := unmountTrees(ctx, d); err != nil {
		return err
	}

	if a, ok := d.(driver.Activator); ok {
		return detachDriverDevices(ctx, d, a)
	}

	loops, err := loopdev.List()
	if err != nil {
		return err
	}

	objects := filepath.Join(p.DataDir(), "objects") + "/"
	for _, b := range loops {
		if !strings.HasPrefix(b.File, objects) {
			continue
		}

		if err := unmountDevice(b); err != nil {
			return err
		}

		if err := b.Clear(); err != nil && !errs.Is(err, errs.NotFound) {
			return err
		}

		if free, err := loopdev.WaitDetached(ctx, b.File, content.ReleaseWait); err != nil && !errs.Is(err, errs.NotFound) {
			return err
		} else if err == nil && !free {
			return errs.New(errs.InUse, "detach", b.File, "its loop device %s is still mounted or open", b.Path).
				WithHint("unmount it, then try again")
		}
	}

	return nil
}

// unmountOverlays unmounts the overlays on objects wherever this namespace has them. Their layers are mounted nowhere
// else.
func unmountOverlays(ctx context.Context, d driver.Driver) error {
	return unmountWhere(func(m mount.Entry) bool {
		id, ok := content.OverlayID(m)
		if !ok {
			return false
		}
		_, err := d.Attachment(ctx, id)
		return err == nil // else it is another pool's, or nothing that a row will be made of
	})
}

// unmountTrees unmounts the trees of objects wherever this namespace has them.
func unmountTrees(ctx context.Context, d driver.Driver) error {
	table, err := mount.Table("self")
	if err != nil {
		return errs.Wrap("detach", "", err)
	}

	for _, m := range table {
		name := filepath.Base(m.Root) // of the directory that is mounted, in its filesystem
		if len(name) <= driver.IDLength || !driver.ValidID(name[:driver.IDLength]) {
			continue
		}

		w, err := d.Attachment(ctx, driver.ObjectID(name[:driver.IDLength]))
		if err != nil || w.Tree == "" {
			continue // another pool's, or nothing that a row will be made of
		}

		tree, err := os.Stat(w.Tree)
		if err != nil {
			continue
		}

		if there, err := os.Stat(m.Point); err != nil || !os.SameFile(tree, there) {
			continue
		}

		if err := mount.Unmount(m.Point); err != nil && !errs.Is(err, errs.NotFound) {
			return err
		}
	}

	return nil
}

// detachDriverDevices unmounts filesystems that are mounted by name, and deactivates the driver's own block devices.
func detachDriverDevices(ctx context.Context, d driver.Driver, a driver.Activator) error {
	sources := map[string]bool{}
	for o, err := range d.List(ctx) {
		if err != nil {
			return err
		}
		if w, err := d.Attachment(ctx, o.ID); err == nil && w.Source != "" {
			sources[w.Source] = true
		}
	}

	if err := unmountWhere(func(m mount.Entry) bool { return sources[m.Source] }); err != nil {
		return err
	}

	active, err := a.Active(ctx)
	if err != nil {
		return err
	}

	for _, id := range active {
		f, err := a.Activate(ctx, id)
		if errs.Is(err, errs.NotFound) {
			continue
		}
		if err != nil {
			return err
		}

		var st unix.Stat_t
		err = unix.Fstat(int(f.Fd()), &st)
		f.Close()
		if err != nil {
			return errs.Wrap("detach", f.Name(), err)
		}

		if err := unmountWhere(func(m mount.Entry) bool { return m.Dev == st.Rdev }); err != nil {
			return err
		}

		if err := a.Deactivate(ctx, id); err != nil {
			return err
		}
	}

	return nil
}

// unmountWhere unmounts the mounts of this namespace that fit. It reads the mount table: only for repairs.
func unmountWhere(fits func(mount.Entry) bool) error {
	table, err := mount.Table("self")
	if err != nil {
		return errs.Wrap("detach", "", err)
	}

	for _, m := range table {
		if !fits(m) {
			continue
		}
		if err := mount.Unmount(m.Point); err != nil && !errs.Is(err, errs.NotFound) {
			return err
		}
	}

	return nil
}

// unmountDevice unmounts a loop device wherever this namespace has it mounted.
func unmountDevice(b loopdev.Bound) error {
	f, err := b.Hold()
	if errs.Is(err, errs.NotFound) {
		return nil // its last user has gone since it was listed
	}
	if err != nil {
		return err
	}

	defer f.Close()
	want := loopdev.DeviceNumber(b.Index)
	return unmountWhere(func(m mount.Entry) bool { return m.Dev == want })
}
