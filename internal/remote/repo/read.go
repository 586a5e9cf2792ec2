package repo

import (
	"cmp"
	"context"
	"crypto/cipher"
	"fmt"
	"slices"
	"sync"

	"pando/internal/base/errs"
)

// headerReach: a range that begins so near the header is read from the header on,
// which saves a request.
const headerReach = 128 << 10

// ReadFrames reads frames of one segment with one ranged request, so they should be
// near each other; the first read of a segment may need a second one, at the same
// time, for its header. The result has their content in the same order, which the
// caller owns; frames that are asked for twice share it. Memory: the range, and the
// content of frames that were packed.
//
// Every frame is authenticated as that of this segment, place and length before
// anything is done with it. Damaged: it is not what was written. NotFound: the segment
// is gone. TooNew.
//
// Frames of a segment that was moved are read from where they are now. ReadFrames is for frames that are needed as a
// whole; one of which a part was dropped is Damaged.
func (r *Repo) ReadFrames(ctx context.Context, frames []Frame) ([][]byte, error) {
	contents, err := r.ReadContents(ctx, frames)
	if err != nil {
		return nil, err
	}
	out := make([][]byte, len(contents))
	for i, c := range contents {
		if out[i], err = c.Whole(); err != nil {
			return nil, errs.Wrap("read segment", c.Frame.Segment.String(), err)
		}
	}
	return out, nil
}

// ReadContents is ReadFrames for frames of which a part may have been dropped, because nothing needed it.
func (r *Repo) ReadContents(ctx context.Context, frames []Frame) ([]FrameContent, error) {
	const op = "read segment"
	if len(frames) == 0 {
		return nil, nil
	}

	s := frames[0].Segment
	out, err := r.readContents(ctx, s, frames)
	if places, _ := r.moves.placesOf(s); !unreadable(err) || len(frames) == 1 || len(places) == 0 {
		return out, errs.Wrap(op, s.String(), err)
	}

	out = make([]FrameContent, len(frames)) // no copy has all of them
	for i := range frames {
		one, err := r.readContents(ctx, s, frames[i:i+1])
		if err != nil {
			return nil, errs.Wrap(op, s.String(), err)
		}
		out[i] = one[0]
	}

	return out, nil
}

// readContents reads frames of one segment from the first place that has all of them.
func (r *Repo) readContents(ctx context.Context, s Segment, frames []Frame) (out []FrameContent, err error) {
	err = r.findFrames(ctx, s, func(p Place) error {
		out, err = r.readAt(ctx, p, s, frames)
		return err
	})
	return out, err
}

// readAt reads frames of one segment from one place, which is read once more if it is damaged: a bit may have flipped
// on its way.
func (r *Repo) readAt(ctx context.Context, p Place, s Segment, frames []Frame) (out []FrameContent, err error) {
	if !p.isOriginal() {
		err = r.readPackTwice(p, func() error {
			out, err = r.readPacked(ctx, p, s, frames)
			return err
		})
		return out, err
	}

	contents, err := r.readFrames(ctx, s, frames)
	if errs.Is(err, errs.Damaged) {
		contents, err = r.readFrames(ctx, s, frames)
	}
	if err != nil {
		return nil, err
	}

	for i, b := range contents {
		out = append(out, FrameContent{Frame: frames[i], bytes: b, blocks: AllBlocks})
	}

	return out, nil
}

func frameRef(f Frame) string { return fmt.Sprintf("%s#%d", f.Segment, f.Index) }

