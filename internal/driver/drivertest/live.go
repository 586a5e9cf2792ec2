package drivertest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/driver"
)

// testLive holds drivers to what they say of copies of volumes in use.
func testLive(t *testing.T, s *suite) {
	lc, ok := s.d.(driver.LiveCopier)
	if !ok {
		if !s.caps.Atomic {
			t.Error("a driver that is not Atomic must be a LiveCopier")
		}
		t.Skip("the driver is no LiveCopier")
	}

	vol, m := s.create(s.fast), model{}
	s.put(vol, m, "a", file{1, 50_000})

	for _, immutable := range []bool{false, true} {
		kind := driver.Volume
		if immutable {
			kind = driver.Snapshot
		}

		calls, copied := 0, 0
		id := s.derived(vol, kind)
		if err := lc.CopyLive(s.ctx(), vol, id, immutable, func(take func() error) error {
			calls++
			err := take()
			copied++
			return err
		}); err != nil {
			t.Fatal(err)
		}

		want := 0
		if s.caps.Atomic {
			want = 1
		}
		if calls != want || copied != want {
			t.Errorf("quiet was called %d times, and came back %d times; wanted %d", calls, copied, want)
		}

		s.wantIdentity(id)
		s.check("a live copy", id.ID, m)
		if a, err := s.d.Attachment(s.ctx(), id.ID); err != nil || a.ReadOnly != immutable {
			t.Errorf("attachment of a live copy: %+v, %v", a, err)
		}

		without := s.derived(vol, kind)
		if err := lc.CopyLive(s.ctx(), vol, without, immutable, nil); err != nil {
			t.Fatal(err)
		}

		s.check("a live copy without quiet", without.ID, m)
	}

	unknown := s.fullIdentity(s.fast)
	s.unchanged(errs.NotFound, "CopyLive of an unknown object", func() error {
		return lc.CopyLive(s.ctx(), unknown.ID, s.derived(vol, driver.Volume), false, nil)
	})

	if s.caps.Atomic {
		refused := errs.New(errs.Conflict, "freeze", "", "refused")
		s.unchanged(errs.Conflict, "CopyLive that is not let", func() error {
			return lc.CopyLive(s.ctx(), vol, s.derived(vol, driver.Volume), false, func(func() error) error { return refused })
		})
		s.unchanged(errs.Conflict, "CopyLive that is told afterwards", func() error {
			return lc.CopyLive(s.ctx(), vol, s.derived(vol, driver.Volume), false,
				func(take func() error) error { return errors.Join(take(), refused) })
		})
		return
	}

	testLiveTree(t, s, lc, vol)
}

// testLiveTree copies a tree to which a writer writes without end, always two
// files alike: a copy that is made must have them alike, or it is refused.
func testLiveTree(t *testing.T, s *suite, lc driver.LiveCopier, vol driver.ObjectID) {
	a, err := s.d.Attachment(s.ctx(), vol)
	if err != nil {
		t.Fatal(err)
	}

	// Many files to look at, so that the writer gets a processor between two looks.
	for i := range 3000 {
		if err := os.WriteFile(filepath.Join(a.Tree, fmt.Sprint("many-", i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}

	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			b := []byte{byte(i), byte(i >> 8), byte(i >> 16)}
			for _, name := range []string{"x", "y"} {
				if err := os.WriteFile(filepath.Join(a.Tree, name), b, 0o600); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})

	id := s.derived(vol, driver.Snapshot)
	err = lc.CopyLive(s.ctx(), vol, id, true, nil)
	close(stop)
	wg.Wait()
	if !errs.Is(err, errs.Conflict) || errs.HintOf(err) == "" {
		t.Errorf("a copy of a tree that never rests: %v, wanted a conflict with a hint", err)
	}

	if _, err := s.d.Attachment(s.ctx(), id.ID); !errs.Is(err, errs.NotFound) {
		t.Errorf("LEAK: the refused copy is there: %v", err)
	}

	if err := lc.CopyLive(s.ctx(), vol, id, true, nil); err != nil {
		t.Fatalf("when it rests: %v", err)
	}

	c, err := s.d.Attachment(s.ctx(), id.ID)
	if err != nil {
		t.Fatal(err)
	}

	x, err1 := os.ReadFile(filepath.Join(c.Tree, "x"))
	y, err2 := os.ReadFile(filepath.Join(c.Tree, "y"))
	if err := errors.Join(err1, err2); err != nil || string(x) != string(y) {
		t.Errorf("the copy is not of one moment: %v, %v, %v", x, y, err)
	}
}
