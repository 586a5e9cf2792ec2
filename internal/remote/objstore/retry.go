package objstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"sync/atomic"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/logs"

	"github.com/cenkalti/backoff/v5"
)

// DefaultAttempts is the default number of attempts at an operation.
const DefaultAttempts = 10

// DefaultTotal is the default time after its beginning until which an operation is tried again. A connection without
// enough progress is cut after two minutes, so an operation without progress fails within five minutes.
const DefaultTotal = 3 * time.Minute

// RetryOptions say how often and when an operation is retried. The zero value has useful defaults.
type RetryOptions struct {
	// Attempts is the number of attempts in total. 0: DefaultAttempts, which with
	// the other defaults covers outages of about 45 s.
	Attempts int
	// First is the pause after the first failure. Each further pause is twice as
	// long, up to Longest. 0: 200 ms, 15 s. Each is shortened at random by up to a
	// half, so that many clients do not return at the same moment.
	First, Longest time.Duration
	// Total is the time after the beginning of the first attempt until which another may begin. 0: DefaultTotal.
	Total time.Duration
	// Reach replaces Total as long as no connection to the store succeeded: the address may be wrong. 0: as Total.
	Reach time.Duration
	// OnRetry is called before each pause, and OnAnswer when an operation that was retried got its answer. They may be
	// called by several goroutines at once.
	OnRetry  func(Waiting)
	OnAnswer func()
}

// Waiting is a pause before an operation is tried again.
type Waiting struct {
	Err         error  // of the last attempt, a Temporary one
	Answer      Answer // of the store
	Attempt, Of int    // attempts so far, and their maximum
	Pause       time.Duration
}

// String describes the pause for people: "server answers 503, attempt 4 of 10, next in 6 s".
func (w Waiting) String() string {
	return fmt.Sprintf(
		"%s, attempt %d of %d, next in %d s",
		w.Answer.Words,
		w.Attempt,
		w.Of,
		(w.Pause+time.Second-1)/time.Second,
	)
}

// Retry returns a store that retries the operations of s after [Temporary] errors. It
// returns other errors at once, and so the end of the context, even during a pause.
//
// A conditional Put whose answer was lost may have succeeded, so that its next attempt
// conflicts with itself. In that case Retry reads the object: if it has the same bytes,
// the write was ours, and Put returns its version. This is correct for objects that no
// two writers would write with the same bytes (they have a random write ID, or are
// encrypted with a random nonce). If another writer has already replaced our write, the
// result is Conflict although the write succeeded: after a Conflict, the caller must
// read the object.
//
// When Retry gives up, it returns the last error, still a Temporary one. The store is an
// io.Closer, and closes s.
func Retry(s Store, o RetryOptions) Store {
	if o.Attempts <= 0 {
		o.Attempts = DefaultAttempts
	}
	if o.First <= 0 {
		o.First = 200 * time.Millisecond
	}
	if o.Longest <= 0 {
		o.Longest = 15 * time.Second
	}
	if o.Total <= 0 {
		o.Total = DefaultTotal
	}
	if o.Reach <= 0 {
		o.Reach = o.Total
	}

	return &retried{s: s, o: o}
}

type retried struct {
	s       Store
	o       RetryOptions
	reached atomic.Bool // the store has answered, well or not
}

func (r *retried) String() string { return r.s.String() }

// Close implements io.Closer.
func (r *retried) Close() error { return Close(r.s) }

// KeepReserve implements Reserver.
func (r *retried) KeepReserve(ctx context.Context) error { return KeepReserve(ctx, r.s) }

// attempts counts the attempts at one operation, and decides how long to pause. It is a backoff.BackOff.
type attempts struct {
	r        *retried
	wait     backoff.ExponentialBackOff
	n        int
	since    time.Time // when the first began
	err      error     // of the last one
	spent    bool      // there is no other
	notified bool      // somebody was told of a pause
}

// newAttempts returns the attempts of a new operation. Pauses are drawn from a third below to a third above the value
// that doubles: the first one from half of First to First.
func (r *retried) newAttempts() *attempts {
	return &attempts{r: r, wait: backoff.ExponentialBackOff{
		InitialInterval: max(
			r.o.First*3/4,
			1,
		), MaxInterval: max(r.o.Longest*3/4, 1), Multiplier: 2, RandomizationFactor: 1. / 3,
	}}
}

// Reset implements backoff.BackOff: the next attempt is the first.
func (a *attempts) Reset() {
	a.n, a.since = 0, time.Now()
	a.wait.Reset()
}

// NextBackOff implements backoff.BackOff. It is called after a failed attempt.
func (a *attempts) NextBackOff() time.Duration {
	a.n++
	total := a.r.o.Total
	if AnswerOf(a.err).Unreached && !a.r.reached.Load() {
		total = a.r.o.Reach
	}
	pause := a.wait.NextBackOff()
	if a.n >= a.r.o.Attempts || time.Since(a.since)+pause > total {
		a.spent = true
		return backoff.Stop
	}
	return pause
}

