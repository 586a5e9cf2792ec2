package replicate

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

// RepairedPoint is a point with missing or damaged data.
type RepairedPoint struct {
	Volume        string `json:"volume"`         // name of the volume
	Point         string `json:"point"`          // name of the point
	Repaired      bool   `json:"repaired"`       // the point is complete again
	Ref           string `json:"ref,omitempty"`  // reference to the object of this pool that it was repaired from
	UploadedBytes int64  `json:"uploaded_bytes"` // bytes that were sent for it
	// host that writes the volume: only its pool may still have the data
	Host   string `json:"host,omitempty"`
	Reason string `json:"reason,omitempty"` // why the point is not complete
}

// VerifyRepair calls Verify, and repairs damaged points whose snapshots or generations are in this pool: it pushes them
// again, in their places. Then it verifies again. The result has the remaining problems, and the repaired points.
//
// Points whose data this pool does not have are returned with the host that writes the volume. Lists of points are
// repaired by [Repair].
func VerifyRepair(ctx context.Context, e *engine.Engine, r *Remote, q VerifyRequest) (_ *Verified, err error) {
	ctx, end := e.Transfer().Begin(ctx, opVerify)
	defer end(&err)

	out, err := Verify(ctx, e, r, q)
	if err != nil || out.TotalProblems == 0 {
		return out, err
	}

	// Repair tables first: then data that these locate need not be sent again.
	progress.From(ctx).Start(progress.Repairing, 0, 0)
	q.Seed = out.Seed // check the same sample again
	var found []RepairedPoint
	if out, found, err = verifyTables(ctx, e, r, q, out); err != nil {
		return nil, err
	}

	// Push the points again, and verify again.
	done, err := repairPoints(ctx, e, r, q, out.Problems)
	if err != nil {
		return nil, err
	}

	if slices.ContainsFunc(done, func(d RepairedPoint) bool { return d.Repaired }) {
		if out, err = Verify(ctx, e, r, q); err != nil {
			return nil, err
		}
	}

	// Points that still have problems are not repaired.
	done = append(found, done...)
	left := affectedPoints(out.Problems)
	for i, d := range done {
		if d.Repaired && slices.Contains(left[d.Volume], d.Point) {
			done[i].Repaired, done[i].Reason = false, "it was sent again, but is still incomplete"
		}
	}

	out.Repaired = done
	return out, nil
}

// verifyTables rebuilds tables of moved data if verify found that some are damaged or missing. It returns the result of
// another verify, and the points that are complete again.
func verifyTables(
	ctx context.Context, e *engine.Engine, r *Remote, q VerifyRequest, was *Verified,
) (now *Verified, whole []RepairedPoint, err error) {
	ofTable := slices.DeleteFunc(slices.Clone(was.Problems), func(p Problem) bool {
		return !strings.HasPrefix(p.Object, "moved/")
	})
	if len(ofTable) == 0 {
		return was, nil, nil
	}

	rp, err := r.Open(ctx)
	if err != nil {
		return nil, nil, err
	}

	defer rp.Close()

	if err := (&repairer{repo: rp, out: &Repaired{}}).repairTables(ctx); err != nil {
		return nil, nil, err
	}

	if now, err = Verify(ctx, e, r, q); err != nil {
		return nil, nil, err
	}

	// Points that only these tables affected are repaired.
	left, affected := affectedPoints(now.Problems), affectedPoints(ofTable)
	for _, volume := range slices.Sorted(maps.Keys(affected)) {
		for _, point := range affected[volume] {
			if !slices.Contains(left[volume], point) {
				whole = append(whole, RepairedPoint{Volume: volume, Point: point, Repaired: true})
			}
		}
	}

	return now, whole, nil
}

// affectedPoints returns the names of the points that problems affect, by volume, in order.
func affectedPoints(problems []Problem) map[string][]string {
	out := map[string][]string{}
	add := func(volume, point string) {
		if volume != "" && point != "" && !slices.Contains(out[volume], point) {
			out[volume] = append(out[volume], point)
		}
	}

	for _, p := range problems {
		add(p.Volume, p.Point)
		for _, name := range p.Affected {
			volume, point, _ := strings.Cut(name, "@")
			add(volume, point)
		}
	}

	for _, points := range out {
		slices.Sort(points)
	}

	return out
}

