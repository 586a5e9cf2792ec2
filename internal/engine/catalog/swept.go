package catalog

import (
	"strconv"
	"time"

	"pando/internal/api"
	"pando/internal/linux/kernel"
)

// The boot in which the pool was last compared with the catalogue, and when that was.
const (
	metaBoot   = "boot"
	metaBootAt = "boot_at"
)

// Swept says when the whole pool was last compared with the catalogue.
type Swept struct {
	BootID string    // "" if it never was
	At     time.Time // zero: it never was
}

// BeforeBoot reports whether that was in an earlier boot, or never: then mounts and operations on record may have ended
// with that boot.
func (s Swept) BeforeBoot() bool { return kernel.EarlierBoot(s.BootID, s.At) }

// Swept reads what SetSwept wrote.
func (t *Tx) Swept() (s Swept, err error) {
	var at string
	if s.BootID, err = t.Meta(metaBoot); err == nil {
		at, err = t.Meta(metaBootAt)
	}
	s.At = parseNano(at)
	return s, err
}

// SetSwept records that the pool was compared with the catalogue in this boot, now. In a boot after the last one, it
// writes an event.
func (t *Tx) SetSwept() error {
	if last, err := t.Swept(); err != nil {
		return err
	} else if last.BootID != "" && last.BeforeBoot() {
		if err := t.putEvent(Event{Kind: api.EventBoot}); err != nil {
			return err
		}
	}

	if err := t.SetMeta(metaBoot, kernel.BootID()); err != nil {
		return err
	}
	return t.SetMeta(metaBootAt, strconv.FormatInt(toNano(time.Now()), 10))
}

// parseNano reads nanoseconds; the zero time if there are none.
func parseNano(s string) time.Time {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return time.Time{}
	}
	return fromNano(n)
}
