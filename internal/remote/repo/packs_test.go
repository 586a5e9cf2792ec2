package repo

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"pando/internal/base/errs"
)

// The files in testdata/packs are the repository of testdata/v1, of which one segment was moved into a pack. They are
// never changed.
const (
	goldenPacksDir = "testdata/v1/packs"
	goldenPartial  = "9s5f3qlcv8jrm96obdmu133me0" // session of the segment with partial frames
)

var freezePacks = flag.Bool("freeze-packs", false, "write "+goldenPacksDir+" if it is not there")

// even are the blocks of a frame with even numbers.
func even() (b BlockSet) {
	for i := 0; i < frameBlocks; i += 2 {
		b.Add(int64(i)*BlockBytes, int64(i)*BlockBytes+1)
	}
	return b
}

// packed is a segment with frames of 1, 8, 128 and 17 blocks, of which a pack has all of the first and the last, and
// the even blocks of the others.
type packed struct {
	segment Segment
	frames  []Frame
	content [][]byte
	pack    Pack
	moved   []MovedPack
}

// movedInto moves the frames of a source.
func movedInto(t testing.TB, r *Repo, src *Source, session ID, n uint32, generation uint64,
	keep func(Frame) BlockSet) []MovedPack {
	t.Helper()
	w, err := r.NewPack(session, n)
	must(t, err)
	for _, s := range src.Segments() {
		ok, err := w.Add(src, s.Segment, keep)
		must(t, err)
		if !ok {
			t.Fatal("it does not fit")
		}
	}
	most := w.Bytes()
	object, err := w.Finish(generation)
	must(t, err)
	if len(object) > most {
		t.Errorf("the pack has %d bytes, and was said to have %d at most", len(object), most)
	}
	must(t, r.PutPack(t.Context(), w.Pack(), object))
	return []MovedPack{{Pack: w.Pack(), Generation: generation, Bytes: int64(len(object)), Segments: w.Segments()}}
}

// keepOf keeps the even blocks of frames of 8 and 128 blocks, and all of others.
func keepOf(f Frame) BlockSet {
	if n := f.Blocks(); n == 8 || n == 128 {
		return even()
	}
	return AllBlocks
}

// makePacked writes a segment, and moves it.
func makePacked(t testing.TB, r *Repo) packed {
	text := bytes.Repeat([]byte("something that packs well. "), 20000)
	return makePackedOf(t, r, noise(1, BlockBytes), noise(2, 8*BlockBytes-100), noise(3, FrameBytes),
		noise(4, 16*BlockBytes+900), text[:FrameBytes])
}

func makePackedOf(t testing.TB, r *Repo, contents ...[]byte) packed {
	t.Helper()
	session := r.env.newID()
	w, err := r.NewSegment(session, 7)
	must(t, err)
	var x packed
	for _, c := range contents {
		content, codec := r.env.pack(nil, c)
		f, err := w.Add(content, codec, len(c))
		must(t, err)
		x.frames, x.content = append(x.frames, f), append(x.content, c)
	}
	x.segment = w.Segment()
	must(t, r.PutSegment(t.Context(), x.segment, w.Finish()))
	src, err := r.OpenSegment(t.Context(), x.segment)
	must(t, err)
	x.moved = movedInto(t, r, src, r.env.newID(), 3, 1, keepOf)
	x.pack = x.moved[0].Pack
	must(t, r.PutTable(t.Context(), x.pack.Table(), x.moved))
	return x
}

