package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/service/listing"

	"github.com/spf13/cobra"
)

func (a *App) lsCommand() *cobra.Command {
	var tree bool
	var s lsSelection
	c := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		GroupID: "volumes",
		Short:   "List volumes",
		Long: `List the volumes. EXCLUSIVE is the space that destroying the volume returns;
SHARED is the space that it shares with other objects. For pools with more than
64 volumes, and for volumes that are trees, both are the last measured values
(from creation, umount or show); --exact measures every volume now.

--filter lists only some volumes. KEY is a column:

  name, origin, fs, state, mountpoint, id, golden    a name, or a pattern: 'agent-*'
  owner                                              a user's name or number
  logical, exclusive, shared, size                   a size: '>1G', '<64M', 0
  generation, extents                                a number: 3, '>100'
  created, used, measured, expires, pinned           an age: '>2h', '<7d'; true, false
  ephemeral, overlay                                 true, false
  labels                                             all labels, as they are shown
  label                                              a label, or its key: 'team=s*',
                                                     team; it is not a column

Volumes must match one of the filters of each KEY, and of each key of a label.
An age is the distance from now: 'expires=<1h' lists volumes that expire within
the next hour, pinned=true those that are pinned. Quote patterns, < and > for
the shell.

--sort orders by any of the columns, and --columns shows them. --limit lists only
the first volumes; in pools with more than 64 volumes, that is quick by name and
by created however many there are.`,
		Example: "  pando ls --filter 'name=agent-*' --filter state=mounted\n" +
			"  pando ls --filter label=team=search --columns name,labels\n" +
			"  pando ls --sort exclusive:desc --columns name,exclusive,used --limit 10\n" +
			"  pando ls -q --filter 'used=>7d'",
		Args: cobra.NoArgs,
	}

	c.Flags().BoolVar(&tree, "tree", false, "show clones below their origins, with the goldens")
	c.Flags().BoolVar(&s.q.Exact, "exact", false, "measure the space of every volume now")

	s.addFlags(c)
	a.formatFlag(c, "columns", "tree")
	c.RunE = func(c *cobra.Command, args []string) error {
		columns, err := s.parse()
		if err != nil {
			return err
		}

		if err := a.checkLsFlags(c, tree); err != nil {
			return err
		}

		return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
			return a.ls(ctx, e, s.q, columns, tree)
		})(c, args)
	}

	return c
}

// checkLsFlags refuses flags that have no effect together.
func (a *App) checkLsFlags(c *cobra.Command, tree bool) error {
	columns := c.Flags().Changed("columns")
	switch {
	case tree && !a.json && (columns || c.Flags().Changed("filter") || c.Flags().Changed("sort") ||
		c.Flags().Changed("limit")):
		return errs.New(errs.Invalid, "ls", "--tree", "the tree shows all volumes in an order of its own").
			WithHint("remove --tree, or --filter, --sort, --limit and --columns")
	case columns && a.json:
		return errs.New(errs.Invalid, "ls", "--columns", "JSON always has all fields").WithHint("remove --columns")
	case columns && a.quiet:
		return errs.New(errs.Invalid, "ls", "--columns", "-q prints only names").WithHint("remove -q or --columns")
	}
	return nil
}

// ls prints the volumes that a request chooses.
func (a *App) ls(ctx context.Context, e *engine.Engine, q listing.Request, columns []listing.Column, tree bool) error {
	page, err := listing.List(ctx, e, q)
	if err != nil {
		return err
	}

	vols := page.Volumes
	switch {
	case a.each != nil:
		err = a.printEach(vols)
	case a.json:
		err = a.written(writeObjects(a.Stdout, vols))
	case tree:
		goldens, err := e.Goldens(ctx)
		if err != nil {
			return err
		}
		return a.printTree(goldens, vols)
	case a.quiet:
		for _, v := range vols {
			a.printf("%s\n", v.Name)
		}
	case len(vols) == 0:
		return a.noteNoVolumes(ctx, e)
	default:
		err = a.printVolumes(vols, columns)
	}

	if page.Next != "" {
		a.printNote("there are more than %s", errs.Plural(len(vols), "volume"))
	}
	return err
}

// noteNoVolumes says why a list is empty.
func (a *App) noteNoVolumes(ctx context.Context, e *engine.Engine) error {
	some, err := listing.List(ctx, e, listing.Request{Limit: 1})
	switch {
	case err != nil:
		return err
	case len(some.Volumes) > 0:
		a.printNote("no volume matches the filters")
	default:
		a.printNote("no volumes; create one with `pando clone GOLDEN VOLUME`")
	}
	return nil
}

func (a *App) printVolumes(vols []api.Object, columns []listing.Column) error {
	var heads []string
	for _, c := range columns {
		heads = append(heads, strings.ToUpper(c.Name))
	}

	t := a.table(heads...)
	for i := range vols {
		cells := make([]string, len(columns))
		for j := range columns {
			cells[j] = lsCell(&columns[j], &vols[i])
		}
		t.row(cells...)
	}

	return t.flush()
}

// stateWords is the state of a volume. An expired one is still there because
// something uses it.
func stateWords(v api.Object) string {
	words := string(v.State)
	if v.ExpiresAt != nil && !v.Pinned && v.ExpiresAt.Before(time.Now()) {
		words += ", expired"
	}
	if v.Ephemeral {
		words += ", ephemeral"
	}
	return words
}

// printTree prints goldens with their clones below them, and clones of clones below those.
func (a *App) printTree(goldens []api.Golden, vols []api.Object) error {
	below := listing.ByOrigin(goldens, vols)
	shown := map[string]bool{}
	var walk func(name, indent string) error
	walk = func(name, indent string) error {
		list := below[name]
		for i, v := range list {
			if shown[v.ID] {
				continue // an origin's name that was given to one of its descendants
			}

			shown[v.ID] = true
			branch, next := "├─ ", "│  "
			if i == len(list)-1 {
				branch, next = "└─ ", "   "
			}

			a.printf("%s%s%s  %s\n", indent, branch, v.Name, volumeWords(v))

			if err := walk(v.Name, indent+next); err != nil {
				return err
			}
		}

		return nil
	}

	for _, g := range goldens {
		a.printf("%s  golden, %s, %s\n", g.Current.Ref, errs.Plural(g.GenerationCount, "generation"),
			formatBytes(g.Current.LogicalBytes))
		if err := walk(g.Name, ""); err != nil {
			return err
		}
	}

	// Volumes without an origin, or whose origin was destroyed.
	for _, v := range below[""] {
		if shown[v.ID] {
			continue
		}

		shown[v.ID] = true
		from := "no origin"
		if v.Origin != "" {
			from = "origin " + v.Origin + " destroyed"
		}

		a.printf("%s  %s, %s\n", v.Name, volumeWords(v), from)

		if err := walk(v.Name, ""); err != nil {
			return err
		}
	}

	return nil
}

// volumeWords describes the space of a volume, and where it is mounted.
func volumeWords(v api.Object) string {
	s := fmt.Sprintf("%s exclusive, %s shared", formatBytes(v.ExclusiveBytes), formatBytes(v.SharedBytes))
	if r, err := ref.Parse("", v.Origin); err == nil && r.At != "" {
		s = "of @" + r.At + ", " + s
	}
	if v.Ephemeral {
		s += ", ephemeral"
	}
	if v.Mounted() {
		s += ", mounted at " + v.Mountpoint
	}
	return s
}
