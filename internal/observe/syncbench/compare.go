package syncbench

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"pando/internal/base/errs"
)

// Words of a Change.
const (
	Faster = "faster"
	Slower = "slower"
	Same   = "no change beyond noise"
	Unsure = "cannot say" // the reports do not hold what it would take
)

// Bases of a Comparison's noise.
const (
	BetweenRuns = "runs"      // the spread of the runs of each report
	InsideRuns  = "time line" // the ups and downs inside the runs: one of the reports has only one
)

// What a change must exceed whatever the spread says.
const (
	// binWidth is that of fio's bins, as a part of their value: no percentile is known better.
	binWidth = 1.0 / 64
	// leastNoise is less than what happens between runs on a quiet machine.
	leastNoise = 0.02
	// blindNoise is the least if there is one run only: what differs from run to
	// run (where the files lie, what else the device does) cannot be seen then. It
	// would be right if runs spread by a standard deviation of 6 %.
	blindNoise = 0.25
)

// confidence of each figure's noise: with six figures, about one comparison in twenty of
// things that are equal finds a change in some figure.
const confidence = 0.99

// batches of a time line; each must have at least batchLength moments.
const (
	batches     = 10
	batchLength = 2
)

// Comparison says what changed from report A to report B. Its JSON form is stable.
type Comparison struct {
	Kind   string `json:"kind"` // "pando bench compare"
	Format int    `json:"format"`
	A      Side   `json:"a"`
	B      Side   `json:"b"`
	// Differences of what was done: with any of them the figures are not of the same
	// thing, and it was forced.
	Differences []string `json:"differences"`
	// Unproven says which report failed its proof: its figures are no basis.
	Unproven []string `json:"unproven"`
	// Warnings are other things that differ, or make the figures weak.
	Warnings   []string `json:"warnings"`
	Basis      string   `json:"basis"`      // of the noise: "runs" or "time line"
	Confidence float64  `json:"confidence"` // of the noise of each figure
	Changes    []Change `json:"changes"`
	Summary    string   `json:"summary"` // a sentence without a full stop
}

// Side is one of the two reports.
type Side struct {
	Name    string  `json:"name"` // the file
	Started string  `json:"started"`
	Host    string  `json:"host"`
	Path    string  `json:"path"`
	Runs    int     `json:"runs"`
	Seconds float64 `json:"seconds"` // of each run
	Verdict string  `json:"verdict"`
}

// Change is one figure in both reports.
type Change struct {
	Figure string  `json:"figure"` // "syncs/s", "p50", "p95", "p99", "p99.9", "max"
	Unit   string  `json:"unit"`   // "1/s" or "s"
	A      float64 `json:"a"`      // geometric mean of the runs
	B      float64 `json:"b"`
	Ratio  float64 `json:"ratio"` // B / A; 0: there is none
	// Noise is what the ratio must exceed, either way, to count as a change: 0.05
	// means above 1.05 or below 1/1.05. -1: not known.
	Noise   float64 `json:"noise"`
	Verdict string  `json:"verdict"`
	Why     string  `json:"why,omitempty"` // of "cannot say"
}

// figure is one of what is compared.
type figure struct {
	name, unit  string
	higherIsBad bool
	binned      bool // it is a bin of a histogram
	of          func(*Run) float64
	// moment is the figure of one interval, whose ups and downs tell how uncertain
	// that of the run is; nil: there is none.
	moment func(*Moment) float64
	why    string // there is none
}

var compared = []figure{
	{name: "syncs/s", unit: "1/s", of: func(r *Run) float64 {
		return r.SyncsPerSecond
	}, moment: func(m *Moment) float64 { return m.Syncs }},
	{name: "p50", unit: "s", higherIsBad: true, binned: true, of: func(r *Run) float64 {
		return r.Sync.P50
	}, moment: func(m *Moment) float64 { return m.P50 }},
	// A time line has no p95. It moves less than p99, so this errs on the safe side.
	{name: "p95", unit: "s", higherIsBad: true, binned: true, of: func(r *Run) float64 {
		return r.Sync.P95
	}, moment: func(m *Moment) float64 { return m.P99 }},
	{name: "p99", unit: "s", higherIsBad: true, binned: true, of: func(r *Run) float64 {
		return r.Sync.P99
	}, moment: func(m *Moment) float64 { return m.P99 }},
	{name: "p99.9", unit: "s", higherIsBad: true, binned: true, of: func(r *Run) float64 {
		return r.Sync.P999
	}, why: "one run does not show the variation"},
	{name: "max", unit: "s", higherIsBad: true, of: func(r *Run) float64 {
		return r.Sync.Max
	}, why: "one run does not show the variation"},
}

