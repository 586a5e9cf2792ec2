// Package cli is the command line of Pando. It has one file for each verb, and is the only package
// that prints. Results go to standard output, as text or (--json) as one JSON
// value; progress, notes and errors go to standard error.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"text/template"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/principal"
	"pando/internal/base/waiting"
	"pando/internal/base/warnings"
	"pando/internal/engine"
	"pando/internal/engine/pool"
	"pando/internal/service/users"

	"github.com/spf13/cobra"
)

// App is one run of the command line.
type App struct {
	Drivers engine.Drivers
	Version string
	Stdin   *os.File
	Stdout  io.Writer
	Stderr  io.Writer
	// NewService makes what `pando serve` answers requests with.
	NewService func(u *users.Users, log *slog.Logger) Service
	Inside     bool // Run is called in a process that goes on: nothing that the command has opened stays open

	dir        string
	json       bool
	quiet      bool
	noProgress bool
	each       *template.Template // form of what would be printed as JSON; nil: JSON
	lasting    bool               // the command runs until it is interrupted, and reopens the pool in each round
	exit       int                // exit code of a command that succeeded but must not exit with 0
	unprinted  error              // the first error of writing the result
	outage     *outage
}

// Main runs the program and returns its exit code. Call it before anything else: this process may be a
// helper that pando has started (engine.Helper).
func Main(drivers engine.Drivers, service func(*users.Users, *slog.Logger) Service, version string) int {
	engine.Helper(os.Args)
	a := &App{Drivers: drivers, NewService: service, Version: version, Stdin: os.Stdin, Stdout: os.Stdout,
		Stderr: os.Stderr}
	// The first signal asks the work to stop and clean up. A second one, at least 1 s later, ends the process as
	// usual. The delay is needed because timeout(1) sends each signal twice: to the process and to its group.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, stop) })
	return a.Run(ctx, os.Args[1:])
}

// Run runs one command line and returns its exit code.
func (a *App) Run(ctx context.Context, args []string) int {
	a.outage = &outage{}
	root := a.root()
	root.SetArgs(bareMount(args))
	root.SetIn(a.Stdin)
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	c, err := root.ExecuteContextC(principal.With(waiting.WithNotes(ctx, a.noteWait), principal.Process()))
	if err == nil {
		err = a.unprinted
	}
	if err == nil {
		return a.exit
	}

	a.failShell(c, args)

	// Give every error a kind.
	var known *errs.Error
	switch {
	case ctx.Err() != nil && errs.KindOf(err) == errs.Internal:
		err = &errs.Error{Kind: errs.Canceled, Err: err}
	case errors.Is(err, context.Canceled):
		err = (&errs.Error{Kind: errs.Canceled, Err: errors.New("interrupted; unfinished work was undone")})
	case !errors.As(err, &known):
		// All packages below return *errs.Error, so any other error is cobra's about the command line.
		err = (&errs.Error{Kind: errs.Invalid, Err: err}).WithHint("run `pando --help` to list the commands")
	}

	a.printError(err)
	if c != nil && c.CommandPath() == "pando run" {
		return runExit(err)
	}
	return errs.KindOf(err).Codes().Exit
}

// Commands returns the tree of commands and topics with the texts that --help prints, for programs that
// write them in another form. Its commands must not be run.
func Commands() *cobra.Command {
	root := (&App{}).root()
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	return root
}

