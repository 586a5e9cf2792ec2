package cli

import (
	"os"
	"slices"
	"strings"
	"syscall"

	"pando/client"
	"pando/internal/base/errs"
	"pando/internal/engine/pool"
	"pando/internal/front/service"

	"github.com/spf13/cobra"
)

// throughService are the commands that go through a service if one is chosen. Others need the pool itself.
var throughService = []string{
	"clone", "fork", "run", "mount", "umount", "ls", "show", "diff", "rebase", "destroy", "snapshot", "rewind", "resize",
	"rename", "label", "label ls", "label set", "label rm", "export", "pin", "unpin", "prune", "gc", "history",
	"golden ls", "golden show", "golden import", "golden publish", "golden set", "push", "pull", "verify", "fsck",
	"doctor", "mcp",
}

// poolless are the commands that use no pool, or one that is not there yet.
var poolless = []string{"version", "exit-codes", "init", "serve", "service", "ui", "help", "completion",
	cobra.ShellCompRequestCmd, cobra.ShellCompNoDescRequestCmd}

// chooseService decides whether a command goes through a service, and through which: that of --socket or PANDO_SOCKET,
// or, for users other than root who have chosen no pool of their own, that of the host. Invalid; Unsupported for a
// command that cannot go through the one that was chosen.
func (a *App) chooseService(c *cobra.Command) error {
	_, verb, _ := strings.Cut(c.CommandPath(), " ")
	a.verb = verb
	first, _, _ := strings.Cut(verb, " ")
	if slices.Contains(poolless, verb) || slices.Contains(poolless, first) {
		return nil
	}

	socket, err := a.chosenSocket(c)
	if err != nil {
		return err
	}
	a.socketChosen = socket != ""
	switch {
	case socket == "" && a.usesHostService():
		a.service = service.DefaultSocket // commands that need the pool itself see it in needsPool
		return nil
	case socket == "" || slices.Contains(throughService, verb):
		a.service = socket
		return nil
	}
	a.service = socket
	return a.needsPool()
}

// chosenSocket returns the socket that the user has chosen, or "". Flags count more than the environment. Invalid.
func (a *App) chosenSocket(c *cobra.Command) (string, error) {
	f := c.Root().PersistentFlags()
	pool, socket := f.Changed("pool"), f.Changed("socket")
	poolVariable, socketVariable := os.Getenv("PANDO_POOL"), os.Getenv(client.SocketVariable)
	invalid := func(what string) *errs.Error { return errs.New(errs.Invalid, c.CommandPath(), "", "%s", what) }
	switch {
	case socket && a.socket == "":
		return "", invalid("--socket must not be empty").WithHint("remove --socket, or name the socket of a service")
	case pool && socket:
		return "", invalid("--pool and --socket cannot be combined: a service has a pool of its own").
			WithHint("remove one of them")
	case socket:
		return a.socket, nil
	case pool:
		return "", nil
	case poolVariable != "" && socketVariable != "":
		return "", invalid("PANDO_POOL and PANDO_SOCKET are both set: a service has a pool of its own").
			WithHint("unset one of them, or choose with --pool or --socket")
	}
	return socketVariable, nil
}

// usesHostService reports whether the user, who has chosen no socket, uses the service of the host: there is one, the
// user is not root and has not chosen a pool, and the default pool belongs to someone else.
func (a *App) usesHostService() bool {
	if os.Geteuid() == 0 || a.dir != "" || os.Getenv("PANDO_POOL") != "" {
		return false
	}
	if info, err := os.Stat(pool.DefaultDir); err == nil {
		if st, ok := info.Sys().(*syscall.Stat_t); ok && int(st.Uid) == os.Geteuid() {
			return false
		}
	}
	_, err := os.Lstat(service.DefaultSocket)
	return err == nil
}

// needsPool returns an error if this command goes through a service: what follows needs the pool itself. Unsupported.
func (a *App) needsPool() error {
	if a.service == "" {
		return nil
	}
	return errs.New(errs.Unsupported, a.verb, "", "the service at %s does not do this for its callers", a.service).
		WithHint("run it as root, for example with sudo, or use a pool of your own with --pool DIR")
}
