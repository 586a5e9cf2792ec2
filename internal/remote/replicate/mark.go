package replicate

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"pando/internal/remote/repo"

	"golang.org/x/sync/semaphore"
)

// A marker finds exactly which frames, and which blocks of these frames, points need. Points share most of their maps,
// so every page is read only once, however many points have it. Marks are only added, never removed.

// marker collects the data that manifests need. Its methods may be called concurrently.
type marker struct {
	repo   *repo.Repo
	memory *semaphore.Weighted // for pages

	mu              sync.Mutex
	segments        map[repo.Segment]*marked
	pages           map[pageKey]bool // that were read, or are in todo
	todo            []repo.Page      // to be read
	nodes           []ownedNode      // to be read
	lost            []lostNode       // that cannot be read, at most maxLostNodes
	inexact         error            // why marks may be missing; nil: none are
	segmentsUnknown error            // why even segments may be missing: manifests of version 2 do not list them
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

// pageKey identifies a page, whichever manifest lists it.
type pageKey struct {
	segment repo.Segment
	index   uint32
	region  uint32
}

func newMarker(r *repo.Repo) *marker {
	return &marker{
		repo: r, memory: semaphore.NewWeighted(pagesInMemory),
		segments: map[repo.Segment]*marked{}, pages: map[pageKey]bool{},
	}
}

// addManifest marks the frames that a manifest names itself. walkMaps marks those that its pages and nodes name.
func (k *marker) addManifest(m *repo.Manifest) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range m.Pages {
		k.segment(p.Frame.Segment).markWhole(p.Frame)
		key := pageKey{p.Frame.Segment, p.Frame.Index, p.Region}
		if !k.pages[key] {
			k.pages[key] = true
			k.todo = append(k.todo, p)
		}
	}

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

// walkNodes reads nodes until none are left. It takes the last ones first, so that the list of nodes stays short.
func (k *marker) walkNodes(ctx context.Context) error {
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
		k.inexact, k.segmentsUnknown = cmp.Or(k.inexact, r.Err), cmp.Or(k.segmentsUnknown, r.Err)
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
	out := map[repo.Segment]bool{}
	for _, m := range all {
		if m.Version == 2 {
			k.addManifest(m)
			continue
		}
		for _, u := range m.Uses {
			out[u.Segment] = true
		}
	}

	err := k.walkMaps(ctx)
	for s := range k.segments {
		out[s] = true
	}

	return out, err
}

// walkMaps reads the pages and nodes that were added, several at once, and marks the frames they need. A page that
// cannot be read is not an error, but means that marks may be missing: see checkExact.
func (k *marker) walkMaps(ctx context.Context) error {
	if err := k.walkNodes(ctx); err != nil {
		return err
	}

	for {
		k.mu.Lock()
		todo := k.todo
		k.todo = nil
		k.mu.Unlock()
		if len(todo) == 0 {
			return nil
		}

		// Pages that lie near each other are read near each other.
		slices.SortFunc(todo, func(a, b repo.Page) int {
			return cmp.Or(compareSegment(a.Frame.Segment, b.Frame.Segment), cmp.Compare(a.Frame.Index, b.Frame.Index))
		})
		if err := eachOf(ctx, todo, k.markPage); err != nil {
			return err
		}
	}
}

// markPage reads a page and marks the frames it needs.
func (k *marker) markPage(ctx context.Context, p repo.Page) error {
	room := pageRoom(p)
	if err := k.memory.Acquire(ctx, room); err != nil {
		return err
	}

	defer k.memory.Release(room)
	pieces, err := k.repo.ReadPage(ctx, p)
	if err != nil && !isUnreadable(err) {
		return err
	}

	k.mu.Lock()
	defer k.mu.Unlock()
	if err != nil {
		k.inexact = cmp.Or(k.inexact, err)
		return nil
	}

	for _, x := range pieces {
		k.segment(x.Frame.Segment).markPart(x.Frame, x.Within, x.Length)
	}

	return nil
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

// checkSegmentsKnown returns nil if all needed segments are known, and otherwise why not. Manifests of version 1 list
// their segments themselves.
func (k *marker) checkSegmentsKnown() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.segmentsUnknown
}

// checkExact returns nil if all pages and nodes could be read. Otherwise data that is not marked may be needed.
func (k *marker) checkExact() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.inexact
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
	if f.Plain > repo.FrameBytes { // more blocks than a BlockSet can hold
		m.markWhole(f)
		return
	}
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
