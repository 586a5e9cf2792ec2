package engine

import (
	"context"
	"maps"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// Waits between two attempts to destroy an expired volume that is in use.
const (
	expireAgainFirst = time.Second
	expireAgainMost  = time.Minute
)

// Expiry destroys volumes at the time when they expire, for a process that runs on. It asks the catalogue in each
// round, and so sees volumes of other processes as well. Its methods must not be called concurrently.
type Expiry struct {
	e       *Engine
	waiting map[driver.ObjectID]expiryWait // expired volumes that could not be destroyed
}

// expiryWait says when to try a volume again.
type expiryWait struct {
	failed int // attempts in a row
	again  time.Time
}

// ExpiryRound is what a round of Expiry found and did.
type ExpiryRound struct {
	Destroyed []string  // volumes
	Waiting   int       // expired volumes that are in use, or could not be destroyed for another reason
	Next      time.Time // when the next volume expires; zero: none will
	Again     time.Time // when the next round has something to do, as far as is known now; zero: never
}

// WatchExpiry returns an Expiry of the pool.
func (e *Engine) WatchExpiry() *Expiry {
	return &Expiry{e: e, waiting: map[driver.ObjectID]expiryWait{}}
}

// DestroyDue destroys the volumes that have expired, except those that are pinned or in use: it tries these again after
// a second, and then less and less often. With nothing to do it costs one query of an index. What it cannot destroy is
// a warning. Permission.
func (x *Expiry) DestroyDue(ctx context.Context) (ExpiryRound, error) {
	ctx, end := x.e.ledger.Begin(ctx)
	defer end()

	var round ExpiryRound
	if x.e.cat.LostError() != nil {
		return round, nil // the catalogue may be wrong: Maintain says so
	}
	due, err := x.findDue(ctx, &round)
	if err != nil || len(due) == 0 {
		return round, err
	}
	if err := x.e.needRoot(opExpire, ""); err != nil {
		return round, err
	}

	report := x.e.destroyExpired(ctx, due)
	gone := map[string]bool{}
	for _, d := range report.Destroyed {
		if gone[d.ID] = true; d.Kind == string(driver.Volume) {
			round.Destroyed = append(round.Destroyed, d.Ref)
		}
	}
	x.e.recovered.add(Recovery{Expired: len(round.Destroyed)}, nil)
	for _, d := range due {
		if gone[string(d.row.ID)] {
			delete(x.waiting, d.row.ID)
			continue
		}
		w := x.waiting[d.row.ID]
		w.again = time.Now().Add(min(expireAgainFirst<<min(w.failed, 10), expireAgainMost))
		w.failed++
		x.waiting[d.row.ID] = w
	}
	x.schedule(&round)
	return round, nil
}

// findDue lists the volumes to be destroyed now, and says in the round when others will be.
func (x *Expiry) findDue(ctx context.Context, round *ExpiryRound) (due []doomed, err error) {
	now := time.Now()
	err = x.e.cat.View(ctx, func(tx *catalog.Tx) error {
		due, round.Next = nil, time.Time{}
		all, err := tx.Expiring(now, len(x.waiting)+expireMost+1)
		if err != nil {
			return err
		}

		// Forget waits of volumes that no longer exist or expire. One that lies behind many others is only tried early.
		expired := map[driver.ObjectID]bool{}
		for _, v := range all {
			if v.At.After(now) {
				round.Next = v.At
				break
			}
			expired[v.ID] = true
			if w, waits := x.waiting[v.ID]; waits && w.again.After(now) || len(due) == expireMost {
				continue
			}
			row, ok, err := tx.Object(v.ID)
			if err != nil {
				return err
			}
			if ok {
				due = append(due, doomed{row: row, ref: row.Name})
			}
		}
		maps.DeleteFunc(x.waiting, func(id driver.ObjectID, _ expiryWait) bool { return !expired[id] })
		return nil
	})
	x.schedule(round)
	return due, err
}

// schedule says in the round what waits, and when there is something to do.
func (x *Expiry) schedule(round *ExpiryRound) {
	round.Waiting, round.Again = len(x.waiting), round.Next
	for _, w := range x.waiting {
		if round.Again.IsZero() || w.again.Before(round.Again) {
			round.Again = w.again
		}
	}
}

// expireMost limits how many expired volumes are destroyed at once.
const expireMost = 256

// destroyExpiredNow destroys expired volumes for a command, and returns their number.
func (e *Engine) destroyExpiredNow(ctx context.Context) int {
	var due []doomed
	if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		rows, err := tx.Expired(time.Now(), expireMost)
		for _, r := range rows {
			due = append(due, doomed{row: r, ref: r.Name})
		}
		return err
	}); err != nil || len(due) == 0 || e.needRoot(opExpire, "") != nil {
		return 0 // left to a command that can
	}
	return len(e.destroyExpired(ctx, due).Destroyed)
}

// destroyExpired destroys expired volumes, except those that are pinned or in use.
func (e *Engine) destroyExpired(ctx context.Context, due []doomed) *DestroyReport {
	isDue := func(_ *catalog.Tx, r catalog.Row, _ bool) (bool, error) {
		now := time.Now()
		return !r.ExpiresAt.IsZero() && !r.ExpiresAt.After(now) && !r.Pinned.After(now), nil
	}
	report := e.destroyRows(ctx, due, destroyOptions{op: opExpire, why: "it had expired", still: isDue})
	for _, err := range report.Failed {
		if !errs.Is(err, errs.InUse) {
			warnings.Add(ctx, "could not destroy an expired volume: %v", err)
		}
	}
	return report
}
