package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"pando/internal/driver"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"
	"pando/internal/linux/treewalk"

	"golang.org/x/sys/unix"
)

// overlayFloor: an upper layer, a mount of overlayfs, one durable row. The lower layer is mounted once for all. An
// upper layer in an image takes the steps of imageFloor; on btrfs it is a snapshot, elsewhere three new directories.
type overlayFloor struct {
	base
	image  *imageFloor       // makes upper layers that are images; or nil
	upper  driver.Attachment // of an upper layer that is empty
	btrfs  bool
	lower  *mount.Detached
	device *os.File // that lower is on; or nil
}

// newOverlayFloor is newFloor for overlays on the golden that lower describes; upper is an empty upper layer.
func newOverlayFloor(
	ctx context.Context, lower, upper driver.Attachment, imgDir, outDir string,
) (_ floor, err error) {
	if upper.Source != "" || upper.Block {
		return nil, errors.New("there is none for overlays of this driver")
	}

	rows, err := openRows(filepath.Join(outDir, "floor.db"))
	if err != nil {
		return nil, err
	}

	f := &overlayFloor{base: base{dir: imgDir, mounts: filepath.Join(outDir, "mnt"), rows: rows}, upper: upper}
	defer func() {
		if err != nil {
			f.close()
		}
	}()

	if f.base.f, err = os.Open(imgDir); err != nil {
		return nil, err
	}

	if f.btrfs, err = kernel.IsBtrfs(f.base.f); err != nil {
		return nil, err
	}

	if upper.Image != "" {
		f.image = &imageFloor{base: f.base, source: upper.Image, fs: string(upper.FS), options: upper.Options,
			sector: upper.SectorBytes}
	}

	return f, f.mountLower(ctx, lower)
}

// mountLower mounts the golden, detached.
func (f *overlayFloor) mountLower(ctx context.Context, what driver.Attachment) (err error) {
	if what.Tree != "" {
		f.lower, err = mount.Tree(what.Tree, true)
		return err
	}

	image, err := os.Open(what.Image)
	if err != nil {
		return err
	}

	defer image.Close()

	if f.device, err = configureLoop(ctx, image, what.SectorBytes); err != nil {
		return err
	}

	option := "noload"
	if what.FS == driver.XFS {
		option = "norecovery"
	}
	f.lower, err = mount.Device(string(what.FS), f.device.Name(), append([]string{option}, what.Options...), true)
	return err
}

func (f *overlayFloor) close() {
	if f.lower != nil {
		f.lower.Close()
	}
	if f.device != nil {
		f.device.Close()
	}
	f.base.close()
}

func (f *overlayFloor) clone(ctx context.Context, i int, step func(string)) error {
	upper, err := f.makeUpper(ctx, i, step)
	if err != nil {
		return err
	}

	defer upper.Close()

	m, err := mount.Overlay{Lower: f.lower, Upper: upper, Name: "floor",
		Options: []string{"index=off", "metacopy=off", "redirect_dir=on", "xino=on"}}.Mount()
	if err != nil {
		return err
	}

	defer m.Close()

	at := f.mountpoint(i)
	if err := unix.Mkdir(at, 0o700); err != nil {
		return fmt.Errorf("mkdir: %w", err)
	}
	if _, err := m.MoveTo(at); err != nil {
		return err
	}

	step("overlay mount")
	if err := f.rows.add(ctx, i); err != nil {
		return err
	}

	step("one durable row")
	return nil
}

// makeUpper makes the upper layer of copy i, and mounts it, detached.
func (f *overlayFloor) makeUpper(ctx context.Context, i int, step func(string)) (*mount.Detached, error) {
	if f.image == nil {
		return f.makeUpperTree(i, step)
	}

	dev, err := f.image.device(ctx, i, step)
	if err != nil {
		return nil, err
	}

	defer dev.Close()

	m, err := mount.Device(f.image.fs, dev.Name(), f.image.options, false)
	step("mount")
	return m, err
}

func (f *overlayFloor) makeUpperTree(i int, step func(string)) (*mount.Detached, error) {
	path := filepath.Join(f.dir, strconv.Itoa(i))
	if f.btrfs {
		src, err := os.Open(f.upper.Tree)
		if err != nil {
			return nil, err
		}
		defer src.Close()
		if err := kernel.SubvolSnapshot(f.base.f, filepath.Base(path), src, false); err != nil {
			return nil, err
		}
		step("BTRFS_IOC_SNAP_CREATE_V2")
		return mount.Tree(path, false)
	}

	for _, dir := range []string{"", mount.UpperDir, mount.WorkDir} {
		if err := os.Mkdir(filepath.Join(path, dir), 0o755); err != nil {
			return nil, err
		}
	}

	step("mkdir")
	d, err := os.Open(path)
	if err != nil {
		return nil, err
	}

	defer d.Close()

	if err := errors.Join(d.Sync(), f.base.f.Sync()); err != nil {
		return nil, err
	}

	step("fsync of directories")
	return mount.Tree(path, false)
}

func (f *overlayFloor) destroy(i int) error {
	if err := unix.Unmount(f.mountpoint(i), 0); err != nil {
		return fmt.Errorf("umount: %w", err)
	}
	switch {
	case f.image != nil:
		return os.Remove(f.image.image(i))
	case f.btrfs:
		return kernel.SubvolDestroy(f.base.f, strconv.Itoa(i))
	}
	return treewalk.Remove(context.Background(), filepath.Join(f.dir, strconv.Itoa(i)))
}
