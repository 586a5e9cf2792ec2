package web

import (
	"cmp"
	"net/url"
	"slices"
	"strconv"

	"pando/client"
)

// areas are bytes as rectangles: a box for each golden, with cells for what its generations hold and its clones share,
// and for what belongs to a single clone or snapshot.
type areas struct {
	Width, Height float64
	Boxes         []box
	Bytes         int64
}

// box is a rectangle. Its cells fill it.
type box struct {
	rect
	Name, Link, Note string
	Bytes            int64
	Cells            []cell
}

// cell is a part of a box.
type cell struct {
	rect
	Class, Title string // class: shared, exclusive, volume, snapshot, other
	Bytes        int64
}

type rect struct{ X, Y, W, H float64 }

// TextFits reports whether there is room for a line of text, in characters.
func (r rect) TextFits(text string) bool { return r.H >= 34 && r.W >= 7.2*float64(len(text))+14 }

// Size of areas, in units that are pixels if the page is wide enough.
const (
	areaWidth  = 1000
	areaHeight = 240
)

// areasOf lays out the goldens of a pool.
func areasOf(sums []lineageSum) areas {
	byGolden := map[string]*box{}
	shared := map[string]int64{} // of generations with each other and with clones
	cloned := map[string]struct{}{}
	for _, s := range sums {
		if s.Kind == "volume" {
			cloned[s.generation()] = struct{}{}
		}
	}
	for _, s := range sums {
		b := byGolden[s.Golden]
		if b == nil {
			b = &box{Name: s.Golden, Link: "/lineage?golden=" + url.QueryEscape(s.Golden)}
			if s.Golden == "" {
				b.Name, b.Link = "no golden", "/volumes"
			}
			byGolden[s.Golden] = b
		}
		_, has := cloned[s.generation()]
		b.add(s, shared, has)
	}

	out := areas{Width: areaWidth, Height: areaHeight}
	for name, b := range byGolden {
		b.addCell("shared", "in its generations, shared by their clones", shared[name])
		if b.Bytes > 0 {
			out.Boxes = append(out.Boxes, *b)
			out.Bytes += b.Bytes
		}
	}
	out.layOut()
	return out
}

// addOther adds what the pool uses beyond what objects are known to have: what volumes share with their own snapshots
// and forks, and what its filesystem needs.
func (a *areas) addOther(used int64) {
	if other := used - a.Bytes; other > 0 && len(a.Boxes) > 0 {
		a.Boxes = append(a.Boxes, box{Name: "other", Link: "/lineage", Bytes: other, Note: "shared by volumes and their " +
			"snapshots and forks, and of the filesystem", Cells: []cell{{Class: "other", Bytes: other,
			Title: "shared by volumes and their snapshots and forks, and of the filesystem"}}})
		a.Bytes += other
		a.layOut()
	}
}

// addVolumes gives each volume of a golden a box of its own.
func (a *areas) addVolumes(volumes []client.Object) {
	if len(a.Boxes) != 1 {
		return
	}
	for _, v := range volumes {
		if v.ExclusiveBytes > 0 {
			a.Boxes = append(a.Boxes, box{Name: v.Name, Link: linkOf(v.Name), Bytes: v.ExclusiveBytes, Cells: []cell{{
				Class: "volume", Title: "only in this volume", Bytes: v.ExclusiveBytes}}})
		}
	}

	// What is left of the golden's own box is in its generations and snapshots.
	golden := &a.Boxes[0]
	golden.Cells = slices.DeleteFunc(golden.Cells, func(c cell) bool { return c.Class == "volume" })
	golden.Bytes = 0
	for _, c := range golden.Cells {
		golden.Bytes += c.Bytes
	}
	a.Boxes = slices.DeleteFunc(a.Boxes, func(b box) bool { return b.Bytes == 0 })
	a.layOut()
}

// generation names the generation of a sum.
func (s lineageSum) generation() string { return s.Golden + "@" + strconv.Itoa(s.Generation) }

