package objstore

import (
	"context"
	"io"
	"iter"
	"sync/atomic"

	"golang.org/x/time/rate"
)

// Limit is s with all its bytes, up and down together, held to bytesPerSecond on
// average, over all that is under way at once. 0 or less: no limit, s itself.
//
// The stores of this program pay for bytes as they go, in small chunks (see
// [Pace]), so that one large object is no burst. What a store has not paid for
// when it returns is waited for then. Names and headers do not count.
func Limit(s Store, bytesPerSecond int64) Store {
	if bytesPerSecond <= 0 {
		return s
	}
	return &limited{s: s, b: newBucket(bytesPerSecond)}
}

type limited struct {
	s Store
	b *bucket
}

// bucket says when the next byte may go.
type bucket struct{ *rate.Limiter }

// newBucket holds what may go in a tenth of a second: what was not used in that time can still be used.
func newBucket(bytesPerSecond int64) *bucket {
	return &bucket{rate.NewLimiter(rate.Limit(bytesPerSecond), max(int(bytesPerSecond/10), 1))}
}

// waitFor waits until n more bytes may have gone. The error is that of the context.
func (b *bucket) waitFor(ctx context.Context, n int) error {
	for n > 0 {
		now := min(n, b.Burst())
		if err := b.WaitN(ctx, now); err != nil {
			<-ctx.Done() // the limiter says beforehand that the context will end before
			return ctx.Err()
		}
		n -= now
	}
	return nil
}

// chunk is how many bytes may go at once: about a twentieth of a second's.
func (b *bucket) chunk() int {
	return min(max(int(b.Limit()/20), 1<<10), 256<<10)
}

// meter is what one operation has paid for.
type meter struct {
	b    *bucket
	paid atomic.Int64
}

type meterKey struct{}

// Pace waits until n more bytes of the operation whose context this is may go over
// the wire, as [Limit] wants it; without a limit it returns at once. A store calls
// it for each chunk before it sends it or after it has received it, [PaceChunk]
// bytes at most. The error is that of the context.
func Pace(ctx context.Context, n int) error {
	m, ok := ctx.Value(meterKey{}).(*meter)
	if !ok || n <= 0 {
		return nil
	}
	m.paid.Add(int64(n))
	return m.b.waitFor(ctx, n)
}

// PaceChunk is how many bytes a store should send or receive between two calls of
// [Pace]; most if there is no limit.
func PaceChunk(ctx context.Context, most int) int {
	if m, ok := ctx.Value(meterKey{}).(*meter); ok {
		return min(m.b.chunk(), most)
	}
	return most
}

// PacedReader is r with [Pace] called for all that is read of it: for the body of
// a request or of an answer.
func PacedReader(ctx context.Context, r io.Reader) io.Reader {
	if _, ok := ctx.Value(meterKey{}).(*meter); !ok {
		return r
	}
	return &pacedReader{ctx, r}
}

type pacedReader struct {
	ctx context.Context
	r   io.Reader
}

func (p *pacedReader) Read(b []byte) (int, error) {
	n, err := p.r.Read(b[:PaceChunk(p.ctx, len(b))])
	if werr := Pace(p.ctx, n); werr != nil && (err == nil || err == io.EOF) {
		err = werr
	}
	return n, err
}

// withMeter gives an operation its meter.
func (l *limited) withMeter(ctx context.Context) (context.Context, *meter) {
	m := &meter{b: l.b}
	return context.WithValue(ctx, meterKey{}, m), m
}

// payRest waits for what the store has not paid for. The end of the context is not
// reported: the operation has been done.
func (m *meter) payRest(ctx context.Context, n int) {
	if n -= int(m.paid.Load()); n > 0 {
		_ = m.b.waitFor(ctx, n)
	}
}

func (l *limited) String() string { return l.s.String() }

// Close is of io.Closer.
func (l *limited) Close() error { return Close(l.s) }

func (l *limited) Put(ctx context.Context, key string, data []byte, c Condition) (Version, error) {
	pctx, m := l.withMeter(ctx)
	v, err := l.s.Put(pctx, key, data, c)
	if err == nil {
		m.payRest(ctx, len(data))
	}
	return v, err
}

func (l *limited) Get(ctx context.Context, key string, offset, length int64) ([]byte, Info, error) {
	pctx, m := l.withMeter(ctx)
	data, info, err := l.s.Get(pctx, key, offset, length)
	if err == nil {
		m.payRest(ctx, len(data))
	}
	return data, info, err
}

func (l *limited) Stat(ctx context.Context, key string) (Info, error) { return l.s.Stat(ctx, key) }
func (l *limited) Delete(ctx context.Context, key string) error       { return l.s.Delete(ctx, key) }
func (l *limited) List(ctx context.Context, prefix string) iter.Seq2[Info, error] {
	return l.s.List(ctx, prefix)
}
