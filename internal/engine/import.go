package engine

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/pool"
	"pando/internal/engine/preset"
	"pando/internal/linux/fsprobe"
	"pando/internal/linux/qcow2"
	"pando/internal/tree/treecopy"

	"golang.org/x/sys/unix"
)

// defaultVolumeBytes is the default size of a golden made from a tree. Images are
// sparse, so unused space costs nothing.
const defaultVolumeBytes = 32 << 30

// ImportRequest says what to import.
type ImportRequest struct {
	Name      ref.Name
	Source    string                // path of a directory, an archive, a disk image or a block device
	FS        driver.FS             // "": the driver's default for trees, the filesystem found inside for images
	SizeBytes int64                 // 0: large enough
	Update    bool                  // make the next generation of an existing golden
	Force     bool                  // import an image as is, even incomplete or damaged, or a block device in use
	Keep      *int                  // newest generations that the golden keeps from now on, 0: all; nil: as before
	Overlay   *driver.OverlayPolicy // policy of the golden from now on; nil: as before
	Labels    map[string]string     // labels to add to those of the golden

	// Preset names rules for what the golden must not have of its source, or is a path of such rules: see package preset.
	Preset string

	Adopt         bool     // Source is a directory that a live system uses: copy again what changes
	Replace       bool     // whether Adopt replaces Source with a volume of the golden
	ReplaceVolume ref.Name // its name; zero: Name followed by -live
}

// Imported is the result of Import.
type Imported struct {
	api.Object
	Files  int64 `json:"file_count,omitempty"`    // number of files in an imported tree
	Bytes  int64 `json:"content_bytes,omitempty"` // size of the data that was imported, without holes
	Waited bool  `json:"waited"`                  // another process has built this generation
	// parts of the source that could not be kept or checked
	Warnings []errs.Message `json:"warnings,omitempty"`
	// what the source is: directory, archive, image, stream
	Source SourceKind `json:"source_kind,omitempty"`
	// references to older generations that the golden no longer keeps
	Removed []string `json:"removed,omitempty"`

	// Cleaned lists what the preset left out of the golden, relative to its root.
	Cleaned []string `json:"cleaned,omitempty"`

	// NotKept counts what the volume's filesystem cannot store of the source. Warnings lists it as text.
	NotKept []treecopy.NotKept `json:"not_kept,omitempty"`

	Passes int `json:"pass_count,omitempty"` // number of copies that an adopted directory needed
	// number of directories of an adopted one that were copied again
	Changed  int64  `json:"changed_count,omitempty"`
	Replaced string `json:"replaced,omitempty"`    // directory that was replaced with a volume
	Aside    string `json:"aside,omitempty"`       // where the old content of the replaced directory is
	Volume   string `json:"replaced_by,omitempty"` // volume that is mounted in the place of the directory
}

// SourceKind is what a golden was imported from.
type SourceKind string

// The kinds of sources.
const (
	SourceDirectory SourceKind = "directory"
	SourceTar       SourceKind = "tar"
	SourceImage     SourceKind = "image" // image of a disk, or a block device
)

// source is the opened source of an import.
type source struct {
	kind   SourceKind
	path   string
	r      io.Reader     // tar
	head   *headReader   // remembers the beginning of a stream, for errors; nil: the source is a file
	f      *os.File      // image
	disk   *qcow2.Reader // image: the disk in f, if f is not the disk itself
	bytes  int64         // bytes of data; 0: unknown
	files  int64
	alloc  int64 // bytes that the tree needs at least; 0: unknown
	probed fsprobe.Result
	stamp  *treecopy.Stamp // stamp of a directory that is adopted
	preset *preset.Rules   // nil: none

	resolved bool // path is resolved: refuse to follow symbolic links while copying

	close func()

	warnings []errs.Message // defects that do not prevent the import
}

