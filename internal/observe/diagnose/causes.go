package diagnose

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/observe/blockdev"
)

func (w *watch) addCause(c Cause) { w.report.Causes = append(w.report.Causes, c) }

// addMeasured adds a cause if the share it explains is large enough, and scores it by that share.
func (w *watch) addMeasured(c Cause) {
	if c.Share < leastShare {
		return
	}
	c.Share = min(1, c.Share)
	c.Confidence, c.score = Likely, c.Share
	w.addCause(c)
}

// addPossible adds a cause that is present, but whose share of the time is unknown. Its score is set already.
func (w *watch) addPossible(c Cause) {
	c.Share, c.Confidence = -1, Possible
	w.addCause(c)
}

// causes finds all causes and ranks them.
func (w *watch) causes() {
	w.arrival()
	w.failures()
	w.throttled()
	w.heldBack()
	w.neighbours()
	w.crowd()
	w.discards()
	w.running()
	w.slowParts()
	w.queues()
	w.commits()
	w.starved()
	w.full()

	// Look for fragments in the files that are synced most.
	var files []string
	perSync := 0.0
	if t := w.tracer; t != nil {
		for _, p := range w.report.Syncs.Processes {
			if p.Relation == Here && len(files) < 8 && p.File != "" {
				files = append(files, p.File)
			}
		}
		if len(t.flight.devices) > 0 && t.here.n > 0 {
			_, f := t.top()
			perSync = float64(f.requests) / float64(t.here.n)
		}
	}

	if w.file != 0 && !slices.Contains(files, w.stack.Path) {
		files = append(files, w.stack.Path)
	}

	w.fragments(files, perSync)

	slices.SortStableFunc(w.report.Causes, func(a, b Cause) int { return cmp.Compare(b.score, a.score) })
	for i := range w.report.Causes {
		w.report.Causes[i].Rank = i + 1
	}
}

// arrival adds a cause if far fewer flushes reach the uppermost device than files are synced.
func (w *watch) arrival() {
	t := w.tracer
	if t == nil || len(t.flight.devices) == 0 || t.here.n < 50 {
		return
	}

	top, f := t.top()
	line := fmt.Sprintf("flushes that %s received during %d recorded syncs of files here: %d", top, t.here.n, f.flushes)
	for i, c := range w.report.Causes {
		if c.score == scoreLie {
			w.report.Causes[i].Evidence = append(c.Evidence, line)
		}
	}

	threads := 0
	for key, p := range t.procs {
		if key.rel == Here {
			threads += len(p.tids)
		}
	}

	volatile := slices.ContainsFunc(w.stack.Devices(), func(l stackLayer) bool { return l.Device.VolatileCache })

	// Threads that sync at the same time share a flush; without data to write (f.bytes) none is needed.
	if !volatile || slices.ContainsFunc(w.report.Causes, func(c Cause) bool { return c.score == scoreLie }) ||
		f.bytes == 0 || float64(f.flushes) >= 0.05*float64(t.here.n)/float64(max(threads, 1)) {
		return
	}

	w.addCause(Cause{
		Code: "flushes-missing", Share: -1, Confidence: Likely, Title: "syncs return, but hardly a flush reaches " + top +
			": a power failure may lose synced data",
		Evidence: []string{line}, score: scoreLie,
		Next: []string{"`pando bench sync " + w.benchPath() + "` shows the layer that drops them"},
	})
}

// benchPath returns the directory for the benchmark.
func (w *watch) benchPath() string {
	if w.file != 0 {
		return filepath.Dir(w.stack.Path)
	}
	return w.stack.Path
}

// failures adds a cause for each device whose requests fail.
func (w *watch) failures() {
	for _, d := range w.report.Devices {
		if d.Errors > 0 {
			w.addCause(Cause{
				Code: "device-errors", Share: -1, Confidence: Certain, Title: "requests to " + d.Name + " fail",
				Evidence: []string{fmt.Sprintf("%d failed in %.0f s", d.Errors, w.elapsed.Seconds())},
				Next:     []string{"`dmesg | grep " + d.Name + "`", "save the data before you look for speed"}, score: scoreErrors,
			})
		}
	}
}

