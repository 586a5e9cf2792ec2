package tracepoint

import (
	"os"
	"testing"

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
