package syncbench

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"pando/internal/observe/proof"
)

func page1(t *testing.T, r *Report) string {
	t.Helper()
	b, err := HTML(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

var pictures = regexp.MustCompile(`(?s)<svg.*?</svg>`)

// TestHTML: the page says what the report does, needs nothing else, and its pictures are
// well-formed and have names for those who cannot see them.
func TestHTML(t *testing.T) {
	r := fixture(t)
	p := page1(t, r)
	for _, want := range []string{
		"✓ PASS", "every sync reached the disk vda.", "/srv/db", "host-1", "3 runs of 30.0 s", "fdatasync",
		"165,997", "286,650", // syncs of run 1, flushes of run 3
		"120 µs", "1.25 ms", "53.3 ms", // p50, p99 and the longest of run 1
		"5,533", "ext4 on /", "volatile write cache", "--fdatasync=1", "Linux 6.18.0", "fio-3.33",
		"the longest sync took 39.6 ms.", "prefers-color-scheme: dark", "@media print", "The histogram as a table",
	} {
		if !strings.Contains(p, want) {
			t.Errorf("the page does not say %q", want)
		}
	}
	for _, never := range []string{"<script", "href=", "src=", "url(", "@import", "http", "<img", "<link", "✗",
		"A quick run"} {
		if strings.Contains(p, never) {
			t.Errorf("the page has %q", never)
		}
	}
	svgs := pictures.FindAllString(p, -1)
	if len(svgs) != 5 { // histogram, curves, three time lines
		t.Errorf("%d pictures", len(svgs))
	}
	for _, s := range svgs {
		d := xml.NewDecoder(strings.NewReader(s))
		title := false
		for {
			tok, err := d.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("a picture is not well-formed: %v", err)
			}
			if e, ok := tok.(xml.StartElement); ok && e.Name.Local == "title" {
				title = true
			}
		}
		if !title || !strings.Contains(s, `role="img"`) || strings.Contains(s, "NaN") || strings.Contains(s, "Inf") {
			t.Errorf("%.200s", s)
		}
	}
	if n := strings.Count(p, `class="stall"`); n != len(r.Runs[0].Stalls) {
		t.Errorf("%d stalls are marked, not %d", n, len(r.Runs[0].Stalls))
	}
}

func TestHTMLOfAFailure(t *testing.T) {
	r := fixture(t)
	r.Quick = true
	r.Verdict = Verdict{Result: Failed, Layer: "loop3",
		Words: []string{"loop3: no flush arrived: `mount -o remount,barrier /x`"}}
	r.Runs[1].Proof.Result = proof.Fail
	r.Runs[1].Proof.Layers[1].Result = proof.Fail
	r.Target = &Target{P99: 0.002, Best: 7000, Writers: 2,
		Steps: []Step{{1, 5000, 0.001, true}, {2, 7000, 0.0015, true}, {4, 9000, 0.004, false}}}
	p := page1(t, r)
	for _, want := range []string{"✗ FAIL at loop3", "A quick run, no verdict on speed",
		"<code>mount -o remount,barrier /x</code>.", `<span class="badge fail">fail</span>`,
		"a p99 of at most 2.00 ms", "7,000 syncs/s", "<title>FAIL: syncs on /srv/db</title>"} {
		if !strings.Contains(p, want) {
			t.Errorf("the page does not say %q", want)
		}
	}
	// O_DSYNC has no write apart, and there may be no syncs at all.
	for i := range r.Runs {
		r.Runs[i].Write, r.Runs[i].Sync, r.Runs[i].Timeline, r.Runs[i].Stalls, r.Runs[i].SyncsPerSecond = nil, Latency{}, nil,
			nil, 0
	}
	r.Profile.Sync = "write (O_DSYNC)"
	if p = page1(t, r); !strings.Contains(p, "There was no sync") ||
		!strings.Contains(p, "each of which waits for the disk") {
		t.Error("the page does not say that there was no sync")
	}
}

// strings below v are replaced by text.
func plant(v reflect.Value, text string) (n int) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			n = plant(v.Elem(), text)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Field(i); f.CanSet() {
				n += plant(f, text)
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			n += plant(v.Index(i), text)
		}
	case reflect.String:
		v.SetString(text)
		n = 1
	case reflect.Map:
		v.Set(reflect.ValueOf(map[string]int64{text: 3}))
		n = 1
	}
	return n
}

