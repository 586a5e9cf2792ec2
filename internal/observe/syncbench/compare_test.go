package syncbench

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/observe/proof"
	"pando/internal/testing/faulttest"
)

// fixture is a report of three runs of fio of 30 s, whose latencies and time lines are real:
// other programs disturbed the first. What is said of the host and of layers is made up.
func fixture(t testing.TB) *Report {
	t.Helper()
	r, err := Read("testdata/report.json")
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func compare(t *testing.T, a, b *Report) *Comparison {
	t.Helper()
	c, err := Compare(a, b, "A.json", "B.json", false)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// verdicts are those of all figures, "syncs/s: slower" and so on.
func verdicts(c *Comparison) (out []string) {
	for _, x := range c.Changes {
		out = append(out, x.Figure+": "+x.Verdict)
	}
	return out
}

func allOf(verdict string) (out []string) {
	for _, f := range compared {
		out = append(out, f.name+": "+verdict)
	}
	return out
}

func TestStudent(t *testing.T) {
	// Tables of quantiles, NIST/SEMATECH e-Handbook 1.3.6.7.2.
	for _, c := range []struct{ p, freedom, want float64 }{
		{0.975, 1, 12.706}, {0.995, 1, 63.657}, {0.995, 2, 9.925}, {0.975, 4, 2.776}, {0.995, 4, 4.604},
		{0.975, 10, 2.228}, {0.995, 18, 2.878}, {0.995, 100, 2.626}, {0.9, 3, 1.638},
	} {
		if got := studentQuantile(c.p, c.freedom); math.Abs(got-c.want) > 0.001 {
			t.Errorf("t(%g, %g) = %.4f, not %.3f", c.p, c.freedom, got, c.want)
		}
	}
}

// TestCompareItself: what is compared with itself has not changed.
func TestCompareItself(t *testing.T) {
	for _, runs := range []int{3, 2} {
		a, b := fixture(t), fixture(t)
		a.Runs, b.Runs = a.Runs[:runs], b.Runs[:runs]
		c := compare(t, a, b)
		if got := verdicts(c); !slices.Equal(got, allOf(Same)) {
			t.Errorf("%d runs: %q", runs, got)
		}
		if c.Summary != "no change beyond noise" || c.Basis != BetweenRuns || len(c.Unproven)+len(c.Differences) > 0 {
			t.Errorf("%+v", c)
		}
	}
	a, b := fixture(t), fixture(t)
	a.Runs, b.Runs = a.Runs[2:], b.Runs[2:]
	c := compare(t, a, b)
	want := allOf(Same)
	want[4], want[5] = "p99.9: "+Unsure, "max: "+Unsure
	if got := verdicts(c); !slices.Equal(got, want) {
		t.Errorf("one run: %q", got)
	}
	if c.Basis != InsideRuns || !strings.Contains(c.Summary, "unknown for p99.9 and max") {
		t.Errorf("one run: %+v", c)
	}
}

// slower makes every latency longer by a factor, and every rate lower.
func slower(r *Report, factor float64) *Report {
	for i := range r.Runs {
		x := &r.Runs[i]
		x.SyncsPerSecond /= factor
		x.WritesPerSecond /= factor
		for _, v := range []*float64{&x.Sync.Min, &x.Sync.Mean, &x.Sync.P50, &x.Sync.P95, &x.Sync.P99, &x.Sync.P999,
			&x.Sync.Max} {
			*v *= factor
		}
		for j := range x.Sync.Histogram {
			x.Sync.Histogram[j].Value *= factor
		}
		for j := range x.Timeline {
			m := &x.Timeline[j]
			m.Syncs /= factor
			m.P50, m.P99, m.Max = m.P50*factor, m.P99*factor, m.Max*factor
		}
	}
	return r
}

// calm is the quietest run of the fixture, as three of a third of the time: a machine
// on which runs hardly differ, but with the ups and downs of a real one.
func calm(t testing.TB) *Report {
	r := fixture(t)
	long := r.Runs[2]
	r.Runs = nil
	n := len(long.Timeline) / 3
	for i := range 3 {
		r.Runs = append(r.Runs, assemble(long, slices.Clone(long.Timeline[i*n:(i+1)*n])))
	}
	return r
}

// assemble makes a run of moments. Their p95, p99.9 and maxima stand for those of
// a histogram, which a report does not have for each second.
func assemble(like Run, moments []Moment) Run {
	at, rate := 0.0, 0.0
	var p50, p99, tail []float64
	like.Sync.Max = 0
	for i := range moments {
		m := &moments[i]
		m.Length = 1
		at++
		m.At = at
		rate += m.Syncs
		p50, p99, tail = append(p50, math.Log(m.P50)), append(p99, math.Log(m.P99)), append(tail, math.Log(m.Max))
		like.Sync.Max = max(like.Sync.Max, m.Max)
	}
	like.Seconds, like.Timeline = at, moments
	like.SyncsPerSecond = rate / at
	like.Sync.P50, like.Sync.P99, like.Sync.P999 = math.Exp(mean(p50)), math.Exp(mean(p99)), math.Exp(mean(tail))
	like.Sync.P95 = math.Sqrt(like.Sync.P50 * like.Sync.P99)
	return like
}

func TestCompareFindsAFifth(t *testing.T) {
	c := compare(t, calm(t), slower(calm(t), 1.2))
	for _, x := range c.Changes[:3] { // the tails vary more than that
		if x.Verdict != Slower {
			t.Errorf("%+v", x)
		}
	}
	if !strings.HasPrefix(c.Summary, "B is slower than A: syncs/s 0.83x") {
		t.Error(c.Summary)
	}
	c = compare(t, slower(calm(t), 1.2), calm(t))
	if x := c.Changes[0]; x.Verdict != Faster || math.Abs(x.Ratio-1.2) > 1e-9 {
		t.Errorf("%+v", x)
	}
	// One run each: it knows less, and says so, but a third of real data is seen.
	a, b := fixture(t), slower(fixture(t), 1.34)
	a.Runs, b.Runs = a.Runs[2:], b.Runs[2:]
	c = compare(t, a, b)
	if x := c.Changes[0]; x.Verdict != Slower || x.Noise < blindNoise || c.Basis != InsideRuns {
		t.Errorf("%+v", x)
	}
	if !slices.ContainsFunc(c.Warnings, func(s string) bool { return strings.Contains(s, "use --runs 3 or more") }) {
		t.Errorf("%q", c.Warnings)
	}
	// Runs that differ by half themselves say nothing of a fifth.
	c = compare(t, fixture(t), slower(fixture(t), 1.2))
	if x := c.Changes[0]; x.Verdict != Same || x.Noise < 0.2 {
		t.Errorf("%+v", x)
	}
}

// draw makes a report of stretches of a real time line, each run with a level of its own
// that differs from the others by a standard deviation of spread.
func draw(rnd *rand.Rand, like *Report, runs, seconds int, spread float64) *Report {
	r := *like
	r.Runs = nil
	for range runs {
		from := like.Runs[rnd.IntN(len(like.Runs))]
		level := math.Exp(rnd.NormFloat64() * spread)
		var moments []Moment
		for len(moments) < seconds {
			at := rnd.IntN(len(from.Timeline) - 5)
			for _, m := range from.Timeline[at : at+5] {
				m.Syncs /= level
				m.P50, m.P99, m.Max = m.P50*level, m.P99*level, m.Max*level
				moments = append(moments, m)
			}
		}
		r.Runs = append(r.Runs, assemble(from, moments[:seconds]))
	}
	return &r
}

// TestCompareRarelyErrs draws pairs of equal reports, and counts those in which any
// figure is said to have changed; and pairs that differ by a fifth.
func TestCompareRarelyErrs(t *testing.T) {
	const pairs = 500
	noisy, quiet := fixture(t), fixture(t)
	quiet.Runs = quiet.Runs[2:] // the others were disturbed
	for _, c := range []struct {
		like          *Report
		runs, seconds int
		spread        float64
	}{{quiet, 3, 30, 0.05}, {noisy, 3, 30, 0.05}, {noisy, 5, 30, 0.05}, {quiet, 3, 30, 0.2}, {noisy, 2, 30, 0}, {quiet, 1,
		60, 0.05}} {
		t.Run(fmt.Sprintf("%d runs like %d, spread %g", c.runs, len(c.like.Runs), c.spread), func(t *testing.T) {
			rnd := faulttest.Rand(t)
			wrong := 0
			for range pairs {
				got := compare(t, draw(rnd, c.like, c.runs, c.seconds, c.spread), draw(rnd, c.like, c.runs, c.seconds, c.spread))
				if slices.ContainsFunc(got.Changes, func(x Change) bool { return x.Verdict == Slower || x.Verdict == Faster }) {
					wrong++
				}
			}
			// Six figures at 99 %: at most 6 in 100, and four standard deviations of chance.
			limit := pairs*0.06 + 4*math.Sqrt(pairs*0.06*0.94)
			t.Logf("%d of %d pairs of equal reports said to differ", wrong, pairs)
			if float64(wrong) > limit {
				t.Errorf("%d of %d pairs of equal reports are said to differ: more than %.0f", wrong, pairs, limit)
			}
		})
	}
	rnd := faulttest.Rand(t)
	found := 0
	for range pairs {
		b := slower(draw(rnd, quiet, 5, 30, 0.03), 1.2)
		if compare(t, draw(rnd, quiet, 5, 30, 0.03), b).Changes[0].Verdict == Slower {
			found++
		}
	}
	t.Logf("a fifth found in %d of %d", found, pairs)
	if found < pairs*8/10 {
		t.Errorf("five runs each that spread by 3 %%: a fifth less is found in %d of %d pairs", found, pairs)
	}
}

func TestCompareRefusesOtherWork(t *testing.T) {
	for want, change := range map[string]func(*Report){
		"profile: postgres and etcd": func(r *Report) { r.Profile.Name = "etcd" },
		"writers: 1 and 4": func(r *Report) {
			r.Runs[0].Writers, r.Runs[1].Writers, r.Runs[2].Writers = 4, 4, 4
		},
		"bytes of a write: 8192 and 4096":          func(r *Report) { r.Profile.Bytes = 4096 },
		"bytes of the files: 67108864 and 1048576": func(r *Report) { r.Profile.File = 1 << 20 },
		"writes for each sync: 1 and 8":            func(r *Report) { r.Profile.PerSync = 8 },
		"sync by: fdatasync and fsync":             func(r *Report) { r.Profile.Sync = "fsync" },
	} {
		b := fixture(t)
		change(b)
		_, err := Compare(fixture(t), b, "A.json", "B.json", false)
		if !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), want) ||
			!strings.Contains(errs.HintOf(err), `parameter "force"`) {
			t.Errorf("%s: %v", want, err)
		}
		c, err := Compare(fixture(t), b, "A.json", "B.json", true)
		if err != nil || !slices.Equal(c.Differences, []string{want}) {
			t.Errorf("forced: %+v, %v", c, err)
		}
	}
}

