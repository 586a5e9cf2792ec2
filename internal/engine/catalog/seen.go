package catalog

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"

	"golang.org/x/sys/unix"
)

// seen is the number of durable commits that a catalogue has had, in a file of its own. The catalogue counts them too,
// in the same transactions. If it has fewer than were seen, it has lost records that were on the disk: its log was cut
// or damaged, or it is an old copy. The file is written after the commit and never synced, so that it cannot be ahead
// of a whole catalogue, whatever a power loss takes.
type seen struct {
	path string
	mu   sync.Mutex
	f    *os.File // open for writing; nil before the first note
}

// Its content is always as long, so that it can be overwritten in place.
const (
	seenFormat = "%020d %08x\n"
	seenBytes  = 30
)

func seenOf(dir string) *seen { return &seen{path: filepath.Join(dir, "catalog.seen")} }

func formatSeen(n int64) []byte {
	return fmt.Appendf(nil, seenFormat, n, crc32.ChecksumIEEE(fmt.Appendf(nil, "%020d", n)))
}

// readCommits returns the number in the file, or 0 if it is missing or damaged: then nothing is known.
func (s *seen) readCommits() int64 {
	f, err := os.Open(s.path)
	if err != nil {
		return 0
	}

	defer f.Close()
	if n := readSeen(f); n > 0 {
		return n
	}

	// Another process may just be writing it.
	if !lockSeen(f, unix.LOCK_SH, time.Now().Add(seenWait)) {
		return 0
	}

	return readSeen(f)
}

func readSeen(f *os.File) int64 {
	var b [seenBytes]byte
	if n, _ := f.ReadAt(b[:], 0); n != seenBytes {
		return 0
	}
	var n, sum int64
	if _, err := fmt.Sscanf(string(b[:]), "%d %x", &n, &sum); err != nil || !bytes.Equal(formatSeen(n), b[:]) {
		return 0
	}
	return n
}

// recordCommits writes n, unless the file already has a higher number. A failure only costs a warning later, so it is
// not an error.
func (s *seen) recordCommits(n int64) {
	deadline := time.Now().Add(seenWait)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.f == nil {
		f, err := openSeen(s.path)
		if err != nil {
			return
		}
		s.f = f
	}

	// One process at a time: a slower one would overwrite what a faster one has written.
	if !lockSeen(s.f, unix.LOCK_EX, deadline) {
		return
	}

	defer func() { _ = unix.Flock(int(s.f.Fd()), unix.LOCK_UN) }()
	if readSeen(s.f) < n {
		_, _ = s.f.WriteAt(formatSeen(n), 0)
	}
}

func (s *seen) closeFile() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.f != nil {
		_ = s.f.Close() // what it lacks costs a warning
		s.f = nil
	}
}

// seenWait is how long a commit waits for others that record theirs, which takes microseconds unless one of them is
// stopped.
const seenWait = time.Second

// lockSeen locks the file, and reports whether it could in time. It tries at least once.
func lockSeen(f *os.File, how int, deadline time.Time) bool {
	for wait := 20 * time.Microsecond; ; wait = min(2*wait, 10*time.Millisecond) {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		if err == nil {
			return true
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || time.Now().After(deadline) {
			return false
		}
		time.Sleep(wait)
	}
}

// openSeen opens the file for writing, and makes it if it is missing.
func openSeen(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}

	f, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err // another process is writing the first one
	}

	// The pool's owner owns it, even if root writes it first.
	var dir unix.Stat_t
	err = unix.Stat(filepath.Dir(path), &dir)
	if err == nil && os.Geteuid() == 0 && dir.Uid != 0 {
		err = f.Chown(int(dir.Uid), int(dir.Gid))
	}
	if err != nil {
		f.Close()
		return nil, err
	}

	return f, nil
}

// Lost returns how many durable commits the catalogue had lost when it was opened: 0 if it is whole, as far as is
// known.
func (c *Catalog) Lost() int64 { return c.lost }

// LostError describes a catalogue that has lost commits; nil if it has not. Damaged.
func (c *Catalog) LostError() error {
	if c.lost == 0 {
		return nil
	}
	return errs.New(errs.Damaged, "open catalogue", c.path,
		"it lost its last %s: its log was damaged, or it is an old copy. Nothing can be created or destroyed until "+
			"it is repaired", lostChangesText(c.lost)).
		WithHint("list what is missing with %s, and restore it with %s", errs.Run("fsck"),
			errs.Run("init", errs.Param("rebuild")))
}

func lostChangesText(n int64) string {
	if n == 1 {
		return "change, which was on disk"
	}
	return fmt.Sprintf("%d changes, which were on disk", n)
}

// Continuous reports whether the catalogue is known to have every durable commit that
// was waited for in this boot.
func (c *Catalog) Continuous() bool { return c.lost == 0 && c.known }

// checkSeen compares the count that was read before the catalogue with that in it.
func (c *Catalog) checkSeen(seen, commits int64) {
	c.lost, c.known = max(seen-commits, 0), seen > 0
}

// countCommits counts durable commits, in the transaction that they share, and returns how many there have been.
func (t *Tx) countCommits(more int64) (n int64, err error) {
	err = t.queryRow(`INSERT INTO meta VALUES ('commits', ?1) ON CONFLICT (key)
		DO UPDATE SET value = CAST(value AS INTEGER) + ?1
		RETURNING CAST(value AS INTEGER)`, more).Scan(&n)
	return n, wrap("write catalogue", t.c.path, err)
}

// SetMended records that the losses of the catalogue of the pool in dir were found and repaired as far as possible:
// from now on it counts as whole.
func (t *Tx) SetMended(dir string) error {
	_, err := t.exec(`INSERT INTO meta VALUES ('commits', ?1) ON CONFLICT (key) DO UPDATE SET value = ?1
		WHERE CAST(value AS INTEGER) < ?1`, seenOf(dir).readCommits())
	return err
}

// OnCommit sets the func that is called with the objects whose rows a transaction has added, after it was committed and
// before Update returns.
func (c *Catalog) OnCommit(fn func([]driver.ObjectID)) { c.onCommit = fn }
