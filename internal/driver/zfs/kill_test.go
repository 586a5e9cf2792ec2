package zfs_test

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"testing"

	"pando/internal/driver"
	driverzfs "pando/internal/driver/zfs"
	"pando/internal/testing/faulttest"
)

// family is what the operations are tried on.
type family struct {
	vol, snap, child, other driver.ObjectID
}

// skipMost runs one of four tests, as an emulated machine is slow, unless all are to run.
func skipMost(t *testing.T) {
	t.Helper()
	if !faulttest.Full() && faulttest.Draw(t, 4) > 0 {
		t.Skip("not drawn: PANDO_TEST_FULL=1 runs it")
	}
}

// TestKilledBetweenSteps dies before the i-th program of each operation, for all i,
// and looks whether one Destroy takes away what was being made, or ends what was
// being destroyed, with nothing else touched.
func TestKilledBetweenSteps(t *testing.T) {
	zpool := newZpool(t, 1<<30)
	p := newPool(t, zpool+"/kill")
	type op struct {
		name string
		run  func(f family, id driver.Identity) error
		gone func(f family) driver.ObjectID // that the operation destroys; nil: it makes id

		alone bool // it needs no family
	}
	fs := driver.Native
	for _, o := range []op{
		{"create native", func(_ family, id driver.Identity) error { return p.d.Create(p.ctx(), id) }, nil, true},
		{"create ext4", func(_ family, id driver.Identity) error {
			id.FS, id.SizeBytes = driver.Ext4, 32<<20
			return p.d.Create(p.ctx(), id)
		}, nil, true},
		{"clone of a snapshot", func(f family, id driver.Identity) error {
			return p.d.Clone(p.ctx(), f.snap, id)
		}, nil, false},
		{"clone of a volume", func(f family, id driver.Identity) error { return p.d.Clone(p.ctx(), f.vol, id) }, nil, false},
		{"snapshot of a volume", func(f family, id driver.Identity) error {
			return p.d.Snapshot(p.ctx(), f.child, id)
		}, nil, false},
		{"snapshot of a snapshot", func(f family, id driver.Identity) error {
			return p.d.Snapshot(p.ctx(), f.snap, id)
		}, nil, false},
		{"flatten", func(f family, id driver.Identity) error { return p.d.Flatten(p.ctx(), f.vol, id, nil) }, nil, false},
		{"receive", func(f family, id driver.Identity) error {
			var b bytes.Buffer
			if err := p.d.Send(p.ctx(), f.snap, "", &b); err != nil {
				return err
			}
			id.Kind = driver.Snapshot
			return p.d.Receive(p.ctx(), id, "", &b)
		}, nil, false},
		{"destroy a volume", func(f family, _ driver.Identity) error {
			return p.d.Destroy(p.ctx(), f.vol)
		}, func(f family) driver.ObjectID { return f.vol }, false},
		{"destroy what has a clone", func(f family, _ driver.Identity) error {
			return p.d.Destroy(p.ctx(), f.child)
		}, func(f family) driver.ObjectID { return f.child }, false},
		{"destroy a snapshot", func(f family, _ driver.Identity) error {
			return p.d.Destroy(p.ctx(), f.snap)
		}, func(f family) driver.ObjectID { return f.snap }, false},
	} {
		t.Run(o.name, func(t *testing.T) {
			skipMost(t)
			for step := 0; ; step++ {
				var f family
				var all []driver.ObjectID
				if !o.alone {
					f.vol = p.create(fs)
					f.snap = p.snapshot(f.vol, fs)
					f.child = p.clone(f.snap, fs)
					f.other = p.clone(f.child, fs)
					all = []driver.ObjectID{f.vol, f.snap, f.child, f.other}
				}
				id := identity(driver.Volume, fs)
				killed := die(p.d, step, func() error { return o.run(f, id) }, t)
				p.open(false)
				what := fmt.Sprintf("killed before step %d", step)
				victim, left := id.ID, all
				if o.gone != nil {
					victim = o.gone(f)
					left = slices.DeleteFunc(all, func(x driver.ObjectID) bool { return x == victim })
				}
				if whole, half := p.list(); len(slices.DeleteFunc(append(whole, half...), func(x driver.ObjectID) bool {
					return x == victim || slices.Contains(left, x)
				})) > 0 {
					t.Errorf("%s: there is something that nobody made: %q, %q", what, whole, half)
				}
				p.must(p.d.Destroy(p.ctx(), victim))
				p.wantExactly(what, left...)
				for _, x := range left {
					p.must(p.d.Destroy(p.ctx(), x))
				}
				if n := p.names(); len(n) > 0 {
					t.Fatalf("LEAK: %s: %q", what, n)
				}
				if !killed {
					t.Logf("%d steps", step)
					return
				}
			}
		})
	}
}

