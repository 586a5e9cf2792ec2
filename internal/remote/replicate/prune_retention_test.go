package replicate

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
)

// at makes points with these times (UTC), named by their place.
func at(t *testing.T, times ...string) []repo.Point {
	t.Helper()
	var out []repo.Point
	for i, s := range times {
		when, err := time.Parse("2006-01-02 15:04", s)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, repo.Point{Seq: uint64(i + 1), Name: fmt.Sprint(i), CreatedAt: when,
			StateOrder: repo.StateOrder{Order: int64(i + 1)}})
	}
	return out
}

func TestPolicyKeeps(t *testing.T) {
	// A year and a half of points, ever denser.
	points := at(t,
		"2024-11-30 10:00", // 0
		"2024-12-31 23:59", // 1: ISO week 1 of 2025
		"2025-01-01 00:00", // 2: the same week, another year
		"2025-03-31 23:00", // 3
		"2025-04-01 00:30", // 4
		"2025-05-05 08:00", // 5: a Monday
		"2025-05-06 07:59", // 6
		"2025-05-06 08:00", // 7
		"2025-05-06 08:59", // 8
		"2025-05-06 09:00", // 9
	)
	now := points[9].CreatedAt.Add(time.Hour)
	kept := append([]repo.Point{}, points...)
	kept[3].Keep = true
	back := append([]repo.Point{}, points...) // the clock was set back before the last
	back[9].CreatedAt = points[0].CreatedAt.Add(-time.Hour)
	old := append([]repo.Point{}, points...) // and was right again after one
	old[6].CreatedAt = points[0].CreatedAt.Add(-time.Hour)
	ahead := append([]repo.Point{}, points...) // the clocks of two were ahead, by different times
	ahead[4].CreatedAt, ahead[5].CreatedAt = points[9].CreatedAt.AddDate(2, 0, 0), points[9].CreatedAt.AddDate(1, 0, 0)
	lastAhead := append([]repo.Point{}, points...) // the clock was ahead when the last was taken
	lastAhead[9].CreatedAt = points[9].CreatedAt.AddDate(1, 0, 0)
	late := append([]repo.Point{}, points...) // the oldest state was pushed last
	late = append(late[1:], late[0])
	for _, c := range []struct {
		name   string
		policy Policy
		points []repo.Point
		want   string
	}{
		{"nothing said", Policy{}, points, "0 1 2 3 4 5 6 7 8 9"},
		{"no points", Policy{Last: 1}, nil, ""},
		{"last", Policy{Last: 3}, points, "7 8 9"},
		{"last of more than there are", Policy{Last: 30}, points, "0 1 2 3 4 5 6 7 8 9"},
		{"hourly", Policy{Hourly: 3}, points, "6 8 9"},
		{"daily", Policy{Daily: 3}, points, "4 5 9"},
		{"weekly", Policy{Weekly: 3}, points, "2 4 9"},
		{"monthly", Policy{Monthly: 4}, points, "2 3 4 9"},
		{"yearly", Policy{Yearly: 9}, points, "1 9"},
		{"within", Policy{Within: time.Hour}, points, "7 8 9"},
		{"within, to the minute", Policy{Within: 61 * time.Minute}, points, "6 7 8 9"},
		{"several", Policy{Last: 2, Daily: 2, Yearly: 2}, points, "1 5 8 9"},
		{"asked to keep", Policy{Last: 1}, kept, "3 9"},
		{"the newest stays, whatever its time", Policy{Hourly: 1}, back, "9"},
		{"hourly, with the clock set back", Policy{Hourly: 3}, back, "0 1 2 3 4 5 6 8 9"}, // what it says is unknown
		{"within, with the clock set back", Policy{Within: time.Minute}, back, "0 1 2 3 4 5 6 7 8 9"},
		{"hourly, with the clock set back before", Policy{Hourly: 5}, old, "3 4 5 8 9"},
		{"within, with the clock set back before", Policy{Within: 61 * time.Minute}, old, "7 8 9"},
		{"within a day, with the clock set back before", Policy{Within: 25 * time.Hour}, old, "5 6 7 8 9"},
		{"daily, with clocks ahead", Policy{Daily: 3}, ahead, "2 3 4 5 9"},
		{"monthly, with clocks ahead", Policy{Monthly: 1}, ahead, "9"},
		{"within, with clocks ahead", Policy{Within: 25 * time.Hour}, ahead, "4 5 6 7 8 9"},
		{"hourly, with the clock ahead", Policy{Hourly: 2}, lastAhead, "6 8 9"},
		{"within, with the clock ahead", Policy{Within: time.Hour}, lastAhead, "6 7 8 9"},
		{"last, of which one was pushed late", Policy{Last: 2}, late, "8 9"},
		{"within, of which one was pushed late", Policy{Within: time.Hour}, late, "7 8 9"},
	} {
		var got []string
		var points []policyPoint
		newest := uint64(0)
		for i, pt := range c.points {
			pt.Seq = uint64(i + 1)
			if points = append(points, policyPointOf(pt)); pt.Order == 10 {
				newest = pt.Seq
			}
		}
		for i, k := range c.policy.selectKept(points, newest, now) {
			if k {
				got = append(got, c.points[i].Name)
			}
		}
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("%s: kept %q, want %q", c.name, s, c.want)
		}
	}
}

