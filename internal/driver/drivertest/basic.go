package drivertest

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/testing/faulttest"
)

func testCaps(t *testing.T, s *suite) {
	c := s.caps
	if c.Name == "" || len(c.FS) == 0 {
		t.Errorf("Caps %+v lack a name or a kind of filesystem", c)
	}
	if !slices.Contains([]driver.CloneCost{driver.CostConstant, driver.CostExtents, driver.CostData}, c.CloneCost) {
		t.Errorf("CloneCost %q is none of the contract's", c.CloneCost)
	}
	if !reflect.DeepEqual(c, s.d.Caps()) {
		t.Error("Caps change from call to call")
	}
}

// testLifecycle makes one of each, for every kind of volume, and compares the
// whole content.
func testLifecycle(t *testing.T, s *suite) {
	for _, fs := range s.caps.FS {
		t.Run(string(fs), func(t *testing.T) {
			s := s.with(t)
			s.wantExactly()
			vol := s.create(fs)
			s.wantExactly(vol)
			s.edit(vol, func(c content) error {
				if r, ok := c.(tree); ok {
					return r.fillTree()
				}
				return c.put("a", file{1, 100_000}.bytes())
			})

			want := s.fingerprint(vol)

			snap := s.snapshot(vol)
			fromSnap := s.clone(snap)
			fromVol := s.clone(vol)
			s.wantExactly(vol, snap, fromSnap, fromVol)

			for what, id := range map[string]driver.ObjectID{
				"volume": vol, "snapshot": snap, "clone of snapshot": fromSnap, "clone of volume": fromVol,
			} {
				if got := s.fingerprint(id); got != want {
					t.Errorf("the %s differs from what was written:\n%s\nwant:\n%s", what, got, want)
				}
				a, err := s.d.Attachment(s.ctx(), id)
				if err != nil {
					t.Fatal(err)
				}
				if a.FS != fs || a.ReadOnly != (id == snap) || (a.Image == "") != (fs == driver.Native) {
					t.Errorf("attachment of the %s is %+v", what, a)
				}
			}

			for _, id := range []driver.ObjectID{vol, snap, fromSnap, fromVol} {
				s.destroy(id)
			}

			s.wantExactly()
		})
	}
}

// with is the suite for a subtest.
func (s *suite) with(t *testing.T) *suite {
	return &suite{t: t, open: s.open, target: s.target, dir: s.dir, d: s.d, caps: s.caps, fast: s.fast,
		activated: s.activated, mounts: t.TempDir()}
}

// testIsolation writes everywhere and looks everywhere else.
func testIsolation(t *testing.T, s *suite) {
	for _, fs := range s.caps.FS {
		if s.target.Slow && (fs == driver.Ext4 || fs == driver.XFS) {
			continue // to the driver they are as raw images
		}

		t.Run(string(fs), func(t *testing.T) {
			s := s.with(t)
			vol, m := s.create(fs), model{}
			s.put(vol, m, "a", file{1, 300_000})
			s.put(vol, m, "b", file{2, 70_000})
			snap := s.snapshot(vol)
			first, second := s.clone(snap), s.clone(snap)
			live := s.clone(vol)
			models := map[driver.ObjectID]model{vol: m, snap: m.copy(), first: m.copy(), second: m.copy(), live: m.copy()}
			checkAll := func(after string) {
				t.Helper()
				for id, m := range models {
					s.check(fmt.Sprintf("%s, object %s", after, id), id, m)
				}
			}

			checkAll("at first")
			s.put(first, models[first], "a", file{3, 300_000}) // in place
			checkAll("after writing to a clone")
			s.put(vol, models[vol], "b", file{4, 90_000})
			checkAll("after writing to the origin")
			s.put(second, models[second], "c", file{5, 1_000})
			s.edit(second, func(c content) error { return c.remove("a") })
			delete(models[second], "a")
			checkAll("after removing in a clone")
			s.put(live, models[live], "b", file{6, 1})
			checkAll("after writing to a clone of the live volume")
			for id := range models {
				s.destroy(id)
			}
		})
	}
}

