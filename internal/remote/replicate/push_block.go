package replicate

import (
	"context"
	"iter"
	"slices"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/repo"

	"golang.org/x/sync/errgroup"
)

// imageContent pushes a block image: pieces, and a map of them that reuses the map of the base.
type imageContent struct {
	*pointPush

	img          *engine.Image
	reader       *imageReader
	stop         func()        // ends the sequence of ranges
	baseManifest repo.Manifest // of the base
	root         repo.NodeRef  // of the new map
}

func (c *imageContent) contentKind() repo.Content { return repo.Block }

// openContent opens the image, and finds out whether its changes can be merged into the map of the base.
func (c *imageContent) openContent(ctx context.Context) (unchanged bool, err error) {
	c.img, err = c.p.e.OpenImage(ctx, engine.ReadRequest{Point: c.pt.ID, Base: c.base.object})
	if errs.Is(err, errs.NotFound) && c.base.object != "" {
		if _, perr := c.p.e.PointByID(ctx, c.base.object); errs.Is(perr, errs.NotFound) {
			return false, errBaseGone
		}
	}
	if err != nil {
		return false, err
	}

	// Decide whether to merge.
	merge := c.img.Exact && c.base.object != "" && mergeable(c.base.point.SizeBytes, c.img.SizeBytes)
	if c.resume != nil && merge != c.merge {
		return false, errStale
	}

	// Prepare to read, and compare with the base.
	c.merge, c.img.Ranges = merge, cacheRanges(c.img.Ranges)
	c.reader = &imageReader{
		img: *c.img, what: c.pt.Ref, merge: merge, hasSum: c.p.repo.HasSum, stats: c.stats, tracker: progress.From(ctx),
	}
	next, stop := iter.Pull2(c.img.Ranges)
	c.reader.ranges, c.stop = newReadAhead(c.img.R, next), stop
	return c.isIdle()
}

func (c *imageContent) closeContent() error {
	if c.stop != nil {
		c.stop()
	}
	if c.img == nil {
		return nil
	}
	return c.img.Close()
}

// describeManifest sets the root of the new map, and the segments whose sizes are known.
func (c *imageContent) describeManifest(m *repo.Manifest) error {
	intact := slices.DeleteFunc(slices.Clone(c.baseManifest.Uses), func(u repo.Use) bool { return c.base.lost[u.Segment] })
	m.Map, m.Logical, m.Uses = c.root, c.root.Bytes, c.stats.listUses(c.root, intact)
	return nil
}

func (c *imageContent) reportResult(out *Pushed) { out.Full = !c.merge }

// storeSegments runs the pipeline over the image.
func (c *imageContent) storeSegments(ctx context.Context) error {
	nodes, err := c.readBase(ctx)
	if err != nil {
		return err
	}

	// Take over what an interrupted push has finished.
	p, r, j := c.p, c.reader, c.j
	first := uint32(0)
	if c.resume != nil {
		for _, f := range j.finished {
			c.stats.setSize(repo.Segment{Session: c.session.ID, N: f.n}, int(f.bytes))
		}
		r.finished, r.replay, first = j.finishedParts(), j.readItems, j.nextSegment
		if err := j.appendRun(first); err != nil {
			return err
		}
	}

	scratch := c.damaged || len(c.base.lost) > 0
	pages := newMapper(nodes.Read, r.base, r.merge, scratch, r.img.SizeBytes, r.ahead)
	progress.From(ctx).StartOf(progress.Pushing, c.pt.Ref, 0, 0)

	// Count the bytes for the progress display in the meantime.
	if progress.From(ctx) != nil {
		ectx, cancel := context.WithCancel(ctx)
		var counting sync.WaitGroup
		counting.Go(func() { p.expectTotal(ectx, r.img) })
		defer counting.Wait()
		defer cancel()
	}

	// Read, compress and upload.
	pl := &pipeline{
		repo: p.repo, session: c.session.ID, first: first, journal: j, mapper: pages, stats: c.stats,
		ready: c.lease.waitBegun,
	}
	err = pl.storeAll(ctx, r.produce)
	c.root = pl.root
	return err
}

