package replicate

import (
	"cmp"
	"context"

	"pando/internal/remote/repo"
)

// treeRoom estimates the memory that reading a tree of nodes takes, in bytes.
const treeRoom = 8 << 20

// walkMemory is the memory for reading maps in all spans together, in bytes.
const walkMemory = 96 << 20

// mapWalk reads the maps of points, one point after the other.
type mapWalk struct {
	v     *verifier
	base  *repo.Manifest  // nil: all nodes are read
	nodes *repo.NodeCache // nil: no map was read yet
}

// reset drops the base and the memory that the walk holds.
func (w *mapWalk) reset() { *w = mapWalk{v: w.v} }

// notePieces notes the expectations of pieces, except those in was, the pieces of another map of the same range.
func (v *verifier) notePieces(pieces, was []repo.Piece) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	all := make([]expected, 0, 1024)
	for _, x := range pieces {
		for len(was) > 0 && was[0].Offset < x.Offset {
			was = was[1:]
		}
		if len(was) > 0 && was[0] == x {
			continue
		}
		if all = append(all, v.expectFrame(x.Frame, x.Within, uint32(x.Length), x.Sum)); len(all) == cap(all) {
			if err := v.noteExpected(all); err != nil {
				return err
			}
			all = all[:0]
		}
	}

	return v.noteExpected(all)
}

// nodeBroken records that a node cannot be read, or is not as its parent describes it.
func (v *verifier) nodeBroken(n repo.NodeRef, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.unreadableNodes) < maxFaults {
		v.unreadableNodes[n] = err.Error()
	}
}

// checkMap reads the nodes of a manifest that its base does not share, notes what they expect, and makes the manifest
// the next base.
func (w *mapWalk) checkMap(ctx context.Context, m *repo.Manifest) error {
	v := w.v
	if err := v.memory.Acquire(ctx, treeRoom); err != nil {
		return err
	}

	defer v.memory.Release(treeRoom)

	if w.nodes == nil {
		w.nodes = v.repo.NewNodeCache(nodeBatch)
	}

	if m.Map.Bytes > 0 { // an empty map has no node
		if err := v.noteNode(m.Root()); err != nil {
			return err
		}
	}

	// Compare the map with that of base.
	d := &treeDiff{
		nodes: w.nodes.Read, old: w.base, now: m,
		wantLeaf: func(f repo.Frame) bool { return v.ReadPercent > 0 && w.nodes.Has(f) }, // else the same is noted again
		onBroken: func(n repo.NodeAt, old bool, err error) error {
			if !isUnreadable(err) {
				return err
			}
			if !old { // nodes of the base are reported when it is checked
				v.nodeBroken(n.NodeRef, err)
			}
			return nil
		},
	}

	var failed error
	d.onRead = func(n repo.NodeAt, old bool) {
		if !old {
			failed = cmp.Or(failed, v.noteNode(n))
		}
	}

	err := d.eachPart(ctx, func(p part) error {
		if n := len(p.now); n > 0 && p.now[n-1].End() > m.SizeBytes {
			v.report(Problem{
				Volume: m.Volume, Point: m.Point, Object: "manifests/" + m.ID.String(), manifest: m.ID,
				Message: "its map describes bytes past the end of the volume",
			})
		}
		return v.notePieces(p.now, p.old)
	})

	w.base = m
	return cmp.Or(err, failed)
}

// noteNode notes the expectation of the frame of a node.
func (v *verifier) noteNode(n repo.NodeAt) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.noteExpected([]expected{v.expectFrame(n.Frame, 0, 0, repo.Sum{})})
}

// treeBlame reports faults in the trees of points, one point after the other. It remembers inner nodes without faults
// below, so that points that share such a node do not read it again.
type treeBlame struct {
	v     *verifier
	clean map[repo.NodeRef]bool
}

// maxClean is the number of nodes that a treeBlame remembers.
const maxClean = 64 << 10

func newTreeBlame(v *verifier) *treeBlame { return &treeBlame{v: v, clean: map[repo.NodeRef]bool{}} }

// blameTree reports the faults of the map of a point, and of the frames that the map needs.
func (v *verifier) blameTree(ctx context.Context, o owner, m *repo.Manifest, t *treeBlame) error {
	if m.Map.IsZero() {
		return nil
	}
	if err := v.memory.Acquire(ctx, treeRoom); err != nil {
		return err
	}
	defer v.memory.Release(treeRoom)
	_, err := t.blameNodes(ctx, o, m, []repo.NodeAt{m.Root()})
	return err
}

// blameNodes reports the faults of nodes of one level, and of everything below them. It returns for each node whether
// there are none.
func (t *treeBlame) blameNodes(ctx context.Context, o owner, m *repo.Manifest, all []repo.NodeAt) ([]bool, error) {
	clean := make([]bool, len(all))
	var todo []repo.NodeAt
	var place []int
	for i, n := range all {
		if clean[i] = t.clean[n.NodeRef]; clean[i] {
			continue
		}
		why, whole := t.v.faultReason(n.Frame, 0, 0, repo.Sum{})
		if why = cmp.Or(why, t.v.unreadableNodes[n.NodeRef]); why != "" {
			t.reportNode(o, m, n, why, whole)
			continue
		}
		todo, place = append(todo, n), append(place, i)
	}

	// Read the others, and what is below them.
	got, err := t.v.repo.ReadNodes(ctx, todo)
	if err != nil {
		return nil, err
	}

	for i, r := range got {
		n := todo[i]
		if r.Err != nil { // it could be read before: it has just been removed or damaged
			t.reportNode(o, m, n, r.Err.Error(), false)
			continue
		}

		if clean[place[i]], err = t.blameBelow(ctx, o, m, n, r.Node); err != nil {
			return nil, err
		}

		if t.v.reportLost(o, n.Frame.Segment) {
			clean[place[i]] = false
		}
		if clean[place[i]] && !n.IsLeaf() && len(t.clean) < maxClean {
			t.clean[n.NodeRef] = true
		}
	}

	return clean, nil
}

// blameBelow reports the faults of the children or pieces of a node, and returns whether there are none.
func (t *treeBlame) blameBelow(
	ctx context.Context,
	o owner,
	m *repo.Manifest,
	at repo.NodeAt,
	n *repo.Node,
) (clean bool, err error) {
	if n.Children == nil {
		ranges := t.v.wrongPieces(n.Pieces)
		t.v.blameRanges(o, ranges)
		clean, last := len(ranges) == 0, repo.Segment{}
		for _, x := range n.Pieces {
			if x.Frame.Segment != last {
				last = x.Frame.Segment
				clean = !t.v.reportLost(o, last) && clean
			}
		}
		return clean, nil
	}

	var children []repo.NodeAt
	for slot, ref := range n.Children {
		if !ref.IsZero() {
			children = append(children, at.Child(slot, ref))
		}
	}

	each, err := t.blameNodes(ctx, o, m, children)
	clean = err == nil
	for _, c := range each {
		clean = clean && c
	}

	return clean, err
}

// reportNode reports that a node cannot be read.
func (t *treeBlame) reportNode(o owner, m *repo.Manifest, n repo.NodeAt, why string, whole bool) {
	if !whole {
		why = "cannot read the point's map: " + why
	}
	p := o.problem("segments/"+n.Frame.Segment.String(), "%s", why)
	p.Offset, p.Length, p.whole = n.From(), max(0, min(n.To(), m.SizeBytes)-n.From()), whole
	t.v.report(p)
}
