package fsprobe

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// image makes a file of size bytes and runs a program on it.
func image(t *testing.T, size int64, name string, args ...string) *os.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if _, err := exec.LookPath(name); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	if out, err := exec.Command(name, append(args, path)...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", name, err, out)
	}
	return f
}

func probe(t *testing.T, f *os.File) Result {
	t.Helper()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	res, err := Probe(f, st.Size())
	if err != nil {
		t.Fatal(err)
	}
	return res
}

var filesystems = []struct {
	name   string
	size   int64
	mkfs   []string
	kind   string
	sector uint32
	backup int64 // where a backup superblock is found; 0: there is none
}{
	{"ext4", 256 << 20, []string{"mkfs.ext4", "-q", "-b", "4096"}, "ext4", 4096, 32768 * 4096},
	{"ext4, 1 KiB blocks", 32 << 20, []string{"mkfs.ext4", "-q", "-b", "1024"}, "ext4", 1024, 8193 * 1024},
	{"ext4, 2 KiB blocks", 64 << 20, []string{"mkfs.ext4", "-q", "-b", "2048"}, "ext4", 2048, 16384 * 2048},
	{"ext4 without checksums", 256 << 20, []string{"mkfs.ext4", "-q", "-b", "4096", "-O", "^metadata_csum"}, "ext4", 4096,
		32768 * 4096},
	{"ext4 with clusters", 256 << 20, []string{"mkfs.ext4", "-q", "-b", "4096", "-O", "bigalloc"}, "ext4", 4096, 0},
	{"ext3", 64 << 20, []string{"mkfs.ext3", "-q", "-b", "1024"}, "ext4", 1024, 8193 * 1024},
	{"ext2", 16 << 20, []string{"mkfs.ext2", "-q", "-b", "1024"}, "ext4", 1024, 8193 * 1024},
	{"ext2 of revision 0", 4 << 20, []string{"mkfs.ext2", "-q", "-r", "0"}, "ext4", 1024, 0},
	{"xfs", 320 << 20, []string{"mkfs.xfs", "-q"}, "xfs", 512, 160 << 20},
	{"xfs, 4 KiB sectors", 320 << 20, []string{"mkfs.xfs", "-q", "-s", "size=4096"}, "xfs", 4096, 160 << 20},
	{"xfs of version 4", 320 << 20, []string{"mkfs.xfs", "-q", "-m", "crc=0"}, "xfs", 512, 160 << 20},
}

func TestProbe(t *testing.T) {
	for _, c := range filesystems {
		t.Run(c.name, func(t *testing.T) {
			f := image(t, c.size, c.mkfs[0], c.mkfs[1:]...)
			whole := probe(t, f)
			if want := (Result{Type: c.kind, SectorBytes: c.sector, Bytes: c.size}); whole != want {
				t.Fatalf("whole: %+v, wanted %+v", whole, want)
			}
			// Without its first superblock the backup tells.
			head, err := readAt(f, 0, 4096)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.WriteAt(make([]byte, 4096), 0); err != nil {
				t.Fatal(err)
			}
			want := Result{Type: c.kind, SectorBytes: c.sector, Damage: "its superblock is gone", Backup: c.backup}
			if c.backup == 0 {
				want = Result{}
			}
			if gone := probe(t, f); gone != want {
				t.Errorf("without its superblock: %+v, wanted %+v", gone, want)
			}
			if _, err := f.WriteAt(head, 0); err != nil {
				t.Fatal(err)
			}
			// Its size is that of the filesystem, however short the image is.
			if err := f.Truncate(c.size / 2); err != nil {
				t.Fatal(err)
			}
			if short := probe(t, f); short != whole {
				t.Errorf("truncated: %+v", short)
			}
		})
	}
}

func TestLogged(t *testing.T) {
	for _, c := range filesystems {
		want := c.kind == "xfs" || c.name != "ext2" && c.name != "ext2 of revision 0"
		f := image(t, c.size, c.mkfs[0], c.mkfs[1:]...)
		if got, err := Logged(f); err != nil || got != want {
			t.Errorf("%s: %v, %v", c.name, got, err)
		}
	}
	f := image(t, 64<<20, "mkfs.ext4", "-q")
	if out, err := exec.Command("tune2fs", "-o", "journal_data_writeback", f.Name()).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got, err := Logged(f); err != nil || got {
		t.Errorf("in writeback mode: %v, %v", got, err)
	}
	empty := image(t, 64<<20, "true")
	if got, err := Logged(empty); err != nil || got {
		t.Errorf("nothing: %v, %v", got, err)
	}
}

