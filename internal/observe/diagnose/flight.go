package diagnose

import (
	"slices"
	"strings"
)

// maxInFlight limits the requests remembered for a device: requests whose completion was missed must not pile up.
const maxInFlight = 4096

// request is a request that was queued to a device and is not complete.
type request struct {
	at            uint64 // when
	sector, count uint64 // in sectors
	flush         bool   // it is, or begins with, a flush
	discard       bool
	kernel        bool    // sent by a kernel thread
	others        float64 // the part of it that is for others, from 0 to 1
}

// device is the state of a device while events are replayed.
type device struct {
	name  string
	depth int // less than 64: see package stack
	above int // the next depth above with a device; -1 if there is none

	inFlight                   []request
	flushes, discards, kernels int // of them
	othersLoad                 float64

	// idle is a time at which the kernel had nothing in flight: earlier requests have ended unseen, as the parts of a
	// merged discard do.
	idle uint64
}

// flight replays the requests of devices, in the order of the stack, and adds up times. Times are in nanoseconds of the
// kernel's monotonic clock.
type flight struct {
	devices []*device
	depths  int
	now     uint64
	sums    []float64 // see the places below
}

// Places in the sums: first the time in which no device had a request, then for each depth the time in which it was the
// deepest with a request of processes that sync here, then four for each device.
const (
	placeNowhere = 0
	placeDepths  = 1

	sumBusy    = 0 // a request in flight that is not all for others
	sumFlush   = 1 // and a flush
	sumOthers  = 2 // busy, by the part of its requests that is for others
	sumDiscard = 3 // busy, by the part of its requests that are discards
	sumPlaces  = 4
)

// leastOwn is the minimum part of a request that must not be for others.
const leastOwn = 0.05

func newFlight(devices []*device) *flight {
	f := &flight{devices: devices}
	for _, d := range devices {
		f.depths = max(f.depths, d.depth+1)
		d.above = -1
		for _, x := range devices {
			if x.depth < d.depth {
				d.above = max(d.above, x.depth)
			}
		}
	}

	f.sums = make([]float64, placeDepths+f.depths+sumPlaces*len(devices))
	return f
}

// of returns the place of a sum of the i-th device.
func (f *flight) of(i, what int) int { return placeDepths + f.depths + i*sumPlaces + what }

// reset forgets the requests in flight: nothing was recorded until t.
func (f *flight) reset(t uint64) {
	f.now = t
	for _, d := range f.devices {
		d.inFlight, d.flushes, d.discards, d.kernels, d.othersLoad = d.inFlight[:0], 0, 0, 0, 0
	}
}

// advance adds up the times until t.
func (f *flight) advance(t uint64) {
	if t < f.now {
	}
	if t <= f.now { // events of two processors, a little out of order
		return
	}

	dt := float64(t - f.now)
	f.now = t
	deepest := -1
	var active uint64 // depths with something that a sync here can wait for, as bits
	for i, d := range f.devices {
		if d.idle != 0 && t > d.idle {
			d.settleAt(d.idle)
			d.idle = 0
		}

		n, others := float64(len(d.inFlight)), d.othersLoad
		if n == 0 {
			continue
		}

		if d.above >= 0 {
			// Requests of kernel threads belong to the device above, which waits for them.
			if active&(1<<d.above) == 0 || d.kernels == 0 && n-others < leastOwn {
				continue
			}
			if d.kernels > 0 {
				others = min(others, n-1)
			}
		} else if n-others < leastOwn {
			continue
		}

		active |= 1 << d.depth
		deepest = max(deepest, d.depth)
		f.sums[f.of(i, sumBusy)] += dt
		f.sums[f.of(i, sumOthers)] += dt * others / n
		f.sums[f.of(i, sumDiscard)] += dt * float64(d.discards) / n
		if d.flushes > 0 {
			f.sums[f.of(i, sumFlush)] += dt
		}
	}

	f.sums[placeDepths+deepest] += dt // -1: placeNowhere
}

// queue records that a request was queued to the device. rwbs is the kernel's: "FWS", "D", ...
func (d *device) queue(r request, rwbs string) {
	r.flush = strings.HasPrefix(rwbs, "F")
	r.discard = strings.HasPrefix(rwbs, "D")
	if len(d.inFlight) >= maxInFlight {
		d.drop(0)
	}

	d.inFlight = append(d.inFlight, r)
	d.othersLoad += r.others
	if r.flush {
		d.flushes++
	}
	if r.discard {
		d.discards++
	}
	if r.kernel {
		d.kernels++
	}
}

func (d *device) drop(i int) {
	r := d.inFlight[i]
	d.inFlight = slices.Delete(d.inFlight, i, i+1)
	d.othersLoad -= r.others
	if len(d.inFlight) == 0 {
		d.othersLoad = 0 // remove rounding errors
	}
	if r.flush {
		d.flushes--
	}
	if r.discard {
		d.discards--
	}
	if r.kernel {
		d.kernels--
	}
}

// complete records that the device has done count sectors from sector on. Requests that the kernel merged complete
// together. Without sectors the oldest flush completes.
func (d *device) complete(sector, count uint64) {
	for i := 0; i < len(d.inFlight); {
		r := d.inFlight[i]
		switch {
		case count == 0 && r.count == 0:
			d.drop(i)
			return
		case count > 0 && r.count > 0 && r.sector >= sector && r.sector < sector+count:
			d.drop(i)
		default:
			i++
		}
	}
}

// settleAt drops requests queued before a time at which the device was idle.
func (d *device) settleAt(idle uint64) {
	for i := 0; i < len(d.inFlight); {
		if d.inFlight[i].at < idle {
			d.drop(i)
		} else {
			i++
		}
	}
}

// completeAt records that the device has done the request that ends at a sector.
func (d *device) completeAt(end uint64) {
	for i, r := range d.inFlight {
		if r.sector+r.count == end {
			d.drop(i)
			return
		}
	}
}
