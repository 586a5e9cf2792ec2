package drivertest

import (
	"testing"

	"pando/internal/driver"
)

// testPower cuts the power right after each operation has returned: the object,
// its identity and its content must be there afterwards.
func testPower(t *testing.T, target Target) {
	if target.Power == nil {
		t.Skip("this target has no filesystem whose power can be cut")
	}

	for name, op := range map[string]func(s *suite, m model) driver.ObjectID{
		"Create": func(s *suite, m model) driver.ObjectID {
			clear(m)
			return s.create(s.fast)
		},
		// The origins of these have just been written, and not synced by anyone.
		"Clone":         func(s *suite, m model) driver.ObjectID { return s.clone(s.written(m)) },
		"Snapshot":      func(s *suite, m model) driver.ObjectID { return s.snapshot(s.written(m)) },
		"CloneOfClone":  func(s *suite, m model) driver.ObjectID { return s.clone(s.clone(s.written(m))) },
		"SecondOfTwins": func(s *suite, m model) driver.ObjectID { id := s.written(m); s.clone(id); return s.clone(id) },
		"Batch":         func(s *suite, m model) driver.ObjectID { return s.cloneBatch(s.written(m), 5)[0] },
		"Seal": func(s *suite, m model) driver.ObjectID {
			sealer := s.sealer()
			from := s.written(m)
			id := s.derived(from, driver.Generation)
			if err := sealer.Seal(s.ctx(), from, id, nil); err != nil {
				s.t.Fatal(err)
			}
			return id.ID
		},
		"Receive": func(s *suite, m model) driver.ObjectID {
			s.streamer()
			vol := s.create(driver.Native)
			s.put(vol, m, "a", file{1, 1 << 20})
			first := s.snapshot(vol)
			s.put(vol, m, "b", file{2, 100})
			return s.receive(s.send(s.snapshot(vol), first), s.receive(s.send(first, ""), ""))
		},
		"SetIdentity": func(s *suite, m model) driver.ObjectID {
			rw, ok := s.d.(driver.Rewriter)
			if !ok {
				s.t.Skip("the driver is no Rewriter")
			}
			vol := s.snapshot(s.written(m))
			id := s.list()[vol].Identity
			id.Kind, id.Generation = driver.Generation, 5
			if err := rw.SetIdentity(s.ctx(), id); err != nil {
				s.t.Fatal(err)
			}
			return vol
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := target.Power(t)
			s := newSuite(t, target, p.Dir())
			m := model{}
			flushes := p.Flushes()
			id := op(s, m)

			// An effect that reached the device only by luck was not flushed.
			if p.Flushes() == flushes {
				t.Error("the device was given no flush")
			}

			want := s.list()[id].Identity
			s.close()
			s.dir = p.Cut()
			d, err := s.open(s.ctx(), s.dir, poolID, false)
			if err != nil {
				t.Fatalf("open after the power cut: %v", err)
			}

			s.use(d)
			o, ok := s.list()[id]
			if !ok || !o.Whole {
				t.Fatalf("after the power cut List yields %+v (%v) for an object that had been made", o, ok)
			}
			if o.Identity != want {
				t.Errorf("after the power cut the identity is %+v, was %+v", o.Identity, want)
			}

			s.check("after the power cut", id, m)
			s.finish()
		})
	}
}

// written makes a volume with content that is in memory only.
func (s *suite) written(m model) driver.ObjectID {
	s.t.Helper()
	vol := s.create(s.fast)
	s.put(vol, m, "a", file{1, 1 << 20})
	s.put(vol, m, "b", file{2, 100})
	return vol
}
