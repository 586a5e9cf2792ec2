package replicate

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"pando/internal/api"
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
	As         ref.Name // local name; zero: the name on the remote
	Update     bool     // replace the content of an existing volume, and keep its current state as a snapshot
	TakeOver   bool     // make this pool the only one that may push the volume
	NoOrigin   bool     // do not restore a missing origin of the volume
	LimitBytes int64    // download limit in bytes a second; 0: none
}

// Pulled is the result of Pull.
type Pulled struct {
	api.Object
	RemoteRef string `json:"remote_ref"` // reference to the point on the remote
	Snapshot  string `json:"snapshot"`   // reference to the snapshot or generation in this pool
	// references to points that were restored first, as the volume was cloned from them
	Origins []string `json:"origins"`
	// reference to the local point that the pull began with, and whose data it did not read
	Base         string   `json:"base,omitempty"`
	ReadBytes    int64    `json:"read_bytes"`       // bytes that were read from the remote
	WrittenBytes int64    `json:"written_bytes"`    // bytes that were written into the pool
	Seconds      float64  `json:"duration_seconds"` // time that it took
	Epoch        uint64   `json:"epoch"`            // number of changes of the writer of the volume
	TookOver     bool     `json:"took_over"`        // this pool became the writer
	Unchanged    bool     `json:"unchanged"`        // the point was in this pool already, so nothing was pulled
	Notes        []string `json:"notes"`            // warnings and other messages, for people

	Volume string `json:"-"` // name of the volume on the remote
	Point  string `json:"-"` // name of the point on the remote
}

// Pull fetches a point from a remote. Of a volume it makes a snapshot, and a volume that is a clone of the snapshot; of
// a golden it makes a generation. Pull begins with a clone of the local point that shares most data with the wanted
// one: an earlier point, or the origin of the volume, which Pull restores first if it is missing. So clones share as
// much here as in the pool they were pushed from. Pull reads and writes only the differences.
//
// Pull authenticates everything it reads. Whatever fails, either the volume is complete as it was pushed, or nothing
// has changed except for restored origins; pulling again resumes from there. Volumes that are trees arrive in the steps
// in which they were pushed, and after a failure only some of the steps may be there.
//
// With TakeOver, Pull first makes this pool the writer, so that pushes of the old writer are refused from then on, and
// then pulls what the old writer pushed before. This can be repeated.
//
// Errors: NotFound, Exists (hint: As, Update), Conflict (the point was removed while it was read), Damaged (with the
// range of the volume), Permission, Unsupported, NoSpace, InUse (with Update: the volume is mounted).
func Pull(ctx context.Context, e *engine.Engine, r *Remote, q PullRequest) (_ Pulled, err error) {
	t := e.Transfer()
	ctx, end := t.Begin(ctx, opPull)
	defer end(&err)

	rp, err := r.OpenLimited(ctx, q.LimitBytes)
	if err != nil {
		return Pulled{}, err
	}
	defer rp.Close()
	return pullFrom(ctx, t, rp, r.Name, q)
}

// puller is a running pull.
type puller struct {
	PullRequest
	e          *engine.Transfer
	repo       *repo.Repo
	remote     string   // name of the remote, for names of origins
	local      ref.Name // name in this pool
	lease      *lease   // nil: the remote is read-only
	here       local    // what has the local name, as of when the links were loaded
	links      map[repo.ID]driver.ObjectID
	recognised map[repo.ID]driver.ObjectID // local objects of manifests without a link: see linkKnownObjects
	heads      map[string]engine.RemoteHead
	out        Pulled

	read, written atomic.Int64

	sharedBytes map[[2]repo.ID]int64 // results of estimateShared
}