type death struct{}

// die runs fn, which dies before its n-th step, and reports whether it did.
func die(d driver.Driver, n int, fn func() error, t *testing.T) (died bool) {
	t.Helper()
	defer driverzfs.OnStep(d, nil)
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(death); !ok {
				panic(r)
			}
			died = true
		}
	}()
	i := 0
	driverzfs.OnStep(d, func([]string) {
		if i++; i > n {
			panic(death{})
		}
	})
	if err := fn(); err != nil {
		t.Errorf("step %d: %v", n, err)
	}
	return false
}

// TestKilledWhileChanging does the same with changes of an identity: the old or the
// new one is there, and the change can be made again.
func TestKilledWhileChanging(t *testing.T) {
	p := newPool(t, newZpool(t, 1<<30)+"/kill")
	ctx := context.Background()
	for _, c := range []struct {
		name     string
		from, to driver.Kind
		change   func(id driver.Identity) error
	}{
		{"finish", driver.Scratch, driver.Generation, func(id driver.Identity) error { return p.d.Finish(ctx, id) }},
		{"rename", driver.Volume, driver.Volume, func(id driver.Identity) error { return p.d.SetIdentity(ctx, id) }},
		{"to a snapshot", driver.Volume, driver.Snapshot, func(id driver.Identity) error { return p.d.SetIdentity(ctx, id) }},
		{"to a volume", driver.Snapshot, driver.Volume, func(id driver.Identity) error { return p.d.SetIdentity(ctx, id) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			skipMost(t)
			for step := 0; ; step++ {
				vol := p.create(driver.Native)
				p.write(vol, "a", "content")
				id := identity(c.from, driver.Native)
				if c.from == driver.Snapshot {
					p.must(p.d.Snapshot(ctx, vol, id))
				} else {
					p.must(p.d.Clone(ctx, vol, id))
				}
				clone := p.clone(id.ID, driver.Native)
				next := id
				next.Kind, next.Name = c.to, "changed"
				died := die(p.d, step, func() error { return c.change(next) }, t)
				p.open(false)
				p.wantExactly(fmt.Sprint("step ", step), vol, id.ID, clone)
				got := p.identity(id.ID)
				if got.Name != id.Name && got.Name != next.Name || got.Kind != id.Kind && got.Kind != next.Kind {
					t.Errorf("step %d: the identity is %+v", step, got)
				}
				for range 2 {
					p.must(c.change(next))
					if got := p.identity(id.ID); got.Name != next.Name || got.Kind != next.Kind {
						t.Errorf("step %d, again: the identity is %+v", step, got)
					}
				}
				if a, err := p.d.Attachment(ctx, id.ID); err != nil || a.ReadOnly != (c.to != driver.Volume) {
					t.Errorf("attachment %+v, %v", a, err)
				}
				p.wantFile(id.ID, "a", "content")
				p.wantFile(clone, "a", "content")
				p.wantExactly("changed", vol, id.ID, clone)
				for _, x := range []driver.ObjectID{id.ID, vol, clone} {
					p.must(p.d.Destroy(ctx, x))
				}
				if n := p.names(); len(n) > 0 {
					t.Fatalf("LEAK: %q", n)
				}
				if !died {
					return
				}
			}
		})
	}
}

func (p *pool) identity(id driver.ObjectID) driver.Identity {
	p.t.Helper()
	for o, err := range p.d.List(p.ctx()) {
		p.must(err)
		if o.ID == id {
			return o.Identity
		}
	}
	p.t.Fatalf("%s is not listed", id)
	return driver.Identity{}
}
