package treecopy

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
)

// archive returns WriteTar's archive of a directory.
func archive(t *testing.T, dir string) ([]byte, Totals) {
	t.Helper()
	var b bytes.Buffer
	got, err := WriteTar(bg, &b, openFile(t, dir), Options{})
	must(t, err)
	return b.Bytes(), got
}

// removeSockets removes the sockets below dir, which tar cannot store.
func removeSockets(t *testing.T, dir string) (n int) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.Type()&os.ModeSocket == 0 {
			return err
		}
		n++
		var st unix.Stat_t
		if err := unix.Stat(filepath.Dir(path), &st); err != nil {
			return err
		}
		if err := os.Remove(path); err != nil {
			return err
		}
		return os.Chtimes(filepath.Dir(path), time.Unix(st.Atim.Unix()), time.Unix(st.Mtim.Unix()))
	}))
	return n
}

// shortenHuge makes Build's sparse file of 1 TiB one of 16 GiB, with data in the middle as before: Untar reads holes as
// zeros, which takes a minute for 1 TiB. The new offsets still need more than 32 bits.
func shortenHuge(t *testing.T, dir string) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "sparse/huge"), os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	var st unix.Stat_t
	must(t, unix.Fstat(int(f.Fd()), &st))
	data := make([]byte, 4096)
	_, err = f.ReadAt(data, st.Size/2)
	must(t, err)
	must(t, f.Truncate(16<<30))
	_, err = f.WriteAt(data, 8<<30)
	must(t, err)
	must(t, f.Sync())
	must(t, os.Chtimes(f.Name(), time.Unix(st.Atim.Unix()), time.Unix(st.Mtim.Unix())))
}

// TestTarRoundTrip: an archive makes the same tree again, with everything that a tree can have.
func TestTarRoundTrip(t *testing.T) {
	needRoot(t)
	for _, kind := range []string{"ext4", "btrfs"} { // on XFS, see TestTarOfOthers
		t.Run(kind, func(t *testing.T) {
			top := testfs.New(t, kind, 512<<20).Dir()
			a, b := filepath.Join(top, "a"), filepath.Join(top, "b")
			must(t, os.Mkdir(a, 0o755))
			must(t, os.Mkdir(b, 0o755))
			treetest.Build(t, a)

			sockets := int64(0)
			_, totals := archive(t, a)
			if !testfs.Full() {
				shortenHuge(t, a)
			}
			for _, n := range totals.NotKept {
				if n.What == LostSockets {
					sockets = n.Count
				}
			}
			if want := removeSockets(t, a); sockets != int64(want) || want == 0 {
				t.Errorf("%d sockets are counted, there are %d", sockets, want)
			}

			packed, totals := archive(t, a)
			got, err := Untar(bg, bytes.NewReader(packed), openFile(t, b), Options{OwnRoot: true})
			must(t, err)
			treetest.Compare(t, a, b, 0)
			if got.Files != totals.Files || len(got.NotKept)+len(totals.NotKept) > 0 || totals.Skipped.Any() {
				t.Errorf("unpacked %+v of %+v", got, totals)
			}
		})
	}
}

// TestTarOfOthers: GNU tar makes the same tree of an archive.
func TestTarOfOthers(t *testing.T) {
	needRoot(t)
	needTool(t, "tar")
	top := testfs.New(t, "xfs", 512<<20).Dir()
	a, b := filepath.Join(top, "a"), filepath.Join(top, "b")
	must(t, os.Mkdir(a, 0o755))
	must(t, os.Mkdir(b, 0o755))
	treetest.Build(t, a)
	removeSockets(t, a)
	packed, _ := archive(t, a)
	file := filepath.Join(top, "archive.tar")
	must(t, os.WriteFile(file, packed, 0o600))
	run(t, b, "tar", "--numeric-owner", "--acls", "--xattrs", "--xattrs-include=*", "--atime-preserve", "-xpf", file)
	treetest.Compare(t, a, b, treetest.Atime)
}

// TestTarFlags: flags are kept, and what tar cannot store is counted.
func TestTarFlags(t *testing.T) {
	needRoot(t)
	top := testfs.New(t, "ext4", 128<<20).Dir()
	a, b := filepath.Join(top, "a"), filepath.Join(top, "b")
	must(t, os.Mkdir(a, 0o755))
	must(t, os.Mkdir(b, 0o755))
	treetest.BuildFlags(t, a, treetest.Immutable|treetest.Append|treetest.NoDump|treetest.NoAtime, false)
	must(t, os.WriteFile(filepath.Join(a, "odd"), nil, 0o600))
	must(t, unix.Setxattr(filepath.Join(a, "odd"), "user.a=b", []byte("1"), 0))
	packed, totals := archive(t, a)
	if totals.Skipped.Xattrs != 1 {
		t.Errorf("%+v", totals)
	}
	must(t, unix.Removexattr(filepath.Join(a, "odd"), "user.a=b"))
	treetest.Removable(t, b)
	_, err := Untar(bg, bytes.NewReader(packed), openFile(t, b), Options{OwnRoot: true})
	must(t, err)
	treetest.Compare(t, a, b, 0)
}

// TestTarHoles: the map of a file with very many holes stays short enough for readers.
func TestTarHoles(t *testing.T) {
	needRoot(t)
	top := testfs.New(t, "xfs", 512<<20).Dir()
	a, b := filepath.Join(top, "a"), filepath.Join(top, "b")
	must(t, os.Mkdir(a, 0o755))
	must(t, os.Mkdir(b, 0o755))
	f, err := os.Create(filepath.Join(a, "file"))
	must(t, err)
	for i := range int64(20000) {
		_, err := fmt.Fprintf(io.NewOffsetWriter(f, i*8192+(i/100)*1<<20), "block %d", i)
		must(t, err)
	}
	must(t, f.Truncate(1<<40))
	must(t, f.Sync())
	must(t, f.Close())
	must(t, os.Symlink(strings.Repeat("x/", 500), filepath.Join(a, strings.Repeat("é", 120))))
	must(t, os.Chtimes(a, time.Unix(1, 0), time.Unix(-2, 5e8)))
	packed, _ := archive(t, a)
	if len(packed) > 220<<20 {
		t.Errorf("the archive has %d bytes", len(packed))
	}

	// Reading a TiB of holes takes a minute, so compare a shorter file.
	must(t, os.Truncate(filepath.Join(a, "file"), 1<<30))
	packed, _ = archive(t, a)
	_, err = Untar(bg, bytes.NewReader(packed), openFile(t, b), Options{OwnRoot: true})
	must(t, err)
	treetest.Compare(t, a, b, treetest.Holes) // XFS reserves space at the end of a file that grows
}

// TestPaxTime: times are written as Go reads them.
func TestPaxTime(t *testing.T) {
	for want, ts := range map[string]unix.Timespec{
		"0": {}, "1.5": {Sec: 1, Nsec: 5e8}, "-1.5": {Sec: -2, Nsec: 5e8}, "-0.000000001": {Sec: -1, Nsec: 999999999},
		"-3": {Sec: -3}, "12.000000009": {Sec: 12, Nsec: 9},
	} {
		if got := paxTime(ts); got != want {
			t.Errorf("%v: %s, wanted %s", ts, got, want)
		}
	}
}
