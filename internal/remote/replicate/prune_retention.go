package replicate

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// Policy says which points of a volume a prune keeps. A rule that is 0 keeps
// nothing by itself; the zero Policy keeps everything. Whatever the rules say, a
// prune keeps the newest point of a volume, points that were marked to be kept, and
// points without which another one cannot be read.
//
// Hours, days, weeks (from Monday, as in ISO 8601), months and years are those of
// UTC. Ages are counted from the newest point of the volume, not from now: no clock
// is needed, and a volume that is not written to loses no points.
type Policy struct {
	Last    int           `json:"keep_last,omitempty"`    // this many of the newest points
	Hourly  int           `json:"keep_hourly,omitempty"`  // the newest point of each of this many hours that have points
	Daily   int           `json:"keep_daily,omitempty"`   // likewise
	Weekly  int           `json:"keep_weekly,omitempty"`  //
	Monthly int           `json:"keep_monthly,omitempty"` //
	Yearly  int           `json:"keep_yearly,omitempty"`  //
	Within  time.Duration `json:"keep_within,omitempty"`  // points at most this much older than the newest
}

// IsZero reports whether no rule is set, so that everything is kept.
func (p Policy) IsZero() bool { return p == Policy{} }

// Check returns an error of kind Invalid if a rule is negative.
func (p Policy) Check(op string) error {
	for _, r := range []struct {
		name string
		n    int
	}{{"keep-last", p.Last}, {"keep-hourly", p.Hourly}, {"keep-daily", p.Daily}, {"keep-weekly", p.Weekly},
		{"keep-monthly", p.Monthly}, {"keep-yearly", p.Yearly}} {
		if r.n < 0 {
			return errs.New(errs.Invalid, op, "", "--%s must not be negative (got %d)", r.name, r.n).
				WithHint("use 0 to disable the rule")
		}
	}

	if p.Within < 0 {
		return errs.New(errs.Invalid, op, "", "the age within which points are kept must not be negative (got %v)", p.Within)
	}

	return nil
}

// Kept reports which of the points made at these times, the oldest first, the rules keep.
func (p Policy) Kept(times []time.Time) []bool {
	points := make([]policyPoint, len(times))
	for i, at := range times {
		points[i] = policyPoint{seq: uint64(i + 1), at: at}
	}
	return p.selectKept(points, uint64(len(points)), false)
}

// policyPoint is the part of a point that a policy looks at. There may be millions of them.
type policyPoint struct {
	seq      uint64
	manifest repo.ID
	name     string
	at       time.Time
	keep     bool // it was marked to be kept
}

func policyPointOf(pt repo.Point) policyPoint {
	return policyPoint{seq: pt.Seq, manifest: pt.Manifest, name: pt.Name, at: pt.CreatedAt, keep: pt.Keep}
}

// generation returns the number of a generation, and 0 for a snapshot.
func (x policyPoint) generation() int {
	n, _ := strconv.Atoi(x.name)
	return n
}

// selectKept reports for each point of a volume, the oldest first, whether the rules keep it, or
// it is always kept. newestSeq is the number of the newest point. Points that other points need
// are added later: see keepParents.
func (p Policy) selectKept(points []policyPoint, newestSeq uint64, golden bool) []bool {
	keep := make([]bool, len(points))
	isNewest := func(i int) bool { return points[i].seq == newestSeq }
	if len(points) == 0 {
		return keep
	}

	for i, pt := range points {
		keep[i] = pt.keep || p.IsZero() || isNewest(i)
	}

	p.keepLast(keep, points, isNewest, golden)
	p.keepByTime(keep, points)
	return keep
}

// keepLast keeps the last points. These are the ones that were pushed last, because clocks can be
// wrong. But generations are ordered by number, and the newest state is the last one.
func (p Policy) keepLast(keep []bool, points []policyPoint, isNewest func(int) bool, golden bool) {
	last := make([]int, len(points))
	for i := range last {
		last[i] = i
	}

	slices.SortStableFunc(last, func(a, b int) int {
		switch {
		case isNewest(a):
			return 1
		case isNewest(b):
			return -1
		case golden:
			return points[a].generation() - points[b].generation()
		}
		return 0
	})

	for _, i := range last[max(0, len(last)-p.Last):] {
		keep[i] = true
	}
}

// keepByTime keeps the newest point of each hour, day, week, month and year, and those within an
// age.
func (p Policy) keepByTime(keep []bool, points []policyPoint) {
	// Order points by time, newest first: the writer's clock may have been set back, so their own
	// order may differ.
	order := make([]int, len(points))
	for i := range order {
		order[i] = i
	}

	slices.SortStableFunc(order, func(a, b int) int {
		if c := points[b].at.Compare(points[a].at); c != 0 {
			return c
		}
		return b - a
	})

	// Go back through the hours, days and so on until each rule has kept its number.
	for _, rule := range []struct {
		n      int
		bucket func(time.Time) string
	}{
		{p.Hourly, func(t time.Time) string { return t.Format("2006-01-02 15") }},
		{p.Daily, func(t time.Time) string { return t.Format("2006-01-02") }},
		{p.Weekly, func(t time.Time) string { y, w := t.ISOWeek(); return fmt.Sprint(y, " ", w) }},
		{p.Monthly, func(t time.Time) string { return t.Format("2006-01") }},
		{p.Yearly, func(t time.Time) string { return t.Format("2006") }},
	} {
		left, last := rule.n, ""
		for _, i := range order {
			if left == 0 {
				break
			}
			if b := rule.bucket(points[i].at.UTC()); b != last {
				keep[i], last = true, b
				left--
			}
		}
	}

	if p.Within > 0 {
		newest := points[order[0]].at
		for i, pt := range points {
			if newest.Sub(pt.at) <= p.Within {
				keep[i] = true
			}
		}
	}
}
