package engine

import (
	"bytes"
	"io"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/linux/fsprobe"
	"pando/internal/tree/treecopy"
)

// headReader remembers how standard input began, so that an error can say what it
// holds instead of a tar. It may be read by another goroutine than the one that asks.
type headReader struct {
	r    io.Reader
	mu   sync.Mutex
	head []byte
}

// headBytes is how much it remembers: enough for most of what fsprobe knows.
const headBytes = 128 << 10

func (h *headReader) Read(p []byte) (int, error) {
	n, err := h.r.Read(p)
	h.mu.Lock()
	h.head = append(h.head, p[:min(n, headBytes-len(h.head))]...)
	h.mu.Unlock()
	return n, err
}

// refuseContent returns the error for what has been read, if that is an image or another
// kind of file that is known, and nil if not.
func (h *headReader) refuseContent() error {
	h.mu.Lock()
	head := bytes.Clone(h.head)
	h.mu.Unlock()
	if treecopy.Sniff(head) != treecopy.Unknown {
		return nil // it is an archive, and something in it is wrong
	}

	what := ""
	r := bytes.NewReader(head)
	if p, err := fsprobe.Probe(r, r.Size()); err == nil && p.Type != "" {
		what = "an image of " + p.Type
	} else if c, err := fsprobe.Identify(r, r.Size()); err == nil && c.Class != fsprobe.Text {
		what = c.Phrase
	}

	if what == "" {
		return nil
	}

	return errs.New(errs.Invalid, opImport, "-",
		"standard input must be a tar archive (plain, gzip or zstd), but this is %s", what).
		WithHint("save it to a file, and import the file")
}
