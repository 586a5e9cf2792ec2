package engine

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/catalog"
	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/kernel"
	"pando/internal/loopdev"
	"pando/internal/mount"
	"pando/internal/pool"

	"golang.org/x/sys/unix"
)

// RebuildReport says what Rebuild brought back.
type RebuildReport struct {
	Dir         string   `json:"dir"`
	Volumes     int      `json:"volumes"`
	Snapshots   int      `json:"snapshots"`
	Goldens     int      `json:"goldens"`
	Generations int      `json:"generations"`
	Garbage     int      `json:"garbage"` // removed: half made when a process died
	Old         string   `json:"old_catalogue"`
	Notes       []string `json:"notes,omitempty"`
}

// Rebuild makes the catalogue anew from the identities in the pool, and keeps
// the old one aside. Lost are last-use times; what is mounted is unmounted. Of two objects with one name, the younger gets another. NotFound,
// InUse (an image is attached: the catalogue would not know where).
func Rebuild(ctx context.Context, dir string, drivers Drivers) (*RebuildReport, error) {
	p, err := pool.Open(ctx, dir)
	if err != nil {
		return nil, err
	}
	unlock, err := pool.Lock(ctx, p.Dir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	d, err := openDriver(ctx, p, drivers)
	if err != nil {
		return nil, err
	}
	if c, ok := d.(io.Closer); ok {
		defer c.Close()
	}
	if d.Caps().NeedsRoot && os.Geteuid() != 0 {
		return nil, errs.New(errs.Permission, "rebuild", dir, "the %s driver needs root for this", d.Caps().Name).WithHint("run it as root")
	}
	r := &RebuildReport{Dir: p.Dir}
	if err := detachAll(ctx, p, d); err != nil {
		return nil, err
	}
	var whole []driver.Identity
	for o, err := range d.List(ctx) {
		switch {
		case err != nil:
			return nil, err
		case o.Err != nil:
			r.Notes = append(r.Notes, "left out object "+string(o.ID)+": "+o.Err.Error())
		case !o.Whole || o.Identity.Kind == driver.Scratch:
			if err := d.Destroy(ctx, o.ID); err != nil {
				return nil, err
			}
			r.Garbage++
		default:
			whole = append(whole, o.Identity)
		}
	}
	if whole, err = settleIdentities(ctx, d, whole, r); err != nil {
		return nil, err
	}
	slices.SortFunc(whole, func(a, b driver.Identity) int { return a.CreatedAt.Compare(b.CreatedAt) })
	if r.Old, err = setAside(p.Dir); err != nil {
		return nil, err
	}
	if err := catalog.Create(ctx, p.Dir, p.Config.ID); err != nil {
		return nil, err
	}
	c, err := catalog.Open(ctx, p.Dir, p.Config.ID)
	if err != nil {
		return nil, err
	}
	defer c.CloseFiles()
	return r, c.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
		if err := fillCatalog(ctx, tx, d, whole, r); err != nil {
			return err
		}
		return tx.SetMeta("boot", kernel.BootID())
	})
}

// settleIdentities finishes what identities say was begun: a volume that was
// replaced becomes a snapshot of its successor. Snapshots whose volume is gone
// become volumes, so that nothing is out of reach.
func settleIdentities(ctx context.Context, d driver.Driver, whole []driver.Identity, r *RebuildReport) ([]driver.Identity, error) {
	rw, ok := d.(driver.Rewriter)
	successors, lineages := map[driver.ObjectID]driver.Identity{}, map[driver.ObjectID]bool{}
	for _, id := range whole {
		if id.Kind == driver.Volume {
			lineages[id.Lineage()] = true
			if id.Replaces != "" {
				successors[id.Replaces] = id
			}
		}
	}
	for i, id := range whole {
		next, replaced := successors[id.ID]
		switch {
		case id.Kind == driver.Volume && replaced:
			vol := catalog.Row{Identity: id}
			was := id
			id = snapshotIdentity(id, vol, next.Before, driver.Clean)
			id.Origin, id.OriginID = was.Origin, was.OriginID
			id.Pinned, id.ExpiresAt, id.Replaces, id.Before = time.Time{}, time.Time{}, "", ""
		case id.Kind == driver.Snapshot && !lineages[id.Volume]:
			name := freeName(id.Origin+"-"+id.Name, string(id.ID))
			r.Notes = append(r.Notes, "the volume of snapshot "+id.Origin+"@"+id.Name+" is gone: it is now volume "+name)
			id.Kind, id.Name, id.Volume, id.Consistency = driver.Volume, name, "", ""
		default:
			continue
		}
		if !ok {
			return nil, errs.New(errs.Unsupported, "rebuild", string(id.ID), "the driver cannot change what it has written")
		}
		if err := rw.SetIdentity(ctx, id); err != nil {
			return nil, err
		}
		whole[i] = id
	}
	return whole, nil
}

