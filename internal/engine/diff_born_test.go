package engine_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/btrfs"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

// TestDiffOfTwins: two clones of a golden change and make files at the same time, as jobs
// do that start together. These have one inode number and the same times, and nothing else
// in common.
func TestDiffOfTwins(t *testing.T) {
	inEachPool(t, func(t *testing.T, e *engine.Engine, method string) {
		born := func(path string) unix.Statx_t {
			var st unix.Statx_t
			if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_INO|unix.STATX_BTIME, &st); err != nil {
				t.Fatal(err)
			}
			return st
		}
		at := [2]string{}
		for i, name := range []string{"one", "two"} {
			clone(t, e, "web", name, false)
			info, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName(name)})
			if err != nil {
				t.Fatal(err)
			}
			at[i] = info.Mountpoint
		}
		// The clock goes on in ticks: not every try is within one, and on a busy host few are.
		want := "m >d0/0\n"
		for try := 0; ; try++ {
			x, y := fmt.Sprintf("x%02d", try), fmt.Sprintf("y%02d", try)
			want += "m >" + x + "\n"
			for i, names := range [][]string{{"d0/0", x, y, fmt.Sprintf("z%02da", try)},
				{"d0/0", y, x, fmt.Sprintf("z%02db", try)}} {
				for _, name := range names {
					// Nobody looks at the directory in between: then the next time of it is exact.
					if err := os.WriteFile(filepath.Join(at[i], name), []byte(fmt.Sprint(name, i)), 0o644); err != nil {
						t.Fatal(err)
					}
				}
			}
			a, b := born(filepath.Join(at[0], x)), born(filepath.Join(at[1], y))
			c, d := born(filepath.Join(at[0], y)), born(filepath.Join(at[1], x))
			if a.Btime == b.Btime && c.Btime == d.Btime && (method == "walk" || a.Ino == b.Ino && c.Ino == d.Ino) {
				for i := range try + 1 {
					want += fmt.Sprintf("m >y%02d\n", i)
				}
				for i := range try + 1 {
					want += fmt.Sprintf("d >z%02da\na >z%02db\n", i, i)
				}
				break
			}
			if try == 99 {
				t.Fatal("two volumes never made their files at the same time: this test shows nothing")
			}
		}
		if got := list(diff(t, e, "one", "two")); got != want {
			t.Errorf("%s, wanted\n%s", got, want)
		}
		nothingLeft(t, e)
	})
}

// copyClock notes when a copy begins.
type copyClock struct {
	*btrfs.Driver
	began *time.Time
}

func (c copyClock) Clone(ctx context.Context, from driver.ObjectID, id driver.Identity) error {
	*c.began = time.Now()
	return c.Driver.Clone(ctx, from, id)
}

// TestGenerationIsAsOldAsItsContent: what a volume writes while its copy becomes a
// generation is not in it, and diff tells by the time which files may have changed.
func TestGenerationIsAsOldAsItsContent(t *testing.T) {
	var began time.Time
	drivers := engine.Drivers{btrfs.Name: func(ctx context.Context, dir, poolID string, create bool) (driver.Driver,
		error) {
		d, err := btrfs.Open(ctx, dir, poolID, create)
		if err != nil {
			return nil, err
		}
		return copyClock{d.(*btrfs.Driver), &began}, nil
	}}
	dir := filepath.Join(testfs.Btrfs(t, 256<<20), "pool")
	if _, err := engine.Init(t.Context(), engine.InitRequest{Dir: dir, Driver: btrfs.Name}, drivers); err != nil {
		t.Fatal(err)
	}
	e, err := engine.Open(t.Context(), dir, drivers)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	src := t.TempDir()
	if err := os.WriteFile(filepath.Join(src, "file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("web"), Source: src}); err != nil {
		t.Fatal(err)
	}
	clone(t, e, "web", "vol", false)
	p, err := e.Publish(t.Context(), engine.PublishRequest{Golden: ref.MustName("web"), Volume: ref.MustName("vol")})
	if err != nil {
		t.Fatal(err)
	}
	if p.CreatedAt.After(began) {
		t.Errorf("the generation is of %v, its content of %v", p.CreatedAt, began)
	}
}
