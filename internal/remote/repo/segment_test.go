package repo

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"pando/internal/base/errs"
	"pando/internal/testing/storetest"
)

// reads are the ranges that were asked for.
func reads(s *storetest.Faulted) (all []string) {
	for _, c := range s.Calls() {
		if c.Op == storetest.Get {
			all = append(all, fmt.Sprintf("%d+%d", c.Offset, c.Length))
		}
	}
	slices.Sort(all)
	return all
}

// What reading costs: one request, and one more for the header of a segment that was
// not read yet, unless the range is near it.
func TestRequests(t *testing.T) {
	ctx := t.Context()
	r, m := made(t)
	w, err := r.NewSegment(NewID(), 0)
	must(t, err)
	var frames []Frame
	for i := range 8 {
		f, err := w.Add(noise(byte(i), 64<<10), Raw, 64<<10)
		must(t, err)
		frames = append(frames, f)
	}
	must(t, r.PutSegment(ctx, w.Segment(), w.Finish()))
	stored := int64(64<<10 + tagSize)
	for _, x := range []struct {
		what   string
		frames []Frame
		known  bool
		want   []string
	}{
		{"near the header", frames[:2], false, []string{fmt.Sprint("0+", headerSize+2*stored)}},
		{"far", frames[5:7], false, []string{fmt.Sprint("0+", headerSize),
			fmt.Sprintf("%d+%d", headerSize+5*stored, 2*stored)}},
		{"known", []Frame{frames[7], frames[6]}, true, []string{fmt.Sprintf("%d+%d", headerSize+6*stored, 2*stored)}},
		{"known, near", frames[1:2], true, []string{fmt.Sprintf("%d+%d", headerSize+stored, stored)}},
		{"none", nil, false, nil},
	} {
		if !x.known {
			r.segments.forgetAll()
		}
		s := storetest.Faulty(m)
		r.store = s
		contents, err := r.ReadFrames(ctx, x.frames)
		must(t, err)
		slices.Sort(x.want)
		if got := reads(s); !slices.Equal(got, x.want) {
			t.Errorf("%s: read %v, want %v", x.what, got, x.want)
		}
		for i, f := range x.frames {
			if !bytes.Equal(contents[i], noise(byte(f.Index), 64<<10)) {
				t.Errorf("%s: frame %d is something else", x.what, f.Index)
			}
		}
	}

	// Either of the two requests may fail; the error is its.
	for i := range 2 {
		r.segments.forgetAll()
		r.store = storetest.Faulty(m, storetest.Fault{
			Match: func(c storetest.Call) bool { return (c.Offset == 0) == (i == 0) }, Err: storetest.Permanent(errs.Permission),
		})
		_, err := r.ReadFrames(ctx, frames[5:7])
		kind(t, err, errs.Permission)
	}
	// A header that was damaged on its way is not remembered.
	r.store = storetest.Faulty(m, storetest.Fault{At: 0, Times: 2, Change: storetest.Flip(headerSize-1, 0)})
	for i, want := range []errs.Kind{errs.Damaged, ""} {
		if _, err := r.ReadFrames(ctx, frames[:1]); errs.KindOf(err) != want {
			t.Errorf("read %d: %v", i, err)
		}
	}
	r.store = m
	// Frames of two segments, and frames that overlap, are mistakes.
	other := frames[1]
	other.Segment.N++
	_, err = r.ReadFrames(ctx, []Frame{frames[0], other})
	kind(t, err, errs.Invalid)
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	_, err = r.ReadFrames(canceled, frames[:1])
	kind(t, err, errs.Canceled)
}

