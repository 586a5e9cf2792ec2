package replicate

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

// maxDepth is the maximum length of a chain of origins or of streams.
const maxDepth = 10000

// errTooDeep says that a chain is longer than maxDepth: origins in a circle, which only a forged repository has.
var errTooDeep = fmt.Errorf("it depends on more than %d other points", maxDepth)

// dest is where to put a point.
type dest struct {
	name   ref.Name
	golden bool
	exists bool // the name exists in this pool
	update bool // an existing volume becomes the point; otherwise it only receives the snapshot
}

// pullPoint makes a local snapshot or generation of a head's point. First it makes everything that the point needs.
func (p *puller) pullPoint(ctx context.Context, h repo.Head, pt repo.Point, d dest, depth int) (api.Object, error) {
	if depth > maxDepth {
		return api.Object{}, errs.New(errs.Damaged, opPull, h.Name+"@"+pt.Name, "%w", errTooDeep)
	}

	m, err := p.readManifest(ctx, h, pt)
	if err != nil {
		return api.Object{}, err
	}

	q := engine.ReceiveRequest{
		Volume: d.name, FS: driver.FS(m.FS), SizeBytes: m.SizeBytes, Sector: m.Sector, CreatedAt: m.CreatedAt,
		Consistency: driver.Consistency(m.Consistency), OriginRef: pt.OriginRef,
		Links: []engine.Link{{Repo: p.repo.ID().String(), Manifest: m.ID.String()}},
	}

	// Find the base, and restore it if necessary.
	if m.Content.Chained() {
		if q.Base, err = p.restoreParent(ctx, h, m, &d, depth); err != nil {
			return api.Object{}, err
		}
	}

	if m.IsOverlay() {
		if q.Lower, err = p.restoreLower(ctx, &m, depth); err != nil {
			return api.Object{}, err
		}
	}

	var base *repo.Manifest
	if m.Content == repo.Block {
		if base, q.Base, err = p.chooseBase(ctx, h, pt, &m, depth); err != nil {
			return api.Object{}, err
		}
	}

	// Set what to make, and what it was cloned from.
	if err := fillDest(&q, pt, d); err != nil {
		return api.Object{}, err
	}

	if err := p.fillOrigin(ctx, &q, pt); err != nil {
		return api.Object{}, err
	}

	if depth == 0 && q.Base != "" {
		if b, err := p.e.PointByID(ctx, q.Base); err == nil {
			p.out.Base = b.Ref
		}
	}

	// Fetch the content.
	var info api.Object
	what := h.Name + "@" + pt.Name
	if m.Content.Chained() {
		info, err = p.receiveStream(ctx, q, &m, what)
	} else {
		info, err = p.receiveImage(ctx, q, base, &m, what)
	}
	if err != nil {
		return api.Object{}, err
	}

	if err := p.loadLinks(ctx); err != nil {
		return api.Object{}, err
	}

	if m.Raw && depth == 0 {
		p.noteKey(ctx, m.ID)
	}

	return info, nil
}

// readManifest reads the manifest of a point, and checks that it belongs to the point and that this pool can receive
// it.
func (p *puller) readManifest(ctx context.Context, h repo.Head, pt repo.Point) (repo.Manifest, error) {
	m, err := p.repo.Manifest(ctx, pt.Manifest)
	if err != nil {
		return m, err
	}

	if m.ID != pt.Manifest || m.Content != pt.Content || m.SizeBytes != pt.SizeBytes || m.FS != pt.FS {
		return m, errs.New(errs.Damaged, opPull, h.Name+"@"+pt.Name, "its manifest describes another point").
			WithHint("check the remote with %s", errs.Run("verify", p.remote))
	}

	return m, p.checkRaw(h, pt, m)
}

// fillDest sets which generation or snapshot a point becomes.
func fillDest(q *engine.ReceiveRequest, pt repo.Point, d dest) (err error) {
	if d.golden {
		q.Golden, q.Generation, q.Update = true, generationOf(pt), d.exists
		return nil
	}
	q.Snapshot, err = ref.ParseName(opPull, pt.Name)
	q.Update, q.SnapshotOnly = d.exists && d.update, d.exists && !d.update
	return err
}