// TestDamagedSuperblock flips each bit of a superblock with a checksum: nothing of
// it is believed then.
func TestDamagedSuperblock(t *testing.T) {
	for _, i := range []int{0, 9} {
		c := filesystems[i]
		t.Run(c.name, func(t *testing.T) {
			f := image(t, c.size, c.mkfs[0], c.mkfs[1:]...)
			b, err := readAt(f, 0, superblockBytes)
			if err != nil {
				t.Fatal(err)
			}
			from, to := extOffset, extOffset+extBytes
			if c.kind == "xfs" {
				from, to = 0, 4096
			}
			for bit := from * 8; bit < to*8; bit++ {
				b[bit/8] ^= 1 << (bit % 8)
				res := probeXFS(b)
				if res.Type == "" {
					res = probeExt(b, extOffset)
				}
				// One bit of each says that there is a checksum at all.
				unsure := bit == (extOffset+101)*8+2 || c.kind == "xfs" && bit/8 == 101
				if res.Type != "" && (res.Damage == "" || res.Bytes != 0) && !unsure {
					t.Errorf("bit %d of byte %d: %+v", bit%8, bit/8, res)
				}
				b[bit/8] ^= 1 << (bit % 8)
			}
		})
	}
}

// TestImpossibleSuperblock writes values that cannot be into superblocks without
// checksums.
func TestImpossibleSuperblock(t *testing.T) {
	ext := image(t, filesystems[3].size, "mkfs.ext4", filesystems[3].mkfs[1:]...)
	xfs := image(t, filesystems[10].size, "mkfs.xfs", filesystems[10].mkfs[1:]...)
	for _, c := range []struct {
		what  string
		f     *os.File
		off   int64
		value []byte
	}{
		{"inodes", ext, 1024, []byte{1, 2, 3, 4}},
		{"blocks", ext, 1024 + 4, make([]byte, 4)},
		{"first block", ext, 1024 + 20, []byte{9}},
		{"blocks in a group", ext, 1024 + 32, []byte{0xff, 0xff, 0xff, 0xff}},
		{"no blocks in a group", ext, 1024 + 32, make([]byte, 4)},
		{"inodes in a group", ext, 1024 + 40, make([]byte, 4)},
		{"size of inodes", ext, 1024 + 88, []byte{3, 1}},
		{"upper half of blocks", ext, 1024 + 336, bytes.Repeat([]byte{0xff}, 4)},
		{"size of blocks", xfs, 4, []byte{0, 0, 9, 9}},
		{"blocks", xfs, 8, bytes.Repeat([]byte{0xff}, 8)},
		{"no blocks", xfs, 8, make([]byte, 8)},
		{"blocks in a group", xfs, 84, make([]byte, 4)},
		{"groups", xfs, 88, []byte{1, 0, 0, 0}},
		{"version", xfs, 101, []byte{0xb7}},
		{"sectors", xfs, 102, []byte{0xff, 0xff}},
		{"inodes", xfs, 104, make([]byte, 2)},
		{"shift of blocks", xfs, 120, []byte{200}},
		{"shift of sectors", xfs, 121, []byte{200}},
		{"unfinished", xfs, 126, []byte{1}},
	} {
		before, err := readAt(c.f, c.off, len(c.value))
		if err != nil {
			t.Fatal(err)
		}
		_, err1 := c.f.WriteAt(c.value, c.off)
		if res := probe(t, c.f); res.Damage == "" || res.Bytes != 0 || res.SectorBytes < 512 {
			t.Errorf("%s: %+v", c.what, res)
		}
		_, err2 := c.f.WriteAt(before, c.off)
		if err := errors.Join(err1, err2); err != nil {
			t.Fatal(err)
		}
	}
}

func TestElsewhere(t *testing.T) {
	ext := image(t, 64<<20, "mkfs.ext4", "-q")
	xfs := image(t, 320<<20, "mkfs.xfs", "-q", "-m", "crc=0")
	_, err1 := ext.WriteAt(make([]byte, 4), 1024+224)
	_, err2 := xfs.WriteAt(make([]byte, 8), 48)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	if res := probe(t, ext); res.Elsewhere != "journal" {
		t.Errorf("%+v", res)
	}
	if res := probe(t, xfs); res.Elsewhere != "log" {
		t.Errorf("%+v", res)
	}
}

// at is a file that is zero but for a text.
func at(off int, text string) []byte {
	b := make([]byte, max(off+len(text), 128<<10))
	copy(b[off:], text)
	return b
}