// testDestroyOrder destroys a family in every possible order.
func testDestroyOrder(t *testing.T, s *suite) {
	const members = 4
	every := 1
	if s.target.Slow {
		every = 5 // no divisor of anything here
	}

	n := faulttest.Draw(t, every)
	for order := range permutations(members) {
		if n++; n%every != 0 {
			continue
		}

		vol, m := s.create(s.fast), model{}
		s.put(vol, m, "a", file{1, 50_000})
		snap := s.snapshot(vol)
		child := s.clone(snap)
		cm := m.copy()
		s.put(child, cm, "b", file{2, 50_000})
		grandchild := s.clone(child)
		gm := cm.copy()
		s.put(grandchild, gm, "c", file{3, 50_000})
		family := [members]driver.ObjectID{vol, snap, child, grandchild}
		models := [members]model{m, m.copy(), cm, gm}
		for i, victim := range order {
			s.destroy(family[victim])
			var left []driver.ObjectID
			for _, k := range order[i+1:] {
				left = append(left, family[k])
				s.check(fmt.Sprintf("order %v: object %d after destroying %d", order, k, victim), family[k], models[k])
			}
			s.wantExactly(left...)
		}
	}
}

// permutations yields all orders of n things.
func permutations(n int) func(yield func([]int) bool) {
	return func(yield func([]int) bool) {
		var rec func(prefix []int) bool
		rec = func(prefix []int) bool {
			if len(prefix) == n {
				return yield(prefix)
			}
			for i := range n {
				if !slices.Contains(prefix, i) && !rec(append(slices.Clone(prefix), i)) {
					return false
				}
			}
			return true
		}

		rec(nil)
	}
}

// testChain clones clones, adds something in each, and looks at all of them.
func testChain(t *testing.T, s *suite) {
	const depth = 6
	ids, models := []driver.ObjectID{s.create(s.fast)}, []model{{}}
	for i := range depth {
		s.put(ids[i], models[i], fileNames[i], file{uint64(i), 40_000})
		ids = append(ids, s.clone(ids[i]))
		models = append(models, models[i].copy())
	}
	for i := range ids {
		s.check(fmt.Sprintf("clone number %d", i), ids[i], models[i])
	}
	s.wantExactly(ids...)
}

// fullIdentity is an identity with something in every field.
func (s *suite) fullIdentity(fs driver.FS) driver.Identity {
	id := s.identity(driver.Volume, fs)
	id.Name = "a-name/with \"quotes\" <&> ünïcode"
	id.Golden = "golden"
	id.Generation = 7
	id.Volume = driver.NewID()
	id.Origin = "web@3"
	id.OriginID = driver.NewID()
	id.CreatedAt = time.Date(2026, 1, 2, 3, 4, 5, 678_901_234, time.UTC)
	id.ExpiresAt = time.Date(2027, 1, 2, 3, 4, 5, 0, time.UTC)
	return id
}

// wantIdentity checks that List reports an identity as it was given; what the
// driver itself fills in must be filled in.
func (s *suite) wantIdentity(want driver.Identity) {
	s.t.Helper()
	got := s.list()[want.ID].Identity
	if want.Sector == 0 {
		want.Sector = got.Sector
	}
	if want.SizeBytes == 0 {
		want.SizeBytes = got.SizeBytes
	}
	if !reflect.DeepEqual(got, want) {
		s.t.Errorf("identity is\n%+v, was given\n%+v", got, want)
	}
	if (got.SizeBytes == 0) != !got.FS.IsImage() {
		s.t.Errorf("identity of a %s volume has size %d", got.FS, got.SizeBytes)
	}
}

func testIdentity(t *testing.T, s *suite) {
	id := s.fullIdentity(s.fast)
	if err := s.d.Create(s.ctx(), id); err != nil {
		t.Fatal(err)
	}

	s.wantIdentity(id)

	clone := s.fullIdentity(s.fast)
	clone.Name, clone.OriginID = "clone", id.ID
	if err := s.d.Clone(s.ctx(), id.ID, clone); err != nil {
		t.Fatal(err)
	}

	s.wantIdentity(clone)

	gen := s.fullIdentity(s.fast)
	gen.Kind = driver.Generation
	if err := s.d.Snapshot(s.ctx(), id.ID, gen); err != nil {
		t.Fatal(err)
	}

	s.wantIdentity(gen)

	eph := s.fullIdentity(s.fast)
	eph.Kind, eph.Ephemeral = driver.Scratch, true
	if err := s.d.Clone(s.ctx(), gen.ID, eph); err != nil {
		t.Fatal(err)
	}

	s.wantIdentity(eph)
	s.wantExactly(id.ID, clone.ID, gen.ID, eph.ID)
	if a, err := s.d.Attachment(s.ctx(), gen.ID); err != nil || !a.ReadOnly {
		t.Errorf("attachment of a generation: %+v, %v; must be read-only", a, err)
	}

	// An identity that the driver cannot store must not leave an object.
	long := s.identity(driver.Volume, s.fast)
	long.Name = string(make([]byte, 64<<10))
	s.unchanged(errs.Invalid, "create with an identity of 64 KiB", func() error { return s.d.Create(s.ctx(), long) })
	s.unchanged(errs.Invalid, "clone with an identity of 64 KiB", func() error { return s.d.Clone(s.ctx(), id.ID, long) })
}

