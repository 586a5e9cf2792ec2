package repo

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"iter"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// Limits of a manifest, which bound the memory of a reader. They suffice for 64 TiB in
// segments of 16 MiB, and for a stream of 1 TiB in full frames.
const (
	maxUses   = 4 << 20
	maxStream = 4 << 20
)

func compareUses(a, b Use) int { return compareSegments(a.Segment, b.Segment) }

// check returns an error unless the parts of the manifest are consistent and within limits.
func (m *Manifest) check() error {
	// Check the fields.
	if err := checkName(m.Volume); err != nil {
		return err
	}

	switch {
	case m.ID.IsZero() || m.Session.IsZero():
		return damaged("the ID of the manifest or of its session is missing")
	case m.SizeBytes < 0 || m.SizeBytes > MaxVolumeBytes:
		return damaged("invalid volume size of %d bytes", m.SizeBytes)
	case !m.Content.known():
		return damaged("unknown content %q", m.Content)
	case m.Content == Block && len(m.Stream) > 0, m.Content.Chained() && m.Map != NodeRef{}:
		return damaged("it mixes content %q with another kind", m.Content)
	case len(m.Uses) > maxUses || len(m.Stream) > maxStream:
		return damaged("%d frames and %d segments are more than allowed", len(m.Stream), len(m.Uses))
	}

	// Check the segments, each listed once. A reader always has them in order, a writer may not.
	uses := m.Uses
	if !slices.IsSortedFunc(uses, compareUses) {
		uses = slices.SortedFunc(slices.Values(uses), compareUses)
	}

	for i, u := range uses {
		if u.Size > MaxSegment {
			return damaged("segment %s declares %d bytes", u.Segment, u.Size)
		}
		if i > 0 && uses[i-1].Segment == u.Segment {
			return damaged("segment %s is listed twice", u.Segment)
		}
	}

	// Check the frames of the stream, the root of the map, and the extensions.
	for _, f := range m.Stream {
		if err := checkUsed(f, FrameBytes, uses); err != nil {
			return err
		}
	}

	if m.Map != (NodeRef{}) {
		if err := m.Map.check(m.Root()); err != nil {
			return err
		}
		if err := checkUsed(m.Map.Frame, MaxNodeBytes, uses); err != nil {
			return err
		}
	}

	if err := m.checkExtensions(); err != nil {
		return err
	}

	return m.checkOverlay()
}

// Root returns the root of the map.
func (m *Manifest) Root() NodeAt { return NodeAt{NodeRef: m.Map, Level: RootLevel(m.SizeBytes)} }

func checkUsed(f Frame, limit uint32, uses []Use) error {
	_, listed := slices.BinarySearchFunc(uses, f.Segment, func(u Use, s Segment) int {
		return compareSegments(u.Segment, s)
	})
	if !listed {
		return damaged("a frame names segment %s, which is not listed", f.Segment)
	}
	return f.check(limit)
}

// encode encodes the content of a manifest: its fields as JSON, then in binary the segments with their sizes, the root
// of the map, the frames of the stream, and the extensions. It lists only segments that it names itself and those that
// its session wrote, so its size does not grow with the volume or its history.
func (m *Manifest) encode() ([]byte, error) {
	fields, err := encodeJSON(m)
	if err != nil {
		return nil, err
	}

	// Write the fields and the segments.
	uses := slices.SortedFunc(slices.Values(m.Uses), compareUses)
	table := newSegmentTable(func(yield func(Segment)) {
		for _, u := range uses {
			yield(u.Segment)
		}
	})

	b := binary.AppendUvarint(nil, uint64(len(fields)))
	b = append(b, fields...)
	b = table.appendTo(b)
	for _, u := range uses {
		b = binary.AppendUvarint(b, uint64(u.Size))
	}

	// Write the root of the map, and the frames of the stream.
	last := looseFrame{offset: headerSize}
	if m.Map == (NodeRef{}) {
		b = append(b, 0)
	} else {
		b = append(b, 1)
		b = appendNodeRef(b, table, &last, m.Map)
	}

	b = last.appendStream(b, table, m.Stream)
	return appendExtensions(b, m.Extensions), nil
}

// looseFrame encodes frames in any order, each relative to where the next frame would be
// if they came in order: the order is that of the content.
type looseFrame struct{ segment, index, offset int64 }

func (l *looseFrame) appendFrame(b []byte, t *segmentTable, f Frame) []byte {
	s := int64(t.index[f.Segment])
	b = binary.AppendVarint(b, s-l.segment)
	if s != l.segment {
		*l = looseFrame{segment: s, offset: headerSize}
	}

	b = binary.AppendVarint(b, int64(f.Index)-l.index)
	b = binary.AppendVarint(b, int64(f.Offset)-l.offset)
	b = binary.AppendUvarint(b, uint64(f.Plain)<<1|uint64(f.Codec))
	if f.Codec == Zstd {
		b = binary.AppendUvarint(b, uint64(f.Plain+tagSize-f.Stored))
	}

	l.index, l.offset = int64(f.Index)+1, int64(f.Offset)+int64(f.Stored)
	return b
}

// appendStream encodes the frames of a manifest's stream.
func (l *looseFrame) appendStream(b []byte, t *segmentTable, frames []Frame) []byte {
	b = binary.AppendUvarint(b, uint64(len(frames)))
	for _, f := range frames {
		b = l.appendFrame(b, t, f)
	}
	return b
}

