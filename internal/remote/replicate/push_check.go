package replicate

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// errBaseDamaged is why changes cannot be laid over the map of a base: a part of it cannot be read.
var errBaseDamaged = errors.New("the base of this push is damaged")

// Checks bounds how often pushes that follow each other look whether what they build upon is there.
type Checks struct {
	Every time.Duration // at most once in this time

	last time.Time
}

// due reports whether it is time to look. A nil Checks always looks.
func (c *Checks) due() bool { return c == nil || c.last.IsZero() || time.Since(c.last) >= c.Every }

// lost is what of a point is not on the remote as it was pushed.
type lost struct {
	manifest bool                  // it cannot be read, so nothing of the point can
	segments map[repo.Segment]bool // that are missing, or have another size
}

func (l lost) any() bool { return l.manifest || len(l.segments) > 0 }

// lostOf finds what a manifest needs that is not there, if it is time to look; of a stream also what it is the
// difference from. All segments are listed once for all that a Push pushes.
func (p *pusher) findLost(ctx context.Context, id repo.ID) (lost, error) {
	out := lost{segments: maps.Clone(p.bad)} // perhaps not of this point; then more is sent than need be
	if out.segments == nil {
		out.segments = map[repo.Segment]bool{}
	}
	if id.IsZero() || p.sizes == nil && !p.q.Checks.due() {
		return out, nil
	}

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

// listSegments lists what segments there are, once. What is written later is not in it.
func (p *pusher) listSegments(ctx context.Context) error {
	if p.sizes != nil {
		return nil
	}

	sizes, err := presentSegments(ctx, p.repo)
	if err != nil {
		return err
	}

	p.sizes = sizes
	if p.q.Checks != nil {
		p.q.Checks.last = time.Now()
	}

	return nil
}

// missingOf adds what a manifest needs that is neither in the list nor, if it was written since, there now.
func (p *pusher) addMissing(ctx context.Context, m *repo.Manifest, to map[repo.Segment]bool) error {
	gone := map[repo.Segment]bool{}
	needs := func(m *repo.Manifest, to map[repo.Segment]bool) { missingSegments(m, p.sizes, to) }
	if m.Version == 2 && m.Content == repo.Block {
		frames, err := p.sampleFrames(ctx, m)
		if err != nil {
			return err
		}
		needs = func(m *repo.Manifest, to map[repo.Segment]bool) { missingFrames(m, frames, p.sizes, to) }
	}

	needs(m, gone)
	if len(gone) == 0 {
		return nil
	}

	var mu sync.Mutex
	err := eachOf(ctx, slices.Collect(maps.Keys(gone)), func(ctx context.Context, s repo.Segment) error {
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

// checkedNodes is how many nodes of a map are looked at, at most, to see what it needs: those of a small volume. Of a
// larger map they are others each time.
const checkedNodes = 64

// someOf is what a map of version 2 needs of segments: the last frame in each that a part of it is in, which is all
// of it if it is small. What is read is kept for the push. A node that cannot be read says nothing: a push that comes
// across it notices.
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

// checkedSegments is in how many segments nodes are read to check what they need, besides that of the root. Of each
// level of a map some are: it bounds the requests, however deep the map is and in however many pushes it was written.
const checkedSegments = 4

// nearNodes chooses so many of nodes, from a random one on, in so many segments, and says in how many they are: one
// request or two for each can read them.
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

// missingFrames adds the segments of frames that are missing, too short, or not as long as a manifest says.
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

// missingOf adds the segments that a manifest needs and that are missing, or are not as long as they must be.
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

	for _, pg := range m.Pages {
		short(pg.Frame)
	}

	for _, f := range m.Stream {
		short(f)
	}
}

// intactBase is what a push can build upon, of b: if something of that is lost it can only be compared with, and what
// is missing is sent again. With Full it is nothing.
func (p *pusher) intactBase(ctx context.Context, x *pointPush, b base) (base, error) {
	if p.q.Full {
		return base{}, nil
	}
	if b.head == "" {
		return b, nil
	}

	gone, err := p.findLost(ctx, b.point.Manifest)
	switch {
	case err != nil:
		return b, err
	case gone.manifest && b.point.Content.Chained(): // nothing can be read that is the difference from it
		x.note = "cannot read " + b.ref() + " on the remote: it was not used as a base"
		return base{}, nil
	case gone.manifest: // or somebody has just removed it: then there may be another
		b.newest = false // so that nothing is taken for unchanged
		return b, nil
	case gone.any():
		x.note = b.ref() + " on the remote is damaged: its missing data was sent again"
		b.object, b.newest, b.lost = "", false, gone.segments
		x.lostSegments = max(x.lostSegments, len(gone.segments))
	}

	return b, nil
}

// again prepares that a point which the head lists is pushed once more, in its place there.
func (p *pusher) preparePushAgain(ctx context.Context, x *pointPush, at repo.Point) error {
	if err := p.endPlannedSession(ctx, x.j); err != nil {
		return err
	}
	x.resuming, x.portable = false, at.Content == repo.Tree
	if p.replaceSeq == nil {
		p.replaceSeq = map[string]uint64{}
	}
	p.replaceSeq[x.name+"@"+at.Name] = at.Seq
	return nil
}

// inPlace puts a point into the place of the one that it replaces. False: there is none.
func (w *headWriter) replacePoint(ctx context.Context, pages repo.PagePutter, h *headState, at *repo.Point) (bool, error) {
	seq, is := w.replaceSeq[h.Name+"@"+at.Name]
	if !is {
		return false, nil
	}

	was, err := w.repo.Point(ctx, h.Head, seq)
	if isUnreadable(err) || err == nil && was.Name != at.Name {
		return false, nil // nothing to replace: it is added
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

// withoutLost reads regions of a map that is compared with, without what is lost.
func (a *pagePrefetcher) skipLostSegments(gone map[repo.Segment]bool) {
	read := a.readPieces
	a.readPieces = func(ctx context.Context, region uint32) ([]repo.Piece, error) {
		pieces, err := read(ctx, region)
		if isUnreadable(err) {
			return nil, nil
		}
		var left []repo.Piece
		for _, x := range pieces {
			if !gone[x.Frame.Segment] {
				left = append(left, x)
			}
		}
		return left, err
	}
}

// mustBeWhole reports parts of a map that cannot be read as errBaseDamaged.
func (a *pagePrefetcher) requireIntactMap() {
	read := a.readPieces
	a.readPieces = func(ctx context.Context, region uint32) ([]repo.Piece, error) {
		pieces, err := read(ctx, region)
		if isUnreadable(err) {
			err = errors.Join(errBaseDamaged, err)
		}
		return pieces, err
	}
}
