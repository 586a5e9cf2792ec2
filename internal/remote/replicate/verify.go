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

// maxProblems is how many problems are listed; the others are counted.
const maxProblems = 1000

// VerifyRequest says what to look at.
type VerifyRequest struct {
	Names       []string // of volumes; none: all
	ReadPercent float64  // of the data that volumes need, to read and check; 0: none, 100: all
	Seed        uint64   // of the choice which; 0: a random one
	Tracker     *progress.Tracker
	Pool        *engine.Engine // that remembers heads, to notice what is lost or older; nil: none

	scratch string // directory for what does not fit into memory
}

// Problem is something that is wrong in a remote.
type Problem struct {
	Volume  string `json:"volume,omitempty"` // "" if that is not known, or none is affected
	Point   string `json:"point,omitempty"`  // the first by name, if several are affected
	Offset  int64  `json:"offset"`           // first byte of the volume that cannot be read
	Length  int64  `json:"length"`           // bytes from there; 0: no bytes in particular
	Object  string `json:"object,omitempty"` // of the remote: "segments/..."
	Message string `json:"message"`
	Volumes int    `json:"volumes"` // how many are affected; 0: not known
	Points  int    `json:"points"`  // of them all
	// Affected names these points, VOLUME@POINT in order, at most 1000.
	Affected []string `json:"affected,omitempty"`
	// Rollback: the list of the volume's points is older than one that this pool has seen.
	Rollback bool `json:"rollback,omitempty"`

	manifest repo.ID // which somebody may have removed meanwhile
	whole    bool    // nothing of the segment counts as intact
	token    repo.ID // of a Rollback: see rollback
}

// String is the problem in one line.
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

// Count says of a problem that affects several points how many, as an addition to its message, else "".
func (p Problem) Count() string {
	switch {
	case p.Points < 2:
		return ""
	case p.Volumes < 2:
		return fmt.Sprintf("; %d points are affected", p.Points)
	}
	return fmt.Sprintf("; %d points of %d volumes are affected", p.Points, p.Volumes)
}

// Verified is what Verify found.
type Verified struct {
	Volumes       int       `json:"volumes"`
	Points        int       `json:"points"`
	Segments      int       `json:"segments"`       // that these need
	SegmentBytes  int64     `json:"segment_bytes"`  // of them, as listed
	ReadSegments  int       `json:"read_segments"`  // that were read whole and checked
	ReadBytes     int64     `json:"read_bytes"`     // of them
	Seed          uint64    `json:"seed"`           // of the choice, if not all were read
	GarbageCount  int       `json:"garbage_count"`  // objects that nothing needs: the next prune removes them
	GarbageBytes  int64     `json:"garbage_bytes"`  //
	WorkingBytes  int64     `json:"working_bytes"`  // written by sessions that have not ended
	Unknown       []string  `json:"unknown"`        // keys of objects that are no part of a repository
	Warnings      []Problem `json:"warnings"`       // that cost no data
	Problems      []Problem `json:"problems"`       // at most 1000
	TotalProblems int       `json:"total_problems"` //

	// Repaired are the points of which something was missing or damaged, if they were to be repaired: see VerifyRepair.
	// Problems are then those that are left.
	Repaired []RepairedPoint `json:"repaired,omitempty"`
}

// Err is nil if there were no problems, and Damaged otherwise.
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

	return e.WithHint("pull the points without problems; remove the damaged ones with %s, and push them again",
		errs.Run("remote delete", "REMOTE", "VOLUME@POINT"))
}

