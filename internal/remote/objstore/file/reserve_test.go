package file_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/testing/testfs"
)

// TestReserve: with a reserve, what frees space can write a first time on a full disk, and nobody else can. The reserve
// comes back once there is room again, and is no object.
func TestReserve(t *testing.T) {
	for _, kind := range []string{"ext4", "tmpfs", "xfs"} {
		t.Run(kind, func(t *testing.T) {
			size := map[string]int64{"xfs": 320 << 20}[kind]
			disk := testfs.New(t, kind, max(size, 40<<20)).Dir()
			dir := filepath.Join(disk, "store")
			s := openStore(t, dir)
			reserve := filepath.Join(dir, ".pando", "reserve")
			if err := s.KeepReserve(t.Context()); err != nil {
				t.Fatal(err)
			}
			put := func(ctx context.Context, key string) error {
				_, err := s.Put(ctx, key, sealed(100_000), objstore.Always)
				return err
			}

			// The disk is full.
			filler := testfs.Fill(t, disk)
			if err := s.KeepReserve(t.Context()); err != nil {
				t.Errorf("a reserve is kept on a full disk: %v", err)
			}
			if err := put(t.Context(), "heads/a"); !errs.Is(err, errs.NoSpace) {
				t.Errorf("Put onto a full disk: %v", err)
			}
			freeing := objstore.WithReserve(t.Context())
			if err := put(freeing, "heads/a"); err != nil {
				t.Errorf("Put that may use the reserve: %v", err)
			}
			if left := leftovers(t, dir); len(left) > 0 {
				t.Errorf("left are %q", left)
			}

			// There is little room, and then enough.
			testfs.Fill(t, disk)
			if err := put(freeing, "heads/b"); !errs.Is(err, errs.NoSpace) {
				t.Errorf("Put without a reserve: %v", err)
			}
			if err := s.KeepReserve(t.Context()); err != nil {
				t.Errorf("there is no room for a reserve: %v", err)
			}
			if _, err := os.Stat(reserve); err == nil {
				t.Error("a reserve was made of the last room")
			}
			if err := os.Remove(filler); err != nil {
				t.Fatal(err)
			}

			// XFS frees the space of a removed file in the background.
			st, err := os.Stat(reserve)
			for limit := time.Now().Add(time.Minute); err != nil && time.Now().Before(limit); st, err = os.Stat(reserve) {
				if err := s.KeepReserve(t.Context()); err != nil {
					t.Fatalf("a reserve is made again: %v", err)
				}
			}
			if err != nil || st.Size() != 1<<20 {
				t.Errorf("the reserve: %v, %v", st, err)
			}
			if got := contents(t, s); len(got) != 1 || got["heads/a"] == "" {
				t.Errorf("the store has %d objects", len(got))
			}
			closeStore(t, s)
		})
	}
}
