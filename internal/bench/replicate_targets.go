package bench

import (
	"fmt"
	"slices"
)

// What the targets of the design are.
const (
	maxSmallPush       = 0.060
	smallPush          = 1 << 20 // bytes appended
	minOverLitestream  = 12
	minOverRestic      = 1
	minOverSlowestPart = 0.8
	// of the time of a small push from the smallest to the largest volume: flat, with the noise of the figures
	maxGrowth = 1.3
)

// Median is the middle of some durations, 0 of none.
func Median(s []float64) float64 {
	if len(s) == 0 {
		return 0
	}
	s = slices.Sorted(slices.Values(s))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

// transfer is what a contender did in the scenario, nil if it was not measured.
func (s *ReplicateScenario) transfer(name string) *Transfer {
	for i := range s.Transfers {
		if t := &s.Transfers[i]; t.Name == name && t.Skipped == "" {
			return t
		}
	}
	return nil
}

// judge compares the figures with the targets, at the largest data of each kind.
func (r *ReplicateReport) judge() {
	var small, least, large *ReplicateScenario
	for i := range r.Scenarios {
		s := &r.Scenarios[i]
		if s.Skipped != "" || s.transfer("pando") == nil {
			continue
		}

		if s.Append == smallPush {
			if small == nil || s.Base > small.Base {
				small = s
			}
			if least == nil || s.Base < least.Base {
				least = s
			}
		}

		if large == nil || s.Base > large.Base {
			large = s
		}
	}

	r.Targets = append(r.Targets, judgeSmall(least, small)...)
	if large == nil {
		return
	}

	own, at := large.transfer("pando"), fmt.Sprintf("%d MiB and %d growths", large.Base>>20,
		len(large.transfer("pando").Appends))
	beside := func(name string, least float64) {
		measured, reason := 0.0, name+" was not measured"
		if t := large.transfer(name); t != nil {
			measured, reason = over(t.RestoreAll, own.RestoreAll), ""
		}
		r.Targets = append(r.Targets, newTarget("restore by "+name+" / by pando", MoreThan, least, Ratio, at, measured,
			reason))
	}

	beside("litestream", minOverLitestream)
	beside("restic", minOverRestic)
	reason := ""
	if large.transfer("pipeline") == nil {
		reason = "the pipeline was not measured"
	}

	r.Targets = append(r.Targets, newTarget("the slower of disk write and decode / restore by pando", AtLeast,
		minOverSlowestPart, Ratio, at,
		over(max(large.Decode, large.Disk), own.RestoreAll), reason))
}

func judgeSmall(least, small *ReplicateScenario) []Target {
	if small == nil {
		reason := "no scenario grows by 1 MiB: use --size 10G+1M"
		return []Target{newTarget("push of 1 MiB more, p50", LessThan, maxSmallPush, Seconds, "", 0, reason)}
	}

	p50 := Median(small.transfer("pando").Appends)
	out := []Target{newTarget("push of 1 MiB more, p50", LessThan, maxSmallPush, Seconds,
		fmt.Sprintf("a volume with %d MiB", small.Base>>20), p50, "")}
	if least.Base < small.Base {
		out = append(out, newTarget("push of 1 MiB more, large volume / small, p50", AtMost, maxGrowth, Ratio,
			fmt.Sprintf("%d / %d MiB", small.Base>>20, least.Base>>20), over(p50, Median(least.transfer("pando").Appends)), ""))
	}

	return out
}
