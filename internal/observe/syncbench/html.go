package syncbench

import (
	"bytes"
	_ "embed"
	"fmt"
	"html"
	"html/template"
	"math"
	"strings"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/observe/proof"
)

//go:embed report.html.tmpl
var pageText string

// pageTemplate parses when it is first used, so that other commands do not wait for it.
var pageTemplate = sync.OnceValue(func() *template.Template {
	return template.Must(template.New("report").Funcs(template.FuncMap{
		"seconds": secondsText, "bytes": bytesText, "count": countText, "rate": rateText, "inc": func(i int) int {
			return i + 1
		},
		"prose":  prose,
		"plural": errs.Plural, "sentence": sentence,
		"resultClass": func(r proof.Result) string {
			return map[proof.Result]string{proof.OK: "ok", proof.Fail: "fail", proof.NotNeeded: "none",
				proof.Unknown: "unknown"}[r]
		},
		"indent": func(depth int) int { return min(max(depth, 0), 12) * 14 },
	}).Parse(pageText))
})

// page is what the template shows.
type page struct {
	*Report
	Passed   bool
	Write    bool // there is a write apart from the sync
	Command  string
	Words    []string // of the verdict
	More     int      // that are left out
	Tiles    []tile
	Hist     template.HTML
	Curve    template.HTML
	HistRows []histRow
	Curves   []curveRow
	Times    []timeRow
	Merged   int64 // syncs of all runs
}

// tile is a figure at the top: the middle of the runs, and from which to which they go.
type tile struct{ Name, Value, Range string }

type histRow struct {
	From, To string
	Count    int64
	Below    string // percent of all up to here
}

type curveRow struct {
	Name   string
	Values []string
}

type timeRow struct {
	Run     int
	Chart   template.HTML
	Stalls  []Stall
	Moments []Moment
}

// HTML is a report as one page that needs nothing else: no scripts, no pictures, no
// network. Whatever the report says is shown as text, never as markup.
func HTML(r *Report) ([]byte, error) {
	p := page{Report: r, Passed: r.Verdict.Result == Pass, Write: r.Runs[0].Write != nil}
	p.Words, p.More = r.Verdict.Short()
	var words []string
	for _, w := range r.Profile.Command {
		words = append(words, quoted(w))
	}

	p.Command = strings.Join(words, " ")
	p.Tiles = []tile{
		tileOf("syncs/s", r.Runs, func(x *Run) float64 { return x.SyncsPerSecond }, rateText),
		tileOf("p50", r.Runs, func(x *Run) float64 { return x.Sync.P50 }, secondsText),
		tileOf("p95", r.Runs, func(x *Run) float64 { return x.Sync.P95 }, secondsText),
		tileOf("p99", r.Runs, func(x *Run) float64 { return x.Sync.P99 }, secondsText),
		tileOf("p99.9", r.Runs, func(x *Run) float64 { return x.Sync.P999 }, secondsText),
		tileOf("max", r.Runs, func(x *Run) float64 { return x.Sync.Max }, secondsText),
	}

	bins := merged(r.Runs, func(x *Run) *Latency { return &x.Sync })
	p.Merged = total(bins)
	p.Hist, p.Curve = histogramChart(bins, r.Profile.Sync), percentileChart(r.Runs, r.Profile.Sync)
	if len(bins) > 0 {
		cols, sum := columnsOf(bins), int64(0)
		for i, n := range cols.counts {
			if n > 0 {
				sum += n
				p.HistRows = append(p.HistRows, histRow{secondsText(cols.edge(i)), secondsText(cols.edge(i + 1)), n,
					percent(sum, p.Merged)})
			}
		}
	}

	for _, c := range percentiles {
		row := curveRow{Name: c.name}
		for i := range r.Runs {
			h := r.Runs[i].Sync.Histogram
			// A percentile above which there is no sync is the longest, and says nothing.
			if n := total(h); n == 0 || float64(n)*(1-c.p) < 1 {
				row.Values = append(row.Values, "–")
			} else {
				row.Values = append(row.Values, secondsText(quantile(h, c.p)))
			}
		}
		p.Curves = append(p.Curves, row)
	}

	scale := timeScaleOf(r.Runs)
	for i := range r.Runs {
		x := &r.Runs[i]
		p.Times = append(p.Times, timeRow{i + 1, timeChart(x, i+1, scale), x.Stalls, thin(x.Timeline)})
	}

	var b bytes.Buffer
	if err := pageTemplate().Execute(&b, p); err != nil {
		return nil, errs.Wrap("write the page", "", err)
	}

	return b.Bytes(), nil
}

func tileOf(name string, runs []Run, of func(*Run) float64, words func(float64) string) tile {
	t := tile{Name: name}
	low, high := math.Inf(1), 0.0
	var logarithms []float64
	for i := range runs {
		v := of(&runs[i])
		low, high = min(low, v), max(high, v)
		logarithms = append(logarithms, math.Log(max(v, 1e-12)))
	}

	switch {
	case low <= 0:
		t.Value = words(high)
	default:
		t.Value = words(math.Exp(mean(logarithms)))
	}

	if len(runs) > 1 {
		from, to := words(low), words(high)
		if n, unit, ok := strings.Cut(from, " "); ok && strings.HasSuffix(to, " "+unit) {
			from = n
		}
		t.Range = from + " – " + to
	}

	return t
}

// percent never says 100 of what is not all.
func percent(part, whole int64) string {
	if part == whole {
		return "100 %"
	}
	v := 100 * float64(part) / float64(whole)
	for _, digits := range []int{1, 2, 3, 4, 5, 6} {
		if s := fmt.Sprintf("%.*f", digits, v); !strings.HasPrefix(s, "100") {
			return s + " %"
		}
	}
	return "just under 100 %"
}

// sentence ends with a full stop.
func sentence(s string) string {
	s = strings.TrimSpace(s)
	if s == "" {
		return ""
	}
	if !strings.HasSuffix(s, ".") {
		s += "."
	}
	return s
}

// prose is a text in which `commands` stand between backticks, as markup.
func prose(s string) template.HTML {
	parts := strings.Split(s, "`")
	var b strings.Builder
	for i, p := range parts {
		p = html.EscapeString(p)
		switch {
		case i%2 == 0:
			b.WriteString(p)
		case i == len(parts)-1: // one that nothing closes
			b.WriteString("`" + p)
		default:
			b.WriteString("<code>" + p + "</code>")
		}
	}

	return template.HTML(b.String()) // all of it is escaped
}

// quoted is a word as a shell reads it.
func quoted(s string) string {
	if s != "" && strings.IndexFunc(s, func(r rune) bool {
		return !strings.ContainsRune("/._-+:@%,=", r) && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
	}) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
