package proof

import (
	"fmt"
	"strings"
)

// callSlack is the share of reported calls that may be uncounted: a load may report calls that it only began.
const callSlack = 0.01

// calls compares the calls that the load reports with those that the kernel counted.
func (j *judge) calls() {
	c := &j.proof.Calls
	*c = Calls{Reported: j.load.Syncs, Counted: -1, Call: j.load.Call}
	if j.load.Syncs == 0 {
		c.Result = Fail
		c.Words = "the load synced nothing: its writes were buffered, and its figures are those of memory: use fsync, " +
			"fdatasync or O_DSYNC"
		if j.Evidence.calls != nil {
			c.Counted = j.called()
		}
		return
	}

	if j.Evidence.calls == nil {
		j.uncounted(c)
		return
	}

	c.Counted = j.called()
	short := j.short()
	saw := fmt.Sprintf("the kernel counted %s of the %s calls of %s that the load "+
		"reports", count(min(c.Counted, c.Reported)),
		count(c.Reported), c.Call)
	switch {
	case short && (j.Evidence.calls["io_uring"] > 0 || j.Evidence.calls["aio"] > 0):
		c.Result = Unknown
		c.Words = saw + ": the others may have been made through io_uring or libaio, where they are not counted"
	case short:
		c.Result = Fail
		c.Words = saw + ": a layer above the kernel swallows them"
		if j.preload != "" {
			c.Words += " (" + j.preload + " is set)"
		}
	case c.Call == dsync && j.Evidence.calls["open with O_DSYNC"] == 0:
		c.Result = Fail
		c.Words = "no file was opened with O_DSYNC or O_SYNC, so the writes were buffered"
		if j.preload != "" {
			c.Words += " (" + j.preload + " is set)"
		}
	default:
		c.Result = OK
		c.Words = fmt.Sprintf("the kernel counted %s calls of %s, the load reports %s", count(c.Counted), c.Call,
			count(c.Reported))
		if n := j.Evidence.calls["sync_file_range"]; n > 0 {
			j.words = append(j.words, fmt.Sprintf("%s calls of sync_file_range make nothing durable and are not counted",
				count(n)))
		}
	}
}

// short reports whether the kernel counted too few of the calls that the load reports.
func (j *judge) short() bool {
	return float64(j.called()) < float64(j.load.Syncs)*(1-callSlack)
}

// syncs returns how many syncs must have arrived: those that the load reports, or the slightly fewer that the kernel
// counted. If it counted too few, something is wrong with the calls, and the load's number is used.
func (j *judge) syncs() int64 {
	if j.Evidence.calls == nil || j.short() {
		return j.load.Syncs
	}
	return min(j.load.Syncs, j.called())
}

// called returns the number of calls of the load's kind.
func (j *judge) called() int64 {
	n := j.Evidence.calls
	switch c := j.load.Call; {
	case c == dsync, strings.HasPrefix(c, "write"):
		return n["write"]
	case c == "fsync", c == "fdatasync", c == "msync", c == "syncfs", c == "sync":
		return n[c]
	}
	return n["fsync"] + n["fdatasync"] + n["msync"] + n["syncfs"]
}

// uncounted judges the calls without the kernel's counters, by their effects.
func (j *judge) uncounted(c *Calls) {
	c.Result, c.Words = Unknown, "not counted, and no layer below shows that they were made: run it as root"
	for _, l := range j.proof.Layers {
		if l.Device && (l.Result == OK || l.Result == NotNeeded) && l.Kind != "partition" {
			c.Result = OK
			c.Words = fmt.Sprintf("not counted (%s), but their effects arrived at %s", j.noTraces, l.Name)
			return
		}
	}
}
