package replicate

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// errBaseDamaged means that changes cannot be merged into the map of a base, because part of the map cannot be read.
var errBaseDamaged = errors.New("the base of this push is damaged")

// checks limits how often successive pushes check that their bases are complete on the remote.
type checks struct {
	every time.Duration             // minimum time between two checks
	last  atomic.Pointer[time.Time] // nil: there was none
}

type checksKey struct{}

// CheckEvery returns a context in which pushes, together, check that their bases are complete on the remote at most
// once in a while. In other contexts each push checks it.
func CheckEvery(ctx context.Context, every time.Duration) context.Context {
	return context.WithValue(ctx, checksKey{}, &checks{every: every})
}

// checksOf returns the limit of a context; nil: there is none.
func checksOf(ctx context.Context) *checks {
	c, _ := ctx.Value(checksKey{}).(*checks)
	return c
}

// due reports whether a check is due. Without a limit it always is.
func (c *checks) due() bool {
	if c == nil {
		return true
	}
	last := c.last.Load()
	return last == nil || time.Since(*last) >= c.every
}

// lost is the data of a point that is missing or damaged on the remote.
type lost struct {
	manifest bool                  // the manifest cannot be read, so nothing of the point can
	segments map[repo.Segment]bool // segments that are missing or have another size
}

func (l lost) any() bool { return l.manifest || len(l.segments) > 0 }

// findLost finds what a manifest needs and what is not on the remote, if a check is due. For a stream it also checks
// the chain of points that it is the difference from. A Push lists all segments once for all its points.
func (p *pusher) findLost(ctx context.Context, id repo.ID) (lost, error) {
	out := lost{segments: maps.Clone(p.bad)} // those of other points only cause more data to be sent
	if out.segments == nil {
		out.segments = map[repo.Segment]bool{}
	}
	if id.IsZero() || p.sizes == nil && !checksOf(ctx).due() {
		return out, nil
	}

	// Check the manifest, and for a stream those that it is the difference from.
	for depth := 0; !id.IsZero() && depth <= maxChain; depth++ {
		m, err := p.repo.Manifest(ctx, id)
		if isUnreadable(err) {
			out.manifest = true
			return out, nil
		}

		if err != nil {
			return out, err
		}

		if err := p.listSegments(ctx); err != nil {
			return out, err
		}

		if m.Content.Chained() && m.IsOverlay() {
			// A pull restores it as an overlay, to apply the differences to it.
			if whole, err := p.lowerIsWhole(ctx, m.Origin.Manifest); err != nil || !whole {
				out.manifest = true
				return out, err
			}
		}

		p.base = &m
		p.noteChainLink(&m)
		if err := p.addMissing(ctx, &m, out.segments); err != nil {
			return out, err
		}

		if id = m.Parent; !m.Content.Chained() {
			break
		}
	}

	return out, nil
}

// listSegments lists the segments on the remote, once. The list does not have segments that are written later.
func (p *pusher) listSegments(ctx context.Context) error {
	if p.sizes != nil {
		return nil
	}

	sizes, err := presentSegments(ctx, p.repo)
	if err != nil {
		return err
	}

	p.sizes = sizes
	if c := checksOf(ctx); c != nil {
		now := time.Now()
		c.last.Store(&now)
	}

	return nil
}

