package drivertest

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/driver"

	"golang.org/x/sys/unix"
)

// fragmentBytes is the length of an extent of a fragmented image.
const fragmentBytes = 4096

// fragment writes every other block of the 8 MiB of a raw image that begin at the
// offset at, so that each is an extent of its own, and returns how many.
func (s *suite) fragment(id driver.ObjectID, at int64) int {
	s.t.Helper()
	a, err := s.d.Attachment(s.ctx(), id)
	if err != nil {
		s.t.Fatal(err)
	}

	f, err := os.OpenFile(a.Image, os.O_RDWR|unix.O_DSYNC, 0)
	if err != nil {
		s.t.Fatal(err)
	}

	defer f.Close()

	const block, blocks = fragmentBytes, 1024
	order := make([]int64, 0, blocks)
	for i := range int64(blocks) {
		order = append(order, i*37%blocks*2*block)
	}

	for i, off := range order {
		if _, err := f.WriteAt(file{uint64(i), block}.bytes(), at+off); err != nil {
			s.t.Fatal(err)
		}
	}

	return blocks
}

func (s *suite) sealer() driver.Sealer {
	s.t.Helper()
	sealer, ok := s.d.(driver.Sealer)
	if !ok {
		s.t.Skip("the driver is no Sealer")
	}
	if !s.caps.Supports(driver.None) {
		s.t.Skip("only raw images can be fragmented deliberately")
	}
	return sealer
}

// fewExtents is what a sealed image of some megabytes may lie in.
const fewExtents = 64

func testSeal(t *testing.T, s *suite) {
	sealer := s.sealer()
	vol := s.create(driver.None)
	pieces := s.fragment(vol, 0)
	if u := s.usage(vol); u.Extents < int64(pieces)/2 {
		t.Fatalf("usage %+v after writing %d separate blocks: this test does not fragment", u, pieces)
	}

	want := s.fingerprint(vol)

	id := s.derived(vol, driver.Generation)
	var last, all int64
	calls := 0
	err := sealer.Seal(s.ctx(), vol, id, func(done, total int64) {
		calls++
		if done < last || done > total || all != 0 && total != all {
			t.Errorf("progress goes from %d of %d to %d of %d", last, all, done, total)
		}
		last, all = done, total
	})
	if err != nil {
		t.Fatal(err)
	}
	if calls == 0 || last != all || all == 0 {
		t.Errorf("progress ended at %d of %d after %d calls", last, all, calls)
	}

	s.wantIdentity(id)
	if a, err := s.d.Attachment(s.ctx(), id.ID); err != nil || !a.ReadOnly {
		t.Errorf("attachment of a sealed generation: %+v, %v; must be read-only", a, err)
	}

	if s.fingerprint(id.ID) != want || s.fingerprint(vol) != want {
		t.Error("sealing changed the content")
	}

	if u := s.usage(id.ID); u.Extents > fewExtents {
		t.Errorf("a sealed image lies in %d extents, want at most %d", u.Extents, fewExtents)
	}

	clone := s.clone(id.ID)
	if u := s.usage(clone); u.Extents > fewExtents || u.ExclusiveBytes != 0 {
		t.Errorf("usage of a clone of a sealed image is %+v, want at most %d extents, all shared", u, fewExtents)
	}

	if s.fingerprint(clone) != want {
		t.Error("the clone of a sealed image differs from it")
	}

	// Sealing what is sealed, and what is empty, is nothing special.
	again := s.derived(id.ID, driver.Generation)
	if err := sealer.Seal(s.ctx(), id.ID, again, nil); err != nil {
		t.Fatal(err)
	}

	if s.fingerprint(again.ID) != want {
		t.Error("sealing a sealed image changed the content")
	}

	empty := s.create(driver.None)
	sealed := s.derived(empty, driver.Generation)
	if err := sealer.Seal(s.ctx(), empty, sealed, nil); err != nil {
		t.Fatal(err)
	}

	s.check("a sealed empty volume", sealed.ID, model{})

	unknown := s.identity(driver.Generation, driver.None)
	s.unchanged(errs.NotFound, "seal of an unknown object", func() error {
		return sealer.Seal(s.ctx(), driver.NewID(), unknown, nil)
	})
	taken := s.derived(vol, driver.Generation)
	taken.ID = clone
	s.unchanged(errs.Exists, "seal onto an existing object", func() error { return sealer.Seal(s.ctx(), vol, taken, nil) })
	s.destroy(vol)
	if s.fingerprint(id.ID) != want {
		t.Error("destroying the origin changed the sealed image")
	}
}

// testSealTight: where the pool has no room for copies of what is fragmented, sealing shares it.
func testSealTight(t *testing.T, s *suite) {
	sealer := s.sealer()
	vol := s.create(driver.None)
	pieces := s.fragment(vol, 0) + s.fragment(vol, 28<<20)
	want := s.fingerprint(vol)

	// Leave room for the copy of the first fragments, holes between them included, but not of the others.
	filler := filepath.Join(s.dir, "filler")
	if err := fillBut(filler, 12<<20); err != nil {
		t.Fatal(err)
	}

	id := s.derived(vol, driver.Generation)
	var done, total int64
	if err := sealer.Seal(s.ctx(), vol, id, func(d, all int64) { done, total = d, all }); err != nil {
		t.Fatal(err)
	}

	if done != total || total != int64(pieces)*fragmentBytes {
		t.Errorf("progress ended at %d of %d; the data are %d bytes", done, total, pieces*fragmentBytes)
	}
	if u := s.usage(id.ID); u.Extents < int64(pieces)/2 || u.ExclusiveBytes != 0 {
		t.Errorf("usage %+v of what was sealed without room for copies, want %d extents, all shared", u, pieces)
	}

	if s.fingerprint(id.ID) != want || s.fingerprint(vol) != want {
		t.Error("sealing changed the content")
	}

	// With more room it has few extents again.
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	s.sync()
	again := s.derived(id.ID, driver.Generation)
	if err := sealer.Seal(s.ctx(), id.ID, again, nil); err != nil {
		t.Fatal(err)
	}

	if u := s.usage(again.ID); u.Extents > fewExtents {
		t.Errorf("sealed again with more room, it lies in %d extents, want at most %d", u.Extents, fewExtents)
	}
	if s.fingerprint(again.ID) != want {
		t.Error("sealing again changed the content")
	}
}

func testSealCanceled(t *testing.T, s *suite) {
	sealer := s.sealer()
	vol := s.create(driver.None)
	s.fragment(vol, 0)
	before := s.names()
	for _, after := range []int64{0, 1, 1 << 20, 3 << 20} {
		ctx, cancel := context.WithCancel(s.ctx())
		id := s.derived(vol, driver.Generation)
		if after == 0 {
			cancel()
		}

		err := sealer.Seal(ctx, vol, id, func(done, total int64) {
			if done >= after {
				cancel()
			}
		})

		cancel()
		if err == nil {
			// It was done before it noticed, and must be whole.
			if s.fingerprint(id.ID) != s.fingerprint(vol) {
				t.Error("Seal succeeded, but its content is not the origin's")
			}
			s.destroy(id.ID)
		} else if !errs.Is(err, errs.Canceled) {
			t.Errorf("Seal, cancelled after %d bytes: %v of kind %q", after, err, errs.KindOf(err))
		}
		if after == 0 && err == nil {
			t.Error("Seal with a cancelled context did all the work")
		}

		if names := s.names(); !slices.Equal(names, before) {
			t.Fatalf("after Seal, cancelled after %d bytes, %s", after, difference(before, names))
		}
	}
}
