package repo

import (
	"bytes"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"filippo.io/age"

	"pando/internal/base/errs"
)

// testEnv is as the real one, but for what a passphrase costs.
func testEnv() env {
	e := realEnv
	e.scrypt = 10
	return e
}

const (
	testIdentity  = "AGE-SECRET-KEY-1GFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPQ4EGAEX"
	testRecipient = "age1zvkyg2lqzraa2lnjvqej32nkuu0ues2s82hzrye869xeexvn73equnujwj"
)

// kind fails the test unless err is of one of the kinds.
func kind(t *testing.T, err error, want ...errs.Kind) {
	t.Helper()
	for _, k := range want {
		if errs.KindOf(err) == k {
			return
		}
	}
	t.Fatalf("error of kind %q, want %q: %v", errs.KindOf(err), want, err)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func identity(t testing.TB, text string) Secret {
	t.Helper()
	s, err := Identity(text)
	must(t, err)
	return s
}

// made is a repository in memory, opened with the test's identity.
func made(t testing.TB) (*Repo, *memory) {
	t.Helper()
	m := newMemory()
	r, err := createRepo(t.Context(), m, NewSlot{Label: "test", Recipient: testRecipient}, testEnv())
	must(t, err)
	r.Close()
	r, err = openRepo(t.Context(), m, testEnv(), identity(t, testIdentity))
	must(t, err)
	t.Cleanup(r.Close)
	return r, m
}

func TestAllOfARepository(t *testing.T) {
	ctx := t.Context()
	r, _ := made(t)

	s := r.NewSession(Push, []string{"web"}, Writer{Pool: "p", Host: "h"})
	must(t, r.PutSession(ctx, &s))
	s.Pins = []ID{NewID()}
	must(t, r.PutSession(ctx, &s))
	sessions, err := r.Sessions(ctx)
	must(t, err)
	if len(sessions) != 1 || sessions[0].Session.Beat != 2 || !reflect.DeepEqual(sessions[0].Session.Pins, s.Pins) {
		t.Fatalf("%+v", sessions)
	}

	rnd := rand.New(rand.NewPCG(1, 2))
	noise := make([]byte, FrameBytes)
	for i := range noise {
		noise[i] = byte(rnd.Uint32())
	}
	text := bytes.Repeat([]byte("the quick brown fox "), FrameBytes/20)[:FrameBytes/BlockBytes*BlockBytes-BlockBytes]
	w, err := r.NewSegment(s.ID, 7)
	must(t, err)
	var pieces []Piece
	at := int64(3 * gib)
	for _, content := range [][]byte{noise, text, noise[:BlockBytes]} {
		packed, codec := Compress(nil, content)
		f, err := w.Add(packed, codec, len(content))
		must(t, err)
		pieces = append(pieces, Piece{Offset: at, Length: int64(len(content)), Frame: f, Sum: r.Sum(content)})
		at += 2 << 20
	}
	if pieces[0].Frame.Codec != Raw || pieces[1].Frame.Codec != Zstd {
		t.Errorf("codecs: %+v", pieces)
	}
	leaf := &Node{Level: 3, Pieces: pieces}
	encoded, err := EncodeNode(leaf)
	must(t, err)
	packed, codec := Compress(nil, encoded)
	root := NodeRef{}
	root.Pieces, root.Bytes = leaf.Count()
	root.Frame, err = w.Add(packed, codec, len(encoded))
	must(t, err)
	size := w.Bytes()
	object := w.Finish()
	if len(object) != size {
		t.Errorf("%d bytes, was said to be %d", len(object), size)
	}
	must(t, r.PutSegment(ctx, w.Segment(), object))
	kind(t, r.PutSegment(ctx, w.Segment(), object), errs.Exists)

	m := Manifest{
		ID: NewID(), Volume: "web", Point: "a", Content: Block, FS: "ext4", SizeBytes: 4 * gib,
		CreatedAt: time.Now().UTC(),
		Session:   s.ID, Map: root, Uses: []Use{{Segment: w.Segment(), Size: uint32(len(object))}},
	}
	must(t, r.PutManifest(ctx, m))
	got, err := r.Manifest(ctx, m.ID)
	must(t, err)
	if !reflect.DeepEqual(got, m) {
		t.Errorf("%+v\nwant %+v", got, m)
	}
	nodes, err := r.ReadNodes(ctx, []NodeAt{got.Root()})
	must(t, err)
	if nodes[0].Err != nil || !reflect.DeepEqual(nodes[0].Node, leaf) {
		t.Fatalf("%+v, %v\nwant %+v", nodes[0].Node, nodes[0].Err, leaf)
	}
	list := nodes[0].Pieces
	contents, err := r.ReadFrames(ctx, []Frame{list[2].Frame, list[0].Frame, list[1].Frame, list[0].Frame})
	must(t, err)
	for i, want := range [][]byte{noise[:BlockBytes], noise, text, noise} {
		if !bytes.Equal(contents[i], want) {
			t.Errorf("frame %d is not what was written", i)
		}
	}
	n, err := r.CheckSegment(ctx, w.Segment())
	if err != nil || n != 4 {
		t.Errorf("%d frames, %v", n, err)
	}

	h := Head{
		Name:    "web",
		Lineage: "l",
		Epoch:   1,
		NextSeq: 2,
		Recent:  []Point{{Seq: 1, Name: "a", Manifest: m.ID, Content: Block, SizeBytes: m.SizeBytes}},
	}
	_, _, err = r.Head(ctx, "web")
	kind(t, err, errs.NotFound)
	v, err := r.PutHead(ctx, h, "")
	must(t, err)
	_, err = r.PutHead(ctx, h, "")
	kind(t, err, errs.Conflict)
	read, v2, err := r.Head(ctx, "web")
	must(t, err)
	if v2 != v || read.WriteID.IsZero() {
		t.Errorf("version %s, %s; %+v", v, v2, read)
	}
	read.WriteID = ID{}
	if !reflect.DeepEqual(read, h) {
		t.Errorf("%+v\nwant %+v", read, h)
	}
	if _, err := r.PutHead(ctx, h, v); err != nil {
		t.Error(err)
	}
	must(t, r.EndSession(ctx, &s))
	kind(t, r.PutSession(ctx, &s), errs.Conflict)
}

func newHybrid(t *testing.T) (identity, recipient string) {
	t.Helper()
	i, err := age.GenerateHybridIdentity()
	must(t, err)
	return i.String(), i.Recipient().String()
}
