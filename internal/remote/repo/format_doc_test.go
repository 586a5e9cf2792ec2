package repo_test

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"filippo.io/age"
	"github.com/klauspost/compress/zstd"

	"pando/internal/remote/repo"
)

// TestFormatIsDocumented: FORMAT.md has every field of JSON that is written.
func TestFormatIsDocumented(t *testing.T) {
	b, err := os.ReadFile("../../../FORMAT.md")
	if err != nil {
		t.Fatal(err)
	}
	_, doc, found := strings.Cut(string(b), "## The repository\n")
	if doc, _, _ = strings.Cut(doc, "\n## "); !found {
		t.Fatal("no section of the repository")
	}
	fields := 0
	var check func(prefix string, typ reflect.Type)
	check = func(prefix string, typ reflect.Type) {
		for i := range typ.NumField() {
			if typ.Field(i).Anonymous {
				check(prefix, typ.Field(i).Type)
				continue
			}
			name, _, _ := strings.Cut(typ.Field(i).Tag.Get("json"), ",")
			if name == "-" || !typ.Field(i).IsExported() {
				continue
			}
			sub := typ.Field(i).Type
			if sub.Kind() == reflect.Slice || sub.Kind() == reflect.Pointer {
				sub = sub.Elem()
			}
			if sub.Kind() == reflect.Struct && strings.HasSuffix(sub.PkgPath(), "internal/remote/repo") {
				check(prefix+name+".", sub)
				continue
			}
			if fields++; name == "" || !strings.Contains(doc, "`"+prefix+name+"`") {
				t.Errorf("FORMAT.md does not tell of %q of %s", prefix+name, typ)
			}
		}
	}
	for _, v := range append(repo.Documented, repo.Head{}, repo.Manifest{}, repo.Session{}, repo.Seen{}) {
		check("", reflect.TypeOf(v))
	}
	if fields < 50 {
		t.Errorf("only %d fields", fields)
	}
	for _, n := range []int{repo.FrameBytes >> 10, repo.SegmentBytes >> 20, repo.MaxSegment >> 20, repo.BlockBytes,
		repo.MaxNodeBytes >> 10, repo.LeafPieces} {
		text := fmt.Sprint(n)
		if n >= 1000 && n < 1_000_000 {
			text = fmt.Sprintf("%d,%03d", n/1000, n%1000)
		}
		if !strings.Contains(doc, text) {
			t.Errorf("FORMAT.md does not tell of the limit %s", text)
		}
	}
}

// What follows reads the frozen repository by FORMAT.md alone, with nothing of this
// package: what is written there suffices.

type foreign struct {
	t          *testing.T
	dir        string
	repository []byte
	keys       map[string][]byte // by ID
	first      []byte
	partial    int // frames of which a part was dropped
}

func (f *foreign) get(key string) []byte {
	f.t.Helper()
	b, err := os.ReadFile(f.dir + "/" + key)
	f.must(err)
	return b
}

