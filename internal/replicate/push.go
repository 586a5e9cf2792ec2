package replicate

import (
	"cmp"
	"context"
	"errors"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/errs"
	"pando/internal/objstore"
	"pando/internal/progress"
	"pando/internal/ref"
	"pando/internal/repo"
)

const opPush = "push"

// PushRequest says what to push.
type PushRequest struct {
	// Refs are volumes, of which a snapshot is taken now, snapshots, generations, and
	// goldens, which is their current generation.
	Refs []ref.Ref
	All  bool // every volume that is not ephemeral, and every golden

	As         ref.Name      // on the remote, of the only ref; zero: its own
	LimitBytes int64         // a second, up and down; 0: no limit
	Freeze     engine.Freeze // whether the writes to a volume in use are stopped
	Full       bool          // send all data, also what is there, and points that are there once more
	Checks     *Checks       // how often is looked whether what is there is whole; nil: by each Push
	NoOrigin   bool          // do not push the golden that a volume descends from first
	Portable   bool          // push trees in the form that every driver with trees can read: see treeContent

	AcceptRollback bool // go on if the remote was put back to an older state than this pool has seen

	// Warn is called with what a person should know before a point is sent; nil: that is in its Note.
	Warn func(text string)

	Tracker *progress.Tracker
}

// Pushed describes one point that is on the remote now. Its JSON form is stable.
type Pushed struct {
	Ref           string  `json:"ref"`       // here: "job@push-20260102T030405.678Z", "web@3"
	Volume        string  `json:"volume"`    // its name there
	Point         string  `json:"point"`     // name of the point there
	Golden        bool    `json:"golden"`    // it is a generation
	Manifest      string  `json:"manifest"`  // ID there
	Content       string  `json:"content"`   // block, stream, tree
	Base          string  `json:"base"`      // what was there and was built upon: "job@push-..."; "" if nothing
	Origin        string  `json:"origin"`    // of a clone: the point there that it was cloned from; "" if none is there
	Full          bool    `json:"full"`      // all data was read
	Resumed       bool    `json:"resumed"`   // it went on where an interrupted push had ended
	Unchanged     bool    `json:"unchanged"` // nothing had to be written: the content was there
	SizeBytes     int64   `json:"size_bytes"`
	LogicalBytes  int64   `json:"logical_bytes"`  // of data, zeros left out; 0 of a stream that is a difference
	ReadBytes     int64   `json:"read_bytes"`     // of the volume
	UploadedBytes int64   `json:"uploaded_bytes"` // of segments
	Segments      int64   `json:"segments"`       // that were uploaded
	Seconds       float64 `json:"seconds"`
	Epoch         uint64  `json:"epoch"`
	LostSegments  int     `json:"lost_segments"`            // of what was there, which were missing or damaged: what is needed of them was sent again
	Raw           bool    `json:"raw,omitempty"`            // of an encrypted ZFS dataset: its blocks travel as they lie on disk
	ExpectedBytes int64   `json:"expected_bytes,omitempty"` // of the stream, as was estimated before it was sent; 0: not known
	Note          string  `json:"note,omitempty"`           // what was not done, and why
}

