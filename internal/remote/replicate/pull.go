package replicate

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

const opPull = "pull"

// PullRequest says what to fetch from a remote.
type PullRequest struct {
	Ref        ref.Ref  // VOLUME (its newest point), VOLUME@POINT, GOLDEN, GOLDEN@N
	As         ref.Name // name here; zero: as there
	Update     bool     // the volume is here, and becomes what is pulled; its state stays as a snapshot
	TakeOver   bool     // this pool may push the volume from now on, and nobody else
	NoOrigin   bool     // do not restore what the volume was cloned from, if that is not here
	LimitBytes int64    // a second, of what is downloaded; 0: no bound
	Tracker    *progress.Tracker
}

// Pulled is the result of Pull.
type Pulled struct {
	engine.Info
	Volume       string   `json:"volume"`        // of the remote
	Point        string   `json:"point"`         // that was pulled
	Snapshot     string   `json:"snapshot"`      // reference of the snapshot or generation here
	Origins      []string `json:"origins"`       // what was restored first, as the volume was cloned from it
	Base         string   `json:"base"`          // what was here and has not been read again
	ReadBytes    int64    `json:"read_bytes"`    // of the remote
	WrittenBytes int64    `json:"written_bytes"` // into the pool
	Seconds      float64  `json:"seconds"`
	Epoch        uint64   `json:"epoch"`     // of the volume in the remote
	TookOver     bool     `json:"took_over"` // this pool is its writer now, and was not before
	Unchanged    bool     `json:"unchanged"` // the point was here already, so nothing was pulled
	Notes        []string `json:"notes"`     // what a person should know
}

// Pull fetches a point of a volume, or a generation of a golden, from a remote, and
// makes a snapshot of it and a volume that is its clone, or a generation. It begins
// as a clone of whatever is here already and has most in common with it: an earlier
// point, or what the volume was cloned from, which is restored first if it is not
// here. So clones share here what they shared where they came from. Only what is
// different is read and written.
//
// Everything that is read is authenticated. Whatever goes wrong, and whenever, the
// volume is there as it was pushed, or nothing has changed but that origins were
// restored; pulling again goes on from there. Volumes that are trees come as the
// steps in which they were pushed: then a step may be all that is there.
//
// TakeOver first makes this pool the writer, by which the old one is refused from
// then on, and then pulls what the old one had pushed until then. It can be repeated.
//
// NotFound, Exists (hint: As, Update), Conflict (it was removed while it was
// read), Damaged (with the range of the volume), Permission, Unsupported, NoSpace,
// InUse (with Update: it is mounted).
func Pull(ctx context.Context, e *engine.Engine, r *Remote, q PullRequest) (Pulled, error) {
	rp, err := r.OpenLimited(ctx, q.LimitBytes)
	if err != nil {
		return Pulled{}, err
	}
	defer rp.Close()
	return pullFrom(ctx, e, rp, r.Name, q)
}

// puller is a pull under way.
type puller struct {
	PullRequest
	e          *engine.Engine
	repo       *repo.Repo
	remote     string   // name, for those of origins
	local      ref.Name // name here
	lease      *lease   // nil: the remote cannot be written
	links      map[repo.ID]driver.ObjectID
	recognised map[repo.ID]driver.ObjectID // points of objects that are here, besides links
	heads      map[string]engine.RemoteHead
	out        Pulled

	read, written atomic.Int64

	sharedBytes map[[2]repo.ID]int64 // of two manifests, what was found out
}

func pullFrom(ctx context.Context, e *engine.Engine, rp *repo.Repo, remote string, q PullRequest) (Pulled, error) {
	start := time.Now()
	p := &puller{PullRequest: q, e: e, repo: rp, remote: remote, local: q.As}
	name, err := ref.ParseName(opPull, q.Ref.Name)
	if err != nil {
		return Pulled{}, err
	}
	if p.local.IsZero() {
		p.local = name
	}

	if q.TakeOver && q.Ref.At != "" {
		return Pulled{}, errs.New(errs.Invalid, opPull, q.Ref.String(), "only a volume can be taken over, not one of its points").
			WithHint("remove @%s to pull the newest point", q.Ref.At)
	}

	p.out.Volume, p.out.Origins, p.out.Notes = q.Ref.Name, []string{}, []string{}
	if err := p.pullRef(ctx); err != nil {
		return Pulled{}, errs.Wrap(opPull, q.Ref.String(), err)
	}

	p.out.ReadBytes, p.out.WrittenBytes = p.read.Load(), p.written.Load()
	p.out.Seconds = time.Since(start).Seconds()
	return p.out, nil
}