// Import makes the first generation of a golden (with Update: the next one) from a
// tree, an archive or a disk image. If another process is building the same golden,
// Import waits and returns the generation that this process has built. Durable on
// return. On error, or if it is interrupted, nothing remains, except that the golden
// stays if only replacing the source fails. Exists, NotFound, Invalid, Damaged,
// NoSpace, Conflict (the source changed), InUse, Unsupported, Permission.
//
// Source is opened with the rights of this process: see ImportFile and ImportStream for sources of others.
func (e *Engine) Import(ctx context.Context, q ImportRequest) (Imported, error) {
	i := &importing{ImportRequest: q, e: e}
	return i.importFrom(ctx, i.openSource)
}

// ImportStream is Import of a tar archive, plain or compressed with gzip or zstd, that r returns. Source is not read:
// it is the name of the stream for errors.
func (e *Engine) ImportStream(ctx context.Context, q ImportRequest, r io.Reader) (Imported, error) {
	q.Source = cmp.Or(q.Source, "-")
	i := &importing{ImportRequest: q, e: e}
	return i.importFrom(ctx, func() (*source, error) {
		head := &headReader{r: r}
		return &source{kind: SourceTar, r: bufio.NewReaderSize(head, 1<<20), head: head, close: func() {}}, nil
	})
}

// ImportFile is Import of an archive, a disk image or a block device that the caller has opened for reading, and keeps
// open until ImportFile returns. Its offset does not matter, and stays. Source is not read: it is the name of the file
// for errors. A directory is refused, as its files would be read with the rights of this process: send them as a
// stream.
func (e *Engine) ImportFile(ctx context.Context, q ImportRequest, f *os.File) (Imported, error) {
	q.Source = cmp.Or(q.Source, f.Name())
	i := &importing{ImportRequest: q, e: e}
	return i.importFrom(ctx, func() (*source, error) { return i.openDescriptor(f) })
}

// importing is an import under way.
type importing struct {
	ImportRequest
	e   *Engine
	src *source
}

// importFrom is Import of the source that open returns.
func (q *importing) importFrom(ctx context.Context, open func() (*source, error)) (_ Imported, err error) {
	e := q.e
	ctx, end := e.ledger.Begin(ctx, opImport)
	defer end(&err)

	if err := q.Name.Required(opImport); err != nil {
		return Imported{}, err
	}

	name := q.Name.String()
	if err := e.needRoot(opImport, name); err != nil {
		return Imported{}, err
	}

	if q.SizeBytes < 0 {
		return Imported{}, errs.New(errs.Invalid, opImport, name, "the size must not be negative (got %d)", q.SizeBytes)
	}

	// Find out what the source is.
	src, err := open()
	if err != nil {
		return Imported{}, errs.Wrap(opImport, q.Source, err)
	}

	defer src.close()
	q.src = src

	if err := q.checkAdopt(ctx); err != nil {
		return Imported{}, err
	}

	if err := q.checkPreset(); err != nil {
		return Imported{}, err
	}

	// Wait for other builders of the golden, and take over their result.
	unlock, waited, err := e.lockGolden(ctx, name)
	if err != nil {
		return Imported{}, err
	}

	defer unlock()

	if waited && !q.Update && !q.Replace { // others may have built from another source
		if info, ok, err := e.currentGeneration(ctx, name); err != nil || ok {
			return Imported{Object: info, Waited: true}, err
		}
	}

	if err := q.checkNew(ctx); err != nil {
		return Imported{}, err
	}

	out, err := q.buildImport(ctx)
	if err != nil {
		return Imported{}, err
	}

	out.Source = src.kind
	out.Removed = e.removeOldOrWarn(ctx, name)
	if q.Replace {
		unlock() // the golden is ready for those who wait for it
		err = q.replaceSource(ctx, &out)
	}

	return out, err
}

// buildImport fills a scratch volume from the source, and publishes it. On error nothing remains.
func (q *importing) buildImport(ctx context.Context) (Imported, error) {
	e, src := q.e, q.src
	id, err := q.planImport(ctx)
	if err != nil {
		return Imported{}, err
	}

	name := q.Name.String()
	b, err := e.startBuild(ctx, buildRequest{op: opImport, name: name, mustBeNew: !q.Update, keep: q.Keep,
		overlay: q.Overlay, labels: q.Labels})
	if err != nil {
		return Imported{}, err
	}

	b.scratch = b.scratch.WithContentOf(id)
	b.gen.Origin = "" // a source is not a reference
	b.preset = src.preset
	out, err := q.fillScratch(ctx, b)
	if err == nil {
		err = src.checkUnused(q.Source) // in case its owner has started since
	}
	if err == nil {
		err = q.flushBeforeSealing(ctx, b.scratch.ID)
	}
	if err == nil {
		out.Object, err = b.publishGeneration(ctx)
	}
	if err != nil {
		b.undoBuild(ctx)
		return Imported{}, errs.Wrap(opImport, name, err)
	}

	return out, nil
}

