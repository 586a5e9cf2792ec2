package diagnose

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"pando/internal/linux/extent"
	"pando/internal/linux/zfs"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"

	"golang.org/x/sys/unix"
)

// settings finds causes that need no watching: layers whose settings drop syncs, and full filesystems.
func (w *watch) settings(ctx context.Context) error {
	layers := w.stack.Layers
	for _, l := range layers {
		switch {
		case l.Kind == stack.InMemory:
			w.addLie("memory-only", l.Name+" is memory: a power failure loses data synced there",
				[]string{"the filesystem is " + l.FSType}, "move the data to a disk, or turn syncs off")
		case l.Kind == stack.Network:
			w.missing("the layers below "+l.Name, "it is on another machine (%s): run diagnose there", l.Mount.Source)
		case l.Kind == stack.FUSE:
			w.missing("the layers below "+l.Name, "it is a FUSE program (%s): only the program knows whether it passes syncs on",
				l.Mount.Source)
		}

		if o := l.Mount.DropsSyncs(); o != "" {
			next := "mount it without " + o
			if strings.Contains(o, "barrier") {
				next = "`mount -o remount," + withBarriers(o) + " " + l.Mount.Point + "`"
			}
			w.addLie("barrier-off", l.Name+" does not pass syncs on to its device: it is mounted with "+o,
				[]string{"mount option " + o + " of " + l.Mount.Source,
					"a power failure loses synced data that is still in a cache"},
				next, "fix this before you look at speed")
		}

		if d := l.Device; d != nil {
			if why := d.HiddenCache(); why != "" {
				w.addLie("cache-lie", l.Name+" is configured as having no volatile write cache, but "+why+": the kernel drops the "+
					"flushes",
					[]string{l.Name + ": write through"}, "`cat /sys/block/"+l.Name+"/queue/write_cache`", "`echo 'write back' > "+
						"/sys/block/"+l.Name+"/queue/write_cache`")
			}
		}

		if l.Device != nil && l.Device.Kind == blockdev.Memory {
			w.addLie("memory-only", l.Name+" is memory: a power failure loses data synced there",
				[]string{"the device is " + l.Name}, "move the data to a disk, or turn syncs off")
		}
	}

	if w.stack.Hidden != "" {
		w.missing("the layers below", "%s", w.stack.Hidden)
	}

	w.databases(ctx)
	w.zfs = w.readZFS(ctx)
	return ctx.Err()
}

func withBarriers(o string) string {
	if o == "nobarrier" {
		return "barrier"
	}
	return "barrier=1"
}

// addLie adds a certain cause: a layer that drops syncs.
func (w *watch) addLie(code, title string, evidence []string, next ...string) {
	w.addCause(Cause{Code: code, Share: -1, Confidence: Certain, Title: title,
		Evidence: evidence, Next: next, score: scoreLie})
}

// A filesystem or pool counts as nearly full from these percentages on.
const (
	fullFrom     = 90
	fullPoolFrom = 80 // ZFS searches free space in another way from then on
)

// full finds filesystems and pools that are nearly full.
func (w *watch) full() {
	for _, l := range w.stack.Layers {
		if l.FSType == "" || l.Kind == stack.Network {
			continue
		}

		var st unix.Statfs_t
		path := l.Mount.Point
		if l.Depth == 0 {
			path = w.stack.Path
		}

		if err := unix.Statfs(path, &st); err != nil {
			w.missing("the free space of "+l.Name, "%v", err)
			continue
		}

		used := st.Blocks - st.Bfree
		if all := used + st.Bavail; all > 0 {
			w.nearFull(l.Name, 100*float64(used)/float64(all), int64(st.Bavail)*st.Bsize, fullFrom, "`df -h "+path+"`")
		}

		if l.FSType == "btrfs" {
			w.btrfsMetadata(l)
		}
	}

	if z := w.zfs; z != nil && z.capacity >= 0 {
		w.nearFull("zpool "+z.pool, float64(z.capacity), z.free, fullPoolFrom, "`zpool list -v "+z.pool+"`")
	}
}

func (w *watch) nearFull(name string, percent float64, left int64, from float64, look string) {
	if percent < from {
		return
	}

	evidence := []string{fmt.Sprintf("%.1f %% used, %d MiB left", percent, left>>20)}
	if z := w.zfs; z != nil && name == "zpool "+z.pool && z.fragmentation >= 0 {
		evidence = append(evidence, fmt.Sprintf("the fragmentation of its free space is %d %%", z.fragmentation))
	}

	w.addCause(Cause{
		Code: "near-full", Share: -1, Confidence: Possible, Title: name + " is nearly full: finding free space takes " +
			"longer, and writes are scattered",
		Evidence: evidence, Next: []string{look, "free some space, or enlarge it"},
		score: scoreFull + (scoreFullest-scoreFull)*(percent-from)/(100-from),
	})
}

