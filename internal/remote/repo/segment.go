package repo

import (
	"context"
	"crypto/cipher"
	"encoding/binary"
	"iter"

	"pando/internal/base/errs"
)

const (
	entrySize  = 4 + 4 + 1 // of a frame, in the index of a segment
	footerSize = 4 + 4 + 8
	footMagic  = "PNDOGEND"
)

// Bytes that a segment takes in addition to its frames, and a frame in addition to its stored bytes.
const (
	SegmentOverhead = headerSize + tagSize + footerSize
	FrameOverhead   = entrySize
)

// frameNonce returns the nonce of a frame: its index, since each segment has its own key.
func frameNonce(index uint32) []byte {
	return binary.BigEndian.AppendUint64(make([]byte, 4, 12), uint64(index))
}

// indexNonce is the nonce of the index. It differs from those of all frames.
var indexNonce = []byte{1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

// frameAAD returns the associated data of a frame: its place, the length of its content,
// and its codec. The index of a segment uses a codec that no frame can have.
func frameAAD(repository ID, s Segment, index, plain uint32, codec Codec) []byte {
	b := make([]byte, 0, 16+16+4+4+4+1)
	b = append(b, repository[:]...)
	b = append(b, s.Session[:]...)
	b = binary.LittleEndian.AppendUint32(b, s.N)
	b = binary.LittleEndian.AppendUint32(b, index)
	b = binary.LittleEndian.AppendUint32(b, plain)
	return append(b, byte(codec))
}

const indexCodec Codec = 0xff

// SegmentWriter collects frames into one segment, in memory. It is for one goroutine.
type SegmentWriter struct {
	segment    Segment
	repository ID
	aead       cipher.AEAD
	b          []byte // the object so far
	index      []byte // an entry for each frame
	frames     uint32
	done       bool
}

// NewSegment begins the n-th segment of a session. Its key is derived from a random
// salt, so a segment that is begun again under the same number has a different key.
//
// The writer holds the segment in memory, in a buffer that grows up to MaxSegment.
func (r *Repo) NewSegment(session ID, n uint32) (*SegmentWriter, error) {
	h, aead, err := r.newSealingCipher(infoSegment)
	if err != nil {
		return nil, err
	}
	w := &SegmentWriter{segment: Segment{Session: session, N: n}, repository: r.id, aead: aead}
	w.b = h.appendTo(make([]byte, 0, firstRoom), typeSegment)
	return w, nil
}

// firstRoom is the initial capacity. It suits small pushes: allocating 16 MiB for each
// would take longer than the push.
const firstRoom = 1 << 20

// fullRoom is the capacity for a segment whose last frame extends beyond SegmentBytes.
const fullRoom = SegmentBytes + FrameBytes + 64<<10

// Segment returns the name of the segment.
func (w *SegmentWriter) Segment() Segment { return w.segment }

// Bytes returns the size of the object if it were finished now. A segment is full at
// SegmentBytes.
func (w *SegmentWriter) Bytes() int {
	return len(w.b) + len(w.index) + tagSize + footerSize
}

// Frames returns the number of frames.
func (w *SegmentWriter) Frames() int { return int(w.frames) }

// Fits reports whether a frame with content bytes, as returned by [Compress], can be
// added.
func (w *SegmentWriter) Fits(content int) bool {
	return w.frames < maxFrames && w.Bytes()+content+tagSize+entrySize <= MaxSegment
}

// Add appends a frame. content is the result of [Compress] for plain bytes, at most FrameBytes. Add encrypts content
// into the segment and does not retain it. Invalid: the frame does not fit, or the sizes are impossible. The frame can
// be read once the segment was written by PutSegment.
func (w *SegmentWriter) Add(content []byte, codec Codec, plain int) (Frame, error) {
	const op = "add a frame to segment"
	if plain <= 0 || plain > FrameBytes || len(content) > plain {
		return Frame{}, badInput(op, w.segment.String(), "%d compressed bytes cannot represent %d bytes of content",
			len(content), plain)
	}

	// Check that it fits.
	f := Frame{
		Segment: w.segment, Index: w.frames, Offset: uint32(len(w.b)),
		Stored: uint32(len(content) + tagSize), Plain: uint32(plain), Codec: codec,
	}
	switch {
	case w.done:
		return Frame{}, errs.New(errs.Internal, op, w.segment.String(), "the segment is already finished")
	case !w.Fits(len(content)):
		return Frame{}, badInput(op, w.segment.String(), "%d bytes do not fit after the first %d", len(content), len(w.b))
	}

	if err := f.check(FrameBytes); err != nil {
		return Frame{}, errs.Wrap(op, w.segment.String(), asInvalid(err))
	}

	// Encrypt the frame, and add its entry to the index.
	w.growBuffer(len(content) + tagSize)
	w.b = w.aead.Seal(w.b, frameNonce(f.Index), content, frameAAD(w.repository, w.segment, f.Index, f.Plain, codec))
	w.index = binary.LittleEndian.AppendUint32(w.index, f.Stored)
	w.index = binary.LittleEndian.AppendUint32(w.index, f.Plain)
	w.index = append(w.index, byte(codec))
	w.frames++
	return f, nil
}

// growBuffer makes room for n more bytes. It doubles the capacity, because append would
// grow large buffers in smaller steps and copy them more often.
func (w *SegmentWriter) growBuffer(n int) {
	need := len(w.b) + n
	if need <= cap(w.b) {
		return
	}
	room := max(2*cap(w.b), need)
	if room >= SegmentBytes && need <= fullRoom {
		room = fullRoom
	}
	w.b = append(make([]byte, 0, room), w.b...)
}

// Finish returns the object for [Repo.PutSegment], or nil if there are no frames. No frames can be added afterwards.
func (w *SegmentWriter) Finish() []byte {
	if w.done || w.frames == 0 {
		return nil
	}

	w.done = true
	at := len(w.b)
	w.b = w.aead.Seal(w.b, indexNonce, w.index, frameAAD(w.repository, w.segment, w.frames, 0, indexCodec))
	sealed := len(w.b) - at
	w.b = binary.LittleEndian.AppendUint32(w.b, uint32(at))
	w.b = binary.LittleEndian.AppendUint32(w.b, uint32(sealed))
	w.b = append(w.b, footMagic...)
	b := w.b
	w.b = nil
	return b
}

// PutSegment writes the object that [SegmentWriter.Finish] returned. Exists: a segment
// with this number exists, which is never replaced. Durable on return.
func (r *Repo) PutSegment(ctx context.Context, s Segment, object []byte) error {
	const op = "write segment"
	if len(object) <= headerSize+tagSize+footerSize || len(object) > MaxSegment {
		return badInput(op, s.String(), "size of %d bytes is out of range", len(object))
	}
	return errs.Wrap(op, s.String(), r.putIfAbsent(ctx, s.key(), object))
}

// SegmentState is an entry of a listing of segments.
type SegmentState struct {
	Segment
	Bytes int64
}

// Segments yields all segments in the order of their keys. An error ends it.
func (r *Repo) Segments(ctx context.Context) iter.Seq2[SegmentState, error] {
	return listSegments(ctx, r, "list the segments in", segmentPrefix, func(s Segment, bytes int64) SegmentState {
		return SegmentState{s, bytes}
	})
}

// StatSegment returns the size of a segment without reading it. For a segment that was moved that is the size of its
// original object, if its pack exists. NotFound.
func (r *Repo) StatSegment(ctx context.Context, s Segment) (SegmentState, error) {
	state := SegmentState{Segment: s}
	err := r.findFrames(ctx, s, func(p Place) error {
		o, err := r.store.Stat(ctx, p.objectKey(s))
		switch {
		case err != nil:
			return err
		case p.isOriginal():
			state.Bytes = o.Bytes
		case o.Bytes != p.PackBytes:
			return errs.New(errs.NotFound, "", "", "pack %s has %d bytes, expected %d", p.Pack, o.Bytes, p.PackBytes)
		default:
			state.Bytes = p.Bytes
		}

		return nil
	})
	if err != nil {
		return SegmentState{}, errs.Wrap("check segment", s.String(), err)
	}

	return state, nil
}

// DeleteSegment removes a segment that nothing names. Absent is success. Durable on
// return.
func (r *Repo) DeleteSegment(ctx context.Context, s Segment) error {
	r.segments.forgetSegment(s)
	return errs.Wrap("delete segment", s.String(), r.store.Delete(ctx, s.key()))
}

// parseFooter returns the place of the sealed index in an object of size bytes.
func parseFooter(footer []byte, size int) (offset, length int, err error) {
	if len(footer) != footerSize || string(footer[8:]) != footMagic {
		return 0, 0, damaged("the footer is not that of a segment")
	}

	offset = int(binary.LittleEndian.Uint32(footer))
	length = int(binary.LittleEndian.Uint32(footer[4:]))
	if offset < headerSize || length < tagSize+entrySize || offset > size || length > size ||
		offset+length+footerSize != size {
		return 0, 0, damaged("the footer places the index at offset %d, length %d, in an object of %d bytes",
			offset, length, size)
	}

	if (length-tagSize)%entrySize != 0 || (length-tagSize)/entrySize > maxFrames {
		return 0, 0, damaged("the footer declares an index of %d bytes", length)
	}

	return offset, length, nil
}

// parseIndex decodes the decrypted index of a segment whose frames end at end.
func parseIndex(b []byte, s Segment, end int) ([]Frame, error) {
	frames := make([]Frame, 0, len(b)/entrySize)
	offset := uint32(headerSize)
	for i := 0; i < len(b); i += entrySize {
		f := Frame{
			Segment: s, Index: uint32(len(frames)), Offset: offset,
			Stored: binary.LittleEndian.Uint32(b[i:]), Plain: binary.LittleEndian.Uint32(b[i+4:]), Codec: Codec(b[i+8]),
		}
		if err := f.check(FrameBytes); err != nil {
			return nil, err
		}
		frames = append(frames, f)
		offset += f.Stored
	}

	if int(offset) != end {
		return nil, damaged("the frames end at offset %d, expected %d", offset, end)
	}

	return frames, nil
}

// CheckSegment reads a whole segment and checks every byte of it: header, frames, their
// contents, index. It returns the number of frames. Damaged, NotFound, TooNew.
func (r *Repo) CheckSegment(ctx context.Context, s Segment) (frames int, err error) {
	const op = "check segment"
	object, _, err := r.store.Get(ctx, s.key(), 0, MaxSegment+1)
	if err != nil {
		return 0, errs.Wrap(op, s.String(), err)
	}
	frames, err = r.checkSegment(ctx, s, object)
	return frames, errs.Wrap(op, s.String(), err)
}

// openFrames checks and decrypts the header and the index of a segment's object.
func (r *Repo) openFrames(ctx context.Context, s Segment, object []byte) (header, cipher.AEAD, []Frame, error) {
	h, err := parseHeader(object, typeSegment)
	if err != nil {
		return h, nil, nil, err
	}
	if len(object) > MaxSegment || len(object) < headerSize+footerSize {
		return h, nil, nil, damaged("size of %d bytes is out of range", len(object))
	}

	aead, err := r.cipherFor(ctx, h, infoSegment)
	if err != nil {
		return h, nil, nil, err
	}

	frames, err := openIndex(aead, r.id, s, object)
	return h, aead, frames, err
}

// checkSegment authenticates all of a segment's object, and returns the number of its frames.
func (r *Repo) checkSegment(ctx context.Context, s Segment, object []byte) (int, error) {
	_, aead, frames, err := r.openFrames(ctx, s, object)
	if err != nil {
		return 0, err
	}

	for _, f := range frames {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		if _, err := openFrame(aead, r.id, f, object[f.Offset:f.Offset+f.Stored]); err != nil {
			return 0, err
		}
	}

	return len(frames), nil
}

// openIndex decrypts the index of a whole segment, and returns its frames.
func openIndex(aead cipher.AEAD, repository ID, s Segment, object []byte) ([]Frame, error) {
	at, length, err := parseFooter(object[len(object)-footerSize:], len(object))
	if err != nil {
		return nil, err
	}
	count := uint32((length - tagSize) / entrySize)
	index, err := aead.Open(nil, indexNonce, object[at:at+length], frameAAD(repository, s, count, 0, indexCodec))
	if err != nil {
		return nil, damaged("the index failed authentication: it is not what was written")
	}
	return parseIndex(index, s, at)
}

// openFrame decrypts a frame and returns its content. It overwrites stored.
func openFrame(aead cipher.AEAD, repository ID, f Frame, stored []byte) ([]byte, error) {
	packed, err := aead.Open(stored[:0], frameNonce(f.Index), stored,
		frameAAD(repository, f.Segment, f.Index, f.Plain, f.Codec))
	if err != nil {
		return nil, damaged("frame %d failed authentication: the content is not what was written", f.Index)
	}
	content, err := unpack(f.Codec, packed, f.Plain)
	if err != nil {
		return nil, damaged("frame %d: %v", f.Index, err)
	}
	return content, nil
}
