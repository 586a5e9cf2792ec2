package repo

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"slices"
	"time"

	"pando/internal/base/errs"
)

// A head lists its newest points itself. Older ones are in pages: separate objects, written once, which the head names.
// So the size of what a push writes does not grow with the history of a volume, and a push that changes no old points
// does not read them.
//
// A page that no head names is garbage, which a prune removes; but a new page is not named yet either. So pages, like
// manifests, are written under a session, and record its ID.

// Bounds of points.
const (
	maxRecent    = 768     // in a head; beyond that, all but keepRecent move to pages
	keepRecent   = 256     // more than the longest chain of streams
	maxPaged     = 4096    // in a page
	maxPageBytes = 4 << 20 // of a page, unpacked
)

// PointPage is the entry of a page of older points in a head.
type PointPage struct {
	ID    ID        `json:"id"`
	Count int       `json:"count"`
	First uint64    `json:"first"` // Seq of its first point
	Last  uint64    `json:"last"`  // Seq of its last point
	From  time.Time `json:"from"`  // creation time of the oldest of its points
	To    time.Time `json:"to"`    // creation time of the newest
	Added int64     `json:"added"` // bytes that the pushes of its points stored
}

// pagedPoints is the content of a page.
type pagedPoints struct {
	Head    string  `json:"head"`    // name of the head it was written for
	Session ID      `json:"session"` // under which it was written
	Points  []Point `json:"points"`
}

func (p *PointPage) check(last uint64) error {
	switch {
	case p.ID.IsZero():
		return damaged("a page of points has no ID")
	case p.First <= last || p.Last < p.First:
		return damaged("the pages of points are out of order: %d to %d after %d", p.First, p.Last, last)
	case p.Count < 1 || p.Count > maxPaged || uint64(p.Count-1) > p.Last-p.First:
		return damaged("a page with points %d to %d declares %d points", p.First, p.Last, p.Count)
	}
	return nil
}

// pageOf returns the entry of a page with these points, without an ID.
func pageOf(points []Point) PointPage {
	p := PointPage{
		Count: len(points), First: points[0].Seq, Last: points[len(points)-1].Seq,
		From: points[0].CreatedAt, To: points[0].CreatedAt,
	}
	for _, x := range points {
		if x.CreatedAt.Before(p.From) {
			p.From = x.CreatedAt
		}
		if x.CreatedAt.After(p.To) {
			p.To = x.CreatedAt
		}
		p.Added += x.Added
	}

	return p
}

// containsSeq reports whether the page covers the number seq; the point itself may have been deleted.
func (p *PointPage) containsSeq(seq uint64) bool { return p.First <= seq && seq <= p.Last }

// Near reports whether a point that was created at a time can be in the page. It allows for clocks of different
// precision.
func (p *PointPage) Near(at time.Time) bool {
	return !at.Before(p.From.Add(-time.Second)) && !at.After(p.To.Add(time.Second))
}

// Count returns how many points a head has, including those in pages.
func (h *Head) Count() int {
	n := len(h.Recent)
	for _, p := range h.Pages {
		n += p.Count
	}
	return n
}

// Unpaged reports whether a head lists few enough points itself to be written without moving some to pages.
func (h *Head) Unpaged() bool { return len(h.Recent) <= maxRecent }

// Page returns the page that covers the point with number seq, if there is one.
func (h *Head) Page(seq uint64) (PointPage, bool) {
	for _, p := range h.Pages {
		if p.containsSeq(seq) {
			return p, true
		}
	}
	return PointPage{}, false
}

// Point finds the point with number seq. It reads at most one page. NotFound: the head has no such point. It also
// returns the errors of [Repo.PagePoints].
func (r *Repo) Point(ctx context.Context, h Head, seq uint64) (Point, error) {
	for _, p := range h.Recent {
		if p.Seq == seq {
			return p, nil
		}
	}

	if page, ok := h.Page(seq); ok {
		points, err := r.PagePoints(ctx, h, page)
		if err != nil {
			return Point{}, err
		}
		for _, p := range points {
			if p.Seq == seq {
				return p, nil
			}
		}
	}

	return Point{}, errs.New(errs.NotFound, "find point", h.Name, "no point has number %d", seq)
}

