package catalog

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/driver"
)

func (o *Operation) update(t *testing.T, fn func(*Tx) error) {
	t.Helper()
	if err := o.c.Update(o.In(t.Context()), Soft, fn); err != nil {
		t.Fatal(err)
	}
}

func markOf(id driver.ObjectID) func(*Tx) error {
	return func(tx *Tx) error { return tx.Mark(Mark{ID: id, Op: "clone"}) }
}

func unmarkOf(id driver.ObjectID) func(*Tx) error {
	return func(tx *Tx) error { return tx.Unmark(id) }
}

// proofs lists the files in live/.
func (c *Catalog) proofs(t *testing.T) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(c.dir, "live"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestProofOfLifeIsLeftToTheNext: operations one after the other have one proof of life, which others see alive, and
// which goes when the catalogue is closed.
func TestProofOfLifeIsLeftToTheNext(t *testing.T) {
	c := openCatalog(t)
	var first string
	for i := range 3 {
		id := driver.NewID()
		op := c.Begin("test")
		op.update(t, markOf(id))
		token := op.liveFileName()
		if i == 0 {
			first = token
		}
		if token != first {
			t.Errorf("operation %d has a proof of its own", i)
		}
		op.update(t, unmarkOf(id))
		op.End()
		if stale, err := c.StaleOwners(nil); err != nil || len(stale) > 0 {
			t.Errorf("stale: %v, %v", stale, err)
		}
		if err := c.RemoveStaleOwners(nil); err != nil {
			t.Fatal(err)
		}
	}

	// Two at once have two.
	a, b := c.Begin("test"), c.Begin("test")
	a.update(t, markOf(driver.NewID()))
	b.update(t, markOf(driver.NewID()))
	if a.liveFileName() == b.liveFileName() {
		t.Error("two operations share a proof")
	}
	a.End()
	b.End()
	if left := c.proofs(t); len(left) > 0 {
		t.Errorf("operations with marks have left %v", left)
	}

	op, id := c.Begin("test"), driver.NewID()
	op.update(t, markOf(id))
	op.update(t, unmarkOf(id))
	op.End()
	if left := c.proofs(t); len(left) != 1 {
		t.Errorf("there is %v", left)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if left := c.proofs(t); len(left) > 0 {
		t.Errorf("left after Close: %v", left)
	}
}

// TestMarkOfTheEndedIsDead: whatever happened before an operation has ended, none of its marks looks alive after.
func TestMarkOfTheEndedIsDead(t *testing.T) {
	for name, leave := range map[string]func(t *testing.T, op *Operation, id driver.ObjectID){
		"a mark": func(t *testing.T, op *Operation, id driver.ObjectID) { op.update(t, markOf(id)) },
		"one mark of two": func(t *testing.T, op *Operation, id driver.ObjectID) {
			other := driver.NewID()
			op.update(t, markOf(other))
			op.update(t, markOf(id))
			op.update(t, unmarkOf(other))
			op.update(t, unmarkOf(other)) // which counts once
		},
		"a mark whose removal was rolled back": func(t *testing.T, op *Operation, id driver.ObjectID) {
			op.update(t, markOf(id))
			broken := errors.New("broken")
			err := op.c.Update(op.In(t.Context()), Soft, func(tx *Tx) error { return errors.Join(tx.Unmark(id), broken) })
			if !errors.Is(err, broken) {
				t.Fatal(err)
			}
		},
		"a mark whose removal was given up": func(t *testing.T, op *Operation, id driver.ObjectID) {
			op.update(t, markOf(id))
			ctx, cancel := context.WithCancel(t.Context())
			if err := op.c.Update(op.In(ctx), Soft, func(tx *Tx) error { defer cancel(); return tx.Unmark(id) }); err == nil {
				t.Fatal("it was committed: this shows nothing")
			}
		},
		"a mark that is being removed": func(t *testing.T, op *Operation, id driver.ObjectID) {
			op.update(t, markOf(id))
			op.update(t, func(tx *Tx) error {
				err := tx.Unmark(id)
				op.End()
				return err
			})
			op.c.dead(t, op.token)
			after := op.c.Begin("test")
			after.update(t, markOf(id)) // and one of another, to be found below
			t.Cleanup(after.End)
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := openCatalog(t)
			op, id := c.Begin("test"), driver.NewID()
			leave(t, op, id)
			token := op.liveFileName()
			op.End()
			c.dead(t, token)

			next := c.Begin("test")
			defer next.End()
			next.update(t, markOf(driver.NewID()))
			if next.liveFileName() == token {
				t.Error("the next operation has the same proof of life")
			}
			c.dead(t, token)
		})
	}
}

// dead fails if the operation looks alive.
func (c *Catalog) dead(t *testing.T, token string) {
	t.Helper()
	if living, err := c.IsLive(token); err != nil || living {
		t.Errorf("%q looks alive (%v)", token, err)
	}
}

// TestUnsureProofGoes: if nobody knows whether marks were committed, their proof of life ends.
func TestUnsureProofGoes(t *testing.T) {
	c := openCatalog(t)
	op, id := c.Begin("test"), driver.NewID()
	op.update(t, markOf(id))
	op.update(t, unmarkOf(id))
	token := op.liveFileName()
	beginCounting(op.In(t.Context()))(0, errors.New("commit: input/output error"))
	op.End()
	c.dead(t, token)
	if left := c.proofs(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestRolledBackMarksDoNotCount: an operation whose marks were never committed leaves its proof of life.
func TestRolledBackMarksDoNotCount(t *testing.T) {
	c := openCatalog(t)
	op := c.Begin("test")
	broken := errors.New("broken")
	err := c.Update(op.In(t.Context()), Soft, func(tx *Tx) error {
		return errors.Join(tx.Mark(Mark{ID: driver.NewID()}), broken)
	})
	if !errors.Is(err, broken) {
		t.Fatal(err)
	}
	op.End()
	if left := c.proofs(t); len(left) != 1 {
		t.Errorf("there is %v", left)
	}
}

// TestEndedTakesNoMarkOfTheNext: an operation that has ended removes no mark of the one that has its proof of life now.
func TestEndedTakesNoMarkOfTheNext(t *testing.T) {
	c := openCatalog(t)
	op, next, id := c.Begin("test"), c.Begin("test"), driver.NewID()
	op.update(t, markOf(id))
	token := op.liveFileName()
	op.update(t, unmarkOf(id))
	op.End()
	next.update(t, markOf(id))
	defer next.End()
	if next.liveFileName() != token {
		t.Fatal("the next operation has another proof: this shows nothing")
	}

	op.update(t, unmarkOf(id))
	var marks []Mark
	if err := c.View(t.Context(), func(tx *Tx) (err error) {
		marks, err = tx.Marks()
		return err
	}); err != nil || len(marks) != 1 {
		t.Errorf("marks: %v, %v", marks, err)
	}
	if err := c.Update(op.In(t.Context()), Soft, markOf(driver.NewID())); err == nil {
		t.Error("an operation that has ended could mark")
	}
}

// TestRemovedProofIsNotUsed: a proof of life that somebody has removed proves nothing to others.
func TestRemovedProofIsNotUsed(t *testing.T) {
	c := openCatalog(t)
	op, id := c.Begin("test"), driver.NewID()
	op.update(t, markOf(id))
	op.update(t, unmarkOf(id))
	token := op.liveFileName()
	op.End()
	if err := os.Remove(filepath.Join(c.dir, "live", token)); err != nil {
		t.Fatal(err)
	}

	next := c.Begin("test")
	defer next.End()
	next.update(t, markOf(id))
	if living, err := c.IsLive(next.liveFileName()); err != nil || !living {
		t.Errorf("an operation at work looks dead (%v)", err)
	}
}
