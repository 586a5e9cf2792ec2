package doctor

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"
)

// checkWriteCache finds caches that are never flushed, and disks in memory.
func checkWriteCache(ctx context.Context, q *host, c *Report) error {
	devices, err := blockdev.List()
	if err != nil {
		return err
	}

	// Block devices.
	whole, volatile := 0, 0
	for _, d := range devices {
		if d.Kind == blockdev.Partition {
			continue
		}
		whole++
		if d.VolatileCache {
			volatile++
		}
		c.findOverriddenCache(d)
	}

	c.measure(count("devices", "block devices", whole),
		count("volatile", "with a volatile cache, which is flushed", volatile))
	if err := c.findMemoryDisks(ctx); err != nil {
		return err
	}

	c.findPoolInMemory(ctx, q.Pool)

	// Log devices of zpools.
	pools, why := zpools(ctx)
	logs := 0
	for _, p := range pools {
		n, err := c.findLogs(ctx, p)
		if err != nil {
			why = fmt.Sprintf("the log devices of %s could not be checked: %v", p, err)
		}
		logs += n
	}

	logText := ""
	if len(pools) > 0 {
		logText = errs.Plural(logs, "log device") + " of ZFS"
	}

	c.Summary = errs.JoinSet("; ", fmt.Sprintf("%s, %d with a volatile cache that is flushed",
		errs.Plural(whole, "block device"),
		volatile), logText, why)
	return ctx.Err()
}

// findOverriddenCache reports a device with a volatile cache that the kernel is set not to flush.
func (c *Report) findOverriddenCache(d blockdev.Device) {
	hardware := d.HiddenCache()
	if hardware == "" {
		return
	}

	set := "/sys/block/" + filepath.Base(strings.ReplaceAll(d.Name, "/", "!")) + "/queue/write_cache"
	f := Finding{
		Code: "write-cache-overridden", Severity: Warning, Subject: d.Path(),
		Title: fmt.Sprintf("%s has a volatile cache, but the kernel is set to assume none: it never flushes the cache",
			d.Path()),
		Measured: []Figure{words("write_cache", "the kernel's setting", "write through"),
			words("hardware", "the device itself", hardware)},
		Why: "The setting does not change the device: it makes the kernel drop flushes. That is safe only if the cache " +
			"survives a power failure, which the kernel cannot know. Otherwise synced data is lost, and benchmarks of syncs " +
			"measure the cache.",
		Do: []Step{
			step("check the data sheet of the disk for power-loss protection (PLP); these commands only show whether it has a "+
				"cache, and whether the cache is on", cacheCommands(d)...),
			step("without PLP, let the kernel flush again, and search the udev rules for this setting",
				"echo 'write back' > "+set, "grep -r write_cache /etc/udev/rules.d /lib/udev/rules.d"),
		},
	}

	// Below a loop device there is always a cache.
	if d.Kind == blockdev.Loop {
		f.Code, f.Severity = "write-cache-loop", Critical
		f.Title = fmt.Sprintf("%s does not pass syncs on to its file: the kernel is set to assume that it has no "+
			"cache", d.Path())
		f.measure(words("file", "file", d.Backing))
		f.Why = "Below a loop device is a file in this host's page cache. Without flushes, data synced above is not " +
			"synced below. The setting survives a detach: it also applies to the next file on this device."
		f.Do = []Step{step("let the kernel flush again", "echo 'write back' > "+set)}
	}

	c.find(f)
}

// cacheCommands returns commands that show what a disk reports about its cache.
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

// findMemoryDisks reports filesystems whose disk is memory.
func (c *Report) findMemoryDisks(ctx context.Context) error {
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
		if err != nil { // the device numbers of btrfs are of no device
			if d, err = blockdev.LookupPath(m.Source); err != nil {
				continue
			}
		}

		if d.Kind != blockdev.Memory {
			continue
		}

		c.find(Finding{
			Code: "write-cache-memory", Severity: Note, Subject: m.Point,
			Title: fmt.Sprintf("the %s at %s is in memory (%s): a power failure loses it, even if synced", m.FSType, m.Point,
				d.Name),
			Measured: []Figure{words("device", "disk", d.Path()), figure("size", "size", Bytes, d.SizeBytes)},
			Why:      "Flushes of it succeed, but save nothing. For disposable data that is as good as tmpfs.",
			Do:       []Step{{Text: "keep no data in it that must survive"}},
		})
	}

	return nil
}

