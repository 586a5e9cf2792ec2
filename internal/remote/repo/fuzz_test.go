package repo

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"os"
	"reflect"
	"testing"

	"pando/internal/base/errs"
)

// What all decoders promise of whatever they are given: no panic, little memory, and
// only these errors.
func refused(t *testing.T, err error) bool {
	t.Helper()
	if err == nil {
		return false
	}
	if k := errs.KindOf(err); k != errs.Damaged && k != errs.TooNew {
		t.Errorf("error of kind %q: %v", k, err)
	}
	return true
}

// seeds adds an input, and broken ones.
func seeds(f *testing.F, all ...[]byte) {
	for _, b := range all {
		f.Add(b)
		f.Add(b[:len(b)/2])
		f.Add(append(bytes.Clone(b), 0))
		for _, i := range []int{0, len(b) / 3, len(b) - 1} {
			if i >= 0 && i < len(b) {
				c := bytes.Clone(b)
				c[i] ^= 0x81
				f.Add(c)
			}
		}
	}
	f.Add([]byte{})
	f.Add(bytes.Repeat([]byte{0xff}, 64))
	f.Add(make([]byte, 64))
}

// contentOf is what is sealed in an object of testdata.
func contentOf(f *testing.F, r *Repo, m *memory, t objectType) (all [][]byte) {
	for _, key := range m.keys() {
		if o := m.data(key); objectType(o[4]) == t {
			opened, err := r.unseal(f.Context(), t, key, o, maxManifestBytes)
			must(f, err)
			all = append(all, opened)
		}
	}
	if len(all) == 0 {
		f.Fatalf("no objects of type %q", t)
	}
	return all
}

func FuzzManifest(f *testing.F) {
	_, r, m := golden(f)
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
		if err != nil || !sameJSON(m, m2) || !reflect.DeepEqual([]any{m.Map, m.Stream, m.Uses},
			[]any{m2.Map, m2.Stream, m2.Uses}) {
			t.Errorf("read as %+v, then as %+v, %v", m, m2, err)
		}
	})
}

// sameJSON: equal but for how times are kept in memory.
func sameJSON(a, b any) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return bytes.Equal(x, y) && (errX == nil) == (errY == nil)
}

// fuzzJSON is for what is JSON all through.
func fuzzJSON[T any](f *testing.F, kind objectType, decode func([]byte) (T, error)) {
	_, r, m := golden(f)
	fuzzContents(f, contentOf(f, r, m, kind), decode)
}