// add adds a sum to the box of its golden. cloned: volumes descend from its generation.
func (b *box) add(s lineageSum, shared map[string]int64, cloned bool) {
	what := plural(s.Objects, s.Kind)
	if s.Generation > 0 && s.Kind != "generation" {
		what += " of generation " + strconv.Itoa(s.Generation)
	}
	switch s.Kind {
	case "generation", "layer":
		// Generations share blocks with each other, too: count the largest. Clones made after a generation was measured
		// share what was only there before.
		shared[s.Golden] = max(shared[s.Golden], s.SharedBytes)
		if cloned {
			b.addCell("shared", "in generation "+strconv.Itoa(s.Generation)+", shared by its clones", s.ExclusiveBytes)
		} else {
			b.addCell("exclusive", "only in generation "+strconv.Itoa(s.Generation), s.ExclusiveBytes)
		}
	case "snapshot":
		b.addCell("snapshot", "only in "+what, s.ExclusiveBytes)
	default:
		b.addCell("volume", "only in "+what, s.ExclusiveBytes)
		if b.Note = plural(s.Objects, "volume"); s.Golden == "" {
			shared[""] += s.SharedBytes
		}
	}
}

func (b *box) addCell(class, title string, bytes int64) {
	if bytes > 0 {
		b.Cells = append(b.Cells, cell{Class: class, Title: title, Bytes: bytes})
		b.Bytes += bytes
	}
}

// order puts what is shared first, where the name is.
func (c cell) order() int {
	if c.Class == "shared" {
		return 0
	}
	return 1
}

// gap is the distance between boxes.
const gap = 4

// layOut gives all boxes their place: the area of each is its bytes.
func (a *areas) layOut() {
	slices.SortFunc(a.Boxes, func(a, b box) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Name, b.Name))
	})
	weights := make([]float64, len(a.Boxes))
	for i, b := range a.Boxes {
		weights[i] = max(float64(b.Bytes), float64(a.Bytes)/400) // small ones stay visible
	}
	for i, r := range squarify(weights, rect{0, 0, a.Width, a.Height}) {
		b := &a.Boxes[i]
		b.rect = rect{r.X + gap/2, r.Y + gap/2, max(r.W-gap, 1), max(r.H-gap, 1)}
		slices.SortStableFunc(b.Cells, func(x, y cell) int {
			return cmp.Or(x.order()-y.order(), cmp.Compare(y.Bytes, x.Bytes))
		})
		inner := make([]float64, len(b.Cells))
		for j, c := range b.Cells {
			inner[j] = float64(c.Bytes)
		}
		for j, r := range squarify(inner, b.rect) {
			b.Cells[j].rect = r
		}
	}
}

// squarify divides a rectangle into parts with these weights, in descending order, as close to squares as it can
// (Bruls, Huizing and van Wijk, 2000).
func squarify(weights []float64, in rect) []rect {
	var total float64
	for _, w := range weights {
		total += w
	}
	out := make([]rect, 0, len(weights))
	scale := in.W * in.H / max(total, 1)
	for begin := 0; begin < len(weights); {
		// Put as many into one row along the shorter side as makes them squarer.
		side := max(min(in.W, in.H), 1e-9)
		end, sum, worst := begin, 0.0, -1.0
		for ; end < len(weights); end++ {
			next := sum + weights[end]*scale
			ratio := worstRatio(weights[begin:end+1], scale, next, side)
			if worst >= 0 && ratio > worst {
				break
			}
			sum, worst = next, ratio
		}
		out = append(out, rowOf(weights[begin:end], scale, sum/side, &in)...)
		begin = end
	}
	return out
}

// worstRatio returns the worst ratio of sides in a row of rectangles.
func worstRatio(row []float64, scale, sum, side float64) (worst float64) {
	depth := sum / side
	for _, w := range row {
		length := w * scale / max(depth, 1e-9)
		worst = max(worst, length/max(depth, 1e-9), depth/max(length, 1e-9))
	}
	return worst
}

// rowOf cuts a row of rectangles off in.
func rowOf(row []float64, scale, depth float64, in *rect) (out []rect) {
	along := 0.0
	for _, w := range row {
		length := w * scale / max(depth, 1e-9)
		if in.W < in.H {
			out = append(out, rect{in.X + along, in.Y, length, depth})
		} else {
			out = append(out, rect{in.X, in.Y + along, depth, length})
		}
		along += length
	}
	if in.W < in.H {
		in.Y, in.H = in.Y+depth, max(in.H-depth, 0)
	} else {
		in.X, in.W = in.X+depth, max(in.W-depth, 0)
	}
	return out
}