// readable checks that all that was moved can be read, and that what was dropped is an error.
func (x *packed) readable(t testing.TB, r *Repo) {
	t.Helper()
	got, err := r.ReadContents(t.Context(), x.frames)
	must(t, err)
	for i, c := range got {
		f := x.frames[i]
		keep := keepOf(f)
		for b := range f.Blocks() {
			from := b * BlockBytes
			length := min(BlockBytes, len(x.content[i])-from)
			part, err := c.Part(uint32(from), int64(length))
			switch {
			case !keep.Has(b):
				if !errs.Is(err, errs.Damaged) {
					t.Errorf("block %d of frame %d was dropped: %v", b, i, err)
				}
			case err != nil || !bytes.Equal(part, x.content[i][from:from+length]):
				t.Fatalf("block %d of frame %d: %v", b, i, err)
			}
		}
		if _, err := c.Part(f.Plain, 1); err == nil {
			t.Error("something can be read behind a frame")
		}
		if _, err := r.ReadFrames(t.Context(), []Frame{f}); errs.Is(err, errs.Damaged) != (keep != AllBlocks) {
			t.Errorf("all of frame %d: %v", i, err)
		}
	}
}

func TestPack(t *testing.T) {
	r, m := made(t)
	x := makePacked(t, r)
	whole, err := r.ReadFrames(t.Context(), x.frames)
	must(t, err) // the segment is still there
	if !bytes.Equal(whole[1], x.content[1]) {
		t.Error("another content")
	}
	must(t, r.DeleteSegment(t.Context(), x.segment))
	x.readable(t, r)
	state, err := r.StatSegment(t.Context(), x.segment)
	if err != nil || state.Bytes != x.moved[0].Segments[0].Bytes {
		t.Errorf("%+v, %v", state, err)
	}

	// A copy of the copy, of a higher generation. A process that has read the first finds it.
	src, err := r.OpenPack(t.Context(), x.pack)
	must(t, err)
	again := movedInto(t, r, src, r.env.newID(), 0, 2, keepOf)
	must(t, r.PutTable(t.Context(), again[0].Table(), again))
	m.mu.Lock()
	delete(m.objects, x.pack.key())
	m.mu.Unlock()
	x.readable(t, r)
	must(t, r.DeleteTable(t.Context(), x.pack.Table()))
	x.readable(t, r)

	// What was dropped cannot be moved.
	w, err := r.NewPack(r.env.newID(), 0)
	must(t, err)
	src, err = r.OpenPack(t.Context(), again[0].Pack)
	must(t, err)
	_, err = w.Add(src, x.segment, func(Frame) BlockSet { return AllBlocks })
	kind(t, err, errs.Damaged)

	// Frames that are not those of the segment.
	for _, change := range []func(*Frame){
		func(f *Frame) { f.Index++ }, func(f *Frame) { f.Offset++ }, func(f *Frame) { f.Index = 100 },
	} {
		f := x.frames[1]
		change(&f)
		_, err := r.ReadContents(t.Context(), []Frame{f})
		kind(t, err, errs.Damaged)
	}
	other := Segment{Session: r.env.newID()}
	_, err = r.ReadContents(t.Context(), []Frame{{Segment: other, Offset: headerSize, Stored: 17, Plain: 1}})
	kind(t, err, errs.NotFound)
}

// TestPackIsReplacedAgain: a reader finds a segment that several prunes move one after the other.
func TestPackIsReplacedAgain(t *testing.T) {
	r, _ := made(t)
	x := makePacked(t, r)
	must(t, r.DeleteSegment(t.Context(), x.segment))
	at := x.pack
	err := r.findFrames(t.Context(), x.segment, func(p Place) error {
		if p.isOriginal() {
			return errs.New(errs.NotFound, "", "", "it was moved")
		}
		if p.Pack != at || p.Generation == 4 {
			return nil
		}
		src, err := r.OpenPack(t.Context(), at)
		must(t, err)
		next := movedInto(t, r, src, r.env.newID(), 0, p.Generation+1, keepOf)
		must(t, r.PutTable(t.Context(), next[0].Table(), next))
		must(t, r.DeletePack(t.Context(), at))
		at = next[0].Pack
		return errs.New(errs.NotFound, "", "", "it was replaced")
	})
	must(t, err)
	x.readable(t, r)
}

