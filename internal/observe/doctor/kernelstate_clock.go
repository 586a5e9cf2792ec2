package doctor

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// clockState describes the system's clock.
type clockState struct {
	now      time.Time
	synced   bool          // a service has told the kernel that it keeps the clock correct
	offset   time.Duration // being corrected now
	maxError time.Duration // as reported to the kernel
	kernel   string        // why synced, offset and maxError are unknown; "" if they are known
	rtc      time.Time     // the hardware clock; zero: there is none
}

// Bits of the kernel's status word, from adjtimex(2).
const (
	staUnsync = 0x0040
	staNano   = 0x2000
	timeError = 5
)

// builtYear is the year in which this was written: an earlier time is wrong.
const builtYear = 2025

// readClock reads the clocks, and the state of synchronisation.
func readClock() clockState {
	var t unix.Timex // Modes is 0: change nothing
	s := clockState{now: time.Now()}
	state, err := unix.Adjtimex(&t)
	if err != nil {
		s.kernel = fmt.Sprintf("adjtimex: %v", err)
	} else {
		unit := time.Microsecond
		if t.Status&staNano != 0 {
			unit = time.Nanosecond
		}
		s.synced = state != timeError && t.Status&staUnsync == 0
		s.offset = time.Duration(t.Offset) * unit
		s.maxError = time.Duration(t.Maxerror) * time.Microsecond
	}

	if n, ok := readNumber("/sys/class/rtc/rtc0/since_epoch"); ok {
		s.rtc = time.Unix(n, 0)
	}

	return s
}

const whyClock = "Stores of remotes refuse requests whose time differs from theirs by more than a few minutes (S3: " +
	"15), certificates seem not yet valid or expired, and volumes with a time to live expire too early or too late."

// clockCheck reports a clock that is wrong or not synchronised.
func clockCheck(_ context.Context, _ *host, c *Report) error {
	s := readClock()
	s.report(c)
	return nil
}

// report adds figures, findings and the summary to c.
func (s clockState) report(c *Report) {
	offset := microseconds("offset_us", "being corrected", s.offset, s.kernel)
	maxError := microseconds("max_error_us", "maximum error, as reported to the kernel", s.maxError, s.kernel)
	c.measure(words("now", "the clock says", s.now.UTC().Format(time.RFC3339)), offset, maxError)
	keep := []Step{
		step("find out which service sets the clock, and whether it reaches a server",
			"timedatectl status", "chronyc tracking || ntpq -p"),
		step("synchronise the clock", "timedatectl set-ntp true"),
		{Text: "in a virtual machine the clock of the host is good enough: use chrony with `refclock PHC /dev/ptp0` " +
			"(ptp_kvm, hv_utils, AWS, Google Cloud)"},
	}

	// The clock itself.
	if y := s.now.UTC().Year(); y < builtYear || y > builtYear+50 {
		c.find(Finding{Code: "clock-implausible", Severity: Warning,
			Title: fmt.Sprintf("the clock is set to the year %d", y), Why: whyClock,
			Do: append([]Step{step("set it", "date -u -s 'YYYY-MM-DD hh:mm:ss'")}, keep...)})
	}

	if s.kernel == "" && !s.synced {
		c.find(Finding{
			Code: "clock-unsynchronised", Severity: Warning, Title: "the clock is not synchronised", Why: "It drifts by a " +
				"few seconds a week or more, and jumps when a virtual machine is paused. " + whyClock,
			Measured: []Figure{maxError}, Do: keep,
		})
	}

	if d := s.offset.Abs(); s.kernel == "" && d > 500*time.Millisecond {
		c.find(Finding{Code: "clock-offset", Severity: Warning,
			Title: fmt.Sprintf("the clock is off by %s, and is being corrected", d.Round(time.Millisecond)), Why: whyClock,
			Do: keep[:1]})
	}

	// The hardware clock.
	if s.rtc.IsZero() {
		c.measure(unknown("rtc", "hardware clock", Text, "there is none"))
	} else {
		s.reportHardware(c, keep[0])
	}

	state := "synchronised"
	switch {
	case s.kernel != "":
		state = "state unknown (" + s.kernel + ")"
	case !s.synced:
		state = "not synchronised"
	}

	c.Summary = fmt.Sprintf("the clock says %s: %s", s.now.UTC().Format("2006-01-02 15:04:05 MST"), state)
}

// reportHardware compares the clock with the hardware clock.
func (s clockState) reportHardware(c *Report, check Step) {
	f := words("rtc", "hardware clock", s.rtc.UTC().Format(time.RFC3339))
	c.measure(f)

	// A hardware clock in local time differs by a multiple of a quarter of an hour.
	diff := s.now.Sub(s.rtc).Abs()
	rest := diff % (15 * time.Minute)
	local := diff < 15*time.Hour && min(rest, 15*time.Minute-rest) < 30*time.Second && diff > time.Minute
	switch {
	case local:
		c.find(Finding{Code: "clock-rtc-local", Severity: Note, Title: "the hardware clock seems to be kept in local time",
			Measured: []Figure{f}, Why: "After a boot the clock is wrong until it is corrected, and off by an hour when " +
				"summer time begins or ends.", Do: []Step{step("keep it in UTC",
				"timedatectl set-local-rtc 0", "hwclock --systohc --utc")}})
	case diff > 5*time.Minute:
		c.find(Finding{Code: "clock-rtc", Severity: Warning,
			Title:    fmt.Sprintf("clock and hardware clock differ by %s", diff.Round(time.Second)),
			Measured: []Figure{f}, Why: "One of them is wrong; after the next boot the system " +
				"starts with the time of the hardware clock. " + whyClock,
			Do: []Step{check, step("when the clock is correct, set the hardware clock", "hwclock --systohc --utc")}})
	}
}