func TestCompareWarns(t *testing.T) {
	b := fixture(t)
	b.Host.Kernel, b.Host.Name, b.Quick = "6.1.0", "host-2", true
	b.Layers[1].Details = "write through"
	b.Verdict.Result, b.Verdict.Layer = Failed, "vda"
	b.Runs[0].Proof.Result = proof.Fail
	c := compare(t, fixture(t), b)
	text := strings.Join(c.Warnings, "\n")
	for _, want := range []string{
		"different hosts: host-1 in A, host-2 in B", "different kernels: 6.18.0 in A, 6.1.0 in B", "B used --quick",
		"the layers have different settings: ", "A stalled in 1 of its 3 runs",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if len(c.Unproven) != 1 || !strings.HasPrefix(c.Unproven[0], "B failed its proof at vda") ||
		!strings.Contains(c.Summary, "could not prove that all synced data") {
		t.Errorf("%+v", c)
	}
	b = fixture(t)
	b.Layers = b.Layers[:1]
	if text := strings.Join(compare(t, fixture(t), b).Warnings, "\n"); !strings.Contains(text,
		"different layers: ext4 on / > vda in A, ext4 on / in B") {
		t.Error(text)
	}
}

// TestCompareWithoutFigures: runs in which nothing was synced have no ratio.
func TestCompareWithoutFigures(t *testing.T) {
	b := fixture(t)
	for i := range b.Runs {
		b.Runs[i].SyncsPerSecond, b.Runs[i].Sync = 0, Latency{}
	}
	c := compare(t, fixture(t), b)
	if !slices.Equal(verdicts(c), allOf(Unsure)) || c.Summary != "these reports do not show whether anything changed" {
		t.Errorf("%+v", c)
	}
	// Too short a time line.
	a, b := fixture(t), fixture(t)
	a.Runs, b.Runs = a.Runs[:1], b.Runs[:1]
	b.Runs[0].Timeline = b.Runs[0].Timeline[:19]
	if c := compare(t, a, b); !slices.Equal(verdicts(c), allOf(Unsure)) {
		t.Errorf("%+v", c)
	}
}
