package drivertest

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/driver"

	"golang.org/x/sys/unix"
)

// testSame takes snapshots of a volume between changes of every kind: what has changed is never called the same, and
// what has not is.
func testSame(t *testing.T, s *suite) {
	d, ok := s.d.(driver.Comparer)
	if !ok {
		t.Skip("the driver is no Comparer")
	}

	same := func(what string, id, base driver.ObjectID, want bool) {
		t.Helper()
		if got, err := d.Same(s.ctx(), id, base); err != nil || got != want {
			t.Errorf("%s: %v, %v; want %v", what, got, err, want)
		}
	}

	sizes := []bool{false, true}
	if s.target.Slow {
		sizes = sizes[:1]
	}

	for _, big := range sizes {
		what := func(text string) string { return fmt.Sprintf("%s (big %v)", text, big) }
		vol := s.create(driver.Native)
		s.edit(vol, func(c content) error {
			p := at(c)
			if big { // so that it takes more than one leaf
				for i := range 600 {
					name := fmt.Sprintf("a file with a long name, number %d", i)
					if err := os.WriteFile(p(name), file{uint64(i), 100}.bytes(), 0o600); err != nil {
						return err
					}
				}
			}

			return errors.Join(os.Mkdir(p("dir"), 0o755), os.WriteFile(p("a"), file{1, 200_000}.bytes(), 0o600),
				os.WriteFile(p("b"), []byte("b"), 0o600), os.WriteFile(p("dir/stays"), nil, 0o600),
				os.Symlink("a", p("link")))
		})

		s.snapshot(vol)

		// A mount may note something once.
		s.edit(vol, func(content) error { return nil })
		base := s.snapshot(vol)
		same(what("nothing"), s.snapshot(vol), base, true)
		for range 2 {
			s.edit(vol, func(c content) error { _, err := os.ReadFile(at(c)("a")); return err })
		}

		if !s.target.Slow { // ZFS writes something at each mount
			same(what("only read"), s.snapshot(vol), base, true)
		}

		edits := []struct {
			what string
			edit func(p func(string) string) error
		}{
			{"a byte in place", func(p func(string) string) error { return writeAt(p("a"), []byte("x"), 100_000) }},
			{"a byte of a small file", func(p func(string) string) error { return writeAt(p("b"), []byte("x"), 0) }},
			{"a mode", func(p func(string) string) error { return os.Chmod(p("b"), 0o640) }},
			{"an owner", func(p func(string) string) error { return os.Chown(p("b"), 7, 8) }},
			{"an attribute", func(p func(string) string) error { return unix.Setxattr(p("b"), testXattr, []byte("v"), 0) }},
			{"a name", func(p func(string) string) error { return os.Rename(p("b"), p("dir/c")) }},
			{"another link", func(p func(string) string) error { return os.Link(p("dir/c"), p("hard")) }},
			{"a link less", func(p func(string) string) error { return os.Remove(p("hard")) }},
			{"a hole", func(p func(string) string) error { return punch(p("a"), 0, 65536) }},
			{"a file less", func(p func(string) string) error { return os.Remove(p("a")) }},
			{"an empty directory", func(p func(string) string) error { return os.Mkdir(p("empty"), 0o700) }},
		}

		if s.target.Slow {
			edits = edits[:3]
		}

		for _, c := range edits {
			s.edit(vol, func(x content) error { return c.edit(at(x)) })
			now := s.snapshot(vol)
			same(what(c.what), now, base, false)
			base = s.snapshot(vol)
			same(what("nothing after "+c.what), base, now, true)
		}

		if big == sizes[len(sizes)-1] {
			testNotComparable(s, d, vol, base, same)
		}
	}
}

// testNotComparable compares what has no history in common, or not that.
func testNotComparable(
	s *suite, d driver.Comparer, vol, base driver.ObjectID, same func(string, driver.ObjectID, driver.ObjectID, bool),
) {
	s.t.Helper()
	other := s.create(driver.Native)
	same("another volume", s.snapshot(other), base, false)

	// Two clones that differ, of which the one that was changed first is compared with a later snapshot of the other.
	one, two := s.clone(base), s.clone(base)
	for i, vol := range []driver.ObjectID{one, two} {
		s.edit(vol, func(c content) error { return writeAt(at(c)("dir/stays"), []byte{byte(i)}, 0) })
	}

	was := s.snapshot(two)
	same("a sibling", s.snapshot(one), was, false)

	for what, ids := range map[string][2]driver.ObjectID{
		"unknown": {driver.NewID(), base}, "an unknown base": {base, driver.NewID()},
	} {
		if got, err := d.Same(s.ctx(), ids[0], ids[1]); got || !errs.Is(err, errs.NotFound) {
			s.t.Errorf("%s: %v, %v", what, got, err)
		}
	}

	same("a volume", vol, base, false)
	same("with a volume", base, vol, false)
	same("the wrong way round", base, s.snapshot(vol), false)
}
