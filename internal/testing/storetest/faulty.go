package storetest

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// Op is a method of a store.
type Op string

// The operations.
const (
	Put    Op = "put"
	Get    Op = "get"
	Stat   Op = "stat"
	List   Op = "list"
	Delete Op = "delete"
)

// Call is one call of a store's method.
type Call struct {
	N         int // its place among all calls, from 0
	Op        Op
	Key       string // the prefix, of List
	Condition objstore.Condition
	Bytes     int   // of the data, of Put
	Offset    int64 // of Get
	Length    int64 // of Get
}

// String is for the log of a test.
func (c Call) String() string {
	switch c.Op {
	case Put:
		how := ""
		if c.Condition.Absent() {
			how = " if absent"
		} else if v := c.Condition.Version(); v != "" {
			how = fmt.Sprintf(" if %q", v)
		}
		return fmt.Sprintf("#%d put %s, %d bytes%s", c.N, c.Key, c.Bytes, how)
	case Get:
		return fmt.Sprintf("#%d get %s [%d, +%d)", c.N, c.Key, c.Offset, c.Length)
	}

	return fmt.Sprintf("#%d %s %s", c.N, c.Op, c.Key)
}

// When a fault strikes.
type When int

const (
	Before When = iota // the operation is not done
	After              // it is done, and its answer is lost. Of List: after half of what it finds
)

// Fault is what goes wrong. The zero value makes the first call fail, before its
// effect, with a temporary error.
type Fault struct {
	// Match selects calls; nil: all. At is the number among those, from 0, of the
	// first that is struck, Times how many are: 0 is one, below 0 all from there on.
	// With a permanent error the latter is a store that has vanished.
	Match func(Call) bool
	At    int
	Times int

	When When
	// Err is what the call returns; nil: a temporary error of kind IO.
	Err error

	// Change, if it is set, makes no error: it changes what Get returns. data is a
	// copy.
	Change func(c Call, data []byte) []byte

	// Delay, if it is set, makes no error: the call takes this much longer, before
	// its effect. The end of its context ends it.
	Delay time.Duration

	// Do, if it is set, is called when the fault strikes, at the moment When, and
	// makes no error by itself: for what somebody else does just then.
	Do func(Call)
}

// Permanent is an error that is not worth another try.
func Permanent(kind errs.Kind) error {
	return errs.New(kind, "use store", "", "made to fail by a test")
}

// Flip is for Fault.Change: it flips one bit of the byte at the offset in the
// object, if the answer has that.
func Flip(offset int64, bit uint) func(Call, []byte) []byte {
	return func(c Call, data []byte) []byte {
		if at := offset - c.Offset; at >= 0 && at < int64(len(data)) {
			data[at] ^= 1 << (bit % 8)
		}
		return data
	}
}

// Ops is for Fault.Match: calls of these operations.
func Ops(ops ...Op) func(Call) bool {
	return func(c Call) bool { return slices.Contains(ops, c.Op) }
}

// Faulted is a store with faults. It is safe for concurrent use if the store below
// is.
type Faulted struct {
	s objstore.Store

	mu     sync.Mutex
	calls  []Call
	faults []*armed
}

type armed struct {
	Fault
	seen  int // calls that matched
	fired int
}

// Faulty is s with faults; without any it only counts. Every fault that matches a
// call strikes, in the order given; the first with an error decides what the call
// returns.
func Faulty(s objstore.Store, faults ...Fault) *Faulted {
	f := &Faulted{s: s}
	f.Add(faults...)
	return f
}

// Add adds faults, which count from now on.
func (f *Faulted) Add(faults ...Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, x := range faults {
		f.faults = append(f.faults, &armed{Fault: x})
	}
}

// KeepReserve implements objstore.Reserver; it is no call that faults strike.
func (f *Faulted) KeepReserve(ctx context.Context) error { return objstore.KeepReserve(ctx, f.s) }

// Heal removes all faults.
func (f *Faulted) Heal() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.faults = nil
}

// Calls are all calls so far, in the order in which they began.
func (f *Faulted) Calls() []Call {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.calls)
}

// Count is how many calls of these operations there were; of all, without any.
func (f *Faulted) Count(ops ...Op) int {
	n := 0
	for _, c := range f.Calls() {
		if len(ops) == 0 || slices.Contains(ops, c.Op) {
			n++
		}
	}
	return n
}

// Fired is how often faults have struck so far.
func (f *Faulted) Fired() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, a := range f.faults {
		n += a.fired
	}
	return n
}

