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

// The map of a manifest is a tree. A node has a level and describes a range of the volume of
// LevelBytes(level), which begins at a multiple of that size. If the range contains at most LeafPieces pieces, the node
// is a leaf and lists them; otherwise it lists its children, nodes of the level below that describe parts of its range.
// An empty range has no node. Pieces do not cross multiples of CellBytes, so the tree depends only on the pieces: the
// same content, stored in the same frames, has the same nodes.

// Sizes of the tree.
const (
	LeafPieces   = 128        // in a leaf, at most; a range with more has an inner node
	NodeChildren = 32         // of an inner node, at most
	CellBytes    = FrameBytes // of a volume, described by a node of level 0: LeafPieces blocks
	MaxNodeBytes = 64 << 10   // encoded, before compression

	childBits = 5
	maxLevel  = 7 // its range is more than MaxVolumeBytes
)

const nodeVersion = 1

// LevelBytes returns the size of the range of a node of a level.
func LevelBytes(level int) int64 { return CellBytes << (childBits * level) }

// RootLevel returns the level of the root of a volume of size bytes: the lowest that describes all of it.
func RootLevel(size int64) int {
	level := 0
	for LevelBytes(level) < size {
		level++
	}
	return level
}

// NodeRef is the location of a node, with totals of its range. The zero NodeRef stands for an empty range, which has
// no node.
type NodeRef struct {
	Frame  Frame
	Pieces int64 // number of pieces in the range
	Bytes  int64 // bytes in these pieces
}

// IsZero reports whether the range is empty and has no node.
func (n NodeRef) IsZero() bool { return n.Pieces == 0 }

// IsLeaf reports whether the node lists pieces.
func (n NodeRef) IsLeaf() bool { return n.Pieces <= LeafPieces }

// NodeAt is a node and its range: [Index*LevelBytes(Level), (Index+1)*LevelBytes(Level)).
type NodeAt struct {
	NodeRef
	Level int
	Index int64
}

// From returns the first offset of the range.
func (n NodeAt) From() int64 { return n.Index * LevelBytes(n.Level) }

// To returns the first offset after the range.
func (n NodeAt) To() int64 { return (n.Index + 1) * LevelBytes(n.Level) }

// Child returns the node in a slot of an inner node.
func (n NodeAt) Child(slot int, ref NodeRef) NodeAt {
	return NodeAt{NodeRef: ref, Level: n.Level - 1, Index: n.Index*NodeChildren + int64(slot)}
}

// Node is the content of a node: a leaf has Pieces, an inner node has Children.
type Node struct {
	Level    int
	Index    int64
	Pieces   []Piece
	Children *[NodeChildren]NodeRef // indexed by their position in the range
}

// Count returns the number of pieces in the range of a node, and the bytes in them.
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

// check reports an error if the node is inconsistent.
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

// check reports an error if the reference cannot be to a node with the range of at.
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

