package cli

import (
	"context"
	"encoding/json"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/service/follow"
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
		ValidArgsFunction: a.completeArgs(anyRef),
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

// history prints events.
func (a *App) history(ctx context.Context, e *engine.Engine, q engine.HistoryRequest) error {
	h, err := e.History(ctx, q)
	if err != nil {
		return err
	}

	switch {
	case a.json:
		err = a.printJSON(append([]api.Event{}, h.Events...)) // [] and not null
	case len(h.Events) == 0:
		a.printNote("no events")
	default:
		err = a.printEvents(a.eventTable(), h.Events)
	}

	switch {
	case h.More && q.After > 0:
		a.printNote("there are later events")
	case h.More:
		a.printNote("there are earlier events; --limit 0 shows all")
	}
	return err
}

// followPeriod is the pause between two looks for further events.
const followPeriod = 200 * time.Millisecond

// followHistory prints events, and then further ones until it is interrupted. The pool is opened in each round, so that
// a rebuild of its catalogue is noticed.
func (a *App) followHistory(ctx context.Context, q engine.HistoryRequest) error {
	ctx, over := context.WithCancel(ctx)
	defer over()

	f := follow.New(q)
	rows := a.eventTable()
	return a.repeat(ctx, followPeriod, "reading events", func(ctx context.Context) (bool, error) {
		e, err := a.openReadOnly(ctx)
		if err != nil {
			return false, err
		}
		defer e.Close()

		for more := true; more; {
			var events []api.Event
			if events, more, err = f.Next(ctx, e); err != nil {
				return f.Begun(), err
			}
			if a.printFurther(rows, events) != nil {
				over()
				break
			}
		}
		return true, nil
	})
}

// printFurther prints events as lines of JSON, or as rows of a table.
func (a *App) printFurther(rows *table, events []api.Event) error {
	switch {
	case a.json:
		return a.printEventLines(events)
	case len(events) > 0:
		return a.printEvents(rows, events)
	}
	return nil
}

// printEventLines prints a line of JSON for each event.
func (a *App) printEventLines(events []api.Event) error {
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
func (a *App) printEvents(t *table, events []api.Event) error {
	if a.quiet {
		for _, v := range events {
			if v.Ref != "" {
				a.printf("%s\n", v.Ref)
			}
		}
		return a.unprinted
	}

	for _, v := range events {
		if v.Event == api.EventGap {
			t.row("-", string(v.Event), "-", "-", "-", "events before the next one are missing")
			continue
		}
		t.row(v.At.Local().Format(time.DateTime), string(v.Event), orDash(v.Ref), listing.OwnerName(v.WhoUID), orDash(v.Op),
			eventDetail(v))
	}
	return t.flush()
}

// eventDetail words the detail of an event.
func eventDetail(v api.Event) string {
	if v.Detail == "" {
		return "-"
	}
	switch v.Event {
	case api.EventCreate:
		return "from " + v.Detail
	case api.EventReplace:
		return "before: " + v.Detail
	case api.EventRename:
		return "was " + v.Detail
	case api.EventMount, api.EventUmount:
		return "at " + v.Detail
	}
	return v.Detail
}
