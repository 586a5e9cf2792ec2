package bench

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"pando/internal/driver"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
	_ "modernc.org/sqlite" // the driver of database/sql
)

// floor is a bare program that does what a clone needs and nothing else: no
// names, no records of what is under way, no checks. It shows what the kernel,
// the filesystem and the disk cost, which no program can go below.
type floor interface {
	// clone makes copy i and mounts it, durably. steps are called as they end.
	clone(ctx context.Context, i int, step func(name string)) error
	// destroy unmounts copy i and unlinks it.
	destroy(i int) error
	// forget removes copy i's row, durably.
	forget(ctx context.Context, i int) error
	// sweep takes away the mount point of a destroyed copy.
	sweep(i int)
	close()
}

// newFloor opens the floor for copies of the golden that att describes. imgDir
// is a directory in the pool's filesystem, outDir one beside the catalogue, dataset,
// on ZFS, one beside which copies may be made.
// The error says why there is no floor here.
func newFloor(att driver.Attachment, imgDir, outDir, dataset string) (floor, error) {
	rows, err := openRows(filepath.Join(outDir, "floor.db"))
	if err != nil {
		return nil, err
	}

	b := base{dir: imgDir, mounts: filepath.Join(outDir, "mnt"), rows: rows}
	if b.f, err = os.Open(imgDir); err != nil {
		b.close()
		return nil, err
	}

	if dataset != "" {
		return newZFSFloor(att, b, dataset), nil
	}
	if att.Image != "" {
		return &imageFloor{base: b, source: att.Image, fs: string(att.FS), options: att.Options, sector: att.SectorBytes}, nil
	}

	is, err := kernel.IsBtrfs(b.f)
	if err == nil && !is {
		err = errors.New("clones are full copies here: the program `cp -a` is what there is to compare with")
	}
	if err != nil {
		b.close()
		return nil, err
	}

	return &subvolFloor{base: b, source: att.Tree}, nil
}

// base is what both floors have.
type base struct {
	dir    string
	mounts string
	f      *os.File // dir
	rows   *rows
}

func (b *base) close() {
	if b.f != nil {
		b.f.Close()
	}
	b.rows.close()
}

func (b *base) forget(ctx context.Context, i int) error { return b.rows.remove(ctx, i) }

func (b *base) mountpoint(i int) string { return filepath.Join(b.mounts, strconv.Itoa(i)) }

func (b *base) sweep(i int) { _ = os.Remove(b.mountpoint(i)) } // if it stays, the scratch directory's removal says so

// finish puts copy i's detached mount, made in the step called what, at its mount
// point, and adds its row.
func (b *base) finish(ctx context.Context, i, mfd int, what string, step func(string)) error {
	err := b.place(i, mfd)
	unix.Close(mfd)
	if err != nil {
		return err
	}
	step(what)
	if err := b.rows.add(ctx, i); err != nil {
		return err
	}
	step("one durable row")
	return nil
}

// place puts a detached mount at copy i's mount point.
func (b *base) place(i, mfd int) error {
	at := b.mountpoint(i)
	if err := unix.Mkdir(at, 0o700); err != nil {
		return fmt.Errorf("mkdir: %w", err)
	}
	if err := unix.MoveMount(mfd, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}
	return nil
}

// imageFloor: FICLONE, fsync, LOOP_CONFIGURE, mount, one durable row.
type imageFloor struct {
	base
	source  string
	fs      string
	options []string
	sector  uint32
}

func (f *imageFloor) image(i int) string { return filepath.Join(f.dir, strconv.Itoa(i)+".img") }

func (f *imageFloor) clone(ctx context.Context, i int, step func(string)) error {
	dev, err := f.device(ctx, i, step)
	if err != nil {
		return err
	}

	defer dev.Close()

	mfd, err := mountDevice(f.fs, dev.Name(), f.options)
	if err != nil {
		return err
	}

	return f.finish(ctx, i, mfd, "mount", step)
}

// device makes copy i, durably, and a block device of it.
func (f *imageFloor) device(ctx context.Context, i int, step func(string)) (*os.File, error) {
	img, err := f.copy(i)
	if err != nil {
		return nil, err
	}

	defer img.Close()

	step("FICLONE")
	if err := img.Sync(); err != nil {
		return nil, err
	}

	if err := f.f.Sync(); err != nil {
		return nil, err
	}

	step("fsync of file and directory")
	dev, err := configureLoop(ctx, img, f.sector)
	if err == nil {
		step("LOOP_CONFIGURE")
	}
	return dev, err
}

func (f *imageFloor) copy(i int) (*os.File, error) {
	src, err := os.Open(f.source)
	if err != nil {
		return nil, err
	}

	defer src.Close()
	dst, err := os.OpenFile(f.image(i), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}

	if err := kernel.Reflink(dst, src); err != nil {
		dst.Close()
		return nil, err
	}

	return dst, nil
}