func TestSegmentWriter(t *testing.T) {
	ctx := t.Context()
	r, m := made(t)
	w, err := r.NewSegment(NewID(), 1<<32-1)
	must(t, err)
	if b := w.Finish(); b != nil {
		t.Errorf("a segment of nothing has %d bytes", len(b))
	}
	for _, x := range []struct {
		content []byte
		codec   Codec
		plain   int
	}{
		{nil, Raw, 0}, {nil, Zstd, 10}, {make([]byte, 10), Raw, 11}, {make([]byte, 10), Zstd, 9}, {make([]byte, 10), Zstd,
			10}, {make([]byte, 10), 2, 11},
		{make([]byte, 10), Zstd, FrameBytes + 1}, {make([]byte, 10), Zstd, -1},
	} {
		if _, err := w.Add(x.content, x.codec, x.plain); !errs.Is(err, errs.Invalid) {
			t.Errorf("%d bytes for %d in codec %d: %v", len(x.content), x.plain, x.codec, err)
		}
	}
	// As full as can be, with frames of all sizes.
	rnd := rand.New(rand.NewPCG(5, 5))
	big := noise(9, FrameBytes)
	for {
		n := 1 + rnd.IntN(FrameBytes)
		if !w.Fits(n) {
			if _, err := w.Add(big[:n], Raw, n); !errs.Is(err, errs.Invalid) {
				t.Errorf("%d bytes after %d: %v", n, w.Bytes(), err)
			}
			break
		}
		_, err := w.Add(big[:n], Raw, n)
		must(t, err)
	}
	for w.Fits(1) {
		_, err := w.Add(big[:1], Raw, 1)
		must(t, err)
		if w.Frames() > 20000 {
			break
		}
	}
	size := w.Bytes()
	b := w.Finish()
	if len(b) != size || len(b) > MaxSegment {
		t.Errorf("%d bytes, was said to be %d", len(b), size)
	}
	if _, err := w.Add(big[:1], Raw, 1); !errs.Is(err, errs.Internal) {
		t.Error(err)
	}
	if w.Finish() != nil {
		t.Error("finished twice")
	}
	must(t, r.PutSegment(ctx, w.Segment(), b))
	n, err := r.CheckSegment(ctx, w.Segment())
	if err != nil || n != w.Frames() {
		t.Errorf("%d frames of %d, %v", n, w.Frames(), err)
	}
	s, err := r.StatSegment(ctx, w.Segment())
	if err != nil || s.Bytes != int64(len(b)) || s.Segment != w.Segment() {
		t.Errorf("%+v, %v", s, err)
	}
	kind(t, r.PutSegment(ctx, Segment{}, b[:10]), errs.Invalid)
	kind(t, r.PutSegment(ctx, Segment{}, make([]byte, MaxSegment+1)), errs.Invalid)
	m.set("segments/readme", nil)
	for s, err := range r.Segments(ctx) {
		if err != nil || s.Segment != w.Segment() {
			t.Errorf("%+v, %v", s, err)
		}
	}
	must(t, r.DeleteSegment(ctx, w.Segment()))
	must(t, r.DeleteSegment(ctx, w.Segment()))
	_, err = r.StatSegment(ctx, w.Segment())
	kind(t, err, errs.NotFound)

	// Many frames of nearly nothing.
	w, err = r.NewSegment(NewID(), 0)
	must(t, err)
	for range maxFrames {
		_, err := w.Add(big[:1], Raw, 1)
		must(t, err)
	}
	if _, err := w.Add(big[:1], Raw, 1); !errs.Is(err, errs.Invalid) {
		t.Error(err)
	}
	must(t, r.PutSegment(ctx, w.Segment(), w.Finish()))
	if n, err := r.CheckSegment(ctx, w.Segment()); n != maxFrames || err != nil {
		t.Errorf("%d frames, %v", n, err)
	}
}

// A segment that is begun twice under one number, as after a kill, has two keys: the
// same frame never encrypts to the same bytes.
func TestSegmentBegunTwice(t *testing.T) {
	r, _ := made(t)
	session := NewID()
	var made [][]byte
	for range 2 {
		w, err := r.NewSegment(session, 3)
		must(t, err)
		_, err = w.Add(make([]byte, 100), Raw, 100)
		must(t, err)
		made = append(made, w.Finish()[headerSize:headerSize+100])
	}
	if bytes.Equal(made[0], made[1]) {
		t.Error("the same key stream was used twice")
	}
}

func TestCompress(t *testing.T) {
	for _, x := range []struct {
		b    []byte
		want Codec
	}{
		{nil, Raw}, {[]byte("x"), Raw}, {noise(1, 100), Raw}, {noise(1, FrameBytes), Raw}, {make([]byte, FrameBytes), Zstd},
		{append(noise(1, 15<<10), make([]byte, 512)...),
			Raw}, {append(noise(1, 15<<10), make([]byte, 2<<10)...), Zstd},
	} {
		room := make([]byte, 3, 100)
		packed, codec := Compress(room, x.b)
		if codec != x.want {
			t.Errorf("%d bytes: codec %d", len(x.b), codec)
		}
		if codec == Zstd && len(packed) > len(x.b)-len(x.b)/16 {
			t.Errorf("%d bytes: saves too little: %d", len(x.b), len(packed))
		}
		got, err := unpack(codec, packed, uint32(len(x.b)))
		if err != nil || !bytes.Equal(got, x.b) {
			t.Errorf("%d bytes: %v", len(x.b), err)
		}
	}
}

// Few bytes do not make much memory, whatever they say.
func TestBombs(t *testing.T) {
	packed, _ := Compress(nil, make([]byte, FrameBytes))
	for _, size := range []uint32{0, 1, FrameBytes - 1, FrameBytes + 1} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := unpack(Zstd, packed, size)
		runtime.ReadMemStats(&after)
		kind(t, err, errs.Damaged)
		if made := after.TotalAlloc - before.TotalAlloc; made > uint64(size)+4<<20 {
			t.Errorf("%d bytes: %d were made room for", size, made)
		}
	}
	if _, err := unpack(Zstd, packed[:4], FrameBytes); !errs.Is(err, errs.Damaged) {
		t.Error(err)
	}
}