func TestIdentify(t *testing.T) {
	mbr := at(510, "\x55\xaa")
	mbr[446+4] = 0x83
	binary.LittleEndian.PutUint32(mbr[446+12:], 2048)
	journal := at(1024+56, "\x53\xef")
	journal[1024+96] = 8
	fixedVHD := append(make([]byte, 1<<20), at(0, "conectix")[:512]...)
	for _, c := range []struct {
		b    []byte
		want string
	}{
		{at(0, "QFI\xfb\x00\x00\x00\x03"), "qcow2"},
		{at(0, "KDMV"), "vmdk"},
		{[]byte("# Disk DescriptorFile\nversion=1\n"), "vmdk"},
		{at(0, "vhdxfile"), "vhdx"},
		{at(0, "conectix"), "vpc"},
		{fixedVHD, "vpc"},
		{at(0, "LUKS\xba\xbe"), "LUKS"},
		{at(512, "LABELONE"), "LVM"},
		{at(4096, "\xfc\x4e\x2b\xa9"), "MD"},
		{at(32769, "CD001"), "iso9660"},
		{at(0, "hsqs"), "squashfs"},
		{at(1024, "\xe2\xe1\xf5\xe0"), "erofs"},
		{at(1024, "\x10\x20\xf5\xf2"), "f2fs"},
		{at(3, "NTFS    "), "ntfs"},
		{at(82, "FAT32   "), "vfat"},
		{at(4096+24, "\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"), "bcachefs"},
		{at(132<<10, "\x0c\xb1\xba\x00\x00\x00\x00\x00"), "zfs"},
		{at(132<<10, "\x00\x00\x00\x00\x00\xba\xb1\x0c"), "zfs"},
		{at(512, "EFI PART"), "GPT"},
		{mbr, "MBR"},
		{at(510, "\x55\xaa"), ""}, // a boot sector without partitions
		{journal, "ext4 journal"},
		{[]byte("neither this nor that\n"), "text"},
		{bytes.Repeat([]byte("ä\n€"), 4096), "text"},
		{make([]byte, 1<<20), ""},
		{[]byte{0, 1, 2, 3}, ""},
	} {
		got, err := Identify(bytes.NewReader(c.b), int64(len(c.b)))
		if err != nil || got.Name != c.want || (got.Class == Unknown) != (c.want == "") ||
			(got.Phrase == "") != (c.want == "") {
			t.Errorf("%+v, %v; wanted %q", got, err, c.want)
		}
		if res, err := Probe(bytes.NewReader(c.b), int64(len(c.b))); err != nil || res.Type != "" {
			t.Errorf("%s: probed as %+v, %v", c.want, res, err)
		}
	}
}

// TestIdentifyReal looks at what real programs make.
func TestIdentifyReal(t *testing.T) {
	for _, c := range []struct {
		size int64
		run  []string
		want string
	}{
		{128 << 20, []string{"mkfs.btrfs", "-q"}, "btrfs"},
		{1 << 20, []string{"mkswap"}, "swap"},
		{16 << 20, []string{"sh", "-c", `echo 'start=2048, type=83' | sfdisk -q "$0"`}, "MBR"},
		{16 << 20, []string{"sh", "-c", `echo 'label: gpt' | sfdisk -q "$0"`}, "GPT"},
	} {
		t.Run(c.want, func(t *testing.T) {
			f := image(t, c.size, c.run[0], c.run[1:]...)
			got, err := Identify(f, c.size)
			if err != nil || got.Name != c.want {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
}

type failing struct{ io.ReaderAt }

func (failing) ReadAt([]byte, int64) (int, error) { return 0, os.ErrPermission }

func TestReadError(t *testing.T) {
	if _, err := Probe(failing{}, 1<<20); !errors.Is(err, os.ErrPermission) {
		t.Error(err)
	}
	if _, err := Identify(failing{}, 1<<20); !errors.Is(err, os.ErrPermission) {
		t.Error(err)
	}
}

// FuzzProbe: whatever an image says, the answer is one that can be.
func FuzzProbe(f *testing.F) {
	noise := make([]byte, 8192)
	_, _ = rand.Read(noise) // never fails
	f.Add(noise)
	f.Add(append([]byte("XFSB"), noise...))
	f.Add(append(append(make([]byte, 1024+56), 0x53, 0xef), noise...))
	f.Fuzz(func(t *testing.T, b []byte) {
		res, err := Probe(bytes.NewReader(b), int64(len(b)))
		if err != nil || res.Bytes < 0 || res.Type != "" && !powerOfTwo(res.SectorBytes, 512, 32<<10) || res.Damage != "" &&
			res.Bytes != 0 {
			t.Errorf("%+v, %v", res, err)
		}
		if _, err := Identify(bytes.NewReader(b), int64(len(b))); err != nil {
			t.Error(err)
		}
	})
}
