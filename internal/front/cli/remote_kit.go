package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

func (a *App) remoteKeyExportCommand() *cobra.Command {
	var q replicate.KitRequest
	secret := newSecret{a: a}
	c := &cobra.Command{
		Use:   "export REMOTE FILE",
		Short: "Write a recovery kit, for when every host is lost",
		Long: `Write a recovery kit to FILE. The kit opens REMOTE when every pool that used it
is lost, even if the remote has lost the object with its keys. It is a text file
with instructions, a copy of that object, and a key of its own, encrypted for a
passphrase or an age recipient. Anyone who has both the file and that secret can
read everything on the remote; the file alone opens nothing. Print it, or keep
it away from the hosts.

The kit's key appears in ` + "`pando remote key ls`" + `; removing it makes the kit
worthless. Write a new kit after ` + "`pando remote key rotate`" + `. Use a kit with
` + "`pando remote add --kit`" + `.` + "\n\n" + passphraseSources,
		Example: "  pando remote key export backup kit.txt --passphrase\n" +
			"  pando remote key export backup kit.txt --recipient age1...",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeRemotes,
	}

	f := c.Flags()
	f.StringVar(&q.Recipient, "recipient", "", "encrypt the kit for this age `RECIPIENT` (age1...)")
	f.BoolVar(&secret.ask, "passphrase", false,
		"encrypt the kit with a passphrase, and ask for it if no file or variable has it")
	f.BoolVar(&q.Force, "force", false, "overwrite FILE if it exists")
	secret.flags(c)

	c.RunE = func(c *cobra.Command, args []string) error {
		q.File = args[1]
		r, err := a.findRemote("remote key export", args[0])
		if err != nil {
			return err
		}

		if q.Recipient == "" {
			what := "new passphrase for the recovery kit"
			if q.Passphrase, err = secret.newPassphrase(c.Context(), "remote key export", args[0], what); err != nil {
				return err
			}
		}

		out, err := replicate.ExportKit(c.Context(), r, q, kitInstructions)
		if err != nil {
			return err
		}

		return a.printResult(out, out.File, "wrote %s, with key %s\n", out.File, out.Key.Label)
	}

	return c
}

// kitInstructions is what people read in a kit.
func kitInstructions(f replicate.KitFacts) string {
	return fmt.Sprintf(kitText, f.URL, f.Repository, f.Key.Label, f.Key.ID, f.Made.Format(time.DateTime))
}

const kitText = `PANDO RECOVERY KIT

This file opens a remote of Pando, an encrypted repository of volumes, when
every host that used it is gone. Print it, or keep it where no fire and no
thief gets at it together with the hosts.

  remote      %s
  repository  %s
  key         %s (%s)
  made        %s UTC

You need this file, and the passphrase (or the age identity) that it was made
for. Whoever has both can read everything in the remote. This file alone opens
nothing.

To get everything back, on a new host with pando and access to the storage:

  1. Save this file as kit.txt, with mode 0600.
  2. pando init
  3. pando remote add backup --kit kit.txt --passphrase
     (or --identity FILE, if the kit was made for an age recipient; if the
     storage has moved, write its URL after "backup")
  4. pando remote ls backup
  5. pando pull NAME

If the object "config" of the remote was lost or damaged, step 3 puts back the
copy that is below. Make a new kit after "pando remote key rotate": what was
written since then cannot be read with an older copy of "config". To make this
kit worthless, run "pando remote key rm" with the key above.

Below are the copy of "config", and the key, encrypted with age ("age -d"
decrypts it, too).
`

// maxKitBytes is how long a recovery kit may be: what is longer is some other file.
const maxKitBytes = 8 << 20

// openKit reads a recovery kit, and makes a request to add a remote one that uses it, with the secrets that it has.
func (a *App) openKit(ctx context.Context, q *replicate.AddRequest, file string) error {
	f, err := os.Open(file)
	if err != nil {
		return wrapReadError("remote add", file, err)
	}

	text, err := io.ReadAll(io.LimitReader(f, maxKitBytes))
	_ = f.Close() // it was only read
	if err != nil {
		return wrapReadError("remote add", file, err)
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
