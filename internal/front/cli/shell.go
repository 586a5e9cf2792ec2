package cli

import (
	"slices"

	"pando/internal/api"
	"pando/internal/base/errs"

	"github.com/spf13/cobra"
)

// shellFlag adds --shell.
func shellFlag(c *cobra.Command, shell *bool) {
	c.Flags().BoolVar(shell, "shell", false,
		"print assignments of PANDO_VOLUME and PANDO_MOUNT, for eval in a shell")
}

// failShell prints what makes eval fail, if a command with --shell has failed: a script would go on otherwise, with the
// directory of another volume. args may be wrong in any way.
func (a *App) failShell(c *cobra.Command, args []string) {
	if c.Flags().Lookup("shell") != nil && slices.Contains(args, "--shell") {
		_ = a.printf("unset PANDO_VOLUME PANDO_MOUNT; false\n") // the error of the command says more
	}
}

// checkShell refuses --shell where there is no single volume, or another format.
func (a *App) checkShell(op string, shell, many bool) error {
	switch {
	case shell && a.json:
		return errs.New(errs.Invalid, op, "", "--shell and --json are two formats").WithHint("choose one of them")
	case shell && many:
		return errs.New(errs.Invalid, op, "", "--shell prints one volume, and these are several").
			WithHint("use --json, or call pando once for each volume")
	}
	return nil
}

// printShell prints a volume as assignments that any POSIX shell reads. PANDO_MOUNT is empty if it is not mounted.
func (a *App) printShell(v api.Object) error {
	return a.printf("PANDO_VOLUME=%s\nPANDO_MOUNT=%s\n", shellWord(v.Name), shellWord(v.Mountpoint))
}
