// Package drivertest is the conformance suite of drivers: what every
// driver.Driver must do, checked on a real filesystem. Drivers may differ only
// in what their Caps and their optional interfaces say; nothing here asks for
// a driver's name.
//
// A driver's own test calls Run once for each filesystem it works on:
//
//	drivertest.Run(t, drivertest.Target{
//		Open: reflink.Open,
//		Dir:  func(t testing.TB) string { return testfs.XFS(t, 2<<30) },
//		...
//	})
//
// Random operations are drawn as everywhere: see faulttest.Rand.
package drivertest

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
)

// Target is a driver on a kind of filesystem.
type Target struct {
	// Open opens the driver.
	Open driver.Opener

	// Dir makes an empty directory with at least 1 GiB of room, on a filesystem
	// that the driver works on. Where clones share space it must be the only
	// thing in that filesystem, as free space is compared.
	Dir func(t testing.TB) string

	// Small makes an empty directory that is alone on a filesystem small enough
	// to be filled. Without it nothing is tested on a full pool.
	Small func(t testing.TB) string

	// Names lists what a pool holds, where that is not files in its directory: each
	// thing that the driver makes there, seen or hidden.
	Names func(dir string) ([]string, error)

	// Free is how much room a pool has, in bytes, where that is not what its
	// directory has.
	Free func(dir string) (int64, error)

	// Fill takes all the room of a pool that Small has made, where that is not what
	// its directory has, and returns what gives it back.
	Fill func(dir string) (func() error, error)

	// Spoil breaks what lies in a pool. Without it, the layout is that of package
	// objdir.
	Spoil func(t testing.TB, dir string) Spoiler

	// Slow is for machines that are emulated: fewer repetitions, and of the tests
	// that need not all run each time a sample. PANDO_TEST_FULL=1 runs all.
	Slow bool

	// Power makes a filesystem whose power can be cut. Without it, durability is
	// not tested.
	Power func(t testing.TB) Power
}

// Power is a filesystem whose power can be cut; *testfs.FS is one.
type Power interface {
	Dir() string
	Flushes() int64 // flushes of the device's cache so far
	Cut() string    // loses what is only in memory, and returns the directory
}

// Spoiler breaks objects, as a dead process or a careless user may.
type Spoiler interface {
	Identity(id driver.ObjectID) string // as stored in the pool
	Put(id driver.ObjectID, text string)
	Remove(id driver.ObjectID) // takes the identity away

	// More are ways to break an object that only this layout has: each does it, and
	// says whether an interrupted replacement of the identity looks so.
	More() map[string]func(id driver.ObjectID) (leftover bool)

	// RemoveData takes the data away and leaves the identity. False if they cannot be
	// apart.
	RemoveData(id driver.ObjectID) bool

	// Foreign puts other people's things beside an object, and returns what checks
	// that they are as they were, and takes them away.
	Foreign(id driver.ObjectID) (check func())
}

const poolID = "conformance-test-pool"

// Run runs the suite.
func Run(t *testing.T, target Target) {
	base := target.Dir(t)
	testfs.LeakCheck(t, base)
	var pools atomic.Int64
	sub := func(name string, fn func(t *testing.T, s *suite)) {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(base, fmt.Sprintf("pool%d", pools.Add(1)))
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			s := newSuite(t, target, dir)
			fn(t, s)
			s.finish()
		})
	}

	some := func(name string, fn func(t *testing.T, s *suite)) {
		if drawn(t, target, name) {
			sub(name, fn)
			return
		}
		t.Run(name, func(t *testing.T) {
			t.Skip("not drawn: PANDO_TEST_FULL=1 runs it")
		})
	}

	sub("Caps", testCaps)
	sub("Lifecycle", testLifecycle)
	some("Isolation", testIsolation)
	sub("DestroyInAnyOrder", testDestroyOrder)
	some("CloneOfCloneOfClone", testChain)
	some("Identity", testIdentity)
	some("SetIdentity", testRewriter)
	some("Inspect", testInspector)
	some("Resize", testResizer)
	some("Finish", testFinisher)
	some("Live", testLive)
	some("Batch", testBatch)
	some("Reopen", testReopen)
	some("ForeignFiles", testForeign)
	some("IncompleteObjects", testIncomplete)
	some("DamagedIdentities", testDamaged)
	some("ErrorKinds", testErrors)
	some("Sizes", testSizes)
	some("Canceled", testCanceled)
	some("Usage", testUsage)
	some("CloneTakesNoSpace", testCloneSpace)
	sub("Seal", testSeal)
	sub("SealCanceled", testSealCanceled)
	some("Stream", testStream)
	some("StreamErrors", testStreamErrors)
	some("Same", testSame)
	t.Run("StreamFull", func(t *testing.T) { testStreamFull(t, target) })
	some("Concurrency", testConcurrency)
	some("Random", testRandom)

	small := func(name string, fn func(t *testing.T, s *suite)) {
		t.Run(name, func(t *testing.T) {
			if target.Small == nil {
				t.Skip("this target has no small filesystem to fill")
			}
			s := newSuite(t, target, target.Small(t))
			fn(t, s)
			s.finish()
		})
	}

	small("FullPool", testFull)
	small("SealInTightPool", testSealTight)

	t.Run("PowerCut", func(t *testing.T) { testPower(t, target) })
}

