package syncbench

import (
	"fmt"
	"html/template"
	"maps"
	"math"
	"slices"
	"strings"
)

// Geometry of all charts, in units of their pictures: those of all charts are equally
// wide, so that texts have the same size everywhere.
const (
	chartWidth  = 760.0
	chartLeft   = 62.0 // room for the labels of the vertical axis
	chartRight  = 58.0 // and for those at the end of lines
	plotWidth   = chartWidth - chartLeft - chartRight
	textHeight  = 14.0
	shownPoints = 700 // of a line: more than can be seen
)

// merged is the histogram of all runs together.
func merged(runs []Run, of func(*Run) *Latency) []Bin {
	counts := map[float64]int64{}
	for i := range runs {
		if l := of(&runs[i]); l != nil {
			for _, b := range l.Histogram {
				counts[b.Value] += b.Count
			}
		}
	}

	out := make([]Bin, 0, len(counts))
	for _, v := range slices.Sorted(maps.Keys(counts)) {
		out = append(out, Bin{v, counts[v]})
	}

	return out
}

// quantile of a histogram: the value of the bin in which it lies; 0 if there is none.
func quantile(bins []Bin, p float64) float64 {
	total, sum := total(bins), int64(0)
	for _, b := range bins {
		if sum += b.Count; sum > 0 && float64(sum) >= p*float64(total) {
			return b.Value
		}
	}
	return 0
}

func total(bins []Bin) (n int64) {
	for _, b := range bins {
		n += b.Count
	}
	return n
}

// columns of the histogram chart: each a twentieth of a decade, some 12 % wide, or more
// if the latencies are very far apart.
type columns struct {
	low, width float64 // logarithms
	counts     []int64
}

func columnsOf(bins []Bin) columns {
	low := math.Log10(max(bins[0].Value, 1e-9))
	high := math.Log10(max(bins[len(bins)-1].Value, 1e-9))
	c := columns{width: 0.05}
	for (high-low)/c.width > 150 {
		c.width *= 2
	}

	c.low = math.Floor(low/c.width) * c.width
	c.counts = make([]int64, int((high-c.low)/c.width)+1)
	for _, b := range bins {
		i := int((math.Log10(max(b.Value, 1e-9)) - c.low) / c.width)
		c.counts[min(max(i, 0), len(c.counts)-1)] += b.Count
	}

	return c
}

// edge is where column i begins, in seconds.
func (c columns) edge(i int) float64 { return math.Pow(10, c.low+float64(i)*c.width) }

// histogramChart is how often which latency was, of all runs together; both axes are
// logarithmic, for it is the rare long ones that matter.
func histogramChart(bins []Bin, call string) template.HTML {
	if len(bins) == 0 {
		return ""
	}

	marks := []struct {
		name  string
		value float64
	}{
		{"p50", quantile(bins, 0.50)}, {"p95", quantile(bins, 0.95)}, {"p99", quantile(bins, 0.99)}, {"p99.9",
			quantile(bins, 0.999)},
		{"max", bins[len(bins)-1].Value},
	}

	cols := columnsOf(bins)
	top := 10 + textHeight*float64(len(marks)) + 4
	const height = 220.0
	bottom := top + height
	x := logScale(cols.edge(0), cols.edge(len(cols.counts)), chartLeft, chartLeft+plotWidth)
	most := int64(1)
	for _, n := range cols.counts {
		most = max(most, n)
	}

	y := scale{math.Log10(0.7), math.Log10(float64(most) * 1.3), bottom, top, true}
	s := newSVG(chartWidth, bottom+40, "hist", "Histogram of the latency of "+call,
		fmt.Sprintf("%s syncs. Half took at most %s, 99 %% at most %s, the longest about %s.", countText(total(bins)),
			secondsText(marks[0].value), secondsText(marks[2].value), secondsText(marks[4].value)))
	for _, t := range y.logTicks(roundText) {
		if t.value < 1 || t.text[0] != '1' && most > 50 {
			continue
		}
		s.line(chartLeft, y.at(t.value), chartLeft+plotWidth, y.at(t.value), "grid")
		s.text(chartLeft-7, y.at(t.value)+4, "end", "label", t.text)
	}

	for _, t := range x.logTicks(tickText) {
		s.line(x.at(t.value), bottom, x.at(t.value), bottom+5, "axis")
		s.text(x.at(t.value), bottom+18, "middle", "label", t.text)
	}

	for i, n := range cols.counts {
		if n == 0 {
			continue
		}
		x0, x1 := x.at(cols.edge(i)), x.at(cols.edge(i+1))
		tip := fmt.Sprintf("%s to %s: %s syncs", secondsText(cols.edge(i)), secondsText(cols.edge(i+1)), countText(n))
		s.rect(x0+0.5, y.at(float64(n)), max(x1-x0-1, 0.8), bottom-y.at(float64(n)), "bar", tip)
	}

	s.line(chartLeft, bottom, chartLeft+plotWidth, bottom, "axis")

	for i, m := range marks {
		at := x.at(m.value)
		level := 10 + textHeight*float64(i+1)
		s.line(at, level-4, at, bottom, "mark")
		anchor, dx := "start", 5.0
		if at > chartLeft+plotWidth*0.75 {
			anchor, dx = "end", -5
		}
		s.text(at+dx, level, anchor, "strong", m.name+" "+secondsText(m.value))
	}

	s.text(chartLeft+plotWidth/2, bottom+35, "middle", "title", "latency of "+call+" (logarithmic)")
	s.text(chartLeft-7, top-8, "end", "title", "syncs")
	return s.done()
}

