package cli

import (
	"context"
	"os"
	"strconv"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/front/viaservice"

	"github.com/spf13/cobra"
)

// historyMost is how many events `pando history` prints without --limit.
const historyMost = 100

func (a *App) historyCommand() *cobra.Command {
	var since string
	q := engine.HistoryQuery{Limit: historyMost}
	c := &cobra.Command{
		Use:     "history [REF]",
		GroupID: "pool",
		Short:   "List who did what, and when",
		Long: `List what was done to REF, the oldest event first: a volume with its snapshots,
a golden with its generations, or only VOLUME@SNAPSHOT or GOLDEN@N. REF may no
longer exist, and events from before a rename are listed, too. Without REF, list
the events of all objects in the pool.

BY is the user for whom pando serve acted, else who ran sudo, else who logged in,
else the user of the process. --json has all of them, and IDs.

The history is a log for people, not an audit trail: root can change it, and the
last events before a power loss may be missing. The pool keeps the newest events
in two files of up to 8 MiB, about 80,000 events. The history works even if the
pool is not mounted or its catalogue is damaged.`,
		Example: "  pando history job-17\n  pando history --since 2h\n" +
			"  pando history --since 2026-11-25T08:00:00Z --limit 0 --json",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeRefs(1),
	}

	c.Flags().StringVar(&since, "since", "", "list events since `TIME`: 2h, 7d, 2026-11-25 or 2026-11-25T08:00:00Z")
	c.Flags().IntVar(&q.Limit, "limit", historyMost, "list only the newest `N` events; 0: all")

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if q.Limit < 0 {
			return errs.New(errs.Invalid, "history", "--limit", "the limit must not be negative (got %d)", q.Limit).
				WithHint("use --limit 0 for all events")
		}
		if c.Flags().Changed("since") {
			if q.Since, err = parseSince("history", since, time.Now()); err != nil {
				return err
			}
		}
		if len(args) > 0 {
			r, err := ref.Parse("history", args[0])
			if err != nil {
				return err
			}
			q.Ref = r.String()
		}
		return a.history(c.Context(), q)
	}

	return c
}

// parseSince reads a duration before now, a day or a time. Invalid.
func parseSince(op, s string, now time.Time) (time.Time, error) {
	if d, err := parseTTL(op, s); err == nil {
		return now.Add(-d), nil
	}
	for _, layout := range []string{
		time.RFC3339, "2006-01-02T15:04:05", time.DateTime, "2006-01-02 15:04", time.DateOnly,
	} {
		if t, err := time.ParseInLocation(layout, s, now.Location()); err == nil {
			return t, nil
		}
	}
	return time.Time{}, errs.New(errs.Invalid, op, s, "not a duration or a time").
		WithHint("use for example 2h, 7d, 2026-11-25 or 2026-11-25T08:00:00Z")
}

// history prints events. It opens only the directory of the pool: a command that only looks must not clean up.
func (a *App) history(ctx context.Context, q engine.HistoryQuery) error {
	out, err := a.readHistory(ctx, q)
	switch {
	case err != nil:
		return err
	case a.json:
		events := out.Events
		if events == nil {
			events = []engine.HistoryEvent{}
		}
		return a.printJSON(events)
	case len(out.Events) == 0:
		a.printNote("no events")
		return nil
	}

	t := a.table("TIME", "VERB", "NAME", "BY", "COMMAND", "DETAILS")
	for _, e := range out.Events {
		cells := []string{e.Time.Local().Format(time.DateTime), e.Verb, e.Name, showPath(engine.Path(e.By())), e.Command}
		if d := historyDetails(e); d != "" {
			cells = append(cells, d)
		}
		t.row(cells...)
	}
	if err := t.flush(); err != nil {
		return err
	}

	if out.More {
		a.printNote("there are older events; list all with `--limit 0`")
	}
	return nil
}

// readHistory reads events of the pool, or asks the service for them.
func (a *App) readHistory(ctx context.Context, q engine.HistoryQuery) (engine.History, error) {
	if a.service == "" {
		return engine.ReadHistory(a.poolDir(), q)
	}
	p, err := viaservice.Open(a.service)
	if err != nil {
		return engine.History{}, err
	}
	defer p.Close()
	return p.History(ctx, q)
}

// historyDetails says what is particular to the verb of an event.
func historyDetails(e engine.HistoryEvent) string {
	switch {
	case e.NameBefore != "":
		return "was " + e.NameBefore
	case e.Verb == "push":
		return "to " + e.Remote
	case e.Remote != "":
		return "from " + e.Remote
	case e.Mountpoint != "":
		return "at " + showPath(engine.Path(e.Mountpoint))
	case e.Until != nil:
		return "until " + e.Until.Local().Format(time.DateTime)
	case e.SizeBytes > 0:
		return formatBytes(e.SizeBytes)
	case e.Verb == "rewind":
		return "to " + e.Origin
	case e.Why != "":
		return e.Why
	case e.Origin != "" && e.Kind != "snapshot":
		return "from " + e.Origin
	}
	return ""
}

// userNameMost limits the bytes of a user's name that comes from the environment.
const userNameMost = 256

// actor describes for the history who runs a command. Only the path of the verb is recorded: arguments may contain
// secrets.
func actor(c *cobra.Command) engine.Actor {
	out := engine.Actor{Command: c.CommandPath()}
	if n, err := strconv.ParseUint(os.Getenv("SUDO_UID"), 10, 32); err == nil {
		id := uint32(n)
		out.SudoUID = &id
		if name := os.Getenv("SUDO_USER"); len(name) <= userNameMost {
			out.SudoUser = name
		}
	}
	return out
}
