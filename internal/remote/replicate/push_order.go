package replicate

import (
	"context"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

// stateOrder returns the order of the state that is pushed among those of the volume or golden. If it is pushed again,
// that is the one it had. Otherwise it comes after all states of earlier epochs, unless it was taken before some of
// them: then it comes before the first of these.
func (x *pointPush) stateOrder(ctx context.Context) (repo.StateOrder, error) {
	if was, again := x.p.replaced[x.name+"@"+x.pt.Name]; again {
		return was.StateOrder, nil
	}
	if x.pt.Golden {
		return repo.StateOrder{Order: x.pt.Place}, nil
	}

	order := repo.StateOrder{Epoch: x.p.epochOfCommit(x.head), Order: x.pt.Place}
	newest, any, err := newestOf(ctx, x.p.repo, x.head.Head)
	if err != nil || !any {
		return order, err
	}

	was := newest.StateOrder
	if x.tookNow() && was.Compare(order) < 0 {
		return order, nil
	}
	here, err := x.snapshotsHere(ctx)
	if err != nil {
		return order, err
	}
	if !x.cameLater(newest, order.Epoch, here) {
		if was.Epoch == order.Epoch && was.Order >= order.Order { // the catalogue was rebuilt after a clock was set back
			order.Order = was.Order + 1
		}
		return order, nil
	}

	// An older snapshot is pushed. Find the first listed state that came later.
	var bad []*pageFault
	for p, err := range allPoints(ctx, x.p.repo, x.head.Head, &bad) {
		if err != nil {
			return order, err
		}
		if was = p.StateOrder; was.Compare(order) < 0 && x.cameLater(p, order.Epoch, here) {
			order = repo.StateOrder{Epoch: was.Epoch, Order: min(x.pt.Place, was.Order-1)}
		}
	}
	return order, nil
}

// tookNow reports whether this push took the snapshot just now.
func (x *pointPush) tookNow() bool { return x.tookSnapshot && !x.resuming }

// snapshotsHere returns the snapshots of the volume in this pool.
func (x *pointPush) snapshotsHere(ctx context.Context) ([]engine.Point, error) {
	name, err := ref.ParseName(opPush, x.pt.Volume)
	if err != nil {
		return nil, err
	}
	all, err := x.p.e.Points(ctx, name)
	if errs.Is(err, errs.NotFound) {
		return nil, nil // it was just renamed
	}
	return slices.DeleteFunc(all, func(o engine.Point) bool { return o.Lineage != x.pt.Lineage }), err
}

// cameLater reports whether a listed point is a newer state than the one that is pushed in an epoch. This pool knows
// places of points that are among its snapshots: pushed from here, or pulled, even if a rebuild has lost their links.
// It has recorded those of others that it has pushed in this epoch. For the rest only dates tell.
func (x *pointPush) cameLater(p repo.Point, epoch uint64, here []engine.Point) bool {
	for _, o := range here {
		linked := slices.Contains(x.links.object[p.Manifest], o.ID)
		if linked || string(o.ID) == p.Source || identityOfLocal(o) == identityOf(p) {
			return o.Place > x.pt.Place
		}
	}
	switch {
	case x.tookNow():
		return false
	case p.Epoch == epoch:
		return p.Order > x.pt.Place
	}
	return p.CreatedAt.After(x.pt.CreatedAt)
}
