package doctor

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"
)

// dirtyThresholds say when writes pile up.
type dirtyThresholds struct {
	flush    time.Duration // that writing out all that may be dirty takes, at least
	throttle float64       // share of the threshold that is dirty now
	ioFull   float64       // percent of the last minute in which all tasks waited for I/O
	memFull  float64       // and for memory
}

var dirtyDefaults = dirtyThresholds{flush: 30 * time.Second, throttle: 0.8, ioFull: 20, memFull: 10}

// vmstat reads /proc/vmstat.
func vmstat() map[string]int64 {
	out := map[string]int64{}
	for line := range strings.Lines(readText("/proc/vmstat")) {
		f := strings.Fields(line)
		if len(f) == 2 {
			if n, err := strconv.ParseInt(f[1], 10, 64); err == nil {
				out[f[0]] = n
			}
		}
	}
	return out
}

// minWritten is what a disk must have written since the boot to say how fast it is.
const minWritten = 1 << 30

// writeRate is how fast a disk has written while it was busy, bytes a second: the
// least that it can, as reads share that time. 0 if it has not written enough.
func writeRate(d blockdev.Device) float64 {
	s, err := d.Stat()
	if err != nil || s.WrittenBytes < minWritten || s.BusyTime <= 0 {
		return 0
	}
	return float64(s.WrittenBytes) / s.BusyTime.Seconds()
}

// dirtyCheck looks at what is written but not on disk, and at swap.
func dirtyCheck(t dirtyThresholds) func(context.Context, *HostRequest, *Report) error {
	return func(ctx context.Context, _ *HostRequest, c *Report) error {
		page := int64(os.Getpagesize())
		vm := vmstat()
		threshold, background := vm["nr_dirty_threshold"]*page, vm["nr_dirty_background_threshold"]*page
		if threshold == 0 {
			return skip("/proc/vmstat does not show the thresholds of writeback")
		}

		mem, err := kernel.ReadMemory()
		if err != nil {
			return skip("/proc/meminfo cannot be read")
		}

		now := mem.Dirty + mem.Writeback
		c.Measured = append(c.Measured,
			figure("dirty", "written but not on disk, now", Bytes, now), figure("background",
				"writeback starts at", Bytes, background),
			figure("threshold", "writers are throttled at", Bytes, threshold), known("share", "that is, in percent of "+
				"memory", Percent,
				100*float64(threshold)/float64(max(mem.Total, 1)), 100*float64(threshold)/float64(max(mem.Total, 1))))

		devices, err := blockdev.List()
		if err != nil {
			return errs.Wrap("list block devices", "/sys", err)
		}

		for _, d := range devices {
			rate := writeRate(d)
			if d.Kind != blockdev.Disk || rate == 0 {
				continue
			}

			seconds := float64(threshold) / rate
			measured := []Figure{figure("rate", "write rate while busy, bytes per second, at least", Bytes,
				int64(rate)).noted("on average since the boot, reads included"),
				figure("threshold", "that may be dirty", Bytes, threshold), known("seconds", "seconds to write that, at most",
					Count, seconds, seconds)}
			c.Measured = append(c.Measured, figure("rate_"+d.Name, d.Name+" write rate while busy, bytes per second, at "+
				"least", Bytes,
				int64(rate)))
			if seconds <= t.flush.Seconds() {
				continue
			}

			want := max(int64(rate*2), 64<<20)
			c.find(Finding{
				Code: "dirty-threshold", Severity: Note, Subject: d.Path(), Measured: measured,
				Title: fmt.Sprintf("up to %s of dirty data may gather in memory: %.0f seconds of writing for %s", mib(threshold),
					seconds, d.Path()),
				Why: "A sync, an unmount or a reboot then waits until everything ahead of it in the queue is written; writers " +
					"that reach the threshold wait until the amount is below it.",
				Do: []Step{{"start writeback sooner, and limit dirty data to what the disk writes in a few seconds; check the " +
					"throughput afterwards, because programs that overwrite the same data benefit from a high limit",
					[]string{fmt.Sprintf("sysctl -w vm.dirty_background_bytes=%d vm.dirty_bytes=%d", want/4, want)}}},
			})
		}

		if share := float64(now) / float64(threshold); share > t.throttle {
			c.find(Finding{
				Code: "dirty-throttling", Severity: Warning, Title: fmt.Sprintf("dirty data has reached %.0f %% of its limit: "+
					"writers are being throttled", 100*share), Measured: c.Measured[:3:3],
				Why: "Beyond the middle of the two thresholds, the kernel delays each writer at each write.",
				Do:  []Step{{"find out which programs write, and how busy the disk is", []string{"pando diagnose PATH"}}},
			})
		}

		pressed := func(code, what, resource string, most float64, do Step) {
			p, err := kernel.ReadPressure(resource)
			if err != nil {
				c.Measured = append(c.Measured, unknown(code, "waiting for "+what, Percent, "the kernel does not report it (PSI)"))
				return
			}

			f := []Figure{percentage(code+"_some", "of the last minute, some task waited for "+what, p.Some),
				percentage(code+"_full", "and all tasks", p.Full)}
			c.Measured = append(c.Measured, f...)
			if p.Full > most {
				c.find(Finding{Code: code, Severity: Warning,
					Title: fmt.Sprintf("all tasks waited for %[2]s during %.0[1]f %% of the last minute", p.Full,
						what), Measured: f,
					Why: "Benchmarks and measurements made now mostly show this pressure.", Do: []Step{do}})
			}
		}

		pressed("io-pressure", "I/O", "io", t.ioFull,
			Step{"find out what the disks do, and for which programs", []string{"pando diagnose PATH"}})
		pressed("memory-pressure", "memory", "memory", t.memFull,
			Step{"find the cgroups that cause the pressure",
				[]string{"find /sys/fs/cgroup -name memory.pressure | xargs grep -H full | sort -t= -k3 -rn | head"}})
		spaces := swaps()
		for _, s := range spaces {
			swapFinding(ctx, c, s)
		}

		io, _ := kernel.ReadPressure("io") // 0 if it is unknown, as said above
		c.Summary = fmt.Sprintf("%s of dirty data, of at most %s; all tasks waited for I/O in %.1f %% of the last minute; "+
			"%s", mib(now), mib(threshold), io.Full, counted(len(spaces), "swap space"))
		return nil
	}
}

