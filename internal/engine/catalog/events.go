package catalog

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"pando/internal/api"
	"pando/internal/base/principal"
	"pando/internal/base/ref"
	"pando/internal/driver"
)

// Events tell what changed in the pool, in the order in which it did. The methods of Tx that change an object, a golden
// or a mount record write them, so that each change and its event are in the same transaction. Measurements, marks,
// tombstones and records of remotes have no events, nor do layers, which nobody asks for.

// Event is a change of the pool.
type Event struct {
	Seq    int64 // number of the event, which is higher than those of all events before
	At     time.Time
	Kind   api.EventKind   // what happened
	Object driver.Kind     // kind of what changed, for a golden Generation; "": the pool
	Ref    string          // reference to what changed, as it is after the change; of a golden, its name
	ID     driver.ObjectID // ID of the object; "": a golden or the pool
	Owner  uint32          // user ID of the object's owner
	Who    uint32          // user ID of who asked for the change
	Op     string          // name of the operation that made it; recover finished or undid others
	// Detail says more: the reference to the origin (create), to the snapshot with the former content (replace), or to
	// the object before (rename); a property that has another value now, as PROPERTY=VALUE (change); the mount point
	// (mount, umount); why it was destroyed. It may be empty.
	Detail string
}

// eventsKept is how many events stay at least.
var eventsKept int64 = 100_000 // tests have fewer

// trimEvery is the mean number of events between two removals of old ones: each time, the newest ones are counted.
const trimEvery = 1024

// metaRemoved is the key of the number up to which events are no longer there, in the table meta.
const metaRemoved = "events_removed"

const eventColumns = `seq, at, kind, object, ref, id, owner, who, op, detail`

// insertEvent gives an event its number: microseconds since 1970 or, if that is not higher than the last number, one
// more than that. So numbers rise even if the last events were lost, or all of them with the catalogue.
const insertEvent = `INSERT INTO events (` + eventColumns + `)
	VALUES (max(?, 1 + coalesce((SELECT max(seq) FROM events), 0)), ?,?,?,?,?,?,?,?,?)`

// values are the columns of an event that happens now.
func (v Event) values(ctx context.Context) []any {
	v.Who = uint32(os.Geteuid())
	if p, ok := principal.From(ctx); ok {
		v.Who = p.UID
	}
	now := time.Now()
	return []any{now.UnixMicro(), now.UnixNano(), v.Kind, v.Object, v.Ref, v.ID, v.Owner, v.Who, v.Op, v.Detail}
}

// WithoutEvents keeps the transaction from writing events: it records what has been there before.
func (t *Tx) WithoutEvents() { t.silent = true }

// putEvent writes an event that happens now.
func (t *Tx) putEvent(v Event) error {
	if t.silent {
		return nil
	}
	if w, err := t.markOwner(); err == nil {
		v.Op = w.operation()
	}

	r, err := t.run(insertEvent, v.values(t.ctx)...)
	if err != nil {
		return err
	}
	if seq, err := r.LastInsertId(); err != nil || seq%trimEvery != 0 {
		return wrap("write catalogue", t.c.path, err)
	}
	return t.trimEvents()
}

// trimEvents removes all events but the newest ones.
func (t *Tx) trimEvents() error {
	var seq int64
	err := t.queryRow(`SELECT seq FROM events ORDER BY seq DESC LIMIT 1 OFFSET ?`, eventsKept).Scan(&seq)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return wrap("read catalogue", t.c.path, err)
	}
	if _, err := t.exec(`DELETE FROM events WHERE seq <= ?`, seq); err != nil {
		return err
	}
	return t.SetMeta(metaRemoved, strconv.FormatInt(seq, 10))
}

// noteObject writes an event about an object.
func (t *Tx) noteObject(kind api.EventKind, r Row, ref, detail string) error {
	switch r.Kind {
	case driver.Volume, driver.Snapshot, driver.Generation:
		return t.putEvent(Event{Kind: kind, Object: r.Kind, Ref: ref, ID: r.ID, Owner: r.Owner, Detail: detail})
	}
	return nil
}