// Verify checks that everything in a remote that volumes need is there and fits
// together: every head, manifest and page is read and authenticated, and every
// segment must be there with exactly the size that it had when it was written. With ReadPercent, segments are read
// whole:
// every frame is authenticated and unpacked, and compared with what volumes expect
// in it.
//
// It changes nothing, needs no session, and may run beside pushes and prunes: a
// problem is one only if the volume still needs what was not right when the rest has
// been looked at. An object that no volume needs, and one that no repository has
// written, is counted and is no problem.
//
// Problems are no error of Verify: see [Verified.Err]. NotFound (a name), and what the
// store returns when it does not answer.
func Verify(ctx context.Context, r *Remote, q VerifyRequest) (*Verified, error) {
	rp, err := r.Open(ctx)
	if err != nil {
		return nil, err
	}

	defer rp.Close()
	q.scratch = r.dir
	out, err := verify(ctx, rp, q)
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

func verify(ctx context.Context, rp *repo.Repo, q VerifyRequest) (*Verified, error) {
	if math.IsNaN(q.ReadPercent) || q.ReadPercent < 0 || q.ReadPercent > 100 {
		return nil, errs.New(errs.Invalid, opVerify, "", "%v is not a percentage of the data: it must be between 0 and 100",
			q.ReadPercent)
	}

	for _, n := range q.Names {
		if err := ref.CheckName(opVerify, n); err != nil {
			return nil, err
		}
	}

	v := &verifier{
		repo: rp, VerifyRequest: q, number: map[repo.Segment]uint32{}, sizes: map[repo.Segment]uint32{},
		named: map[repo.ID]bool{}, chained: map[repo.ID][]owner{},
		memory: semaphore.NewWeighted(pagesInMemory), expectations: expectations{dir: q.scratch, limit: expectedInMemory},
		unreadableNodes: map[repo.NodeRef]string{}, faults: map[expected]string{}, findings: map[findingKey]*finding{},
		spoilt: map[string]string{},
		out:    &Verified{Unknown: []string{}, Warnings: []Problem{}, Problems: []Problem{}},
	}

	defer v.expectations.close()

	var err error
	if v.witness, err = newWitness(ctx, v.Pool, rp); err != nil {
		return nil, err
	}

	if v.Seed == 0 {
		v.Seed = rand.Uint64()
	}

	if err := v.runVerify(ctx); err != nil {
		return nil, errs.Wrap(opVerify, rp.Store().String(), err)
	}

	return v.out, nil
}

// verifier is a verification under way. What it keeps in memory is bounded, but for a few bytes for each point and
// each segment: it never has all manifests, all pages or all that these expect of segments.
type verifier struct {
	VerifyRequest
	repo    *repo.Repo
	out     *Verified
	witness witness

	memory  *semaphore.Weighted // for pages
	spans   []span
	ages    map[repo.ID]int64   // of the points that are checked: see age
	sibling map[repo.ID]repo.ID // the oldest clone of a point

	mu              sync.Mutex
	segments        []segmentState          // that are needed
	number          map[repo.Segment]uint32 // their place in segments
	sizes           map[repo.Segment]uint32 // of segments, as the manifests of their sessions say, needed or not
	expectations    expectations
	parents         []checked                   // of streams, to look at
	chained         map[repo.ID][]owner         // streams, by the manifest that they are the difference from
	named           map[repo.ID]bool            // manifests that heads or streams name
	listed          map[repo.Segment]int64      // bytes of segments that are there; of moved ones, those that they had
	moved           map[repo.Segment]repo.Place // segments that are in packs
	packsRead       map[repo.Pack]bool
	unreadTables    bool                        // a table cannot be read, so that something seems to be missing
	lostPacks       map[repo.Segment]repo.Place // that were moved to packs which are missing or cut
	tables          map[repo.Segment]lostTable  // of segments that are in packs, which nothing tells any more
	spoilt          map[string]string           // objects that are damaged, of which there may be another copy, and why
	problems        []Problem
	droppedProblems int // problems that are not in the list
	findings        map[findingKey]*finding
	affected        int // points in all findings together

	// What is wrong, and for whom is looked for in the end.
	damaged         bool                    // segments are missing, of another size, or cannot be read
	unreadableNodes map[repo.NodeRef]string // pages and nodes that cannot be read, and why; of a page only the frame
	faults          map[expected]string
	usesWrong       bool // a manifest does not list a segment
}

func (v *verifier) runVerify(ctx context.Context) error {
	v.Tracker.Start("reading manifests", 0, 0)
	heads, err := v.readHeads(ctx)
	if err != nil {
		return err
	}

	if err := v.planSpans(ctx, heads); err != nil {
		return err
	}

	if err := v.checkPoints(ctx); err != nil {
		return err
	}

	v.Tracker.Start("listing objects", 0, 0)
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

	if err := v.blamePoints(ctx); err != nil {
		return err
	}

	return v.concludeProblems(ctx)
}

// readHeads reads all heads, and says which cannot be read.
func (v *verifier) readHeads(ctx context.Context) ([]repo.Head, error) {
	all, err := readHeads(ctx, v.repo)
	if err != nil {
		return nil, err
	}

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

	for _, n := range v.Names {
		if !slices.ContainsFunc(heads, func(h repo.Head) bool { return h.Name == n && !h.Gone }) && len(v.problems) == 0 {
			return nil, noVolumeError(errs.New(errs.NotFound, "", "", ""), v.repo, opVerify, n)
		}
	}

	return heads, nil
}

// reportRollbacks says which heads are missing or older than this pool remembers, and remembers the others.
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

	if err := v.witness.rememberHeads(ctx, all); err != nil { // of the catalogue: what is on the remote is not affected
		v.out.Warnings = append(
			v.out.Warnings,
			Problem{
				Message: fmt.Sprintf("this pool could not record the state it has seen, so it will not notice a rollback: %v", err),
			},
		)
	}

	return nil
}

