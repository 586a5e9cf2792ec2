// Package blockdev reads the properties of block devices, the devices below them and their statistics from sysfs. It
// opens no device, changes nothing, and needs no root.
package blockdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Kind is the kind of a device.
type Kind string

// The kinds.
const (
	Disk      Kind = "disk"          // real, or of a virtual machine
	Partition Kind = "partition"     // of a disk
	Loop      Kind = "loop"          // a file
	Mapper    Kind = "device-mapper" // LVM, crypt, ...
	RAID      Kind = "raid"          // md
	Zvol      Kind = "zvol"          // a volume of a zpool
	Memory    Kind = "memory"        // zram, brd, null_blk, emulated pmem: lost in a power failure
	Other     Kind = "other"         // nbd, drbd, rbd, bcache, ublk, ...: the layers below are unknown
)

// sectorBytes is the unit of the statistics and sizes in sysfs, for any disk.
const sectorBytes = 512

// Device is a block device as sysfs shows it.
type Device struct {
	Name   string // "vda1"
	Number uint64 // as st_rdev
	Kind   Kind

	// VolatileCache is set if the device has a write cache that a power failure loses, so the kernel must flush it.
	// Otherwise the kernel drops flushes before they reach the device.
	VolatileCache bool
	FUA           bool   // can write single blocks through its cache
	Rotational    bool   // reported as rotating; often wrong for disks of virtual machines
	ReadOnly      bool   //
	Transport     string // "nvme", "virtio", "scsi", "" if unknown
	LogicalBytes  int    // the smallest write it accepts
	PhysicalBytes int    // the smallest write it does without reading first
	AlignOffset   int    // its offset into the physical blocks of its disk, in bytes; -1: unknown
	StartBytes    int64  // of a partition, on its disk
	SizeBytes     int64  //
	Scheduler     string // of I/O: "none", "mq-deadline", ...
	QueueRequests int    // nr_requests
	Backing       string // of a loop device: the path of its file when it was attached, possibly with " (deleted)"
	DirectIO      bool   // of a loop device: its file's page cache is bypassed

	dir string // in sysfs
}

// Path returns the usual path of the device node.
func (d Device) Path() string { return "/dev/" + strings.ReplaceAll(d.Name, "!", "/") }

// ID returns "major:minor".
func (d Device) ID() string {
	return fmt.Sprintf("%d:%d", unix.Major(d.Number), unix.Minor(d.Number))
}

// Lookup describes the device with a number (st_rdev of its node, or st_dev of a file on it). The error is
// fs.ErrNotExist for anonymous numbers, of filesystems on no device or on several.
func Lookup(number uint64) (Device, error) {
	dir, err := filepath.EvalSymlinks(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(number), unix.Minor(number)))
	if err != nil {
		return Device{}, err
	}
	return describe(dir, number)
}

// LookupPath describes the device whose node is at path.
func LookupPath(path string) (Device, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return Device{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return Device{}, fmt.Errorf("%s is not a block device", path)
	}
	return Lookup(st.Rdev)
}

