package api

import "pando/internal/driver"

// Pool describes the pool.
type Pool struct {
	Dir            string           `json:"dir"`                     // directory of the pool
	ID             string           `json:"id"`                      // ID of the pool
	Driver         string           `json:"driver"`                  // driver that makes copies
	Why            string           `json:"why"`                     // reason for the driver
	Backing        string           `json:"backing,omitempty"`       // file of a loop-backed pool
	BackingBytes   int64            `json:"backing_bytes,omitempty"` // size of that file
	CloneCost      driver.CloneCost `json:"clone_cost"`              // what the time that a clone takes depends on
	TotalBytes     int64            `json:"total_bytes"`             // size of the filesystem
	UsedBytes      int64            `json:"used_bytes"`              // space in use on it, by whatever
	FreeBytes      int64            `json:"free_bytes"`              // space that can be used
	MinFreePercent float64          `json:"min_free_percent"`        // share of the space that new clones leave free
	VolumeCount    int              `json:"volume_count"`            // number of volumes
	MountedCount   int              `json:"mounted_count"`           // number of volumes that are mounted
	SnapshotCount  int              `json:"snapshot_count"`          // number of snapshots
	GoldenCount    int              `json:"golden_count"`            // number of goldens
	// GenerationCount is the number of generations of all goldens.
	GenerationCount int     `json:"generation_count"`
	LogicalBytes    int64   `json:"logical_bytes"`         // space that full copies of everything would use
	PhysicalBytes   int64   `json:"physical_bytes"`        // space in use by the objects
	SavedRatio      float64 `json:"saved_ratio,omitempty"` // logical_bytes / physical_bytes
	TrashCount      int     `json:"trash_count"`           // number of objects that were destroyed, and are to be removed
	TrashBytes      int64   `json:"trash_bytes"`           // space that removing them returns
	MeasuredExact   bool    `json:"measured_exact"`        // everything was measured now

	// If everything was measured:
	TieCount  int   `json:"tie_count,omitempty"`  // number of destroyed objects that others still need
	TiedBytes int64 `json:"tied_bytes,omitempty"` // space that would return without them
}