// noteChange writes an event about an object of which n rows have another value of a property now: one or none.
func (t *Tx) noteChange(n int64, id driver.ObjectID, property, value string) error {
	if n == 0 {
		return nil
	}
	r, ok, err := t.Object(id)
	if err != nil || !ok {
		return err
	}
	return t.noteObject(api.EventChange, r, t.RefOf(r), property+"="+value)
}

// baseText is the generation that an object descends from, in the detail of an event; "" if there is none.
func baseText(golden string, generation int) string {
	if golden == "" {
		return ""
	}
	return ref.Generation(golden, generation)
}

// noteMount writes an event about a volume that was mounted or unmounted.
func (t *Tx) noteMount(kind api.EventKind, id driver.ObjectID, mountpoint string) error {
	r, ok, err := t.Object(id)
	if err != nil || !ok {
		return err
	}
	return t.noteObject(kind, r, t.RefOf(r), mountpoint)
}

// noteGolden writes an event about a golden.
func (t *Tx) noteGolden(kind api.EventKind, g Golden, detail string) error {
	return t.putEvent(Event{Kind: kind, Object: driver.Generation, Ref: g.Name, Owner: g.Owner, Detail: detail})
}

// noteProperties writes an event for each property of a golden that changes.
func (t *Tx) noteProperties(before, g Golden) error {
	for _, p := range []struct {
		changed bool
		detail  string
	}{
		{before.Keep != g.Keep, fmt.Sprintf("keep=%d", g.Keep)},
		{before.Overlay != g.Overlay, fmt.Sprintf("overlay=%s", g.Overlay)},
		{before.Labels != g.Labels, "labels=" + g.Labels.Text()},
		{before.Source != g.Source, "source"}, // its value is long
	} {
		if p.changed {
			if err := t.noteGolden(api.EventChange, g, p.detail); err != nil {
				return err
			}
		}
	}
	return nil
}

// Events calls fn for the events with a higher number than after, until it returns false or an error: the oldest first
// or, with back, the newest first.
func (t *Tx) Events(after int64, back bool, fn func(Event) (more bool, err error)) error {
	query := `SELECT ` + eventColumns + ` FROM events WHERE seq > ? ORDER BY seq`
	if back {
		query += ` DESC`
	}
	return t.eachRow(query, []any{after}, func(s scanner) error {
		var v Event
		var at int64
		if err := s.Scan(&v.Seq, &at, &v.Kind, &v.Object, &v.Ref, &v.ID, &v.Owner, &v.Who, &v.Op, &v.Detail); err != nil {
			return wrap("read catalogue", t.c.path, err)
		}
		v.At = fromNano(at)
		more, err := fn(v)
		if err == nil && !more {
			err = errEnough
		}
		return err
	})
}

// EventRange returns the number up to which events are no longer there, and that of the last event.
func (t *Tx) EventRange() (removed, last int64, err error) {
	err = t.queryRow(`SELECT CAST(value AS INTEGER), coalesce((SELECT max(seq) FROM events), 0) FROM meta WHERE key = ?`,
		metaRemoved).Scan(&removed, &last)
	return removed, last, wrap("read catalogue", t.c.path, err)
}

// ContinueEvents gives the first event of a new catalogue a higher number than last, the last one in the catalogue that
// it replaces.
func (t *Tx) ContinueEvents(last int64) error {
	if _, err := t.exec(`UPDATE events SET seq = max(seq, ? + 1)`, last); err != nil {
		return err
	}
	_, err := t.exec(`UPDATE meta SET value = (SELECT min(seq) - 1 FROM events) WHERE key = ?`, metaRemoved)
	return err
}

// LastEvent returns the number of the last event in the catalogue of the pool in dir; 0 if it cannot be read.
func LastEvent(ctx context.Context, dir, poolID string) (last int64) {
	c, err := OpenReadOnly(ctx, dir, poolID)
	if err != nil {
		return 0
	}
	defer c.Close()
	_ = c.View(ctx, func(tx *Tx) (err error) {
		_, last, err = tx.EventRange()
		return err
	})
	return last
}

// AskEvent calls the func of OnFind for the object of an event.
func (t *Tx) AskEvent(op string, v Event) error {
	if t.c.onFind == nil || v.Object == "" {
		return nil
	}
	return t.c.onFind(t.ctx, op, Found{v.Ref, v.Object, v.Owner})
}
