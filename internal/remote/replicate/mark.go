package replicate

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"pando/internal/remote/repo"
)

// A marker finds exactly which frames, and which blocks of these frames, points need. Points share most of their maps,
// so every node is read only once, however many points have it. Marks are only added, never removed.

// marker collects the data that manifests need. Its methods may be called concurrently.
type marker struct {
	repo *repo.Repo

	mu       sync.Mutex
	segments map[repo.Segment]*marked
	nodes    []ownedNode // nodes that are still to be read
	lost     []lostNode  // nodes that cannot be read, at most maxLostNodes
	unread   error       // why marks may be missing; nil: none are
}

// ownedNode is a node of a map, and the first manifest found to have it.
type ownedNode struct {
	repo.NodeAt
	of repo.ID
}

// lostNode is a node that cannot be read.
type lostNode struct {
	ownedNode
	why error
}

// maxLostNodes is the most unreadable nodes that a marker remembers.
const maxLostNodes = 100

func newMarker(r *repo.Repo) *marker { return &marker{repo: r, segments: map[repo.Segment]*marked{}} }

// addManifest marks the frames that a manifest names itself. walkMaps marks those that nodes name.
func (k *marker) addManifest(m *repo.Manifest) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, f := range m.Stream {
		k.segment(f.Segment).markWhole(f)
	}
	k.addNode(ownedNode{m.Root(), m.ID})
}

// addNode marks a node, and lets walkMaps read it unless it was marked before. The caller holds the lock.
func (k *marker) addNode(n ownedNode) {
	if n.IsZero() {
		return
	}
	s := k.segment(n.Frame.Segment)
	s.markWhole(n.Frame)
	if f := s.frame(n.Frame); !f.node {
		f.node = true
		k.nodes = append(k.nodes, n)
	}
}

// walkMaps reads the nodes that were added and those below them, and marks the frames they need. It takes the last ones
// first, so that the list of nodes stays short. A node that cannot be read is not an error, but means that marks may be
// missing: see checkComplete.
func (k *marker) walkMaps(ctx context.Context) error {
	for {
		// Take a batch.
		k.mu.Lock()
		from := max(0, len(k.nodes)-nodeBatch)
		todo := slices.Clone(k.nodes[from:])
		k.nodes = k.nodes[:from]
		k.mu.Unlock()
		if len(todo) == 0 {
			return nil
		}

		// Read it, and mark what the nodes need.
		nodes := make([]repo.NodeAt, len(todo))
		for i, n := range todo {
			nodes[i] = n.NodeAt
		}

		got, err := k.repo.ReadNodes(ctx, nodes)
		if err != nil {
			return err
		}

		k.mu.Lock()
		for i, r := range got {
			k.markNode(todo[i], r)
		}

		k.mu.Unlock()
	}
}

// markNode marks the frames that a node needs. The caller holds the lock.
func (k *marker) markNode(at ownedNode, r repo.ReadNode) {
	switch {
	case r.Err != nil:
		if len(k.lost) < maxLostNodes {
			k.lost = append(k.lost, lostNode{at, r.Err})
		}
		k.unread = cmp.Or(k.unread, r.Err)
	case r.Children == nil:
		for _, x := range r.Pieces {
			k.segment(x.Frame.Segment).markPart(x.Frame, x.Within, x.Length)
		}
	default:
		for slot, ref := range r.Children {
			k.addNode(ownedNode{at.Child(slot, ref), at.of})
		}
	}
}

// needsOf returns all segments that the given manifests need.
func needsOf(ctx context.Context, r *repo.Repo, all ...*repo.Manifest) (map[repo.Segment]bool, error) {
	k := newMarker(r)
	for _, m := range all {
		k.addManifest(m)
	}

	err := k.walkMaps(ctx)
	out := map[repo.Segment]bool{}
	for s := range k.segments {
		out[s] = true
	}

	return out, err
}

// segment returns the marks of a segment. The caller holds the lock.
func (k *marker) segment(s repo.Segment) *marked {
	m := k.segments[s]
	if m == nil {
		m = &marked{}
		k.segments[s] = m
	}
	return m
}

// hasSegment reports whether anything in a segment is marked.
func (k *marker) hasSegment(s repo.Segment) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.segments[s] != nil
}

// checkComplete returns nil if all nodes could be read. Otherwise data that is not marked may be needed.
func (k *marker) checkComplete() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.unread
}

// neededBytes returns how many bytes of a segment of size bytes are needed. A frame of which only some blocks are
// needed counts in proportion to them.
func (k *marker) neededBytes(s repo.Segment, size int64) int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	m := k.segments[s]
	if m == nil {
		return 0
	}
	return min(size, m.neededBytes()+repo.SegmentOverhead)
}

// markedFrame is the needed part of a frame.
type markedFrame struct {
	index  uint32
	stored uint32
	total  uint32 // blocks
	blocks repo.BlockSet
	node   bool // it is a node that was read or is in marker.nodes
}

// marked is the needed part of a segment: frames in order of index.
type marked struct {
	frames []markedFrame
}

// frame returns the entry of a frame, and creates it if there is none.
func (m *marked) frame(f repo.Frame) *markedFrame {
	n := len(m.frames)
	if n > 0 && m.frames[n-1].index == f.Index {
		return &m.frames[n-1]
	}

	i, found := n, false
	if n > 0 && m.frames[n-1].index > f.Index {
		i, found = m.findFrame(f.Index)
	}
	if !found {
		m.frames = slices.Insert(m.frames, i, markedFrame{index: f.Index, stored: f.Stored, total: uint32(f.Blocks())})
	}

	return &m.frames[i]
}

// findFrame returns the place of a frame, or where it would be inserted.
func (m *marked) findFrame(index uint32) (int, bool) {
	return slices.BinarySearchFunc(m.frames, index, func(f markedFrame, i uint32) int { return cmp.Compare(f.index, i) })
}

// markWhole marks all of a frame.
func (m *marked) markWhole(f repo.Frame) { m.frame(f).blocks = repo.AllBlocks }

// markPart marks a part of the content of a frame, in bytes.
func (m *marked) markPart(f repo.Frame, within uint32, length int64) {
	m.frame(f).blocks.Add(int64(within), int64(within)+length)
}

// neededBytes returns the bytes that the needed parts of the frames take.
func (m *marked) neededBytes() (n int64) {
	for i := range m.frames {
		f := &m.frames[i]
		total := int64(f.total)
		n += repo.FrameOverhead + (int64(f.stored)*int64(f.blocks.Count(int(total)))+total-1)/total
	}
	return n
}
