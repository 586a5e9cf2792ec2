package doctor

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pando/internal/observe/blockdev"
)

// TestDirtyMemory: this host's true figures, against bounds that they exceed and bounds
// that nothing does.
func TestDirtyMemory(t *testing.T) {
	all := dirtyThresholds{flush: 0, throttle: -1, ioFull: -1, memFull: -1}
	none := dirtyThresholds{flush: 1 << 62, throttle: 1e9, ioFull: 101, memFull: 101}
	r := checkNow(t, dirtyCheck(all), nil)
	threshold, background := value(r.Measured, "threshold"), value(r.Measured, "background")
	if threshold <= 0 || background <= 0 || background > threshold || threshold > float64(meminfo()["MemTotal"]) {
		t.Errorf("writers wait at %v, %v", background, threshold)
	}
	if s, text := r.about("dirty-throttling", ""); s != Warning {
		t.Errorf("%q %s", s, text)
	}
	pressure := parsePressure(readText("/proc/pressure/io"))
	for _, code := range []string{"io-pressure", "memory-pressure"} {
		if s, text := r.about(code, ""); (s == Warning) != pressure.known {
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

func TestPressure(t *testing.T) {
	for text, want := range map[string]pressure{
		"some avg10=0.32 avg60=12.50 avg300=0.43 total=1787864492\nfull avg10=0.20 avg60=7.29 avg300=0.29 " +
			"total=513974156\n": {12.5, 7.29, true},
		"some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n": {0, 0, true},
		"":                    {},
		"some avg60=many\n":   {},
		"avg60=1 nonsense\n":  {},
		"full avg60=3.00 x\n": {0, 3, false},
	} {
		if got := parsePressure(text); got != want {
			t.Errorf("%q: %+v", text, got)
		}
	}
	if p := parsePressure(readText("/proc/pressure/io")); p.known && (p.some < 0 || p.some > 100 || p.full > p.some) {
		t.Error(fmt.Sprint(p))
	}
}
