package doctor

import (
	"errors"
	"io/fs"
	"strings"
	"testing"
	"time"

	"pando/internal/linux/kernel"
	"pando/internal/observe/blockdev"

	"golang.org/x/sys/unix"
)

// TestDirtyMemory: this host's true figures, against bounds that they exceed and bounds
// that nothing does.
func TestDirtyMemory(t *testing.T) {
	all := dirtyThresholds{flush: 0, throttle: -1, ioFull: -1, memFull: -1}
	none := dirtyThresholds{flush: 1 << 62, throttle: 1e9, ioFull: 101, memFull: 101}
	r := checkNow(t, dirtyCheck(all), nil)
	threshold, background := value(r.Measured, "threshold"), value(r.Measured, "background")
	if threshold <= 0 || background <= 0 || background > threshold || threshold > memoryBytes(t) {
		t.Errorf("writers wait at %v, %v", background, threshold)
	}
	if s, text := r.about("dirty-throttling", ""); s != Warning {
		t.Errorf("%q %s", s, text)
	}
	_, err := kernel.ReadPressure("io")
	known := err == nil
	for _, code := range []string{"io-pressure", "memory-pressure"} {
		if s, text := r.about(code, ""); (s == Warning) != known {
			t.Errorf("%s: %q %s", code, s, text)
		}
	}
	fast, err := blockdev.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range fast {
		rate := writeRate(d)
		if d.Kind != blockdev.Disk || rate == 0 {
			continue
		}
		s, text := r.about("dirty-threshold", d.Path())
		if s != Note || !strings.Contains(text, "vm.dirty_bytes=") {
			t.Errorf("%s: %q %s", d.Name, s, text)
		}
		for _, f := range r.Findings {
			if f.Subject == d.Path() && f.Code == "dirty-threshold" {
				seconds := value(f.Measured, "seconds")
				if want := threshold / rate; seconds < want/2 || seconds > want*2 {
					t.Errorf("%s takes %v seconds, not %v", d.Name, seconds, want)
				}
				// It is the bound that decides.
				just := none
				just.flush = time.Duration((seconds*4 + 1) * float64(time.Second))
				if s, text := checkNow(t, dirtyCheck(just), nil).about("dirty-threshold", d.Path()); s != "" {
					t.Errorf("%s: %s", d.Name, text)
				}
			}
		}
	}
	for _, f := range checkNow(t, dirtyCheck(none), nil).Findings {
		if f.Code != "swap-on-volume" { // other tests have that
			t.Errorf("%+v", f)
		}
	}
}

// memoryBytes is how much memory the host has.
func memoryBytes(t *testing.T) float64 {
	t.Helper()
	mem, err := kernel.ReadMemory()
	if err != nil {
		t.Fatal(err)
	}
	return float64(mem.Total)
}

// TestPressure: a share of a minute, and all tasks wait no longer than some do.
func TestPressure(t *testing.T) {
	p, err := kernel.ReadPressure("io")
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EOPNOTSUPP) { // not in the kernel, or off since the boot
		t.Skipf("SKIPPED: %v: boot a kernel that has PSI, with psi=1", err)
	}
	if err != nil || p.Some < 0 || p.Some > 100 || p.Full > p.Some {
		t.Error(p, err)
	}
}
