package zfs

import (
	"encoding/json"
	"os"
	"path/filepath"

	"pando/internal/driver"
)

// origins is a directory with what never changes of immutable objects that were
// cloned: to clone them again nothing need be read, as ZFS itself says whether they
// are there. What is encrypted is not noted: it may be given another key.
const origins = "origins"

type originNote struct {
	FS   driver.FS `json:"fs"`
	Size int64     `json:"size"`
}

func (d *Driver) originPath(id driver.ObjectID) string {
	return filepath.Join(d.dir, origins, string(id))
}

// rememberOrigin remembers an origin for later processes. It is only a cache.
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

// rememberedOrigin returns what is remembered of an origin; an incomplete note does not count.
func (d *Driver) rememberedOrigin(id driver.ObjectID) (originNote, bool) {
	var n originNote
	b, err := os.ReadFile(d.originPath(id))
	return n, err == nil && json.Unmarshal(b, &n) == nil
}

func (d *Driver) forgetOrigin(id driver.ObjectID) { _ = os.Remove(d.originPath(id)) }
