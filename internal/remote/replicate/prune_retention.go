package replicate

import (
	"cmp"
	"fmt"
	"slices"
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
// UTC. Ages are counted from the newest point of the volume, not from now, so that a
// volume that is not written to loses no points. A clock that was ahead costs no point:
// one that is dated later than the newest, or than now, takes no other's place. One that
// is dated too early counts as a point of that hour, day, …
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

// policyPoint is the part of a point that a policy looks at. There may be millions of them.
type policyPoint struct {
	seq      uint64
	order    repo.StateOrder
	manifest repo.ID
	name     string
	at       time.Time
	keep     bool // it was marked to be kept
}

func policyPointOf(pt repo.Point) policyPoint {
	return policyPoint{pt.Seq, pt.StateOrder, pt.Manifest, pt.Name, pt.CreatedAt, pt.Keep}
}

// selectKept reports for each point of a volume, in the order of the list, whether the rules keep it, or it is always
// kept. newestSeq is the number of the newest point. Points that other points need are added later: see keepParents.
func (p Policy) selectKept(points []policyPoint, newestSeq uint64, now time.Time) []bool {
	keep := make([]bool, len(points))
	if len(points) == 0 {
		return keep
	}
	isNewest := func(i int) bool { return points[i].seq == newestSeq }
	for i, pt := range points {
		keep[i] = pt.keep || p.IsZero() || isNewest(i)
	}

	// Order the points by state, the oldest first.
	order := make([]int, len(points))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case isNewest(a):
			return 1
		case isNewest(b):
			return -1
		}
		return points[a].order.Compare(points[b].order)
	})

	for _, i := range order[max(0, len(order)-p.Last):] {
		keep[i] = true
	}

	p.keepByTime(keep, points, order, now)
	return keep
}

// keepByTime keeps the newest point of each hour, day, week, month and year, and those within an age. order has the
// points by state, the oldest first.
//
// Dates come from clocks that may have been wrong. A point that is dated later than the newest state, or than now, is
// from the future: its date says nothing. Others may be wrong, too, but then a rule keeps more than it should.
func (p Policy) keepByTime(keep []bool, points []policyPoint, order []int, now time.Time) {
	at := func(n int) time.Time { return points[order[n]].at }
	newest := newestDate(len(order), at, now)
	future := func(n int) bool { return at(n).After(newest) }

	// Go back through the hours, days and so on until each rule has kept its number.
	byDate := make([]int, 0, len(order))
	for n := range order {
		if !future(n) {
			byDate = append(byDate, n)
		}
	}
	slices.SortStableFunc(byDate, func(a, b int) int { return cmp.Or(at(b).Compare(at(a)), b-a) })
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
		newer := make([]bool, len(order)) // it is one of those that the rule has kept
		for _, n := range byDate {
			if left == 0 {
				break
			}
			if b := rule.bucket(at(n).UTC()); b != last {
				keep[order[n]], newer[n], last = true, true, b
				left--
			}
		}

		// What is from the future takes no other's place. It stays until the rule keeps its number of newer states.
		seen, kept := map[string]bool{}, 0
		for n := range slices.Backward(order) {
			if newer[n] {
				kept++
			}
			if b := rule.bucket(at(n).UTC()); future(n) && kept < rule.n && !seen[b] {
				keep[order[n]], seen[b] = true, true
			}
		}
	}

	if p.Within > 0 {
		for n, date := range datesOf(len(order), at, newest) {
			keep[order[n]] = keep[order[n]] || newest.Sub(date) <= p.Within
		}
	}
}

// newestDate returns the date from which ages count: that of the newest of n states that is not dated after now. If all
// are, the clock of this host is wrong, and it is the date of the newest state.
func newestDate(n int, at func(int) time.Time, now time.Time) time.Time {
	for i := n - 1; i >= 0; i-- {
		if !at(i).After(now) {
			return at(i)
		}
	}
	return at(n - 1)
}

// datesOf returns when each of n states was taken at the latest, the oldest state first: no state is older than one
// before it, and one from the future, dated after newest, is as old as the next.
func datesOf(n int, at func(int) time.Time, newest time.Time) []time.Time {
	out := make([]time.Time, n)
	var last time.Time
	for i := range n {
		if !at(i).After(newest) && at(i).After(last) {
			last = at(i)
		}
		out[i] = last
	}
	next := newest
	for i := n - 1; i >= 0; i-- {
		if at(i).After(newest) {
			out[i] = next
		}
		next = out[i]
	}
	return out
}
