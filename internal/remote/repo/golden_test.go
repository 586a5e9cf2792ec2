package repo

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// The directories in testdata/v1 are repositories of format version 1: one file for each object, under its key. They
// are never changed: remotes hold such bytes. freeze writes what is missing, for a new kind of object.
var freeze = flag.Bool("freeze", false, "write files of testdata/v1 that are not there")

const gib = 1 << 30

const (
	goldenDir        = "testdata/v1/all"
	goldenPassphrase = "correct horse battery staple"
)

// counted is a source of the same random bytes each time.
type counted struct {
	n    uint64
	rest []byte
}

func (c *counted) Read(b []byte) (int, error) {
	for n := 0; n < len(b); {
		if len(c.rest) == 0 {
			block := sha256.Sum256(binary.LittleEndian.AppendUint64([]byte("pando golden"), c.n))
			c.rest, c.n = block[:], c.n+1
		}
		k := copy(b[n:], c.rest)
		c.rest, n = c.rest[k:], n+k
	}
	return len(b), nil
}

// noise is content that cannot be packed.
func noise(seed byte, n int) []byte {
	b := make([]byte, n)
	_, _ = (&counted{n: uint64(seed) << 32}).Read(b)
	return b
}

func goldenEnv() env {
	return env{
		random: &counted{}, now: func() time.Time { return time.Date(2026, 11, 22, 1, 2, 3, 456789, time.UTC) },
		pack: storeRaw, scrypt: 10,
	}
}

// goldenContent is all that is in the repository of testdata.
type goldenContent struct {
	config   keyring
	head     Head
	packed   Head // whose object is packed
	session  Session
	seen     Seen
	block    Manifest
	stream   Manifest
	empty    Manifest
	pieces   []Piece
	contents map[Frame][]byte
	segments []Segment
	objects  map[string][]byte
}

