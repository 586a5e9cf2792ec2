package repo

import (
	"bytes"
	"context"
	"crypto/cipher"
	"sync"
)

// nodeReach is how many bytes before a node are read along with it: a push writes its nodes together, the root last,
// so most of the nodes requested next precede it.
const nodeReach = 64 << 10

// maxStretches is how many stretches a cache keeps: of the nodes of many pushes, the newest few matter.
const maxStretches = 8

// stretch is a range of the stored bytes of a segment.
type stretch struct {
	segment Segment
	start   uint32
	b       []byte
	aead    cipher.AEAD
}

func (s stretch) covers(seg Segment, from, to uint32) bool {
	return s.segment == seg && s.start <= from && int64(to) <= int64(s.start)+int64(len(s.b))
}

// stretches caches ranges of segments that were read along with nodes. The zero value is empty; nil reads nothing
// along. Methods may be called concurrently.
type stretches struct {
	mu  sync.Mutex
	all []stretch // the oldest first
}

// readContents returns the contents of nodes of one segment, from a stretch, or with one request that reads such a
// stretch. Nil without an error: the nodes were moved or are damaged, and must be read like other frames.
func (s *stretches) readContents(ctx context.Context, r *Repo, frames []Frame) ([][]byte, error) {
	if s == nil {
		return nil, nil
	}

	// Compute the range of the frames.
	seg, start, end := frames[0].Segment, frames[0].Offset, uint32(0)
	for _, f := range frames {
		if f.Segment != seg || f.check(FrameBytes) != nil {
			return nil, nil
		}
		start, end = min(start, f.Offset), max(end, f.Offset+f.Stored)
	}

	// Find a stretch that contains it, or read one.
	part, known := s.findStretch(seg, start, end)
	if !known {
		if places, _ := r.moves.placesOf(seg); len(places) > 0 || end-start > nodeReach {
			return nil, nil
		}
		var err error
		if part, err = s.readStretch(ctx, r, seg, start, end); unreadable(err) {
			return nil, nil
		} else if err != nil {
			return nil, err
		}
	}

	// Decrypt copies of the frames.
	out := make([][]byte, len(frames))
	for i, f := range frames {
		at := f.Offset - part.start
		content, err := openFrame(part.aead, r.id, f, bytes.Clone(part.b[at:at+f.Stored]))
		if err != nil {
			s.forgetSegment(seg)
			return nil, nil
		}
		out[i] = content
	}

	r.segments.keepCipher(seg, part.aead) // only now that it has decrypted a frame: the header may be damaged
	return out, nil
}

// readStretch reads [start, end) of a segment and up to nodeReach bytes before it, and caches the result.
func (s *stretches) readStretch(ctx context.Context, r *Repo, seg Segment, start, end uint32) (stretch, error) {
	from := start - min(start, nodeReach)
	if from <= headerReach {
		from = 0 // includes the header, in case it is needed
	}

	aead, b, err := r.readRange(ctx, seg, from, end)
	if err != nil {
		return stretch{}, err
	}

	part := stretch{segment: seg, start: from, b: b, aead: aead}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.all) == maxStretches {
		s.all = s.all[1:]
	}

	s.all = append(s.all, part)
	return part, nil
}

func (s *stretches) findStretch(seg Segment, from, to uint32) (stretch, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, part := range s.all {
		if part.covers(seg, from, to) {
			return part, true
		}
	}
	return stretch{}, false
}

// forgetSegment drops the stretches of a segment, after a frame in one of them could not be decrypted.
func (s *stretches) forgetSegment(seg Segment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var left []stretch
	for _, part := range s.all {
		if part.segment != seg {
			left = append(left, part)
		}
	}
	s.all = left
}
