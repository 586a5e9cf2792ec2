package cli

import (
	"errors"
	"os"
	"os/signal"
	"syscall"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

// runHelp is the text of `pando run --help`.
const runHelp = `Clone REF, mount the clone, run COMMAND in it, and destroy the clone when the
command ends. The exit code is that of the command. The command finds the mount
point in PANDO_MOUNT and the name of the volume in PANDO_VOLUME. It does not get
the secrets that pando reads from the environment: passphrases of remotes, and
credentials of AWS and Google Cloud.

If processes that the command started still use the clone, it stays mounted and
pando names them. The next pando command after they end destroys the clone. With
--keep, unmount it with ` + "`pando umount`" + ` instead.

If the pool cannot store everything that the command wrote to a clone with
--keep, pando fails as umount does, unless the command itself failed.

If pando is killed, the next pando command destroys the clone; with --keep or
--keep-on-failure the clone stays.

With --root or --bind, COMMAND runs in a sandbox: it has its own mounts, processes,
IPC, host name and network, few privileges, and a filter of system calls. It sees
nothing of this host but its kernel, with --bind also its programs and libraries
(/usr, /opt and public files of /etc), all read-only. With --root the clone is the
root filesystem; with --bind PATH it is at PATH. Every process of the sandbox ends
with COMMAND, and with pando. Its environment has only PATH, HOME, USER, the
terminal and the language; add variables with --env. If standard input or output is
a terminal, the sandbox gets one of its own.

--diff lists on standard output what COMMAND has changed, as ` + "`pando diff`" + ` does.
--publish makes the clone the next generation of a golden if COMMAND exits with 0.
With --json, both are printed as one JSON object after the output of COMMAND. A
command that --timeout ended has the exit code 124.`

func (a *App) runCommand() *cobra.Command {
	var q engine.RunRequest
	var name, publish string
	var env []string
	c := &cobra.Command{
		Use:     "run REF -- COMMAND [ARG...]",
		GroupID: "volumes",
		Short:   "Run a command in a fresh clone, then destroy the clone",
		Long:    runHelp,
		Example: "  pando run web -- make test\n  pando run web --keep -- ./migrate.sh\n" +
			"  pando run debian --root --memory 1G --timeout 10m -- ./untrusted.sh\n" +
			"  pando run web --bind /app --net host --diff -- npm install",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeRefs(1),
	}

	c.Flags().BoolVar(&q.Keep, "keep", false, "keep the volume, and unmount it when the command ends")
	c.Flags().StringVar(&name, "name", "", "call the volume `NAME` (default: a generated name)")
	c.Flags().BoolVar(&q.Overlay, "overlay", false, "use an overlay, as with `pando clone` (default: as the golden says)")
	c.Flags().BoolVar(&q.KeepOnFailure, "keep-on-failure", false, "keep the volume unless the command exits with 0")
	c.Flags().StringVar(&publish, "publish", "", "publish the volume as the next generation of `GOLDEN` if the command "+
		"exits with 0")
	c.Flags().BoolVar(&q.Diff, "diff", false, "list what the command has changed")
	c.Flags().DurationVar(&q.Timeout, "timeout", 0, "end the command after this `DURATION`, with exit code 124")
	c.Flags().StringArrayVar(&env, "env", nil, "set `NAME=VALUE` for the command, or pass NAME on (repeatable)")
	_ = c.RegisterFlagCompletionFunc("env", cobra.NoFileCompletions)
	_ = c.RegisterFlagCompletionFunc("timeout", cobra.NoFileCompletions)
	_ = c.RegisterFlagCompletionFunc("publish", a.completeRefs(1))
	sandboxed := sandboxFlags(c, "run")
	labels := a.labelFlag(c, "run", "the volume")
	rightsFlags(c.Flags(), &q.May)
	c.Flags().SetInterspersed(true)

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if q.From, err = ref.Parse("run", args[0]); err != nil {
			return err
		}

		if err := checkDash(c, "run", args); err != nil {
			return err
		}

		if q.Labels, err = labels(); err != nil {
			return err
		}

		q.GoldenDecides = !c.Flags().Changed("overlay")
		if name != "" {
			if q.Name, err = ref.ParseName("clone", name); err != nil {
				return err
			}
		}

		if publish != "" {
			if q.Publish, err = ref.ParseName("publish", publish); err != nil {
				return err
			}
		}

		q.Command = args[1:]
		if q.Sandbox, err = sandboxed(); err != nil {
			return err
		}
		if err := surround(&q, env); err != nil {
			return err
		}

		if c.Flags().Changed("timeout") && q.Timeout <= 0 {
			return errs.New(errs.Invalid, "run", args[0], "--timeout must be greater than 0 (got %s)", q.Timeout)
		}

		e, err := a.openCalls(c.Context())
		if err != nil {
			return err
		}

		defer e.Close()

		// While the command runs, signals go to it, and what it does with them
		// decides when the run ends.
		ctx, tell := a.collectWarnings(c.Context())
		defer tell()

		r, err := e.Run(ctx, q)
		if r.Diff != nil || r.Published != nil {
			if printed := a.printRun(r); err == nil {
				err = printed
			}
		}
		return a.endRun(r, err)
	}

	return c
}