// drawOf is of how many tests one is drawn where everything is slow.
const drawOf = 4

// drawn decides whether a test runs that need not run each time.
func drawn(t *testing.T, target Target, name string) bool {
	return !target.Slow || faulttest.Full() || faulttest.Draw(t, drawOf, name) == 0
}

// suite is the driver under test, on a pool directory of its own.
type suite struct {
	t      *testing.T
	open   driver.Opener
	target Target
	dir    string // of the pool
	d      driver.Driver
	caps   driver.Caps
	fast   driver.FS // the kind of volume that is quickest to test with
	mounts string    // directory to mount images in
	nmount atomic.Int64

	activated *sync.Map // IDs of objects whose block devices are there
}

func newSuite(t *testing.T, target Target, dir string) *suite {
	t.Helper()
	s := &suite{t: t, open: target.Open, target: target, dir: dir, activated: new(sync.Map)}
	d, err := target.Open(t.Context(), dir, poolID, true)
	if errs.Is(err, errs.Permission) && os.Geteuid() != 0 {
		t.Skipf("SKIPPED: %v: run the tests as root", err)
	}
	if err != nil {
		t.Fatalf("open: %v", err)
	}

	s.use(d)
	s.fast = s.caps.FS[0]

	// A raw image needs no mount, unless its block device must be made first.
	if _, ok := d.(driver.Activator); !ok && s.caps.Supports(driver.None) {
		s.fast = driver.None
	}

	if slices.ContainsFunc(s.caps.FS, driver.FS.IsImage) {
		s.mounts = t.TempDir()
		testfs.LeakCheck(t, s.mounts)
	}

	// Whatever happens, the filesystem must be free to be unmounted.
	t.Cleanup(func() { s.close() })
	return s
}

func (s *suite) use(d driver.Driver) { s.d, s.caps = d, d.Caps() }

// close closes the driver if it can be: it holds a directory open.
func (s *suite) close() {
	s.t.Helper()
	closeDriver(s.t, s.d)
	s.d = nil
}