// throttled finds limits on the control groups of the processes that sync.
func (w *watch) throttled() {
	t := w.tracer
	if t == nil {
		return
	}

	seen := map[limit]bool{}
	for key, p := range t.procs {
		if key.rel != Here {
			continue
		}

		for _, l := range limitsOf(p.groups) {
			i := slices.IndexFunc(w.stack.Devices(), func(x stackLayer) bool { return x.Device.ID() == l.device })
			if i < 0 || seen[l] {
				continue
			}

			seen[l] = true
			io, was := w.stop.groups[ioKey{l.dir, l.device}], w.start.groups[ioKey{l.dir, l.device}]
			used := float64(io.bytes - was.bytes)
			if l.what == "requests" {
				used = float64(io.requests - was.requests)
			}

			used /= max(w.elapsed.Seconds(), 1e-3)
			const close = 0.7
			if used < close*float64(l.perSecond) {
				continue
			}

			// Time in which the device had nothing to do is due to the limit.
			device := w.stack.Devices()[i]
			share := 1.0
			if place, _ := t.deviceOf(device.Device.Number); place >= 0 {
				share = 1 - w.share(t.flight.of(place, sumBusy))
			}

			w.addMeasured(Cause{
				Code: "cgroup-limit", Share: share, Title: fmt.Sprintf("%s is throttled by a limit on its control group: %d %s "+
					"per second to %s", p.command, l.perSecond, l.what, device.Name),
				Evidence: []string{
					filepath.Join(l.dir, l.setting) + ": " + fmt.Sprintf("%s %d", l.device, l.perSecond),
					fmt.Sprintf("it used %.0f of them per second", used),
					fmt.Sprintf("%[2]s was idle for %[1]s of the time of the syncs", percent(share), device.Name),
				},
				Next: []string{"`cat " + filepath.Join(l.dir, l.setting) + "`",
					"raise the limit, or write less: the limit is slow, not the disk"},
			})
		}
	}
}

func percent(share float64) string { return fmt.Sprintf("%.0f %%", 100*share) }

func seconds(s float64) string {
	switch {
	case s < 1e-3:
		return fmt.Sprintf("%.0f µs", s*1e6)
	case s < 1:
		return fmt.Sprintf("%.1f ms", s*1e3)
	}
	return fmt.Sprintf("%.1f s", s)
}

// heldBack finds writers that the kernel throttles because too much data is dirty.
func (w *watch) heldBack() {
	if z := w.zfs; z != nil {
		w.heldBackZFS(z)
	}

	if w.dirty == nil {
		return
	}

	// Rank the throttled processes by how long they waited.
	type one struct {
		key dirtyKey
		*pauses
	}
	var list []one
	for key, p := range w.dirty.paused {
		list = append(list, one{key, p})
	}

	slices.SortFunc(list, func(a, b one) int { return cmp.Compare(b.total, a.total) })
	if len(list) == 0 {
		return
	}

	// Describe them, and add up the time of those that sync here.
	var evidence []string
	here := time.Duration(0)
	for _, x := range list {
		if len(evidence) < 5 {
			evidence = append(evidence,
				fmt.Sprintf("%s (pid %d) was throttled %d times while writing to %s, %s in all, at most %s",
					x.command, x.key.pid, x.n, w.dirty.layers[x.key.bdi], x.total.Round(time.Millisecond), x.most))
		}
		if w.tracer != nil && w.tracer.procs[procKey{x.key.pid, Here}] != nil {
			here += x.total
		}
	}

	const page = 4096
	evidence = append(evidence,
		fmt.Sprintf("at the last pause, %d MiB of dirty data were for this device, and the kernel aims for %d MiB; the "+
			"maximum on the whole host was %d MiB", list[0].dirty*page>>20, list[0].aim*page>>20, w.report.Host.DirtyBytes>>20))
	c := Cause{
		Code: "dirty-throttle", Title: "writers are throttled: they write faster than the device", Evidence: evidence,
		Next: []string{"`grep -E 'Dirty|Writeback' /proc/meminfo`",
			"`sysctl vm.dirty_ratio vm.dirty_background_ratio`, and /sys/class/bdi/" + list[0].key.bdi + "/max_ratio",
			"make the writer sync more often, so that less piles up, or use direct I/O"},
	}

	// Score the cause by that time or, if others were throttled, by how long the first of them was.
	syncs := time.Duration(w.report.Syncs.Mean * float64(w.report.Syncs.Count) * 1e9)
	switch {
	case here > 0 && w.report.Syncs.Count > 0:
		// The share is of the time in which the writer waited for storage.
		c.Share = float64(here) / float64(here+syncs)
		w.addMeasured(c)
	default:
		part := float64(list[0].total) / float64(max(w.elapsed, 1))
		if c.score = scoreThrottled * min(1, part); part >= leastShare {
			w.addPossible(c)
		}
	}
}

