package repo

import (
	"context"
	"iter"
	"unicode/utf8"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// HeadState is a head with its version in the store.
type HeadState struct {
	Head
	Version objstore.Version
}

const maxName = 255

// check reports an error if the head, from a caller or from the store, is inconsistent.
func (h *Head) check() error {
	if err := checkName(h.Name); err != nil {
		return err
	}

	last := uint64(0)
	for _, p := range h.Pages {
		if err := p.check(last); err != nil {
			return err
		}
		last = p.Last
	}

	for _, p := range h.Recent {
		if err := p.check(last); err != nil {
			return err
		}
		last = p.Seq
	}

	if h.NextSeq <= last {
		return damaged("the next point would be number %d, after %d", h.NextSeq, last)
	}

	return nil
}

// check reports an error if the point is inconsistent, or does not come after number last.
func (p *Point) check(last uint64) error {
	switch {
	case p.Seq <= last:
		return damaged("the points are out of order: %d after %d", p.Seq, last)
	case p.Manifest.IsZero():
		return damaged("point %d has no manifest", p.Seq)
	case !p.Content.known():
		return damaged("point %d has unknown content %q", p.Seq, p.Content)
	case p.SizeBytes < 0 || p.SizeBytes > MaxVolumeBytes:
		return damaged("point %d has an invalid size of %d bytes", p.Seq, p.SizeBytes)
	}
	return nil
}

func checkName(name string) error {
	if name == "" || len(name) > maxName || !utf8.ValidString(name) {
		return damaged("%q is not a valid name: it must have between 1 and %d bytes", name, maxName)
	}
	return nil
}

// asInvalid returns err with the kind Invalid, for values that the caller passed in.
func asInvalid(err error) error {
	if err == nil {
		return nil
	}
	return errs.New(errs.Invalid, "", "", "%w", err)
}

func decodeHead(b []byte) (Head, error) {
	var fields struct {
		Head
		Points pointList `json:"points"`
		Pages  pageList  `json:"pages"`
		Fenced idList    `json:"fenced"`
	}
	if err := decodeJSON(b, &fields); err != nil {
		return Head{}, err
	}

	h := fields.Head
	h.Recent, h.Pages, h.Fenced = fields.Points, fields.Pages, fields.Fenced
	if err := h.check(); err != nil {
		return Head{}, err
	}

	return h, nil
}

// Head reads the head of a name. NotFound: nothing with this name was ever pushed.
func (r *Repo) Head(ctx context.Context, name string) (Head, objstore.Version, error) {
	const op = "read head"
	if err := checkName(name); err != nil {
		return Head{}, "", errs.Wrap(op, name, asInvalid(err))
	}
	key, err := r.headKey(name)
	if err != nil {
		return Head{}, "", err
	}
	h, version, err := r.readHead(ctx, key)
	return h, version, errs.Wrap(op, name, err)
}

func (r *Repo) readHead(ctx context.Context, key string) (Head, objstore.Version, error) {
	content, version, err := r.getContent(ctx, typeHead, key, maxHeadBytes)
	if err != nil {
		return Head{}, "", err
	}

	h, err := decodeHead(content)
	if err != nil {
		return Head{}, "", err
	}

	// Authentication proves that it was sealed for this key; the key must also be the one of its name.
	if want, err := r.headKey(h.Name); err != nil || want != key {
		return Head{}, "", damaged("the head belongs to another name")
	}

	return h, version, nil
}

// PutHead replaces the state prev of a head, "" for none, and returns the new version.
// Conflict: another process has written the head since. Durable on return. It does not
// touch the objects that h refers to.
//
// Every write has its own ID, so that [objstore.Retry] recognizes it. After a temporary
// error the head may or may not have been written: read it.
func (r *Repo) PutHead(ctx context.Context, h Head, prev objstore.Version) (objstore.Version, error) {
	now, err := r.RewriteHead(ctx, HeadState{Head: h, Version: prev})
	return now.Version, err
}

// RewriteHead is PutHead with the state that h was read from. It returns h as it is in the store then: with its new
// version and the ID of this write.
func (r *Repo) RewriteHead(ctx context.Context, h HeadState) (HeadState, error) {
	h.WriteID = r.env.newID()
	version, err := r.putHead(ctx, h.Head, h.Version)
	h.Version = version
	return h, err
}

// putHead writes a head that has the ID of this write.
func (r *Repo) putHead(ctx context.Context, h Head, prev objstore.Version) (objstore.Version, error) {
	const op = "write head"
	if err := h.check(); err != nil {
		return "", errs.Wrap(op, h.Name, asInvalid(err))
	}

	key, err := r.headKey(h.Name)
	if err != nil {
		return "", err
	}

	content, err := encodeJSON(h)
	if err != nil {
		return "", errs.Wrap(op, h.Name, err)
	}

	object, err := r.seal(typeHead, key, content, maxHeadBytes)
	if err != nil {
		return "", errs.Wrap(op, h.Name, err)
	}

	condition := objstore.IfAbsent
	if prev != "" {
		condition = objstore.IfVersion(prev)
	}

	now, err := r.store.Put(ctx, key, object, condition)
	return now, errs.Wrap(op, h.Name, goneIsConflict(err))
}

// goneIsConflict returns err, with NotFound turned into Conflict: an expected state that
// was deleted has changed as well.
func goneIsConflict(err error) error {
	if errs.Is(err, errs.NotFound) {
		return errs.New(errs.Conflict, "", "", "%w", err)
	}
	return err
}

// Heads yields all heads in the order of their keys, which is not the order of names. It
// reads several at once. An error ends it; a head that disappears while it runs is one,
// because heads are never removed.
func (r *Repo) Heads(ctx context.Context) iter.Seq2[HeadState, error] {
	return readEach(ctx, r, headPrefix, func(ctx context.Context, id ID) (HeadState, error) {
		key := headPrefix + id.String()
		h, version, err := r.readHead(ctx, key)
		return HeadState{Head: h, Version: version}, errs.Wrap("read head", key, err)
	})
}