func closeDriver(t *testing.T, d driver.Driver) {
	t.Helper()
	if c, ok := d.(io.Closer); ok && d != nil {
		if err := c.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
}

// reopen closes the driver and opens it again, as another process would.
func (s *suite) reopen() {
	s.t.Helper()
	s.close()
	d, err := s.open(s.t.Context(), s.dir, poolID, false)
	if err != nil {
		s.t.Fatalf("open again: %v", err)
	}
	s.use(d)
}

// finish destroys everything and checks that nothing is left of it.
func (s *suite) finish() {
	s.t.Helper()
	if s.t.Failed() || s.t.Skipped() {
		return
	}

	for id := range s.list() {
		s.destroy(id)
	}

	if left := s.list(); len(left) != 0 {
		s.t.Errorf("after destroying everything, List still sees %v", left)
	}

	if names := s.names(); len(names) != 0 {
		s.t.Errorf("LEAK: after destroying everything, the pool still holds %q", names)
	}
}

func (s *suite) ctx() context.Context { return s.t.Context() }

// sizeOf is a size that a volume of a kind may have.
func sizeOf(fs driver.FS) int64 {
	switch fs {
	case driver.XFS:
		return 320 << 20
	case driver.Native:
		return 0
	case driver.None:
		return int64(len(fileNames)) * slotBytes
	}
	return 64 << 20
}

// identity is the identity of a new object.
func (s *suite) identity(kind driver.Kind, fs driver.FS) driver.Identity {
	id := driver.NewID()
	return driver.Identity{
		Version: driver.IdentityVersion, Pool: poolID, ID: id, Kind: kind, Name: "n" + string(id[:6]),
		FS: fs, SizeBytes: sizeOf(fs), CreatedAt: time.Now().UTC().Truncate(time.Second), BootID: "test-boot",
		Owner: 4294967294,
	}
}

// create makes a volume.
func (s *suite) create(fs driver.FS) driver.ObjectID {
	s.t.Helper()
	id := s.identity(driver.Volume, fs)
	if err := s.d.Create(s.ctx(), id); err != nil {
		s.t.Fatalf("create a %s volume: %v", fs, err)
	}
	return id.ID
}

// clone clones a volume.
func (s *suite) clone(from driver.ObjectID) driver.ObjectID {
	s.t.Helper()
	id := s.derived(from, driver.Volume)
	if err := s.d.Clone(s.ctx(), from, id); err != nil {
		s.t.Fatalf("clone: %v", err)
	}
	return id.ID
}

// snapshot makes a snapshot.
func (s *suite) snapshot(from driver.ObjectID) driver.ObjectID {
	s.t.Helper()
	id := s.derived(from, driver.Snapshot)
	if err := s.d.Snapshot(s.ctx(), from, id); err != nil {
		s.t.Fatalf("snapshot: %v", err)
	}
	return id.ID
}

// derived is the identity of a new object made from another.
func (s *suite) derived(from driver.ObjectID, kind driver.Kind) driver.Identity {
	s.t.Helper()
	o, ok := s.list()[from]
	if !ok {
		s.t.Fatalf("origin %s is not listed", from)
	}

	id := s.identity(kind, o.Identity.FS)
	id.SizeBytes, id.Sector = o.Identity.SizeBytes, o.Identity.Sector
	id.Origin, id.OriginID = o.Identity.Name, from
	if kind == driver.Snapshot {
		id.Volume = from
	}

	return id
}

func (s *suite) destroy(id driver.ObjectID) {
	s.t.Helper()
	if _, active := s.activated.LoadAndDelete(id); active {
		if err := s.d.(driver.Activator).Deactivate(s.ctx(), id); err != nil {
			s.t.Fatalf("deactivate: %v", err)
		}
	}
	if err := s.d.Destroy(s.ctx(), id); err != nil {
		s.t.Fatalf("destroy: %v", err)
	}
}

// list is what List yields.
func (s *suite) list() map[driver.ObjectID]driver.Object {
	s.t.Helper()
	out := map[driver.ObjectID]driver.Object{}
	for o, err := range s.d.List(s.ctx()) {
		if err != nil {
			s.t.Fatalf("list: %v", err)
		}
		if _, twice := out[o.ID]; twice {
			s.t.Errorf("List yields %s twice", o.ID)
		}
		out[o.ID] = o
	}

	return out
}

// wantExactly checks that the pool holds these objects, whole, and no others.
func (s *suite) wantExactly(ids ...driver.ObjectID) {
	s.t.Helper()
	got := s.list()
	for _, id := range ids {
		if o, ok := got[id]; !ok {
			s.t.Errorf("List does not yield %s", id)
		} else if !o.Whole || o.Err != nil || o.Identity.ID != id {
			s.t.Errorf("List yields %+v: not whole", o)
		}
		delete(got, id)
	}

	for _, o := range got {
		s.t.Errorf("List yields %+v, which should not be there", o)
	}
}

// names lists everything in the pool, usually files in its directories, which
// shows also what List does not.
func (s *suite) names() []string {
	s.t.Helper()

	if s.target.Names != nil {
		out, err := s.target.Names(s.dir)
		if err != nil {
			s.t.Fatal(err)
		}
		return out
	}

	var out []string
	top, err := os.ReadDir(s.dir)
	if err != nil {
		s.t.Fatal(err)
	}

	for _, e := range top {
		if e.Name() == "lost+found" {
			continue
		}

		if !e.IsDir() {
			out = append(out, e.Name())
			continue
		}

		in, err := os.ReadDir(filepath.Join(s.dir, e.Name()))
		if err != nil {
			s.t.Fatal(err)
		}

		for _, f := range in {
			out = append(out, filepath.Join(e.Name(), f.Name()))
		}
	}

	return out
}

// unchanged runs fn, which must fail with an error of a kind, and checks that it
// changed nothing in the pool.
func (s *suite) unchanged(kind errs.Kind, what string, fn func() error) {
	s.t.Helper()
	before := s.names()
	err := fn()
	if got := errs.KindOf(err); got != kind {
		s.t.Errorf("%s: error %v of kind %q, want %q", what, err, got, kind)
	}
	if after := s.names(); !slices.Equal(before, after) {
		s.t.Errorf("%s: failed, but %s", what, difference(before, after))
	}
}

// difference says how two lists of names differ.
func difference(before, after []string) string {
	without := func(a, b []string) []string {
		return slices.DeleteFunc(slices.Clone(a), func(x string) bool { return slices.Contains(b, x) })
	}
	return fmt.Sprintf("%q came into the pool and %q went", without(after, before), without(before, after))
}

// sync makes the pool durable, where that is not what every call does.
func (s *suite) sync() {
	s.t.Helper()
	if d, ok := s.d.(driver.Syncer); ok {
		if err := d.Sync(s.ctx()); err != nil {
			s.t.Fatalf("sync: %v", err)
		}
	}
}