func (r *Repo) readFrames(ctx context.Context, s Segment, frames []Frame) ([][]byte, error) {
	start, end := frames[0].Offset, uint32(0)
	for _, f := range frames {
		if f.Segment != s {
			return nil, badInput("read frames", s.String(), "a requested frame is in segment %s", f.Segment)
		}
		if err := f.check(MaxPageBytes); err != nil {
			return nil, err
		}
		start, end = min(start, f.Offset), max(end, f.Offset+f.Stored)
	}

	aead, b, err := r.readRange(ctx, s, start, end)
	if err != nil {
		return nil, err
	}

	order := make([]int, len(frames))
	for i := range order {
		order[i] = i
	}

	slices.SortFunc(order, func(i, j int) int { return cmp.Compare(frames[i].Offset, frames[j].Offset) })
	contents := make([][]byte, len(frames))
	for n, i := range order {
		f := frames[i]
		if n > 0 { // decrypting in place has used it up
			if last := frames[order[n-1]]; last == f {
				contents[i] = contents[order[n-1]]
				continue
			} else if f.Offset < last.Offset+last.Stored {
				return nil, damaged("frames %d and %d overlap", last.Index, f.Index)
			}
		}

		if err := ctx.Err(); err != nil {
			return nil, err
		}

		from, to := f.Offset-start, f.Offset-start+f.Stored
		content, err := openFrame(aead, r.id, f, b[from:to:to])
		if err != nil {
			return nil, err
		}

		contents[i] = content
	}

	r.segments.keepCipher(s, aead) // not before it has opened something: the header may be damaged
	return contents, nil
}

// readRange reads [start, end) of a segment, and what opens its frames.
func (r *Repo) readRange(ctx context.Context, s Segment, start, end uint32) (cipher.AEAD, []byte, error) {
	if aead := r.segments.cachedCipher(s); aead != nil {
		b, err := r.readExactly(ctx, s, start, end)
		return aead, b, err
	}

	if start <= headerReach {
		b, err := r.readExactly(ctx, s, 0, end)
		if err != nil {
			return nil, nil, err
		}
		aead, err := r.segmentCipher(ctx, s, b)
		return aead, b[start:], err
	}

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	var aead cipher.AEAD
	var headErr error
	var reading sync.WaitGroup
	reading.Go(func() {
		head, err := r.readExactly(ctx, s, 0, headerSize)
		if err == nil {
			aead, err = r.segmentCipher(ctx, s, head)
		}
		if headErr = err; err != nil {
			cancel()
		}
	})

	b, err := r.readExactly(ctx, s, start, end)
	if err != nil {
		cancel()
	}

	reading.Wait()

	// One that was canceled because of the other says nothing.
	if headErr != nil && (err == nil || errs.Is(err, errs.Canceled)) {
		err = headErr
	}

	return aead, b, err
}

func (r *Repo) readExactly(ctx context.Context, s Segment, start, end uint32) ([]byte, error) {
	b, info, err := r.store.Get(ctx, s.key(), int64(start), int64(end-start))
	if err != nil {
		return nil, err
	}
	if len(b) != int(end-start) {
		return nil, damaged("the object has %d bytes, so [%d, %d) cannot be read", info.Bytes, start, end)
	}
	return b, nil
}

// segmentCipher is what the header of a segment, at the beginning of b, says.
func (r *Repo) segmentCipher(ctx context.Context, s Segment, b []byte) (cipher.AEAD, error) {
	h, err := parseHeader(b, typeSegment)
	if err != nil {
		return nil, err
	}
	return r.cipherFor(ctx, h, infoSegment)
}

// keyCache remembers the ciphers of segments, which are never replaced. The zero value
// is empty.
type keyCache struct {
	mu sync.Mutex
	m  map[Segment]cipher.AEAD
}

const maxCachedKeys = 16 << 10 // some 10 MiB

func (c *keyCache) cachedCipher(s Segment) cipher.AEAD {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.m[s]
}

func (c *keyCache) keepCipher(s Segment, a cipher.AEAD) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.m == nil {
		c.m = map[Segment]cipher.AEAD{}
	}

	for other := range c.m { // any
		if len(c.m) < maxCachedKeys {
			break
		}
		delete(c.m, other)
	}

	c.m[s] = a
}

func (c *keyCache) forgetSegment(s Segment) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.m, s)
}

func (c *keyCache) forgetAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.m = nil
}
