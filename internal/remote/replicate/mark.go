package replicate

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"pando/internal/remote/repo"

	"golang.org/x/sync/semaphore"
)

// A marker finds what points need, exactly: which frames of which segments, and which blocks of these. Points share
// most of their maps, so every page is read once, however many points have it. What is marked only grows.

// marker collects what manifests need. Its methods may be called concurrently.
type marker struct {
	repo   *repo.Repo
	memory *semaphore.Weighted // for pages

	mu              sync.Mutex
	segments        map[repo.Segment]*marked
	pages           map[pageKey]bool // that were read, or are in todo
	todo            []repo.Page
	nodes           []ownedNode // that are to be read
	lost            []lostNode  // that cannot be read, at most maxLostNodes
	inexact         error       // why what is marked is not all; nil: it is
	segmentsUnknown error       // why what segments are needed is not all that is marked: manifests of version 2 do not tell it
}

// ownedNode is a node of the map of a manifest, the first of those that have it.
type ownedNode struct {
	repo.NodeAt
	of repo.ID
}

// lostNode is a node that cannot be read.
type lostNode struct {
	ownedNode
	why error
}

// maxLostNodes bounds how many nodes are remembered that cannot be read.
const maxLostNodes = 100

// pageKey is a page, wherever it is listed.
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

// addManifest marks what a manifest itself says. What its pages say is marked by walk.
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

// addNode marks a node that was not marked before, and what is below it is then marked by walk. The caller holds the
// lock.
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

// walkNodes reads nodes until none is left, the last that was added first, so that there are never many to read.
func (k *marker) walkNodes(ctx context.Context) error {
	for {
		k.mu.Lock()
		from := max(0, len(k.nodes)-nodeBatch)
		todo := slices.Clone(k.nodes[from:])
		k.nodes = k.nodes[:from]
		k.mu.Unlock()
		if len(todo) == 0 {
			return nil
		}

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

// markNode marks what a node needs. The caller holds the lock.
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

// needsOf is all segments that some manifests need.
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

// walkMaps reads the pages that were added, several at once, and marks what they need. A page that cannot be read is no
// error, but a reason to trust nothing but what was marked: see checkExact.
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

// markPage reads a page and marks what it needs.
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

// segment is what is marked of a segment. The caller holds the lock.
func (k *marker) segment(s repo.Segment) *marked {
	m := k.segments[s]
	if m == nil {
		m = &marked{}
		k.segments[s] = m
	}
	return m
}

// hasSegment reports whether something of a segment is marked.
func (k *marker) hasSegment(s repo.Segment) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.segments[s] != nil
}

// checkSegmentsKnown is nil if all segments that are needed are known, and else says why not. Manifests of version 1 say it
// themselves.
func (k *marker) checkSegmentsKnown() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.segmentsUnknown
}

// checkExact is nil if all that was added could be read. Else something that is not marked may be needed.
func (k *marker) checkExact() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.inexact
}

// neededBytes is how many bytes of a segment of size bytes are needed: of a frame of which only some blocks are, their
// share.
func (k *marker) neededBytes(s repo.Segment, size int64) int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	m := k.segments[s]
	if m == nil {
		return 0
	}
	return min(size, m.neededBytes()+repo.SegmentOverhead)
}

// markedFrame is what of a frame is needed.
type markedFrame struct {
	index  uint32
	stored uint32
	total  uint32 // blocks
	blocks repo.BlockSet
	node   bool // it is a node, which was read or is going to be
}

// marked is what of a segment is needed: frames in order of index.
type marked struct {
	frames []markedFrame
}

// frame is the entry of a frame, which is made if there is none.
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

// findFrame is the place of a frame.
func (m *marked) findFrame(index uint32) (int, bool) {
	return slices.BinarySearchFunc(m.frames, index, func(f markedFrame, i uint32) int { return cmp.Compare(f.index, i) })
}

// markWhole marks all of a frame.
func (m *marked) markWhole(f repo.Frame) { m.frame(f).blocks = repo.AllBlocks }

// markPart marks a part of the content of a frame.
func (m *marked) markPart(f repo.Frame, within uint32, length int64) {
	if f.Plain > repo.FrameBytes { // more than can be told apart
		m.markWhole(f)
		return
	}
	m.frame(f).blocks.Add(int64(within), int64(within)+length)
}

// neededBytes is what the frames take.
func (m *marked) neededBytes() (n int64) {
	for i := range m.frames {
		f := &m.frames[i]
		total := int64(f.total)
		n += repo.FrameOverhead + (int64(f.stored)*int64(f.blocks.Count(int(total)))+total-1)/total
	}
	return n
}
