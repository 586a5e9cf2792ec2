package replicate

import (
	"context"
	"slices"

	"pando/internal/remote/repo"
)

// tree is a map that is changed in order of offset. It keeps changed nodes in memory and writes them when
// there are many. Nodes that do not change stay where they are stored, and are not read.
//
// Nodes are written together, level by level, so that nodes that are read together are stored together.
type tree struct {
	nodes readNodes
	level int
	root  treeKid
	held  int // approximate number of pieces and children in memory
}

// treeKid is a node in its parent: stored at ref, or in memory. The zero treeKid is no node.
type treeKid struct {
	ref  repo.NodeRef
	node *treeNode
}

func (k *treeKid) empty() bool { return k.node == nil && k.ref.IsZero() }

// treeNode is a node in memory: a leaf with at most LeafPieces pieces, or an inner node, which may have too few pieces
// for one until finalizeNode.
type treeNode struct {
	was    repo.NodeRef // where it is stored while unchanged; zero: it has to be written
	pieces []repo.Piece
	kids   *[repo.NodeChildren]treeKid // of an inner node
}

// heldInTree is the value of tree.held at which a tree is written: some 5 MiB.
const heldInTree = 48 << 10

// newTree returns a tree for a volume of size bytes that begins as the map of base, which may be nil. If the volume is
// smaller than base, the tree drops what lies beyond its end.
func newTree(ctx context.Context, nodes readNodes, base *repo.Manifest, size int64) (*tree, error) {
	t := &tree{nodes: nodes, level: repo.RootLevel(size)}
	if base == nil || base.Map.IsZero() {
		return t, nil
	}

	// The volume is smaller: only the first child of each level remains.
	at := base.Root()
	for at.Level > t.level {
		n, err := t.readNode(ctx, at)
		if err != nil {
			return nil, err
		}

		if n.kids == nil {
			t.root.node = &treeNode{pieces: piecesIn(n.pieces, 0, repo.LevelBytes(t.level))}
			if len(t.root.node.pieces) == 0 {
				t.root = treeKid{}
			}
			return t, nil
		}

		if at = at.Child(0, n.kids[0].ref); at.IsZero() {
			return t, nil
		}
	}

	// The volume is larger: put new levels above the root, or make a leaf span the larger range.
	t.root.ref = at.NodeRef
	for level := at.Level; level < t.level; level++ {
		if !at.IsLeaf() {
			t.root = treeKid{node: &treeNode{kids: &[repo.NodeChildren]treeKid{0: t.root}}}
			continue
		}
		if t.root.node == nil {
			n, err := t.readNode(ctx, at)
			if err != nil {
				return nil, err
			}
			t.root = treeKid{node: &treeNode{pieces: n.pieces}}
		}
	}

	return t, nil
}

// readNode reads a stored node.
func (t *tree) readNode(ctx context.Context, at repo.NodeAt) (*treeNode, error) {
	got, err := t.nodes(ctx, []repo.NodeAt{at})
	if err == nil {
		err = got[0].Err
	}
	if err != nil {
		return nil, err
	}

	n := &treeNode{was: at.NodeRef, pieces: got[0].Pieces} // shared with a cache, so never changed in place
	if got[0].Children != nil {
		n.kids = &[repo.NodeChildren]treeKid{}
		for i, ref := range got[0].Children {
			n.kids[i].ref = ref
		}
	}

	t.held += len(n.pieces) + repo.NodeChildren
	return n, nil
}

// loadNode reads a node that is not empty, unless it is in memory.
func (t *tree) loadNode(ctx context.Context, k *treeKid, at repo.NodeAt) (err error) {
	if k.node == nil {
		at.NodeRef = k.ref
		k.node, err = t.readNode(ctx, at)
	}
	return err
}

// rootAt returns the position of the root.
func (t *tree) rootAt() repo.NodeAt { return repo.NodeAt{Level: t.level} }