// notifyPause reports a pause before the next attempt.
func (a *attempts) notifyPause(ctx context.Context, err error, pause time.Duration) {
	a.notified = true
	w := Waiting{Err: err, Answer: AnswerOf(err), Attempt: a.n, Of: a.r.o.Attempts, Pause: pause}
	logs.From(ctx).WarnContext(ctx, errs.MaskURLs(w.String()), "store", errs.MaskURLs(a.r.String()))
	if a.r.o.OnRetry != nil {
		a.r.o.OnRetry(w)
	}
}

// retry repeats an operation until it succeeds, or another attempt is useless.
func (a *attempts) retry(ctx context.Context, try func() error) error {
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		a.err = try()
		if !AnswerOf(a.err).Unreached {
			a.r.reached.Store(true)
		}
		if a.err != nil && !Temporary(a.err) {
			return struct{}{}, backoff.Permanent(a.err)
		}
		return struct{}{}, a.err
	}, backoff.WithBackOff(a), backoff.WithMaxElapsedTime(0),
		backoff.WithNotify(func(err error, pause time.Duration) { a.notifyPause(ctx, err, pause) }))

	var final *backoff.PermanentError
	switch {
	case a.spent:
		return a.gaveUpError()
	case ctx.Err() != nil && Temporary(a.err) && !errors.As(a.err, &final):
		return a.interruptedError(ctx.Err())
	}
	if ctx.Err() == nil && !Temporary(err) {
		a.notifyAnswer()
	}

	return err
}

// notifyAnswer calls OnAnswer if OnRetry was called before.
func (a *attempts) notifyAnswer() {
	if a.notified && a.r.o.OnAnswer != nil {
		a.r.o.OnAnswer()
	}
	a.notified = false
}

// interruptedError returns the error of an operation whose context ended during a pause. It keeps the cause of the
// pause.
func (a *attempts) interruptedError(ended error) error {
	out := &errs.Error{Kind: errs.Canceled, Err: fmt.Errorf("%w, after: %w", ended, a.err)}
	var e *errs.Error
	if errors.As(a.err, &e) {
		out.Op, out.Ref, out.Err = e.Op, e.Ref, fmt.Errorf("%w, after: %w", ended, e.Err)
	}
	return out
}

// gaveUpError returns the last error, with the number of attempts and the time they took.
func (a *attempts) gaveUpError() error {
	var e *errs.Error
	if a.n == 1 || !errors.As(a.err, &e) {
		return a.err
	}
	out := *e
	cause := e.Err
	if cause == nil {
		cause = errors.New(string(e.Kind))
	}
	out.Err = fmt.Errorf("%w (tried %d times in %s)", cause, a.n, time.Since(a.since).Round(100*time.Millisecond))
	return TransientAnswer(&out, AnswerOf(a.err))
}

func (r *retried) Put(ctx context.Context, key string, data []byte, c Condition) (Version, error) {
	var v Version
	lost := false
	err := r.newAttempts().retry(ctx, func() (err error) {
		v, err = r.s.Put(ctx, key, data, c)
		if lost && c != Always && errs.Is(err, errs.Conflict) && !Temporary(err) {
			if v, err = r.resolveConflict(ctx, key, data, err); err != nil {
				return backoff.Permanent(err) // reading it was retried already
			}
			return nil
		}
		lost = lost || Temporary(err)
		return err
	})
	if err != nil {
		return "", err
	}

	return v, nil
}

// resolveConflict finds out whether the object is what an earlier attempt wrote whose
// answer was lost.
func (r *retried) resolveConflict(ctx context.Context, key string, data []byte, conflict error) (Version, error) {
	there, info, err := r.Get(ctx, key, 0, -1)
	switch {
	case errs.Is(err, errs.NotFound):
		return "", conflict // the other write is gone, whoever made it
	case err != nil:
		return "", err // Temporary, or the context has ended: the outcome is not known
	case bytes.Equal(there, data):
		return info.Version, nil
	}
	return "", conflict
}

func (r *retried) Get(ctx context.Context, key string, offset, length int64) ([]byte, Info, error) {
	var data []byte
	var info Info
	err := r.newAttempts().retry(ctx, func() (err error) {
		data, info, err = r.s.Get(ctx, key, offset, length)
		return err
	})
	if err != nil {
		return nil, Info{}, err
	}
	return data, info, nil
}

func (r *retried) Stat(ctx context.Context, key string) (Info, error) {
	var info Info
	err := r.newAttempts().retry(ctx, func() (err error) {
		info, err = r.s.Stat(ctx, key)
		return err
	})
	if err != nil {
		return Info{}, err
	}
	return info, nil
}

func (r *retried) Delete(ctx context.Context, key string) error {
	return r.newAttempts().retry(ctx, func() error { return r.s.Delete(ctx, key) })
}

// List begins again after an error, and skips the keys that it has yielded, since
// keys come in order. Each key resets the attempts.
func (r *retried) List(ctx context.Context, prefix string) iter.Seq2[Info, error] {
	return func(yield func(Info, error) bool) {
		last := ""
		a := r.newAttempts()
		err := a.retry(ctx, func() error {
			for info, err := range r.s.List(ctx, prefix) {
				if err != nil {
					return err
				}
				if last != "" && info.Key <= last {
					continue
				}
				last = info.Key
				a.notifyAnswer()
				a.Reset()
				if !yield(info, nil) {
					return nil
				}
			}

			return nil
		})
		if err != nil {
			yield(Info{}, err)
		}
	}
}
