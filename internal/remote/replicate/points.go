package replicate

import (
	"context"
	"errors"
	"iter"
	"math"
	"slices"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
)

// A head lists its newest points. Older ones are in pages, which are never changed, only replaced. A reader of a page
// may find that the head was rewritten since and that a prune removed the page: it then reads the head again, and
// continues where it was. Pages that cannot be read are skipped: the caller decides what that means.

// pageFault is a page of points that cannot be read.
type pageFault = repo.PageError

// pageFilter selects pages of points. A nil filter selects all.
type pageFilter func(repo.PointPage) bool

// pageHolding selects the page that holds the point with the given number.
func pageHolding(seq uint64) pageFilter {
	return func(p repo.PointPage) bool { return p.First <= seq && seq <= p.Last }
}

// pagesNear selects the pages that may hold a point created at the given time.
func pagesNear(at time.Time) pageFilter {
	return func(p repo.PointPage) bool { return p.Near(at) }
}

// pointSeq is a sequence of points. An error ends it.
type pointSeq = iter.Seq2[repo.Point, error]

// olderPoints yields the points in those pages of a head that want selects, newest first. Faults of pages are added to
// bad, unless it is nil.
func olderPoints(ctx context.Context, r *repo.Repo, h repo.Head, want pageFilter, bad *[]*pageFault) pointSeq {
	return func(yield func(repo.Point, error) bool) {
		below := uint64(math.MaxUint64)
		left := func() (out []repo.PointPage) {
			for _, p := range slices.Backward(h.Pages) {
				if p.First < below && (want == nil || want(p)) {
					out = append(out, p)
				}
			}
			return out
		}

		_, err := followPages(ctx, r, &h, left, bad, func(read repo.PageRead) bool {
			for _, x := range slices.Backward(read.Points) {
				if x.Seq < below && !yield(x, nil) {
					return false
				}
			}
			below = min(below, read.Page.First)
			return true
		})
		if err != nil {
			yield(repo.Point{}, err)
		}
	}
}

// allPoints yields all points of a head, oldest first. Faults of pages are added to bad, unless it is nil.
func allPoints(ctx context.Context, r *repo.Repo, h repo.Head, bad *[]*pageFault) pointSeq {
	return func(yield func(repo.Point, error) bool) {
		above := uint64(0)
		left := func() []repo.PointPage {
			return slices.DeleteFunc(slices.Clone(h.Pages), func(p repo.PointPage) bool { return p.Last <= above })
		}
		give := func(points []repo.Point) bool {
			for _, x := range points {
				if x.Seq > above {
					above = x.Seq
					if !yield(x, nil) {
						return false
					}
				}
			}
			return true
		}

		// First the pages, then the recent points of the head as it is by then.
		whole, err := followPages(ctx, r, &h, left, bad, func(read repo.PageRead) bool {
			if !give(read.Points) {
				return false
			}
			above = max(above, read.Page.Last)
			return true
		})

		switch {
		case err != nil:
			yield(repo.Point{}, err)
		case whole:
			give(h.Recent)
		}
	}
}

// followPages calls fn with the pages of h that left returns, until fn returns false; whole is false then. If a page is
// gone because the head was changed, followPages reads the head again, and continues with that. A page that is missing
// from one head after the other counts as damaged: a hostile store could return two old heads in turn forever.
func followPages(
	ctx context.Context, r *repo.Repo, h *repo.Head, left func() []repo.PointPage, bad *[]*pageFault,
	fn func(repo.PageRead) bool,
) (whole bool, err error) {
	for again, heads := true, 0; again; heads++ {
		again = false
		for read := range r.ReadPages(ctx, *h, left()) {
			if read.Err != nil {
				now, is, err := headMovedOn(ctx, r, *h, read)
				if err != nil {
					return false, err
				}
				if is && heads < headTries {
					*h, again = now, true
					break
				}
				appendPageFault(bad, read.Err)
			}

			if !fn(read) {
				return false, nil
			}
		}
	}

	return true, nil
}

// headMovedOn finds out why a page could not be read. It returns true, and the current head, if the head no longer
// names the page.
func headMovedOn(
	ctx context.Context, r *repo.Repo, h repo.Head, read repo.PageRead,
) (now repo.Head, is bool, err error) {
	if ctx.Err() != nil {
		return h, false, ctx.Err()
	}
	if !isUnreadable(read.Err) {
		return h, false, read.Err
	}
	if !errs.Is(read.Err, errs.NotFound) {
		return h, false, nil
	}

	now, _, err = r.Head(ctx, h.Name)
	switch {
	case isUnreadable(err):
		return h, false, nil
	case err != nil:
		return h, false, err
	}

	return now, !headNamesPage(now, read.Page.ID), nil
}

