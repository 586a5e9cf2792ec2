package cli

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"time"

	"pando/client"
	"pando/internal/base/errs"
	"pando/internal/front/service"
	"pando/internal/front/web"

	"github.com/spf13/cobra"
)

// uiGrace is how long the service that only `pando ui` has waits at its end.
const uiGrace = 10 * time.Second

func (a *App) uiCommand() *cobra.Command {
	var own bool
	c := &cobra.Command{
		Use:     "ui",
		GroupID: "pool",
		Short:   "Print a URL of the web page, which works once",
		Long: `Print a URL that signs one browser in to the web page of the service, with the
rights of the user who runs this command. It works once, and for a minute. Whoever
has it has these rights: do not pass it on. If it is used a second time, the
session that it began ends.

The service must have been started with --web. It is that of --socket, of
PANDO_SOCKET, or of ` + client.DefaultSocket + `. If there is none,
or with --own, this command serves the page itself until it is interrupted.

The page is at a host name of its own below localhost, which browsers find
without asking anybody. From another machine, forward the port of the page:
ssh -L 9745:127.0.0.1:9745 HOST`,
		Example: "  pando ui\n  pando ui --socket /run/pando/ci.sock\n  pando --pool /srv/pool ui",
		Args:    cobra.NoArgs,
	}
	c.Flags().BoolVar(&own, "own", false, "serve the page here, even if a service is running")

	c.RunE = func(c *cobra.Command, _ []string) error {
		socket, err := a.uiSocket(c, own)
		if err != nil {
			return err
		}
		if socket == "" {
			return a.serveUI(c.Context())
		}
		return a.askForUI(c.Context(), socket)
	}
	return c
}

// uiSocket returns the socket of the service that has the page; "": this command serves it. Invalid.
func (a *App) uiSocket(c *cobra.Command, own bool) (string, error) {
	socket, err := a.chosenSocket(c)
	switch {
	case err != nil:
		return "", err
	case own && socket != "" && c.Root().PersistentFlags().Changed("socket"):
		return "", errs.New(errs.Invalid, "ui", "", "--own and --socket cannot be combined").WithHint("remove one of them")
	case own:
		return "", nil
	case socket != "" || a.dir != "" || os.Getenv("PANDO_POOL") != "":
		return socket, nil
	}
	if _, err := os.Lstat(service.DefaultSocket); err == nil {
		return service.DefaultSocket, nil
	}
	return "", nil
}

// askForUI prints the URL of a running service.
func (a *App) askForUI(ctx context.Context, socket string) error {
	c, err := client.New(client.Options{Socket: socket})
	if err != nil {
		return errs.Wrap("ui", socket, err)
	}
	defer c.Close()

	resp, err := c.Do(ctx, client.Request{Method: http.MethodPost, Path: "/v1/web/logins",
		Header: http.Header{"Pando-Words": {"command-line"}}})
	if err != nil {
		return serviceError("ui", socket, err)
	}
	defer resp.Body.Close()
	var out service.WebLogin
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
		return errs.Wrap("ui", socket, err)
	}
	return a.printResult(out, out.URL, "%s\n", out.URL)
}

// serveUI serves the page of a pool that this process opens, until ctx ends.
func (a *App) serveUI(ctx context.Context) error {
	a.lasting = true
	o, err := a.serviceOptions(uiGrace)
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

	l, err := service.ListenWeb("127.0.0.1:0")
	if err != nil {
		return err
	}
	w := web.New(s, web.Options{Address: l.Addr().String(), Log: a.printWarning})
	s.SetWeb(w)
	url, expiresAt := w.Login(service.LocalCaller(uint32(os.Geteuid()), uint32(os.Getegid()), os.Getpid()))
	if err := a.printResult(service.WebLogin{URL: url, ExpiresAt: expiresAt}, url, "%s\n", url); err != nil {
		_ = l.Close()
		return err
	}
	a.printNote("serving the page of %s until interrupted", e.Dir())
	return s.Serve(ctx, l)
}
