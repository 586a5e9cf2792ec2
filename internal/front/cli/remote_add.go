package cli

import (
	"context"
	"os"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

// remoteAddHelp is the text of `pando remote add --help`.
const remoteAddHelp = `Give the repository at URL a name in this pool. URL is one of:

  file:/DIR           a directory, for example on another disk or a network mount
  s3://BUCKET/PREFIX  S3 or a compatible server (?endpoint=https://HOST:PORT&region=REGION)
  gs://BUCKET/PREFIX  Google Cloud Storage

pando takes credentials from the environment and from the files that the
storage's own tools use, and does not store them. It tests the storage first,
and refuses storage that does not support conditional writes, because hosts
could overwrite each other's data there.

If there is no repository at URL, pando creates one. A repository can be opened
only with a key. This pool gets a key of its own, stored in the pool
(remotes/NAME/identity). If that is the only key, losing this host means losing
everything pushed, so add a passphrase, or the recipient (age1...) of an age
identity that is kept elsewhere.

If there is a repository, pando opens it with its passphrase or with an age
identity that it knows, and adds a key for this pool.

With --kit, pando opens the repository with a recovery kit (written by
` + "`pando remote key export`" + `) and the passphrase or identity for that kit. This
works even if the repository has lost its config, which pando then restores. URL
is optional, because the kit contains it.` + "\n\n" + passphraseSources

func (a *App) remoteAddCommand() *cobra.Command {
	var q replicate.AddRequest
	var passphraseFile, identityFile, kitFile string
	var ask, create, noCreate bool
	c := &cobra.Command{
		Use:   "add NAME [URL]",
		Short: "Create a repository at URL, or open an existing one",
		Long:  remoteAddHelp,
		Example: `  pando remote add backup s3://my-bucket/pando?region=eu-central-1 --passphrase
  pando remote add nas file:/mnt/nas/pando --recipient age1...
  pando remote add backup gs://my-bucket/pando --no-create --identity rescue.key
  pando remote add backup --kit kit.txt --passphrase`,
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: cobra.NoFileCompletions,
	}

	f := c.Flags()
	f.StringVar(&kitFile, "kit", "", "open the repository with the recovery kit in `FILE`")
	f.BoolVar(&create, "create", false, "fail if there is already a repository")
	f.BoolVar(&noCreate, "no-create", false, "fail if there is no repository yet")
	f.BoolVar(&ask, "passphrase", false, "use a passphrase, and ask for it if no file or variable has it")
	f.StringVar(&passphraseFile, "passphrase-file", "", "read the passphrase from `FILE` (- for standard input)")
	f.StringVar(&identityFile, "identity", "",
		"open the repository with the age identity in `FILE` (- for standard input)")
	f.StringArrayVar(&q.Recipients, "recipient", nil,
		"also encrypt the key of a new repository for this age `RECIPIENT`; may be repeated")
	c.MarkFlagsMutuallyExclusive("create", "no-create")
	c.MarkFlagsMutuallyExclusive("create", "kit")
	c.MarkFlagsMutuallyExclusive("recipient", "kit")

	c.RunE = a.withPool(func(ctx context.Context, e *engine.Engine, args []string) (err error) {
		q.Name, q.MustExist, q.MustCreate = args[0], noCreate, create
		switch {
		case len(args) == 2:
			q.URL = args[1]
		case kitFile == "":
			return errs.New(errs.Invalid, "remote add", q.Name,
				"no URL given").WithHint("run `pando remote add --help` for the forms of URLs")
		}

		if err := ref.CheckName("remote add", q.Name); err != nil {
			return err
		}

		if identityFile != "" {
			b, err := a.readSecret("remote add", identityFile)
			if err != nil {
				return err
			}
			q.Identity = string(b)
		}

		if ask || passphraseGiven(passphraseFile) {
			what := "passphrase of " + q.Name
			if kitFile != "" {
				what = "passphrase of the recovery kit"
			}
			fresh := !noCreate && kitFile == ""
			if q.Passphrase, err = a.needPassphrase(ctx, "remote add", passphraseFile, what, fresh); err != nil {
				return err
			}
		}

		if kitFile != "" {
			if err := a.openKit(ctx, &q, kitFile); err != nil {
				return err
			}
		}

		access, err := a.remoteAccess()
		if err != nil {
			return err
		}

		out, err := replicate.Add(ctx, e, q, access)
		if replicate.NoKey(err) && q.Passphrase == "" && q.Identity == "" && a.onTerminal() {
			// There is a repository, and somebody who may know what opens it.
			a.printNote("there is a repository at %s", q.URL)
			if q.Passphrase, err = a.passphrase(ctx, "remote add", "", "its passphrase", false); err != nil {
				return err
			}
			out, err = replicate.Add(ctx, e, q, access)
		}
		if err != nil {
			return err
		}

		return a.printAdded(ctx, out)
	})

	return c
}

func (a *App) printAdded(ctx context.Context, r replicate.Added) error {
	if a.json {
		return a.printJSON(r)
	}
	if a.quiet {
		return a.printf("%s\n", r.Name)
	}

	how := "opened the repository"
	if r.Created {
		how = "created a repository"
	}

	a.printf("%s  %s at %s\n", r.Name, how, r.URL)

	if r.ConfigRestored {
		a.printNote("its config was missing or damaged: restored the copy in the recovery kit")
	}

	if name := endpointVariable(); name != "" && strings.HasPrefix(r.URL, "s3:") && !strings.Contains(r.URL, "endpoint=") {
		a.printNote("%s names the server, so it must be set for every command; "+
			"to avoid that, add the remote with ?endpoint= in its URL", name)
	}

	a.warnOnlyKey(ctx, r.Opened)
	return nil
}

// warnOnlyKey warns if no key but that of this pool opens a remote.
func (a *App) warnOnlyKey(ctx context.Context, r *replicate.Remote) {
	keys, err := replicate.Keys(ctx, r)
	if err != nil || len(keys) != 1 || !keys[0].ThisPool {
		return
	}
	a.printWarning("only this pool can open the remote: if %s is lost, so is everything pushed", r.IdentityFile())
	a.printNote(
		"add another key with `pando remote key add %s --passphrase`, or --recipient age1...; or write a recovery kit with "+
			"`pando remote key export %s FILE --passphrase`",
		r.Name,
		r.Name,
	)
}

// endpointVariable is the variable that names another server than Amazon's, "" if none does.
func endpointVariable() string {
	for _, name := range []string{"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"} {
		if os.Getenv(name) != "" {
			return name
		}
	}
	return ""
}
