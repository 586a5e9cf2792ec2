package repo

import (
	"context"
	"encoding/binary"
	"errors"
	"math/bits"
	"slices"
	"sync"

	"pando/internal/base/errs"

	"golang.org/x/sync/errgroup"
)

// The map of a manifest of version 2 is a tree. A node is of a level and describes a range of the volume of
// LevelBytes(level), which begins at a multiple of that: if at most LeafPieces pieces are in it, it is a leaf and lists
// them; else it lists where its children are, the nodes of the level below, of which each describes a part of its
// range. Where nothing is, there is no node. Pieces do not cross multiples of CellBytes, so the tree follows from the
// pieces alone: the same content, stored in the same frames, has the same nodes.

// Sizes of the tree.
const (
	LeafPieces   = 128        // in a leaf, at most; a range with more has an inner node
	NodeChildren = 32         // of an inner node, at most
	CellBytes    = FrameBytes // of a volume, that a node of level 0 describes: LeafPieces blocks
	MaxNodeBytes = 64 << 10   // encoded, before compression

	childBits = 5
	maxLevel  = 7 // its range is more than MaxVolumeBytes
)

const nodeVersion = 2 // where a page says 1

// LevelBytes is how large the range of a node of a level is.
func LevelBytes(level int) int64 { return CellBytes << (childBits * level) }

// RootLevel is the level of the root of a volume of so many bytes: the lowest that describes all of it.
func RootLevel(size int64) int {
	level := 0
	for LevelBytes(level) < size {
		level++
	}
	return level
}

// NodeRef says where a node is, and what is in its range. The zero NodeRef is no node: nothing is in the range.
type NodeRef struct {
	Frame  Frame
	Pieces int64 // in the range
	Bytes  int64 // that these describe
}

// IsZero reports whether it is no node.
func (n NodeRef) IsZero() bool { return n.Pieces == 0 }

// IsLeaf reports whether the node lists pieces.
func (n NodeRef) IsLeaf() bool { return n.Pieces <= LeafPieces }

// NodeAt is a node and its range: [Index*LevelBytes(Level), (Index+1)*LevelBytes(Level)).
type NodeAt struct {
	NodeRef
	Level int
	Index int64
}

// From is where the range begins.
func (n NodeAt) From() int64 { return n.Index * LevelBytes(n.Level) }

// To is the first offset behind the range.
func (n NodeAt) To() int64 { return (n.Index + 1) * LevelBytes(n.Level) }

// Child is the node in a slot of an inner node.
func (n NodeAt) Child(slot int, ref NodeRef) NodeAt {
	return NodeAt{NodeRef: ref, Level: n.Level - 1, Index: n.Index*NodeChildren + int64(slot)}
}

// Node is the content of a node: Pieces of a leaf, Children of an inner node.
type Node struct {
	Level    int
	Index    int64
	Pieces   []Piece
	Children *[NodeChildren]NodeRef // by their place in the range
}

// Count returns how many pieces are in the range of a node, and how many bytes these describe.
func (n *Node) Count() (pieces, bytes int64) {
	if n.Children == nil {
		for _, p := range n.Pieces {
			bytes += p.Length
		}
		return int64(len(n.Pieces)), bytes
	}
	for _, c := range n.Children {
		pieces, bytes = pieces+c.Pieces, bytes+c.Bytes
	}
	return pieces, bytes
}

func (n *Node) at() NodeAt { return NodeAt{Level: n.Level, Index: n.Index} }

// check says what is wrong with a node.
func (n *Node) check() error {
	switch {
	case n.Level < 0 || n.Level > maxLevel:
		return damaged("node level %d is out of range", n.Level)
	case n.Index < 0 || n.Index > (MaxVolumeBytes-1)/LevelBytes(n.Level):
		return damaged("node number %d of level %d is out of range", n.Index, n.Level)
	case n.Children == nil && (len(n.Pieces) == 0 || len(n.Pieces) > LeafPieces):
		return damaged("a leaf lists %d pieces", len(n.Pieces))
	case n.Children == nil:
		return n.checkLeaf()
	case n.Level == 0 || len(n.Pieces) > 0:
		return damaged("an inner node of level %d lists pieces or cannot have children", n.Level)
	}

	total := int64(0)
	for i, c := range n.Children {
		if c == (NodeRef{}) {
			continue
		}
		if err := c.check(n.at().Child(i, c)); err != nil {
			return err
		}
		total += c.Pieces
	}

	if total <= LeafPieces {
		return damaged("an inner node covers only %d pieces and should be a leaf", total)
	}

	return nil
}

