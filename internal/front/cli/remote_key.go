package cli

import (
	"context"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

func (a *App) remoteKeyCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "key",
		Aliases: []string{"keys"},
		Short:   "Manage the keys that open a remote",
		Long: `List, add, remove, rotate and export the keys of a remote. Data on a remote is
encrypted with a master key that the remote stores only in wrapped form: once
for each pool that uses it, each passphrase, and each age recipient. These are
the keys that ` + "`pando remote key`" + ` manages. Any one of them is enough to read
everything.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}

	c.AddCommand(
		a.remoteKeyLsCommand(),
		a.remoteKeyAddCommand(),
		a.remoteKeyRmCommand(),
		a.remoteKeyRotateCommand(),
		a.remoteKeyExportCommand(),
	)

	return c
}

func (a *App) remoteKeyLsCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "ls REMOTE",
		Aliases:           []string{"list"},
		Short:             "List the keys of a remote",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeRemotes,
		RunE: func(c *cobra.Command, args []string) error {
			r, err := a.findRemote("remote key", args[0])
			if err != nil {
				return err
			}
			keys, err := replicate.Keys(c.Context(), r)
			if err != nil {
				return err
			}
			return a.printKeys(keys)
		},
	}
}

func (a *App) printKeys(keys []replicate.Key) error {
	switch {
	case a.json:
		return a.printJSON(keys)
	case a.quiet:
		for _, k := range keys {
			a.printf("%s\n", k.ID)
		}
		return nil
	}

	t := a.table("ID", "LABEL", "KIND", "RECIPIENT", "CREATED")
	for _, k := range keys {
		label := k.Label
		if k.ThisPool {
			label += " (this pool)"
		}
		t.row(k.ID, label, k.Kind, orDash(k.Recipient), k.CreatedAt.Local().Format(time.DateTime))
	}

	return t.flush()
}

func (a *App) remoteKeyAddCommand() *cobra.Command {
	var n replicate.NewKey
	secret := newSecret{a: a}
	c := &cobra.Command{
		Use:   "add REMOTE",
		Short: "Add a passphrase or an age recipient that can open a remote",
		Long: `Add a key to REMOTE. Anyone who knows the passphrase, or has the identity of the
age recipient, can then open REMOTE and read everything on it.` + "\n\n" + passphraseSources,
		Example: "  pando remote key add backup --passphrase\n  pando remote key add backup --recipient age1... " +
			"--label rescue",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeRemotes,
	}

	f := c.Flags()
	f.StringVar(&n.Label, "label", "", "call the key `LABEL` (default: passphrase, or the start of the recipient)")
	f.StringVar(&n.Recipient, "recipient", "", "add this age `RECIPIENT` (age1...)")
	f.BoolVar(&secret.ask, "passphrase", false, "add a passphrase, and ask for it if no file or variable has it")
	secret.flags(c)

	c.RunE = func(c *cobra.Command, args []string) error {
		r, err := a.findRemote("remote key", args[0])
		if err != nil {
			return err
		}

		if n.Recipient == "" {
			what := "new passphrase for " + r.Name
			if n.Passphrase, err = secret.newPassphrase(c.Context(), "remote key", args[0], what); err != nil {
				return err
			}
		}

		if n.Label == "" {
			n.Label = replicate.PassphraseLabel
			if n.Recipient != "" {
				n.Label = replicate.RecipientLabel(n.Recipient)
			}
		}

		k, err := replicate.AddKey(c.Context(), r, n)
		if err != nil {
			return err
		}

		return a.printKey("added", k)
	}

	return c
}

func (a *App) remoteKeyRmCommand() *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use:     "rm REMOTE KEY",
		Aliases: []string{"remove"},
		Short:   "Remove a key of a remote",
		Long: `Remove KEY (an ID, label or recipient listed by ` + "`pando remote key ls`" + `) from
REMOTE. The holder of KEY can then no longer open the remote, unless they kept a
copy of the master key. In that case, ` + "`pando remote key rotate`" + ` protects data
written later, and only the permissions of the storage protect data that is
already there. The last key cannot be removed.`,
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeRemotes,
		RunE: func(c *cobra.Command, args []string) error {
			r, err := a.findRemote("remote key", args[0])
			if err != nil {
				return err
			}
			k, err := replicate.RemoveKey(c.Context(), r, args[1], force)
			if err != nil {
				return err
			}
			err = a.printKey("removed", k)
			a.warnOnlyKey(c.Context(), r)
			return err
		},
	}

	c.Flags().BoolVar(&force, "force", false, "remove even the key of this pool, which then cannot use the remote")
	return c
}

func (a *App) printKey(done string, k replicate.Key) error {
	return a.printResult(k, k.ID, "%s key %s (%s)\n", done, k.Label, k.Kind)
}

func (a *App) remoteKeyRotateCommand() *cobra.Command {
	var files []string
	c := &cobra.Command{
		Use:   "rotate REMOTE",
		Short: "Encrypt new data with a new master key",
		Long: `Create a new master key for REMOTE and wrap it for every existing key. Data
written from now on is encrypted with it; existing data stays as it is and can
still be read. Rotate after ` + "`pando remote key rm`" + ` if someone may have kept a
copy of the master key. Other hosts need no change.

pando needs the passphrase of each key that is a passphrase. It reads them from
--passphrase-file [KEY=]FILE (KEY is an ID or a label, and required if there are
several), from the environment, or from the terminal.`,
		Example: "  pando remote key rotate backup\n  pando remote key rotate backup --passphrase-file " +
			"rescue=/root/pass",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeRemotes,
	}

	c.Flags().StringArrayVar(&files, "passphrase-file", nil,
		"read the passphrase of a key from `[KEY=]FILE`; may be repeated")

	c.RunE = func(c *cobra.Command, args []string) error {
		r, err := a.findRemote("remote key", args[0])
		if err != nil {
			return err
		}

		keys, err := replicate.RotateKeys(c.Context(), r, func(k replicate.Key) (string, error) {
			return a.needPassphrase(c.Context(), "remote key", fileOfKey(files, k), "passphrase of key "+k.Label, false)
		})
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(keys)
		}
		if a.quiet {
			return nil
		}
		if slices.ContainsFunc(keys, func(k replicate.Key) bool { return strings.HasPrefix(k.Label, replicate.KitLabel) }) {
			a.printNote("write a new recovery kit: the copy of the config in the old one lacks the new key")
		}

		return a.printf("rotated the master key of %s, and wrapped it for %s\n", r.Name, errs.Plural(len(keys), "key"))
	}

	return c
}

// fileOfKey finds among [KEY=]FILE the one for a key; "" if there is none.
func fileOfKey(files []string, k replicate.Key) string {
	plain := ""
	for _, f := range files {
		name, file, named := strings.Cut(f, "=")
		switch {
		case named && (name == k.ID || name == k.Label):
			return file
		case !named:
			plain = f
		}
	}
	return plain
}

// newSecret is what the command line says about the passphrase of a new key.
type newSecret struct {
	a    *App
	ask  bool   // --passphrase
	file string // --passphrase-file
}

// flags adds --passphrase-file to a command that has --recipient and --passphrase.
func (s *newSecret) flags(c *cobra.Command) {
	c.Flags().StringVar(&s.file, "passphrase-file", "", "read the passphrase from `FILE` (- for standard input)")
	c.MarkFlagsMutuallyExclusive("recipient", "passphrase")
	c.MarkFlagsMutuallyExclusive("recipient", "passphrase-file")
}

// newPassphrase returns the passphrase for a key without a recipient. Invalid if none was given.
func (s *newSecret) newPassphrase(ctx context.Context, op, remote, what string) (string, error) {
	if !s.ask && !passphraseGiven(s.file) {
		return "", errs.New(errs.Invalid, op, remote, "neither a passphrase nor a recipient was given").
			WithHint("use --passphrase, --passphrase-file FILE or --recipient age1...")
	}
	return s.a.needPassphrase(ctx, op, s.file, what, true)
}

// needPassphrase is passphrase, and Invalid if there is none.
func (a *App) needPassphrase(ctx context.Context, op, file, what string, fresh bool) (string, error) {
	p, err := a.passphrase(ctx, op, file, what, fresh)
	if err == nil && p == "" {
		err = errs.New(errs.Invalid, op, what, "cannot ask for it without a terminal").
			WithHint("use --passphrase-file FILE, %s or %s", passphraseFileVariable, passphraseVariable)
	}
	return p, err
}