// TestTableIsWrittenOnce: whoever comes second is refused, unless it is the same.
func TestTableIsWrittenOnce(t *testing.T) {
	r, _ := made(t)
	x := makePacked(t, r)
	ctx := t.Context()
	must(t, r.PutTable(ctx, x.pack.Table(), x.moved))
	kind(t, r.PutTable(ctx, x.pack.Table(), nil), errs.Exists)
	other := Table{x.pack.Session, 9}
	must(t, r.PutTable(ctx, other, nil))
	must(t, r.PutTable(ctx, other, nil))
	for _, bad := range [][]MovedPack{
		x.moved,
		{{Pack: Pack{x.pack.Session, 9 * PacksPerTable}, Generation: 0, Segments: x.moved[0].Segments}},
		{{Pack: Pack{x.pack.Session, 9 * PacksPerTable}, Generation: 1}},
		{{
			Pack: Pack{x.pack.Session, 9 * PacksPerTable}, Generation: 1, Bytes: MaxSegment + 1,
			Segments: x.moved[0].Segments,
		}},
	} {
		kind(t, r.PutTable(ctx, Table{x.pack.Session, 9}, bad), errs.Invalid)
	}
}

// TestEveryChangeOfAPackIsNoticed flips every byte of a pack and its table, and cuts them.
func TestEveryChangeOfAPackIsNoticed(t *testing.T) {
	r, m := made(t)
	session := r.env.newID()
	w, err := r.NewSegment(session, 0)
	must(t, err)
	f, err := w.Add(noise(1, 4*BlockBytes), Raw, 4*BlockBytes)
	must(t, err)
	must(t, r.PutSegment(t.Context(), w.Segment(), w.Finish()))
	src, err := r.OpenSegment(t.Context(), w.Segment())
	must(t, err)
	moved := movedInto(t, r, src, r.env.newID(), 0, 1, func(Frame) BlockSet { return BlockSet{1} })
	must(t, r.PutTable(t.Context(), moved[0].Table(), moved))
	must(t, r.DeleteSegment(t.Context(), w.Segment()))
	for _, key := range []string{moved[0].Pack.key(), moved[0].Table().key()} {
		was := m.data(key)
		changes(was, func(what string, at int, changed []byte) {
			m.set(key, changed)
			fresh := goldenRepoWith(t, m, r)
			_, err := fresh.ReadContents(t.Context(), []Frame{f})
			if bytes.HasPrefix(changed, was) && key == moved[0].Pack.key() {
				if err = fresh.CheckPack(t.Context(), moved[0]); err == nil { // nobody reads what comes behind
					t.Errorf("%s is not noticed", what)
				}
			}
			if k := errs.KindOf(err); k != errs.Damaged && k != errs.TooNew && k != errs.NotFound {
				t.Errorf("%s of %s at %d: %v", what, key, at, err)
			}
		})
		m.set(key, was)
	}
	if _, err := goldenRepoWith(t, m, r).ReadContents(t.Context(), []Frame{f}); err != nil {
		t.Error(err)
	}
}

// goldenRepoWith is the repository as a process sees it that has read nothing.
func goldenRepoWith(_ testing.TB, m *memory, r *Repo) *Repo {
	fresh := &Repo{store: m, env: r.env, id: r.id}
	fresh.ring, fresh.secrets, fresh.raw, fresh.version = r.ring, r.secrets, r.raw, r.version
	return fresh
}

// TestHostileIndexesCostLittle: what an index says is checked before room is made for it.
func TestHostileIndexesCostLittle(t *testing.T) {
	many := binary.AppendUvarint(nil, 1<<40)
	segment := append([]byte{1, 1}, make([]byte, 16+1+16+saltSize)...)
	for _, b := range [][]byte{
		nil, many, {0}, {1}, {1, 0}, append([]byte{1}, many...), segment,
		append(append(slices.Clone(segment), 1), many...),
		append(append(slices.Clone(segment), 1), binary.AppendUvarint(nil, maxPackFrames+1)...),
	} {
		if n := testing.AllocsPerRun(1, func() {
			if _, err := decodePackIndex(b, 1<<20); !errs.Is(err, errs.Damaged) {
				t.Errorf("%x: %v", b, err)
			}
			if _, err := decodeMoved(Table{}, append(slices.Clone(b), 7)); !errs.Is(err, errs.Damaged) {
				t.Errorf("as a table, %x: %v", b, err)
			}
		}); n > 100 {
			t.Errorf("%x takes %v allocations", b, n)
		}
	}
}