// btrfsMetadata finds a btrfs whose metadata chunks are full and that has no unallocated space for another: it stalls,
// however much space is free for data.
func (w *watch) btrfsMetadata(l stack.Layer) {
	dir := btrfsDir(l)
	if dir == "" {
		return
	}

	number := func(name string) int64 {
		n, _ := strconv.ParseInt(strings.TrimSpace(slurp(dir+"/allocation/"+name)), 10, 64)
		return n
	}
	total, used := number("metadata/total_bytes"), number("metadata/bytes_used")
	if total == 0 {
		return
	}

	var size, allocated int64
	for _, m := range w.stack.Layers {
		if m.Device != nil && m.Depth == l.Depth+1 {
			size += m.Device.SizeBytes
		}
	}

	for _, k := range []string{"data", "metadata", "system"} {
		allocated += number(k + "/disk_total")
	}

	reserve := number("global_rsv_size")
	const chunk = 256 << 20
	percent := 100 * float64(used+reserve) / float64(total)
	if percent < 85 || size-allocated > chunk {
		return
	}

	w.addCause(Cause{
		Code: "metadata-full", Share: -1, Confidence: Possible, Title: l.Name + " has hardly any free space for metadata: " +
			"syncs wait until some is free",
		Evidence: []string{fmt.Sprintf("%.0f %% of %d MiB for metadata are used or reserved, and %d MiB of the devices "+
			"are unallocated", percent, total>>20, (size-allocated)>>20)},
		Next: []string{"`btrfs filesystem usage " + l.Mount.Point + "`",
			"`btrfs balance start -dusage=10 " + l.Mount.Point + "`: it frees nearly empty data chunks"},
		score: scoreMetadata,
	})
}

// A file counts as fragmented by these limits.
const (
	fragmentsFrom     = 64
	fragmentBytesFrom = 64 << 10 // mean length of an extent below this
	mostExtents       = 1 << 18
)

// fragments counts the extents of the files that were synced most, and of files behind loop devices.
func (w *watch) fragments(files []string, requestsPerSync float64) {
	names := files
	for _, l := range w.stack.Devices() {
		if l.Device.Kind == blockdev.Loop && l.Device.Backing != "" {
			names = append(names, l.Device.Backing)
		}
	}

	for _, name := range names {
		pieces, bytes, err := piecesOf(name)
		if err != nil {
			if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOTTY) && !errors.Is(err, os.ErrNotExist) {
				w.missing("the fragments of "+name, "%v", err)
			}
			continue
		}

		if pieces < fragmentsFrom || bytes/pieces >= fragmentBytesFrom {
			continue
		}

		c := Cause{
			Code: "fragmented", Share: -1, Confidence: Possible, Title: name + " is fragmented: a sync writes to many places",
			Evidence: []string{fmt.Sprintf("%d extents, %d KiB each on average", pieces, bytes/pieces>>10)},
			Next: []string{"`filefrag -v " + name + " | head`",
				"rewrite it sequentially: copy it within the filesystem and rename the copy over it"}, score: scoreFragments,
		}

		if requestsPerSync > 0 {
			c.Evidence = append(c.Evidence, fmt.Sprintf("each sync sends %.1f requests to the uppermost device",
				requestsPerSync))
		}

		w.addCause(c)
	}
}

// piecesOf counts the extents of a file that are not adjacent on the device.
func piecesOf(name string) (pieces, bytes int64, err error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, 0, err
	}

	defer f.Close()

	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return 0, 0, err
	}

	stop := errors.New("enough")
	var end int64 = -1
	err = extent.Scan(f, false, func(x extent.Extent) error {
		if x.Flags&(extent.Delalloc|extent.Unknown|extent.Inline) != 0 {
			return nil
		}
		if x.Physical != end {
			pieces++
		}

		end = x.Physical + x.Length
		bytes += x.Length
		if pieces >= mostExtents {
			return stop
		}

		return nil
	})
	if errors.Is(err, stop) {
		err = nil
	}

	return pieces, bytes, err
}

// zfsFacts is the state of the zpool below the path.
type zfsFacts struct {
	pool          string
	capacity      int64 // percent; -1 unknown
	fragmentation int64
	free          int64
	lastTxg       uint64
	tx            map[string]int64 // counters of waits
}