// Newest finds the point with the newest state of a volume or golden: the last one, unless an older snapshot or
// generation was pushed after it. It hardly ever has to read a page. False: the head has no points.
func (r *Repo) Newest(ctx context.Context, h Head) (Point, bool, error) {
	if h.Latest != 0 {
		p, err := r.Point(ctx, h, h.Latest)
		var unread *PageError
		if !errs.Is(err, errs.NotFound) || errors.As(err, &unread) {
			return p, err == nil, err
		}
	}

	last := h.lastSeq()
	if last == 0 {
		return Point{}, false, nil
	}
	p, err := r.Point(ctx, h, last)
	return p, err == nil, err
}

// NewestSeq is the number of the point that [Repo.Newest] finds; 0: the head has no points.
func (h *Head) NewestSeq() uint64 { return cmp.Or(h.Latest, h.lastSeq()) }

// lastSeq is the number of the point that was pushed last; 0: there is none.
func (h *Head) lastSeq() uint64 {
	if n := len(h.Recent); n > 0 {
		return h.Recent[n-1].Seq
	}
	if n := len(h.Pages); n > 0 {
		return h.Pages[n-1].Last
	}
	return 0
}

// PageError reports that a page of points cannot be read. Its kind is that of the cause.
type PageError struct {
	Page PointPage
	Err  error
}

func (e *PageError) Error() string { return e.Err.Error() }
func (e *PageError) Unwrap() error { return e.Err }

// Object returns the key of the page.
func (p *PointPage) Object() string { return pagePrefix + p.ID.String() }

// PagePoints reads the points of a page of a head, oldest first. Errors are a *[PageError]: NotFound (the page is lost,
// or the head was rewritten since it was read and a prune has removed the page), Damaged, TooNew, or a kind of the
// store.
func (r *Repo) PagePoints(ctx context.Context, h Head, page PointPage) ([]Point, error) {
	content, err := r.readPointPage(ctx, page.ID)
	if err == nil {
		err = content.checkMatches(h, page)
	}
	if err != nil {
		return nil, &PageError{page, errs.Wrap("read points", page.Object(), err)}
	}
	return content.Points, nil
}

func (c *pagedPoints) checkMatches(h Head, page PointPage) error {
	want := pageOf(c.Points)
	switch {
	case c.Head != h.Name:
		return damaged("the page belongs to another volume")
	case want.Count != page.Count || want.First != page.First || want.Last != page.Last:
		return damaged("the page has %d points from %d to %d, but the head expects %d from %d to %d",
			want.Count, want.First, want.Last, page.Count, page.First, page.Last)
	}
	return nil
}

func (r *Repo) readPointPage(ctx context.Context, id ID) (pagedPoints, error) {
	content, _, err := r.getContent(ctx, typePoints, pagePrefix+id.String(), maxPageBytes)
	if err != nil {
		return pagedPoints{}, err
	}
	return decodePoints(content)
}

func decodePoints(b []byte) (pagedPoints, error) {
	var fields struct {
		pagedPoints
		Points pointList `json:"points"`
	}
	if err := decodeJSON(b, &fields); err != nil {
		return pagedPoints{}, err
	}

	p := fields.pagedPoints
	p.Points = fields.Points
	if len(p.Points) == 0 || len(p.Points) > maxPaged || p.Session.IsZero() {
		return pagedPoints{}, damaged("invalid page: %d points, session %s", len(p.Points), p.Session)
	}

	return p, checkName(p.Head)
}

// PageRead is the result of reading a page.
type PageRead struct {
	Page   PointPage
	Points []Point
	Err    error // as of [Repo.PagePoints]
}

// ReadPages reads pages of a head, several at once, and yields them in order, including those that cannot be read.
func (r *Repo) ReadPages(ctx context.Context, h Head, pages []PointPage) iter.Seq[PageRead] {
	ids := func(yield func(PointPage, error) bool) {
		for _, p := range pages {
			if !yield(p, nil) {
				return
			}
		}
	}

	return func(yield func(PageRead) bool) {
		for read := range readInOrder(ctx, ids, func(ctx context.Context, p PointPage) (PageRead, error) {
			points, err := r.PagePoints(ctx, h, p)
			return PageRead{p, points, err}, nil
		}) {
			if !yield(read) {
				return
			}
		}
	}
}

// PagePutter writes pages of points. Session returns the session to write them under, which must exist until the head
// that names them is written; it is called only if there is something to write.
type PagePutter struct {
	Repo    *Repo
	Session func(context.Context) (ID, error)
}

