package replicate

import (
	"context"
	"sync"

	"pando/internal/remote/repo"
)

// cellPrefetcher reads cells of a map before they are needed. It reads a few at once and keeps each until it is
// dropped. Methods may be called concurrently.
type cellPrefetcher struct {
	ctx        context.Context
	readPieces func(context.Context, uint32) ([]repo.Piece, error)

	mu      sync.Mutex
	known   map[uint32]*prefetchedCell
	queue   []uint32
	running int // cells that were begun and not dropped, at most cellAhead of those in queue

	room chan struct{} // a token for each cell that reserve may still let in
}

type prefetchedCell struct {
	begun    bool
	reserved bool
	done     chan struct{}
	pieces   []repo.Piece
	err      error
}

// newCellPrefetcher returns a prefetcher for the cells of a map. It reads until ctx ends.
func newCellPrefetcher(ctx context.Context, nodes readNodes, m *repo.Manifest) *cellPrefetcher {
	a := &cellPrefetcher{ctx: ctx, known: map[uint32]*prefetchedCell{}, room: make(chan struct{}, 2*cellAhead)}
	a.readPieces = func(ctx context.Context, cell uint32) ([]repo.Piece, error) { return readCell(ctx, nodes, m, cell) }
	for range cap(a.room) {
		a.room <- struct{}{}
	}
	return a
}

// reserveCell bounds how many cells the reader may get before they are dropped. At the bound it calls full, which
// passes on what the callers of dropCell still need, and then waits for a drop.
func (a *cellPrefetcher) reserveCell(ctx context.Context, cell uint32, full func() error) error {
	a.mu.Lock()
	r := a.known[cell]
	if r == nil {
		r = &prefetchedCell{done: make(chan struct{})}
		a.known[cell] = r
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

// prefetchCell queues a cell that waitCell will ask for. It does not wait. Callers queue cells in the order in
// which they will drop them.
func (a *cellPrefetcher) prefetchCell(cell uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.known[cell] == nil {
		a.known[cell] = &prefetchedCell{done: make(chan struct{})}
		a.queue = append(a.queue, cell)
		a.startQueued()
	}
}

// waitCell returns the pieces of a cell, which stay in memory until dropCell.
func (a *cellPrefetcher) waitCell(ctx context.Context, cell uint32) ([]repo.Piece, error) {
	a.mu.Lock()
	r := a.known[cell]
	if r == nil {
		r = &prefetchedCell{done: make(chan struct{})}
		a.known[cell] = r
	}

	a.startReading(cell, r) // even if cellAhead others are being read
	a.mu.Unlock()
	select {
	case <-r.done:
		return r.pieces, r.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// dropCell forgets a cell.
func (a *cellPrefetcher) dropCell(cell uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.dropLocked(cell)
}

// dropCells forgets the cells from first to last, both included.
func (a *cellPrefetcher) dropCells(first, last uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for cell := range a.known {
		if cell >= first && cell <= last {
			a.dropLocked(cell)
		}
	}
}

// dropLocked is dropCell for callers that hold mu.
func (a *cellPrefetcher) dropLocked(cell uint32) {
	r := a.known[cell]
	if r == nil {
		return
	}

	delete(a.known, cell)
	if r.begun {
		a.running--
	}
	if r.reserved {
		a.room <- struct{}{}
	}

	a.startQueued()
}

// startQueued starts to read queued cells as far as the bound allows. The caller holds mu.
func (a *cellPrefetcher) startQueued() {
	for len(a.queue) > 0 && a.running < cellAhead {
		cell := a.queue[0]
		a.queue = a.queue[1:]
		if r := a.known[cell]; r != nil {
			a.startReading(cell, r)
		}
	}
}

// startReading starts to read a cell, once. The caller holds mu.
func (a *cellPrefetcher) startReading(cell uint32, r *prefetchedCell) {
	if r.begun {
		return
	}
	r.begun = true
	a.running++
	go func() {
		defer close(r.done)
		r.pieces, r.err = a.readPieces(a.ctx, cell)
	}()
}