func testRewriter(t *testing.T, s *suite) {
	rw, ok := s.d.(driver.Rewriter)
	if !ok {
		t.Skip("the driver is no Rewriter")
	}

	id := s.fullIdentity(s.fast)
	if err := s.d.Create(s.ctx(), id); err != nil {
		t.Fatal(err)
	}

	m := model{}
	s.put(id.ID, m, "a", file{1, 5_000})
	other := s.create(s.fast)

	id.Name, id.ExpiresAt = "renamed", time.Time{}
	for range 2 { // even when nothing changes
		if err := rw.SetIdentity(s.ctx(), id); err != nil {
			t.Fatal(err)
		}
		s.wantIdentity(id)
		s.wantExactly(id.ID, other)
	}

	s.check("after SetIdentity", id.ID, m)

	// What is being made becomes what it is for.
	id.Kind = driver.Generation
	if err := rw.SetIdentity(s.ctx(), id); err != nil {
		t.Fatal(err)
	}

	if a, err := s.d.Attachment(s.ctx(), id.ID); err != nil || !a.ReadOnly {
		t.Errorf("attachment of what became a generation: %+v, %v; must be read-only", a, err)
	}

	s.check("after becoming a generation", id.ID, m)

	unknown := s.fullIdentity(s.fast)
	s.unchanged(errs.NotFound, "SetIdentity of an unknown object", func() error {
		return rw.SetIdentity(s.ctx(), unknown)
	})
}

func testFinisher(t *testing.T, s *suite) {
	fin, ok := s.d.(driver.Finisher)
	if !ok {
		t.Skip("the driver is no Finisher")
	}

	vol, m := s.create(s.fast), model{}
	s.put(vol, m, "a", file{1, 5_000})
	gen := s.list()[vol].Identity
	gen.Kind, gen.Golden, gen.Generation = driver.Generation, "golden", 3
	if err := fin.Finish(s.ctx(), gen); err != nil {
		t.Fatal(err)
	}

	s.wantIdentity(gen)
	s.wantExactly(vol)
	if a, err := s.d.Attachment(s.ctx(), vol); err != nil || !a.ReadOnly {
		t.Errorf("attachment of a finished object: %+v, %v; must be read-only", a, err)
	}

	s.check("after Finish", vol, m)
	s.check("clone of a finished object", s.clone(vol), m)
	unknown := s.fullIdentity(s.fast)
	unknown.Kind = driver.Generation
	s.unchanged(errs.NotFound, "Finish of an unknown object", func() error { return fin.Finish(s.ctx(), unknown) })
}

// testReopen checks that a pool is all in its directory.
func testReopen(t *testing.T, s *suite) {
	vol, m := s.create(s.fast), model{}
	s.put(vol, m, "a", file{1, 5_000})
	snap := s.snapshot(vol)
	before := s.list()
	s.reopen()
	if after := s.list(); !reflect.DeepEqual(before, after) {
		t.Errorf("opened again, List yields\n%+v, before\n%+v", after, before)
	}

	s.check("opened again", snap, m)

	// create on what exists changes nothing.
	again, err := s.open(s.ctx(), s.dir, poolID, true)
	if err != nil {
		t.Fatalf("open with create on an existing pool: %v", err)
	}

	closeDriver(t, again)
	s.wantExactly(vol, snap)

	// Objects of another pool are not this one's to use.
	foreign, err := s.open(s.ctx(), s.dir, "another-pool", false)
	if err != nil {
		t.Fatal(err)
	}

	defer closeDriver(t, foreign)

	if _, err := foreign.Attachment(s.ctx(), vol); !errs.Is(err, errs.Damaged) {
		t.Errorf("attachment of an object of another pool: %v, want kind damaged", err)
	}

	if d, err := s.open(s.ctx(), t.TempDir(), poolID, false); err == nil {
		closeDriver(t, d)
		t.Error("opening a directory without a pool succeeded")
	}
}

