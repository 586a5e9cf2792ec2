package engine

import (
	"bufio"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/check"
	"pando/internal/engine/content"
	"pando/internal/linux/durable"
	"pando/internal/tree/treecopy"

	"github.com/klauspost/compress/zstd"
)

const opExport = "export"

// ExportFormat is what an exported file is.
type ExportFormat string

// The formats.
const (
	ExportTar     ExportFormat = "tar"
	ExportTarZstd ExportFormat = "tar.zst"
	ExportRaw     ExportFormat = "raw"
	ExportQcow2   ExportFormat = "qcow2"
)

// ExportFormats lists the formats.
var ExportFormats = []ExportFormat{ExportTar, ExportTarZstd, ExportRaw, ExportQcow2}

// exportSuffixes are the ends of file names that stand for formats.
var exportSuffixes = []struct {
	suffix string
	format ExportFormat
}{
	{".tar", ExportTar}, {".tar.zst", ExportTarZstd}, {".tzst", ExportTarZstd},
	{".raw", ExportRaw}, {".img", ExportRaw}, {".qcow2", ExportQcow2},
}

// ExportRequest says what to export, and to which file.
type ExportRequest struct {
	From    ref.Ref      // a volume, even in use, a snapshot or a generation
	File    string       // path of the file to write
	Format  ExportFormat // "": by the end of the file's name
	Replace bool         // an existing file
	Freeze  Freeze       // whether the writes to a volume in use are stopped
}

// Exported is the result of Export. Its JSON form is stable.
type Exported struct {
	Ref    string       `json:"ref"`    // reference to what was exported
	File   string       `json:"file"`   // path of the file, absolute, or -
	Format ExportFormat `json:"format"` // format of the file
	// number of files in an archive; each of several names of a file counts
	Files     int64              `json:"file_count,omitempty"`
	Bytes     int64              `json:"content_bytes"`      // size of the data, without holes
	FileBytes int64              `json:"file_bytes"`         // length of the file
	NotKept   []treecopy.NotKept `json:"not_kept,omitempty"` // what the format cannot store
	Warnings  []errs.Message     `json:"warnings,omitempty"` // what was not exported, for people
}

// Export writes a volume, snapshot or generation to a file: its files as a tar archive, or its block device as an
// image. Import makes the same content of it. A volume is exported from a private copy of one moment, which programs
// that use it do not notice (a pool whose driver cannot do that copies again what changes). The file appears under its
// name when it is complete and durable; after an error or an interruption there is none, and an existing file is as
// before. Nothing in the pool changes. Export waits for a golden like Clone. NotFound, Exists, Invalid, Unsupported,
// InUse, NoSpace, Conflict, Permission.
//
// File is made with the rights of this process: see ExportStream for exports to others.
func (e *Engine) Export(ctx context.Context, q ExportRequest) (out Exported, err error) {
	ctx, end := e.ledger.Begin(ctx, opExport)
	defer end(&err)

	if err := q.findFormat(); err != nil {
		return out, err
	}
	if err := q.checkFile(e.pool.Dir); err != nil {
		return out, err
	}

	x := &export{e: e, q: q, out: &out}
	err = x.withExport(ctx, func() error {
		f, err := durable.Create(q.File)
		if err != nil {
			return errs.Wrap(opExport, q.File, err)
		}
		defer f.Discard()

		if q.Format == ExportRaw {
			err = x.writeSparse(ctx, f.File)
		} else {
			err = x.write(ctx, &counted{w: f, n: &out.FileBytes})
		}

		// The file gets its name at the end.
		if err == nil {
			err = ctx.Err()
		}
		if err == nil {
			err = f.Commit(q.Replace)
		}
		if errors.Is(err, fs.ErrExist) {
			return existsError(q.File)
		}
		return err
	})
	return out, err
}

// ExportStream is Export to a stream instead of a file: q has a format, and no file. What was written before an error
// is a part of the export.
func (e *Engine) ExportStream(ctx context.Context, q ExportRequest, w io.Writer) (out Exported, err error) {
	ctx, end := e.ledger.Begin(ctx, opExport)
	defer end(&err)

	q.File = "-"
	if err := q.findFormat(); err != nil {
		return out, err
	}

	x := &export{e: e, q: q, out: &out}
	err = x.withExport(ctx, func() error {
		return x.write(ctx, &counted{w: w, n: &out.FileBytes})
	})
	return out, err
}

// withExport calls write with the object to be exported, once that can be written in the format.
func (x *export) withExport(ctx context.Context, write func() error) error {
	q, out := x.q, x.out
	out.Ref, out.File, out.Format = q.From.String(), q.File, q.Format
	if err := x.checkExport(ctx); err != nil {
		return err
	}

	if err := x.open(ctx); err != nil {
		return err
	}
	defer x.view.close(ctx)

	return errs.Wrap(opExport, out.Ref, write())
}

