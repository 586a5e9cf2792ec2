package drivertest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"pando/internal/driver"
	"pando/internal/testing/faulttest"
)

// randomSteps is how many operations a run makes, randomMost how many objects
// it keeps at most.
const (
	randomSteps = 250
	randomMost  = 14
)

// testRandom does random operations and compares every object with a model of
// it, all the time.
func testRandom(t *testing.T, s *suite) {
	r := faulttest.Rand(t)
	type object struct {
		identity driver.Identity
		content  model
	}
	objects := map[driver.ObjectID]*object{}

	// pick returns a random object, in an order that depends on the seed only.
	var order []driver.ObjectID
	pick := func(writable bool) *object {
		var from []driver.ObjectID
		for _, id := range order {
			if !writable || objects[id].identity.Kind == driver.Volume {
				from = append(from, id)
			}
		}
		if len(from) == 0 {
			return nil
		}
		return objects[from[r.IntN(len(from))]]
	}

	add := func(id driver.Identity, m model) {
		objects[id.ID] = &object{identity: id, content: m}
		order = append(order, id.ID)
	}
	drop := func(id driver.ObjectID) {
		delete(objects, id)
		order = slices.DeleteFunc(order, func(x driver.ObjectID) bool { return x == id })
	}
	var history []string
	note := func(format string, args ...any) { history = append(history, fmt.Sprintf(format, args...)) }
	defer func() {
		if t.Failed() {
			for i, h := range history {
				t.Logf("%3d %s", i, h)
			}
		}
	}()

	derive := func(o *object, kind driver.Kind) driver.Identity {
		id := s.identity(kind, s.fast)
		id.Origin, id.OriginID = o.identity.Name, o.identity.ID
		id.Ephemeral = r.IntN(4) == 0
		return id
	}

	steps := randomSteps
	if s.target.Slow {
		steps /= 3
	}

	for range steps {
		if t.Failed() {
			return
		}

		n := r.IntN(100)
		full := len(objects) >= randomMost
		switch {
		case len(objects) == 0 || n < 5 && !full:
			id := s.identity(driver.Volume, s.fast)
			note("create %s", id.ID)
			if err := s.d.Create(s.ctx(), id); err != nil {
				t.Fatalf("create: %v", err)
			}
			add(id, model{})
		case n < 20 && !full:
			o := pick(false)
			id := derive(o, driver.Volume)
			note("clone %s to %s", o.identity.ID, id.ID)
			if err := s.d.Clone(s.ctx(), o.identity.ID, id); err != nil {
				t.Fatalf("clone: %v", err)
			}
			add(id, o.content.copy())
		case n < 32 && !full:
			o := pick(false)
			id := derive(o, driver.Snapshot)
			sealer, can := s.d.(driver.Sealer)
			if can && r.IntN(2) == 0 {
				note("seal %s to %s", o.identity.ID, id.ID)
				if err := sealer.Seal(s.ctx(), o.identity.ID, id, nil); err != nil {
					t.Fatalf("seal: %v", err)
				}
			} else {
				note("snapshot %s to %s", o.identity.ID, id.ID)
				if err := s.d.Snapshot(s.ctx(), o.identity.ID, id); err != nil {
					t.Fatalf("snapshot: %v", err)
				}
			}

			add(id, o.content.copy())
		case n < 46:
			o := pick(false)
			note("destroy %s", o.identity.ID)
			s.destroy(o.identity.ID)
			drop(o.identity.ID)
		case n < 75:
			if o := pick(true); o != nil {
				name := fileNames[r.IntN(len(fileNames))]
				f := file{r.Uint64(), sizeFrom(r)}
				note("write %d bytes to %s of %s", f.n, name, o.identity.ID)
				s.put(o.identity.ID, o.content, name, f)
			}
		case n < 82:
			if o := pick(true); o != nil && len(o.content) > 0 {
				names := slices.Sorted(maps.Keys(o.content))
				name := names[r.IntN(len(names))]
				note("remove %s of %s", name, o.identity.ID)
				s.edit(o.identity.ID, func(c content) error { return c.remove(name) })
				delete(o.content, name)
			}
		case n < 86:
			if rw, ok := s.d.(driver.Rewriter); ok {
				o := pick(false)
				o.identity = s.list()[o.identity.ID].Identity
				o.identity.Name = fmt.Sprint("renamed", r.IntN(1000))
				note("rename %s to %s", o.identity.ID, o.identity.Name)
				if err := rw.SetIdentity(s.ctx(), o.identity); err != nil {
					t.Fatalf("SetIdentity: %v", err)
				}
			}
		case n < 88:
			note("open again")
			s.reopen()
		case n < 90:
			o := pick(false)
			note("measure %s", o.identity.ID)
			s.usage(o.identity.ID)
		default:
			o := pick(false)
			note("check %s", o.identity.ID)
			s.check("in between", o.identity.ID, o.content)
		}

		s.wantExactly(order...)
	}

	for id, o := range objects {
		s.check("at the end", id, o.content)
		if got := s.list()[id].Identity; got.Name != o.identity.Name || got.Kind != o.identity.Kind {
			t.Errorf("at the end, identity %+v, want %+v", got, o.identity)
		}
	}
}

// sizeFrom picks a size of a file: mostly small, at times at a border.
func sizeFrom(r *rand.Rand) int {
	switch r.IntN(6) {
	case 0:
		return r.IntN(100)
	case 1:
		return []int{0, 1, 4095, 4096, 4097, 65536}[r.IntN(6)]
	case 2:
		return r.IntN(1 << 20)
	}
	return r.IntN(20_000)
}