// heldBackZFS adds a cause if counters of ZFS show that it throttled writers.
func (w *watch) heldBackZFS(z *zfsFacts) {
	now := kstat("/proc/spl/kstat/zfs/dmu_tx")
	var evidence []string
	for _, name := range []string{"dmu_tx_dirty_throttle", "dmu_tx_dirty_delay", "dmu_tx_dirty_over_max",
		"dmu_tx_memory_reserve", "dmu_tx_memory_reclaim"} {
		if n := now[name] - z.tx[name]; n > 0 {
			evidence = append(evidence, fmt.Sprintf("%s grew by %d (of all zpools)", name, n))
		}
	}

	if evidence != nil {
		w.addPossible(Cause{
			Code: "dirty-throttle", Title: "ZFS throttles writers: dirty data exceeds its limits",
			Evidence: evidence, score: scoreThrottledZFS,
			Next: []string{"`cat /proc/spl/kstat/zfs/dmu_tx`", "`cat /sys/module/zfs/parameters/zfs_dirty_data_max`",
				"`zpool iostat -vl " + z.pool + " 5`: are the data disks slow?"},
		})
	}
}

// neighbours finds the device that worked most for other processes during the syncs.
func (w *watch) neighbours() {
	t := w.tracer
	if t == nil {
		return
	}

	best, share := -1, 0.0
	for i := range t.flight.devices {
		if s := w.share(t.flight.of(i, sumOthers)); s > share {
			best, share = i, s
		}
	}

	if best < 0 {
		return
	}

	d := t.flight.devices[best]
	who, evidence := w.otherProcesses()
	evidence = append(evidence, fmt.Sprintf("%s worked for other processes during %s of the time of the syncs",
		d.name, percent(share)))
	w.addMeasured(Cause{
		Code: "neighbour", Share: share, Title: "other processes keep " + d.name + " busy: " + who, Evidence: evidence,
		Next: []string{"limit its control group (io.max, or blkio.throttle.write_iops_device), or move it to another disk",
			"`pando iostat` shows the writes of each volume"},
	})
}

// otherProcesses describes the processes and control groups that sync or write elsewhere, and names the busiest.
func (w *watch) otherProcesses() (busiest string, evidence []string) {
	name := func(command string, pid int, group string) string {
		s := fmt.Sprintf("%s (pid %d", command, pid)
		if group != "" && group != "/" {
			s += ", control group " + group
		}
		return s + ")"
	}

	// Those that sync come first.
	for _, p := range w.report.Syncs.Processes {
		if p.Relation == Here || len(evidence) >= 4 {
			continue
		}
		n := name(p.Command, p.PID, p.CGroup)
		if busiest == "" {
			busiest = n
		}
		evidence = append(evidence, fmt.Sprintf("%s syncs %s %.0f times per second", n, p.File, p.PerSecond))
	}

	// Then those that only write.
	for _, x := range w.report.Writers {
		if x.Here || len(evidence) >= 8 || x.Requests < 1 {
			continue
		}

		n := x.Name
		switch x.Kind {
		case "process":
			if x.PID == 0 {
				continue
			}
			n = name(x.Name, x.PID, x.CGroup)
		case "cgroup":
			if x.Name == "/" {
				continue
			}
			n = "control group " + x.Name
		}

		if busiest == "" {
			busiest = n
		}

		evidence = append(evidence, fmt.Sprintf("%s: %.0f requests and %.0f flushes per second", n, x.Requests, x.Flushes))
	}

	return cmp.Or(busiest, "other processes"), evidence
}