// struck is what strikes one call.
type struck struct {
	call   Call
	faults []Fault
}

func (f *Faulted) note(c Call) struck {
	f.mu.Lock()
	defer f.mu.Unlock()
	c.N = len(f.calls)
	f.calls = append(f.calls, c)
	x := struck{call: c}
	for _, a := range f.faults {
		if a.Match != nil && !a.Match(c) {
			continue
		}
		n := a.seen
		a.seen++
		if n >= a.At && (a.Times < 0 || n < a.At+max(a.Times, 1)) {
			a.fired++
			x.faults = append(x.faults, a.Fault)
		}
	}

	return x
}

// at is what the faults of a moment do.
func (x struck) at(ctx context.Context, when When) error {
	var failed error
	for _, f := range x.faults {
		if f.Delay > 0 && when == Before {
			timer := time.NewTimer(f.Delay)
			select {
			case <-timer.C:
			case <-ctx.Done():
				timer.Stop()
				return objstore.Ended(ctx, string(x.call.Op), x.call.Key)
			}
		}

		if f.When != when {
			continue
		}
		if f.Do != nil {
			f.Do(x.call)
		}
		if failed != nil || f.Do != nil && f.Err == nil || f.Change != nil || f.Delay > 0 {
			continue
		}

		if failed = f.Err; failed == nil {
			failed = objstore.Transient(errs.New(errs.IO, string(x.call.Op)+" object", x.call.Key,
				"made to fail by a test (call %s)", x.call))
		}
	}

	return failed
}

func (f *Faulted) String() string { return f.s.String() }

// Put implements objstore.Store.
func (f *Faulted) Put(ctx context.Context, key string, data []byte, c objstore.Condition) (objstore.Version, error) {
	x := f.note(Call{Op: Put, Key: key, Condition: c, Bytes: len(data)})
	if err := x.at(ctx, Before); err != nil {
		return "", err
	}
	v, err := f.s.Put(ctx, key, data, c)
	if lost := x.at(ctx, After); lost != nil {
		return "", lost
	}
	return v, err
}

// Get implements objstore.Store.
func (f *Faulted) Get(ctx context.Context, key string, offset, length int64) ([]byte, objstore.Info, error) {
	x := f.note(Call{Op: Get, Key: key, Offset: offset, Length: length})
	if err := x.at(ctx, Before); err != nil {
		return nil, objstore.Info{}, err
	}

	data, info, err := f.s.Get(ctx, key, offset, length)
	if lost := x.at(ctx, After); lost != nil {
		return nil, objstore.Info{}, lost
	}

	if err == nil {
		for _, fault := range x.faults {
			if fault.Change != nil {
				data = fault.Change(x.call, slices.Clone(data))
			}
		}
	}

	return data, info, err
}

// Stat implements objstore.Store.
func (f *Faulted) Stat(ctx context.Context, key string) (objstore.Info, error) {
	x := f.note(Call{Op: Stat, Key: key})
	if err := x.at(ctx, Before); err != nil {
		return objstore.Info{}, err
	}
	info, err := f.s.Stat(ctx, key)
	if lost := x.at(ctx, After); lost != nil {
		return objstore.Info{}, lost
	}
	return info, err
}

// Delete implements objstore.Store.
func (f *Faulted) Delete(ctx context.Context, key string) error {
	x := f.note(Call{Op: Delete, Key: key})
	if err := x.at(ctx, Before); err != nil {
		return err
	}
	err := f.s.Delete(ctx, key)
	if lost := x.at(ctx, After); lost != nil {
		return lost
	}
	return err
}

// List implements objstore.Store.
func (f *Faulted) List(ctx context.Context, prefix string) iter.Seq2[objstore.Info, error] {
	return func(yield func(objstore.Info, error) bool) {
		x := f.note(Call{Op: List, Key: prefix})
		if err := x.at(ctx, Before); err != nil {
			yield(objstore.Info{}, err)
			return
		}

		var found []objstore.Info
		var failed error
		for info, err := range f.s.List(ctx, prefix) {
			if err != nil {
				failed = err
				break
			}
			found = append(found, info)
		}

		if lost := x.at(ctx, After); lost != nil {
			found, failed = found[:len(found)/2], lost
		}

		for _, info := range found {
			if !yield(info, nil) {
				return
			}
		}

		if failed != nil {
			yield(objstore.Info{}, failed)
		}
	}
}
