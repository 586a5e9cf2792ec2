package replicate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

const opPush = "push"

// PushRequest describes what to push, and how.
type PushRequest struct {
	// Refs are volumes (Push takes a snapshot of each), snapshots, generations, and
	// goldens (Push pushes their current generations).
	Refs []ref.Ref
	All  bool // push every golden, and every volume that is not ephemeral

	As         ref.Name      // name on the remote, for a single ref; zero: its own name
	LimitBytes int64         // rate limit for uploads and downloads in bytes a second; 0: none
	Freeze     engine.Freeze // whether to freeze the filesystem of a volume in use
	Full       bool          // send all data again, even of points that are on the remote
	NoOrigin   bool          // do not first push the golden that a volume descends from
	Portable   bool          // push trees in the form that every driver with trees can read: see treeContent

	AcceptRollback bool // push even if the remote was reset to an older state than this pool has seen
}

// Pushed describes one point that is on the remote after a Push. Its JSON form is stable.
type Pushed struct {
	Ref       string   `json:"ref"`            // reference to what was pushed: job@push-20260102T030405.678Z, web@3
	Kind      api.Kind `json:"kind"`           // kind of what was pushed: snapshot, generation
	RemoteRef string   `json:"remote_ref"`     // reference to the point on the remote
	Manifest  string   `json:"manifest"`       // ID of the point's manifest on the remote
	Content   string   `json:"content"`        // form of the data: block, stream, tree
	Base      string   `json:"base,omitempty"` // reference to the point on the remote that it builds upon
	// reference to the point on the remote that it was cloned from
	Origin    string `json:"origin,omitempty"`
	Full      bool   `json:"full"`                 // all data was read
	Resumed   bool   `json:"resumed"`              // it resumed an interrupted push
	Unchanged bool   `json:"unchanged"`            // nothing was written: the content was on the remote already
	SizeBytes int64  `json:"size_bytes,omitempty"` // size of the block device
	// bytes of data without zeros; 0 for a stream that is a difference
	LogicalBytes  int64   `json:"logical_bytes"`
	ReadBytes     int64   `json:"read_bytes"`       // bytes that were read from the volume
	UploadedBytes int64   `json:"uploaded_bytes"`   // size of the segments that were sent
	Segments      int64   `json:"segment_count"`    // number of segments that were sent
	Seconds       float64 `json:"duration_seconds"` // time that it took
	Epoch         uint64  `json:"epoch"`            // number of changes of the writer of the volume
	// number of segments that were missing or damaged; what is needed of them was sent again
	LostSegments  int    `json:"lost_segment_count"`
	Raw           bool   `json:"raw,omitempty"`            // encrypted blocks were sent as they are on disk
	ExpectedBytes int64  `json:"expected_bytes,omitempty"` // size of the stream, estimated beforehand
	Note          string `json:"note,omitempty"`           // what was not done, and why

	Volume string `json:"-"` // name of the volume on the remote
	Point  string `json:"-"` // name of the point on the remote
}

// Push uploads points of volumes and goldens to a remote. Where the pool's driver knows what has changed since the last
// push, or since the generation that a volume was cloned from, Push reads and uploads only that. Otherwise it reads all
// data, compares it with the remote, and uploads the differences.
//
// Of a volume, Push takes a snapshot, pushes it, and keeps it for the next push. It destroys earlier snapshots that
// only served this purpose. A volume that has not changed since its last push gets no new point.
//
// Push first checks, with one listing of all segments (see CheckEvery), that the base is complete. If data of it is
// missing or has another size, Push reads the whole volume, compares it with the rest of the base, and sends the
// missing data again. It also pushes a damaged point on the remote again, in its place.
//
// A point is on the remote completely or not at all. The next push resumes an interrupted one with the same snapshot,
// and then pushes the newer state. A point that fails does not prevent others from being pushed, unless the remote does
// not answer (see Outage). Push returns the points that were pushed together with the joined errors. Goldens that had
// to be pushed precede their clones in the result.
//
// Errors: Conflict if another pool writes the volume on the remote (a take-over), or if it is a different volume;
// Damaged if the remote has lost a volume, or was reset to an older state of it, unless AcceptRollback; InUse if
// another process is pushing it; Invalid; NotFound; Unsupported (a tree has something that cannot be sent); and the
// kinds of the store.
func Push(ctx context.Context, e *engine.Engine, r *Remote, q PushRequest) (_ []Pushed, err error) {
	p := &pusher{e: e.Transfer(), r: r, q: q}
	ctx, end := p.e.Begin(ctx, opPush)
	defer end(&err)

	targets, err := p.findTargets(ctx)
	if err != nil {
		return nil, err
	}

	if err := p.openRepo(ctx); err != nil {
		return nil, err
	}

	defer p.repo.Close()
	keepReserve(ctx, p.repo)

	// Push each target, until the remote does not answer any more.
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
			break // each of the others would fail in the same way, after many attempts
		}
	}

	if len(failed) == 1 {
		return p.pushed, failed[0]
	}

	return p.pushed, errors.Join(failed...)
}

// remoteDown reports whether the remote does not answer at all, so that an error does not depend on the request that
// failed.
func (p *pusher) remoteDown(ctx context.Context) bool { return Outage(p.repo.Refresh(ctx)) }

// skippedError adds to the error of an outage how many targets were skipped because of it.
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
	e      *engine.Transfer
	r      *Remote
	q      PushRequest
	repoID string

	sizes map[repo.Segment]int64 // segments on the remote; nil: not listed yet
	bad   map[repo.Segment]bool  // segments that are known to be damaged, whatever their sizes
	base  *repo.Manifest         // the last base that was read
	nodes *repo.NodeCache        // nodes of maps; nil: none was read
	chain map[repo.ID]chainLink  // links of the manifests that were read; nil: none

	intact map[repo.ID]bool // lower layers of overlays that were found to be complete

	pushed []Pushed // so far, goldens before their clones
}

// openRepo opens the repository, and loads what the catalogue has of it. The caller closes the repository.
func (p *pusher) openRepo(ctx context.Context) error {
	me, err := writerOf(p.e.Engine)
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

// target is one reference to push.
type target struct {
	ref    ref.Ref
	volume bool // a volume, of which the push takes a snapshot
}

// findTargets checks the request and finds what to push, without accessing the remote.
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

	// A reference that is Invalid as a point is a volume.
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

// allTargets returns all goldens, and then the volumes, which may be clones of them.
func (p *pusher) allTargets(ctx context.Context) ([]target, error) {
	var out []target
	goldens, err := p.e.Goldens(ctx)
	if err != nil {
		return nil, err
	}

	for _, g := range goldens {
		out = append(out, target{ref: ref.Ref{Name: g.Name}})
	}

	volumes, err := p.e.Volumes(ctx, engine.VolumesRequest{})
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
