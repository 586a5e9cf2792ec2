package catalog

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/principal"
	"pando/internal/driver"
)

// Row is an object of the catalogue.
type Row struct {
	driver.Identity
	UsedAt     time.Time
	Usage      driver.Usage // as last measured
	MeasuredAt time.Time    // zero: never
	OriginGone bool         // the origin no longer exists, as CurrentOrigins has found
}

// Golden is a series of generations.
type Golden struct {
	Name      string
	Current   int // number of the generation that clones are made of
	Next      int // number that the next generation gets
	CreatedAt time.Time
	Owner     uint32 // user ID of who made it
	driver.GoldenProperties
}

// MountRecord says where a volume is mounted, or was: the kernel decides whether it still is.
type MountRecord struct {
	ID         driver.ObjectID
	Mountpoint string
	Loop       int    // -1: none
	MountID    uint64 // 0: the mount point is a symbolic link
	Dev, Ino   uint64 // of the image file behind the loop device
	MountNS    uint64
	MadeDir    bool // the mount point was made for it, and goes with it
	BootID     string
	At         time.Time

	// Owner is shown in place of the owner of the volume's root directory, wherever that owns files; nil: no other is.
	Owner *principal.Owner
}

// Mark says that an operation works on an object.
type Mark struct {
	ID         driver.ObjectID
	Op         string
	Name       string          // the name that it will have; reserved until the mark is removed
	Reads      driver.ObjectID // its origin, which must not be destroyed while the mark exists
	Mountpoint string
	MadeDir    bool   // the mount point is made for it
	Freezes    bool   // the filesystem in Reads may be frozen
	Owner      string // for LockOrphan
	Process
	At time.Time
}

// Tombstone records that an object is to be destroyed, or has been.
type Tombstone struct {
	ID        driver.ObjectID
	Ref       string
	Bytes     int64
	At        time.Time
	Reclaimed bool
}

const objectColumns = `id, kind, name, golden, generation, volume, fs, size, sector, origin, origin_id, created_at,
 expires_at, ephemeral, boot, used_at, logical, exclusive, shared, extents, measured_at, pinned, consistency, lower,
 mirror, labels, ord, owner`

// objectValues are the placeholders of objectColumns.
var objectValues = `?` + strings.Repeat(`,?`, strings.Count(objectColumns, `,`))

type scanner interface{ Scan(...any) error }

func scanRow(s scanner) (Row, error) {
	var r Row
	var created, expires, used, measured, pinned int64
	var labels string
	err := s.Scan(&r.ID, &r.Kind, &r.Name, &r.Golden, &r.Generation, &r.Volume, &r.FS, &r.SizeBytes, &r.Sector, &r.Origin,
		&r.OriginID,
		&created, &expires, &r.Ephemeral, &r.BootID, &used,
		&r.Usage.LogicalBytes, &r.Usage.ExclusiveBytes, &r.Usage.SharedBytes, &r.Usage.Extents, &measured, &pinned,
		&r.Consistency, &r.Lower, &r.Mirror, &labels, &r.Order, &r.Owner)
	r.Labels = driver.StoredLabels(labels)
	r.CreatedAt, r.ExpiresAt, r.UsedAt, r.MeasuredAt, r.Pinned = fromNano(created), fromNano(expires), fromNano(used),
		fromNano(measured), fromNano(pinned)
	return r, err
}

func toNano(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

// timeText is a time in the detail of an event; "" if it is not set.
func timeText(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}

func fromNano(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n).UTC()
}

// PutObject adds an object. Exists if its name is taken.
func (t *Tx) PutObject(r Row) error {
	if err := t.insertObject(r); err != nil {
		return err
	}
	return t.noteObject(api.EventCreate, r, t.RefOf(r), r.Origin)
}

