package catalog

import (
	"testing"

	"pando/internal/api"
	"pando/internal/driver"
)

// TestOperationsKeepTheirMarks: an operation that gives up takes no mark of another away, which works on the same
// object; and what one leaves when it ends can be claimed, once.
func TestOperationsKeepTheirMarks(t *testing.T) {
	dir, ctx := t.TempDir(), t.Context()
	if err := Create(ctx, dir, "pool", api.EventInit); err != nil {
		t.Fatal(err)
	}
	c, err := Open(ctx, dir, "pool")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	id := driver.NewID()
	marks := func() (out []Mark) {
		t.Helper()
		if err := c.View(ctx, func(tx *Tx) (err error) { out, err = tx.Marks(); return err }); err != nil {
			t.Fatal(err)
		}
		return out
	}

	mine, other := c.Begin("test"), c.Begin("test")
	defer other.End()
	if err := c.Update(mine.In(ctx), Soft, func(tx *Tx) error { return tx.Mark(Mark{ID: id, Op: "clone"}) }); err != nil {
		t.Fatal(err)
	}
	unmark := func(tx *Tx) error { return tx.Unmark(id) }
	if err := c.Update(ctx, Soft, unmark); err == nil {
		t.Error("unmarked outside of any operation")
	}
	if err := c.Update(other.In(ctx), Soft, unmark); err != nil {
		t.Fatal(err)
	}
	if len(marks()) != 1 {
		t.Fatal("another operation has taken the mark away")
	}
	owner := marks()[0].Owner
	if g, err := c.LockOrphan(owner); err != nil || g != nil {
		t.Fatalf("claimed while it is at work: %v, %v", g, err)
	}

	mine.End()
	g, err := c.LockOrphan(owner)
	if err != nil || g == nil {
		t.Fatalf("not claimed after its end: %v", err)
	}
	if second, err := c.LockOrphan(owner); err != nil || second != nil {
		t.Errorf("claimed twice: %v, %v", second, err)
	}
	if err := c.Update(g.In(ctx), Soft, unmark); err != nil {
		t.Fatal(err)
	}
	if left := marks(); len(left) > 0 {
		t.Errorf("left: %+v", left)
	}
	if err := g.Close(true); err != nil {
		t.Error(err)
	}
}
