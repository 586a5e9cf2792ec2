package repo

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/testing/testfs"
)

// reading is a way to read the object of a key; what it gives is compared.
type reading struct {
	key  string
	read func(context.Context, *Repo) (any, error)
	// partial: an object that is changed may also read as it was, because this way of
	// reading does not look at all of it.
	partial bool
}

func readings(t testing.TB, g *goldenContent, r *Repo) []reading {
	t.Helper()
	headKey := func(name string) string {
		key, err := r.headKey(name)
		must(t, err)
		return key
	}
	all := []reading{
		{key: headKey(g.head.Name), read: func(ctx context.Context, r *Repo) (any, error) {
			h, _, err := r.Head(ctx, g.head.Name)
			return h, err
		}},
		{key: headKey(g.packed.Name), read: func(ctx context.Context, r *Repo) (any, error) {
			h, _, err := r.Head(ctx, g.packed.Name)
			return h, err
		}},
		{key: sessionPrefix + g.session.ID.String(), read: func(ctx context.Context, r *Repo) (any, error) {
			s, err := r.Session(ctx, g.session.ID)
			return s.Session, err
		}},
		{key: seenKey, read: func(ctx context.Context, r *Repo) (any, error) {
			s, _, err := r.Seen(ctx)
			return s, err
		}},
	}
	for _, m := range []Manifest{g.block, g.stream, g.empty} {
		all = append(all, reading{key: manifestKey(m.ID), read: func(ctx context.Context, r *Repo) (any, error) {
			m, err := r.Manifest(ctx, m.ID)
			return m, err
		}})
	}
	for _, s := range g.segments {
		var frames []Frame
		for f := range g.contents {
			if f.Segment == s {
				frames = append(frames, f)
			}
		}
		slices.SortFunc(frames, compareFrames)
		all = append(all, reading{key: s.key(), read: func(ctx context.Context, r *Repo) (any, error) {
			n, err := r.CheckSegment(ctx, s)
			return n, err
		}}, reading{key: s.key(), partial: true, read: func(ctx context.Context, r *Repo) (any, error) {
			r.segments.forgetAll()
			c, err := r.ReadFrames(ctx, frames)
			return c, err
		}})
	}
	return all
}

// changes are what can be done to an object: every byte in two ways, every length
// that is shorter, and a byte more.
func changes(data []byte, each func(what string, at int, changed []byte)) {
	for i := range data {
		for _, x := range []byte{1 << (i % 8), 0xff} {
			b := bytes.Clone(data)
			b[i] ^= x
			each(fmt.Sprintf("byte %d ^ %#x", i, x), i, b)
		}
	}
	for n := range data {
		each(fmt.Sprintf("cut to %d", n), -1, data[:n])
	}
	each("a byte more", -1, append(bytes.Clone(data), 0))
}

// However an object is changed, it is Damaged and never read as something else. The
// byte of the version may also say TooNew.
func TestEveryChangeIsNoticed(t *testing.T) {
	testfs.NotShort(t, "it does one thing after the other")
	ctx := t.Context()
	g, r, m := golden(t)
	for _, x := range readings(t, g, r) {
		was := m.data(x.key)
		want, err := x.read(ctx, r)
		must(t, err)
		changes(was, func(what string, at int, changed []byte) {
			m.set(x.key, changed)
			got, err := x.read(ctx, r)
			switch {
			case err == nil && x.partial && reflect.DeepEqual(got, want):
			case err == nil:
				t.Errorf("%s, %s: read as %+v", x.key, what, got)
			case errs.Is(err, errs.Damaged):
			case errs.Is(err, errs.TooNew) && at == 5:
			default:
				t.Errorf("%s, %s: error of kind %q: %v", x.key, what, errs.KindOf(err), err)
			}
		})
		m.set(x.key, was)
		if _, err := x.read(ctx, r); err != nil {
			t.Errorf("%s: does not recover: %v", x.key, err)
		}
	}
}

// The same of config: with an identity, and with a passphrase.
func TestEveryChangeOfConfigIsNoticed(t *testing.T) {
	_, _, m := golden(t)
	was := m.data(configKey)
	identity := identity(t, testIdentity)
	tried := 0
	changes(was, func(what string, at int, changed []byte) {
		m.set(configKey, changed)
		secret := identity
		if tried++; tried%8 == 0 { // a passphrase costs more
			secret = Passphrase(goldenPassphrase)
		}
		r, err := openRepo(t.Context(), m, testEnv(), secret)
		switch {
		case err == nil:
			t.Errorf("%s: opened", what)
			r.Close()
		case errs.Is(err, errs.Damaged), errs.Is(err, errs.Permission):
		case errs.Is(err, errs.TooNew) && at == 5:
		default:
			t.Errorf("%s: error of kind %q: %v", what, errs.KindOf(err), err)
		}
	})
	m.set(configKey, was)
}

