package catalog

import (
	"context"
	"sync"
	"testing"

	"pando/internal/api"
	"pando/internal/base/errs"
)

// pretendUpgrades makes this version one that has come after others. The steps lead from each to the next.
func pretendUpgrades(t *testing.T, steps ...func(*Tx) error) {
	upgrades = steps
	t.Cleanup(func() { upgrades = nil })
}

// TestUpgrade: a catalogue of an older version is upgraded when it is opened, once, even if several processes open it
// at the same time. It keeps what it has. A version that knows only the older one refuses it from then on.
func TestUpgrade(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	if err := Create(ctx, dir, "p", api.EventInit); err != nil {
		t.Fatal(err)
	}
	c, err := Open(ctx, dir, "p")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Update(ctx, Durable, func(tx *Tx) error { return tx.SetMeta("kept", "v") }); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}

	pretendUpgrades(t, func(tx *Tx) error { return tx.SetMeta("steps", "1") }, func(tx *Tx) error {
		was, err := tx.Meta("steps")
		if err != nil {
			return err
		}
		return tx.SetMeta("steps", was+"2")
	})
	if _, err := OpenReadOnly(ctx, dir, "p"); !errs.Is(err, errs.Unsupported) {
		t.Errorf("opened for reading: %v", err)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			c, err := Open(ctx, dir, "p")
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			_ = c.View(ctx, func(tx *Tx) error {
				kept, kerr := tx.Meta("kept")
				steps, serr := tx.Meta("steps")
				if kept != "v" || steps != "12" || kerr != nil || serr != nil {
					t.Errorf("kept %q, steps %q: %v, %v", kept, steps, kerr, serr)
				}
				return nil
			})
		})
	}
	wg.Wait()
	if c, err := OpenReadOnly(ctx, dir, "p"); err != nil {
		t.Errorf("opened for reading after the upgrade: %v", err)
	} else {
		c.Close()
	}

	upgrades = nil
	for name, open := range map[string]func(context.Context, string, string) (*Catalog, error){
		"for reading": OpenReadOnly, "for writing": Open} {
		if _, err := open(ctx, dir, "p"); !errs.Is(err, errs.TooNew) {
			t.Errorf("a newer one, opened %s: %v", name, err)
		}
	}
}
