package engine_test

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

// diffKinds are pools and volumes that can be compared, with the way it is done
// between a golden and its clone.
var diffKinds = []struct {
	name, host, driver, fs, method string
}{
	{"ext4", "xfs", reflink.Name, "ext4", "ext4"},
	{"xfs", "xfs", reflink.Name, "xfs", "walk"},
	{"ext4 on btrfs", "btrfs", reflink.Name, "ext4", "ext4"},
	{"btrfs", "btrfs", btrfs.Name, "native", "btrfs"},
	{"plain", "ext4", plain.Name, "native", "walk"},
}

// inEachPool runs a test with a pool and a golden web of each kind.
func inEachPool(t *testing.T, fn func(t *testing.T, e *engine.Engine, method string)) {
	for _, k := range diffKinds {
		t.Run(k.name, func(t *testing.T) {
			e := newPool(t, testfs.New(t, k.host, 1<<30).Dir(), engine.InitRequest{Driver: k.driver})
			src := t.TempDir()
			for i := range 20 {
				write(t, filepath.Join(src, fmt.Sprintf("d%d", i%4), fmt.Sprint(i)), fmt.Sprint("content ", i))
			}
			q := engine.ImportRequest{Name: ref.MustName("web"), Source: src, FS: driver.FS(k.fs)}
			if k.fs != "native" {
				q.SizeBytes = 320 << 20
			}
			if _, err := e.Import(t.Context(), q); err != nil {
				t.Fatal(err)
			}
			// What was made at the very moment of the copy is not recognised when it is renamed.
			time.Sleep(50 * time.Millisecond)
			fn(t, e, k.method)
		})
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func reference(t *testing.T, s string) ref.Ref {
	t.Helper()
	r, err := ref.Parse("test", s)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func diff(t *testing.T, e *engine.Engine, a, b string) engine.Difference {
	t.Helper()
	d, err := e.Diff(t.Context(), engine.DiffRequest{A: reference(t, a), B: reference(t, b)})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// list is changes in short.
func list(d engine.Difference) string {
	s := ""
	for _, c := range d.Changes {
		s += c.Op[:1] + " " + string(c.From) + ">" + string(c.Path) + "\n"
	}
	return s
}

// edit changes a volume.
func edit(t *testing.T, e *engine.Engine, volume string, fn func(dir string)) {
	t.Helper()
	i, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName(volume)})
	if err != nil {
		t.Fatal(err)
	}
	fn(i.Mountpoint)
	if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName(volume)}); err != nil {
		t.Fatal(err)
	}
}

func publish(t *testing.T, e *engine.Engine, golden, volume string) {
	t.Helper()
	if _, err := e.Publish(t.Context(), engine.PublishRequest{Golden: ref.MustName(golden),
		Volume: ref.MustName(volume)}); err != nil {
		t.Fatal(err)
	}
}

// nothingLeft fails if a scratch object or a mark has been left behind: what
// there is must be what there was.
func nothingLeft(t *testing.T, e *engine.Engine) {
	t.Helper()
	left, err := filepath.Glob(filepath.Join(e.Dir(), "data", "objects", "*.meta"))
	if err != nil {
		t.Fatal(err)
	}
	p, err := e.Pool(t.Context(), engine.PoolRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if n := p.VolumeCount + p.GenerationCount + p.SnapshotCount; len(left) != n {
		t.Errorf("the pool holds %d objects, the catalogue %d", len(left), n)
	}
}

// TestDiff: of each kind of volume the same differences are found, in the way
// that follows the change where there is one, idle or in use.
func TestDiff(t *testing.T) {
	inEachPool(t, func(t *testing.T, e *engine.Engine, method string) {
		v := clone(t, e, "web", "v", true)
		if d := diff(t, e, "web", "v"); len(d.Changes) > 0 {
			t.Errorf("a fresh clone differs: %s", list(d))
		}
		write(t, filepath.Join(v.Mountpoint, "d0/0"), "changed")
		write(t, filepath.Join(v.Mountpoint, "new/deeper/file"), "new")
		if err := os.Remove(filepath.Join(v.Mountpoint, "d1/1")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(v.Mountpoint, "d2"), filepath.Join(v.Mountpoint, "new/d2")); err != nil {
			t.Fatal(err)
		}
		want := "m >d0/0\nd >d1/1\na >new\nr d2>new/d2\na >new/deeper\na >new/deeper/file\n"
		if e.Caps().Name == plain.Name { // nothing tells that it is the same directory
			want = "m >d0/0\nd >d1/1\nd >d2\nd >d2/10\nd >d2/14\nd >d2/18\nd >d2/2\nd >d2/6\na >new\na >new/d2\na " +
				">new/d2/10\na >new/d2/14\na >new/d2/18\na >new/d2/2\na >new/d2/6\na >new/deeper\na >new/deeper/file\n"
		}
		check := func(when string) {
			t.Helper()
			d := diff(t, e, "web", "v")
			if got := list(d); got != want {
				t.Errorf("%s:\n%s\nwanted:\n%s", when, got, want)
			}
			if d.Method != method {
				t.Errorf("%s: compared by %q, wanted %q", when, d.Method, method)
			}
		}
		check("in use")
		if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")}); err != nil {
			t.Fatal(err)
		}
		check("idle")
		publish(t, e, "web", "v")
		if d := diff(t, e, "web@1", "web@2"); list(d) != want {
			t.Errorf("between generations:\n%s\nwanted:\n%s", list(d), want)
		}
		if d := diff(t, e, "v", "web@2"); len(d.Changes) > 0 {
			t.Errorf("what was published differs: %s", list(d))
		}
		if _, err := e.Diff(t.Context(), engine.DiffRequest{A: reference(t, "web"), B: reference(t, "no")}); !errs.Is(err,
			errs.NotFound) || errs.HintOf(err) == "" {
			t.Errorf("%v, wanted NotFound with a hint", err)
		}
		nothingLeft(t, e)
	})
}

