package engine_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/fsprobe"
	"pando/internal/linux/run"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// imageSource makes an image with a fresh filesystem.
func imageSource(t *testing.T, kind string) string {
	t.Helper()
	path, size, args := filepath.Join(t.TempDir(), kind+".img"), int64(64<<20), []string{"-q", "-b", "4096"}
	if kind == "xfs" {
		size, args = 320<<20, []string{"-q"}
	}
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, size)); err != nil {
		t.Fatal(err)
	}
	if _, err := run.Program(t.Context(), "mkfs."+kind, append(args, path)...); err != nil {
		t.Fatal(err)
	}
	return path
}

// imageWith returns a copy of an image with text at an offset.
func imageWith(t *testing.T, image string, off int64, text []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "damaged.img")
	if _, err := run.Program(t.Context(), "cp", "--sparse=always", image, path); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt(text, off)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// imageOf returns a copy of an image that ends after size bytes.
func imageOf(t *testing.T, image string, size int64) string {
	t.Helper()
	path := imageWith(t, image, 0, nil)
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
	return path
}

func objects(t *testing.T, e *engine.Engine) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(e.Dir(), "data", "objects"))
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, x := range entries {
		out = append(out, x.Name())
	}
	return out
}

// head is how an image begins: most of an ext4 of 64 MiB, and the part of an XFS
// that tests change.
func head(t *testing.T, path string) []byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 48<<20))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func probeImage(t *testing.T, path string) fsprobe.Result {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	res, err := fsprobe.Probe(f, st.Size())
	if err != nil {
		t.Fatal(err)
	}
	return res
}

// TestImportRefusesDamaged: an image that is not a whole filesystem is refused, and
// changes nothing; --force takes it as it is.
func TestImportRefusesDamaged(t *testing.T) {
	e := imagePool(t, "xfs", 2<<30)
	ext4, xfs := imageSource(t, "ext4"), imageSource(t, "xfs")
	zeros, junk := make([]byte, 4096), bytes.Repeat([]byte{0x5a}, 512)
	backed := imageSource(t, "ext4") // a second block group has a backup superblock
	if _, err := run.Program(t.Context(), "mkfs.ext4", "-q", "-F", "-b", "1024", backed); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, image, text string
		kind              errs.Kind
	}{
		{"short ext4", imageOf(t, ext4, 40<<20), "24 MiB is missing", errs.Damaged},
		{"ext4 without its last byte", imageOf(t, ext4, 64<<20-1), "1 byte is missing", errs.Damaged},
		{"short XFS", imageOf(t, xfs, 200<<20), "120 MiB is missing", errs.Damaged},
		{"superblock of ext4", imageWith(t, ext4, 1024+8, junk[:4]), "checksum of its superblock", errs.Damaged},
		{"superblock of XFS", imageWith(t, xfs, 140, junk[:4]), "checksum of its superblock", errs.Damaged},
		{"no superblock of ext4", imageWith(t, backed, 1024, zeros[:1024]), "there is a backup at byte 8389632",
			errs.Damaged},
		{"no superblock of XFS", imageWith(t, xfs, 0, zeros), "there is a backup at byte", errs.Damaged},
		{"groups of ext4", imageWith(t, ext4, 4096, junk), "filesystem is damaged: ", errs.Damaged},
		{"free space of XFS", imageWith(t, xfs, 512, junk), "filesystem is damaged: ", errs.Damaged},
	} {
		t.Run(c.name, func(t *testing.T) {
			files, rows := objects(t, e), dump(t, e.Dir())
			_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: c.image})
			if !errs.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) ||
				!strings.Contains(errs.HintOf(err), `parameter "force"`) {
				t.Errorf("%v (hint %q), wanted %s with %q", err, errs.HintOf(err), c.kind, c.text)
			}
			if got := objects(t, e); !slices.Equal(got, files) {
				t.Errorf("before %v, after %v", files, got)
			}
			sameDump(t, "refused", rows, dump(t, e.Dir()))

			out, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: c.image, Force: true})
			if err != nil {
				t.Fatal(err)
			}
			want, got := head(t, c.image), head(t, imageFile(t, e, "g"))
			if !bytes.Equal(want, got[:len(want)]) || len(bytes.Trim(got[len(want):], "\x00")) > 0 {
				t.Error("the forced import is another")
			}
			if (len(out.Warnings) == 0) != strings.Contains(c.text, "filesystem is damaged") {
				t.Errorf("warnings: %q", out.Warnings)
			}
			if _, err := e.RemoveGolden(t.Context(), reference(t, "g")); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestImportOfCrash: an image of a machine that crashed is whole: its log is
