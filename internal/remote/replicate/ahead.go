package replicate

import (
	"context"
	"sync"

	"pando/internal/remote/repo"
)

// pagePrefetcher reads regions of a map, or cells of a map of version 2, before they are needed. It reads a few at once
// and keeps each until it is dropped. Methods may be called concurrently.
type pagePrefetcher struct {
	ctx        context.Context
	readPieces func(context.Context, uint32) ([]repo.Piece, error)

	mu         sync.Mutex
	known      map[uint32]*prefetchedRegion
	queue      []uint32
	running    int // regions that were begun and not dropped
	maxRunning int // of these

	room chan struct{} // a token for each region that reserve may still let in
}

type prefetchedRegion struct {
	begun    bool
	reserved bool
	done     chan struct{}
	pieces   []repo.Piece
	err      error
}

// newPagePrefetcher returns a prefetcher for the regions of a manifest of version 1, or the cells of one of version 2.
// It reads until ctx ends.
func newPagePrefetcher(ctx context.Context, r *repo.Repo, nodes readNodes, m *repo.Manifest) *pagePrefetcher {
	a := &pagePrefetcher{ctx: ctx, known: map[uint32]*prefetchedRegion{}, maxRunning: regionAhead}
	a.readPieces = func(ctx context.Context, region uint32) ([]repo.Piece, error) { return readRegion(ctx, r, m, region) }

	if m.Version == 2 {
		a.maxRunning = cellAhead
		a.readPieces = func(ctx context.Context, cell uint32) ([]repo.Piece, error) { return readCell(ctx, nodes, m, cell) }
	}

	a.room = make(chan struct{}, 2*a.maxRunning)
	for range cap(a.room) {
		a.room <- struct{}{}
	}

	return a
}

// reserveRegion bounds how many regions the reader may get before they are dropped. At the bound it calls full, which
// passes on what the callers of dropRegion still need, and then waits for a drop.
func (a *pagePrefetcher) reserveRegion(ctx context.Context, region uint32, full func() error) error {
	a.mu.Lock()
	r := a.known[region]
	if r == nil {
		r = &prefetchedRegion{done: make(chan struct{})}
		a.known[region] = r
	}

	reserved := r.reserved
	r.reserved = true
	a.mu.Unlock()
	if reserved {
		return nil
	}

	select {
	case <-a.room:
		return nil
	default:
	}

	if err := full(); err != nil {
		return err
	}

	select {
	case <-a.room:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// prefetchRegion queues a region that waitRegion will ask for. It does not wait. Callers queue regions in the order in
// which they will drop them.
func (a *pagePrefetcher) prefetchRegion(region uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.known[region] == nil {
		a.known[region] = &prefetchedRegion{done: make(chan struct{})}
		a.queue = append(a.queue, region)
		a.startQueued()
	}
}

// waitRegion returns the pieces of a region, which stay in memory until dropRegion.
func (a *pagePrefetcher) waitRegion(ctx context.Context, region uint32) ([]repo.Piece, error) {
	a.mu.Lock()
	r := a.known[region]
	if r == nil {
		r = &prefetchedRegion{done: make(chan struct{})}
		a.known[region] = r
	}

	a.startReading(region, r) // at once, whatever else is being read
	a.mu.Unlock()
	select {
	case <-r.done:
		return r.pieces, r.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// dropRegion forgets a region.
func (a *pagePrefetcher) dropRegion(region uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.dropLocked(region)
}

// dropRegions forgets the regions from first to last, both included.
func (a *pagePrefetcher) dropRegions(first, last uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for region := range a.known {
		if region >= first && region <= last {
			a.dropLocked(region)
		}
	}
}

// dropLocked is dropRegion for callers that hold mu.
func (a *pagePrefetcher) dropLocked(region uint32) {
	r := a.known[region]
	if r == nil {
		return
	}

	delete(a.known, region)
	if r.begun {
		a.running--
	}
	if r.reserved {
		a.room <- struct{}{}
	}

	a.startQueued()
}

// startQueued starts to read queued regions as far as the bound allows. The caller holds mu.
func (a *pagePrefetcher) startQueued() {
	for len(a.queue) > 0 && a.running < a.maxRunning {
		region := a.queue[0]
		a.queue = a.queue[1:]
		if r := a.known[region]; r != nil {
			a.startReading(region, r)
		}
	}
}

// startReading starts to read a region, once. The caller holds mu.
func (a *pagePrefetcher) startReading(region uint32, r *prefetchedRegion) {
	if r.begun {
		return
	}
	r.begun = true
	a.running++
	go func() {
		defer close(r.done)
		r.pieces, r.err = a.readPieces(a.ctx, region)
	}()
}
