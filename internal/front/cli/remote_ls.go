package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

func (a *App) remoteLsCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "ls [NAME [VOLUME]]",
		Aliases: []string{"list"},
		Short:   "List remotes, the volumes on a remote, or the points of a volume",
		Long: `Without NAME, list the remotes of this pool without contacting them. With NAME,
list the volumes and goldens on that remote: the number of points, the size of
the newest (LOGICAL), the bytes stored for all points (STORED), the host that
writes the volume, and the commands at work on it. With VOLUME, list its points.`,
		Example:           "  pando remote ls\n  pando remote ls backup\n  pando remote ls backup job-17 --json",
		Args:              cobra.MaximumNArgs(2),
		ValidArgsFunction: a.completeOnRemote(2),
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return a.listRemotes()
			}

			r, err := a.findRemote("remote ls", args[0])
			if err != nil {
				return err
			}

			if len(args) > 1 {
				if err := ref.CheckName("remote ls", args[1]); err != nil {
					return err
				}
			}

			l, err := replicate.Volumes(c.Context(), r)
			if err != nil {
				return err
			}

			defer l.Close()

			if len(args) == 1 {
				return a.printListed(c.Context(), r, l)
			}

			for _, v := range l.Volumes {
				if v.Name == args[1] && v.Problem != "" {
					return errs.New(errs.Damaged, "remote ls", v.Name, "cannot read its list of points on %s: %s", r.Name,
						v.Problem).
						WithHint("rebuild the list with `pando remote repair %s`", r.Name)
				}
				if v.Name == args[1] {
					return a.printPoints(c.Context(), r, l, v)
				}
			}

			return errs.New(errs.NotFound, "remote ls", args[1], "%s has no volume or golden with this name", r.Name).
				WithHint("run `pando remote ls %s` to list them", r.Name)
		},
	}
	a.formatFlag(c)
	return c
}

func (a *App) listRemotes() error {
	names, err := replicate.List(a.poolDir())
	if err != nil {
		return err
	}

	out := []api.Remote{}
	for _, n := range names {
		r, err := a.findRemote("remote ls", n)
		if err != nil {
			// One that is damaged must not hide the others.
			a.printWarning("%v", err)
			out = append(out, api.Remote{Name: n, Problem: err.Error()})
			continue
		}
		out = append(out, r.Describe())
	}

	switch {
	case a.json:
		return a.printJSON(out)
	case a.quiet:
		for _, r := range out {
			a.printf("%s\n", r.Name)
		}
		return nil
	case len(out) == 0:
		a.printNote("no remotes; add one with `pando remote add NAME URL`")
		return nil
	}

	t := a.table("NAME", "URL", "REPOSITORY", "ADDED")
	for _, r := range out {
		added := "-"
		if r.AddedAt != nil {
			added = formatAge(*r.AddedAt)
		}
		t.row(r.Name, orDash(r.URL), orDash(r.Repository), added)
	}

	return t.flush()
}

func (a *App) printListed(ctx context.Context, r *replicate.Remote, l *replicate.Listing) error {
	if a.json {
		return a.printListing(ctx, l)
	}

	vols, all := l.Volumes, len(l.Volumes)
	vols = slices.DeleteFunc(slices.Clone(vols), func(v replicate.Listed) bool {
		if v.Problem != "" {
			a.printWarning("cannot read the list of points of %s: %s", cmp.Or(v.Name, v.Object), v.Problem)
		}
		return v.Problem != ""
	})

	if len(vols) < all {
		a.printNote("rebuild the list with `pando remote repair %s`", r.Name)
	}

	switch {
	case a.quiet:
		for _, v := range vols {
			if v.Count == 0 {
				continue // its first push is under way
			}
			a.printf("%s\n", v.Name)
		}
		return nil
	case len(vols) == 0:
		a.printNote("%s is empty; push to it with `pando push REF --to %s`", r.Name, r.Name)
		return nil
	}

	t := a.table("NAME", "KIND", "FS", "POINTS", "NEWEST", "FROM", "LOGICAL", "STORED", "WRITER", "AT WORK")
	for _, v := range vols {
		newest, when, origin := "-", "-", "-"
		if p := v.NewestPoint; v.Count > 0 {
			newest, when, origin = p.Name, formatAge(p.CreatedAt), orDash(p.Origin)
		}

		t.row(
			v.Name,
			string(v.Kind),
			orDash(v.FS),
			itoa(v.Count),
			newest+", "+when,
			origin,
			formatBytes(v.LogicalBytes),
			formatBytes(v.StoredBytes),
			orDash(v.Writer),
			describeOperations(v.Operations),
		)
	}

	return t.flush()
}

