package kernel

import (
	"fmt"
	"os"

	"github.com/prometheus/procfs"
)

// Memory is the memory of the host, in bytes: see proc_meminfo(5). What the kernel does not report is 0.
type Memory struct {
	Total, Available   int64
	Dirty, Writeback   int64 // waiting to be written, and being written
	Slab, SReclaimable int64 // of the kernel's own objects: all, and what it can free
	Cached             int64 // of files, and Shmem
	Buffers            int64 // cached from block devices: metadata of filesystems
	Shmem              int64 // of tmpfs and shared memory
}

// ReadMemory reads /proc/meminfo.
func ReadMemory() (Memory, error) {
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return Memory{}, err
	}

	m, err := proc.Meminfo()
	if err != nil {
		return Memory{}, fmt.Errorf("read /proc/meminfo: %w", err)
	}

	bytes := func(p *uint64) int64 {
		if p == nil {
			return 0
		}
		return int64(*p)
	}

	return Memory{
		Total: bytes(m.MemTotalBytes), Available: bytes(m.MemAvailableBytes),
		Dirty: bytes(m.DirtyBytes), Writeback: bytes(m.WritebackBytes),
		Slab: bytes(m.SlabBytes), SReclaimable: bytes(m.SReclaimableBytes),
		Cached: bytes(m.CachedBytes), Buffers: bytes(m.BuffersBytes), Shmem: bytes(m.ShmemBytes),
	}, nil
}

// SlabCache is a cache of kernel objects of one type.
type SlabCache struct {
	Name    string
	Objects int64 // in use
	Bytes   int64 // of all its slabs, whole
}

// SlabCaches reads /proc/slabinfo: see slabinfo(5). Permission without root; not every kernel has it.
func SlabCaches() ([]SlabCache, error) {
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return nil, err
	}

	info, err := proc.SlabInfo()
	if err != nil {
		return nil, fmt.Errorf("read /proc/slabinfo: %w", err)
	}

	out := make([]SlabCache, len(info.Slabs))
	for i, s := range info.Slabs {
		out[i] = SlabCache{s.Name, s.ObjActive, s.SlabNum * s.PagesPerSlab * int64(os.Getpagesize())}
	}

	return out, nil
}

// Pressure is the share of the last minute, in percent, in which tasks waited for a resource:
// Documentation/accounting/psi.rst of Linux.
type Pressure struct {
	Some, Full float64 // some task, all tasks
}

// ReadPressure reads the pressure on "io" or "memory". NotFound and Unsupported: this kernel does not report it.
func ReadPressure(resource string) (p Pressure, err error) {
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return p, err
	}

	stats, err := proc.PSIStatsForResource(resource)
	if err != nil {
		return p, fmt.Errorf("read /proc/pressure/%s: %w", resource, err)
	}

	if stats.Some != nil {
		p.Some = stats.Some.Avg60
	}
	if stats.Full != nil {
		p.Full = stats.Full.Avg60
	}

	return p, nil
}
