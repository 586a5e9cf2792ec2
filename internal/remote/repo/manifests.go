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
	maxPages  = MaxVolumeBytes / RegionBytes

	// A frame counts once for each page that refers to it.
	maxUseBytes = int64(MaxSegment) * maxPages
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
	case m.Content == Block && len(m.Stream) > 0, m.Content.Chained() && (len(m.Pages) > 0 || m.Map != NodeRef{}):
		return damaged("it mixes content %q with another kind", m.Content)
	case len(m.Uses) > maxUses || len(m.Stream) > maxStream || len(m.Pages) > maxPages:
		return damaged("%d pages, %d frames and %d segments are more than allowed", len(m.Pages), len(m.Stream), len(m.Uses))
	}

	if err := m.checkVersion(); err != nil {
		return err
	}

	// Check the segments, each listed once. A reader always has them in order, a writer may not.
	uses := m.Uses
	if !slices.IsSortedFunc(uses, compareUses) {
		uses = slices.SortedFunc(slices.Values(uses), compareUses)
	}

	for i, u := range uses {
		if m.Version < 2 && (u.Bytes <= 0 || u.Bytes > maxUseBytes) {
			return damaged("it declares %d used bytes of segment %s", u.Bytes, u.Segment)
		}
		if i > 0 && uses[i-1].Segment == u.Segment {
			return damaged("segment %s is listed twice", u.Segment)
		}
	}

	// Check the pages, the frames of the stream and the root of the map.
	next := int64(0)
	for _, p := range m.Pages {
		if int64(p.Region) < next || int64(p.Region)*RegionBytes >= m.SizeBytes {
			return damaged("the page of region %d is out of order or past the end", p.Region)
		}
		next = int64(p.Region) + 1
		if err := checkUsed(p.Frame, MaxPageBytes, uses); err != nil {
			return err
		}
	}

	for _, f := range m.Stream {
		if err := checkUsed(f, FrameBytes, uses); err != nil {
			return err
		}
	}

	if m.Map == (NodeRef{}) {
		return nil
	}

	if err := m.Map.check(m.Root()); err != nil {
		return err
	}

	return checkUsed(m.Map.Frame, MaxNodeBytes, uses)
}

// Root returns the root of the map of a manifest of version 2.
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

// encode encodes the content of a manifest: its fields as JSON, then the segments,
// pages and frames in binary.
func (m *Manifest) encode() ([]byte, error) {
	if m.Version == 2 {
		return m.encode2()
	}

	b, table, err := m.encodeHead()
	if err != nil {
		return nil, err
	}

	// Write the pages and the frames of the stream.
	last := looseFrame{offset: headerSize}
	b = binary.AppendUvarint(b, uint64(len(m.Pages)))
	next := uint64(0)
	for _, p := range m.Pages {
		b = binary.AppendUvarint(b, uint64(p.Region)-next)
		b = last.appendFrame(b, table, p.Frame)
		next = uint64(p.Region) + 1
	}

	return last.appendStream(b, table, m.Stream), nil
}

// encodeHead encodes what manifests of both versions begin with: the fields, then the segments, each with the bytes
// used of it (version 1) or its size.
func (m *Manifest) encodeHead() ([]byte, *segmentTable, error) {
	uses := slices.SortedFunc(slices.Values(m.Uses), compareUses)
	out := *m
	out.Sizes = nil
	if m.Version < 2 {
		out.Sizes = sizesOf(uses)
	}

	fields, err := encodeJSON(out)
	if err != nil {
		return nil, nil, err
	}

	table := newSegmentTable(func(yield func(Segment)) {
		for _, u := range uses {
			yield(u.Segment)
		}
	})

	b := binary.AppendUvarint(nil, uint64(len(fields)))
	b = append(b, fields...)
	b = table.appendTo(b)
	for _, u := range uses {
		n := uint64(u.Size)
		if m.Version < 2 {
			n = uint64(u.Bytes)
		}
		b = binary.AppendUvarint(b, n)
	}

	return b, table, nil
}

// maxSizes is the number of segments beyond which a manifest omits their sizes, because it would become too large.
const maxSizes = 1 << 20

// sizesOf returns the sizes of segments; nil if no size is known, or there are too many.
func sizesOf(uses []Use) []uint32 {
	out := make([]uint32, len(uses))
	known := false
	for i, u := range uses {
		out[i] = u.Size
		known = known || u.Size != 0
	}
	if !known || len(uses) > maxSizes {
		return nil
	}
	return out
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

// decodeManifest decodes a manifest of version 1 or 2, and checks it. Damaged, TooNew.
func decodeManifest(b []byte, version byte) (Manifest, error) {
	if version == 2 {
		return decodeManifest2(b)
	}

	r := &reader{b: b}
	m, err := r.manifestFields()
	if err != nil {
		return Manifest{}, err
	}

	// Decode the segments, with the bytes used and the size of each.
	segments := r.segmentTable(maxUses)
	if r.err == nil && len(segments) > 0 {
		m.Uses = make([]Use, 0, len(segments))
		for _, s := range segments {
			m.Uses = append(m.Uses, Use{Segment: s, Bytes: int64(r.uvarint("the bytes that it uses", uint64(maxUseBytes)))})
		}
	}

	if len(m.Sizes) == len(m.Uses) {
		for i := range m.Uses {
			m.Uses[i].Size = m.Sizes[i]
		}
	}

	m.Sizes = nil

	// Decode the pages and the frames of the stream.
	r.content(&m, segments)
	if err := r.finish(); err != nil {
		return Manifest{}, err
	}

	if err := m.check(); err != nil {
		return Manifest{}, err
	}

	return m, nil
}

// manifestFields decodes the fields of a manifest.
func (r *reader) manifestFields() (m Manifest, err error) {
	fields := r.nextBytes("its fields", int(r.uvarint("the length of its fields", maxManifestBytes)))
	if r.err != nil {
		return m, r.err
	}
	if err := json.Unmarshal(fields, &m); err != nil {
		return m, damaged("cannot parse the fields: %v", err)
	}
	return m, nil
}

// content decodes the pages and the frames of the stream of a manifest of version 1.
func (r *reader) content(m *Manifest, segments []Segment) {
	last := looseFrame{offset: headerSize}
	next := uint64(0)
	for range r.count("pages", 5) {
		region := next + r.uvarint("a region", maxPages)
		if r.err != nil || region >= maxPages {
			r.fail("region %d of a page is out of range", region)
			break
		}
		m.Pages = append(m.Pages, Page{Region: uint32(region), Frame: last.readFrame(r, segments, MaxPageBytes)})
		next = region + 1
	}

	m.Stream = r.stream(&last, segments)
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

	version := byte(objectVersion)
	if m.Version == 2 {
		if now, err := r.Version(); err != nil || now < 2 { // programs that support only version 1 must refuse the repository
			return errs.New(errs.Internal, op, m.ID.String(), "the repository has version %d, but a manifest of version 2 "+
				"needs version 2", now)
		}
		version = 2
	}

	content, err := m.encode()
	if err != nil {
		return errs.Wrap(op, m.ID.String(), err)
	}

	key := manifestKey(m.ID)
	object, err := r.sealVersion(typeManifest, version, key, content, maxManifestBytes)
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
	o, err := r.getObject(ctx, typeManifest, manifestKey(id), maxManifestBytes)
	if err != nil {
		return Manifest{}, errs.Wrap(op, id.String(), err)
	}

	m, err := decodeManifest(o.content, o.format)
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