func FuzzPackIndex(f *testing.F) {
	r, _ := made(f)
	x := makePacked(f, r)
	src, err := r.OpenPack(f.Context(), x.pack)
	must(f, err)
	index := packIndex{generation: 1, segments: src.segments}
	_, end := src.segments[0].span()
	f.Add(index.encode(), end)
	f.Fuzz(func(t *testing.T, b []byte, end uint32) {
		x, err := decodePackIndex(b, end)
		if refused(t, err) {
			return
		}
		// Segments are written in the order in which they lie.
		slices.SortFunc(x.segments, func(a, b movedSegment) int { return int(a.frames[0].at) - int(b.frames[0].at) })
		if !bytes.Equal(x.encode(), b) {
			t.Error("it is encoded in another way")
		}
	})
}

func FuzzTable(f *testing.F) {
	r, _ := made(f)
	x := makePacked(f, r)
	f.Add(encodeMoved(x.moved))
	f.Add(encodeMoved(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		packs, err := decodeMoved(Table{N: 5}, b)
		if refused(t, err) {
			return
		}
		if !bytes.Equal(encodeMoved(packs), b) {
			t.Error("it is encoded in another way")
		}
	})
}

// writeGoldenPacks repacks the frozen repository. It returns its objects.
func writeGoldenPacks(t testing.TB) (map[string][]byte, packed) {
	t.Helper()
	_, _, m := golden(t)
	r := goldenRepo(t, m)
	r.env = goldenEnv()
	r.env.random = &counted{n: 2 << 20}
	ctx := context.Background()
	var all []MovedPack
	n := uint32(0)
	session := r.env.newID()
	for s, err := range r.Segments(t.Context()) {
		must(t, err)
		src, err := r.OpenSegment(ctx, s.Segment)
		must(t, err)
		all = append(all, movedInto(t, r, src, session, n, 1, func(Frame) BlockSet { return AllBlocks })...)
		n += 2
		must(t, r.DeleteSegment(ctx, s.Segment))
	}
	must(t, r.PutTable(ctx, Table{Session: session}, all))

	// And one with a partial frame.
	x := makePackedOf(t, r, noise(1, BlockBytes), noise(2, 8*BlockBytes-100))
	must(t, r.DeleteSegment(ctx, x.segment))
	out := map[string][]byte{}
	for key, o := range m.objects {
		out[key] = o.data
	}
	return out, x
}

// TestFreezePacks writes the frozen files.
func TestFreezePacks(t *testing.T) {
	if !*freezePacks {
		t.Skip("only by -freeze-packs")
	}
	if _, err := os.Stat(goldenPacksDir); err == nil {
		t.Fatal("frozen files are never changed")
	}
	now, _ := writeGoldenPacks(t)
	for key, b := range now {
		path := filepath.Join(goldenPacksDir, key)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, b, 0o644))
	}
}

// TestFrozenPacks: the frozen packs are written the same, and hold what was in the segments.
func TestFrozenPacks(t *testing.T) {
	want := loadFiles(t, goldenPacksDir)
	now, x := writeGoldenPacks(t)
	if len(now) != len(want.objects) || len(now) == 0 {
		t.Fatalf("%d objects, want %d", len(now), len(want.objects))
	}
	for _, key := range slices.Sorted(maps.Keys(now)) {
		if !bytes.Equal(now[key], want.data(key)) {
			t.Errorf("%s is written in another way", key)
		}
	}
	g, _, _ := golden(t)
	r := goldenRepo(t, want)
	for f, content := range g.contents {
		got, err := r.ReadFrames(t.Context(), []Frame{f})
		must(t, err)
		if !bytes.Equal(got[0], content) {
			t.Errorf("frame %d of segment %s is another one", f.Index, f.Segment)
		}
	}
	x.readable(t, r)
	if got := x.segment.Session.String(); got != goldenPartial {
		t.Errorf("the session is %s", got)
	}
}

