package repo

import (
	"reflect"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/testing/storetest"
)

// pathOf writes a segment with data and then the nodes of a path, the root last, as a push does. The root is the first
// of the result.
func pathOf(t *testing.T, r *Repo, data int) (Segment, []NodeAt) {
	t.Helper()
	w, err := r.NewSegment(NewID(), 0)
	must(t, err)
	var last Frame
	for range data {
		last, err = w.Add(noise(1, FrameBytes), Raw, FrameBytes)
		must(t, err)
	}

	leaf := &Node{}
	for i := range int64(LeafPieces) {
		p := Piece{Offset: i * BlockBytes, Length: BlockBytes, Frame: last, Within: uint32(i) * BlockBytes}
		leaf.Pieces = append(leaf.Pieces, p)
	}
	var path []NodeAt
	for level := 0; level < 4; level++ {
		n := leaf
		if level > 0 {
			one := path[0].NodeRef
			n = &Node{Level: level, Children: &[NodeChildren]NodeRef{one, one}}
		}
		b, err := EncodeNode(n)
		must(t, err)
		f, err := w.Add(b, Raw, len(b))
		must(t, err)
		ref := NodeRef{Frame: f}
		ref.Pieces, ref.Bytes = n.Count()
		path = append([]NodeAt{{NodeRef: ref, Level: level}}, path...)
	}
	must(t, r.PutSegment(t.Context(), w.Segment(), w.Finish()))
	return w.Segment(), path
}

// TestNodesOfOnePushInOneRequest: of what a push has written of a map, one request reads all that is near its root.
func TestNodesOfOnePushInOneRequest(t *testing.T) {
	for _, data := range []int{1, 4} {
		r, m := made(t)
		_, path := pathOf(t, r, data)
		s := storetest.Faulty(m)
		r.store = s
		r.segments.forgetAll()
		cache := r.NewNodeCache(100)
		for _, n := range path {
			got, err := cache.Read(t.Context(), []NodeAt{n})
			must(t, err)
			must(t, got[0].Err)
			alone, err := r.ReadNodes(t.Context(), []NodeAt{n})
			must(t, err)
			if !reflect.DeepEqual(got[0], alone[0]) {
				t.Errorf("level %d is %+v, alone it is %+v", n.Level, got[0], alone[0])
			}
		}
		// One for the header, one for the nodes.
		if got := len(reads(s)) - len(path); got != 2 {
			t.Errorf("a path behind %d frames takes %d requests: %v", data, got, reads(s))
		}
	}
}

// TestWhatIsReadAlongIsChecked: a bit that flips on its way is read again, and one that stays is damage of just the
// nodes that it is in.
func TestWhatIsReadAlongIsChecked(t *testing.T) {
	r, m := made(t)
	seg, path := pathOf(t, r, 4)
	flips := map[string]func(storetest.Call) bool{
		"header": func(c storetest.Call) bool { return c.Length == headerSize },
		"nodes":  func(c storetest.Call) bool { return c.Length != headerSize },
	}
	for what, match := range flips {
		s := storetest.Faulty(m, storetest.Fault{
			Match: match, Times: 1, Change: func(_ storetest.Call, b []byte) []byte {
				for i := headerSize - 1; i < len(b); i += 64 {
					b[i] ^= 1
				}
				return b
			},
		})
		r.store = s
		r.segments.forgetAll()
		cache := r.NewNodeCache(100)
		for _, n := range path {
			got, err := cache.Read(t.Context(), []NodeAt{n})
			must(t, err)
			if got[0].Err != nil || got[0].Level != n.Level {
				t.Errorf("%s, level %d: %v", what, n.Level, got[0].Err)
			}
		}
	}

	r.store = m
	b := append([]byte(nil), m.data(seg.key())...)
	b[path[2].Frame.Offset] ^= 1
	m.set(seg.key(), b)
	cache := r.NewNodeCache(100)
	for i, n := range path {
		got, err := cache.Read(t.Context(), []NodeAt{n})
		must(t, err)
		if want := i == 2; errs.Is(got[0].Err, errs.Damaged) != want {
			t.Errorf("level %d: %v", n.Level, got[0].Err)
		}
	}
}

// TestWhatIsReadAlongIsBounded: a cache keeps few stretches, of few bytes each.
func TestWhatIsReadAlongIsBounded(t *testing.T) {
	r, _ := made(t)
	cache := r.NewNodeCache(4)
	for range 2 * maxStretches {
		_, path := pathOf(t, r, 1)
		_, err := cache.Read(t.Context(), path)
		must(t, err)
	}
	total := 0
	for _, s := range cache.along.all {
		total += len(s.b)
	}
	if n := len(cache.along.all); n != maxStretches || total > maxStretches*(2*nodeReach+headerReach) {
		t.Errorf("%d stretches of %d bytes are kept", n, total)
	}
}