func (t *Tx) insertObject(r Row) error {
	_, err := t.exec(`INSERT INTO objects (`+objectColumns+`) VALUES (`+objectValues+`)`,
		r.ID, r.Kind, r.Name, r.Golden, r.Generation, r.Volume, r.FS, r.SizeBytes, r.Sector, r.Origin, r.OriginID,
		toNano(r.CreatedAt), toNano(r.ExpiresAt), r.Ephemeral, r.BootID, toNano(r.UsedAt),
		r.Usage.LogicalBytes, r.Usage.ExclusiveBytes, r.Usage.SharedBytes, r.Usage.Extents, toNano(r.MeasuredAt),
		toNano(r.Pinned), r.Consistency, r.Lower, r.Mirror, storedLabels(r.Identity), r.Order, r.Owner)
	t.put = append(t.put, r.ID)
	return err
}

// storedLabels returns the labels in the row of an object. Those of a generation are in the row of its golden.
func storedLabels(id driver.Identity) string {
	if id.Kind == driver.Generation {
		return ""
	}
	return id.Labels.Text()
}

// Bury replaces an object by a tombstone. Its mount record goes, and what is known of it in remotes; of a volume, its
// former names as well. If it was the last overlay that needed a layer, that is buried, too. The event says why.
// Without such an object, the tombstone is still added.
func (t *Tx) Bury(b Tombstone, why string) error {
	id := b.ID
	gone := Row{Identity: driver.Identity{ID: id}}
	err := t.queryRow(`DELETE FROM objects WHERE id = ?
		RETURNING kind, name, golden, generation, volume, lower, owner`, id).
		Scan(&gone.Kind, &gone.Name, &gone.Golden, &gone.Generation, &gone.Volume, &gone.Lower, &gone.Owner)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return wrap("write catalogue", t.c.path, err)
	}
	if err := t.noteObject(api.EventDestroy, gone, t.RefOf(gone), why); err != nil {
		return err
	}

	if gone.Lower != "" {
		if err := t.dropUnusedLayer(gone.Lower); err != nil {
			return err
		}
	}

	// A volume is never a lower layer, and only volumes have former names.
	known := lowerKey(id)
	if gone.Kind == driver.Volume {
		known = volumeNamesKey(gone.Lineage())
	}
	if err := t.forgetMeta(known); err != nil {
		return err
	}

	for _, query := range []string{
		`DELETE FROM remote_points WHERE object = ?`,
		`DELETE FROM attachments WHERE id = ?`,
	} {
		if _, err := t.exec(query, id); err != nil {
			return err
		}
	}
	return t.AddTombstone(b)
}

// SetUsage records a measurement.
func (t *Tx) SetUsage(id driver.ObjectID, u driver.Usage, at time.Time) error {
	_, err := t.exec(`UPDATE objects SET logical=?, exclusive=?, shared=?, extents=?, measured_at=? WHERE id=?`,
		u.LogicalBytes, u.ExclusiveBytes, u.SharedBytes, u.Extents, toNano(at), id)
	return err
}

// SetPinned records until when an object must not be destroyed.
func (t *Tx) SetPinned(id driver.ObjectID, until time.Time) error {
	n, err := t.exec(`UPDATE objects SET pinned=?1 WHERE id=?2 AND pinned<>?1`, toNano(until), id)
	return cmp.Or(err, t.noteChange(n, id, "pinned", timeText(until)))
}

// SetLabels records the labels of a volume or snapshot. PutGolden records those of a golden.
func (t *Tx) SetLabels(id driver.ObjectID, labels driver.Labels) error {
	n, err := t.exec(`UPDATE objects SET labels=?1 WHERE id=?2 AND labels<>?1`, labels.Text(), id)
	return cmp.Or(err, t.noteChange(n, id, "labels", labels.Text()))
}

// SetExpires records when an object expires.
func (t *Tx) SetExpires(id driver.ObjectID, at time.Time) error {
	n, err := t.exec(`UPDATE objects SET expires_at=?1 WHERE id=?2 AND expires_at<>?1`, toNano(at), id)
	return cmp.Or(err, t.noteChange(n, id, "expires", timeText(at)))
}

