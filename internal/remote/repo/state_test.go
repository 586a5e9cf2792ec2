package repo

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/testing/storetest"
	"pando/internal/testing/testfs"
)

// A renewal that failed may have been done. The next one finds out, and does not take
// its own write for somebody else's.
func TestSessionKnowsItsOwnWrites(t *testing.T) {
	ctx := t.Context()
	for _, when := range []storetest.When{storetest.Before, storetest.After} {
		for first := range 3 { // which write fails, and then the two after it
			r, m := made(t)
			puts := storetest.Faulty(m)
			r.store = puts
			s := r.NewSession(Push, []string{"web"}, Writer{})
			for range first {
				must(t, r.PutSession(ctx, &s))
			}
			puts.Add(storetest.Fault{Match: storetest.Ops(storetest.Put), When: when, Times: 3})
			for range 3 {
				if err := r.PutSession(ctx, &s); when == storetest.Before && err == nil {
					t.Fatal("the fault was not reported")
				}
			}
			puts.Heal()
			s.Pins = append(s.Pins, NewID())
			must(t, r.PutSession(ctx, &s))
			must(t, r.PutSession(ctx, &s))
			got, err := r.Session(ctx, s.ID)
			must(t, err)
			if got.Beat != s.Beat || !reflect.DeepEqual(got.Pins, s.Pins) {
				t.Errorf("%+v, want %+v", got.Session, s)
			}
			must(t, r.EndSession(ctx, &s))
			must(t, r.EndSession(ctx, &s))
			_, err = r.Session(ctx, s.ID)
			kind(t, err, errs.NotFound)
		}
	}
}

// A session that somebody has ended or written is not taken back, even if a write
// before that is not known to have been done.
func TestSessionThatWasEnded(t *testing.T) {
	ctx := t.Context()
	for _, unsure := range []bool{false, true} {
		for _, what := range []string{"dropped", "written"} {
			r, m := made(t)
			other := goldenRepo(t, m)
			puts := storetest.Faulty(m)
			r.store = puts
			s := r.NewSession(Push, nil, Writer{})
			must(t, r.PutSession(ctx, &s))
			if unsure {
				puts.Add(storetest.Fault{Match: storetest.Ops(storetest.Put), When: storetest.After})
				if err := r.PutSession(ctx, &s); err == nil {
					t.Fatal("no fault")
				}
				puts.Heal()
			}
			all, err := other.Sessions(ctx)
			must(t, err)
			if what == "dropped" {
				must(t, other.DropSession(ctx, all[0]))
			} else {
				theirs := all[0].Session
				theirs.writes = sessionWrites{version: all[0].Version, begun: true}
				must(t, other.PutSession(ctx, &theirs))
			}
			for range 2 {
				kind(t, r.PutSession(ctx, &s), errs.Conflict)
			}
		}
	}
}

func TestSessionsThatComeAndGo(t *testing.T) {
	ctx := t.Context()
	r, m := made(t)
	var want []ID
	for range 20 {
		s := r.NewSession(Pull, nil, Writer{})
		must(t, r.PutSession(ctx, &s))
		want = append(want, s.ID)
	}
	m.set("sessions/readme.txt", []byte("not of this program"))
	gone := want[7]
	r.store = storetest.Faulty(m, storetest.Fault{
		Match: func(c storetest.Call) bool { return c.Op == storetest.List }, When: storetest.After,
		Do: func(storetest.Call) { _ = m.Delete(ctx, sessionPrefix+gone.String()) },
	})
	want = slices.Delete(want, 7, 8)
	all, err := r.Sessions(ctx)
	must(t, err)
	var got []ID
	for _, s := range all {
		got = append(got, s.ID)
	}
	slices.SortFunc(want, func(a, b ID) int { return strings.Compare(a.String(), b.String()) })
	if !slices.Equal(got, want) {
		t.Errorf("%v\nwant %v", got, want)
	}

	// It fails closed: whatever cannot be read, nothing is left out.
	for _, fault := range []storetest.Fault{
		{Match: storetest.Ops(storetest.List), When: storetest.Before},
		{Match: storetest.Ops(storetest.List), When: storetest.After},
		{Match: storetest.Ops(storetest.Get), At: 11},
		{Match: gets(sessionPrefix + want[3].String()), Times: 2, Change: storetest.Flip(60, 3)},
	} {
		r.store = storetest.Faulty(m, fault)
		if all, err := r.Sessions(ctx); err == nil || all != nil {
			t.Errorf("%+v: %d sessions", fault, len(all))
		}
	}
	r.store = m
	m.set(sessionPrefix+NewID().String(), []byte("not of this program either, but it could be"))
	_, err = r.Sessions(ctx)
	kind(t, err, errs.Damaged)
}