// crowd adds a cause if several control groups sync below the path, and one of them makes most of the syncs.
func (w *watch) crowd() {
	// Count the syncs of each control group.
	groups := map[string]int64{}
	var all int64
	var busiest *Process
	for i, p := range w.report.Syncs.Processes {
		if p.Relation != Here {
			continue
		}
		if busiest == nil { // sorted, the busiest first
			busiest = &w.report.Syncs.Processes[i]
		}
		groups[p.CGroup] += p.Sampled
		all += p.Sampled
	}

	const most = 0.5
	if len(groups) < 2 || all == 0 || float64(groups[busiest.CGroup]) < most*float64(all) {
		return
	}

	// Describe them.
	part := float64(groups[busiest.CGroup]) / float64(all)
	c := Cause{
		Code: "crowd", Title: fmt.Sprintf("%d control groups sync here; %s of the syncs come from %s", len(groups),
			percent(part), busiest.CGroup), score: scoreCrowd * part,
		Next: []string{"`pando diagnose` on the directory of one of them shows how the others slow it down"},
	}

	for _, p := range w.report.Syncs.Processes {
		if p.Relation == Here && len(c.Evidence) < 5 {
			c.Evidence = append(c.Evidence,
				fmt.Sprintf("%s (pid %d, control group %s) syncs %s %.0f times per second, in %s on average", p.Command, p.PID,
					p.CGroup, p.File, p.PerSecond, seconds(p.Mean)))
		}
	}

	w.addPossible(c)
}

// discards adds a cause if discards of free space keep a device busy.
func (w *watch) discards() {
	// Find the device whose discards took most of the time of the syncs.
	t := w.tracer
	best, share := "", 0.0
	var d Device
	for _, x := range w.report.Devices {
		s := 0.0
		if t != nil {
			for _, l := range w.stack.Devices() {
				if i, _ := t.deviceOf(l.Device.Number); l.Name == x.Name && i >= 0 {
					s = w.share(t.flight.of(i, sumDiscard))
				}
			}
		}
		if x.DiscardsPerSecond > 0 && s >= share {
			best, share, d = x.Name, s, x
		}
	}

	if best == "" {
		return
	}

	// Describe its discards, and who sent them.
	took := w.stop.devices[best].Minus(w.start.devices[best]).DiscardTime
	busy := took.Seconds() / max(w.elapsed.Seconds(), 1e-3)
	c := Cause{
		Code: "discard", Share: share, Title: "discards of free space keep " + best + " busy (fstrim, or the mount option " +
			"discard)",
		Evidence: []string{fmt.Sprintf("%.0f discards per second, %d MiB in all; together they took %s", d.DiscardsPerSecond,
			d.DiscardedBytes>>20, took.Round(time.Millisecond))},
		Next: []string{"run `fstrim` at a quiet time, and remove the mount option discard",
			"`systemctl list-timers fstrim.timer`"},
	}

	if t != nil {
		var keys []senderKey
		for key, s := range t.senders {
			if key.dev.name == best && s.discards > 0 {
				keys = append(keys, key)
			}
		}
		slices.SortFunc(keys, func(a, b senderKey) int { return cmp.Compare(t.senders[b].discards, t.senders[a].discards) })
		for _, key := range keys[:min(len(keys), 4)] {
			s := t.senders[key]
			c.Evidence = append(c.Evidence, fmt.Sprintf("%s (pid %d) sent %d of them while events were recorded", s.command,
				key.pid, s.discards))
		}
	}

	// Without a share of the syncs, use the share of all time.
	switch {
	case share >= leastShare:
		w.addMeasured(c)
	case busy >= leastShare:
		c.score = scoreRunning * min(1, busy)
		w.addPossible(c)
	}
}

// running adds the maintenance that filesystems and pools were doing, such as scrubs.
func (w *watch) running() {
	for _, o := range w.ops {
		part := min(1, float64(o.seen)/float64(max(w.looks, 1)))
		if strings.Contains(o.title, "zpool") {
			part = 1 // sampled at the start and at the end only
		}
		const least = 0.05
		if part < least {
			continue
		}
		w.addPossible(Cause{Code: o.code, Title: o.title,
			Evidence: []string{fmt.Sprintf("it was running in %s of the samples", percent(part)),
				o.detail}, Next: o.next, score: scoreRunning * part})
	}
}