func (p *puller) pullRef(ctx context.Context) error {
	p.Tracker.Start("reading the remote", 0, 0)
	if err := p.loadLinks(ctx); err != nil { // before the head is read: see headMemory
		return err
	}

	h, _, err := p.repo.Head(ctx, p.Ref.Name)
	if err != nil {
		return noVolumeError(err, p.repo, opPull, p.Ref.Name)
	}

	if why := headMemory(p.heads).rollbackReason(&h, true); why != "" {
		p.addNote("%s", why)
	}

	pt, err := resolvePoint(ctx, p.repo, h, opPull, p.Ref)
	if err != nil {
		return err
	}

	if err := p.linkKnownObjects(ctx, h, pt); err != nil {
		return err
	}

	here, err := p.localPoints(ctx, p.local)
	if err != nil {
		return err
	}

	if err := p.checkDestination(h, pt, here); err != nil {
		return err
	}

	if p.TakeOver {
		if err := p.checkReceivable(ctx, h, pt, here); err != nil {
			return err
		}

		if h, err = p.takeOver(ctx); err != nil {
			return err
		}

		if pt, err = resolvePoint(ctx, p.repo, h, opPull, p.Ref); err != nil {
			return err
		}

		if err := p.checkDestination(h, pt, here); err != nil { // it was pushed to just before
			return err
		}

		if pt.Content == repo.Tree && !p.e.Caps().Supports(driver.Native) {
			p.addNote("this pool stores trees of files as images: only pools that store images can pull what it pushes")
		}
	}

	p.out.Point, p.out.Epoch = pt.Name, h.Epoch
	if here.hasObject(p.links[pt.Manifest]) {
		return p.finishUnchanged(ctx, h, pt)
	}

	if err := p.fetchPoint(ctx, h, pt, here); err != nil {
		return err
	}

	return p.claimLineage(ctx, h)
}

// known reads what is remembered of this repository.
func (p *puller) loadLinks(ctx context.Context) error {
	id := p.repo.ID().String()
	links, err := p.e.Links(ctx, id)
	if err != nil {
		return err
	}

	p.links, p.heads = map[repo.ID]driver.ObjectID{}, map[string]engine.RemoteHead{}
	for _, l := range links {
		if m, err := repo.ParseID(l.Manifest); err == nil {
			p.links[m] = l.Object
		}
	}

	for m, o := range p.recognised {
		if _, linked := p.links[m]; !linked {
			p.links[m] = o
		}
	}

	heads, err := p.e.RemoteHeads(ctx, id)
	for _, h := range heads {
		p.heads[h.Name] = h
	}

	return err
}

// recognise finds the objects that recent points of a head, and pt, describe, though no link says so: those that they
// were pushed from, if that was from here (links may be lost), and those that are here of points that were pushed once
// more, under another manifest. IDs are never used again, so it is the same content.
func (p *puller) linkKnownObjects(ctx context.Context, h repo.Head, pt repo.Point) error {
	var again objectsByIdentity
	for _, x := range append(slices.Clone(h.Recent), pt) {
		if _, linked := p.links[x.Manifest]; linked {
			continue
		}

		o, err := p.e.PointByID(ctx, driver.ObjectID(x.Source))
		switch {
		case errs.Is(err, errs.NotFound) || errs.Is(err, errs.Invalid):
			if again == nil {
				if again, err = p.objectsOfHead(ctx, h.Name); err != nil {
					return err
				}
			}
			o.ID = again[identityOf(x)]
		case err != nil:
			return err
		}

		if o.ID == "" {
			continue
		}
		if p.recognised == nil {
			p.recognised = map[repo.ID]driver.ObjectID{}
		}

		p.recognised[x.Manifest], p.links[x.Manifest] = o.ID, o.ID
	}

	return nil
}

