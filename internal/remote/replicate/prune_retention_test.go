package replicate

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
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
		out = append(out, repo.Point{Seq: uint64(i + 1), Name: fmt.Sprint(i), CreatedAt: when})
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
	kept := append([]repo.Point{}, points...)
	kept[3].Keep = true
	back := append([]repo.Point{}, points...) // the clock was set back before the last
	back[9].CreatedAt = points[0].CreatedAt.Add(-time.Hour)
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
		{"the newest stays, whatever its time", Policy{Hourly: 1}, back, "8 9"},
		{"within, with the clock set back", Policy{Within: time.Minute}, back, "8 9"},
	} {
		var got []string
		var points []policyPoint
		for i, pt := range c.points {
			pt.Seq = uint64(i + 1)
			points = append(points, policyPointOf(pt))
		}
		for i, k := range c.policy.selectKept(points, uint64(len(points)), false) {
			if k {
				got = append(got, c.points[i].Name)
			}
		}
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("%s: kept %q, want %q", c.name, s, c.want)
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