func (f *foreign) must(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

func (f *foreign) hkdf(key, salt []byte, info string) []byte {
	out, err := hkdf.Key(sha256.New, key, salt, info, 32)
	f.must(err)
	return out
}

func (f *foreign) expand(key []byte, info string, n int) []byte {
	out, err := hkdf.Expand(sha256.New, key, info, n)
	f.must(err)
	return out
}

func (f *foreign) decrypt(key, nonce, sealed, aad []byte) []byte {
	f.t.Helper()
	block, err := aes.NewCipher(key)
	f.must(err)
	gcm, err := cipher.NewGCM(block)
	f.must(err)
	plain, err := gcm.Open(nil, nonce, sealed, aad)
	f.must(err)
	return plain
}

func (f *foreign) unpack(codec byte, b []byte, size uint32) []byte {
	f.t.Helper()
	if codec == 1 {
		d, err := zstd.NewReader(nil)
		f.must(err)
		defer d.Close()
		b, err = d.DecodeAll(b, nil)
		f.must(err)
	}
	if len(b) != int(size) {
		f.t.Fatalf("%d bytes, not %d", len(b), size)
	}
	return b
}

var text = base32.HexEncoding.WithPadding(base32.NoPadding)

func id(b []byte) string { return strings.ToLower(text.EncodeToString(b)) }

func (f *foreign) openConfig(who age.Identity, kind byte) {
	b := f.get("config")
	f.repository = b[8:24]
	at := 36
	var ringKey []byte
	for range binary.LittleEndian.Uint16(b[32:]) {
		size := int(binary.LittleEndian.Uint16(b[at+18:]))
		if b[at+16] == kind {
			r, err := age.Decrypt(bytes.NewReader(b[at+20:at+20+size]), who)
			f.must(err)
			ringKey, err = io.ReadAll(r)
			f.must(err)
		}
		at += 20 + size
	}
	plain := f.decrypt(f.hkdf(ringKey, b[at:at+32], "pando config v1"), make([]byte, 12), b[at+32:], b[:at+32])
	var ring struct {
		Keys []struct {
			Key []byte `json:"key"`
		} `json:"keys"`
	}
	f.must(json.Unmarshal(plain, &ring))
	f.keys = map[string][]byte{}
	for _, k := range ring.Keys {
		f.keys[string(f.expand(k.Key, "pando key id v1", 16))] = k.Key
	}
	f.first = ring.Keys[0].Key
	if !bytes.Equal(f.expand(f.first, "pando repository id v1", 16), f.repository) {
		f.t.Error("the ID is not that of the first key")
	}
}

// object is the content of a metadata object.
func (f *foreign) object(key string) []byte {
	f.t.Helper()
	b := f.get(key)
	aad := slices.Concat(b[:56], f.repository, []byte(key))
	plain := f.decrypt(f.hkdf(f.keys[string(b[8:24])], b[24:56], "pando metadata v1"), make([]byte, 12), b[56:], aad)
	return f.unpack(plain[0], plain[5:], binary.LittleEndian.Uint32(plain[1:]))
}

type place struct {
	session               []byte
	n                     uint32
	index, offset, stored uint32
	plain                 uint32
	codec                 byte
}

func (f *foreign) frame(p place) []byte {
	f.t.Helper()
	name := p.segment()
	if _, err := os.Stat(f.dir + "/" + name); err != nil {
		return f.movedFrame(p)
	}
	b := f.get(name)
	key := f.hkdf(f.keys[string(b[8:24])], b[24:56], "pando segment v1")
	return f.unpack(p.codec, f.decrypt(key, p.nonce(p.index), b[p.offset:p.offset+p.stored], f.aad(p)), p.plain)
}

// segment is the key of the segment.
func (p place) segment() string { return fmt.Sprintf("segments/%s/%d", id(p.session), p.n) }

func (place) nonce(n uint32) []byte { return binary.BigEndian.AppendUint64(make([]byte, 4), uint64(n)) }

// aad is what a frame is bound to.
func (f *foreign) aad(p place) []byte {
	aad := slices.Concat(f.repository, p.session)
	for _, n := range []uint32{p.n, p.index, p.plain} {
		aad = binary.LittleEndian.AppendUint32(aad, n)
	}
	return append(aad, p.codec)
}

// movedFrame reads a frame from the greatest pack that has its segment.
func (f *foreign) movedFrame(p place) []byte {
	f.t.Helper()
	best, generation := "", int64(0)
	tables, err := filepath.Glob(f.dir + "/moved/*/*")
	f.must(err)
	for _, t := range tables {
		key := strings.TrimPrefix(t, f.dir+"/")
		n := &numbers{f.object(key)}
		_, number, _ := strings.Cut(strings.TrimPrefix(key, "moved/"), "/")
		first, err := strconv.ParseInt(number, 10, 64)
		f.must(err)
		next := 16 * first
		for range n.u() {
			next += n.u()
			g := n.u()
			n.u() // bytes
			segments := n.segments()
			for _, s := range segments {
				n.u()
				if bytes.Equal(s.session, p.session) && s.n == p.n && g > generation {
					best, generation = fmt.Sprintf("packs/%s/%d", filepath.Base(filepath.Dir(t)), next), g
				}
			}
			next++
		}
	}
	content, blocks := f.packedFrame(best, p)
	for i, b := range blocks {
		if b != 0xff {
			f.partial++
			for at := range 8 {
				if from := (8*i + at) * 4096; b>>at&1 == 0 && from < len(content) {
					clear(content[from:min(from+4096, len(content))])
				}
			}
		}
	}
	return content
}

// packedFrame finds a frame in a pack, and says which of its blocks are there.
func (f *foreign) packedFrame(key string, p place) (content, blocks []byte) {
	f.t.Helper()
	b := f.get(key)
	end := len(b)
	if string(b[end-8:]) != "PNDOPEND" {
		f.t.Fatal("no pack")
	}
	at, length := binary.LittleEndian.Uint32(b[end-16:]), binary.LittleEndian.Uint32(b[end-12:])
	packKey := f.hkdf(f.keys[string(b[8:24])], b[24:56], "pando pack v1")
	nonce := append([]byte{1}, make([]byte, 11)...)
	plain := f.decrypt(packKey, nonce, b[at:at+length], slices.Concat(b[:56], f.repository, []byte(key)))
	n := &numbers{f.unpack(plain[0], plain[5:], binary.LittleEndian.Uint32(plain[1:]))}
	offset, number := uint32(56), uint32(0)
	n.u() // generation
	for range n.u() {
		s := place{session: n.take(16), n: uint32(n.u())}
		segmentKey := f.hkdf(f.keys[string(n.take(16))], n.take(32), "pando segment v1")
		n.u() // bytes of the segment
		index, from := int64(0), int64(56)
		for range n.u() {
			index += n.u()
			from += n.u()
			x := s
			x.index, x.offset = uint32(index), uint32(from)
			n.length(&x)
			index, from = index+1, from+int64(x.stored)
			stored, codec, kept := x.stored, x.codec, x.plain
			blocks := bytes.Repeat([]byte{0xff}, 16)
			part := n.take(1)[0] == 1
			if part {
				blocks = n.take(16)
				kept = 0
				for i := range (x.plain + 4095) / 4096 {
					if blocks[i/8]>>(i%8)&1 == 1 {
						kept += min(4096, x.plain-i*4096)
					}
				}
				codec = n.take(1)[0]
				if stored = kept + 16; codec == 1 {
					stored -= uint32(n.u())
				}
			}
			if bytes.Equal(x.session, p.session) && x.n == p.n && x.index == p.index {
				sealed := b[offset : offset+stored]
				if !part {
					return f.unpack(x.codec, f.decrypt(segmentKey, p.nonce(x.index), sealed, f.aad(x)), x.plain), blocks
				}
				some := f.unpack(
					codec,
					f.decrypt(packKey, p.nonce(number), sealed, slices.Concat(f.aad(x), blocks, []byte{codec})),
					kept,
				)
				out := make([]byte, x.plain)
				for i := range (x.plain + 4095) / 4096 {
					if blocks[i/8]>>(i%8)&1 == 1 {
						k := copy(out[i*4096:min((i+1)*4096, x.plain)], some)
						some = some[k:]
					}
				}
				return out, blocks
			}
			offset, number = offset+stored, number+1
		}
	}
	f.t.Fatalf("%s has no frame %d", key, p.index)
	return nil, nil
}

// TestAnotherProgramCanReadPacks reads the partial frames of the frozen packs; whole ones are read with the volume.
func TestAnotherProgramCanReadPacks(t *testing.T) {
	who, err := age.ParseX25519Identity(repo.FrozenIdentity)
	if err != nil {
		t.Fatal(err)
	}
	f := &foreign{t: t, dir: "testdata/v1/packs"}
	f.openConfig(who, 1)
	session, n := repo.FrozenPartialSegment()
	for index, want := range repo.FrozenPartial() {
		got := f.movedFrame(place{session: session, n: n, index: index})
		for at := 0; at < len(want); at += 4096 {
			block := want[at:min(at+4096, len(want))]
			if at/4096%2 == 1 {
				block = make([]byte, len(block))
			}
			if !bytes.Equal(got[at:at+len(block)], block) {
				t.Fatalf("frame %d has another block at %d", index, at)
			}
		}
	}
	if f.partial == 0 {
		t.Error("no frame was partial")
	}
}

type numbers struct{ b []byte }

func (n *numbers) u() int64 {
	v, k := binary.Uvarint(n.b)
	n.b = n.b[k:]
	return int64(v)
}

func (n *numbers) s() int64 {
	v, k := binary.Varint(n.b)
	n.b = n.b[k:]
	return v
}

func (n *numbers) take(k int64) []byte {
	b := n.b[:k]
	n.b = n.b[k:]
	return b
}

// segments reads a list of segments: all that is known of a frame but itself.
func (n *numbers) segments() (all []place) {
	for range n.u() {
		session := n.take(16)
		next := int64(0)
		for range n.u() {
			next += n.u()
			all = append(all, place{session: session, n: uint32(next)})
			next++
		}
	}
	return all
}

func (n *numbers) length(p *place) {
	v := n.u()
	p.plain, p.codec = uint32(v>>1), byte(v&1)
	p.stored = p.plain + 16
	if p.codec == 1 {
		p.stored -= uint32(n.u())
	}
}

func (n *numbers) frames(segments []place) (all []place) {
	at, index, offset := int64(0), int64(0), int64(56)
	for range n.u() {
		if n.u() == 1 {
			at, index, offset = at+1, 0, 56
		}
		p := segments[at]
		index += n.u()
		offset += n.u()
		p.index, p.offset = uint32(index), uint32(offset)
		n.length(&p)
		all = append(all, p)
		index, offset = index+1, offset+int64(p.stored)
	}
	return all
}

type loose struct{ at, index, offset int64 }

func (n *numbers) loose(l *loose, segments []place) place {
	if d := n.s(); d != 0 {
		*l = loose{l.at + d, 0, 56}
	}
	p := segments[l.at]
	l.index += n.s()
	l.offset += n.s()
	p.index, p.offset = uint32(l.index), uint32(l.offset)
	n.length(&p)
	l.index, l.offset = l.index+1, l.offset+int64(p.stored)
	return p
}

func TestAnotherProgramCanReadIt(t *testing.T) {
	x25519, err := age.ParseX25519Identity(repo.FrozenIdentity)
	if err != nil {
		t.Fatal(err)
	}
	paper, err := age.NewScryptIdentity(repo.FrozenPassphrase)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		dir  string
		kind byte
		who  age.Identity
	}{
		{"testdata/v1/all", 1, x25519}, {"testdata/v1/all", 2, paper}, {"testdata/v1/packs", 1, x25519},
	} {
		f := &foreign{t: t, dir: c.dir}
		f.openConfig(c.who, c.kind)

		mac := hmac.New(sha256.New, f.expand(f.first, "pando names v1", 32))
		mac.Write([]byte("web"))
		var head struct {
			Name   string `json:"name"`
			Points []struct {
				Manifest string `json:"manifest"`
			} `json:"points"`
		}
		f.must(json.Unmarshal(f.object("heads/"+id(mac.Sum(nil)[:16])), &head))
		if head.Name != "web" || len(head.Points) != 2 {
			t.Fatalf("%+v", head)
		}

		want := repo.FrozenVolume()
		block := f.manifest(head.Points[0].Manifest)
		if block.size != want.Size || !reflect.DeepEqual(block.volume, want.Pieces) || len(block.stream) > 0 {
			t.Errorf("the volume is not what was written: %d bytes, %d pieces", block.size, len(block.volume))
		}
		if stream := f.manifest(head.Points[1].Manifest); !bytes.Equal(stream.stream, want.Stream) || len(stream.volume) > 0 {
			t.Error("the stream is not what was written")
		}
	}
}

