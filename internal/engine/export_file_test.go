package engine_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/testing/treetest"

	"golang.org/x/sys/unix"
)

// smallTree makes a tree with everything that tar can store, without the largest files.
func smallTree(t *testing.T, dir string) {
	t.Helper()
	must(t, os.Mkdir(dir, 0o755))
	treetest.Build(t, dir)
	must(t, os.Remove(filepath.Join(dir, "sparse", "huge")))
	must(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type()&os.ModeSocket != 0 {
			err = os.Remove(path)
		}
		return err
	}))
}

func export(t *testing.T, e *engine.Engine, from, file string) engine.Exported {
	t.Helper()
	out, err := e.Export(t.Context(), engine.ExportRequest{From: reference(t, from), File: file})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// importFrom imports a file into a golden, and returns where a clone of it is mounted.
func importFrom(t *testing.T, e *engine.Engine, name, file string) string {
	t.Helper()
	if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName(name), Source: file}); err != nil {
		t.Fatalf("importing %s: %v", file, err)
	}
	return clone(t, e, name, name+"-clone", true).Mountpoint
}

// TestExportRoundTrip: what is exported can be imported again, and is the same.
func TestExportRoundTrip(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		src := filepath.Join(top, "src")
		smallTree(t, src)
		q := engine.ImportRequest{Name: ref.MustName("g"), Source: src}
		if e.Caps().FS[0].IsImage() {
			q.SizeBytes = 128 << 20
		}
		if _, err := e.Import(t.Context(), q); err != nil {
			t.Fatal(err)
		}

		// A volume in use, whose last changes are only in memory.
		v := clone(t, e, "g", "v", true)
		must(t, os.WriteFile(filepath.Join(v.Mountpoint, "new"), []byte("text"), 0o640))
		before := objects(t, e)
		formats := []string{"a.tar"} // all of them where there are images; what reads and writes a tar is the same elsewhere
		if e.Caps().FS[0].IsImage() {
			formats = append(formats, "b.tar.zst", "c.tzst", "d.raw", "e.img", "f.qcow2")
		}

		for _, name := range formats {
			file := filepath.Join(top, name)
			out := export(t, e, "v", file)
			st, err := os.Stat(file)
			if err != nil || st.Size() != out.FileBytes || st.Mode().Perm() != 0o600 || out.Bytes == 0 ||
				(out.Files > 0) != (name[0] <= 'c') || len(out.Warnings) > 0 {
				t.Errorf("%s: %+v, %v, %v", name, out, st, err)
			}
			if after := objects(t, e); len(after) != len(before) {
				t.Errorf("%s left %v", name, after)
			}

			if filepath.Ext(name) == ".qcow2" {
				fromQcow2(t, file) // checks it
			}
			got := importFrom(t, e, "from"+name[:1], file)
			treetest.Compare(t, v.Mountpoint, got, treetest.RootMode|treetest.Holes)
			destroy(t, e, "from"+name[:1]+"-clone")
			if _, err := e.RemoveGolden(t.Context(), reference(t, "from"+name[:1])); err != nil {
				t.Fatal(err)
			}
		}

		// A generation, to standard output.
		var b bytes.Buffer
		out, err := e.ExportStream(t.Context(), engine.ExportRequest{From: reference(t, "g@1"),
			Format: engine.ExportTarZstd}, &b)
		if err != nil || out.FileBytes != int64(b.Len()) || out.File != "-" {
			t.Errorf("%+v, %d bytes, %v", out, b.Len(), err)
		}
		if _, err := e.ImportStream(t.Context(), engine.ImportRequest{Name: ref.MustName("piped")}, &b); err != nil {
			t.Fatal(err)
		}
		treetest.Compare(t, src, clone(t, e, "piped", "p", true).Mountpoint, treetest.RootMode|treetest.Holes)
	})
}