// Percentiles shown in the table beside the curve.
var percentiles = []struct {
	name string
	p    float64
}{
	{"p50", 0.5}, {"p75", 0.75}, {"p90", 0.9}, {"p95", 0.95}, {"p99", 0.99}, {"p99.5", 0.995}, {"p99.9", 0.999}, {"p99.95",
		0.9995}, {"p99.99", 0.9999},
}

// nines is where a percentile lies on an axis on which each further nine is as far as
// the one before: 0.9 at 1, 0.99 at 2.
func nines(p float64) float64 { return -math.Log10(1 - p) }

// percentileChart draws a curve for each run: the latency that a part of the syncs did not exceed. The axis stretches
// out the rare ones.
func percentileChart(runs []Run, call string) template.HTML {
	const top, height = 18.0, 260.0
	bottom := top + height

	// Choose the axes.
	var low, high float64
	most := int64(0)
	for i := range runs {
		h := runs[i].Sync.Histogram
		if len(h) == 0 {
			continue
		}
		most = max(most, total(h))
		if v := quantile(h, 0.01); low == 0 || v < low {
			low = v
		}
		high = max(high, h[len(h)-1].Value)
	}

	if most == 0 {
		return ""
	}

	right := 4.0
	for right < 7 && float64(most) > math.Pow(10, right) {
		right++
	}

	if most < 3000 {
		right = 3
	}

	x := scale{0, right, chartLeft, chartLeft + plotWidth, false}
	y := logScale(low*0.95, high*1.1, bottom, top)
	s := newSVG(chartWidth, bottom+40, "curve", "Percentiles of the latency of "+call, percentileWords(runs))

	// Draw the grid.
	for _, t := range y.logTicks(tickText) {
		s.line(chartLeft, y.at(t.value), chartLeft+plotWidth, y.at(t.value), "grid")
		s.text(chartLeft-7, y.at(t.value)+4, "end", "label", t.text)
	}

	for _, t := range []tick{{0, "0"}, {0.5, "50"}, {0.75, "75"}, {0.9, "90"}, {0.99, "99"}, {0.999, "99.9"},
		{0.9999, "99.99"}, {0.99999, "99.999"}, {0.999999, "99.9999"}, {0.9999999, "99.99999"}} {
		if nines(t.value) > right+1e-6 {
			break
		}
		at := x.at(nines(t.value))
		s.line(at, top, at, bottom, "grid")
		s.text(at, bottom+18, "middle", "label", t.text)
	}

	s.line(chartLeft, bottom, chartLeft+plotWidth, bottom, "axis")
	drawCurves(s, runs, x, y, top, bottom)
	s.text(chartLeft+plotWidth/2, bottom+35, "middle", "title",
		"percent of syncs that took at most this long (each further nine has the same width)")
	return s.done()
}

