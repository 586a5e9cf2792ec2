package replicate

import (
	"context"
	"errors"

	"pando/internal/remote/repo"
)

// estimateShared estimates how many bytes of the content of b are also in a, both block images. Damaged data counts as
// not shared.
func (p *puller) estimateShared(ctx context.Context, a, b *repo.Manifest) (n int64, err error) {
	// Compare the maps, once for each pair.
	key := [2]repo.ID{a.ID, b.ID}
	if n, known := p.sharedBytes[key]; known {
		return n, nil
	}

	differ, err := estimateDiffering(ctx, p.repo, a, b)
	if err != nil && !isUnreadable(err) {
		return 0, err
	}
	if err == nil {
		n = max(0, b.Map.Bytes-differ)
	}
	if p.sharedBytes == nil {
		p.sharedBytes = map[[2]repo.ID]int64{}
	}

	p.sharedBytes[key] = n
	return n, nil
}

// comparedNodes is the maximum number of nodes to read for an estimate of what two maps have in common.
const comparedNodes = 2048

var errEnough = errors.New("enough was read")

// estimateDiffering estimates how many bytes of b's content a does not share. It compares only a part of large maps,
// and assumes that half of the rest differs.
func estimateDiffering(ctx context.Context, r *repo.Repo, a, b *repo.Manifest) (n int64, err error) {
	add := func(p part) error {
		for _, l := range changedLayers(p.old, p.now) {
			if l.Piece != nil {
				n += l.Length
			}
		}
		return nil
	}

	// Compare until enough nodes were read.
	read := 0
	d := &treeDiff{
		nodes: func(ctx context.Context, nodes []repo.NodeAt) ([]repo.ReadNode, error) {
			if read += len(nodes); read > comparedNodes {
				return nil, errEnough
			}
			return r.ReadNodes(ctx, nodes)
		},
		old: a, now: b,
		onBroken: func(_ repo.NodeAt, _ bool, err error) error { return err },
	}

	if err = d.eachPart(ctx, add); !errors.Is(err, errEnough) {
		return n, err
	}

	// Count half of the rest.
	for _, p := range d.todo {
		if n += p.now.node.Bytes / 2; p.now.node.IsZero() {
			n += logicalBytes(p.now.pieces) / 2
		}
	}

	return n, nil
}