func testErrors(t *testing.T, s *suite) {
	ctx := s.ctx()
	vol, m := s.create(s.fast), model{}
	s.put(vol, m, "a", file{1, 5_000})
	snap := s.snapshot(vol)
	unknown := driver.NewID()

	for range 2 {
		if err := s.d.Destroy(ctx, unknown); err != nil {
			t.Errorf("destroy of what never existed: %v", err)
		}
	}

	gone := s.clone(vol)
	for range 3 {
		s.destroy(gone)
	}

	s.unchanged(errs.NotFound, "clone of an unknown object", func() error {
		return s.d.Clone(ctx, unknown, s.identity(driver.Volume, s.fast))
	})
	s.unchanged(errs.NotFound, "clone of a destroyed object", func() error {
		return s.d.Clone(ctx, gone, s.identity(driver.Volume, s.fast))
	})
	s.unchanged(errs.NotFound, "snapshot of an unknown object", func() error {
		return s.d.Snapshot(ctx, unknown, s.identity(driver.Snapshot, s.fast))
	})
	s.unchanged(errs.NotFound, "usage of an unknown object", func() error {
		_, err := s.d.Usage(ctx, unknown)
		return err
	})
	s.unchanged(errs.NotFound, "attachment of an unknown object", func() error {
		_, err := s.d.Attachment(ctx, unknown)
		return err
	})

	taken := func(existing driver.ObjectID) driver.Identity {
		id := s.identity(driver.Volume, s.fast)
		id.ID = existing
		return id
	}

	s.unchanged(errs.Exists, "create of an existing volume", func() error { return s.d.Create(ctx, taken(vol)) })
	s.unchanged(errs.Exists, "clone onto an existing volume", func() error { return s.d.Clone(ctx, snap, taken(vol)) })
	s.unchanged(errs.Exists, "clone onto its own origin", func() error { return s.d.Clone(ctx, vol, taken(vol)) })
	s.unchanged(errs.Exists, "clone onto an existing snapshot", func() error { return s.d.Clone(ctx, vol, taken(snap)) })
	s.unchanged(errs.Exists, "snapshot onto an existing volume", func() error {
		return s.d.Snapshot(ctx, snap, taken(vol))
	})
	s.check("after it was refused", vol, m)
	s.check("after it was refused", snap, m)

	for _, fs := range []driver.FS{driver.Native, driver.Ext4, driver.XFS, driver.None, "ntfs"} {
		if !s.caps.Supports(fs) {
			id := s.identity(driver.Volume, fs)
			s.unchanged(errs.Unsupported, "create of a "+string(fs)+" volume", func() error { return s.d.Create(ctx, id) })
		}
	}

	s.wantExactly(vol, snap)
}

// testSizes is about the sizes of images.
func testSizes(t *testing.T, s *suite) {
	images := 0
	for _, fs := range s.caps.FS {
		if !fs.IsImage() {
			continue
		}

		images++
		vol, m := s.create(fs), model{}
		s.put(vol, m, "a", file{1, 100_000})
		size := sizeOf(fs)

		larger := s.identity(driver.Volume, fs)
		larger.SizeBytes = size + 16<<20
		if err := s.d.Clone(s.ctx(), vol, larger); err != nil {
			t.Fatalf("clone a %s volume with a larger size: %v", fs, err)
		}

		s.wantIdentity(larger)
		s.check("larger clone", larger.ID, m)

		same := s.identity(driver.Volume, fs)
		same.SizeBytes = 0
		if err := s.d.Clone(s.ctx(), vol, same); err != nil {
			t.Fatalf("clone a %s volume without a size: %v", fs, err)
		}

		if got := s.list()[same.ID].Identity.SizeBytes; got != size {
			t.Errorf("a clone made without a size says %d bytes, its origin has %d", got, size)
		}

		smaller := s.identity(driver.Volume, fs)
		smaller.SizeBytes = size - 4096
		s.unchanged(errs.Invalid, "clone with a smaller size", func() error { return s.d.Clone(s.ctx(), vol, smaller) })
		s.unchanged(errs.Invalid, "snapshot with a smaller size", func() error { return s.d.Snapshot(s.ctx(), vol, smaller) })
		tiny := s.identity(driver.Volume, fs)
		for _, n := range []int64{0, 1, -1} {
			tiny.SizeBytes = n
			s.unchanged(errs.Invalid, fmt.Sprintf("create a %s volume of %d bytes", fs, n), func() error {
				return s.d.Create(s.ctx(), tiny)
			})
		}
	}

	if images == 0 {
		t.Skip("the driver keeps no images")
	}
}
