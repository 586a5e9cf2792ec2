package api

import (
	"time"

	"pando/internal/driver"
)

// Object is a volume, a snapshot, or a generation of a golden.
type Object struct {
	Ref  string `json:"ref"`  // reference to the object, as commands take it
	Kind Kind   `json:"kind"` // volume, snapshot or generation
	ID   string `json:"id"`   // ID of the object, which no other ever has
	// Name is the name of the volume, or of the snapshot within its volume.
	Name string `json:"name,omitempty" of:"volume,snapshot" always:"volume,snapshot"`
	// Volume is the name of the snapshot's volume.
	Volume string `json:"volume,omitempty" of:"snapshot" always:"snapshot"`
	// Golden and Generation are what a generation is. A volume and a snapshot have those that they descend from.
	Golden string `json:"golden,omitempty" always:"generation"`
	// Generation is the number of the generation, see Golden.
	Generation int       `json:"generation,omitempty" always:"generation"`
	FS         driver.FS `json:"fs"`               // filesystem of the content: ext4, xfs, btrfs, native, raw
	Driver     string    `json:"driver"`           // driver of the pool
	State      State     `json:"state"`            // what the object is doing
	Origin     string    `json:"origin,omitempty"` // reference to what the object was made from
	// OriginRemoved means that the origin no longer exists. Something else may have its name.
	OriginRemoved bool `json:"origin_removed,omitempty"`
	// Mountpoint is the directory or link where a volume is mounted.
	Mountpoint string     `json:"mountpoint,omitempty" of:"volume"`
	CreatedAt  time.Time  `json:"created_at"`           // time when the object was made
	LastUsedAt time.Time  `json:"last_used_at"`         // time when a command last used the object
	ExpiresAt  *time.Time `json:"expires_at,omitempty"` // time from which on the object is destroyed
	Ephemeral  bool       `json:"ephemeral"`            // a reboot removes the object; its syncs need not reach the disk
	Overlay    bool       `json:"overlay"`              // the object holds only what differs from its golden

	SizeBytes      int64 `json:"size_bytes,omitempty"` // size of the block device; absent: as large as the pool
	LogicalBytes   int64 `json:"logical_bytes"`        // space that a full copy would use
	ExclusiveBytes int64 `json:"exclusive_bytes"`      // space that destroying the object would return
	SharedBytes    int64 `json:"shared_bytes"`         // space that other objects use as well
	Extents        int64 `json:"extents,omitempty"`    // number of pieces on disk
	// MeasuredAt is when the space was measured; absent: never, and the space is an estimate, that of the origin.
	MeasuredAt *time.Time `json:"measured_at,omitempty"`

	Pinned      bool       `json:"pinned"`                 // the object must not be destroyed
	PinnedUntil *time.Time `json:"pinned_until,omitempty"` // end of the pin; absent: until it is unpinned
	// Consistency is how consistent the content of a snapshot is: clean, crash.
	Consistency driver.Consistency `json:"consistency,omitempty" of:"snapshot,generation"`
	// Mirror means that a generation was made from the source of its golden.
	Mirror bool `json:"mirror,omitempty" of:"generation"`

	Labels   driver.Labels `json:"labels"`    // labels of the object; a generation has those of its golden
	OwnerUID uint32        `json:"owner_uid"` // user ID of the owner; a snapshot has that of its volume
}

// Mounted reports whether the volume is mounted.
func (o Object) Mounted() bool { return o.Mountpoint != "" }

// Detail is an object with what only describing it tells.
type Detail struct {
	Object
	OriginID string `json:"origin_id,omitempty"` // ID of the origin
	// Base is the generation that a volume or snapshot descends from, and that changes are compared with.
	Base string `json:"base,omitempty" of:"volume,snapshot"`
	// CloneCost is what the time that a clone takes depends on: constant, extents, data.
	CloneCost driver.CloneCost `json:"clone_cost,omitempty"`
	// Snapshots are the snapshots of the volume, the oldest first.
	Snapshots []Object `json:"snapshots,omitzero" of:"volume" is:"snapshot"`
	// Held means that the volume is still mounted, but not where Pando mounted it.
	Held bool `json:"held,omitempty" of:"volume"`
	// StallSeconds is how long copying a mounted volume may stop its writers.
	StallSeconds float64 `json:"stall_seconds,omitempty" of:"volume"`
	// TiedBytes is the space of destroyed objects that stay as long as this object or others need them.
	TiedBytes int64       `json:"tied_bytes,omitempty"`
	Key       *driver.Key `json:"key,omitempty"`    // key of the pool's filesystem; absent: it is not encrypted
	Layers    *Layers     `json:"layers,omitempty"` // layers of an overlay
}

// Layers describes an overlay.
type Layers struct {
	Lower        string   `json:"lower"`         // reference to the generation whose files the overlay changes
	LowerID      string   `json:"lower_id"`      // ID of that generation
	LowerRemoved bool     `json:"lower_removed"` // the generation was removed, and stays in the pool for its overlays
	LowerBytes   int64    `json:"lower_bytes"`   // space that a full copy of the generation would use
	Options      []string `json:"options"`       // options of the overlay mount
}