// configureLoop makes img a block device that vanishes with its last user.
func configureLoop(ctx context.Context, img *os.File, sector uint32) (*os.File, error) {
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}

	defer ctl.Close()

	cfg := unix.LoopConfig{Fd: uint32(img.Fd()), Size: sector}
	cfg.Info.Flags = unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO
	for {
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("LOOP_CTL_GET_FREE: %w", err)
		}

		dev, err := os.OpenFile("/dev/loop"+strconv.Itoa(n), os.O_RDWR, 0)
		if err == nil {
			if err = unix.IoctlLoopConfigure(int(dev.Fd()), &cfg); err == nil {
				return dev, nil
			}
			dev.Close()
		}

		// Others on this host take devices too.
		if !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENXIO) && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("LOOP_CONFIGURE: %w", err)
		}

		if err := sleep(ctx, time.Millisecond); err != nil {
			return nil, err
		}
	}
}

// mountDevice makes a detached mount.
func mountDevice(fstype, source string, options []string) (int, error) {
	fsfd, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen: %w", err)
	}

	defer unix.Close(fsfd)

	err = unix.FsconfigSetString(fsfd, "source", source)
	for _, o := range options {
		if err != nil {
			break
		}
		if key, value, has := strings.Cut(o, "="); has {
			err = unix.FsconfigSetString(fsfd, key, value)
		} else {
			err = unix.FsconfigSetFlag(fsfd, o)
		}
	}
	if err == nil {
		err = unix.FsconfigCreate(fsfd)
	}
	if err != nil {
		return -1, fmt.Errorf("fsconfig: %w", err)
	}

	mfd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOATIME)
	if err != nil {
		return -1, fmt.Errorf("fsmount: %w", err)
	}

	return mfd, nil
}

func (f *imageFloor) destroy(i int) error {
	if err := unix.Unmount(f.mountpoint(i), 0); err != nil {
		return fmt.Errorf("umount: %w", err)
	}
	return os.Remove(f.image(i))
}

// subvolFloor: BTRFS_IOC_SNAP_CREATE_V2, a bind mount, one durable row.
type subvolFloor struct {
	base
	source string
}

func (f *subvolFloor) clone(ctx context.Context, i int, step func(string)) error {
	src, err := os.Open(f.source)
	if err != nil {
		return err
	}

	defer src.Close()
	if err := kernel.SubvolSnapshot(f.f, strconv.Itoa(i), src, false); err != nil {
		return err
	}

	step("BTRFS_IOC_SNAP_CREATE_V2")
	mfd, err := unix.OpenTree(unix.AT_FDCWD, filepath.Join(f.dir, strconv.Itoa(i)),
		unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open_tree: %w", err)
	}

	return f.finish(ctx, i, mfd, "bind mount", step)
}

func (f *subvolFloor) destroy(i int) error {
	if err := unix.Unmount(f.mountpoint(i), 0); err != nil {
		return fmt.Errorf("umount: %w", err)
	}
	return kernel.SubvolDestroy(f.f, strconv.Itoa(i))
}

// rows is a database of one table, set up as a careful program would: WAL, and
// every commit waits for the disk.
type rows struct {
	db             *sql.DB
	insert, delete *sql.Stmt
}

func openRows(path string) (*rows, error) {
	db, err := sql.Open("sqlite",
		"file:"+(&url.URL{Path: path}).EscapedPath()+"?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)")
	if err != nil {
		return nil, err
	}

	db.SetMaxOpenConns(1)
	r := &rows{db: db}
	if _, err = db.Exec(`CREATE TABLE volumes
		(name TEXT PRIMARY KEY, id TEXT NOT NULL, origin TEXT NOT NULL, at INTEGER NOT NULL) WITHOUT ROWID`); err == nil {
		if r.insert, err = db.Prepare(`INSERT INTO volumes VALUES (?,?,?,?)`); err == nil {
			r.delete, err = db.Prepare(`DELETE FROM volumes WHERE name = ?`)
		}
	}
	if err != nil {
		r.close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}

	return r, nil
}

func (r *rows) add(ctx context.Context, i int) error {
	_, err := r.insert.ExecContext(ctx, strconv.Itoa(i), string(driver.NewID()), "golden@1", time.Now().UnixNano())
	return err
}

func (r *rows) remove(ctx context.Context, i int) error {
	_, err := r.delete.ExecContext(ctx, strconv.Itoa(i))
	return err
}

func (r *rows) close() {
	for _, s := range []*sql.Stmt{r.insert, r.delete} {
		if s != nil {
			s.Close()
		}
	}
	r.db.Close()
}
