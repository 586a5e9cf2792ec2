package drivertest

import (
	"testing"

	"pando/internal/base/errs"
	"pando/internal/driver"
)

// testInspector: what is broken around an object's content is seen and mended,
// and the content stays.
func testInspector(t *testing.T, s *suite) {
	ins, ok := s.d.(driver.Inspector)
	if !ok {
		t.Skip("the driver is no Inspector")
	}

	id := s.fullIdentity(s.fast)
	if err := s.d.Create(s.ctx(), id); err != nil {
		t.Fatal(err)
	}

	m := model{}
	s.put(id.ID, m, "a", file{1, 5_000})
	id = s.list()[id.ID].Identity
	sp := s.spoiler()
	inspect := func(what string, want driver.Condition) {
		t.Helper()
		got, err := ins.Inspect(s.ctx(), id)
		if err != nil || got.Data != want.Data || (got.Mode == "") != (want.Mode == "") || got.Leftover != want.Leftover ||
			got.Err != nil {
			t.Errorf("%s: %+v, %v; wanted %+v", what, got, err, want)
		}
		if got.Data && got.SizeBytes != id.SizeBytes && s.fast.IsImage() {
			t.Errorf("%s: %d bytes, wanted %d", what, got.SizeBytes, id.SizeBytes)
		}
	}

	inspect("whole", driver.Condition{Data: true})
	spoil := sp.More()
	spoil["its identity is gone"] = func(id driver.ObjectID) bool { sp.Remove(id); return false }
	spoil["its identity is garbage"] = func(id driver.ObjectID) bool { sp.Put(id, "{garbage"); return false }
	for what, spoil := range spoil {
		inspect(what, driver.Condition{Data: true, Leftover: spoil(id.ID)})
		for range 2 {
			if err := ins.Restore(s.ctx(), id); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			s.wantIdentity(id)
			s.wantExactly(id.ID)
			inspect("restored", driver.Condition{Data: true})
		}
	}

	s.check("after Restore", id.ID, m)

	// What is called a generation must be one.
	id.Kind = driver.Generation
	if got, err := ins.Inspect(s.ctx(), id); err != nil || (got.Mode == "") != (s.caps.Name == "plain") {
		t.Errorf("a writable generation: %+v, %v", got, err)
	}

	if err := ins.Restore(s.ctx(), id); err != nil {
		t.Fatal(err)
	}

	inspect("a restored generation", driver.Condition{Data: true})
	if a, err := s.d.Attachment(s.ctx(), id.ID); err != nil || !a.ReadOnly {
		t.Errorf("attachment: %+v, %v; must be read-only", a, err)
	}

	s.check("after becoming a generation", id.ID, m)
	s.destroy(id.ID)
	inspect("destroyed", driver.Condition{})
	s.unchanged(errs.NotFound, "Restore of what is not there", func() error { return ins.Restore(s.ctx(), id) })
}

func firstOf(all ...error) error {
	for _, err := range all {
		if err != nil {
			return err
		}
	}
	return nil
}
