package api

import (
	"time"

	"pando/internal/driver"
)

// Remote is a remote that the pool knows.
type Remote struct {
	Name       string     `json:"name"`                 // name of the remote in this pool
	URL        string     `json:"url,omitempty"`        // address, without secrets
	Repository string     `json:"repository,omitempty"` // ID of the repository
	Recipient  string     `json:"recipient,omitempty"`  // recipient of this host's key, if it was made for this remote
	AddedAt    *time.Time `json:"added_at,omitempty"`   // time when it was added
	Problem    string     `json:"problem,omitempty"`    // why nothing else is known of it
}

// RemoteVolume is a volume or golden on a remote.
type RemoteVolume struct {
	Name         string      `json:"name,omitempty"`        // name of the volume; absent: not known, see Problem
	Kind         Kind        `json:"kind"`                  // volume or golden
	FS           driver.FS   `json:"fs,omitempty"`          // filesystem of the newest point
	SizeBytes    int64       `json:"size_bytes,omitempty"`  // size of the newest point
	LogicalBytes int64       `json:"logical_bytes"`         // bytes of data in the newest point, without zeros
	StoredBytes  int64       `json:"stored_bytes"`          // bytes that were sent for all points, compressed
	Writer       string      `json:"writer,omitempty"`      // host that may push it
	WriterPool   string      `json:"writer_pool,omitempty"` // ID of the pool that may push it
	Epoch        uint64      `json:"epoch,omitempty"`       // number of changes of the writer
	Newest       string      `json:"newest,omitempty"`      // name of the newest point
	Points       []Point     `json:"points"`                // points in the order in which they were pushed
	Operations   []Operation `json:"operations"`            // what is at work on it, or was killed while at work

	// Problem is why the list of its points, Object, cannot be read. Nothing else is known then. With IncompleteCount,
	// only a part of the list with that many points cannot be read, and Points has the others.
	Problem         string `json:"problem,omitempty"`
	Object          string `json:"object,omitempty"`           // the object of the remote that cannot be read
	IncompleteCount int    `json:"incomplete_count,omitempty"` // number of points that cannot be listed
}

// Point is a point of a volume on a remote: a snapshot or a generation.
type Point struct {
	Ref       string    `json:"ref"`        // reference to the point, as commands take it: job-17@push-...
	Name      string    `json:"name"`       // name of the point within its volume
	CreatedAt time.Time `json:"created_at"` // time when the snapshot or generation was made
	// how consistent the content is: clean, crash
	Consistency  driver.Consistency `json:"consistency,omitempty"`
	Content      string             `json:"content"`              // form of the data: block, stream, tree
	SizeBytes    int64              `json:"size_bytes,omitempty"` // size of the block device
	LogicalBytes int64              `json:"logical_bytes"`        // bytes of data, without zeros
	StoredBytes  int64              `json:"stored_bytes"`         // bytes that were sent for it alone
	Origin       string             `json:"origin,omitempty"`     // reference to what it was cloned from
	Keep         bool               `json:"keep"`                 // a prune never removes it
}

// Operation is a push, pull or prune at work on a remote. Times are from the clock of its host. Of one whose record
// cannot be read, only that is known.
type Operation struct {
	Op        string    `json:"op,omitempty"`        // push, pull or prune
	Host      string    `json:"host,omitempty"`      // host of the process
	Pool      string    `json:"pool,omitempty"`      // ID of its pool
	PID       int       `json:"pid,omitempty"`       // ID of the process
	StartedAt time.Time `json:"started_at,omitzero"` // time when it began
	RenewedAt time.Time `json:"renewed_at,omitzero"` // time when it last showed that it lives
	// Unreadable means that the record of the operation cannot be read.
	Unreadable bool `json:"unreadable,omitempty"`
}
