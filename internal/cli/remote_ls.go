package cli

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"pando/internal/errs"
	"pando/internal/ref"
	"pando/internal/replicate"

	"github.com/spf13/cobra"
)

func (a *App) remoteLsCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "ls [NAME [VOLUME]]",
		Aliases: []string{"list"},
		Short:   "List remotes, what a remote holds, or the points of a volume there",
		Long: `Without NAME it lists the remotes of this pool, without asking them. With NAME it
lists what that remote holds: volumes and goldens, how many points each has, what
its newest holds (LOGICAL), what all of them took when they were stored (STORED),
which host writes it, and who is at work on it. With VOLUME it lists its points.`,
		Example:           "  pando remote ls\n  pando remote ls backup\n  pando remote ls backup job-17 --json",
		Args:              usage(cobra.MaximumNArgs(2)),
		ValidArgsFunction: a.completeOnRemote(2),
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return a.listRemotes()
			}
			r, err := a.remote("remote ls", args[0])
			if err != nil {
				return err
			}
			if len(args) > 1 {
				if err := ref.CheckName("remote ls", args[1]); err != nil {
					return err
				}
			}
			vols, err := replicate.Volumes(c.Context(), r)
			if err != nil {
				return err
			}
			if len(args) == 1 {
				return a.printListed(r, vols)
			}
			for _, v := range vols {
				if v.Name == args[1] && v.Problem != "" {
					return errs.New(errs.Damaged, "remote ls", v.Name, "the list of its points on %s cannot be read: %s", r.Name, v.Problem).
						WithHint("make it anew with `pando remote repair %s`", r.Name)
				}
				if v.Name == args[1] {
					return a.printPoints(v)
				}
			}
			return errs.New(errs.NotFound, "remote ls", args[1], "%s has no volume of this name", r.Name).
				WithHint("see `pando remote ls %s`", r.Name)
		},
	}
}

// remoteInfo is what is known of a remote without asking it.
type remoteInfo struct {
	*replicate.Remote
	Problem string `json:"problem,omitempty"`
}

func (a *App) listRemotes() error {
	names, err := replicate.List(a.poolDir())
	if err != nil {
		return err
	}
	out := []remoteInfo{}
	for _, n := range names {
		r, err := a.loadRemote(n)
		if err != nil {
			// One that is damaged must not hide the others.
			a.warn("%v", err)
			out = append(out, remoteInfo{Remote: &replicate.Remote{Name: n}, Problem: err.Error()})
			continue
		}
		out = append(out, remoteInfo{Remote: r})
	}
	switch {
	case a.json:
		return a.printJSON(out)
	case a.quiet:
		for _, r := range out {
			if err := a.printf("%s\n", r.Name); err != nil {
				return err
			}
		}
		return nil
	case len(out) == 0:
		a.note("no remotes; add one with `pando remote add NAME URL`")
		return nil
	}
	t := a.table("NAME", "URL", "REPOSITORY", "ADDED")
	for _, r := range out {
		t.row(r.Name, orDash(r.URL), r.Mark.ID.String(), ago(r.AddedAt))
	}
	return t.flush()
}

func (a *App) printListed(r *replicate.Remote, vols []replicate.Listed) error {
	if a.json {
		return a.printJSON(vols)
	}
	all := len(vols)
	vols = slices.DeleteFunc(slices.Clone(vols), func(v replicate.Listed) bool {
		if v.Problem != "" {
			a.warn("the list of points of %s cannot be read: %s", cmp.Or(v.Name, v.Object), v.Problem)
		}
		return v.Problem != ""
	})
	if len(vols) < all {
		a.note("make it anew with `pando remote repair %s`", r.Name)
	}
	switch {
	case a.quiet:
		for _, v := range vols {
			if len(v.Points) == 0 {
				continue // its first push is under way
			}
			if err := a.printf("%s\n", v.Name); err != nil {
				return err
			}
		}
		return nil
	case len(vols) == 0:
		a.note("%s holds nothing; push something with `pando push REF --to %s`", r.Name, r.Name)
		return nil
	}
	t := a.table("NAME", "KIND", "FS", "POINTS", "NEWEST", "FROM", "LOGICAL", "STORED", "WRITER", "AT WORK")
	for _, v := range vols {
		newest, when, origin := "-", "-", "-"
		if i := slices.IndexFunc(v.Points, func(p replicate.ListedPoint) bool { return p.Name == v.Newest }); i >= 0 {
			p := v.Points[i]
			newest, when, origin = p.Name, ago(p.CreatedAt), orDash(p.Origin)
		}
		t.row(v.Name, v.Kind, orDash(v.FS), itoa(len(v.Points)), newest+", "+when, origin, size(v.LogicalBytes), size(v.StoredBytes), orDash(v.Writer), atWork(v.Sessions))
	}
	return t.flush()
}

// atWork says who works on a volume.
func atWork(all []replicate.ListedWork) string {
	if len(all) == 0 {
		return "-"
	}
	w := all[0]
	s := fmt.Sprintf("%s by %s (pid %d), seen %s", w.Kind, w.Host, w.PID, ago(w.RenewedAt))
	if len(all) > 1 {
		s += fmt.Sprintf(", and %d more", len(all)-1)
	}
	return s
}

func (a *App) printPoints(v replicate.Listed) error {
	switch {
	case a.json:
		return a.printJSON(v)
	case a.quiet:
		for _, p := range v.Points {
			if err := a.printf("%s@%s\n", v.Name, p.Name); err != nil {
				return err
			}
		}
		return nil
	}
	t := a.table("POINT", "CREATED", "CONSISTENCY", "FROM", "SIZE", "LOGICAL", "STORED")
	for _, p := range v.Points {
		t.row(v.Name+"@"+p.Name, p.CreatedAt.Local().Format(time.DateTime), orDash(p.Consistency), orDash(p.Origin), size(p.SizeBytes), size(p.LogicalBytes), size(p.StoredBytes))
	}
	return t.flush()
}