// writeGolden makes the repository anew. What zstd makes is taken from the files: a
// newer compressor may pack in other ways, which is no change of the format.
func writeGolden(t testing.TB, wrapped [][]byte, packedText []byte) (*goldenContent, *Repo) {
	t.Helper()
	ctx := t.Context()
	e := goldenEnv()
	m := newMemory()
	g := &goldenContent{contents: map[Frame][]byte{}}

	k := keyring{
		serial:  1,
		ringKey: e.randomBytes(keySize),
		keys: []masterKey{
			newMasterKey(e.randomBytes(keySize), e.utcNow()),
			newMasterKey(e.randomBytes(keySize), e.utcNow().Add(time.Hour)),
		},
	}
	k.id = derivedID(k.keys[0].secret, infoRepoID)
	for i, n := range []NewSlot{{Label: "host a", Recipient: testRecipient},
		{Label: "paper", Passphrase: goldenPassphrase}} {
		s, err := k.newSlot(e.newID(), n, e)
		must(t, err)
		if wrapped != nil {
			s.wrapped = wrapped[i]
		}
		s.CreatedAt = s.CreatedAt.Add(time.Duration(i) * time.Minute)
		k.slots = append(k.slots, s)
	}
	k.serial = 1<<40 + 3
	raw, err := k.encode(e.randomBytes(saltSize))
	must(t, err)
	m.set(configKey, raw)
	g.config = *k.clone()
	r := &Repo{store: m, env: e, id: k.id}
	r.mu.Lock()
	r.useKeyring(&k, raw, "v1")
	r.mu.Unlock()

	w := Writer{Pool: "oifdsnonohp2nsqcubr0gnhfhk", Host: "host-a.example"}
	g.session = r.NewSession(Push, []string{"web", "db.main"}, w)
	g.session.PID = 4711
	g.session.Pins = []ID{r.env.newID()}
	must(t, r.PutSession(ctx, &g.session))

	text := bytes.Repeat([]byte("all that glitters is not gold\n"), 1000)[:4*BlockBytes]
	add := func(w *SegmentWriter, stored []byte, codec Codec, content []byte) Frame {
		f, err := w.Add(stored, codec, len(content))
		must(t, err)
		g.contents[f] = content
		return f
	}
	end := func(w *SegmentWriter) {
		g.segments = append(g.segments, w.Segment())
		must(t, r.PutSegment(ctx, w.Segment(), w.Finish()))
	}
	a, err := r.NewSegment(g.session.ID, 0)
	must(t, err)
	raw0, raw1 := noise(1, BlockBytes), noise(2, BlockBytes+100)
	f0, f1, f2 := add(a, raw0, Raw, raw0), add(a, packedText, Zstd, text), add(a, raw1, Raw, raw1)
	g.pieces = []Piece{
		{Offset: gib, Length: BlockBytes, Frame: f0, Sum: r.Sum(raw0)},
		{Offset: gib + 2*BlockBytes, Length: BlockBytes, Frame: f1, Within: 3 * BlockBytes},
		{Offset: gib + 3*BlockBytes, Length: 2 * BlockBytes, Frame: f1, Sum: r.Sum(text[:2*BlockBytes])},
		{Offset: gib + 100*BlockBytes, Length: BlockBytes + 100, Frame: f2},
	}
	end(a)
	b, err := r.NewSegment(g.session.ID, 258)
	must(t, err)
	leaf, err := EncodeNode(&Node{Level: 3, Pieces: g.pieces})
	must(t, err)
	root := NodeRef{Frame: add(b, leaf, Raw, leaf), Pieces: 4, Bytes: 5*BlockBytes + 100}
	end(b)

	g.block = Manifest{
		ID: r.env.newID(), Volume: "web", Point: "before-upgrade", Content: Block, FS: "ext4", SizeBytes: gib +
			101*BlockBytes + 100, Sector: 4096,
		CreatedAt: e.utcNow().Add(time.Second), Consistency: "crash", Source: "gckkeq0jo03rbeb4fuvt62o3qo",
		Session: g.session.ID, Parent: r.env.newID(),
		Origin: &Origin{Ref: "golden@3", Volume: "golden",
			Manifest: r.env.newID()}, Logical: 5*BlockBytes + 100, Added: 12345,
		Map: root, Uses: []Use{{Segment: a.Segment(), Size: 9999}, {Segment: b.Segment()}},
		StateOrder: StateOrder{Epoch: 3, Order: 1_795_309_323_000_456_789},
	}
	g.stream = Manifest{
		ID: r.env.newID(), Volume: "db.main", Point: "7", Content: Stream, FS: "native", CreatedAt: e.utcNow(),
		Consistency: "clean", Source: "s",
		Session: g.session.ID, Logical: 1, Added: 1,
		Stream: []Frame{f2, f0, f1, f1}, Uses: []Use{{Segment: a.Segment(), Size: 9999}},
	}
	g.empty = Manifest{ID: r.env.newID(), Volume: "empty", Content: Block, Session: g.session.ID,
		CreatedAt: time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)}
	for _, m := range []Manifest{g.block, g.stream, g.empty} {
		must(t, r.PutManifest(ctx, m))
	}

	g.head = Head{
		Name: "web", Lineage: "0123456789abcdefghijklmnog", Epoch: 3, Writer: w, NextSeq: 18,
		Recent: []Point{
			{Seq: 3, Name: "before-upgrade", Manifest: g.block.ID, Source: g.block.Source, Content: Block, FS: "ext4",
				SizeBytes: g.block.SizeBytes,
				CreatedAt: g.block.CreatedAt, Consistency: "crash", Logical: g.block.Logical, Added: g.block.Added, Keep: true,
				OriginRef: "golden@3", OriginVol: "golden", OriginID: g.block.Origin.Manifest, StateOrder: g.block.StateOrder},
			{Seq: 17, Name: "s", Manifest: g.stream.ID, Source: "s", Content: Stream, FS: "native",
				CreatedAt: g.stream.CreatedAt, Parent: g.block.ID},
		},
		Fenced: []ID{r.env.newID()},
	}
	_, err = r.PutHead(ctx, g.head, "")
	must(t, err)
	g.seen = Seen{Sessions: []SeenSession{{ID: g.session.ID, Beat: 1, At: e.utcNow()}}}
	_, err = r.PutSeen(ctx, g.seen, "")
	must(t, err)

	g.packed = Head{Name: "übergroß", Golden: true, Lineage: "l", Epoch: 1, NextSeq: 1, Gone: true,
		Writer: Writer{Host: strings.Repeat("long ", 100)}}
	r.env.pack = Compress
	_, err = r.PutHead(ctx, g.packed, "")
	must(t, err)

	g.objects = map[string][]byte{}
	for key, o := range m.objects {
		g.objects[key] = o.data
	}
	t.Cleanup(r.Close)
	return g, r
}