// No object passes for another: of another key, of another kind, of another
// repository.
func TestObjectsAreBoundToTheirPlace(t *testing.T) {
	ctx := t.Context()
	g, r, m := golden(t)
	all := readings(t, g, r)

	// Another repository with the same content under the same keys of objects.
	other, foreign := made(t)
	for _, key := range m.keys() {
		if key == configKey {
			continue
		}
		o := m.data(key)
		if objectType(o[4]) == typeSegment {
			continue
		}
		opened, err := r.unseal(ctx, objectType(o[4]), key, o, maxManifestBytes)
		must(t, err)
		sealed, err := other.seal(objectType(o[4]), key, opened, maxManifestBytes)
		must(t, err)
		foreign.set(key, sealed)
		if _, err := other.unseal(ctx, objectType(o[4]), key, sealed, maxManifestBytes); err != nil {
			t.Errorf("%s: %v", key, err)
		}
	}

	objects := map[string][]byte{}
	for _, key := range m.keys() {
		objects["ours "+key] = m.data(key)
	}
	for _, key := range foreign.keys() {
		objects["foreign "+key] = foreign.data(key)
	}
	swaps := 0
	for _, x := range all {
		was := m.data(x.key)
		for from, data := range objects {
			if from == "ours "+x.key {
				continue
			}
			swaps++
			m.set(x.key, data)
			if got, err := x.read(ctx, r); !errs.Is(err, errs.Damaged) {
				t.Errorf("%s passes for %s: %+v, %v", from, x.key, got, err)
			}
		}
		m.set(x.key, was)
	}
	if swaps < 100 {
		t.Errorf("only %d swaps", swaps)
	}
}

// Two repositories of the same keys are made by nobody; but who copies one and has its
// keys cannot pass parts of the copy under another ID.
func TestSealedForTheRepository(t *testing.T) {
	ctx := t.Context()
	g, r, _ := golden(t)
	for _, x := range readings(t, g, r) {
		r.id[3] ^= 1
		r.segments.forgetAll()
		if got, err := x.read(ctx, r); !errs.Is(err, errs.Damaged) {
			t.Errorf("%s of another repository: %+v, %v", x.key, got, err)
		}
		r.id[3] ^= 1
	}
}

// A holder of the keys can seal anything under any key of an object, but not make one
// thing pass for another.
func TestObjectsAreWhatTheirKeySays(t *testing.T) {
	ctx := t.Context()
	g, r, m := golden(t)
	put := func(typ objectType, from, to string) {
		t.Helper()
		opened, err := r.unseal(ctx, typ, from, m.data(from), maxManifestBytes)
		must(t, err)
		sealed, err := r.seal(typ, to, opened, maxManifestBytes)
		must(t, err)
		m.set(to, sealed)
	}
	web, err := r.headKey("web")
	must(t, err)
	other, err := r.headKey("other")
	must(t, err)
	put(typeHead, web, other)
	_, _, err = r.Head(ctx, "other")
	kind(t, err, errs.Damaged)
	id := NewID()
	put(typeManifest, manifestKey(g.block.ID), manifestKey(id))
	_, err = r.Manifest(ctx, id)
	kind(t, err, errs.Damaged)
	put(typeSession, sessionPrefix+g.session.ID.String(), sessionPrefix+id.String())
	_, err = r.Session(ctx, id)
	kind(t, err, errs.Damaged)
	_, err = r.Sessions(ctx)
	kind(t, err, errs.Damaged)

	// Data in place of a node.
	root := g.block.Root()
	for f := range g.contents {
		if f == root.Frame {
			continue
		}
		at := root
		at.Frame = f
		nodes, err := r.ReadNodes(ctx, []NodeAt{at})
		must(t, err)
		kind(t, nodes[0].Err, errs.Damaged, errs.TooNew)
	}
	// Content that is larger than that of its kind can be.
	sealed, err := r.seal(typeHead, web, make([]byte, maxHeadBytes+1), maxManifestBytes)
	must(t, err)
	m.set(web, sealed)
	_, _, err = r.Head(ctx, "web")
	kind(t, err, errs.Damaged)
	// An object of any size is not read whole.
	m.set(web, make([]byte, maxHeadBytes+100))
	_, _, err = r.Head(ctx, "web")
	kind(t, err, errs.Damaged)
}