// checkNew refuses a name that is taken before any work is done.
func (q *importing) checkNew(ctx context.Context) error {
	e := q.e
	return e.cat.View(ctx, func(tx *catalog.Tx) error {
		_, exists, err := tx.ResolveGolden(opImport, q.Name.String())
		if err != nil {
			return err
		}
		if !exists {
			return tx.CheckFree(opImport, q.Name.String())
		}

		if !q.Update {
			return errs.New(errs.Exists, opImport, q.Name.String(), "golden %q already exists", q.Name).
				WithHint("add a generation with %s",
					errs.Run("golden import", errs.Param("update"), q.Name.String(), "..."))
		}

		return nil
	})
}

// currentGeneration describes the current generation of a golden; ok is false if there is none.
func (e *Engine) currentGeneration(ctx context.Context, name string) (info api.Object, ok bool, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		g, exists, err := tx.Golden(name)
		if err != nil || !exists {
			return err
		}
		row, exists, err := tx.Generation(name, g.Current)
		if err != nil || !exists {
			return err
		}
		info, ok = generationOf(row, g, e.caps.Name), true
		return nil
	})

	return info, ok, err
}

// openSource opens the source and finds out what it is. It returns NotFound, Invalid or Permission.
func (q *importing) openSource() (*source, error) {
	e := q.e
	if q.Source == "" {
		return nil, errs.New(errs.Invalid, opImport, `""`, "the source is empty").
			WithHint("name a directory, an archive, a disk image, or - for a tar on standard input")
	}

	if strings.Contains(q.Source, "://") || strings.HasPrefix(q.Source, "git@") {
		return nil, errs.New(errs.Unsupported, opImport, q.Source, "importing from a URL is not supported").
			WithHint("download it, then import the file or directory")
	}

	// Resolve the path, and refuse sources inside the pool.
	abs, err := filepath.Abs(q.Source)
	if err != nil {
		return nil, err
	}

	real, err := filepath.EvalSymlinks(abs)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errs.New(errs.NotFound, opImport, q.Source, "it does not exist")
	}
	if err != nil {
		return nil, err
	}

	dir, err := filepath.EvalSymlinks(e.pool.Dir)
	if err != nil {
		return nil, err
	}

	if real == dir || strings.HasPrefix(real, dir+"/") {
		return nil, errs.New(errs.Invalid, opImport, q.Source, "it is inside the pool").
			WithHint("publish a volume as a golden with %s", errs.Run("golden publish"))
	}

	// Open a directory, a file or a block device.
	st, err := os.Stat(real)
	if err != nil {
		return nil, err
	}

	switch {
	case st.IsDir():
		f, err := os.Open(real) // if it cannot be read, fail before anything is created
		if err != nil {
			return nil, err
		}
		f.Close()
		return &source{kind: SourceDirectory, path: real, close: func() {}}, nil
	case isFileOrBlockDevice(st):
		return q.openFile(real, st)
	}

	return nil, errs.New(errs.Invalid, opImport, q.Source, "not a directory, a regular file or a block device")
}

func isFileOrBlockDevice(st fs.FileInfo) bool {
	return st.Mode().IsRegular() || st.Mode()&(fs.ModeDevice|fs.ModeCharDevice) == fs.ModeDevice
}

