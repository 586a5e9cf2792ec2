package repo

import (
	"bytes"
	"encoding/json"
)

// Lists in JSON are read element by element, and what is no element ends it: a list of millions of nothings packs into
// a kilobyte, and would take hundreds of bytes of memory each.

// decodeList reads a list of which each element is one that check accepts. check is called in order.
func decodeList[T any](b []byte, check func(*T) error) ([]T, error) {
	if bytes.Equal(bytes.TrimSpace(b), []byte("null")) {
		return nil, nil
	}

	d := json.NewDecoder(bytes.NewReader(b))
	if t, err := d.Token(); err != nil || t != json.Delim('[') {
		return nil, damaged("a list begins with %v instead of [", t)
	}

	out := []T{}
	for d.More() {
		var x T
		if err := d.Decode(&x); err != nil {
			return nil, err
		}
		if err := check(&x); err != nil {
			return nil, err
		}
		out = append(out, x)
	}

	return out, nil
}

type (
	pointList []Point
	pageList  []PointPage
	idList    []ID
	seenList  []SeenSession
)

func (l *pointList) UnmarshalJSON(b []byte) (err error) {
	last := uint64(0)
	*l, err = decodeList(b, func(p *Point) error {
		err := p.check(last)
		last = p.Seq
		return err
	})
	return err
}

func (l *pageList) UnmarshalJSON(b []byte) (err error) {
	last := uint64(0)
	*l, err = decodeList(b, func(p *PointPage) error {
		err := p.check(last)
		last = p.Last
		return err
	})
	return err
}

func (l *idList) UnmarshalJSON(b []byte) (err error) {
	*l, err = decodeList(b, func(id *ID) error {
		if id.IsZero() {
			return damaged("a list contains an empty ID")
		}
		return nil
	})
	return err
}

func (l *seenList) UnmarshalJSON(b []byte) (err error) {
	*l, err = decodeList(b, func(s *SeenSession) error {
		if s.ID.IsZero() {
			return damaged("a session has no ID")
		}
		return nil
	})
	return err
}
