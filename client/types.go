package client

import (
	"encoding/json"
	"time"
)

// Object is a volume, a snapshot, or a generation of a golden.
type Object struct {
	Name           string            `json:"name"`
	ID             string            `json:"id"`
	Kind           string            `json:"kind"` // volume, snapshot, golden
	FS             string            `json:"fs"`
	Driver         string            `json:"driver"`
	State          string            `json:"state"`  // volume: idle, mounted; golden: current, superseded; snapshot: idle
	Origin         string            `json:"origin"` // reference; "" if it was imported
	Golden         string            `json:"golden"`
	Generation     int               `json:"generation"`
	Mountpoint     string            `json:"mountpoint"` // "" unless mounted
	CreatedAt      time.Time         `json:"created_at"`
	LastUsedAt     time.Time         `json:"last_used_at"`
	ExpiresAt      *time.Time        `json:"expires_at"`
	Ephemeral      bool              `json:"ephemeral"`
	Overlay        bool              `json:"overlay"`
	SizeBytes      int64             `json:"size_bytes"`      // of the block device; 0: as large as the pool
	LogicalBytes   int64             `json:"logical_bytes"`   // space that a full copy would use
	ExclusiveBytes int64             `json:"exclusive_bytes"` // space that destroying it would return
	SharedBytes    int64             `json:"shared_bytes"`
	Extents        int64             `json:"extents"`
	MeasuredAt     *time.Time        `json:"measured_at"`
	PinnedUntil    *time.Time        `json:"pinned_until"` // year 2200: until it is unpinned
	Consistency    string            `json:"consistency"`  // of a snapshot: clean, crash
	Labels         map[string]string `json:"labels"`
	Owner          *Owner            `json:"owner,omitempty"`     // user to whom a volume belongs; nil: root
	Sandboxed      bool              `json:"sandboxed,omitempty"` // mounted in the sandbox of a run, and nowhere else
	BuildKey       string            `json:"build_key,omitempty"` // of a generation that a command has built
	Warnings       []string          `json:"warnings"`            // of the request: problems that did not prevent it

	ETag string `json:"-"` // for IfMatch of a later change; "" in lists
}

func (o *Object) setETag(tag string) { o.ETag = tag }

// Details is all that is known of an object.
type Details struct {
	Object
	OriginID      string          `json:"origin_id"`
	Base          string          `json:"base"`           // of a volume or snapshot: the generation it descends from
	Keep          int             `json:"keep"`           // of a golden: generations that it keeps, 0: all
	OverlayPolicy string          `json:"overlay_policy"` // of a golden: never, default, allowed
	Source        json.RawMessage `json:"source"`         // of a golden: what a refresh makes new generations from
	CloneCost     string          `json:"clone_cost"`     // what the time of a clone depends on: constant, extents, data
	Generations   []Object        `json:"generations"`
	Snapshots     []Object        `json:"snapshots"`
	Durable       bool            `json:"durable"` // survives a reboot
	Held          bool            `json:"held"`    // still mounted, but not where Pando mounted it
	StallSeconds  float64         `json:"stall_seconds"`
	TiedBytes     int64           `json:"tied_bytes"`
}

// Owner is a user of the host.
type Owner struct {
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"` // the user's primary group
}

// Golden is a golden with its current generation.
type Golden struct {
	Object
	Generations   int             `json:"generations"` // that exist
	Volumes       int             `json:"volumes"`     // cloned from any of them
	OverlayPolicy string          `json:"overlay_policy"`
	Source        json.RawMessage `json:"source"`
}

// Imported is a golden that was imported.
type Imported struct {
	Object
	Files   int64    `json:"files"`
	Bytes   int64    `json:"bytes"`
	Waited  bool     `json:"waited"`  // another process has built this generation
	Removed []string `json:"removed"` // older generations
	Cleaned []string `json:"cleaned"` // what the preset left out
}

// Pool describes the pool.
type Pool struct {
	Dir            string  `json:"dir"`
	ID             string  `json:"id"`
	Driver         string  `json:"driver"`
	TotalBytes     int64   `json:"total_bytes"`
	UsedBytes      int64   `json:"used_bytes"`
	FreeBytes      int64   `json:"free_bytes"`
	MinFreePercent float64 `json:"min_free_percent"`
	Volumes        int     `json:"volumes"`
	Mounted        int     `json:"mounted"`
	Snapshots      int     `json:"snapshots"`
	Goldens        int     `json:"goldens"`
	Generations    int     `json:"generations"`
	LogicalBytes   int64   `json:"logical_bytes"`
	PhysicalBytes  int64   `json:"physical_bytes"`
	SavedRatio     float64 `json:"saved_ratio"`
	TrashObjects   int     `json:"trash_objects"`
	TrashBytes     int64   `json:"trash_bytes"`
}

