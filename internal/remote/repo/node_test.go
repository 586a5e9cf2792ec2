package repo

import (
	"bytes"
	"encoding/binary"
	"math"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"pando/internal/base/errs"
)

func TestLevels(t *testing.T) {
	for size, want := range map[int64]int{0: 0, 1: 0, CellBytes: 0, CellBytes + 1: 1, 16 << 20: 1, 1 << 30: 3, 16 << 40: 5,
		MaxVolumeBytes: 7} {
		if got := RootLevel(size); got != want || LevelBytes(got) < size || got > maxLevel {
			t.Errorf("%d bytes: level %d, want %d", size, got, want)
		}
	}
	if CellBytes/BlockBytes != LeafPieces {
		t.Error("a cell may have more pieces than a leaf")
	}
}

// What is not as a node must be is not written.
func TestNodesThatCannotBe(t *testing.T) {
	f := Frame{Offset: headerSize, Stored: BlockBytes + tagSize, Plain: BlockBytes}
	ref := NodeRef{Frame: f, Pieces: 100, Bytes: 100 * BlockBytes}
	piece := func(at, n int64) Piece { return Piece{Offset: at, Length: n, Frame: f} }
	big := f
	big.Plain, big.Stored = FrameBytes, FrameBytes+tagSize
	many := make([]Piece, LeafPieces+1)
	for i := range many {
		many[i] = piece(int64(i)*BlockBytes, BlockBytes)
	}
	huge := NodeRef{Frame: big, Pieces: 100, Bytes: 100 * BlockBytes}
	for what, n := range map[string]*Node{
		"no pieces":          {},
		"too many pieces":    {Level: 1, Pieces: many},
		"a level below":      {Level: -1, Pieces: many[:1]},
		"a level above":      {Level: maxLevel + 1, Pieces: many[:1]},
		"behind the largest": {Index: MaxVolumeBytes / CellBytes, Pieces: []Piece{piece(MaxVolumeBytes, BlockBytes)}},
		"a negative place":   {Index: -1, Pieces: []Piece{piece(-CellBytes, BlockBytes)}},
		"outside":            {Index: 1, Pieces: many[:1]},
		"over the border": {Level: 1,
			Pieces: []Piece{{Offset: CellBytes - BlockBytes, Length: 2 * BlockBytes, Frame: big}}},
		"out of order":             {Pieces: []Piece{many[1], many[0]}},
		"an inner node of level 0": {Children: &[NodeChildren]NodeRef{ref, ref}},
		"few pieces below":         {Level: 1, Children: &[NodeChildren]NodeRef{ref}},
		"no child":                 {Level: 1, Children: &[NodeChildren]NodeRef{}},
		"both":                     {Level: 1, Pieces: many[:1], Children: &[NodeChildren]NodeRef{ref, ref}},
		"more pieces than blocks":  {Level: 1, Children: &[NodeChildren]NodeRef{ref, {Frame: f, Pieces: 129, Bytes: 129}}},
		"more bytes than pieces": {Level: 2, Children: &[NodeChildren]NodeRef{ref, ref,
			{Frame: f, Pieces: 1, Bytes: FrameBytes + 1}}},
		"a child without bytes":   {Level: 1, Children: &[NodeChildren]NodeRef{ref, ref, {Frame: f, Pieces: 1}}},
		"a child without pieces":  {Level: 1, Children: &[NodeChildren]NodeRef{ref, ref, {Frame: f, Bytes: 1}}},
		"a child that is too big": {Level: 1, Children: &[NodeChildren]NodeRef{ref, huge}},
	} {
		if b, err := EncodeNode(n); !errs.Is(err, errs.Invalid) {
			t.Errorf("%s: %x, %v", what, b, err)
		}
	}
	if _, err := EncodeNode(&Node{Level: 1, Children: &[NodeChildren]NodeRef{ref, ref}}); err != nil {
		t.Error(err)
	}
}

// The largest nodes are within the limit.
func TestLargestNodes(t *testing.T) {
	leaf := &Node{Level: 6, Index: 1}
	inner := &Node{Level: 6, Index: 1, Children: &[NodeChildren]NodeRef{}}
	frame := func(plain uint32) Frame {
		return Frame{
			Segment: Segment{NewID(), math.MaxUint32},
			Index:   maxFrames - 1,
			Offset:  MaxSegment - plain,
			Stored:  plain - 1,
			Plain:   plain,
			Codec:   Zstd,
		}
	}
	for i := range int64(LeafPieces) {
		leaf.Pieces = append(leaf.Pieces, Piece{
			Offset: LevelBytes(
				6,
			) + i*LevelBytes(
				5,
			)/4, Length: CellBytes - BlockBytes, Frame: frame(FrameBytes), Within: BlockBytes, Sum: Sum{1},
		})
	}
	for i := range inner.Children {
		inner.Children[i] = NodeRef{Frame: frame(MaxNodeBytes), Pieces: LevelBytes(5) / BlockBytes, Bytes: LevelBytes(5)}
	}
	for _, n := range []*Node{leaf, inner} {
		b, err := EncodeNode(n)
		if err != nil || len(b) > MaxNodeBytes/4 {
			t.Errorf("%d bytes, %v", len(b), err)
		}
		again, err := DecodeNode(b)
		if err != nil || !reflect.DeepEqual(again, n) {
			t.Errorf("%+v, %v", again, err)
		}
	}
}

