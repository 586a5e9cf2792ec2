package check

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/ledger"
	"pando/internal/engine/pool"
)

// Rebuilt describes what Rebuild recovered.
type Rebuilt struct {
	Dir         string `json:"dir"`              // directory of the pool
	Volumes     int    `json:"volume_count"`     // number of volumes
	Snapshots   int    `json:"snapshot_count"`   // number of snapshots
	Goldens     int    `json:"golden_count"`     // number of goldens
	Generations int    `json:"generation_count"` // number of generations
	// number of incomplete objects of processes that died, which were removed
	Garbage int      `json:"garbage_count"`
	Old     string   `json:"old_catalogue,omitempty"` // file that the old catalogue was moved to
	Notes   []string `json:"notes,omitempty"`         // what could not be restored, and why
}

// rebuildingName is the directory in which the new catalogue is made.
const rebuildingName = "rebuild.inprogress"

// Rebuild rebuilds the catalogue of a pool, whose lock the caller holds, from the identities in it, and keeps the old
// one aside. Last-use times are lost; mounted volumes are unmounted. Of two volumes with one name, the younger gets
// another. If it dies, the pool has the old catalogue, or none, or the new one, never half of one; and it can be
// repeated. InUse (an image is attached: the catalogue would not know where).
func Rebuild(ctx context.Context, p *pool.Pool, d driver.Driver) (*Rebuilt, error) {
	r := &Rebuilt{Dir: p.Dir}
	if err := DetachAll(ctx, p, d); err != nil {
		return nil, err
	}

	// Read the identities, and remove incomplete objects.
	var whole []driver.Identity
	var err error
	for o, err := range d.List(ctx) {
		switch {
		case err != nil:
			return nil, err
		case o.Err != nil:
			r.Notes = append(r.Notes, "skipped object "+string(o.ID)+": "+o.Err.Error())
		case !o.Whole || o.Identity.Kind == driver.Scratch:
			if err := d.Destroy(ctx, o.ID); err != nil {
				return nil, err
			}
			r.Garbage++
		default:
			whole = append(whole, o.Identity)
		}
	}

	// Settle what the identities say.
	slices.SortFunc(whole, func(a, b driver.Identity) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	whole = leaveOutTwins(whole, r)
	if whole, err = dropUnusedLayers(ctx, d, whole, r); err != nil {
		return nil, err
	}
	if err := settleIdentities(ctx, d, whole, r); err != nil {
		return nil, err
	}

	findBases(whole)

	return r, replaceCatalog(ctx, p, d, whole, r)
}

// replaceCatalog makes the new catalogue beside the old one, which it then replaces as a whole.
func replaceCatalog(
	ctx context.Context, p *pool.Pool, d driver.Driver, whole []driver.Identity, r *Rebuilt,
) error {
	making := filepath.Join(p.Dir, rebuildingName)
	if err := os.RemoveAll(making); err != nil {
		return errs.Wrap("rebuild", making, err)
	}

	if err := os.Mkdir(making, 0o700); err != nil {
		return errs.Wrap("rebuild", making, err)
	}

	if err := writeCatalog(ctx, p, making, d, whole, r); err != nil {
		_ = os.RemoveAll(making) // if it cannot be removed, the next rebuild removes it
		return err
	}

	for _, d := range []string{"live", "locks", "mnt"} { // in case they were lost
		if err := os.Mkdir(filepath.Join(p.Dir, d), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return errs.Wrap("rebuild", p.Dir, err)
		}
	}

	// Replace the catalogue, durably.
	var err error
	if r.Old, err = setAsideCatalog(p.Dir); err != nil {
		return err
	}

	if err := os.Rename(filepath.Join(making, "catalog.db"), filepath.Join(p.Dir, "catalog.db")); err != nil {
		return errs.Wrap("rebuild", p.Dir, err)
	}

	if err := p.Sync(); err != nil {
		return err
	}

	for _, id := range whole {
		ledger.NoteCommitted(d, id.ID)
	}

	return errs.Wrap("rebuild", making, os.RemoveAll(making))
}

// writeCatalog makes a catalogue of the pool in dir, one file and durable.
func writeCatalog(
	ctx context.Context, p *pool.Pool, dir string, d driver.Driver, whole []driver.Identity, r *Rebuilt,
) error {
	if err := catalog.Create(ctx, dir, p.Config.ID, api.EventRebuild); err != nil {
		return err
	}

	c, err := catalog.Open(ctx, dir, p.Config.ID)
	if err != nil {
		return err
	}

	last := catalog.LastEvent(ctx, p.Dir, p.Config.ID)
	err = c.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
		tx.WithoutEvents()
		if err := tx.ContinueEvents(last); err != nil {
			return err
		}
		if err := fillCatalog(ctx, tx, d, whole, r); err != nil {
			return err
		}
		if err := tx.SetMended(p.Dir); err != nil {
			return err
		}
		return tx.SetSwept()
	})

	// Closing writes the log back into the file and removes it.
	if cerr := c.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}

	if _, err := os.Lstat(filepath.Join(dir, "catalog.db-wal")); err == nil {
		return errs.New(errs.Internal, "rebuild", dir, "the log of the new catalogue was not written back")
	}

	return nil
}

