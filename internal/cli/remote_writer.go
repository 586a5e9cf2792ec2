package cli

import (
	"context"

	"pando/internal/engine"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

func (a *App) remoteWriterCommand() *cobra.Command {
	var fresh bool
	c := &cobra.Command{
		Use:   "writer",
		Short: "Show who this pool is to remotes, or give it an identity of its own",
		Long: `A volume on a remote has one writer, which is a pool. Of a pool that was copied with
its disk (a restored image of a virtual machine, two machines made from one
template), each copy would be that writer. The first copy that pushes stays it; the
others are refused (conflict), and so is a pool that was restored from a backup and
has forgotten what it pushed.

--new gives this pool an identity of its own. The volumes that it wrote on remotes are
then another pool's: take over those that this pool is to write (` + "`pando pull\nREMOTE VOLUME --take-over --update`" + `), or push them under other names (--as). Pushes
that were interrupted begin afresh. Nothing on remotes is changed.`,
		Example: "  pando remote writer\n  pando remote writer --new",
		Args:    usage(cobra.NoArgs),
	}

	c.Flags().BoolVar(&fresh, "new", false, "give this pool a new identity")

	c.RunE = a.with(func(ctx context.Context, e *engine.Engine, _ []string) error {
		var out replicate.WriterIdentity
		var err error
		if fresh {
			out, err = replicate.NewWriter(ctx, e)
		} else {
			out, err = replicate.Writer(e)
		}
		if err != nil {
			return err
		}
		return a.printWriter(out)
	})

	return c
}

func (a *App) printWriter(w replicate.WriterIdentity) error {
	switch {
	case a.json:
		return a.printJSON(w)
	case a.quiet:
		return a.printf("%s\n", w.ID)
	}

	if err := a.fields("writer", w.ID, "was", w.Previous, "host", w.Host); err != nil {
		return err
	}

	if w.New {
		a.note("take over what this pool is to write with `pando pull REMOTE VOLUME --take-over --update`")
	}

	return nil
}