// Service is what the service says about itself.
type Service struct {
	Version   string    `json:"version"`
	Pool      string    `json:"pool"`
	PoolID    string    `json:"pool_id"`
	Driver    string    `json:"driver"`
	StartedAt time.Time `json:"started_at"`
	Caller    string    `json:"caller"`     // who this client is, to the service
	AllRights bool      `json:"all_rights"` // the client may do everything, as root may
	Running   int       `json:"running_operations"`
	Tasks     []Task    `json:"tasks"`
}

// Task is what the service does by itself, at an interval or when there is something to do.
type Task struct {
	Name           string     `json:"name"`
	Verb           string     `json:"verb"`
	Ref            string     `json:"ref"`           // what it works on; may be ""
	EverySeconds   float64    `json:"every_seconds"` // 0: when there is something to do
	Running        bool       `json:"running"`
	Runs           int        `json:"runs"` // that have ended, since the service started
	LastStartedAt  *time.Time `json:"last_started_at"`
	LastFinishedAt *time.Time `json:"last_finished_at"`
	LastResult     string     `json:"last_result"` // of the last run that did not fail
	LastError      *Error     `json:"last_error"`  // of the last run; nil: it did not fail
	Failures       int        `json:"failures"`    // in a row
	NextAt         *time.Time `json:"next_at"`     // nil: unknown
}

// Make is what CloneRequest and ForkRequest have in common.
type Make struct {
	Mount     bool              `json:"mount,omitempty"`
	MountDir  string            `json:"mount_dir,omitempty"` // absolute; "": below the pool
	Dev       bool              `json:"dev,omitempty"`       // devices in it work
	SUID      bool              `json:"suid,omitempty"`      // set-user-ID programs in it work
	SizeBytes int64             `json:"size_bytes,omitempty"`
	TTL       float64           `json:"ttl_seconds,omitempty"` // seconds
	Ephemeral bool              `json:"ephemeral,omitempty"`
	Labels    map[string]string `json:"labels,omitempty"`
	Owner     *Owner            `json:"owner,omitempty"`  // gets the volume; nil: root
	Freeze    string            `json:"freeze,omitempty"` // if_needed (the default), always, never
}

// CloneRequest says what to clone.
type CloneRequest struct {
	From    string `json:"from"` // GOLDEN, GOLDEN@N, VOLUME@SNAPSHOT or VOLUME
	Name    string `json:"name"`
	Overlay *bool  `json:"overlay,omitempty"` // nil: as the golden says
	Make

	Key string `json:"-"` // Idempotency-Key; "": none
}

// ForkRequest says how to copy a volume.
type ForkRequest struct {
	Name string `json:"name"`
	Make

	Key string `json:"-"` // Idempotency-Key; "": none
}

// MountRequest says how to mount a volume.
type MountRequest struct {
	Dir  string `json:"dir,omitempty"` // absolute; "": below the pool
	Dev  bool   `json:"dev,omitempty"`
	SUID bool   `json:"suid,omitempty"`
}

// SnapshotRequest says how to snapshot a volume.
type SnapshotRequest struct {
	Name   string            `json:"name,omitempty"` // "": the time
	Labels map[string]string `json:"labels,omitempty"`
	Freeze string            `json:"freeze,omitempty"`

	Key string `json:"-"` // Idempotency-Key; "": none
}

// SnapshotGroup has snapshots of several volumes at one point in time.
type SnapshotGroup struct {
	Name          string   `json:"name"`
	FrozenSeconds float64  `json:"frozen_seconds"`
	Snapshots     []Object `json:"snapshots"`
	Warnings      []string `json:"warnings"`
}

// Rewound is a volume that was rewound.
type Rewound struct {
	Object
	Before string `json:"before"` // reference of the snapshot with the previous state
}

