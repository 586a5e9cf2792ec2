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
// nothing by itself; the zero Policy keeps everything. Whatever the rules say, the
// newest point of a volume stays, and so does what somebody asked to keep and what
// another point cannot be read without.
//
// Hours, days, weeks (from Monday, as ISO 8601 counts them), months and years are
// those of UTC. Ages are counted from the newest point of the volume, not from now:
// no clock is asked, and a volume that nobody writes loses nothing by waiting.
type Policy struct {
	Last    int           `json:"keep_last,omitempty"`    // the newest
	Hourly  int           `json:"keep_hourly,omitempty"`  // the newest of each of so many hours that have one
	Daily   int           `json:"keep_daily,omitempty"`   // and so on
	Weekly  int           `json:"keep_weekly,omitempty"`  //
	Monthly int           `json:"keep_monthly,omitempty"` //
	Yearly  int           `json:"keep_yearly,omitempty"`  //
	Within  time.Duration `json:"keep_within,omitempty"`  // that are at most so much older than the newest
}

// IsZero reports whether no rule is set, so that everything is kept.
func (p Policy) IsZero() bool { return p == Policy{} }

// Check reports what is wrong with the rules. Invalid.
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

// retained is what a policy asks of a point. There may be millions of them.
type retained struct {
	seq      uint64
	manifest repo.ID
	name     string
	at       time.Time
	keep     bool // somebody asked for that
}

func retainedOf(pt repo.Point) retained {
	return retained{seq: pt.Seq, manifest: pt.Manifest, name: pt.Name, at: pt.CreatedAt, keep: pt.Keep}
}

// generation is the number of a generation.
func (x retained) generation() int {
	n, _ := strconv.Atoi(x.name)
	return n
}

// selectKept says for each point of a volume, the oldest first, whether it stays by the
// rules alone or by what is always kept of one volume. newest is the number of the newest.
func (p Policy) selectKept(points []retained, newestSeq uint64, golden bool) []bool {
	keep := make([]bool, len(points))
	isNewest := func(i int) bool { return points[i].seq == newestSeq }
	if len(points) == 0 {
		return keep
	}

	for i, pt := range points {
		keep[i] = pt.keep || p.IsZero() || isNewest(i)
	}

	// The last ones are those that were pushed last, as clocks go wrong; but an older
	// generation that was pushed later is older, and the newest state is the last one.
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

	// By time: the writer's clock may have been set back, so not in the order of
	// the points.
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

	newest := points[order[0]].at
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
		for i, pt := range points {
			if newest.Sub(pt.at) <= p.Within {
				keep[i] = true
			}
		}
	}

	return keep
}