func TestHeads(t *testing.T) {
	ctx := t.Context()
	r, m := made(t)
	names := map[string]bool{}
	for i := range 50 {
		h := Head{Name: fmt.Sprint("a-volume-", i), NextSeq: 1, Epoch: uint64(i)}
		_, err := r.PutHead(ctx, h, "")
		must(t, err)
		names[h.Name] = true
	}
	for _, key := range m.keys() {
		if strings.Contains(key, "a-volume") || bytes.Contains(m.data(key), []byte("a-volume")) {
			t.Errorf("a name shows in %s", key)
		}
	}
	for h, err := range r.Heads(ctx) {
		must(t, err)
		_, version, err := r.Head(ctx, h.Name)
		if err != nil || version != h.Version || !names[h.Name] || fmt.Sprint("a-volume-", h.Epoch) != h.Name {
			t.Errorf("%+v, %s, %v", h, version, err)
		}
		delete(names, h.Name)
	}
	if len(names) > 0 {
		t.Errorf("left out: %v", names)
	}

	// Whoever stops early leaves nothing running; errors end it, once, in their place.
	for range r.Heads(ctx) {
		break
	}
	damaged, err := r.headKey("a-volume-7")
	must(t, err)
	for _, fault := range []storetest.Fault{
		{Match: storetest.Ops(storetest.List)},
		{Match: storetest.Ops(storetest.List), When: storetest.After},
		{Match: storetest.Ops(storetest.Get), At: 40},
		{Match: storetest.Ops(storetest.Get), At: 40, Err: storetest.Permanent(errs.NotFound)},
		{Match: gets(damaged), Times: 2, Change: storetest.Flip(100, 1)},
	} {
		r.store = storetest.Faulty(m, fault)
		good, bad := 0, 0
		for _, err := range r.Heads(ctx) {
			if err != nil {
				bad++
			} else if good++; bad > 0 {
				t.Error("goes on after an error")
			}
		}
		if bad != 1 || good >= 50 {
			t.Errorf("%+v: %d heads, %d errors", fault, good, bad)
		}
	}
	r.store = m

	for what, h := range map[string]Head{
		"no name":        {NextSeq: 1},
		"long name":      {Name: strings.Repeat("x", 256), NextSeq: 1},
		"not UTF-8":      {Name: "\xff", NextSeq: 1},
		"next":           {Name: "a"},
		"next too small": {Name: "a", NextSeq: 1, Recent: []Point{{Seq: 1, Manifest: NewID(), Content: Block}}},
		"order": {Name: "a", NextSeq: 9, Recent: []Point{{Seq: 2, Manifest: NewID(), Content: Block},
			{Seq: 2, Manifest: NewID(), Content: Block}}},
		"no manifest": {Name: "a", NextSeq: 9, Recent: []Point{{Seq: 2, Content: Block}}},
		"no content":  {Name: "a", NextSeq: 9, Recent: []Point{{Seq: 2, Manifest: NewID()}}},
		"size": {Name: "a", NextSeq: 9,
			Recent: []Point{{Seq: 2, Manifest: NewID(), Content: Block, SizeBytes: -1}}},
		"time": {Name: "a", NextSeq: 9,
			Recent: []Point{{Seq: 2, Manifest: NewID(), Content: Block,
				CreatedAt: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}}},
	} {
		if _, err := r.PutHead(ctx, h, ""); !errs.Is(err, errs.Invalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, _, err = r.Head(ctx, "")
	kind(t, err, errs.Invalid)
}

// Of several that write over the same state exactly one succeeds.
func TestPutHeadIsCompareAndSwap(t *testing.T) {
	ctx := t.Context()
	r, _ := made(t)
	for _, prev := range []string{"", "written"} {
		h := Head{Name: "web" + prev, NextSeq: 1}
		var version objstore.Version
		if prev != "" {
			v, err := r.PutHead(ctx, h, "")
			must(t, err)
			version = v
		}
		var all sync.WaitGroup
		var mu sync.Mutex
		won := []uint64{}
		for i := range uint64(16) {
			all.Go(func() {
				h := h
				h.Epoch = i
				if _, err := r.PutHead(ctx, h, version); err == nil {
					mu.Lock()
					won = append(won, i)
					mu.Unlock()
				} else if !errs.Is(err, errs.Conflict) {
					t.Error(err)
				}
			})
		}
		all.Wait()
		got, _, err := r.Head(ctx, h.Name)
		if err != nil || len(won) != 1 || got.Epoch != won[0] {
			t.Errorf("%v have won; %+v, %v", won, got, err)
		}
	}
	// The state that was expected is gone: that is a conflict as well.
	_, err := r.PutHead(ctx, Head{Name: "never", NextSeq: 1}, "v1")
	kind(t, err, errs.Conflict)
}

func TestSeen(t *testing.T) {
	ctx := t.Context()
	r, _ := made(t)
	s, v, err := r.Seen(ctx)
	if err != nil || v != "" || s.Sessions != nil {
		t.Errorf("%+v, %s, %v", s, v, err)
	}
	s.Sessions = []SeenSession{{ID: NewID(), Beat: 3}}
	v, err = r.PutSeen(ctx, s, "")
	must(t, err)
	_, err = r.PutSeen(ctx, s, "")
	kind(t, err, errs.Conflict)
	_, err = r.PutSeen(ctx, Seen{}, v)
	must(t, err)
	_, err = r.PutSeen(ctx, s, v)
	kind(t, err, errs.Conflict)
}

func TestAfterClose(t *testing.T) {
	ctx := t.Context()
	g, r, _ := golden(t)
	w, err := r.NewSegment(NewID(), 0)
	must(t, err)
	ring := r.ring
	r.Close()
	r.Close()
	for _, k := range ring.keys {
		if !bytes.Equal(k.secret, make([]byte, keySize)) {
			t.Error("a key is still there")
		}
	}
	if !bytes.Equal(ring.ringKey, make([]byte, keySize)) {
		t.Error("the ring key is still there")
	}
	if r.Sum([]byte("x")) != (Sum{}) {
		t.Error("a sum without a key")
	}
	for f := range g.contents {
		_, err := r.ReadFrames(ctx, []Frame{f})
		kind(t, err, errs.Internal)
	}
	_, err = r.NewSegment(NewID(), 0)
	kind(t, err, errs.Internal)
	_, err = r.PutHead(ctx, g.head, "")
	kind(t, err, errs.Internal)
	_, _, err = r.Head(ctx, g.head.Name)
	kind(t, err, errs.Internal)
	kind(t, r.AddSlot(ctx, NewSlot{Label: "x", Passphrase: "y"}), errs.Internal)
	kind(t, r.PutManifest(ctx, g.block), errs.Internal)
	kind(t, r.Check(Mark{}), errs.Internal)
	_ = w
}

// Keys are used and forgotten by several at once: nothing is ever sealed with a key
// that was wiped. (The race detector looks at the rest.)
func TestRefreshWhileInUse(t *testing.T) {
	ctx := t.Context()
	r, m := made(t)
	other := goldenRepo(t, m)
	_, err := r.PutHead(ctx, Head{Name: "web", NextSeq: 1}, "")
	must(t, err)
	var all sync.WaitGroup
	stop := make(chan struct{})
	for i := range 4 {
		all.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				name := fmt.Sprint("h", i, "-", n)
				if _, err := other.PutHead(ctx, Head{Name: name, NextSeq: 1}, ""); err != nil {
					t.Error(err)
				}
				if _, _, err := other.Head(ctx, "web"); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 20 {
		must(t, r.Rotate(ctx, nil))
		_, v, err := r.Head(ctx, "web")
		must(t, err)
		_, err = r.PutHead(ctx, Head{Name: "web", NextSeq: 1}, v)
		must(t, err)
		must(t, other.Refresh(ctx))
	}
	close(stop)
	all.Wait()
	for _, err := range r.Heads(ctx) {
		must(t, err)
	}
}

func TestIDs(t *testing.T) {
	seen := map[ID]bool{}
	for range 1000 {
		id := NewID()
		if parsed, err := ParseID(id.String()); err != nil || parsed != id || seen[id] || id.IsZero() {
			t.Errorf("%s is read as %s, %v", id, parsed, err)
		}
		seen[id] = true
	}
	for _, text := range []string{"", "0", strings.Repeat("0", 25), strings.Repeat("0", 27), strings.Repeat("w", 26),
		strings.Repeat("V", 26), strings.Repeat("v", 26), "0000000000000000000000000\n"} {
		_, err := ParseID(text)
		kind(t, err, errs.Invalid)
	}
	var id ID
	kind(t, id.UnmarshalText([]byte("x")), errs.Invalid)
	if !id.IsZero() {
		t.Error("an error changed it")
	}
}

// Pieces of any shape are read as they were written.
func TestPieces(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 7))
	for range 60 {
		want := &Node{Level: 3, Pieces: randomPieces(rnd, 1+rnd.IntN(LeafPieces))}
		b, err := EncodeNode(want)
		must(t, err)
		got, err := DecodeNode(b)
		must(t, err)
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%+v\nwant %+v", got, want)
		}
		for n := range b {
			if _, err := DecodeNode(b[:n]); !errs.Is(err, errs.Damaged) {
				t.Fatalf("cut to %d of %d: %v", n, len(b), err)
			}
		}
		_, err = DecodeNode(append(b, 0))
		kind(t, err, errs.Damaged)
	}
}

