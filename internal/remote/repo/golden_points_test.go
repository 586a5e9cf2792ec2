package repo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"pando/internal/base/errs"
)

// The files in testdata/v1/points are a repository with a head that has pages of points.
const goldenPointsDir = "testdata/v1/points"

// goldenPoints is what is in the repository.
type goldenPoints struct {
	head    Head
	points  []Point
	objects map[string][]byte
}

// writeGoldenPoints makes the repository anew. wrapped is as of frozenKeys.
func writeGoldenPoints(t testing.TB, wrapped [][]byte) *goldenPoints {
	t.Helper()
	ctx := t.Context()
	e := goldenEnv()
	e.random = &counted{n: 1 << 24}
	m := newMemory()
	g := &goldenPoints{}

	r := writeOneKey(t, e, m, 3, wrapped)
	for i := range 7 {
		g.points = append(g.points, Point{
			Seq: uint64(10 * (i + 1)), Name: fmt.Sprint("p", i+1), Manifest: r.env.newID(), Source: "s",
			Content: Block, FS: "ext4", SizeBytes: 1 << 30,
			CreatedAt: e.utcNow().Add(time.Duration(i) * time.Hour), Added: int64(i), Keep: i == 2,
		})
	}
	session := r.env.newID()
	w := PagePutter{r, func(context.Context) (ID, error) { return session, nil }}
	g.head = Head{Name: "web", Lineage: "l", Epoch: 2, NextSeq: 71, Recent: g.points[5:], Latest: 30}
	for _, part := range [][]Point{g.points[:3], g.points[3:5]} {
		pages, err := w.PutPages(ctx, g.head.Name, part)
		must(t, err)
		g.head.Pages = append(g.head.Pages, pages...)
	}
	_, err := r.PutHead(ctx, g.head, "")
	must(t, err)
	g.objects = map[string][]byte{}
	for key, o := range m.objects {
		g.objects[key] = o.data
	}
	return g
}

// frozenPoints is the frozen repository, opened, and what must be in it.
func frozenPoints(t testing.TB) (*goldenPoints, *Repo, *memory) {
	t.Helper()
	m := loadFiles(t, goldenPointsDir)
	return writeGoldenPoints(t, frozenKeys(t, goldenPointsDir)), goldenRepo(t, m), m
}

func TestFrozenPoints(t *testing.T) {
	ctx := t.Context()
	g, r, m := frozenPoints(t)
	if len(g.objects) != len(m.keys()) || len(m.keys()) != 4 {
		t.Errorf("%d objects are written, %d are there", len(g.objects), len(m.keys()))
	}
	for key, want := range g.objects {
		if got := m.data(key); !bytes.Equal(got, want) {
			t.Errorf("%s is written differently:\n%x\nwas\n%x", key, want, got)
		}
	}
	h, _, err := r.Head(ctx, "web")
	must(t, err)
	h.WriteID = ID{}
	if !reflect.DeepEqual(h, g.head) || h.Count() != 7 {
		t.Errorf("%+v\nwant %+v", h, g.head)
	}
	var got []Point
	for read := range r.ReadPages(ctx, h, h.Pages) {
		must(t, read.Err)
		got = append(got, read.Points...)
	}
	if got = append(got, h.Recent...); !reflect.DeepEqual(got, g.points) {
		t.Errorf("%+v\nwant %+v", got, g.points)
	}
	newest, ok, err := r.Newest(ctx, h)
	if err != nil || !ok || newest.Name != "p3" {
		t.Errorf("the newest is %+v, %v", newest, err)
	}
}

// However a head with pages, or a page, is changed, it is damaged, and never read as something else.
func TestEveryChangeOfPointsIsNoticed(t *testing.T) {
	ctx := t.Context()
	g, r, m := frozenPoints(t)
	for _, page := range g.head.Pages {
		was := m.data(page.Object())
		changes(was, func(what string, at int, changed []byte) {
			m.set(page.Object(), changed)
			_, err := r.PagePoints(ctx, g.head, page)
			if !errs.Is(err, errs.Damaged) && !(errs.Is(err, errs.TooNew) && at == versionAt) {
				t.Errorf("%s, %s: %v", page.Object(), what, err)
			}
		})
		m.set(page.Object(), was)
	}

	// A page that says something else than its head, and one of another head.
	page, wrong := g.head.Pages[0], g.head
	for what, p := range map[string]PointPage{
		"count": {ID: page.ID, Count: 2, First: page.First, Last: page.Last},
		"first": {ID: page.ID, Count: 3, First: page.First - 1, Last: page.Last},
		"last":  {ID: page.ID, Count: 3, First: page.First, Last: page.Last + 1},
		"other": g.head.Pages[1],
	} {
		if p.ID == page.ID {
			_, err := r.PagePoints(ctx, g.head, p)
			kind(t, err, errs.Damaged)
			continue
		}
		m.set(page.Object(), m.data(p.Object())) // bound to its key
		_, err := r.PagePoints(ctx, g.head, page)
		if !errs.Is(err, errs.Damaged) {
			t.Errorf("%s: %v", what, err)
		}
		m.set(page.Object(), g.objects[page.Object()])
	}
	wrong.Name = "db"
	_, err := r.PagePoints(ctx, wrong, page)
	kind(t, err, errs.Damaged)
	m.set(page.Object(), nil)
	must(t, m.Delete(ctx, page.Object()))
	_, err = r.PagePoints(ctx, g.head, page)
	kind(t, err, errs.NotFound)
}