// receiveStream receives the stream of a manifest. The progress says that it pulls what.
func (p *puller) receiveStream(
	ctx context.Context, q engine.ReceiveRequest, m *repo.Manifest, what string,
) (api.Object, error) {
	total := int64(0)
	for _, f := range m.Stream {
		total += int64(f.Plain)
	}

	progress.From(ctx).StartOf(progress.Pulling, what, 0, total)
	s := openFrameStream(ctx, p.repo, m.Stream, &p.read, &p.written, progress.From(ctx))
	defer s.Close()

	q.Tree = m.Content == repo.Tree
	if q.Tree {
		q.NeedBytes = total
	}

	return p.e.Receive(ctx, q, engine.Content{Stream: s})
}

// receiveImage receives the image of a manifest, as the difference from base unless that is nil. The progress
// says that it pulls what.
func (p *puller) receiveImage(
	ctx context.Context, q engine.ReceiveRequest, base, m *repo.Manifest, what string,
) (api.Object, error) {
	x := &restore{repo: p.repo, remote: p.remote, base: base, now: m, tracker: progress.From(ctx)}
	q.NeedBytes = p.estimateBytes(ctx, base, m)
	total := int64(0)
	if base == nil {
		total = m.Logical
	}

	image := func(ctx context.Context, t engine.Target) error {
		progress.From(ctx).StartOf(progress.Pulling, what, 0, total)
		x.to = t
		return x.restoreImage(ctx)
	}

	info, err := p.e.Receive(ctx, q, engine.Content{Image: image})
	p.read.Add(x.read.Load())
	p.written.Add(x.written.Load())
	return info, err
}

// noteKey adds a note if the user has to load a key before what was pulled raw can be mounted.
func (p *puller) noteKey(ctx context.Context, id repo.ID) {
	k, err := p.e.Key(ctx, p.links[id])
	if err == nil && k.Root != "" && !k.Loaded {
		p.addNote(
			"its files are still encrypted with the key of the pool they were pushed from: load that key "+
				"with `zfs load-key %s` before you mount it",
			k.Root,
		)
	}
}

// estimateBytes estimates how many bytes of the pool a point will occupy.
func (p *puller) estimateBytes(ctx context.Context, base, m *repo.Manifest) int64 {
	if base == nil {
		return m.Logical
	}
	n, err := p.estimateShared(ctx, base, m)
	if err != nil {
		n = 0 // assume that nothing is shared
	}
	return max(0, m.Map.Bytes-n)
}

// fillOrigin sets what a volume was cloned from, as references of this pool, if this pool has it.
func (p *puller) fillOrigin(ctx context.Context, q *engine.ReceiveRequest, pt repo.Point) error {
	id, ok := p.links[pt.OriginID]
	if !ok {
		return nil
	}

	o, err := p.e.PointByID(ctx, id)
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}

	q.OriginRef, q.OriginID = o.Ref, o.ID
	if o.Golden && !q.Golden {
		q.Descends = o.ID
	}

	return nil
}

// chooseBase chooses the point that a block volume's point begins as a clone of: the one that shares most with it,
// among those that are here or can be restored. Without a base, the results are zero.
func (p *puller) chooseBase(
	ctx context.Context, h repo.Head, pt repo.Point, m *repo.Manifest, depth int,
) (*repo.Manifest, driver.ObjectID, error) {
	if id := p.links[m.ID]; p.canClone(ctx, id, m, m) {
		return m, id, nil // the same point, under another name
	}

	s := &baseSearch{p: p, m: m}
	if err := s.searchLocal(ctx, h, pt); err != nil {
		return nil, "", err
	}

	if pt.OriginID.IsZero() || ctx.Err() != nil {
		return s.best, s.object, ctx.Err()
	}

	if _, here := p.links[pt.OriginID]; !here && !p.NoOrigin {
		if err := s.searchOrigin(ctx, pt, depth); err != nil {
			return nil, "", err
		}
	}

	return s.best, s.object, nil
}

