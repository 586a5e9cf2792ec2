package service

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine"
)

// States of an operation.
const (
	stateRunning  = "running"
	stateDone     = "done"
	stateFailed   = "failed"
	stateCanceled = "canceled"
)

const (
	maxRunning       = 64             // operations that run at the same time
	maxRunningOfUser = 8              // of these, those of one user without root's rights
	maxFinished      = 1000           // operations that are remembered after their end
	rememberFor      = 24 * time.Hour // how long, at most
	maxResult        = 8 << 20        // bytes of a result that is remembered

	maxFinishedOfUser = 200      // operations of one user without root's rights that are remembered after their end
	maxResultsOfUser  = 32 << 20 // bytes of the results of these

	waitAtMost = 5 * time.Minute // of one request
)

// Operation is long work: it goes on when the request that began it has been answered.
type Operation struct {
	ID         string            `json:"id"`
	Verb       string            `json:"verb" doc:"As on the command line: push, gc"`
	Ref        string            `json:"ref" doc:"What it works on; may be empty"`
	By         string            `json:"by" doc:"Who began it"`
	State      string            `json:"state" enum:"running,done,failed,canceled"`
	StartedAt  time.Time         `json:"started_at"`
	FinishedAt *time.Time        `json:"finished_at"`
	Progress   OperationProgress `json:"progress"`
	Result     any               `json:"result,omitempty" doc:"Of one that is done: as the command prints it as JSON"`
	Error      *Problem          `json:"error,omitempty" doc:"Of one that failed or was canceled"`
	Warnings   []errs.Message    `json:"warnings,omitempty"`
}

// OperationProgress is how far an operation is. Totals are 0 while they are unknown.
type OperationProgress struct {
	Stage      string `json:"stage"`
	Files      int64  `json:"files"`
	Bytes      int64  `json:"bytes"`
	TotalFiles int64  `json:"total_files"`
	TotalBytes int64  `json:"total_bytes"`
	Stalled    string `json:"stalled,omitempty" doc:"Why it makes no progress at the moment"`
}

// work is an operation while it runs, and after.
type work struct {
	metrics  *metrics
	tracker  *progress.Tracker
	warnings *warnings.List
	cancel   context.CancelFunc
	done     chan struct{} // closed at its end
	caller   Caller        // who began it

	mu sync.Mutex
	op Operation // but for its progress and warnings
}

// describe returns the operation as it is now.
func (w *work) describe() Operation {
	w.mu.Lock()
	op := w.op
	w.mu.Unlock()
	if op.Error != nil {
		op.Error = op.Error.in(httpWords{}) // a copy: it is rendered already, and answers are rendered in place
	}

	s := w.tracker.State()
	op.Progress = OperationProgress{Stage: s.Stage, Files: s.Files, Bytes: s.Bytes, TotalFiles: s.TotalFiles,
		TotalBytes: s.TotalBytes}
	if s.Stalled != nil && op.State == stateRunning {
		op.Progress.Stalled = s.Stalled.Answer
	}
	op.Warnings = w.warnings.Messages()
	return op
}

// ended reports whether the operation has ended.
func (w *work) ended() bool {
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}

// partial is the error of work that failed and has a result that explains it.
type partial struct {
	error
	result any
}

// Unwrap returns the error.
func (p partial) Unwrap() error { return p.error }

// finish records the end of the operation, in the words of the caller who began it.
func (w *work) finish(words errs.Renderer, result any, err error) {
	now := time.Now().UTC()
	state, problem := stateDone, (*Problem)(nil)
	if err != nil {
		state, problem, result = stateFailed, problemOf(err).in(words), nil
		if p := (partial{}); errors.As(err, &p) {
			result = p.result
		}
		if errs.Is(err, errs.Canceled) {
			state = stateCanceled
		}
	}

	var text any
	if result != nil {
		b, merr := json.Marshal(errs.Rendered(result, words))
		switch {
		case merr != nil:
			state, problem = stateFailed, problemOf(errs.Wrap(w.op.Verb, w.op.Ref, merr)).in(words)
		case len(b) > maxResult:
			warnings.Add(warnings.Collect(context.Background(), w.warnings), "the result is too long to be kept (%s)",
				errs.FormatBytes(int64(len(b))))
		default:
			text = json.RawMessage(b)
		}
	}

	w.mu.Lock()
	w.op.State, w.op.FinishedAt, w.op.Result, w.op.Error = state, &now, text, problem
	w.metrics.ended(w.op)
	w.mu.Unlock()
	close(w.done)
}

// operations are those that run, and the last ones that have ended. They are kept in memory only.
type operations struct {
	life    context.Context
	metrics *metrics

	mu      sync.Mutex
	refused bool // the service ends
	byID    map[string]*work
	order   []*work // in the order of their beginning
	running sync.WaitGroup
}

func newOperations(life context.Context, m *metrics) *operations {
	return &operations{life: life, metrics: m, byID: map[string]*work{}}
}

