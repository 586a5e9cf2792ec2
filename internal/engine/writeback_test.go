package engine_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// fullable is a pool that can be filled to the last byte, and emptied again.
type fullable struct {
	t *testing.T
	e *engine.Engine

	filler string // a file on the filesystem that is full
}

func newFullable(t *testing.T, kind string) *fullable {
	dir := testfs.New(t, kind, 800<<20).Dir()
	return &fullable{t, newPool(t, dir, engine.InitRequest{Driver: reflink.Name, MinFreePercent: 1}),
		filepath.Join(dir, "filler")}
}

// fill leaves no room for anybody.
func (p *fullable) fill() {
	p.t.Helper()
	_ = os.Remove(filepath.Join(p.e.Dir(), "reserve"))
	p.fillRest()
}

// fillRest leaves room only for those who may spend the reserve.
func (p *fullable) fillRest() {
	p.t.Helper()
	f, err := os.OpenFile(p.filler, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	must(p.t, err)
	end := st.Size()
	for step := int64(256 << 20); step >= 4096; {
		switch err := unix.Fallocate(int(f.Fd()), 0, end, step); {
		case err == nil:
			end += step
		case errors.Is(err, unix.ENOSPC):
			step /= 2
		default:
			p.t.Fatal(err)
		}
	}
}

func (p *fullable) empty() {
	p.t.Helper()
	if err := os.Remove(p.filler); err != nil {
		p.t.Fatal(err)
	}
}

// lose has fill take all room, and writes a file into a mounted volume, of which next to nothing can reach the pool.
// Nobody but who has the file open gets to know.
func (p *fullable) lose(mountpoint string, fill func()) (path string, content []byte) {
	p.t.Helper()

	// With an empty journal the next commit, which would stop the filesystem, is 5 seconds away, unless somebody calls
	// sync(2).
	must(p.t, syncPath(p.t, mountpoint, unix.Syncfs))

	content = make([]byte, 8<<20)
	_, _ = rand.Read(content)
	for try := range 20 {
		fill() // first: whenever the kernel writes the file, there is no room for it
		path = filepath.Join(mountpoint, fmt.Sprintf("lost-%d", try))
		if os.WriteFile(path, content, 0o644) != nil || syncPath(p.t, path, unix.Fsync) != nil {
			return path, content
		}
	}
	p.t.Fatal("the pool does not become full")
	return "", nil
}

// stops reports whether a message says that a filesystem has given up: after sync(2), which makes it commit, it has.
// Then it may forget what it could not write.
func stops(message string) bool {
	return strings.Contains(message, "it can no longer write to the pool")
}

func syncPath(t *testing.T, path string, call func(fd int) error) error {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	return call(int(f.Fd()))
}

// listen returns a context, and what calls with it warned of.
func listen(t *testing.T) (context.Context, func() string) {
	r := &warnings.List{}
	return warnings.Collect(t.Context(), r), func() string {
		text := ""
		for _, w := range r.Messages() {
			text += w.String() + "\n"
		}
		return strings.TrimSuffix(text, "\n")
	}
}

// TestLostWritesAreReported: what could not be stored in a full pool makes the next command
// that relies on it fail, even when there is room again; the volume stays as it is.
func TestLostWritesAreReported(t *testing.T) {
	testfs.NotShort(t, "it is about space")
	for _, c := range []struct {
		pool string
		fs   driver.FS
	}{{"xfs", driver.Ext4}, {"xfs", driver.XFS}, {"btrfs", driver.Ext4}} {
		t.Run(c.pool+"/"+string(c.fs), func(t *testing.T) {
			p := newFullable(t, c.pool)
			if _, err := p.e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: source(t), FS: c.fs,
				SizeBytes: 320 << 20}); err != nil {
				t.Fatal(err)
			}
			for name, do := range map[string]func(e *engine.Engine, v string) error{
				"snapshot": func(e *engine.Engine, v string) error {
					_, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName(v), Name: ref.MustName("s")})
					return err
				},
				"snapshot-live": func(e *engine.Engine, v string) error {
					_, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName(v), Name: ref.MustName("s"),
						Freeze: engine.FreezeNever})
					return err
				},
				"fork": func(e *engine.Engine, v string) error {
					_, err := e.Fork(t.Context(), engine.CloneRequest{From: ref.Ref{Name: v}, Name: ref.MustName(v + "-fork")})
					return err
				},
				"publish": func(e *engine.Engine, v string) error {
					_, err := e.Publish(t.Context(), engine.PublishRequest{Golden: ref.MustName(v + "-golden"),
						Volume: ref.MustName(v)})
					return err
				},
				"rewind": func(e *engine.Engine, v string) error {
					_, err := e.Rewind(t.Context(), engine.RewindRequest{Volume: ref.MustName(v), Snapshot: ref.MustName("before"),
						Detach: true})
					return err
				},
				"umount": func(e *engine.Engine, v string) error {
					_, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName(v)})
					return err
				},
			} {
				if c.fs == driver.Ext4 && c.pool == "xfs" || name == "umount" || name == "snapshot" {
					t.Run(name, func(t *testing.T) { p.refuses(t, "v-"+name, do) })
				}
			}
		})
	}
}

