package zfs

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/zfs"
)

// Usage implements driver.Driver. ZFS counts space when it writes a transaction
// group, so Usage syncs first. Extents is 1 for anything that is not empty: the
// cost of clones does not depend on extents, and ZFS does not report them.
func (d *Driver) Usage(ctx context.Context, id driver.ObjectID) (driver.Usage, error) {
	if err := d.Sync(ctx); err != nil {
		return driver.Usage{}, err
	}
	o, err := d.readWhole(ctx, "measure", id, true)
	if err != nil {
		return driver.Usage{}, err
	}
	return usageOf(o), nil
}

// Usages implements driver.Measurer. It runs one program. Its figures may not include
// data written in the last 5 seconds.
func (d *Driver) Usages(ctx context.Context) (map[driver.ObjectID]driver.Usage, error) {
	live, _, err := d.listNodes(ctx)
	if err != nil {
		return nil, err
	}
	out := map[driver.ObjectID]driver.Usage{}
	for _, n := range live {
		if o := d.objectOf(n); o.Whole {
			out[o.ID] = usageOf(o)
		}
	}
	return out, nil
}

// headerBytes is the space that a clone without changes may use, for several copies of
// the header of its dataset. It holds no data.
const headerBytes = 32 << 10

// usageOf returns the space of an object, from the figures of its dataset.
func usageOf(o object) driver.Usage {
	n := o.node
	u := driver.Usage{LogicalBytes: n.refer}
	if u.LogicalBytes > 0 {
		u.Extents = 1
	}

	var newest *snap // that has clones
	for _, s := range n.snaps {
		if len(s.clones) > 0 {
			newest = s
		}
	}

	switch own := n.ownSnap(); {
	case newest == nil && len(n.snaps) > 0 && own != nil:
		u.ExclusiveBytes = n.used // all of it would go
	case own != nil && newest == own:
		u.ExclusiveBytes = 0 // its clones share it
	case own != nil:
		u.ExclusiveBytes = own.written
	default:
		u.ExclusiveBytes = n.written // since the last snapshot, or its origin
	}

	if u.ExclusiveBytes = min(u.ExclusiveBytes, u.LogicalBytes); u.ExclusiveBytes <= headerBytes && n.origin != "" {
		u.ExclusiveBytes = 0
	}

	u.SharedBytes = u.LogicalBytes - u.ExclusiveBytes
	for _, s := range n.snaps {
		if id, _ := n.id(); s.name != string(id) || s.deferred {
			u.TiedBytes = n.inSnaps // the object's own snapshot adds nothing: its data is that of the dataset
		}
	}

	return u
}

// Ties implements driver.Tied. Bytes is the space that snapshots on live datasets use
// alone, or all the space of a dataset in the graveyard. It runs one program.
func (d *Driver) Ties(ctx context.Context) ([]driver.Tie, error) {
	live, inGraveyard, err := d.listNodes(ctx)
	if err != nil {
		return nil, err
	}

	there := map[string]bool{}
	for _, n := range live {
		id, _ := n.id()
		there[string(id)] = true
	}

	// Find destroyed snapshots that live datasets carry.
	var out []driver.Tie
	for _, n := range live {
		var hidden []*snap
		foreign := false
		rest := n.inSnaps
		for _, s := range n.snaps {
			id, _ := n.id()
			switch {
			case !d.isOwnSnap(s):
				foreign = true
			case s.deferred:
				hidden = append(hidden, s)
				rest -= s.used
			case s.name == string(id):
				rest -= s.used
			}
		}

		for i, s := range hidden {
			t := d.tieOf(n, s)
			if there[s.name] {
				// This is the origin of a clone of a volume: nothing was destroyed.
				t.ID = ""
			}

			id, _ := n.id()
			t.Holder = id
			t.Bytes = s.used
			if i == len(hidden)-1 && !foreign {
				t.Bytes += max(rest, 0) // what several of them hold together
			}
			if t.ID != "" || t.Bytes > 0 {
				out = append(out, t)
			}
		}
	}

	// Add the graveyard.
	for _, n := range inGraveyard {
		id, _ := n.id()
		t := driver.Tie{Name: n.name, ID: id, Bytes: n.used}
		for _, s := range n.snaps {
			x := d.tieOf(n, s)
			t.HeldBy = append(t.HeldBy, x.HeldBy...)
			t.Foreign = append(t.Foreign, x.Foreign...)
		}
		if n.children > 0 {
			t.Foreign = append(t.Foreign, "datasets in "+n.name)
		}
		out = append(out, t)
	}

	return out, nil
}