// A frame is read only as what it is: at its place, with its length and codec.
func TestFramesAreBoundToTheirPlace(t *testing.T) {
	ctx := t.Context()
	g, r, _ := golden(t)
	for f := range g.contents {
		for what, change := range map[string]func(*Frame){
			"segment number":  func(f *Frame) { f.Segment.N ^= 258 },
			"index":           func(f *Frame) { f.Index++ },
			"index below":     func(f *Frame) { f.Index-- },
			"offset":          func(f *Frame) { f.Offset++ },
			"offset below":    func(f *Frame) { f.Offset-- },
			"stored":          func(f *Frame) { f.Stored-- },
			"stored more":     func(f *Frame) { f.Stored++ },
			"plain":           func(f *Frame) { f.Plain++ },
			"plain less":      func(f *Frame) { f.Plain-- },
			"stored and less": func(f *Frame) { f.Plain--; f.Stored-- },
			"codec":           func(f *Frame) { f.Codec ^= 1 },
			"unknown codec":   func(f *Frame) { f.Codec = 2 },
			"nowhere":         func(f *Frame) { f.Offset = MaxSegment },
			"wraps":           func(f *Frame) { f.Offset = 1<<32 - 1 },
			"huge":            func(f *Frame) { f.Stored, f.Plain = 1<<32-1, 1<<32-1-tagSize },
			"empty":           func(f *Frame) { f.Stored, f.Plain = tagSize, 0 },
			"header":          func(f *Frame) { f.Offset = 0 },
		} {
			changed := f
			change(&changed)
			r.segments.forgetAll()
			for range 2 { // even when the segment's key is known
				if got, err := r.ReadFrames(ctx, []Frame{changed}); !errs.Is(err, errs.Damaged) {
					t.Errorf("%+v with another %s: %x, %v", f, what, got, err)
				}
				_, err := r.ReadFrames(ctx, []Frame{f})
				must(t, err)
			}
		}
	}
	gone := Segment{Session: NewID()}
	for f := range g.contents {
		f.Segment = gone
		_, err := r.ReadFrames(ctx, []Frame{f})
		kind(t, err, errs.NotFound)
		if !strings.Contains(err.Error(), gone.key()) && !strings.Contains(err.Error(), gone.String()) {
			t.Errorf("does not say which segment: %v", err)
		}
	}
	_, err := r.CheckSegment(ctx, gone)
	kind(t, err, errs.NotFound)
}

// withVersion returns a copy of an object with another version number.
func withVersion(object []byte, version byte) []byte {
	b := bytes.Clone(object)
	b[versionAt] = version
	return b
}

// newer is an object as a newer version would have written it.
func newer(t *testing.T, r *Repo, key string, was []byte) []byte {
	t.Helper()
	kind := objectType(was[4])
	if kind == typeSegment {
		return withVersion(was, objectVersion+1)
	}
	content, err := r.unseal(t.Context(), kind, key, was, maxManifestBytes)
	must(t, err)
	h, aead, err := r.newSealingCipher(infoMetadata)
	must(t, err)
	plain := binary.LittleEndian.AppendUint32([]byte{byte(Raw)}, uint32(len(content)))
	head := withVersion(h.appendTo(nil, kind), objectVersion+1)
	return aead.Seal(head, zeroNonce, append(plain, content...), metaAAD(head, r.id, key))
}

// newerConfig is a config that a newer version has written, of which only the beginning is known.
func newerConfig() []byte {
	return append(withVersion(putPreamble(nil, typeConfig), objectVersion+1), noise(9, 900)...)
}

// TestChangedVersionIsDamage: what says that it is newer and was not written so is damaged, so that it is read again,
// and can be repaired.
func TestChangedVersionIsDamage(t *testing.T) {
	ctx := t.Context()
	g, r, m := golden(t)
	for _, x := range readings(t, g, r) {
		was := m.data(x.key)
		if objectType(was[4]) == typeSegment {
			continue // its frames do not depend on it
		}
		for _, version := range []byte{objectVersion + 1, 9, 0x81, 0xff} {
			m.set(x.key, withVersion(was, version))
			_, err := x.read(ctx, r)
			kind(t, err, errs.Damaged)
		}
		m.set(x.key, was)
	}

	raw := m.data(configKey)
	m.set(configKey, withVersion(raw, 9))
	for _, secret := range []Secret{identity(t, testIdentity), Passphrase(goldenPassphrase)} {
		_, err := openRepo(ctx, m, testEnv(), secret)
		kind(t, err, errs.Damaged)
	}
	kind(t, r.Refresh(ctx), errs.Damaged)
	plan, err := PlanRestore(ctx, m, raw, r.Mark(), identity(t, testIdentity))
	if err != nil || plan == nil {
		t.Errorf("it cannot be put back: %v", err)
	}
	stranger, _, err := NewIdentity()
	must(t, err)
	_, err = openRepo(ctx, m, testEnv(), identity(t, stranger))
	kind(t, err, errs.TooNew) // who has no key of it cannot tell
}

