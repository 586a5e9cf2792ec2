package cli

import (
	"context"
	"fmt"

	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) gcCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "gc",
		GroupID: "pool",
		Short:   "Clean up, and return free space",
		Long: `Compares everything in the pool with the catalogue, removes what was half made or
half destroyed, detaches loop devices that nothing accounts for, and returns the
free space of a pool in a sparse file to the filesystem below. Every command does
the urgent part of this by itself; gc looks at everything. It never removes what
it does not understand: that is reported.`,
		Args: usage(cobra.NoArgs),
		RunE: a.with(func(ctx context.Context, e *engine.Engine, _ []string) error {
			r, err := e.GC(ctx)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(r)
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
			return a.fields(
				"looked at", plural(r.Objects, "object"),
				"removed", fmt.Sprintf("%s half made or half destroyed, %d destroyed earlier", plural(r.Garbage, "object"), r.Reclaimed),
				"detached", fmt.Sprintf("%s, %d stale attachments forgotten", plural(r.Loops, "loop device"), r.Detached),
				"returned", size(r.FreedBytes)+" in the pool",
				"host", host,
			)
		}),
	}
}
