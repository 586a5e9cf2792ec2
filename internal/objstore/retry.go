package objstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"time"

	"pando/internal/errs"
)

// DefaultAttempts is how often an operation is tried if nobody says otherwise.
const DefaultAttempts = 10

// RetryOptions say how often and when. The zero value is good.
type RetryOptions struct {
	// Attempts is how often an operation is tried in all. 0: DefaultAttempts, which
	// with the other defaults rides out about 45 seconds.
	Attempts int
	// First is the pause after the first failure; each further one is twice as
	// long, up to Longest. 0: 200 ms, 15 s. Each is shortened by up to a half by
	// chance, so that many clients do not come back at the same moment.
	First, Longest time.Duration
	// OnRetry is told before each pause, for people and for tests. It may be
	// called by several goroutines at once.
	OnRetry func(err error, attempt int, pause time.Duration)
}

// Retry is s with operations that fail with a [Temporary] error tried again. Other
// errors are returned at once, and so is the end of the context, also during a
// pause.
//
// A Put with a condition whose answer was lost may have been done, so that its
// next try gets Conflict by itself. That is settled by reading the object: with the
// same bytes it was ours, and Put returns its version. This is right for objects
// that no two writers would write the same (a random write ID, or encrypted with
// a random nonce). If somebody has replaced our write already, the result is
// Conflict although it was done: who gets a Conflict must look at what is there.
//
// When it gives up, the last error is returned, still a Temporary one.
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
	return &retried{s: s, o: o}
}

type retried struct {
	s Store
	o RetryOptions
}

func (r *retried) String() string { return r.s.String() }

// tries counts the attempts at one operation.
type tries struct {
	o     RetryOptions
	n     int
	since time.Time
}

// again says whether to try again after err: nil after the pause, or what to return.
func (t *tries) again(ctx context.Context, err error) error {
	if t.n == 0 {
		t.since = time.Now()
	}
	t.n++
	if !Temporary(err) || ctx.Err() != nil {
		return err
	}
	if t.n >= t.o.Attempts {
		return t.gaveUp(err)
	}
	pause := t.o.Longest
	if shift := t.n - 1; shift < 30 && t.o.First<<shift < pause {
		pause = t.o.First << shift
	}
	pause -= rand.N(pause/2 + 1)
	if t.o.OnRetry != nil {
		t.o.OnRetry(err, t.n, pause)
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		// The cause is kept for people: why it was waiting at all.
		out := &errs.Error{Kind: errs.Canceled, Err: fmt.Errorf("%w, after: %w", ctx.Err(), err)}
		var e *errs.Error
		if errors.As(err, &e) {
			out.Op, out.Ref, out.Err = e.Op, e.Ref, fmt.Errorf("%w, after: %w", ctx.Err(), e.Err)
		}
		return out
	}
}

func (t *tries) gaveUp(err error) error {
	var e *errs.Error
	if t.n == 1 || !errors.As(err, &e) {
		return err
	}
	out := *e
	cause := e.Err
	if cause == nil {
		cause = errors.New(string(e.Kind))
	}
	out.Err = fmt.Errorf("%w (tried %d times in %s)", cause, t.n, time.Since(t.since).Round(100*time.Millisecond))
	return Transient(&out)
}

func (r *retried) Put(ctx context.Context, key string, data []byte, c Condition) (Version, error) {
	t := tries{o: r.o}
	for lost := false; ; {
		v, err := r.s.Put(ctx, key, data, c)
		if err == nil {
			return v, nil
		}
		if lost && c != Always && errs.Is(err, errs.Conflict) && !Temporary(err) {
			return r.settle(ctx, key, data, err)
		}
		lost = lost || Temporary(err)
		if err := t.again(ctx, err); err != nil {
			return "", err
		}
	}
}

// settle finds out whether the object is what an earlier try has written, whose
// answer was lost.
func (r *retried) settle(ctx context.Context, key string, data []byte, conflict error) (Version, error) {
	there, info, err := r.Get(ctx, key, 0, -1)
	switch {
	case errs.Is(err, errs.NotFound):
		return "", conflict // whoever wrote it, it is gone
	case err != nil:
		return "", err // Temporary, or the context has ended: nobody knows
	case bytes.Equal(there, data):
		return info.Version, nil
	}
	return "", conflict
}

func (r *retried) Get(ctx context.Context, key string, offset, length int64) ([]byte, Info, error) {
	for t := (tries{o: r.o}); ; {
		data, info, err := r.s.Get(ctx, key, offset, length)
		if err == nil {
			return data, info, nil
		}
		if err := t.again(ctx, err); err != nil {
			return nil, Info{}, err
		}
	}
}

func (r *retried) Stat(ctx context.Context, key string) (Info, error) {
	for t := (tries{o: r.o}); ; {
		info, err := r.s.Stat(ctx, key)
		if err == nil {
			return info, nil
		}
		if err := t.again(ctx, err); err != nil {
			return Info{}, err
		}
	}
}

func (r *retried) Delete(ctx context.Context, key string) error {
	for t := (tries{o: r.o}); ; {
		err := r.s.Delete(ctx, key)
		if err == nil {
			return nil
		}
		if err := t.again(ctx, err); err != nil {
			return err
		}
	}
}

// List begins again after an error and leaves out what it has yielded, which it
// can as keys come in order. Attempts are counted from the last key on.
func (r *retried) List(ctx context.Context, prefix string) iter.Seq2[Info, error] {
	return func(yield func(Info, error) bool) {
		last := ""
		for t := (tries{o: r.o}); ; {
			var failed error
			for info, err := range r.s.List(ctx, prefix) {
				if err != nil {
					failed = err
					break
				}
				if last != "" && info.Key <= last {
					continue
				}
				last, t = info.Key, tries{o: r.o}
				if !yield(info, nil) {
					return
				}
			}
			if failed == nil {
				return
			}
			if err := t.again(ctx, failed); err != nil {
				yield(Info{}, err)
				return
			}
		}
	}
}
