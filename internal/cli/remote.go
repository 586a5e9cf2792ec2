package cli

import (
	"context"
	"errors"
	"os"
	"strings"
	"time"

	"pando/internal/engine"
	"pando/internal/errs"
	"pando/internal/ref"
	"pando/internal/replicate"

	"github.com/spf13/cobra"
)

func (a *App) remoteCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "remote",
		Aliases: []string{"remotes"},
		GroupID: "remotes",
		Short:   "Add, list and look after remotes",
		Long: `A remote is an encrypted repository in object storage, or in a directory, to which
volumes and goldens are pushed and from which they are pulled. All that leaves
this host is encrypted and authenticated here: who keeps the storage sees neither
contents nor names.`,
		Args: usage(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(
		a.remoteAddCommand(),
		a.remoteLsCommand(),
		a.remoteRmCommand(),
		a.remoteDeleteCommand(),
		a.remotePruneCommand(),
		a.remoteRepairCommand(),
		a.remoteWriterCommand(),
		a.remoteKeyCommand(),
	)
	return c
}

func (a *App) remoteAddCommand() *cobra.Command {
	var q replicate.AddRequest
	var passphraseFile, identityFile, kitFile string
	var ask, create, noCreate bool
	c := &cobra.Command{
		Use:   "add NAME [URL]",
		Short: "Make a repository at URL, or open the one that is there",
		Long: `Gives the repository at URL a name in this pool. URL is one of

  file:/DIR           a directory, for example on another disk, or mounted from elsewhere
  s3://BUCKET/PREFIX  S3, or what speaks its protocol: ?endpoint=https://HOST:PORT&region=REGION
  gs://BUCKET/PREFIX  Google Cloud Storage

Credentials of the storage come from the environment and the files in which its own
tools look for them, and are not kept. The storage is tried first: one that does not
honour conditional writes is refused, because hosts could overwrite each other there.

If there is no repository, one is made. It opens with keys only. This pool gets one,
which lies in it (remotes/NAME/identity); if that were the only one, all that is
pushed would be lost with this host. So give it a passphrase, or the recipient
(age1...) of an age identity that is kept elsewhere.

If there is a repository, it is opened with its passphrase or an age identity that it
knows, and this pool gets a key of its own.

With --kit it is opened with a recovery kit (` + "`pando remote key export`" + `) and the
passphrase or identity for that kit. This works even if the repository has lost its
config, which is then put back. URL may be left out: the kit has it.

` + passphraseSources,
		Example: `  pando remote add backup s3://my-bucket/pando?region=eu-central-1 --passphrase
  pando remote add nas file:/mnt/nas/pando --recipient age1...
  pando remote add backup gs://my-bucket/pando --no-create --identity rescue.key
  pando remote add backup --kit kit.txt --passphrase`,
		Args:              usage(cobra.RangeArgs(1, 2)),
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	f := c.Flags()
	f.StringVar(&kitFile, "kit", "", "open it with the recovery kit in `FILE`")
	f.BoolVar(&create, "create", false, "there must be no repository yet")
	f.BoolVar(&noCreate, "no-create", false, "there must be a repository: make none")
	f.BoolVar(&ask, "passphrase", false, "a passphrase opens it: ask for it")
	f.StringVar(&passphraseFile, "passphrase-file", "", "read the passphrase from `FILE` (- for standard input)")
	f.StringVar(&identityFile, "identity", "", "open it with the age identity in `FILE`")
	f.StringArrayVar(&q.Recipients, "recipient", nil, "who has the identity of this age `RECIPIENT` can open the new repository, too; may be repeated")
	c.MarkFlagsMutuallyExclusive("create", "no-create")
	c.MarkFlagsMutuallyExclusive("create", "kit")
	c.MarkFlagsMutuallyExclusive("recipient", "kit")
	c.RunE = a.with(func(ctx context.Context, e *engine.Engine, args []string) (err error) {
		q.Name, q.MustExist, q.MustCreate = args[0], noCreate, create
		switch {
		case len(args) == 2:
			q.URL = args[1]
		case kitFile == "":
			return errs.New(errs.Invalid, "remote add", q.Name, "a URL is needed").WithHint("see `pando remote add --help`")
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
		if q.Access, err = a.remoteAccess(); err != nil {
			return err
		}
		out, err := replicate.Add(ctx, e, q)
		if replicate.NoKey(err) && q.Passphrase == "" && q.Identity == "" && a.onTerminal() {
			// There is a repository, and somebody who may know what opens it.
			a.note("there is a repository at %s", q.URL)
			if q.Passphrase, err = a.passphrase(ctx, "remote add", "", "its passphrase", false); err != nil {
				return err
			}
			out, err = replicate.Add(ctx, e, q)
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
		how = "made a repository"
	}
	if err := a.printf("%s  %s at %s\n", r.Name, how, r.URL); err != nil {
		return err
	}
	if r.ConfigRestored {
		a.note("its config was missing or damaged: put back the copy that is in the recovery kit")
	}
	if name := endpointVariable(); name != "" && strings.HasPrefix(r.URL, "s3:") && !strings.Contains(r.URL, "endpoint=") {
		a.note("%s says where the server is: it must be set for each command, "+
			"or add the remote with ?endpoint= in its URL", name)
	}
	a.warnOnlyKey(ctx, &r.Remote)
	return nil
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

// warnOnlyKey warns if no key but that of this pool opens a remote.
func (a *App) warnOnlyKey(ctx context.Context, r *replicate.Remote) {
	keys, err := replicate.Keys(ctx, r)
	if err != nil || len(keys) != 1 || !keys[0].ThisPool {
		return
	}
	a.warn("only this pool can open it: if %s is lost, so is all that is pushed", r.IdentityFile())
	a.note(
		"add another key: `pando remote key add %s --passphrase`, or with --recipient age1...; or make a recovery kit: "+
			"`pando remote key export %s FILE --passphrase`",
		r.Name,
		r.Name,
	)
}

func (a *App) remoteRmCommand() *cobra.Command {
	var q replicate.RemoveRequest
	c := &cobra.Command{
		Use:     "rm NAME",
		Aliases: []string{"remove"},
		Short:   "Forget a remote; what it holds stays",
		Long: `Makes this pool forget the remote NAME: its address, this pool's key to it, and
what was noted of pushes. Nothing of what was pushed is removed; with another key
the remote can be added again. This pool's key is taken out of the repository.

If no other key opens the repository it is refused (conflict), because nobody could
read it any more; and also if the repository cannot be reached, because nobody
knows. --force does it all the same.`,
		Args:              usage(cobra.ExactArgs(1)),
		ValidArgsFunction: a.completeRemotes,
		RunE: a.with(func(ctx context.Context, e *engine.Engine, args []string) error {
			access, err := a.remoteAccess()
			if err != nil {
				return err
			}
			q.Name, q.Access = args[0], access
			out, err := replicate.Forget(ctx, e, q)
			if err != nil {
				return a.knownRemotes(err)
			}
			if out.KeyError != nil {
				a.warn("this pool's key stays in the repository, where nobody can use it any more: %v", out.KeyError)
			}
			switch {
			case a.json:
				return a.printJSON(out)
			case a.quiet:
				return nil
			}
			return a.printf("forgot %s\n", out.Name)
		}),
	}
	c.Flags().BoolVar(&q.Force, "force", false, "also if no other key opens the repository, or it cannot be reached")
	return c
}

func (a *App) remoteDeleteCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "delete REMOTE REF",
		Short: "Remove a volume, or one of its points, from a remote",
		Long: `Removes the volume or golden REF with all its points from REMOTE, or one point
(VOLUME@SNAP, GOLDEN@N). Nothing is removed here. What was cloned from it can be
pulled as before. The space returns with the next ` + "`pando remote prune`" + `.`,
		Example:           "  pando remote delete backup job-17\n  pando remote delete backup web@3",
		Args:              usage(cobra.ExactArgs(2)),
		ValidArgsFunction: a.completeOnRemote(2),
		RunE: func(c *cobra.Command, args []string) error {
			q, err := ref.Parse("remote delete", args[1])
			if err != nil {
				return err
			}
			r, err := a.remote("remote delete", args[0])
			if err != nil {
				return err
			}
			out, err := replicate.RemoveVolume(c.Context(), r, q)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(out)
			}
			if a.quiet {
				return nil
			}
			what := q.String()
			if out.Whole {
				what += " with " + plural(len(out.Points), "point")
			}
			if err := a.printf("deleted %s from %s\n", what, r.Name); err != nil {
				return err
			}
			a.note("the space returns with `pando remote prune %s`", r.Name)
			return nil
		},
	}
}

// remote finds a remote by its name; "" is the only one. NotFound, Invalid.
func (a *App) remote(op, name string) (*replicate.Remote, error) {
	if name != "" {
		if err := ref.CheckName(op, name); err != nil {
			return nil, err
		}
		r, err := a.loadRemote(name)
		return r, a.knownRemotes(err)
	}
	all, err := replicate.List(a.poolDir())
	if err != nil {
		return nil, err
	}
	switch len(all) {
	case 0:
		return nil, errs.New(errs.NotFound, op, "", "this pool has no remote").
			WithHint("add one with `pando remote add NAME URL`")
	case 1:
		return a.loadRemote(all[0])
	}
	return nil, errs.New(errs.Invalid, op, "", "this pool has %d remotes: name one of them", len(all)).
		WithHint("choose one of: %s", strings.Join(all, ", "))
}

// knownRemotes adds to the error of a remote that is not there which ones are.
func (a *App) knownRemotes(err error) error {
	if !errs.Is(err, errs.NotFound) {
		return err
	}
	var known *errs.Error
	all, lerr := replicate.List(a.poolDir())
	if lerr != nil || len(all) == 0 || !errors.As(err, &known) || known.Op != "open remote" {
		return err
	}
	out := *known
	out.Hint = errs.Messagef("this pool has: %s", strings.Join(all, ", "))
	return &out
}

// completeRemotes completes the name of a remote, once.
func (a *App) completeRemotes(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	all, err := replicate.List(a.poolDir())
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return all, cobra.ShellCompDirectiveNoFileComp
}

// completionTime is how long completing asks a remote.
const completionTime = 5 * time.Second

// completeOnRemote completes a remote and then volumes that it has, in the first n
// arguments (0: all).
func (a *App) completeOnRemote(n int) completer {
	return func(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		if len(args) == 0 {
			return a.completeRemotes(c, args, word)
		}
		if n > 0 && len(args) >= n {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx := c.Context()
		if ctx == nil {
			ctx = context.Background()
		}
		ctx, cancel := context.WithTimeout(ctx, completionTime)
		defer cancel()
		r, err := a.loadRemote(args[0])
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		l, err := replicate.Volumes(ctx, r)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		defer l.Close()
		var out []string
		name, _, point := strings.Cut(word, "@")
		for _, v := range l.Volumes {
			out = append(out, v.Name)
			if point && v.Name == name {
				for p, err := range l.Points(ctx, &v) {
					if err != nil {
						break
					}
					out = append(out, v.Name+"@"+p.Name)
				}
			}
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	}
}