// surround gives the command its standard files, environment and signals.
func surround(q *engine.RunRequest, env []string) (err error) {
	q.Stdin, q.Stdout, q.Stderr = os.Stdin, os.Stdout, os.Stderr
	if q.Sandbox.On() {
		q.Signals, q.Suspend = sandboxSignals, suspend
		q.Env, err = sandboxEnv(env)
		return err
	}

	q.Signals = foregroundSignals
	q.Env, err = addEnv(withoutSecrets(os.Environ()), env)
	return err
}

// runReport is the result of a run as JSON.
type runReport struct {
	Volume    string             `json:"volume"`
	Exit      int                `json:"exit"`
	Kept      bool               `json:"kept"`
	Published *engine.Published  `json:"published"`
	Diff      *engine.Difference `json:"diff"`
}

// printRun prints what a run has changed and published.
func (a *App) printRun(r engine.RunResult) error {
	if a.json {
		return a.printJSON(runReport{r.Volume, r.Exit, r.Kept, r.Published, r.Diff})
	}

	if r.Diff != nil {
		if err := a.printDiff(*r.Diff); err != nil {
			return err
		}
	}
	if p := r.Published; p != nil {
		a.noteRemoved(p.Removed)
		a.printNote("published %s", ref.Generation(p.Golden, p.Generation))
	}
	return nil
}

// checkDash makes sure that -- comes between the only argument of a verb and the command to run, if there is one.
func checkDash(c *cobra.Command, op string, args []string) error {
	if len(args) < 2 || c.ArgsLenAtDash() == 1 {
		return nil
	}
	return errs.New(errs.Invalid, op, args[0], "the command must follow --").
		WithHint("run `pando %s %s -- COMMAND`", op, args[0])
}

// foregroundSignals receives the signals that ask pando to end while a command runs in the
// foreground: it is the command that decides what to do with them.
func foregroundSignals() (arriving <-chan os.Signal, stop func()) {
	c := make(chan os.Signal, 8)
	signal.Notify(c, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	return c, func() { signal.Stop(c) }
}

// endRun says what became of the volume of a run. The exit status is the command's:
// only if that is 0, an error of pando's own decides.
func (a *App) endRun(r engine.RunResult, err error) error {
	a.exit = r.Exit
	switch {
	case r.Held != nil && r.Kept && r.Mountpoint == "": // it was mounted in a sandbox only
		a.printWarning("kept volume %s, still in use: %v", r.Volume, causeOf(r.Held))
	case r.Held != nil && r.Kept:
		a.printWarning("kept volume %s, still mounted at %s: %v", r.Volume, r.Mountpoint, causeOf(r.Held))
		a.printNote("unmount it with `pando umount %s` once nothing uses it", r.Volume)
	case r.Held != nil:
		a.printWarning("volume %s could not be destroyed yet: %v", r.Volume, causeOf(r.Held))
		a.printNote("%s destroys it once nothing uses it", a.cleaner())
	case r.Kept && err == nil:
		a.printNote("kept volume %s", r.Volume)
	}
	if err != nil && r.Ran && r.Exit != 0 {
		a.printError(err)
		return nil
	}

	return err
}

// cleaner names who destroys what has expired.
func (a *App) cleaner() string {
	if a.service != "" {
		return "the service"
	}
	return "the next pando command"
}

// causeOf is an error without the operation and the reference that it begins with.
func causeOf(err error) error {
	var e *errs.Error
	if errors.As(err, &e) && e.Err != nil {
		return e.Err
	}
	return err
}
