package drivertest

import (
	"testing"

	"pando/internal/base/errs"
	"pando/internal/driver"

	"golang.org/x/sync/errgroup"
)

func (s *suite) batch(from driver.ObjectID) driver.Batch {
	s.t.Helper()
	batcher, ok := s.d.(driver.Batcher)
	if !ok {
		s.t.Skip("the driver is no Batcher")
	}
	b, err := batcher.Batch(s.ctx(), from)
	if err != nil {
		s.t.Fatal(err)
	}
	return b
}

// cloneBatch makes n clones at once.
func (s *suite) cloneBatch(from driver.ObjectID, n int) []driver.ObjectID {
	s.t.Helper()
	b := s.batch(from)
	ids := make([]driver.ObjectID, n)
	var g errgroup.Group
	for i := range ids {
		id := s.derived(from, driver.Volume)
		ids[i] = id.ID
		g.Go(func() error { return b.Clone(s.ctx(), id) })
	}

	if err := g.Wait(); err != nil {
		s.t.Fatal(err)
	}

	if err := b.Flush(s.ctx()); err != nil {
		s.t.Fatal(err)
	}

	if err := b.Close(); err != nil {
		s.t.Fatal(err)
	}

	return ids
}

func testBatch(t *testing.T, s *suite) {
	m := model{}
	from := s.written(m)
	ids := s.cloneBatch(from, 5)
	for _, id := range ids {
		s.check("in a batch", id, m)
	}

	s.wantExactly(append(ids, from)...)

	b := s.batch(from)
	defer b.Close()

	s.unchanged(errs.Exists, "a clone under an ID that is taken", func() error {
		again := s.derived(from, driver.Volume)
		again.ID = ids[0]
		return b.Clone(s.ctx(), again)
	})

	s.unchanged(errs.NotFound, "a batch of nothing", func() error {
		_, err := s.d.(driver.Batcher).Batch(s.ctx(), driver.NewID())
		return err
	})

	// The origin may be destroyed afterwards.
	s.destroy(from)
	for _, id := range ids {
		s.check("without the origin", id, m)
	}
}
