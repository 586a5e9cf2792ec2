package cli

import (
	"os"
	"os/user"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/front/policy"

	"github.com/spf13/cobra"
)

// loadPolicy reads the policy of a service. Without a flag, the file may be missing: then it is nil, and only root may
// use the service. A service of an ordinary user, who cannot give volumes to others, has none.
func loadPolicy(file string, given bool) (*policy.Policy, error) {
	if os.Geteuid() != 0 {
		if given {
			return nil, errs.New(errs.Permission, "serve", file, "only a service of root can serve other users").
				WithHint("run it as root, or remove --policy")
		}
		return nil, nil
	}
	p, err := policy.Read(file)
	if !given && errs.Is(err, errs.NotFound) {
		return nil, nil
	}
	return p, err
}

func (a *App) servePolicyCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "policy",
		Short: "Check what a policy allows users of the service",
		Args:  cobra.NoArgs,
		RunE:  func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.policyCheckCommand(), a.policyShowCommand())
	return c
}

func (a *App) policyCheckCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "check [FILE]",
		Short:   "Check a policy for mistakes",
		Long:    "Check FILE, by default " + policy.DefaultFile + ", as the service does when it starts.",
		Example: "  pando serve policy check policy.toml",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			file := policy.DefaultFile
			if len(args) > 0 {
				file = args[0]
			}
			p, err := policy.Read(file)
			if err != nil {
				return err
			}
			n := p.Rules()
			return a.printResult(map[string]any{"file": file, "rules": n}, "", "%s: %s\n", file, errs.Plural(n, "rule"))
		},
	}
}

func (a *App) policyShowCommand() *cobra.Command {
	file := policy.DefaultFile
	c := &cobra.Command{
		Use:   "show USER",
		Short: "Show what a policy allows a user",
		Long: `Show which rule applies to USER, a name or number, and what it allows. The groups
are those in /etc/group: the service asks the kernel for those of the process.`,
		Example: "  pando serve policy show alice",
		Args:    cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			p, err := policy.Read(file)
			if err != nil {
				return err
			}
			u, err := policyUser(args[0])
			if err != nil {
				return err
			}

			g := p.For(u)
			if g == nil {
				return errs.New(errs.NotFound, "show policy", args[0], "no rule of %s names this user", file).
					WithHint("add a [[rule]] to %s", file)
			}
			return a.printGrant(g)
		},
	}
	c.Flags().StringVar(&file, "policy", file, "show what `FILE` allows")
	return c
}

// policyUser looks a user up as the host knows it.
func policyUser(name string) (policy.User, error) {
	u, err := user.Lookup(name)
	if err != nil {
		u, err = user.LookupId(name)
	}
	if err != nil {
		n, nerr := strconv.ParseUint(name, 10, 32)
		if nerr != nil {
			return policy.User{}, errs.New(errs.NotFound, "show policy", name, "there is no such user on this host").
				WithHint("use the number of the user")
		}
		return policy.User{UID: uint32(n)}, nil // without a name, as for the service
	}

	uid, _ := strconv.ParseUint(u.Uid, 10, 32) // of /etc/passwd
	out := policy.User{UID: uint32(uid), Name: u.Username}
	groups, err := u.GroupIds()
	if err != nil {
		return out, errs.Wrap("show policy", name, err)
	}
	for _, g := range groups {
		gid, _ := strconv.ParseUint(g, 10, 32)
		out.GIDs = append(out.GIDs, uint32(gid))
	}
	return out, nil
}

func yesNo(is bool) string {
	if is {
		return "yes"
	}
	return "no"
}

// printGrant prints what a rule allows a user.
func (a *App) printGrant(g *policy.Grant) error {
	list := func(all []string) string {
		if len(all) == 0 {
			return "none"
		}
		return strings.Join(all, ", ")
	}
	volumes, bytes, ttl := "any number", "any number", "any"
	if g.MaxVolumes > 0 {
		volumes = strconv.Itoa(g.MaxVolumes)
	}
	if g.MaxBytes > 0 {
		bytes = formatBytes(g.MaxBytes)
	}
	if g.MaxTTL > 0 {
		ttl = g.MaxTTL.String()
	}
	v := struct {
		*policy.Grant
		MaxTTLSeconds float64 `json:"max_ttl_seconds"`
	}{g, g.MaxTTL.Seconds()}
	return a.printResult(v, "", "rule         %d\ngoldens      %s\npublish      %s\nmax volumes  %s\nmax bytes    %s\n"+
		"max ttl      %s\nmounts       %s\nsee all      %s\nimport       %s\n", g.Rule, list(g.Goldens), list(g.Publish),
		volumes, bytes, ttl, list(g.Mounts), yesNo(g.SeeAll), yesNo(g.Import))
}