// checkExport checks what is to be exported before anything is done.
func (x *export) checkExport(ctx context.Context) error {
	e, q := x.e, x.q
	if err := e.needRoot(opExport, q.From.String()); err != nil {
		return err
	}

	if err := e.awaitGolden(ctx, q.From.Name); err != nil {
		return err
	}

	return e.cat.View(ctx, func(tx *catalog.Tx) error {
		row, err := tx.Resolve(opExport, q.From)
		if err != nil {
			return err
		}
		return checkFormat(row, q.From.String(), q.Format)
	})
}

// findFormat decides the format. Invalid.
func (q *ExportRequest) findFormat() error {
	switch {
	case q.File == "":
		return errs.New(errs.Invalid, opExport, `""`, "the file name is empty").
			WithHint("name a file, or - for standard output")
	case q.Format != "":
		if slices.Contains(ExportFormats, q.Format) {
			return nil
		}
		return errs.New(errs.Invalid, opExport, string(q.Format), "unknown format").
			WithHint("choose tar, tar.zst, raw or qcow2")
	case q.File == "-":
		return errs.New(errs.Invalid, opExport, "-", "a stream has no file name that tells the format").
			WithHint("add %s, or tar.zst, raw or qcow2", errs.Param("format", "tar"))
	}

	for _, s := range exportSuffixes {
		if strings.HasSuffix(q.File, s.suffix) {
			q.Format = s.format
			return nil
		}
	}

	return errs.New(errs.Invalid, opExport, q.File, "the file name does not tell the format").
		WithHint("let it end with .tar, .tar.zst, .raw, .img or .qcow2, or add %s", errs.Param("format", "tar"))
}

// checkFile checks that a file can be made, outside the pool. It returns Invalid, Exists or NotFound.
func (q *ExportRequest) checkFile(pool string) error {
	abs, err := filepath.Abs(q.File)
	if err != nil {
		return errs.Wrap(opExport, q.File, err)
	}

	// Resolve the directory, but replace a symbolic link itself.
	dir, err := filepath.EvalSymlinks(filepath.Dir(abs))
	if errors.Is(err, fs.ErrNotExist) {
		return errs.New(errs.NotFound, opExport, q.File, "its directory does not exist").
			WithHint("create it with `mkdir -p %s`", errs.ShellWord(filepath.Dir(abs)))
	}
	if err != nil {
		return errs.Wrap(opExport, q.File, err)
	}

	abs = filepath.Join(dir, filepath.Base(abs))
	real, err := filepath.EvalSymlinks(pool)
	if err != nil {
		return errs.Wrap(opExport, q.File, err)
	}
	if strings.HasPrefix(abs, real+"/") {
		return errs.New(errs.Invalid, opExport, q.File, "it is inside the pool").
			WithHint("choose a directory outside %s", pool)
	}

	st, err := os.Lstat(abs)
	switch {
	case err == nil && !st.Mode().IsRegular() && (st.IsDir() || q.Replace):
		return errs.New(errs.Invalid, opExport, q.File, "it exists, and is not a regular file").
			WithHint("name another file, or write to standard output with -")
	case err == nil && !q.Replace:
		return existsError(q.File)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return errs.Wrap(opExport, q.File, err)
	}

	q.File = abs
	return nil
}

func existsError(file string) error {
	return errs.New(errs.Exists, opExport, file, "the file already exists").
		WithHint("name another file, or replace it with %s", errs.Param("force"))
}

// checkFormat checks that an object can be written in a format. Invalid, Unsupported.
func checkFormat(row catalog.Row, name string, format ExportFormat) error {
	image := format == ExportRaw || format == ExportQcow2
	switch {
	case !image && row.FS == driver.None:
		return errs.New(errs.Invalid, opExport, name, "a raw volume has no files that a tar archive could hold").
			WithHint("export its block device with %s", errs.Param("format", "raw"))
	case image && row.IsOverlay():
		return errs.New(errs.Unsupported, opExport, name, "an overlay has no image with all its files").
			WithHint("export its files with %s", errs.Param("format", "tar"))
	case image && !row.FS.IsImage():
		return errs.New(errs.Unsupported, opExport, name, "it is a tree of files, not an image").
			WithHint("export its files with %s; imported into a pool of the reflink driver, they become an image",
				errs.Param("format", "tar"))
	}
	return nil
}

// export is an object opened to be exported.
type export struct {
	e    *Engine
	q    ExportRequest
	view *view
	side *side
	out  *Exported
}

// open finds the object, and keeps it from being destroyed. A volume is copied first: programs may go on using
// it, and it can be mounted and destroyed in the meantime.
func (x *export) open(ctx context.Context) error {
	progress.From(ctx).Start(progress.Copying, 0, 0)
	v, err := x.e.openSides(ctx, opExport, x.q.Freeze, x.q.From)
	if err != nil {
		return err
	}

	x.view, x.side = v, v.sides[0]
	err = x.copyVolume(ctx)
	if err == nil && x.side.row().IsOverlay() {
		err = x.flattenOverlay(ctx)
	}
	if err != nil {
		v.close(ctx)
		return errs.Wrap(opExport, x.out.Ref, err)
	}

	return nil
}

