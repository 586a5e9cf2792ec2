package proof

import (
	"testing"

	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"
)

// evidenceOf is that of a disk with a volatile cache to which flushes came, and of calls
// of fdatasync; nil: they were not counted.
func evidenceOf(flushes int64, calls map[string]int64) *Evidence {
	disk := blockdev.Device{Kind: blockdev.Disk, VolatileCache: true}
	x := evidence{dev: &device{name: "vda", dev: disk, top: true}}
	x.flush, x.kernel = flushes, flushes
	return &Evidence{
		stack:   &stack.Stack{Layers: []stack.Layer{{Name: "vda", Kind: stack.Kind(blockdev.Disk), Device: &disk}}},
		method:  Tracepoints,
		devices: map[string]evidence{"vda": x},
		calls:   calls,
	}
}

// TestNeeded: what the syncs need is reckoned by those that were made, if these are about
// as many as the load reports.
func TestNeeded(t *testing.T) {
	counted := func(n int64) map[string]int64 { return map[string]int64{"fdatasync": n} }
	for _, c := range []struct {
		name          string
		calls         map[string]int64
		writers       int
		flushes       int64
		needed        int64
		onCalls, disk Result
	}{
		{"all", counted(1000), 1, 1000, 1000, OK, OK},
		{"the last one was only begun", counted(999), 1, 999, 999, OK, OK},
		{"as many as are tolerated", counted(990), 1, 990, 990, OK, OK},
		{"a flush less than calls", counted(999), 1, 998, 999, OK, Fail},
		{"one call less than is tolerated", counted(989), 1, 989, 1000, Fail, Fail},
		{"more calls than reported", counted(1010), 1, 1000, 1000, OK, OK},
		{"of four writers, each only began one", counted(996), 4, 249, 249, OK, OK},
		{"of four writers, a flush less", counted(996), 4, 248, 249, OK, Fail},
		{"no calls at all", counted(0), 1, 0, 1000, Fail, Fail},
		{"calls that were not counted", nil, 1, 999, 1000, Unknown, Fail},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := evidenceOf(c.flushes, c.calls).Judge(Load{Call: "fdatasync", Syncs: 1000, Writers: c.writers})
			l := p.Layers[0]
			if l.Needed != c.needed || l.Result != c.disk || p.Calls.Result != c.onCalls {
				t.Errorf("needed %d, calls %s, disk %s (%s); wanted %d, %s, %s", l.Needed, p.Calls.Result, l.Result, l.Words,
					c.needed, c.onCalls, c.disk)
			}
		})
	}
}
