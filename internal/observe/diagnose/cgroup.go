package diagnose

import (
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"pando/internal/linux/mount"
)

// The files of control groups are read here, not by github.com/containerd/cgroups: that manages groups, does not read
// limits back, and brings D-Bus and eBPF into the program.

// cgroups are the control groups of a process: in the unified hierarchy, and in the controllers of version 1 that
// matter here; "" if there is none.
type cgroups struct{ unified, blkio, memory string }

// name returns the most specific one.
func (g cgroups) name() string {
	for _, s := range []string{g.unified, g.blkio, g.memory} {
		if s != "" && s != "/" {
			return s
		}
	}
	return "/"
}

func groupsOf(pid int) cgroups {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if err != nil {
		return cgroups{}
	}
	return parseGroups(string(b))
}

// parseGroups reads /proc/PID/cgroup: see cgroups(7).
func parseGroups(text string) (g cgroups) {
	for line := range strings.Lines(text) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) != 3 {
			continue
		}
		if f[0] == "0" && f[1] == "" {
			g.unified = f[2]
		}

		for c := range strings.SplitSeq(f[1], ",") {
			switch c {
			case "blkio":
				g.blkio = f[2]
			case "memory":
				g.memory = f[2]
			}
		}
	}

	return g
}

// hierarchies are the mount points of control groups; "" if not mounted.
type hierarchies struct{ unified, blkio, memory string }

var groupRoots = sync.OnceValue(func() (h hierarchies) {
	table, err := mount.Table("self")
	if err != nil {
		return h
	}

	for _, m := range table {
		switch {
		case m.FSType == "cgroup2" && h.unified == "":
			h.unified = m.Point
		case m.FSType == "cgroup" && m.Has("blkio") && h.blkio == "":
			h.blkio = m.Point
		case m.FSType == "cgroup" && m.Has("memory") && h.memory == "":
			h.memory = m.Point
		}
	}

	return h
})

// groupIO is the amount a control group has written to a device.
type groupIO struct{ bytes, requests int64 }

// ioKey is a control group, by its directory, and a device, "254:0".
type ioKey struct{ dir, device string }

// mostGroups is the maximum number of control groups that are read.
const mostGroups = 5000

// readGroupIO reads how much each control group has written to some devices. In version 2 the figures include the
// groups below.
func readGroupIO(devices map[string]bool) map[ioKey]groupIO {
	out := map[ioKey]groupIO{}
	h := groupRoots()
	seen := 0
	walk := func(root string, read func(dir string)) {
		if root == "" {
			return
		}

		_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return nil // it has been removed
			}
			if seen++; seen > mostGroups {
				return filepath.SkipAll
			}
			read(path)
			return nil
		})
	}

	walk(h.unified, func(dir string) {
		for dev, io := range parseIOStat(slurp(dir + "/io.stat")) {
			if devices[dev] {
				out[ioKey{dir, dev}] = io
			}
		}
	})

	walk(h.blkio, func(dir string) {
		bytes := parseBlkio(slurp(dir + "/blkio.throttle.io_service_bytes"))
		requests := parseBlkio(slurp(dir + "/blkio.throttle.io_serviced"))
		for dev, n := range bytes {
			if devices[dev] {
				out[ioKey{dir, dev}] = groupIO{n, requests[dev]}
			}
		}
	})

	return out
}

func slurp(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return string(b)
}

// parseIOStat reads io.stat of version 2: "254:0 rbytes=1 wbytes=2 rios=3 wios=4 ...".
func parseIOStat(text string) map[string]groupIO {
	out := map[string]groupIO{}
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		var io groupIO
		for _, w := range f[min(1, len(f)):] {
			k, v, _ := strings.Cut(w, "=")
			n, err := strconv.ParseInt(v, 10, 64)
			switch {
			case err != nil:
			case k == "wbytes":
				io.bytes = n
			case k == "wios":
				io.requests = n
			}
		}

		if len(f) > 1 {
			out[f[0]] = io
		}
	}

	return out
}