// SetBase records the generation that an object descends from.
func (t *Tx) SetBase(id driver.ObjectID, golden string, generation int) error {
	n, err := t.exec(`UPDATE objects SET golden=?1, generation=?2 WHERE id=?3 AND (golden, generation)<>(?1, ?2)`, golden,
		generation, id)
	return cmp.Or(err, t.noteChange(n, id, "base", baseText(golden, generation)))
}

// ReplaceVolume gives the name of the volume old to next, which continues its lineage, and makes old the snapshot that
// asSnapshot describes.
func (t *Tx) ReplaceVolume(old driver.ObjectID, asSnapshot, next Row) error {
	before, _, err := t.Object(old)
	if err != nil {
		return err
	}
	if err := t.ForgetMount(old); err != nil {
		return err
	}
	if _, err := t.exec(`UPDATE objects SET kind='snapshot', name=?, volume=?, consistency=?, pinned=0, expires_at=0,
		labels='', ord=?
		WHERE id=?`,
		asSnapshot.Name, asSnapshot.Volume, asSnapshot.Consistency, asSnapshot.Order, old); err != nil {
		return err
	}
	if err := t.insertObject(next); err != nil {
		return err
	}
	snapshot := next.Name + "@" + asSnapshot.Name
	asSnapshot.ID, asSnapshot.Kind = old, driver.Snapshot
	if err := t.noteObject(api.EventReplace, next, next.Name, snapshot); err != nil {
		return err
	}
	if err := t.noteObject(api.EventCreate, asSnapshot, snapshot, next.Name); err != nil {
		return err
	}
	return t.noteIdentity(before, next, next.Name)
}

// LineageHolder finds the volume whose snapshots name lineage as their volume.
func (t *Tx) LineageHolder(lineage driver.ObjectID) (Row, bool, error) {
	if r, ok, err := t.Object(lineage); err != nil || ok && r.Kind == driver.Volume && r.Volume == "" {
		return r, ok, err
	}
	return t.findRow(`kind = 'volume' AND volume = ? AND volume <> ''`, lineage)
}

// SetUsed records when an object was last used.
func (t *Tx) SetUsed(id driver.ObjectID, at time.Time) error {
	_, err := t.exec(`UPDATE objects SET used_at=? WHERE id=?`, toNano(at), id)
	return err
}

func (t *Tx) findRow(where string, args ...any) (Row, bool, error) {
	r, err := scanRow(t.queryRow(`SELECT `+objectColumns+` FROM objects WHERE `+where, args...))
	if errors.Is(err, sql.ErrNoRows) {
		return Row{}, false, nil
	}
	if err != nil {
		return Row{}, false, wrap("read catalogue", t.c.path, err)
	}
	return r, true, nil
}

// Object looks an object up by ID.
func (t *Tx) Object(id driver.ObjectID) (Row, bool, error) { return t.findRow(`id = ?`, id) }

// Volume looks a volume up by name.
func (t *Tx) Volume(name string) (Row, bool, error) {
	return t.findRow(`kind = 'volume' AND name = ?`, name)
}

// Generation looks a generation up by number.
func (t *Tx) Generation(golden string, n int) (Row, bool, error) {
	return t.findRow(`kind = 'generation' AND golden = ? AND generation = ?`, golden, n)
}

// Snapshot looks a snapshot up by name, given the lineage of its volume.
func (t *Tx) Snapshot(volume driver.ObjectID, name string) (Row, bool, error) {
	return t.findRow(`kind = 'snapshot' AND volume = ? AND name = ?`, volume, name)
}

// Rows calls fn for every object of a kind, in order of name and number; with
// kind "" for all.
func (t *Tx) Rows(kind driver.Kind, fn func(Row) error) error {
	q, args := `SELECT `+rowText+` FROM objects`, []any{}
	switch kind {
	case driver.Volume:
		if scan, err := t.mostlyVolumes(); err != nil {
			return err
		} else if scan {
			return t.scanVolumes(fn)
		}
		q += ` WHERE kind = 'volume' ORDER BY name`
	case driver.Generation:
		q += ` WHERE kind = 'generation' ORDER BY golden, generation`
	case driver.Snapshot:
		q += ` WHERE kind = 'snapshot' ORDER BY volume, ord`
	case driver.Layer:
		q += ` WHERE kind = 'layer' ORDER BY golden, generation`
	}

	return t.eachRow(q, args, func(s scanner) error {
		var text string
		if err := s.Scan(&text); err != nil {
			return wrap("read catalogue", t.c.path, err)
		}
		return t.callWithRow(text, fn)
	})
}

