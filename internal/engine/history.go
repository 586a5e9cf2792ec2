package engine

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine/catalog"
)

const opHistory = "history"

// HistoryRequest says which events to read.
type HistoryRequest struct {
	Ref   ref.Ref // volume, golden, snapshot or generation whose events are read, whatever its names were; zero: all
	After int64   // number of the last event that the reader knows; 0: it knows none
	Limit int     // most events to read: the next ones or, without After, the newest ones; 0: all
}

// History is what the method of that name has read.
type History struct {
	Events []api.Event
	Next   int64 // the After with which to go on: no event that was wanted lies between the last one and it
	More   bool  // whether there are further ones: later ones or, without After, earlier ones
}

// History reads events, the oldest first. If there were events between After and the first one that are no longer
// there, or After is not a number of this catalogue, the first event is an api.EventGap, beyond Limit. To follow a
// pool, read the last event, then everything that is of interest, and then the events after Next, again and again.
// NotFound: nothing has the reference, or had it.
func (e *Engine) History(ctx context.Context, q HistoryRequest) (out History, err error) {
	if q.Limit < 0 || q.After < 0 {
		return out, errs.New(errs.Invalid, opHistory, "", "a limit and the number of an event must not be negative")
	}

	// Read one more than asked for, to know whether there are others.
	all := func(catalog.Event) bool { return true }
	limit := q.Limit
	if limit > 0 {
		q.Limit++
	}
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		removed, last, err := tx.EventRange()
		if err != nil {
			return err
		}

		var events []api.Event
		switch {
		case q.Ref.Name != "":
			events, err = readTrail(tx, q)
		case q.After > 0:
			events, err = readEvents(tx, q, false, all)
		default:
			events, err = readEvents(tx, q, true, all)
			slices.Reverse(events)
		}

		out = History{Events: events, Next: last, More: limit > 0 && len(events) > limit}
		switch {
		case out.More && q.After > 0:
			out.Events = events[:limit]
			out.Next = events[limit-1].Seq
		case out.More:
			out.Events = events[1:]
		}
		if q.After > 0 {
			out.addGap(q.After, removed, last)
		}
		return err
	})
	return out, err
}

// addGap puts an api.EventGap before the events if others after a number were removed, or if the number is none of this
// catalogue, which may be an old copy of the one that had it.
func (h *History) addGap(after, removed, last int64) {
	gap := api.Event{Event: api.EventGap, Seq: removed, At: time.Now().UTC()}
	if after > last {
		gap.Seq = last
	} else if after >= removed {
		return
	}
	h.Events = append([]api.Event{gap}, h.Events...)
}

// readEvents reads the events that may be seen and that wanted chooses.
func readEvents(
	tx *catalog.Tx, q HistoryRequest, back bool, wanted func(catalog.Event) bool,
) (out []api.Event, err error) {
	err = tx.Events(q.After, back, func(v catalog.Event) (bool, error) {
		if !wanted(v) {
			return true, nil
		}
		if err := tx.AskEvent(opHistory, v); err != nil {
			return true, unlessHidden(err)
		}
		out = append(out, eventOf(v))
		return len(out) != q.Limit, nil
	})
	return out, err
}

func eventOf(v catalog.Event) api.Event {
	out := api.Event{Seq: v.Seq, At: v.At, Event: v.Kind, Ref: v.Ref, ID: string(v.ID), WhoUID: v.Who, Op: v.Op,
		Detail: v.Detail}
	if v.Object != "" {
		out.Kind = kindOf(v.Object, v.Ref)
	}
	return out
}

// readTrail reads the events of what a reference names.
func readTrail(tx *catalog.Tx, q HistoryRequest) ([]api.Event, error) {
	limit := q.Limit
	if q.After > 0 {
		q.Limit = 0 // names must be followed from the newest event back
	}
	out, err := readEvents(tx, q, true, trailOf(q.Ref).has)
	if err != nil {
		return nil, err
	}

	slices.Reverse(out)
	if q.After > 0 && limit > 0 && len(out) > limit {
		out = out[:limit]
	}
	if len(out) > 0 {
		return out, nil
	}

	// Nothing happened to it, or there is no such thing.
	_, err = tx.Resolve(opHistory, q.Ref)
	if errs.Is(err, errs.NotFound) && q.After > 0 {
		_, err = readTrail(tx, HistoryRequest{Ref: q.Ref, Limit: 1})
	}
	return nil, err
}

// trail finds the events about what a reference names, or once named, from the newest event back. Names are followed
// through renames.
type trail struct {
	of   ref.Ref
	refs map[ref.Ref]bool // references that it had when the last event had happened
}

// trailOf returns the trail of what a reference names: with all snapshots or generations, if it names none.
func trailOf(r ref.Ref) *trail { return &trail{r, map[ref.Ref]bool{r: true}} }

// has reports whether an event belongs to the trail. Events must come the newest first.
func (l *trail) has(v catalog.Event) bool {
	if v.Object == "" {
		return false
	}

	was := splitRef(v.Ref)
	has := l.names(was)
	switch v.Kind {
	case api.EventRename:
		before := splitRef(v.Detail)
		has = has || l.names(before)
		for r := range maps.Clone(l.refs) {
			if old, ok := renamed(r, was, before); ok {
				has = true
				l.drop(r)
				l.refs[old] = true
			}
		}
	case api.EventCreate:
		l.drop(was)
	}
	return has
}

// renamed returns the reference that what r names gets if from gets the reference to.
func renamed(r, from, to ref.Ref) (now ref.Ref, ok bool) {
	switch {
	case r == from:
		return to, true
	case from.At == "" && r.Name == from.Name: // snapshots and generations follow
		return ref.Ref{Name: to.Name, At: r.At}, true
	}
	return r, false
}

// drop removes a reference that named something else before. That belongs to the trail only if it is the reference
// asked for.
func (l *trail) drop(r ref.Ref) {
	if r != l.of {
		delete(l.refs, r)
	}
}

// names reports whether a reference is one of the trail's, or one to a part of what it names.
func (l *trail) names(r ref.Ref) bool { return l.refs[r] || l.refs[ref.Ref{Name: r.Name}] }

// Trail finds the events about what a reference names from now on. Names are followed through renames.
type Trail struct{ now ref.Ref }

// NewTrail returns the trail of what a reference names: with all snapshots or generations, if it names none. The zero
// reference stands for everything.
func NewTrail(r ref.Ref) *Trail { return &Trail{r} }

// Has reports whether an event belongs to the trail. Events must come the oldest first.
func (l *Trail) Has(v api.Event) bool {
	if v.Event == api.EventGap || l.now.Name == "" {
		return true
	}
	if v.Kind == "" {
		return false
	}

	r := splitRef(v.Ref)
	if v.Event == api.EventRename {
		if now, ok := renamed(l.now, splitRef(v.Detail), r); ok {
			l.now = now
			return true
		}
	}
	return r == l.now || l.now.At == "" && r.Name == l.now.Name
}

func splitRef(s string) ref.Ref {
	name, at, _ := strings.Cut(s, "@")
	return ref.Ref{Name: name, At: at}
}
