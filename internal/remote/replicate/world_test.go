package replicate

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/driver/zfs"
	"pando/internal/engine"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/storetest"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

var testDrivers = engine.Drivers{
	reflink.Name: reflink.Open,
	btrfs.Name:   btrfs.Open,
	plain.Name:   plain.Open,
	zfs.Name:     zfs.Open,
}

const mib = 1 << 20

// world is a pool with a remote in a directory, whose store can be made to fail.
type world struct {
	t     *testing.T
	e     *engine.Engine
	r     *Remote
	dir   string // of the pool
	store *storetest.Faulted
}

// newEngine makes a pool in a directory, removed at the end of the test.
func newEngine(t *testing.T, dir, driverName string) *engine.Engine {
	t.Helper()
	testfs.LeakCheck(t, dir)
	return initEngine(t, engine.InitRequest{Dir: filepath.Join(dir, "pool"), Driver: driverName})
}

// initEngine makes a pool, removed at the end of the test.
func initEngine(t *testing.T, q engine.InitRequest) *engine.Engine {
	t.Helper()
	pool := q.Dir
	if _, err := engine.Init(t.Context(), q, testDrivers); err != nil {
		t.Fatal(err)
	}
	e := openEngine(t, pool)
	t.Cleanup(func() {
		e.Close()
		q := engine.DeinitRequest{Dir: pool, Force: true}
		if _, err := engine.Deinit(context.Background(), q, testDrivers, nil); err != nil {
			t.Errorf("deinit at the end: %v", err)
		}
		if _, err := os.Stat(pool); err == nil {
			t.Errorf("LEAK: %s", pool)
		}
	})
	return e
}

func openEngine(t *testing.T, pool string) *engine.Engine {
	t.Helper()
	e, _ := maintained(t, pool)
	return e
}