// openDescriptor is openSource for a file that the caller has opened. It opens the same file once more, with an offset
// of its own and, of a block device, exclusively. It returns Invalid or Permission (it is not open for reading).
func (q *importing) openDescriptor(f *os.File) (*source, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !isFileOrBlockDevice(st) {
		return nil, errs.New(errs.Invalid, opImport, q.Source, "not a regular file or a block device").
			WithHint("send what a directory or a pipe holds as a tar archive")
	}

	// The one that is opened here can be read, whatever the rights of the caller.
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err != nil {
		return nil, err
	}
	if mode := flags & unix.O_ACCMODE; flags&unix.O_PATH != 0 || mode != unix.O_RDONLY && mode != unix.O_RDWR {
		return nil, errs.New(errs.Permission, opImport, q.Source, "it is not open for reading")
	}
	return q.openFile("/proc/self/fd/"+itoa(int(f.Fd())), st)
}

// planImport decides the filesystem and size of the volume, and checks that there is
// enough space.
func (q *importing) planImport(ctx context.Context) (driver.Identity, error) {
	e, src := q.e, q.src
	id := driver.Identity{FS: q.FS}

	// An image determines both.
	if src.kind == SourceImage {
		if err := q.planImage(&id); err != nil {
			return id, err
		}
	}

	// Check that the driver supports the filesystem.
	if id.FS == "" {
		id.FS = e.caps.FS[0]
	}

	probe := driver.Identity{ID: driver.NewID(), Name: q.Name.String(), FS: id.FS}
	if err := e.caps.Check(ctx, opImport, probe); err != nil {
		return id, err
	}

	// Measure a tree.
	if src.kind != SourceImage {
		if id.FS == driver.None {
			return id, errs.New(errs.Invalid, opImport, q.Name.String(), "a raw volume cannot hold files").
				WithHint("use %s or xfs", errs.Param("fs", "ext4"))
		}

		if src.kind == SourceDirectory {
			n, err := q.measureSource(ctx)
			if err != nil {
				return id, err
			}
			src.files, src.bytes, src.alloc = n.Files, n.Bytes, n.Allocated
		}

		if err := q.treeSize(ctx, &id); err != nil {
			return id, err
		}
	}

	if q.SizeBytes > 0 {
		if err := q.admitImportSize(ctx, id); err != nil {
			return id, err
		}
	}

	return id, e.pool.Admit(ctx, opImport, q.Name.String(), src.alloc)
}

// admitImportSize checks the size that a golden is to have.
func (q *importing) admitImportSize(ctx context.Context, id driver.Identity) error {
	e, src := q.e, q.src
	w := wantedSize{opImport, q.Name.String(), id.SizeBytes, 1, fsprobe.NewGrowth(string(id.FS))}
	if src.kind == SourceImage { // its filesystem stays as it is
		w.growth = fsprobe.NewGrowth("")
	}
	return e.admitSize(ctx, w)
}

// planImage decides the filesystem and size of the volume for an image. It returns Invalid.
func (q *importing) planImage(id *driver.Identity) error {
	src := q.src
	found := driver.None
	if src.probed.Type != "" {
		found = driver.FS(src.probed.Type)
	}
	if id.FS == "" {
		id.FS = found
	}

	if id.FS != found && id.FS != driver.None {
		return errs.New(errs.Invalid, opImport, q.Source, "the image holds %s, not %s", src.probed.Type, id.FS).
			WithHint("remove %s", errs.Param("fs"))
	}

	id.Sector = sectorFor(src)
	id.SizeBytes = roundUp(src.bytes)
	if id.FS != driver.None { // only with --force is the image the smaller one
		id.SizeBytes = roundUp(max(src.bytes, src.probed.Bytes))
	}

	if q.SizeBytes > 0 && roundUp(q.SizeBytes) < id.SizeBytes {
		return errs.New(errs.Invalid, opImport, q.Source, "the size must be at least that of the image, %s (got %s)",
			errs.FormatBytes(id.SizeBytes), errs.FormatBytes(q.SizeBytes)).
			WithHint("use a larger %s, or remove it", errs.Param("size"))
	}

	id.SizeBytes = max(id.SizeBytes, roundUp(q.SizeBytes))
	if src.alloc == 0 {
		src.alloc = allocatedBytes(src.f)
	}

	return nil
}