func (n *Node) checkLeaf() error {
	if err := checkPieces(n.Pieces, n.at().From(), n.at().To()); err != nil {
		return err
	}
	for _, p := range n.Pieces {
		if p.Offset/CellBytes != (p.End()-1)/CellBytes {
			return damaged("the piece at %d crosses a multiple of %d", p.Offset, CellBytes)
		}
	}
	return nil
}

// check says what is wrong with a reference to a node of a range.
func (n NodeRef) check(at NodeAt) error {
	size := LevelBytes(at.Level)
	switch {
	case n.Pieces <= 0 || n.Pieces > size/BlockBytes:
		return damaged("a node of level %d declares %d pieces", at.Level, n.Pieces)
	case n.Bytes <= 0 || n.Bytes > size || n.Bytes > n.Pieces*FrameBytes:
		return damaged("a node of level %d declares %d bytes of data", at.Level, n.Bytes)
	case at.Index < 0 || at.Index > (MaxVolumeBytes-1)/size:
		return damaged("node number %d of level %d is out of range", at.Index, at.Level)
	}
	return n.Frame.check(MaxNodeBytes)
}

// EncodeNode encodes a node in at most MaxNodeBytes. Invalid if it is not as a node must be.
func EncodeNode(n *Node) ([]byte, error) {
	const op = "write node"
	if err := n.check(); err != nil {
		return nil, errs.Wrap(op, "", asInvalid(err))
	}

	kind := byte(0)
	if n.Children != nil {
		kind = 1
	}

	b := []byte{nodeVersion, kind, byte(n.Level)}
	b = binary.AppendUvarint(b, uint64(n.Index))
	var err error
	if n.Children == nil {
		b, err = appendPieces(b, n.at().From(), n.Pieces)
	} else {
		b = appendChildren(b, n.Children)
	}
	if err == nil && len(b) > MaxNodeBytes {
		err = badInput("", "", "it would take %d bytes, over the limit of %d", len(b), MaxNodeBytes)
	}

	return b, errs.Wrap(op, "", err)
}

func appendChildren(b []byte, children *[NodeChildren]NodeRef) []byte {
	table := newSegmentTable(func(yield func(Segment)) {
		for _, c := range children {
			if !c.IsZero() {
				yield(c.Frame.Segment)
			}
		}
	})

	b = table.appendTo(b)
	there := uint32(0)
	for i, c := range children {
		if !c.IsZero() {
			there |= 1 << i
		}
	}

	b = binary.LittleEndian.AppendUint32(b, there)
	last := looseFrame{offset: headerSize}
	for _, c := range children {
		if !c.IsZero() {
			b = appendNodeRef(b, table, &last, c)
		}
	}

	return b
}

func appendNodeRef(b []byte, t *segmentTable, last *looseFrame, n NodeRef) []byte {
	b = last.appendFrame(b, t, n.Frame)
	b = binary.AppendUvarint(b, uint64(n.Pieces))
	return binary.AppendUvarint(b, uint64(n.Bytes))
}

func (r *reader) nodeRef(segments []Segment, last *looseFrame, used []bool) NodeRef {
	n := NodeRef{Frame: last.readFrame(r, segments, MaxNodeBytes)}
	n.Pieces = int64(r.uvarint("the number of pieces of a node", MaxVolumeBytes/BlockBytes))
	n.Bytes = int64(r.uvarint("the bytes of a node", MaxVolumeBytes))
	if r.err == nil && used != nil {
		used[last.segment] = true
	}
	return n
}

// DecodeNode reads what EncodeNode wrote. Damaged, TooNew. Whether its children are what it says of them, and whether
// it is within its volume, is for the caller to see.
func DecodeNode(b []byte) (*Node, error) {
	n, err := decodeNode(b)
	return n, errs.Wrap("read node", "", err)
}

func decodeNode(b []byte) (*Node, error) {
	switch {
	case len(b) < 3 || len(b) > MaxNodeBytes:
		return nil, damaged("size of %d bytes is out of range", len(b))
	case b[0] < nodeVersion:
		return nil, damaged("version number is %d", b[0])
	case b[0] > nodeVersion:
		return nil, errs.New(errs.TooNew, "", "", "format version %d is newer than this pando supports (up to %d)", b[0], nodeVersion).
			WithHint("upgrade pando")
	case b[1] > 1 || b[2] > maxLevel:
		return nil, damaged("unknown node kind %d or level %d", b[1], b[2])
	}

	n := &Node{Level: int(b[2])}
	r := &reader{b: b[3:]}
	n.Index = int64(r.uvarint("its number", uint64((MaxVolumeBytes-1)/LevelBytes(n.Level))))
	if b[1] == 0 {
		n.Pieces = r.pieces(n.at().From(), uint64(LevelBytes(n.Level)/BlockBytes), LeafPieces)
	} else {
		n.Children = r.children()
	}

	if err := r.finish(); err != nil {
		return nil, err
	}

	if err := n.check(); err != nil {
		return nil, err
	}

	return n, nil
}

