package cli

import (
	"context"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"pando/internal/base/errs"
	"pando/internal/front/mcp"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// mcpHelp is the text of `pando mcp --help`.
const mcpHelp = `Serve the Model Context Protocol on standard input and output, until the client
closes the input or pando is interrupted. A client, such as a coding agent, starts
this command and gets tools to list, clone, snapshot, compare, rewind, publish and
destroy volumes, to read and write files in them, and to run commands in them.

What the client reaches is decided here. It clones the goldens of --golden only,
publishes those of --publish only, and names only volumes that begin with --prefix.
It changes and destroys only what this server has made, unless --allow-destroy is
given. Commands run in a sandbox, as with ` + "`pando run`" + `: the clone is at /work among
the programs of this host, without a network, unless the options say otherwise.
Without root, a pool that a service has opened is used like any other.

At the end the volumes that were made are destroyed, or named with --keep. If pando
is killed, the service or the next pando command destroys them within ten minutes.
Generations that were published stay, and are named.`

// mcpFlags are the options of mcp.
type mcpFlags struct {
	mcp.Options
	ttl string
}

func (a *App) mcpCommand() *cobra.Command {
	var q mcpFlags
	c := &cobra.Command{
		Use:     "mcp",
		GroupID: "pool",
		Short:   "Give an agent volumes through the Model Context Protocol",
		Long:    mcpHelp,
		Example: "  pando mcp --golden web\n  pando mcp --golden 'base-*' --publish 'agent-*' --prefix agent --ttl 2h\n" +
			"  pando mcp --golden debian --root --memory 2G --pids 500",
		Args: cobra.NoArgs,
	}

	f := c.Flags()
	f.StringVar(&q.Prefix, "prefix", "mcp", "names of volumes begin with `NAME` and -")
	f.StringArrayVar(&q.Goldens, "golden", nil, "let the client clone `GOLDEN`, which may be a pattern (repeatable)")
	f.StringArrayVar(&q.Publish, "publish", nil, "let the client publish `GOLDEN`, which may be a pattern (repeatable)")
	f.IntVar(&q.MaxVolumes, "max-volumes", 10, "let the client have `N` volumes at a time")
	f.DurationVar(&q.Timeout, "timeout", 10*time.Minute, "end each command after this `DURATION` at the latest")
	f.StringVar(&q.ttl, "ttl", "", "destroy each volume after this `DURATION`, such as 2h, at the latest")
	f.BoolVar(&q.Keep, "keep", false, "keep the volumes at the end, and name them")
	f.BoolVar(&q.AllowDestroy, "allow-destroy", false,
		"let the client change and destroy all volumes with the prefix, whoever made them")
	for _, name := range []string{"golden", "publish"} {
		_ = c.RegisterFlagCompletionFunc(name, a.completeGoldens)
	}
	for _, name := range []string{"prefix", "max-volumes", "timeout", "ttl"} {
		_ = c.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
	sandboxed := sandboxFlags(c, "mcp")

	c.RunE = func(c *cobra.Command, _ []string) (err error) {
		if q.Sandbox, err = sandboxed(); err != nil {
			return err
		}
		if !q.Sandbox.On() {
			q.Sandbox.Bind = "/work"
		}
		if q.Env, err = sandboxEnv(nil); err != nil {
			return err
		}
		if q.ttl != "" {
			if q.TTL, err = parseTTL("mcp", q.ttl); err != nil {
				return err
			}
		}
		return a.serveMCP(c.Context(), q.Options)
	}
	return c
}

// serveMCP serves the client on standard input and output.
func (a *App) serveMCP(ctx context.Context, o mcp.Options) error {
	a.lasting = true
	o.Version, o.NoMounts = a.Version, a.service == "" && os.Geteuid() != 0
	e, err := a.openCalls(ctx)
	if err != nil {
		return err
	}
	defer e.Close()

	pool, ok := e.(mcp.Pool)
	if !ok {
		return errs.New(errs.Internal, "mcp", "", "this pool does not have all calls")
	}
	s, err := mcp.New(ctx, pool, o)
	if err != nil {
		return err
	}
	if term.IsTerminal(int(a.Stdin.Fd())) {
		a.printNote("waiting for a client of the Model Context Protocol on standard input; Ctrl-D ends it")
	}

	// A client that is gone must not end this process before it has cleaned up. Programs that it starts get SIGPIPE.
	gone := make(chan os.Signal, 1)
	signal.Notify(gone, syscall.SIGPIPE)
	defer signal.Stop(gone)
	end, err := s.Serve(a.Stdin, os.Stdout)
	a.printEnd(end)
	return errs.Wrap("mcp", "", err)
}

// printEnd says on standard error what became of the volumes of a server.
func (a *App) printEnd(end mcp.End) {
	if len(end.Destroyed) > 0 {
		a.printNote("destroyed %s", strings.Join(end.Destroyed, ", "))
	}
	for _, name := range end.Kept {
		a.printNote("kept volume %s", name)
	}
	for _, generation := range end.Published {
		a.printNote("published %s", generation)
	}
	for _, name := range slices.Sorted(maps.Keys(end.InUse)) {
		a.printWarning("volume %s is still in use: %v", name, causeOf(end.InUse[name]))
		if !slices.Contains(end.Kept, name) {
			a.printNote("%s destroys it once nothing uses it", a.cleaner())
		}
	}
	for _, name := range slices.Sorted(maps.Keys(end.Failed)) {
		a.printWarning("volume %s: %v", name, causeOf(end.Failed[name]))
	}
}