// dropUnusedLayers destroys the layers that no overlay needs any more, and returns the other objects.
func dropUnusedLayers(
	ctx context.Context, d driver.Driver, whole []driver.Identity, r *Rebuilt,
) ([]driver.Identity, error) {
	used := map[driver.ObjectID]bool{}
	for _, id := range whole {
		used[id.Lower] = true
	}

	out := whole[:0:0]
	for _, id := range whole {
		if id.Kind != driver.Layer || used[id.ID] || id.Golden == "" { // those without a golden are templates
			out = append(out, id)
			continue
		}
		if err := d.Destroy(ctx, id.ID); err != nil {
			return nil, err
		}
		r.Garbage++
	}

	return out, nil
}

// settleIdentities finishes the operations that identities show to be unfinished: a volume that was replaced becomes a
// snapshot of its successor. Snapshots whose volume no longer exists become volumes, so that all objects can be
// reached; and of two objects with one name the younger gets another. It also writes its changes into the pool.
func settleIdentities(ctx context.Context, d driver.Driver, whole []driver.Identity, r *Rebuilt) error {
	// Find successors and names.
	successors, lineages := map[driver.ObjectID]driver.Identity{}, map[driver.ObjectID]bool{}
	taken := map[string]bool{}
	for _, id := range whole {
		switch id.Kind {
		case driver.Volume:
			lineages[id.Lineage()] = true
			if id.Replaces != "" {
				successors[id.Replaces] = id
			}
		case driver.Generation:
			taken[id.Golden] = true // goldens and volumes share one space of names
		}
	}

	rename := func(name string, id driver.ObjectID) string {
		if taken[name] {
			name = freeName(name, string(id))
		}
		taken[name] = true
		return name
	}

	// Correct one identity after the other.
	for i, id := range whole {
		was := id
		next, replaced := successors[id.ID]
		switch {
		case id.Kind == driver.Volume && replaced:
			id = id.Predecessor(next)
		case id.Kind == driver.Volume:
			if id.Name = rename(id.Name, id.ID); id.Name != was.Name {
				r.Notes = append(r.Notes, "two objects were named "+was.Name+": one is now named "+id.Name)
			}
		case id.Kind == driver.Snapshot && lineages[id.Volume]:
			key := string(id.Volume) + "@"
			id.Name = strings.TrimPrefix(rename(key+id.Name, id.ID), key)
		case id.Kind == driver.Snapshot:
			id = orphanVolume(id)
			id.Name = rename(id.Name, id.ID)
			r.Notes = append(r.Notes,
				"the volume of snapshot "+was.Origin+"@"+was.Name+" no longer exists: the snapshot is now volume "+id.Name)
		}

		if id == was {
			if err := restoreObject(ctx, d, id); err != nil {
				return err
			}
			continue
		}

		rw, ok := d.(driver.Rewriter)
		if !ok {
			return errs.New(errs.Unsupported, "rebuild", string(id.ID), "the driver cannot change what it has written")
		}

		if err := rw.SetIdentity(ctx, id); err != nil {
			return err
		}

		whole[i] = id
	}

	return nil
}

// restoreObject completes an object whose identity is right. A process may have died between writing the identity and
// setting the mode, and the mark that named the object goes with the old catalogue.
func restoreObject(ctx context.Context, d driver.Driver, id driver.Identity) error {
	ins, ok := d.(driver.Inspector)
	if !ok {
		return nil
	}

	cond, err := ins.Inspect(ctx, id)
	if err != nil || !cond.Data || cond.Mode == "" && !cond.Leftover {
		return err
	}

	return ins.Restore(ctx, id)
}

// leaveOutTwins leaves out generations that have the number of an older one. Pando never makes such a generation.
// Numbers cannot be changed, so it stays in the pool without a row.
func leaveOutTwins(whole []driver.Identity, r *Rebuilt) []driver.Identity {
	seen := map[string]bool{}
	return slices.DeleteFunc(whole, func(id driver.Identity) bool {
		if id.Kind != driver.Generation {
			return false
		}
		name := ref.Generation(id.Golden, id.Generation)
		twin := seen[name]
		if seen[name] = true; twin {
			r.Notes = append(r.Notes, "skipped object "+string(id.ID)+": an older object is already "+name)
		}
		return twin
	})
}