// randomPieces are pieces of 16 GiB, in frames that some of them share.
func randomPieces(rnd *rand.Rand, n int) []Piece {
	sessions := []ID{NewID(), NewID(), NewID()}
	type place struct{ index, offset uint32 }
	next := map[Segment]place{}
	var frames []Frame
	for range 1 + n/2 {
		s := Segment{Session: sessions[rnd.IntN(3)], N: uint32(rnd.IntN(3)) << rnd.IntN(31)}
		at, used := next[s]
		if !used {
			at.offset = headerSize
		}
		at.index += uint32(rnd.IntN(2) * rnd.IntN(50))
		at.offset += uint32(rnd.IntN(2) * rnd.IntN(5000))
		f := Frame{Segment: s, Index: at.index, Offset: at.offset, Plain: uint32(1+rnd.IntN(4)) * BlockBytes}
		f.Stored = f.Plain + tagSize
		if rnd.IntN(2) == 0 {
			f.Codec = Zstd
			f.Stored = tagSize + 1 + uint32(rnd.IntN(int(f.Plain)-1))
		}
		next[s] = place{f.Index + 1, f.Offset + f.Stored}
		frames = append(frames, f)
	}
	var pieces []Piece
	at := int64(0)
	for range n {
		f := frames[rnd.IntN(len(frames))]
		blocks := 1 + rnd.IntN(int(f.Plain)/BlockBytes)
		if rest := CellBytes - at%CellBytes; rest < int64(blocks)*BlockBytes { // no piece crosses the border of a cell
			at += rest
		}
		p := Piece{Offset: at, Length: int64(blocks) * BlockBytes, Frame: f,
			Within: uint32(rnd.IntN(int(f.Plain) - blocks*BlockBytes + 1))}
		if rnd.IntN(3) > 0 {
			p.Sum = Sum(NewID())
		}
		pieces = append(pieces, p)
		at = p.End() + int64(rnd.IntN(2)*rnd.IntN(100))*BlockBytes
	}
	last := &pieces[len(pieces)-1]
	last.Length -= int64(rnd.IntN(BlockBytes))
	return pieces
}