// fromQcow2 checks an image with QEMU's program, and converts it to a raw one.
func fromQcow2(t *testing.T, file string) string {
	t.Helper()
	if _, err := exec.LookPath("qemu-img"); err != nil {
		t.Skip("SKIPPED: qemu-img is not installed")
	}
	for _, args := range [][]string{{"check", "-f", "qcow2", file}, {"convert", "-f", "qcow2", "-O", "raw", file,
		file + ".raw"}} {
		if out, err := exec.Command("qemu-img", args...).CombinedOutput(); err != nil {
			t.Fatalf("qemu-img %v: %v: %s", args, err, out)
		}
	}
	return file + ".raw"
}

// TestExportRawVolume: the image of a raw volume is the same, as a file, through a pipe, and as qcow2.
func TestExportRawVolume(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		rawGolden(t, e, "disk", 16<<20)
		want, err := os.ReadFile(imageFile(t, e, "disk"))
		must(t, err)
		clone(t, e, "disk", "idle", false)
		clone(t, e, "disk", "attached", true)
		for _, from := range []string{"disk@1", "idle", "attached"} {
			file := filepath.Join(top, from+".img")
			export(t, e, from, file)
			export(t, e, from, filepath.Join(top, from+".qcow2"))
			var pipe bytes.Buffer
			_, err := e.ExportStream(t.Context(), engine.ExportRequest{From: reference(t, from), Format: engine.ExportRaw},
				&pipe)
			must(t, err)
			for _, f := range []string{file, fromQcow2(t, filepath.Join(top, from+".qcow2"))} {
				if got, err := os.ReadFile(f); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s differs (%v)", f, err)
				}
			}
			if !bytes.Equal(pipe.Bytes(), want) {
				t.Errorf("%s: the pipe got something else", from)
			}
		}
	})
}

// TestExportRefuses: a refused export makes no file, changes none, and leaves nothing in the pool.
func TestExportRefuses(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		image := e.Caps().FS[0].IsImage()
		src := filepath.Join(top, "src")
		must(t, os.Mkdir(src, 0o755), os.WriteFile(filepath.Join(src, "file"), []byte("text"), 0o600))
		if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: src}); err != nil {
			t.Fatal(err)
		}
		clone(t, e, "g", "v", false)
		out := filepath.Join(top, "out")
		must(t, os.Mkdir(out, 0o755), os.WriteFile(filepath.Join(out, "old.tar"), []byte("old"), 0o600),
			os.Symlink("old.tar", filepath.Join(out, "link.tar")))
		before := objects(t, e)

		type refusal struct {
			from, file string
			format     engine.ExportFormat
			force      bool
			kind       errs.Kind
			hint       string
		}
		cases := []refusal{
			{from: "none", file: "a.tar", kind: errs.NotFound},
			{from: "v@none", file: "a.tar", kind: errs.NotFound},
			{from: "v", file: "old.tar", kind: errs.Exists, hint: "force"},
			{from: "v", file: "link.tar", kind: errs.Exists},
			{from: "v", file: "link.tar", force: true, kind: errs.Invalid},
			{from: "v", file: "", format: "tar", kind: errs.Invalid, hint: "standard output"},
			{from: "v", file: "a.zip", kind: errs.Invalid, hint: ".tar.zst"},
			{from: "v", file: "a.tar", format: "zip", kind: errs.Invalid, hint: "qcow2"},
			{from: "v", file: "missing/a.tar", kind: errs.NotFound, hint: "mkdir -p"},
			{from: "v", file: e.Dir() + "/a.tar", kind: errs.Invalid, hint: "outside"},
		}
		if image {
			rawGolden(t, e, "disk", 1<<20)
			before = objects(t, e)
			cases = append(cases, refusal{from: "disk", file: "a.tar", kind: errs.Invalid, hint: "raw"})
		} else {
			cases = append(cases, refusal{from: "v", file: "a.raw", kind: errs.Unsupported, hint: "tar"},
				refusal{from: "v", file: "a.qcow2", kind: errs.Unsupported, hint: "reflink"})
		}

		for _, c := range cases {
			file := c.file
			if !filepath.IsAbs(file) && file != "" {
				file = filepath.Join(out, file)
			}
			_, err := e.Export(t.Context(), engine.ExportRequest{From: reference(t, c.from), File: file, Format: c.format,
				Replace: c.force})
			if !errs.Is(err, c.kind) || !strings.Contains(errs.HintOf(err), c.hint) {
				t.Errorf("%+v: %v (hint %q)", c, err, errs.HintOf(err))
			}
		}

		// Errors of writing, and interruptions.
		_, err := e.ExportStream(t.Context(), engine.ExportRequest{From: reference(t, "v")}, failing{})
		if !errs.Is(err, errs.Invalid) || !strings.Contains(errs.HintOf(err), "format") {
			t.Errorf("a stream without a format: %v", err)
		}
		_, err = e.ExportStream(t.Context(), engine.ExportRequest{From: reference(t, "v"), Format: engine.ExportTarZstd},
			failing{})
		if !errors.Is(err, errFailing) {
			t.Errorf("a failing writer: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = e.Export(ctx, engine.ExportRequest{From: reference(t, "v"), File: filepath.Join(out, "a.tar")})
		if err == nil {
			t.Error("an interrupted export succeeds")
		}

		entries, err := os.ReadDir(out)
		old, rerr := os.ReadFile(filepath.Join(out, "old.tar"))
		if err != nil || rerr != nil || len(entries) != 2 || string(old) != "old" {
			t.Errorf("left %v, %q", entries, old)
		}
		if after := objects(t, e); len(after) != len(before) {
			t.Errorf("left %v", after)
		}

		// With force, the file is replaced.
		_, err = e.Export(t.Context(), engine.ExportRequest{From: reference(t, "v"), File: filepath.Join(out, "old.tar"),
			Replace: true})
		must(t, err)
		b, err := os.ReadFile(filepath.Join(importFrom(t, e, "again", filepath.Join(out, "old.tar")), "file"))
		if err != nil || string(b) != "text" {
			t.Errorf("%q, %v", b, err)
		}
	})
}