// What a newer version wrote is not taken for damaged, and not read.
func TestTooNew(t *testing.T) {
	ctx := t.Context()
	g, r, m := golden(t)
	for _, x := range readings(t, g, r) {
		was := m.data(x.key)
		m.set(x.key, newer(t, r, x.key, was))
		_, err := x.read(ctx, r)
		kind(t, err, errs.TooNew)
		if errs.HintOf(err) == "" {
			t.Error("no hint")
		}
		m.set(x.key, was)
	}
	m.set(configKey, newerConfig())
	_, err := openRepo(ctx, m, testEnv(), identity(t, testIdentity))
	kind(t, err, errs.TooNew)

	node, err := EncodeNode(&Node{Level: 3, Pieces: g.pieces})
	must(t, err)
	node[0]++
	_, err = DecodeNode(node)
	kind(t, err, errs.TooNew)
}

// TestDevelopmentRepository: a repository from before there were releases is refused, and nothing is done to it.
func TestDevelopmentRepository(t *testing.T) {
	ctx := t.Context()
	r, m := made(t)
	good := m.data(configKey)
	old := bytes.Clone(good)
	copy(old, oldMagic)
	m.set(configKey, old)
	_, err := openRepo(ctx, m, testEnv(), identity(t, testIdentity))
	kind(t, err, errs.Unsupported)
	if !strings.Contains(errs.HintOf(err), "export") {
		t.Errorf("hint %q", errs.HintOf(err))
	}
	kind(t, r.Refresh(ctx), errs.Unsupported)
	plan, err := PlanRestore(ctx, m, good, r.Mark(), identity(t, testIdentity))
	kind(t, err, errs.Unsupported)
	if plan != nil || !bytes.Equal(m.data(configKey), old) {
		t.Error("it would be replaced")
	}
}

// Lists of nothings pack into a kilobyte. Reading one costs no more than unpacking it: nothing is kept of an element
// that is none.
func TestHostileListsCostLittle(t *testing.T) {
	testfs.NotShort(t, "it reads one object after the other")
	ctx := t.Context()
	_, r, m := golden(t)
	web, err := r.headKey("web")
	must(t, err)
	session := sessionPrefix + NewID().String()
	points := PointPage{ID: NewID()}
	for _, x := range []struct {
		typ   objectType
		key   string
		field string
		limit int
		read  func() error
	}{
		{typeHead, web, "points", maxHeadBytes, func() error { _, _, err := r.Head(ctx, "web"); return err }},
		{typeHead, web, "pages", maxHeadBytes, func() error { _, _, err := r.Head(ctx, "web"); return err }},
		{typePoints, points.Object(), "points", maxPageBytes, func() error {
			_, err := r.PagePoints(ctx, Head{Name: "web"}, points)
			return err
		}},
		{typeHead, web, "fenced", maxHeadBytes, func() error { _, _, err := r.Head(ctx, "web"); return err }},
		{typeSession, session, "pins", maxSessionBytes, func() error {
			id, err := ParseID(strings.TrimPrefix(session, sessionPrefix))
			if err == nil {
				_, err = r.Session(ctx, id)
			}
			return err
		}},
		{typeSeen, seenKey, "sessions", maxSeenBytes, func() error { _, _, err := r.Seen(ctx); return err }},
	} {
		for _, element := range []string{"{}", "0", "null", "[]", `""`} {
			begin := `{"name":"web","` + x.field + `":[`
			content := begin + strings.Repeat(element+",", (x.limit-len(begin)-8)/(len(element)+1)) + element + "]}"
			sealed, err := r.seal(x.typ, x.key, []byte(content), x.limit)
			must(t, err)
			m.set(x.key, sealed)

			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			err = x.read()
			runtime.ReadMemStats(&after)
			if !errs.Is(err, errs.Damaged) {
				t.Errorf("%s of %s: %v", x.field, element, err)
			}
			if n := after.TotalAlloc - before.TotalAlloc; n > uint64(4*x.limit) {
				t.Errorf("%s of %s: %d bytes that unpack to %d cost %d of memory", x.field, element, len(sealed), len(content), n)
			}
		}
	}
}
