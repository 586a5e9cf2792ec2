package objstore

import (
	"context"
	"io"
	"iter"
	"sync/atomic"

	"golang.org/x/time/rate"
)

// Limit returns a store that limits the bytes of s, up and down together and over
// all concurrent operations, to bytesPerSecond on average. If that is 0 or less, it
// returns s.
//
// The stores of this program pay for bytes as they transfer them, in small chunks
// (see [Pace]), so that a large object does not cause a burst. If a store returns
// without having paid for all bytes, the operation waits for the rest at its end.
// Names and headers do not count.
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

// bucket decides when the next byte may be transferred.
type bucket struct{ *rate.Limiter }

// newBucket returns a bucket that holds the bytes of a tenth of a second: unused bytes of that time can be used later.
func newBucket(bytesPerSecond int64) *bucket {
	return &bucket{rate.NewLimiter(rate.Limit(bytesPerSecond), max(int(bytesPerSecond/10), 1))}
}

// waitFor waits until n more bytes may be transferred. It returns only the error of the context.
func (b *bucket) waitFor(ctx context.Context, n int) error {
	for n > 0 {
		now := min(n, b.Burst())
		if err := b.WaitN(ctx, now); err != nil {
			<-ctx.Done() // the limiter returns early if it knows that the context will end first
			return ctx.Err()
		}
		n -= now
	}
	return nil
}

// chunk returns how many bytes may be transferred at once: those of about a twentieth of a second.
func (b *bucket) chunk() int {
	return min(max(int(b.Limit()/20), 1<<10), 256<<10)
}

// meter counts the bytes that one operation has paid for.
type meter struct {
	b    *bucket
	paid atomic.Int64
}

type meterKey struct{}

// Pace waits until the operation with this context may transfer n more bytes under
// its [Limit]. Without a limit it returns at once. A store calls it for each chunk
// of at most [PaceChunk] bytes, before sending or after receiving it. It returns
// only the error of the context.
func Pace(ctx context.Context, n int) error {
	m, ok := ctx.Value(meterKey{}).(*meter)
	if !ok || n <= 0 {
		return nil
	}
	m.paid.Add(int64(n))
	return m.b.waitFor(ctx, n)
}

// PaceChunk returns how many bytes a store should send or receive between two calls
// of [Pace]. Without a limit it returns most.
func PaceChunk(ctx context.Context, most int) int {
	if m, ok := ctx.Value(meterKey{}).(*meter); ok {
		return min(m.b.chunk(), most)
	}
	return most
}

// PacedReader returns a reader that calls [Pace] for everything read from r: the
// body of a request or of an answer.
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

// withMeter returns a context with a meter for one operation.
func (l *limited) withMeter(ctx context.Context) (context.Context, *meter) {
	m := &meter{b: l.b}
	return context.WithValue(ctx, meterKey{}, m), m
}

// payRest waits for the bytes that the store has not paid for. It ignores the end of
// the context, because the operation is done.
func (m *meter) payRest(ctx context.Context, n int) {
	if n -= int(m.paid.Load()); n > 0 {
		_ = m.b.waitFor(ctx, n)
	}
}

func (l *limited) String() string { return l.s.String() }

// Close implements io.Closer.
func (l *limited) Close() error { return Close(l.s) }

// KeepReserve implements Reserver.
func (l *limited) KeepReserve(ctx context.Context) error { return KeepReserve(ctx, l.s) }

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