// swapFinding reports swap space on layers that need memory to write.
func swapFinding(ctx context.Context, c *Report, s swapSpace) {
	st, err := stack.Of(ctx, s.path)
	if err != nil {
		return // deleted, or in another namespace
	}

	for _, l := range st.Layers {
		what := ""
		switch {
		case l.Device == nil:
		case l.Device.Kind == blockdev.Zvol:
			what = "the ZFS volume " + l.Device.Path()
		case l.Device.Kind == blockdev.Loop:
			what = "the loop device " + l.Device.Path()
		}

		if l.Kind == stack.FUSE || l.Kind == stack.Network || l.Kind == stack.Zpool {
			what = "a filesystem of type " + l.FSType
			if l.Kind == stack.Zpool {
				what = "a zpool"
			}
		}

		if what == "" {
			continue
		}

		c.find(Finding{
			Code: "swap-on-volume", Severity: Warning, Subject: s.path,
			Title:    fmt.Sprintf("swap space %s lies on %s", printable(s.path), what),
			Measured: []Figure{figure("size", "size", Bytes, s.size), figure("used", "in use", Bytes, s.used)},
			Why: "To write there, the kernel needs memory for the layers in between, and it swaps because it has none: under " +
				"pressure the host can hang for good.",
			Do: []Step{{"remove it, and swap to a partition, a file on the disk's own filesystem, or zram",
				[]string{"swapoff " + word(s.path)}}},
		})

		return
	}
}
