package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/source/build"

	"github.com/spf13/cobra"
)

const goldenBuildHelp = `Run COMMAND in a clone of REF, a generation or snapshot, and publish the clone as
the next generation of GOLDEN if the command exits with 0. If it does not, nothing
is published, and pando exits with the command's exit code.

A later build with the same key does not run the command, but prints the same
generation at once. The key says what the result depends on: choose for example
the checksum of a lock file. Without --key it is a checksum of COMMAND, its
directory and its environment, without --secret. A key that was used with another base is an error
(conflict). If several processes build the same key, one runs the command; the
others show its output and return its result.

The command runs in the root of the clone. It finds PATH, HOME, LANG, PANDO_MOUNT
and PANDO_VOLUME in its environment, and what --env declares, but nothing of the
caller's. Its output goes to standard error and to a log (` + "`pando golden log`" + `);
pando prints only the generation to standard output, so scripts can clone it:

  pando clone "$(pando golden build -q deps --from web --key K -- npm ci)" job

Use that reference, and not GOLDEN: a result that was found again need not be the
current generation.

With --remote, pando looks for the result on that remote first, and pushes a new
one there. If the remote does not answer, pando warns and builds without it.`

// buildFlags are the flags that golden build and build share.
type buildFlags struct {
	again  bool
	remote string
	keep   string
}

func (b *buildFlags) add(a *App, c *cobra.Command) {
	c.Flags().BoolVar(&b.again, "no-cache", false, "run the command even if there is a result, and replace that")
	c.Flags().StringVar(&b.remote, "remote", "", "share results with other hosts through the remote `NAME`")
	_ = c.RegisterFlagCompletionFunc("remote", a.completeRemotes)
	keepFlag(c.Flags(), &b.keep)
}

func (a *App) goldenBuildCommand() *cobra.Command {
	var q engine.BuildRequest
	var flags buildFlags
	var from string
	var env, secrets []string
	c := &cobra.Command{
		Use:   "build GOLDEN --from REF [--key KEY] -- COMMAND [ARG...]",
		Short: "Run a command in a clone and keep the result, unless there is one",
		Long:  goldenBuildHelp,
		Example: `  pando golden build deps --from web --key "$(sha256sum < package-lock.json)" -- npm ci
  pando golden build tools --from debian -- apt-get install -y gcc make`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeGoldens,
	}

	f := c.Flags()
	f.StringVar(&from, "from", "", "run the command in a clone of `REF`, a golden or snapshot (required)")
	f.StringVar(&q.Key, "key", "", "find the result again by `KEY` (default: a checksum of the command)")
	f.StringArrayVar(&env, "env", nil, "give the command the variable `NAME=VALUE`, or NAME as it is set now (repeatable)")
	f.StringArrayVar(&secrets, "secret", nil,
		"give the command the variable `NAME` as it is set now, on which no key depends (repeatable)")
	f.StringVar(&q.Dir, "dir", "", "run the command in the directory `DIR` of the clone (default: its root)")
	flags.add(a, c)
	labels := a.labelFlag(c, "build", "the golden")
	rightsFlags(f, &q.May)
	_ = c.RegisterFlagCompletionFunc("from", a.completeRefs(1))

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		const op = "golden build"
		if q.Golden, err = ref.ParseName(op, args[0]); err != nil {
			return err
		}
		if from == "" {
			return errs.New(errs.Invalid, op, args[0], "--from is missing").
				WithHint("name the golden or snapshot to begin with: `pando golden build %s --from REF -- COMMAND`", args[0])
		}
		if q.From, err = ref.Parse(op, from); err != nil {
			return err
		}
		if c.ArgsLenAtDash() != 1 {
			return errs.New(errs.Invalid, op, args[0], "the command must follow --").
				WithHint("run `pando golden build %s --from %s -- COMMAND`", args[0], from)
		}
		if q.Keep, err = parseKeep(op, flags.keep); err != nil {
			return err
		}
		if q.Env, err = build.Environment(op, env, os.Environ()); err != nil {
			return err
		}

		added, err := labels()
		if err != nil {
			return err
		}
		q.Labels, q.Command, q.Again = added.Map(), args[1:], flags.again
		if !c.Flags().Changed("key") {
			q.Key = build.CommandKey(q.Command, q.Dir, q.Env)
		}
		for _, s := range secrets {
			if strings.Contains(s, "=") {
				return errs.New(errs.Invalid, op, "", "--secret takes only the name of a variable").
					WithHint("set the variable when you call pando: others can see the arguments of a command")
			}
		}
		if q.Env, err = build.Environment(op, append(env, secrets...), os.Environ()); err != nil {
			return err
		}
		q.Signals, q.Output = foregroundSignals, a.buildOutput()

		share, err := a.sharing(op, flags.remote)
		if err != nil {
			return err
		}

		return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
			stop := a.showProgress(&q.Tracker)
			out, err := share.Build(ctx, e, q)
			stop()
			return a.printBuilt(out, err)
		})(c, args)
	}

	return c
}

// buildOutput returns where the output of a build goes: not to standard output, which has the result.
func (a *App) buildOutput() io.Writer {
	if a.quiet {
		return nil
	}
	return a.Stderr
}

// commandFailed reports whether the command of a build failed. It prints the error; the exit code is the command's.
func (a *App) commandFailed(err error) bool {
	var failed *engine.CommandError
	if !errors.As(err, &failed) {
		return false
	}
	a.printError(err)
	a.exit = failed.Exit
	return true
}

// printBuilt prints the result of a build. The exit code is that of the command if this failed.
func (a *App) printBuilt(out engine.Built, err error) error {
	if a.commandFailed(err) {
		return nil
	}
	if err != nil {
		return err
	}

	if a.json {
		return a.printJSON(out)
	}

	a.noteRemoved(out.Removed)
	switch {
	case out.Fetched:
		a.printNote("fetched from the remote")
	case out.Waited:
		a.printNote("another pando process has built it")
	case out.Cached && out.State != "current":
		a.printNote("cached: the command did not run; this is not the current generation of %s", out.Golden)
	case out.Cached:
		a.printNote("cached: the command did not run")
	}
	return a.printf("%s\n", ref.Generation(out.Golden, out.Generation))
}