// readZFS reads the settings of the datasets, and the counters of the pool at the start. It returns nil without ZFS.
func (w *watch) readZFS(ctx context.Context) *zfsFacts {
	var z *zfsFacts
	for _, l := range w.stack.Layers {
		if l.Dataset == "" {
			continue
		}
		if z == nil {
			z = &zfsFacts{pool: zfs.PoolOf(l.Dataset), capacity: -1, fragmentation: -1}
		}
		if l.Kind == stack.Zpool {
			continue
		}

		rows, err := zfs.ZFS.Rows(ctx, 3, "get", "-Hp", "-o", "property,value,source", "sync,logbias", l.Dataset)
		if err != nil {
			w.missing("the settings of "+l.Dataset, "%v", err)
			continue
		}

		for _, r := range rows {
			switch {
			case r[0] == "sync" && r[1] == "disabled":
				w.addLie("sync-disabled", l.Dataset+" does not sync: sync=disabled",
					[]string{"sync=disabled (" + r[2] + ")", "a power failure loses the data synced in the last seconds"},
					"`zfs inherit sync "+l.Dataset+"`, or `zfs set sync=standard "+l.Dataset+"`", "fix this before you look at speed")
			case r[0] == "logbias" && r[1] == "throughput":
				w.addCause(Cause{
					Code: "logbias", Share: -1, Confidence: Possible, Title: l.Dataset + " has logbias=throughput: its syncs " +
						"bypass the log devices",
					Evidence: []string{"logbias=throughput (" + r[2] + ")"}, Next: []string{"`zfs set logbias=latency " +
						"" + l.Dataset + "`"}, score: scoreFull,
				})
			}
		}
	}

	if z == nil {
		return nil
	}

	rows, err := zfs.Zpool.Rows(ctx, 3, "list", "-Hp", "-o", "capacity,fragmentation,free", z.pool)
	if err != nil || len(rows) != 1 {
		w.missing("the free space of zpool "+z.pool, "%v", err)
	} else {
		for i, p := range []*int64{&z.capacity, &z.fragmentation, &z.free} {
			if n, err := strconv.ParseInt(rows[0][i], 10, 64); err == nil {
				*p = n
			}
		}
	}

	for _, t := range readTxgs(z.pool) {
		z.lastTxg = max(z.lastTxg, t.txg)
	}

	z.tx = kstat("/proc/spl/kstat/zfs/dmu_tx")
	w.findZpoolScan(ctx, z.pool)
	return z
}

// findZpoolScan finds out whether a scrub or resilver is running.
func (w *watch) findZpoolScan(ctx context.Context, pool string) {
	out, err := zfs.Zpool.Output(ctx, "status", pool)
	if err != nil {
		w.missing("scrub and resilver of zpool "+pool, "%v", err)
		return
	}
	if o := parseScan(string(out), pool); o != nil {
		w.sawOperation(o)
	}
}

// parseScan reads the scan line of zpool status.
func parseScan(text, pool string) *operation {
	_, rest, ok := strings.Cut(text, "scan:")
	if !ok {
		return nil
	}

	line, _, _ := strings.Cut(strings.TrimSpace(rest), "\n")
	switch {
	case strings.HasPrefix(line, "scrub in progress"):
		return &operation{code: "scrub", title: "a scrub of zpool " + pool + " is reading all data", detail: line,
			next: []string{"`zpool status " + pool + "`", "`zpool scrub -p " + pool + "` pauses it"}}
	case strings.HasPrefix(line, "resilver in progress"):
		return &operation{code: "rebuild", title: "zpool " + pool + " is rebuilding a disk", detail: line,
			next: []string{"`zpool status " + pool + "`"}}
	}

	return nil
}

// txg is a transaction group that has been written: times in nanoseconds.
type txg struct {
	txg                       uint64
	dirty                     int64
	open, quiesce, wait, sync int64
}

func readTxgs(pool string) []txg { return parseTxgs(slurp("/proc/spl/kstat/zfs/" + pool + "/txgs")) }

// parseTxgs reads the table of transaction groups: those that are committed.
func parseTxgs(text string) (out []txg) {
	var head []string
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) > 2 && f[0] == "txg" {
			head = f
			continue
		}

		if head == nil || len(f) != len(head) {
			continue
		}

		var t txg
		committed := false
		for i, h := range head {
			n, _ := strconv.ParseInt(f[i], 10, 64)
			switch h {
			case "txg":
				t.txg = uint64(n)
			case "state":
				committed = f[i] == "C"
			case "ndirty":
				t.dirty = n
			case "otime":
				t.open = n
			case "qtime":
				t.quiesce = n
			case "wtime":
				t.wait = n
			case "stime":
				t.sync = n
			}
		}

		if committed {
			out = append(out, t)
		}
	}

	return out
}

// kstat reads lines of the form "name type value".
func kstat(path string) map[string]int64 {
	out := map[string]int64{}
	for line := range strings.Lines(slurp(path)) {
		if f := strings.Fields(line); len(f) == 3 {
			if n, err := strconv.ParseInt(f[2], 10, 64); err == nil {
				out[f[0]] = n
			}
		}
	}
	return out
}

// stackLayer is a layer below the path.
type stackLayer = stack.Layer