// foreignManifest is what a manifest describes.
type foreignManifest struct {
	size       int64
	volume     map[int64][]byte // blocks by offset
	stream     []byte
	extensions map[string]string
	sizes      map[string]int64 // bytes of segments, by key
}

// manifest reads a manifest, and all that it describes.
func (f *foreign) manifest(id string) foreignManifest {
	f.t.Helper()
	out := foreignManifest{volume: map[int64][]byte{}, extensions: map[string]string{}, sizes: map[string]int64{}}
	n := &numbers{f.object("manifests/" + id)}
	var fields struct {
		Size int64 `json:"size"`
	}
	f.must(json.Unmarshal(n.take(n.u()), &fields))
	out.size = fields.Size
	segments := n.segments()
	for _, s := range segments {
		out.sizes[s.segment()] = n.u()
	}

	l := loose{0, 0, 56}
	if n.u() == 1 {
		root := n.loose(&l, segments)
		pieces, bytes := n.u(), n.u()
		level := int64(0)
		for 512<<10<<(5*level) < out.size {
			level++
		}
		if p, b := f.node(f.frame(root), level, 0, out.volume); p != pieces || b != bytes {
			f.t.Errorf("%d pieces of %d bytes, not %d of %d", p, b, pieces, bytes)
		}
	}
	for range n.u() {
		out.stream = append(out.stream, f.frame(n.loose(&l, segments))...)
	}
	for range n.u() {
		name := string(n.take(n.u()))
		if n.take(1)[0] != 0 {
			f.t.Error("an extension is critical")
		}
		out.extensions[name] = string(n.take(n.u()))
	}
	if len(n.b) != 0 {
		f.t.Error("bytes are left over")
	}
	return out
}

