package repo

import (
	"bytes"
	"reflect"
	"testing"
	"time"

	"pando/internal/base/errs"
)

// The files in testdata/v1/map are a repository with a map of several levels, and with extensions.
const (
	goldenMapDir = "testdata/v1/map"
	mapSize      = 17<<20 + BlockBytes + 100
	mapBlock     = "76f12m0tqgi7j5e5vtnd8aaq4s"
	mapStream    = "27d0rs42or1hls8nbah9u55pq8"
)

// goldenMapContent is what is in the repository.
type goldenMapContent struct {
	block, stream, empty Manifest
	nodes                []NodeAt // the root last
	contents             []*Node
	segment              Segment
	objects              map[string][]byte
}

// writeGoldenMap makes the repository anew. wrapped is as of frozenKeys.
func writeGoldenMap(t testing.TB, wrapped [][]byte) (*goldenMapContent, *Repo) {
	t.Helper()
	ctx := t.Context()
	e := goldenEnv()
	e.random = &counted{n: 1 << 20}
	m := newMemory()
	g := &goldenMapContent{}

	r := writeOneKey(t, e, m, 7, wrapped)

	// Blocks that are all the same, as many as a leaf has, one more, and two far behind: so there are leaves of two
	// levels, and inner nodes of two.
	session := r.env.newID()
	w, err := r.NewSegment(session, 3)
	must(t, err)
	add := func(content []byte) Frame {
		f, err := w.Add(content, Raw, len(content))
		must(t, err)
		return f
	}
	raw0, raw1 := noise(1, BlockBytes), noise(2, BlockBytes+100)
	f0, f1 := add(raw0), add(raw1)
	first := &Node{}
	for i := range int64(LeafPieces) {
		first.Pieces = append(first.Pieces, Piece{Offset: i * BlockBytes, Length: BlockBytes, Frame: f0, Sum: r.Sum(raw0)})
	}
	second := &Node{Index: 1, Pieces: []Piece{{Offset: CellBytes + BlockBytes, Length: BlockBytes, Frame: f0}}}
	last := &Node{Level: 1, Index: 1, Pieces: []Piece{
		{Offset: LevelBytes(1), Length: BlockBytes, Frame: f1},
		{Offset: mapSize - BlockBytes - 100, Length: BlockBytes + 100, Frame: f1, Sum: r.Sum(raw1)},
	}}
	put := func(n *Node) NodeRef {
		b, err := EncodeNode(n)
		must(t, err)
		ref := NodeRef{Frame: add(b)}
		ref.Pieces, ref.Bytes = n.Count()
		g.nodes = append(g.nodes, NodeAt{NodeRef: ref, Level: n.Level, Index: n.Index})
		g.contents = append(g.contents, n)
		return ref
	}
	inner := &Node{Level: 1, Children: &[NodeChildren]NodeRef{0: put(first), 1: put(second)}}
	root := put(&Node{Level: 2, Children: &[NodeChildren]NodeRef{0: put(inner), 1: put(last)}})
	g.segment = w.Segment()
	object := w.Finish()
	must(t, r.PutSegment(ctx, g.segment, object))
	uses := []Use{{Segment: g.segment, Size: uint32(len(object))}}

	g.block = Manifest{
		ID: r.env.newID(), Volume: "web", Point: "v2", Content: Block, FS: "ext4", SizeBytes: mapSize, Sector: 512,
		CreatedAt:   e.utcNow(),
		Consistency: "clean", Source: "s", Session: session, Parent: r.env.newID(), Logical: 1, Added: 2,
		Map: root, Uses: uses,
		Extensions: []Extension{{Name: "labels", Data: []byte(`{"team":"storage"}`)}, {Name: "x.empty"}},
	}
	g.stream = Manifest{
		ID: r.env.newID(), Volume: "db", Point: "7", Content: Stream, FS: "native", CreatedAt: e.utcNow(), Source: "s",
		Session: session,
		Logical: 1, Added: 1, Stream: []Frame{f1, f0, f1}, Uses: uses,
	}
	g.empty = Manifest{
		ID:        r.env.newID(),
		Volume:    "empty",
		Content:   Block,
		SizeBytes: 1 << 40,
		Session:   session,
		CreatedAt: time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC),
	}
	for _, m := range []Manifest{g.block, g.stream, g.empty} {
		must(t, r.PutManifest(ctx, m))
	}
	g.objects = map[string][]byte{}
	for key, o := range m.objects {
		g.objects[key] = o.data
	}
	return g, r
}

// goldenMap is the frozen repository with a map, opened, and what must be in it.
func goldenMap(t testing.TB) (*goldenMapContent, *Repo, *memory) {
	t.Helper()
	m := loadFiles(t, goldenMapDir)
	g, _ := writeGoldenMap(t, frozenKeys(t, goldenMapDir))
	return g, goldenRepo(t, m), m
}

func TestFrozenMap(t *testing.T) {
	ctx := t.Context()
	g, r, m := goldenMap(t)
	if len(g.objects) != len(m.keys()) {
		t.Errorf("%d objects are written, %d are there", len(g.objects), len(m.keys()))
	}
	for key, want := range g.objects {
		if got := m.data(key); !bytes.Equal(got, want) {
			t.Errorf("%s is written differently:\n%x\nwas\n%x", key, want, got)
		}
	}
	if g.block.ID.String() != mapBlock || g.stream.ID.String() != mapStream {
		t.Errorf("manifests %s, %s", g.block.ID, g.stream.ID)
	}
	for _, want := range []Manifest{g.block, g.stream, g.empty} {
		got, err := r.Manifest(ctx, want.ID)
		must(t, err)
		for i := range got.Extensions { // nothing is nothing
			if len(got.Extensions[i].Data) == 0 {
				got.Extensions[i].Data = nil
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%+v\nwant %+v", got, want)
		}
	}
	if root := g.nodes[len(g.nodes)-1]; g.block.Root() != root {
		t.Errorf("the root is %+v, not %+v", g.block.Root(), root)
	}
	for range 2 {
		cache := r.NewNodeCache(2)
		got, err := cache.Read(ctx, append(g.nodes, g.nodes...))
		must(t, err)
		for i, n := range got {
			if n.Err != nil || !reflect.DeepEqual(n.Node, g.contents[i%len(g.contents)]) {
				t.Errorf("node %d: %+v, %v", i, n.Node, n.Err)
			}
		}
	}
	frames, err := r.CheckSegment(ctx, g.segment)
	if err != nil || frames != 7 {
		t.Errorf("%d frames, %v", frames, err)
	}
}

// However a manifest is changed, it is damaged, and never read as something else.
func TestEveryChangeOfManifestIsNoticed(t *testing.T) {
	ctx := t.Context()
	g, r, m := goldenMap(t)
	for _, want := range []Manifest{g.block, g.stream, g.empty} {
		key := manifestKey(want.ID)
		was := m.data(key)
		changes(was, func(what string, at int, changed []byte) {
			m.set(key, changed)
			_, err := r.Manifest(ctx, want.ID)
			if !errs.Is(err, errs.Damaged) && !(errs.Is(err, errs.TooNew) && at == versionAt) {
				t.Errorf("%s, %s: %v", key, what, err)
			}
		})
		m.set(key, was)
	}
}