// repairPoints pushes the affected points again that this pool has.
func repairPoints(
	ctx context.Context, e *engine.Engine, r *Remote, q VerifyRequest, problems []Problem,
) ([]RepairedPoint, error) {
	p := &pusher{e: e.Transfer(), r: r, q: PushRequest{NoOrigin: true}, bad: map[repo.Segment]bool{}}
	if err := p.openRepo(ctx); err != nil {
		return nil, err
	}

	defer p.repo.Close()
	for _, x := range problems {
		if s, is := segmentOf(x.Object); is {
			p.bad[s] = true
		}
	}

	affected := affectedPoints(problems)
	out := []RepairedPoint{}
	for _, volume := range slices.Sorted(maps.Keys(affected)) {
		done, err := p.repairVolume(ctx, volume, affected[volume])
		if err != nil {
			return nil, err
		}
		out = append(out, done...)
	}

	return out, nil
}

// segmentOf returns the segment whose object a problem names, and false if it names another object.
func segmentOf(object string) (repo.Segment, bool) {
	name, is := strings.CutPrefix(object, "segments/")
	session, number, cut := strings.Cut(name, "/")
	id, err := repo.ParseID(session)
	n, nerr := strconv.ParseUint(number, 10, 32)
	return repo.Segment{Session: id, N: uint32(n)}, is && cut && err == nil && nerr == nil
}

// repairVolume pushes points of one volume again, the oldest first, so that newer ones can be based on them.
func (p *pusher) repairVolume(ctx context.Context, volume string, names []string) (out []RepairedPoint, err error) {
	h, err := p.readHead(ctx, volume)
	if err != nil {
		for _, n := range names {
			out = append(out, RepairedPoint{Volume: volume, Point: n, Reason: err.Error()})
		}
		return out, ctx.Err()
	}

	links, err := p.loadLinks(ctx)
	if err != nil {
		return nil, err
	}

	var unread []*pageFault // reported by verify
	for at, err := range allPoints(ctx, p.repo, h.Head, &unread) {
		if err != nil {
			return nil, err
		}
		if !slices.Contains(names, at.Name) {
			continue
		}
		d := p.repairPoint(ctx, h, at, links)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		out = append(out, d)
	}

	return out, nil
}

// repairPoint pushes a point again from the object of this pool that it was pushed from, or from one that was pulled
// from it.
func (p *pusher) repairPoint(ctx context.Context, h headState, at repo.Point, l links) RepairedPoint {
	out := RepairedPoint{Volume: h.Name, Point: at.Name, Host: h.Writer.Host, Reason: "this pool does not have its data"}
	if h.Writer.Pool == p.me.Pool {
		out.Host, out.Reason = "", "this pool, which writes the volume, no longer has its data"
	}

	// Find the objects that have its content.
	objects := []driver.ObjectID{driver.ObjectID(at.Source)}
	for _, o := range l.objects {
		if slices.Contains(l.manifest[o], at.Manifest) && o != objects[0] {
			objects = append(objects, o)
		}
	}

	for _, o := range objects {
		pt, err := p.e.PointByID(ctx, o)
		if err != nil {
			continue // it is not in this pool
		}
		sent, err := p.pushAgain(ctx, h.Name, pt)
		out.UploadedBytes += sent
		if err == nil {
			out.Repaired, out.Ref, out.Host, out.Reason = true, pt.Ref, "", ""
			return out
		}
		if out.Ref == "" { // report the first failure
			out.Ref, out.Reason = pt.Ref, err.Error()
		}
	}

	return out
}

// pushAgain pushes an object to a head that already lists it, and returns the number of bytes sent.
func (p *pusher) pushAgain(ctx context.Context, head string, pt engine.Point) (sent int64, err error) {
	what, err := ref.Parse(opVerify, pt.Ref)
	if err != nil {
		return 0, err
	}

	if p.q.As, err = ref.ParseName(opVerify, head); err != nil {
		return 0, err
	}

	before := len(p.pushed)
	err = p.pushTarget(ctx, target{ref: what})
	for _, d := range p.pushed[before:] {
		sent += d.UploadedBytes
	}

	return sent, err
}

// Left says in one line why a point is not complete, and which host may be able to repair it.
func (d RepairedPoint) Left() string {
	if d.Host == "" {
		return d.Reason
	}
	return fmt.Sprintf("%s; only %s, which writes the volume, could restore it", d.Reason, d.Host)
}