// maintained opens a pool as a command does, and says what was cleaned up.
func maintained(t *testing.T, pool string) (*engine.Engine, engine.Recovery) {
	t.Helper()
	e, err := engine.Open(t.Context(), pool, testDrivers)
	if err != nil {
		t.Fatal(err)
	}
	r, err := e.Maintain(t.Context(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return e, r
}

// newWorld is a reflink pool on a fresh XFS, and a remote in a temporary directory.
func newWorld(t *testing.T) *world {
	t.Helper()
	return worldOn(t, testfs.XFS(t, 2<<30), reflink.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
}

func worldOn(t *testing.T, dir, driverName, url string) *world {
	t.Helper()
	return worldOf(t, newEngine(t, dir, driverName), url)
}

func worldOf(t *testing.T, e *engine.Engine, url string) *world {
	t.Helper()
	w := &world{t: t, e: e, dir: e.Dir()}
	if _, err := Add(t.Context(), e, AddRequest{Name: "r", URL: url}, Access{}); err != nil {
		t.Fatal(err)
	}
	w.load()
	return w
}

// load reads the remote as a new process would, with the same store below.
func (w *world) load() {
	w.t.Helper()
	r, err := Load(w.dir, "r", Access{})
	if err != nil {
		w.t.Fatal(err)
	}
	r.retry = objstore.RetryOptions{Attempts: 4, First: time.Microsecond, Longest: time.Millisecond}
	if w.store == nil {
		s, err := OpenStore(w.t.Context(), r.URL, Access{}, false)
		if err != nil {
			w.t.Fatal(err)
		}
		w.store = storetest.Faulty(s)
	}
	r.wrap = func(objstore.Store) objstore.Store { return w.store }
	w.r = r
}

// open opens the repository.
func (w *world) open() *repo.Repo {
	w.t.Helper()
	rp, err := w.r.Open(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(rp.Close)
	return rp
}

// importImage makes a golden of a raw image with this content; holes stay holes.
func (w *world) importImage(name string, size int64, fill func(f *os.File)) {
	w.t.Helper()
	path := filepath.Join(filepath.Dir(w.dir), name+".img")
	f, err := os.Create(path)
	if err != nil {
		w.t.Fatal(err)
	}
	if err := f.Truncate(size); err != nil {
		w.t.Fatal(err)
	}
	fill(f)
	if err := f.Close(); err != nil {
		w.t.Fatal(err)
	}
	if _, err := w.e.Import(w.t.Context(), engine.ImportRequest{Name: ref.MustName(name), Source: path, FS: driver.None,
		Update: true}); err != nil {
		w.t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) clone(from, name string) {
	w.t.Helper()
	r, err := ref.Parse("", from)
	if err == nil {
		_, err = w.e.Clone(w.t.Context(), engine.CloneRequest{From: r, Name: ref.MustName(name)})
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// image is the path of the image of a volume, snapshot or generation.
func (w *world) image(name string) string {
	w.t.Helper()
	r, err := ref.Parse("", name)
	if err != nil {
		w.t.Fatal(err)
	}
	d, err := w.e.Show(w.t.Context(), r)
	if err != nil {
		w.t.Fatal(err)
	}
	return w.imageOf(d.ID)
}

func (w *world) imageOf(id string) string {
	w.t.Helper()
	found, err := filepath.Glob(filepath.Join(w.dir, "data", "objects", id+".*"))
	if err != nil {
		w.t.Fatal(err)
	}
	found = slices.DeleteFunc(found, func(p string) bool { return filepath.Ext(p) == ".meta" })
	if len(found) != 1 {
		w.t.Fatalf("images of %s: %v", id, found)
	}
	return found[0]
}

// edit changes the image of a volume that is not mounted.
func (w *world) edit(volume string, change func(f *os.File)) {
	w.t.Helper()
	f, err := os.OpenFile(w.image(volume), os.O_RDWR, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	change(f)
	if err := f.Sync(); err != nil {
		w.t.Fatal(err)
	}
}

// noise writes bytes that cannot be compressed.
func noise(t *testing.T, f *os.File, seed uint64, offset, length int64) {
	t.Helper()
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16), byte(seed >> 24), 1})
	if _, err := io.CopyN(io.NewOffsetWriter(f, offset), r, length); err != nil {
		t.Fatal(err)
	}
}

// text writes bytes that can be.
func text(t *testing.T, f *os.File, seed uint64, offset, length int64) {
	t.Helper()
	var b bytes.Buffer
	for i := seed; int64(b.Len()) < length; i++ {
		fmt.Fprintf(&b, "{\"record\": %d, \"name\": \"a name of some length %d\"}\n", i, i*seed)
	}
	if _, err := f.WriteAt(b.Bytes()[:length], offset); err != nil {
		t.Fatal(err)
	}
}

func punch(t *testing.T, f *os.File, offset, length int64) {
	t.Helper()
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, offset, length); err != nil {
		t.Fatal(err)
	}
}

// push pushes and wants it to succeed.
func (w *world) push(refs ...string) []Pushed {
	w.t.Helper()
	out, err := w.tryPush(refs...)
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

func (w *world) tryPush(refs ...string) ([]Pushed, error) {
	w.t.Helper()
	q := PushRequest{}
	for _, s := range refs {
		r, err := ref.Parse("", s)
		if err != nil {
			w.t.Fatal(err)
		}
		q.Refs = append(q.Refs, r)
	}
	return Push(w.t.Context(), w.e, w.r, q)
}

// check reads a point of the remote whole, by nothing but its manifest, and compares it
// with the image that it should be. It recomputes all that a manifest adds up.
func (w *world) check(rp *repo.Repo, id repo.ID, image string) {
	w.t.Helper()
	ctx := context.Background()
	m, err := rp.Manifest(ctx, id)
	if err != nil {
		w.t.Fatal(err)
	}
	f, err := os.Open(image)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || st.Size() != m.SizeBytes {
		w.t.Fatalf("manifest %s is of %d bytes, the image has %d (%v)", id, m.SizeBytes, st.Size(), err)
	}
	pieces, err := piecesBetween(ctx, rp.ReadNodes, &m, 0, repo.MaxVolumeBytes)
	if err != nil {
		w.t.Fatal(err)
	}
	logical, at := int64(0), int64(0)
	frames := map[repo.Frame][]byte{}
	for _, p := range pieces {
		logical += p.Length
		if frames[p.Frame] == nil {
			c, err := rp.ReadFrames(ctx, []repo.Frame{p.Frame})
			if err != nil {
				w.t.Fatalf("piece at %d: %v", p.Offset, err)
			}
			frames[p.Frame] = c[0]
		}
		content := frames[p.Frame][p.Within:][:p.Length]
		if p.Sum != (repo.Sum{}) && !rp.HasSum(content, p.Sum) {
			w.t.Fatalf("the piece at %d is not what its sum says", p.Offset)
		}
		zeroBytes(w.t, f, at, p.Offset)
		sameBytes(w.t, f, p.Offset, content)
		at = p.End()
	}
	zeroBytes(w.t, f, at, m.SizeBytes)
	needed, err := needsOf(ctx, rp, &m)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, u := range m.Uses {
		if !needed[u.Segment] {
			continue // it says how large it was, for who might
		}
		s, err := rp.StatSegment(ctx, u.Segment)
		if err != nil && u.Segment.Session == m.Session {
			w.t.Fatal(err)
		}
		if err == nil && u.Size != 0 && int64(u.Size) != s.Bytes {
			w.t.Fatalf("manifest %s says that segment %s has %d bytes, and it has %d", id, u.Segment, u.Size, s.Bytes)
		}
	}
	if logical != m.Logical {
		w.t.Fatalf("manifest %s says %d bytes of data, and has %d", id, m.Logical, logical)
	}
}

// zeroBytes wants a range of an image to be zero. It reads what is no hole.
func zeroBytes(t *testing.T, f *os.File, at, to int64) {
	t.Helper()
	for at < to {
		start, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if err == unix.ENXIO || err == nil && start >= to {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		end, err := unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			t.Fatal(err)
		}
		end = min(end, to)
		sameBytes(t, f, start, make([]byte, end-start))
		at = end
	}
}

func sameBytes(t *testing.T, f *os.File, at int64, want []byte) {
	t.Helper()
	for len(want) > 0 {
		n := min(len(want), mib)
		got := make([]byte, n)
		if _, err := f.ReadAt(got, at); err != nil && err != io.EOF {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want[:n]) {
			for i := range got {
				if got[i] != want[i] {
					t.Fatalf("the remote has another byte at %d: %#x, the image %#x", at+int64(i), want[i], got[i])
				}
			}
		}
		want, at = want[n:], at+int64(n)
	}
}

// checkPoint compares the newest point of a head with an image.
func (w *world) checkPoint(rp *repo.Repo, head, image string) repo.Head {
	w.t.Helper()
	h, _, err := rp.Head(context.Background(), head)
	if err != nil {
		w.t.Fatal(err)
	}
	if len(h.Recent) == 0 {
		w.t.Fatalf("head %s has no points", head)
	}
	w.check(rp, w.newest(rp, h).Manifest, image)
	return h
}

// noSessions fails the test if a session is left.
func (w *world) noSessions(rp *repo.Repo) {
	w.t.Helper()
	s, err := rp.Sessions(context.Background())
	if err != nil {
		w.t.Fatal(err)
	}
	if len(s) > 0 {
		w.t.Errorf("LEAK: session %s of %v", s[0].ID, s[0].Heads)
	}
}

// pushSnapshots are the snapshots of a volume that pushes have taken.
func (w *world) pushSnapshots(volume string) []string {
	w.t.Helper()
	names, err := pooltest.SnapshotNames(context.Background(), w.e, volume)
	if err != nil {
		w.t.Fatal(err)
	}
	return slices.DeleteFunc(names, func(n string) bool { return !pushNames().MatchString(n) })
}

// clearLost removes the sessions of pushes that failed in a way that kept them from
// ending them, as a prune would.
func (w *world) clearLost(rp *repo.Repo) {
	w.t.Helper()
	all, err := rp.Sessions(context.Background())
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Logf("%d sessions are left for a prune", len(all))
	for _, s := range all {
		if err := rp.DropSession(context.Background(), s); err != nil {
			w.t.Fatal(err)
		}
	}
}

// newest is the newest point of a head.
func (w *world) newest(rp *repo.Repo, h repo.Head) repo.Point {
	w.t.Helper()
	pt, ok, err := rp.Newest(w.t.Context(), h)
	if err != nil || !ok {
		w.t.Fatalf("%s has no newest point: %v", h.Name, err)
	}
	return pt
}

// pointsOf are all points of a head.
func pointsOf(t testing.TB, rp *repo.Repo, h repo.Head) (out []repo.Point) {
	t.Helper()
	for pt, err := range allPoints(t.Context(), rp, h, nil) {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, pt)
	}
	return out
}

// piecesBetween reads the pieces of a map that begin in [from, to), a range whose pieces must fit
// into memory.
func piecesBetween(ctx context.Context, nodes readNodes, m *repo.Manifest, from, to int64) ([]repo.Piece, error) {
	var out []repo.Piece
	todo := []repo.NodeAt{m.Root()}
	for len(todo) > 0 {
		todo = slices.DeleteFunc(todo, func(n repo.NodeAt) bool { return n.IsZero() || n.To() <= from || n.From() >= to })
		got, err := nodes(ctx, todo)
		if err != nil {
			return nil, err
		}

		var next []repo.NodeAt
		for i, r := range got {
			switch {
			case r.Err != nil:
				return nil, r.Err
			case r.Children == nil:
				out = append(out, piecesIn(r.Pieces, from, to)...)
			default:
				for slot, ref := range r.Children {
					next = append(next, todo[i].Child(slot, ref))
				}
			}
		}

		todo = next
	}

	slices.SortFunc(out, func(a, b repo.Piece) int { return int((a.Offset - b.Offset) / repo.BlockBytes) })
	return out, nil
}
