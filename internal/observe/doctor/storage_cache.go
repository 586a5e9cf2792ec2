package doctor

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"
)

// checkWriteCache finds caches that flushes do not reach.
func checkWriteCache(ctx context.Context, q *HostRequest, c *Report) error {
	devices, err := blockdev.List()
	if err != nil {
		return err
	}

	whole, volatile := 0, 0
	for _, d := range devices {
		if d.Kind == blockdev.Partition {
			continue
		}
		whole++
		if d.VolatileCache {
			volatile++
		}
		c.overridden(d)
	}

	c.Measured = append(c.Measured,
		figure("devices", "block devices", Count, int64(whole)),
		figure("volatile", "with a volatile cache, which is flushed", Count, int64(volatile)))
	if err := c.inMemory(ctx, q); err != nil {
		return err
	}

	pools, why := zpools(ctx)
	logs := 0
	for _, p := range pools {
		n, err := c.logDevices(ctx, p)
		if err != nil {
			why = fmt.Sprintf("the log devices of %s could not be looked at: %v", p, err)
		}
		logs += n
	}

	logText := ""
	if len(pools) > 0 {
		logText = counted(logs, "log device") + " of ZFS"
	}

	c.Summary = sentence(fmt.Sprintf("%s, %d with a volatile cache that is flushed", counted(whole, "block device"),
		volatile), logText, why)
	return ctx.Err()
}

// overridden is about a device whose cache somebody told the kernel not to flush.
func (c *Report) overridden(d blockdev.Device) {
	hardware := d.HiddenCache()
	if hardware == "" {
		return
	}

	set := "/sys/block/" + filepath.Base(strings.ReplaceAll(d.Name, "/", "!")) + "/queue/write_cache"
	f := Finding{
		Code: "write-cache-overridden", Severity: Warning, Subject: d.Path(),
		Title: fmt.Sprintf("%s has a volatile cache, and the kernel was told that it has none: it flushes nothing",
			d.Path()),
		Measured: []Figure{words("write_cache", "the kernel's setting", "write through"),
			words("hardware", "the device itself", hardware)},
		Why: "The setting does not change the device: it makes the kernel drop flushes. That is right only if the cache " +
			"survives a power failure, which the kernel cannot know. " +
			"If it does not, what was synced is lost, and benchmarks of syncs measure the cache.",
		Do: []Step{
			{"look whether the disk protects its cache. Its data sheet says so (PLP, power-loss protection); these programs " +
				"show only whether there is a cache and whether it is on", cacheCommands(d)},
			{"if it does not, let the kernel flush again, and look in udev rules for what sets this",
				[]string{"echo 'write back' > " + set, "grep -r write_cache /etc/udev/rules.d /lib/udev/rules.d"}},
		},
	}

	if d.Kind == blockdev.Loop {
		f.Code, f.Severity = "write-cache-loop", Critical
		f.Title = fmt.Sprintf("%s does not pass syncs on to its file: the kernel was told that it has no cache", d.Path())
		f.Measured = append(f.Measured, words("file", "file", d.Backing))
		f.Why = "What lies below a loop device is a file in this host's page cache. Without flushes nothing that was " +
			"synced above is synced below. " +
			"The setting stays when the file is detached: the next file on this device has it, too."
		f.Do = []Step{{"let the kernel flush again", []string{"echo 'write back' > " + set}}}
	}

	c.find(f)
}

// cacheCommands are programs that show what a disk says of its cache.
func cacheCommands(d blockdev.Device) []string {
	switch d.Transport {
	case "nvme":
		controller, _, _ := strings.Cut(strings.TrimPrefix(d.Name, "nvme"), "n")
		return []string{"nvme id-ctrl /dev/nvme" + controller + " | grep -w vwc",
			"nvme get-feature /dev/nvme" + controller + " -f 6 -H"}
	case "ata":
		return []string{"hdparm -W " + d.Path(), "smartctl -i -g wcache " + d.Path()}
	case "scsi", "usb":
		return []string{"smartctl -i -g wcache " + d.Path(), "sdparm --get=WCE " + d.Path()}
	}
	return []string{"lsblk -o NAME,MODEL,SERIAL " + d.Path()}
}

