package replicate

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/repo"

	"golang.org/x/sync/semaphore"
)

const opVerify = "verify"

// maxProblems is the number of problems that are listed. Others are only counted.
const maxProblems = 1000

// VerifyRequest says what to check.
type VerifyRequest struct {
	Names       []string // of volumes; none: all
	ReadPercent float64  // of the data that volumes need, to read and check; 0: none, 100: all
	Seed        uint64   // of the random sample; 0: draw one
}

// Problem is damage that was found in a remote.
type Problem struct {
	// name of the volume; absent: not known, or none is affected
	Volume   string   `json:"volume,omitempty"`
	Point    string   `json:"point,omitempty"`    // name of the point, the first one if several are affected
	Offset   int64    `json:"offset_bytes"`       // first byte of the volume that cannot be read
	Length   int64    `json:"length_bytes"`       // bytes from there; 0: no bytes in particular
	Object   string   `json:"object,omitempty"`   // object of the remote: segments/...
	Message  string   `json:"message"`            // what is wrong
	Volumes  int      `json:"volume_count"`       // number of volumes that are affected; 0: not known
	Points   int      `json:"point_count"`        // number of points of all these volumes that are affected
	Affected []string `json:"affected,omitempty"` // references to these points, at most 1000
	// the list of points of the volume is older than one that this pool has seen
	Rollback bool `json:"rollback,omitempty"`

	manifest repo.ID // of the point, which may have been removed in the meantime
	whole    bool    // no part of the segment counts as intact
	token    repo.ID // of a Rollback: see rollback
}

// String returns the problem in one line.
func (p Problem) String() string {
	s := p.Volume
	if p.Point != "" {
		s += "@" + p.Point
	}
	if p.Length > 0 {
		s += fmt.Sprintf(" bytes %d to %d", p.Offset, p.Offset+p.Length-1)
	}
	if p.Object != "" {
		s += " (" + p.Object + ")"
	}
	return s + ": " + p.Message + p.Count()
}

// Count returns an addition to the message of a problem that affects several points: how many. It returns "" for
// others.
func (p Problem) Count() string {
	switch {
	case p.Points < 2:
		return ""
	case p.Volumes < 2:
		return fmt.Sprintf("; %d points are affected", p.Points)
	}
	return fmt.Sprintf("; %d points of %d volumes are affected", p.Points, p.Volumes)
}

// Verified is the result of Verify.
type Verified struct {
	Volumes      int   `json:"volume_count"`  // number of volumes
	Points       int   `json:"point_count"`   // number of points
	Segments     int   `json:"segment_count"` // number of segments that these points need
	SegmentBytes int64 `json:"segment_bytes"` // size of these segments, as listed
	// number of segments that were read completely and checked
	ReadSegments int    `json:"read_segment_count"`
	ReadBytes    int64  `json:"read_bytes"`    // size of the segments that were read
	Seed         uint64 `json:"seed"`          // seed of the sample, if not all segments were read
	GarbageCount int    `json:"garbage_count"` // number of unneeded objects, which the next prune removes
	GarbageBytes int64  `json:"garbage_bytes"` // size of these objects
	// size of what operations have written that have not ended
	WorkingBytes  int64     `json:"working_bytes"`
	Unknown       []string  `json:"unknown"`       // keys of objects that do not belong to a repository
	Warnings      []Problem `json:"warnings"`      // problems that cost no data
	Problems      []Problem `json:"problems"`      // problems, at most 1000
	TotalProblems int       `json:"problem_count"` // number of problems

	// points with missing or damaged data, if they were to be repaired; problems are those that are left then
	Repaired []RepairedPoint `json:"repaired,omitempty"`
}

// Err returns nil if there were no problems, and Damaged otherwise.
func (v *Verified) Err() error {
	if v.TotalProblems == 0 {
		return nil
	}

	what, first := "", v.Problems[0]
	if what = first.Volume; first.Point != "" {
		what += "@" + first.Point
	}

	e := errs.New(errs.Damaged, opVerify, what, "found %d problems; the first: %s", v.TotalProblems, first)
	if v.TotalProblems == 1 {
		e = errs.New(errs.Damaged, opVerify, what, "found 1 problem: %s", first)
	}

	// The hint is for the first problem.
	if first.Rollback {
		return e.WithHint(
			"restore the newer state of the remote if you can; to continue from the older one, push the volume with %s",
			errs.Param("accept-rollback"),
		)
	}

	if strings.HasPrefix(first.Object, "heads/") || strings.HasPrefix(first.Object, "points/") {
		return e.WithHint("rebuild the list of points with %s", errs.Run("remote repair", "REMOTE"))
	}

	if strings.HasPrefix(first.Object, "moved/") {
		return e.WithHint("rebuild the table of moved data with %s, before you remove anything from the remote",
			errs.Run("remote repair", "REMOTE"))
	}

	if first.Volume == "" && v.TotalProblems == 1 && strings.HasPrefix(first.Object, "packs/") {
		return e.WithHint("remove the damaged copy with %s: no point is affected, because another copy exists",
			errs.Run("remote prune", "REMOTE"))
	}

	return e.WithHint("pull the points without problems, and repair the others with %s from the pool that pushed them",
		errs.Run("verify", errs.Param("repair")))
}

