// Package tracepoint counts and records kernel events (tracepoints, Documentation/trace/events.rst) through
// perf_event_open(2).
// All state is in file descriptors, so a killed process leaves neither a tracing instance nor an enabled event behind.
// Tracefs is needed only for the numbers and layouts of events; if it is not mounted, this process mounts it privately,
// without a path.
// Counting costs the traced program almost nothing, because the kernel filters and counts in place; recording costs a
// few hundred nanoseconds for each event, so record only in short windows.
package tracepoint

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// root returns the path of tracefs, and keeps a private mount open.
var root = sync.OnceValues(func() (string, error) {
	// Not below /sys/kernel/debug, where a lookup mounts it.
	const dir = "/sys/kernel/tracing"
	if _, err := os.Stat(filepath.Join(dir, "events/block")); err == nil {
		return dir, nil
	} else if errors.Is(err, fs.ErrPermission) {
		return "", errs.New(errs.Permission, "trace the kernel", "", "%s cannot be read: %w", dir,
			err).WithHint("run it as root")
	}

	d, err := mount.Device("tracefs", "tracefs", nil, true)
	if err != nil {
		kind := errs.KindOf(err)
		if kind != errs.Permission {
			kind = errs.Unsupported
		}
		e := errs.New(kind, "trace the kernel", "", "no tracefs: %w", err)
		if kind == errs.Permission {
			return "", e.WithHint("run it as root")
		}
		return "", e.WithHint("use a kernel with CONFIG_FTRACE and tracefs")
	}

	top, err := d.Open()
	if err != nil {
		return "", errs.Wrap("trace the kernel", "", err)
	}

	keep = []any{d, top} // as long as the process lives
	return fmt.Sprintf("/proc/self/fd/%d", top.Fd()), nil
})

var keep []any

// Available returns the reason why events cannot be counted, or nil: Permission without root (or with a strict
// kernel.perf_event_paranoid), Unsupported without tracefs or perf events.
func Available() error {
	c, err := Count("block:block_bio_queue", "", Everything)
	if err != nil {
		return err
	}
	return c.Close()
}

// Event is the number of a tracepoint and the layout of its records.
type Event struct {
	Name   string // "block:block_bio_queue"
	ID     uint64
	Fields map[string]Field
}

// Field is a field of a record.
type Field struct {
	Offset, Size int
	Signed       bool
	Dynamic      bool // __data_loc: the field holds the offset and the length of its content
}

// Lookup finds an event named SYSTEM:NAME. Unsupported if this kernel lacks it.
func Lookup(name string) (*Event, error) {
	dir, err := root()
	if err != nil {
		return nil, err
	}

	system, event, _ := strings.Cut(name, ":")
	text, err := os.ReadFile(filepath.Join(dir, "events", system, event, "format"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errs.New(errs.Unsupported, "trace the kernel", name, "this kernel lacks the event")
	}
	if err != nil {
		return nil, errs.Wrap("trace the kernel", name, err)
	}

	runtime.KeepAlive(keep)
	e, err := parseFormat(string(text))
	if err != nil {
		return nil, errs.New(errs.Unsupported, "trace the kernel", name, "the event's format: %w", err)
	}

	e.Name = name
	return e, nil
}

var fieldLine = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^\s*field:(.*?)(\w+)(\[\d*\])?;\s*offset:(\d+);\s*size:(\d+);\s*signed:([01]);`)
})

func parseFormat(text string) (*Event, error) {
	e := &Event{Fields: map[string]Field{}}
	for line := range strings.Lines(text) {
		if id, ok := strings.CutPrefix(line, "ID: "); ok {
			n, err := strconv.ParseUint(strings.TrimSpace(id), 10, 32)
			if err != nil {
				return nil, err
			}
			e.ID = n
			continue
		}

		m := fieldLine().FindStringSubmatch(line)
		if m == nil {
			continue
		}

		offset, err1 := strconv.Atoi(m[4])
		size, err2 := strconv.Atoi(m[5])
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}

		e.Fields[m[2]] = Field{Offset: offset, Size: size, Signed: m[6] == "1", Dynamic: strings.Contains(m[1], "__data_loc")}
	}

	if e.ID == 0 || len(e.Fields) == 0 {
		return nil, errors.New("no ID or no fields")
	}

	return e, nil
}

// Scope selects the processes whose events count.
type Scope int

const (
	// Everything selects all processes and the kernel itself. A positive Scope is a process ID, and selects its threads
	// and the processes they start from then on.
	Everything Scope = -1

	// Children selects the programs that the calling thread starts from then on, and their descendants, from their exec
	// on, but neither the thread itself nor children of other threads. The caller must lock its goroutine to the thread
	// (runtime.LockOSThread), and start the program from there, and nothing else.
	Children Scope = 0
)

// Counter counts the events that match a filter. Its methods are safe for concurrent use.
type Counter struct {
	fds []int
	mu  sync.Mutex
}

// Count starts counting. The filter is in the kernel's language (Documentation/trace/events.rst, section 5): `dev ==
// 0x700000 && rwbs ~ "*F*"`; an empty one matches all events. For a process, threads count only if they start after the
// call: count a child before its exec.
func Count(event, filter string, scope Scope) (*Counter, error) {
	e, err := Lookup(event)
	if err != nil {
		return nil, err
	}

	c := &Counter{}
	for _, cpu := range cpusFor(scope) {
		attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_TRACEPOINT, Config: e.ID}
		if scope != Everything {
			attr.Bits |= unix.PerfBitInherit
		}
		if scope == Children {
			attr.Bits |= unix.PerfBitDisabled | unix.PerfBitEnableOnExec
		}

		fd, err := open(&attr, scope, cpu, event, filter)
		if errors.Is(err, unix.ENODEV) {
			continue // the CPU is offline
		}

		if err != nil {
			_ = c.Close()
			return nil, err
		}

		c.fds = append(c.fds, fd)
	}

	return c, nil
}