// inMemory is about filesystems whose disk is memory.
func (c *Report) inMemory(ctx context.Context, q *HostRequest) error {
	all, err := ownFilesystems()
	if err != nil {
		return err
	}

	for _, m := range all {
		if err := ctx.Err(); err != nil {
			return err
		}

		if !onDevices[m.FSType] {
			continue
		}

		d, err := blockdev.Lookup(m.Dev)
		if err != nil { // btrfs
			if d, err = blockdev.LookupPath(m.Source); err != nil {
				continue
			}
		}

		if d.Kind != blockdev.Memory {
			continue
		}

		f := Finding{
			Code: "write-cache-memory", Severity: Note, Subject: m.Point,
			Title: fmt.Sprintf("the %s at %s is in memory (%s): it is gone with the power, synced or not", m.FSType, m.Point,
				d.Name),
			Measured: []Figure{words("device", "disk", d.Path()), figure("size", "size", Bytes, d.SizeBytes)},
			Why:      "Flushes of it are done and save nothing. For what may be lost, that is as good as tmpfs.",
			Do:       []Step{{Text: "keep nothing in it that must survive"}},
		}

		c.find(f)
	}

	if q.Pool == nil || q.Pool.Data == "" {
		return nil
	}

	s, err := stack.Of(ctx, q.Pool.Data)
	if err != nil {
		return nil // other checks say that the pool is not there
	}

	for _, l := range s.Layers {
		if l.Kind == stack.InMemory || l.Device != nil && l.Device.Kind == blockdev.Memory {
			c.find(Finding{
				Code: "write-cache-pool-memory", Severity: Warning, Subject: q.Pool.Dir,
				Title:    fmt.Sprintf("Pando's pool is in memory (%s): all goldens and volumes are gone with the power", l.Name),
				Measured: []Figure{words("layer", "in", l.Name)},
				Why:      "Nothing that is done in it survives a restart of this host.",
				Do: []Step{{"if they must survive, push them to a remote, or make a pool on a disk",
					[]string{"pando push --all", "pando init --help"}}},
			})
			break
		}
	}

	return nil
}

// logDevices is about what ZFS writes syncs to, and returns how many there are.
func (c *Report) logDevices(ctx context.Context, pool string) (int, error) {
	vdevs, err := vdevsOf(ctx, pool)
	if err != nil {
		return 0, err
	}

	n := 0
	for _, v := range vdevs {
		if v.class != "logs" || !strings.HasPrefix(v.path, "/dev/") {
			continue
		}

		n++
		d, err := blockdev.LookupPath(v.path)
		if err != nil {
			continue // not there: check scrub says so
		}
		if !d.VolatileCache {
			continue
		}

		c.find(Finding{
			Code: "write-cache-log", Severity: Note, Subject: v.path,
			Title: fmt.Sprintf("the log device %s of zpool %s has a volatile cache; whether it survives a power failure "+
				"is not known", v.path, pool),
			Measured: []Figure{words("pool", "zpool", pool), words("write_cache", "write cache", "write back"),
				words("transport", "connected by", d.Transport)},
			Why: "ZFS flushes it after each write of its log, so nothing is lost if the disk obeys. But a disk without " +
				"power-loss protection is slow at that, and a cheap one may lie. " +
				"A log device is only as good as its flushes.",
			Do: []Step{
				{"look it up in its data sheet (PLP, power-loss protection); these programs show only whether there is a cache",
					cacheCommands(d)},
				{"measure what a sync costs: a disk with protection does one in some 20 to 100 µs, one without in 1 ms or more",
					[]string{"pando bench sync"}},
			},
		})
	}

	return n, nil
}