var errFailing = errors.New("no more")

// failing is a writer that fails.
type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errFailing }

// TestExportOfOverlay: the files of an overlay are exported, with those of its lower layer, even what overlayfs does
// not show. Nothing keeps the overlay from being destroyed then.
func TestExportOfOverlay(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		src, top := t.TempDir(), t.TempDir()
		must(t, os.WriteFile(filepath.Join(src, "lower"), []byte("l"), 0o600),
			unix.Mknod(filepath.Join(src, "whiteout"), unix.S_IFCHR, 0),
			unix.Lsetxattr(filepath.Join(src, "lower"), "trusted.overlay.other", []byte("x"), 0))
		importTree(t, e, "h", src)
		_, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "h"}, Name: ref.MustName("o"), Overlay: true})
		must(t, err)
		edit(t, e, "o", func(dir string) { must(t, os.WriteFile(filepath.Join(dir, "upper"), []byte("u"), 0o600)) })
		publish(t, e, "published", "o")
		_, err = e.Export(t.Context(), engine.ExportRequest{From: reference(t, "o"), File: filepath.Join(top, "o.raw")})
		if !errs.Is(err, errs.Unsupported) || errs.HintOf(err) == "" {
			t.Errorf("%v", err)
		}

		// While it is being exported, it is destroyed.
		file, err := os.Create(filepath.Join(top, "o.tar"))
		must(t, err)
		defer file.Close()
		gone := false
		_, err = e.ExportStream(t.Context(), engine.ExportRequest{From: reference(t, "o"), Format: engine.ExportTar},
			writeFunc(func(p []byte) (int, error) {
				if !gone {
					destroy(t, e, "o")
					gone = true
				}
				return file.Write(p)
			}))
		must(t, err)

		again := importFrom(t, e, "again", file.Name())
		treetest.Compare(t, clone(t, e, "published", "p", true).Mountpoint, again, treetest.RootMode)
		if got := contentOf(t, again); got != "./lower=l ./upper=u " {
			t.Errorf("the export holds %s", got)
		}
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(again, "whiteout"), &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
			t.Errorf("a file that overlayfs hides: %v", err)
		}
		destroy(t, e, "p", "again-clone")
	})
}

