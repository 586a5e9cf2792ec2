package engine

import (
	"context"
	"os"

	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// LockBuild keeps other processes from building or fetching the result of a request until unlock, as Build does itself.
// The lock ends with the process.
func (e *Engine) LockBuild(ctx context.Context, q BuildRequest) (unlock func(), err error) {
	unlock, _, err = e.lockBuilding(ctx, q.Golden.String(), buildLock(q), func() {})
	return unlock, err
}

// buildLock names the lock of a build.
func buildLock(q BuildRequest) string { return "build " + q.Golden.String() + " " + q.Key }

// PublishFetched publishes a generation that was made elsewhere from the base of a request as the result of the
// request: its content is that of from, a generation in this pool, and so is its log, if from has one. The caller holds
// the lock of the build. Durable on return. NotFound, Invalid.
func (e *Engine) PublishFetched(ctx context.Context, q BuildRequest, from ref.Ref) (Built, error) {
	ctx, end := e.ledger.Begin(ctx)
	defer end()

	if err := e.needRoot(opBuild, q.Golden.String()); err != nil {
		return Built{}, err
	}

	var base, row catalog.Row
	var baseRef string
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if base, err = buildBase(tx, q.From); err != nil {
			return err
		}
		baseRef = tx.RefOf(base)
		row, err = buildBase(tx, from)
		return err
	}); err != nil {
		return Built{}, err
	}

	held, err := e.ledger.Hold(ctx, opBuild, row.ID)
	if err != nil {
		return Built{}, err
	}
	defer held.Release(ctx)

	record := driver.Build{Key: q.Key, Base: base.ID}
	if row.Build.Key == q.Key && row.Build.Base == base.ID { // the same result, in another golden
		record = row.Build
	}
	out, err := e.publishResult(ctx, resultRequest{golden: q.Golden.String(), vol: row,
		record: record, origin: base, originRef: baseRef, keep: q.Keep, labels: q.Labels, tracker: q.Tracker,
		made: func(id driver.ObjectID) { _ = os.Link(e.resultLog(row.ID), e.resultLog(id)) }})
	return Built{Info: out.Info, Key: q.Key, Cached: true, Fetched: true, Removed: out.Removed}, err
}

// LinkOf returns the manifest in a repository that describes an object; "" if none is known.
func (e *Engine) LinkOf(ctx context.Context, repo string, id driver.ObjectID) (manifest string, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		manifest, err = tx.ManifestOf(repo, id)
		return err
	})
	return manifest, err
}