// EncodeNode encodes a node in at most MaxNodeBytes. Invalid: the node is inconsistent.
func EncodeNode(n *Node) ([]byte, error) {
	const op = "write node"
	if err := n.check(); err != nil {
		return nil, errs.Wrap(op, "", asInvalid(err))
	}

	// Write the header.
	kind := byte(0)
	if n.Children != nil {
		kind = 1
	}

	b := []byte{nodeVersion, kind, byte(n.Level)}
	b = binary.AppendUvarint(b, uint64(n.Index))

	// Write the content.
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

// appendChildren encodes the children of an inner node.
func appendChildren(b []byte, children *[NodeChildren]NodeRef) []byte {
	table := newSegmentTable(func(yield func(Segment)) {
		for _, c := range children {
			if !c.IsZero() {
				yield(c.Frame.Segment)
			}
		}
	})

	b = table.appendTo(b)
	present := uint32(0)
	for i, c := range children {
		if !c.IsZero() {
			present |= 1 << i
		}
	}

	b = binary.LittleEndian.AppendUint32(b, present)
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

// DecodeNode decodes the output of EncodeNode. Damaged, TooNew. The caller must check that the children match their
// references, and that the node is within its volume.
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
		return nil, tooNew(b[0], nodeVersion)
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

// children decodes what appendChildren has written.
func (r *reader) children() *[NodeChildren]NodeRef {
	segments := r.segmentTable(NodeChildren)
	var present uint32
	if b := r.nextBytes("the set of children", 4); b != nil {
		present = binary.LittleEndian.Uint32(b)
	}
	if r.err == nil && (present == 0 || len(segments) > bits.OnesCount32(present)) {
		r.fail("%d children in %d segments are not possible", bits.OnesCount32(present), len(segments))
	}

	children := &[NodeChildren]NodeRef{}
	used := make([]bool, len(segments))
	last := looseFrame{offset: headerSize}
	for i := range children {
		if present&(1<<i) == 0 {
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

// ReadNode is the result of reading one node.
type ReadNode struct {
	*Node
	Err error // Damaged, NotFound (its segment is missing), TooNew; nil: Node is set
}

// Bounds of reading nodes.
const (
	nodeReads = 8         // concurrent requests
	nodeGap   = 64 << 10  // up to this many bytes between two nodes are read, to save a request
	nodeSpan  = 2 << 20   // bytes of a segment in one request
	nodePlain = 512 << 10 // bytes of decompressed nodes in one request
)

// ReadNodes reads nodes; one request reads nodes that are near each other. The result has the same order. A node that
// cannot be read does not hide the others; any other error ends it.
//
// It checks that each node is the one its reference describes.
func (r *Repo) ReadNodes(ctx context.Context, nodes []NodeAt) ([]ReadNode, error) {
	return r.readAllNodes(ctx, nodes, nil)
}

// readAllNodes is ReadNodes, which takes nodes from the stretches in along, and adds those that it reads.
func (r *Repo) readAllNodes(ctx context.Context, nodes []NodeAt, along *stretches) ([]ReadNode, error) {
	// Order the nodes by place.
	out := make([]ReadNode, len(nodes))
	order := make([]int, len(nodes))
	for i := range order {
		order[i] = i
	}

	slices.SortStableFunc(order, func(i, j int) int { return compareFrames(nodes[i].Frame, nodes[j].Frame) })

	// Read those that are near each other together.
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

// nodesTogether returns how many of the first nodes in order one request should read.
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

// readNodes reads the nodes with the indexes in some, which are in one segment, into out.
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

	// Read one by one to find the nodes that cannot be read.
	for i := range some {
		if err := r.readNodes(ctx, nodes, some[i:i+1], out, along); err != nil {
			return err
		}
	}

	return nil
}

// unreadable reports whether err means that an object is missing, or cannot be read as it was written.
func unreadable(err error) bool {
	var e *errs.Error
	return errors.As(err, &e) && (e.Kind == errs.Damaged || e.Kind == errs.NotFound || e.Kind == errs.TooNew)
}

// decode decodes the content of a node, and checks that it is the one the reference describes.
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

// checkMatches reports an error if node is not the one the reference describes.
func (n NodeAt) checkMatches(node *Node) error {
	if node.Level != n.Level || node.Index != n.Index {
		return damaged("found node %d of level %d, expected %d of level %d", node.Index, node.Level, n.Index, n.Level)
	}
	if pieces, bytes := node.Count(); pieces != n.Pieces || bytes != n.Bytes {
		return damaged("the node has %d pieces of %d bytes, expected %d of %d", pieces, bytes, n.Pieces, n.Bytes)
	}
	return nil
}

// nodeWait is a node that is being read, or has been read.
type nodeWait struct {
	at   NodeAt // as it was first requested
	done chan struct{}
	node ReadNode
	err  error
	used uint64 // value of the clock when it was last requested
}

// NodeCache reads nodes and keeps the most recently requested ones. Methods may be called concurrently.
type NodeCache struct {
	repo *Repo
	most int

	mu    sync.Mutex
	known map[Frame]*nodeWait
	clock uint64
	bytes int64 // stored bytes of the nodes that were read

	along stretches
}

// NewNodeCache returns a cache that keeps between most and 2*most nodes once it is full. A node takes at most about
// 10 KiB.
func (r *Repo) NewNodeCache(most int) *NodeCache {
	return &NodeCache{repo: r, most: most, known: map[Frame]*nodeWait{}}
}

// Read is [Repo.ReadNodes] through the cache. The nodes are shared and must not be changed.
func (c *NodeCache) Read(ctx context.Context, nodes []NodeAt) ([]ReadNode, error) {
	// Find the nodes that no call has requested yet.
	waits := make([]*nodeWait, len(nodes))
	var todo []NodeAt
	var mine []*nodeWait
	c.mu.Lock()

	for i, n := range nodes {
		c.clock++
		w := c.known[n.Frame]
		if w == nil {
			w = &nodeWait{at: n, done: make(chan struct{})}
			c.known[n.Frame] = w
			todo, mine = append(todo, n), append(mine, w)
		}
		w.used, waits[i] = c.clock, w
	}

	c.forgetOldest()
	c.mu.Unlock()

	// Read them, and wake up the calls that wait for them.
	if len(todo) > 0 {
		got, err := c.repo.readAllNodes(ctx, todo, &c.along)
		c.mu.Lock()
		for i, w := range mine {
			if w.err = err; err == nil {
				w.node = got[i]
			}
			if w.err != nil || w.node.Err != nil { // the next attempt may succeed
				delete(c.known, todo[i].Frame)
			}
			c.bytes += int64(todo[i].Frame.Stored)
			close(w.done)
		}
		c.mu.Unlock()
	}

	// Wait for the nodes that other calls are reading.
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

		// Another call may have requested this frame as a different node, which it may not be.
		out[i] = w.node
		switch n := w.node.Node; {
		case n == nil && w.at != nodes[i]:
			again, err := c.repo.ReadNodes(ctx, nodes[i:i+1])
			if err != nil {
				return nil, err
			}
			out[i] = again[0]
		case n != nil:
			if err := nodes[i].checkMatches(n); err != nil {
				out[i] = ReadNode{Err: errs.Wrap("read node", frameRef(nodes[i].Frame), err)}
			}
		}
	}

	return out, nil
}

// Has reports whether the node in a frame is in the cache.
func (c *NodeCache) Has(f Frame) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.known[f] != nil
}

// forgetOldest drops the least recently requested half of a full cache. The caller holds mu.
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
			delete(c.known, f) // calls that wait for it hold w
		}
	}
}

// BytesRead returns how many stored bytes of nodes were read.
func (c *NodeCache) BytesRead() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}
