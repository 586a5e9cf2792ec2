package syncbench

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/observe/proof"
)

// writeback is the longest of the usual cycles in which kernels write what was left in memory: 30 s of
// the page cache (dirty_expire_centisecs) and of btrfs, 5 s of ext4's journal and of ZFS.
const writeback = 30 * time.Second

// verdict says what the runs come to. note is of the search; notDurable as in Config.
func verdict(r *Report, note, notDurable string) Verdict {
	v := Verdict{Result: Pass, Words: []string{}}
	for i, run := range r.Runs {
		if run.Proof.Result == proof.OK {
			continue
		}

		prefix := ""
		if len(r.Runs) > 1 {
			prefix = fmt.Sprintf("run %d: ", i+1)
		}
		if v.Result == Pass {
			v.Layer = run.Proof.Layer
		}

		v.Result = Failed
		if len(run.Proof.Reasons) == 0 {
			v.Words = append(v.Words, prefix+"could not prove that synced data reached the disk")
		}

		for _, reason := range run.Proof.Reasons {
			v.Words = append(v.Words, prefix+reason)
		}
	}

	if v.Result == Pass {
		for _, run := range r.Runs {
			for _, reason := range run.Proof.Reasons {
				if !slices.Contains(v.Words, reason) {
					v.Words = append(v.Words, reason)
				}
			}
		}
		if len(v.Words) == 0 {
			v.Words = append(v.Words, "every sync reached the disk")
		}
	}

	if notDurable != "" {
		v = v.byDesign(notDurable)
	}

	v.Words = append(v.Words, figures(r)...)
	if note != "" {
		v.Words = append(v.Words, note)
	}

	return v
}

// byDesign returns the verdict on a path of which nothing is durable, for the reason why. The remedies that the proofs
// name are not wanted there; they stay in the proofs.
func (v Verdict) byDesign(why string) Verdict {
	out := Verdict{Result: Failed, Layer: v.Layer, ByDesign: why}
	switch {
	case v.Result == Pass:
		out.Words = []string{"the syncs of these runs reached the disk, but the data is not kept"}
	case v.Layer != "":
		out.Words = []string{"flushes are missing from " + v.Layer + " on"}
	default:
		out.Words = []string{"could not prove that synced data reached the disk"}
	}
	return out
}

// figures is what to know about the figures.
func figures(r *Report) []string {
	var out []string
	length := words(r.Seconds)
	switch {
	case r.Quick:
		out = append(out, fmt.Sprintf("a quick run of %s, shorter than a writeback cycle, does not measure speed", length))
	case r.Seconds < 2*writeback.Seconds():
		out = append(out, fmt.Sprintf("runs of %s, shorter than two writeback cycles of %s, do not measure speed",
			length, words(writeback.Seconds())))
	}

	few, stalled := int64(math.MaxInt64), 0
	for _, run := range r.Runs {
		few = min(few, run.Syncs)
		stalled += len(run.Stalls)
	}

	if names := indicative(few); len(names) > 0 {
		what := strings.Replace(names[0], "p999", "p99.9", 1)
		if len(names) == 1 {
			what += " is"
		} else {
			what += " and above are"
		}
		out = append(out, fmt.Sprintf("%s indicative: fewer than 10 of %d syncs in a run took longer", what, few))
	}

	if stalled > 0 {
		out = append(out, errs.Plural(stalled, "stall")+": see the time line")
	}

	return out
}