// orphanVolume returns the identity of the volume that a snapshot becomes when its own volume no longer exists.
func orphanVolume(id driver.Identity) driver.Identity {
	name := id.Name
	if base, _, _ := strings.Cut(id.Origin, "@"); base != "" {
		name = base + "-" + name
	}
	id.Kind, id.Volume, id.Consistency = driver.Volume, "", ""
	id.Name = freeName(name, string(id.ID))
	return id
}

// findBases fills in the generations that volumes and snapshots descend from after a publish, which records the base in
// the identity of the generation first.
func findBases(whole []driver.Identity) {
	published := map[driver.ObjectID]*driver.Identity{}
	for i := range whole {
		id := &whole[i]
		if id.Kind != driver.Generation || id.OriginID == "" {
			continue
		}
		if p := published[id.OriginID]; p == nil || id.Generation > p.Generation {
			published[id.OriginID] = id
		}
	}

	for i := range whole {
		id := &whole[i]
		if id.Kind == driver.Generation {
			continue
		}

		if g := published[id.ID]; g != nil && (id.Golden == "" || id.Golden == g.Golden && id.Generation < g.Generation) {
			id.Golden, id.Generation = g.Golden, g.Generation // as Publish records it
		}
	}
}

// setAsideCatalog renames the old catalogue's files, so that nothing is lost. It renames the database first: without
// it, the next command reports that the catalogue is missing. If this process dies then, the next call continues.
func setAsideCatalog(dir string) (string, error) {
	const set = "catalog.damaged-"
	name := func(stamp, ext string) string { return filepath.Join(dir, set+stamp+".db"+ext) }
	stamp := time.Now().UTC().Format("20060102T150405.000000000")
	old := ""
	if err := os.Rename(filepath.Join(dir, "catalog.db"), name(stamp, "")); err == nil {
		old = name(stamp, "")
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", errs.Wrap("rebuild", dir, err)
	} else if before, _ := filepath.Glob(filepath.Join(dir, set+"*.db")); len(before) > 0 {
		// The remaining files belong to the database that was set aside last.
		last := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(slices.Max(before)), set), ".db")
		_, has := os.Lstat(name(last, "-wal"))
		_, left := os.Lstat(filepath.Join(dir, "catalog.db-wal"))
		if has != nil && left == nil {
			stamp, old = last, name(last, "")
		}
	}

	for _, ext := range []string{"-wal", "-shm"} {
		err := os.Rename(filepath.Join(dir, "catalog.db"+ext), name(stamp, ext))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", errs.Wrap("rebuild", dir, err)
		}
	}

	return old, nil
}

// fillCatalog writes a row for every object.
func fillCatalog(ctx context.Context, tx *catalog.Tx, d driver.Driver, whole []driver.Identity, r *Rebuilt) error {
	goldens := map[string]*catalog.Golden{}
	var usages map[driver.ObjectID]driver.Usage
	if m, ok := d.(driver.Measurer); ok {
		var err error
		if usages, err = m.Usages(ctx); err != nil {
			return err
		}
	}

	now := time.Now()
	for _, id := range whole {
		row := catalog.Row{Identity: id, UsedAt: now, MeasuredAt: now}
		if u, ok := usages[id.ID]; ok {
			row.Usage = u
		} else if d.Caps().FS[0].IsImage() { // trees would be walked
			u, err := d.Usage(ctx, id.ID)
			if err != nil {
				return err
			}
			row.Usage = u
		} else {
			row.MeasuredAt = time.Time{}
		}

		switch id.Kind {
		case driver.Volume:
			r.Volumes++
		case driver.Snapshot:
			r.Snapshots++
		case driver.Generation:
			r.Generations++
			g := goldens[id.Golden]
			if g == nil {
				g = &catalog.Golden{Name: id.Golden}
				goldens[id.Golden] = g
			}
			addGeneration(g, id)
		}

		if err := tx.PutObject(row); err != nil {
			return err
		}
	}

	r.Goldens = len(goldens)
	for _, g := range goldens {
		if err := tx.PutGolden(*g); err != nil {
			return err
		}
	}

	return nil
}

// addGeneration adds a generation to a golden's row, from its identity. Generations come in order of their time.
func addGeneration(g *catalog.Golden, id driver.Identity) {
	if id.Generation > g.Current {
		g.Current, g.Owner, g.GoldenProperties = id.Generation, id.Owner, id.GoldenProperties
	}
	g.Next = max(g.Next, g.Current+1)
	// A generation that was pulled may be older than its golden is in this pool. It then has Since.
	switch {
	case !id.Since.IsZero():
		g.CreatedAt = id.Since
	case g.CreatedAt.IsZero():
		g.CreatedAt = id.CreatedAt
	}
}

func freeName(name, id string) string { return name[:min(len(name), 110)] + "-" + id[:12] }
