package drivertest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"pando/internal/driver"
)

// testConcurrency clones and destroys from one origin in many goroutines, half
// of them with a driver of their own, as another process has.
func testConcurrency(t *testing.T, s *suite) {
	workers, rounds := 16, 4
	if s.target.Slow {
		workers, rounds = 8, 2
	}

	vol, m := s.create(s.fast), model{}
	s.put(vol, m, "a", file{1, 200_000})
	origin := s.snapshot(vol)
	other, err := s.open(s.ctx(), s.dir, poolID, false)
	if err != nil {
		t.Fatal(err)
	}

	defer closeDriver(t, other)

	want := m["a"].bytes()
	work := func(d driver.Driver, worker int) error {
		mounts := ""
		if s.mounts != "" {
			mounts = filepath.Join(s.mounts, fmt.Sprint("worker", worker))
			if err := os.Mkdir(mounts, 0o755); err != nil {
				return err
			}
		}

		s := &suite{t: t, open: s.open, target: s.target, dir: s.dir, d: d, caps: s.caps, fast: s.fast,
			activated: s.activated, mounts: mounts}
		for round := range rounds {
			id := s.identity(driver.Volume, s.fast)
			if worker%4 == 3 {
				id.Ephemeral = true
			}

			if err := d.Clone(s.ctx(), origin, id); err != nil {
				return err
			}

			mine := file{uint64(worker*rounds + round), 10_000}
			if err := s.attached(id.ID, func(c content) error {
				if b, err := c.get("a"); err != nil || !bytes.Equal(b, want) {
					return fmt.Errorf("a clone does not have its origin's content (%w)", err)
				}
				return c.put("b", mine.bytes())
			}); err != nil {
				return err
			}

			snap := s.identity(driver.Snapshot, s.fast)
			if err := d.Snapshot(s.ctx(), id.ID, snap); err != nil {
				return err
			}

			for _, err := range d.List(s.ctx()) {
				if err != nil {
					return err
				}
			}

			if err := d.Destroy(s.ctx(), id.ID); err != nil {
				return err
			}

			if err := s.attached(snap.ID, func(c content) error {
				if b, err := c.get("b"); err != nil || !bytes.Equal(b, mine.bytes()) {
					return fmt.Errorf("a snapshot does not have its volume's content (%w)", err)
				}
				return nil
			}); err != nil {
				return err
			}

			if err := d.Destroy(s.ctx(), snap.ID); err != nil {
				return err
			}
		}

		return nil
	}

	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			d := s.d
			if worker%2 == 1 {
				d = other
			}
			if err := work(d, worker); err != nil {
				t.Errorf("worker %d: %v", worker, err)
			}
		})
	}

	wg.Wait()
	s.wantExactly(vol, origin)
	s.check("the origin of many clones", origin, m)

	// All destroy the same one at once.
	victim := s.clone(origin)
	for range workers {
		wg.Go(func() {
			// Who comes second may find it half gone: any answer but a lie will do.
			_ = s.d.Destroy(s.ctx(), victim)
		})
	}

	wg.Wait()
	s.destroy(victim)
	s.wantExactly(vol, origin)
}
