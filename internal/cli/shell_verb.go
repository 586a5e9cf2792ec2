package cli

import (
	"cmp"
	"os"

	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

// shellHelp is the text of `pando shell --help`.
const shellHelp = `Run COMMAND, or without one the shell that SHELL names, in VOLUME. A volume that
is not mounted is mounted for that time. The exit code is that of the command,
which finds the mount point in PANDO_MOUNT and the name of the volume in
PANDO_VOLUME. It does not get the secrets that pando reads from the environment.

The overlay of a user is mounted in a namespace of its own, where only the
command and what it starts see it: this needs no root. Until the command ends,
other commands on the volume are refused, and so is a second shell. What the
command has started ends with it, and with pando.

Otherwise, if processes that the command started still use the volume, it stays
mounted, and pando names them. If pando is killed, the command goes on.`

func (a *App) shellCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "shell VOLUME [-- COMMAND [ARG...]]",
		GroupID: "volumes",
		Short:   "Run a shell or a command in an existing volume",
		Long:    shellHelp,
		Example: "  pando shell job-17\n  pando shell job-17 -- git status",
		Args:    cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVolumes(1),
	}
	c.Flags().SetInterspersed(true)
	c.RunE = func(c *cobra.Command, args []string) (err error) {
		q := engine.ShellRequest{Command: args[1:]}
		if q.Volume, err = ref.ParseName("shell", args[0]); err != nil {
			return err
		}

		if err := checkDash(c, "shell", args); err != nil {
			return err
		}

		if len(q.Command) == 0 {
			q.Command = []string{cmp.Or(os.Getenv("SHELL"), "/bin/sh")}
		}

		q.Stdin, q.Stdout, q.Stderr = os.Stdin, os.Stdout, os.Stderr
		q.Env, q.Signals = withoutSecrets(os.Environ()), foregroundSignals
		e, err := a.openPool(c.Context())
		if err != nil {
			return err
		}

		defer e.Close()

		ctx, tell := a.collectWarnings(c.Context())
		defer tell()

		r, err := e.Shell(ctx, q)
		return a.endShell(r, err)
	}
	return c
}

// endShell says what became of the volume of a shell. The exit status is that of the command, as in endRun.
func (a *App) endShell(r engine.ShellResult, err error) error {
	a.exit = r.Exit
	if r.Held != nil {
		a.printWarning("volume %s stays mounted at %s: %v", r.Volume, r.Mountpoint, causeOf(r.Held))
		a.printNote("it is unmounted once nothing uses it, at the latest by `pando umount %s`", r.Volume)
	}
	if err != nil && r.Ran && r.Exit != 0 {
		a.printError(err)
		return nil
	}
	return err
}
