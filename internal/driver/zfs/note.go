package zfs

import (
	"encoding/json"
	"os"
	"path/filepath"

	"pando/internal/driver"
)

// origins is a directory with notes on immutable objects that were cloned. The notes
// hold what never changes, so that cloning them again needs no listing: ZFS itself
// reports whether they exist. Encrypted objects have no note, as their key may change.
const origins = "origins"

type originNote struct {
	FS   driver.FS `json:"fs"`
	Size int64     `json:"size"`
}

func (d *Driver) originPath(id driver.ObjectID) string {
	return filepath.Join(d.dir, origins, string(id))
}

// rememberOrigin writes the note on an origin, for later processes. Errors do not matter: the note is only a cache.
func (d *Driver) rememberOrigin(o object) {
	if o.node.encRoot != "" {
		return
	}
	b, err := json.Marshal(originNote{o.Identity.FS, o.node.size})
	if err != nil {
		return
	}
	p := d.originPath(o.ID)
	if os.WriteFile(p, b, 0o600) != nil && os.Mkdir(filepath.Dir(p), 0o700) == nil {
		_ = os.WriteFile(p, b, 0o600)
	}
}

// rememberedOrigin returns the note on an origin, and whether there is a complete one.
func (d *Driver) rememberedOrigin(id driver.ObjectID) (originNote, bool) {
	var n originNote
	b, err := os.ReadFile(d.originPath(id))
	return n, err == nil && json.Unmarshal(b, &n) == nil
}

func (d *Driver) forgetOrigin(id driver.ObjectID) { _ = os.Remove(d.originPath(id)) }
