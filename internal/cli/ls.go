package cli

import (
	"context"
	"fmt"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) lsCommand() *cobra.Command {
	var tree, exact bool
	c := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		GroupID: "volumes",
		Short:   "List volumes",
		Long: `List the volumes. EXCLUSIVE is the space that destroying the volume returns;
SHARED is the space that it shares with other objects. For pools with more than
64 volumes, and for volumes that are trees, both are the last measured values
(from creation, umount or show); --exact measures every volume now.`,
		Args: cobra.NoArgs,
	}

	c.Flags().BoolVar(&tree, "tree", false, "show clones below their origins, with the goldens")
	c.Flags().BoolVar(&exact, "exact", false, "measure the space of every volume now")

	c.RunE = a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
		vols, err := e.Volumes(ctx, exact)
		if err != nil {
			return err
		}

		switch {
		case a.json:
			return a.written(writeInfos(a.Stdout, vols))
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
			return nil
		case len(vols) == 0:
			a.printNote("no volumes; create one with `pando clone GOLDEN VOLUME`")
			return nil
		}

		return a.printVolumes(vols)
	})

	return c
}

func (a *App) printVolumes(vols []engine.Info) error {
	t := a.table("NAME", "ORIGIN", "FS", "STATE", "LOGICAL", "EXCLUSIVE", "SHARED", "CREATED", "MOUNTPOINT")
	for _, v := range vols {
		t.row(v.Name, orDash(v.Origin), v.FS, stateWords(v), formatBytes(v.LogicalBytes), formatBytes(v.ExclusiveBytes),
			formatBytes(v.SharedBytes), formatAge(v.CreatedAt), orDash(v.Mountpoint))
	}
	return t.flush()
}

// stateWords is the state of a volume. An expired one is still there because
// something uses it.
func stateWords(v engine.Info) string {
	words := v.State
	if v.ExpiresAt != nil && v.PinnedUntil == nil && v.ExpiresAt.Before(time.Now()) {
		words += ", expired"
	}
	if v.Ephemeral {
		words += ", ephemeral"
	}
	return words
}

// printTree prints goldens with their clones below them, and clones of clones below those.
func (a *App) printTree(goldens []engine.GoldenInfo, vols []engine.Info) error {
	below := childrenByOrigin(goldens, vols)
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
		a.printf("%s@%d  golden, %s, %s\n", g.Name, g.Generation, errs.Plural(g.Generations, "generation"),
			formatBytes(g.LogicalBytes))
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

// childrenByOrigin groups volumes by the name of their origin, without @: "" for those whose origin no longer exists.
func childrenByOrigin(goldens []engine.GoldenInfo, vols []engine.Info) map[string][]engine.Info {
	below := map[string][]engine.Info{}
	known := map[string]bool{}
	for _, g := range goldens {
		known[g.Name] = true
	}

	for _, v := range vols {
		known[v.Name] = true
	}

	for _, v := range vols {
		name := ""
		if r, err := ref.Parse("", v.Origin); err == nil {
			name = r.Name
		}
		if !known[name] || name == v.Name {
			name = ""
		}
		below[name] = append(below[name], v)
	}

	return below
}

// volumeWords describes the space of a volume, and where it is mounted.
func volumeWords(v engine.Info) string {
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
