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

// operation is maintenance of a filesystem or pool, such as a scrub, that was seen running.
type operation struct {
	code, title string
	seen        int // samples that saw it
	detail      string
	next        []string
}

// scanner finds out whether one filesystem or array has an operation running.
type scanner struct {
	dir *os.File // may be nil
	ask func() *operation
}

// btrfsDir returns the sysfs directory of the btrfs of a layer; "" if there is none.
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
			return &operation{code: "rebuild", title: "the array " + l.Name + " is busy with: " + action,
				detail: "done: " + strings.TrimSpace(slurp(path+"sync_completed")) + " sectors", next: []string{"`cat " +
					"/proc/mdstat`"}}
		}})
	}
}

func (w *watch) prepareBtrfs(l stack.Layer) {
	dir := btrfsDir(l)
	if dir == "" {
		w.missing("balance and scrub of "+l.Name, "not in /sys/fs/btrfs")
		return
	}

	point := l.Mount.Point
	w.scans = append(w.scans, scanner{ask: func() *operation {
		now := strings.TrimSpace(slurp(dir + "/exclusive_operation"))
		if now == "" || now == "none" || strings.Contains(now, "paused") {
			return nil
		}
		return &operation{code: "balance", title: "btrfs is busy with: " + now,
			detail: dir + "/exclusive_operation says " + strconv.Quote(now),
			next:   []string{"`btrfs balance status " + point + "`", "`btrfs balance pause " + point + "` until a quieter time"}}
	}})

	f, err := os.Open(point)
	if err != nil {
		w.missing("scrub of "+l.Name, "%v", err)
		return
	}

	ids, _ := filepath.Glob(dir + "/devinfo/*") // the pattern is valid
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
				return &operation{code: "scrub", title: "a scrub of " + l.Name + " is reading all data",
					detail: fmt.Sprintf("reported by the kernel for device %d", id),
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