// List describes all block devices, including partitions, except devices that vanish in the meantime and loop devices
// without a file.
func List() ([]Device, error) {
	dirs, err := filepath.Glob("/sys/dev/block/*:*")
	if err != nil {
		return nil, err
	}

	var out []Device
	for _, link := range dirs {
		var major, minor uint32
		if _, err := fmt.Sscanf(filepath.Base(link), "%d:%d", &major, &minor); err != nil {
			continue
		}
		d, err := Lookup(unix.Mkdev(major, minor))
		if err != nil || d.Kind == Loop && d.Backing == "" {
			continue
		}
		out = append(out, d)
	}

	slices.SortFunc(out, func(a, b Device) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

func describe(dir string, number uint64) (Device, error) {
	d := Device{Name: filepath.Base(dir), Number: number, dir: dir, AlignOffset: -1}
	if _, err := os.Stat(filepath.Join(dir, "stat")); err != nil {
		return Device{}, err
	}

	queue := dir
	if _, err := os.Stat(filepath.Join(dir, "partition")); err == nil {
		d.Kind = Partition
		d.StartBytes = d.number("start") * sectorBytes
		queue = filepath.Dir(dir) // a partition uses its disk's queue
	}

	q := Device{dir: queue}
	d.VolatileCache = q.text("queue/write_cache") == "write back"
	d.FUA = q.text("queue/fua") == "1"
	d.Rotational = q.text("queue/rotational") == "1"
	d.LogicalBytes = int(q.number("queue/logical_block_size"))
	d.PhysicalBytes = int(q.number("queue/physical_block_size"))
	d.QueueRequests = int(q.number("queue/nr_requests"))
	d.Scheduler = chosen(q.text("queue/scheduler"))
	d.ReadOnly = d.text("ro") == "1"
	d.SizeBytes = d.number("size") * sectorBytes
	if s := d.text("alignment_offset"); s != "" {
		if n, err := strconv.Atoi(s); err == nil {
			d.AlignOffset = n
		}
	}

	d.Transport = transport(queue)
	if d.Kind == Partition {
		return d, nil
	}

	switch {
	case strings.HasPrefix(d.Name, "loop"):
		d.Kind = Loop
		d.Backing = d.text("loop/backing_file")
		d.DirectIO = d.text("loop/dio") == "1"
	case exists(filepath.Join(dir, "dm")):
		d.Kind = Mapper
	case exists(filepath.Join(dir, "md")):
		d.Kind = RAID
	case strings.HasPrefix(d.Name, "zd"):
		d.Kind = Zvol
	case strings.HasPrefix(d.Name, "zram"), strings.HasPrefix(d.Name, "ram"), strings.HasPrefix(d.Name, "nullb"),
		strings.HasPrefix(d.Name, "pmem"):
		d.Kind = Memory
	case d.Transport != "":
		d.Kind = Disk
	default:
		d.Kind = Other
	}

	return d, nil
}

// transport derives from a disk's path in sysfs how it is connected.
func transport(dir string) string {
	real, err := filepath.EvalSymlinks(filepath.Join(dir, "device"))
	if err != nil {
		real = dir
	}

	for _, t := range []struct{ part, name string }{
		{"/nvme", "nvme"}, {"/virtio", "virtio"}, {"/mmc", "mmc"}, {"/ata", "ata"}, {"/usb", "usb"}, {"/xen",
			"xen"}, {"/vbd-", "xen"},
		{"/host", "scsi"}, {"/target", "scsi"},
	} {
		if strings.Contains(real, t.part) {
			return t.name
		}
	}

	return ""
}

// chosen returns the word in brackets, or the whole text if there is none.
func chosen(s string) string {
	if _, rest, ok := strings.Cut(s, "["); ok {
		word, _, _ := strings.Cut(rest, "]")
		return word
	}
	return s
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func (d Device) text(name string) string {
	b, err := os.ReadFile(filepath.Join(d.dir, name))
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(string(b), "\n")
}

func (d Device) number(name string) int64 {
	n, _ := strconv.ParseInt(strings.TrimSpace(d.text(name)), 10, 64)
	return n
}

// Below lists the devices that d consists of: the disk of a partition, the slaves of a mapper or RAID device; none for
// others (use Backing for loop devices).
func (d Device) Below() ([]Device, error) {
	if d.Kind == Partition {
		var major, minor uint32
		disk := Device{dir: filepath.Dir(d.dir)}
		if _, err := fmt.Sscanf(disk.text("dev"), "%d:%d", &major, &minor); err != nil {
			return nil, fmt.Errorf("the disk of %s: %w", d.Name, err)
		}
		x, err := Lookup(unix.Mkdev(major, minor))
		if err != nil {
			return nil, err
		}
		return []Device{x}, nil
	}

	slaves, err := os.ReadDir(filepath.Join(d.dir, "slaves"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}

	var out []Device
	for _, s := range slaves {
		x := Device{dir: filepath.Join(d.dir, "slaves", s.Name())}
		var major, minor uint32
		if _, err := fmt.Sscanf(x.text("dev"), "%d:%d", &major, &minor); err != nil {
			return nil, fmt.Errorf("%s below %s: %w", s.Name(), d.Name, err)
		}
		if x, err = Lookup(unix.Mkdev(major, minor)); err != nil {
			return nil, err
		}
		out = append(out, x)
	}

	return out, nil
}

// Above lists the devices built on d: its partitions, and mapper and RAID devices, but not loop devices, which use
// files.
func (d Device) Above() ([]Device, error) {
	var dirs []string
	for _, pattern := range []string{"*/partition", "holders/*"} {
		found, err := filepath.Glob(filepath.Join(d.dir, pattern))
		if err != nil {
			return nil, err
		}
		for _, f := range found {
			dirs = append(dirs, strings.TrimSuffix(f, "/partition"))
		}
	}

	var out []Device
	for _, dir := range dirs {
		var major, minor uint32
		if _, err := fmt.Sscanf(Device{dir: dir}.text("dev"), "%d:%d", &major, &minor); err != nil {
			continue // it has been removed
		}
		x, err := Lookup(unix.Mkdev(major, minor))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		out = append(out, x)
	}

	return out, nil
}

// HiddenCache returns the evidence that a device has a volatile cache although the kernel is set to assume none
// (queue/write_cache is "write through") and drops its flushes. It returns "" if the kernel flushes, or without
// evidence: NVMe drives are not queried, because only root can.
func (d Device) HiddenCache() string {
	switch {
	case d.VolatileCache || d.Kind == Partition: // a partition uses its disk's queue
		return ""
	case d.Kind == Loop && !d.ReadOnly && d.Backing != "":
		// The driver claims a volatile cache for every file that can be synced (drivers/block/loop.c).
		return "data written to its file stays in memory until it is flushed"
	}

	claims, _ := filepath.Glob(filepath.Join(d.dir, "device/scsi_disk/*/cache_type"))
	for _, name := range append(claims, filepath.Join(d.dir, "cache_type")) { // the last: virtio
		if text, err := os.ReadFile(name); err == nil && strings.HasPrefix(string(text), "write back") {
			return "the device reports a volatile cache (cache_type " + strings.TrimSpace(string(text)) + ")"
		}
	}

	if d.FUA && d.Kind == Disk {
		// The kernel enables FUA only for devices with a cache, and keeps it when the setting is overridden.
		return "it supports writing through a volatile cache (FUA)"
	}

	return ""
}

// Stat is the statistics of a device since it was created (Documentation/block/stat.rst of the kernel).
type Stat struct {
	Reads, Writes, Discards, Flushes int64 // completed; Flushes is -1 if the kernel does not count them (before 5.5)

	ReadBytes, WrittenBytes, DiscardedBytes int64

	// ReadTime and the others are the total durations of requests, from queueing to completion.
	ReadTime, WriteTime, DiscardTime, FlushTime time.Duration

	InFlight  int64         // now
	BusyTime  time.Duration // with at least one request in flight
	QueueTime time.Duration // BusyTime weighted by the number in flight
}

// Stat reads the statistics. Partitions have no counts of flushes: the kernel counts them for the disk.
func (d Device) Stat() (Stat, error) {
	b, err := os.ReadFile(filepath.Join(d.dir, "stat"))
	if err != nil {
		return Stat{}, err
	}
	s, err := parseStat(string(b))
	if err == nil && d.Kind == Partition {
		s.Flushes = -1
	}
	return s, err
}

func parseStat(text string) (Stat, error) {
	f := strings.Fields(text)
	if len(f) < 11 {
		return Stat{}, fmt.Errorf("%d fields of block statistics, at least 11 expected", len(f))
	}

	n := make([]int64, 17)
	for i := range min(len(f), len(n)) {
		v, err := strconv.ParseUint(f[i], 10, 64)
		if err != nil {
			return Stat{}, fmt.Errorf("block statistics: %w", err)
		}
		n[i] = int64(v)
	}

	ms := func(v int64) time.Duration { return time.Duration(v) * time.Millisecond }
	s := Stat{
		Reads: n[0], ReadBytes: n[2] * sectorBytes, ReadTime: ms(n[3]),
		Writes: n[4], WrittenBytes: n[6] * sectorBytes, WriteTime: ms(n[7]),
		InFlight: n[8], BusyTime: ms(n[9]), QueueTime: ms(n[10]),
		Discards: n[11], DiscardedBytes: n[13] * sectorBytes, DiscardTime: ms(n[14]),
		Flushes: n[15], FlushTime: ms(n[16]),
	}

	if len(f) < 16 {
		s.Flushes = -1
	}

	return s, nil
}

// Minus returns the difference of two readings; InFlight is that of s.
func (s Stat) Minus(o Stat) Stat {
	d := Stat{
		Reads: s.Reads - o.Reads, Writes: s.Writes - o.Writes, Discards: s.Discards - o.Discards, Flushes: -1,
		ReadBytes: s.ReadBytes - o.ReadBytes, WrittenBytes: s.WrittenBytes - o.WrittenBytes,
		DiscardedBytes: s.DiscardedBytes - o.DiscardedBytes,
		ReadTime:       s.ReadTime - o.ReadTime, WriteTime: s.WriteTime - o.WriteTime,
		DiscardTime: s.DiscardTime - o.DiscardTime, FlushTime: s.FlushTime - o.FlushTime,
		InFlight: s.InFlight, BusyTime: s.BusyTime - o.BusyTime, QueueTime: s.QueueTime - o.QueueTime,
	}
	if s.Flushes >= 0 && o.Flushes >= 0 {
		d.Flushes = s.Flushes - o.Flushes
	}
	return d
}