// sameHere are objects that came from a head or went there, by what stays the same of a point when that is pushed once
// more.
type objectsByIdentity map[pointIdentity]driver.ObjectID

// pointIdentity tells points of one volume or golden apart: no two are made in the same nanosecond.
type pointIdentity struct {
	name        string
	createdAt   int64 // nanoseconds since 1970
	sizeBytes   int64
	fs          string
	consistency string
}

func identityOf(pt repo.Point) pointIdentity {
	return pointIdentity{pt.Name, pt.CreatedAt.UnixNano(), pt.SizeBytes, pt.FS, pt.Consistency}
}

// samePoints lists the objects that are linked to this repository, of the volume or golden that a head is here.
func (p *puller) objectsOfHead(ctx context.Context, head string) (objectsByIdentity, error) {
	out := objectsByIdentity{}
	lineage := p.heads[head].Lineage
	if lineage == "" {
		return out, nil
	}

	for _, id := range p.links {
		o, err := p.e.PointByID(ctx, id)
		if errs.Is(err, errs.NotFound) || errs.Is(err, errs.Invalid) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if o.Lineage == lineage {
			out[pointIdentity{o.Name, o.CreatedAt.UnixNano(), o.SizeBytes, string(o.FS), string(o.Consistency)}] = id
		}
	}

	return out, nil
}

// local is what has a name here.
type local struct {
	exists bool
	points []engine.Point
}

func (p *puller) localPoints(ctx context.Context, name ref.Name) (local, error) {
	points, err := p.e.Points(ctx, name)
	if errs.Is(err, errs.NotFound) {
		return local{}, nil
	}
	return local{err == nil, points}, err
}

// has reports whether an object is among the points.
func (l local) hasObject(id driver.ObjectID) bool {
	for _, x := range l.points {
		if x.ID == id && id != "" {
			return true
		}
	}
	return false
}

// named reports whether a point of a name is there.
func (l local) hasName(name string) bool {
	for _, x := range l.points {
		if x.Name == name {
			return true
		}
	}
	return false
}

// lineage is that of the points; "" if there are none.
func (l local) lineage() driver.ObjectID {
	if len(l.points) == 0 {
		return ""
	}
	return l.points[0].Lineage
}

// follows reports whether what is here under a name is a golden that came from, or
// went to, a head of this remote: then it may take further generations of it.
func (p *puller) followsHead(l local, head string) bool {
	return l.exists && len(l.points) > 0 && l.points[0].Golden && p.heads[head].Lineage == l.lineage()
}

// admit refuses what cannot be put where it is to go, before anything is changed.
func (p *puller) checkDestination(h repo.Head, pt repo.Point, here local) error {
	full := p.local.String() + "@" + pt.Name
	if h.Golden {
		if _, ok := (ref.Ref{Name: h.Name, At: pt.Name}).Generation(); !ok {
			return errs.New(errs.Damaged, opPull, full, "%q is not a generation number", pt.Name).
				WithHint("check the remote with %s", errs.Run("verify", p.remote))
		}
	}

	switch {
	case !here.exists || here.hasObject(p.links[pt.Manifest]):
		return nil
	case h.Golden && here.hasName(pt.Name):
		why := "the golden already has a different generation with this number"
		if p.followsHead(here, h.Name) {
			why += ": the generation was removed from the remote, and another was pushed under its number"
		}
		return errs.New(errs.Exists, opPull, full, "%s", why).
			WithHint("to keep both, pull it under another name with `%s`; to replace the local one, "+
				"remove it with %s and pull again", errs.Param("as", "NAME"), errs.Run("golden rm", full))
	case !p.Update && !p.followsHead(here, h.Name):
		return errs.New(errs.Exists, opPull, p.local.String(), "it already exists in this pool").
			WithHint("pull it under another name with %s, or use %s to replace its content and keep the current state as "+
				"a snapshot", errs.Param("as", "NAME"), errs.Param("update"))
	case here.hasName(pt.Name):
		return errs.New(errs.Exists, opPull, full, "the volume already has a different snapshot with this name").
			WithHint("to keep both, pull it under another name with `%s`; to replace the local one, "+
				"destroy it with %s and pull again", errs.Param("as", "NAME"), errs.Run("destroy", full))
	}

	return nil
}