// fuzzContents is fuzzJSON with these to begin with.
func fuzzContents[T any](f *testing.F, contents [][]byte, decode func([]byte) (T, error)) {
	seeds(f, contents...)
	for _, s := range []string{"{}", "null", "[]", `{"name":"x","next":1}`, `{"id":"00000000000000000000000000"}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := decode(b)
		if refused(t, err) {
			return
		}
		again, err := encodeJSON(v)
		if err != nil {
			return // a time that has no text
		}
		v2, err := decode(again)
		if err != nil || !sameJSON(v, v2) {
			t.Errorf("read as %+v, then as %+v, %v", v, v2, err)
		}
	})
}

func FuzzHead(f *testing.F) { fuzzJSON(f, typeHead, decodeHead) }
func FuzzPoints(f *testing.F) {
	_, r, m := frozenPoints(f)
	fuzzContents(f, contentOf(f, r, m, typePoints), decodePoints)
}

func FuzzPagedHead(f *testing.F) {
	_, r, m := frozenPoints(f)
	fuzzContents(f, contentOf(f, r, m, typeHead), decodeHead)
}

func FuzzSession(f *testing.F) { fuzzJSON(f, typeSession, decodeSession) }
func FuzzSeen(f *testing.F)    { fuzzJSON(f, typeSeen, decodeSeen) }

// Config, as anybody can write it.
func FuzzConfig(f *testing.F) {
	_, _, m := golden(f)
	raw := m.data(configKey)
	seeds(f, raw)
	c, err := decodeConfig(raw)
	must(f, err)
	ringKey, err := unwrap(c.slots[0].wrapped, SlotRecipient, []Secret{identity(f, testIdentity)}, keySize)
	must(f, err)
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := decodeConfig(b)
		if refused(t, err) {
			return
		}
		if k, err := c.openSealed(bytes.Clone(ringKey)); err == nil && !bytes.Equal(b, raw) {
			t.Errorf("%x opens as %+v", b, k)
		} else if err != nil {
			refused(t, err)
		}
	})
}

// What is sealed in config, as somebody who once had the keys can write it.
func FuzzSealedConfig(f *testing.F) {
	_, r, m := golden(f)
	c, err := decodeConfig(m.data(configKey))
	must(f, err)
	plain, err := newAEAD(derive(r.ring.ringKey, c.salt, infoConfig, keySize)).Open(nil, zeroNonce, c.sealed, c.aad)
	must(f, err)
	seeds(f, plain)
	f.Fuzz(func(t *testing.T, b []byte) {
		var private sealedConfig
		if json.Unmarshal(b, &private) != nil {
			return
		}
		k := &keyring{id: c.id, serial: c.serial, ringKey: make([]byte, keySize)}
		if refused(t, k.loadSealed(c, private)) {
			return
		}
		if k.keys[0].id != r.ring.keys[0].id || len(k.slots) != len(c.slots) {
			t.Errorf("opens as %+v", k)
		}
	})
}

// A slot: an age file.
func FuzzSlot(f *testing.F) {
	_, r, m := golden(f)
	c, err := decodeConfig(m.data(configKey))
	must(f, err)
	want := bytes.Clone(r.ring.ringKey)
	var valid [][]byte
	for _, s := range c.slots {
		valid = append(valid, s.wrapped)
	}
	seeds(f, valid...)
	secrets := []Secret{identity(f, testIdentity)}
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := unwrap(b, SlotRecipient, secrets, keySize)
		if err != nil {
			refused(t, err)
		} else if got != nil && !bytes.Equal(got, want) {
			// Somebody can wrap any key for a public recipient: it then opens nothing.
			if _, err := c.openSealed(got); err == nil {
				t.Errorf("%x opens config", b)
			}
		}
	})
}

// A segment: header, frames, index, footer.
func FuzzSegment(f *testing.F) {
	g, _, m := golden(f)
	r := goldenRepo(f, m)
	s := g.segments[1]
	whole := m.data(s.key())
	seeds(f, whole, m.data(g.segments[0].key()))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := parseHeader(b, typeSegment); err != nil {
			refused(t, err)
		}
		if _, err := r.checkSegment(t.Context(), s, bytes.Clone(b)); err == nil && !bytes.Equal(b, whole) {
			t.Errorf("%x passes", b)
		} else if err != nil {
			refused(t, err)
		}
	})
}

// The end of a segment and its index, opened: as somebody who has the keys can write
// them.
func FuzzSegmentIndex(f *testing.F) {
	g, r, m := golden(f)
	for _, s := range g.segments {
		b := m.data(s.key())
		h, err := parseHeader(b, typeSegment)
		must(f, err)
		aead, err := r.cipherFor(f.Context(), h, infoSegment)
		must(f, err)
		at, length, err := parseFooter(b[len(b)-footerSize:], len(b))
		must(f, err)
		index, err := aead.Open(nil, indexNonce, b[at:at+length],
			frameAAD(r.id, s, uint32((length-tagSize)/entrySize), 0, indexCodec))
		must(f, err)
		f.Add(index, b[len(b)-footerSize:], at, len(b))
		f.Add(index[:len(index)-1], b[len(b)-footerSize-1:], at+1, len(b)+1)
	}
	f.Add(bytes.Repeat([]byte{0xff}, 18), bytes.Repeat([]byte{0xff}, footerSize), 1<<31, 1<<31)
	f.Fuzz(func(t *testing.T, index, footer []byte, end, size int) {
		if size < 0 || size > MaxSegment {
			return // is checked before
		}
		if at, length, err := parseFooter(footer, size); err != nil {
			refused(t, err)
		} else if at < headerSize || length <= 0 || at+length > size {
			t.Errorf("[%d, +%d) of %d", at, length, size)
		}
		if len(index)%entrySize != 0 || len(index)/entrySize > maxFrames {
			return // so is this
		}
		frames, err := parseIndex(index, Segment{}, end)
		if refused(t, err) {
			return
		}
		next := uint32(headerSize)
		for _, f := range frames {
			if f.Offset != next || f.check(FrameBytes) != nil {
				t.Errorf("%+v", f)
			}
			next += f.Stored
		}
	})
}

// The content of frames and objects, once it is decrypted.
func FuzzContent(f *testing.F) {
	text, err := os.ReadFile(goldenDir + "/text.zst")
	must(f, err)
	f.Add(text, uint32(4*BlockBytes))
	f.Add(text, uint32(4*BlockBytes-1))
	f.Add(text, uint32(1<<24))
	f.Add(bytes.Repeat(text, 3), uint32(12*BlockBytes))
	f.Add([]byte{}, uint32(0))
	f.Fuzz(func(t *testing.T, b []byte, size uint32) {
		if size > FrameBytes {
			return // is checked before
		}
		for _, codec := range []Codec{Raw, Zstd, 2, indexCodec} {
			content, err := unpack(codec, b, size)
			if refused(t, err) {
				continue
			}
			if len(content) != int(size) || cap(content) > max(int(size), cap(b)) {
				t.Errorf("%d bytes, room for %d, of %d", len(content), cap(content), size)
			}
		}
		plain := append([]byte{byte(Zstd), 0, 0, 0, 0}, b...)
		binary.LittleEndian.PutUint32(plain[1:], size)
		if content, err := openContent(plain, BlockBytes); !refused(t, err) && len(content) > BlockBytes {
			t.Errorf("%d bytes", len(content))
		}
	})
}

// Keys of objects: what is read as one is written the same.
func FuzzKeys(f *testing.F) {
	f.Add("9rq1vkvam1ilvppl8prd0e2pvs/258")
	f.Add("9rq1vkvam1ilvppl8prd0e2pvs/00")
	f.Add("9rq1vkvam1ilvppl8prd0e2pvt")
	f.Add("VVVVVVVVVVVVVVVVVVVVVVVVVV/4294967296")
	f.Fuzz(func(t *testing.T, text string) {
		if s, ok := parseSegment(text); ok && s.String() != text {
			t.Errorf("%q is read as %q", text, s)
		}
		if id, err := ParseID(text); err == nil && id.String() != text {
			t.Errorf("%q is read as %q", text, id)
		}
	})
}