// slowParts adds the layers at which slow syncs spend their time.
func (w *watch) slowParts() {
	t := w.tracer
	if t == nil || t.here.n == 0 {
		return
	}

	mean := t.here.mean()
	for i := range t.flight.devices {
		w.slowPart(i, mean)
	}

	if above := w.share(placeNowhere); mean >= 5*slowLayer && above >= 0.5 {
		w.addMeasured(Cause{
			Code: "above-devices", Share: weightAbove * above, Title: "syncs wait above the devices: for the journal, for " +
				"each other, for a limit or for a CPU",
			Evidence: []string{fmt.Sprintf("a sync takes %s on average; for %s of that no device had a request", seconds(mean),
				percent(above))},
			Next: []string{"check the other causes; `cat /proc/PID/stack` shows where the waiting process is stuck"},
		})
	}
}

// slowPart adds the i-th traced device if slow syncs spend their time there. mean is that of the syncs, in seconds.
func (w *watch) slowPart(i int, mean float64) {
	// Find the device among the layers and in the report.
	t := w.tracer
	d := t.flight.devices[i]
	x := slices.IndexFunc(w.report.Devices, func(r Device) bool { return r.Name == d.name })
	l := slices.IndexFunc(w.stack.Devices(), func(l stackLayer) bool { return l.Name == d.name })
	if x < 0 || l < 0 {
		return
	}

	// Compute its part of the time.
	device, r := w.stack.Devices()[l].Device, w.report.Devices[x]
	busy := w.share(t.flight.of(i, sumBusy))
	at := min(busy, w.share(placeDepths+d.depth)) // with nothing waiting further down
	flush := fmt.Sprintf("in %s of that, a flush was in flight there; its flushes take %s on average, its writes %s",
		percent(part(w.share(t.flight.of(i, sumFlush)), busy)), seconds(r.FlushAwait), seconds(r.WriteAwait))
	logs := slices.ContainsFunc(w.stack.Devices(), func(l stackLayer) bool { return l.Role == "log" })
	long := slowSync
	if device.Rotational && device.Kind == blockdev.Disk && device.Transport != "virtio" {
		long = slowSpinning
	}

	// Name the cause by the kind of device.
	switch {
	case logs && r.Role == "log" && mean >= slowLayer && busy >= 0.3:
		w.addMeasured(Cause{
			Code: "log-device", Share: busy, Title: "the log device " + d.name + " takes the time, not the pool",
			Evidence: []string{fmt.Sprintf("a request was at %s for %s of the time of the syncs", d.name, percent(busy)), flush},
			Next: []string{"`zpool iostat -vl " + w.poolName() + " 5`",
				"use a mirrored log device with power-loss protection"},
		})
	case logs && r.Role == "" && mean >= slowLayer && busy >= 0.3 && w.bottom(d.name):
		w.addMeasured(Cause{
			Code: "pool-devices", Share: weightPoolDevices * busy, Title: "a data disk of the pool, " + d.name +
				", is busy during the syncs, although there are log devices",
			Evidence: []string{fmt.Sprintf("for %s of the time of the syncs a request was at %s, which is busy %s of all time",
				percent(busy), d.name, percent(r.Busy)), flush},
			Next: []string{"`zpool iostat -vl " + w.poolName() + " 5`", "find other programs that write to the pool"},
		})
	case w.bottom(d.name) && mean >= long && r.Queue < deepQueue:
		w.addMeasured(Cause{
			Code: "slow-device", Share: at * (1 - w.share(t.flight.of(i, sumOthers))),
			Title: "the device " + d.name + " itself is slow to write or to flush",
			Evidence: []string{fmt.Sprintf("a sync takes %s on average; %s of that time it waits for %s", seconds(mean),
				percent(at), d.name), flush},
			Next: []string{"`cat /sys/block/" + d.name + "/queue/scheduler`",
				"`pando doctor` checks its caches and alignment",
				"use disks with power-loss protection, which need not write their cache at each flush"},
		})
	case !w.bottom(d.name) && mean >= slowLayer && at >= 0.4:
		w.addMeasured(Cause{
			Code: "slow-layer", Share: at, Title: "the time is lost in " + d.name +
				": requests wait there while nothing is in flight below",
			Evidence: []string{fmt.Sprintf("a sync takes %s on average, %s of that there", seconds(mean), percent(at)), flush},
			Next: []string{"`losetup -l`: direct I/O avoids a second cache",
				"check the limits and the CPU time of the threads that work for " + d.name},
		})
	}
}

