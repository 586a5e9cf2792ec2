package ledger

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/driver/plain"
	"pando/internal/engine/catalog"
	"pando/internal/linux/kernel"
)

// books is a ledger over a real catalogue and a real driver. It stands in for an engine that mounts nothing.
type books struct {
	*Ledger
	t     testing.TB
	stuck driver.ObjectID // cannot be removed
}

func newBooks(t testing.TB) *books {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{"live", "data"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := catalog.Create(t.Context(), dir, "pool", api.EventInit); err != nil {
		t.Fatal(err)
	}
	cat, err := catalog.Open(t.Context(), dir, "pool")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cat.Close() })
	d, err := plain.Open(t.Context(), filepath.Join(dir, "data"), "pool", true)
	if err != nil {
		t.Fatal(err)
	}

	b := &books{t: t}
	b.Ledger = New(cat, d, b)
	return b
}

func (b *books) Thaw(context.Context, driver.ObjectID) error { return nil }

func (b *books) UndoMount(context.Context, catalog.Mark) error { return nil }

func (b *books) Finish(ctx context.Context, m catalog.Mark, _ catalog.Row) error {
	return b.Unmark(ctx, m.ID)
}

func (b *books) Remove(ctx context.Context, id driver.ObjectID, _, _ string) error {
	if id == b.stuck {
		return errors.New("the disk is broken")
	}
	return b.drv.Destroy(ctx, id)
}

// abandon makes n volumes in an operation that ends before it has recorded them.
func (b *books) abandon(n int) []driver.Identity {
	b.t.Helper()
	ctx, end := b.Begin(b.t.Context(), "test")
	defer end(nil)

	ids := make([]driver.Identity, n)
	marks := make([]catalog.Mark, n)
	for i := range ids {
		name := fmt.Sprintf("v%d", i)
		ids[i] = driver.Identity{
			ID: driver.NewID(), Kind: driver.Volume, Name: name, FS: driver.Native, CreatedAt: time.Now(),
			BootID: kernel.BootID(),
		}
		marks[i] = catalog.Mark{ID: ids[i].ID, Op: "clone", Name: name, Mountpoint: "/nowhere"}
	}
	if err := b.Claim(ctx, "clone", false, func(*catalog.Tx) ([]catalog.Mark, error) { return marks, nil }); err != nil {
		b.t.Fatal(err)
	}
	for _, id := range ids {
		if err := b.drv.Create(ctx, id); err != nil {
			b.t.Fatal(err)
		}
	}
	return ids
}

// marks lists all marks.
func (b *books) marks() (marks []catalog.Mark) {
	b.t.Helper()
	if err := b.cat.View(b.t.Context(), func(tx *catalog.Tx) (err error) {
		marks, err = tx.Marks()
		return err
	}); err != nil {
		b.t.Fatal(err)
	}
	return marks
}

// tombstones lists the objects whose tombstones wait for their removal.
func (b *books) tombstones() (ids []driver.ObjectID) {
	b.t.Helper()
	if err := b.cat.View(b.t.Context(), func(tx *catalog.Tx) error {
		tombstones, err := tx.Unreclaimed(0)
		for _, g := range tombstones {
			ids = append(ids, g.ID)
		}
		return err
	}); err != nil {
		b.t.Fatal(err)
	}
	return ids
}

// objects lists what the driver has.
func (b *books) objects() (ids []driver.ObjectID) {
	b.t.Helper()
	for o, err := range b.drv.List(b.t.Context()) {
		if err != nil {
			b.t.Fatal(err)
		}
		ids = append(ids, o.ID)
	}
	return ids
}

// TestBatchKeepsWhatIsNotGarbage: of marks that are cleaned up together, each is treated by itself: what is in the
// catalogue stays, and what is noted as committed, and what cannot be removed keeps its tombstone.
func TestBatchKeepsWhatIsNotGarbage(t *testing.T) {
	b := newBooks(t)
	ids := b.abandon(7)
	recorded, committed, stuck := ids[1], ids[3], ids[5]
	if err := b.cat.Update(t.Context(), catalog.Durable, func(tx *catalog.Tx) error {
		return tx.PutObject(catalog.Row{Identity: recorded, UsedAt: time.Now()})
	}); err != nil {
		t.Fatal(err)
	}
	NoteCommitted(b.drv, committed.ID)
	b.stuck = stuck.ID

	said := &warnings.List{}
	done, err := b.CleanUp(warnings.Collect(t.Context(), said), b.marks())
	if err != nil || done.Marks != len(ids) || len(done.Failed) > 0 {
		t.Fatalf("%+v, %v", done, err)
	}
	if m := b.marks(); len(m) > 0 {
		t.Errorf("marks are left: %v", m)
	}
	if g := b.tombstones(); !slices.Equal(g, []driver.ObjectID{stuck.ID}) {
		t.Errorf("tombstones of %v, wanted that of %s", g, stuck.ID)
	}
	left := b.objects()
	slices.Sort(left)
	want := []driver.ObjectID{recorded.ID, committed.ID, stuck.ID}
	slices.Sort(want)
	if !slices.Equal(left, want) {
		t.Errorf("objects %v, wanted %v", left, want)
	}
	if w := said.Messages(); len(w) != 2 {
		t.Errorf("warnings %q, wanted one of the committed and one of the stuck", w)
	}
}

// TestFailedBatchKeepsItsMarks: what a batch could not record, the next command cleans up.
func TestFailedBatchKeepsItsMarks(t *testing.T) {
	b := newBooks(t)
	ids := b.abandon(3)

	// The context ends after the claim, as with an interrupted command.
	ctx, cancel := context.WithCancel(t.Context())
	b.work = &interrupted{books: b, cancel: cancel}
	done, _ := b.CleanUp(ctx, b.marks())
	if m := b.marks(); len(m) != len(ids) || done.Marks != 0 || len(b.objects()) != len(ids) {
		t.Errorf("%d marks and %d objects are left, %d of them cleaned up", len(m), len(b.objects()), done.Marks)
	}

	b.work = b
	if done, err := b.CleanUp(t.Context(), b.marks()); err != nil || done.Marks != len(ids) {
		t.Errorf("the next: %+v, %v", done, err)
	}
	if n := len(b.objects()); n > 0 {
		t.Errorf("%d objects are left", n)
	}
}

// interrupted ends the context at the first thing that is taken down.
type interrupted struct {
	*books
	cancel context.CancelFunc
}

func (w *interrupted) UndoMount(context.Context, catalog.Mark) error {
	w.cancel()
	return nil
}

// BenchmarkCleanUp measures what it costs to clean up after an operation that died with many marks, which are cleaned
// up in batches, and one by one:
//
//	go test ./internal/engine/ledger -run '^$' -bench CleanUp
func BenchmarkCleanUp(b *testing.B) {
	const marks = 2000
	size := cleanUpBatch
	for _, batch := range []int{1, size} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			cleanUpBatch = batch
			defer func() { cleanUpBatch = size }()
			for range b.N {
				b.StopTimer()
				books := newBooks(b)
				books.abandon(marks)
				dead := books.marks()
				ctx := ReclaimUntil(b.Context(), time.Now()) // only marks: removing takes what it takes
				b.StartTimer()

				if done, err := books.CleanUp(ctx, dead); err != nil || done.Marks != marks {
					b.Fatalf("%+v, %v", done, err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/1000/float64(b.N*marks), "ms/mark")
		})
	}
}
