package replicate

import (
	"context"
	"slices"
	"sort"

	"pando/internal/remote/repo"
)

// Maps are trees of nodes. They are read part by part in order of offset, never all at once. One request
// reads many nodes if they lie near each other.

// These constants bound how much of trees is in memory at once.
const (
	nodeBatch   = 256 // nodes that are read at once
	cachedNodes = 512 // nodes that are kept in case they are needed again
)

// readNodes reads nodes: [repo.Repo.ReadNodes], or the same method of a cache.
type readNodes func(context.Context, []repo.NodeAt) ([]repo.ReadNode, error)

// treePart is what a map has in a range: a node that is not read yet, or pieces, or nothing.
type treePart struct {
	node   repo.NodeRef
	level  int // of the node; a node below the level of the range lies in the first part of the range
	pieces []repo.Piece
	lost   bool // unreadable, so its content is unknown: see treeDiff.lostDiffers
}

func (s treePart) empty() bool { return s.node.IsZero() && len(s.pieces) == 0 && !s.lost }

// treePair is the range of a node, with what two maps have there.
type treePair struct {
	level    int
	index    int64
	old, now treePart
}

func (p treePair) at() repo.NodeAt { return repo.NodeAt{Level: p.level, Index: p.index} }

// node returns the position of a part of the pair whose node has the level of the range.
func (p treePair) node(s treePart) repo.NodeAt {
	return repo.NodeAt{NodeRef: s.node, Level: p.level, Index: p.index}
}

// part is a range of a volume, with what two maps have there.
type part struct {
	from, to int64
	old, now []repo.Piece
}

// treeDiff finds the parts in which two trees differ, in order of offset. It is used once.
type treeDiff struct {
	nodes    readNodes
	old, now *repo.Manifest // nil: an empty map

	// wantLeaf reports whether to read a leaf of old. A leaf that is not read counts as having no pieces. If wantLeaf is
	// nil, all leaves are read.
	wantLeaf func(repo.Frame) bool

	// onRead is called for every node that was read; it may be nil.
	onRead func(n repo.NodeAt, old bool)
	// onBroken is called for every node that cannot be read. If it returns nil, the node counts as empty.
	onBroken func(n repo.NodeAt, old bool, err error) error
	// lostDiffers makes an unreadable node of old differ from everything, instead of counting as empty.
	lostDiffers bool

	todo []treePair // in reverse order
}

// eachPart calls fn for every part in which the maps may differ, in order of offset.
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

// pushRoots starts with the roots. One may be of a higher level than the other.
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

// appendPair adds a pair unless both maps have the same there.
func appendPair(to []treePair, p treePair) []treePair {
	if p.old.empty() && p.now.empty() ||
		!p.old.node.IsZero() && p.old.node == p.now.node && p.old.level == p.now.level {
		return to
	}
	return append(to, p)
}

// expandNext reads the next nodes and replaces each with what is in it.
func (d *treeDiff) expandNext(ctx context.Context) error {
	// Choose the nodes. asked has an entry for each part, because reading may change what mustRead returns.
	var want []repo.NodeAt
	var asked []bool
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

	// Replace the parts, in the order in which the nodes were chosen.
	var out []treePair
	for _, p := range slices.Backward(d.todo[n:]) {
		var inner [2]*[repo.NodeChildren]repo.NodeRef
		for i, s := range []*treePart{&p.old, &p.now} {
			ask := asked[0]
			if asked = asked[1:]; !ask {
				if i == 0 && s.level == p.level && !s.node.IsZero() { // a leaf that is not wanted
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

// mustRead reports whether a part of a pair is a node that has to be read now.
func (d *treeDiff) mustRead(p treePair, s treePart, old bool) bool {
	return !s.node.IsZero() && s.level == p.level && !(old && d.skipsLeaf(s.node))
}

// skipsLeaf reports whether a node of old is a leaf that is not wanted.
func (d *treeDiff) skipsLeaf(n repo.NodeRef) bool {
	return d.wantLeaf != nil && !n.IsZero() && n.IsLeaf() && !d.wantLeaf(n.Frame)
}

// noLeaf is a treeDiff.wantLeaf for callers that do not need the pieces of old.
func noLeaf(repo.Frame) bool { return false }

// dividePair adds a pair, or if one of its parts is an inner node, the pairs of the children's ranges.
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

// piecesIn returns the pieces that begin in [from, to). pieces is in order of offset.
func piecesIn(pieces []repo.Piece, from, to int64) []repo.Piece {
	i := sort.Search(len(pieces), func(i int) bool { return pieces[i].Offset >= from })
	j := sort.Search(len(pieces), func(j int) bool { return pieces[j].Offset >= to })
	return pieces[i:j]
}