func (t *Tx) callWithRow(text string, fn func(Row) error) error {
	r, err := parseRow(text)
	if err != nil {
		return errs.New(errs.Damaged, "read catalogue", t.c.path, "%w", err).WithHint("%s", damagedHint)
	}
	return fn(r)
}

// mostlyVolumes reports whether there are many objects, and most of them are volumes.
func (t *Tx) mostlyVolumes() (bool, error) {
	var volumes, others int
	err := t.queryRow(`SELECT (SELECT count(*) FROM objects WHERE kind = 'volume'),
		(SELECT count(*) FROM objects WHERE kind = 'snapshot') + (SELECT count(*) FROM objects WHERE kind = 'generation')`).
		Scan(&volumes, &others)
	return volumes > 1000 && volumes > others, wrap("read catalogue", t.c.path, err)
}

// scanVolumes calls fn for every volume in order of name. It reads the table in the order in which it is stored and
// sorts in memory (the + keeps SQLite from using the index): looking up tens of thousands of rows in the order of an
// index takes twice as long.
func (t *Tx) scanVolumes(fn func(Row) error) error {
	type named struct{ name, text string }
	var all []named
	if err := t.eachRow(`SELECT name, `+rowText+` FROM objects WHERE +kind = 'volume'`, nil, func(s scanner) error {
		var v named
		err := s.Scan(&v.name, &v.text)
		all = append(all, v)
		return wrap("read catalogue", t.c.path, err)
	}); err != nil {
		return err
	}

	slices.SortFunc(all, func(a, b named) int { return strings.Compare(a.name, b.name) })
	for _, v := range all {
		if err := t.callWithRow(v.text, fn); err != nil {
			return err
		}
	}

	return nil
}

// rowText is a row as one text, its columns separated by a control character that no name or reference can contain.
// Getting a value out of SQLite costs more than finding it, so with tens of thousands of rows one value a row takes
// half the time of twenty.
const rowText = `concat_ws(char(31), ` + objectColumns + `)`

const rowSeparator = "\x1f"

// parseRow reads a rowText.
func parseRow(text string) (Row, error) {
	var r Row
	var bad error
	rest, more := text, true
	next := func() string {
		var f string
		if !more {
			bad = errors.New("a row with too few columns")
		}
		f, rest, more = strings.Cut(rest, rowSeparator)
		return f
	}

	number := func() int64 {
		f := next()
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil && bad == nil {
			bad = fmt.Errorf("%q is not a number", f)
		}
		return n
	}

	moment := func() time.Time { return fromNano(number()) }
	r.ID, r.Kind, r.Name = driver.ObjectID(next()), driver.Kind(next()), next()
	r.Golden, r.Generation, r.Volume = next(), int(number()), driver.ObjectID(next())
	r.FS, r.SizeBytes, r.Sector = driver.FS(next()), number(), uint32(number())
	r.Origin, r.OriginID = next(), driver.ObjectID(next())
	r.CreatedAt, r.ExpiresAt = moment(), moment()
	r.Ephemeral, r.BootID = number() != 0, next()
	r.UsedAt = moment()
	r.Usage = driver.Usage{LogicalBytes: number(), ExclusiveBytes: number(), SharedBytes: number(), Extents: number()}
	r.MeasuredAt = moment()
	r.Pinned, r.Consistency = moment(), driver.Consistency(next())
	r.Lower, r.Mirror, r.Labels = driver.ObjectID(next()), number() != 0, driver.StoredLabels(next())
	r.Order, r.Owner = number(), uint32(number())
	if bad == nil && more {
		bad = errors.New("a row with too many columns")
	}

	return r, bad
}