// flattenOverlay makes a private volume with all files of an overlay, which is exported in its place: overlayfs itself
// hides files and attributes of the golden that look like its own. The overlay may be destroyed from then on.
func (x *export) flattenOverlay(ctx context.Context) error {
	e, overlay := x.e, x.side
	flat := e.newIdentity(ctx, driver.Scratch)
	flat.Ephemeral = true
	if err := e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		return tx.Mark(catalog.Mark{ID: flat.ID, Op: opLook})
	}); err != nil {
		return err
	}

	row := overlay.row()
	x.side = &side{ref: overlay.ref, live: content.Live{Row: row}, copy: flat, made: true}
	x.view.sides = append(x.view.sides, x.side)
	cost, err := e.overlayCost(ctx, row)
	if err != nil {
		return err
	}
	if err := e.pool.Admit(ctx, opExport, x.out.Ref, cost); err != nil {
		return err
	}

	if flat, err = e.cloneWithChanges(ctx, row, overlay.identity(), flat); err != nil {
		return err
	}
	x.side.copy, x.side.live.Row.Identity = flat, flat
	e.ledger.DestroyUnfinished(ctx, overlay.copy.ID)
	return nil
}

// copyVolume makes the private copy of a volume. A driver that copies all data does so only if the volume is in use.
func (x *export) copyVolume(ctx context.Context) error {
	e, s := x.e, x.side
	if s.row().Kind != driver.Volume {
		return nil
	}

	if !s.made && (s.live.InUse() || e.caps.Atomic) {
		if !e.caps.Sharing {
			need, err := bytesToCopy(ctx, e, s.row())
			if err != nil {
				return err
			}
			if err := e.pool.Admit(ctx, opExport, x.out.Ref, need); err != nil {
				return err
			}
		}
		if err := e.copyLive(ctx, s.live, s.copy, false); err != nil {
			return err
		}
		s.made = true
	}

	// Replay the log of the copy, so that the image is clean.
	if row := s.row(); x.q.Format == ExportRaw || x.q.Format == ExportQcow2 {
		if s.made && row.FS != driver.None {
			if wrong, err := check.Replay(ctx, e.content, s.id(), row.FS); err != nil {
				return err
			} else if wrong != "" {
				return errs.New(errs.Damaged, opExport, x.out.Ref, "%s", wrong).
					WithHint("check it with %s", errs.Run("fsck"))
			}
		}
	}

	// From now on only the copy is needed, except the lower layer of an overlay.
	if !s.made || s.row().IsOverlay() {
		return nil
	}

	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		if err := tx.Unmark(s.copy.ID); err != nil {
			return err
		}
		return tx.Mark(catalog.Mark{ID: s.copy.ID, Op: opLook})
	})
}

// write writes the object to w.
func (x *export) write(ctx context.Context, w io.Writer) error {
	w = &untilDone{ctx, w}
	switch x.q.Format {
	case ExportRaw:
		return x.writeRaw(ctx, w)
	case ExportQcow2:
		return x.writeQcow2(ctx, w)
	case ExportTarZstd:
		z, err := zstd.NewWriter(w)
		if err != nil {
			return err
		}
		if err := x.writeTar(ctx, z); err != nil {
			z.Reset(nil) // what it holds is not written
			return err
		}
		return z.Close()
	}
	return x.writeTar(ctx, w)
}

// writeTar writes the files as a tar archive.
func (x *export) writeTar(ctx context.Context, w io.Writer) error {
	progress.From(ctx).Start(progress.Exporting, 0, x.side.row().Usage.LogicalBytes)
	buffered := bufio.NewWriterSize(w, 1<<20)
	err := x.view.withRoot(ctx, x.side, func(root *os.File) error {
		totals, err := treecopy.WriteTar(ctx, buffered, root,
			treecopy.Options{Unprivileged: os.Geteuid() != 0, Progress: progress.From(ctx).Add})
		x.out.Files, x.out.Bytes, x.out.NotKept = totals.Files, totals.Bytes, totals.NotKept
		x.out.Warnings = append(skippedMessages(totals.Skipped), tarLossMessages(totals.NotKept)...)
		return err
	})
	if err == nil {
		err = buffered.Flush()
	}
	return err
}

// tarLossMessages describes what a tar archive cannot store.
func tarLossMessages(all []treecopy.NotKept) []errs.Message {
	var out []errs.Message
	for _, n := range all {
		what := countOf(n.Count, "file has", "files have") + " the property " + n.What + ", which a tar archive cannot store"
		if n.What == treecopy.LostSockets {
			what = countOf(n.Count, "socket was skipped", "sockets were skipped") + ": tar has no type for them"
		}
		out = append(out, errs.Messagef("%s, for example %s", what, n.Example))
	}
	return out
}

// untilDone writes to w until the context ends.
type untilDone struct {
	ctx context.Context
	w   io.Writer
}

func (u *untilDone) Write(p []byte) (int, error) {
	if err := u.ctx.Err(); err != nil {
		return 0, err
	}
	return u.w.Write(p)
}

// counted counts what is written to w.
type counted struct {
	w io.Writer
	n *int64
}

func (c *counted) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	*c.n += int64(n)
	return n, err
}