// setAside renames the old catalogue's files, so that nothing is lost.
func setAside(dir string) (string, error) {
	stamp := time.Now().UTC().Format("20060102T150405.000000000")
	old := ""
	for _, ext := range []string{"-wal", "-shm", ""} { // the database last: it alone is not a catalogue in use
		from := filepath.Join(dir, "catalog.db"+ext)
		to := filepath.Join(dir, "catalog.damaged-"+stamp+".db"+ext)
		if err := os.Rename(from, to); err == nil {
			old = to
		} else if !errors.Is(err, fs.ErrNotExist) {
			return "", errs.Wrap("rebuild", from, err)
		}
	}
	return old, nil
}

// fillCatalog writes a row for every object.
func fillCatalog(ctx context.Context, tx *catalog.Tx, d driver.Driver, whole []driver.Identity, r *RebuildReport) error {
	goldens := map[string]*catalog.Golden{}
	now := time.Now()
	published := map[driver.ObjectID]driver.Identity{} // the last generation that came of a volume
	for _, id := range whole {
		if id.Kind == driver.Generation && id.OriginID != "" {
			published[id.OriginID] = id
		}
	}
	for _, id := range whole {
		row := catalog.Row{Identity: id, UsedAt: now, MeasuredAt: now}
		if d.Caps().FS[0].IsImage() { // trees would be walked
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
			if g, ok := published[id.ID]; ok && (row.Golden == "" || row.Golden == g.Golden && row.Generation < g.Generation) {
				row.Golden, row.Generation = g.Golden, g.Generation // as Publish says
			}
			if _, taken, err := tx.Volume(id.Name); err != nil {
				return err
			} else if taken {
				row.Name = freeName(id.Name, string(id.ID))
				r.Notes = append(r.Notes, "two volumes were called "+id.Name+": one is now "+row.Name)
			}
		case driver.Snapshot:
			r.Snapshots++
		case driver.Generation:
			r.Generations++
			g := goldens[id.Golden]
			if g == nil {
				g = &catalog.Golden{Name: id.Golden, CreatedAt: id.CreatedAt}
				goldens[id.Golden] = g
			}
			if id.Generation > g.Current {
				g.Current, g.Keep = id.Generation, id.Keep
			}
			g.Next = g.Current + 1
			if id.CreatedAt.Before(g.CreatedAt) {
				g.CreatedAt = id.CreatedAt
			}
		}
		if err := tx.Put(row); err != nil {
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

func freeName(name, id string) string { return name[:min(len(name), 110)] + "-" + id[:12] }

// detachAll unmounts everything of a pool whose catalogue cannot say where it
// is mounted: default mount points, and mounts that the kernel's list shows to
// be on images of the pool. InUse if something remains.
func detachAll(ctx context.Context, p *pool.Pool, d driver.Driver) error {
	entries, err := os.ReadDir(p.MountDir())
	if err != nil {
		return errs.Wrap("detach", p.MountDir(), err)
	}
	for _, e := range entries {
		path := filepath.Join(p.MountDir(), e.Name())
		if m, err := kernel.MountAt(unix.AT_FDCWD, path); err == nil && m.Root {
			if err := mount.Unmount(path); err != nil {
				return err
			}
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return errs.Wrap("detach", path, err)
		}
	}
	loops, err := loopdev.List()
	if err != nil {
		return err
	}
	objects := filepath.Join(p.DataDir(), "objects") + "/"
	for _, b := range loops {
		if !strings.HasPrefix(b.File, objects) {
			continue
		}
		if err := unmountDevice(b); err != nil {
			return err
		}
		if err := b.Clear(); err != nil && !errs.Is(err, errs.NotFound) {
			return err
		}
		if free, err := loopdev.WaitDetached(ctx, b.File, releaseWait); err != nil && !errs.Is(err, errs.NotFound) {
			return err
		} else if err == nil && !free {
			return errs.New(errs.InUse, "detach", b.File, "%s on it is still mounted or open somewhere", b.Path).WithHint("unmount it, then try again")
		}
	}
	return nil
}

// unmountDevice unmounts a loop device wherever this namespace has it. It reads
// the mount table: only for repairs.
func unmountDevice(b loopdev.Bound) error {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return errs.Wrap("detach", b.Path, err)
	}
	want := "7:" + strconv.Itoa(b.Index)
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line)
		if len(f) > 4 && f[2] == want {
			if err := mount.Unmount(mount.Unescape(f[4])); err != nil && !errs.Is(err, errs.NotFound) {
				return err
			}
		}
	}
	return nil
}
