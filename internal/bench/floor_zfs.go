package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/pool"
	"pando/internal/linux/mount"
	"pando/internal/linux/zfs"

	"golang.org/x/sys/unix"
)

// zfsFloor: `zfs clone`, a mount, one durable row. Of a zvol, it waits for the
// block device in between.
type zfsFloor struct {
	base
	snapshot string // of the golden
	prefix   string // of the names of copies
	fs       driver.FS
	options  []string
}

// deviceWait is how long the device of a zvol may take to come.
const deviceWait = 10 * time.Second

// newZFSFloor is the floor for a golden in a dataset. copies is the dataset
// beside which copies are made.
func newZFSFloor(att driver.Attachment, b base, copies string) *zfsFloor {
	source := att.Source
	if att.Block {
		source = strings.TrimPrefix(att.Image, "/dev/zvol/")
	}
	return &zfsFloor{base: b, snapshot: source + "@" + filepath.Base(source), prefix: copies + "-", fs: att.FS,
		options: att.Options}
}

func (f *zfsFloor) name(i int) string { return f.prefix + strconv.Itoa(i) }

func (f *zfsFloor) clone(ctx context.Context, i int, step func(string)) error {
	name := f.name(i)
	property := "canmount=noauto"
	if f.fs.IsImage() {
		property = "volmode=dev"
	}

	if err := zfs.ZFS.Do(ctx, "clone", "-o", property, f.snapshot, name); err != nil {
		return err
	}

	step("zfs clone")
	fstype, source := "zfs", name
	if f.fs.IsImage() {
		dev, err := zfs.AwaitDevice(ctx, name, deviceWait)
		if err != nil {
			return err
		}
		defer dev.Close()
		fstype, source = string(f.fs), dev.Name()
		step("its device is there")
	}

	mfd, err := mountDevice(fstype, source, f.options)
	if err != nil {
		return err
	}

	return f.finish(ctx, i, mfd, "mount", step)
}

func (f *zfsFloor) destroy(i int) error {
	if err := unix.Unmount(f.mountpoint(i), 0); err != nil {
		return fmt.Errorf("umount: %w", err)
	}
	return zfs.ZFS.Do(context.Background(), "destroy", f.name(i))
}

// datasetOf is the dataset of a run in a pool on ZFS, in which it copies trees; ""
// on others. Copies of the floor are beside it.
func datasetOf(p *pool.Pool, name string) string {
	root, err := os.Readlink(filepath.Join(p.DataDir(), "dataset"))
	if err != nil {
		return ""
	}
	return root + "/" + name
}

// mountDataset makes the dataset of a run, and mounts it on its inner directory.
func (s *scratch) mountDataset(ctx context.Context) error {
	if err := zfs.ZFS.Do(ctx, "create", "-o", "canmount=noauto", s.dataset); err != nil {
		return err
	}
	m, err := mount.Device("zfs", s.dataset, nil, false)
	if err != nil {
		return err
	}
	defer m.Close()
	_, err = m.MoveTo(s.inner)
	return err
}

// removeDatasets destroys the dataset of a run and the copies of its floor.
func (s *scratch) removeDatasets(ctx context.Context) error {
	if s.dataset == "" {
		return nil
	}

	if err := mount.Unmount(s.inner); err != nil && !errs.Is(err, errs.NotFound) {
		return err
	}

	rows, err := zfs.ZFS.Rows(ctx, 1, "list", "-H", "-d", "1", "-t", "filesystem,volume", "-o", "name",
		filepath.Dir(s.dataset))
	if err != nil {
		return err
	}

	var all []error
	for _, r := range rows {
		if r[0] == s.dataset || strings.HasPrefix(r[0], s.dataset+"-") {
			all = append(all, zfs.Patiently(ctx, deviceWait, func() error { return zfs.ZFS.Do(ctx, "destroy", r[0]) }))
		}
	}

	return errors.Join(all...)
}
