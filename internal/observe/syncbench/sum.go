package syncbench

import (
	"slices"
	"strings"

	"pando/internal/observe/proof"
)

// LayerSum is what arrived at a layer in all runs together. Counts that were not taken
// in one of them, or cannot be, are -1; the result is the worst.
type LayerSum struct {
	proof.LayerProof
	Failures []string // what is said of the layer in runs in which it failed, each once
}

// SumLayers adds up the runs, layer by layer, from the top down.
func SumLayers(runs []Run) (out []*LayerSum) {
	for i := range runs {
		for _, l := range runs[i].Proof.Layers {
			if !l.Device {
				l.Flushes, l.FUA, l.OthersFlushes, l.Writes, l.WrittenBytes = -1, -1, -1, -1, -1
			}

			at := slices.IndexFunc(out, func(s *LayerSum) bool { return s.Name == l.Name && s.Depth == l.Depth })
			if at < 0 {
				out = append(out, &LayerSum{LayerProof: l})
				at = len(out) - 1
			} else {
				out[at].add(l)
			}

			if (l.Result == proof.Fail || l.Result == proof.Unknown) && l.Words != "" &&
				!slices.Contains(out[at].Failures, l.Words) {
				out[at].Failures = append(out[at].Failures, l.Words)
			}
		}
	}

	return out
}

func (s *LayerSum) add(l proof.LayerProof) {
	for _, v := range []struct {
		sum  *int64
		more int64
	}{{&s.Flushes, l.Flushes}, {&s.FUA, l.FUA}, {&s.OthersFlushes, l.OthersFlushes}, {&s.Writes,
		l.Writes}, {&s.WrittenBytes, l.WrittenBytes}} {
		if *v.sum < 0 || v.more < 0 {
			*v.sum = -1
		} else {
			*v.sum += v.more
		}
	}

	s.Needed += l.Needed
	order := []proof.Result{proof.NotNeeded, proof.OK, proof.Unknown, proof.Fail} // the worst last
	if slices.Index(order, l.Result) > slices.Index(order, s.Result) {
		s.Result = l.Result
	}
}

// shownReasons is how many words of a verdict are shown whatever they are of.
const shownReasons = 4

// Short are the words of a verdict for people who have the rest below: if there are
// many, those of runs after the first that failed are left out, and those that differ from
// others in numbers only. more is how many.
func (v *Verdict) Short() (words []string, more int) {
	if len(v.Words) <= shownReasons {
		return v.Words, 0
	}

	first := ""
	said := map[string]bool{} // without its numbers
	for _, w := range v.Words {
		essence := strings.Map(func(r rune) rune {
			if r >= '0' && r <= '9' || r == ',' {
				return -1
			}
			return r
		}, w)

		if said[essence] { // the same of another run
			more++
			continue
		}

		said[essence] = true
		run, _, _ := strings.Cut(w, ": ")
		switch n, isRun := strings.CutPrefix(run, "run "); {
		case !isRun || strings.Trim(n, "0123456789") != "" || run == first:
		case first == "":
			first = run
		default:
			more++
			continue
		}

		words = append(words, w)
	}

	return words, more
}
