package cli

import (
	"context"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/front/viaservice"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

func (a *App) remoteCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "remote",
		Aliases: []string{"remotes"},
		GroupID: "remotes",
		Short:   "Manage remotes",
		Long: `Manage remotes. A remote is an encrypted repository in object storage or in a
directory, to which volumes and goldens are pushed and from which they are
pulled. All data is encrypted and authenticated on this host before it is
uploaded: the operator of the storage sees neither contents nor names.`,
		Args: cobra.NoArgs,
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

// findRemote finds a remote by its name; "" is the only one. NotFound, Invalid.
func (a *App) findRemote(op, name string) (*replicate.Remote, error) {
	name, err := chooseRemote(op, name, func() ([]string, error) { return replicate.List(a.poolDir()) })
	if err != nil {
		return nil, err
	}
	return a.loadRemote(name)
}

// chooseRemote returns the name of a remote: the given one, or for "" the only one that list returns. NotFound,
// Invalid.
func chooseRemote(op, name string, list func() ([]string, error)) (string, error) {
	if name != "" {
		return name, ref.CheckName(op, name)
	}

	all, err := list()
	if err != nil {
		return "", err
	}

	switch len(all) {
	case 0:
		return "", errs.New(errs.NotFound, op, "", "this pool has no remote").
			WithHint("add one with `pando remote add NAME URL`")
	case 1:
		return all[0], nil
	}

	how := "choose one"
	if op == "push" {
		how = "choose one with --to"
	}

	return "", errs.New(errs.Invalid, op, "", "this pool has %d remotes and none was chosen", len(all)).
		WithHint("%s: %s", how, strings.Join(all, ", "))
}

// completeRemotes completes the name of a remote, once.
func (a *App) completeRemotes(c *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	all, err := a.remoteNames(c)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return all, cobra.ShellCompDirectiveNoFileComp
}

// remoteNames returns the names of the remotes, for completion.
func (a *App) remoteNames(c *cobra.Command) ([]string, error) {
	p, err := a.serviceOf(c)
	if err != nil {
		return nil, err
	}
	if p == nil {
		return replicate.List(a.poolDir())
	}
	defer p.Close()
	return p.Remotes(contextOf(c))
}

// serviceOf connects to the service that a command goes through; nil: none. The caller closes it.
func (a *App) serviceOf(c *cobra.Command) (*viaservice.Pool, error) {
	if err := a.chooseService(c); err != nil || a.service == "" { // completion has not chosen it
		return nil, err
	}
	return viaservice.Open(a.service)
}

// contextOf returns the context of a command; completion of some shells has none.
func contextOf(c *cobra.Command) context.Context {
	if ctx := c.Context(); ctx != nil {
		return ctx
	}
	return context.Background()
}

// completionTime limits how long completion waits for a remote.
const completionTime = 5 * time.Second

// completeOnRemote completes the name of a remote and then its volumes, in the first n arguments (0: all).
func (a *App) completeOnRemote(n int) completer {
	return func(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		if len(args) == 0 {
			return a.completeRemotes(c, args, word)
		}
		if n > 0 && len(args) >= n {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}

		ctx, cancel := context.WithTimeout(contextOf(c), completionTime)
		defer cancel()

		// A service tells the names of volumes, and not those of their points.
		p, err := a.serviceOf(c)
		if err == nil && p != nil {
			defer p.Close()
			names, err := p.OnRemote(ctx, args[0])
			if err != nil {
				return nil, cobra.ShellCompDirectiveError
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		}
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}

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