// A frame whose content is not what its codec says, sealed by somebody who may.
func TestFrameOfAHostileWriter(t *testing.T) {
	ctx := t.Context()
	r, _ := made(t)
	for what, x := range map[string]struct {
		content []byte
		plain   int
	}{
		"not zstd":  {noise(1, 100), 1000},
		"too short": {first(Compress(nil, make([]byte, 999))), 1000},
		"too long":  {first(Compress(nil, make([]byte, 1001))), 1000},
		"a bomb":    {first(Compress(nil, make([]byte, FrameBytes))), 1000 + 1},
	} {
		w, err := r.NewSegment(NewID(), 0)
		must(t, err)
		if what == "a bomb" {
			x.plain = len(x.content) + 1
		}
		f, err := w.Add(x.content, Zstd, x.plain)
		must(t, err)
		must(t, r.PutSegment(ctx, w.Segment(), w.Finish()))
		_, err = r.ReadFrames(ctx, []Frame{f})
		kind(t, err, errs.Damaged)
		_, err = r.CheckSegment(ctx, w.Segment())
		kind(t, err, errs.Damaged)
	}
}

func first(b []byte, _ Codec) []byte { return b }

// mixed is content as databases have it: text, numbers and noise.
func mixed(n int) []byte {
	rnd := rand.New(rand.NewPCG(1, 1))
	var b []byte
	for len(b) < n {
		b = fmt.Appendf(b,
			`{"id":%d,"user":"user-%04d","at":"2026-11-%02dT%02d:%02d:%02dZ","amount":%d.%02d,"token":"%016x"}`+"\n",
			rnd.IntN(1<<30), rnd.IntN(5000), 1+rnd.IntN(28), rnd.IntN(24), rnd.IntN(60), rnd.IntN(60), rnd.IntN(10000),
			rnd.IntN(100), rnd.Uint64())
	}
	return b[:n]
}

func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	must(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// What a segment costs on one processor, beside the bare work of zstd and AES.
func BenchmarkSegment(b *testing.B) {
	const size = 16 << 20
	for _, data := range []struct {
		name string
		b    []byte
	}{{"text", mixed(size)}, {"noise", noise(1, size)}} {
		r, _ := made(b)
		e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderConcurrency(1),
			zstd.WithEncoderCRC(false))
		must(b, err)
		block, err := aes.NewCipher(make([]byte, 32))
		must(b, err)
		gcm, err := cipher.NewGCM(block)
		must(b, err)
		out, room := make([]byte, 0, 2*size), make([]byte, 0, 2*FrameBytes)
		bare := func() {
			out := out[:0]
			nonce := make([]byte, 12)
			for off := 0; off < size; off += FrameBytes {
				packed := e.EncodeAll(data.b[off:off+FrameBytes], room)
				nonce[0]++
				out = gcm.Seal(out, nonce, packed, nil)
			}
		}
		seal := func() (*SegmentWriter, []Frame) {
			w, err := r.NewSegment(NewID(), 0)
			must(b, err)
			var packed []byte
			var frames []Frame
			for off := 0; off < size; off += FrameBytes {
				content, codec := Compress(packed, data.b[off:off+FrameBytes])
				f, err := w.Add(content, codec, FrameBytes)
				must(b, err)
				if codec == Zstd {
					packed = content
				}
				frames = append(frames, f)
			}
			return w, frames
		}
		// Of the time of a processor, so that what else runs does not count.
		run := func(name string, do func(b *testing.B)) {
			b.Run(data.name+"/"+name, func(b *testing.B) {
				b.SetBytes(size)
				before := processorTime(b)
				for b.Loop() {
					do(b)
				}
				b.ReportMetric(float64(b.N)*size/1e6/(processorTime(b)-before).Seconds(), "MB/cpu-s")
			})
		}
		run("bare-zstd-aes", func(*testing.B) { bare() })
		run("write", func(*testing.B) {
			w, _ := seal()
			w.Finish()
		})
		var packed []byte
		run("compress", func(b *testing.B) {
			n := 0
			for off := 0; off < size; off += FrameBytes {
				content, codec := Compress(packed, data.b[off:off+FrameBytes])
				if n += len(content); codec == Zstd {
					packed = content
				}
			}
			b.ReportMetric(float64(size)/float64(n), "ratio")
		})
		run("sum", func(*testing.B) {
			for off := 0; off < size; off += FrameBytes {
				r.Sum(data.b[off : off+FrameBytes])
			}
		})
		w, frames := seal()
		must(b, r.PutSegment(b.Context(), w.Segment(), w.Finish()))
		run("read", func(b *testing.B) {
			_, err := r.ReadFrames(b.Context(), frames)
			must(b, err)
		})
		run("check", func(b *testing.B) {
			_, err := r.CheckSegment(b.Context(), w.Segment())
			must(b, err)
		})
	}
	r, _ := made(b)
	text := mixed(BlockBytes)
	b.Run("sum-4k", func(b *testing.B) {
		b.SetBytes(BlockBytes)
		for b.Loop() {
			r.Sum(text)
		}
	})
}
