package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"time"

	"pando/client"
	"pando/internal/base/errs"
	"pando/internal/front/schedule"
	"pando/internal/front/tasks"

	"github.com/spf13/cobra"
)

func (a *App) serviceCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "service",
		GroupID: "pool",
		Short:   "Show what a running service does, and check its tasks",
		Long: `Show what a service that ` + "`pando serve`" + ` runs is doing by itself and for others,
and check the file of its tasks.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.serviceStatusCommand(), a.serviceCheckCommand())
	return c
}

func (a *App) serviceStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show a running service, its operations and its tasks",
		Long: `Show the service that listens on the socket of --socket, of PANDO_SOCKET, or
` + client.DefaultSocket + `: its version and pool, the operations
that are running, and its tasks. For each task pando prints its interval, when it
ran last and what came of it, and when it is due. A task without an interval runs
when there is something to do. If the last run failed, the error follows.`,
		Example: "  pando service status\n  pando service status --socket /run/ci.sock --json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.serviceStatus(c.Context(), a.socket)
		},
	}
}

func (a *App) serviceCheckCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "check [FILE]",
		Short: "Check a file of tasks",
		Long: `Check a file of tasks (default: ` + tasks.DefaultFile + `), and list the tasks in it. Nothing
is run, and no service needs to be running. Whether volumes, goldens and remotes
exist is checked when a task runs.`,
		Example: "  pando service check contrib/tasks.toml",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			name := tasks.DefaultFile
			if len(args) > 0 {
				name = args[0]
			}
			config, err := tasks.ReadFile(name)
			if err != nil {
				return err
			}
			return a.printConfig(config)
		},
	}
}

// printConfig prints the tasks of a file.
func (a *App) printConfig(c *tasks.Config) error {
	type task struct {
		Name         string  `json:"name"`
		Verb         string  `json:"verb"`
		Ref          string  `json:"ref"`
		EverySeconds float64 `json:"every_seconds"`
	}
	out := []task{}
	for _, j := range (&tasks.Host{}).Jobs(c) {
		t := task{j.Name, j.Verb, j.Ref, j.Every.Seconds()}
		if j.Watch {
			t.EverySeconds = 0
		}
		out = append(out, t)
	}
	if a.json {
		return a.printJSON(out)
	}
	if a.quiet {
		return nil
	}

	t := a.table("TASK", "EVERY", "DOES")
	for _, x := range out {
		t.row(x.Name, formatEvery(x.EverySeconds), strings.TrimSpace(x.Verb+" "+x.Ref))
	}
	return t.flush()
}

// serviceStatus prints the state of a service.
func (a *App) serviceStatus(ctx context.Context, socket string) error {
	c, err := client.New(client.Options{Socket: socket})
	if err != nil {
		return errs.Wrap("service status", socket, err)
	}
	defer c.Close()

	s, err := c.Service(ctx)
	if err != nil {
		return serviceError("service status", socket, err)
	}
	all, err := c.Operations(ctx)
	if err != nil {
		return serviceError("service status", socket, err)
	}
	running := []client.Operation{}
	for _, o := range all {
		if o.Running() {
			running = append(running, o)
		}
	}

	if a.json {
		return a.printJSON(struct {
			*client.Service
			Operations []client.Operation `json:"operations"`
		}{s, running})
	}
	return a.printStatus(s, running)
}

// serviceError returns the error about a service that does not answer, or that refuses.
func serviceError(op, socket string, err error) error {
	var refused *client.Error
	if errors.As(err, &refused) {
		return (&errs.Error{Kind: errs.Kind(refused.Kind), Op: op, Err: errors.New(refused.Detail)}).
			WithHint("%s", refused.Hint)
	}
	if errors.Is(err, context.Canceled) {
		return err
	}

	switch {
	case socket == "" && os.Getenv(client.SocketVariable) != "":
		socket = os.Getenv(client.SocketVariable)
	case socket == "":
		socket = client.DefaultSocket
	}
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return errs.New(errs.NotFound, op, socket, "no service listens on this socket").
			WithHint("start one with `pando serve --socket %s`, or name its socket with --socket", socket)
	case errors.Is(err, fs.ErrPermission):
		return errs.New(errs.Permission, op, socket, "you may not connect to this socket").
			WithHint("run the command as root, for example with sudo")
	}
	return errs.Wrap(op, socket, err)
}

func (a *App) printStatus(s *client.Service, running []client.Operation) error {
	if a.quiet {
		return nil
	}

	// The service.
	a.printf("version     %s\n", s.Version)
	a.printf("pool        %s (%s)\n", s.Pool, s.Driver)
	a.printf("running     %s\n", formatSpan(time.Since(s.StartedAt)))
	a.printf("operations  %d\n", s.Running)

	// Operations.
	if len(running) > 0 {
		a.printf("\n")
		t := a.table("OPERATION", "ON", "BY", "FOR", "PROGRESS")
		for _, o := range running {
			t.row(o.Verb, orDash(o.Ref), o.By, formatSpan(time.Since(o.StartedAt)), formatOperation(o.Progress))
		}
		if err := t.flush(); err != nil {
			return err
		}
	}

	// Tasks.
	a.printf("\n")
	t := a.table("TASK", "EVERY", "LAST", "NEXT", "RESULT")
	for _, x := range s.Tasks {
		t.row(x.Name, formatEvery(x.EverySeconds), lastRun(x), nextRun(x.NextAt), lastResult(x))
	}
	if err := t.flush(); err != nil {
		return err
	}

	for _, x := range s.Tasks {
		if x.LastError != nil {
			again := ""
			if x.Failures > 1 {
				again = fmt.Sprintf(", %d times in a row", x.Failures)
			}
			a.printf("\n%s failed %s%s: %s\n", x.Name, formatAge(*x.LastFinishedAt), again, x.LastError.Detail)
			if x.LastError.Hint != "" {
				a.printf("hint: %s\n", x.LastError.Hint)
			}
		}
	}
	return nil
}

// formatEvery formats the interval of a task; 0: it has none.
func formatEvery(seconds float64) string {
	if seconds == 0 {
		return "when due"
	}
	return schedule.FormatInterval(time.Duration(seconds * float64(time.Second)))
}

func lastRun(t client.Task) string {
	switch {
	case t.Running:
		return "running"
	case t.LastFinishedAt == nil:
		return "never"
	}
	return formatAge(*t.LastFinishedAt)
}

func nextRun(at *time.Time) string {
	if at == nil {
		return "-"
	}
	return "in " + formatSpan(max(0, time.Until(*at)))
}

func lastResult(t client.Task) string {
	if t.LastError != nil {
		return "failed"
	}
	return orDash(t.LastResult)
}

func formatOperation(p client.Progress) string {
	switch {
	case p.Stalled != "":
		return p.Stage + ": waiting, " + p.Stalled
	case p.TotalBytes > 0:
		return fmt.Sprintf("%s: %s of %s", p.Stage, formatBytes(p.Bytes), formatBytes(p.TotalBytes))
	case p.TotalFiles > 0:
		return fmt.Sprintf("%s: %d of %d", p.Stage, p.Files, p.TotalFiles)
	}
	return orDash(p.Stage)
}