// part returns a as a share of b, from 0 to 1.
func part(a, b float64) float64 {
	if b <= 0 {
		return 0
	}
	return min(1, a/b)
}

func (w *watch) poolName() string {
	if w.zfs != nil {
		return w.zfs.pool
	}
	return ""
}

// queues adds the device whose deep queue costs the syncs most.
func (w *watch) queues() {
	t := w.tracer
	var best *Cause
	for _, d := range w.report.Devices {
		if d.Queue < deepQueue || d.Busy < 0.6 || d.Kind == string(blockdev.Partition) {
			continue
		}

		share := 0.0
		if t != nil {
			share = d.SyncShare * (1 - 1/d.Queue)
		}
		if best != nil && share <= best.Share {
			continue
		}

		best = &Cause{
			Code: "deep-queue", Share: share, Title: fmt.Sprintf("the queue of %s is deep: a sync waits behind %.0f other "+
				"requests", d.Name, d.Queue),
			Evidence: []string{
				fmt.Sprintf("%.1f requests in flight on average, %d at most, of %d; busy %s of the time", d.Queue, d.MostQueued,
					d.NrRequests, percent(d.Busy)),
				fmt.Sprintf("a write takes %s on average, a flush %s; %s of the time of the syncs is spent at %s",
					seconds(d.WriteAwait), seconds(d.FlushAwait), percent(d.SyncShare), d.Name),
			},
			Next: []string{"`cat /sys/block/" + d.Name + "/queue/{scheduler,nr_requests,wbt_lat_usec}`",
				"limit the requests of bulk work, or run it in the idle class: `ionice -c 3`"},
		}
	}

	switch {
	case best == nil:
	case w.total() > 0:
		w.addMeasured(*best)
	default:
		best.score = scoreRunning
		w.addPossible(*best)
	}
}

// commits adds slow commits of the filesystem's journal or of ZFS transaction groups.
func (w *watch) commits() {
	// The journal of ext4.
	if t := w.tracer; t != nil && t.commits.n > 0 {
		c := t.commits
		mean := float64(c.sum) / float64(c.n) / 1e9
		busy := min(1, float64(c.sum)/float64(max(t.traced, 1)))
		if (mean >= slowCommit || float64(c.most)/1e9 >= 10*slowCommit) && busy >= leastShare {
			w.addPossible(Cause{
				Code: "slow-commits", Title: "journal commits are slow, and syncs wait for them", score: scoreCommits * busy,
				Evidence: []string{fmt.Sprintf("%d commits, %s on average, %s at most: %s of the time", c.n, seconds(mean),
					seconds(float64(c.most)/1e9), percent(busy))},
				Next: []string{"write less metadata beside the synced files: fewer new files, fewer appends",
					"move the synced files to a filesystem of their own"},
			})
		}
	}

	z := w.zfs
	if z == nil {
		return
	}

	// Transaction groups that ZFS wrote in the meantime.
	var n int
	var most, sum, dirty int64
	for _, t := range readTxgs(z.pool) {
		if t.txg <= z.lastTxg {
			continue
		}
		n++
		most, sum, dirty = max(most, t.sync), sum+t.sync, max(dirty, t.dirty)
	}

	if time.Duration(most) >= slowTxg {
		busy := min(1, float64(sum)/float64(max(w.elapsed, 1)))
		w.addPossible(Cause{
			Code: "slow-commits", Title: "transaction groups of zpool " + z.pool + " are slow to write, and syncs stall " +
				"behind them", score: scoreTxgLeast + scoreTxgShare*busy,
			Evidence: []string{fmt.Sprintf("%d transaction groups; the slowest took %s to write, the largest had %d MiB", n,
				seconds(float64(most)/1e9), dirty>>20)},
			Next: []string{"`cat /proc/spl/kstat/zfs/" + z.pool + "/txgs`",
				"`zpool iostat -vl " + z.pool + " 5`: are the data disks slow, or is too much data written?"},
		})
	}
}