// canReceive refuses what this pool can never hold, or not as long as the volume is mounted, before somebody else is
// kept from writing it. Unsupported, InUse.
func (p *puller) checkReceivable(ctx context.Context, h repo.Head, pt repo.Point, here local) error {
	if here.exists && !h.Golden && !here.hasObject(p.links[pt.Manifest]) {
		if err := p.e.CanUpdate(ctx, p.local); err != nil {
			return err
		}
	}

	m, err := p.repo.Manifest(ctx, pt.Manifest)
	if err != nil {
		return err
	}

	if err := p.checkRaw(h, pt, m); err != nil {
		return err
	}

	var begin []byte
	if len(m.Stream) > 0 {
		frames, err := p.repo.ReadFrames(ctx, m.Stream[:1])
		if err != nil {
			return err
		}
		begin = frames[0]
	}

	return p.e.CanReceive(h.Name+"@"+pt.Name, driver.FS(m.FS), m.Content == repo.Tree, begin)
}

// readsRaw is nil if this pool can receive what a manifest describes, as far as encryption goes. Unsupported.
func (p *puller) checkRaw(h repo.Head, pt repo.Point, m repo.Manifest) error {
	if !m.Raw || p.e.ReceivesRaw() {
		return nil
	}
	return errs.New(errs.Unsupported, opPull, h.Name+"@"+pt.Name,
		"it is an encrypted ZFS dataset, and its blocks were sent as they are on disk").
		WithHint("pull it into a pool that was created with %s", errs.Param("driver", "zfs"))
}

// nothingToDo is the end of a pull of what is here.
func (p *puller) finishUnchanged(ctx context.Context, h repo.Head, pt repo.Point) error {
	p.out.Unchanged = true
	p.addNote("%s@%s is already in this pool", p.local, pt.Name)
	if err := p.describeResult(ctx, pt); err != nil {
		return err
	}
	return p.claimLineage(ctx, h)
}

func (p *puller) addNote(format string, args ...any) {
	p.out.Notes = append(p.out.Notes, errs.New(errs.Internal, "", "", format, args...).Error())
}

// result describes what is here now.
func (p *puller) describeResult(ctx context.Context, pt repo.Point) error {
	point, err := p.e.PointByID(ctx, p.links[pt.Manifest])
	if err != nil {
		return err
	}

	what := p.local.Ref()
	if point.Golden {
		what.At = point.Name
	}

	d, err := p.e.Show(ctx, what)
	if err != nil {
		return err
	}

	p.out.Info, p.out.Snapshot = d.Info, point.Ref
	return nil
}

// fetch pulls under a session, so that nothing of it is pruned meanwhile.
func (p *puller) fetchPoint(ctx context.Context, h repo.Head, pt repo.Point, here local) error {
	me, err := writerOf(p.e)
	if err != nil {
		return err
	}

	sctx, l, err := beginSession(ctx, p.repo, repo.Pull, nil, me, pt.Manifest)
	switch {
	case errs.Is(err, errs.Permission):
		sctx = ctx
		p.addNote("the remote is read-only for this host, so a prune that runs during this pull does not know about it")
	case err != nil:
		return err
	default:
		p.lease = l
		// What cannot be removed now, a prune ends.
		defer func() { _ = l.endSession(ctx) }()
	}

	// Pinned first, then looked at again: now it stays.
	if h, _, err = p.repo.Head(sctx, h.Name); err != nil {
		return noVolumeError(err, p.repo, opPull, h.Name)
	}

	is, err := headLists(sctx, p.repo, h, pt)
	if err != nil {
		return err
	}
	if !is {
		return p.removedError(pt)
	}

	d := dest{name: p.local, golden: h.Golden, exists: here.exists, update: here.exists}
	info, err := p.pullPoint(sctx, h, pt, d, 0)
	if err != nil {
		if errors.Is(context.Cause(sctx), errEnded) && ctx.Err() == nil {
			return errs.New(errs.Conflict, opPull, p.Ref.String(), "a prune ended this pull because it showed no sign of life").
				WithHint("run the pull again")
		}
		if errs.Is(err, errs.NotFound) {
			return p.missingError(ctx, pt, err)
		}
		return err
	}

	p.out.Info = info
	return p.recordHead(ctx, h, pt)
}

