package engine

import (
	"context"
	"errors"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// Totals of the catalogue, which Metrics returns.
type (
	GoldenTotals = catalog.GoldenTotals
	VolumeTotals = catalog.VolumeTotals
)

// MetricsQuery says what Metrics returns.
type MetricsQuery struct {
	Volumes int // this many volumes one by one, those with the most bytes of their own; 0: none
}

// Metrics describes the pool for monitoring. A part that could not be read has an error, and the others are valid.
type Metrics struct {
	Space    SpaceMetrics
	SpaceErr error

	Totals    catalog.Totals
	Volumes   []VolumeTotals // the largest first
	TotalsErr error

	Recovered RecoveredMetrics
}

// SpaceMetrics is the space of the pool, in bytes.
type SpaceMetrics struct {
	TotalBytes, UsedBytes, FreeBytes int64
	HostFreeBytes                    int64 // on the filesystem below a loop-backed pool; else FreeBytes
	MinFreeBytes                     int64 // below this, the pool admits no new data
	HasReserve                       bool  // what cleaning up a full pool needs is reserved
}

// RecoveredMetrics is what this Engine has cleaned up since it was opened.
type RecoveredMetrics struct {
	Undone      int64 // interrupted operations that were undone or finished
	Reclaimed   int64 // objects destroyed earlier and removed now
	Expired     int64
	Garbage     int64 // after a boot: objects that were incomplete or ephemeral
	StaleMounts int64 // after a boot: mount records without a mount
	LoopDevices int64 // after a boot: detached

	LastAt time.Time           // when Maintain last succeeded
	Errors map[errs.Kind]int64 // of Maintain
}

// Metrics describes the pool as the catalogue has it, in one query: it measures nothing, and calls the driver only for
// the space of the pool. It changes nothing but that, once in the life of a pool, it adds an index to the catalogue
// that makes the query fast.
func (e *Engine) Metrics(ctx context.Context, q MetricsQuery) Metrics {
	var m Metrics
	m.Space, m.SpaceErr = e.spaceMetrics(ctx)
	m.Recovered = e.recovered.totals(e.ledger.CleanedMarks())

	// A pool without room for the index has a slower query.
	if !e.readOnly && !e.indexed.Load() {
		err := e.cat.IndexMetrics(ctx)
		e.indexed.Store(err == nil)
	}

	m.TotalsErr = e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if m.Totals, err = tx.Totals(); err != nil || q.Volumes == 0 {
			return err
		}
		m.Volumes, err = tx.LargestVolumes(q.Volumes)
		return err
	})
	return m
}

func (e *Engine) spaceMetrics(ctx context.Context) (SpaceMetrics, error) {
	s, err := e.pool.Space(ctx)
	return SpaceMetrics{
		TotalBytes: s.TotalBytes, UsedBytes: s.UsedBytes, FreeBytes: s.FreeBytes, HostFreeBytes: s.HostFree,
		MinFreeBytes: int64(float64(s.TotalBytes) * e.pool.Config.MinFreePercent / 100),
		HasReserve:   e.pool.HasReserve(),
	}, err
}

// NotePushed records that the volume or golden of a snapshot or generation was pushed to a repository successfully, for
// Metrics. Not durable by itself. It is not an error if the object does not exist.
func (e *Engine) NotePushed(ctx context.Context, repo string, id driver.ObjectID) error {
	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.SetPushed(id, repo, time.Now()) })
}

// recovered adds up what an Engine has cleaned up.
type recovered struct {
	mu sync.Mutex
	RecoveredMetrics
}

// add adds the result of Maintain.
func (a *recovered) add(r Recovery, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()

	a.Reclaimed += int64(r.Reclaimed)
	a.Expired += int64(r.Expired)
	if s := r.Swept; s != nil {
		a.Garbage += int64(s.Garbage)
		a.StaleMounts += int64(s.StaleMounts)
		a.LoopDevices += int64(s.Loops)
	}

	switch {
	case err == nil:
		a.LastAt = time.Now()
	case !errors.Is(err, context.Canceled):
		if a.Errors == nil {
			a.Errors = map[errs.Kind]int64{}
		}
		a.Errors[errs.KindOf(err)]++
	}
}

// totals returns a copy, with the number of marks that were cleaned up.
func (a *recovered) totals(marks int64) RecoveredMetrics {
	a.mu.Lock()
	defer a.mu.Unlock()

	out := a.RecoveredMetrics
	out.Undone = marks
	out.Errors = map[errs.Kind]int64{}
	for k, n := range a.Errors {
		out.Errors[k] = n
	}
	return out
}