// isUnreadable reports whether err says that an object is not as it was written.
func isUnreadable(err error) bool {
	return errs.Is(err, errs.Damaged) || errs.Is(err, errs.TooNew) || errs.Is(err, errs.NotFound)
}

func (v *verifier) report(p Problem) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.reportLocked(p)
}

// reportLocked is problem for who holds the lock.
func (v *verifier) reportLocked(p Problem) {
	if strings.HasPrefix(p.Object, "segments/") && !p.manifest.IsZero() {
		if p.whole {
			p = v.blameTable(p)
		}
		v.addFinding(p)
		return
	}

	if len(v.problems) >= 8*maxProblems { // some of them may turn out to be none
		v.droppedProblems++
		return
	}

	v.problems = append(v.problems, p)
}

// listAndCount lists everything and counts what nothing needs.
func (v *verifier) listAndCount(ctx context.Context) error {
	sessions := map[repo.ID]bool{}
	if err := v.addSessions(ctx, sessions); err != nil {
		return err
	}

	v.listed = map[repo.Segment]int64{}
	manifests, lists := map[repo.ID]int64{}, map[repo.ID]int64{}
	packs, tables := map[repo.Pack]int64{}, 0
	for o, err := range v.repo.Objects(ctx) {
		if err != nil {
			return err
		}

		switch o.Kind {
		case repo.SegmentObject:
			v.listed[o.Segment] = o.Bytes
		case repo.ManifestObject:
			manifests[o.ID] = o.Bytes
		case repo.PointsObject:
			lists[o.ID] = o.Bytes
		case repo.PackObject:
			packs[o.Pack] = o.Bytes
		case repo.TableObject:
			tables++
		case "":
			v.out.Unknown = append(v.out.Unknown, o.Key)
		case repo.ProbeObject:
			v.out.GarbageCount++
			v.out.GarbageBytes += o.Bytes
		}
	}

	if err := v.listMoved(ctx, tables); err != nil {
		return err
	}

	if len(v.Names) > 0 || len(v.problems) > 0 || len(v.unreadableNodes) > 0 {
		return nil // what the rest needs was not looked at, or is not known
	}

	needed := v.named
	used := map[repo.Segment]bool{}
	for _, s := range v.segments {
		used[s.Segment] = true
	}

	// What was pushed since the heads were read.
	var fresh []repo.ID
	now, err := readHeads(ctx, v.repo)
	if err != nil {
		return err
	}

	pages := map[repo.ID]bool{}
	for _, h := range now.good {
		for _, p := range h.Head.Pages {
			pages[p.ID] = true
		}
		for pt, err := range allPoints(ctx, v.repo, h.Head, nil) {
			if err != nil {
				return err
			}
			if !needed[pt.Manifest] {
				fresh = append(fresh, pt.Manifest)
			}
		}
	}

	if err := v.addSessions(ctx, sessions); err != nil {
		return err
	}

	for s := range sessions {
		st, err := v.repo.Session(ctx, s)
		if errs.Is(err, errs.NotFound) {
			continue
		}
		if err != nil {
			return err
		}
		fresh = append(fresh, st.Session.Pins...)
	}

	var read []*repo.Manifest
	err = readManifests(
		ctx,
		v.repo,
		fresh,
		func(m repo.Manifest) { read = append(read, &m) },
		func(_ repo.ID, err error) error {
			if isUnreadable(err) {
				return nil // the next verify says it, if it is still needed
			}
			return err
		},
	)
	if err != nil {
		return err
	}

	for id, n := range lists {
		if !pages[id] && len(sessions) == 0 {
			v.out.GarbageCount++
			v.out.GarbageBytes += n
		}
	}

	more, err := needsOf(ctx, v.repo, read...)
	if err != nil {
		return err
	}

	for s := range more {
		used[s] = true
	}

	v.countPackGarbage(packs, used, sessions)

	for s, n := range v.listed {
		_, moved := v.moved[s]
		switch {
		case used[s] || moved:
		case sessions[s.Session]:
			v.out.WorkingBytes += n
		default:
			v.out.GarbageCount++
			v.out.GarbageBytes += n
		}
	}

	isFresh := map[repo.ID]bool{}
	for _, id := range fresh {
		isFresh[id] = true
	}

	var unnamed []repo.ID
	for id, n := range manifests {
		if needed[id] || isFresh[id] {
			continue
		}
		unnamed = append(unnamed, id)
		if len(sessions) == 0 {
			v.out.GarbageCount++
			v.out.GarbageBytes += n
		}
	}

	return v.lostHeads(ctx, unnamed, now, sessions)
}