// Destroyed describes one object that was destroyed.
type Destroyed struct {
	Ref            string `json:"ref"`
	ID             string `json:"id"`
	Kind           string `json:"kind"`
	ExclusiveBytes int64  `json:"exclusive_bytes"`
	Reclaimed      bool   `json:"reclaimed"`
	HeldBy         string `json:"held_by"`
}

// DestroyRequest says what to destroy.
type DestroyRequest struct {
	What   []string `json:"what,omitempty"`    // names of volumes or globs over them, and VOLUME@SNAPSHOT
	IDs    []string `json:"ids,omitempty"`     // ID of each name: what no longer exists is left out
	Labels []string `json:"labels,omitempty"`  // only what has these labels: KEY or KEY=VALUE, a glob
	DryRun bool     `json:"dry_run,omitempty"` // only report what would be destroyed
}

// DestroyReport says what was destroyed.
type DestroyReport struct {
	Destroyed []Destroyed `json:"destroyed"`
	Failed    []*Error    `json:"failed"` // one for each object that still exists
	Warnings  []string    `json:"warnings"`
}

// Difference is what differs between two objects.
type Difference struct {
	A       string `json:"a"`
	B       string `json:"b"`
	Changes []struct {
		Op   string `json:"op"` // added, modified, deleted, renamed
		Path string `json:"path"`
		From string `json:"from"` // of renamed
		Type string `json:"type"` // file, directory, symlink, ...
	} `json:"changes"`
	Method string          `json:"method"`
	Stat   json.RawMessage `json:"stat"`
}

// GoldenProperties changes properties of a golden. Those that are not set stay.
type GoldenProperties struct {
	Keep    *int   `json:"keep,omitempty"`    // newest generations that it keeps; 0: all
	Overlay string `json:"overlay,omitempty"` // never, default, allowed
}

// GoldenSet is the answer to GoldenProperties.
type GoldenSet struct {
	Golden        string   `json:"golden"`
	Keep          int      `json:"keep"`
	OverlayPolicy string   `json:"overlay_policy"`
	Removed       []string `json:"removed"`
	Warnings      []string `json:"warnings"`
}

// PublishRequest says which volume becomes the next generation of a golden.
type PublishRequest struct {
	Volume  string            `json:"volume"`
	Force   bool              `json:"force,omitempty"`
	Keep    *int              `json:"keep,omitempty"`
	Overlay string            `json:"overlay,omitempty"`
	Preset  string            `json:"preset,omitempty"`
	Labels  map[string]string `json:"labels,omitempty"`
	Freeze  string            `json:"freeze,omitempty"`

	Key string `json:"-"` // Idempotency-Key; "": none
}

// PushRequest says what is pushed to a remote.
type PushRequest struct {
	Refs           []string `json:"refs,omitempty"`
	All            bool     `json:"all,omitempty"`
	As             string   `json:"as,omitempty"`
	LimitRate      int64    `json:"limit_rate,omitempty"` // bytes a second
	Freeze         string   `json:"freeze,omitempty"`
	Full           bool     `json:"full,omitempty"`
	NoOrigin       bool     `json:"no_origin,omitempty"`
	Portable       bool     `json:"portable,omitempty"`
	AcceptRollback bool     `json:"accept_rollback,omitempty"`
}

// PullRequest says what is pulled from a remote.
type PullRequest struct {
	Ref       string `json:"ref"`
	As        string `json:"as,omitempty"`
	Update    bool   `json:"update,omitempty"`
	TakeOver  bool   `json:"take_over,omitempty"`
	NoOrigin  bool   `json:"no_origin,omitempty"`
	LimitRate int64  `json:"limit_rate,omitempty"`
}

// VerifyRequest says what is checked of a remote.
type VerifyRequest struct {
	Names       []string `json:"names,omitempty"`
	ReadPercent float64  `json:"read_percent,omitempty"`
	Repair      bool     `json:"repair,omitempty"`
}

// RemoteVolume is a volume or golden on a remote.
type RemoteVolume struct {
	Name        string       `json:"name"`
	Points      int          `json:"points"`                 // its snapshots or generations there
	NewestPoint *RemotePoint `json:"newest_point,omitempty"` // nil if it has no points
	Problem     string       `json:"problem"`                // why the list of its points cannot be read
}

// RemotePoint is a snapshot or generation on a remote. Sizes are in bytes.
type RemotePoint struct {
	Name         string    `json:"name"`
	CreatedAt    time.Time `json:"created_at"`
	SizeBytes    int64     `json:"size_bytes"`
	LogicalBytes int64     `json:"logical_bytes"`
	StoredBytes  int64     `json:"stored_bytes"`
}

