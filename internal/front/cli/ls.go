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
		Use:     "ls [REF...]",
		Aliases: []string{"list"},
		GroupID: "volumes",
		Short:   "List volumes and snapshots",
		Long: `List the volumes, with --snapshots also their snapshots, or only what each REF
names, which may be a quoted glob: 'agent-*', 'job-17@*'.

EXCLUSIVE is the space that destroying the volume returns; SHARED is the space
that it shares with other objects. For pools with more than 64 volumes, and for
volumes that are trees, both are the last measured values (from creation, umount
or show); --exact measures every volume now. A ~ marks the values of an origin
that may have changed after they were measured.

--filter lists only some volumes. KEY is a column:

  name, origin, fs, state, mountpoint, id, golden    a name, or a pattern: 'agent-*'
  kind                                               volume or snapshot
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
			"  pando ls 'job-17@*' --sort created\n" +
			"  pando ls -q --filter 'used=>7d'",
		ValidArgsFunction: a.completeEvery(destroyable),
	}

	c.Flags().BoolVar(&tree, "tree", false, "show clones and snapshots below their origins, with the goldens")
	c.Flags().BoolVar(&s.q.Snapshots, "snapshots", false, "list snapshots, too")
	c.Flags().BoolVar(&s.q.Exact, "exact", false, "measure the space of every volume now")

	s.addFlags(c)
	a.formatFlag(c, "columns", "tree")
	c.RunE = func(c *cobra.Command, args []string) error {
		columns, err := s.parse()
		if err != nil {
			return err
		}

		if err := a.checkLsFlags(c, tree, len(args) > 0); err != nil {
			return err
		}

		return a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			if err := s.choose(ctx, e, args); err != nil {
				return err
			}
			s.q.Snapshots = s.q.Snapshots || tree && !a.json
			return a.ls(ctx, e, s.q, columns, tree)
		})(c, args)
	}

	return c
}

// checkLsFlags refuses flags that have no effect together.
func (a *App) checkLsFlags(c *cobra.Command, tree, some bool) error {
	columns := c.Flags().Changed("columns")
	switch {
	case tree && !a.json && (some || columns || c.Flags().Changed("filter") || c.Flags().Changed("sort") ||
		c.Flags().Changed("limit")):
		return errs.New(errs.Invalid, "ls", "--tree", "the tree shows all volumes in an order of its own").
			WithHint("remove --tree, or each REF, --filter, --sort, --limit and --columns")
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
			a.printf("%s\n", v.Ref)
		}
	case len(vols) == 0:
		return a.noteNoVolumes(ctx, e)
	default:
		err = a.printVolumes(vols, columns)
	}

	if page.Next != "" {
		noun := "volume"
		if q.Snapshots {
			noun = "object"
		}
		a.printNote("there are more than %s", errs.Plural(len(vols), noun))
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

// printTree prints goldens with what was made from them below, and what was made from that below it.
func (a *App) printTree(goldens []api.Golden, objects []api.Object) error {
	for _, n := range listing.Tree(goldens, objects) {
		line := ""
		if g := n.Golden; g != nil {
			line = fmt.Sprintf("%s  golden, %s, %s", g.Current.Ref, errs.Plural(g.GenerationCount, "generation"),
				formatBytes(g.Current.LogicalBytes))
		} else {
			line = n.Object.Ref + "  " + objectWords(n.Object)
			switch {
			case n.Object.Origin == "":
				line += ", no origin"
			case listing.Rewound(n.Object) == "":
				line += ", origin " + n.Object.Origin + " destroyed"
			}
		}
		a.printf("%s\n", line)
		a.printBelow(n, "")
	}
	return nil
}

// printBelow prints what is below a node of the tree.
func (a *App) printBelow(n *listing.Node, indent string) {
	for i, x := range n.Below {
		branch, next := "├─ ", "│  "
		if i == len(n.Below)-1 {
			branch, next = "└─ ", "   "
		}
		a.printf("%s%s%s  %s\n", indent, branch, x.Object.Ref, objectWords(x.Object))
		a.printBelow(x, indent+next)
	}
}

// objectWords describes the space of a volume or snapshot, and where it is mounted.
func objectWords(o *api.Object) string {
	s := fmt.Sprintf("%s exclusive, %s shared", spaceOf(o, o.ExclusiveBytes), spaceOf(o, o.SharedBytes))
	if o.Kind == api.KindSnapshot {
		return "snapshot, " + s
	}

	if at := listing.Rewound(o); at != "" {
		s = "rewound to @" + at + ", " + s
	} else if r, err := ref.Parse("", o.Origin); err == nil && r.Name == o.Golden {
		s = "of @" + r.At + ", " + s
	}
	if o.Ephemeral {
		s += ", ephemeral"
	}
	if o.Mounted() {
		s += ", mounted at " + o.Mountpoint
	}
	return s
}
