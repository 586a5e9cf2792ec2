package tracepoint

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestPause: what happens in a pause is not recorded, before and after it is.
func TestPause(t *testing.T) {
	need(t)
	r, err := NewRecorder(Spec{Event: "syscalls:sys_enter_fdatasync"})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	const before, during, after = 987001, 987002, 987003 // no descriptors
	_ = unix.Fdatasync(before)
	if err := r.Pause(); err != nil {
		t.Fatal(err)
	}
	_ = unix.Fdatasync(during)
	if err := r.Resume(); err != nil {
		t.Fatal(err)
	}
	_ = unix.Fdatasync(after)
	records, _, err := r.Read()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[int64]int{}
	for _, x := range records {
		if x.PID == os.Getpid() {
			seen[x.Event.Int(x.Raw, "fd")]++
		}
	}
	if seen[before] != 1 || seen[during] != 0 || seen[after] != 1 {
		t.Errorf("recorded %v", seen)
	}
}

// TestRingPages: the buffers of all processors together are bounded.
func TestRingPages(t *testing.T) {
	for _, c := range [][2]int{{1, 1024}, {2, 1024}, {16, 1024}, {17, 512}, {128, 128}, {4096, 64}} {
		if got := ringPages(c[0]); got != c[1] {
			t.Errorf("%d processors: %d pages, want %d", c[0], got, c[1])
		}
	}
}

// BenchmarkRecorded shows what a recorder costs who is recorded: a system call that does
// nothing, without one, with one that pauses, and with one that records both its ends. The
// figures are those of the fastest of many rounds, which other programs disturb least.
func BenchmarkRecorded(b *testing.B) {
	if err := Available(); err != nil {
		b.Skipf("SKIPPED: %v", err)
	}
	const calls = 10_000
	fastest := func(r *Recorder) float64 {
		best := time.Duration(1 << 62)
		for range max(b.N, 200) {
			start := time.Now()
			for range calls {
				_ = unix.Fdatasync(987004) // no descriptor
			}
			best = min(best, time.Since(start))
			if r != nil {
				if _, _, err := r.Read(); err != nil {
					b.Fatal(err)
				}
			}
		}
		return float64(best.Nanoseconds()) / calls
	}
	without := fastest(nil)
	r, err := NewRecorder(Spec{Event: "syscalls:sys_enter_fdatasync"}, Spec{Event: "syscalls:sys_exit_fdatasync"})
	if err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	recorded := fastest(r)
	if err := r.Pause(); err != nil {
		b.Fatal(err)
	}
	paused := fastest(nil)
	b.ReportMetric(without, "ns/call")
	b.ReportMetric(paused, "ns/call-paused")
	b.ReportMetric(recorded, "ns/call-recorded")
	b.ReportMetric((recorded-paused)/2, "ns/event")
	b.ReportMetric(0, "ns/op")
}