// starved adds shortages of CPU time and memory.
func (w *watch) starved() {
	// CPU time.
	var delay, whole time.Duration
	for _, d := range w.cpu {
		delay += d.last - d.first
		whole += d.till.Sub(d.since)
	}

	if whole > 0 {
		share := float64(delay) / float64(whole)
		w.addMeasured(Cause{
			Code: "cpu", Share: share, Title: "the processes that sync wait for a CPU",
			Evidence: []string{fmt.Sprintf("their %d threads were ready but not running for %s of the time", len(w.cpu),
				percent(share)), fmt.Sprintf("CPU pressure: %s of the time", known(w.report.Host.CPUPressure))},
			Next: []string{"`cat /proc/pressure/cpu`", "`uptime`: more tasks are running than there are CPUs"},
		})
	}

	if s := w.report.Host.Steal; s >= leastShare {
		w.addMeasured(Cause{
			Code: "steal", Share: s, Title: "the hypervisor gives the CPUs of this machine to others",
			Evidence: []string{fmt.Sprintf("steal: %s of CPU time", percent(s))},
			Next:     []string{"`vmstat 1 5` (column st)", "move to a less crowded host"},
		})
	}

	// Memory, of the host and of the control groups of processes that sync.
	share := w.report.Host.MemoryPressure
	var evidence []string
	if share > 0 {
		evidence = append(evidence, "some task waited for memory for "+percent(share)+" of the time")
	}

	for _, p := range w.report.Syncs.Processes {
		if p.Relation == Here && p.MemoryPressure > 0 {
			evidence = append(evidence, fmt.Sprintf("tasks of control group %s waited for memory for %s of the time", p.CGroup,
				percent(p.MemoryPressure)))
			share = max(share, p.MemoryPressure)
		}
	}

	grown := false
	for path, was := range w.start.fails {
		var n int64
		if _, err := fmt.Sscan(slurp(path), &n); err == nil && n > was {
			grown = true
			evidence = append(evidence, fmt.Sprintf("%s grew by %d", path, n-was))
		}
	}

	switch {
	case share >= leastShare:
		w.addMeasured(Cause{Code: "memory", Share: share, Title: "memory is short", Evidence: evidence,
			Next: []string{"`cat /proc/pressure/memory`", "`free -m`"}})
	case grown:
		w.addPossible(Cause{Code: "memory", Title: "the control group of a process that syncs has reached its memory limit",
			Evidence: evidence, Next: []string{"raise its memory limit"}, score: scoreFull})
	}
}

// known formats a share, which is negative if it is unknown.
func known(share float64) string {
	if share < 0 {
		return "unknown"
	}
	return percent(share)
}

// verdict sums the report up in a sentence or two.
func (w *watch) verdict() {
	r := w.report
	s := r.Syncs
	look := []string{"`pando bench sync " + w.benchPath() + "` measures the cost of a sync here with its own load",
		"`pando doctor` checks the settings of the host"}

	// Say what the syncs took.
	figures := fmt.Sprintf("%d syncs: median %s, 99th percentile %s, longest %s", s.Count, seconds(s.P50),
		seconds(s.P99), seconds(s.Max))
	switch {
	case s.Sampled == 0 && w.tracer != nil && s.Pending > 0:
		r.Verdict = fmt.Sprintf("a sync has been waiting for %s, and none has finished", seconds(s.Pending))
	case s.Count == 0 && w.tracer != nil:
		r.Verdict = fmt.Sprintf("no file here was synced in %.0f s: start the load, or use `pando bench sync`",
			w.elapsed.Seconds())
		for _, p := range s.Processes {
			if p.Relation == Filesystem {
				r.Verdict += "; on the same filesystem, " + p.Command + " synced " + p.File
				break
			}
		}
		r.Next = look
	case w.tracer == nil:
		r.Verdict = "syncs and their durations are not visible"
	default:
		r.Verdict = figures
	}

	// Name the main cause.
	if len(r.Causes) == 0 {
		if s.Count > 0 || w.tracer == nil {
			r.Verdict += "; nothing stands out"
		}
		r.Next = look
	} else {
		r.Verdict += "; main cause: " + r.Causes[0].Title
	}

	if r.Interrupted {
		r.Verdict = fmt.Sprintf("interrupted after %.1f s: %s", w.elapsed.Seconds(), r.Verdict)
	}
}
