package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/service/listing"
	"pando/internal/source/git"

	"github.com/spf13/cobra"
)

func (a *App) showCommand() *cobra.Command {
	var exact bool
	c := &cobra.Command{
		Use:     "show [REF]",
		GroupID: "volumes",
		Short:   "Describe a volume, generation or snapshot, or the pool",
		Long: `Describe REF with figures measured now; data written to a mounted volume is
flushed to the pool first. Without REF, describe the pool: its free space, and
how much space sharing saves.`,
		Example:           "  pando show job-17\n  pando show web@3 --json\n  pando show",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeArgs(anyRef),
	}

	c.Flags().BoolVar(&exact, "exact", false, "for the pool: measure every object in it now")
	a.formatFlag(c)

	c.RunE = a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
		if len(args) == 0 {
			p, err := e.Pool(ctx, engine.PoolRequest{Exact: exact})
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(p)
			}
			a.printPool(p)
			return nil
		}

		r, err := ref.Parse("show", args[0])
		if err != nil {
			return err
		}

		d, err := e.Show(ctx, r)
		if err != nil {
			return err
		}
		return a.printShown(ctx, e, r, d)
	})

	return c
}

func (a *App) printFields(pairs ...string) {
	width := 0
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			width = max(width, len(pairs[i]))
		}
	}

	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] == "" {
			continue
		}
		a.printf("%-*s  %s\n", width, pairs[i], pairs[i+1])
	}
}

// printShown prints an object, or the golden that a reference without a number names.
func (a *App) printShown(ctx context.Context, e *engine.Engine, r ref.Ref, d api.Detail) error {
	switch {
	case d.Kind == api.KindGeneration && r.At == "":
		g, err := e.Golden(ctx, d)
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(g)
		}
		return a.printGolden(g)
	case a.json:
		return a.printJSON(d)
	}
	return a.printDetail(d)
}

// printGolden prints a golden with its generations.
func (a *App) printGolden(g api.Golden) error {
	keep := ""
	if g.Keep > 0 {
		keep = errs.Plural(g.Keep, "generation")
	}
	policy := map[string]string{
		"never":   "never (`pando golden set` can allow it)",
		"default": "the default for clones",
	}[g.OverlayPolicy]
	shown := g.Current
	shown.Kind = g.Kind
	a.printObject(shown, "source", git.Describe(g.Source), "keep", keep, "overlays", policy)

	// Whether a generation is one of the repository matters only if there is a repository.
	a.printf("\n")
	columns := []string{"GENERATION", "STATE", "LOGICAL", "EXCLUSIVE", "SHARED", "CREATED"}
	if g.Source != nil {
		columns = append(columns, "FROM")
	}
	t := a.table(columns...)
	for _, x := range g.Generations {
		row := []string{x.Ref, string(x.State), formatBytes(x.LogicalBytes), formatBytes(x.ExclusiveBytes),
			formatBytes(x.SharedBytes), formatAge(x.CreatedAt)}
		if g.Source != nil {
			row = append(row, generationFrom(x))
		}
		t.row(row...)
	}
	return t.flush()
}

// printDetail prints an object, a volume with its snapshots.
func (a *App) printDetail(d api.Detail) error {
	a.printObject(d)
	if len(d.Snapshots) == 0 {
		return nil
	}

	a.printf("\n")
	t := a.table("SNAPSHOT", "CONSISTENCY", "LOGICAL", "EXCLUSIVE", "CREATED")
	for _, s := range d.Snapshots {
		t.row(s.Ref, orDash(s.Consistency), spaceOf(&s, s.LogicalBytes), spaceOf(&s, s.ExclusiveBytes),
			formatAge(s.CreatedAt))
	}
	return t.flush()
}

// spaceOf is some of the space of an object: with a ~ if it has never been measured.
func spaceOf(o *api.Object, bytes int64) string {
	if o.MeasuredAt == nil {
		return "~" + formatBytes(bytes)
	}
	return formatBytes(bytes)
}