// Compare says what changed from a to b beyond the noise of their runs; names are what
// to call them. Reports of different work are Invalid, unless force.
//
// The noise is that of Welch's t interval for the difference of the runs' mean
// logarithms, so that it is a ratio; with a single run in a report, that of batch means
// of the time lines, and never below 25 %. docs/bench-sync.md has the argument and its
// limits.
func Compare(a, b *Report, nameA, nameB string, force bool) (*Comparison, error) {
	c := &Comparison{
		Kind: "pando bench compare", Format: 1, A: side(a, nameA), B: side(b, nameB),
		Differences: differences(a, b), Unproven: []string{}, Warnings: warnings(a, b),
		Basis: BetweenRuns, Confidence: confidence,
	}

	if len(c.Differences) > 0 && !force {
		return nil, errs.New(errs.Invalid, "compare", nameB, "measured different work than %s: %s", nameA,
			strings.Join(c.Differences, "; ")).
			WithHint("measure both in the same way, or compare them anyway with %s", errs.Param("force"))
	}

	for _, s := range []struct {
		word string
		r    *Report
	}{{"A", a}, {"B", b}} {
		if s.r.Verdict.Result == Pass {
			continue
		}
		if why := s.r.Verdict.ByDesign; why != "" {
			c.Unproven = append(c.Unproven, fmt.Sprintf("%s fails by design: %s", s.word, why))
			continue
		}
		where := ""
		if s.r.Verdict.Layer != "" {
			where = " at " + s.r.Verdict.Layer
		}
		c.Unproven = append(c.Unproven,
			fmt.Sprintf("%s failed its proof%s: could not prove that all synced data reached the disk, so its figures mean "+
				"nothing", s.word, where))
	}

	if len(a.Runs) < 2 || len(b.Runs) < 2 {
		c.Basis = InsideRuns
	}

	for _, f := range compared {
		c.Changes = append(c.Changes, f.compare(a.Runs, b.Runs, c.Basis))
	}

	c.Summary = c.summary()
	return c, nil
}

func side(r *Report, name string) Side {
	return Side{Name: name, Started: r.Started.Format("2006-01-02 15:04:05Z07:00"), Host: r.Host.Name, Path: r.Path,
		Runs: len(r.Runs), Seconds: r.Seconds, Verdict: r.Verdict.Result}
}

// differences are those of the work that was done.
func differences(a, b *Report) []string {
	out := []string{}
	add := func(what, x, y string) {
		if x != y {
			out = append(out, fmt.Sprintf("%s: %s and %s", what, x, y))
		}
	}

	pa, pb := a.Profile, b.Profile
	add("profile", pa.Name, pb.Name)
	add("sync by", pa.Sync, pb.Sync)
	add("writers", writersOf(a), writersOf(b))
	add("bytes of a write", fmt.Sprint(pa.Bytes), fmt.Sprint(pb.Bytes))
	add("bytes of the files", fmt.Sprint(pa.File), fmt.Sprint(pb.File))
	add("writes for each sync", fmt.Sprint(pa.PerSync), fmt.Sprint(pb.PerSync))
	return out
}

func writersOf(r *Report) string {
	var all []string
	for _, x := range r.Runs {
		if s := fmt.Sprint(x.Writers); !slices.Contains(all, s) {
			all = append(all, s)
		}
	}
	return strings.Join(all, ", ")
}