// parseBlkio reads the writes of a file of version 1: "254:0 Write 4096".
func parseBlkio(text string) map[string]int64 {
	out := map[string]int64{}
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) == 3 && f[1] == "Write" {
			if n, err := strconv.ParseInt(f[2], 10, 64); err == nil {
				out[f[0]] = n
			}
		}
	}
	return out
}

// limit is a limit of a control group on writes to a device.
type limit struct {
	dir, device string
	what        string // "bytes" or "requests"
	perSecond   int64
	setting     string // the file that sets it
}

// limitsOf returns the write limits of a process: those of its own group and of the groups above.
func limitsOf(g cgroups) (out []limit) {
	h := groupRoots()
	each := func(root, path string, read func(dir string)) {
		if root == "" || path == "" {
			return
		}
		for p := filepath.Clean("/" + path); ; p = filepath.Dir(p) {
			read(filepath.Join(root, p))
			if p == "/" {
				return
			}
		}
	}

	each(h.unified, g.unified, func(dir string) { out = append(out, parseIOMax(dir, slurp(dir+"/io.max"))...) })

	each(h.blkio, g.blkio, func(dir string) {
		for _, k := range [][2]string{{"blkio.throttle.write_bps_device", "bytes"},
			{"blkio.throttle.write_iops_device", "requests"}} {
			for line := range strings.Lines(slurp(dir + "/" + k[0])) {
				f := strings.Fields(line)
				if len(f) != 2 {
					continue
				}
				if n, err := strconv.ParseInt(f[1], 10, 64); err == nil && n > 0 {
					out = append(out, limit{dir, f[0], k[1], n, k[0]})
				}
			}
		}
	})

	return out
}

// parseIOMax reads io.max of version 2: "254:0 rbps=max wbps=1048576 riops=max wiops=100".
func parseIOMax(dir, text string) (out []limit) {
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		for _, w := range f[min(1, len(f)):] {
			k, v, _ := strings.Cut(w, "=")
			what := map[string]string{"wbps": "bytes", "wiops": "requests"}[k]
			n, err := strconv.ParseInt(v, 10, 64)
			if what != "" && err == nil {
				out = append(out, limit{dir, f[0], what, n, "io.max"})
			}
		}
	}

	return out
}

// pressure reads the time, in microseconds, in which some task waited (Documentation/accounting/psi.rst). -1: unknown.
// procfs reads the files of the host only, not those of control groups.
func pressure(path string) int64 {
	for line := range strings.Lines(slurp(path)) {
		if !strings.HasPrefix(line, "some ") {
			continue
		}
		if _, total, ok := strings.Cut(line, "total="); ok {
			if n, err := strconv.ParseInt(strings.TrimSpace(total), 10, 64); err == nil {
				return n
			}
		}
	}
	return -1
}

// pressureDir returns the directory with the pressure on a control group alone; "" if it is not counted, or the group
// is the whole host.
func pressureDir(g cgroups) string {
	h := groupRoots()
	if h.unified == "" || g.unified == "" || g.unified == "/" {
		return ""
	}
	dir := filepath.Join(h.unified, g.unified)
	if _, err := os.Stat(dir + "/io.pressure"); err != nil {
		return ""
	}
	return dir
}

// groupPressure is the time that tasks of a control group have waited since the watch began.
type groupPressure struct {
	since                time.Time
	io0, io1, mem0, mem1 int64 // microseconds; -1: not known
}

// shares returns the shares of the time in which some task waited for storage, and for memory; -1: unknown.
func (p *groupPressure) shares() (io, memory float64) {
	took := float64(time.Since(p.since).Microseconds())
	share := func(a, b int64) float64 {
		if a < 0 || b < 0 || took <= 0 {
			return -1
		}
		return min(1, float64(b-a)/took)
	}
	return share(p.io0, p.io1), share(p.mem0, p.mem1)
}
