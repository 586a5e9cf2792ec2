package repo

import (
	"context"
	"iter"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// The methods below read objects one by one for verify, so that one that cannot be read
// does not hide the others.

// HeadIDs yields the last parts of the keys of all heads: keyed hashes of names. An
// error ends it.
func (r *Repo) HeadIDs(ctx context.Context) iter.Seq2[ID, error] { return r.listIDs(ctx, headPrefix) }

// HeadByID reads a head without knowing its name. NotFound, Damaged, TooNew.
func (r *Repo) HeadByID(ctx context.Context, id ID) (HeadState, error) {
	key := headPrefix + id.String()
	h, version, err := r.readHead(ctx, key)
	return HeadState{Head: h, Version: version}, errs.Wrap("read head", key, err)
}

// HeadID returns the last part of the key of a head: a keyed hash of the name.
func (r *Repo) HeadID(name string) (ID, error) {
	key, err := r.headKey(name)
	if err != nil {
		return ID{}, err
	}
	return ParseID(strings.TrimPrefix(key, headPrefix))
}

// RawHead returns the object of a head, which may be damaged, and its version, for keeping a copy and overwriting
// exactly this state. An object that is too large for a head is truncated. NotFound.
func (r *Repo) RawHead(ctx context.Context, id ID) ([]byte, objstore.Version, error) {
	key := headPrefix + id.String()
	object, info, err := r.store.Get(ctx, key, 0, maxHeadBytes+headerSize+metaSize+tagSize)
	return object, info.Version, errs.Wrap("read head", key, err)
}

// RawSession returns a session whose content cannot be read: its ID and its version in the store. NotFound.
func (r *Repo) RawSession(ctx context.Context, id ID) (SessionState, error) {
	info, err := r.store.Stat(ctx, sessionPrefix+id.String())
	return SessionState{Session: Session{ID: id, Kind: Push}, Version: info.Version},
		errs.Wrap("read session", id.String(), err)
}

// SessionIDs yields the IDs of all sessions. An error ends it.
func (r *Repo) SessionIDs(ctx context.Context) iter.Seq2[ID, error] {
	return r.listIDs(ctx, sessionPrefix)
}

// DropSeen removes the record that prunes leave for each other, for when it cannot be
// read any more. Absent is success.
func (r *Repo) DropSeen(ctx context.Context) error {
	return errs.Wrap("remove the record of sessions in", r.store.String(), r.store.Delete(ctx, seenKey))
}

// ObjectKind is the kind of an object, judged by its key.
type ObjectKind string

// The kinds of objects. The zero ObjectKind stands for objects that no repository writes.
const (
	ConfigObject   ObjectKind = "config"
	HeadObject     ObjectKind = "head"
	ManifestObject ObjectKind = "manifest"
	SegmentObject  ObjectKind = "segment"
	PackObject     ObjectKind = "pack"
	TableObject    ObjectKind = "table"
	SessionObject  ObjectKind = "session"
	PointsObject   ObjectKind = "points"
	SeenObject     ObjectKind = "seen"
	ProbeObject    ObjectKind = "probe" // left by objstore.Probe
)

// ListedObject is an entry of a listing of the store.
type ListedObject struct {
	objstore.Info
	Kind    ObjectKind
	ID      ID      // of a head, manifest, session or page of points
	Segment Segment // of a segment
	Pack    Pack    // of a pack
	Table   Table   // of a table
}

// Objects yields everything in the store in the order of keys, including objects that
// no repository writes. An error ends it.
func (r *Repo) Objects(ctx context.Context) iter.Seq2[ListedObject, error] {
	return listObjects(ctx, r, "list", "", func(o objstore.Info) (ListedObject, bool) { return classify(o), true })
}

// classify returns the kind and the identity of an object by its key.
func classify(o objstore.Info) ListedObject {
	l := ListedObject{Info: o}
	switch {
	case o.Key == configKey:
		l.Kind = ConfigObject
	case o.Key == seenKey:
		l.Kind = SeenObject
	case strings.HasPrefix(o.Key, probePrefix):
		l.Kind = ProbeObject
	case strings.HasPrefix(o.Key, segmentPrefix):
		if s, ok := parseSegment(strings.TrimPrefix(o.Key, segmentPrefix)); ok {
			l.Kind, l.Segment = SegmentObject, s
		}
	case strings.HasPrefix(o.Key, packPrefix):
		if s, ok := parseSegment(strings.TrimPrefix(o.Key, packPrefix)); ok {
			l.Kind, l.Pack = PackObject, Pack(s)
		}
	case strings.HasPrefix(o.Key, movedPrefix):
		if s, ok := parseSegment(strings.TrimPrefix(o.Key, movedPrefix)); ok {
			l.Kind, l.Table = TableObject, Table(s)
		}
	default:
		for prefix, kind := range map[string]ObjectKind{
			headPrefix: HeadObject, manifestPrefix: ManifestObject, sessionPrefix: SessionObject, pagePrefix: PointsObject,
		} {
			if text, found := strings.CutPrefix(o.Key, prefix); found {
				if id, err := ParseID(text); err == nil {
					l.Kind, l.ID = kind, id
				}
			}
		}
	}

	return l
}

// CheckSegmentSize checks that a segment ends as a segment of size bytes, the size in a listing, must. It reads only
// the footer. Damaged, NotFound.
func (r *Repo) CheckSegmentSize(ctx context.Context, s Segment, size int64) error {
	const op = "check segment"
	if size < headerSize+footerSize || size > MaxSegment {
		return errs.Wrap(op, s.String(), damaged("size of %d bytes is out of range", size))
	}

	var err error
	for range 2 { // a bit may have flipped in transit
		b, _, gerr := r.store.Get(ctx, s.key(), size-footerSize, footerSize)
		if gerr != nil {
			return errs.Wrap(op, s.String(), gerr)
		}
		if _, _, err = parseFooter(b, int(size)); err == nil {
			break
		}
	}

	return errs.Wrap(op, s.String(), err)
}
