package cli

import (
	"fmt"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) gcCommand() *cobra.Command {
	explain := false
	c := &cobra.Command{
		Use:     "gc",
		GroupID: "pool",
		Short:   "Remove garbage, and return free space",
		Long: `Remove destroyed objects, incomplete objects of processes that died, expired
volumes, and generations that their golden no longer keeps; detach stray loop
devices; and return the free space of a pool in a sparse file to the filesystem
below. Every pando command does the urgent part of this work within a time
limit; gc checks everything and takes the time it needs. It never removes
objects that it does not recognise, and reports them instead.

With --explain, pando also measures how much space each removed object returns,
and lists why every other object stays: until when it is pinned, where it is
mounted, which process holds it in which mount namespace, or what was cloned
from it.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			e, err := a.openUnmaintained(c.Context())
			if err != nil {
				return err
			}
			defer e.Close()
			r, err := e.GC(c.Context(), engine.GCRequest{Explain: explain})
			if err != nil {
				return err
			}
			return a.printGC(r, explain)
		},
	}

	c.Flags().BoolVar(&explain, "explain", false,
		"list how much space each removed object returns, and why every other object stays")
	return c
}

func (a *App) printGC(r *engine.GCReport, explain bool) error {
	if a.json {
		return a.printJSON(r)
	}

	for _, w := range r.Warnings {
		a.printWarning("%s", w)
	}

	for _, k := range r.Kept {
		a.printWarning("%s", k)
	}

	for _, m := range r.Missing {
		a.printWarning("%s is in the catalogue, but its data is missing", m)
	}

	if a.quiet {
		return nil
	}

	// Word the fields that not every run has.
	host := ""
	if r.TrimmedBytes > 0 {
		host = fmt.Sprintf("%s returned by the file of the pool", formatBytes(r.HostFreed))
	}

	expired, untied := "", ""
	if r.Untied > 0 {
		untied = errs.Plural(r.Untied, "object") + " destroyed earlier that others needed until now"
	}

	if r.Expired+r.Retired > 0 {
		expired = fmt.Sprintf("%s, %s beyond retention", errs.Plural(r.Expired, "volume"),
			errs.Plural(r.Retired, "generation"))
	}

	a.printFields(
		"checked", errs.Plural(r.Objects, "object"),
		"removed", fmt.Sprintf("%s, %d destroyed earlier", errs.Plural(r.Garbage, "incomplete object"),
			r.Reclaimed),
		"expired", expired, "untied", untied,
		"detached", fmt.Sprintf("%s, removed %s", errs.Plural(r.Loops, "block device"),
			errs.Plural(r.StaleMounts, "stale attachment")),
		"returned", formatBytes(r.FreedBytes)+" in the pool",
		"host", host,
	)

	if explain {
		a.explainGC(r)
	}

	return nil
}

// explainGC prints two tables: the objects that were removed, and why the others stay.
func (a *App) explainGC(r *engine.GCReport) {
	if len(r.Freed) > 0 {
		a.printf("\n")

		t := a.table("REMOVED", "RETURNED", "WHY")
		for _, f := range r.Freed {
			bytes := "-"
			if f.Bytes != nil {
				bytes = formatBytes(*f.Bytes)
			}
			t.row(f.Ref, bytes, f.Why)
		}

		t.flush()
	}

	if len(r.KeptThings) == 0 {
		return
	}

	a.printf("\n")

	t := a.table("KEPT", "KIND", "WHY")
	for _, k := range r.KeptThings {
		for i, m := range k.Why {
			why := renderMessage(m)
			switch {
			case i > 0:
				t.row("", "", why)
			case k.Kind == api.KindTie:
				t.row(k.Ref, string(k.Kind), why+" ("+formatBytes(k.Bytes)+")")
			default:
				t.row(k.Ref, string(k.Kind), why)
			}
		}
	}

	t.flush()
}
