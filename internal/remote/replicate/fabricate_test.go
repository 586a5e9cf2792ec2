package replicate

import (
	"bytes"
	"context"
	"encoding/binary"
	"maps"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/file"
	"pando/internal/remote/repo"
	"pando/internal/testing/storetest"
)

// bench is a repository in a directory, and what its volumes hold. Volumes are made
// without a pool, so that their pieces can be as odd as a map may be.
type bench struct {
	t      testing.TB
	dir    string
	store  objstore.Store
	secret repo.Secret
	repo   *repo.Repo // without faults

	mu     sync.Mutex
	truth  map[string]map[string]*made // by volume and point
	blocks int                         // in one frame, at most
	frames int                         // in one segment, about
}

// made is a point of a volume.
type made struct {
	volume, point string
	manifest      repo.Manifest
	content       map[int64][]byte // blocks that are not zero
}

func newBench(t testing.TB) *bench {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "remote")
	u := &url.URL{Scheme: "file", Path: dir}
	store, err := file.Create(t.Context(), u)
	if err != nil {
		t.Fatal(err)
	}
	identity, recipient, err := repo.NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	r, err := repo.Create(t.Context(), store, repo.NewSlot{Label: "test", Recipient: recipient})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	secret, err := repo.Identity(identity)
	if err != nil {
		t.Fatal(err)
	}
	return &bench{
		t:      t,
		dir:    dir,
		store:  store,
		secret: secret,
		repo:   r,
		truth:  map[string]map[string]*made{},
		blocks: 8,
		frames: 4,
	}
}

// faulty opens the repository through a store with faults, without retries.
func (b *bench) faulty(faults ...storetest.Fault) (*repo.Repo, *storetest.Faulted) {
	b.t.Helper()
	f := storetest.Faulty(b.store)
	r, err := repo.Open(b.t.Context(), f, b.secret)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(r.Close)
	f.Add(faults...)
	return r, f
}

// block is a block of content that tells where it is from.
func block(seed uint64) []byte {
	out := make([]byte, repo.BlockBytes)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := 0; i < len(out)/2; i += 8 { // half of it can be compressed
		binary.LittleEndian.PutUint64(out[i:], r.Uint64())
	}
	return out
}

// change is what a point differs in from its base: blocks by offset; nil is zero.
type change map[int64][]byte

// randomChange makes n changes of a volume of size bytes.
func randomChange(r *rand.Rand, size int64, n int) change {
	c := change{}
	for range n {
		at := r.Int64N(size/repo.BlockBytes) * repo.BlockBytes
		for range r.IntN(6) + 1 { // runs of blocks
			switch {
			case at >= size:
			case r.IntN(5) == 0:
				c[at] = nil
			default:
				c[at] = block(r.Uint64())
			}
			at += repo.BlockBytes
		}
	}
	return c
}