// replace replaces everything in [from, to) with pieces. Both offsets are borders of cells.
func (t *tree) replace(ctx context.Context, from, to int64, pieces []repo.Piece) error {
	if from >= to {
		return nil
	}
	_, err := t.replaceIn(ctx, &t.root, t.rootAt(), from, to, pieces)
	return err
}

// replaceIn is replace within the range of one node. It reports whether anything changed.
func (t *tree) replaceIn(
	ctx context.Context,
	k *treeKid,
	at repo.NodeAt,
	from, to int64,
	pieces []repo.Piece,
) (bool, error) {
	if from, to = max(from, at.From()), min(to, at.To()); from >= to {
		return false, nil
	}

	// Handle what needs no node.
	pieces = piecesIn(pieces, from, to)
	switch {
	case k.empty() && len(pieces) == 0:
		return false, nil
	case len(pieces) == 0 && from == at.From() && to == at.To():
		*k = treeKid{}
		return true, nil
	case k.empty():
		k.node = t.newLeaf(at, slices.Clone(pieces))
		return true, nil
	}

	if err := t.loadNode(ctx, k, at); err != nil {
		return false, err
	}

	// In a leaf, replace the pieces.
	n := k.node
	changed := false
	if n.kids == nil {
		if slices.Equal(piecesIn(n.pieces, from, to), pieces) {
			return false, nil
		}
		all := slices.Concat(piecesIn(n.pieces, at.From(), from), pieces, piecesIn(n.pieces, to, at.To()))
		if len(all) == 0 {
			*k = treeKid{}
			return true, nil
		}
		k.node = t.newLeaf(at, all)
		return true, nil
	}

	// In an inner node, replace in its children.
	size := repo.LevelBytes(at.Level - 1)
	for slot := int((from - at.From()) / size); slot <= int((to-1-at.From())/size); slot++ {
		c, err := t.replaceIn(ctx, &n.kids[slot], at.Child(slot, repo.NodeRef{}), from, to, pieces)
		if err != nil {
			return false, err
		}
		changed = changed || c
	}

	if changed {
		n.was = repo.NodeRef{}
	}

	return changed, nil
}

// newLeaf returns a node with pieces: a leaf, or an inner node above leaves if there are too many pieces for one.
func (t *tree) newLeaf(at repo.NodeAt, pieces []repo.Piece) *treeNode {
	t.held += len(pieces)
	if len(pieces) <= repo.LeafPieces {
		return &treeNode{pieces: pieces}
	}

	n := &treeNode{kids: &[repo.NodeChildren]treeKid{}}
	for slot := range n.kids {
		child := at.Child(slot, repo.NodeRef{})
		if some := piecesIn(pieces, child.From(), child.To()); len(some) > 0 {
			n.kids[slot].node = t.newLeaf(child, some)
		}
	}

	return n
}

// pendingNode is a node that has to be written, in its parent.
type pendingNode struct {
	kid *treeKid
	at  repo.NodeAt
}

// flushNodes writes the changed nodes before an offset. All further changes must lie after it.
func (t *tree) flushNodes(ctx context.Context, before int64, add frameAdder) error {
	var out [8][]pendingNode // by level
	if err := t.collectReady(ctx, &t.root, t.rootAt(), before, &out); err != nil {
		return err
	}

	for _, level := range out {
		for _, w := range level {
			if err := w.writeNode(ctx, add); err != nil {
				return err
			}
		}
	}

	t.held = 0
	return nil
}

// finishTree writes all changed nodes, and returns the root.
func (t *tree) finishTree(ctx context.Context, add frameAdder) (repo.NodeRef, error) {
	err := t.flushNodes(ctx, repo.LevelBytes(t.level), add)
	return t.root.ref, err
}