// printObject prints everything that is known about an object, and further fields.
func (a *App) printObject(d api.Detail, more ...string) {
	// Word the fields that not every object has.
	expires, sizeText, measured, pinned := "", "as large as the pool", "", ""
	switch {
	case d.PinnedUntil != nil:
		pinned = "until " + d.PinnedUntil.Local().Format(time.DateTime)
	case d.Pinned:
		pinned = "until it is unpinned"
	}

	base := d.Base
	if base == d.Origin {
		base = ""
	}

	tied := ""
	if d.TiedBytes > 0 {
		tied = formatBytes(d.TiedBytes) + " of destroyed objects, kept for others (`pando gc --explain`)"
	}

	if d.ExpiresAt != nil {
		expires = d.ExpiresAt.Local().Format(time.DateTime) + " (" + formatAge(*d.ExpiresAt) + ")"
	}
	if d.SizeBytes > 0 {
		sizeText = formatBytes(d.SizeBytes)
	}
	if d.MeasuredAt != nil {
		measured = formatAge(*d.MeasuredAt)
	}

	state := stateWords(d.Object)
	if d.Held {
		state += " (in another mount namespace, or held by a process)"
	}

	durable := ""
	if d.Ephemeral {
		durable = "no: a reboot removes it, and its syncs need not reach the disk"
	}

	// Word what clones cost, and the key of an encrypted dataset.
	cost := map[driver.CloneCost]string{
		driver.CostConstant: "the same for any size",
		driver.CostExtents:  fmt.Sprintf("grows with the extents: %d", d.Extents),
		driver.CostData:     "grows with files and bytes: each clone is a full copy",
	}[d.CloneCost]

	stall := ""
	if d.StallSeconds > 0 {
		stall = fmt.Sprintf("up to %v while a copy is made of the volume in use",
			time.Duration(d.StallSeconds*float64(time.Second)).Round(time.Millisecond))
	}

	key := ""
	if d.Key != nil {
		key = "loaded"
		if !d.Key.Loaded {
			key = "not loaded (`zfs load-key " + d.Key.Root + "`)"
		}
	}

	layers, options := "", ""
	if l := d.Layers; l != nil {
		layers = "on " + l.Lower + " (" + formatBytes(l.LowerBytes) + ")"
		if l.LowerRemoved {
			layers = "on the removed " + l.Lower + " (" + formatBytes(l.LowerBytes) + "), which stays for its overlays"
		}
		options = explainOptions(l.Options)
	}

	fields := append([]string{
		"name", d.Ref, "kind", string(d.Kind), "id", d.ID, "fs", string(d.FS), "driver", d.Driver,
		"state", state, "durable", durable,
		"mountpoint", d.Mountpoint, "origin", d.Origin, "base", base, "overlay", layers, "options", options,
		"consistency", string(d.Consistency),
	}, more...)
	a.printFields(append(fields,
		"pinned", pinned, "labels", d.Labels.String(), "owner", listing.OwnerName(d.OwnerUID), "size", sizeText,
		"logical", formatBytes(d.LogicalBytes), "exclusive", formatBytes(d.ExclusiveBytes),
		"shared", formatBytes(d.SharedBytes), "tied", tied,
		"key", key, "measured", measured,
		"clone cost", cost, "write stall", stall,
		"created", d.CreatedAt.Local().Format(time.DateTime)+" ("+formatAge(d.CreatedAt)+")",
		"last used", formatAge(d.LastUsedAt), "expires", expires,
	)...)
}

// generationFrom says where a generation of a golden with a source comes from.
func generationFrom(g api.Object) string {
	if g.Mirror {
		return "its source"
	}
	if g.Origin == "" {
		return "imported"
	}
	return g.Origin + " (published)"
}

// printPool prints the pool's directory, driver, space and contents.
func (a *App) printPool(p api.Pool) {
	backing, trash, saved := "", "", ""
	if p.Backing != "" {
		backing = fmt.Sprintf("%s (%s, sparse)", p.Backing, formatBytes(p.BackingBytes))
	}
	if p.TrashCount > 0 {
		trash = fmt.Sprintf("%s, %s still to return", errs.Plural(p.TrashCount, "object"), formatBytes(p.TrashBytes))
	}

	ties := ""
	if p.TieCount > 0 {
		ties = fmt.Sprintf("%s of %s, destroyed but needed by others (`pando gc --explain`)", formatBytes(p.TiedBytes),
			errs.Plural(p.TieCount, "object"))
	}

	if p.SavedRatio > 0 {
		saved = fmt.Sprintf("%s of data in %s: %.1fx", formatBytes(p.LogicalBytes), formatBytes(p.PhysicalBytes),
			p.SavedRatio)
	}

	a.printFields(
		"pool", p.Dir, "driver", p.Driver, "why", p.Why, "backing", backing,
		"room", fmt.Sprintf("%s free of %s (new clones need %.4g %% free)", formatBytes(p.FreeBytes),
			formatBytes(p.TotalBytes), p.MinFreePercent),
		"holds", strings.Join([]string{
			errs.Plural(p.GoldenCount, "golden") + " with " + errs.Plural(p.GenerationCount, "generation"),
			errs.Plural(p.VolumeCount, "volume") + " (" + fmt.Sprint(p.MountedCount) + " mounted)",
			errs.Plural(p.SnapshotCount, "snapshot"),
		}, ", "),
		"sharing", saved, "trash", trash, "ties", ties,
	)
}

// whyOptions says what mount options of overlays are for.
var whyOptions = map[string]string{
	"index=off":       "so that rebase can replace the golden",
	"metacopy=off":    "so that rebase can replace the golden",
	"redirect_dir=on": "so that directories of the golden can be renamed",
	"xino=on":         "so that inode numbers stay the same",
	"volatile":        "so that syncs return at once",
}

// explainOptions joins mount options, each with its reason; the reason of several in a row stands behind the last.
func explainOptions(options []string) string {
	var b strings.Builder
	for i, o := range options {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(o)
		if why := whyOptions[o]; why != "" && (i+1 == len(options) || whyOptions[options[i+1]] != why) {
			b.WriteString(" (" + why + ")")
		}
	}
	return b.String()
}