// A node is only what was said of it where it is referred to: place and content.
func TestNodeIsWhatWasSaid(t *testing.T) {
	ctx := t.Context()
	g, r, _ := goldenMap(t)
	for _, right := range g.nodes {
		for what, change := range map[string]func(*NodeAt){
			"another level":  func(n *NodeAt) { n.Level++ },
			"another place":  func(n *NodeAt) { n.Index++ },
			"more pieces":    func(n *NodeAt) { n.Pieces++ },
			"other bytes":    func(n *NodeAt) { n.Bytes-- },
			"another offset": func(n *NodeAt) { n.Frame.Offset++ },
		} {
			wrong := right
			change(&wrong)
			got, err := r.ReadNodes(ctx, append([]NodeAt{wrong}, g.nodes...))
			must(t, err)
			if !errs.Is(got[0].Err, errs.Damaged) {
				t.Errorf("%s: %+v, %v", what, got[0].Node, got[0].Err)
			}
			for _, n := range got[1:] {
				if n.Err != nil && what != "another offset" {
					t.Errorf("%s hides another node: %v", what, n.Err)
				}
			}
		}
		cache := r.NewNodeCache(8)
		less := right
		less.Pieces--
		for _, n := range []NodeAt{right, less, right} {
			got, err := cache.Read(ctx, []NodeAt{n})
			must(t, err)
			if errs.Is(got[0].Err, errs.Damaged) != (n == less) {
				t.Errorf("from a cache: %+v, %v", got[0].Node, got[0].Err)
			}
		}

		// One request does not hide the node that another one, in the same call, describes rightly.
		both, err := r.NewNodeCache(8).Read(ctx, []NodeAt{less, right})
		must(t, err)
		if !errs.Is(both[0].Err, errs.Damaged) || both[1].Err != nil {
			t.Errorf("of two requests: %v, %v", both[0].Err, both[1].Err)
		}

		gone := right
		gone.Frame.Segment.N++
		got, err := r.ReadNodes(ctx, []NodeAt{gone, right})
		if err != nil || !errs.Is(got[0].Err, errs.NotFound) || got[1].Err != nil {
			t.Errorf("%+v, %v", got, err)
		}
	}
}

func TestExtensions(t *testing.T) {
	ctx := t.Context()
	g, r, _ := goldenMap(t)
	put := func(x ...Extension) (Manifest, error) {
		m := g.empty
		m.ID, m.Extensions = NewID(), x
		if err := r.PutManifest(ctx, m); err != nil {
			return m, err
		}
		return r.Manifest(ctx, m.ID)
	}
	m, err := put(
		Extension{Name: "a", Data: []byte("b")},
		Extension{Name: strings.Repeat("x", maxExtensionName), Data: make([]byte, 1000)},
	)
	if err != nil || len(m.Extensions) != 2 || string(m.Extensions[0].Data) != "b" {
		t.Errorf("%+v, %v", m, err)
	}
	if m.IsOverlay() || len(m.Needs()) > 0 {
		t.Errorf("%+v needs %v", m, m.Needs())
	}
	_, err = put(Extension{Name: "a"}, Extension{Name: "future", Critical: true})
	kind(t, err, errs.TooNew)
	if errs.HintOf(err) == "" || !strings.Contains(err.Error(), "future") {
		t.Error(err)
	}
	for _, x := range [][]Extension{
		{{Name: ""}}, {{Name: "A"}}, {{Name: strings.Repeat("x", maxExtensionName+1)}}, {{Name: "b"},
			{Name: "a"}}, {{Name: "a"}, {Name: "a"}},
		{{Name: "a", Data: make([]byte, maxExtensionBytes)}, {Name: "b", Data: []byte{1}}},
	} {
		_, err := put(x...)
		kind(t, err, errs.Invalid)
	}
}

