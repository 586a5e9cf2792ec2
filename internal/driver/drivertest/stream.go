package drivertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/treecopy/treetest"

	"golang.org/x/sys/unix"
)

func (s *suite) streamer() driver.Streamer {
	s.t.Helper()
	d, ok := s.d.(driver.Streamer)
	if !ok {
		s.t.Skip("the driver is no Streamer")
	}
	return d
}

// another is the suite on a pool of its own, in a filesystem of its own.
func (s *suite) another(t *testing.T) *suite { t.Helper(); return newSuite(t, s.target, s.target.Dir(t)) }

// send is the stream of an object.
func (s *suite) send(from, base driver.ObjectID) []byte {
	s.t.Helper()
	var b bytes.Buffer
	if err := s.streamer().Send(s.ctx(), from, base, &b); err != nil {
		s.t.Fatalf("send: %v", err)
	}
	return b.Bytes()
}

// received is the identity of what is to be received.
func (s *suite) received() driver.Identity {
	id := s.identity(driver.Snapshot, driver.Native)
	id.Volume = driver.NewID()
	return id
}

// receive makes an object of a stream.
func (s *suite) receive(stream []byte, base driver.ObjectID) driver.ObjectID {
	s.t.Helper()
	id := s.received()
	if err := s.streamer().Receive(s.ctx(), id, base, bytes.NewReader(stream)); err != nil {
		s.t.Fatalf("receive: %v", err)
	}
	s.wantIdentity(id)
	if a, err := s.d.Attachment(s.ctx(), id.ID); err != nil || !a.ReadOnly {
		s.t.Errorf("attachment of what was received: %+v, %v; must be read-only", a, err)
	}
	return id.ID
}

// tree describes all that is in an object.
func (s *suite) tree(id driver.ObjectID) map[string]treetest.Entry {
	s.t.Helper()
	var out map[string]treetest.Entry
	s.edit(id, func(c content) (err error) {
		out, err = treetest.Fingerprint(string(c.(tree)))
		return err
	})
	return out
}

// sameTree checks that two objects, of two pools, hold the same.
func (s *suite) sameTree(what string, id driver.ObjectID, other *suite, otherID driver.ObjectID, ignore treetest.Field) {
	s.t.Helper()
	for i, d := range treetest.Diff(s.tree(id), other.tree(otherID), ignore) {
		if i == 20 {
			s.t.Error("and more")
			break
		}
		s.t.Errorf("%s: %s", what, d)
	}
}

// bigBytes is the size of a file that increments change a little of.
const bigBytes = 8 << 20

// treeEdits are what is done to a tree between its snapshots. Each returns how many
// bytes of content it has written, at most.
var treeEdits = []struct {
	name   string
	ignore treetest.Field
	edit   func(p func(string) string) (int64, error)
}{
	{"small changes", 0, func(p func(string) string) (int64, error) {
		f, err := os.OpenFile(p("big"), os.O_RDWR, 0)
		if err != nil {
			return 0, err
		}
		defer f.Close()
		for _, off := range []int64{0, 1 << 20, bigBytes - 4096} {
			if _, err := f.WriteAt(file{77, 4096}.bytes(), off); err != nil {
				return 0, err
			}
		}
		// A hole in a stream may be zeros.
		_, err = f.WriteAt([]byte("more"), bigBytes)
		return 4 * 4096, errors.Join(err,
			os.Remove(p("size/4096")),
			os.Rename(p("dirs/bushy"), p("dirs/renamed")),
			os.Rename(p("dirs/renamed/7/file"), p("dirs/moved")),
			os.Truncate(p("size/65537-not-there"), 0).(interface{ Unwrap() error }).Unwrap().(unix.Errno).ignore(),
		)
	}},
}