// TestPolicyWithWrongClocks: whatever the dates are, and in whatever order states were pushed, the rules keep what they
// would keep if points had no order, only dates, except of points that are dated after the newest state.
func TestPolicyWithWrongClocks(t *testing.T) {
	r := faulttest.Rand(t)
	for range 3000 {
		now := time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)
		points, newest := make([]policyPoint, 1+r.IntN(12)), uint64(0)
		for i, place := range r.Perm(len(points)) {
			if place == len(points)-1 {
				newest = uint64(i + 1)
			}
			points[i] = policyPoint{seq: uint64(i + 1), order: repo.StateOrder{Order: int64(place + 1)},
				at: now.Add(time.Duration(r.Int64N(int64(200*24*time.Hour))) - time.Duration(180*24*time.Hour))}
		}
		rule := Policy{Hourly: r.IntN(4), Daily: r.IntN(4), Monthly: r.IntN(4),
			Within: time.Duration(r.IntN(3)) * 40 * 24 * time.Hour}
		kept := rule.selectKept(points, newest, now)
		byState := slices.SortedFunc(slices.Values(points), func(a, b policyPoint) int { return a.order.Compare(b.order) })
		limit := newestDate(len(points), func(i int) time.Time { return byState[i].at }, now)

		byDate := slices.SortedFunc(slices.Values(points), func(a, b policyPoint) int { return b.at.Compare(a.at) })
		for _, b := range []struct {
			n      int
			layout string
		}{{rule.Hourly, "2006010215"}, {rule.Daily, "20060102"}, {rule.Monthly, "200601"}} {
			last, left := "", b.n
			for _, x := range byDate {
				if f := x.at.Format(b.layout); f != last && left > 0 {
					last, left = f, left-1
					if !kept[x.seq-1] && !x.at.After(limit) {
						t.Fatalf("%+v of %v lost %+v", rule, points, x)
					}
				}
			}
		}
		for _, x := range points {
			if rule.Within > 0 && byDate[0].at.Sub(x.at) <= rule.Within && !x.at.After(limit) && !kept[x.seq-1] {
				t.Fatalf("%+v of %v lost %+v", rule, points, x)
			}
		}
	}
}

func TestPolicyCheck(t *testing.T) {
	for _, p := range []Policy{{Last: -1}, {Hourly: -1}, {Daily: -1}, {Weekly: -1}, {Monthly: -1}, {Yearly: -1},
		{Within: -1}} {
		if err := p.Check("prune"); !errs.Is(err, errs.Invalid) {
			t.Errorf("%+v: %v, want it to be invalid", p, err)
		}
	}
	if err := (Policy{Last: 1, Within: time.Hour}).Check("prune"); err != nil {
		t.Error(err)
	}
}