// readBase reads the manifest of the base, and prepares to read its map. Errors: errBaseGone, Damaged.
func (c *imageContent) readBase(ctx context.Context) (nodes *repo.NodeCache, err error) {
	// Read the manifest, unless the check of the base has read it.
	p, r := c.p, c.reader
	switch id := c.base.point.Manifest; {
	case p.base != nil && p.base.ID == id:
		c.baseManifest = *p.base
	case !id.IsZero():
		c.baseManifest, err = p.repo.Manifest(ctx, id)
	}
	if isUnreadable(err) {
		err = errBaseGone
	}
	if err != nil {
		return nil, err
	}

	// Prepare to read its map.
	if nodes = p.nodes; nodes == nil {
		nodes = p.repo.NewNodeCache(cachedNodes)
	}

	if !c.baseManifest.ID.IsZero() {
		if c.baseManifest.Content != repo.Block {
			return nil, errs.New(errs.Damaged, opPush, c.base.ref(),
				"the head lists a block image, but its manifest says %q", c.baseManifest.Content)
		}
		r.base = &c.baseManifest
		r.ahead = newCellPrefetcher(ctx, nodes.Read, r.base)
		if r.merge {
			r.ahead.requireIntactMap()
		} else {
			r.ahead.skipLostSegments(c.base.lost)
		}
	}

	return nodes, nil
}

// mergeable reports whether changes of a volume can be merged into the map of a volume of another size: pieces within a
// volume must end at whole blocks.
func mergeable(was, is int64) bool {
	return was == is || was%repo.BlockBytes == 0 && is%repo.BlockBytes == 0
}

// expectTotal tells the tracker how many bytes there are to push.
func (p *pusher) expectTotal(ctx context.Context, img engine.Image) {
	total := int64(0)
	for g, err := range img.Ranges {
		if err != nil || ctx.Err() != nil {
			return
		}
		if !g.Zero {
			total += g.Length
		}
	}
	progress.From(ctx).Expect(0, total)
}

// findSession finds the session of an interrupted push. Errors: errStale if the push cannot be resumed.
func (x *pointPush) findSession(ctx context.Context) error {
	s, err := x.p.repo.Session(ctx, x.j.plan.Session)
	switch {
	case errs.Is(err, errs.NotFound):
		return errStale
	case err != nil:
		return err
	case slices.Contains(x.head.Fenced, x.j.plan.Session):
		return errStale // a prune has fenced it, and was killed before it removed it
	case !x.j.ownsSession(s.Session):
		return errStale // a copy of this pool has resumed it
	}

	x.resume, x.wroteManifest = &s, true
	return nil
}

// usePlannedBase finds the base of an interrupted push, and the segments that it has uploaded. Errors: errStale if the
// push cannot be resumed.
func (x *pointPush) usePlannedBase(ctx context.Context) error {
	// Find the base in its head.
	p, pl := x.p, x.j.plan
	x.base = base{object: driver.ObjectID(pl.Base), head: pl.Head}
	x.origin, x.merge = pl.Origin, pl.Merge
	if !pl.Manifest.IsZero() {
		of := x.head
		var err error
		if pl.Head != x.name {
			if of, err = p.readHead(ctx, pl.Head); err != nil {
				return err
			}
		}

		is := func(at repo.Point) bool { return at.Manifest == pl.Manifest }
		var found bool
		if x.base.point, found, err = findPoint(ctx, p.repo, of.Head, nil, is); err != nil {
			return err
		}

		if !found {
			return errStale
		}
	}

	// Check that the base and the uploaded segments are there.
	if missing, err := p.findLost(ctx, pl.Manifest); err != nil {
		return err
	} else if missing.any() {
		return errStale
	}

	return p.dropMissingSegments(ctx, x.j)
}

// dropMissingSegments drops the journal's finished segments that are not on the remote with their full size, so that
// they are uploaded again.
func (p *pusher) dropMissingSegments(ctx context.Context, j *journal) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(2 * uploads)
	good := make([]bool, len(j.finished))
	for i, f := range j.finished {
		g.Go(func() error {
			s, err := p.repo.StatSegment(ctx, repo.Segment{Session: j.plan.Session, N: f.n})
			if errs.Is(err, errs.NotFound) {
				return nil
			}
			good[i] = err == nil && s.Bytes == f.bytes
			return err
		})
	}

	if err := g.Wait(); err != nil {
		return err
	}

	var kept []finishedSegment
	for i, f := range j.finished {
		if good[i] {
			kept = append(kept, f)
		}
	}

	j.finished = kept
	return nil
}