func warnings(a, b *Report) []string {
	out := []string{}
	add := func(what, x, y string) {
		if x != y {
			out = append(out, fmt.Sprintf("%s: %s in A, %s in B", what, orNone(x), orNone(y)))
		}
	}

	add("different hosts", a.Host.Name, b.Host.Name)
	add("different numbers of CPUs", fmt.Sprint(a.Host.CPUs), fmt.Sprint(b.Host.CPUs))
	add("different kernels", a.Host.Kernel, b.Host.Kernel)
	add("different versions of fio", a.Host.Fio, b.Host.Fio)
	add("different layers", chain(a, false), chain(b, false))
	if chain(a, false) == chain(b, false) {
		add("the layers have different settings", chain(a, true), chain(b, true))
	}

	add("runs of different length, in seconds", fmt.Sprint(a.Seconds), fmt.Sprint(b.Seconds))

	for _, s := range []struct {
		word string
		r    *Report
	}{{"A", a}, {"B", b}} {
		if s.r.Quick {
			out = append(out, s.word+" used --quick: shorter than a writeback cycle, so it says little about speed")
		}
		n := 0
		for _, x := range s.r.Runs {
			if len(x.Stalls) > 0 {
				n++
			}
		}
		if n > 0 {
			out = append(out, fmt.Sprintf("%s stalled in %d of its %d runs: check its time line before its percentiles",
				s.word, n, len(s.r.Runs)))
		}
	}

	switch n := min(len(a.Runs), len(b.Runs)); {
	case n == 1:
		out = append(out, "one run does not show how much runs differ: only changes above 25 % count, and p99.9 and max "+
			"cannot be compared; use --runs 3 or more")
	case n == 2:
		out = append(out, "two runs hardly show how much runs differ, so the noise is large; use --runs 3 or more")
	}

	return out
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// chain is the layers in a line.
func chain(r *Report, details bool) string {
	var out []string
	for _, l := range r.Layers {
		s := l.Name
		if details && l.Details != "" {
			s += " (" + l.Details + ")"
		}
		out = append(out, s)
	}
	return strings.Join(out, " > ")
}

func (f figure) compare(a, b []Run, basis string) Change {
	c := Change{Figure: f.name, Unit: f.unit, Noise: -1, Verdict: Unsure}
	xa, okA := logs(a, f.of)
	xb, okB := logs(b, f.of)
	if okA {
		c.A = math.Exp(mean(xa))
	}
	if okB {
		c.B = math.Exp(mean(xb))
	}

	if !okA || !okB {
		c.Why = "0 in a run"
		return c
	}

	c.Ratio = c.B / c.A
	var ea, eb estimate
	least := leastNoise
	if basis == BetweenRuns {
		ea, eb = betweenRuns(xa, f.binned), betweenRuns(xb, f.binned)
	} else {
		least = blindNoise
		if f.moment == nil {
			c.Why = f.why
			return c
		}
		if ea, okA = insideRuns(a, f.moment); okA {
			eb, okA = insideRuns(b, f.moment)
		}
		if !okA {
			c.Why = fmt.Sprintf("a single run needs a time line of at least %d intervals", batches*batchLength)
			return c
		}
	}

	c.Noise = max(math.Expm1(halfWidth(ea, eb)), least)
	change := math.Abs(math.Log(c.Ratio))
	switch {
	case change <= math.Log1p(c.Noise):
		c.Verdict = Same
	case (c.Ratio > 1) == f.higherIsBad:
		c.Verdict = Slower
	default:
		c.Verdict = Faster
	}

	if c.Noise > 1e6 { // as good as not known, and too long to print
		c.Noise = 1e6
	}

	return c
}

// logs are the logarithms of a figure of all runs; false if one has none.
func logs(runs []Run, of func(*Run) float64) ([]float64, bool) {
	var out []float64
	for i := range runs {
		v := of(&runs[i])
		if v <= 0 {
			return nil, false
		}
		out = append(out, math.Log(v))
	}
	return out, len(out) > 0
}

// estimate is how uncertain a mean is.
type estimate struct {
	variance float64 // of the mean
	freedom  float64 // degrees of
}

// betweenRuns is the uncertainty of the mean of independent runs.
func betweenRuns(x []float64, binned bool) estimate {
	v := variance(x)
	if binned {
		v += binWidth * binWidth / 12 // of a value that is only known to lie in a bin
	}
	return estimate{v / float64(len(x)), float64(len(x) - 1)}
}

// insideRuns is the uncertainty of the mean of runs by batch means: the time line of each
// is cut into a few long batches, whose means hardly depend on each other though the
// moments do. False if one has too short a time line.
func insideRuns(runs []Run, of func(*Moment) float64) (estimate, bool) {
	var e estimate
	square := 0.0
	for i := range runs {
		var x []float64
		for j := range runs[i].Timeline {
			m := &runs[i].Timeline[j]
			// A short interval at the end has too few syncs; one without any has no latency.
			if v := of(m); v > 0 && m.Length > runs[i].Seconds/float64(len(runs[i].Timeline))/2 {
				x = append(x, math.Log(v))
			}
		}

		if len(x) < batches*batchLength {
			return e, false
		}

		means := make([]float64, batches)
		for k := range means {
			means[k] = mean(x[k*len(x)/batches : (k+1)*len(x)/batches])
		}

		v := variance(means) / batches
		e.variance += v
		square += v * v / (batches - 1)
	}

	n := float64(len(runs))
	e.variance /= n * n
	e.freedom = batches - 1
	if square > 0 {
		e.freedom = e.variance * e.variance * n * n * n * n / square
	}

	return e, true
}

// halfWidth is that of the interval of the difference of two means, after Welch.
func halfWidth(a, b estimate) float64 {
	v := a.variance + b.variance
	if v == 0 {
		return 0
	}
	freedom := v * v / (a.variance*a.variance/a.freedom + b.variance*b.variance/b.freedom)
	return studentQuantile((1+confidence)/2, freedom) * math.Sqrt(v)
}

func (c *Comparison) summary() string {
	var better, worse, unsure []string
	for _, x := range c.Changes {
		s := fmt.Sprintf("%s %.2fx", x.Figure, x.Ratio)
		switch x.Verdict {
		case Faster:
			better = append(better, s)
		case Slower:
			worse = append(worse, s)
		case Unsure:
			unsure = append(unsure, x.Figure)
		}
	}

	var out string
	switch {
	case len(better)+len(worse) == 0 && len(unsure) == len(c.Changes):
		return "these reports do not show whether anything changed"
	case len(better)+len(worse) == 0:
		out = "no change beyond noise"
	case len(worse) == 0:
		out = "B is faster than A: " + strings.Join(better, ", ")
	case len(better) == 0:
		out = "B is slower than A: " + strings.Join(worse, ", ")
	default:
		out = "B is faster than A in " + strings.Join(better, ", ") + ", and slower in " + strings.Join(worse, ", ")
	}

	if len(unsure) > 0 {
		out += "; unknown for " + strings.Join(unsure, " and ")
	}
	if len(c.Unproven) > 0 {
		out += "; warning: could not prove that all synced data reached the disk"
	}

	return out
}