// sum is what tells contents apart.
func (f *foreign) sum(content []byte) []byte {
	block, err := aes.NewCipher(f.expand(f.first, "pando sums v1", 32))
	f.must(err)
	gcm, err := cipher.NewGCM(block)
	f.must(err)
	return gcm.Seal(nil, make([]byte, 12), nil, content)
}

// pieces reads what a leaf lists, and what is there.
func (n *numbers) pieces(f *foreign, at int64, volume map[int64][]byte) {
	f.t.Helper()
	frames := n.frames(n.segments())
	expect := int64(0)
	for range n.u() {
		gap := n.u()
		at += gap >> 1 * 4096
		size := n.u()
		expect += n.s()
		within := n.u()
		content := f.frame(frames[expect])[within : within+size]
		if gap&1 == 1 {
			if !bytes.Equal(f.sum(content), n.take(16)) {
				f.t.Errorf("the sum of the piece at %d is wrong", at)
			}
		}
		volume[at] = content
		at += size
		expect++
	}
}

// node reads a node of a map, and all below it. It returns how many pieces it found, and of how many
// bytes.
func (f *foreign) node(b []byte, level, index int64, volume map[int64][]byte) (pieces, bytes int64) {
	f.t.Helper()
	n := &numbers{b[3:]}
	if b[0] != 1 || int64(b[2]) != level || n.u() != index {
		f.t.Errorf("not node %d of level %d", index, level)
	}
	if b[1] == 0 {
		before := len(volume)
		n.pieces(f, index*(512<<10<<(5*level)), volume)
		for at, c := range volume {
			if at/(512<<10<<(5*level)) == index {
				bytes += int64(len(c))
			}
		}
		if len(n.b) != 0 {
			f.t.Error("bytes are left over")
		}
		return int64(len(volume) - before), bytes
	}
	segments := n.segments()
	there := binary.LittleEndian.Uint32(n.take(4))
	l := loose{0, 0, 56}
	for slot := range int64(32) {
		if there&(1<<slot) == 0 {
			continue
		}
		child := n.loose(&l, segments)
		wantPieces, wantBytes := n.u(), n.u()
		p, b := f.node(f.frame(child), level-1, index*32+slot, volume)
		if p != wantPieces || b != wantBytes {
			f.t.Errorf("%d pieces of %d bytes, not %d of %d", p, b, wantPieces, wantBytes)
		}
		pieces, bytes = pieces+p, bytes+b
	}
	if len(n.b) != 0 {
		f.t.Error("bytes are left over")
	}
	return pieces, bytes
}

