package replicate

import (
	"context"
	"slices"

	"pando/internal/driver"
	"pando/internal/engine"
)

// A volume or golden that was renamed in this pool keeps its head: pushes go on under the name that it had when it was
// first pushed. Whatever gets that name later cannot be pushed there, as the head has the lineage of the first one: see
// checkFits.

// headOfTarget returns the name of the head that a target is pushed to.
func (p *pusher) headOfTarget(ctx context.Context, t target) (string, error) {
	if !p.q.As.IsZero() {
		return p.q.As.String(), nil
	}
	n, err := p.e.NamesOf(ctx, t.ref.Name)
	if err != nil {
		return "", err
	}
	return p.findHead(ctx, n.Lineage, n.All)
}

// headOf returns the name of the head that a point of this pool is pushed to, unless the request names another.
func (p *pusher) headOf(ctx context.Context, pt engine.Point) (string, error) {
	return p.findHead(ctx, pt.Lineage, append([]string{pt.Volume}, pt.Former...))
}

// findHead returns the name of the head of a lineage. names are the names of the volume or golden, the present one
// first. It is the first of them under which this pool has pushed the lineage or pulled it, and the present name if
// there is none.
func (p *pusher) findHead(ctx context.Context, lineage driver.ObjectID, names []string) (string, error) {
	if len(names) == 1 {
		return names[0], nil
	}

	heads, err := p.e.RemoteHeads(ctx, p.repoID)
	if err != nil {
		return "", err
	}
	for _, name := range names {
		if slices.ContainsFunc(heads, func(h engine.RemoteHead) bool { return h.Name == name && h.Lineage == lineage }) {
			return name, nil
		}
	}

	// The pool may have forgotten the head: a push was killed right after its commit, or something else was pulled from
	// the head since.
	for _, name := range names {
		h, err := p.readHead(ctx, name)
		switch {
		case isUnreadable(err): // damage of another volume must not prevent this push
		case err != nil:
			return "", err
		case h.version != "" && !h.unclaimed() && h.Writer.Pool == p.me.Pool && h.Lineage == string(lineage):
			return name, nil
		}
	}
	return names[0], nil
}
