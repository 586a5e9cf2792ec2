package cli

import (
	"errors"
	"os"
	"os/signal"
	"syscall"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

// runHelp is the text of `pando run --help`.
const runHelp = `Clone REF, mount the clone, run COMMAND in it, and destroy the clone when the
command ends. The command finds the mount point in PANDO_MOUNT and the name of the
volume in PANDO_VOLUME. It does not get the secrets that pando reads from the
environment: passphrases of remotes, and credentials of AWS and Google Cloud.

The exit code is that of the command, 125 if pando itself failed, 126 if COMMAND
cannot be started, and 127 if there is no such command.

If processes that the command started still use the clone, it stays mounted and
pando names them. The next pando command after they end destroys the clone. With
--keep, unmount it with ` + "`pando umount`" + ` instead.

If the pool cannot store everything that the command wrote to a clone with
--keep, pando fails as umount does, unless the command itself failed.

If pando is killed, the next pando command destroys the clone; with --keep the
clone stays.`

func (a *App) runCommand() *cobra.Command {
	var q engine.RunRequest
	var name string
	c := &cobra.Command{
		Use:               "run REF -- COMMAND [ARG...]",
		GroupID:           "volumes",
		Short:             "Run a command in a fresh clone, then destroy the clone",
		Long:              runHelp,
		Example:           "  pando run web -- make test\n  pando run web --keep -- ./migrate.sh",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeArgs(anyRef),
	}

	c.Flags().BoolVar(&q.Keep, "keep", false, "keep the volume, and unmount it when the command ends")
	c.Flags().StringVar(&name, "name", "", "call the volume `NAME` (default: a generated name)")
	c.Flags().BoolVar(&q.Overlay, "overlay", false, "use an overlay, as with `pando clone` (default: as the golden says)")
	labels := a.labelFlag(c, "run", "the volume")
	rightsFlags(c.Flags(), &q.May)
	c.Flags().SetInterspersed(true)

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if q.From, err = ref.Parse("run", args[0]); err != nil {
			return err
		}

		if c.ArgsLenAtDash() < 0 && len(args) > 1 {
			return errs.New(errs.Invalid, "run", args[0], "the command must follow --").
				WithHint("run `pando run %s -- COMMAND`", args[0])
		}

		if q.Labels, err = labels(); err != nil {
			return err
		}

		q.GoldenDecides = !c.Flags().Changed("overlay")
		if name != "" {
			if q.Name, err = ref.ParseName("clone", name); err != nil {
				return err
			}
		}

		q.Command = args[1:]
		q.Env = withoutSecrets(os.Environ())
		e, err := a.openPool(c.Context())
		if err != nil {
			return err
		}

		defer e.Close()

		// While the command runs, signals go to it, and what it does with them
		// decides when the run ends.
		ctx, tell := a.collectWarnings(c.Context())
		defer tell()

		r, err := e.Run(ctx, q, engine.Terminal{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
			Signals: foregroundSignals})
		return a.endRun(r, err)
	}

	return c
}

// foregroundSignals receives the signals that ask pando to end while a command runs in the
// foreground: it is the command that decides what to do with them.
func foregroundSignals() (arriving <-chan os.Signal, stop func()) {
	c := make(chan os.Signal, 8)
	signal.Notify(c, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	return c, func() { signal.Stop(c) }
}

// endRun says what became of the volume of a run. The exit status is the command's:
// only if that is 0, an error of pando's own decides.
func (a *App) endRun(r engine.RunResult, err error) error {
	a.exit = r.Exit
	switch {
	case r.Held != nil && r.Kept:
		a.printWarning("kept volume %s, still mounted at %s: %v", r.Volume, r.Mountpoint, causeOf(r.Held))
		a.printNote("unmount it with `pando umount %s` once nothing uses it", r.Volume)
	case r.Held != nil:
		a.printWarning("volume %s could not be destroyed yet: %v", r.Volume, causeOf(r.Held))
		a.printNote("the next pando command destroys it once nothing uses it")
	case r.Kept && err == nil:
		a.printNote("kept volume %s", r.Volume)
	}
	if err != nil && r.Ran && r.Exit != 0 {
		a.printError(err)
		return nil
	}

	return err
}

// runExit is the exit code of run for an error of its own.
func runExit(err error) int {
	var start *engine.StartError
	switch {
	case errs.Is(err, errs.Canceled):
		return errs.Canceled.Codes().Exit
	case errors.As(err, &start) && errs.Is(start, errs.NotFound):
		return exitNoProgram
	case errors.As(err, &start):
		return exitCannotStart
	}
	return exitPandoFailed
}

// causeOf is an error without the operation and the reference that it begins with.
func causeOf(err error) error {
	var e *errs.Error
	if errors.As(err, &e) && e.Err != nil {
		return e.Err
	}
	return err
}
