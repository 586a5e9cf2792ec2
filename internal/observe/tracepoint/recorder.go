package tracepoint

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"unsafe"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Record is one event.
type Record struct {
	Event *Event
	Time  uint64 // nanoseconds of CLOCK_MONOTONIC
	PID   int    // of the process (thread group); 0 and -1: the kernel itself
	TID   int    // of the thread
	CPU   int
	Raw   []byte // read it with Event.Int and Event.String
}

// Spec is an event to record.
type Spec struct {
	Event  string // "block:block_bio_queue"
	Filter string // as of Count
}

// Recorder records events of all processes. It is for one goroutine.
type Recorder struct {
	rings []*ring
	more  []int // descriptors of further events that write to the rings
	ids   map[uint64]*Event
	lost  uint64
}

// ring is the buffer of a CPU, which the kernel fills.
type ring struct {
	fd, cpu int
	mem     []byte
}

// ringPages returns the size of a CPU's buffer in pages, a power of two: 4 MiB, or less on hosts with so many CPUs that
// all buffers would exceed 64 MiB, but at least 256 KiB.
func ringPages(processors int) int {
	n := 1 << 10
	for n > 1<<6 && n*processors > 16<<10 {
		n /= 2
	}
	return n
}

// Record starts recording; events of all specs are in a single order.
func NewRecorder(specs ...Spec) (*Recorder, error) {
	r := &Recorder{ids: map[uint64]*Event{}}
	fail := func(err error) (*Recorder, error) {
		_ = r.Close()
		return nil, err
	}
	type target struct {
		*Event
		filter string
	}
	var events []target
	for _, s := range specs {
		e, err := Lookup(s.Event)
		if err != nil {
			return fail(err)
		}
		events = append(events, target{e, s.Filter})
	}

	page := os.Getpagesize()
	all := cpus()
	for _, cpu := range all {
		var first *ring
		for _, e := range events {
			attr := unix.PerfEventAttr{
				Type: unix.PERF_TYPE_TRACEPOINT, Config: e.ID, Sample: 1,
				Sample_type: unix.PERF_SAMPLE_IDENTIFIER | unix.PERF_SAMPLE_TID | unix.PERF_SAMPLE_TIME | unix.PERF_SAMPLE_CPU |
					unix.PERF_SAMPLE_RAW,
				Bits: unix.PerfBitUseClockID, Clockid: unix.CLOCK_MONOTONIC,
			}

			fd, err := open(&attr, Everything, cpu, e.Name, e.filter)
			if errors.Is(err, unix.ENODEV) {
				break // the CPU is offline
			}
			if err != nil {
				return fail(err)
			}

			var id uint64
			if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.PERF_EVENT_IOC_ID,
				uintptr(unsafe.Pointer(&id))); errno != 0 {
				_ = unix.Close(fd)
				return fail(errs.Wrap("trace the kernel", e.Name, fmt.Errorf("PERF_EVENT_IOC_ID: %w", errno)))
			}

			r.ids[id] = e.Event
			if first != nil {
				r.more = append(r.more, fd)
				if err := unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_SET_OUTPUT, first.fd); err != nil {
					return fail(errs.Wrap("trace the kernel", e.Name, fmt.Errorf("PERF_EVENT_IOC_SET_OUTPUT: %w", err)))
				}
				continue
			}

			mem, err := unix.Mmap(fd, 0, (1+ringPages(len(all)))*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err != nil {
				_ = unix.Close(fd)
				return fail(errs.Wrap("trace the kernel", e.Name, fmt.Errorf("map the buffer: %w", err)))
			}

			first = &ring{fd: fd, cpu: cpu, mem: mem}
			r.rings = append(r.rings, first)
		}
	}

	return r, nil
}

// Read returns the records since the last call, in order of time. Lost is the number of events since the start that
// were dropped because the buffer was full: read more often.
func (r *Recorder) Read() (records []Record, lost uint64, err error) {
	for _, g := range r.rings {
		if records, err = r.drain(g, records); err != nil {
			return nil, r.lost, err
		}
	}
	slices.SortStableFunc(records, func(a, b Record) int { return cmp.Compare(a.Time, b.Time) })
	return records, r.lost, nil
}

// Kinds of records: perf_event_open(2).
const (
	recordLost   = 2
	recordSample = 9
)

func (r *Recorder) drain(g *ring, out []Record) ([]Record, error) {
	page := os.Getpagesize()
	meta := (*unix.PerfEventMmapPage)(unsafe.Pointer(&g.mem[0]))
	data := g.mem[page:]
	size := uint64(len(data))
	head := atomic.LoadUint64(&meta.Data_head)
	tail := meta.Data_tail
	for tail < head {
		header := g.at(data, tail, 8)
		kind, n := binary.NativeEndian.Uint32(header), uint64(binary.NativeEndian.Uint16(header[6:]))
		if n < 8 || n > size {
			return nil, errs.New(errs.Internal, "trace the kernel", "", "a record of %d bytes", n)
		}

		body := g.at(data, tail, n)[8:]
		tail += n
		switch {
		case kind == recordLost && len(body) >= 16:
			r.lost += binary.NativeEndian.Uint64(body[8:])
		case kind == recordSample && len(body) >= 36:
			// identifier, pid, tid, time, cpu, reserved, size of raw, raw
			rawSize := int(binary.NativeEndian.Uint32(body[32:]))
			e := r.ids[binary.NativeEndian.Uint64(body)]
			if e == nil || 36+rawSize > len(body) {
				continue
			}
			out = append(out, Record{
				Event: e, PID: int(int32(binary.NativeEndian.Uint32(body[8:]))),
				TID:  int(int32(binary.NativeEndian.Uint32(body[12:]))),
				Time: binary.NativeEndian.Uint64(body[16:]), CPU: int(binary.NativeEndian.Uint32(body[24:])), Raw: body[36 : 36+
					rawSize],
			})
		}
	}

	atomic.StoreUint64(&meta.Data_tail, tail)
	return out, nil
}

// at copies n bytes out of the ring, where they may wrap around.
func (g *ring) at(data []byte, pos, n uint64) []byte {
	out := make([]byte, n)
	from := pos % uint64(len(data))
	k := copy(out, data[from:])
	copy(out[k:], data)
	return out
}

// Close stops recording.
func (r *Recorder) Close() error {
	var all []error
	for _, fd := range r.more {
		all = append(all, unix.Close(fd))
	}
	for _, g := range r.rings {
		all = append(all, unix.Munmap(g.mem), unix.Close(g.fd))
	}
	r.rings, r.more = nil, nil
	return errors.Join(all...)
}
