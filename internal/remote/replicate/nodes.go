package replicate

import (
	"context"
	"slices"
	"sort"

	"pando/internal/remote/repo"
)

// Maps of version 2 are trees of nodes. They are read part by part, in order of offset, with many nodes in one request
// where they lie near each other, and never all at once.

// Bounds of what of trees is in memory at once.
const (
	nodeBatch   = 256 // nodes that are read at once
	cachedNodes = 512 // that are kept in case they are needed again
)

// readNodes is [repo.Repo.ReadNodes], or that of a cache.
type readNodes func(context.Context, []repo.NodeAt) ([]repo.ReadNode, error)

// treePart is what a map has in a range: a node that is still to be read, or pieces, or nothing.
type treePart struct {
	node   repo.NodeRef
	level  int // of the node; it may be below that of the range, and is then in the first part of that
	pieces []repo.Piece
	lost   bool // nobody knows what: see treeDiff.unlike
}

func (s treePart) empty() bool { return s.node.IsZero() && len(s.pieces) == 0 && !s.lost }

// treePair is the range of a node and what two maps have there.
type treePair struct {
	level    int
	index    int64
	old, now treePart
}

func (p treePair) at() repo.NodeAt { return repo.NodeAt{Level: p.level, Index: p.index} }

// node is a part of the pair that is a node of its range.
func (p treePair) node(s treePart) repo.NodeAt {
	return repo.NodeAt{NodeRef: s.node, Level: p.level, Index: p.index}
}

// part is a range of a volume and what two maps have there.
type part struct {
	from, to int64
	old, now []repo.Piece
}

// treeDiff goes over the parts in which two trees differ, in order of offset. It is used once.
type treeDiff struct {
	nodes    readNodes
	old, now *repo.Manifest // of version 2; nil: nothing

	// leaf says whether a leaf of old is read; of one that is not, the pieces are as if there were none. Nil: all are.
	wantLeaf func(repo.Frame) bool

	// read is told of every node that was read; nil: nobody is.
	onRead func(n repo.NodeAt, old bool)
	// broken is told of every node that cannot be read. If it returns nil it is as if nothing were there.
	onBroken func(n repo.NodeAt, old bool, err error) error
	// unlike: where a node of old cannot be read, old is like nothing, rather than as if nothing were there.
	lostDiffers bool

	todo []treePair // in reverse order
}

// each calls fn for every part in which the maps may differ.
func (d *treeDiff) eachPart(ctx context.Context, fn func(part) error) error {
	d.pushRoots()
	for len(d.todo) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}

		next := d.todo[len(d.todo)-1]
		if !next.old.node.IsZero() || !next.now.node.IsZero() {
			if err := d.expandNext(ctx); err != nil {
				return err
			}
			continue
		}

		d.todo = d.todo[:len(d.todo)-1]
		if next.old.lost {
			next.old.pieces = unknownPieces(next.at().From(), min(next.at().To(), d.old.SizeBytes, d.now.SizeBytes))
		}

		if err := fn(part{next.at().From(), next.at().To(), next.old.pieces, next.now.pieces}); err != nil {
			return err
		}
	}

	return nil
}

// begin begins at the roots, one of which may be of a higher level than the other.
func (d *treeDiff) pushRoots() {
	var p treePair
	for i, m := range []*repo.Manifest{d.old, d.now} {
		if m == nil || m.Map.IsZero() {
			continue
		}
		root := m.Root()
		p.level = max(p.level, root.Level)
		*[]*treePart{&p.old, &p.now}[i] = treePart{node: root.NodeRef, level: root.Level}
	}
	d.todo = appendPair(nil, p)
}

// appendPair adds a pair, unless both maps have the same there.
func appendPair(to []treePair, p treePair) []treePair {
	if p.old.empty() && p.now.empty() ||
		!p.old.node.IsZero() && p.old.node == p.now.node && p.old.level == p.now.level {
		return to
	}
	return append(to, p)
}

