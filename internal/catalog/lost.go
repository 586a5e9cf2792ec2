package catalog

import (
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
func (t *Tx) SetLost(a Attached, l Lost) error {
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
func (t *Tx) Lost(a Attached) (l Lost, ok bool, err error) {
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