// collectReady collects the nodes that can be written, because no further change reaches them. It does not collect a
// node whose parent may still become a leaf: joining would have to read the node again, before it is on the remote.
func (t *tree) collectReady(
	ctx context.Context, k *treeKid, at repo.NodeAt, before int64, out *[8][]pendingNode,
) error {
	if k.node == nil {
		return nil
	}

	if at.To() <= before {
		if _, err := t.finalizeNode(ctx, k, at); err != nil {
			return err
		}
		k.collectNodes(at, out)
		return nil
	}

	if k.node.kids == nil {
		return nil
	}

	// Finalize the children before the offset, and descend into the one that it lies in.
	sure := int64(0) // pieces that are final
	var done []int
	for slot := range k.node.kids {
		kid, child := &k.node.kids[slot], at.Child(slot, repo.NodeRef{})
		if child.To() > before {
			if err := t.collectReady(ctx, kid, child, before, out); err != nil {
				return err
			}
			break
		}
		n, err := t.finalizeNode(ctx, kid, child)
		if err != nil {
			return err
		}
		sure += n
		done = append(done, slot)
	}

	// With so many pieces, this node stays an inner node, so its children can be written.
	if sure > repo.LeafPieces {
		for _, slot := range done {
			k.node.kids[slot].collectNodes(at.Child(slot, repo.NodeRef{}), out)
		}
	}

	return nil
}

// finalizeNode gives a node that no further change reaches its final form: an unchanged node is dropped from memory,
// and a node with few pieces becomes a leaf. It returns how many pieces are in the node's range.
func (t *tree) finalizeNode(ctx context.Context, k *treeKid, at repo.NodeAt) (int64, error) {
	switch {
	case k.node == nil:
		return k.ref.Pieces, nil
	case !k.node.was.IsZero():
		*k = treeKid{ref: k.node.was}
		return k.ref.Pieces, nil
	case k.node.kids == nil:
		return int64(len(k.node.pieces)), nil
	}

	total := int64(0)
	for slot := range k.node.kids {
		n, err := t.finalizeNode(ctx, &k.node.kids[slot], at.Child(slot, repo.NodeRef{}))
		if err != nil {
			return 0, err
		}
		total += n
	}

	switch {
	case total == 0:
		*k = treeKid{}
	case total <= repo.LeafPieces:
		return total, t.joinLeaves(ctx, k, at)
	}

	return total, nil
}

// joinLeaves turns an inner node whose children are leaves into a leaf.
func (t *tree) joinLeaves(ctx context.Context, k *treeKid, at repo.NodeAt) error {
	var pieces []repo.Piece
	for slot := range k.node.kids {
		kid := &k.node.kids[slot]
		if kid.empty() {
			continue
		}
		if err := t.loadNode(ctx, kid, at.Child(slot, repo.NodeRef{})); err != nil {
			return err
		}
		pieces = append(pieces, kid.node.pieces...)
	}

	*k = treeKid{node: &treeNode{pieces: pieces}}
	return nil
}

// collectNodes adds a finalized node, and the nodes below it, that have to be written, by level and in order.
func (k *treeKid) collectNodes(at repo.NodeAt, out *[8][]pendingNode) {
	if k.node == nil {
		return
	}
	out[at.Level] = append(out[at.Level], pendingNode{k, at})
	if k.node.kids != nil {
		for slot := range k.node.kids {
			k.node.kids[slot].collectNodes(at.Child(slot, repo.NodeRef{}), out)
		}
	}
}

// writeNode writes a node whose children are written already.
func (w pendingNode) writeNode(ctx context.Context, add frameAdder) error {
	n := &repo.Node{Level: w.at.Level, Index: w.at.Index, Pieces: w.kid.node.pieces}
	if w.kid.node.kids != nil {
		n.Children = &[repo.NodeChildren]repo.NodeRef{}
		for slot, kid := range w.kid.node.kids {
			n.Children[slot] = kid.ref
		}
	}

	b, err := repo.EncodeNode(n)
	if err != nil {
		return err
	}

	packed, codec := repo.Compress(nil, b)
	f, err := add(ctx, packed, codec, len(b))
	if err != nil {
		return err
	}

	pieces, bytes := n.Count()
	*w.kid = treeKid{ref: repo.NodeRef{Frame: f, Pieces: pieces, Bytes: bytes}}
	return nil
}