// isCached reports whether all of a file can be read from memory. Where ext4 could not allocate blocks it leaves pages
// in the cache that it has invalidated ("This should not happen!! Data will be lost"): cachestat(2) counts these,
// mincore(2) does not (mm/mincore.c, mincore_page).
func isCached(t *testing.T, path string) bool {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	st, err := f.Stat()
	must(t, err)
	b, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	must(t, err)
	defer func() { must(t, unix.Munmap(b)) }()

	pages := make([]byte, (len(b)+os.Getpagesize()-1)/os.Getpagesize())
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)),
		uintptr(unsafe.Pointer(&pages[0]))); errno != 0 {
		t.Fatal(errno)
	}
	return !slices.ContainsFunc(pages, func(p byte) bool { return p&1 == 0 })
}

// refuses checks that a verb fails once after writes were lost, and changes nothing.
func (p *fullable) refuses(t *testing.T, v string, do func(e *engine.Engine, v string) error) {
	p.t = t
	info := clone(t, p.e, "g", v, false)
	if _, err := p.e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName(v),
		Name: ref.MustName("before")}); err != nil {
		t.Fatal(err)
	}
	info, err := p.e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName(v)})
	if err != nil {
		t.Fatal(err)
	}
	path, content := p.lose(info.Mountpoint, p.fill)
	p.empty()

	e := open(t, p.e.Dir())
	defer e.Close()
	// If a block of the filesystem itself was among those that could not be stored, the kernel says EIO.
	lost := do(e, v)
	if !errs.Is(lost, errs.NoSpace) && !errs.Is(lost, errs.IO) ||
		!strings.Contains(errs.HintOf(lost), "copy what you need out of "+info.Mountpoint) {
		t.Fatalf("%v (hint %q), wanted NoSpace or IO with a hint", lost, errs.HintOf(lost))
	}
	d, err := e.Show(t.Context(), ref.Ref{Name: v})
	if err != nil || d.ID != info.ID || d.Mountpoint != info.Mountpoint || len(d.Snapshots) != 1 {
		t.Errorf("the volume has changed: %+v, %v", d, err)
	}
	if !stops(lost.Error()) && isCached(t, path) {
		if b, err := os.ReadFile(path); err != nil || !bytes.Equal(b, content) {
			t.Errorf("it cannot be read any more: %v", err)
		}
	} else {
		t.Log("the kernel has dropped data from memory that it could not store, as it may when memory is short")
	}
	giveUp(t, e, v)
	// Of the next mount nothing is known.
	if _, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName(v)}); err != nil {
		t.Fatal(err)
	}
	ctx, warnings := listen(t)
	if _, err := e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName(v)}); err != nil || warnings() != "" {
		t.Errorf("the umount after that: %v, warnings %q", err, warnings())
	}
	destroy(t, e, v)
}

// giveUp wants each umount of a volume to fail that does not say that data is given up, and then gives it up.
func giveUp(t *testing.T, e *engine.Engine, v string) {
	t.Helper()
	for range 2 {
		_, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName(v)})
		if !errs.Is(err, errs.NoSpace) && !errs.Is(err, errs.IO) ||
			!strings.Contains(errs.HintOf(err), `is given up by operation "umount"`) {
			t.Errorf("umount of %s: %v (hint %q)", v, err, errs.HintOf(err))
		}
	}
	if d, err := e.Show(t.Context(), ref.Ref{Name: v}); err != nil || d.Mountpoint == "" {
		t.Errorf("%s is mounted at %q, %v", v, d.Mountpoint, err)
	}
	ctx, warnings := listen(t)
	if _, err := e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName(v), Discard: true}); err != nil ||
		!strings.Contains(warnings(), v+" is unmounted without data written before ") {
		t.Errorf("umount of %s that gives data up: %v, warnings %q", v, err, warnings())
	}
}

