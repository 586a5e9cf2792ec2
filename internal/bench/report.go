package bench

import "pando/internal/driver"

// Report is the result of a run. Times are in seconds, sizes in bytes. Its JSON
// form is stable.
type Report struct {
	Pool       PoolReport   `json:"pool"`
	Host       HostReport   `json:"host"`
	Source     SourceReport `json:"source"`
	Clones     int          `json:"clones"`
	Rounds     int          `json:"rounds"`
	Overlay    bool         `json:"overlay"`                      // clones are overlays
	Mounted    bool         `json:"mounted"`                      // the volumes that fill the pool are mounted
	NoFloor    string       `json:"floor_not_measured,omitempty"` // why there is no raw floor
	Operations []Operation  `json:"operations"`
	Series     []Series     `json:"series"`
	// the floor's slower p50 over its faster one in the two series with few volumes: about 1 if the machine was calm; 0:
	// no floor
	Drift     float64   `json:"drift"`
	Commands  []Command `json:"commands"`
	Neighbour []Phase   `json:"neighbour"`
	Targets   []Target  `json:"targets"`
	Kept      string    `json:"kept,omitempty"` // begins the names of what was left
}

// PoolReport describes the pool.
type PoolReport struct {
	Dir        string   `json:"dir"`
	Driver     string   `json:"driver"`
	LoopBacked bool     `json:"loop_backed"`
	TotalBytes int64    `json:"total_bytes"`
	FreeBytes  int64    `json:"free_bytes"`
	Volumes    int      `json:"volumes"` // before the run
	Devices    []Device `json:"devices"`
	NoDevices  string   `json:"devices_not_measured,omitempty"`
}

// HostReport describes the host.
type HostReport struct {
	CPUs        int    `json:"cpus"`
	MemoryBytes int64  `json:"memory_bytes"`
	Kernel      string `json:"kernel"`
}

// SourceReport describes what was copied and cloned.
type SourceReport struct {
	Kind         string    `json:"kind"` // what the source is: directory, golden or generated
	Name         string    `json:"name"`
	Files        int64     `json:"files"` // number of files, without directories
	Bytes        int64     `json:"bytes"` // bytes of data in the files
	FS           driver.FS `json:"fs"`    // filesystem of the golden that was made of it
	Extents      int64     `json:"extents"`
	SizeBytes    int64     `json:"size_bytes"` // size of the golden's block device
	LogicalBytes int64     `json:"logical_bytes"`
}

// Names of operations.
const (
	OpCopy         = "cp -a"
	OpReflink      = "cp -a --reflink"
	OpImport       = "pando golden import"
	OpFloor        = "raw floor: clone + mount"
	OpPando        = "pando: clone + mount"
	OpFloorDestroy = "raw floor: umount + unlink"
	OpPandoDestroy = "pando: destroy"
)

// Operation is a row of the table of what things cost.
type Operation struct {
	Name        string `json:"name"`
	NotMeasured string `json:"not_measured,omitempty"` // why there are no figures
	Wall        Dist   `json:"wall_seconds"`           // until it returned
	// until a syncfs after it returned; count 0: it is durable by itself
	Synced Dist `json:"synced_seconds"`
	// of the processor in the kernel, for one, mean; not that of kernel threads
	Sys       float64       `json:"sys_seconds"`
	MaxRSS    int64         `json:"max_rss_bytes"` // 0: it runs inside this process
	Devices   []DeviceBytes `json:"devices"`
	Tail      *Tail         `json:"tail"`
	TailOf    int           `json:"tail_of"` // operations that Tail and Devices were measured over, one after the other
	NoDevices string        `json:"devices_not_measured,omitempty"`
}

// OthersBytes is the most that other programs wrote a second to one of the disks
// just before an operation was measured: what is said of devices includes that.
func (r *Report) OthersBytes() float64 {
	most := 0.0
	for _, op := range r.Operations {
		for _, d := range op.Devices {
			most = max(most, d.Others)
		}
	}
	return most
}

// Series is a number of clones of the floor and of Pando, taking turns, and of
// their destruction.
type Series struct {
	Volumes      int    `json:"volumes"` // in the pool when it began
	FloorClone   Dist   `json:"floor_clone_seconds"`
	PandoClone   Dist   `json:"pando_clone_seconds"`
	FloorDestroy Dist   `json:"floor_destroy_seconds"`
	FloorForget  Dist   `json:"floor_destroy_and_row_seconds"` // and one row deleted durably
	PandoDestroy Dist   `json:"pando_destroy_seconds"`
	Steps        []Step `json:"floor_steps"`

	pando *Sample
}

// Step is a part of the floor's clone.
type Step struct {
	Name string `json:"name"`
	Dist Dist   `json:"seconds"`
}

// Command is a whole command: a process is started, works and ends.
type Command struct {
	Line    string  `json:"command"`
	Volumes int     `json:"volumes"` // in the pool
	Wall    Dist    `json:"wall_seconds"`
	User    float64 `json:"user_seconds"` // mean
	Sys     float64 `json:"sys_seconds"`  // mean
	MaxRSS  int64   `json:"max_rss_bytes"`
}

// Phase is what the neighbour felt while something happened.
type Phase struct {
	While       string `json:"while"`
	NotMeasured string `json:"not_measured,omitempty"`
	Write       Dist   `json:"write_seconds"` // 8 KiB and fdatasync
}

// Verdicts.
const (
	Pass        = "pass"
	Fail        = "fail"
	NotMeasured = "not_measured"
)

// Relations of Target.
const (
	AtMost   = "at_most"
	LessThan = "less_than"
	AtLeast  = "at_least"
	MoreThan = "more_than"
)

// Units of Target.
const (
	Ratio   = "ratio"
	Seconds = "seconds"
	Bytes   = "bytes"
	Count   = "count"
)

// Target is a claim, and whether it holds here.
type Target struct {
	Name     string   `json:"name"`
	Relation string   `json:"relation"`
	Target   float64  `json:"target"`
	Unit     string   `json:"unit"`
	Measured *float64 `json:"measured"` // null: see Reason
	Verdict  string   `json:"verdict"`
	At       string   `json:"at"`               // the circumstances of the figure
	Reason   string   `json:"reason,omitempty"` // why there is no verdict
}