func (l *looseFrame) readFrame(r *reader, segments []Segment, limit uint32) Frame {
	// Decode the place, relative to the last frame.
	step := r.varint("a frame's segment")
	if step != 0 {
		*l = looseFrame{segment: l.segment + step, offset: headerSize}
	}

	index, offset := l.index+r.varint("a frame's index"), l.offset+r.varint("a frame's offset")
	packed := r.uvarint("a frame's length", uint64(limit)<<1|1)
	if r.err == nil && (l.segment < 0 || l.segment >= int64(len(segments)) || index < 0 || index >= maxFrames ||
		offset < 0 || offset > MaxSegment) {
		r.fail("a frame lies outside any segment")
	}

	// Decode the lengths.
	f := Frame{Index: uint32(index), Offset: uint32(offset), Plain: uint32(packed >> 1), Codec: Codec(packed & 1)}
	saved := uint64(0)
	if f.Codec == Zstd {
		saved = r.uvarint("a frame's stored length", uint64(f.Plain))
	}
	if r.err != nil {
		return Frame{}
	}

	f.Stored = uint32(uint64(f.Plain) + tagSize - saved)
	f.Segment = segments[l.segment]
	l.index, l.offset = index+1, offset+int64(f.Stored)
	return f
}

// decodeManifest decodes a manifest, and checks it. Damaged, TooNew.
func decodeManifest(b []byte) (Manifest, error) {
	var m Manifest
	r := &reader{b: b}
	fields := r.nextBytes("its fields", int(r.uvarint("the length of its fields", maxManifestBytes)))
	if r.err != nil {
		return Manifest{}, r.err
	}
	if err := json.Unmarshal(fields, &m); err != nil {
		return Manifest{}, damaged("cannot parse the fields: %v", err)
	}

	// Decode the segments with their sizes, of which each takes at least a byte.
	segments := r.segmentTable(maxUses)
	if r.err == nil && len(segments) > len(r.b) {
		r.fail("truncated in the sizes of %d segments", len(segments))
	}
	if r.err != nil {
		return Manifest{}, r.err
	}

	for _, s := range segments {
		m.Uses = append(m.Uses, Use{Segment: s, Size: uint32(r.uvarint("the bytes of a segment", MaxSegment))})
	}

	// Decode the root of the map, and the frames of the stream.
	last := looseFrame{offset: headerSize}
	if r.uvarint("whether it has a map", 1) == 1 {
		m.Map = r.nodeRef(segments, &last, nil)
	}

	m.Stream = r.stream(&last, segments)

	// Decode the extensions. An unknown one counts only if the rest is not damaged.
	unknown := r.extensions(&m)
	if err := r.finish(); err != nil {
		return Manifest{}, err
	}

	if err := m.check(); err != nil {
		return Manifest{}, err
	}

	if unknown != "" {
		return Manifest{}, errs.New(errs.TooNew, "", "", "it needs extension %q, which this pando does not support", unknown).
			WithHint("upgrade pando")
	}

	return m, nil
}

// stream decodes the frames of a manifest's stream.
func (r *reader) stream(last *looseFrame, segments []Segment) (out []Frame) {
	frames := r.count("frames", 4)
	if frames > maxStream {
		r.fail("%d frames are more than allowed", frames)
	}

	for range frames {
		if r.err != nil {
			break
		}
		out = append(out, last.readFrame(r, segments, FrameBytes))
	}

	return out
}

func manifestKey(id ID) string { return manifestPrefix + id.String() }

// PutManifest writes a manifest. Exists: a manifest with this ID exists, which is never
// replaced. Invalid: its parts are inconsistent, or too many. All objects that it refers
// to must exist. Durable on return.
func (r *Repo) PutManifest(ctx context.Context, m Manifest) error {
	const op = "write manifest"
	if err := m.check(); err != nil {
		return errs.Wrap(op, m.ID.String(), asInvalid(err))
	}

	content, err := m.encode()
	if err != nil {
		return errs.Wrap(op, m.ID.String(), err)
	}

	key := manifestKey(m.ID)
	object, err := r.seal(typeManifest, key, content, maxManifestBytes)
	if err != nil {
		return errs.Wrap(op, m.ID.String(), err)
	}

	return errs.Wrap(op, m.ID.String(), r.putIfAbsent(ctx, key, object))
}

// putIfAbsent writes an object. Exists: there is an object with this key.
func (r *Repo) putIfAbsent(ctx context.Context, key string, object []byte) error {
	_, err := r.store.Put(ctx, key, object, objstore.IfAbsent)
	if errs.Is(err, errs.Conflict) {
		return errs.New(errs.Exists, "", "", "%w", err)
	}
	return err
}

// Manifest reads a manifest. Its Uses are ordered by segment. NotFound, Damaged, TooNew.
func (r *Repo) Manifest(ctx context.Context, id ID) (Manifest, error) {
	const op = "read manifest"
	content, _, err := r.getContent(ctx, typeManifest, manifestKey(id), maxManifestBytes)
	if err != nil {
		return Manifest{}, errs.Wrap(op, id.String(), err)
	}

	m, err := decodeManifest(content)
	if err == nil && m.ID != id {
		err = damaged("the object contains manifest %s", m.ID)
	}
	if err != nil {
		return Manifest{}, errs.Wrap(op, id.String(), err)
	}

	return m, nil
}

// DeleteManifest removes a manifest that nothing names. Absent is success. Durable on
// return.
func (r *Repo) DeleteManifest(ctx context.Context, id ID) error {
	return errs.Wrap("delete manifest", id.String(), r.store.Delete(ctx, manifestKey(id)))
}

// Manifests yields the IDs of all manifests, ordered by their text. An error ends it.
func (r *Repo) Manifests(ctx context.Context) iter.Seq2[ID, error] {
	return r.listIDs(ctx, manifestPrefix)
}
