package content

import (
	"sync"

	"pando/internal/base/errs"
	"pando/internal/base/principal"
	"pando/internal/engine/catalog"
	"pando/internal/linux/mount"
)

// showOwner makes the mount of a volume, or those of the layers of an overlay, show owners as the record says. root is
// the volume's root directory.
func (acc *Access) showOwner(a catalog.MountRecord, root func() (mount.Owner, error), mounts ...*mount.Detached) error {
	if a.Owner == nil {
		return nil
	}
	from, err := root()
	if err != nil {
		return err
	}
	return acc.idMaps.set(principal.Owner(from), *a.Owner, mounts...)
}

// checkOwner refuses a mount that cannot show another owner, or may not. Invalid, Unsupported.
func checkOwner(op, name string, raw bool, may Rights) error {
	switch {
	case may.Owner == nil:
		return nil
	case may.Dev || may.SUID:
		return errs.New(errs.Invalid, op, name, "for another owner, a volume is always mounted nosuid and nodev").
			WithHint("remove %s, or %s and %s", errs.Param("owner"), errs.Param("dev"), errs.Param("suid"))
	case !CanMount():
		return errs.New(errs.Permission, op, name, "only root can mount a volume for another owner")
	case raw:
		return errs.New(errs.Unsupported, op, name, "a raw volume has no files that could belong to another user")
	}
	return nil
}

// idMaps are the maps of owners that mounts of this process have had. A map takes some milliseconds to make.
type idMaps struct {
	mu   sync.Mutex
	made map[ownerPair]*mount.IDMap
}

type ownerPair struct{ a, b principal.Owner }

// maxMaps is how many maps are kept. Each is an open file.
const maxMaps = 64

// set makes mounts show owner a as b, and b as a. Unsupported.
func (i *idMaps) set(a, b principal.Owner, mounts ...*mount.Detached) error {
	if a == b {
		return nil
	}
	m, err := i.get(ownerPair{a, b})
	if err != nil {
		return err
	}
	for _, d := range mounts {
		if err := d.SetIDMap(m); err != nil {
			return err
		}
	}
	return nil
}

func (i *idMaps) get(p ownerPair) (*mount.IDMap, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if m := i.made[p]; m != nil {
		return m, nil
	}
	m, err := mount.SwapOwners(mount.Owner(p.a), mount.Owner(p.b))
	if err != nil {
		return nil, errs.Wrap("mount", "", err)
	}
	if i.made == nil || len(i.made) >= maxMaps {
		i.made = map[ownerPair]*mount.IDMap{} // those that nobody uses are closed when they are collected
	}
	i.made[p] = m
	return m, nil
}
