package doctor

import (
	"context"
	"fmt"
	"os"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"
)

// dirtyThresholds are the limits above which dirtyCheck reports writes that pile up.
type dirtyThresholds struct {
	flush    time.Duration // to write all data that may be dirty
	throttle float64       // share of the kernel's threshold that is dirty now, 0 to 1
	ioFull   float64       // percent of the last minute in which all tasks waited for I/O
	memFull  float64       // and for memory
}

var dirtyDefaults = dirtyThresholds{flush: 30 * time.Second, throttle: 0.8, ioFull: 20, memFull: 10}

// minWritten is the number of bytes that a disk must have written since the boot for its rate to be known.
const minWritten = 1 << 30

// writeRate returns how fast a disk has written while it was busy, in bytes per second. It is a lower bound, because
// reads share that time. 0 means that the disk has written less than minWritten.
func writeRate(d blockdev.Device) float64 {
	s, err := d.Stat()
	if err != nil || s.WrittenBytes < minWritten || s.BusyTime <= 0 {
		return 0
	}
	return float64(s.WrittenBytes) / s.BusyTime.Seconds()
}

// dirtyCheck returns a check of dirty data, of the pressure on disks and memory, and of swap space.
func dirtyCheck(t dirtyThresholds) func(context.Context, *host, *Report) error {
	return func(ctx context.Context, _ *host, c *Report) error {
		// Read the thresholds of writeback and the amount of dirty data.
		page := int64(os.Getpagesize())
		threshold := readTable("/proc/vmstat", "nr_dirty_threshold", 1) * page
		if threshold == 0 {
			return skip("/proc/vmstat does not show the thresholds of writeback")
		}

		background := readTable("/proc/vmstat", "nr_dirty_background_threshold", 1) * page
		mem, err := kernel.ReadMemory()
		if err != nil {
			return skip("/proc/meminfo cannot be read")
		}

		now := mem.Dirty + mem.Writeback
		c.measure(figure("dirty", "written but not on disk, now", Bytes, now),
			figure("background", "writeback starts at", Bytes, background),
			figure("threshold", "writers are throttled at", Bytes, threshold),
			percentage("share", "that is, in percent of memory", 100*float64(threshold)/float64(max(mem.Total, 1))))
		summary := c.Measured[:3:3]

		// Compare with what the disks can write.
		devices, err := blockdev.List()
		if err != nil {
			return errs.Wrap("list block devices", "/sys", err)
		}

		for _, d := range devices {
			if rate := writeRate(d); d.Kind == blockdev.Disk && rate > 0 {
				c.findLargeThreshold(d, rate, threshold, t.flush)
			}
		}

		if share := float64(now) / float64(threshold); share > t.throttle {
			c.find(Finding{
				Code: "dirty-throttling", Severity: Warning, Title: fmt.Sprintf("dirty data has reached %.0f %% of its limit: "+
					"writers are being throttled", 100*share), Measured: summary,
				Why: "Beyond the middle of the two thresholds, the kernel delays each writer at each write.",
				Do:  []Step{step("find out which programs write, and how busy the disk is", "pando diagnose PATH")},
			})
		}

		// Find tasks that wait for disks or memory, and swap space that can hang.
		io := c.findPressure("io", "I/O", t.ioFull,
			step("find out what the disks do, and for which programs", "pando diagnose PATH"))
		c.findPressure("memory", "memory", t.memFull,
			step("find the cgroups that cause the pressure",
				"find /sys/fs/cgroup -name memory.pressure | xargs grep -H full | sort -t= -k3 -rn | head"))
		spaces := swaps()
		for _, s := range spaces {
			c.findUnsafeSwap(ctx, s)
		}

		c.Summary = fmt.Sprintf("%s of dirty data, of at most %s; all tasks waited for I/O in %.1f %% of the last minute; "+
			"%s", sizeText(now), sizeText(threshold), io.Full, errs.Plural(len(spaces), "swap space"))
		return nil
	}
}