// metaPlace is the key of the largest place that was given to a snapshot, in the table meta.
const metaPlace = "place"

// NextPlace returns the [driver.Identity.Order] of a snapshot that comes into the pool now.
func (t *Tx) NextPlace(now time.Time) (n int64, err error) {
	err = t.queryRow(`UPDATE meta SET value = max(?1, CAST(value AS INTEGER) + 1) WHERE key = ?2
		RETURNING CAST(value AS INTEGER)`, toNano(now), metaPlace).Scan(&n)
	if errors.Is(err, sql.ErrNoRows) { // the catalogue is new, or was rebuilt
		err = t.queryRow(`INSERT INTO meta SELECT ?2, max(?1, 1 + coalesce(max(ord), 0)) FROM objects
			RETURNING CAST(value AS INTEGER)`, toNano(now), metaPlace).Scan(&n)
	}
	return n, wrap("write catalogue", t.c.path, err)
}

// Expired lists at most limit volumes that have expired and are not pinned.
func (t *Tx) Expired(now time.Time, limit int) ([]Row, error) {
	var out []Row
	err := t.eachRow(`SELECT `+objectColumns+` FROM objects WHERE expires_at > 0 AND expires_at <= ?1
		AND pinned <= ?1 AND kind = 'volume' LIMIT ?2`,
		[]any{toNano(now), limit}, func(s scanner) error {
			r, err := scanRow(s)
			out = append(out, r)
			return wrap("read catalogue", t.c.path, err)
		})
	return out, err
}

// Generations lists the generations of a golden in order.
func (t *Tx) Generations(golden string) ([]Row, error) {
	var out []Row
	err := t.eachRow(`SELECT `+objectColumns+` FROM objects WHERE kind = 'generation' AND golden = ? ORDER BY generation`,
		[]any{golden}, func(s scanner) error {
			r, err := scanRow(s)
			out = append(out, r)
			return wrap("read catalogue", t.c.path, err)
		})
	return out, err
}

// Snapshots lists the snapshots of a volume, given its lineage, oldest first.
func (t *Tx) Snapshots(volume driver.ObjectID) ([]Row, error) {
	var out []Row
	err := t.eachRow(`SELECT `+objectColumns+` FROM objects WHERE kind = 'snapshot' AND volume = ? ORDER BY ord`,
		[]any{volume}, func(s scanner) error {
			r, err := scanRow(s)
			out = append(out, r)
			return wrap("read catalogue", t.c.path, err)
		})
	return out, err
}

// errEnough ends an eachRow without an error.
var errEnough = errors.New("enough rows were read")

func (t *Tx) eachRow(q string, args []any, fn func(scanner) error) error {
	rows, release, err := t.s.queryRows(t.untilEnd(), q, args...)
	if err != nil {
		return wrap("read catalogue", t.c.path, err)
	}

	defer release()
	defer rows.Close()
	for rows.Next() {
		if t.ctx.Err() != nil {
			return wrap("read catalogue", t.c.path, context.Cause(t.ctx))
		}
		if err := fn(rows); err != nil {
			if errors.Is(err, errEnough) {
				err = nil
			}
			return err
		}
	}

	return wrap("read catalogue", t.c.path, rows.Err())
}

const goldenColumns = `name, current, next, created_at, keep, overlay, source, labels, owner`

func scanGolden(s scanner) (Golden, error) {
	var g Golden
	var created int64
	var labels string
	err := s.Scan(&g.Name, &g.Current, &g.Next, &created, &g.Keep, &g.Overlay, &g.Source, &labels, &g.Owner)
	g.CreatedAt, g.Labels = fromNano(created), driver.StoredLabels(labels)
	return g, err
}

// Golden looks a golden up.
func (t *Tx) Golden(name string) (Golden, bool, error) {
	g, err := scanGolden(t.queryRow(`SELECT `+goldenColumns+` FROM goldens WHERE name = ?`, name))
	if errors.Is(err, sql.ErrNoRows) {
		return Golden{}, false, nil
	}
	return g, err == nil, wrap("read catalogue", t.c.path, err)
}