// TestLostWritesToRawVolume: the same of a block device.
func TestLostWritesToRawVolume(t *testing.T) {
	testfs.NotShort(t, "it is about space")
	p := newFullable(t, "xfs")
	image := filepath.Join(t.TempDir(), "image")
	if err := errors.Join(os.WriteFile(image, []byte("raw"), 0o600), os.Truncate(image, 64<<20)); err != nil {
		t.Fatal(err)
	}
	if _, err := p.e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: image,
		FS: driver.None}); err != nil {
		t.Fatal(err)
	}
	dev := clone(t, p.e, "g", "raw", true).Mountpoint
	f, err := os.OpenFile(dev, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	p.fill() // first: the kernel must not write the data before there is no room for it
	if _, err = f.WriteAt(bytes.Repeat([]byte("x"), 8<<20), 32<<20); err != nil {
		t.Fatal(err)
	}
	// Closing a block device writes what is in memory, and does not say that it cannot.
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = p.e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("raw")})
	p.empty()
	if !errs.Is(err, errs.NoSpace) {
		t.Errorf("%v, wanted NoSpace", err)
	}
	if _, err := os.Stat(dev); err != nil {
		t.Error(err)
	}
	giveUp(t, p.e, "raw")
}

// TestLostWritesOfTrees: trees share a filesystem, which does not say whose writes it has lost
// when the host below it is full. So no umount of one succeeds.
func TestLostWritesOfTrees(t *testing.T) {
	testfs.NotShort(t, "it is about space")
	host := testfs.Tmpfs(t, 200<<20)
	e := newPool(t, testfs.NewIn(t, host, "xfs", 320<<20).Dir(), engine.InitRequest{Driver: plain.Name, MinFreePercent: 1})
	importTree(t, e, "g", source(t))
	p := &fullable{t, e, filepath.Join(host, "filler")}
	a, b := clone(t, e, "g", "a", true), clone(t, e, "g", "b", true)
	p.lose(a.Mountpoint, p.fill)
	p.empty()
	for _, v := range []string{b.Name, a.Name} {
		giveUp(t, e, v)
	}
}

// TestLostWritesAreShown: looking at a volume writes what is in memory, and must not hide
// from the umount that it could not.
func TestLostWritesAreShown(t *testing.T) {
	testfs.NotShort(t, "it is about space")
	p := newFullable(t, "xfs")
	importTree(t, p.e, "g", source(t))
	v := clone(t, p.e, "g", "v", true)
	p.lose(v.Mountpoint, p.fill)
	p.empty()
	ctx, warnings := listen(t)
	if _, err := p.e.Show(ctx, ref.Ref{Name: "v"}); err != nil ||
		!strings.Contains(warnings(), "v: some data written to it") {
		t.Errorf("show: %v, warnings %q", err, warnings())
	}
	if stops(warnings()) {
		giveUp(t, p.e, "v")
		return
	}

	// A copy is good for what has been written since.
	ctx, warnings = listen(t)
	if _, err := p.e.Snapshot(ctx, engine.SnapshotRequest{Volume: ref.MustName("v"),
		Name: ref.MustName("s")}); err != nil || !strings.Contains(warnings(), "the copy lacks them") {
		t.Errorf("snapshot: %v, warnings %q", err, warnings())
	}
	if _, err := p.e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")}); err == nil ||
		!strings.Contains(err.Error(), "writes failed before") {
		t.Errorf("umount: %v", err)
	}
	giveUp(t, p.e, "v")
}

// TestLossIsRecordedInFullPool: a command that finds out about lost writes has room to record it, so that a later
// umount knows.
func TestLossIsRecordedInFullPool(t *testing.T) {
	testfs.NotShort(t, "it is about space")
	p := newFullable(t, "xfs")
	importTree(t, p.e, "g", source(t))
	v := clone(t, p.e, "g", "v", true)
	p.lose(v.Mountpoint, p.fillRest)

	// Fill the catalogue's log: with a reader it cannot start over.
	db, err := sql.Open("sqlite", "file:"+filepath.Join(p.e.Dir(), "catalog.db"))
	must(t, err)
	defer db.Close()
	reader, err := db.BeginTx(t.Context(), nil)
	must(t, err)
	must(t, reader.QueryRowContext(t.Context(), "SELECT count(*) FROM meta").Scan(new(int)))
	for size := 1 << 20; size > 0; {
		if _, err := db.ExecContext(t.Context(), `REPLACE INTO meta VALUES ('filler', zeroblob(?))`, size); err != nil {
			size /= 2
		}
	}

	ctx, warnings := listen(t)
	if _, err := p.e.Show(ctx, ref.Ref{Name: "v"}); err != nil ||
		!strings.Contains(warnings(), "some data written to it") {
		t.Errorf("show: %v, warnings %q", err, warnings())
	}
	must(t, reader.Rollback())
	p.empty()
	giveUp(t, p.e, "v")
}