// TestHTMLEscapes: whatever stands in the texts of a report is text on the page.
func TestHTMLEscapes(t *testing.T) {
	for _, evil := range []string{
		`<script>alert(1)</script>`, `"><img src=x onerror=alert(1)>`, `'/><svg onload=alert(1)>`, `</style><script>`,
		"`<b onclick=x>`", `</title><script>`, `--></svg><script>`,
	} {
		r := fixture(t)
		r.Runs[0].Proof.Sample = &proof.Sample{Uncovered: map[string]int64{"x": 1}}
		r.Volume, r.Verdict.Layer, r.Runs[0].Proof.Hidden, r.Runs[0].Proof.NoTraces, r.Layers[0].Role = "x", "x", "x", "x",
			"x"
		if n := plant(reflect.ValueOf(r), evil); n < 50 {
			t.Fatalf("%d texts", n)
		}
		p := strings.ToLower(page1(t, r))
		for _, bad := range []string{"<script", "<img", "onload=alert(1)>", "<b ", "</style><", "--></svg"} {
			if strings.Contains(p, bad) {
				at := strings.Index(p, bad)
				t.Errorf("%s: the page has %q: %.200s", evil, bad, p[max(0, at-50):])
			}
		}
		if n := strings.Count(p, "<svg"); n != 5 || strings.Count(p, "</title>") < 6 {
			t.Errorf("%s: %d pictures", evil, n)
		}
		if !strings.Contains(p, "&lt;") {
			t.Errorf("%s: nothing is escaped", evil)
		}
	}
}

// TestHTMLOfExtremes: figures far from those of any disk are drawn, too.
func TestHTMLOfExtremes(t *testing.T) {
	for name, change := range map[string]func(*Report){
		"one sync": func(r *Report) {
			for i := range r.Runs {
				r.Runs[i].Sync = Latency{Count: 1, Min: 1, Mean: 1, P50: 1, P95: 1, P99: 1, P999: 1, Max: 1,
					Histogram: []Bin{{1, 1}}}
				r.Runs[i].Timeline = []Moment{{At: 1, Length: 1, Syncs: 1, P50: 1, P99: 1, Max: 1}}
			}
		},
		"thirty decades": func(r *Report) { r.Runs[0].Sync.Histogram = []Bin{{0, 5}, {1e-300, 7}, {1e15, 1e15}} },
		"a long time line": func(r *Report) {
			m := r.Runs[0].Timeline
			for i := range 20_000 {
				r.Runs[0].Timeline = append(r.Runs[0].Timeline,
					Moment{At: m[len(m)-1].At + float64(i+1), Length: 1, Syncs: 100, P50: 1, P99: 2, Max: 3})
			}
			r.Runs[0].Stalls = slices.Repeat(r.Runs[0].Stalls, 100)
		},
		"a stop":    func(r *Report) { r.Runs[0].Timeline[3] = Moment{At: r.Runs[0].Timeline[3].At, Length: 1} },
		"many runs": func(r *Report) { r.Runs = slices.Repeat(r.Runs, 20) },
	} {
		r := fixture(t)
		change(r)
		b := []byte(page1(t, r))
		if bytes.Contains(b, []byte("NaN")) || bytes.Contains(b, []byte("Inf")) {
			t.Errorf("%s: a figure is no number", name)
		}
		if len(b) > 2<<20 {
			t.Errorf("%s: %d bytes", name, len(b))
		}
	}
}

// TestTicksDiffer: no two numbers at an axis read the same.
func TestTicksDiffer(t *testing.T) {
	for _, high := range []float64{0.4, 1, 3, 5, 7.5, 12, 60, 600, 1975, 123456} {
		seen := map[string]bool{}
		for _, k := range niceTicks(high, 10, roundText) {
			if seen[k.text] {
				t.Errorf("up to %v: %q twice", high, k.text)
			}
			seen[k.text] = true
		}
	}
}