// baseSearch finds the point that shares most data with a manifest.
type baseSearch struct {
	p *puller
	m *repo.Manifest

	best   *repo.Manifest // so far; nil: none
	object driver.ObjectID
	shared int64 // bytes that best shares with m
}

// tryBase keeps a local point as the best one if it shares more than the best one so far. A base is only an
// optimization, so tryBase skips a point whose map cannot be read.
func (s *baseSearch) tryBase(ctx context.Context, id repo.ID) {
	o, ok := s.p.links[id]
	if !ok {
		return
	}

	b, err := s.p.repo.Manifest(ctx, id)
	if err != nil || !s.p.canClone(ctx, o, &b, s.m) {
		return
	}

	if n, err := s.p.estimateShared(ctx, &b, s.m); err == nil && n > s.shared {
		s.best, s.object, s.shared = &b, o, n
	}
}

// searchLocal tries the points that are here and may share data with pt.
func (s *baseSearch) searchLocal(ctx context.Context, h repo.Head, pt repo.Point) error {
	// Try the neighbours in the same head, and the origin.
	earlier, later := repo.ID{}, repo.ID{}
	around, err := s.p.nearbyPoints(ctx, h, pt)
	if err != nil {
		return err
	}

	for _, x := range around {
		_, here := s.p.links[x.Manifest]
		switch {
		case here && x.Seq < pt.Seq:
			earlier = x.Manifest
		case here && x.Seq > pt.Seq && later.IsZero():
			later = x.Manifest
		}
	}

	s.tryBase(ctx, earlier)
	s.tryBase(ctx, later)
	s.tryBase(ctx, pt.OriginID)

	s.tryOthers(ctx, earlier, later, pt.OriginID)
	return nil
}

// tryOthers tries points of other local volumes, which may share more, except those that were tried.
func (s *baseSearch) tryOthers(ctx context.Context, tried ...repo.ID) {
	enough := s.m.Map.Bytes - s.m.Map.Bytes/16
	for _, id := range s.p.otherBases(s.m, tried...) {
		if s.shared >= enough || ctx.Err() != nil {
			break
		}
		s.tryBase(ctx, id)
	}
}

// searchOrigin finds the origin of pt on the remote, and restores and tries it if it shares more than the best local
// point, and not next to nothing.
func (s *baseSearch) searchOrigin(ctx context.Context, pt repo.Point, depth int) error {
	// Find the origin; perhaps it is here without a link.
	p := s.p
	oh, opt, err := p.findOrigin(ctx, pt)
	if err != nil || opt.Manifest.IsZero() {
		return err
	}

	if err := p.linkKnownObjects(ctx, oh, opt); err != nil {
		return err
	}

	if _, here := p.links[pt.OriginID]; here {
		s.tryBase(ctx, pt.OriginID)
		return nil
	}

	// Find out how much it shares.
	o, err := p.repo.Manifest(ctx, opt.Manifest)
	if isUnreadable(err) {
		p.addNote("cannot read %s, which it was cloned from: their common data is not shared in this pool", pt.OriginRef)
		return nil
	}

	if err != nil {
		return err
	}

	if o.Content != repo.Block || o.SizeBytes > s.m.SizeBytes {
		return nil
	}
	n, err := p.estimateShared(ctx, &o, s.m)
	if err != nil {
		return err
	}
	if n <= s.shared || n < s.m.Map.Bytes/16 {
		return nil
	}

	// Restore it. The point may be intact where its origin is damaged: in what it has written itself.
	err = p.restoreOrigin(ctx, oh, opt, depth+1)
	if isUnreadable(err) && !errors.Is(err, errTooDeep) {
		p.addNote("cannot restore %s, which it was cloned from: their common data is not shared in this pool", pt.OriginRef)
		// What the origin was cloned from may be here now.
		s.tryBase(ctx, opt.OriginID)
		s.tryOthers(ctx, opt.OriginID)
		return nil
	}

	if err != nil {
		return err
	}

	s.tryBase(ctx, pt.OriginID)
	return nil
}

