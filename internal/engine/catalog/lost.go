package catalog

import (
	"context"
	"fmt"
	"time"

	"pando/internal/driver"
)

// Lost is what is known of writes to an attached volume that never reached the pool: the
// kernel reports each failure once, to whoever asks first.
type Lost struct {
	At   time.Time // when Pando found out last
	Told bool      // an umount has failed because of it
}

const lostPrefix = "lost-"

// SetLost records that writes were lost while an object was attached as a says, and forgets
// what was recorded of attachments that are no more.
func (t *Tx) SetLost(a MountRecord, l Lost) error {
	if _, err := t.exec(`DELETE FROM meta WHERE key GLOB 'lost-*' AND substr(key, 6) NOT IN (SELECT id FROM attachments)`); err != nil {
		return err
	}
	told := 0
	if l.Told {
		told = 1
	}
	return t.SetMeta(lostPrefix+string(a.ID), fmt.Sprintf("%d %d %d", toNano(a.At), toNano(l.At), told))
}

// Lost returns what is known of writes that were lost in this attachment.
func (t *Tx) Lost(a MountRecord) (l Lost, ok bool, err error) {
	v, err := t.Meta(lostPrefix + string(a.ID))
	if err != nil || v == "" {
		return l, false, err
	}
	var since, at int64
	var told int
	if n, _ := fmt.Sscanf(v, "%d %d %d", &since, &at, &told); n != 3 || since != toNano(a.At) {
		return l, false, nil // of an earlier attachment
	}
	return Lost{At: fromNano(at), Told: told == 1}, true, nil
}

// ForgetLost removes what SetLost has recorded of an object. Absent is success.
func (t *Tx) ForgetLost(id driver.ObjectID) error {
	_, err := t.exec(`DELETE FROM meta WHERE key = ?`, lostPrefix+string(id))
	return err
}

// LostWrites is what is known of writes that were lost in an attachment.
func (c *Catalog) LostWrites(ctx context.Context, a MountRecord) (l Lost, known bool, err error) {
	err = c.View(ctx, func(tx *Tx) (err error) {
		l, known, err = tx.Lost(a)
		return err
	})
	return l, known, err
}

// TellLostWrites records that somebody has been told of lost writes. A power loss may take that away.
func (c *Catalog) TellLostWrites(ctx context.Context, a MountRecord, l Lost) error {
	l.Told = true
	return c.Update(ctx, Soft, func(tx *Tx) error { return tx.SetLost(a, l) })
}

// Loss is what NoteLostWrites records.
type Loss struct {
	Told    bool                   // the caller reports it now
	Stopped bool                   // nothing more can be lost: nothing can be written any more
	Shared  func(MountRecord) bool // nil, or others that may have lost them, as they share a filesystem
}

// NoteLostWrites records that writes were lost now, found out in attachment a. A power loss may take that away.
func (c *Catalog) NoteLostWrites(ctx context.Context, a MountRecord, l Loss) error {
	now := time.Now()
	note := func(tx *Tx, x MountRecord) error {
		if old, known, err := tx.Lost(x); err != nil || known && old.Told && l.Stopped {
			return err // of what has stopped nothing more can be lost
		}
		return tx.SetLost(x, Lost{At: now, Told: l.Told && x.ID == a.ID})
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
