package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/service/listing"

	"github.com/spf13/cobra"
)

func (a *App) historyCommand() *cobra.Command {
	var q engine.HistoryRequest
	var follow bool
	c := &cobra.Command{
		Use:     "history [REF]",
		GroupID: "pool",
		Short:   "Show what has changed in the pool, when, and who did it",
		Long: `Show the last changes of the pool, the newest at the end: what was made, renamed,
mounted, changed and destroyed, when, and by whom. With REF, show only those of a
volume with its snapshots, of a golden with its generations, or of one snapshot or
generation, under all the names that it had, even after it was destroyed.

The pool keeps the last 100,000 events. With --json, each has a number, "seq", and
--after NUMBER shows the next events. An event of the kind "gap" says that events
are missing: they were older than those that the pool keeps, or the catalogue was
rebuilt. After it, and after "boot" and "rebuild", look at everything anew.

--follow waits for further events and shows each when it happens, after the last
--limit ones; with --json, it prints one line for each. It follows REF through
renames.`,
		Example: "  pando history\n" +
			"  pando history web --limit 0\n" +
			"  pando history --follow --json",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeRefs(1),
	}

	c.Flags().Int64Var(&q.After, "after", 0, "show the events after the one with this `number`")
	c.Flags().IntVar(&q.Limit, "limit", 100, "show at most this `number` of events: the last ones or, with --after, the "+
		"next ones; 0: all")
	c.Flags().BoolVarP(&follow, "follow", "f", false, "wait for further events")
	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if err := checkHistoryFlags(q); err != nil {
			return err
		}
		if len(args) > 0 {
			if q.Ref, err = ref.Parse("history", args[0]); err != nil {
				return err
			}
		}
		if follow {
			return a.followHistory(c.Context(), q)
		}
		return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
			return a.history(ctx, e, q)
		})(c, args)
	}
	return c
}

func checkHistoryFlags(q engine.HistoryRequest) error {
	if q.After < 0 {
		return errs.New(errs.Invalid, "history", "--after", "the number of an event is not negative (got %d)", q.After)
	}
	if q.Limit < 0 {
		return errs.New(errs.Invalid, "history", "--limit", "must not be negative (got %d)", q.Limit).
			WithHint("use 0 for all events")
	}
	return nil
}

// history prints events. It asks for one more than the limit, to know whether there are others.
func (a *App) history(ctx context.Context, e *engine.Engine, q engine.HistoryRequest) error {
	limit := q.Limit
	if limit > 0 {
		q.Limit++
	}
	h, err := e.History(ctx, q)
	if err != nil {
		return err
	}

	events, more := h.Events, ""
	if limit > 0 && len(events) > 0 && events[0].Kind == engine.EventGap {
		limit++
	}
	if n := len(events); limit > 0 && n > limit {
		if q.After > 0 {
			events, more = events[:limit], "there are later events"
		} else {
			events, more = events[n-limit:], "there are earlier events; --limit 0 shows all"
		}
	}

	switch {
	case a.json:
		err = a.printJSON(append([]engine.Event{}, events...)) // [] and not null
	case len(events) == 0:
		a.printNote("no events")
	default:
		err = a.printEvents(a.eventTable(), events)
	}
	if more != "" {
		a.printNote("%s", more)
	}
	return err
}

// Follower looks for further events so often, and reads at most so many at once.
const (
	followPeriod = 200 * time.Millisecond
	followPage   = 1000
)

// historyFollower prints events, and then further ones.
type historyFollower struct {
	*App
	q     engine.HistoryRequest
	trail *engine.Trail // trail of the events that are wanted
	begun bool          // whether the first round has ended
	rows  *table
	over  func() // ends the command
	err   error  // error of printing
}

// followHistory prints events, and then further ones until it is interrupted.
func (a *App) followHistory(ctx context.Context, q engine.HistoryRequest) error {
	if q.After > 0 {
		q.Limit = 0
	}
	ctx, over := context.WithCancel(ctx)
	defer over()

	f := &historyFollower{App: a, q: q, trail: engine.NewTrail(q.Ref), rows: a.eventTable(), over: over}
	return cmp.Or(a.repeat(ctx, followPeriod, "reading events", f.round), f.err)
}

// round prints the events since the last round. The pool is opened for each, so that a rebuild of its catalogue is
// noticed.
func (f *historyFollower) round(ctx context.Context) (some bool, err error) {
	e, err := f.openReadOnly(ctx)
	if err != nil {
		return false, err
	}
	defer e.Close()

	for more := true; more; f.begun = true {
		h, err := e.History(ctx, f.q)
		if err != nil {
			return f.begun, err
		}

		more = f.begun && len(h.Events) >= followPage
		if f.begun { // before, the engine has chosen them
			h.Events = slices.DeleteFunc(h.Events, func(v engine.Event) bool { return !f.trail.Has(v) })
		}
		if f.err = f.print(h.Events); f.err != nil || f.unprinted != nil {
			f.over()
			return true, nil
		}
		f.q = engine.HistoryRequest{After: h.Next, Limit: followPage}
	}
	return true, nil
}

func (f *historyFollower) print(events []engine.Event) error {
	switch {
	case f.json:
		return f.printEventLines(events)
	case len(events) > 0:
		return f.printEvents(f.rows, events)
	}
	return nil
}

// printEventLines prints a line of JSON for each event.
func (a *App) printEventLines(events []engine.Event) error {
	enc := json.NewEncoder(a.Stdout)
	enc.SetEscapeHTML(false)
	for _, v := range events {
		if err := enc.Encode(v); err != nil {
			return a.written(err)
		}
	}
	return nil
}

func (a *App) eventTable() *table { return a.table("TIME", "EVENT", "REF", "BY", "WITH", "DETAIL") }

// printEvents prints events as rows of a table or, with -q, what they are about.
func (a *App) printEvents(t *table, events []engine.Event) error {
	if a.quiet {
		for _, v := range events {
			if v.Ref != "" {
				a.printf("%s\n", v.Ref)
			}
		}
		return a.unprinted
	}

	for _, v := range events {
		if v.Kind == engine.EventGap {
			t.row("-", string(v.Kind), "-", "-", "-", "events before the next one are missing")
			continue
		}
		t.row(v.At.Local().Format(time.DateTime), string(v.Kind), orDash(v.Ref), listing.OwnerName(v.WhoUID), orDash(v.Op),
			eventDetail(v))
	}
	return t.flush()
}

// eventDetail words the detail of an event.
func eventDetail(v engine.Event) string {
	if v.Detail == "" {
		return "-"
	}
	switch v.Kind {
	case engine.EventCreate:
		return "from " + v.Detail
	case engine.EventReplace:
		return "before: " + v.Detail
	case engine.EventRename:
		return "was " + v.Detail
	case engine.EventMount, engine.EventUmount:
		return "at " + v.Detail
	}
	return v.Detail
}