// Goldens lists all goldens in order of name.
func (t *Tx) Goldens() ([]Golden, error) {
	var out []Golden
	err := t.eachRow(`SELECT `+goldenColumns+` FROM goldens ORDER BY name`, nil, func(s scanner) error {
		g, err := scanGolden(s)
		out = append(out, g)
		return wrap("read catalogue", t.c.path, err)
	})
	return out, err
}

// PutGolden adds a golden or replaces its row.
func (t *Tx) PutGolden(g Golden) error {
	before, exists, err := t.Golden(g.Name)
	if err != nil {
		return err
	}
	if _, err := t.exec(`INSERT INTO goldens (`+goldenColumns+`) VALUES (?,?,?,?,?,?,?,?,?)
		ON CONFLICT (name) DO UPDATE SET current=excluded.current, next=excluded.next, keep=excluded.keep,
		overlay=excluded.overlay, source=excluded.source, labels=excluded.labels`,
		g.Name, g.Current, g.Next, toNano(g.CreatedAt), g.Keep, g.Overlay, g.Source, g.Labels.Text(), g.Owner); err != nil {
		return err
	}
	if !exists {
		return t.noteGolden(api.EventCreate, g, "")
	}
	return t.noteProperties(before, g)
}

// DeleteEmptyGolden removes the row of a golden that has no generation left, and its former names.
func (t *Tx) DeleteEmptyGolden(name string) error {
	var created int64
	gone := Golden{Name: name}
	err := t.queryRow(`DELETE FROM goldens WHERE name = ?1 AND NOT EXISTS
		(SELECT 1 FROM objects WHERE kind = 'generation' AND golden = ?1) RETURNING created_at, owner`, name).
		Scan(&created, &gone.Owner)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return wrap("write catalogue", t.c.path, err)
	}
	if err := t.noteGolden(api.EventDestroy, gone, ""); err != nil {
		return err
	}
	gone.CreatedAt = fromNano(created)
	return t.forgetMeta(goldenNamesKey(gone))
}

// RecordMount records where an object is mounted.
func (t *Tx) RecordMount(a MountRecord) error {
	was, err := t.deleteMountRecord(a.ID)
	if err == nil {
		err = t.putMountRecord(a)
	}
	if err != nil || was == a.Mountpoint {
		return err
	}
	if was != "" {
		if err := t.noteMount(api.EventUmount, a.ID, was); err != nil {
			return err
		}
	}
	return t.noteMount(api.EventMount, a.ID, a.Mountpoint)
}

// RecordFirstMount is RecordMount for an object that this transaction has added.
func (t *Tx) RecordFirstMount(r Row, a MountRecord) error {
	if err := t.putMountRecord(a); err != nil {
		return err
	}
	return t.noteObject(api.EventMount, r, t.RefOf(r), a.Mountpoint)
}

func (t *Tx) putMountRecord(a MountRecord) error {
	uid, gid := int64(-1), int64(-1)
	if a.Owner != nil {
		uid, gid = int64(a.Owner.UID), int64(a.Owner.GID)
	}
	_, err := t.exec(`INSERT OR REPLACE INTO attachments (`+mountRecordColumns+`) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)`,
		a.ID, a.Mountpoint, a.Loop, int64(a.MountID), int64(a.Dev), int64(a.Ino), int64(a.MountNS), a.MadeDir, uid, gid,
		a.BootID, toNano(a.At))
	return err
}

// RecordRemount records that an object with a mount record is mounted in another way now. A power loss may undo that.
func (c *Catalog) RecordRemount(ctx context.Context, a MountRecord) error {
	return c.Update(ctx, Soft, func(tx *Tx) error { return tx.putMountRecord(a) })
}

// ForgetMount removes a mount record. Absent is success.
func (t *Tx) ForgetMount(id driver.ObjectID) error {
	mountpoint, err := t.deleteMountRecord(id)
	if err != nil || mountpoint == "" {
		return err
	}
	return t.noteMount(api.EventUmount, id, mountpoint)
}