// replayed, in the copy.
func TestImportOfCrash(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs"} {
		t.Run(kind, func(t *testing.T) {
			e := imagePool(t, "xfs", 2<<30)
			if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"),
				Source: imageSource(t, kind)}); err != nil {
				t.Fatal(err)
			}
			v := clone(t, e, "g", "v", true)
			for i := range 100 {
				f, err := os.Create(filepath.Join(v.Mountpoint, strings.Repeat("x", i+1)))
				if err == nil {
					_, err = f.WriteString("content")
					err = errors.Join(err, f.Sync(), f.Close())
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			image := imageWith(t, imageFile(t, e, "v"), 0, nil) // while it is mounted
			before, err := os.Stat(image)
			if err != nil {
				t.Fatal(err)
			}
			if kind == "ext4" && !probeImage(t, image).Dirty {
				t.Error("the journal is clean: nothing is tested")
			}
			out, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("crashed"), Source: image})
			if err != nil || len(out.Warnings) > 0 {
				t.Fatalf("%v %v", out.Warnings, err)
			}
			if after, err := os.Stat(image); err != nil || !after.ModTime().Equal(before.ModTime()) {
				t.Errorf("the source was changed (%v)", err)
			}
			if probeImage(t, imageFile(t, e, "crashed")).Dirty {
				t.Error("the journal was not replayed")
			}
			w := clone(t, e, "crashed", "w", true)
			for i := range 100 {
				if b, err := os.ReadFile(filepath.Join(w.Mountpoint, strings.Repeat("x", i+1))); err != nil ||
					string(b) != "content" {
					t.Fatalf("file %d: %q, %v", i, b, err)
				}
			}
		})
	}
}

// TestImportCleanImage: an image that needs no replay is imported bit by bit.
func TestImportCleanImage(t *testing.T) {
	e := imagePool(t, "xfs", 1<<30)
	for _, kind := range []string{"ext4", "xfs"} {
		image := imageSource(t, kind)
		if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName(kind), Source: image}); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(head(t, image), head(t, imageFile(t, e, kind))) {
			t.Errorf("%s: the golden is another", kind)
		}
	}
}

// TestImportWithoutChecker: where e2fsck or xfs_repair is missing, or too old, the
// superblock is checked all the same, and a warning says that no more was.
func TestImportWithoutChecker(t *testing.T) {
	e := imagePool(t, "xfs", 1<<30)
	future := imageSource(t, "ext4")
	if _, err := run.Program(t.Context(), "debugfs", "-w", "-R", "feature FEATURE_I30", future); err != nil {
		t.Fatal(err)
	}
	out, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("future"), Source: future})
	if err != nil || len(out.Warnings) != 1 || !strings.Contains(out.Warnings[0].String(),
		"e2fsck does not know all features") {
		t.Errorf("with a feature that nobody knows: %q, %v", out.Warnings, err)
	}
	engine.HideProgram(t, "e2fsck")
	engine.HideProgram(t, "xfs_repair")
	for _, kind := range []string{"ext4", "xfs"} {
		image := imageSource(t, kind)
		out, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName(kind), Source: image})
		if err != nil || len(out.Warnings) != 1 || !strings.Contains(out.Warnings[0].String(), "was not checked") ||
			!strings.Contains(out.Warnings[0].String(), "apt-get install") {
			t.Errorf("%s: %q, %v", kind, out.Warnings, err)
		}
		if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("short"),
			Source: imageOf(t, image, 32<<20)}); !errs.Is(err, errs.Damaged) {
			t.Errorf("a short %s: %v", kind, err)
		}
	}
	broken := imageWith(t, imageSource(t, "xfs"), 512, bytes.Repeat([]byte{0x5a}, 512))
	if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("broken"), Source: broken}); !errs.Is(err,
		errs.Damaged) {
		t.Errorf("an XFS that cannot be mounted: %v", err)
	}
}

