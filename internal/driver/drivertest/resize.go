package drivertest

import (
	"testing"

	"pando/internal/base/errs"
	"pando/internal/driver"
)

// testResizer: an image gets another size and keeps its content, and nothing else changes.
func testResizer(t *testing.T, s *suite) {
	r, ok := s.d.(driver.Resizer)
	if !ok {
		t.Skip("the driver is no Resizer")
	}

	id := s.fullIdentity(s.fast)
	if err := s.d.Create(s.ctx(), id); err != nil {
		t.Fatal(err)
	}

	m := model{}
	s.put(id.ID, m, "a", file{1, 5_000})
	id = s.list()[id.ID].Identity
	size := func(want int64) {
		t.Helper()
		got, err := s.d.(driver.Inspector).Inspect(s.ctx(), id)
		if err != nil || got.SizeBytes != want || got.Err != nil {
			t.Errorf("%+v, %v, wanted %d bytes", got, err, want)
		}
	}

	// Larger, and back, each twice.
	for _, n := range []int64{id.SizeBytes * 2, id.SizeBytes * 2, id.SizeBytes, id.SizeBytes} {
		if err := r.Resize(s.ctx(), id.ID, n); err != nil {
			t.Fatal(err)
		}
		size(n)
		s.wantIdentity(id)
	}

	s.check("after Resize", id.ID, m)
	s.wantExactly(id.ID)

	if err := r.Resize(s.ctx(), driver.NewID(), 1<<30); !errs.Is(err, errs.NotFound) {
		t.Errorf("an object that does not exist: %v", err)
	}
	s.wantExactly(id.ID)
}