// pullFrom is Pull from a repository that is open. remote is the name of the remote.
func pullFrom(ctx context.Context, e *engine.Transfer, rp *repo.Repo, remote string, q PullRequest) (Pulled, error) {
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
		return Pulled{}, errs.New(errs.Invalid, opPull, q.Ref.String(),
			"only a volume can be taken over, not one of its points").
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

// pullRef pulls the point that the request names, and takes the volume over if the request says so.
func (p *puller) pullRef(ctx context.Context) error {
	// Find the point on the remote. Links are loaded before the head is read: see headMemory.
	progress.From(ctx).Start(progress.ReadingRemote, 0, 0)
	if err := p.loadLinks(ctx); err != nil {
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

	// Find what this pool has, and refuse what cannot be put there.
	if err := p.linkKnownObjects(ctx, h, pt); err != nil {
		return err
	}

	here := p.here
	if o, is := here.find(identityOf(pt)); is {
		p.links[pt.Manifest] = o.ID // the links may be lost, or lead to another volume
	}

	if err := p.checkDestination(h, pt, here); err != nil {
		return err
	}

	if p.TakeOver {
		if h, pt, err = p.takeOverPoint(ctx, h, pt, here); err != nil {
			return err
		}
	}

	// Fetch the point unless it is here.
	p.out.Point, p.out.RemoteRef, p.out.Epoch = pt.Name, h.Name+"@"+pt.Name, h.Epoch
	if here.hasObject(p.links[pt.Manifest]) {
		return p.finishUnchanged(ctx, h, pt)
	}

	if err := p.fetchPoint(ctx, h, pt, here); err != nil {
		return err
	}

	return p.claimLineage(ctx, h)
}

// takeOverPoint takes the volume over, and returns its head and its newest point: the old writer may have pushed
// another one after pt.
func (p *puller) takeOverPoint(
	ctx context.Context, h repo.Head, pt repo.Point, here local,
) (repo.Head, repo.Point, error) {
	err := p.checkReceivable(ctx, h, pt, here)
	if err != nil {
		return h, pt, err
	}

	if h, err = p.takeOver(ctx); err != nil {
		return h, pt, err
	}

	if pt, err = resolvePoint(ctx, p.repo, h, opPull, p.Ref); err != nil {
		return h, pt, err
	}

	if err := p.checkDestination(h, pt, here); err != nil {
		return h, pt, err
	}

	if pt.Content == repo.Tree && !p.e.Caps().Supports(driver.Native) {
		p.addNote("this pool stores trees of files as images: only pools that store images can pull what it pushes")
	}

	return h, pt, nil
}

// loadLinks reads the links and heads that the catalogue has of this repository. A point may have been pulled under
// several names: a link to an object that has the local name is then preferred to others.
func (p *puller) loadLinks(ctx context.Context) error {
	id := p.repo.ID().String()
	links, err := p.e.Links(ctx, id)
	if err != nil {
		return err
	}

	if p.here, err = p.localPoints(ctx, p.local); err != nil {
		return err
	}

	mine := map[driver.ObjectID]bool{}
	for _, x := range p.here.points {
		mine[x.ID] = true
	}

	p.links, p.heads = map[repo.ID]driver.ObjectID{}, map[string]engine.RemoteHead{}
	for _, l := range links {
		if m, err := repo.ParseID(l.Manifest); err == nil && !mine[p.links[m]] {
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

// linkKnownObjects finds the local objects of a head's recent points and of pt that have no link: the objects that this
// pool pushed them from (links may be lost), and objects of points that were pushed again under another manifest.
// Object IDs are never reused, so the content is the same.
func (p *puller) linkKnownObjects(ctx context.Context, h repo.Head, pt repo.Point) error {
	var again objectsByIdentity
	for _, x := range append(slices.Clone(h.Recent), pt) {
		if _, linked := p.links[x.Manifest]; linked {
			continue
		}

		// Find the object by its ID, or by what identifies the point.
		o, err := p.e.PointByID(ctx, driver.ObjectID(x.Source))
		switch {
		case errs.Is(err, errs.NotFound, errs.Invalid):
			if again == nil {
				if again, err = p.objectsOfHead(ctx, h.Name); err != nil {
					return err
				}
			}
			o.ID = again[identityOf(x)]
		case err != nil:
			return err
		}

		// Remember it.
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

// objectsByIdentity has the objects that were pulled from a head or pushed to it, by the properties of a point that
// stay the same when it is pushed again.
type objectsByIdentity map[pointIdentity]driver.ObjectID

// pointIdentity distinguishes the points of one volume or golden: no two are created in the same nanosecond.
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

func identityOfLocal(o engine.Point) pointIdentity {
	return pointIdentity{o.Name, o.CreatedAt.UnixNano(), o.SizeBytes, string(o.FS), string(o.Consistency)}
}

// objectsOfHead lists the objects with a link to this repository that belong to the local volume or golden of a head,
// or to what has the local name, which is preferred: another volume may have been pulled from the head since.
func (p *puller) objectsOfHead(ctx context.Context, head string) (objectsByIdentity, error) {
	out := objectsByIdentity{}
	lineage, mine := p.heads[head].Lineage, p.here.lineage()
	if lineage == "" && mine == "" {
		return out, nil
	}

	for _, id := range p.links {
		o, err := p.e.PointByID(ctx, id)
		if errs.Is(err, errs.NotFound, errs.Invalid) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if _, is := out[identityOfLocal(o)]; o.Lineage == mine || o.Lineage == lineage && !is {
			out[identityOfLocal(o)] = id
		}
	}

	return out, nil
}

// local is what this pool has under a name.
type local struct {
	exists bool
	points []engine.Point
}

// localPoints returns what this pool has under a name.
func (p *puller) localPoints(ctx context.Context, name ref.Name) (local, error) {
	points, err := p.e.Points(ctx, name)
	if errs.Is(err, errs.NotFound) {
		return local{}, nil
	}
	return local{err == nil, points}, err
}

// hasObject reports whether an object is among the points.
func (l local) hasObject(id driver.ObjectID) bool {
	for _, x := range l.points {
		if x.ID == id && id != "" {
			return true
		}
	}
	return false
}

// hasName reports whether there is a point with a name.
func (l local) hasName(name string) bool {
	for _, x := range l.points {
		if x.Name == name {
			return true
		}
	}
	return false
}

// find finds the point with an identity.
func (l local) find(id pointIdentity) (engine.Point, bool) {
	i := slices.IndexFunc(l.points, func(x engine.Point) bool { return identityOfLocal(x) == id })
	if i < 0 {
		return engine.Point{}, false
	}
	return l.points[i], true
}

// lineage returns the lineage of the points, "" if there are none.
func (l local) lineage() driver.ObjectID {
	if len(l.points) == 0 {
		return ""
	}
	return l.points[0].Lineage
}

// holdsPoint reports whether a point of a head is among local points: by a link, or by its identity, because the point
// may have been pulled under another name since, or the links may be lost.
func (p *puller) holdsPoint(l local, x repo.Point) bool {
	_, is := l.find(identityOf(x))
	return is || l.hasObject(p.links[x.Manifest])
}

// followsHead reports whether l is a golden that was pulled from a head of this remote or pushed to it. It may receive
// further generations of that head then.
func (p *puller) followsHead(l local, h repo.Head) bool {
	if !l.exists || len(l.points) == 0 || !l.points[0].Golden {
		return false
	}
	if p.heads[h.Name].Lineage == l.lineage() {
		return true
	}

	return slices.ContainsFunc(h.Recent, func(x repo.Point) bool { return p.holdsPoint(l, x) })
}

// checkDestination returns an error if the point cannot be put where the request wants it. Nothing has changed yet
// then.
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
		if p.followsHead(here, h) {
			why += ": the generation was removed from the remote, and another was pushed under its number"
		}
		return errs.New(errs.Exists, opPull, full, "%s", why).
			WithHint("pull it under another name with `%s`, which keeps both", errs.Param("as", "NAME"))
	case !p.Update && !p.followsHead(here, h):
		return errs.New(errs.Exists, opPull, p.local.String(), "it already exists in this pool").
			WithHint("pull it under another name with %s, or use %s to replace its content and keep the current state as "+
				"a snapshot", errs.Param("as", "NAME"), errs.Param("update"))
	case here.hasName(pt.Name):
		return errs.New(errs.Exists, opPull, full, "the volume already has a different snapshot with this name").
			WithHint("pull it under another name with `%s`, which keeps both", errs.Param("as", "NAME"))
	}

	return nil
}

// checkReceivable returns an error if this pool can never hold the point, or not while the volume is mounted. It is
// called before a take-over, which prevents the old writer from pushing. Errors: Unsupported, InUse.
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

// checkRaw returns an error if this pool cannot receive a manifest's stream because it is raw, from an encrypted
// dataset. Errors: Unsupported.
func (p *puller) checkRaw(h repo.Head, pt repo.Point, m repo.Manifest) error {
	if !m.Raw || p.e.ReceivesRaw() {
		return nil
	}
	return errs.New(errs.Unsupported, opPull, h.Name+"@"+pt.Name,
		"it is an encrypted ZFS dataset, and its blocks were sent as they are on disk").
		WithHint("pull it into a pool that was created with %s", errs.Param("driver", "zfs"))
}

// finishUnchanged finishes a pull of a point that is already here.
func (p *puller) finishUnchanged(ctx context.Context, h repo.Head, pt repo.Point) error {
	p.out.Unchanged = true
	p.addNote("%s@%s is already in this pool", p.local, pt.Name)
	if err := p.describeResult(ctx, pt); err != nil {
		return err
	}
	return p.claimLineage(ctx, h)
}

// addNote adds a message for the user to the result.
func (p *puller) addNote(format string, args ...any) {
	p.out.Notes = append(p.out.Notes, errs.New(errs.Internal, "", "", format, args...).Error())
}

// describeResult fills the result in from the volume or generation that is here now.
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

	p.out.Object, p.out.Snapshot = d.Object, point.Ref
	return nil
}

// fetchPoint pulls a point under a session, which keeps a prune from removing its data in the meantime.
func (p *puller) fetchPoint(ctx context.Context, h repo.Head, pt repo.Point, here local) error {
	// Begin a session that pins the point.
	me, err := writerOf(p.e.Engine)
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
		// If the session cannot be ended now, a prune ends it.
		defer func() { _ = l.endSession(ctx) }()
	}

	// Read the head again: a point that is still listed after it was pinned will stay.
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

	// Make the point and everything it needs.
	d := dest{name: p.local, golden: h.Golden, exists: here.exists, update: here.exists}
	info, err := p.pullPoint(sctx, h, pt, d, 0)
	if err != nil {
		if errors.Is(context.Cause(sctx), errEnded) && ctx.Err() == nil {
			return errs.New(errs.Conflict, opPull, p.Ref.String(), "the session of this pull is no longer on the remote, "+
				"so its data may be deleted: a prune found it expired, or someone deleted it from the store").
				WithHint("run the pull again")
		}
		if errs.Is(err, errs.NotFound) {
			return p.missingError(ctx, pt, err)
		}
		return err
	}

	p.out.Object = info
	return p.recordHead(ctx, h, pt)
}

// removedError returns the error for a point that the head no longer lists.
func (p *puller) removedError(pt repo.Point) error {
	return errs.New(errs.Conflict, opPull, p.Ref.Name+"@"+pt.Name, "it was just removed from the remote").
		WithHint("pull another point: list them with %s", errs.Run("remote ls", p.remote))
}

// missingError returns the error for a point whose data is missing: either the point was removed, or the remote is
// damaged.
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

// recordHead records in the catalogue that the volume has this point on the remote, and sets the result's snapshot.
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

// takeOver makes this pool the writer of the volume, unless it already is.
func (p *puller) takeOver(ctx context.Context) (h repo.Head, err error) {
	me, err := writerOf(p.e.Engine)
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

// claimLineage records in the head, after a take-over, which volume of this pool writes it.
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

// generationOf returns the generation number of a golden's point, 0 if its name is not a number.
func generationOf(pt repo.Point) int {
	n, _ := strconv.Atoi(pt.Name)
	return n
}