// push makes a point, as the change of base (nil: of nothing), under a session of r.
// It says in a map what it has made, if that came to be. origin: base is of another
// volume.
func (b *bench) push(
	ctx context.Context, r *repo.Repo, volume, point string, size int64, base *made, c change, origin bool,
) (*made, error) {
	var pins []repo.ID
	if base != nil {
		pins = append(pins, base.manifest.ID)
	}
	sctx, l, err := beginSession(ctx, r, repo.Push, []string{volume}, repo.Writer{Pool: "pool", Host: "host"}, pins...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = l.endSession(ctx) }()
	m := &made{volume: volume, point: point, content: map[int64][]byte{}}
	m.manifest = repo.Manifest{
		ID: repo.NewID(), Volume: volume, Point: point, Content: repo.Block, FS: "none", SizeBytes: size, Sector: 512,
		CreatedAt: time.Now().UTC(), Source: "source", Session: l.id,
	}
	m.manifest.Order = m.manifest.CreatedAt.UnixNano()
	if base != nil {
		bh, _, err := r.Head(sctx, base.volume)
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(bh.Recent, func(x repo.Point) bool { return x.Manifest == base.manifest.ID }) {
			return nil, errs.New(errs.Conflict, "push", volume, "the base is gone")
		}
		maps.Copy(m.content, base.content)
		m.manifest.Origin = base.manifest.Origin
		if origin {
			m.manifest.Origin = &repo.Origin{Ref: base.volume + "@" + base.point, Volume: base.volume,
				Manifest: base.manifest.ID}
		}
	}
	if err := b.write(sctx, r, l.id, m, base, c); err != nil {
		return nil, err
	}
	for {
		h, v, err := r.Head(sctx, volume)
		if errs.Is(err, errs.NotFound) {
			h, v, err = repo.Head{Name: volume, NextSeq: 1, Writer: repo.Writer{Pool: "pool", Host: "host"}}, "", nil
		}
		if err != nil {
			return nil, err
		}
		if slices.Contains(h.Fenced, l.id) {
			return nil, errs.New(errs.Conflict, "push", volume, "fenced")
		}
		if _, err := r.Session(sctx, l.id); err != nil {
			return nil, err
		}
		h.Gone = false
		pt := repo.Point{
			Seq: h.NextSeq, Name: point, Manifest: m.manifest.ID, Source: "source", Content: repo.Block, FS: "none",
			SizeBytes: size,
			CreatedAt: m.manifest.CreatedAt, Logical: m.manifest.Logical, StateOrder: m.manifest.StateOrder,
		}
		if o := m.manifest.Origin; o != nil {
			pt.OriginRef, pt.OriginVol, pt.OriginID = o.Ref, o.Volume, o.Manifest
		}
		h.Recent, h.NextSeq = append(h.Recent, pt), h.NextSeq+1
		if _, err := r.PutHead(sctx, h, v); errs.Is(err, errs.Conflict) {
			continue
		} else if err != nil {
			return nil, err
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.truth[volume] == nil {
			b.truth[volume] = map[string]*made{}
		}
		b.truth[volume][point] = m
		return m, nil
	}
}

// write writes frames, the map and the manifest.
func (b *bench) write(ctx context.Context, r *repo.Repo, session repo.ID, m, base *made, c change) error {
	var seg *repo.SegmentWriter
	n := uint32(0)
	var written stats
	finish := func() error {
		if seg == nil {
			return nil
		}
		s, object := seg.Segment(), seg.Finish()
		seg = nil
		written.setSize(s, len(object))
		return r.PutSegment(ctx, s, object)
	}
	add := func(content []byte) (repo.Frame, error) {
		if seg == nil {
			var err error
			if seg, err = r.NewSegment(session, n); err != nil {
				return repo.Frame{}, err
			}
			n++
		}
		packed, codec := repo.Compress(nil, content)
		return seg.Add(packed, codec, len(content))
	}
	// Frames of some blocks each, which need not be neighbours.
	offsets := slices.Sorted(maps.Keys(c))
	var layers []layer
	var frame []int64
	pack := func() error {
		if len(frame) == 0 {
			return nil
		}
		var content []byte
		for _, at := range frame {
			content = append(content, c[at]...)
		}
		f, err := add(content)
		for i, at := range frame {
			layers = append(layers, pieceLayer(repo.Piece{
				Offset: at, Length: repo.BlockBytes, Frame: f, Within: uint32(i * repo.BlockBytes), Sum: r.Sum(c[at]),
			}))
		}
		frame = nil
		if err == nil && n%3 == 1 && seg.Frames() > b.frames {
			err = finish()
		}
		return err
	}
	for _, at := range offsets {
		if c[at] == nil {
			layers = append(layers, zeroLayer(at, repo.BlockBytes))
			delete(m.content, at)
			continue
		}
		m.content[at] = c[at]
		if frame = append(frame, at); len(frame) == b.blocks {
			if err := pack(); err != nil {
				return err
			}
		}
	}
	if err := pack(); err != nil {
		return err
	}
	slices.SortFunc(layers, func(a, b layer) int { return int(a.Offset/repo.BlockBytes - b.Offset/repo.BlockBytes) })

	// Write the map, and the manifest.
	var was *repo.Manifest
	if base != nil {
		was = &base.manifest
	}
	t, err := newTree(ctx, r.ReadNodes, was, m.manifest.SizeBytes)
	if err != nil {
		return err
	}
	for len(layers) > 0 {
		cell := layers[0].Offset / repo.CellBytes
		n := slices.IndexFunc(layers, func(l layer) bool { return l.Offset/repo.CellBytes != cell })
		if n < 0 {
			n = len(layers)
		}
		old, err := t.cellPieces(ctx, cell)
		if err == nil {
			err = t.replace(ctx, cell*repo.CellBytes, (cell+1)*repo.CellBytes, overlayLayers(old, layers[:n]))
		}
		if err != nil {
			return err
		}
		layers = layers[n:]
	}
	m.manifest.Map, err = t.finishTree(
		ctx,
		func(_ context.Context, packed []byte, codec repo.Codec, plain int) (repo.Frame, error) {
			content, err := repo.Unpack(codec, packed, uint32(plain))
			if err != nil {
				return repo.Frame{}, err
			}
			return add(content)
		},
	)
	if err == nil {
		err = finish()
	}
	if err != nil {
		return err
	}
	m.manifest.Logical = m.manifest.Map.Bytes
	if base != nil {
		m.manifest.Uses = base.manifest.Uses
	}
	m.manifest.Uses = written.listUses(m.manifest.Map, m.manifest.Uses)
	return r.PutManifest(ctx, m.manifest)
}

// pieces are all pieces of a small map.
func (b *bench) pieces(m *made) []repo.Piece {
	b.t.Helper()
	pieces, err := piecesBetween(b.t.Context(), b.repo.ReadNodes, &m.manifest, 0, m.manifest.SizeBytes)
	if err != nil {
		b.t.Fatal(err)
	}
	return pieces
}

// must is push without faults.
func (b *bench) must(volume, point string, size int64, base *made, c change, origin bool) *made {
	b.t.Helper()
	m, err := b.push(b.t.Context(), b.repo, volume, point, size, base, c, origin)
	if err != nil {
		b.t.Fatalf("make %s@%s: %v", volume, point, err)
	}
	return m
}

// memory is a target that lies in memory. It says what must not happen to it.
type memory struct {
	mu      sync.Mutex
	size    int64
	blocks  map[int64][]byte
	touched map[int64]int // how often a block was written
	wrong   string
}

func newMemory(size int64, content map[int64][]byte) *memory {
	return &memory{size: size, blocks: maps.Clone(content), touched: map[int64]int{}}
}

func (m *memory) WriteAt(b []byte, off int64) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.check(off, int64(len(b)))
	for at := 0; at < len(b); at += repo.BlockBytes {
		m.blocks[off+int64(at)] = bytes.Clone(b[at:min(at+repo.BlockBytes, len(b))])
		m.touched[off+int64(at)]++
	}
	return len(b), nil
}

