package proof

import (
	"fmt"
	"strings"
)

// callSlack is how many of the calls reported may not have been counted: a load may
// report calls that it only began.
const callSlack = 0.01

// calls compares what the load says with what the kernel saw.
func (j *judge) calls() {
	c := &j.proof.Calls
	*c = Calls{Reported: j.load.Syncs, Counted: -1, Call: j.load.Call}
	if j.load.Syncs == 0 {
		c.Result = Fail
		c.Words = "the load has synced nothing: it was buffered, and its figures are those of memory: use fsync, " +
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
	saw := fmt.Sprintf("the kernel saw %s of the %s calls of %s that the load reports", count(min(c.Counted, c.Reported)),
		count(c.Reported), c.Call)
	switch {
	case short && (j.Evidence.calls["io_uring"] > 0 || j.Evidence.calls["aio"] > 0):
		c.Result = Unknown
		c.Words = saw + ": others may have been made through io_uring or libaio, where they are not counted"
	case short:
		c.Result = Fail
		c.Words = saw + ": something between them and the kernel swallows them"
		if j.preload != "" {
			c.Words += " (" + j.preload + " is set)"
		}
	case c.Call == dsync && j.Evidence.calls["open with O_DSYNC"] == 0:
		c.Result = Fail
		c.Words = "no file was opened with O_DSYNC or O_SYNC, so that the writes were buffered"
		if j.preload != "" {
			c.Words += " (" + j.preload + " is set)"
		}
	default:
		c.Result = OK
		c.Words = fmt.Sprintf("the kernel saw %s calls of %s, the load reports %s", count(c.Counted), c.Call,
			count(c.Reported))
		if n := j.Evidence.calls["sync_file_range"]; n > 0 {
			j.words = append(j.words, fmt.Sprintf("%s calls of sync_file_range make nothing durable, and are not counted",
				count(n)))
		}
	}
}

// short reports whether the kernel saw too few of the calls that the load reports.
func (j *judge) short() bool {
	return float64(j.called()) < float64(j.load.Syncs)*(1-callSlack)
}

// syncs is how many syncs must have arrived: those that the load reports, or the few
// less that the kernel saw. If it saw too few, something is wrong with the calls, and
// what the load reports counts.
func (j *judge) syncs() int64 {
	if j.Evidence.calls == nil || j.short() {
		return j.load.Syncs
	}
	return min(j.load.Syncs, j.called())
}

// called is the number of calls of the load's kind.
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

// uncounted judges the calls where the kernel's counters cannot be had: by what came
// out of them.
func (j *judge) uncounted(c *Calls) {
	c.Result, c.Words = Unknown, "not counted, and nothing below shows that they were made: run it as root"
	for _, l := range j.proof.Layers {
		if l.Device && (l.Result == OK || l.Result == NotNeeded) && l.Kind != "partition" {
			c.Result = OK
			c.Words = fmt.Sprintf("not counted (%s), but what they cause arrived at %s", j.noTraces, l.Name)
			return
		}
	}
}