// TestRebase: a volume gets the golden's changes and keeps its own; the state
// before stays; conflicts change nothing.
func TestRebase(t *testing.T) {
	inEachPool(t, func(t *testing.T, e *engine.Engine, _ string) {
		clone(t, e, "web", "v", false)
		edit(t, e, "v", func(dir string) {
			write(t, filepath.Join(dir, "d0/0"), "mine")
			write(t, filepath.Join(dir, "mine"), "mine")
		})
		own := list(diff(t, e, "web", "v"))
		clone(t, e, "web", "fix", false)
		edit(t, e, "fix", func(dir string) {
			write(t, filepath.Join(dir, "d1/1"), "theirs")
			write(t, filepath.Join(dir, "theirs"), "theirs")
		})
		publish(t, e, "web", "fix")
		rebase := func(q engine.RebaseRequest) (engine.Rebased, error) {
			q.Volume, q.Onto = ref.MustName("v"), ref.Ref{Name: "web"}
			return e.Rebase(t.Context(), q)
		}
		r, err := rebase(engine.RebaseRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if r.Generation != 2 || r.Base != "web@1" || r.Stat.Modified != 1 || r.Stat.Added != 1 {
			t.Errorf("%+v", r)
		}
		if got := list(diff(t, e, "web", "v")); got != own {
			t.Errorf("its own changes are now\n%s\nwanted\n%s", got, own)
		}
		if got := list(diff(t, e, "web@1", r.Before)); got != own {
			t.Errorf("before they were\n%s\nwanted\n%s", got, own)
		}
		nothingLeft(t, e)

		edit(t, e, "fix", func(dir string) { write(t, filepath.Join(dir, "d0/0"), "theirs") })
		publish(t, e, "web", "fix")
		r, err = rebase(engine.RebaseRequest{})
		if !errs.Is(err, errs.Conflict) || errs.HintOf(err) == "" || len(r.Conflicts) != 1 || r.Conflicts[0].Path != "d0/0" {
			t.Errorf("%v with %+v, wanted a conflict with a hint", err, r.Conflicts)
		}
		if got := list(diff(t, e, "web@2", "v")); got != own {
			t.Errorf("after a conflict it differs by\n%s\nwanted\n%s", got, own)
		}
		nothingLeft(t, e)

		clone(t, e, "v", "v2", false)
		content := func(volume, want string) {
			t.Helper()
			edit(t, e, volume, func(dir string) {
				if b, err := os.ReadFile(filepath.Join(dir, "d0/0")); err != nil || string(b) != want {
					t.Errorf("%s has %q, %v, wanted %q", volume, b, err, want)
				}
				if b, err := os.ReadFile(filepath.Join(dir, "mine")); err != nil || string(b) != "mine" {
					t.Errorf("%s has lost its own file: %q, %v", volume, b, err)
				}
			})
		}
		if _, err := rebase(engine.RebaseRequest{Ours: true}); err != nil {
			t.Fatal(err)
		}
		content("v", "mine")
		if _, err := e.Rebase(t.Context(), engine.RebaseRequest{Volume: ref.MustName("v2"), Onto: ref.Ref{Name: "web"},
			Theirs: true}); err != nil {
			t.Fatal(err)
		}
		content("v2", "theirs")
		nothingLeft(t, e)

		// What it came from is gone.
		if _, err := e.Clone(t.Context(), engine.CloneRequest{From: reference(t, "web@1"),
			Name: ref.MustName("old")}); err != nil {
			t.Fatal(err)
		}
		if _, err := e.RemoveGolden(t.Context(), reference(t, "web@1")); err != nil {
			t.Fatal(err)
		}
		_, err = e.Rebase(t.Context(), engine.RebaseRequest{Volume: ref.MustName("old"), Onto: ref.Ref{Name: "web"}})
		if !errs.Is(err, errs.NotFound) || errs.HintOf(err) == "" {
			t.Errorf("%v, wanted NotFound with a hint", err)
		}
		nothingLeft(t, e)
	})
}

// TestRebaseOfMovedDirectory: an overlay ends as an ordinary volume with the same changes, in which a directory that it
// has moved keeps the golden's changes.
func TestRebaseOfMovedDirectory(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		volumes := map[string]bool{"overlay": true}
		if e.Caps().Sharing { // else nothing tells what an ordinary volume has moved
			volumes["volume"] = false
		}
		for name, overlay := range volumes {
			_, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName(name),
				Overlay: overlay})
			must(t, err)
			edit(t, e, name, func(dir string) {
				must(t, os.Rename(filepath.Join(dir, "sub"), filepath.Join(dir, "moved")),
					os.WriteFile(filepath.Join(dir, "moved", "b"), []byte("of the volume"), 0o644))
			})
		}
		clone(t, e, "g", "next", false)
		edit(t, e, "next", func(dir string) {
			must(t, os.WriteFile(filepath.Join(dir, "sub", "a"), []byte("of the golden"), 0o644),
				os.WriteFile(filepath.Join(dir, "sub", "new"), []byte("too"), 0o644))
		})
		publish(t, e, "g", "next")

		for name := range volumes {
			_, err := e.Rebase(t.Context(), engine.RebaseRequest{Volume: ref.MustName(name), Onto: ref.Ref{Name: "g"},
				Ours: true})
			must(t, err)
			edit(t, e, name, func(dir string) {
				const want = "./file=content ./gone=x ./moved/a=of the golden ./moved/b=of the volume ./moved/new=too "
				if got := contentOf(t, dir); got != want {
					t.Errorf("the %s has %s", name, got)
				}
			})
		}
		destroy(t, e, append(slices.Collect(maps.Keys(volumes)), "next")...)
		wantClean(t, e)
	})
}

