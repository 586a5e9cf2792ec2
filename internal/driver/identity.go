package driver

import "time"

// WithContentOf returns id as that of an object with the content of another. All that says how content is to be read is
// copied here, and only here.
func (id Identity) WithContentOf(other Identity) Identity {
	id.FS, id.SizeBytes, id.Sector, id.Lower = other.FS, other.SizeBytes, other.Sector, other.Lower
	return id
}

// SnapshotOf returns id, the identity of a new object, as that of a snapshot of vol called name.
func (id Identity) SnapshotOf(vol Identity, name string, worth Consistency) Identity {
	id.Kind, id.Name, id.Volume, id.Consistency = Snapshot, name, vol.Lineage(), worth
	id.Golden, id.Generation, id.Ephemeral, id.Owner = vol.Golden, vol.Generation, vol.Ephemeral, vol.Owner
	id.Origin, id.OriginID = vol.Name, vol.ID
	return id.WithContentOf(vol)
}

// Predecessor returns the identity of a volume that successor has replaced: it becomes the snapshot successor.Before.
func (id Identity) Predecessor(successor Identity) Identity {
	out := id.SnapshotOf(id, successor.Before, Clean)
	out.Order = successor.Order
	out.Origin, out.OriginID = id.Origin, id.OriginID
	out.Pinned, out.ExpiresAt, out.Replaces, out.Before = time.Time{}, time.Time{}, "", ""
	out.Labels = Labels{} // the other volume has them
	return out
}