// Verify checks that all objects in a remote that volumes need exist and are
// consistent: it reads and authenticates every head, manifest and page, and every
// segment must exist with exactly the size it had when it was written. With
// ReadPercent, it reads segments completely: it authenticates and decompresses every
// frame, and compares it with what volumes expect in it.
//
// It changes nothing, needs no session, and may run beside pushes and prunes: a
// problem counts only if a volume still needs the object at the end. Objects that no
// volume needs, and objects that do not belong to a repository, are counted, but are
// not problems.
//
// Problems are not errors of Verify: see [Verified.Err]. Errors: NotFound (a name), and
// those of a store that does not answer.
//
// e is the pool that remembers heads, to detect lost and rolled-back ones. nil remembers none.
func Verify(ctx context.Context, e *engine.Engine, r *Remote, q VerifyRequest) (*Verified, error) {
	rp, err := r.Open(ctx)
	if err != nil {
		return nil, err
	}
	defer rp.Close()

	v := &verifier{repo: rp, VerifyRequest: q, pool: e, expectations: expectations{dir: r.dir}}
	out, err := v.verify(ctx)
	if err == nil && slices.ContainsFunc(out.Problems, func(p Problem) bool {
		return strings.HasPrefix(p.Object, "heads/")
	}) {
		r.nameDamaged(ctx, rp, func(names map[string]string) {
			for i := range out.Problems {
				out.Problems[i].Volume = cmp.Or(out.Problems[i].Volume, names[out.Problems[i].Object])
			}
		})
	}

	return out, err
}

// verify is Verify in a repository that is open.
func (v *verifier) verify(ctx context.Context) (*Verified, error) {
	if math.IsNaN(v.ReadPercent) || v.ReadPercent < 0 || v.ReadPercent > 100 {
		return nil, errs.New(errs.Invalid, opVerify, "", "%v is not a percentage of the data: it must be between 0 and 100",
			v.ReadPercent)
	}

	for _, n := range v.Names {
		if err := ref.CheckName(opVerify, n); err != nil {
			return nil, err
		}
	}

	v.number, v.sizes = map[repo.Segment]uint32{}, map[repo.Segment]uint32{}
	v.named, v.needing = map[repo.ID]bool{}, map[repo.ID][]owner{}
	v.memory = semaphore.NewWeighted(walkMemory)
	v.unreadableNodes, v.faults = map[repo.NodeRef]string{}, map[expected]string{}
	v.findings, v.spoilt = map[findingKey]*finding{}, map[string]string{}
	v.out = &Verified{Unknown: []string{}, Warnings: []Problem{}, Problems: []Problem{}}

	v.expectations.limit = expectedInMemory
	defer v.expectations.close()

	var err error
	if v.witness, err = newWitness(ctx, v.pool, v.repo); err != nil {
		return nil, err
	}

	if v.Seed == 0 {
		v.Seed = rand.Uint64()
	}

	if err := v.runVerify(ctx); err != nil {
		return nil, errs.Wrap(opVerify, v.repo.Store().String(), err)
	}

	return v.out, nil
}

// verifier is a verification under way. Its memory is bounded, except for a few bytes for each point and each segment:
// it never holds all manifests, all pages, or all that these expect of segments.
type verifier struct {
	VerifyRequest
	pool    *engine.Engine // pool that remembers heads; nil: none
	repo    *repo.Repo
	out     *Verified
	witness witness

	memory  *semaphore.Weighted // bounds the memory for pages
	spans   []span
	ages    map[repo.ID]int64   // ages of the checked points: see age
	sibling map[repo.ID]repo.ID // the oldest clone of a point

	mu              sync.Mutex
	segments        []segmentState          // segments that are needed
	number          map[repo.Segment]uint32 // places of segments in that list
	sizes           map[repo.Segment]uint32 // sizes of segments, needed or not, as the manifests of their sessions say
	expectations    expectations
	needed          []checked                   // points that only others need, to look at
	also            map[repo.ID]bool            // points that were in needed
	needing         map[repo.ID][]owner         // points, by each manifest that they need: see Manifest.Needs
	named           map[repo.ID]bool            // manifests that heads or other manifests name
	listed          map[repo.Segment]int64      // bytes of segments that are there; of moved ones, those that they had
	moved           map[repo.Segment]repo.Place // segments that are in packs
	packsRead       map[repo.Pack]bool
	unreadTables    bool                        // whether a table cannot be read, so that something seems to be missing
	lostPacks       map[repo.Segment]repo.Place // segments that were moved to packs which are missing or cut
	tables          map[repo.Segment]lostTable  // tables of segments in packs, which nothing tells any more
	spoilt          map[string]string           // objects that are damaged, of which there may be another copy, and why
	problems        []Problem
	droppedProblems int // problems that are not in the list
	findings        map[findingKey]*finding
	affected        int // points in all findings together

	// Faults. The points that they affect are found at the end.
	damaged         bool                    // segments are missing, of another size, or cannot be read
	unreadableNodes map[repo.NodeRef]string // nodes that cannot be read, and why
	faults          map[expected]string
}

