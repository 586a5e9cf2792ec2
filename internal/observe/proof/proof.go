// Package proof shows whether what a program synced reached the disk: at each layer
// below a path, the flushes and forced writes (FUA) that arrived, against those that
// the program's syncs need. What cannot be shown is a failure, never a pass.
package proof

// Result of a layer, or of all.
type Result string

// The results.
const (
	OK        Result = "ok"         // what the syncs need arrived
	Fail      Result = "fail"       // less arrived, or the layer says itself that it does not pass syncs on
	NotNeeded Result = "not needed" // the layer keeps nothing that a flush would have to move on
	Unknown   Result = "unknown"    // it cannot be shown; of the whole this is a failure
)

// Method is how events were counted.
type Method string

// The methods.
const (
	Tracepoints Method = "tracepoints"      // in the kernel, of the layer's device, with who sent them
	Statistics  Method = "block statistics" // of the device, whoever sent them
)

// Proof is what was found during one run.
type Proof struct {
	Method   Method `json:"method"`
	NoTraces string `json:"no_tracepoints,omitempty"` // the reason if own is nil by tracepoints
	Result   Result `json:"result"`
	// Layer names the first layer, from the top, that fails; "" if none does.
	// "system call" is the layer above the filesystem.
	Layer string `json:"layer,omitempty"`
	// Reasons are sentences for people, without full stops, most important first.
	Reasons []string `json:"reasons"`

	Calls   Calls        `json:"calls"`
	Layers  []LayerProof `json:"layers"` // from the top down
	Sample  *Sample      `json:"sample,omitempty"`
	Hidden  string       `json:"hidden,omitempty"` // the reason if own is nilhing is known below the last layer
	Seconds float64      `json:"seconds"`          // that were watched
}

// Calls are the system calls that make data durable.
type Calls struct {
	Reported int64  `json:"reported"` // as the load generator says
	Counted  int64  `json:"counted"`  // as the kernel saw; -1: not counted
	Call     string `json:"call"`     // "fdatasync", "fsync", "write (O_DSYNC)"
	Result   Result `json:"result"`
	Words    string `json:"words"` // a sentence for people
}

// LayerProof is what arrived at a layer.
type LayerProof struct {
	Name   string `json:"name"` // as in stack.Layer
	Kind   string `json:"kind"`
	Depth  int    `json:"depth"`
	Role   string `json:"role,omitempty"`
	Device bool   `json:"device"` // it is a block device, so that something could be counted

	Flushes int64 `json:"flushes"` // -1: not counted; with those before a FUA write
	// writes that go through the cache by themselves, without a flush before; -1: not counted
	FUA          int64 `json:"fua"`
	Writes       int64 `json:"writes"`
	WrittenBytes int64 `json:"written_bytes"`
	// OthersFlushes is how many of Flushes and FUA are surely of other programs
	// (tracepoints), or would be at the rate before the run (statistics).
	OthersFlushes        int64   `json:"others_flushes"`
	OthersBytesPerSecond float64 `json:"others_bytes_per_second"` // written before the run
	// flushes that the syncs need at the least here; 0 if none
	Needed int64 `json:"needed"`
	// FlushSeconds is how long the device took for a flush on average, by the block
	// statistics; 0: not known. A figure too good to be true shows here.
	FlushSeconds  float64 `json:"flush_seconds,omitempty"`
	VolatileCache bool    `json:"volatile_cache"`
	Result        Result  `json:"result"`
	Words         string  `json:"words"` // a sentence for people, without a full stop
}

// Sample is what short looks at single syncs have shown: between the start and the end
// of a sync, was a flush (or forced write) completed at every device that needs one?
type Sample struct {
	Seconds float64 `json:"seconds"`
	Syncs   int64   `json:"syncs"`
	Lost    int64   `json:"lost_events"` // syncs near these are left out
	// Uncovered is the number of syncs without such a flush, by the layer's name.
	Uncovered map[string]int64 `json:"uncovered"`
}