// copies is a segment of which all was moved into a pack, and that pack into a second one; none was deleted.
func copies(t *testing.T) (*Repo, *memory, packed, MovedPack) {
	t.Helper()
	r, m := made(t)
	x := makePacked(t, r)
	src, err := r.OpenPack(t.Context(), x.pack)
	must(t, err)
	again := movedInto(t, r, src, r.env.newID(), 0, 2, keepOf)
	must(t, r.PutTable(t.Context(), again[0].Table(), again))
	return r, m, x, again[0]
}

// TestOlderCopiesAreRead: what is damaged in the copy that counts is read from an older one, or from the segment's own
// object, and is noted. Only what no copy has is damaged.
func TestOlderCopiesAreRead(t *testing.T) {
	cut := func(b []byte) []byte { return b[:len(b)/2] }
	flip := func(b []byte) []byte {
		b = bytes.Clone(b)
		b[headerSize+100] ^= 1 // of the first frame
		return b
	}
	for name, hurt := range map[string]func([]byte) []byte{"cut": cut, "flip": flip} {
		for _, own := range []bool{false, true} {
			r, m, x, best := copies(t)
			if !own {
				must(t, r.DeleteSegment(t.Context(), x.segment))
			} else {
				must(t, r.DeletePack(t.Context(), x.pack))
			}
			m.set(best.Pack.key(), hurt(m.data(best.Pack.key())))
			fresh := goldenRepoWith(t, m, r)
			_, err := fresh.Moved(t.Context()) // so that it knows where to look first
			must(t, err)
			if own {
				got, err := fresh.ReadFrames(t.Context(), x.frames)
				must(t, err)
				if !bytes.Equal(got[2], x.content[2]) {
					t.Error("another content")
				}
			} else {
				x.readable(t, fresh)
			}
			if fresh.Spoilt()[best.Pack.key()] == nil {
				t.Errorf("%s, own %v: the damage is not noted: %v", name, own, fresh.Spoilt())
			}
			state, err := fresh.StatSegment(t.Context(), x.segment)
			if err != nil || state.Bytes != best.Segments[0].Bytes {
				t.Errorf("%s, own %v: %+v, %v", name, own, state, err)
			}
			n := 0
			err = fresh.ScanSegment(t.Context(), x.segment, func(_ Frame, _ FrameContent, err error) error {
				n++
				return err
			})
			if err != nil || n != len(x.frames) {
				t.Errorf("%s, own %v: scanned %d frames, %v", name, own, n, err)
			}
		}
	}
}

// TestOwnObjectIsDamaged: a segment that was moved, and whose own object was damaged before it was deleted.
func TestOwnObjectIsDamaged(t *testing.T) {
	r, m, x, _ := copies(t)
	m.set(x.segment.key(), m.data(x.segment.key())[:200])
	fresh := goldenRepoWith(t, m, r)
	x.readable(t, fresh)
	if fresh.Spoilt()[x.segment.key()] == nil {
		t.Errorf("the damage is not noted: %v", fresh.Spoilt())
	}
}

// TestEveryCopyIsDamagedElsewhere: two copies, each of which lacks something else.
func TestEveryCopyIsDamagedElsewhere(t *testing.T) {
	r, m, x, best := copies(t)
	must(t, r.DeleteSegment(t.Context(), x.segment))
	for key, at := range map[string]int{best.Pack.key(): headerSize + 10, x.pack.key(): headerSize + BlockBytes + 100} {
		b := bytes.Clone(m.data(key))
		b[at] ^= 1
		m.set(key, b)
	}
	x.readable(t, goldenRepoWith(t, m, r))

	// And both lack the same.
	b := bytes.Clone(m.data(x.pack.key()))
	b[headerSize+10] ^= 1
	m.set(x.pack.key(), b)
	_, err := goldenRepoWith(t, m, r).ReadContents(t.Context(), x.frames)
	kind(t, err, errs.Damaged)
}
