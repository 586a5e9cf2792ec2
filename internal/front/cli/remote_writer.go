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
		Short: "Show or replace the identity of this pool as a writer",
		Long: `Show the identity with which this pool writes to remotes. A volume on a remote
has one writer, which is a pool. If a pool is copied together with its disk (a
restored virtual machine image, two machines made from one template), all copies
have the same identity. The first copy that pushes stays the writer; pushes of
the others fail (conflict), and so do pushes of a pool that was restored from a
backup and no longer knows what it pushed.

--new gives this pool an identity of its own. Volumes that it wrote on remotes
then belong to another writer: take over those that this pool is to write
(` + "`pando pull VOLUME --from REMOTE --take-over --update`" + `), or push them under other
names (--as). Interrupted pushes start again from the beginning. Nothing on the
remotes is changed.`,
		Example: "  pando remote writer\n  pando remote writer --new",
		Args:    cobra.NoArgs,
	}

	c.Flags().BoolVar(&fresh, "new", false, "give this pool a new identity")

	c.RunE = a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
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

	a.printFields("writer", w.ID, "was", w.Previous, "host", w.Host)

	if w.New {
		a.printNote("take over the volumes that this pool is to write: " +
			"`pando pull VOLUME --from REMOTE --take-over --update`")
	}

	return nil
}