// writeOneKey makes a repository with one key and one slot. wrapped is as of frozenKeys.
func writeOneKey(t testing.TB, e env, m *memory, serial uint64, wrapped [][]byte) *Repo {
	t.Helper()
	k := keyring{
		serial:  serial,
		ringKey: e.randomBytes(keySize),
		keys:    []masterKey{newMasterKey(e.randomBytes(keySize), e.utcNow())},
	}
	k.id = derivedID(k.keys[0].secret, infoRepoID)
	s, err := k.newSlot(e.newID(), NewSlot{Label: "host a", Recipient: testRecipient}, e)
	must(t, err)
	if len(wrapped) > 0 {
		s.wrapped = wrapped[0]
	}
	k.slots = []slot{s}
	raw, err := k.encode(e.randomBytes(saltSize))
	must(t, err)
	m.set(configKey, raw)
	r := &Repo{store: m, env: e, id: k.id}
	r.mu.Lock()
	r.useKeyring(&k, raw, "v1")
	r.mu.Unlock()
	t.Cleanup(r.Close)
	return r
}

// loadGolden is the frozen repository.
func loadGolden(t testing.TB) *memory {
	t.Helper()
	m := loadFiles(t, goldenDir)
	must(t, m.Delete(t.Context(), "text.zst"))
	return m
}

// loadFiles is a store with the files of a directory.
func loadFiles(t testing.TB, dir string) *memory {
	t.Helper()
	m := newMemory()
	must(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		key, err := filepath.Rel(dir, path)
		m.set(key, b)
		return err
	}))
	return m
}

// golden is the frozen repository, opened, and what must be in it.
func golden(t testing.TB) (*goldenContent, *Repo, *memory) {
	t.Helper()
	m := loadGolden(t)
	text, err := os.ReadFile(goldenDir + "/text.zst")
	must(t, err)
	g, _ := writeGolden(t, frozenKeys(t, goldenDir), text)
	r, err := openRepo(t.Context(), m, testEnv(), identity(t, testIdentity))
	must(t, err)
	t.Cleanup(r.Close)
	return g, r, m
}

// TestFreeze writes the frozen repositories, as far as they are not there.
func TestFreeze(t *testing.T) {
	if !*freeze {
		return // it is no test: it writes what tests read
	}
	packed, err := os.ReadFile(filepath.Join(goldenDir, "text.zst"))
	if os.IsNotExist(err) {
		packed, _ = Compress(nil, bytes.Repeat([]byte("all that glitters is not gold\n"), 1000)[:4*BlockBytes])
	}
	g, _ := writeGolden(t, frozenKeys(t, goldenDir), packed)
	g.objects["text.zst"] = packed
	m, _ := writeGoldenMap(t, frozenKeys(t, goldenMapDir))
	p := writeGoldenPoints(t, frozenKeys(t, goldenPointsDir))
	for dir, objects := range map[string]map[string][]byte{goldenDir: g.objects, goldenMapDir: m.objects,
		goldenPointsDir: p.objects} {
		for key, data := range objects {
			path := filepath.Join(dir, key)
			if _, err := os.Stat(path); err == nil {
				continue
			}
			must(t, os.MkdirAll(filepath.Dir(path), 0o755))
			must(t, os.WriteFile(path, data, 0o644))
		}
	}
	t.Log("with a map:", m.block.ID, m.stream.ID)
}

// frozenKeys are the ring keys of a frozen repository as age has wrapped them, which is random: one of each slot, none
// if the repository is not there.
func frozenKeys(t testing.TB, dir string) (wrapped [][]byte) {
	t.Helper()
	if _, err := os.Stat(filepath.Join(dir, configKey)); err != nil {
		return nil
	}
	c, err := decodeConfig(loadFiles(t, dir).data(configKey))
	must(t, err)
	for _, s := range c.slots {
		wrapped = append(wrapped, s.wrapped)
	}
	return wrapped
}

func TestFrozenObjectsAreWrittenTheSame(t *testing.T) {
	g, _, m := golden(t)
	if len(g.objects) != 10 {
		t.Errorf("%d objects", len(g.objects))
	}
	for _, key := range m.keys() {
		if _, known := g.objects[key]; !known {
			t.Errorf("%s is not written any more", key)
		}
	}
	r := goldenRepo(t, m)
	packed, err := r.headKey(g.packed.Name)
	must(t, err)
	for key, want := range g.objects {
		if key == packed { // as the compressor of today packs
			continue
		}
		if got := m.data(key); !bytes.Equal(got, want) {
			t.Errorf("%s is written differently:\n%x\nwas\n%x", key, want, got)
		}
	}
}