// deleteMountRecord returns where the object was mounted; "" if it has no record.
func (t *Tx) deleteMountRecord(id driver.ObjectID) (mountpoint string, err error) {
	err = t.queryRow(`DELETE FROM attachments WHERE id = ? RETURNING mountpoint`, id).Scan(&mountpoint)
	if errors.Is(err, sql.ErrNoRows) {
		err = nil
	}
	return mountpoint, wrap("write catalogue", t.c.path, err)
}

const mountRecordColumns = `id, mountpoint, loop, mount_id, dev, ino, mount_ns, made_dir, uid, gid, boot, at`

func scanMountRecord(s scanner) (MountRecord, error) {
	var a MountRecord
	var mountID, dev, ino, ns, uid, gid, at int64
	err := s.Scan(&a.ID, &a.Mountpoint, &a.Loop, &mountID, &dev, &ino, &ns, &a.MadeDir, &uid, &gid, &a.BootID, &at)
	if uid >= 0 {
		a.Owner = &principal.Owner{UID: uint32(uid), GID: uint32(gid)}
	}
	a.MountID, a.Dev, a.Ino, a.MountNS, a.At = uint64(mountID), uint64(dev), uint64(ino), uint64(ns), fromNano(at)
	return a, err
}

// MountRecord looks up where an object is mounted.
func (t *Tx) MountRecord(id driver.ObjectID) (MountRecord, bool, error) {
	a, err := scanMountRecord(t.queryRow(`SELECT `+mountRecordColumns+` FROM attachments WHERE id = ?`, id))
	if errors.Is(err, sql.ErrNoRows) {
		return MountRecord{}, false, nil
	}
	return a, err == nil, wrap("read catalogue", t.c.path, err)
}

// MountRecords lists all mount records by object.
func (t *Tx) MountRecords() (map[driver.ObjectID]MountRecord, error) {
	out := map[driver.ObjectID]MountRecord{}
	err := t.eachRow(`SELECT `+mountRecordColumns+` FROM attachments`, nil, func(s scanner) error {
		a, err := scanMountRecord(s)
		out[a.ID] = a
		return wrap("read catalogue", t.c.path, err)
	})
	return out, err
}

// AddTombstone adds a tombstone.
func (t *Tx) AddTombstone(b Tombstone) error {
	_, err := t.exec(`INSERT OR IGNORE INTO tombstones (id, ref, bytes, at, reclaimed) VALUES (?,?,?,?,0)`, b.ID, b.Ref,
		b.Bytes, toNano(b.At))
	return err
}

// SetReclaimed records that the driver has removed an object.
func (t *Tx) SetReclaimed(id driver.ObjectID) error {
	_, err := t.exec(`UPDATE tombstones SET reclaimed = 1 WHERE id = ?`, id)
	return err
}

// Unreclaimed lists the tombstones whose objects may still exist, at most limit (0: all).
func (t *Tx) Unreclaimed(limit int) ([]Tombstone, error) {
	if limit <= 0 {
		limit = -1
	}

	var out []Tombstone
	err := t.eachRow(`SELECT id, ref, bytes, at FROM tombstones WHERE reclaimed = 0 LIMIT ?`, []any{limit},
		func(s scanner) error {
			var b Tombstone
			var at int64
			err := s.Scan(&b.ID, &b.Ref, &b.Bytes, &at)
			b.At = fromNano(at)
			out = append(out, b)
			return wrap("read catalogue", t.c.path, err)
		})

	return out, err
}

// HasTombstone reports whether an object has a tombstone.
func (t *Tx) HasTombstone(id driver.ObjectID) (bool, error) {
	var n int
	err := t.queryRow(`SELECT count(*) FROM tombstones WHERE id = ?`, id).Scan(&n)
	return n > 0, wrap("read catalogue", t.c.path, err)
}