func (m *memory) Zero(off, n int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.check(off, n)
	for at := off; at < off+n; at += repo.BlockBytes {
		delete(m.blocks, at)
		m.touched[at]++
	}
	return nil
}

func (m *memory) SizeBytes() int64 { return m.size }

func (m *memory) check(off, n int64) {
	if off < 0 || n <= 0 || off+n > m.size || off%repo.BlockBytes != 0 {
		m.wrong = "a range outside of it, or not of whole blocks"
	}
}

// same compares the content with what it should be.
func (m *memory) same(t testing.TB, what string, want map[int64][]byte) {
	t.Helper()
	if m.wrong != "" {
		t.Errorf("%s: %s was written", what, m.wrong)
	}
	bad := 0
	for at := range allKeys(m.blocks, want) {
		w, g := want[at], m.blocks[at]
		if w == nil {
			w = zeroBlock[:]
		}
		if g == nil {
			g = zeroBlock[:]
		}
		if !bytes.Equal(w, g) && !(len(g) < len(w) && bytes.Equal(w[:len(g)], g)) {
			if bad++; bad < 4 {
				t.Errorf("%s: the block at %d is not what was pushed", what, at)
			}
		}
	}
	if bad >= 4 {
		t.Errorf("%s: %d blocks in all", what, bad)
	}
}

func allKeys(a, b map[int64][]byte) map[int64]bool {
	out := map[int64]bool{}
	for k := range a {
		out[k] = true
	}
	for k := range b {
		out[k] = true
	}
	return out
}

// restored reads a point into memory, over the content of base if that is not nil.
func (b *bench) restored(r *repo.Repo, m, base *made) (*memory, *restore, error) {
	x := &restore{repo: r, now: &m.manifest}
	to := newMemory(m.manifest.SizeBytes, nil)
	if to.blocks = map[int64][]byte{}; base != nil {
		x.base = &base.manifest
		maps.Copy(to.blocks, base.content)
	}
	x.to = to
	return to, x, x.restoreImage(b.t.Context())
}

// whole checks that every point that is listed can be restored, and that verify finds
// nothing.
func (b *bench) whole() {
	b.t.Helper()
	heads, err := readHeads(b.t.Context(), b.repo)
	if err != nil {
		b.t.Fatal(err)
	}
	for _, h := range heads.good {
		for _, pt := range h.Head.Recent {
			m := b.truth[h.Head.Name][pt.Name]
			if m == nil || m.manifest.ID != pt.Manifest {
				continue // a push whose answer was lost
			}
			to, _, err := b.restored(b.repo, m, nil)
			if err != nil {
				b.t.Errorf("%s@%s cannot be restored: %v", h.Head.Name, pt.Name, err)
				continue
			}
			to.same(b.t, h.Head.Name+"@"+pt.Name, m.content)
		}
	}
	b.verified(100)
}

// verified checks that verify finds nothing.
func (b *bench) verified(percent float64) *Verified {
	b.t.Helper()
	v, err := verify(b.t.Context(), b.repo, VerifyRequest{ReadPercent: percent})
	if err != nil {
		b.t.Fatal(err)
	}
	for _, p := range v.Problems {
		b.t.Errorf("verify: %v", p)
	}
	for _, k := range v.Unknown {
		b.t.Errorf("verify: unknown object %s", k)
	}
	return v
}

// raceFor is how long tests of races go on.
func raceFor(t testing.TB) time.Duration {
	if s := os.Getenv("PANDO_TEST_RACE"); s != "" {
		d, err := time.ParseDuration(s)
		if err != nil {
			t.Fatalf("PANDO_TEST_RACE: %v", err)
		}
		return d
	}
	return 4 * time.Second
}

// cellPieces returns the pieces of one cell. The caller must not change them.
func (t *tree) cellPieces(ctx context.Context, cell int64) ([]repo.Piece, error) {
	k, at := &t.root, t.rootAt()
	from := cell * repo.CellBytes
	for !k.empty() {
		if err := t.loadNode(ctx, k, at); err != nil {
			return nil, err
		}
		if k.node.kids == nil {
			return piecesIn(k.node.pieces, from, from+repo.CellBytes), nil
		}
		slot := int((from - at.From()) / repo.LevelBytes(at.Level-1))
		k, at = &k.node.kids[slot], at.Child(slot, repo.NodeRef{})
	}

	return nil, nil
}
