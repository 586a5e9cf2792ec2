package treediff

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pando/internal/testing/testfs"
)

// inodeAt is what statAt says of a path.
func inodeAt(t *testing.T, path string) inode {
	t.Helper()
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	i, err := statAt(dir, filepath.Base(path), path)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// twins are two copies of one tree that were changed at the same time. Each has two files
// and a directory of its own that were made in the opposite order, so that what has one
// number and one time of birth in both has two names; a file under a name that only it has;
// and other text in a file of the origin. parted is when the trees parted, or a little before.
func twins(t *testing.T, w world) (a, b string, parted time.Time) {
	t.Helper()
	origin := w.empty()
	if err := os.WriteFile(filepath.Join(origin, "before"), []byte("origin"), 0o644); err != nil {
		t.Fatal(err)
	}
	w.settle(origin)
	// The clock goes on in ticks: not every try is within one.
	for range 100 {
		parted = time.Now()
		a, b = w.copy(origin), w.copy(origin)
		must := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		change := func(tree, only, text string, names []string) {
			must(os.WriteFile(filepath.Join(tree, names[0]), []byte(names[0]+text), 0o644))
			must(os.WriteFile(filepath.Join(tree, names[1]), []byte(names[1]+text), 0o644))
			must(os.Mkdir(filepath.Join(tree, names[2]), 0o755))
			must(os.Mkdir(filepath.Join(tree, names[3]), 0o755))
			must(os.WriteFile(filepath.Join(tree, only), nil, 0o644))
			f, err := os.OpenFile(filepath.Join(tree, "before"), os.O_WRONLY, 0)
			must(err)
			_, err = f.WriteAt([]byte(text), 0)
			must(err)
			must(f.Close())
		}
		change(a, "onlya", "text a", []string{"x", "y", "u", "v"})
		change(b, "onlyb", "text b", []string{"y", "x", "v", "u"})
		same := true
		for x, y := range map[string]string{"x": "y", "y": "x", "u": "v", "v": "u", "onlya": "onlyb", "before": "before",
			".": "."} {
			i, j := inodeAt(t, filepath.Join(a, x)), inodeAt(t, filepath.Join(b, y))
			same = same && (i.ino == j.ino || x == ".") && i.btime == j.btime && i.ctime == j.ctime
		}
		if same {
			w.settle(a)
			w.settle(b)
			return a, b, parted
		}
	}
	t.Fatal("two trees were never changed at the same time: this test shows nothing")
	return
}

// TestTwins: what both trees changed and made for themselves is not the same for having one
// number, one time of birth and one time of change.
func TestTwins(t *testing.T) {
	for _, c := range []struct {
		name, method string
		world        func(t *testing.T) world
		noHints      bool
		noTime       bool // it is not known when the trees parted
	}{
		{"btrfs", "btrfs", snapshots, false, false},
		{"btrfs by generation", "btrfs", snapshots, false, true},
		{"btrfs without hints", "walk", snapshots, true, false},
		{"ext4", "ext4", func(t *testing.T) world { return images(t, "ext4", blockArgs["ext4"]...) }, false, false},
		{"ext4 without hints", "walk", func(t *testing.T) world {
			return images(t, "ext4", blockArgs["ext4"]...)
		}, true, false},
		{"xfs", "walk", func(t *testing.T) world { return images(t, "xfs", blockArgs["xfs"]...) }, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := c.world(t)
			a, b, parted := twins(t, w)
			o := Options{SameOrigin: true, Younger: parted}
			if c.noTime {
				o.Younger = time.Time{}
			}
			if !c.noHints {
				w.hints(a, b, &o)
			}
			r := compareTrees(t, a, b, o)
			var got []string
			for _, ch := range r.Changes {
				got = append(got, fmt.Sprint(ch.Op, " ", ch.Path))
			}
			if want := []string{"modified before", "deleted onlya", "added onlyb", "modified x",
				"modified y"}; !slices.Equal(got, want) || r.Stats.Method != c.method {
				t.Errorf("by %q: %q, wanted %q", r.Stats.Method, got, want)
			}
		})
	}
}

// TestBornBefore: what was made before the trees parted is recognised under another name,
// however new it is, where generations tell.
func TestBornBefore(t *testing.T) {
	for name, world := range map[string]func(t *testing.T) world{
		"btrfs": snapshots,
		"ext4":  func(t *testing.T) world { return images(t, "ext4", blockArgs["ext4"]...) },
	} {
		t.Run(name, func(t *testing.T) {
			w := world(t)
			a := w.empty()
			o := Options{SameOrigin: true, Younger: time.Now()} // before what is made next
			old := filepath.Join(a, "old")
			if err := os.WriteFile(old, []byte("text"), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink("to", old+"link"); err != nil {
				t.Fatal(err)
			}
			w.settle(a)
			b := w.copy(a)
			for _, p := range []string{"old", "oldlink"} {
				if err := os.Rename(filepath.Join(b, p), filepath.Join(b, "new"+p)); err != nil {
					t.Fatal(err)
				}
			}
			w.settle(b)
			w.hints(a, b, &o)
			r := compareTrees(t, a, b, o)
			if len(r.Changes) != 2 || r.Changes[0].Op != Renamed || r.Changes[1].Op != Renamed || r.Changes[0].Content {
				t.Errorf("%+v", r.Changes)
			}
		})
	}
}

// TestGeneration: what file handles say is what the kernel says by another call.
func TestGeneration(t *testing.T) {
	const getVersion = 0x80087601 // FS_IOC_GETVERSION
	for kind, want := range map[string]generationKind{"ext4": uniqueGenerations, "xfs": commonGenerations,
		"btrfs": commonGenerations, "tmpfs": noGenerations} {
		t.Run(kind, func(t *testing.T) {
			top := testfs.New(t, kind, 320<<20).Dir()
			if err := os.WriteFile(filepath.Join(top, "file"), nil, 0o644); err != nil {
				t.Fatal(err)
			}
			dir, f := openDir(t, top), openDir(t, filepath.Join(top, "file"))
			k, err := generationsOf(dir)
			if err != nil || k != want {
				t.Fatal(k, err)
			}
			got, itself := k.readGeneration(dir, "file"), k.readGeneration(f, "")
			if got != itself || got.known != (k != noGenerations) {
				t.Fatalf("%+v by name, %+v by descriptor", got, itself)
			}
			if !got.known {
				return
			}
			if n, err := unix.IoctlGetInt(int(f.Fd()), getVersion); err != nil || uint32(n) != uint32(got.n) {
				t.Errorf("generation %d, the kernel says %d, %v", got.n, uint32(n), err)
			}
		})
	}
	for typ, n := range map[int32]int{1: 7, 0x81: 11, 0x4d: 19, 2: 40} { // too short, and unknown
		if g := parseHandle(typ, make([]byte, n)); g.known {
			t.Errorf("a handle of type %#x and %d bytes has generation %d", typ, n, g.n)
		}
	}
}