// findLargeThreshold adds the write rate of a disk to the figures, and a finding if the disk needs longer than limit to
// write as much as may be dirty. rate is in bytes per second, threshold in bytes.
func (c *Report) findLargeThreshold(d blockdev.Device, rate float64, threshold int64, limit time.Duration) {
	c.measure(figure("rate_"+d.Name, d.Name+" write rate while busy, bytes per second, at least", Bytes, int64(rate)))
	seconds := float64(threshold) / rate
	if seconds <= limit.Seconds() {
		return
	}

	want := max(int64(rate*2), 64<<20)
	c.find(Finding{
		Code: "dirty-threshold", Severity: Note, Subject: d.Path(),
		Title: fmt.Sprintf("up to %s of dirty data may gather in memory: %.0f seconds of writing for %s",
			sizeText(threshold), seconds, d.Path()),
		Measured: []Figure{figure("rate", "write rate while busy, bytes per second, at least", Bytes,
			int64(rate)).noted("on average since the boot, reads included"),
			figure("threshold", "that may be dirty", Bytes, threshold),
			known("seconds", "seconds to write that, at most", Count, seconds, seconds)},
		Why: "A sync, an unmount or a reboot then waits until everything ahead of it in the queue is written; writers " +
			"that reach the threshold wait until the amount is below it.",
		Do: []Step{step("start writeback sooner, and limit dirty data to what the disk writes in a few seconds; check the "+
			"throughput afterwards, because programs that overwrite the same data benefit from a high limit",
			fmt.Sprintf("sysctl -w vm.dirty_background_bytes=%d vm.dirty_bytes=%d", want/4, want))},
	})
}

// findPressure reports that all tasks waited for a resource during more than most percent of the last minute. It
// returns the pressure; 0 if the kernel does not report it.
func (c *Report) findPressure(resource, what string, most float64, do Step) kernel.Pressure {
	code := resource + "-pressure"
	p, err := kernel.ReadPressure(resource)
	if err != nil {
		c.measure(unknown(code, "waiting for "+what, Percent, "the kernel does not report it (PSI)"))
		return p
	}

	f := []Figure{percentage(code+"_some", "of the last minute, some task waited for "+what, p.Some),
		percentage(code+"_full", "and all tasks", p.Full)}
	c.measure(f...)
	if p.Full > most {
		c.find(Finding{Code: code, Severity: Warning,
			Title:    fmt.Sprintf("all tasks waited for %s during %.0f %% of the last minute", what, p.Full),
			Measured: f,
			Why:      "Benchmarks and measurements made now mostly show this pressure.", Do: []Step{do}})
	}

	return p
}

// findUnsafeSwap reports swap space on layers that need memory to write.
func (c *Report) findUnsafeSwap(ctx context.Context, s swapSpace) {
	st, err := stack.Of(ctx, s.path)
	if err != nil {
		return // the file was deleted, or is in another namespace
	}

	for _, l := range st.Layers {
		what := needsMemory(l)
		if what == "" {
			continue
		}

		c.find(Finding{
			Code: "swap-on-volume", Severity: Warning, Subject: s.path,
			Title:    fmt.Sprintf("swap space %s lies on %s", printable(s.path), what),
			Measured: []Figure{figure("size", "size", Bytes, s.size), figure("used", "in use", Bytes, s.used)},
			Why: "To write there, the kernel needs memory for the layers in between, and it swaps because it has none: under " +
				"pressure the host can hang for good.",
			Do: []Step{step("remove it, and swap to a partition, a file on the disk's own filesystem, or zram",
				"swapoff "+word(s.path))},
		})

		return
	}
}

// needsMemory names a layer that needs memory to write; "" if it does not.
func needsMemory(l stack.Layer) string {
	switch {
	case l.Kind == stack.Zpool:
		return "a zpool"
	case l.Kind == stack.FUSE || l.Kind == stack.Network:
		return "a filesystem of type " + l.FSType
	case l.Device == nil:
		return ""
	case l.Device.Kind == blockdev.Zvol:
		return "the ZFS volume " + l.Device.Path()
	case l.Device.Kind == blockdev.Loop:
		return "the loop device " + l.Device.Path()
	}
	return ""
}