func TestAnotherProgramCanReadMaps(t *testing.T) {
	who, err := age.ParseX25519Identity(repo.FrozenIdentity)
	if err != nil {
		t.Fatal(err)
	}
	f := &foreign{t: t, dir: "testdata/v1/map"}
	f.openConfig(who, 1)
	block, stream, want := repo.FrozenMap()

	got := f.manifest(block)
	for key, size := range got.sizes {
		if size != int64(len(f.get(key))) {
			t.Errorf("%s is said to have %d bytes", key, size)
		}
	}
	if got.size != want.Size || !reflect.DeepEqual(got.volume, want.Pieces) || len(got.stream) > 0 {
		t.Errorf("the volume is not what was written: %d bytes, %d pieces", got.size, len(got.volume))
	}
	if !reflect.DeepEqual(got.extensions, map[string]string{"labels": `{"team":"storage"}`, "x.empty": ""}) {
		t.Error(got.extensions)
	}
	if got := f.manifest(stream); string(got.stream) != string(want.Stream) || len(got.volume) > 0 {
		t.Error("the stream is not what was written")
	}
}

func TestAnotherProgramCanReadPagesOfPoints(t *testing.T) {
	who, err := age.ParseX25519Identity(repo.FrozenIdentity)
	if err != nil {
		t.Fatal(err)
	}
	f := &foreign{t: t, dir: "testdata/v1/points"}
	f.openConfig(who, 1)
	mac := hmac.New(sha256.New, f.expand(f.first, "pando names v1", 32))
	mac.Write([]byte("web"))
	key := "heads/" + id(mac.Sum(nil)[:16])

	type points []struct {
		Seq  uint64 `json:"seq"`
		Name string `json:"name"`
	}
	var head struct {
		Points points `json:"points"`
		Latest uint64 `json:"latest"`
		Pages  []struct {
			ID    string `json:"id"`
			Count int    `json:"count"`
		} `json:"pages"`
	}
	f.must(json.Unmarshal(f.object(key), &head))
	var names []string
	newest := ""
	read := func(all points) {
		for _, p := range all {
			if names = append(names, p.Name); p.Seq == head.Latest {
				newest = p.Name
			}
		}
	}
	for _, p := range head.Pages {
		var page struct {
			Head   string `json:"head"`
			Points points `json:"points"`
		}
		f.must(json.Unmarshal(f.object("points/"+p.ID), &page))
		if page.Head != "web" || len(page.Points) != p.Count {
			t.Errorf("%+v in a page of %d points", page, p.Count)
		}
		read(page.Points)
	}
	read(head.Points)
	if !slices.Equal(names, []string{"p1", "p2", "p3", "p4", "p5", "p6", "p7"}) || newest != "p3" {
		t.Errorf("points %q, the newest %q", names, newest)
	}
}
