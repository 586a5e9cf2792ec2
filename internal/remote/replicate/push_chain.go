package replicate

import (
	"context"
	"slices"

	"pando/internal/remote/repo"
)

// maxChain is how many differences may follow a whole stream: to read the last, all are needed.
const maxChain = 30

// chainLink is what counts of a point in a chain of differences.
type chainLink struct {
	parent repo.ID // what it is the difference from; zero: it is whole
	added  int64   // bytes that were stored for it
}

// chainBears reports whether one more difference may be put upon a point: not if there are many, or if they are larger
// than a whole stream was. What the point builds upon need not be listed by any head.
func (p *pusher) canExtendChain(ctx context.Context, h headState, b base) (bool, error) {
	at, sum := chainLink{b.point.Parent, b.point.Added}, int64(0)
	for range maxChain {
		if at.parent.IsZero() {
			return sum <= at.added, nil
		}
		sum += at.added
		below, err := p.chainLinkOf(ctx, h, at.parent)
		if isUnreadable(err) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		at = below
	}

	return false, nil
}

// chainLinkOf finds a link by its manifest. That is read only if neither the check of the base has read it nor the head
// itself lists the point. Pages are not looked into: they are larger than manifests, and more.
func (p *pusher) chainLinkOf(ctx context.Context, h headState, id repo.ID) (chainLink, error) {
	if l, known := p.chain[id]; known {
		return l, nil
	}
	if i := slices.IndexFunc(h.Recent, func(x repo.Point) bool { return x.Manifest == id }); i >= 0 {
		return chainLink{h.Recent[i].Parent, h.Recent[i].Added}, nil
	}
	m, err := p.repo.Manifest(ctx, id)
	if err != nil {
		return chainLink{}, err
	}
	return p.noteChainLink(&m), nil
}

// noteChainLink remembers a link whose manifest was read.
func (p *pusher) noteChainLink(m *repo.Manifest) chainLink {
	if p.chain == nil {
		p.chain = map[repo.ID]chainLink{}
	}
	l := chainLink{m.Parent, m.Added}
	p.chain[m.ID] = l
	return l
}
