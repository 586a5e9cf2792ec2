package cli

import (
	"context"
	"fmt"
	"os"

	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/replicate"
	"pando/internal/source/build"

	"github.com/spf13/cobra"
)

const buildHelp = `Run the steps of a build file, each in a clone of the result of the step before,
and publish the result of the last step as the next generation of a golden. Every
result is kept: a later build runs only from the first step that has changed, or
whose input files have. Clones cost the same for any size, and so does a step.

  golden = "app"             # gets the result of the last step
  from = "debian"            # what the first step begins with

  [[step]]
  name = "deps"
  copy = ["package.json", "package-lock.json"]
  run = "npm ci"

  [[step]]
  name = "app"
  copy = ["src"]
  run = "npm run build"
  env = { NODE_ENV = "production" }

docs/builds.md describes all keys. The results of all steps but the last are
generations of the golden NAME.steps, so clones of NAME never see them. Commands
run in the root of the clone, and find only PATH, HOME, LANG, PANDO_MOUNT,
PANDO_VOLUME and declared variables in their environment. pando prints the
generation to standard output, and everything else to standard error.

If a step fails, pando exits with the exit code of its command. The results of
the steps before it stay; the next build continues from there.`

func (a *App) buildCommand() *cobra.Command {
	var q build.Request
	var flags buildFlags
	var file, golden, from string
	c := &cobra.Command{
		Use:     "build [-f FILE]",
		GroupID: "goldens",
		Short:   "Run a chain of steps, and only those that have changed",
		Long:    buildHelp,
		Example: `  pando build
  pando build -f ci/app.toml --remote cache
  pando clone "$(pando build -q)" job --mount`,
		Args: cobra.NoArgs,
	}

	f := c.Flags()
	f.StringVarP(&file, "file", "f", "pando.toml", "read the steps from `FILE`")
	f.StringVar(&golden, "golden", "", "publish as `NAME` (default: as the file says)")
	f.StringVar(&from, "from", "", "begin with `REF` (default: as the file says)")
	f.StringVar(&q.Until, "step", "", "stop after the step `NAME`, and print its result")
	flags.add(a, c)
	_ = c.MarkFlagFilename("file", "toml")
	_ = c.RegisterFlagCompletionFunc("from", a.completeRefs(1))
	_ = c.RegisterFlagCompletionFunc("golden", a.completeGoldens)

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if q.File, err = build.ReadFile(file); err != nil {
			return err
		}
		if golden != "" {
			if q.Golden, err = ref.ParseName("build", golden); err != nil {
				return err
			}
		}
		if from != "" {
			r, err := ref.Parse("build", from)
			if err != nil {
				return err
			}
			q.From = &r
		}
		if q.Keep, err = parseKeep("build", flags.keep); err != nil {
			return err
		}
		if q.Share, err = a.sharing("build", flags.remote); err != nil {
			return err
		}

		q.Again, q.Caller, q.Signals, q.Output = flags.again, os.Environ(), foregroundSignals, a.buildOutput()
		q.Begin = func(n int, s build.StepResult) { a.printNote("step %d (%s): running", n+1, s.Name) }
		q.Done = func(n int, s build.StepResult) { a.printNote("step %d (%s): %s", n+1, s.Name, describeStep(s)) }
		return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
			stop := a.showProgress(&q.Tracker)
			out, err := build.Run(ctx, e, q)
			stop()
			return a.printChain(out, err)
		})(c, args)
	}

	return c
}

// sharing returns how to share results through a remote; nil without one.
func (a *App) sharing(op, remote string) (*build.Sharing, error) {
	if remote == "" {
		return nil, nil
	}
	if err := ref.CheckName(op, remote); err != nil {
		return nil, err
	}

	access, err := a.remoteAccess()
	if err != nil {
		return nil, err
	}
	if access.Attempts == 0 {
		access.Attempts = sharingAttempts
	}
	r, err := replicate.Load(a.poolDir(), remote, access)
	if err != nil {
		return nil, err
	}
	return &build.Sharing{Remote: r}, nil
}

// sharingAttempts is how often a build tries a request, unless PANDO_REMOTE_ATTEMPTS says it: running the command takes
// less time than waiting for a remote that is down.
const sharingAttempts = 3

// describeStep says in words what became of a step.
func describeStep(s build.StepResult) string {
	switch {
	case s.Fetched && s.Result != "":
		return "fetched, " + s.Result
	case s.Waited:
		return "built by another pando process, " + s.Result
	case s.Cached && s.Result == "":
		return "not needed: a later step is cached"
	case s.Cached:
		return "cached, " + s.Result
	}
	return fmt.Sprintf("done in %s, %s", formatSeconds(s.Seconds), s.Result)
}

// printChain prints the result of a build file. The exit code is that of the command if this failed.
func (a *App) printChain(out build.Result, err error) error {
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
	return a.printf("%s\n", ref.Generation(out.Golden, out.Generation))
}
