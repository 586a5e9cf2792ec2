package syncbench

import (
	"fmt"
	"html"
	"html/template"
	"math"
	"slices"
	"strings"
)

// svg is a picture in the making. Its colours are classes of the page's style sheet, so
// that they follow light, dark and print.
type svg struct {
	strings.Builder
}

// newSVG begins a picture of w by h units, which scales to the width of the page. title
// and text are for those who cannot see it.
func newSVG(w, h float64, id, title, text string) *svg {
	s := &svg{}
	fmt.Fprintf(s,
		`<svg viewBox="0 0 %s %s" role="img" aria-labelledby="%s-t %s-d">`+
			`<title id="%s-t">%s</title><desc id="%s-d">%s</desc>`,
		num(w), num(h), id, id, id, html.EscapeString(title), id, html.EscapeString(text))
	return s
}

// done is the picture, safe to put into a page: text that is not of this package went
// through html.EscapeString.
func (s *svg) done() template.HTML {
	s.WriteString("</svg>")
	return template.HTML(s.String()) // see above
}

// num writes a coordinate: a tenth of a unit is less than can be seen.
func num(v float64) string {
	t := fmt.Sprintf("%.1f", v)
	return strings.TrimSuffix(t, ".0")
}

func (s *svg) line(x1, y1, x2, y2 float64, class string) {
	fmt.Fprintf(s, `<line x1="%s" y1="%s" x2="%s" y2="%s" class="%s"/>`, num(x1), num(y1), num(x2), num(y2), class)
}

// rect has a title, which browsers show under the pointer, if tip is not "".
func (s *svg) rect(x, y, w, h float64, class, tip string) {
	fmt.Fprintf(s, `<rect x="%s" y="%s" width="%s" height="%s" class="%s"`, num(x), num(y), num(w), num(h), class)
	if tip == "" {
		s.WriteString("/>")
		return
	}
	fmt.Fprintf(s, "><title>%s</title></rect>", html.EscapeString(tip))
}

// text is anchored at "start", "middle" or "end".
func (s *svg) text(x, y float64, anchor, class, text string) {
	fmt.Fprintf(s, `<text x="%s" y="%s" text-anchor="%s" class="%s">%s</text>`, num(x), num(y), anchor, class,
		html.EscapeString(text))
}

type point struct{ x, y float64 }

// path is a line through points, and down to the base if there is an area.
func (s *svg) path(p []point, class string) {
	if len(p) == 0 {
		return
	}

	fmt.Fprintf(s, `<path class="%s" d="`, class)
	for i, q := range p {
		command := "L" // line to
		if i == 0 {
			command = "M" // move to
		}
		s.WriteString(command + num(q.x) + " " + num(q.y))
	}

	s.WriteString(`"/>`)
}

// scale maps values onto coordinates.
type scale struct {
	low, high float64 // values; of a logarithmic scale their logarithms
	from, to  float64 // coordinates
	log       bool
}

func (c scale) at(v float64) float64 {
	if c.log {
		v = math.Log10(max(v, 1e-12))
	}
	v = min(max(v, c.low), c.high)
	return c.from + (v-c.low)/(c.high-c.low)*(c.to-c.from)
}

// logScale holds all values from low to high, and is never without extent.
func logScale(low, high, from, to float64) scale {
	l, h := math.Log10(max(low, 1e-12)), math.Log10(max(high, low, 1e-12))
	if h-l < 0.5 {
		l, h = l-0.25, h+0.25
	}
	return scale{l, h, from, to, true}
}

// tick is a mark on an axis.
type tick struct {
	value float64
	text  string // "": a mark without
}

// logTicks are at powers of ten and, if there are few of these, at 2 and 5.
func (c scale) logTicks(words func(float64) string) (out []tick) {
	steps := []float64{1}
	if c.high-c.low < 2.2 {
		steps = []float64{1, 2, 5}
	}

	every := int(math.Ceil((c.high - c.low) / 9)) // of decades, if there are very many
	for d := int(math.Floor(c.low)); d <= int(math.Ceil(c.high)); d++ {
		if ((d%every)+every)%every != 0 {
			continue
		}
		for _, k := range steps {
			v := k * math.Pow(10, float64(d))
			if l := math.Log10(v); l >= c.low-1e-9 && l <= c.high+1e-9 {
				out = append(out, tick{v, words(v)})
			}
		}
	}

	return out
}

// niceTicks are about n round values from 0 to high.
func niceTicks(high float64, n int, words func(float64) string) (out []tick) {
	if high < 1e-9 {
		return []tick{{0, words(0)}}
	}

	step := math.Pow(10, math.Floor(math.Log10(high/float64(n))))
	for _, k := range []float64{1, 2, 5, 10} {
		if high/(step*k) <= float64(n) {
			step *= k
			break
		}
	}

	for i := 0; float64(i)*step <= high*1.0001; i++ {
		out = append(out, tick{float64(i) * step, words(float64(i) * step)})
	}

	return out
}

// spread moves values apart until neighbours have a distance of at least gap, and
// keeps them between low and high as well as it goes: for labels at the end of lines.
func spread(y []float64, gap, low, high float64) []float64 {
	order := make([]int, len(y))
	for i := range order {
		order[i] = i
	}

	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case y[a] < y[b]:
			return -1
		case y[a] > y[b]:
			return 1
		}
		return 0
	})

	out := slices.Clone(y)
	last := low - gap
	for _, i := range order {
		out[i] = max(out[i], last+gap)
		last = out[i]
	}

	next := high + gap
	for _, i := range slices.Backward(order) {
		out[i] = min(out[i], next-gap)
		next = out[i]
	}

	return out
}
