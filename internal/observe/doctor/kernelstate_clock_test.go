package doctor

import (
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestClock: what is read is what the kernel says, and each fault that a clock can have
// is a finding, alone. (No test can set the clock of the host that it shares.)
func TestClock(t *testing.T) {
	s := readClock()
	var x unix.Timex
	state, err := unix.Adjtimex(&x)
	if err != nil {
		t.Fatal(err)
	}
	if want := state != timeError && x.Status&staUnsync == 0; s.synced != want || s.kernel != "" {
		t.Errorf("synchronised %v (%s), but state %d, status %#x", s.synced, s.kernel, state, x.Status)
	}
	if d := time.Since(s.now); d < 0 || d > time.Minute {
		t.Errorf("now is %s", s.now)
	}
	r := checkNow(t, clockCheck, nil)
	if severity, text := r.about("clock-unsynchronised", ""); (severity == "") != s.synced {
		t.Errorf("synchronised %v: %q %s", s.synced, severity, text)
	}

	good := clockState{now: time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC), synced: true, offset: 3 * time.Millisecond,
		maxError: 20 * time.Millisecond, rtc: time.Date(2026, 6, 1, 12, 0, 1, 0, time.UTC)}
	for _, c := range []struct {
		what, code string
		change     func(*clockState)
	}{
		{"a good one", "", func(*clockState) {}},
		{"no hardware clock", "", func(s *clockState) { s.rtc = time.Time{} }},
		{"no adjtimex", "", func(s *clockState) { s.kernel, s.synced = "adjtimex: not permitted", false }},
		{"not synchronised", "clock-unsynchronised", func(s *clockState) { s.synced = false }},
		{"an offset", "clock-offset", func(s *clockState) { s.offset = -2 * time.Second }},
		{"1970", "clock-implausible", func(s *clockState) { s.now, s.rtc = time.Unix(1000, 0), time.Unix(1000, 0) }},
		{"far in the future", "clock-implausible", func(s *clockState) {
			s.now = time.Date(2150, 1, 1, 0, 0, 0, 0, time.UTC)
			s.rtc = s.now
		}},
		{"hardware clock in local time", "clock-rtc-local", func(s *clockState) { s.rtc = s.now.Add(2 * time.Hour) }},
		{"hardware clock wrong", "clock-rtc", func(s *clockState) { s.rtc = s.now.Add(-100 * time.Minute) }},
		{"hardware clock a little off", "", func(s *clockState) { s.rtc = s.now.Add(-40 * time.Second) }},
	} {
		s := good
		c.change(&s)
		var k Report
		s.report(&k)
		var codes []string
		for _, f := range k.Findings {
			codes = append(codes, f.Code)
		}
		if got := strings.Join(codes, " "); got != c.code {
			t.Errorf("%s: %q, not %q", c.what, got, c.code)
		}
	}
}
