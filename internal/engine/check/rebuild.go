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

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/ledger"
	"pando/internal/engine/pool"
)

// Rebuilt says what Rebuild brought back.
type Rebuilt struct {
	Dir         string   `json:"dir"`
	Volumes     int      `json:"volumes"`
	Snapshots   int      `json:"snapshots"`
	Goldens     int      `json:"goldens"`
	Generations int      `json:"generations"`
	Garbage     int      `json:"garbage"` // removed: half made when a process died
	Old         string   `json:"old_catalogue"`
	Notes       []string `json:"notes,omitempty"`
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

	var whole []driver.Identity
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
	if err := settleIdentities(ctx, d, whole, r); err != nil {
		return nil, err
	}

	findBases(whole)

	// Make the new catalogue beside the old one; it then replaces it as a whole.
	making := filepath.Join(p.Dir, rebuildingName)
	if err := os.RemoveAll(making); err != nil {
		return nil, errs.Wrap("rebuild", making, err)
	}

	if err := os.Mkdir(making, 0o700); err != nil {
		return nil, errs.Wrap("rebuild", making, err)
	}

	if err := writeCatalog(ctx, p, making, d, whole, r); err != nil {
		_ = os.RemoveAll(making) // else the next rebuild does
		return nil, err
	}

	for _, d := range []string{"live", "locks", "mnt"} { // in case they were lost
		if err := os.Mkdir(filepath.Join(p.Dir, d), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, errs.Wrap("rebuild", p.Dir, err)
		}
	}

	var err error
	if r.Old, err = setAsideCatalog(p.Dir); err != nil {
		return nil, err
	}

	if err := os.Rename(filepath.Join(making, "catalog.db"), filepath.Join(p.Dir, "catalog.db")); err != nil {
		return nil, errs.Wrap("rebuild", p.Dir, err)
	}

	if err := p.Sync(); err != nil {
		return nil, err
	}

	for _, id := range whole {
		ledger.NoteCommitted(d, id.ID)
	}

	return r, errs.Wrap("rebuild", making, os.RemoveAll(making))
}

// writeCatalog makes a catalogue of the pool in dir, one file and durable.
func writeCatalog(
	ctx context.Context, p *pool.Pool, dir string, d driver.Driver, whole []driver.Identity, r *Rebuilt,
) error {
	if err := catalog.Create(ctx, dir, p.Config.ID); err != nil {
		return err
	}

	c, err := catalog.Open(ctx, dir, p.Config.ID)
	if err != nil {
		return err
	}

	err = c.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
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

// settleIdentities finishes what identities say was begun: a volume that was replaced becomes a snapshot of its
// successor. Snapshots whose volume no longer exists become volumes, so that nothing is out of reach; and of two
// objects with one name the younger gets another. It also writes its changes into the pool.
func settleIdentities(ctx context.Context, d driver.Driver, whole []driver.Identity, r *Rebuilt) error {
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

	for i, id := range whole {
		was := id
		next, replaced := successors[id.ID]
		switch {
		case id.Kind == driver.Volume && replaced:
			id = id.Predecessor(next.Before)
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

		// A process that wrote an identity may have died before it set the mode, and the mark that named it goes with the old
		// catalogue.
		if ins, ok := d.(driver.Inspector); ok && id == was {
			if cond, err := ins.Inspect(ctx, id); err != nil {
				return err
			} else if cond.Data && (cond.Mode != "" || cond.Leftover) {
				if err := ins.Restore(ctx, id); err != nil {
					return err
				}
			}
		}

		if id == was {
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

// leaveOutTwins leaves out generations with the number of an older one, which no pando makes: numbers cannot be
// changed, so they stay in the pool.
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

// orphanVolume returns the identity of the volume that a snapshot becomes whose volume no longer exists.
func orphanVolume(id driver.Identity) driver.Identity {
	name := id.Name
	if base, _, _ := strings.Cut(id.Origin, "@"); base != "" {
		name = base + "-" + name
	}
	id.Kind, id.Volume, id.Consistency = driver.Volume, "", ""
	id.Name = freeName(name, string(id.ID))
	return id
}

// findBases fills in the generations that volumes and snapshots descend from:
// after a publish, which says so in the generation first, and where identities
// of earlier versions do not tell.
func findBases(whole []driver.Identity) {
	byID, published := map[driver.ObjectID]*driver.Identity{}, map[driver.ObjectID]*driver.Identity{}
	for i := range whole {
		id := &whole[i]
		byID[id.ID] = id
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

		if id.Golden == "" {
			at := id
			for range whole { // origins could lead in a circle
				if at = byID[at.OriginID]; at == nil || at.Golden != "" {
					break
				}
			}
			if at != nil {
				id.Golden, id.Generation = at.Golden, at.Generation
			}
		}

		if g := published[id.ID]; g != nil && (id.Golden == "" || id.Golden == g.Golden && id.Generation < g.Generation) {
			id.Golden, id.Generation = g.Golden, g.Generation // as Publish says
		}
	}
}

// setAsideCatalog renames the old catalogue's files, so that nothing is lost. The database goes first: without it the
// rest is no catalogue, and the next command says so. If this process dies then, the next call continues.
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
		g.Current, g.Keep = id.Generation, id.Keep
	}
	g.Next = max(g.Next, g.Current+1)
	// One that was pulled may be older than its golden is here, and then says so.
	switch {
	case !id.Since.IsZero():
		g.CreatedAt = id.Since
	case g.CreatedAt.IsZero():
		g.CreatedAt = id.CreatedAt
	}
}

func freeName(name, id string) string { return name[:min(len(name), 110)] + "-" + id[:12] }