// TestRebaseInFullPool: nothing is lost when there is no room.
func TestRebaseInFullPool(t *testing.T) {
	testfs.NotShort(t, "it is about space")
	for _, k := range []struct{ host, driver string }{{"xfs", reflink.Name}, {"btrfs", btrfs.Name}} {
		t.Run(k.driver, func(t *testing.T) {
			dir := testfs.New(t, k.host, 600<<20).Dir()
			e := newPool(t, dir, engine.InitRequest{Driver: k.driver, MinFreePercent: 0.01})
			importTree(t, e, "web", source(t))
			clone(t, e, "web", "v", false)
			edit(t, e, "v", func(dir string) {
				f, err := os.Create(filepath.Join(dir, "big"))
				if err != nil {
					t.Fatal(err)
				}
				defer f.Close()
				for range 100 {
					if _, err := f.Write(bytes.Repeat([]byte("x"), 1<<20)); err != nil {
						t.Fatal(err)
					}
				}
			})
			clone(t, e, "web", "fix", false)
			edit(t, e, "fix", func(dir string) { write(t, filepath.Join(dir, "theirs"), "theirs") })
			publish(t, e, "web", "fix")
			own := list(diff(t, e, "web@1", "v"))
			filler := filepath.Join(dir, "filler")
			fill(t, filler)
			_, err := e.Rebase(t.Context(), engine.RebaseRequest{Volume: ref.MustName("v"), Onto: ref.Ref{Name: "web"}})
			if !errs.Is(err, errs.NoSpace) || errs.HintOf(err) == "" {
				t.Errorf("in a full pool: %v, wanted NoSpace with a hint", err)
			}
			if k.driver == reflink.Name { // on btrfs the copy shares the blocks
				// Room to begin with, but not to end.
				if st, serr := os.Stat(filler); serr != nil || os.Truncate(filler, st.Size()-20<<20) != nil {
					t.Fatal(serr)
				}
				_, err = e.Rebase(t.Context(), engine.RebaseRequest{Volume: ref.MustName("v"), Onto: ref.Ref{Name: "web"}})
				if !errs.Is(err, errs.NoSpace) || errs.HintOf(err) == "" {
					t.Errorf("in a pool that gets full: %v, wanted NoSpace with a hint", err)
				}
			}
			if err := os.Remove(filler); err != nil {
				t.Fatal(err)
			}
			if got := list(diff(t, e, "web@1", "v")); got != own {
				t.Errorf("it differs by\n%s\nwanted\n%s", got, own)
			}
			nothingLeft(t, e)
			if _, err := e.Rebase(t.Context(), engine.RebaseRequest{Volume: ref.MustName("v"),
				Onto: ref.Ref{Name: "web"}}); err != nil {
				t.Error(err)
			}
		})
	}
}
