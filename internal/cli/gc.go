package cli

import (
	"fmt"

	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) gcCommand() *cobra.Command {
	explain := false
	c := &cobra.Command{
		Use:     "gc",
		GroupID: "pool",
		Short:   "Clean up, and return free space",
		Long: `Removes what was destroyed, what was half made when a process died, volumes whose
time to live is over, and generations that their golden does not keep; detaches
loop devices that nothing accounts for; and returns the free space of a pool in a
sparse file to the filesystem below. Every command does the urgent part of this
by itself, within a bound; gc looks at everything and takes the time it needs. It
never removes what it does not understand: that is reported.

With --explain it measures what each thing that it removes returns to the pool,
and says of everything else why it stays: pinned until when, mounted where, held
by which process in which mount namespace, made from by what.`,
		Args: usage(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			e, err := engine.Open(c.Context(), a.poolDir(), a.Drivers, engine.ShortLived)
			if err != nil {
				return err
			}
			defer e.Close()
			r, err := e.GC(c.Context(), explain)
			if err != nil {
				return err
			}
			return a.printGC(r, explain)
		},
	}

	c.Flags().BoolVar(&explain, "explain", false, "say why everything stays, and what each thing that goes returns")
	return c
}

func (a *App) printGC(r *engine.GCReport, explain bool) error {
	if a.json {
		return a.printJSON(r)
	}

	for _, w := range r.Warnings {
		a.warn("%s", w)
	}

	for _, k := range r.Kept {
		a.warn("%s", k)
	}

	for _, m := range r.Missing {
		a.warn("%s is in the catalogue, but its data is gone", m)
	}

	if a.quiet {
		return nil
	}

	host := ""
	if r.TrimmedBytes > 0 {
		host = fmt.Sprintf("%s given back by the pool's file", size(r.HostFreed))
	}

	expired, untied := "", ""
	if r.Untied > 0 {
		untied = plural(r.Untied, "thing") + " that others needed when it was destroyed"
	}

	if r.Expired+r.Retired > 0 {
		expired = fmt.Sprintf("%s whose time was over, %s not kept any more", plural(r.Expired, "volume"),
			plural(r.Retired, "generation"))
	}

	if err := a.fields(
		"looked at", plural(r.Objects, "object"),
		"removed", fmt.Sprintf("%s half made or half destroyed, %d destroyed earlier", plural(r.Garbage, "object"),
			r.Reclaimed),
		"expired", expired, "untied", untied,
		"detached", fmt.Sprintf("%s, %d stale attachments forgotten", plural(r.Loops, "block device"), r.StaleMounts),
		"returned", size(r.FreedBytes)+" in the pool",
		"host", host,
	); err != nil || !explain {
		return err
	}

	if len(r.Freed) > 0 {
		if err := a.printf("\n"); err != nil {
			return err
		}

		t := a.table("REMOVED", "RETURNED", "WHY")
		for _, f := range r.Freed {
			bytes := "-"
			if f.Bytes >= 0 {
				bytes = size(f.Bytes)
			}
			t.row(f.Ref, bytes, f.Why)
		}

		if err := t.flush(); err != nil {
			return err
		}
	}

	if len(r.KeptThings) == 0 {
		return nil
	}

	if err := a.printf("\n"); err != nil {
		return err
	}

	t := a.table("KEPT", "KIND", "WHY")
	for _, k := range r.KeptThings {
		for i, m := range k.Why {
			why := words(m)
			switch {
			case i > 0:
				t.row("", "", why)
			case k.Kind == "tie":
				t.row(k.Ref, k.Kind, why+" ("+size(k.Bytes)+")")
			default:
				t.row(k.Ref, k.Kind, why)
			}
		}
	}

	return t.flush()
}