// drawCurves draws a curve for each run, with its number at the end of the plot.
func drawCurves(s *svg, runs []Run, x, y scale, top, bottom float64) {
	right := x.high
	var ends []float64
	var names []int
	for i := range runs {
		h := runs[i].Sync.Histogram
		n := total(h)
		if n == 0 {
			continue
		}

		// A curve is drawn where there are syncs above it.
		last := min(right, math.Log10(float64(n)))
		var p []point
		for k := 0.0; k <= shownPoints; k++ {
			at := right * k / shownPoints
			if at > last {
				break
			}
			p = append(p, point{x.at(at), y.at(quantile(h, 1-math.Pow(10, -at)))})
		}

		p = append(p, point{x.at(last), y.at(h[len(h)-1].Value)}) // the longest
		s.path(p, fmt.Sprintf("curve run%d dash%d", i%6, i/6%2))
		ends, names = append(ends, p[len(p)-1].y), append(names, i)
		if last < right { // the label stands at the end of the plot
			s.line(p[len(p)-1].x, p[len(p)-1].y, x.at(right), p[len(p)-1].y, "leader")
		}
	}

	for k, at := range spread(ends, textHeight, top, bottom) {
		if len(names) > 16 && k > 0 {
			break // they would lie upon each other
		}
		s.text(chartLeft+plotWidth+6, at+4, "start", fmt.Sprintf("end ink%d", names[k]%6), fmt.Sprintf("run %d", names[k]+1))
	}
}

func percentileWords(runs []Run) string {
	var b strings.Builder
	for i, r := range runs {
		fmt.Fprintf(&b, "Run %d: half at most %s, 99 %% at most %s, 99.9 %% at most %s, longest %s. ", i+1,
			secondsText(r.Sync.P50), secondsText(r.Sync.P99), secondsText(r.Sync.P999), secondsText(r.Sync.Max))
	}
	return strings.TrimSpace(b.String())
}

// timeScale is what the time lines of all runs share, so that they can be compared.
type timeScale struct {
	seconds, rate, low, high float64
}

func timeScaleOf(runs []Run) timeScale {
	var t timeScale
	for i := range runs {
		for _, m := range runs[i].Timeline {
			t.seconds, t.rate = max(t.seconds, m.At), max(t.rate, m.Syncs)
			if m.P50 > 0 && (t.low == 0 || m.P50 < t.low) {
				t.low = m.P50
			}
			t.high = max(t.high, m.Max, m.P99)
		}
	}
	return t
}

// thin puts neighbouring moments together until few enough are left: rates are averaged,
// and of latencies the worst stays.
func thin(all []Moment) []Moment {
	every := (len(all) + shownPoints - 1) / shownPoints
	if every <= 1 {
		return all
	}

	var out []Moment
	for i := 0; i < len(all); i += every {
		sum := Moment{}
		for _, m := range all[i:min(i+every, len(all))] {
			sum.At = m.At
			sum.Length += m.Length
			sum.Syncs += m.Syncs * m.Length
			sum.P50, sum.P99, sum.Max = max(sum.P50, m.P50), max(sum.P99, m.P99), max(sum.Max, m.Max)
		}
		if sum.Length > 0 {
			sum.Syncs /= sum.Length
		}
		out = append(out, sum)
	}

	return out
}

