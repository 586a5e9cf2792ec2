package extent_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/linux/extent"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// write makes a file of n bytes that no filesystem compresses or leaves out.
func write(t *testing.T, path string, n int) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*i>>3) | 1
	}
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
}

func measure(t *testing.T, dir string) extent.Usage {
	t.Helper()
	u, err := extent.MeasureTree(t.Context(), dir, extent.TreeOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return u
}

const block = 4096

// TestMeasureTree measures the same tree on every filesystem.
func TestMeasureTree(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs", "ext4", "tmpfs"} {
		t.Run(kind, func(t *testing.T) {
			top := testfs.New(t, kind, 256<<20).Dir()
			dir := filepath.Join(top, "tree")
			var want int64
			for i := range 60 {
				write(t, filepath.Join(dir, fmt.Sprintf("d%d/e%d/f%d", i%7, i%3, i)), (1+i%5)*block)
				want += int64(1+i%5) * block
			}
			// What must not count, or not twice.
			write(t, filepath.Join(dir, "linked"), 10*block)
			want += 10 * block
			for i := range 5 {
				if err := os.Link(filepath.Join(dir, "linked"), filepath.Join(dir, fmt.Sprintf("d%d/link", i))); err != nil {
					t.Fatal(err)
				}
			}
			write(t, filepath.Join(top, "outside"), 100*block)
			if err := errors.Join(
				os.Symlink("../outside", filepath.Join(dir, "symlink")),
				os.Symlink("..", filepath.Join(dir, "loop")),
				unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600),
				os.WriteFile(filepath.Join(dir, "empty"), nil, 0o600),
				os.Mkdir(filepath.Join(dir, "mounted"), 0o700),
			); err != nil {
				t.Fatal(err)
			}
			f, err := os.Create(filepath.Join(dir, "sparse"))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.WriteAt(make([]byte, 2*block), 16<<20); err != nil {
				t.Fatal(err)
			}
			f.Close()
			want += 2 * block
			// The same filesystem, so only the mount tells it apart.
			write(t, filepath.Join(top, "elsewhere/d/f"), 50*block)
			m, err := mount.Tree(filepath.Join(top, "elsewhere"), false)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := m.MoveTo(filepath.Join(dir, "mounted")); err != nil {
				t.Fatal(err)
			}
			m.Close()
			defer mount.Unmount(filepath.Join(dir, "mounted"))
			u := measure(t, dir)
			if u.Exclusive != want || u.Shared != 0 {
				t.Errorf("measured %+v, want %d bytes, none shared", u, want)
			}
			if u.Extents < 62 || u.Extents > 200 {
				t.Errorf("measured %d extents in 62 files", u.Extents)
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if _, err := extent.MeasureTree(ctx, dir, extent.TreeOptions{}); !errors.Is(err, context.Canceled) {
				t.Errorf("with a cancelled context: %v", err)
			}
			if _, err := extent.MeasureTree(t.Context(), filepath.Join(dir, "nowhere"), extent.TreeOptions{}); !errors.Is(err,
				fs.ErrNotExist) {
				t.Errorf("of what is not there: %v", err)
			}
		})
	}
}

// TestMeasureTreeShared measures reflinked files.
func TestMeasureTreeShared(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			top := testfs.New(t, kind, 256<<20).Dir()
			a, b := filepath.Join(top, "a"), filepath.Join(top, "b")
			write(t, filepath.Join(a, "shared"), 64*block)
			write(t, filepath.Join(a, "own"), 16*block)
			if err := os.Mkdir(b, 0o755); err != nil {
				t.Fatal(err)
			}
			src, err := os.Open(filepath.Join(a, "shared"))
			if err != nil {
				t.Fatal(err)
			}
			dst, err := os.Create(filepath.Join(b, "clone"))
			if err != nil {
				t.Fatal(err)
			}
			if err := kernel.Reflink(dst, src); err != nil {
				t.Fatal(err)
			}
			// A quarter of the clone is its own.
			if _, err := dst.WriteAt(make([]byte, 16*block), 32*block); err != nil {
				t.Fatal(err)
			}
			src.Close()
			dst.Close()
			if u := measure(t, b); u.Exclusive != 16*block || u.Shared != 48*block {
				t.Errorf("clone: %+v", u)
			}
			// The origin is alone with the quarter that the clone replaced.
			want := extent.Usage{Exclusive: 32 * block, Shared: 48 * block}
			if kind == "btrfs" {
				// Its extents are shared as a whole for as long as any part of them is.
				want = extent.Usage{Exclusive: 16 * block, Shared: 64 * block}
			}
			if u := measure(t, a); u.Exclusive != want.Exclusive || u.Shared != want.Shared {
				t.Errorf("origin: %+v, want %+v", u, want)
			}
		})
	}
}

// TestMeasureTreeInline is about files so small that btrfs keeps them in its
// metadata.
func TestMeasureTreeInline(t *testing.T) {
	dir := testfs.Btrfs(t, 128<<20)
	write(t, filepath.Join(dir, "old"), 1000)
	time.Sleep(20 * time.Millisecond) // times of files have the resolution of a clock tick
	copied := time.Now()
	time.Sleep(20 * time.Millisecond)
	write(t, filepath.Join(dir, "new"), 1000)
	u := measure(t, dir)
	if u.Shared != 0 || u.Exclusive < 2000 || u.Exclusive > 2*block {
		t.Errorf("measured %+v", u)
	}
	half := u.Exclusive / 2
	u, err := extent.MeasureTree(t.Context(), dir, extent.TreeOptions{InlineSharedUntil: copied})
	if err != nil {
		t.Fatal(err)
	}
	if u.Shared != half || u.Exclusive != half {
		t.Errorf("as a copy: measured %+v, want %d each", u, half)
	}
}

// TestMeasureTreeSubvolume checks that a subvolume inside does not count.
func TestMeasureTreeSubvolume(t *testing.T) {
	dir := testfs.Btrfs(t, 128<<20)
	write(t, filepath.Join(dir, "f"), 8*block)
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := kernel.SubvolCreate(d, "sub"); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "sub/d/f"), 20*block)
	if u := measure(t, dir); u.Exclusive != 8*block {
		t.Errorf("measured %+v, want %d bytes", u, 8*block)
	}
	if u := measure(t, filepath.Join(dir, "sub")); u.Exclusive != 20*block {
		t.Errorf("measured %+v of the subvolume, want %d bytes", u, 20*block)
	}
}

// TestMeasureTreeChanging measures while files come and go.
func TestMeasureTreeChanging(t *testing.T) {
	dir := t.TempDir()
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			p := filepath.Join(dir, fmt.Sprint("d", i%5), fmt.Sprint("f", i%50))
			_ = os.MkdirAll(filepath.Dir(p), 0o755)
			switch i % 4 {
			case 0:
				_ = os.RemoveAll(filepath.Dir(p))
			case 1:
				_ = os.Remove(p)
				_ = os.Symlink("/", p)
			default:
				_ = os.WriteFile(p, []byte(strings.Repeat("x", 5000)), 0o600)
			}
		}
	}()
	defer func() {
		close(stop)
		<-done
	}()
	for range 200 {
		measure(t, dir)
	}
}