// nearbyPoints returns the points of a head that may share data with a point: the recent ones, and those in the point's
// page.
func (p *puller) nearbyPoints(ctx context.Context, h repo.Head, pt repo.Point) ([]repo.Point, error) {
	var out []repo.Point
	page, _ := h.Page(pt.Seq)
	for x, err := range olderPoints(ctx, p.repo, h, func(x repo.PointPage) bool { return x.ID == page.ID }, nil) {
		if err != nil {
			return nil, err
		}
		out = append(out, x)
	}
	slices.Reverse(out)
	return append(out, h.Recent...), nil
}

// mostOthers is the maximum number of other volumes' manifests that a pull reads to find a base.
const mostOthers = 8

// otherBases returns the manifests of further local candidates, except those that were tried: the base it was pushed
// with, and what was last pulled or pushed of each volume, the newest first.
func (p *puller) otherBases(m *repo.Manifest, tried ...repo.ID) []repo.ID {
	heads := slices.SortedFunc(maps.Values(p.heads), func(a, b engine.RemoteHead) int { return b.At.Compare(a.At) })
	out := []repo.ID{m.Parent}
	for _, h := range heads {
		if id, err := repo.ParseID(h.Manifest); err == nil && id != m.Parent {
			out = append(out, id)
		}
	}

	out = slices.DeleteFunc(out, func(id repo.ID) bool {
		_, here := p.links[id]
		return !here || slices.Contains(tried, id)
	})
	return out[:min(len(out), mostOthers)]
}

// canClone reports whether a volume like m can begin as a clone of an object that is linked to manifest b.
func (p *puller) canClone(ctx context.Context, id driver.ObjectID, b, m *repo.Manifest) bool {
	if id == "" || b.Content != repo.Block || b.SizeBytes > m.SizeBytes {
		return false
	}
	o, err := p.e.PointByID(ctx, id)
	return err == nil && o.FS.IsImage() && o.IsOverlay() == m.IsOverlay() && o.SizeBytes == b.SizeBytes &&
		(m.Sector == 0 || o.Sector == m.Sector)
}

// findOrigin finds what a point was cloned from on the remote, and pins it. If it is not there, findOrigin adds a note
// and returns the zero point.
func (p *puller) findOrigin(ctx context.Context, pt repo.Point) (repo.Head, repo.Point, error) {
	if p.lease != nil {
		if err := p.lease.pinManifests(ctx, pt.OriginID); err != nil {
			return repo.Head{}, repo.Point{}, err
		}
	}

	oh, _, err := p.repo.Head(ctx, pt.OriginVol)
	if err != nil && !isUnreadable(err) {
		return oh, repo.Point{}, err
	}

	if err == nil && !oh.Gone {
		x, is, err := findPoint(ctx, p.repo, oh, nil, func(x repo.Point) bool { return x.Manifest == pt.OriginID })
		if is || err != nil {
			return oh, x, err
		}
	}

	p.addNote("%s, which it was cloned from, is no longer on the remote: their common data is not shared in this pool",
		pt.OriginRef)
	return oh, repo.Point{}, nil
}

// restoreOrigin restores a point that another point needs.
func (p *puller) restoreOrigin(ctx context.Context, h repo.Head, pt repo.Point, depth int) error {
	d, err := p.chooseDest(ctx, h, pt)
	if err != nil {
		return err
	}

	if _, err := p.pullPoint(ctx, h, pt, d, depth); err != nil {
		return err
	}

	point, err := p.e.PointByID(ctx, p.links[pt.Manifest])
	if err != nil {
		return err
	}

	p.out.Origins = append(p.out.Origins, point.Ref)
	if p.heads[h.Name].Lineage == point.Lineage || d.exists && !h.Golden {
		return nil
	}

	err = p.e.PutRemoteHead(ctx, engine.RemoteHead{
		Repo: p.repo.ID().String(), Name: h.Name,
		Lineage: point.Lineage, Epoch: h.Epoch, NextSeq: h.NextSeq, Manifest: pt.Manifest.String(),
	})
	if err != nil {
		return err
	}

	return p.loadLinks(ctx)
}