// treeSize decides the size of the image for a tree.
func (q *importing) treeSize(ctx context.Context, id *driver.Identity) error {
	e, src := q.e, q.src
	if !id.FS.IsImage() {
		if q.SizeBytes > 0 {
			return errs.New(errs.Unsupported, opImport, q.Name.String(),
				"%s volumes of the %s driver have no size of their own: they share the space of the pool", id.FS, e.caps.Name).
				WithHint("remove %s", errs.Param("size"))
		}
		return nil
	}

	if id.SizeBytes = roundUp(q.SizeBytes); id.SizeBytes > 0 {
		if src.alloc > id.SizeBytes {
			return errs.New(errs.Invalid, opImport, q.Name.String(), "the files need at least %s, more than the size of %s",
				errs.FormatBytes(src.alloc), errs.FormatBytes(id.SizeBytes)).
				WithHint("use a larger %s, or remove it", errs.Param("size"))
		}
		return nil
	}

	s, err := e.pool.Space(ctx)
	id.SizeBytes = imageBytes(s, src.alloc)
	return err
}

// imageBytes returns the default size of an image for a tree that needs about this many bytes.
func imageBytes(s pool.Space, tree int64) int64 {
	size := max(defaultVolumeBytes, roundUp(2*tree))
	// A size larger than the pool would mislead.
	return max(min(size, s.TotalBytes>>20<<20), 512<<20)
}

// copyOptions returns the options for copying into a volume. The pool itself is never copied.
func (e *Engine) copyOptions(t *progress.Tracker) treecopy.Options {
	o := treecopy.Options{Unprivileged: os.Geteuid() != 0}
	if t != nil {
		o.Progress = t.Add
	}
	for _, p := range []string{e.pool.Dir, e.pool.DataDir()} {
		var st unix.Stat_t
		if unix.Stat(p, &st) == nil {
			o.Exclude = append(o.Exclude, treecopy.Inode{Dev: st.Dev, Ino: st.Ino})
		}
	}
	return o
}

// sourceOptions returns copyOptions for a directory that is imported.
func (q *importing) sourceOptions(t *progress.Tracker) treecopy.Options {
	e, src := q.e, q.src
	o := e.copyOptions(t)
	o.Resolved = src.resolved
	return o
}

// fillScratch creates the scratch volume and copies the source into it.
func (q *importing) fillScratch(ctx context.Context, b *build) (Imported, error) {
	e, src := q.e, q.src
	if src.kind == SourceImage {
		kind := b.scratch.FS
		b.scratch.FS = driver.None // the image brings its own filesystem
		if err := e.drv.Create(ctx, b.scratch); err != nil {
			return Imported{}, err
		}
		b.scratch.FS = kind
		out, err := q.fillImage(ctx, b)
		if err == nil {
			out.Cleaned, err = b.cleanScratch(ctx)
		}
		return out, err
	}

	if err := e.drv.Create(ctx, b.scratch); err != nil {
		return Imported{}, err
	}

	// Copy the directory, or unpack the archive.
	var totals treecopy.Totals
	var out Imported
	put := func(root *os.File) (err error) {
		opt := q.sourceOptions(progress.From(ctx))
		content.AtStep("copying")
		if src.kind == SourceDirectory {
			opt.Staging = b.scratch.FS == driver.Ext4
			progress.From(ctx).Start(progress.Copying, src.files, src.bytes)
			if q.Adopt {
				totals, err = q.copyAdopted(ctx, root, opt, &out)
				return err
			}
			totals, err = treecopy.CopyDir(ctx, src.path, root, opt)
			return err
		}

		opt.Staging = b.scratch.FS == driver.Ext4
		progress.From(ctx).Start(progress.Unpacking, 0, 0)
		totals, err = treecopy.Untar(ctx, src.r, root, opt)
		if src.head != nil && errs.Is(err, errs.Invalid) {
			err = cmp.Or(src.head.refuseContent(q.Source), err)
		}

		return err
	}

	err := e.fillTree(ctx, b.scratch, func(root *os.File) (err error) {
		if err = put(root); err == nil {
			out.Cleaned, err = b.clean(ctx, root)
		}
		return err
	})
	out.Files, out.Bytes, out.Warnings = totals.Files, totals.Bytes, skippedMessages(totals.Skipped)
	out.NotKept, out.Warnings = totals.NotKept, append(out.Warnings, lossMessages(totals.NotKept)...)
	return out, err
}

