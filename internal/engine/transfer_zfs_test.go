package engine_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/reflink"
	"pando/internal/driver/zfs"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

// pointSum is a hash of the content of a snapshot or generation, whatever the driver.
func pointSum(t *testing.T, e *engine.Engine, what string) string {
	t.Helper()
	h := sha256.New()
	if err := readImage(t.Context(), e, engine.ReadRequest{Point: point(t, e, what).ID}, func(m *engine.Image) error {
		_, err := io.Copy(h, io.NewSectionReader(m.R, 0, m.SizeBytes))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}

// TestTransferZFS: zvols are sent and received as images, also to and from a pool of
// reflinks; clones share with what they are received from; and what fails leaves
// nothing.
func TestTransferZFS(t *testing.T) {
	zpool := testfs.ZFS(t, 2<<30)
	drivers[zfs.Name] = zfs.Open
	defer delete(drivers, zfs.Name)
	for _, toZFS := range []bool{true, false} {
		t.Run(fmt.Sprintf("to zfs %v", toZFS), func(t *testing.T) {
			dir := t.TempDir()
			b := newPool(t, dir, engine.InitRequest{Driver: zfs.Name, Dataset: zpool + "/pando", MinFreePercent: 1})
			a := newPool(t, testfs.XFS(t, 500<<20), engine.InitRequest{Driver: reflink.Name, MinFreePercent: 1})
			if !toZFS {
				a, b = b, a
			}
			if _, err := a.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: source(t),
				SizeBytes: 48 << 20, FS: driver.Ext4}); err != nil {
				t.Fatal(err)
			}
			clone(t, a, "g", "job", false)
			for _, n := range []string{"one", "two"} {
				edit(t, a, "job", func(dir string) { write(t, filepath.Join(dir, "file"), n) })
				snapshot(t, a, "job", n)
			}
			g, one, two := point(t, a, "g"), point(t, a, "job@one"), point(t, a, "job@two")
			carry(t, a, b, g, "", "", nil)
			_, c := carry(t, a, b, one, g.ID, point(t, b, "g").ID, func(q *engine.ReceiveRequest) {
				q.OriginID = point(t, b, "g").ID
			})
			if c.exact != toZFS { // zvols cannot be compared without reading
				t.Errorf("%+v", c)
			}
			before, err := b.Pool(t.Context(), engine.PoolRequest{})
			if err != nil {
				t.Fatal(err)
			}
			mine := errors.New("mine")
			for _, name := range []string{"volume", "update", "generation"} { // each takes seconds there
				q := request(two)
				q.Volume, q.Snapshot = ref.MustName("new"), ref.MustName("n")
				receipts[name](&q, point(t, b, "job@one").ID)
				if q.Volume.String() == "v" {
					q.Volume = ref.MustName("job")
				}
				image := func(_ context.Context, to engine.Target) error {
					if err := to.Zero(4096, 1<<20); err != nil {
						return err
					}
					if _, err := to.WriteAt(make([]byte, 1<<20), 8<<20); err != nil {
						return err
					}
					return mine
				}
				if _, err := b.Transfer().Receive(t.Context(), q, engine.Content{Image: image}); !errors.Is(err, mine) {
					t.Errorf("%s: %v", name, err)
				}
			}
			if now, err := b.Pool(t.Context(), engine.PoolRequest{}); err != nil || now.VolumeCount != before.VolumeCount ||
				now.SnapshotCount != before.SnapshotCount || now.GenerationCount != before.GenerationCount {
				t.Errorf("%+v was %+v (%v)", now, before, err)
			}
			carry(t, a, b, two, one.ID, point(t, b, "job@one").ID, func(q *engine.ReceiveRequest) { q.Update = true })
			for _, what := range []string{"g@1", "job@one", "job@two"} {
				if x, y := pointSum(t, a, what), pointSum(t, b, what); x != y {
					t.Errorf("%s: %s, not %s", what, y, x)
				}
			}
			edit(t, b, "job", func(dir string) {
				if text, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(text) != "two" {
					t.Errorf("%q, %v", text, err)
				}
			})
			for _, l := range dump(t, b.Dir()) {
				if strings.HasPrefix(l, "mark|") || strings.HasPrefix(l, "tombstone|") {
					t.Errorf("left: %s", l)
				}
			}
			if r := fsck(t, b.Dir(), false); len(r.Findings) > 0 {
				t.Errorf("fsck: %s", findings(r))
			}
			destroy(t, b, "job")
		})
	}
}
