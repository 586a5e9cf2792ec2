package catalog

import (
	"context"
	"fmt"
	"time"

	"pando/internal/driver"
)

// Lost describes writes to a mounted volume that never reached the pool: the kernel reports each failure once, to the
// first process that asks.
type Lost struct {
	At time.Time // when Pando last noticed
}

const lostPrefix = "lost-"

// SetLost records that writes were lost while an object was mounted as a says, and forgets those of mounts that no
// longer exist.
func (t *Tx) SetLost(a MountRecord, l Lost) error {
	if _, err := t.exec(`DELETE FROM meta WHERE key GLOB 'lost-*'
		AND substr(key, 6) NOT IN (SELECT id FROM attachments)`); err != nil {
		return err
	}
	return t.SetMeta(lostPrefix+string(a.ID), fmt.Sprintf("%d %d", toNano(a.At), toNano(l.At)))
}

// Lost returns what is known of writes that were lost in this mount.
func (t *Tx) Lost(a MountRecord) (l Lost, ok bool, err error) {
	v, err := t.Meta(lostPrefix + string(a.ID))
	if err != nil || v == "" {
		return l, false, err
	}
	var since, at int64
	if n, _ := fmt.Sscanf(v, "%d %d", &since, &at); n != 2 || since != toNano(a.At) {
		return l, false, nil // of an earlier mount
	}
	return Lost{At: fromNano(at)}, true, nil
}

// ForgetLost removes what SetLost has recorded of an object. Absent is success.
func (t *Tx) ForgetLost(id driver.ObjectID) error {
	return t.forgetMeta(lostPrefix + string(id))
}

// LostWrites returns what is known of writes that were lost in a mount.
func (c *Catalog) LostWrites(ctx context.Context, a MountRecord) (l Lost, known bool, err error) {
	err = c.View(ctx, func(tx *Tx) (err error) {
		l, known, err = tx.Lost(a)
		return err
	})
	return l, known, err
}

// Loss is what NoteLostWrites records.
type Loss struct {
	Stopped bool                   // nothing more can be lost, as nothing more can be written
	Shared  func(MountRecord) bool // nil, or others that may have lost them, as they share a filesystem
}

// NoteLostWrites records that writes were lost now, noticed in the mount a. A power loss may undo that.
func (c *Catalog) NoteLostWrites(ctx context.Context, a MountRecord, l Loss) error {
	now := time.Now()
	note := func(tx *Tx, x MountRecord) error {
		if _, known, err := tx.Lost(x); err != nil || known && l.Stopped {
			return err // a stopped filesystem cannot lose more
		}
		return tx.SetLost(x, Lost{At: now})
	}

	return c.Update(ctx, Soft, func(tx *Tx) error {
		if l.Shared == nil {
			return note(tx, a)
		}

		all, err := tx.MountRecords()
		if err != nil {
			return err
		}

		for _, x := range all {
			if !l.Shared(x) {
				continue
			}
			if err := note(tx, x); err != nil {
				return err
			}
		}

		return nil
	})
}
