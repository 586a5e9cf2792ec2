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

// headerReach is the distance from the start of a segment within which a range is read
// together with the header, which saves a request.
const headerReach = 128 << 10

// ReadFrames reads frames of one segment with one ranged request, so they should be
// near each other; the first read of a segment may need a second, concurrent request
// for its header. The result has their contents in the same order; the caller owns
// them, and frames that are requested twice share theirs. Memory: the range, and the
// contents of compressed frames.
//
// Every frame is authenticated as belonging to this segment, place and length before
// it is used. Damaged: it fails authentication. NotFound: the segment is missing.
// TooNew.
//
// If a segment was moved, its frames are read from their current place. ReadFrames is for frames that are needed as a
// whole: a frame that a prune dropped blocks of is Damaged.
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

// ReadContents is ReadFrames for frames that a prune may have dropped unneeded blocks of.
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

	// No single copy has all of them: read them one by one.
	out = make([]FrameContent, len(frames))
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

// readAt reads frames of one segment from one place. A damaged one is read twice: a bit may have flipped in transit.
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

// readFrames reads frames of a segment with one request, and returns their contents in the order of frames.
func (r *Repo) readFrames(ctx context.Context, s Segment, frames []Frame) ([][]byte, error) {
	// Read the range that contains all frames.
	start, end := frames[0].Offset, uint32(0)
	for _, f := range frames {
		if f.Segment != s {
			return nil, badInput("read frames", s.String(), "a requested frame is in segment %s", f.Segment)
		}
		if err := f.check(FrameBytes); err != nil {
			return nil, err
		}
		start, end = min(start, f.Offset), max(end, f.Offset+f.Stored)
	}

	aead, b, err := r.readRange(ctx, s, start, end)
	if err != nil {
		return nil, err
	}

	// Decrypt the frames in order of offset.
	order := make([]int, len(frames))
	for i := range order {
		order[i] = i
	}

	slices.SortFunc(order, func(i, j int) int { return cmp.Compare(frames[i].Offset, frames[j].Offset) })
	contents := make([][]byte, len(frames))
	for n, i := range order {
		f := frames[i]
		if n > 0 { // decrypting in place has overwritten the bytes of the last frame
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

	r.segments.keepCipher(s, aead) // only now that it has decrypted a frame: the header may be damaged
	return contents, nil
}

// readRange reads [start, end) of a segment, and returns the cipher of its frames as well.
func (r *Repo) readRange(ctx context.Context, s Segment, start, end uint32) (cipher.AEAD, []byte, error) {
	if aead := r.segments.cachedCipher(s); aead != nil {
		b, err := r.readExactly(ctx, s, start, end)
		return aead, b, err
	}

	// The header is near: one request reads both.
	if start <= headerReach {
		b, err := r.readExactly(ctx, s, 0, end)
		if err != nil {
			return nil, nil, err
		}
		aead, err := r.segmentCipher(ctx, s, b)
		return aead, b[start:], err
	}

	// Otherwise read header and range at the same time.
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

	// If one request was canceled because the other failed, report the failure.
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

// segmentCipher returns the cipher of the segment whose header is at the beginning of b.
func (r *Repo) segmentCipher(ctx context.Context, s Segment, b []byte) (cipher.AEAD, error) {
	h, err := parseHeader(b, typeSegment)
	if err != nil {
		return nil, err
	}
	return r.cipherFor(ctx, h, infoSegment)
}

// keyCache keeps the ciphers of segments, which never change. The zero value is empty.
type keyCache struct {
	mu sync.Mutex
	m  map[Segment]cipher.AEAD
}

const maxCachedKeys = 16 << 10 // about 10 MiB

func (c *keyCache) cachedCipher(s Segment) cipher.AEAD {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.m[s]
}

// keepCipher adds the cipher of a segment to the cache.
func (c *keyCache) keepCipher(s Segment, a cipher.AEAD) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.m == nil {
		c.m = map[Segment]cipher.AEAD{}
	}

	for other := range c.m { // evict any of them
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
