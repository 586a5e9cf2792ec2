package repo

import (
	"bytes"
	"encoding/json"
)

// Lists in JSON are decoded element by element, and the first invalid element ends decoding: a list of millions of
// empty elements compresses into a kilobyte, and each would take hundreds of bytes of memory.

// decodeList decodes a list, and fails at the first element that check rejects. It calls check in order.
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
