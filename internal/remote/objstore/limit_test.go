package objstore_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"testing"
	"testing/synctest"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/testing/storetest"

	"golang.org/x/sync/errgroup"
)

// unpaced hides from a store that it is limited, as one that does not pace does.
type unpaced struct{ objstore.Store }

func (u unpaced) Put(ctx context.Context, key string, data []byte, c objstore.Condition) (objstore.Version, error) {
	return u.Store.Put(context.WithoutCancel(context.Background()), key, data, c)
}

func (u unpaced) Get(ctx context.Context, key string, offset, length int64) ([]byte, objstore.Info, error) {
	return u.Store.Get(context.Background(), key, offset, length)
}

// TestLimitHoldsTheRate moves much more than the limit's burst, several at once and
// in both directions, and compares the time with what the rate makes of the bytes.
func TestLimitHoldsTheRate(t *testing.T) {
	for _, rate := range []int64{5_000, 100_000, 1 << 20, 50 << 20} {
		for name, wrap := range map[string]func(objstore.Store) objstore.Store{
			"paced":   func(s objstore.Store) objstore.Store { return s },
			"unpaced": func(s objstore.Store) objstore.Store { return unpaced{s} },
		} {
			t.Run(fmt.Sprintf("%s %d", name, rate), func(t *testing.T) {
				inBubble(t, func(t *testing.T, s objstore.Store) {
					l := objstore.Limit(wrap(s), rate)
					size := int(min(rate, 4<<20)) // of one object
					start := time.Now()
					g, ctx := errgroup.WithContext(t.Context())
					for i := range 4 {
						g.Go(func() error {
							key := fmt.Sprint("o", i)
							if _, err := l.Put(ctx, key, make([]byte, size), objstore.Always); err != nil {
								return err
							}
							got, _, err := l.Get(ctx, key, int64(size/2), -1)
							if err == nil && len(got) != size-size/2 {
								err = fmt.Errorf("%d bytes read", len(got))
							}
							return err
						})
					}
					if err := g.Wait(); err != nil {
						t.Fatal(err)
					}
					moved := 4 * (size + size - size/2)
					want := float64(moved) / float64(rate)
					if got := time.Since(start).Seconds(); got < want-0.1001 || got > want*1.02 {
						t.Errorf("%d bytes at %d a second took %.3f s, want %.3f", moved, rate, got, want)
					}
				})
			})
		}
	}
}

// TestPacedReaderIsNoBurst: at no moment more has gone than the rate allows.
func TestPacedReaderIsNoBurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const rate = 1 << 20
		var worst float64
		largest := 0 // that went at once
		// Limit hands its meter to a store by the context; this store uses it.
		reader := storeFunc(func(ctx context.Context, data []byte) error {
			start, n := time.Now(), 0
			r := objstore.PacedReader(ctx, bytes.NewReader(data))
			for buf := make([]byte, 1<<20); ; {
				got, err := r.Read(buf)
				n += got
				largest = max(largest, got)
				worst = max(worst, float64(n)-rate*time.Since(start).Seconds())
				if err == io.EOF {
					break
				}
				if err != nil {
					return err
				}
			}
			if n != len(data) {
				return fmt.Errorf("%d bytes of %d", n, len(data))
			}
			return nil
		})
		start := time.Now()
		if _, err := objstore.Limit(reader, rate).Put(t.Context(), "a", make([]byte, 16<<20), objstore.Always); err != nil {
			t.Fatal(err)
		}
		if got := time.Since(start).Seconds(); got < 15.8 || got > 16.1 {
			t.Errorf("16 MiB at 1 MiB a second took %.2f s", got)
		}
		if worst > rate/5 || largest > rate/10 {
			t.Errorf("at some moment %.0f bytes more had gone than the rate allows; %d went at once", worst, largest)
		}
	})
}

// storeFunc is a store whose Put is a function; there is nothing else to it.
type storeFunc func(ctx context.Context, data []byte) error

func (f storeFunc) Put(ctx context.Context, _ string, data []byte, _ objstore.Condition) (objstore.Version, error) {
	return "v", f(ctx, data)
}
func (storeFunc) Get(context.Context, string, int64, int64) ([]byte, objstore.Info, error) {
	panic("not used")
}
func (storeFunc) Stat(context.Context, string) (objstore.Info, error) { panic("not used") }
func (storeFunc) List(context.Context, string) iter.Seq2[objstore.Info, error] {
	panic("not used")
}
func (storeFunc) Delete(context.Context, string) error { panic("not used") }
func (storeFunc) String() string                       { return "a function" }

// TestLimitHonoursContext: the end of the context ends the wait, and the object is
// not there.
func TestLimitHonoursContext(t *testing.T) {
	inBubble(t, func(t *testing.T, s objstore.Store) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		_, err := objstore.Limit(s, 1000).Put(ctx, "a", make([]byte, 1_000_000), objstore.Always)
		if !errs.Is(err, errs.Canceled) || time.Since(start) > time.Second {
			t.Errorf("%v after %s", err, time.Since(start))
		}
		if _, err := s.Stat(t.Context(), "a"); !errs.Is(err, errs.NotFound) {
			t.Errorf("the object is there: %v", err)
		}
	})
}

// TestLimitPaysForRetries: what is sent again counts again.
func TestLimitPaysForRetries(t *testing.T) {
	inBubble(t, func(t *testing.T, s objstore.Store) {
		f := storetest.Faulty(s, storetest.Fault{When: storetest.After, Times: 3})
		r := objstore.Retry(objstore.Limit(f, 100_000),
			objstore.RetryOptions{First: time.Nanosecond, Longest: time.Nanosecond})
		start := time.Now()
		mustPut(t, r, "a", string(make([]byte, 200_000)), objstore.Always)
		if got := time.Since(start).Seconds(); got < 7.8 || got > 8.2 {
			t.Errorf("four times 200,000 bytes at 100,000 a second took %.2f s", got)
		}
	})
}

func TestNoLimit(t *testing.T) {
	s := newStore(t)
	if objstore.Limit(s, 0) != s || objstore.Limit(s, -1) != s {
		t.Error("no limit is one")
	}
	if err := objstore.Pace(t.Context(), 1<<40); err != nil {
		t.Error(err)
	}
	if n := objstore.PaceChunk(t.Context(), 12345); n != 12345 {
		t.Errorf("a chunk is %d", n)
	}
}
