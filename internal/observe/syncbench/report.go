// Package syncbench measures what syncing a path costs, in the ways databases do it,
// and shows whether the data reached the disk. The load is made by fio.
package syncbench

import (
	"math"
	"time"

	"pando/internal/observe/proof"
)

// Format is the version of Report's JSON form. It grows when a field changes its
// meaning or goes; a reader refuses a newer one.
const Format = 1

// Verdict in one word.
const (
	Pass = "PASS" // every sync reached the disk, in every run
	// Failed: it did not, or it cannot be shown that it did.
	Failed = "FAIL"
)

// Report is the result of `pando bench sync`. Times are in seconds, sizes in bytes.
// Its JSON form is stable.
type Report struct {
	Kind    string    `json:"kind"` // "pando bench sync"
	Format  int       `json:"format"`
	Pando   string    `json:"pando"` // version
	Started time.Time `json:"started"`
	Path    string    `json:"path"`             // the directory measured
	Volume  string    `json:"volume,omitempty"` // if one was named
	Quick   bool      `json:"quick"`            // shorter than writeback cycles: no verdict on speed
	Seconds float64   `json:"seconds"`          // of each run

	Host    Host    `json:"host"`
	Profile Profile `json:"profile"`
	Layers  []Layer `json:"layers"` // below the path, from the top down
	Runs    []Run   `json:"runs"`
	// Target is set if a p99 to keep was given.
	Target *Target `json:"target,omitempty"`

	Verdict Verdict `json:"verdict"`
}

// Host describes the machine.
type Host struct {
	Name        string `json:"name"`
	CPUs        int    `json:"cpus"`
	MemoryBytes int64  `json:"memory_bytes"`
	Kernel      string `json:"kernel"`
	Fio         string `json:"fio"` // version
}

// Profile says what was done, and what it stands for.
type Profile struct {
	Name    string   `json:"name"`   // "postgres"
	Title   string   `json:"title"`  // "PostgreSQL: a commit, wal_sync_method=fdatasync"
	Models  string   `json:"models"` // sentences: what the database does and how this is like it, with sources
	Sync    string   `json:"sync"`   // the call whose latency is shown: "fdatasync", "fsync", "write (O_DSYNC)"
	Writers int      `json:"writers"`
	Bytes   int64    `json:"block_bytes"` // of a write; 0 if they differ
	File    int64    `json:"file_bytes"`  // of all files
	PerSync int      `json:"writes_per_sync"`
	Command []string `json:"command"` // fio and its arguments, to run it by hand
	// Calls are the system calls by which it does it, for programs: tests compare them
	// with what strace shows.
	Calls Calls `json:"system_calls"`
}

// Layer is a thing below the path, as found before the run.
type Layer struct {
	Name    string `json:"name"`
	Kind    string `json:"kind"`
	Depth   int    `json:"depth"`
	Role    string `json:"role,omitempty"`
	Details string `json:"details"` // for people: "rw,noatime", "volatile write cache, scheduler none"
}

// Run is one run of the profile.
type Run struct {
	Writers int     `json:"writers"`
	Seconds float64 `json:"seconds"` // as measured
	Writes  int64   `json:"writes"`
	Bytes   int64   `json:"bytes"`
	Syncs   int64   `json:"syncs"`
	// WritesPerSecond is fio's IOPS.
	WritesPerSecond float64 `json:"writes_per_second"`
	SyncsPerSecond  float64 `json:"syncs_per_second"`
	// Sync is the latency of what makes a commit durable; Write that of the write
	// before it, which is only memory. With O_DSYNC there is one call: Write is nil.
	Sync  Latency  `json:"sync"`
	Write *Latency `json:"write,omitempty"`

	Timeline []Moment    `json:"timeline"`
	Stalls   []Stall     `json:"stalls"`
	Proof    proof.Proof `json:"proof"`
}

// Latency is a distribution, in seconds.
type Latency struct {
	Count int64   `json:"count"`
	Min   float64 `json:"min"`
	Mean  float64 `json:"mean"`
	P50   float64 `json:"p50"`
	P95   float64 `json:"p95"`
	P99   float64 `json:"p99"`
	P999  float64 `json:"p999"`
	Max   float64 `json:"max"`
	// Indicative names the percentiles, as their fields are named here, above which there are fewer than ten of Count:
	// chance decides them.
	Indicative []string `json:"indicative,omitempty"`
	// Histogram has no empty bins; ascending. A bin is about 1.6 % wide: fio's own.
	Histogram []Bin `json:"histogram"`
}

// percentiles of a Latency, ascending.
var percentileFields = []struct {
	name string // in JSON
	part float64
}{{"p50", 0.5}, {"p95", 0.95}, {"p99", 0.99}, {"p999", 0.999}}

// indicative returns what Indicative says of n latencies.
func indicative(n int64) []string {
	var out []string
	for _, p := range percentileFields {
		if n > 0 && math.Round(float64(n)*(1-p.part)*1e6)/1e6 < 10 {
			out = append(out, p.name)
		}
	}
	return out
}

// Bin counts the latencies around a value (fio's bin), in seconds.
type Bin struct {
	Value float64 `json:"value"`
	Count int64   `json:"count"`
}

// Moment is one interval of the time line, usually a second.
type Moment struct {
	At     float64 `json:"at"`     // its end, seconds from the start of the run
	Length float64 `json:"length"` // seconds
	Syncs  float64 `json:"syncs_per_second"`
	P50    float64 `json:"p50"`
	P99    float64 `json:"p99"`
	Max    float64 `json:"max"`
}

// Stall is a stretch of the time line that is far from the rest.
type Stall struct {
	From  float64 `json:"from"` // seconds from the start of the run
	To    float64 `json:"to"`
	Words string  `json:"words"` // "2 s at 3 % of the median rate; the longest sync took 1.9 s"
}

// Target is the most syncs a second that keep a p99.
type Target struct {
	P99     float64 `json:"p99"` // asked for, in seconds
	Steps   []Step  `json:"steps"`
	Best    float64 `json:"syncs_per_second"` // of the best step that keeps it; 0: none does
	Writers int     `json:"writers"`          // of that step
}

// Step is one measurement of the search.
type Step struct {
	Writers        int     `json:"writers"`
	SyncsPerSecond float64 `json:"syncs_per_second"`
	P99            float64 `json:"p99"`
	Keeps          bool    `json:"keeps"`
}

// Verdict is what it comes to.
type Verdict struct {
	Result string `json:"result"`          // PASS or FAIL
	Layer  string `json:"layer,omitempty"` // that fails
	// sentences without full stops: the reasons, then what to know about the figures
	Words    []string `json:"words"`
	ByDesign string   `json:"by_design,omitempty"` // why it fails wherever syncs arrive: Config.NotDurable
}