// tieOf returns the tie of a snapshot, with everything that depends on it.
func (d *Driver) tieOf(n *node, s *snap) driver.Tie {
	t := driver.Tie{Name: n.name + "@" + s.name, ID: driver.ObjectID(s.name)}
	if !d.isOwnSnap(s) {
		t.Foreign = append(t.Foreign, t.Name)
	}

	for _, c := range s.clones {
		if id, ok := strings.CutPrefix(c, d.root+"/"); ok && driver.ValidID(id) {
			t.HeldBy = append(t.HeldBy, driver.ObjectID(id))
		} else {
			t.Foreign = append(t.Foreign, c)
		}
	}

	if s.holds > 0 {
		t.Foreign = append(t.Foreign, "a hold on "+t.Name)
	}

	return t
}

// Space caches its figures in a file for a moment.
const (
	spaceFile = "space"
	spaceAge  = 5 * time.Second
)

type spaceNote struct {
	At    time.Time `json:"at"`
	Total int64     `json:"total"`
	Free  int64     `json:"free"`
}

// plenty reports whether so much space is free that figures may be some seconds old.
func (s spaceNote) plenty() bool { return s.Free > s.Total/4 && s.Free > 16<<30 }

// Space implements driver.Spacer. Rough figures are at most 5 seconds old.
func (d *Driver) Space(ctx context.Context, rough bool) (driver.Space, error) {
	p := filepath.Join(d.dir, spaceFile)
	if rough {
		var s spaceNote
		if b, err := os.ReadFile(p); err == nil && json.Unmarshal(b, &s) == nil && s.plenty() {
			if age := time.Since(s.At); age >= 0 && age < spaceAge {
				return driver.Space{TotalBytes: s.Total, FreeBytes: s.Free, UsedBytes: s.Total - s.Free}, nil
			}
		}
	}

	rows, err := zfs.ZFS.Rows(ctx, 2, "get", "-Hp", "-o", "property,value", "available,used", d.root)
	if zfs.Is(err, zfs.Absent) {
		err = d.rootErrorOr(ctx, err)
	}
	if err != nil {
		return driver.Space{}, err
	}

	var s driver.Space
	for _, r := range rows {
		n, err := zfs.Number(r[1])
		if err != nil {
			return driver.Space{}, err
		}
		if r[0] == "available" {
			s.FreeBytes = n
		} else {
			s.UsedBytes = n
		}
	}

	s.TotalBytes = s.FreeBytes + s.UsedBytes
	if note := (spaceNote{time.Now(), s.TotalBytes, s.FreeBytes}); note.plenty() {
		if b, err := json.Marshal(note); err == nil {
			tmp := p + ".new"
			if os.WriteFile(tmp, b, 0o600) == nil {
				_ = os.Rename(tmp, p) // only a cache
			}
		}
	}

	return s, nil
}

// Reclaiming implements driver.Spacer: ZFS frees destroyed datasets in the background.
func (d *Driver) Reclaiming(ctx context.Context) (bool, error) {
	rows, err := zfs.Zpool.Rows(ctx, 1, "get", "-Hp", "-o", "value", "freeing", d.zp)
	if err != nil {
		return false, err
	}
	if len(rows) != 1 {
		return false, errs.New(errs.Damaged, "zpool get", d.zp, "%d rows", len(rows))
	}
	n, err := zfs.Number(rows[0][0])
	return n > 0, err
}

// Sync implements driver.Syncer. Every change of a dataset is durable as soon as the
// program that made it ends; Sync also writes the cached data of files.
func (d *Driver) Sync(ctx context.Context) error { return zfs.Zpool.Do(ctx, "sync", d.zp) }
