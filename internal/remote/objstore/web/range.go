package web

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// Range returns the value of a Range header for length bytes from offset, or "" for the
// whole object. length < 0: to the end. It must not be 0, which a header cannot express.
func Range(offset, length int64) string {
	switch {
	case length >= 0:
		return fmt.Sprintf("bytes=%d-%d", offset, offset+length-1)
	case offset > 0:
		return fmt.Sprintf("bytes=%d-", offset)
	}
	return ""
}

// Span is the part of an object that an answer contains.
type Span struct {
	Offset int64 // of the first byte
	Length int64 // bytes that follow; -1 if it does not say how many
	Total  int64 // bytes of the whole object; -1 likewise
}

// SpanOf returns the span of an answer to a request for length bytes from offset, from
// its headers. A server may ignore the range and send the whole object. Headers that do
// not fit the request are an error.
func SpanOf(h http.Header, offset, length int64) (Span, error) {
	bytes := int64(-1)
	if v := h.Get("Content-Length"); v != "" {
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil || n < 0 {
			return Span{}, fmt.Errorf("the answer has an invalid Content-Length: %q", v)
		}
		bytes = n
	}

	v := h.Get("Content-Range")
	if v == "" {
		return Span{Offset: 0, Length: bytes, Total: bytes}, nil
	}

	wrong := fmt.Errorf("the answer has an invalid Content-Range: %q for %s", v, Range(offset, length))
	unit, rest, _ := strings.Cut(v, " ")
	span, total, _ := strings.Cut(rest, "/")
	first, last, _ := strings.Cut(span, "-")
	a, err1 := strconv.ParseInt(first, 10, 64)
	b, err2 := strconv.ParseInt(last, 10, 64)
	n, err3 := strconv.ParseInt(total, 10, 64)
	if unit != "bytes" || err1 != nil || err2 != nil || err3 != nil || a != offset || b < a || b >= n {
		return Span{}, wrong
	}

	want := n - offset
	if length >= 0 {
		want = min(want, length)
	}
	if b-a+1 != want || (bytes >= 0 && bytes != want) {
		return Span{}, wrong
	}

	return Span{Offset: a, Length: want, Total: n}, nil
}

// Cut returns the requested part of data, which begins at s.Offset of the object.
func (s Span) Cut(data []byte, offset, length int64) []byte {
	from := min(max(offset-s.Offset, 0), int64(len(data)))
	data = data[from:]
	if length >= 0 {
		data = data[:min(length, int64(len(data)))]
	}
	return data
}