// TombstoneIDs lists the IDs of all tombstones.
func (t *Tx) TombstoneIDs() (map[driver.ObjectID]bool, error) {
	out := map[driver.ObjectID]bool{}
	err := t.eachRow(`SELECT id FROM tombstones`, nil, func(s scanner) error {
		var id driver.ObjectID
		err := s.Scan(&id)
		out[id] = true
		return wrap("read catalogue", t.c.path, err)
	})
	return out, err
}

// ForgetReclaimed removes the tombstones of objects whose removal is durable: call it after a driver.Syncer, with the
// time at which that began.
func (t *Tx) ForgetReclaimed(before time.Time) error {
	_, err := t.exec(`DELETE FROM tombstones WHERE reclaimed = 1 AND at < ?`, toNano(before))
	return err
}

// Meta reads a value; "" if it was never set.
func (t *Tx) Meta(key string) (string, error) {
	var v string
	err := t.queryRow(`SELECT value FROM meta WHERE key = ?`, key).Scan(&v)
	if errors.Is(err, sql.ErrNoRows) {
		return "", nil
	}
	return v, wrap("read catalogue", t.c.path, err)
}

// SetMeta writes a value.
func (t *Tx) SetMeta(key, value string) error {
	_, err := t.exec(`INSERT OR REPLACE INTO meta (key, value) VALUES (?,?)`, key, value)
	return err
}

// Summary is what a process needs to know when it opens a pool.
type Summary struct {
	Swept       Swept
	Marks       int
	Unreclaimed int
	Reclaimed   int // tombstones kept only until the removal is durable
	Expired     int // volumes that have expired
}

// Summary reads it in one query. now decides what has expired.
func (t *Tx) Summary(now time.Time) (Summary, error) {
	var s Summary
	var total int
	var at string
	err := t.queryRow(`SELECT coalesce((SELECT value FROM meta WHERE key = 'boot'), ''),
		coalesce((SELECT value FROM meta WHERE key = 'boot_at'), ''),
		(SELECT count(*) FROM marks), (SELECT count(*) FROM tombstones WHERE reclaimed = 0),
		(SELECT count(*) FROM tombstones),
		(SELECT count(*) FROM objects WHERE expires_at > 0 AND expires_at <= ?1 AND pinned <= ?1)`, toNano(now)).
		Scan(&s.Swept.BootID, &at, &s.Marks, &s.Unreclaimed, &total, &s.Expired)
	s.Reclaimed, s.Swept.At = total-s.Unreclaimed, parseNano(at)
	return s, wrap("read catalogue", t.c.path, err)
}

// Counts says how many things the catalogue holds.
type Counts struct{ Volumes, Snapshots, Goldens, Generations, Mounted int }

// Count counts.
func (t *Tx) Count() (Counts, error) {
	var n Counts
	err := t.queryRow(`SELECT (SELECT count(*) FROM objects WHERE kind='volume'),
		(SELECT count(*) FROM objects WHERE kind='snapshot'),
		(SELECT count(*) FROM goldens), (SELECT count(*) FROM objects WHERE kind='generation'),
		(SELECT count(*) FROM attachments)`).
		Scan(&n.Volumes, &n.Snapshots, &n.Goldens, &n.Generations, &n.Mounted)
	return n, wrap("read catalogue", t.c.path, err)
}

// CountDescendants counts the volumes and snapshots that descend from a generation.
func (t *Tx) CountDescendants(golden string, generation int) (int, error) {
	var n int
	err := t.queryRow(`SELECT count(*) FROM objects WHERE kind <> 'generation' AND golden = ? AND generation = ?`, golden,
		generation).Scan(&n)
	return n, wrap("read catalogue", t.c.path, err)
}

// ClonesByOrigin counts the volumes of each origin.
func (t *Tx) ClonesByOrigin() (map[driver.ObjectID]int, error) {
	out := map[driver.ObjectID]int{}
	err := t.eachRow(`SELECT origin_id, count(*) FROM objects WHERE kind = 'volume' GROUP BY origin_id`, nil,
		func(s scanner) error {
			var id driver.ObjectID
			var n int
			err := s.Scan(&id, &n)
			out[id] = n
			return wrap("read catalogue", t.c.path, err)
		})
	return out, err
}