// PutPages writes points, which must be in order, into as many pages as needed. Durable on return.
func (w PagePutter) PutPages(ctx context.Context, head string, points []Point) ([]PointPage, error) {
	var out []PointPage
	for most := maxPaged; len(points) > 0; {
		n := min(most, len(points))
		page, fits, err := w.putPage(ctx, head, points[:n])
		switch {
		case err != nil:
			return nil, err
		case !fits:
			most = n / 2
			continue
		}
		out, points = append(out, page), points[n:]
	}

	return out, nil
}

// putPage writes one page. False: it would be too large.
func (w PagePutter) putPage(ctx context.Context, head string, points []Point) (PointPage, bool, error) {
	const op = "write points"
	page := pageOf(points)
	page.ID = w.Repo.env.newID()
	session, err := w.Session(ctx)
	if err != nil {
		return page, false, err
	}

	content, err := encodeJSON(pagedPoints{Head: head, Session: session, Points: points})
	if err != nil {
		return page, false, errs.Wrap(op, head, err)
	}
	if len(content) > maxPageBytes && len(points) > 1 {
		return page, false, nil
	}

	object, err := w.Repo.seal(typePoints, page.Object(), content, maxPageBytes)
	if err == nil {
		err = w.Repo.putIfAbsent(ctx, page.Object(), object)
	}

	return page, true, errs.Wrap(op, head, err)
}

// Shrink moves the oldest of the points that a head lists itself into pages, if there are too many. On an error h is
// unchanged.
func (w PagePutter) Shrink(ctx context.Context, h *Head) error {
	if h.Unpaged() {
		return nil
	}
	n := len(h.Recent) - keepRecent
	pages, err := w.PutPages(ctx, h.Name, h.Recent[:n])
	if err != nil {
		return err
	}
	h.Pages = append(slices.Clone(h.Pages), pages...)
	h.Recent = slices.Clone(h.Recent[n:])
	return nil
}

// Edit changes points of a head. It calls edit with the points of each page that touched selects, and with the recent
// points; edit returns their replacements in the same order. Other pages stay as they are, unless several fit into one.
// A *[PageError] reports a page that cannot be read. On an error h is unchanged.
func (w PagePutter) Edit(ctx context.Context, h *Head, touched func(PointPage) bool, edit func([]Point) []Point) error {
	var pages []PointPage
	var rest []Point // points of rewritten pages that are not in a new page yet
	put := func(full bool) error {
		n := len(rest)
		if full {
			n -= n % maxPaged
		}
		more, err := w.PutPages(ctx, h.Name, rest[:n])
		pages, rest = append(pages, more...), slices.Clone(rest[n:])
		return err
	}

	// Keep, rewrite or merge each page.
	for i, p := range h.Pages {
		if !touched(p) && !h.merges(i, len(rest)) {
			if err := put(false); err != nil {
				return err
			}
			pages = append(pages, p)
			continue
		}

		points, err := w.Repo.PagePoints(ctx, *h, p)
		if err != nil {
			return err
		}
		if touched(p) {
			points = edit(points)
		}

		rest = append(rest, points...)
		if err := put(true); err != nil {
			return err
		}
	}

	if err := put(false); err != nil {
		return err
	}

	// Edit the recent points, and change the head.
	h.Pages, h.Recent = pages, edit(slices.Clone(h.Recent))
	return nil
}

// PageSession returns the session that a page was written under. NotFound, Damaged, TooNew.
func (r *Repo) PageSession(ctx context.Context, id ID) (ID, error) {
	p, err := r.readPointPage(ctx, id)
	return p.Session, errs.Wrap("read points", pagePrefix+id.String(), err)
}

// PageIDs yields the IDs of all pages of points. An error ends it.
func (r *Repo) PageIDs(ctx context.Context) iter.Seq2[ID, error] { return r.listIDs(ctx, pagePrefix) }

// DeletePage removes a page that no head names. Absent is success. Durable on return.
func (r *Repo) DeletePage(ctx context.Context, id ID) error {
	return errs.Wrap("delete points", pagePrefix+id.String(), r.store.Delete(ctx, pagePrefix+id.String()))
}

// merges reports whether page i fits into one page with the before points that precede it or, if there are none, with
// the next page.
func (h *Head) merges(i, before int) bool {
	n := h.Pages[i].Count
	if before > 0 {
		return before+n <= maxPaged
	}
	return i+1 < len(h.Pages) && n+h.Pages[i+1].Count <= maxPaged
}

// Fragmented reports whether [PagePutter.Edit] could merge many pages.
func (h *Head) Fragmented() bool {
	n := 0
	for i := range h.Pages {
		if h.merges(i, 0) {
			n++
		}
	}
	return n >= 8
}