// TestImportDevice: a block device that somebody uses is not read under their hands.
func TestImportDevice(t *testing.T) {
	e := imagePool(t, "xfs", 1<<30)
	fs := testfs.New(t, "ext4", 32<<20)
	dev := "/dev/" + fs.Device()
	_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: dev})
	if !errs.Is(err, errs.InUse) || errs.HintOf(err) == "" {
		t.Fatalf("%v, wanted InUse", err)
	}
	if err := os.WriteFile(filepath.Join(fs.Dir(), "file"), []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	d, err := os.Open(fs.Dir())
	if err == nil {
		err = errors.Join(unix.Syncfs(int(d.Fd())), d.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	out, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: dev, Force: true})
	if err != nil || out.FS != driver.Ext4 || out.SizeBytes != 32<<20 {
		t.Fatalf("%+v, %v", out, err)
	}
	v := clone(t, e, "g", "v", true)
	if b, err := os.ReadFile(filepath.Join(v.Mountpoint, "file")); err != nil || string(b) != "content" {
		t.Errorf("%q, %v", b, err)
	}
}

// TestImportUnknown: what is neither an archive nor an ext4 or XFS becomes a raw
// golden only if that was asked for.
func TestImportUnknown(t *testing.T) {
	e := imagePool(t, "xfs", 1<<30)
	dir := t.TempDir()
	file := func(name, content string, size int64) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(path, []byte(content), 0o600),
			os.Truncate(path, max(size, int64(len(content))))); err != nil {
			t.Fatal(err)
		}
		return path
	}
	btrfs := strings.Repeat("\x00", 65536+64) + "_BHRfS_M"
	for _, c := range []struct{ path, text, hint string }{
		{file("vm image.qcow2", "QFI\xfb\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x01\x00", 1<<20), "a qcow2 disk image",
			"ask its maker for a raw image"},
		{file("btrfs", btrfs, 1<<20), "a btrfs image", "mount -o ro "},
		{file("gpt", strings.Repeat("\x00", 512)+"EFI PART", 1<<20), "GPT partition table", "losetup -r -P -f --show "},
		{file("luks", "LUKS\xba\xbe", 1<<20), "encrypted with LUKS", "open it with"},
		{file("zip", "PK\x03\x04", 1<<20), "a zip archive", "unpack it"},
		{file("text", strings.Repeat("text\n", 4096), 0), "a text file", "a tar archive"},
		{file("zeros", "", 1<<20), "no archive or filesystem that Pando recognizes", "a tar archive"},
	} {
		files := objects(t, e)
		for _, force := range []bool{false, true} {
			_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: c.path, Force: force})
			if hint := errs.HintOf(err); !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), c.text) ||
				!strings.Contains(hint, c.hint) ||
				strings.Contains(hint, `parameter "fs" set to none`) == strings.Contains(c.text, "qcow2") {
				t.Errorf("%s: %v (hint %q)", c.path, err, hint)
			}
		}
		if got := objects(t, e); !slices.Equal(got, files) {
			t.Errorf("%s: left %v", c.path, got)
		}
		out, err := e.Import(t.Context(),
			engine.ImportRequest{Name: ref.MustName(filepath.Base(strings.ReplaceAll(c.path, " ", ""))), Source: c.path,
				FS: driver.None})
		if st, serr := os.Stat(c.path); err != nil || serr != nil || out.FS != driver.None ||
			out.SizeBytes != (st.Size()+4095)/4096*4096 ||
			(len(out.Warnings) == 1) != strings.Contains(c.text, "qcow2") {
			t.Errorf("%s: %+v, %v", c.path, out, err)
		}
	}
	// An image of standard input is no archive, although it begins like an empty one.
	for _, path := range []string{imageSource(t, "ext4"), filepath.Join(dir, "btrfs"), filepath.Join(dir, "zeros")} {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		_, err = e.ImportStream(t.Context(), engine.ImportRequest{Name: ref.MustName("g")}, f)
		f.Close()
		if !errs.Is(err, errs.Invalid) || errs.HintOf(err) == "" {
			t.Errorf("%s on standard input: %v", path, err)
		}
	}
}

// TestImportSaysWhatIsWrong: of what e2fsck says only that which is wrong is in the error.
func TestImportSaysWhatIsWrong(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
		image := imageSource(t, "ext4")
		_, err := run.Program(t.Context(), "debugfs", "-w", "-R", "sif <2> blocks 100", image)
		must(t, err)
		_, err = e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: image})
		const wrong = "its filesystem is damaged: Inode 2, i_blocks is 100, should be 8"
		if !errs.Is(err, errs.Damaged) || !strings.HasSuffix(err.Error(), wrong) {
			t.Errorf("%v, wanted %q", err, wrong)
		}
	})
}