// The manifest of an overlay needs that of its lower layer, which it must name.
func TestOverlayManifests(t *testing.T) {
	ctx := t.Context()
	g, r, _ := goldenMap(t)
	lower := Origin{Ref: "web@1", Volume: "web", Manifest: NewID()}
	put := func(m Manifest, change func(m *Manifest)) (Manifest, error) {
		m.ID, m.Extensions, m.Origin, m.Parent = NewID(), nil, &lower, ID{}
		m.MarkOverlay()
		if change != nil {
			change(&m)
		}
		if err := r.PutManifest(ctx, m); err != nil {
			return m, err
		}
		return r.Manifest(ctx, m.ID)
	}

	parent := NewID()
	for _, m := range []Manifest{g.block, g.stream, g.empty} {
		got, err := put(m, func(m *Manifest) { m.Parent = parent })
		want := []ID{lower.Manifest}
		if m.Content.Chained() {
			want = []ID{parent, lower.Manifest}
		}
		if err != nil || !got.IsOverlay() || !slices.Equal(got.Needs(), want) {
			t.Errorf("%+v needs %v, %v", got, got.Needs(), err)
		}
	}

	for what, change := range map[string]func(m *Manifest){
		"no origin":           func(m *Manifest) { m.Origin = nil },
		"an unnamed origin":   func(m *Manifest) { m.Origin = &Origin{Ref: "web@1", Volume: "web"} },
		"no head":             func(m *Manifest) { m.Origin = &Origin{Manifest: lower.Manifest} },
		"itself":              func(m *Manifest) { m.Origin = &Origin{Volume: "web", Manifest: m.ID} },
		"that may be ignored": func(m *Manifest) { m.Extensions[0].Critical = false },
		"with content":        func(m *Manifest) { m.Extensions[0].Data = []byte{1} },
	} {
		if _, err := put(g.empty, change); !errs.Is(err, errs.Invalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// What says that much comes costs no memory for that.
func TestHostileMapsCostLittle(t *testing.T) {
	much := binary.AppendUvarint(nil, 1<<40)
	node := []byte{nodeVersion, 0, 3, 0}
	manifest := append([]byte{2}, "{}"...)
	session := append(bytes.Repeat([]byte{1}, 16), binary.AppendUvarint(nil, maxUses)...)
	for what, decode := range map[string]func() error{
		"sessions of a leaf": func() error { _, err := DecodeNode(append(node, much...)); return err },
		"segments of a leaf": func() error { _, err := DecodeNode(append(append(node, 1), session...)); return err },
		"frames of a leaf":   func() error { _, err := DecodeNode(append(append(node, 0), much...)); return err },
		"pieces of a leaf":   func() error { _, err := DecodeNode(append(append(node, 0, 0), much...)); return err },
		"sessions of an inner": func() error {
			_, err := DecodeNode(append([]byte{nodeVersion, 1, 3, 0}, much...))
			return err
		},
		"fields of a manifest": func() error { _, err := decodeManifest(much); return err },
		"segments of a manifest": func() error {
			_, err := decodeManifest(append(append(manifest, 1), session...))
			return err
		},
		"frames of a manifest": func() error {
			_, err := decodeManifest(append(append(manifest, 0, 0), much...))
			return err
		},
		"extensions": func() error {
			_, err := decodeManifest(append(append(manifest, 0, 0, 0), much...))
			return err
		},
		"a name of an extension": func() error {
			_, err := decodeManifest(append(append(manifest, 0, 0, 0, 1), much...))
			return err
		},
		"a large extension": func() error {
			_, err := decodeManifest(append(append(manifest, 0, 0, 0, 1, 1, 'a', 0), much...))
			return err
		},
		"bytes behind a manifest": func() error { _, err := decodeManifest(append(manifest, 0, 0, 0, 0, 0)); return err },
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := decode()
		runtime.ReadMemStats(&after)
		if !errs.Is(err, errs.Damaged) {
			t.Errorf("%s: %v", what, err)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > 64<<10 {
			t.Errorf("%s: %d bytes of memory", what, n)
		}
	}
}

func FuzzNode(f *testing.F) {
	g, _, _ := goldenMap(f)
	for _, n := range g.contents {
		b, err := EncodeNode(n)
		must(f, err)
		seeds(f, b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := DecodeNode(b)
		if refused(t, err) {
			return
		}
		again, err := EncodeNode(n)
		if err != nil || !bytes.Equal(again, b) {
			t.Errorf("read as %+v, which is written as %x, %v, not %x", n, again, err, b)
		}
	})
}

func FuzzManifestWithMap(f *testing.F) {
	_, r, m := goldenMap(f)
	seeds(f, contentOf(f, r, m, typeManifest)...)
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeManifest(b)
		if refused(t, err) {
			return
		}
		again, err := m.encode()
		if err != nil {
			return // a time that has no text
		}
		m2, err := decodeManifest(again)
		if err != nil || !sameJSON(m, m2) ||
			!reflect.DeepEqual([]any{m.Map, m.Stream, m.Uses, m.Extensions}, []any{m2.Map, m2.Stream, m2.Uses, m2.Extensions}) {
			t.Errorf("read as %+v, then as %+v, %v", m, m2, err)
		}
	})
}