// writeFunc is a writer that calls a function.
type writeFunc func(p []byte) (int, error)

func (w writeFunc) Write(p []byte) (int, error) { return w(p) }

// TestExportOfSockets: sockets are skipped, and a warning says so.
func TestExportOfSockets(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		src := filepath.Join(top, "src")
		must(t, os.Mkdir(src, 0o755), unix.Mknod(filepath.Join(src, "a"), unix.S_IFSOCK|0o600, 0),
			unix.Mknod(filepath.Join(src, "b"), unix.S_IFSOCK|0o600, 0))
		if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: src}); err != nil {
			t.Fatal(err)
		}
		out := export(t, e, "g", filepath.Join(top, "g.tar"))
		const want = "2 sockets were skipped: tar has no type for them, for example a"
		if len(out.Warnings) != 1 || out.Warnings[0].String() != want || len(out.NotKept) != 1 || out.Files != 0 {
			t.Errorf("%+v", out)
		}
	})
}

// TestImportQcow2: what QEMU writes is imported as the disk in it; what is damaged, or only a part of a disk, is
// refused.
func TestImportQcow2(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		if _, err := exec.LookPath("qemu-img"); err != nil {
			t.Skip("SKIPPED: qemu-img is not installed")
		}
		disk := imageSource(t, "ext4")
		qemu := func(args ...string) {
			t.Helper()
			if out, err := exec.Command("qemu-img", args...).CombinedOutput(); err != nil {
				t.Fatalf("qemu-img %v: %v: %s", args, err, out)
			}
		}
		bring := func(name, file string, fs driver.FS) (engine.Imported, error) {
			t.Helper()
			return e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName(name), Source: file, FS: fs})
		}

		good := filepath.Join(top, "good.qcow2")
		qemu("convert", "-c", "-f", "raw", "-O", "qcow2", disk, good)
		want, err := os.ReadFile(disk)
		must(t, err)
		for name, fs := range map[string]driver.FS{"ext4": "", "raw": driver.None} {
			out, err := bring(name, good, fs)
			if err != nil || len(out.Warnings) > 0 || out.SizeBytes != int64(len(want)) {
				t.Fatalf("%+v, %v", out, err)
			}
			if got, err := os.ReadFile(imageFile(t, e, name)); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s: the golden is another (%v)", name, err)
			}
		}

		// A truncated image, one with a backing file, and one of a disk with partitions.
		st, err := os.Stat(good)
		must(t, err)
		short := filepath.Join(top, "short.qcow2")
		part := filepath.Join(top, "part.qcow2")
		table := filepath.Join(top, "table")
		must(t, exec.Command("cp", good, short).Run(), os.Truncate(short, st.Size()/2),
			os.WriteFile(table, append(make([]byte, 512), "EFI PART"...), 0o600), os.Truncate(table, 1<<20))
		qemu("create", "-f", "qcow2", "-F", "qcow2", "-b", good, part)
		qemu("convert", "-f", "raw", "-O", "qcow2", table, table+".qcow2")
		before := objects(t, e)
		for _, c := range []struct {
			file string
			kind errs.Kind
			hint string
		}{
			{short, errs.Damaged, "qemu-img check"}, {part, errs.Invalid, "qemu-img convert"},
			{table + ".qcow2", errs.Invalid, "losetup"},
		} {
			if _, err := bring("refused", c.file, ""); !errs.Is(err, c.kind) || !strings.Contains(errs.HintOf(err), c.hint) {
				t.Errorf("%s: %v (hint %q)", c.file, err, errs.HintOf(err))
			}
		}
		if after := objects(t, e); len(after) != len(before) {
			t.Errorf("left %v", after)
		}
		if _, err := bring("table", table+".qcow2", driver.None); err != nil {
			t.Error(err)
		}
	})
}