// TestAbortedJournalIsReported: a full pool makes ext4 abort its journal. syncfs(2) says so once, and then succeeds,
// until ext4 notices itself or for ever, as kernels go, although nothing reaches the pool any more.
func TestAbortedJournalIsReported(t *testing.T) {
	testfs.NotShort(t, "it is about space")
	p := newFullable(t, "xfs")
	importTree(t, p.e, "g", source(t))
	for _, name := range []string{"unnoticed", "noticed"} {
		v := clone(t, p.e, "g", name, true)
		must(t, syncPath(t, v.Mountpoint, unix.Syncfs))
		p.fill()
		for i := range 300 { // more of metadata than XFS allocates ahead
			must(t, os.Mkdir(filepath.Join(v.Mountpoint, fmt.Sprint(i)), 0o755))
		}
		if syncPath(t, v.Mountpoint, unix.Syncfs) == nil {
			t.Fatal("the pool is not full")
		}
		p.empty()
		if name == "noticed" && os.Mkdir(filepath.Join(v.Mountpoint, "late"), 0o755) == nil {
			t.Error("ext4 goes on")
		}
		if err := syncPath(t, v.Mountpoint, unix.Syncfs); err != nil {
			t.Logf("this kernel says it again: %v", err)
		}

		if _, err := p.e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName(name), Name: ref.MustName("s"),
			Freeze: engine.FreezeNever}); !errs.Is(err, errs.IO) || !stops(err.Error()) {
			t.Errorf("snapshot: %v", err)
		}
		giveUp(t, p.e, name)
	}
}

// TestLostWritesOfStoppedFilesystem: a filesystem that cannot write any more is not mounted for
// ever, and not unmounted in silence.
func TestLostWritesOfStoppedFilesystem(t *testing.T) {
	e := newPool(t, testfs.XFS(t, 800<<20), engine.InitRequest{MinFreePercent: 1})
	for _, fs := range []driver.FS{driver.Ext4, driver.XFS} {
		g := "g-" + string(fs)
		if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName(g), Source: source(t), FS: fs,
			SizeBytes: 320 << 20}); err != nil {
			t.Fatal(err)
		}
		v := clone(t, e, g, string(fs), true)
		stop(t, v.Mountpoint)
		_, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName(v.Name)})
		if !errs.Is(err, errs.IO) || !strings.Contains(err.Error(), "can no longer write") {
			t.Errorf("%s: %v (hint %q)", fs, err, errs.HintOf(err))
		}
		giveUp(t, e, v.Name)
		// Nothing is to be saved of what is destroyed.
		w := clone(t, e, g, "w-"+string(fs), true)
		stop(t, w.Mountpoint)
		destroy(t, e, w.Name)
	}
}

// stop shuts a mounted ext4 or XFS down: EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN.
func stop(t *testing.T, dir string) {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	noFlush := uint32(2)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), 0x8004587d, uintptr(unsafe.Pointer(&noFlush))); errno != 0 {
		t.Fatal(errno)
	}
}

// TestFullPoolIsBlamed: what filesystems in images say when the pool has run full means that it has.
func TestFullPoolIsBlamed(t *testing.T) {
	testfs.NotShort(t, "it is about space")
	p := newFullable(t, "xfs")
	blamed := func(err error) error { return engine.BlamePool(t.Context(), p.e, err) }
	readOnly := errs.Wrap("write", "f", unix.EROFS)
	if got := blamed(readOnly); got != readOnly {
		t.Errorf("in a pool with room, %v has become %v", readOnly, got)
	}

	p.fill()
	if got := blamed(readOnly); !errs.Is(got, errs.NoSpace) || errs.HintOf(got) == "" || !errors.Is(got, unix.EROFS) {
		t.Errorf("in a full pool, %v has become %v, wanted NoSpace with a hint", readOnly, got)
	}
	for _, err := range []error{nil, errs.Wrap("write", "f", unix.EACCES)} {
		if got := blamed(err); got != err {
			t.Errorf("in a full pool, %v has become %v", err, got)
		}
	}
}