func (p *puller) removedError(pt repo.Point) error {
	return errs.New(errs.Conflict, opPull, p.Ref.Name+"@"+pt.Name, "it was just removed from the remote").
		WithHint("pull another point: list them with %s", errs.Run("remote ls", p.remote))
}

// missing words that something of a point is not there: somebody has removed it, or
// the remote is damaged.
func (p *puller) missingError(ctx context.Context, pt repo.Point, err error) error {
	h, _, herr := p.repo.Head(ctx, p.Ref.Name)
	if herr == nil {
		if is, lerr := headLists(ctx, p.repo, h, pt); lerr == nil && !is {
			return p.removedError(pt)
		}
	}
	return errs.New(errs.Damaged, opPull, p.Ref.Name+"@"+pt.Name, "the remote is missing data of this point: %w", err).
		WithHint("find intact points with %s, and pull an older one", errs.Run("verify", p.remote))
}

// remember notes what the volume is in the remote, and describes what was pulled.
func (p *puller) recordHead(ctx context.Context, h repo.Head, pt repo.Point) error {
	point, err := p.e.PointByID(ctx, p.links[pt.Manifest])
	if err != nil {
		return err
	}
	p.out.Snapshot = point.Ref
	return p.e.PutRemoteHead(ctx, engine.RemoteHead{
		Repo: p.repo.ID().String(), Name: h.Name,
		Lineage: point.Lineage, Epoch: h.Epoch, NextSeq: h.NextSeq, Manifest: pt.Manifest.String(),
	})
}

// takeOver makes this pool the writer of the volume, unless it is that already.
func (p *puller) takeOver(ctx context.Context) (h repo.Head, err error) {
	me, err := writerOf(p.e)
	if err != nil {
		return h, err
	}
	w := headWriter{repo: p.repo, remote: p.remote, me: me, tokens: newTokenFiles(p.e.Dir(), p.repo), memory: p.heads}
	h, p.out.TookOver, err = w.takeOver(ctx, p.Ref.Name, func(h repo.Head) error {
		_, err := resolvePoint(ctx, p.repo, h, opPull, p.Ref)
		return err
	})
	return h, err
}

// claimLineage says in the head which volume of this pool writes it, after a
// take-over.
func (p *puller) claimLineage(ctx context.Context, h repo.Head) error {
	here, err := p.localPoints(ctx, p.local)
	if err != nil || !p.TakeOver {
		return err
	}

	lineage := string(here.lineage())
	_, err = changeHead(ctx, p.repo, opPull, h.Name, func(now *repo.Head) (bool, error) {
		if now.Epoch != h.Epoch || now.Writer.Pool != h.Writer.Pool {
			return false, errs.New(errs.Conflict, opPull, h.Name, "host %s has since taken over the volume", now.Writer.Host).
				WithHint("decide which host writes the volume: %s shows its writer", errs.Run("remote ls", p.remote))
		}
		if now.Lineage == lineage {
			return false, nil
		}
		now.Lineage = lineage
		return true, nil
	})
	if err != nil {
		return err
	}

	newest, _, err := newestOf(ctx, p.repo, h)
	if err != nil {
		return err
	}

	return p.e.PutRemoteHead(ctx, engine.RemoteHead{
		Repo: p.repo.ID().String(), Name: h.Name,
		Lineage: here.lineage(), Epoch: h.Epoch, NextSeq: h.NextSeq, Manifest: newest.Manifest.String(),
	})
}

func generationOf(pt repo.Point) int {
	n, _ := strconv.Atoi(pt.Name)
	return n
}
