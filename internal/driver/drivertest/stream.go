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

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/testing/treetest"

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
func (s *suite) another(t *testing.T) *suite {
	t.Helper()
	return newSuite(t, s.target, s.target.Dir(t))
}

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
func (s *suite) sameTree(
	what string, id driver.ObjectID, other *suite, otherID driver.ObjectID, ignore treetest.Field,
) {
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

// treeEdit is what is done to a tree between its snapshots. It returns about how
// many bytes of content it has written.
type treeEdit struct {
	name   string
	ignore treetest.Field // from here on
	edit   func(p func(string) string) (int64, error)
}

// slowEdits are of what fillTree makes, for machines on which treeEdits take too
// long.
var slowEdits = []treeEdit{
	{"changes", treetest.Holes, func(p func(string) string) (int64, error) {
		err := errors.Join(
			writeAt(p("big"), file{77, 4096}.bytes(), 0, 1<<20, bigBytes-4096), punch(p("big"), 2<<20, 1<<20),
			os.Remove(p("dir/sub/file3")), os.Rename(p("dir/sub"), p("moved")), os.Rename(p("moved/file5"), p("empty/file")),
			os.Remove(p("dangling")), os.Mkdir(p("dangling"), 0o700), os.WriteFile(p("dangling/in"), []byte("x"), 0o600),
			os.Remove(p("dir/hardlink")), os.Link(p("moved/file8"), p("dir/other")), os.Truncate(p("moved/file9"), 10),
			os.Chmod(p("private"), 0o640), os.Chown(p("script"), 5, 6), unix.Setxattr(p("closed"), testXattr, []byte("new"), 0),
		)
		return 4 * 4096, err
	}},
}

// treeEdits are of what treetest makes.
var treeEdits = []treeEdit{
	{"small changes", 0, func(p func(string) string) (int64, error) {
		err := errors.Join(
			writeAt(p("big"), file{77, 4096}.bytes(), 0, 1<<20, bigBytes-4096),
			writeAt(p("big"), []byte("more"), bigBytes),
			os.Remove(p("size/4096")),
			os.Rename(p("dirs/bushy"), p("dirs/renamed")),
			os.Rename(p("dirs/renamed/7/file"), p("dirs/moved")),
			os.Mkdir(p("dirs/renamed/new"), 0o700),
			os.WriteFile(p("dirs/renamed/new/file"), []byte("new"), 0o600),
			os.RemoveAll(p("dirs/renamed/8")),
		)
		return 5 * 4096, err
	}},
	{"names", 0, func(p func(string) string) (int64, error) {
		err := errors.Join(
			// Two files change places, and a directory goes below its own child.
			unix.Renameat2(unix.AT_FDCWD, p("size/1"), unix.AT_FDCWD, p("size/65536"), unix.RENAME_EXCHANGE),
			os.MkdirAll(p("turn/x/y"), 0o755),
			os.Rename(p("dirs/renamed"), p("turn/x/y/renamed")),
			os.Rename(p("turn/x/y"), p("turn/y")),
			os.Rename(p("turn/x"), p("turn/y/x")),
			// One kind of file in the place of another.
			os.Remove(p("size/511")), os.Mkdir(p("size/511"), 0o755), os.WriteFile(p("size/511/in"), []byte("x"), 0o644),
			os.RemoveAll(p("dirs/0700")), os.Symlink("../size", p("dirs/0700")),
			os.Remove(p("links/file")), os.WriteFile(p("links/file"), []byte("no link"), 0o644),
			os.Remove(p("links/dangling")), unix.Mkfifo(p("links/dangling"), 0o600),
			// Hard links.
			os.Remove(p("hard/first")), os.Link(p("hard/second"), p("turn/fifth")), os.Remove(p("hard/z/big7")),
			os.Link(p("size/4097"), p("hard/another")),
		)

		return 3 * 4096, err
	}},
	{"attributes", treetest.Holes, func(p func(string) string) (int64, error) {
		err := errors.Join(
			os.Chmod(p("mode/0666"), 0o4755), os.Chmod(p(""), 0o711), os.Chown(p(""), 3, 4),
			// Its bits must stay although the kernel takes them at a change of owner.
			os.Chown(p("owner/setuid0"), 1234, 5678), os.Chmod(p("owner/setuid0"), 0o6755),
			os.Lchown(p("links/owned"), 99, 98),
			unix.Setxattr(p("size/4097"), "user.new", []byte("value"), 0), unix.Setxattr(p(""), "user.new", []byte("root's"), 0),
			unix.Setxattr(p(""), "system.posix_acl_default",
				[]byte(treetest.ACL([3]uint32{1, 7, ^uint32(0)}, [3]uint32{2, 5, 77}, [3]uint32{4, 5, ^uint32(0)},
					[3]uint32{16, 7, ^uint32(0)}, [3]uint32{32, 5, ^uint32(0)})), 0),
			os.WriteFile(p("inherits"), []byte("ACL"), 0o644),
			unix.Lremovexattr(p("xattr/symlink"), "trusted.on a symlink"),
			os.Truncate(p("size/3145733"), 1<<20+1), os.Truncate(p("size/0"), 1<<20),
			punch(p("big"), 2<<20, 1<<20), writeAt(p("big"), file{78, 4096}.bytes(), 5<<20),
		)

		// What was made while the root had no default ACL has none.
		return 4 * 4096, errors.Join(err, unix.Removexattr(p("inherits"), "system.posix_acl_access"))
	}},
}

func writeAt(path string, b []byte, offsets ...int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	for _, off := range offsets {
		if _, err := f.WriteAt(b, off); err != nil {
			f.Close()
			return err
		}
	}
	return f.Close()
}

func punch(path string, off, n int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
}

// at is paths in an attached tree.
func at(c content) func(string) string {
	return func(name string) string { return filepath.Join(string(c.(tree)), name) }
}

// fullTree makes a volume with everything in it.
func (s *suite) fullTree() driver.ObjectID {
	s.t.Helper()
	vol := s.create(driver.Native)
	s.edit(vol, func(c content) error {
		if !s.target.Slow {
			treetest.Build(s.t, string(c.(tree)))
		} else if err := c.(tree).fillTree(); err != nil {
			return err
		}
		return os.WriteFile(at(c)("big"), file{5, bigBytes}.bytes(), 0o644)
	})
	return vol
}

// testStream sends an object and then increments from pool to pool, in every way
// that they may go round.
func testStream(t *testing.T, a *suite) {
	a.streamer()
	b, c := a.another(t), a.another(t)
	vol := a.fullTree()
	aIDs := []driver.ObjectID{a.snapshot(vol)}
	stream := a.send(aIDs[0], "")
	if len(stream) < bigBytes {
		t.Fatalf("the stream has %d bytes, the tree more than %d", len(stream), bigBytes)
	}

	bIDs := []driver.ObjectID{b.receive(stream, "")}
	b.sameTree("whole object", bIDs[0], a, aIDs[0], 0)

	// What was received is as good as the origin, to a third pool.
	cIDs := []driver.ObjectID{c.receive(b.send(bIDs[0], ""), "")}
	c.sameTree("whole object, sent on", cIDs[0], a, aIDs[0], 0)

	edits := treeEdits
	if a.target.Slow {
		edits = slowEdits
	}

	var ignore treetest.Field
	for i, e := range edits {
		ignore |= e.ignore
		var written int64
		a.edit(vol, func(c content) (err error) { written, err = e.edit(at(c)); return err })
		aIDs = append(aIDs, a.snapshot(vol))
		stream := a.send(aIDs[i+1], aIDs[i])
		if len(stream) > bigBytes/2 {
			t.Errorf("%s: the stream of the difference has %d bytes, about %d were written", e.name, len(stream), written)
		}

		bIDs = append(bIDs, b.receive(stream, bIDs[i]))
		b.sameTree(e.name, bIDs[i+1], a, aIDs[i+1], ignore)
		if a.caps.Sharing {
			b.sync()
			if u := b.usage(bIDs[i+1]); u.ExclusiveBytes > written+2<<20 || u.SharedBytes < bigBytes/2 {
				t.Errorf("%s: usage of the increment is %+v, about %d bytes were written", e.name, u, written)
			}
		}

		cIDs = append(cIDs, c.receive(b.send(bIDs[i+1], bIDs[i]), cIDs[i]))
		c.sameTree(e.name+", sent on", cIDs[i+1], a, aIDs[i+1], ignore)
	}

	// On from what was received, and back to where it came from.
	last := len(edits)
	fork := c.clone(cIDs[last])
	c.edit(fork, func(c content) error {
		return errors.Join(writeAt(at(c)("big"), []byte("forked"), 3<<20), os.WriteFile(at(c)("fork"), []byte("x"), 0o600))
	})
	forked := c.snapshot(fork)
	stream = c.send(forked, cIDs[last])
	back := a.receive(stream, aIDs[last])
	a.sameTree("a fork, sent back", back, c, forked, ignore)
	viaB := b.receive(stream, bIDs[last])
	b.sameTree("a fork, sent to the one between", viaB, c, forked, ignore)

	// And on from there, in a pool that has both only received.
	again := b.clone(viaB)
	b.edit(again, func(c content) error { return os.Remove(at(c)("fork")) })
	againSnap := b.snapshot(again)
	final := c.receive(b.send(againSnap, viaB), forked)
	c.sameTree("a fork of a fork", final, b, againSnap, ignore)

	// Steps may be left out, and a pool may receive what it has.
	skip := a.send(aIDs[last], aIDs[0])
	b.sameTree("several steps at once", b.receive(skip, bIDs[0]), a, aIDs[last], ignore)
	a.sameTree("into its own pool", a.receive(skip, aIDs[0]), a, aIDs[last], ignore)
	a.sameTree("twice into its own pool", a.receive(skip, aIDs[0]), a, aIDs[last], ignore)

	// Nothing that was built on has changed.
	for i := range bIDs {
		b.sameTree("an older one, afterwards", bIDs[i], a, aIDs[i], treetest.Holes)
	}

	b.finish()
	c.finish()
}

// testStreamErrors sends and receives what cannot be.
func testStreamErrors(t *testing.T, a *suite) {
	ctx := a.ctx()
	as := a.streamer()
	b := a.another(t)
	bs := b.streamer()
	vol := a.create(driver.Native)
	put := func(name string, f file) { a.edit(vol, func(c content) error { return c.put(name, f.bytes()) }) }
	put("a", file{1, 300_000})
	s0 := a.snapshot(vol)
	put("b", file{2, 300_000})
	s1 := a.snapshot(vol)
	put("a", file{3, 100_000})
	s2 := a.snapshot(vol)
	whole, diff, diff2 := a.send(s0, ""), a.send(s1, s0), a.send(s2, s1)

	unknown := driver.NewID()
	send := func(from, base driver.ObjectID) func() error {
		return func() error { return as.Send(ctx, from, base, io.Discard) }
	}
	a.unchanged(errs.NotFound, "send of an unknown object", send(unknown, ""))
	a.unchanged(errs.NotFound, "send with an unknown base", send(s1, unknown))
	a.unchanged(errs.Invalid, "send of a volume", send(vol, ""))
	a.unchanged(errs.Invalid, "send with a volume as its base", send(s1, vol))
	a.unchanged(errs.Invalid, "send of a snapshot to itself", send(s1, s1))
	for _, room := range []int{0, 10, 4000, 200_000} {
		w := &fullWriter{room: room}
		if err := as.Send(ctx, s0, "", w); !errors.Is(err, errFull) {
			t.Errorf("send to a writer that fails after %d bytes: %v", room, err)
		}
	}

	for _, room := range []int{-1, 10, 4000, 200_000} {
		sub, cancel := context.WithCancel(ctx)
		if room < 0 {
			cancel()
		}
		err := as.Send(sub, s0, "", &fullWriter{room: room, then: func() error { cancel(); return nil }})
		cancel()
		if !errs.Is(err, errs.Canceled) {
			t.Errorf("send cancelled after %d bytes: %v of kind %q", room, err, errs.KindOf(err))
		}
	}

	r0, r1 := b.receive(whole, ""), driver.ObjectID("")
	receive := func(stream []byte, base driver.ObjectID) func() error {
		return func() error { return bs.Receive(ctx, b.received(), base, bytes.NewReader(stream)) }
	}
	b.unchanged(errs.NotFound, "receive with an unknown base", receive(diff, unknown))
	b.unchanged(errs.Conflict, "receive of a difference without a base", receive(diff, ""))
	b.unchanged(errs.Conflict, "receive of a whole object with a base", receive(whole, r0))
	b.unchanged(errs.Conflict, "receive of a difference to another base", receive(diff2, r0))
	r1 = b.receive(diff, r0)
	b.unchanged(errs.Conflict, "receive of a difference to an older base", receive(diff, r1))

	// A clone has the same content, but may change at any time.
	b.unchanged(errs.Invalid, "receive with a volume as its base", receive(diff, b.clone(r0)))
	b.unchanged(errs.Exists, "receive onto an existing object", func() error {
		id := b.received()
		id.ID = r0
		return bs.Receive(ctx, id, "", bytes.NewReader(whole))
	})

	b.unchanged(errs.Invalid, "receive of a volume", func() error {
		return bs.Receive(ctx, b.identity(driver.Volume, driver.Native), "", bytes.NewReader(whole))
	})
	b.unchanged(errs.Invalid, "receive with an identity of 64 KiB", func() error {
		id := b.received()
		id.Name = string(make([]byte, 64<<10))
		return bs.Receive(ctx, id, "", bytes.NewReader(whole))
	})

	for what, c := range map[string]struct {
		stream []byte
		base   driver.ObjectID
	}{"a whole object": {whole, ""}, "a difference": {diff2, r1}} {
		n := len(c.stream)
		cuts, changes, ends := []int{0, 1, 16, 17, 30, 100, n / 3, n / 2, n * 9 / 10, n - 11, n - 10, n - 1}, []int{5, 20,
			200, n / 2, n - 2}, []int{0, 1, 1000, n / 2, n - 1}
		if a.target.Slow {
			cuts, changes, ends = []int{0, n / 2, n - 1}, []int{200, n / 2}, []int{0, n / 2, n - 1}
		}

		for _, cut := range cuts {
			b.unchanged(errs.Damaged, fmt.Sprintf("receive of %d of the %d bytes of %s", cut, n, what),
				receive(c.stream[:cut], c.base))
		}

		b.unchanged(errs.Damaged, "receive of more than "+what, receive(append(bytes.Clone(c.stream), 0), c.base))
		for _, pos := range changes {
			bad := bytes.Clone(c.stream)
			bad[pos] ^= 4
			b.unchanged(errs.Damaged, fmt.Sprintf("receive of %s with byte %d of %d changed", what, pos, n),
				receive(bad, c.base))
		}

		for _, at := range ends {
			sub, cancel := context.WithCancel(ctx)
			b.unchanged(errs.Canceled, fmt.Sprintf("receive of %s, cancelled after %d bytes", what, at), func() error {
				return bs.Receive(sub, b.received(), c.base,
					io.MultiReader(bytes.NewReader(c.stream[:at]), &stopReader{sub, cancel}))
			})
			broken := errors.New("the network is down")
			b.unchanged(errs.IO, fmt.Sprintf("receive of %s from a reader that fails after %d bytes", what, at), func() error {
				return bs.Receive(ctx, b.received(), c.base,
					io.MultiReader(bytes.NewReader(c.stream[:at]),
						failReader{errs.Wrap("download", "", &errs.Error{Kind: errs.IO, Err: broken})}))
			})
		}
	}

	// None of this is in the way of the right thing.
	b.sameTree("after others were refused", b.receive(diff2, r1), a, s2, 0)
	b.finish()
}

var errFull = errors.New("no more")

// fullWriter takes so many bytes.
type fullWriter struct {
	room int
	then func() error
}

func (w *fullWriter) Write(b []byte) (int, error) {
	if w.room -= len(b); w.room >= 0 {
		return len(b), nil
	}
	if w.then != nil {
		return len(b), w.then()
	}
	return 0, errFull
}

// stopReader cancels and then gives what the context says.
type stopReader struct {
	ctx    context.Context
	cancel func()
}

func (r *stopReader) Read([]byte) (int, error) {
	r.cancel()
	return 0, r.ctx.Err()
}

type failReader struct{ err error }

func (r failReader) Read([]byte) (int, error) { return 0, r.err }

// testStreamFull receives more than fits.
func testStreamFull(t *testing.T, target Target) {
	if target.Small == nil {
		t.Skip("this target has no small filesystem to fill")
	}

	b := newSuite(t, target, target.Small(t))
	b.streamer()
	a := b.another(t)
	room, err := b.freeNow()
	if err != nil {
		t.Fatal(err)
	}

	pieces := room>>24 + 2
	if target.Fill != nil { // there will be no room at all
		pieces = 2
	}

	vol := a.create(driver.Native)
	a.edit(vol, func(c content) error { return os.WriteFile(at(c)("small"), file{1, 100_000}.bytes(), 0o600) })
	s0 := a.snapshot(vol)
	a.edit(vol, func(c content) error {
		for i := range pieces { // of 16 MiB each
			if err := os.WriteFile(at(c)(fmt.Sprint("large", i)), file{uint64(i), 16 << 20}.bytes(), 0o600); err != nil {
				return err
			}
		}
		return nil
	})

	s1 := a.snapshot(vol)
	base := b.receive(a.send(s0, ""), "")
	empty := func() error { return nil }
	if target.Fill != nil {
		if empty, err = target.Fill(b.dir); err != nil {
			t.Fatal(err)
		}
	}

	for what, parent := range map[string][2]driver.ObjectID{"a whole object": {"", ""}, "a difference": {s0, base}} {
		r, w := io.Pipe()
		go func() { w.CloseWithError(a.streamer().Send(a.ctx(), s1, parent[0], w)) }()
		b.unchanged(errs.NoSpace, "receive of "+what+" larger than the pool", func() error {
			return b.streamer().Receive(b.ctx(), b.received(), parent[1], r)
		})
		r.Close()
	}

	if err := empty(); err != nil {
		t.Fatal(err)
	}

	// The room returns. A full filesystem has none for an identity either.
	again := b.identity(driver.Volume, driver.Native)
	b.eventually("after what did not fit was removed, there is no room for a clone", func() bool {
		b.sync()
		err := b.d.Clone(b.ctx(), base, again)
		if err != nil && !errs.Is(err, errs.NoSpace) {
			t.Fatal(err)
		}
		return err == nil
	})

	b.eventually("after what did not fit was removed, there is no room for a little", func() bool {
		b.sync()
		err := b.attached(again.ID, func(c content) error {
			return os.WriteFile(at(c)("new"), file{9, 16 << 20}.bytes(), 0o600)
		})
		if err != nil && !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
		return err == nil
	})

	b.sameTree("after the pool was full", base, a, s0, 0)
	a.finish()
	b.finish()
}
