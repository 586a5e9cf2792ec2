package treestream

import (
	"bytes"
	"flag"
	"os"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"

	"pando/internal/tree/treecopy"
)

var freeze = flag.Bool("freeze", false, "write the frozen streams: only for a new version of the format")

// frozenRecords has every kind of record.
func frozenRecords() (whole, diff []record) {
	full := treecopy.Attributes{
		Mode: unix.S_IFREG | 0o4750, UID: 1000, GID: 1 << 31, Atime: unix.Timespec{Sec: -1, Nsec: 999_999_999},
		Mtime: unix.Timespec{Sec: 1 << 33, Nsec: 1}, Flags: 0x40, Project: 7,
		Hints: treecopy.Hints{XFlags: 0x800, ExtentSize: 65536, CowExtentSize: 4096},
	}
	whole = []record{
		{kind: kindDir, path: "dir"},
		{kind: kindFile, path: "dir/file", size: 1 << 40, attrs: treecopy.Attributes{Flags: 0x800000}},
		{kind: kindData, off: 4096, data: []byte("content")},
		{kind: kindZero, off: 8192, size: 4096},
		{kind: kindXattr, target: "user.colour", data: []byte("red")},
		{kind: kindAttrs, path: "dir/file", typ: unix.S_IFREG, attrs: full},
		{kind: kindSymlink, path: "dir/link", target: "../anywhere"},
		{kind: kindNode, path: "null", typ: unix.S_IFCHR, rdev: unix.Mkdev(1, 3)},
		{kind: kindLink, path: "other\nname", typ: unix.S_IFREG, target: "dir/file"},
	}
	diff = []record{
		{kind: kindUnprotect, path: "a"},
		{kind: kindRemove, path: "a/old", typ: unix.S_IFREG},
		{kind: kindOut, path: "b", typ: unix.S_IFDIR, slot: 300},
		{kind: kindIn, path: "c", typ: unix.S_IFDIR, slot: 300},
		{kind: kindChange, path: "c/file", before: 100, size: 5000},
		{kind: kindData, off: 4096, data: []byte("new")},
		{kind: kindFlags, path: "", typ: unix.S_IFDIR, attrs: treecopy.Attributes{Mode: unix.S_IFDIR | 0o755, Flags: 0x10}},
	}
	return whole, diff
}

// TestFrozen: what version 1 of the format was, it is: frozen streams are written and read byte by byte as ever.
func TestFrozen(t *testing.T) {
	whole, diff := frozenRecords()
	for name, records := range map[string][]record{"testdata/v1.whole": whole, "testdata/v1.diff": diff} {
		isDiff := name == "testdata/v1.diff"
		written := forged(t, isDiff, records...)
		if *freeze {
			must(t, os.WriteFile(name, written, 0o644))
		}
		frozen, err := os.ReadFile(name)
		must(t, err)
		if !bytes.Equal(written, frozen) {
			t.Errorf("%s is written in another way", name)
		}
		d, err := newDecoder(bytes.NewReader(frozen))
		must(t, err)
		if d.diff != isDiff {
			t.Errorf("%s: a difference: %v", name, d.diff)
		}
		for i, want := range append(records, record{kind: kindEnd}) {
			got, err := d.readRecord()
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Fatalf("%s, record %d: %+v, %v, want %+v", name, i, got, err, want)
			}
		}
	}
}
