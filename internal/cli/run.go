package cli

import (
	"os"

	"pando/internal/engine"
	"pando/internal/errs"
	"pando/internal/ref"

	"github.com/spf13/cobra"
)

func (a *App) runCommand() *cobra.Command {
	var q engine.RunRequest
	c := &cobra.Command{
		Use:     "run REF -- COMMAND [ARG...]",
		GroupID: "volumes",
		Short:   "Run a command in a fresh clone, then destroy the clone",
		Long: `Clones REF, runs COMMAND with the mounted clone as its working directory, and
destroys the clone when the command has ended. Its exit status is the command's.
The command finds the mount point in PANDO_MOUNT and the name of the volume in
PANDO_VOLUME. It does not get the secrets that pando itself reads from the environment:
passphrases of remotes, and credentials of AWS and Google Cloud. If pando itself is killed, the next pando command cleans up.`,
		Example:           "  pando run web -- make test\n  pando run web --keep -- ./migrate.sh",
		Args:              usage(cobra.MinimumNArgs(1)),
		ValidArgsFunction: a.completeRefs(1),
	}
	c.Flags().BoolVar(&q.Keep, "keep", false, "keep the volume, unmounted")
	c.Flags().StringVar(&q.Name, "name", "", "`NAME` of the volume (default: made up)")
	c.Flags().SetInterspersed(true)
	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if q.From, err = ref.Parse("run", args[0]); err != nil {
			return err
		}
		if c.ArgsLenAtDash() < 0 && len(args) > 1 {
			return errs.New(errs.Invalid, "run", args[0], "the command must stand behind --").WithHint("pando run %s -- COMMAND", args[0])
		}
		q.Command = args[1:]
		q.Stdin, q.Stdout, q.Stderr = os.Stdin, os.Stdout, os.Stderr
		q.Env = withoutSecrets(os.Environ())
		e, err := a.open(c.Context())
		if err != nil {
			return err
		}
		defer e.Release()
		// While the command runs, signals go to it, and what it does with them
		// decides when the run ends.
		r, err := e.Run(c.Context(), q)
		a.exit = r.Exit
		if r.Kept && err == nil {
			a.note("kept volume %s", r.Volume)
		}
		return err
	}
	return c
}
