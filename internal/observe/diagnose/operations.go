package diagnose

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"pando/internal/linux/kernel"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"
)

// operation is work of a filesystem or pool on itself that was seen running.
type operation struct {
	code, title string
	seen        int // how many looks saw it
	detail      string
	next        []string
}

// scanner asks one filesystem or array whether something is running.
type scanner struct {
	dir *os.File // may be nil
	ask func() *operation
}

// btrfsDir is the directory in sysfs of the btrfs of a layer; "" if it is not there.
func btrfsDir(l stack.Layer) string {
	d, err := blockdev.LookupPath(l.Mount.Source)
	if err != nil {
		return ""
	}
	found, err := filepath.Glob("/sys/fs/btrfs/*/devices/" + d.Name)
	if err != nil || len(found) == 0 {
		return ""
	}
	return filepath.Dir(filepath.Dir(found[0]))
}

func (w *watch) prepareOperations() {
	for _, l := range w.stack.Layers {
		if l.FSType == "btrfs" {
			w.prepareBtrfs(l)
		}
		if l.Device == nil || l.Device.Kind != blockdev.RAID {
			continue
		}

		path := "/sys/block/" + l.Name + "/md/"
		w.scans = append(w.scans, scanner{ask: func() *operation {
			action := strings.TrimSpace(slurp(path + "sync_action"))
			if action == "" || action == "idle" || action == "frozen" {
				return nil
			}
			return &operation{code: "rebuild", title: "the array " + l.Name + " is at work on itself: " + action,
				detail: "done: " + strings.TrimSpace(slurp(path+"sync_completed")) + " sectors", next: []string{"`cat /proc/mdstat`"}}
		}})
	}
}

func (w *watch) prepareBtrfs(l stack.Layer) {
	dir := btrfsDir(l)
	if dir == "" {
		w.missing("balance and scrub of "+l.Name, "it is not in /sys/fs/btrfs")
		return
	}

	point := l.Mount.Point
	w.scans = append(w.scans, scanner{ask: func() *operation {
		now := strings.TrimSpace(slurp(dir + "/exclusive_operation"))
		if now == "" || now == "none" || strings.Contains(now, "paused") {
			return nil
		}
		return &operation{code: "balance", title: "btrfs is at work on itself: " + now,
			detail: dir + "/exclusive_operation says " + strconv.Quote(now),
			next:   []string{"`btrfs balance status " + point + "`", "`btrfs balance pause " + point + "` until a quieter time"}}
	}})

	f, err := os.Open(point)
	if err != nil {
		w.missing("scrub of "+l.Name, "%v", err)
		return
	}

	ids, _ := filepath.Glob(dir + "/devinfo/*") // the pattern is good
	var devids []uint64
	for _, p := range ids {
		if n, err := strconv.ParseUint(filepath.Base(p), 10, 64); err == nil {
			devids = append(devids, n)
		}
	}

	w.scans = append(w.scans, scanner{dir: f, ask: func() *operation {
		for _, id := range devids {
			running, err := kernel.BtrfsScrubbing(f, id)
			if err != nil {
				w.missing("scrub of "+l.Name, "%v", err)
				return nil
			}
			if running {
				return &operation{code: "scrub", title: "a scrub of " + l.Name + " is reading everything",
					detail: fmt.Sprintf("the kernel says so of device %d", id),
					next: []string{"`btrfs scrub status " + point + "`",
						"`btrfs scrub cancel " + point + "`; it goes on with `btrfs scrub resume`"}}
			}
		}

		return nil
	}})
}

func (w *watch) lookOperations() {
	for _, s := range w.scans {
		if o := s.ask(); o != nil {
			w.sawOperation(o)
		}
	}
}

func (w *watch) sawOperation(o *operation) {
	seen := 0
	if was := w.ops[o.title]; was != nil {
		seen = was.seen
	}
	o.seen = seen + 1
	w.ops[o.title] = o
}