// RemotePruneRequest says which points of a remote stay: as many of the newest, and the newest of each hour, day and so
// on. Without a number, all of them do, and only what no point needs is removed.
type RemotePruneRequest struct {
	Names             []string `json:"names,omitempty"` // of volumes; none: all
	KeepLast          int      `json:"keep_last,omitempty"`
	KeepHourly        int      `json:"keep_hourly,omitempty"`
	KeepDaily         int      `json:"keep_daily,omitempty"`
	KeepWeekly        int      `json:"keep_weekly,omitempty"`
	KeepMonthly       int      `json:"keep_monthly,omitempty"`
	KeepYearly        int      `json:"keep_yearly,omitempty"`
	KeepWithinSeconds float64  `json:"keep_within_seconds,omitempty"`
	DryRun            bool     `json:"dry_run,omitempty"`
	MaxRepack         *int64   `json:"max_repack,omitempty"` // bytes to rewrite at most; nil: no limit
	AcceptRollback    bool     `json:"accept_rollback,omitempty"`
}

// PruneRequest says what may be removed from the pool.
type PruneRequest struct {
	KeepFreePercent  float64  `json:"keep_free_percent,omitempty"`
	OlderThanSeconds float64  `json:"older_than_seconds,omitempty"`
	IdleSeconds      float64  `json:"idle_seconds,omitempty"`
	Labels           []string `json:"labels,omitempty"`
	DryRun           bool     `json:"dry_run,omitempty"`
}

// Remote is a remote of the pool.
type Remote struct {
	Name    string    `json:"name"`
	AddedAt time.Time `json:"added_at"`
}

// Operation is long work of the service.
type Operation struct {
	ID         string          `json:"id"`
	Verb       string          `json:"verb"`
	Ref        string          `json:"ref"`
	By         string          `json:"by"`
	State      string          `json:"state"` // running, done, failed, canceled
	StartedAt  time.Time       `json:"started_at"`
	FinishedAt *time.Time      `json:"finished_at"`
	Progress   Progress        `json:"progress"`
	Result     json.RawMessage `json:"result"` // of one that is done: as the command line prints it with --json
	Error      *Error          `json:"error"`  // of one that failed or was canceled
	Warnings   []string        `json:"warnings"`
}

// Running reports whether the operation has not ended.
func (o *Operation) Running() bool { return o.State == "running" }

// Progress is how far an operation is. Totals are 0 while they are unknown.
type Progress struct {
	Stage      string `json:"stage"`
	Files      int64  `json:"files"`
	Bytes      int64  `json:"bytes"`
	TotalFiles int64  `json:"total_files"`
	TotalBytes int64  `json:"total_bytes"`
	Stalled    string `json:"stalled"` // why it makes no progress at the moment
}

// Event says what was done to an object.
type Event struct {
	Time       time.Time  `json:"time"`
	Verb       string     `json:"verb"`
	Kind       string     `json:"kind"` // volume, snapshot, generation, golden
	Name       string     `json:"name"`
	NameBefore string     `json:"name_before"`
	ObjectID   string     `json:"id"`
	Lineage    string     `json:"lineage"`
	Origin     string     `json:"origin"`
	Mountpoint string     `json:"mountpoint"`
	SizeBytes  int64      `json:"size_bytes"`
	Until      *time.Time `json:"until"`
	OwnerUID   *uint32    `json:"owner_uid"` // user to whom the volume belongs; nil: root
	Remote     string     `json:"remote"`
	UID        uint32     `json:"uid"`
	User       string     `json:"user"`
	SudoUID    *uint32    `json:"sudo_uid"`
	SudoUser   string     `json:"sudo_user"`
	LoginUID   *uint32    `json:"login_uid"`
	LoginUser  string     `json:"login_user"`
	ForUID     *uint32    `json:"for_uid"`  // user for whom the service acted
	ForUser    string     `json:"for_user"` // its name, or the token's
	PID        int        `json:"pid"`
	Command    string     `json:"command"`
	Why        string     `json:"why"` // reason, if nobody has asked for it

	ID  string `json:"-"` // for Events to continue after it; "" in History
	Gap bool   `json:"-"` // no event: events are missing here
}
