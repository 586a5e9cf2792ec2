package replicate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/repo"
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
	LostSegments  int     `json:"lost_segments"`            // of what was there: what is needed of them was sent again
	Raw           bool    `json:"raw,omitempty"`            // of an encrypted ZFS dataset: blocks as they lie on disk
	ExpectedBytes int64   `json:"expected_bytes,omitempty"` // of the stream, as was estimated before; 0: not known
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
// that fails does not keep others from being pushed, unless the remote does not answer (see Outage); what was is
// returned with the errors, joined. Goldens that had to be pushed before their clones are in the result,
// before those.
//
// Errors: Conflict if another pool writes the volume there (somebody took it over) or
// it is another volume than the one here, Damaged if the remote has lost a volume, or was put
// back to an older state of it, unless AcceptRollback, InUse if it is being pushed already, Invalid,
// NotFound, Unsupported (what cannot be sent of a tree), and the kinds of the
// store.
func Push(ctx context.Context, e *engine.Engine, r *Remote, q PushRequest) ([]Pushed, error) {
	p := &pusher{e: e, r: r, q: q}
	targets, err := p.findTargets(ctx)
	if err != nil {
		return nil, err
	}

	if err := p.openRepo(ctx); err != nil {
		return nil, err
	}

	defer p.repo.Close()

	var failed []error
	for i, t := range targets {
		err := p.pushTarget(ctx, t)
		left := len(targets) - i - 1
		out := left > 0 && Outage(err) && p.remoteDown(ctx)
		if out {
			err = skippedError(err, t, left)
		}
		if err != nil {
			failed = append(failed, errs.Wrap(opPush, t.ref.String(), err))
		}
		if out || ctx.Err() != nil {
			break // of each of the others it would be found out again only after many attempts
		}
	}

	if len(failed) == 1 {
		return p.pushed, failed[0]
	}

	return p.pushed, errors.Join(failed...)
}

// unreached reports whether the remote does not answer at all, so that it was not for what was asked that it did not.
func (p *pusher) remoteDown(ctx context.Context) bool { return Outage(p.repo.Refresh(ctx)) }

// notTried adds to the error of an outage how many others were not tried because of it.
func skippedError(err error, t target, left int) error {
	what := "skipped 1 other"
	if left > 1 {
		what = fmt.Sprintf("skipped %d others", left)
	}
	return errs.New(errs.KindOf(err), opPush, t.ref.String(), "%w; %s because the remote does not answer", err, what)
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
	chain map[repo.ID]chainLink  // of manifests that were read; nil: none

	pushed []Pushed // so far, goldens before their clones
}

// open opens the repository, and reads what is remembered of it. The caller closes it.
func (p *pusher) openRepo(ctx context.Context) error {
	me, err := writerOf(p.e)
	if err != nil {
		return err
	}

	rp, err := p.r.OpenLimited(ctx, p.q.LimitBytes)
	if err != nil {
		return err
	}

	p.repoID = rp.ID().String()
	p.headWriter = headWriter{
		repo: rp, remote: p.r.Name, me: me, tokens: newTokenFiles(p.e.Dir(), rp), freeNames: &sync.Map{},
		acceptRollback: p.q.AcceptRollback,
	}
	if p.memory, err = rememberedHeads(ctx, p.e, rp); err != nil {
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
func (p *pusher) findTargets(ctx context.Context) ([]target, error) {
	q := p.q
	switch {
	case q.All && len(q.Refs) > 0:
		return nil, errs.New(errs.Invalid, opPush, "", "volume names cannot be combined with %s", errs.Param("all"))
	case !q.All && len(q.Refs) == 0:
		return nil, errs.New(errs.Invalid, opPush, "", "nothing to push").
			WithHint("name volumes or goldens, or push everything with %s", errs.Param("all"))
	case !q.As.IsZero() && (q.All || len(q.Refs) != 1):
		return nil, errs.New(errs.Invalid, opPush, q.As.String(),
			"only one volume at a time can be given another name on the remote")
	case q.LimitBytes < 0:
		return nil, errs.New(errs.Invalid, opPush, "", "the rate limit must not be negative (got %d bytes/s)", q.LimitBytes)
	}

	if q.All {
		return p.allTargets(ctx)
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
func (p *pusher) allTargets(ctx context.Context) ([]target, error) {
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