// describeOperations says who works on a volume.
func describeOperations(all []api.Operation) string {
	if len(all) == 0 {
		return "-"
	}
	w := all[0]
	s := fmt.Sprintf("%s by %s (pid %d), seen %s", w.Op, w.Host, w.PID, formatAge(w.RenewedAt))
	if len(all) > 1 {
		s += fmt.Sprintf(", and %d more", len(all)-1)
	}
	return s
}

// printPoints prints the points of a volume as they are read: there may be millions.
func (a *App) printPoints(
	ctx context.Context, r *replicate.Remote, l *replicate.Listing, v replicate.Listed,
) (err error) {
	switch {
	case a.each != nil:
		for p, err := range l.Points(ctx, &v) {
			if err = errors.Join(err, a.printEach(p)); err != nil {
				return err
			}
		}
	case a.json:
		err = a.printVolume(&v, l.Points(ctx, &v), "")
	case a.quiet:
		for p, err := range l.Points(ctx, &v) {
			if err != nil {
				return err
			}
			a.printf("%s@%s\n", v.Name, p.Name)
		}
	default:
		t := a.table("POINT", "CREATED", "CONSISTENCY", "FROM", "SIZE", "LOGICAL", "STORED")
		for p, err := range l.Points(ctx, &v) {
			if err != nil {
				return err
			}
			t.row(
				v.Name+"@"+p.Name,
				p.CreatedAt.Local().Format(time.DateTime),
				orDash(p.Consistency),
				orDash(p.Origin),
				formatBytes(p.SizeBytes),
				formatBytes(p.LogicalBytes),
				formatBytes(p.StoredBytes),
			)
		}

		err = t.flush()
	}

	if v.IncompleteCount > 0 {
		a.printWarning("cannot list %s of %s: %s", errs.Plural(v.IncompleteCount, "point"), v.Name, v.Problem)
		a.printNote("rebuild the list with `pando remote repair %s`", r.Name)
	}

	return err
}

// printListing prints all volumes as JSON.
func (a *App) printListing(ctx context.Context, l *replicate.Listing) error {
	if len(l.Volumes) == 0 || a.each != nil {
		return a.printJSON(l.Volumes)
	}

	for i := range l.Volumes {
		begin := ",\n  "
		if i == 0 {
			begin = "[\n  "
		}
		a.printf("%s", begin)
		a.printVolume(&l.Volumes[i], l.Points(ctx, &l.Volumes[i]), "  ")
	}

	return a.printf("\n]\n")
}

// printVolume prints a volume as JSON, its points as they are read. What is behind them is known then.
func (a *App) printVolume(v *replicate.Listed, points iter.Seq2[api.Point, error], indent string) error {
	const list = `"points": []`
	encode := func(x any, indent string) (string, error) {
		var b strings.Builder
		enc := json.NewEncoder(&b)
		enc.SetEscapeHTML(false)
		enc.SetIndent(indent, "  ")
		err := enc.Encode(x)
		return strings.TrimSuffix(b.String(), "\n"), err
	}

	text, err := encode(v, indent)
	if err != nil {
		return err
	}

	before, _, _ := strings.Cut(text, list)
	a.printf("%s\"points\": [", before)

	some := false
	for p, err := range points {
		if err != nil {
			return err
		}

		point, err := encode(p, indent+"    ")
		if err != nil {
			return err
		}

		comma := ","
		if !some {
			comma, some = "", true
		}

		a.printf("%s\n%s    %s", comma, indent, point)
	}

	if some {
		a.printf("\n%s  ", indent)
	}

	if text, err = encode(v, indent); err != nil {
		return err
	}

	_, after, _ := strings.Cut(text, list)
	if indent == "" {
		after += "\n"
	}

	return a.printf("]%s", after)
}
