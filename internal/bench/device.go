package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// sectorBytes is the unit of /sys/dev/block/*/stat, whatever the disk's own.
const sectorBytes = 512

// maxLayers bounds the loop devices that lie on each other.
const maxLayers = 8

// Device is a block device below the pool.
type Device struct {
	Name string `json:"name"` // "loop0", "vda1"
	Role string `json:"role"` // "pool": the pool's filesystem is on it; "host": it is below the file behind that
	// VolatileCache: the device has a write cache that loses power, so the kernel
	// must flush it. Without one there is nothing to flush.
	VolatileCache bool `json:"volatile_cache"`

	stat string // path of its statistics
}

// counts are what a device has done since it came into being.
type counts struct {
	written int64 // bytes
	flushes int64 // cache flushes completed; -1 if the kernel does not count them
}

// devicesBelow finds the block devices that hold dir: those of its filesystem,
// and if they are loop devices, those below the file behind, and so on. It
// returns an error that says why if there is none or it cannot be told.
func devicesBelow(dir string) ([]Device, error) {
	var out []Device
	role := "pool"
	for range maxLayers {
		devs, err := filesystemDevices(dir)
		if err != nil {
			return out, err
		}
		backing := ""
		for _, d := range devs {
			d.Role = role
			out = append(out, d)
			b, err := os.ReadFile(filepath.Join(filepath.Dir(d.stat), "loop/backing_file"))
			if err == nil {
				backing = strings.TrimSuffix(string(b), "\n")
			}
		}
		if backing == "" {
			return out, nil
		}
		dir, role = backing, "host"
	}
	return out, fmt.Errorf("more than %d loop devices on each other", maxLayers)
}

// filesystemDevices finds the devices of the filesystem that path is on.
func filesystemDevices(path string) ([]Device, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return nil, fmt.Errorf("stat %s: %w", path, err)
	}
	if d, err := device(st.Dev); err == nil {
		return []Device{d}, nil
	}
	// An anonymous device number: btrfs, or no disk at all. The mount table
	// names the device that was mounted.
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, err
	}
	fstype, source, err := mountSource(bufio.NewScanner(f), real)
	if err != nil {
		return nil, err
	}
	var dev unix.Stat_t
	if err := unix.Stat(source, &dev); err != nil || dev.Mode&unix.S_IFMT != unix.S_IFBLK {
		return nil, fmt.Errorf("%s is on %s (%s), which is no block device", path, fstype, source)
	}
	d, err := device(dev.Rdev)
	if err != nil {
		return nil, err
	}
	if fstype == "btrfs" {
		return btrfsDevices(d)
	}
	return []Device{d}, nil
}

// device describes the block device with a number.
func device(rdev uint64) (Device, error) {
	link := fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(rdev), unix.Minor(rdev))
	real, err := filepath.EvalSymlinks(link)
	if err != nil {
		return Device{}, err
	}
	d := Device{Name: filepath.Base(real), stat: filepath.Join(real, "stat")}
	if _, err := d.read(); err != nil {
		return Device{}, err
	}
	for _, p := range []string{real, filepath.Dir(real)} { // a partition's queue is its disk's
		if b, err := os.ReadFile(filepath.Join(p, "queue/write_cache")); err == nil {
			d.VolatileCache = strings.TrimSpace(string(b)) == "write back"
			break
		}
	}
	return d, nil
}

// btrfsDevices finds all devices of the btrfs that d belongs to.
func btrfsDevices(d Device) ([]Device, error) {
	links, err := filepath.Glob("/sys/fs/btrfs/*/devices/*")
	if err != nil {
		return nil, err
	}
	of := map[string][]Device{}
	mine := ""
	for _, l := range links {
		real, err := filepath.EvalSymlinks(l)
		if err != nil {
			continue // unmounted meanwhile
		}
		b, err := os.ReadFile(filepath.Join(real, "dev"))
		if err != nil {
			continue
		}
		var major, minor uint32
		if _, err := fmt.Sscanf(string(b), "%d:%d", &major, &minor); err != nil {
			continue
		}
		x, err := device(unix.Mkdev(major, minor))
		if err != nil {
			continue
		}
		fs := filepath.Dir(l)
		of[fs] = append(of[fs], x)
		if x.Name == d.Name {
			mine = fs
		}
	}
	if mine == "" {
		return []Device{d}, nil
	}
	return of[mine], nil
}

