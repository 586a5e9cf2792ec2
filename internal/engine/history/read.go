package history

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Query selects events.
type Query struct {
	Ref   string    // all of objects that had this name or have this ID; VOLUME@SNAPSHOT or GOLDEN@N: of that one; "": all
	Since time.Time // zero: all
	Limit int       // only the newest; 0: all

	Keep func(Event) bool // only those that it accepts; nil: all
}

// Result has the selected events, the oldest first.
type Result struct {
	Events []Event
	More   bool // there are older ones, which Limit left out
}

// Read reads the log of the pool in dir. It changes nothing. Lines that are damaged or of an unknown version are
// skipped. A pool without a log has no events. Permission, IO.
func Read(dir string, q Query) (Result, error) {
	text, err := readFiles(dir)
	if err != nil {
		return Result{}, errs.Wrap("read history", filepath.Join(dir, FileName), err)
	}
	return search(text, q), nil
}

// readTries limits how often the files are opened again because one of them was replaced.
const readTries = 5

// readFiles returns both files of the log, the older first.
func readFiles(dir string) ([]byte, error) {
	for try := 1; ; try++ {
		text, replaced, err := readOnce(dir)
		if err != nil || !replaced || try == readTries {
			return text, err
		}
	}
}

// readOnce is one try of readFiles. It reports whether the newer file was replaced in the meantime: its content may
// then be missing.
func readOnce(dir string) (text []byte, replaced bool, err error) {
	f, err := openIfExists(filepath.Join(dir, FileName))
	if err != nil {
		return nil, false, err
	}
	if f != nil {
		defer f.Close()
	}

	old, err := openIfExists(filepath.Join(dir, OldName))
	if err != nil {
		return nil, false, err
	}
	if old != nil {
		defer old.Close()
	}

	now, err := openIfExists(filepath.Join(dir, FileName))
	if err != nil {
		return nil, false, err
	}
	if now != nil {
		defer now.Close()
	}

	for _, r := range []*os.File{old, f} {
		if r == nil {
			continue
		}
		b, err := io.ReadAll(r)
		if err != nil {
			return nil, false, err
		}
		text = append(text, b...)
		text = append(text, '\n') // the last line may have been cut off
	}

	return text, !sameFile(f, now), nil
}

func openIfExists(path string) (*os.File, error) {
	fd, err := openRegular(path, unix.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

func sameFile(a, b *os.File) bool {
	if a == nil || b == nil {
		return a == b
	}
	x, err := a.Stat()
	if err != nil {
		return false
	}
	y, err := b.Stat()
	return err == nil && os.SameFile(x, y)
}

// search selects events from the text of a log.
func search(text []byte, q Query) Result {
	lines := bytes.Split(text, []byte{'\n'})
	wanted := func(int, Event) bool { return true }
	if q.Ref != "" {
		wanted = follow(lines, q.Ref)
	}

	// Read backwards, so that the newest events do not cost the reading of all.
	var out Result
	for i, l := range slices.Backward(lines) {
		e, ok := parseLine(l)
		if !ok || !wanted(i, e) || e.Time.Before(q.Since) || q.Keep != nil && !q.Keep(e) {
			continue
		}
		if q.Limit > 0 && len(out.Events) == q.Limit {
			out.More = true
			break
		}
		out.Events = append(out.Events, e)
	}

	slices.Reverse(out.Events)
	return out
}
