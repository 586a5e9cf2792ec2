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
	return t.SetMeta(lostPrefix+string(a.ID), fmt.Sprintf("%d %d 0", toNano(a.At), toNano(l.At)))
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
	_, err := t.exec(`DELETE FROM meta WHERE key = ?`, lostPrefix+string(id))
	return err
}

// LostWrites returns what is known of writes that were lost in a mount.
func (c *Catalog) LostWrites(ctx context.Context, a MountRecord) (l Lost, known bool, err error) {
	err = c.View(ctx, func(tx *Tx) (err error) {
		l, known, err = tx.Lost(a)
		return err
	})
	return l, known, err
}

// NoteLostWrites records that writes were lost now, noticed in the mount a, and if shared is not nil, in all mounts for
// which it holds: they share a filesystem, which does not say whose writes it has lost. A power loss may undo that; it
// unmounts everything, too.
func (c *Catalog) NoteLostWrites(ctx context.Context, a MountRecord, shared func(MountRecord) bool) error {
	lost := Lost{At: time.Now()}
	return c.Update(ctx, Soft, func(tx *Tx) error {
		if shared == nil {
			return tx.SetLost(a, lost)
		}

		all, err := tx.MountRecords()
		if err != nil {
			return err
		}

		for _, x := range all {
			if !shared(x) {
				continue
			}
			if err := tx.SetLost(x, lost); err != nil {
				return err
			}
		}

		return nil
	})
}