func TestHeadsWithWrongPages(t *testing.T) {
	r, _ := made(t)
	page := func(count int, first, last uint64) PointPage {
		return PointPage{ID: NewID(), Count: count, First: first, Last: last}
	}
	for what, pages := range map[string][]PointPage{
		"no ID":        {{Count: 1, First: 1, Last: 1}},
		"no points":    {page(0, 1, 1)},
		"too many":     {page(3, 1, 2)},
		"far too many": {page(maxPaged+1, 1, 1<<40)},
		"backwards":    {page(1, 2, 1)},
		"from zero":    {page(1, 0, 1)},
		"overlapping":  {page(2, 1, 5), page(2, 5, 9)},
		"recent":       {page(2, 1, 11)},
		"not next":     {page(2, 1, 99)},
	} {
		h := Head{Name: "a", NextSeq: 20, Pages: pages, Recent: []Point{{Seq: 11, Manifest: NewID(), Content: Block}}}
		if _, err := r.PutHead(t.Context(), h, ""); !errs.Is(err, errs.Invalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// Points are put into as many pages as they need, which are edited and merged without losing one.
func TestPagesAreEdited(t *testing.T) {
	ctx := t.Context()
	r, m := made(t)
	r.env.pack = Compress
	session := NewID()
	w := PagePutter{r, func(context.Context) (ID, error) { return session, nil }}
	h := Head{Name: "a", NextSeq: 1}
	add := func(n int, name string) {
		for range n {
			at := time.Unix(int64(h.NextSeq), 0).UTC()
			h.Recent = append(
				h.Recent,
				Point{Seq: h.NextSeq, Name: name, Manifest: NewID(), Content: Block, CreatedAt: at, Added: 1},
			)
			h.NextSeq++
		}
	}
	all := func() (out []Point) {
		for read := range r.ReadPages(ctx, h, h.Pages) {
			must(t, read.Err)
			out = append(out, read.Points...)
		}
		return append(out, h.Recent...)
	}
	add(maxRecent, "x")
	must(t, w.Shrink(ctx, &h))
	if len(h.Pages) != 0 {
		t.Error("a page too soon")
	}
	for range 20 {
		add(maxRecent-len(h.Recent)+1, "x")
		must(t, w.Shrink(ctx, &h))
	}
	add(3000, string(bytes.Repeat([]byte{0x7f}, 2000))) // more than four pages of 4 MiB hold
	must(t, w.Shrink(ctx, &h))
	if len(h.Recent) != keepRecent || h.Count() != int(h.NextSeq)-1 || !h.Fragmented() {
		t.Errorf("%d recent points, %d in all, %d pages", len(h.Recent), h.Count(), len(h.Pages))
	}
	before, pages := all(), len(h.Pages)

	must(t, w.Edit(ctx, &h, func(PointPage) bool { return false }, func(p []Point) []Point { return p }))
	if !reflect.DeepEqual(all(), before) || len(h.Pages) >= pages || h.Fragmented() {
		t.Errorf("%d points are left, in %d pages, of %d in %d", h.Count(), len(h.Pages), len(before), pages)
	}
	_, err := r.PutHead(ctx, h, "")
	must(t, err)

	without := func(p []Point) []Point { return slices.DeleteFunc(p, func(x Point) bool { return x.Seq%3 == 0 }) }
	must(t, w.Edit(ctx, &h, func(p PointPage) bool { return p.containsSeq(5000) }, without))
	left := 0
	for _, p := range all() {
		if p.Seq%3 == 0 {
			left++
		}
	}
	if n := len(all()); n >= len(before) || n != h.Count() || left == 0 || n < len(before)-maxPaged {
		t.Errorf("%d points are left of %d", n, len(before))
	}

	// What cannot be read changes nothing.
	was := h
	must(t, m.Delete(ctx, h.Pages[1].Object()))
	err = w.Edit(ctx, &h, func(PointPage) bool { return true }, func(p []Point) []Point { return p })
	var fault *PageError
	if !errs.Is(err, errs.NotFound) || !errors.As(err, &fault) || fault.Page != was.Pages[1] {
		t.Errorf("%v", err)
	}
	if !reflect.DeepEqual(h, was) {
		t.Errorf("%v", err)
	}
}