// runVerify checks points, objects and, with ReadPercent, data, and puts the problems into the result.
func (v *verifier) runVerify(ctx context.Context) error {
	progress.From(ctx).Start(progress.ReadingManifests, 0, 0)
	heads, err := v.readHeads(ctx)
	if err != nil {
		return err
	}

	// Read the manifests and maps of all points, and note what they expect of segments.
	if err := v.planSpans(ctx, heads); err != nil {
		return err
	}

	if err := v.checkPoints(ctx); err != nil {
		return err
	}

	v.warnOfLostOrigins()

	// List all objects, and compare segments with what is expected of them.
	progress.From(ctx).Start(progress.ListingObjects, 0, 0)
	if err := v.listAndCount(ctx); err != nil {
		return err
	}

	if _, _, err := v.repo.Seen(ctx); isUnreadable(err) {
		v.out.Warnings = append(v.out.Warnings, Problem{Object: "prune/seen",
			Message: fmt.Sprintf("the next prune replaces it: %v", err)})
	} else if err != nil {
		return err
	}

	if err := v.findSizes(ctx); err != nil {
		return err
	}

	v.countSegments()
	if v.ReadPercent > 0 {
		if err := v.readData(ctx); err != nil {
			return err
		}
	}

	// Find out whom the faults affect.
	if err := v.blamePoints(ctx); err != nil {
		return err
	}

	return v.concludeProblems(ctx)
}

// readHeads reads all heads, and reports those that cannot be read.
func (v *verifier) readHeads(ctx context.Context) ([]repo.Head, error) {
	all, err := readHeads(ctx, v.repo)
	if err != nil {
		return nil, err
	}

	// Report damaged heads: those of volumes that are not checked are only warnings.
	for _, d := range all.bad {
		p := Problem{Object: d.Object, Message: "cannot read a volume's list of points: " + d.Reason}
		i := slices.IndexFunc(v.Names, func(n string) bool { id, err := v.repo.HeadID(n); return err == nil && id == d.id })
		switch {
		case i >= 0:
			p.Volume = v.Names[i]
			v.report(p)
		case len(v.Names) == 0:
			v.report(p)
		default:
			v.out.Warnings = append(v.out.Warnings, p)
		}
	}

	if err := v.reportRollbacks(ctx, all); err != nil {
		return nil, err
	}

	var heads []repo.Head
	for _, h := range all.good {
		heads = append(heads, h.Head)
	}

	// Volumes that were named must exist, unless their heads are damaged.
	for _, n := range v.Names {
		if !slices.ContainsFunc(heads, func(h repo.Head) bool { return h.Name == n && !h.Gone }) && len(v.problems) == 0 {
			return nil, noVolumeError(errs.New(errs.NotFound, "", "", ""), v.repo, opVerify, n)
		}
	}

	return heads, nil
}

// reportRollbacks reports the heads that are missing or older than this pool remembers, and remembers the others.
func (v *verifier) reportRollbacks(ctx context.Context, all headset) error {
	back, err := v.witness.rollbacks(ctx, all)
	if err != nil {
		return err
	}

	for _, b := range back {
		if len(v.Names) == 0 || slices.Contains(v.Names, b.volume) {
			v.report(Problem{Volume: b.volume, Object: b.object, Message: b.reason, Rollback: !b.lost, token: b.token})
		}
	}

	if err := v.witness.rememberHeads(ctx, all); err != nil { // an error of the catalogue, not of the remote
		v.out.Warnings = append(
			v.out.Warnings,
			Problem{
				Message: fmt.Sprintf("this pool could not record the state it has seen, so it will not notice a rollback: %v", err),
			},
		)
	}

	return nil
}

// isUnreadable reports whether err says that an object is missing, damaged, or too new to be read.
func isUnreadable(err error) bool {
	return errs.Is(err, errs.Damaged, errs.TooNew, errs.NotFound)
}

// report adds a problem. It may be called concurrently.
func (v *verifier) report(p Problem) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.reportLocked(p)
}