func (r *reader) children() *[NodeChildren]NodeRef {
	segments := r.segmentTable(NodeChildren)
	var there uint32
	if b := r.nextBytes("which children there are", 4); b != nil {
		there = binary.LittleEndian.Uint32(b)
	}
	if r.err == nil && (there == 0 || len(segments) > bits.OnesCount32(there)) {
		r.fail("%d children in %d segments are not possible", bits.OnesCount32(there), len(segments))
	}

	children := &[NodeChildren]NodeRef{}
	used := make([]bool, len(segments))
	last := looseFrame{offset: headerSize}
	for i := range children {
		if there&(1<<i) == 0 {
			continue
		}
		if children[i] = r.nodeRef(segments, &last, used); r.err != nil {
			return nil
		}
		if children[i].IsZero() {
			r.fail("a child is empty")
		}
	}
	if r.err == nil && slices.Contains(used, false) {
		r.fail("a listed segment holds no child")
	}

	return children
}

// ReadNode is what became of reading one node.
type ReadNode struct {
	*Node
	Err error // Damaged, NotFound (its segment is gone), TooNew; nil: Node is there
}

// Bounds of reading nodes.
const (
	nodeReads = 8         // requests at once
	nodeGap   = 64 << 10  // bytes between two nodes that are read along rather than asked for twice
	nodeSpan  = 2 << 20   // bytes of a segment in one request
	nodePlain = 512 << 10 // bytes of content of one request
)

// ReadNodes reads nodes, those that are near each other with one request. The result is in the same order. A node that
// cannot be read does not hide the others; any other error ends it.
//
// What a node must be was said where it is referred to: that it is so is checked.
func (r *Repo) ReadNodes(ctx context.Context, nodes []NodeAt) ([]ReadNode, error) {
	return r.readAllNodes(ctx, nodes, nil)
}

// readAllNodes is ReadNodes, of what along has, or with what it reads along.
func (r *Repo) readAllNodes(ctx context.Context, nodes []NodeAt, along *stretches) ([]ReadNode, error) {
	out := make([]ReadNode, len(nodes))
	order := make([]int, len(nodes))
	for i := range order {
		order[i] = i
	}

	slices.SortStableFunc(order, func(i, j int) int { return compareFrames(nodes[i].Frame, nodes[j].Frame) })
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(nodeReads)
	for len(order) > 0 {
		n := nodesTogether(nodes, order)
		some := order[:n]
		order = order[n:]
		g.Go(func() error { return r.readNodes(ctx, nodes, some, out, along) })
	}

	return out, g.Wait()
}

// nodesTogether is how many of the nodes in order one request is for.
func nodesTogether(nodes []NodeAt, order []int) int {
	first := nodes[order[0]].Frame
	end, plain := int64(first.Offset)+int64(first.Stored), int64(first.Plain)
	for n := 1; n < len(order); n++ {
		f := nodes[order[n]].Frame
		last := int64(f.Offset) + int64(f.Stored)
		plain += int64(f.Plain)
		if f.Segment != first.Segment || int64(f.Offset)-end > nodeGap || last-int64(first.Offset) > nodeSpan ||
			plain > nodePlain {
			return n
		}
		end = max(end, last)
	}

	return len(order)
}

// readNodes reads some nodes of one segment.
func (r *Repo) readNodes(
	ctx context.Context,
	nodes []NodeAt,
	some []int,
	out []ReadNode,
	along *stretches,
) error {
	frames := make([]Frame, len(some))
	for i, n := range some {
		frames[i] = nodes[n].Frame
	}

	contents, err := along.readContents(ctx, r, frames)
	if contents == nil && err == nil {
		contents, err = r.ReadFrames(ctx, frames)
	}

	switch {
	case err == nil:
		for i, n := range some {
			node, err := nodes[n].decode(contents[i])
			out[n] = ReadNode{node, errs.Wrap("read node", frameRef(frames[i]), err)}
		}
		return nil
	case !unreadable(err):
		return err
	case len(some) == 1:
		out[some[0]].Err = err
		return nil
	}

	for i := range some { // which of them it is
		if err := r.readNodes(ctx, nodes, some[i:i+1], out, along); err != nil {
			return err
		}
	}

	return nil
}

