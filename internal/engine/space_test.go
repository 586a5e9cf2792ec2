package engine_test

import (
	"crypto/rand"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/linux/durable"
	"pando/internal/linux/kernel"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// TestUmountReturnsDeleted: what was deleted in a volume returns to the pool when it is
// unmounted, even if nobody has synced the deletion.
func TestUmountReturnsDeleted(t *testing.T) {
	testfs.NotShort(t, "it is about space")
	e := newPool(t, testfs.New(t, "xfs", 800<<20).Dir(), engine.InitRequest{Driver: reflink.Name, MinFreePercent: 1})
	for _, fs := range []driver.FS{driver.Ext4, driver.XFS} {
		t.Run(string(fs), func(t *testing.T) {
			name := "g" + string(fs)
			if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName(name), Source: source(t), FS: fs,
				SizeBytes: 320 << 20}); err != nil {
				t.Fatal(err)
			}
			v := clone(t, e, name, "v"+string(fs), true)
			image := filepath.Join(e.Dir(), "data", "objects", v.ID+".img")
			const files, bytes = 64, 1 << 20
			paths := make([]string, files)
			for i := range paths {
				paths[i] = filepath.Join(v.Mountpoint, fmt.Sprint("deleted", i))
				b := make([]byte, bytes)
				_, _ = rand.Read(b)
				must(t, os.WriteFile(paths[i], b, 0o600))
			}
			must(t, durable.SyncFS(v.Mountpoint))
			before := allocated(t, image)
			for _, path := range paths {
				must(t, os.Remove(path))
			}
			if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName(v.Name)}); err != nil {
				t.Fatal(err)
			}
			if fs == driver.XFS {
				// It frees in the background, and may take more time than an umount waits. What
				// is left of it comes back the next time.
				if _, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName(v.Name)}); err != nil {
					t.Fatal(err)
				}
				if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName(v.Name)}); err != nil {
					t.Fatal(err)
				}
			}
			least := int64(files * bytes * 9 / 10)
			if back := before - allocated(t, image); back < least {
				t.Errorf("%d of %d bytes came back", back, files*bytes)
			}
			destroy(t, e, v.Name)
		})
	}
}

// TestReserveIsTakenAgain: what one call has spent of the reserve, the next that frees space takes again, also right
// after the reserve was found whole.
func TestReserveIsTakenAgain(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
		importTree(t, e, "g", source(t))
		for _, name := range []string{"a", "b", "c"} {
			clone(t, e, "g", name, false)
			if !e.HasReserve() {
				t.Skip("SKIPPED: no room for a reserve")
			}
			if name != "a" && !e.SpendReserve(t.Context()) {
				t.Error("there was nothing to spend")
			}
			destroy(t, e, name)
			if !e.HasReserve() {
				t.Errorf("the destroy of %s has not taken the reserve again", name)
			}
		}
	})
}

func allocated(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(path, &st))
	return st.Blocks * 512
}

// TestDeadAreNotBlamed: if what a dead process has left cannot be cleaned up, the reason is told
// at once, and not that this process is at work.
func TestDeadAreNotBlamed(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
		importTree(t, e, "g", source(t))
		v := clone(t, e, "g", "v", false)
		db, err := sql.Open("sqlite", "file:"+filepath.Join(e.Dir(), "catalog.db"))
		must(t, err)
		defer db.Close()
		for _, query := range []string{
			`UPDATE objects SET pinned = 1 WHERE id = '` + v.ID + `'`,
			`INSERT INTO marks VALUES ('` + v.ID + `', 'pin', '', '', '', 0, 0, 'p-dead', 999999999, 1, '` + kernel.BootID() +
				`', 1)`,
		} {
			_, err := db.ExecContext(t.Context(), query)
			must(t, err)
		}
		objects, err := os.Open(filepath.Join(e.Dir(), "data", "objects"))
		must(t, err)
		defer objects.Close()
		_, err = kernel.SetImmutable(objects, true)
		must(t, err)

		var said warnings.List
		// which takes no mark
		_, err = e.Umount(warnings.Collect(t.Context(), &said), engine.UmountRequest{Volume: ref.MustName("v")})
		must(t, err)
		r, err := e.Destroy(warnings.Collect(t.Context(), &said), toDestroy("v"))
		must(t, err)
		if len(r.Failed) != 1 || !errs.Is(r.Failed[0], errs.Permission) ||
			!strings.Contains(r.Failed[0].Error(), "an interrupted pin of it could not be cleaned up") {
			t.Errorf("failed: %v", r.Failed)
		}
		if w := said.Messages(); len(w) > 1 {
			t.Errorf("warnings: %v", w)
		}
		_, err = kernel.SetImmutable(objects, false)
		must(t, err)
		destroy(t, e, "v")
	})
}