func (a *App) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "pando",
		Short: "Instant, disposable, copy-on-write volumes",
		Long: `Pando gives a Linux host instant, disposable, copy-on-write volumes: import a
directory once as a golden, give every agent session, CI job or test a private
writable clone of it in milliseconds, and destroy the clone just as fast.`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}

	// Flags of all commands.
	f := root.PersistentFlags()
	f.StringVar(&a.dir, "pool", "", "use the pool in `DIR` (default $PANDO_POOL, or "+pool.DefaultDir+")")
	f.BoolVar(&a.json, "json", false, "print the result as JSON on standard output, and errors as JSON on standard error")
	f.BoolVarP(&a.quiet, "quiet", "q", false, "print only names, or nothing; hide notes and progress")
	f.BoolVar(&a.noProgress, "no-progress", false, "do not show progress")
	_ = root.MarkPersistentFlagDirname("pool")
	root.PersistentPreRunE = func(c *cobra.Command, _ []string) error {
		if f.Changed("pool") && a.dir == "" { // the variable of a script was empty
			return errs.New(errs.Invalid, c.CommandPath(), "", "--pool must not be empty").
				WithHint("remove --pool, or name the directory of a pool")
		}
		return nil
	}

	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return (&errs.Error{Kind: errs.Invalid, Op: c.CommandPath(), Err: err}).
			WithHint("run `%s --help` to list the options", c.CommandPath())
	})

	// The verbs, in groups.
	root.AddGroup(
		&cobra.Group{ID: "volumes", Title: "Volumes:"},
		&cobra.Group{ID: "goldens", Title: "Goldens:"},
		&cobra.Group{ID: "remotes", Title: "Remotes:"},
		&cobra.Group{ID: "pool", Title: "The pool:"},
		&cobra.Group{ID: "tools", Title: "Tools:"},
	)

	root.AddCommand(
		a.cloneCommand(), a.forkCommand(), a.runCommand(), a.mountCommand(), a.umountCommand(), a.lsCommand(),
		a.showCommand(), a.diffCommand(), a.rebaseCommand(), a.flattenCommand(), a.destroyCommand(),
		a.snapshotCommand(), a.rewindCommand(), a.resizeCommand(), a.renameCommand(), a.labelCommand(), a.exportCommand(),
		a.pinCommand(), a.unpinCommand(), a.setCommand(),
		a.goldenCommand(),
		a.remoteCommand(), a.pushCommand(), a.pullCommand(), a.verifyCommand(),
		a.initCommand(), a.deinitCommand(), a.poolCommand(), a.gcCommand(), a.pruneCommand(), a.fsckCommand(),
		a.historyCommand(), a.serveCommand(),
		a.doctorCommand(), a.diagnoseCommand(), a.iostatCommand(), a.benchCommand(), a.versionCommand(), a.exitCodesTopic(),
	)

	reportArgs(root)
	root.CompletionOptions.HiddenDefaultCmd = false
	return root
}

// bareMount allows `--mount` without a directory: as the last argument or before another flag, it means the
// default mount point.
func bareMount(args []string) []string {
	out := make([]string, 0, len(args))
	for i, s := range args {
		if s == "--" {
			return append(out, args[i:]...)
		}
		if s == "--mount" && (i+1 == len(args) || strings.HasPrefix(args[i+1], "-")) {
			s = "--mount="
		}
		out = append(out, s)
	}
	return out
}

// poolDir returns the directory of the pool: from --pool, PANDO_POOL or the default.
func (a *App) poolDir() string {
	switch {
	case a.dir != "":
		return a.dir
	case os.Getenv("PANDO_POOL") != "":
		return os.Getenv("PANDO_POOL")
	}
	return pool.DefaultDir
}

// openReadOnly opens the pool without maintenance. The caller closes the engine, which changes nothing.
func (a *App) openReadOnly(ctx context.Context) (*engine.Engine, error) {
	return engine.Open(ctx, a.poolDir(), a.Drivers, engine.ReadOnly)
}

// openUnmaintained opens the pool, and does no more. The caller closes the engine.
func (a *App) openUnmaintained(ctx context.Context) (*engine.Engine, error) {
	var options []engine.Option
	if !a.lasting && !a.Inside {
		options = append(options, engine.ShortLived)
	}
	return engine.Open(ctx, a.poolDir(), a.Drivers, options...)
}

// openPool opens the pool, does urgent maintenance, and prints what that cleaned up. The caller closes the engine.
func (a *App) openPool(ctx context.Context) (*engine.Engine, error) {
	e, err := a.openUnmaintained(ctx)
	if err != nil {
		return nil, err
	}

	// Do urgent maintenance, and report it.
	r, err := e.Maintain(ctx, time.Now())
	if err != nil {
		e.Close()
		return nil, err
	}

	if r.Undone > 0 {
		a.printNote("cleaned up %s", errs.Plural(r.Undone, "interrupted operation"))
	}
	if r.Expired > 0 {
		a.printNote("destroyed %s", errs.Plural(r.Expired, "expired volume"))
	}

	if r.Swept != nil && r.Swept.Garbage > 0 {
		a.printNote("first use since the host started: removed %s that were incomplete or ephemeral",
			errs.Plural(r.Swept.Garbage, "object"))
	}

	if r.Swept != nil {
		for _, s := range r.Swept.Missing {
			a.printWarning("%s is in the catalogue, but its data is missing", s)
		}
		for _, s := range r.Swept.Kept {
			a.printWarning("%s", s)
		}
	}

	for _, w := range r.Warnings {
		a.printWarning("%s", w)
	}

	return e, nil
}

