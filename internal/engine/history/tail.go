package history

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Numbered is an event with its position in the log: an ID that a Tail can continue after. Positions of one log are in
// the order of events.
type Numbered struct {
	ID string
	Event
}

// Tail follows a log from a position. It must not be used concurrently.
type Tail struct {
	dir    string
	f      *os.File // that it reads; nil: there was no log yet
	key    string   // of the file, in IDs; "": it has no line yet
	at     int64    // offset of the next line
	gap    bool     // to be reported by Next
	behind bool     // the file is the older one
}

// Beginning is the position before all events that are known.
const Beginning = "0"

// tailMost limits the bytes that Next reads at once.
const tailMost = 256 << 10

// Follow returns a tail of the log of the pool in dir: after the event with an ID or, if that is "", after all events
// so far. If the log does not have the event any more, Next reports a gap. Invalid, Permission, IO.
func Follow(dir, after string) (*Tail, error) {
	t := &Tail{dir: dir}
	key, offset, err := parsePosition(after)
	if err != nil {
		return nil, err
	}

	// The files of the log, the older first. There may be none.
	for _, name := range []string{OldName, FileName} {
		f, err := openIfExists(filepath.Join(dir, name))
		if err != nil {
			t.Close()
			return nil, errs.Wrap("follow history", dir, err)
		}
		if f == nil {
			continue
		}

		of := keyOf(f)
		switch {
		case after != "" && t.f != nil && (after == Beginning || t.key == key):
			_ = f.Close() // the older file is where to begin
			continue
		case t.f != nil:
			_ = t.f.Close()
		}
		t.f, t.key, t.at, t.behind = f, of, 0, name == OldName
	}

	switch {
	case t.f == nil:
		t.gap = key != ""
	case after == "":
		t.at, err = endOf(t.f)
	case key != "" && t.key == key:
		t.at = offset
		end, serr := t.f.Seek(0, io.SeekEnd)
		if err = serr; err == nil && offset > end {
			err = errs.New(errs.Invalid, "follow history", after, "this event is after the end of the log")
		}
	case key != "":
		// It is gone, or of another log: begin with the oldest event.
		_ = t.f.Close()
		t.f = nil
		if t, err = Follow(dir, Beginning); err == nil {
			t.gap = true
		}
	}
	if err != nil {
		t.Close()
		return nil, errs.Wrap("follow history", dir, err)
	}
	return t, nil
}

// parsePosition parses an ID. Invalid.
func parsePosition(id string) (key string, offset int64, err error) {
	if id == "" || id == Beginning {
		return "", 0, nil
	}
	key, number, ok := strings.Cut(id, "-")
	offset, err = strconv.ParseInt(number, 16, 64)
	if !ok || err != nil || offset < 0 || len(key) != keyChars {
		return "", 0, errs.New(errs.Invalid, "follow history", id, "not the ID of an event").
			WithHint("use the ID of the last event that was received")
	}
	return key, offset, nil
}

// keyChars is the length of the key of a file.
const keyChars = 16

// keyOf returns the key of a file of the log: a hash of its first line, which no other file has. It is "" as long as
// there is none.
func keyOf(f *os.File) string {
	b := make([]byte, lineMost+1)
	n, _ := f.ReadAt(b, 0)
	line, _, ok := bytes.Cut(b[:n], []byte("\n"))
	if !ok {
		return ""
	}
	sum := sha256.Sum256(line)
	return hex.EncodeToString(sum[:])[:keyChars]
}

// endOf returns the offset after the last whole line of a file.
func endOf(f *os.File) (int64, error) {
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil || end == 0 {
		return end, err
	}
	b := make([]byte, min(end, lineMost+1))
	if _, err := f.ReadAt(b, end-int64(len(b))); err != nil && err != io.EOF {
		return 0, err
	}
	return end - int64(len(b)) + int64(bytes.LastIndexByte(b, '\n')+1), nil
}

// Close closes the file that is followed.
func (t *Tail) Close() {
	if t.f != nil {
		_ = t.f.Close() // only read
	}
}

// Position returns the ID after which the next event follows.
func (t *Tail) Position() string {
	if t.key == "" {
		return Beginning
	}
	return t.key + "-" + strconv.FormatInt(t.at, 16)
}

// Next returns the next events, none if there are none yet. gap reports that events before them are missing. IO,
// Permission.
func (t *Tail) Next() (events []Numbered, gap bool, err error) {
	gap, t.gap = t.gap, false
	if t.f == nil {
		err = t.openFirst()
	}
	if err == nil && t.f != nil {
		events, err = t.read()
	}
	if err == nil && t.f != nil && len(events) == 0 {
		var lost bool
		lost, err = t.moveOn()
		gap = gap || lost
	}
	return events, gap, errs.Wrap("follow history", t.dir, err)
}

// openFirst opens the log, if there is one now.
func (t *Tail) openFirst() (err error) {
	t.f, err = openIfExists(filepath.Join(t.dir, FileName))
	t.key, t.at, t.behind = "", 0, false
	return err
}

// read returns events of the file from the offset on. It takes whole lines only.
func (t *Tail) read() ([]Numbered, error) {
	var events []Numbered
	b := make([]byte, tailMost)
	n, err := t.f.ReadAt(b, t.at)
	if err != nil && err != io.EOF {
		return nil, err
	}
	if t.key == "" && n > 0 {
		t.key = keyOf(t.f)
	}

	for rest := b[:n]; ; {
		line, more, ok := bytes.Cut(rest, []byte("\n"))
		if !ok {
			break
		}
		t.at += int64(len(line)) + 1
		rest = more
		if e, ok := parseLine(line); ok {
			events = append(events, Numbered{t.Position(), e})
		}
	}
	return events, nil
}

// moveOn goes on with the newer file, if there is one. Lines that were appended to the older one since it was read are
// read first. It reports whether there may have been files in between.
func (t *Tail) moveOn() (lost bool, err error) {
	var mine, now, old unix.Stat_t
	if err := unix.Fstat(int(t.f.Fd()), &mine); err != nil {
		return false, err
	}
	err = unix.Stat(filepath.Join(t.dir, FileName), &now)
	if errors.Is(err, fs.ErrNotExist) || err == nil && now.Ino == mine.Ino {
		return false, nil // the newer one comes with the next event
	}
	if err != nil {
		return false, err
	}
	if mine.Size > t.at && !t.behind {
		t.behind = true // what is there can be read, or is a line that was cut off
		return false, nil
	}

	// Usually this one is the older file now, and the newer one follows it.
	name := FileName
	if unix.Stat(filepath.Join(t.dir, OldName), &old) == nil && old.Ino != mine.Ino {
		name, lost = OldName, true
	}
	f, err := openIfExists(filepath.Join(t.dir, name))
	if err != nil || f == nil {
		return false, err
	}
	_ = t.f.Close() // only read
	t.f, t.key, t.at, t.behind = f, "", 0, name == OldName
	return lost, nil
}
