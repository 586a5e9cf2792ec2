// Package proof proves whether synced data reached the disk: at each layer below a path it compares the flushes and
// forced writes (FUA) that arrived with those that the program's syncs need. A result that cannot be proved is a
// failure, never a pass.
package proof

// Result is the result of a layer, or of the whole.
type Result string

// The results.
const (
	OK        Result = "ok"         // the requests that the syncs need arrived
	Fail      Result = "fail"       // too few arrived, or the settings of the layer drop syncs
	NotNeeded Result = "not needed" // the layer keeps no data that a flush would write
	Unknown   Result = "unknown"    // it cannot be proved; for the whole this is a failure
)

// Method is how events were counted.
type Method string

// The methods.
const (
	Tracepoints Method = "tracepoints"      // in the kernel, by device and sender
	Statistics  Method = "block statistics" // of the device, from any sender
)

// Proof is the result of one run.
type Proof struct {
	Method   Method `json:"method"`
	NoTraces string `json:"no_tracepoints,omitempty"` // the reason if own is nil by tracepoints
	Result   Result `json:"result"`
	// Layer is the first layer, from the top, that fails; "" if none does.
	// "system call" is the layer above the filesystem.
	Layer string `json:"layer,omitempty"`
	// Reasons are sentences for people, without full stops, the most important first.
	Reasons []string `json:"reasons"`

	Calls   Calls        `json:"calls"`
	Layers  []LayerProof `json:"layers"` // from the top down
	Sample  *Sample      `json:"sample,omitempty"`
	Hidden  string       `json:"hidden,omitempty"` // the reason if own is nilhing is known below the last layer
	Seconds float64      `json:"seconds"`          // of the watch
}

// Calls are the system calls that make data durable.
type Calls struct {
	Reported int64  `json:"reported"` // by the load generator
	Counted  int64  `json:"counted"`  // by the kernel; -1: not counted
	Call     string `json:"call"`     // "fdatasync", "fsync", "write (O_DSYNC)"
	Result   Result `json:"result"`
	Words    string `json:"words"` // a sentence for people
}

// LayerProof compares the requests that arrived at a layer with those needed.
type LayerProof struct {
	Name   string `json:"name"` // as in stack.Layer
	Kind   string `json:"kind"`
	Depth  int    `json:"depth"`
	Role   string `json:"role,omitempty"`
	Device bool   `json:"device"` // it is a block device, which has counts

	Flushes int64 `json:"flushes"` // -1: not counted; includes flushes before a FUA write
	// writes through the cache without a flush before; -1: not counted
	FUA          int64 `json:"fua"`
	Writes       int64 `json:"writes"`
	WrittenBytes int64 `json:"written_bytes"`
	// OthersFlushes is the part of Flushes and FUA that is certainly of other programs (tracepoints), or expected at the
	// rate before the run (statistics).
	OthersFlushes        int64   `json:"others_flushes"`
	OthersBytesPerSecond float64 `json:"others_bytes_per_second"` // written before the run
	// the minimum of flushes that the syncs need here; 0 if none
	Needed int64 `json:"needed"`
	// FlushSeconds is the mean duration of a flush, from the block statistics; 0: unknown. Figures that are too good to be
	// true show here.
	FlushSeconds  float64 `json:"flush_seconds,omitempty"`
	VolatileCache bool    `json:"volatile_cache"`
	Result        Result  `json:"result"`
	Words         string  `json:"words"` // a sentence for people, without a full stop
}

// Sample is the result of following single syncs for short times: between the start and the end of a sync, was a flush
// (or forced write) completed at every device that needs one?
type Sample struct {
	Seconds float64 `json:"seconds"`
	Syncs   int64   `json:"syncs"`
	Lost    int64   `json:"lost_events"` // syncs near these are skipped
	// Uncovered is the number of syncs without such a flush, by the layer's name.
	Uncovered map[string]int64 `json:"uncovered"`
}