// collectWarnings returns a context that collects warnings of the engine; tell prints them.
func (a *App) collectWarnings(ctx context.Context) (_ context.Context, tell func()) {
	said := &warnings.List{}
	return warnings.Collect(ctx, said), func() {
		for _, w := range said.Messages() {
			a.printWarning("%s", w)
		}
	}
}

// withPool opens the pool, calls fn and closes it.
func (a *App) withPool(
	fn func(ctx context.Context, e *engine.Engine, args []string) error,
) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		e, err := a.openPool(c.Context())
		if err != nil {
			return err
		}
		defer e.Close()
		ctx, tell := a.collectWarnings(c.Context())
		defer tell()
		return fn(ctx, e, args)
	}
}

// printNote prints information that is not part of the result, unless -q or --json is given.
func (a *App) printNote(format string, args ...any) {
	if !a.quiet && !a.json {
		fmt.Fprintln(a.Stderr, errs.MaskURLs(fmt.Sprintf("pando: "+format, renderArgs(args)...)))
	}
}

// noteWait prints that this command waits for another process, in the same place as progress.
func (a *App) noteWait(text string) {
	switch {
	case a.quiet:
	case a.json:
		fmt.Fprintln(a.Stderr, progressEvent{Stage: errs.MaskURLs(text)}.line())
	default:
		a.printNote("%s", text)
	}
}

// printWarning prints a problem that does not stop the command, even with --json.
func (a *App) printWarning(format string, args ...any) {
	fmt.Fprintln(a.Stderr, errs.MaskURLs(fmt.Sprintf("pando: warning: "+format, renderArgs(args)...)))
}

// printJSON prints the one JSON value of a command. Errors are those of printf.
func (a *App) printJSON(v any) error {
	if a.unprinted != nil {
		return a.unprinted
	}
	if a.each != nil {
		return a.printEach(v)
	}
	enc := json.NewEncoder(a.Stdout)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return a.written(enc.Encode(rendered(v)))
}

// printf prints a line of the result. After an error it prints nothing more and returns that error, with which Run
// ends the command: callers need not check each line.
func (a *App) printf(format string, args ...any) error {
	if a.unprinted != nil {
		return a.unprinted
	}
	_, err := fmt.Fprintf(a.Stdout, format, renderArgs(args)...)
	return a.written(err)
}

// printResult prints the result of a command: v with --json, only name with --quiet (nothing if it is ""), else a text.
func (a *App) printResult(v any, name, format string, args ...any) error {
	switch {
	case a.json:
		return a.printJSON(v)
	case !a.quiet:
		return a.printf(format, args...)
	case name != "":
		return a.printf("%s\n", name)
	}
	return nil
}

// written makes an error of writing the result the error of the command, and returns the first one. A closed pipe
// (| head) is not an error.
func (a *App) written(err error) error {
	if err != nil && a.unprinted == nil && !errors.Is(err, syscall.EPIPE) {
		a.unprinted = errs.Wrap("print", "", err)
	}
	return a.unprinted
}

func (a *App) printError(err error) {
	if a.json && a.each == nil || wantsJSON() {
		b, _ := json.Marshal(api.Failure{Error: api.ErrorOf(err, hintOf(err))}) // strings only
		fmt.Fprintf(a.Stderr, "%s\n", b)
		return
	}

	fmt.Fprintf(a.Stderr, "pando: %s\n", errs.MaskURLs(err.Error()))
	if hint := hintOf(err); hint != "" {
		fmt.Fprintf(a.Stderr, "hint: %s\n", hint)
	}
}

// wantsJSON reports whether the arguments contain --json. It works even if the command line cannot be parsed.
func wantsJSON() bool {
	for _, s := range os.Args[1:] {
		if s == "--" {
			return false
		}
		if s == "--json" {
			return true
		}
	}
	return false
}

// reportArgs turns cobra's errors about the arguments of all commands below c into errors of kind Invalid.
func reportArgs(c *cobra.Command) {
	for _, sub := range c.Commands() {
		reportArgs(sub)
	}

	check := c.Args
	if check == nil {
		return
	}

	c.Args = func(c *cobra.Command, args []string) error {
		if err := check(c, args); err != nil {
			return (&errs.Error{Kind: errs.Invalid, Op: c.CommandPath(), Err: err}).WithHint("usage: %s", c.UseLine())
		}
		return nil
	}
}