func goldenRepo(t testing.TB, m objstore.Store) *Repo {
	t.Helper()
	r, err := openRepo(t.Context(), m, testEnv(), identity(t, testIdentity))
	must(t, err)
	t.Cleanup(r.Close)
	return r
}

func TestFrozenRepositoryIsRead(t *testing.T) {
	ctx := t.Context()
	g, _, m := golden(t)
	for _, secret := range []Secret{identity(t, testIdentity), Passphrase(goldenPassphrase)} {
		r, err := openRepo(ctx, m, testEnv(), secret)
		must(t, err)
		defer r.Close()
		same := func(what string, got, want any, err error) {
			t.Helper()
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%s: %+v, %v\nwant %+v", what, got, err, want)
			}
		}
		same("ID", r.ID(), g.config.id, nil)
		same("mark", r.Mark(), Mark{ID: g.config.id, Serial: 1<<40 + 3, Key: g.config.keys[1].id}, nil)
		for i, k := range g.config.keys {
			same("key", r.ring.keys[i], k, nil)
		}
		slots, err := r.Slots(ctx)
		same("slots", slots, []SlotInfo{g.config.slots[0].SlotInfo, g.config.slots[1].SlotInfo}, err)
		sessions, err := r.Sessions(ctx)
		if len(sessions) == 1 {
			sessions[0].writes = g.session.writes
			same("session", sessions[0].Session, g.session, err)
		} else {
			t.Errorf("%d sessions, %v", len(sessions), err)
		}
		seen, _, err := r.Seen(ctx)
		seen.WriteID = ID{}
		same("seen", seen, g.seen, err)
		for _, want := range []Manifest{g.block, g.stream, g.empty} {
			got, err := r.Manifest(ctx, want.ID)
			same("manifest", got, want, err)
		}
		for _, want := range []Head{g.head, g.packed} {
			got, _, err := r.Head(ctx, want.Name)
			if got.WriteID.IsZero() {
				t.Error("no write ID")
			}
			got.WriteID = ID{}
			same("head", got, want, err)
		}
		nodes, err := r.ReadNodes(ctx, []NodeAt{g.block.Root()})
		must(t, err)
		same("map", nodes[0].Node, &Node{Level: 3, Pieces: g.pieces}, nodes[0].Err)
		for f, want := range g.contents {
			got, err := r.ReadFrames(ctx, []Frame{f})
			same("frame", got, [][]byte{want}, err)
		}
		frames := 0
		for _, s := range g.segments {
			n, err := r.CheckSegment(ctx, s)
			must(t, err)
			frames += n
		}
		if frames != 4 {
			t.Errorf("%d frames", frames)
		}
		var segments []Segment
		for s, err := range r.Segments(ctx) {
			must(t, err)
			segments = append(segments, s.Segment)
			if s.Bytes != int64(len(m.data(s.key()))) {
				t.Errorf("%s has %d bytes", s, s.Bytes)
			}
		}
		same("segments", segments, g.segments, nil)
		var manifests []ID
		for id, err := range r.Manifests(ctx) {
			must(t, err)
			manifests = append(manifests, id)
		}
		want := []ID{g.block.ID, g.stream.ID, g.empty.ID}
		slices.SortFunc(want, func(a, b ID) int { return bytes.Compare(a[:], b[:]) })
		same("manifests", manifests, want, nil)
		if got := r.Sum(noise(1, BlockBytes)); got != g.pieces[0].Sum {
			t.Errorf("sum is %x, was %x", got, g.pieces[0].Sum)
		}
		names := 0
		for h, err := range r.Heads(ctx) {
			must(t, err)
			names++
			if h.Name != g.head.Name && h.Name != g.packed.Name {
				t.Errorf("head %q", h.Name)
			}
		}
		if names != 2 {
			t.Errorf("%d heads", names)
		}
	}
	_, err := openRepo(ctx, m, testEnv(), Passphrase("wrong"))
	kind(t, err, errs.Permission)
}

// storeRaw is a compressor that never compresses.
func storeRaw(_, src []byte) ([]byte, Codec) { return src, Raw }