// reportLocked is report for callers that hold the lock.
func (v *verifier) reportLocked(p Problem) {
	if strings.HasPrefix(p.Object, "segments/") && !p.manifest.IsZero() {
		if p.whole {
			p = v.blameTable(p)
		}
		v.addFinding(p)
		return
	}

	if len(v.problems) >= 8*maxProblems { // more than are listed: concludeProblems drops some
		v.droppedProblems++
		return
	}

	v.problems = append(v.problems, p)
}

// concludeProblems puts the problems into the result. It drops those of objects that volumes no longer need, because
// they were removed during the verification.
func (v *verifier) concludeProblems(ctx context.Context) error {
	v.noteSpoilt()
	if len(v.problems) == 0 && len(v.findings) == 0 && len(v.spoilt) == 0 {
		return nil
	}

	spoilt, err := v.spoiltCopies(ctx)
	if err != nil {
		return err
	}

	now, err := v.rereadHeads(ctx)
	if err != nil {
		return err
	}

	// Find all points that are affected.
	v.blameChains(now.named)
	found := v.listFindings(now.named)
	tables := map[string]bool{} // with which points are affected
	for _, p := range found {
		tables[p.Object] = strings.HasPrefix(p.Object, "moved/")
	}

	// List each problem that still exists once.
	left := map[string]bool{}
	for _, p := range slices.Concat(v.problems, found, spoilt) {
		if tables[p.Object] && p.Points == 0 || left[p.String()] || now.resolves(p) {
			continue // reported with the affected points, reported before, or gone
		}

		left[p.String()] = true
		if p.Point != "" && p.Points == 0 {
			p.Volumes, p.Points = 1, 1
		}

		v.out.TotalProblems++
		if len(v.out.Problems) < maxProblems {
			v.out.Problems = append(v.out.Problems, p)
		}
	}

	if v.out.TotalProblems > 0 {
		v.out.TotalProblems += v.droppedProblems
	}

	slices.SortStableFunc(v.out.Problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Volume, b.Volume), cmp.Compare(a.Point, b.Point), cmp.Compare(a.Offset, b.Offset),
			cmp.Compare(a.Object, b.Object))
	})
	return nil
}

// reread is what heads say at the end of a verification.
type reread struct {
	named       map[repo.ID]bool   // manifests of points, and those that these need
	readable    map[string]bool    // heads, by object
	older       map[string]bool    // heads that are older than remembered
	tokens      map[string]repo.ID // of heads
	unreadPages map[string]bool    // pages of points that cannot be read
}

// rereadHeads reads the heads again, and the manifests that no head names but others need.
func (v *verifier) rereadHeads(ctx context.Context) (reread, error) {
	now := reread{named: map[repo.ID]bool{}, readable: map[string]bool{}, older: map[string]bool{},
		tokens: map[string]repo.ID{}, unreadPages: map[string]bool{}}
	var needed []repo.ID
	for id, err := range v.repo.HeadIDs(ctx) {
		if err != nil {
			return now, err
		}

		h, err := v.repo.HeadByID(ctx, id)
		if isUnreadable(err) {
			continue
		}
		if err != nil {
			return now, err
		}

		object := "heads/" + id.String()
		now.readable[object] = true
		now.older[object] = v.witness.memory.rollbackReason(&h.Head, true) != ""
		now.tokens[object] = h.Head.Token
		var bad []*pageFault
		for pt, err := range allPoints(ctx, v.repo, h.Head, &bad) {
			if err != nil {
				return now, err
			}
			now.named[pt.Manifest] = true
			if pt.Content.Chained() {
				needed = append(needed, pt.Parent)
			}
		}

		for _, f := range bad {
			now.unreadPages[f.Page.Object()] = true
		}
	}

	// Points that are still listed need others, too.
	for id, by := range v.needing {
		if slices.ContainsFunc(by, func(o owner) bool { return now.named[o.manifest] }) {
			needed = append(needed, id)
		}
	}

	for len(needed) > 0 {
		id := needed[0]
		if needed = needed[1:]; id.IsZero() || now.named[id] {
			continue
		}
		now.named[id] = true
		m, err := v.repo.Manifest(ctx, id)
		switch {
		case err == nil:
			needed = append(needed, m.Needs()...)
		case !isUnreadable(err):
			return now, err
		}
	}

	return now, nil
}

// resolves reports whether a problem no longer exists: its point was removed, or its head or page can be read now or is
// no longer needed.
func (now *reread) resolves(p Problem) bool {
	switch {
	case !p.manifest.IsZero() && !now.named[p.manifest]:
		return true
	case p.Rollback && !now.older[p.Object] && (p.token.IsZero() || now.tokens[p.Object] != p.token):
		return true
	}
	return now.readable[p.Object] && !p.Rollback ||
		strings.HasPrefix(p.Object, "points/") && !now.unreadPages[p.Object]
}
