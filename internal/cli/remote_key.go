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
		Short:   "List, add, remove, rotate and export what opens a remote",
		Long: `What is on a remote is encrypted with a key that the remote holds only wrapped: once
for each pool that uses it, each passphrase, and each age recipient. These are the
keys that ` + "`pando remote key`" + ` deals with. One of them is enough to read everything.`,
		Args: usage(cobra.NoArgs),
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
		Short:             "List what opens a remote",
		Args:              usage(cobra.ExactArgs(1)),
		ValidArgsFunction: a.completeRemotes,
		RunE: func(c *cobra.Command, args []string) error {
			r, err := a.remote("remote key", args[0])
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
			if err := a.printf("%s\n", k.ID); err != nil {
				return err
			}
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
	var passphraseFile string
	var ask bool
	c := &cobra.Command{
		Use:   "add REMOTE",
		Short: "Let a passphrase or an age recipient open a remote, too",
		Long: `From now on who knows the passphrase, or has the identity of the age recipient, can
open REMOTE, and read all that is there.

` + passphraseSources,
		Example: "  pando remote key add backup --passphrase\n  pando remote key add backup --recipient age1... " +
			"--label rescue",
		Args:              usage(cobra.ExactArgs(1)),
		ValidArgsFunction: a.completeRemotes,
	}

	f := c.Flags()
	f.StringVar(&n.Label, "label", "", "call the key this (default: passphrase, or the start of the recipient)")
	f.StringVar(&n.Recipient, "recipient", "", "an age `RECIPIENT`: age1...")
	f.BoolVar(&ask, "passphrase", false, "a passphrase: ask for it")
	f.StringVar(&passphraseFile, "passphrase-file", "", "read the passphrase from `FILE` (- for standard input)")
	c.MarkFlagsMutuallyExclusive("recipient", "passphrase")
	c.MarkFlagsMutuallyExclusive("recipient", "passphrase-file")

	c.RunE = func(c *cobra.Command, args []string) error {
		r, err := a.remote("remote key", args[0])
		if err != nil {
			return err
		}

		if n.Recipient == "" {
			if !ask && !passphraseGiven(passphraseFile) {
				return errs.New(errs.Invalid, "remote key", args[0], "neither a passphrase nor a recipient is given").
					WithHint("use --passphrase, --passphrase-file FILE or --recipient age1...")
			}
			if n.Passphrase, err = a.needPassphrase(c.Context(), "remote key", passphraseFile, "new passphrase for "+r.Name,
				true); err != nil {
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
		Short:   "Take away a key that opens a remote",
		Long: `Removes KEY (its ID, label or recipient, see ` + "`pando remote key ls`" + `) from REMOTE. Who
has it cannot open the remote any more, unless he has kept a copy of what it
opened: then ` + "`pando remote key rotate`" + ` keeps from him what is written from then on,
and only the storage's own permissions keep from him what is there already. The
last key cannot be removed.`,
		Args:              usage(cobra.ExactArgs(2)),
		ValidArgsFunction: a.completeRemotes,
		RunE: func(c *cobra.Command, args []string) error {
			r, err := a.remote("remote key", args[0])
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

	c.Flags().BoolVar(&force, "force", false, "also the key of this pool, which cannot use the remote then")
	return c
}

func (a *App) printKey(done string, k replicate.Key) error {
	switch {
	case a.json:
		return a.printJSON(k)
	case a.quiet:
		return a.printf("%s\n", k.ID)
	}
	return a.printf("%s key %s (%s)\n", done, k.Label, k.Kind)
}

func (a *App) remoteKeyRotateCommand() *cobra.Command {
	var files []string
	c := &cobra.Command{
		Use:   "rotate REMOTE",
		Short: "Encrypt what is written from now on with a new key",
		Long: `Makes a new master key, with which all that is written to REMOTE from now on is
encrypted, and wraps it for everything that opens REMOTE now. What is there stays as
it is and can still be read. Do it after ` + "`pando remote key rm`" + `, if somebody may
have kept a copy of the master key. Other hosts need not be told.

The passphrase of each key that is one is needed: on a terminal, from
--passphrase-file [KEY=]FILE (KEY is an ID or a label, needed if there are several),
or from the environment.`,
		Example: "  pando remote key rotate backup\n  pando remote key rotate backup --passphrase-file " +
			"rescue=/root/pass",
		Args:              usage(cobra.ExactArgs(1)),
		ValidArgsFunction: a.completeRemotes,
	}

	c.Flags().StringArrayVar(&files, "passphrase-file", nil,
		"read the passphrase of a key from a file: `[KEY=]FILE`; may be repeated")

	c.RunE = func(c *cobra.Command, args []string) error {
		r, err := a.remote("remote key", args[0])
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
			a.note("make a new recovery kit: the copy of the config in the old one lacks the new key")
		}

		return a.printf("rotated the key of %s, for %s\n", r.Name, plural(len(keys), "key"))
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

// needPassphrase is passphrase, and Invalid if there is none.
func (a *App) needPassphrase(ctx context.Context, op, file, what string, fresh bool) (string, error) {
	p, err := a.passphrase(ctx, op, file, what, fresh)
	if err == nil && p == "" {
		err = errs.New(errs.Invalid, op, what, "there is no terminal to ask for it").
			WithHint("use --passphrase-file FILE, %s or %s", passphraseFileVariable, passphraseVariable)
	}
	return p, err
}