// timeChart draws the rate of a run above its latencies, with its stalls as numbered bands through both.
func timeChart(r *Run, n int, t timeScale) template.HTML {
	if len(r.Timeline) == 0 || t.seconds == 0 {
		return ""
	}

	const top, rateHeight, between, latencyHeight = 22.0, 92.0, 24.0, 86.0
	middle := top + rateHeight
	upper := middle + between
	bottom := upper + latencyHeight
	x := scale{0, t.seconds, chartLeft, chartLeft + plotWidth, false}
	rate := scale{0, max(t.rate*1.05, 1e-9), middle, top, false}
	lat := logScale(t.low*0.9, t.high*1.1, bottom, upper)
	words := fmt.Sprintf("%s syncs/s on average; %d stalls.", rateText(r.SyncsPerSecond), len(r.Stalls))
	s := newSVG(chartWidth, bottom+38, fmt.Sprintf("time%d", n), fmt.Sprintf("Time line of run %d", n), words)

	// Draw the stalls and the grid.
	for i, w := range r.Stalls {
		x0, x1 := x.at(w.From), x.at(w.To)
		s.rect(x0, top, max(x1-x0, 2), bottom-top, "stall", fmt.Sprintf("stall %d: %s", i+1, w.Words))
	}

	for _, k := range niceTicks(rate.high, 4, roundText) {
		s.line(chartLeft, rate.at(k.value), chartLeft+plotWidth, rate.at(k.value), "grid")
		s.text(chartLeft-7, rate.at(k.value)+4, "end", "label", k.text)
	}

	ticks := lat.logTicks(tickText)
	if len(ticks) > 5 { // too many for so low a picture
		var powers []tick
		for _, k := range ticks {
			if l := math.Log10(k.value); math.Abs(l-math.Round(l)) < 1e-6 {
				powers = append(powers, k)
			}
		}
		ticks = powers
	}

	for _, k := range ticks {
		s.line(chartLeft, lat.at(k.value), chartLeft+plotWidth, lat.at(k.value), "grid")
		s.text(chartLeft-7, lat.at(k.value)+4, "end", "label", k.text)
	}

	drawTimeline(s, r, x, rate, lat)

	// Draw the axes, and number the stalls.
	s.line(chartLeft, middle, chartLeft+plotWidth, middle, "axis")
	s.line(chartLeft, bottom, chartLeft+plotWidth, bottom, "axis")
	last := -100.0
	for i, w := range r.Stalls {
		// Numbers that would overlap are left out: the list has them all.
		if at := (x.at(w.From) + x.at(w.To)) / 2; at-last >= 14 {
			s.text(at, top-4, "middle", "stallno", fmt.Sprint(i+1))
			last = at
		}
	}

	for _, k := range niceTicks(t.seconds, 10, roundText) {
		s.line(x.at(k.value), bottom, x.at(k.value), bottom+5, "axis")
		s.text(x.at(k.value), bottom+18, "middle", "label", k.text)
	}

	s.text(chartLeft-7, top-8, "end", "title", "syncs/s")
	s.text(chartLeft-7, upper-8, "end", "title", "latency")
	s.text(chartLeft+plotWidth/2, bottom+34, "middle", "title", "seconds from the start of the run")
	return s.done()
}

// drawTimeline draws the curves of a run: its rate as an area, and three latencies with their names at the end.
func drawTimeline(s *svg, r *Run, x, rate, lat scale) {
	middle, bottom, upper := rate.from, lat.from, lat.to
	var area, line, p50, p99, longest []point
	for _, m := range thin(r.Timeline) {
		x0, x1 := x.at(m.At-m.Length), x.at(m.At)
		y := rate.at(m.Syncs)
		line = append(line, point{x0, y}, point{x1, y})
		mid := (x0 + x1) / 2
		if m.Max > 0 {
			p50, p99 = append(p50, point{mid, lat.at(m.P50)}), append(p99, point{mid, lat.at(m.P99)})
			longest = append(longest, point{mid, lat.at(m.Max)})
		}
	}

	area = append(append(append(area, point{line[0].x, middle}), line...), point{line[len(line)-1].x, middle})
	s.path(area, "area")
	s.path(line, "rate")
	s.path(p50, "p50")
	s.path(p99, "p99")
	s.path(longest, "longest")

	if len(p50) > 0 {
		// In this order they stay if they end at the same height.
		end := spread([]float64{longest[len(longest)-1].y, p99[len(p99)-1].y, p50[len(p50)-1].y}, textHeight, upper, bottom)
		for i, name := range []string{"max", "p99", "p50"} {
			s.text(chartLeft+plotWidth+6, end[i]+4, "start", "end", name)
		}
	}
}