// expand reads the nodes that are next, and puts what is in them in their place.
func (d *treeDiff) expandNext(ctx context.Context) error {
	var want []repo.NodeAt
	var asked []bool // of each part, in the order in which they are gone over; reading may change what would be wanted
	n := len(d.todo)
	for n > 0 && len(want) < nodeBatch {
		n--
		p := d.todo[n]
		for i, s := range []treePart{p.old, p.now} {
			ask := d.mustRead(p, s, i == 0)
			if asked = append(asked, ask); ask {
				want = append(want, p.node(s))
			}
		}
	}

	got, err := d.nodes(ctx, want)
	if err != nil {
		return err
	}

	var out []treePair
	for _, p := range slices.Backward(d.todo[n:]) {
		var inner [2]*[repo.NodeChildren]repo.NodeRef
		for i, s := range []*treePart{&p.old, &p.now} {
			ask := asked[0]
			if asked = asked[1:]; !ask {
				if i == 0 && s.level == p.level && !s.node.IsZero() { // it is skipped
					*s = treePart{}
				}
				continue
			}

			r := got[0]
			got = got[1:]
			if r.Err != nil {
				if err := d.onBroken(p.node(*s), i == 0, r.Err); err != nil {
					return err
				}
				*s = treePart{lost: i == 0 && d.lostDiffers}
				continue
			}

			if d.onRead != nil {
				d.onRead(p.node(*s), i == 0)
			}

			if inner[i] = r.Children; r.Children == nil {
				*s = treePart{pieces: r.Pieces}
			}
		}

		out = dividePair(out, p, inner)
	}

	d.todo = d.todo[:n]
	for _, p := range slices.Backward(out) {
		d.todo = append(d.todo, p)
	}

	return nil
}

// wants reports whether a part of a pair is a node that is to be read now.
func (d *treeDiff) mustRead(p treePair, s treePart, old bool) bool {
	return !s.node.IsZero() && s.level == p.level && !(old && d.skipsLeaf(s.node))
}

// skips reports whether a node of old is a leaf that is not read.
func (d *treeDiff) skipsLeaf(n repo.NodeRef) bool {
	return d.wantLeaf != nil && !n.IsZero() && n.IsLeaf() && !d.wantLeaf(n.Frame)
}

// noLeaf is a treeDiff.leaf for those who do not want to know what old has.
func noLeaf(repo.Frame) bool { return false }

// divide adds a pair, or what is in the parts of its range, if one of the two is an inner node.
func dividePair(out []treePair, p treePair, inner [2]*[repo.NodeChildren]repo.NodeRef) []treePair {
	below := func(s treePart) bool { return !s.node.IsZero() && s.level < p.level }
	if inner[0] == nil && inner[1] == nil && !below(p.old) && !below(p.now) {
		return appendPair(out, p)
	}

	for slot := range repo.NodeChildren {
		at := p.at().Child(slot, repo.NodeRef{})
		child := treePair{level: at.Level, index: at.Index}
		for i, s := range []treePart{p.old, p.now} {
			to := []*treePart{&child.old, &child.now}[i]
			switch {
			case inner[i] != nil:
				*to = treePart{node: inner[i][slot], level: at.Level}
			case below(s) && slot == 0:
				*to = s
			case below(s):
			case s.lost:
				to.lost = true
			default:
				to.pieces = piecesIn(s.pieces, at.From(), at.To())
			}
		}

		out = appendPair(out, child)
	}

	return out
}

// piecesIn is what of pieces, in order, begins in [from, to).
func piecesIn(pieces []repo.Piece, from, to int64) []repo.Piece {
	i := sort.Search(len(pieces), func(i int) bool { return pieces[i].Offset >= from })
	j := sort.Search(len(pieces), func(j int) bool { return pieces[j].Offset >= to })
	return pieces[i:j]
}

// piecesBetween reads the pieces of a map of version 2 that begin in [from, to), which must be a range of which all
// fits into memory. broken: see treeDiff.
func piecesBetween(ctx context.Context, nodes readNodes, m *repo.Manifest, from, to int64) ([]repo.Piece, error) {
	var out []repo.Piece
	todo := []repo.NodeAt{m.Root()}
	for len(todo) > 0 {
		todo = slices.DeleteFunc(todo, func(n repo.NodeAt) bool { return n.IsZero() || n.To() <= from || n.From() >= to })
		got, err := nodes(ctx, todo)
		if err != nil {
			return nil, err
		}

		var next []repo.NodeAt
		for i, r := range got {
			switch {
			case r.Err != nil:
				return nil, r.Err
			case r.Children == nil:
				out = append(out, piecesIn(r.Pieces, from, to)...)
			default:
				for slot, ref := range r.Children {
					next = append(next, todo[i].Child(slot, ref))
				}
			}
		}

		todo = next
	}

	slices.SortFunc(out, func(a, b repo.Piece) int { return int((a.Offset - b.Offset) / repo.BlockBytes) })
	return out, nil
}
