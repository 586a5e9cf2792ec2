package api

// NewVolumes is what volumes are made from.
type NewVolumes struct {
	// From is a reference to what is cloned: GOLDEN, GOLDEN@N, VOLUME or VOLUME@SNAPSHOT.
	From string `json:"from"`
	Name string `json:"name"` // name of the volume
	// Count makes as many volumes, NAME-1 to NAME-COUNT: all of them, or none.
	Count int `json:"count,omitempty"`
	// SizeBytes is the size of the volume; absent: that of the origin.
	SizeBytes int64 `json:"size_bytes,omitempty"`
	// TTLSeconds is how long the volume stays before it is destroyed; absent: as long as allowed.
	TTLSeconds int64 `json:"ttl_seconds,omitempty"`
	Ephemeral  bool  `json:"ephemeral,omitempty"` // a reboot removes the volume; its syncs need not reach the disk
	// Overlay makes a volume that holds only what differs from the golden; absent: as the golden says.
	Overlay *bool             `json:"overlay,omitempty"`
	Labels  map[string]string `json:"labels,omitempty"` // labels of the volume
	Mount   bool              `json:"mount,omitempty"`  // mount the volume
	// Dir is the directory where root wants it mounted; absent: the place of the user, or below the pool.
	Dir string `json:"dir,omitempty"`
}

// NewMount is how a volume is mounted.
type NewMount struct {
	// Dir is the directory where root wants it mounted; absent: the place of the user, or below the pool.
	Dir string `json:"dir,omitempty"`
}

// VolumePage is a list of volumes, or a part of one.
type VolumePage struct {
	Volumes []Object `json:"volumes" is:"volume"` // volumes, in order
	Next    string   `json:"next,omitempty"`      // the parameter "after" of the next page; absent: there is none
}

// GoldenPage is a list of goldens.
type GoldenPage struct {
	Goldens []Golden `json:"goldens"` // goldens, in order of name
}

// Problem is an error as an answer of the service (RFC 9457).
type Problem struct {
	Type   string `json:"type"`           // always about:blank
	Title  string `json:"title"`          // what the status means
	Status int    `json:"status"`         // status code of the answer
	Detail string `json:"detail"`         // operation, reference and cause, for people
	Kind   string `json:"kind"`           // kind of the error, as on the command line
	Op     string `json:"op,omitempty"`   // operation that failed
	Ref    string `json:"ref,omitempty"`  // what it failed on
	Hint   string `json:"hint,omitempty"` // what to do next
}