// addMissing adds the segments that a manifest needs and that are neither in the list nor were written since.
func (p *pusher) addMissing(ctx context.Context, m *repo.Manifest, to map[repo.Segment]bool) error {
	missing := map[repo.Segment]bool{}
	needs := func(m *repo.Manifest, to map[repo.Segment]bool) { missingSegments(m, p.sizes, to) }
	if m.Content == repo.Block {
		frames, err := p.sampleFrames(ctx, m)
		if err != nil {
			return err
		}
		needs = func(m *repo.Manifest, to map[repo.Segment]bool) { missingFrames(m, frames, p.sizes, to) }
	}

	// Find what the list does not have.
	needs(m, missing)
	if len(missing) == 0 {
		return nil
	}

	// Ask for each, as it may have been written since.
	var mu sync.Mutex
	err := eachOf(ctx, slices.Collect(maps.Keys(missing)), func(ctx context.Context, s repo.Segment) error {
		state, err := p.repo.StatSegment(ctx, s)
		if errs.Is(err, errs.NotFound) {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		p.sizes[s] = state.Bytes
		return err
	})

	needs(m, to)
	return err
}

// checkedNodes is the maximum number of nodes to read to find what a map needs. They are all nodes of a small volume,
// and a different sample of a larger one each time.
const checkedNodes = 64

// sampleFrames returns, for segments that a map needs, the last frame that is needed of each. It reads a
// sample of the nodes, which is all of them if the map is small, and keeps them for the push. It skips nodes that
// cannot be read: a push that needs such a node notices.
func (p *pusher) sampleFrames(ctx context.Context, m *repo.Manifest) (map[repo.Segment]repo.Frame, error) {
	if p.nodes == nil {
		p.nodes = p.repo.NewNodeCache(cachedNodes)
	}

	out := map[repo.Segment]repo.Frame{}
	add := func(f repo.Frame) {
		if last, has := out[f.Segment]; !has || f.Offset > last.Offset {
			out[f.Segment] = f
		}
	}

	// Read level by level, as many nodes and segments as the bounds allow.
	todo := []repo.NodeAt{m.Root()}
	nodes, segments := checkedNodes, 1+checkedSegments // one has the root
	for len(todo) > 0 && !todo[0].IsZero() {
		for _, n := range todo {
			add(n.Frame)
		}

		if nodes == 0 || segments == 0 {
			break
		}

		var in int
		todo, in = sampleNodes(todo, nodes, segments)
		nodes, segments = nodes-len(todo), segments-in
		got, err := p.nodes.Read(ctx, todo)
		if err != nil {
			return nil, err
		}

		// Collect frames of pieces, and the nodes of the next level.
		var next []repo.NodeAt
		for i, r := range got {
			if r.Err != nil {
				continue
			}

			for _, x := range r.Pieces {
				add(x.Frame)
			}

			if r.Children == nil {
				continue
			}

			for slot, ref := range r.Children {
				if !ref.IsZero() {
					next = append(next, todo[i].Child(slot, ref))
				}
			}
		}

		todo = next
	}

	return out, nil
}

// checkedSegments is the maximum number of segments, besides the root's, in which nodes are read to check what they
// need. It bounds the number of requests, however deep the map is and however many pushes wrote it.
const checkedSegments = 4

// sampleNodes chooses at most most of the nodes, beginning with a random one, in at most mostSegments segments. in is
// the number of segments that they are in; one or two requests for each can read them.
func sampleNodes(all []repo.NodeAt, most, mostSegments int) (out []repo.NodeAt, in int) {
	mostSegments = min(mostSegments, 2)
	begin := 0
	if len(all) > most || len(all) > mostSegments {
		begin = rand.IntN(len(all))
	}

	segments := map[repo.Segment]bool{}
	for i := range all {
		n := all[(begin+i)%len(all)]
		if len(out) == most || !segments[n.Frame.Segment] && len(segments) == mostSegments {
			break
		}
		segments[n.Frame.Segment] = true
		out = append(out, n)
	}

	return out, len(segments)
}

// missingFrames adds the segments of frames that are missing, too short, or of another size than the manifest has.
func missingFrames(
	m *repo.Manifest,
	frames map[repo.Segment]repo.Frame,
	sizes map[repo.Segment]int64,
	to map[repo.Segment]bool,
) {
	for s, f := range frames {
		if size, there := sizes[s]; !there || size < int64(f.Offset)+int64(f.Stored) {
			to[s] = true
		}
	}

	for _, u := range m.Uses {
		if size, there := sizes[u.Segment]; there && u.Size != 0 && int64(u.Size) != size {
			if _, needed := frames[u.Segment]; needed {
				to[u.Segment] = true
			}
		}
	}
}

// missingSegments adds the segments that a manifest needs and that are missing or have the wrong size.
func missingSegments(m *repo.Manifest, sizes map[repo.Segment]int64, to map[repo.Segment]bool) {
	for _, u := range m.Uses {
		size, there := sizes[u.Segment]
		if !there || u.Size != 0 && int64(u.Size) != size {
			to[u.Segment] = true
		}
	}

	short := func(f repo.Frame) {
		if sizes[f.Segment] < int64(f.Offset)+int64(f.Stored) {
			to[f.Segment] = true
		}
	}

	for _, f := range m.Stream {
		short(f)
	}
}

// intactBase returns b as far as a push can use it. If some of its data is lost, the new point can only be compared
// with it, and the missing data is sent again. With Full, the result is no base.
func (p *pusher) intactBase(ctx context.Context, x *pointPush, b base) (base, error) {
	if p.q.Full {
		return base{}, nil
	}
	if b.head == "" {
		return b, nil
	}

	missing, err := p.findLost(ctx, b.point.Manifest)
	switch {
	case err != nil:
		return b, err
	case missing.manifest && b.point.Content.Chained(): // a difference from it could not be read
		x.note = "cannot read " + b.ref() + " on the remote: it was not used as a base"
		return base{}, nil
	case missing.manifest: // or the point was just removed, and there may be another base
		b.newest = false // so that the volume does not count as unchanged
		return b, nil
	case missing.any():
		x.noteDamagedBase(b)
		b.object, b.newest, b.lost = "", false, missing.segments
		x.lostSegments = max(x.lostSegments, len(missing.segments))
	}

	return b, nil
}

// noteDamagedBase notes that a base is damaged. The push sends what its own point needs, and does not repair the base.
func (x *pointPush) noteDamagedBase(b base) {
	x.note = fmt.Sprintf("%s on the remote is damaged and stays incomplete: only what %s@%s needs of its missing data "+
		"was sent again", b.ref(), x.name, x.pt.Name)
}

// preparePushAgain prepares to push a point that the head lists once more, in its place there.
func (p *pusher) preparePushAgain(ctx context.Context, x *pointPush, at repo.Point) error {
	if err := p.endPlannedSession(ctx, x.j); err != nil {
		return err
	}
	x.resuming, x.portable = false, at.Content == repo.Tree
	if p.replaced == nil {
		p.replaced = map[string]repo.Point{}
	}
	p.replaced[x.name+"@"+at.Name] = at
	return nil
}

// replacePoint puts a point into the place of the one that it replaces. It reports whether there was one.
func (w *headWriter) replacePoint(
	ctx context.Context, pages repo.PagePutter, h *headState, at *repo.Point,
) (bool, error) {
	old, is := w.replaced[h.Name+"@"+at.Name]
	if !is {
		return false, nil
	}

	seq := old.Seq
	was, err := w.repo.Point(ctx, h.Head, seq)
	if isUnreadable(err) || err == nil && was.Name != at.Name {
		return false, nil // nothing to replace: the caller adds the point
	}
	if err != nil {
		return false, err
	}

	at.Seq, at.Keep = seq, was.Keep
	err = pages.Edit(ctx, &h.Head, pageHolding(seq), func(points []repo.Point) []repo.Point {
		if i := slices.IndexFunc(points, func(x repo.Point) bool { return x.Seq == seq }); i >= 0 {
			points[i] = *at
		}
		return points
	})

	return err == nil, err
}

// skipLostSegments makes the prefetcher leave out pieces in lost segments and parts of the map that cannot be read. It
// is for a map that is only compared with.
func (a *cellPrefetcher) skipLostSegments(lostSegments map[repo.Segment]bool) {
	read := a.readPieces
	a.readPieces = func(ctx context.Context, cell uint32) ([]repo.Piece, error) {
		pieces, err := read(ctx, cell)
		if isUnreadable(err) {
			return nil, nil
		}
		var left []repo.Piece
		for _, x := range pieces {
			if !lostSegments[x.Frame.Segment] {
				left = append(left, x)
			}
		}
		return left, err
	}
}

// requireIntactMap makes the prefetcher report parts of the map that cannot be read as errBaseDamaged.
func (a *cellPrefetcher) requireIntactMap() {
	read := a.readPieces
	a.readPieces = func(ctx context.Context, cell uint32) ([]repo.Piece, error) {
		pieces, err := read(ctx, cell)
		if isUnreadable(err) {
			err = errors.Join(errBaseDamaged, err)
		}
		return pieces, err
	}
}
