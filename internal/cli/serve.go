package cli

import (
	"context"
	"errors"
	"log"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/front/policy"
	"pando/internal/front/service"
	"pando/internal/front/tasks"
	"pando/internal/front/web"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

// serveHelp is the text of `pando serve --help`.
const serveHelp = `Serve the pool to other programs over HTTP, until interrupted. GET
/v1/openapi.json describes all requests, docs/service.md has examples. All other
commands keep working.

Programs of this host connect to the unix socket. If there is a group pando, its
members may connect to it, otherwise only root. The kernel tells who they are.
The file of --policy says what users other than root may do: which goldens they
clone, how many volumes they have, and for how long. Their volumes belong to them,
and nobody else but root reaches these. Without the file, only root, and the user
that the service runs as, may use it. SIGHUP reads the file again.

With --listen, programs can also connect over TCP. They send a token that
` + "`pando serve token`" + ` has made: whoever has one may do everything. --tls-cert and
--tls-key are needed unless the address is a loopback address.

The service destroys volumes at the time when they expire. The file of --tasks
says what else it does by itself: keep space free, and take snapshots, push, pull,
refresh goldens, prune and gc at intervals; docs/tasks.md describes it. SIGHUP
reads the file again. ` + "`pando service status`" + ` shows what the tasks did.

GET /metrics has metrics for Prometheus, for root and for callers with a token.
With --metrics, everybody on this host can read them, and do nothing else, at a
loopback address. They name goldens and remotes; with --metrics-volumes also
the volumes that take the most space.

With --web, the service also has a web page at a loopback address. ` + "`pando ui`" + `
prints a URL that signs a browser in. docs/web.md describes the page.

SIGTERM and SIGINT end the service: it accepts no more requests, waits for those
under way, cancels what has not ended after --grace, and exits with 0. Whatever
it was doing when it is killed, the next command or service cleans up. SIGHUP
makes it read its files again; it keeps what it knows of a file with a mistake.

systemd can start it: it takes the socket of a .socket unit in place of --socket,
and tells when it is ready and what it is doing. The packages have such units.`

// defaultWeb is where the web page listens unless it was told otherwise.
const defaultWeb = "127.0.0.1:9745"

// defaultTokens is where the tokens of a service are.
const defaultTokens = "/etc/pando/tokens"

// serveFlags are the flags of serve.
type serveFlags struct {
	socket, listen, cert, key, tokens string
	grace, tasks, policy              string
	policyGiven                       bool
	metrics, web                      string
	metricsVolumes                    int
}

func (a *App) serveCommand() *cobra.Command {
	var q serveFlags
	c := &cobra.Command{
		Use:     "serve",
		GroupID: "pool",
		Short:   "Serve the pool to other programs over HTTP",
		Long:    serveHelp,
		Example: "  pando serve\n  pando serve --socket /run/pando/ci.sock\n" +
			"  pando serve --listen 10.0.0.5:7443 --tls-cert host.pem --tls-key host.key",
		Args: cobra.NoArgs,
	}

	f := c.Flags()
	f.StringVar(&q.socket, "socket", service.DefaultSocket, "listen on the unix socket `PATH`")
	f.StringVar(&q.listen, "listen", "", "also listen on `HOST:PORT`, for callers with tokens")
	f.StringVar(&q.cert, "tls-cert", "", "certificate of --listen, with its chain, a `FILE` in PEM")
	f.StringVar(&q.key, "tls-key", "", "private key of --tls-cert, a `FILE` in PEM")
	f.StringVar(&q.tokens, "token-file", defaultTokens, "accept the tokens in `FILE`")
	f.StringVar(&q.tasks, "tasks", tasks.DefaultFile, "do what `FILE` says at intervals")
	f.StringVar(&q.metrics, "metrics", "", "also serve metrics on `HOST:PORT`, to everybody on this host")
	f.IntVar(&q.metricsVolumes, "metrics-volumes", 0,
		"also have metrics of the `N` volumes that take the most space (100 if N is missing)")
	f.Lookup("metrics-volumes").NoOptDefVal = "100"
	f.StringVar(&q.web, "web", "", "also serve a web page to browsers, on `HOST:PORT` ("+defaultWeb+" if it is missing)")
	f.Lookup("web").NoOptDefVal = defaultWeb
	f.StringVar(&q.policy, "policy", policy.DefaultFile, "let users do what `FILE` allows")
	f.StringVar(&q.grace, "grace", "20s", "at the end, wait this `DURATION` for requests and operations")

	c.RunE = func(c *cobra.Command, _ []string) error {
		grace, err := parseTTL("serve", q.grace)
		if err != nil {
			return err
		}
		if q.listen == "" && (q.cert != "" || q.key != "" || f.Changed("token-file")) {
			return errs.New(errs.Invalid, "serve", "", "--tls-cert, --tls-key and --token-file need --listen").
				WithHint("add --listen HOST:PORT")
		}
		if q.metricsVolumes < 0 || q.metricsVolumes > service.MaxMetricsVolumes {
			return errs.New(errs.Invalid, "serve", "", "--metrics-volumes must be between 0 and %d (got %d)",
				service.MaxMetricsVolumes, q.metricsVolumes)
		}
		q.policyGiven = f.Changed("policy")
		return a.serve(c.Context(), q, grace, f.Changed("tasks"))
	}

	c.AddCommand(a.serveTokenCommand(), a.servePolicyCommand())
	return c
}

// readTasks reads a file of tasks, which may be missing unless it was asked for.
func readTasks(name string, must bool) (*tasks.Config, error) {
	c, err := tasks.ReadFile(name)
	switch {
	case err == nil || !errs.Is(err, errs.NotFound):
		return c, err
	case must:
		return nil, errs.New(errs.NotFound, "read tasks", name, "it does not exist").
			WithHint("create it, or remove --tasks")
	}
	return &tasks.Config{}, nil
}

// serviceOptions returns what every service of this program has.
func (a *App) serviceOptions(grace time.Duration) (service.Options, error) {
	access, err := a.remoteAccess()
	if err != nil {
		return service.Options{}, err
	}
	program, err := os.Executable()
	if err != nil {
		return service.Options{}, errs.Wrap("serve", "", err)
	}
	return service.Options{Version: a.Version, Drivers: a.Drivers, Grace: grace, Log: a.printWarning, Env: os.Environ(),
		Program: program, TempDir: os.TempDir(),
		Prepare: func(h *http.Server) { h.ErrorLog = log.New(warningLog{a}, "", 0) },
		Access:  func() (replicate.Access, error) { return access, nil }}, nil
}

// serve opens the pool, and serves it until ctx ends.
func (a *App) serve(ctx context.Context, q serveFlags, grace time.Duration, mustTasks bool) error {
	a.lasting = true
	super := newSupervisor(a.printWarning)
	o, err := a.serviceOptions(grace)
	if err != nil {
		return err
	}
	o.MetricsVolumes = q.metricsVolumes
	if o.Tasks, err = readTasks(q.tasks, mustTasks); err != nil {
		return err
	}
	if q.listen != "" {
		if o.Tokens, err = service.ReadTokens(q.tokens); err != nil {
			return (&errs.Error{Kind: errs.KindOf(err), Op: "serve", Ref: q.tokens, Err: err}).
				WithHint("make a token with `pando serve token NAME --token-file %s`", q.tokens)
		}
	}

	rules, err := loadPolicy(q.policy, q.policyGiven)
	if err != nil {
		return err
	}

	e, err := a.openPool(ctx)
	if err != nil {
		return err
	}
	defer e.Close()

	s, err := service.New(e, o)
	if err != nil {
		return err
	}

	s.SetPolicy(rules)

	listeners, err := a.listen(q)
	if err != nil {
		return err
	}
	if q.web != "" {
		l, err := service.ListenWeb(q.web)
		if err != nil {
			closeAll(listeners)
			return err
		}
		listeners = append(listeners, l)
		s.SetWeb(web.New(s, web.Options{Address: l.Addr().String(), Log: a.printWarning}))
	}
	for _, l := range listeners {
		a.printNote("listening on %s%s", l.Addr(), l.Purpose())
	}

	// Connections wait in the sockets from here on.
	if a.onHangup != nil {
		reload := func() { super.reload(func() error { return a.reloadFiles(s, q, mustTasks) }) }
		a.onHangup.Store(&reload)
		defer a.onHangup.Store(nil)
	}
	text, err := s.Health(ctx)
	if err != nil {
		return err
	}
	super.tell("READY=1", status(text))
	defer context.AfterFunc(ctx, func() {
		super.tell("STOPPING=1", status("waiting for requests and operations to end"))
	})()
	go super.watch(ctx, s.Health)
	return s.Serve(ctx, listeners...)
}

// reloadFiles reads the files of a running service again. What is in a file with a mistake stays as it was.
func (a *App) reloadFiles(s *service.Service, q serveFlags, mustTasks bool) error {
	var failed []error
	if s.Tokens != nil {
		failed = append(failed, s.Tokens.Reload())
	}

	rules, err := loadPolicy(q.policy, q.policyGiven)
	if failed = append(failed, err); err == nil {
		s.SetPolicy(rules)
		if rules != nil {
			a.printNote("read the policy %s again", q.policy)
		}
	}

	planned, err := readTasks(q.tasks, mustTasks)
	if failed = append(failed, err); err == nil {
		s.SetTasks(planned)
		a.printNote("read %s from %s", errs.Plural(len(planned.Tasks), "task"), q.tasks)
	}
	return errors.Join(failed...)
}

// listen opens the listeners of a service, all or none.
func (a *App) listen(q serveFlags) (out []*service.Listener, err error) {
	defer func() {
		if err != nil {
			closeAll(out)
			out = nil
		}
	}()

	var l *service.Listener
	if n, activated := activatedSockets(); activated {
		if l, err = service.Activated(n); err != nil {
			return out, err
		}
	} else {
		var group bool
		if l, group, err = service.ListenUnix(q.socket); err != nil {
			return out, err
		}
		if !group && os.Geteuid() == 0 {
			a.printNote("there is no group %s: only root can connect to %s", service.Group, q.socket)
		}
	}
	out = append(out, l)

	if q.listen != "" {
		if l, err = service.ListenTCP(q.listen, q.cert, q.key); err != nil {
			return out, err
		}
		out = append(out, l)
	}
	if q.metrics != "" {
		if l, err = service.ListenMetrics(q.metrics); err != nil {
			return out, err
		}
		out = append(out, l)
	}
	return out, nil
}

func closeAll(listeners []*service.Listener) {
	for _, l := range listeners {
		_ = l.Close()
	}
}

// activatedSockets returns how many sockets systemd has passed to this process (sd_listen_fds(3)).
func activatedSockets() (n int, ok bool) {
	if pid, err := strconv.Atoi(os.Getenv("LISTEN_PID")); err != nil || pid != os.Getpid() {
		return 0, false
	}

	n, _ = strconv.Atoi(os.Getenv("LISTEN_FDS")) // 0 is refused
	for _, v := range []string{"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"} {
		_ = os.Unsetenv(v) // programs that this one starts must not take them for theirs
	}
	return n, true
}

// warningLog passes the lines of a logger on as warnings.
type warningLog struct{ a *App }

// Write prints one line.
func (w warningLog) Write(b []byte) (int, error) {
	w.a.printWarning("%s", strings.TrimSpace(string(b)))
	return len(b), nil
}

func (a *App) serveTokenCommand() *cobra.Command {
	path := defaultTokens

	c := &cobra.Command{
		Use:   "token NAME",
		Short: "Make a token for programs that connect over TCP",
		Long: `Make a token called NAME, and print it. The file keeps only its hash, so it cannot
be shown again. A running service knows the token after SIGHUP or a restart. To
revoke a token, remove its line from the file, and send the service SIGHUP.`,
		Example: "  pando serve token ci --token-file /etc/pando/tokens",
		Args:    cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			name, err := ref.ParseName("add token", args[0])
			if err != nil {
				return err
			}
			token, err := service.AddToken(path, name)
			if errors.Is(err, os.ErrNotExist) {
				return errs.New(errs.NotFound, "add token", path, "its directory does not exist").
					WithHint("create it, or choose another file with --token-file")
			}
			if err != nil {
				return err
			}
			return a.printResult(map[string]string{"name": name.String(), "token": token}, token, "%s\n", token)
		},
	}
	c.Flags().StringVar(&path, "token-file", path, "add the hash of the token to `FILE`")
	return c
}
