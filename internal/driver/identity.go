package driver

import "time"

// SnapshotOf returns id, the identity of a new object, as that of a snapshot of vol called name.
func (id Identity) SnapshotOf(vol Identity, name string, worth Consistency) Identity {
	id.Kind, id.Name, id.Volume, id.Consistency = Snapshot, name, vol.Lineage(), worth
	id.FS, id.SizeBytes, id.Sector, id.Ephemeral = vol.FS, vol.SizeBytes, vol.Sector, vol.Ephemeral
	id.Golden, id.Generation = vol.Golden, vol.Generation
	id.Origin, id.OriginID = vol.Name, vol.ID
	return id
}

// Predecessor returns the identity of a volume that another has replaced: it becomes the snapshot called name.
func (id Identity) Predecessor(name string) Identity {
	out := id.SnapshotOf(id, name, Clean)
	out.Origin, out.OriginID = id.Origin, id.OriginID
	out.Pinned, out.ExpiresAt, out.Replaces, out.Before = time.Time{}, time.Time{}, "", ""
	return out
}