// findPoolInMemory reports a pool on a layer that is memory.
func (c *Report) findPoolInMemory(ctx context.Context, pool *PoolFacts) {
	if pool == nil || pool.Data == "" {
		return
	}

	s, err := stack.Of(ctx, pool.Data)
	if err != nil {
		return // other checks report a missing pool
	}

	for _, l := range s.Layers {
		if l.Kind == stack.InMemory || l.Device != nil && l.Device.Kind == blockdev.Memory {
			c.find(Finding{
				Code: "write-cache-pool-memory", Severity: Warning, Subject: pool.Dir,
				Title:    fmt.Sprintf("the pool is in memory (%s): a power failure loses all goldens and volumes", l.Name),
				Measured: []Figure{words("layer", "in", l.Name)},
				Why:      "Nothing in it survives a restart of this host.",
				Do: []Step{step("if they must survive, push them to a remote, or create a pool on a disk",
					"pando push --all", "pando init --help")},
			})
			return
		}
	}
}

// findLogs reports log devices of a zpool whose failure can lose data. It returns the number of its log devices.
func (c *Report) findLogs(ctx context.Context, pool string) (int, error) {
	vdevs, err := vdevsOf(ctx, pool)
	if err != nil {
		return 0, err
	}
	c.findSingleLogs(pool, vdevs)
	return c.findVolatileLogs(pool, vdevs), nil
}

// findSingleLogs reports the log devices of a zpool that are not mirrored.
func (c *Report) findSingleLogs(pool string, vdevs []vdev) {
	var single []string
	for _, v := range vdevs {
		if v.class == "logs" && v.path != "" && v.top == v.name {
			single = append(single, v.path)
		}
	}
	if len(single) == 0 {
		return
	}

	c.find(Finding{
		Code: "write-cache-log-single", Severity: Warning, Subject: pool,
		Title: fmt.Sprintf("zpool %s has %s without a mirror", pool, errs.Plural(len(single), "log device")),
		Measured: []Figure{count("devices", "log devices without a mirror", len(single)),
			words("paths", "log devices", strings.Join(single, " "))},
		Why: "Until the next transaction group, some seconds, synced data is only in memory and on the log device. If the " +
			"device is lost together with the memory, as when a power failure kills it, programs lose what they were told " +
			"was durable, and the pool needs a manual import.",
		Do: []Step{step("attach a second device, preferably with power-loss protection",
			"zpool attach "+word(pool)+" "+word(single[0])+" NEWDISK")},
	})
}

// findVolatileLogs reports log devices of a zpool with a volatile cache. It returns the number of its log devices.
func (c *Report) findVolatileLogs(pool string, vdevs []vdev) int {
	n := 0
	for _, v := range vdevs {
		if v.class != "logs" || !strings.HasPrefix(v.path, "/dev/") {
			continue
		}

		n++
		d, err := blockdev.LookupPath(v.path)
		if err != nil {
			continue // check scrub reports missing devices
		}
		if !d.VolatileCache {
			continue
		}

		c.find(Finding{
			Code: "write-cache-log", Severity: Note, Subject: v.path,
			Title: fmt.Sprintf("the log device %s of zpool %s has a volatile cache, which may not survive a power "+
				"failure", v.path, pool),
			Measured: []Figure{words("pool", "zpool", pool), words("write_cache", "write cache", "write back"),
				words("transport", "connected by", d.Transport)},
			Why: "ZFS flushes it after each write of its log, so nothing is lost if the disk obeys. But disks without " +
				"power-loss protection flush slowly, and cheap ones may ignore flushes.",
			Do: []Step{
				step("check its data sheet for power-loss protection (PLP); these commands only show whether it has a cache",
					cacheCommands(d)...),
				step("measure the duration of a sync: 20 to 100 µs with power-loss protection, 1 ms or more without",
					"pando bench sync"),
			},
		})
	}

	return n
}
