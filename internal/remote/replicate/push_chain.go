package replicate

import (
	"context"
	"slices"

	"pando/internal/remote/repo"
)

// maxChain is the maximum number of differences after a full stream. Reading the last one needs all of them.
const maxChain = 30

// chainLink is one point in a chain of differences.
type chainLink struct {
	parent repo.ID // what it is the difference from; zero: it is a full stream
	added  int64   // bytes that were stored for it
}

// canExtendChain reports whether one more difference may follow a point. It may not if the chain is long, or if its
// differences together are larger than the full stream. The points below need not be listed by any head.
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

// chainLinkOf returns the link of a manifest. It reads the manifest only if the check of the base has not read it and
// the head's recent points do not list it. It does not search pages: they are larger than manifests, and more numerous.
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

// noteChainLink caches the link of a manifest that was read.
func (p *pusher) noteChainLink(m *repo.Manifest) chainLink {
	if p.chain == nil {
		p.chain = map[repo.ID]chainLink{}
	}
	l := chainLink{m.Parent, m.Added}
	p.chain[m.ID] = l
	return l
}
