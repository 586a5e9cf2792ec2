package file_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/testing/storetest"
	"pando/internal/testing/testfs"
)

var kinds = []string{"ext4", "xfs", "btrfs"}

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T) objstore.Store { return openStore(t, t.TempDir()) })
}

// TestConformanceOnFilesystems: one filesystem for all tests of the suite, a
// directory for each.
func TestConformanceOnFilesystems(t *testing.T) {
	for _, kind := range append(kinds, "tmpfs", "ext4 with times in seconds") {
		t.Run(kind, func(t *testing.T) {
			var top string
			if kind == "ext4 with times in seconds" {
				top = coarseExt4(t)
			} else {
				top = testfs.New(t, kind, 1<<30).Dir()
			}
			n := 0
			storetest.Run(t, func(t *testing.T) objstore.Store {
				n++
				dir := filepath.Join(top, fmt.Sprint(n))
				t.Cleanup(func() {
					if err := os.RemoveAll(dir); err != nil {
						t.Error(err)
					}
				})
				return openStore(t, dir)
			})
		})
	}
}

// coarseExt4 mounts an ext4 whose inodes have no room for nanoseconds.
func coarseExt4(t *testing.T) string {
	t.Helper()
	dir := testfs.Ext4With(t, 1<<30, "-I", "128")
	// Else this would be the same as without -I 128.
	probe := filepath.Join(dir, "probe")
	if err := os.WriteFile(probe, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(probe, time.Unix(1, 1), time.Unix(1, 1)); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(probe); err != nil || st.ModTime().Nanosecond() != 0 {
		t.Fatalf("this filesystem keeps nanoseconds: %v, %v", st, err)
	}
	return dir
}

// TestPowerCut: what Put has returned is there afterwards, with its version, in
// directories that are new, too; what Delete has returned is not.
func TestPowerCut(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			fs := testfs.New(t, kind, 256<<20)
			dir := filepath.Join(fs.Dir(), "store")
			s := openStore(t, dir)
			want := map[string]string{}
			put := func(key string, n int, c objstore.Condition) objstore.Version {
				t.Helper()
				data := sealed(n)
				v, err := s.Put(t.Context(), key, data, c)
				if err != nil {
					t.Fatal(err)
				}
				want[key] = string(data)
				return v
			}
			put("config", 100, objstore.IfAbsent)
			v := put("heads/h", 1000, objstore.IfAbsent)
			put("segments/a/0", 1<<20, objstore.IfAbsent)
			put("segments/a/1", 1<<20, objstore.IfAbsent)
			put("segments/b/c/d/0", 10, objstore.IfAbsent)
			if err := s.Delete(t.Context(), "segments/a/0"); err != nil {
				t.Fatal(err)
			}
			delete(want, "segments/a/0")
			put("heads/h", 2000, objstore.IfVersion(v))
			last := put("manifests/m", 100_000, objstore.Always)
			closeStore(t, s)
			fs.Cut()

			after := openStore(t, dir)
			if got := contents(t, after); !maps.Equal(got, want) {
				t.Errorf("after the power cut there are %d objects, want %d, or they differ", len(got), len(want))
			}
			if info, err := after.Stat(t.Context(), "manifests/m"); err != nil || info.Version != last {
				t.Errorf("after the power cut the version is %q, %v, want %q", info.Version, err, last)
			}
			closeStore(t, after)
		})
	}
}

// TestFull: a Put that has no room leaves nothing, and what was there stays.
func TestFull(t *testing.T) {
	for _, kind := range []string{"ext4", "tmpfs"} {
		t.Run(kind, func(t *testing.T) {
			dir := filepath.Join(testfs.New(t, kind, 24<<20).Dir(), "store")
			s := openStore(t, dir)
			small := sealed(1000)
			v, err := s.Put(t.Context(), "heads/h", small, objstore.Always)
			if err != nil {
				t.Fatal(err)
			}
			big := sealed(40 << 20)
			for _, c := range []objstore.Condition{objstore.Always, objstore.IfVersion(v)} {
				_, err = s.Put(t.Context(), "heads/h", big, c)
				if !errs.Is(err, errs.NoSpace) || objstore.Temporary(err) || errs.HintOf(err) == "" {
					t.Errorf("Put onto a full disk: %v, hint %q", err, errs.HintOf(err))
				}
			}
			if left := leftovers(t, dir); len(left) > 0 {
				t.Errorf("left are %q", left)
			}
			if got := contents(t, s); !maps.Equal(got, map[string]string{"heads/h": string(small)}) {
				t.Errorf("the store has %d objects, or they differ", len(got))
			}
			if _, err := s.Put(t.Context(), "heads/h", sealed(2000), objstore.IfVersion(v)); err != nil {
				t.Errorf("a small Put after that: %v", err)
			}
			closeStore(t, s)
		})
	}
}