// headNamesPage reports whether a head names a page.
func headNamesPage(h repo.Head, page repo.ID) bool {
	return slices.ContainsFunc(h.Pages, func(p repo.PointPage) bool { return p.ID == page })
}

// appendPageFault adds err to bad if it is about a page, unless bad is nil.
func appendPageFault(bad *[]*pageFault, err error) {
	var f *pageFault
	if bad != nil && errors.As(err, &f) {
		*bad = append(*bad, f)
	}
}

// newestFirst yields all readable points of a head, newest first. It reads each page only when it gets there.
func newestFirst(ctx context.Context, r *repo.Repo, h repo.Head, want pageFilter, bad *[]*pageFault) pointSeq {
	return func(yield func(repo.Point, error) bool) {
		for _, x := range slices.Backward(h.Recent) {
			if !yield(x, nil) {
				return
			}
		}
		for x, err := range olderPoints(ctx, r, h, want, bad) {
			if !yield(x, err) {
				return
			}
		}
	}
}

// findPoint finds the newest point of a head for which is returns true. It reads only pages that want selects, and
// returns false if no readable point matches.
func findPoint(
	ctx context.Context, r *repo.Repo, h repo.Head, want pageFilter, is func(repo.Point) bool,
) (repo.Point, bool, error) {
	for x, err := range newestFirst(ctx, r, h, want, nil) {
		if err != nil {
			return repo.Point{}, false, err
		}
		if is(x) {
			return x, true, nil
		}
	}
	return repo.Point{}, false, nil
}

// headLists reports whether a head still lists a point that was read before. It reads at most one page. In a page that
// cannot be read it finds nothing.
func headLists(ctx context.Context, r *repo.Repo, h repo.Head, pt repo.Point) (bool, error) {
	if h.Gone {
		return false, nil
	}
	if slices.ContainsFunc(h.Recent, func(x repo.Point) bool { return x.Manifest == pt.Manifest }) {
		return true, nil
	}
	_, is, err := findPoint(ctx, r, h, pageHolding(pt.Seq), func(x repo.Point) bool { return x.Manifest == pt.Manifest })
	return is, err
}

// pageWriter writes pages of points of one head, under a session of its own, which it begins with the first page. Call
// checkNotFenced before you commit a head that names the pages: a prune may have ended the session.
type pageWriter struct {
	repo   *repo.Repo
	head   string
	writer repo.Writer

	mu     sync.Mutex
	lease  *lease
	unsure bool // the head that names the pages may have been written, or may still be
}

func newPageWriter(r *repo.Repo, head string) *pageWriter {
	return &pageWriter{repo: r, head: head, writer: repo.Writer{Host: hostLabel()}}
}

func (w *pageWriter) pagePutter() repo.PagePutter {
	return repo.PagePutter{Repo: w.repo, Session: func(ctx context.Context) (repo.ID, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.lease == nil {
			_, l, err := beginSession(context.WithoutCancel(ctx), w.repo, repo.Push, []string{w.head}, w.writer)
			if err != nil {
				return repo.ID{}, err
			}
			w.lease = l
		}
		return w.lease.id, nil
	}}
}

// checkNotFenced returns nil if the pages may be committed over a head, and errEnded otherwise.
func (w *pageWriter) checkNotFenced(h repo.Head) error {
	if w.lease != nil && slices.Contains(h.Fenced, w.lease.id) {
		return errEnded
	}
	return nil
}

// noteOutcome records the result of writing the head that names the pages.
func (w *pageWriter) noteOutcome(err error) {
	w.unsure = err != nil && (objstore.Temporary(err) || !errs.Is(err, errs.Conflict))
}

// endSession ends the session, if there is one. If it is not known whether the head was written, it leaves the session
// to a prune: the pages must stay until that head can no longer be written. A session that cannot be ended is also left
// to a prune.
func (w *pageWriter) endSession(ctx context.Context) {
	switch {
	case w.lease == nil:
	case w.unsure:
		w.lease.abandon()
	default:
		_ = w.lease.endSession(ctx)
	}
}