// chooseDest chooses where to restore a point that another point needs: under its own name if that is free or was
// pulled from the same head, otherwise under a name that ends in the remote's name.
func (p *puller) chooseDest(ctx context.Context, h repo.Head, pt repo.Point) (dest, error) {
	for i := 0; ; i++ {
		// Check that the name is valid, and not the one that the pull needs itself.
		free, err := ref.ParseName(opPull, p.nameOfNeeded(h.Name, i))
		if err != nil || i > 1000 {
			return dest{}, errs.New(errs.Exists, opPull, h.Name, "found no free name for the origin of the volume").
				WithHint("free the name %s", h.Name)
		}

		if free == p.local {
			continue // reserved for the requested volume
		}

		// Use it if it is free, or if what has the name comes from the same head.
		l, err := p.localPoints(ctx, free)
		switch {
		case err != nil:
			return dest{}, err
		case !l.exists:
			return dest{name: free, golden: h.Golden}, nil
		case l.hasName(pt.Name) || len(l.points) == 0 || l.points[0].Golden != h.Golden:
			continue
		}

		is, err := p.sharesHistory(ctx, l, h)
		if err != nil {
			return dest{}, err
		}
		if is {
			return dest{name: free, golden: h.Golden, exists: true}, nil
		}
	}
}

// nameOfNeeded returns the i-th name that a point that another point needs can have here: its own, or one that ends in
// the remote's name. A long name is cut.
func (p *puller) nameOfNeeded(name string, i int) string {
	if i == 0 {
		return name
	}

	suffix := "." + p.remote[:min(len(p.remote), ref.MaxNameBytes/2)]
	if i > 1 {
		suffix += fmt.Sprintf("-%d", i)
	}

	name = name[:min(len(name), ref.MaxNameBytes-len(suffix))]
	return strings.TrimRight(name, ".") + suffix // no name contains ".."
}

// sharesHistory reports whether a local point is linked to a point of a head, so that both belong to one history.
func (p *puller) sharesHistory(ctx context.Context, l local, h repo.Head) (bool, error) {
	if p.heads[h.Name].Lineage == l.lineage() {
		return true, nil
	}
	_, is, err := findPoint(ctx, p.repo, h, nil, func(x repo.Point) bool { return p.holdsPoint(l, x) })
	return is, err
}

// restoreParent returns the object that a stream is the difference from, and restores it if it is not here. If the
// parent belongs to the same volume, the destination exists from then on.
func (p *puller) restoreParent(
	ctx context.Context, h repo.Head, m repo.Manifest, d *dest, depth int,
) (driver.ObjectID, error) {
	if m.Parent.IsZero() {
		return "", nil
	}

	if id, ok := p.links[m.Parent]; ok {
		if _, err := p.e.PointByID(ctx, id); err == nil {
			return id, nil
		}
	}

	// A stream's parent exists as long as the stream, even if no head lists it.
	pm, err := p.repo.Manifest(ctx, m.Parent)
	if err != nil {
		return "", err
	}

	// A parent in another volume is an origin.
	pt := pointFrom(&pm, 0)
	if pm.Volume != h.Name {
		oh, err := p.headOfNeeded(ctx, pm.Volume, false)
		if err == nil {
			err = p.restoreOrigin(ctx, oh, pt, depth+1)
		}
		return p.links[m.Parent], err
	}

	// The parent belongs to the same volume. A new volume begins with its oldest state and is updated step by step; an
	// existing one receives the intermediate states as snapshots.
	pd := *d
	if d.exists && !d.golden {
		pd.update = false
	}

	if _, err := p.pullPoint(ctx, h, pt, pd, depth+1); err != nil {
		return "", err
	}

	if !d.exists {
		d.exists, d.update = true, true
	}

	return p.links[m.Parent], nil
}