// A number in a longer form than it needs would be a second encoding of the same node.
func TestOneNodeOneEncoding(t *testing.T) {
	g, _, _ := golden(t)
	b, err := EncodeNode(&Node{Level: 3, Pieces: g.pieces})
	must(t, err)
	if b[3] != 0 {
		t.Fatalf("the number is not where it is looked for: %x", b[:4])
	}
	_, err = DecodeNode(slices.Concat(b[:3], []byte{0x80, 0}, b[4:]))
	kind(t, err, errs.Damaged)
}

func TestPiecesThatCannotBe(t *testing.T) {
	good := func() []Piece {
		f := Frame{Offset: headerSize, Plain: 2 * BlockBytes, Stored: 2*BlockBytes + tagSize}
		return []Piece{{Offset: 0, Length: BlockBytes, Frame: f},
			{Offset: BlockBytes, Length: BlockBytes, Frame: f, Within: BlockBytes}}
	}
	encode := func(p []Piece) error { _, err := EncodeNode(&Node{Level: 1, Pieces: p}); return err }
	must(t, encode(good()))
	for what, change := range map[string]func(p []Piece) []Piece{
		"nothing":    func(p []Piece) []Piece { return nil },
		"order":      func(p []Piece) []Piece { return []Piece{p[1], p[0]} },
		"twice":      func(p []Piece) []Piece { return []Piece{p[0], p[0]} },
		"other node": func(p []Piece) []Piece { p[1].Offset = LevelBytes(1); return p },
		"crosses cells": func(p []Piece) []Piece {
			p[1].Offset = CellBytes - BlockBytes
			p[1].Length = 2 * BlockBytes
			p[1].Within = 0
			return p
		},
		"negative": func(p []Piece) []Piece { p[0].Offset = -BlockBytes; return p },
		"beyond": func(p []Piece) []Piece {
			p[0].Offset, p[1].Offset = MaxVolumeBytes, MaxVolumeBytes+BlockBytes
			return p
		},
		"not aligned":       func(p []Piece) []Piece { p[1].Offset += 512; return p },
		"length":            func(p []Piece) []Piece { p[0].Length = 512; return p },
		"empty":             func(p []Piece) []Piece { p[1].Length = 0; return p },
		"outside its frame": func(p []Piece) []Piece { p[1].Within++; return p },
		"too large a frame": func(p []Piece) []Piece {
			p[1].Frame.Plain, p[1].Frame.Stored = FrameBytes+1, FrameBytes+1+tagSize
			return p
		},
		"frames overlap":   func(p []Piece) []Piece { p[1].Frame.Index++; p[1].Frame.Offset++; return p },
		"two of one index": func(p []Piece) []Piece { p[1].Frame.Offset += 1 << 20; return p },
	} {
		if err := encode(change(good())); !errs.Is(err, errs.Invalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestManifestsThatCannotBe(t *testing.T) {
	ctx := t.Context()
	g, r, _ := golden(t)
	for what, change := range map[string]func(m *Manifest){
		"no ID":            func(m *Manifest) { m.ID = ID{} },
		"no session":       func(m *Manifest) { m.Session = ID{} },
		"no volume":        func(m *Manifest) { m.Volume = "" },
		"size":             func(m *Manifest) { m.SizeBytes = MaxVolumeBytes + 1 },
		"content":          func(m *Manifest) { m.Content = "x" },
		"both":             func(m *Manifest) { m.Stream = []Frame{m.Map.Frame} },
		"unlisted segment": func(m *Manifest) { m.Uses = m.Uses[:1] },
		"too large a use":  func(m *Manifest) { m.Uses[0].Size = MaxSegment + 1 },
		"use twice":        func(m *Manifest) { m.Uses = append(m.Uses, m.Uses[0]) },
		"more than fits":   func(m *Manifest) { m.SizeBytes = CellBytes; m.Map.Bytes = CellBytes + 1 },
		"frame":            func(m *Manifest) { m.Map.Frame.Offset = 0 },
	} {
		m := g.block
		m.ID = NewID()
		m.Uses = slices.Clone(m.Uses)
		change(&m)
		if err := r.PutManifest(ctx, m); !errs.Is(err, errs.Invalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	kind(t, r.PutManifest(ctx, g.block), errs.Exists)
	_, err := r.Manifest(ctx, NewID())
	kind(t, err, errs.NotFound)
	must(t, r.DeleteManifest(ctx, g.block.ID))
	must(t, r.DeleteManifest(ctx, g.block.ID))
	_, err = r.Manifest(ctx, g.block.ID)
	kind(t, err, errs.NotFound)
}

// A manifest of a large stream, with frames in any order.
func TestLargeManifest(t *testing.T) {
	testfs.NotShort(t, "it is about sizes")
	ctx := t.Context()
	r, m := made(t)
	rnd := rand.New(rand.NewPCG(3, 3))
	want := Manifest{ID: NewID(), Volume: "big", Content: Tree, Session: NewID(), CreatedAt: time.Unix(0, 0).UTC()}
	sessions := []ID{NewID(), NewID(), NewID()}
	for _, s := range sessions {
		for n := range 100_000 {
			want.Uses = append(want.Uses, Use{Segment{Session: s, N: uint32(n * 3)}, uint32(rnd.IntN(MaxSegment))})
		}
	}
	slices.SortFunc(want.Uses, func(a, b Use) int { return compareSegments(a.Segment, b.Segment) })
	for range 800_000 {
		want.Stream = append(want.Stream, Frame{
			Segment: want.Uses[rnd.IntN(len(want.Uses))].Segment, Index: uint32(rnd.IntN(maxFrames)), Offset: headerSize +
				uint32(rnd.IntN(SegmentBytes)),
			Plain: 30000, Stored: 100 + uint32(rnd.IntN(20000)), Codec: Zstd,
		})
	}
	must(t, r.PutManifest(ctx, want))
	t.Logf("%d frames, %d segments: %d bytes", len(want.Stream), len(want.Uses), len(m.data(manifestKey(want.ID))))
	got, err := r.Manifest(ctx, want.ID)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("it is read as something else, %v", err)
	}
}

// gets matches the reading of one object.
func gets(key string) func(storetest.Call) bool {
	return func(c storetest.Call) bool { return c.Op == storetest.Get && c.Key == key }
}