// unreadable reports whether err says that something is not as it was written.
func unreadable(err error) bool {
	var e *errs.Error
	return errors.As(err, &e) && (e.Kind == errs.Damaged || e.Kind == errs.NotFound || e.Kind == errs.TooNew)
}

// decode reads the content of a node, and checks that it is the one that is referred to.
func (n NodeAt) decode(b []byte) (*Node, error) {
	node, err := decodeNode(b)
	if err != nil {
		return nil, err
	}
	if err := n.checkMatches(node); err != nil {
		return nil, err
	}
	return node, nil
}

// checkMatches says in what a node is not the one that is referred to.
func (n NodeAt) checkMatches(node *Node) error {
	if node.Level != n.Level || node.Index != n.Index {
		return damaged("found node %d of level %d, expected %d of level %d", node.Index, node.Level, n.Index, n.Level)
	}
	if pieces, bytes := node.Count(); pieces != n.Pieces || bytes != n.Bytes {
		return damaged("the node has %d pieces of %d bytes, expected %d of %d", pieces, bytes, n.Pieces, n.Bytes)
	}
	return nil
}

// nodeWait is a node that is being read, or was.
type nodeWait struct {
	done chan struct{}
	node ReadNode
	err  error
	used uint64 // when it was last asked for
}

// NodeCache reads nodes and keeps those that were read last. Methods may be called concurrently.
type NodeCache struct {
	repo *Repo
	most int

	mu    sync.Mutex
	known map[Frame]*nodeWait
	clock uint64
	bytes int64 // that were read, as they are stored

	along stretches
}

// NewNodeCache keeps so many nodes, of about 10 KiB each at most.
func (r *Repo) NewNodeCache(most int) *NodeCache {
	return &NodeCache{repo: r, most: most, known: map[Frame]*nodeWait{}}
}

// Read is [Repo.ReadNodes]. What it returns is shared: it must not be changed.
func (c *NodeCache) Read(ctx context.Context, nodes []NodeAt) ([]ReadNode, error) {
	waits := make([]*nodeWait, len(nodes))
	var todo []NodeAt
	var mine []*nodeWait
	c.mu.Lock()

	for i, n := range nodes {
		c.clock++
		w := c.known[n.Frame]
		if w == nil {
			w = &nodeWait{done: make(chan struct{})}
			c.known[n.Frame] = w
			todo, mine = append(todo, n), append(mine, w)
		}
		w.used, waits[i] = c.clock, w
	}

	c.forgetOldest()
	c.mu.Unlock()

	if len(todo) > 0 {
		got, err := c.repo.readAllNodes(ctx, todo, &c.along)
		c.mu.Lock()
		for i, w := range mine {
			if w.err = err; err == nil {
				w.node = got[i]
			}
			if w.err != nil || w.node.Err != nil { // nobody keeps what may be there next time
				delete(c.known, todo[i].Frame)
			}
			c.bytes += int64(todo[i].Frame.Stored)
			close(w.done)
		}
		c.mu.Unlock()
	}

	out := make([]ReadNode, len(nodes))
	for i, w := range waits {
		select {
		case <-w.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		if w.err != nil {
			return nil, w.err
		}

		out[i] = w.node
		if n := w.node.Node; n != nil { // it may have been asked for as another one
			if err := nodes[i].checkMatches(n); err != nil {
				out[i] = ReadNode{Err: errs.Wrap("read node", frameRef(nodes[i].Frame), err)}
			}
		}
	}

	return out, nil
}

// Has reports whether a node is kept.
func (c *NodeCache) Has(f Frame) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.known[f] != nil
}

// forgetOldest forgets the half of the nodes that nobody asked for longest; the caller holds mu.
func (c *NodeCache) forgetOldest() {
	if len(c.known) <= 2*c.most {
		return
	}

	var ages []uint64
	for _, w := range c.known {
		ages = append(ages, w.used)
	}

	slices.Sort(ages)
	oldest := ages[len(ages)-c.most]
	for f, w := range c.known {
		if w.used < oldest {
			delete(c.known, f) // who waits for it has it
		}
	}
}

// BytesRead is how many stored bytes of nodes were read.
func (c *NodeCache) BytesRead() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}