// mountSource finds, in the form of /proc/self/mountinfo, what is mounted where
// path is: the type of filesystem and its source.
func mountSource(lines *bufio.Scanner, path string) (fstype, source string, err error) {
	best := -1
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		sep := -1
		for i := 6; i < len(f); i++ {
			if f[i] == "-" {
				sep = i
				break
			}
		}
		if sep < 0 || len(f) < sep+3 {
			continue
		}
		at := unescapeMount(f[4])
		if at != "/" && path != at && !strings.HasPrefix(path, at+"/") {
			continue
		}
		if len(at) >= best { // later lines hide earlier ones
			best, fstype, source = len(at), f[sep+1], unescapeMount(f[sep+2])
		}
	}
	if err := lines.Err(); err != nil {
		return "", "", err
	}
	if best < 0 {
		return "", "", fmt.Errorf("the mount table does not show what %s is on", path)
	}
	return fstype, source, nil
}

// unescapeMount undoes the octal escapes (\040) of the mount table.
func unescapeMount(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func (d Device) read() (counts, error) {
	b, err := os.ReadFile(d.stat)
	if err != nil {
		return counts{}, err
	}
	return parseStat(string(b))
}

// parseStat reads the statistics of a block device: see
// Documentation/block/stat.rst of the kernel.
func parseStat(s string) (counts, error) {
	f := strings.Fields(s)
	if len(f) < 11 {
		return counts{}, fmt.Errorf("%d fields of block statistics, at least 11 expected", len(f))
	}
	n, err := strconv.ParseInt(f[6], 10, 64)
	if err != nil {
		return counts{}, fmt.Errorf("block statistics: %w", err)
	}
	c := counts{written: n * sectorBytes, flushes: -1}
	if len(f) > 15 {
		if c.flushes, err = strconv.ParseInt(f[15], 10, 64); err != nil {
			return counts{}, fmt.Errorf("block statistics: %w", err)
		}
	}
	return c, nil
}

// meter measures what is written to the devices below a pool.
type meter struct {
	devs  []Device
	err   error    // why there is nothing to measure
	dirs  []string // whose filesystems are synced
	limit time.Duration
	idle  []float64 // bytes/s that others write, by device
}

func newMeter(limit time.Duration, dirs ...string) *meter {
	m := &meter{dirs: dirs, limit: limit}
	m.devs, m.err = devicesBelow(dirs[0])
	m.idle = make([]float64, len(m.devs))
	return m
}

func (m *meter) read() ([]counts, error) {
	if m.err != nil {
		return nil, m.err
	}
	out := make([]counts, len(m.devs))
	for i, d := range m.devs {
		c, err := d.read()
		if err != nil {
			return nil, err
		}
		out[i] = c
	}
	return out, nil
}

// DeviceBytes is what an operation made a device do, divided by the number of
// operations that were measured together.
type DeviceBytes struct {
	Device  string  `json:"device"`
	Role    string  `json:"role"`
	During  float64 `json:"written_during_bytes"`
	After   float64 `json:"written_after_bytes"`     // the tail: until it was quiet, with a final sync
	Flushes float64 `json:"flushes"`                 // completed during the operation; -1: not counted by this kernel
	Others  float64 `json:"others_bytes_per_second"` // written in the second before, by other programs
}

// Tail says how writing ended after an operation.
type Tail struct {
	Seconds float64 `json:"seconds"` // from the end of the operation to the last write
	Quiet   bool    `json:"quiet"`   // false: the limit came first
}

const (
	pollEvery  = 250 * time.Millisecond
	quietPolls = 4
	// quietBytes a poll and less count as quiet; quietDirty more unwritten
	// bytes in memory than before the operation, too.
	quietBytes = 64 << 10
	quietDirty = 4 << 20
)

// around runs fn, which does n operations of one kind, and measures what they
// write, during and after, each divided by n. reason says why nothing could be
// measured; fn has run nevertheless.
func (m *meter) around(ctx context.Context, fn func() (n int, err error)) (devs []DeviceBytes, tail *Tail, reason string, err error) {
	if err := m.settle(ctx); err != nil {
		return nil, nil, "", err
	}
	dirty := dirtyBytes()
	before, rerr := m.read()
	n, err := fn()
	if err != nil {
		return nil, nil, "", err
	}
	if rerr != nil {
		return nil, nil, rerr.Error(), nil
	}
	after, err := m.read()
	if err != nil {
		return nil, nil, err.Error(), nil
	}
	t, err := m.untilQuiet(ctx, dirty)
	if err != nil {
		return nil, nil, "", err
	}
	end, err := m.read()
	if err != nil {
		return nil, nil, err.Error(), nil
	}
	per := float64(max(n, 1))
	for i, d := range m.devs {
		b := DeviceBytes{
			Device: d.Name, Role: d.Role, Others: m.idle[i], Flushes: -1,
			During: float64(after[i].written-before[i].written) / per,
			After:  float64(end[i].written-after[i].written) / per,
		}
		if before[i].flushes >= 0 {
			b.Flushes = float64(after[i].flushes-before[i].flushes) / per
		}
		devs = append(devs, b)
	}
	return devs, &t, "", nil
}

// settle syncs, and measures for a second (less if there is less patience for
// tails) what others write.
func (m *meter) settle(ctx context.Context) error {
	if err := m.sync(); err != nil {
		return err
	}
	a, err := m.read()
	if err != nil {
		return nil // nothing to measure: said elsewhere
	}
	start := time.Now()
	if err := sleep(ctx, min(time.Second, m.limit)); err != nil {
		return err
	}
	b, err := m.read()
	if err != nil {
		return nil
	}
	for i := range a {
		m.idle[i] = float64(b[i].written-a[i].written) / max(time.Since(start).Seconds(), 0.001)
	}
	return nil
}

// untilQuiet waits until next to nothing is written for a second and the
// system has no more unwritten data than before, then syncs.
func (m *meter) untilQuiet(ctx context.Context, dirty int64) (Tail, error) {
	start := time.Now()
	last := start
	t := Tail{}
	prev, err := m.read()
	if err != nil {
		return t, err
	}
	for polls := 0; time.Since(start) < m.limit; {
		if err := sleep(ctx, pollEvery); err != nil {
			return t, err
		}
		now, err := m.read()
		if err != nil {
			return t, err
		}
		polls++
		for i := range now {
			if float64(now[i].written-prev[i].written) > max(quietBytes, 2*m.idle[i]*pollEvery.Seconds()) {
				polls, last = 0, time.Now()
			}
		}
		prev = now
		if polls >= quietPolls && dirtyBytes() <= dirty+quietDirty {
			t.Quiet = true
			break
		}
	}
	t.Seconds = last.Sub(start).Seconds()
	return t, m.sync()
}

// sync writes out the filesystems of the pool.
func (m *meter) sync() error {
	var all []error
	for _, d := range m.dirs {
		all = append(all, syncfs(d))
	}
	return errors.Join(all...)
}

func syncfs(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return fmt.Errorf("syncfs %s: %w", dir, err)
	}
	return nil
}

// dirtyBytes is how much data in memory is still to be written, on all disks.
func dirtyBytes() int64 {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	return parseDirty(string(b))
}

func parseDirty(meminfo string) int64 {
	var total int64
	for line := range strings.Lines(meminfo) {
		k, v, _ := strings.Cut(line, ":")
		if k == "Dirty" || k == "Writeback" {
			n, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64)
			total += n << 10
		}
	}
	return total
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