// Read returns the number of events so far. It fails after Close.
func (c *Counter) Read() (uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fds == nil {
		return 0, os.ErrClosed
	}

	var sum uint64
	for _, fd := range c.fds {
		var b [8]byte
		n, err := unix.Read(fd, b[:])
		if err != nil {
			return 0, fmt.Errorf("read a counter of events: %w", err)
		}
		if n != len(b) {
			return 0, fmt.Errorf("read a counter of events: %d bytes", n)
		}
		sum += binary.NativeEndian.Uint64(b[:])
	}

	return sum, nil
}

// Close stops counting.
func (c *Counter) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []error
	for _, fd := range c.fds {
		all = append(all, unix.Close(fd))
	}
	c.fds = nil
	return errors.Join(all...)
}

func open(attr *unix.PerfEventAttr, scope Scope, cpu int, event, filter string) (int, error) {
	attr.Size = uint32(unsafe.Sizeof(*attr))
	fd, err := unix.PerfEventOpen(attr, int(scope), cpu, -1, unix.PERF_FLAG_FD_CLOEXEC)
	switch {
	case errs.IsAny(err, unix.EACCES, unix.EPERM):
		return 0, errs.New(errs.Permission, "trace the kernel", event, "perf_event_open: %w", err).WithHint("run it as root")
	case errs.IsAny(err, unix.ENOSYS, unix.EOPNOTSUPP, unix.ENOENT):
		return 0, errs.New(errs.Unsupported, "trace the kernel", event, "perf_event_open: %w",
			err).WithHint("use a kernel with CONFIG_PERF_EVENTS")
	case err != nil:
		return 0, errs.Wrap("trace the kernel", event, fmt.Errorf("perf_event_open: %w", err))
	}

	if filter == "" {
		return fd, nil
	}

	text, err := unix.BytePtrFromString(filter)
	if err == nil {
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.PERF_EVENT_IOC_SET_FILTER,
			uintptr(unsafe.Pointer(text))); errno != 0 {
			err = errno
		}
	}
	if err != nil {
		_ = unix.Close(fd)
		return 0, errs.New(errs.Internal, "trace the kernel", event, "the filter %s: %w", filter, err)
	}

	return fd, nil
}

// cpusFor lists the CPUs that need a descriptor each: all online CPUs, even for a process, because the kernel records
// inherited events only by CPU.
func cpusFor(scope Scope) []int {
	if scope != Everything {
		return []int{-1}
	}
	return cpus()
}

func cpus() []int {
	text, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err != nil {
		return []int{0}
	}
	return parseCPUs(strings.TrimSpace(string(text)))
}

// parseCPUs reads "0-3,8".
func parseCPUs(s string) (out []int) {
	for part := range strings.SplitSeq(s, ",") {
		a, b, isRange := strings.Cut(part, "-")
		if !isRange {
			b = a
		}
		from, err1 := strconv.Atoi(a)
		to, err2 := strconv.Atoi(b)
		if err1 != nil || err2 != nil {
			continue
		}
		for n := from; n <= to; n++ {
			out = append(out, n)
		}
	}

	return out
}

// Int reads a number from a record's raw bytes; 0 if it has no such field.
func (e *Event) Int(raw []byte, field string) int64 {
	f, ok := e.Fields[field]
	if !ok || f.Offset+f.Size > len(raw) {
		return 0
	}

	b := raw[f.Offset : f.Offset+f.Size]
	switch {
	case f.Size == 1 && f.Signed:
		return int64(int8(b[0]))
	case f.Size == 1:
		return int64(b[0])
	case f.Size == 2 && f.Signed:
		return int64(int16(binary.NativeEndian.Uint16(b)))
	case f.Size == 2:
		return int64(binary.NativeEndian.Uint16(b))
	case f.Size == 4 && f.Signed:
		return int64(int32(binary.NativeEndian.Uint32(b)))
	case f.Size == 4:
		return int64(binary.NativeEndian.Uint32(b))
	case f.Size == 8:
		return int64(binary.NativeEndian.Uint64(b))
	}

	return 0
}

// String reads text from a record's raw bytes, up to its first zero byte.
func (e *Event) String(raw []byte, field string) string {
	f, ok := e.Fields[field]
	if !ok || f.Offset+f.Size > len(raw) {
		return ""
	}

	b := raw[f.Offset : f.Offset+f.Size]
	if f.Dynamic && f.Size == 4 {
		loc := binary.NativeEndian.Uint32(b)
		from, n := int(loc&0xffff), int(loc>>16)
		if from+n > len(raw) {
			return ""
		}
		b = raw[from : from+n]
	}

	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}

	return string(b)
}

// Now returns the time of the clock of recorded events, in nanoseconds; 0 if it cannot be read.
func Now() uint64 {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) != nil {
		return 0
	}
	return uint64(t.Nano())
}

// KernelDev returns a device number in the kernel's own form, as in the dev fields of block events.
func KernelDev(number uint64) uint64 {
	return uint64(unix.Major(number))<<20 | uint64(unix.Minor(number))
}