// fillImage copies an image into the scratch volume, and checks its filesystem.
func (q *importing) fillImage(ctx context.Context, b *build) (Imported, error) {
	e, src := q.e, q.src
	progress.From(ctx).Start(progress.Copying, 0, src.alloc)
	out := Imported{Warnings: src.warnings}
	err := e.content.WithPath(ctx, b.scratch.ID, func(path string) (err error) {
		out.Bytes, err = copyImage(ctx, src, path)
		return err
	})
	if err != nil || q.Force || b.scratch.FS == driver.None {
		return out, err
	}

	warnings, err := q.checkCopied(ctx, b.scratch.ID)
	out.Warnings = append(out.Warnings, warnings...)
	return out, err
}

// fillTree calls put with the root of the scratch volume's files.
func (e *Engine) fillTree(ctx context.Context, id driver.Identity, put func(*os.File) error) error {
	if id.FS == driver.Native {
		return e.content.WithTree(ctx, id.ID, false, put)
	}

	// The image is worthless after a power loss, so it needs no barriers. Writing
	// goes through the page cache: sealing reads the image again at once, and most
	// of it never reaches the disk.
	o := content.ImageOptions{Buffered: true}
	if id.FS == driver.Ext4 {
		o.Extra = []string{"barrier=0", "noauto_da_alloc"}
	}

	return e.content.WithImage(ctx, id.ID, o, func(root *os.File) error {
		// An empty volume has no lost+found; e2fsck creates it if it needs one.
		if err := unix.Unlinkat(int(root.Fd()), "lost+found", unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
			return errs.Wrap(opImport, "lost+found", err)
		}
		if err := put(root); err != nil {
			return err
		}
		if err := root.Chmod(0o755); err != nil {
			return errs.Wrap(opImport, id.Name, err)
		}
		return errs.Wrap(opImport, id.Name, unix.Syncfs(int(root.Fd())))
	})
}

// flushBeforeSealing writes the scratch volume to disk if the pool has no space for a
// second copy of it. Data that is only in memory has no blocks on disk yet, so sealing
// copies it, which is fast because the first copy is then never written. Data on disk
// has blocks, and sealing shares all long extents instead of copying them.
func (q *importing) flushBeforeSealing(ctx context.Context, scratch driver.ObjectID) error {
	e := q.e
	if _, ok := e.drv.(driver.Sealer); !ok {
		return nil
	}

	w, err := e.drv.Attachment(ctx, scratch)
	if err != nil || w.Image == "" {
		return err
	}

	f, err := os.Open(w.Image)
	if err != nil {
		return errs.Wrap(opImport, w.Image, err)
	}

	defer f.Close()

	s, err := e.pool.Space(ctx)
	if err != nil {
		return err
	}

	if least := int64(float64(s.TotalBytes) * e.pool.Config.MinFreePercent / 100); s.FreeBytes-allocatedBytes(f) >= least {
		return nil
	}

	return errs.Wrap(opImport, w.Image, f.Sync())
}

// skippedMessages describes what a copy could not keep.
func skippedMessages(s treecopy.Skipped) []errs.Message {
	var out []errs.Message
	add := func(n int64, one, many string) {
		if n > 0 {
			out = append(out, errs.Messagef("%s", countOf(n, one, many)))
		}
	}

	add(s.Owners, "file now belongs to you instead of its owner: keeping owners needs root",
		"files now belong to you instead of their owner: keeping owners needs root")
	add(s.Devices, "device node was skipped: creating it needs root",
		"device nodes were skipped: creating them needs root")
	add(s.Xattrs, "extended attribute was skipped: it needs root, or does not apply here",
		"extended attributes were skipped: they need root, or do not apply here")
	add(s.KernelDirs, "mount of a kernel filesystem (proc, sysfs, ...) became an empty directory",
		"mounts of kernel filesystems (proc, sysfs, ...) became empty directories")
	return out
}

func itoa(n int) string { return strconv.Itoa(n) }