// lostHeads says which volumes have manifests but no head. Heads are never deleted, so those are lost, unless somebody
// is about to make them.
func (v *verifier) lostHeads(ctx context.Context, unnamed []repo.ID, now headset, sessions map[repo.ID]bool) error {
	there := map[repo.ID]bool{}
	for _, h := range now.good {
		if id, err := v.repo.HeadID(h.Head.Name); err == nil {
			there[id] = true
		}
	}

	for _, d := range now.bad {
		there[d.id] = true
	}

	return readManifests(ctx, v.repo, unnamed, func(m repo.Manifest) {
		id, err := v.repo.HeadID(m.Volume)
		if err != nil || there[id] || sessions[m.Session] {
			return
		}
		there[id] = true // it is said once
		v.report(Problem{Volume: m.Volume, Object: "heads/" + id.String(),
			Message: "the volume's list of points is missing, but some of its points still exist"})
	}, func(_ repo.ID, err error) error {
		if isUnreadable(err) {
			return nil // no volume that is there needs it
		}
		return err
	})
}

// addSessions adds those that are there, and says which cannot be read.
func (v *verifier) addSessions(ctx context.Context, found map[repo.ID]bool) error {
	for id, err := range v.repo.SessionIDs(ctx) {
		if err != nil {
			return err
		}
		if found[id] {
			continue
		}

		_, err := v.repo.Session(ctx, id)
		switch {
		case errs.Is(err, errs.NotFound):
		case isUnreadable(err):
			v.report(Problem{Object: "sessions/" + id.String(),
				Message: fmt.Sprintf("prunes delete nothing, because they cannot tell which data this session needs: %v", err)})
		case err != nil:
			return err
		default:
			found[id] = true
		}
	}

	return nil
}

// concludeProblems drops problems with what volumes do not need any more: somebody has removed
// it while we looked.
func (v *verifier) concludeProblems(ctx context.Context) error {
	v.noteSpoilt()
	if len(v.problems) == 0 && len(v.findings) == 0 && len(v.spoilt) == 0 {
		return nil
	}

	spoilt, err := v.spoiltCopies(ctx)
	if err != nil {
		return err
	}

	named := map[repo.ID]bool{}
	readable := map[string]bool{}
	older, tokens := map[string]bool{}, map[string]repo.ID{}
	unread := map[string]bool{} // pages of points
	var streams []repo.ID
	for id, err := range v.repo.HeadIDs(ctx) {
		if err != nil {
			return err
		}

		h, err := v.repo.HeadByID(ctx, id)
		if isUnreadable(err) {
			continue
		}
		if err != nil {
			return err
		}

		readable["heads/"+id.String()] = true
		older["heads/"+id.String()] = v.witness.memory.rollbackReason(&h.Head, true) != ""
		tokens["heads/"+id.String()] = h.Head.Token
		var bad []*pageFault
		for pt, err := range allPoints(ctx, v.repo, h.Head, &bad) {
			if err != nil {
				return err
			}
			named[pt.Manifest] = true
			if pt.Content.Chained() {
				streams = append(streams, pt.Parent)
			}
		}

		for _, f := range bad {
			unread[f.Page.Object()] = true
		}
	}

	for len(streams) > 0 { // and all that they are the difference from
		id := streams[0]
		if streams = streams[1:]; id.IsZero() || named[id] {
			continue
		}
		named[id] = true
		m, err := v.repo.Manifest(ctx, id)
		switch {
		case err == nil:
			streams = append(streams, m.Parent)
		case !isUnreadable(err):
			return err
		}
	}

	v.blameChains(named)
	left := map[string]bool{}
	found := v.listFindings(named)
	tables := map[string]bool{} // with which points are affected
	for _, p := range found {
		tables[p.Object] = strings.HasPrefix(p.Object, "moved/")
	}

	for _, p := range slices.Concat(v.problems, found, spoilt) {
		switch {
		case tables[p.Object] && p.Points == 0:
			continue // it is said with the points
		case left[p.String()]:
			continue
		case !p.manifest.IsZero() && !named[p.manifest]:
			continue
		case p.Rollback && !older[p.Object] && (p.token.IsZero() || tokens[p.Object] != p.token):
			continue
		case readable[p.Object] && !p.Rollback, strings.HasPrefix(p.Object, "points/") && !unread[p.Object]:
			continue // it can be read now, or is not needed any more
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