// Push carries points of volumes and goldens to a remote. Only what has changed since
// the last push, or since the generation that a volume was cloned from, is read and
// uploaded, where the pool's driver can tell; what it cannot tell is read and compared
// with what is there.
//
// Of a volume a snapshot is taken and pushed, and kept for the next push; earlier ones
// that only served that are destroyed. A volume in which nothing has changed since its
// last push gets no new point.
//
// What a push builds upon is looked for first, in one listing of all segments (see Checks): if something of it is
// missing or has another size, the volume is read whole and compared with what is left, and what is missing is sent
// again. So is a point that is there already and is not whole, in its place.
//
// A point is there, whole, or not at all. What an interrupted push has uploaded is not
// lost: the next one goes on with the same snapshot, and then pushes what is newer. One
// that fails does not keep others from being pushed; what was is returned with the
// errors, joined. Goldens that had to be pushed before their clones are in the result,
// before those.
//
// Errors: Conflict if another pool writes the volume there (somebody took it over) or
// it is another volume than the one here, Damaged if the remote has lost a volume, or was put
// back to an older state of it, unless AcceptRollback, InUse if it is being pushed already, Invalid,
// NotFound, Unsupported (what cannot be sent of a tree), and the kinds of the
// store.
func Push(ctx context.Context, e *engine.Engine, r *Remote, q PushRequest) ([]Pushed, error) {
	p := &pusher{e: e, r: r, q: q}
	targets, err := p.targets(ctx)
	if err != nil {
		return nil, err
	}
	if err := p.open(ctx); err != nil {
		return nil, err
	}
	defer p.repo.Close()
	var out []Pushed
	var failed []error
	for _, t := range targets {
		done, err := p.target(ctx, t)
		out = append(append(out, p.origins...), done...)
		p.origins = nil
		if err != nil {
			failed = append(failed, errs.Wrap(opPush, t.ref.String(), err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	if len(failed) == 1 {
		return out, failed[0]
	}
	return out, errors.Join(failed...)
}

// pusher is one push of one or more volumes.
type pusher struct {
	headWriter
	e      *engine.Engine
	r      *Remote
	q      PushRequest
	repoID string

	sizes map[repo.Segment]int64 // segments that are there; nil: not listed
	bad   map[repo.Segment]bool  // segments that are known to be damaged, whatever their sizes
	base  *repo.Manifest         // that was read last
	nodes *repo.NodeCache        // of maps; nil: nothing was read

	origins []Pushed // goldens that were pushed before their clones, not yet reported
}

// open opens the repository, and reads what is remembered of it. The caller closes it.
func (p *pusher) open(ctx context.Context) error {
	me, err := writer(p.e)
	if err != nil {
		return err
	}
	rp, err := p.r.OpenLimited(ctx, p.q.LimitBytes)
	if err != nil {
		return err
	}
	p.repoID = rp.ID().String()
	p.headWriter = headWriter{
		repo: rp, remote: p.r.Name, me: me, tokens: newTokenFiles(p.e.Dir(), rp), free: &sync.Map{}, acceptRollback: p.q.AcceptRollback,
	}
	if p.memory, err = remembered(ctx, p.e, rp); err != nil {
		rp.Close()
	}
	return err
}

// target is what a reference names.
type target struct {
	ref    ref.Ref
	volume bool // take a snapshot of it
}

// targets finds what is to be pushed, before anything is asked of the remote.
func (p *pusher) targets(ctx context.Context) ([]target, error) {
	q := p.q
	switch {
	case q.All && len(q.Refs) > 0:
		return nil, errs.New(errs.Invalid, opPush, "", "either all volumes are pushed, or those that are named")
	case !q.All && len(q.Refs) == 0:
		return nil, errs.New(errs.Invalid, opPush, "", "nothing to push is named").
			WithHint("name volumes or goldens, or use %s", errs.Param("all"))
	case !q.As.IsZero() && (q.All || len(q.Refs) != 1):
		return nil, errs.New(errs.Invalid, opPush, q.As.String(), "a name on the remote can be given to one volume only")
	case q.LimitBytes < 0:
		return nil, errs.New(errs.Invalid, opPush, "", "a rate of %d bytes a second is none", q.LimitBytes)
	}
	if q.All {
		return p.everything(ctx)
	}
	var out []target
	for _, r := range q.Refs {
		t := target{ref: r}
		_, err := p.e.Point(ctx, r)
		if errs.Is(err, errs.Invalid) && r.At == "" {
			t.volume, err = true, nil
		}
		if err != nil {
			return nil, err
		}
		if !slices.Contains(out, t) {
			out = append(out, t)
		}
	}
	return out, nil
}

// everything is all goldens, and then the volumes, some of which are clones of them.
func (p *pusher) everything(ctx context.Context) ([]target, error) {
	var out []target
	goldens, err := p.e.Goldens(ctx)
	if err != nil {
		return nil, err
	}
	for _, g := range goldens {
		out = append(out, target{ref: ref.Ref{Name: g.Golden}})
	}
	volumes, err := p.e.Volumes(ctx, false)
	if err != nil {
		return nil, err
	}
	for _, v := range volumes {
		if !v.Ephemeral {
			out = append(out, target{ref: ref.Ref{Name: v.Name}, volume: true})
		}
	}
	return out, nil
}

// job is the push of one point to one head.
type job struct {
	pt    engine.Point
	head  string // its name
	claim claim  // as the head was first read
	j     *journal
	took  bool // the snapshot was taken for this push
	goOn  bool // the journal has its plan
	lost  int  // segments of what it builds upon that were not there
	named bool // a manifest may be written that names the head
	begun time.Time
	note  string

	portable bool // what it replaces is a tree that every driver can read
}

// target pushes one volume, snapshot or generation. It may return what was pushed
// besides an error.
func (p *pusher) target(ctx context.Context, t target) (out []Pushed, err error) {
	begun := time.Now()
	head := cmp.Or(p.q.As.String(), t.ref.Name)
	j, err := openJournal(ctx, p.r.dir, head)
	if err != nil {
		return nil, err
	}
	defer j.close()
	h, err := p.readHead(ctx, head)
	if err != nil {
		return nil, err
	}
	if err := cmp.Or(p.mayWrite(h), p.notOlder(h)); err != nil {
		return nil, err
	}
	if !t.volume {
		pt, err := p.e.Point(ctx, t.ref)
		if err != nil {
			return nil, err
		}
		jb := &job{pt: pt, head: head, j: j, begun: begun}
		if jb.goOn = j.plan != nil && j.plan.Object == string(pt.ID); !jb.goOn {
			if err := p.forget(ctx, j); err != nil {
				return nil, err
			}
		}
		return add(nil)(p.point(ctx, jb, h))
	}
	if pt, ok := p.unfinished(ctx, j, t.ref.Name); ok {
		jb := &job{pt: pt, head: head, j: j, took: true, goOn: j.plan.Object != "", begun: begun}
		if out, err = add(nil)(p.point(ctx, jb, h)); err != nil {
			return out, err
		}
		begun = time.Now()
		if h, err = p.readHead(ctx, head); err != nil {
			return out, err
		}
	} else if err := p.forget(ctx, j); err != nil {
		return nil, err
	}
	return add(out)(p.volume(ctx, t.ref.Name, head, j, h, begun))
}

// add adds what was pushed, which it may have been in spite of an error.
func add(out []Pushed) func(Pushed, error) ([]Pushed, error) {
	return func(done Pushed, err error) ([]Pushed, error) {
		if done.Manifest != "" {
			out = append(out, done)
		}
		return out, err
	}
}

// volume takes a snapshot and pushes it.
func (p *pusher) volume(ctx context.Context, name, head string, j *journal, h headState, begun time.Time) (Pushed, error) {
	vol, err := ref.ParseName(opPush, name)
	if err != nil {
		return Pushed{}, err
	}
	var snap ref.Ref
	for {
		at := ref.MustName(pushName(time.Now()))
		snap = vol.At(at)
		// Who cleans up must know that somebody is about to use it. After a power loss a
		// snapshot that nobody uses is recognised without this.
		if err := j.begin(plan{Snapshot: snap.String(), Took: true}, false); err != nil {
			return Pushed{}, err
		}
		_, err := p.e.Snapshot(ctx, engine.SnapshotRequest{Volume: vol, Name: at, Freeze: p.q.Freeze, Tracker: p.q.Tracker})
		if err == nil {
			break
		}
		if err := errors.Join(err, j.clear()); !errs.Is(err, errs.Exists) {
			return Pushed{}, err
		}
		// A push to another remote has taken one in this very millisecond.
		select {
		case <-ctx.Done():
			return Pushed{}, errs.Wrap(opPush, name, ctx.Err())
		case <-time.After(time.Millisecond):
		}
	}
	pt, err := p.e.Point(ctx, snap)
	if err != nil {
		return Pushed{}, err
	}
	return p.point(ctx, &job{pt: pt, head: head, j: j, took: true, begun: begun}, h)
}

// unfinished finds the snapshot that an interrupted push of a volume had taken.
func (p *pusher) unfinished(ctx context.Context, j *journal, volume string) (engine.Point, bool) {
	if j.plan == nil || !j.plan.Took {
		return engine.Point{}, false
	}
	if id := j.plan.Object; id != "" {
		pt, err := p.e.PointByID(ctx, driver.ObjectID(id))
		return pt, err == nil && pt.Volume == volume
	}
	r, err := ref.Parse(opPush, j.plan.Snapshot)
	if err != nil || r.Name != volume {
		return engine.Point{}, false
	}
	pt, err := p.e.Point(ctx, r)
	return pt, err == nil
}

// forget gives up what the journal has of an unfinished push.
func (p *pusher) forget(ctx context.Context, j *journal) error {
	if err := p.endPlanned(ctx, j); err != nil {
		return err
	}
	return errs.Wrap(opPush, filepath.Base(j.path), j.clear())
}

// endPlanned ends the session of an unfinished push, if it may be ended. Its journal still
// says which snapshot it is of, so that nobody destroys that.
func (p *pusher) endPlanned(ctx context.Context, j *journal) error {
	if j.plan == nil || j.plan.Session.IsZero() || !p.mayEnd(ctx, filepath.Base(j.path)) {
		return nil
	}
	return p.repo.EndSession(ctx, &repo.Session{ID: j.plan.Session})
}

// mayEnd reports whether a session that has perhaps written a manifest may be ended before it commits: not if the
// volume has no head yet. Heads are never deleted, so a manifest without session and head tells of a head that was
// lost. A prune ends the session, and makes the head.
func (p *pusher) mayEnd(ctx context.Context, head string) bool {
	_, _, err := p.repo.Head(ctx, head)
	return err == nil || broken(err) && !errs.Is(err, errs.NotFound)
}

// point pushes one point. Whatever the error, either the journal has what is needed to
// go on, or the push left nothing behind. h is as the head was first read.
func (p *pusher) point(ctx context.Context, jb *job, h headState) (Pushed, error) {
	jb.claim = h.claim()
	if err := p.fits(ctx, h, jb.pt); err != nil {
		return Pushed{}, p.discard(ctx, jb, err)
	}
	links, err := p.links(ctx)
	if err != nil {
		return Pushed{}, err
	}
	at, there, err := p.alreadyThere(ctx, h, jb.pt, links)
	if err != nil {
		return Pushed{}, err
	}
	if there {
		gone, err := p.lostOf(ctx, at.Manifest)
		if err != nil {
			return Pushed{}, err
		}
		if !gone.any() && !p.q.Full && !p.otherForm(at) {
			return p.wasThere(ctx, jb, h, at)
		}
		jb.lost = len(gone.segments)
		if err := p.again(ctx, jb, at); err != nil {
			return Pushed{}, err
		}
	}
	push := p.block
	if !jb.pt.FS.IsImage() {
		push = p.tree
	}
	out, err := push(ctx, jb, h, links)
	if hopeless(err) {
		err = p.discard(ctx, jb, err)
	}
	return out, named(err, jb.pt)
}

// named makes an error about an object one about what people call it.
func named(err error, pt engine.Point) error {
	var known *errs.Error
	if !errors.As(err, &known) || known.Ref != string(pt.ID) {
		return err
	}
	out := *known
	out.Ref = pt.Ref
	return &out
}

// hopeless reports whether a push that failed so cannot be gone on with.
func hopeless(err error) bool {
	switch errs.KindOf(err) {
	case errs.Conflict, errs.Exists, errs.Unsupported:
		return !objstore.Temporary(err)
	}
	return false
}

// wasThere finishes the push of a point that the head lists already: its content was
// pushed or pulled before, or a push was killed just after its commit.
func (p *pusher) wasThere(ctx context.Context, jb *job, h headState, at repo.Point) (Pushed, error) {
	out := p.describe(jb, h, at)
	out.Unchanged = !jb.goOn
	out.Resumed = jb.goOn
	err := p.settle(ctx, jb, h, at.Manifest, func(ctx context.Context) error { return p.endPlanned(ctx, jb.j) })
	out.Seconds = time.Since(jb.begun).Seconds()
	return out, err
}

// describe begins the result of a push.
func (p *pusher) describe(jb *job, h headState, at repo.Point) Pushed {
	return Pushed{
		Ref: jb.pt.Ref, Volume: jb.head, Point: at.Name, Golden: jb.pt.Golden, Manifest: at.Manifest.String(), Content: string(at.Content),
		Origin: at.OriginRef, SizeBytes: at.SizeBytes, LogicalBytes: at.Logical, Epoch: h.Epoch, Note: jb.note,
		LostSegments: jb.lost,
	}
}

// discard ends a push that cannot be gone on with, for err, and leaves nothing of it.
func (p *pusher) discard(ctx context.Context, jb *job, err error) error {
	ctx = context.WithoutCancel(ctx)
	_ = p.endPlanned(ctx, jb.j) // else a prune does, sometime
	if cerr := jb.j.clear(); cerr != nil {
		return errors.Join(err, cerr)
	}
	if jb.took {
		_ = p.destroy(ctx, jb.pt.Ref) // else the next push does
	}
	return err
}
