package engine

import (
	"bytes"
	"io"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/linux/fsprobe"
	"pando/internal/tree/treecopy"
)

// headReader remembers the beginning of a stream, so that an error can say what
// it contains instead of a tar. Reading and asking can happen in different goroutines.
type headReader struct {
	r    io.Reader
	mu   sync.Mutex
	head []byte
}

// headBytes is how much it remembers: enough for most formats that fsprobe knows.
const headBytes = 128 << 10

func (h *headReader) Read(p []byte) (int, error) {
	n, err := h.r.Read(p)
	h.mu.Lock()
	h.head = append(h.head, p[:min(n, headBytes-len(h.head))]...)
	h.mu.Unlock()
	return n, err
}

// refuseContent returns an error that names the content read so far, if that is an image
// or another known kind of file, and nil otherwise.
func (h *headReader) refuseContent(name string) error {
	h.mu.Lock()
	head := bytes.Clone(h.head)
	h.mu.Unlock()
	if treecopy.Sniff(head) != treecopy.Unknown {
		return nil // an archive, but a damaged one
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

	return errs.New(errs.Invalid, opImport, name,
		"a stream must be a tar archive (plain, gzip or zstd), but this is %s", what).
		WithHint("save it to a file, and import the file")
}
