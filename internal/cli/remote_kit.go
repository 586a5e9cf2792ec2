package cli

import (
	"context"
	"io"
	"os"

	"pando/internal/errs"
	"pando/internal/replicate"

	"github.com/spf13/cobra"
)

func (a *App) remoteKeyExportCommand() *cobra.Command {
	var q replicate.KitRequest
	var passphraseFile string
	var ask bool
	c := &cobra.Command{
		Use:   "export REMOTE FILE",
		Short: "Write a recovery kit, for the day when every host is gone",
		Long: `Writes FILE, a text that opens REMOTE when every pool that used it is lost, and also
when the remote has lost the object in which its keys are: instructions in plain
words, a copy of that object, and a key of its own, encrypted for a passphrase or an
age recipient. With the file and that secret anybody can read all that is there; the
file alone opens nothing. Print it, or keep it away from the hosts.

The key is one of REMOTE from then on (see ` + "`pando remote key ls`" + `); removing it makes
the kit worthless. Make a new kit after ` + "`pando remote key rotate`" + `. To use it, see
` + "`pando remote add --kit`" + `.

` + passphraseSources,
		Example:           "  pando remote key export backup kit.txt --passphrase\n  pando remote key export backup kit.txt --recipient age1...",
		Args:              usage(cobra.ExactArgs(2)),
		ValidArgsFunction: a.completeRemotes,
	}
	f := c.Flags()
	f.StringVar(&q.Recipient, "recipient", "", "encrypt it for an age `RECIPIENT`: age1...")
	f.BoolVar(&ask, "passphrase", false, "encrypt it for a passphrase: ask for it")
	f.StringVar(&passphraseFile, "passphrase-file", "", "read the passphrase from `FILE` (- for standard input)")
	f.BoolVar(&q.Force, "force", false, "write over FILE if it is there")
	c.MarkFlagsMutuallyExclusive("recipient", "passphrase")
	c.MarkFlagsMutuallyExclusive("recipient", "passphrase-file")
	c.RunE = func(c *cobra.Command, args []string) error {
		q.File = args[1]
		r, err := a.remote("remote key export", args[0])
		if err != nil {
			return err
		}
		if q.Recipient == "" {
			if !ask && !passphraseGiven(passphraseFile) {
				return errs.New(errs.Invalid, "remote key export", args[0], "neither a passphrase nor a recipient is given").
					WithHint("use --passphrase, --passphrase-file FILE or --recipient age1...")
			}
			what := "new passphrase for the recovery kit"
			if q.Passphrase, err = a.needPassphrase(c.Context(), "remote key export", passphraseFile, what, true); err != nil {
				return err
			}
		}
		out, err := replicate.ExportKit(c.Context(), r, q)
		if err != nil {
			return err
		}
		switch {
		case a.json:
			return a.printJSON(out)
		case a.quiet:
			return a.printf("%s\n", out.File)
		}
		return a.printf("wrote %s, with key %s\n", out.File, out.Key.Label)
	}
	return c
}

// maxKitBytes is how long a recovery kit may be: what is longer is some other file.
const maxKitBytes = 8 << 20

// openKit reads a recovery kit, and makes a request to add a remote one that uses it, with the secrets that it has.
func (a *App) openKit(ctx context.Context, q *replicate.AddRequest, file string) error {
	f, err := os.Open(file)
	if err != nil {
		return errs.Wrap("remote add", file, err)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxKitBytes))
	_ = f.Close() // it was only read
	if err != nil {
		return errs.Wrap("remote add", file, err)
	}
	kit, err := replicate.ParseKit(text)
	if err != nil {
		return err
	}
	if q.Passphrase == "" && q.Identity == "" {
		what := "passphrase of the recovery kit"
		if q.Passphrase, err = a.needPassphrase(ctx, "remote add", "", what, false); err != nil {
			return err
		}
	}
	return kit.Open(q, q.Passphrase, q.Identity)
}