// begin adds an operation. InUse if too many run, Canceled if the service ends.
func (o *operations) begin(verb, ref string, by Caller, cancel context.CancelFunc) (*work, error) {
	o.mu.Lock()
	defer o.mu.Unlock()

	if o.refused {
		return nil, errs.New(errs.Canceled, verb, ref, "the service is ending").
			WithHint("repeat it when it has started again")
	}
	o.forgetOld()
	most := maxRunning
	busy := o.countRunning(nil) >= most
	if !busy && !by.trusted() { // a user must not keep others from working
		most = maxRunningOfUser
		busy = o.countRunning(&by) >= most
	}
	if busy {
		return nil, errs.New(errs.InUse, verb, ref, "%d operations are running, and no more may", most).
			WithHint("wait until one of them has ended: GET /v1/operations")
	}

	if other := o.measuring(); other != nil && isBench(verb) {
		return nil, errs.New(errs.InUse, verb, ref, "operation %s measures already, and each would measure the other",
			other.op.ID).WithHint("wait until it has ended, or cancel it: DELETE /v1/operations/%s", other.op.ID)
	}

	o.metrics.began(verb)
	w := &work{metrics: o.metrics, tracker: &progress.Tracker{}, warnings: &warnings.List{}, cancel: cancel,
		done: make(chan struct{}), caller: by,
		op: Operation{ID: string(driver.NewID()), Verb: verb, Ref: ref, By: by.String(), State: stateRunning,
			StartedAt: time.Now().UTC()}}
	o.byID[w.op.ID] = w
	o.order = append(o.order, w)
	o.running.Add(1)
	return w, nil
}

// measuring returns the measurement that runs, or nil. The mutex is held.
func (o *operations) measuring() *work {
	for _, w := range o.order {
		if isBench(w.op.Verb) && !w.ended() {
			return w
		}
	}
	return nil
}

// isBench reports whether a verb measures the host, which it must have for itself.
func isBench(verb string) bool { return strings.HasPrefix(verb, "bench ") }

// countRunning returns how many have not ended; with a caller, of those that it may see. The mutex is held.
func (o *operations) countRunning(of *Caller) int {
	n := 0
	for _, w := range o.order {
		if of != nil && !w.isFor(*of) {
			continue
		}
		if !w.ended() {
			n++
		}
	}
	return n
}

// forgetOld forgets operations that ended long ago, the oldest of too many, and results of users that take too much
// memory. The caller holds the mutex.
func (o *operations) forgetOld() {
	finished, ofUser := 0, map[uint32]int{}
	for _, w := range o.order {
		if w.ended() {
			finished++
			ofUser[w.caller.UID]++
		}
	}
	o.order = slices.DeleteFunc(o.order, func(w *work) bool {
		w.mu.Lock()
		end := w.op.FinishedAt
		w.mu.Unlock()
		tooMany := finished >= maxFinished || !w.caller.trusted() && ofUser[w.caller.UID] >= maxFinishedOfUser
		if end == nil || !tooMany && time.Since(*end) < rememberFor {
			return false
		}
		finished--
		ofUser[w.caller.UID]--
		delete(o.byID, w.op.ID)
		return true
	})

	bytes := map[uint32]int{}
	for _, w := range slices.Backward(o.order) {
		if !w.caller.trusted() {
			bytes[w.caller.UID] += w.keepResult(maxResultsOfUser - bytes[w.caller.UID])
		}
	}
}

// keepResult forgets the result if it has more bytes than most. It returns how many it has then.
func (w *work) keepResult(most int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	text, _ := w.op.Result.(json.RawMessage)
	if len(text) <= most {
		return len(text)
	}
	w.op.Result = nil
	warnings.Add(warnings.Collect(context.Background(), w.warnings), "the result is no longer kept, as newer ones need "+
		"its memory")
	return 0
}

// isFor reports whether a caller may see and cancel an operation: users only their own.
func (w *work) isFor(c Caller) bool {
	return c.trusted() || c.Local && !w.caller.trusted() && w.caller.UID == c.UID
}

// find finds an operation that a caller may see. NotFound.
func (o *operations) find(id string, c Caller) (*work, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if w, ok := o.byID[id]; ok && w.isFor(c) {
		return w, nil
	}
	return nil, errs.New(errs.NotFound, "operation", id, "no such operation: the service remembers the last %d, until it "+
		"restarts", maxFinished).WithHint("GET /v1/operations lists them")
}

// list returns the operations that a caller may see, the newest first.
func (o *operations) list(c Caller) []*work {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.forgetOld()
	out := slices.DeleteFunc(slices.Clone(o.order), func(w *work) bool { return !w.isFor(c) })
	slices.Reverse(out)
	return out
}

// refuse lets no more operations begin.
func (o *operations) refuse() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.refused = true
}

// wait waits until all operations have ended, or ctx has. It reports which.
func (o *operations) wait(ctx context.Context) bool {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		o.running.Wait()
	}()
	select {
	case <-ended:
		return true
	case <-ctx.Done():
		return false
	}
}

// start begins an operation for the caller of a request, and answers with it. The operation has the limits of the
// request.
func (s *Service) start(
	ctx context.Context, verb, ref string, fn func(context.Context, *progress.Tracker) (any, error),
) (*operationAnswer, error) {
	c := callerOf(ctx)
	words := wordsOf(ctx)
	life := context.WithValue(context.WithValue(s.operations.life, callerKey{}, c), wordsKey{}, words)
	life, cancel := context.WithCancel(engine.WithinSame(ctx, life))
	w, err := s.operations.begin(verb, ref, c, cancel)
	if err != nil {
		cancel()
		return nil, err
	}

	life = warnings.Collect(engine.ActAs(life, c.actor(verb)), w.warnings)
	go func() {
		defer s.operations.running.Done()
		defer cancel()
		result, err := fn(life, w.tracker)
		w.finish(words, result, err)
	}()
	return operationAt(w), nil
}

// during runs an operation within the request of its caller, which is streaming its input or output: it ends with the
// request.
func (s *Service) during(
	ctx context.Context, verb, ref string, fn func(context.Context, *progress.Tracker) (any, error),
) (any, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w, err := s.operations.begin(verb, ref, callerOf(ctx), cancel)
	if err != nil {
		return nil, err
	}
	defer s.operations.running.Done()

	result, err := fn(ctx, w.tracker)
	w.finish(wordsOf(ctx), result, err)
	return result, err
}
