package replicate

import (
	"io"
	"os"

	"pando/internal/engine"

	"golang.org/x/sys/unix"
)

// These constants bound how far the kernel reads an image ahead of its reader.
const (
	aheadBytes  = 16 << 20 // bytes asked for and not read yet
	aheadRanges = 1024     // ranges taken and not given yet
	aheadOnce   = 2 << 20  // bytes in one request to the kernel
)

// readAhead takes the ranges of an image before they are needed, and asks the kernel to read them. An image that was
// written through a loop device is not in the page cache, and the disk would be idle while the only reader waits for
// each answer. Only one goroutine may use it.
type readAhead struct {
	nextRange func() (engine.Range, error, bool) // the next range of the image
	advise    func(offset, length int64)         // asks the kernel to read a part; nil: no read-ahead

	queue []engine.Range // taken and not given yet
	err   error          // the error that ended nextRange, to be given after queue
	ended bool           // nextRange has no more

	notAsked []engine.Range // data that the kernel was not asked for yet
	asked    []engine.Range // data that it was asked for and that was not read yet
	bytes    int64          // of asked
}

// newReadAhead returns a readAhead for the reader of an image. It does nothing but pass ranges on if image is not a
// file.
func newReadAhead(image io.ReaderAt, take func() (engine.Range, error, bool)) *readAhead {
	a := &readAhead{nextRange: take}
	if f, ok := image.(*os.File); ok {
		a.advise = func(offset, length int64) {
			_ = unix.Fadvise(int(f.Fd()), offset, length, unix.FADV_WILLNEED) // only an optimization
		}
	}
	return a
}

// next returns the next range of the image.
func (a *readAhead) next() (engine.Range, error, bool) {
	if a.advise == nil {
		return a.nextRange()
	}

	for len(a.queue) == 0 && !a.ended {
		a.takeRange()
	}

	if len(a.queue) == 0 {
		return engine.Range{}, a.err, a.err != nil
	}

	g := a.queue[0]
	a.queue = a.queue[1:]
	a.adviseAhead()
	return g, nil, true
}

// markRead records that everything before an offset was read, or will not be.
func (a *readAhead) markRead(before int64) {
	passed := 0
	for ; passed < len(a.asked) && a.asked[passed].End() <= before; passed++ {
		a.bytes -= a.asked[passed].Length
	}
	a.asked = a.asked[passed:]
	for len(a.notAsked) > 0 && a.notAsked[0].End() <= before {
		a.notAsked = a.notAsked[1:]
	}
	if passed > 0 {
		a.adviseAhead()
	}
}

// takeRange takes one more range from the image.
func (a *readAhead) takeRange() {
	g, err, ok := a.nextRange()
	if !ok || err != nil {
		a.err, a.ended = err, true
		return
	}
	a.queue = append(a.queue, g)
	if !g.Zero {
		a.notAsked = append(a.notAsked, g)
	}
}

// adviseAhead asks the kernel for as much as may be read ahead.
func (a *readAhead) adviseAhead() {
	for a.bytes < aheadBytes {
		if len(a.notAsked) == 0 {
			if a.ended || len(a.queue) >= aheadRanges {
				return
			}
			a.takeRange()
			continue
		}

		g := &a.notAsked[0]
		part := engine.Range{Offset: g.Offset, Length: min(g.Length, aheadOnce)}
		a.advise(part.Offset, part.Length)
		a.asked, a.bytes = append(a.asked, part), a.bytes+part.Length
		g.Offset, g.Length = g.Offset+part.Length, g.Length-part.Length
		if g.Length == 0 {
			a.notAsked = a.notAsked[1:]
		}
	}
}
