package repo

import (
	"context"
	"iter"
	"unicode/utf8"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// HeadState is a head as it was read.
type HeadState struct {
	Head
	Version objstore.Version
}

const maxName = 255

// check says what is wrong with a head, of a caller or from a store.
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

// check says what is wrong with a point that comes after the one with the number last.
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

// asInvalid is err as the caller's mistake.
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

// Head reads the head of a name. NotFound: nothing of this name was ever there.
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

	// Sealed for this key by somebody who has the keys, but is it this name's?
	if want, err := r.headKey(h.Name); err != nil || want != key {
		return Head{}, "", damaged("the head belongs to another name")
	}

	return h, version, nil
}

// PutHead writes a head over the state prev, "" for none, and returns the new one.
// Conflict: somebody else has written it since. Durable on return. It does not touch
// what h refers to.
//
// The write gets an ID of its own, so that [objstore.Retry] knows it again. After a
// temporary error the head may or may not be as h says: read it.
func (r *Repo) PutHead(ctx context.Context, h Head, prev objstore.Version) (objstore.Version, error) {
	const op = "write head"
	if err := h.check(); err != nil {
		return "", errs.Wrap(op, h.Name, asInvalid(err))
	}

	h.WriteID = r.env.newID()
	key, err := r.headKey(h.Name)
	if err != nil {
		return "", err
	}

	content, err := encodeJSON(h)
	if err != nil {
		return "", errs.Wrap(op, h.Name, err)
	}

	version := byte(objectVersion)
	if len(h.Pages) > 0 || len(content) > maxFirstHead {
		version = headVersion
	}

	object, err := r.sealVersion(typeHead, version, key, content, maxHeadBytes)
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

// goneIsConflict is err; that a state which was expected is gone altogether is a Conflict as
// well.
func goneIsConflict(err error) error {
	if errs.Is(err, errs.NotFound) {
		return errs.New(errs.Conflict, "", "", "%w", err)
	}
	return err
}

// Heads yields all heads, several read at once, in order of their keys, which is not
// that of names. An error ends it; a head that went away meanwhile is one, since
// nobody removes heads.
func (r *Repo) Heads(ctx context.Context) iter.Seq2[HeadState, error] {
	return readEach(ctx, r, headPrefix, func(ctx context.Context, id ID) (HeadState, error) {
		key := headPrefix + id.String()
		h, version, err := r.readHead(ctx, key)
		return HeadState{Head: h, Version: version}, errs.Wrap("read head", key, err)
	})
}
