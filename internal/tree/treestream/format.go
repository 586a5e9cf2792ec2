// Package treestream encodes a tree of files, or its difference to another tree, in a stream that does not depend on
// a filesystem. [Send] and [SendDiff] write a stream, and [Apply] builds the tree. FORMAT.md describes the format.
//
// A stream keeps what internal/tree/treecopy keeps, which reads and sets all attributes. internal/tree/treediff
// finds the differences.
//
// Others may have tampered with a stream, so nothing in it leads outside the tree, and the memory for reading it
// is bounded. A tree is complete only when Apply returns without an error. The caller removes the tree of a truncated
// stream.
package treestream

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"math"
	"strings"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/tree/treecopy"
)

// Magic is the beginning of every stream.
const Magic = "pando tree\r\n\x00"

// version of the format that this code writes.
const version = 1

// flagDiff in the header says that the stream is the difference to another tree.
const flagDiff = 1

const headerBytes = len(Magic) + 2

// Limits of a stream, which bound the memory that a reader needs.
const (
	maxBody   = 1 << 20   // bytes of a record
	maxPath   = 256 << 10 // bytes of a path
	maxName   = 255       // bytes of one component of a path
	maxTarget = 4096      // bytes of the target of a symbolic link
	maxData   = 256 << 10 // bytes of content in one record
	maxXattrs = 64 << 20  // bytes of all extended attributes of a file
	maxSize   = 1 << 62   // bytes of a file
	readBytes = 128 << 10 // size of the read buffer
	maxHeld   = 256       // number of protected files with several names that a difference changes
)

// kind of a record.
type kind byte

const (
	kindDir       kind = 1
	kindFile      kind = 2
	kindSymlink   kind = 3
	kindNode      kind = 4
	kindLink      kind = 5
	kindRemove    kind = 6
	kindOut       kind = 7
	kindIn        kind = 8
	kindChange    kind = 9
	kindData      kind = 10
	kindZero      kind = 11
	kindXattr     kind = 12
	kindAttrs     kind = 13
	kindFlags     kind = 14
	kindUnprotect kind = 15
	kindEnd       kind = 255
)

// record is one step of building a tree. Its kind determines which fields are used.
type record struct {
	kind   kind
	path   string
	typ    uint32 // S_IFMT
	target string // for a link: a path in the tree; for a symbolic link: any text; for an attribute: its name
	slot   uint64
	rdev   uint64
	before int64 // old size of a changed file
	size   int64 // of a file or a range
	off    int64
	data   []byte // valid until the next record
	attrs  treecopy.Attributes
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// encoder writes records.
type encoder struct {
	w       io.Writer
	crc     uint32
	records uint64
	last    string // path of the previous record
	body    []byte
	head    []byte
}

func newEncoder(w io.Writer, diff bool) (*encoder, error) {
	e := &encoder{w: w}
	head := append([]byte(Magic), version, 0)
	if diff {
		head[len(head)-1] = flagDiff
	}
	return e, e.writeBytes(head)
}

func (e *encoder) writeBytes(b []byte) error {
	e.crc = crc32.Update(e.crc, castagnoli, b)
	_, err := e.w.Write(b)
	return err
}

func (e *encoder) uint(v uint64)   { e.body = binary.AppendUvarint(e.body, v) }
func (e *encoder) text(s string)   { e.uint(uint64(len(s))); e.body = append(e.body, s...) }
func (e *encoder) typ(mode uint32) { e.uint(uint64(mode & unix.S_IFMT >> 12)) }

// path writes a path as the length of the prefix that it shares with the path of the previous record, and the rest.
func (e *encoder) path(p string) {
	n := 0
	for n < len(p) && n < len(e.last) && p[n] == e.last[n] {
		n++
	}
	e.uint(uint64(n))
	e.text(p[n:])
}

func (e *encoder) time(t unix.Timespec) {
	e.body = binary.AppendVarint(e.body, t.Sec)
	e.uint(uint64(t.Nsec))
}

func (e *encoder) hints(flags uint32, h treecopy.Hints) {
	for _, v := range []uint32{flags, h.XFlags, h.ExtentSize, h.CowExtentSize} {
		e.uint(uint64(v))
	}
}

// writeRecord writes one record.
func (e *encoder) writeRecord(r record) error {
	if len(r.path) > maxPath {
		return errs.New(errs.Unsupported, opSend, quote(r.path),
			"the path has %d bytes, but at most %d can be sent", len(r.path), maxPath)
	}

	e.body = e.body[:0]
	switch r.kind {
	case kindData, kindZero, kindXattr:
	default:
		e.path(r.path)
		e.last = r.path
	}

	switch r.kind {
	case kindFile:
		e.uint(uint64(r.size))
		e.hints(r.attrs.Flags, r.attrs.Hints)
	case kindSymlink:
		e.text(r.target)
	case kindNode:
		e.typ(r.typ)
		e.uint(uint64(unix.Major(r.rdev)))
		e.uint(uint64(unix.Minor(r.rdev)))
	case kindLink:
		e.typ(r.typ)
		e.path(r.target)
	case kindRemove:
		e.typ(r.typ)
	case kindOut, kindIn:
		e.typ(r.typ)
		e.uint(r.slot)
	case kindChange:
		e.uint(uint64(r.before))
		e.uint(uint64(r.size))
	case kindData:
		e.uint(uint64(r.off))
		e.body = append(e.body, r.data...)
	case kindZero:
		e.uint(uint64(r.off))
		e.uint(uint64(r.size))
	case kindXattr:
		e.text(r.target)
		e.body = append(e.body, r.data...)
	case kindAttrs, kindFlags:
		e.attributes(r.kind, &r.attrs)
	}

	return e.finish(r.kind)
}

func (e *encoder) attributes(k kind, a *treecopy.Attributes) {
	e.uint(uint64(a.Mode))
	if k == kindAttrs {
		e.uint(uint64(a.UID))
		e.uint(uint64(a.GID))
		e.time(a.Atime)
		e.time(a.Mtime)
	}
	e.hints(a.Flags, a.Hints)
	e.uint(uint64(a.Project))
}

// finish writes the head of a record and its body.
func (e *encoder) finish(k kind) error {
	e.head = binary.AppendUvarint(append(e.head[:0], byte(k)), uint64(len(e.body)))
	e.records++
	if err := e.writeBytes(e.head); err != nil {
		return err
	}
	return e.writeBytes(e.body)
}

// end writes the last record.
func (e *encoder) end() error {
	crc := e.crc
	e.body = e.body[:0]
	e.uint(e.records)
	e.body = binary.LittleEndian.AppendUint32(e.body, crc)
	return e.finish(kindEnd)
}

// IsEmpty reports whether b is a complete stream of the difference between two equal trees.
func IsEmpty(b []byte) bool {
	if len(b) > headerBytes+32 {
		return false
	}
	d, err := newDecoder(bytes.NewReader(b))
	if err != nil || !d.diff {
		return false
	}
	r, err := d.readRecord()
	return err == nil && r.kind == kindEnd
}

// decoder reads and checks records.
type decoder struct {
	r       *bufio.Reader
	crc     uint32
	records uint64
	last    string
	buf     []byte // body of the record
	b       []byte // the rest of the body
	diff    bool
	err     error // the first error in the body
}

// damaged returns the error for a violation of the format.
func damaged(format string, args ...any) error {
	return errs.New(errs.Damaged, "", "", "damaged tree stream: "+format, args...)
}

// newDecoder returns a decoder of the stream r, whose header it reads.
func newDecoder(r io.Reader) (*decoder, error) {
	d := &decoder{r: bufio.NewReaderSize(r, readBytes)}
	head := make([]byte, headerBytes)
	if err := d.full(head); err != nil {
		return nil, err
	}

	if string(head[:len(Magic)]) != Magic {
		return nil, damaged("it does not begin as one")
	}

	v, flags := head[len(Magic)], head[len(Magic)+1]
	if v != version || flags&^flagDiff != 0 {
		return nil, errs.New(errs.TooNew, "", "",
			"the tree stream has version %d and flags %#x, but this pando supports version %d", v, flags, version).
			WithHint("upgrade pando")
	}

	d.diff = flags&flagDiff != 0
	return d, nil
}

// full reads all of b.
func (d *decoder) full(b []byte) error {
	_, err := io.ReadFull(d.r, b)
	if isEOF(err) {
		return damaged("it is cut short")
	}
	d.crc = crc32.Update(d.crc, castagnoli, b)
	return err
}

// isEOF reports whether a stream has ended. An error of Pando's is more specific, and does not count.
func isEOF(err error) bool {
	return errs.IsAny(err, io.EOF, io.ErrUnexpectedEOF) && errs.KindOf(err) == errs.Internal
}

// readRecord reads the next record. The last one is of kind kindEnd.
func (d *decoder) readRecord() (record, error) {
	// Read its bytes.
	crc := d.crc
	var k [1]byte
	if err := d.full(k[:]); err != nil {
		return record{}, err
	}

	n, err := d.length()
	if err != nil {
		return record{}, err
	}
	if cap(d.buf) < n {
		d.buf = make([]byte, max(n, 4096))
	}

	d.b = d.buf[:n]
	if err := d.full(d.b); err != nil {
		return record{}, err
	}

	// Decode them.
	r := record{kind: kind(k[0])}
	if r.kind == kindEnd {
		return r, d.end(crc)
	}

	d.records++
	d.body(&r)
	if d.err == nil && len(d.b) > 0 {
		d.fail("a record of kind %d is %d bytes too long", r.kind, len(d.b))
	}

	return r, d.err
}

// length reads the length of a record's body.
func (d *decoder) length() (int, error) {
	n := uint64(0)
	for shift := 0; ; shift += 7 {
		var b [1]byte
		if err := d.full(b[:]); err != nil {
			return 0, err
		}
		n |= uint64(b[0]&0x7f) << shift
		if n > maxBody || shift > 21 {
			return 0, damaged("a record of %d bytes", n)
		}
		if b[0] < 0x80 {
			return int(n), nil
		}
	}
}

// end checks the last record, which has the number and the checksum of all records before it.
func (d *decoder) end(crc uint32) error {
	n := d.uint(math.MaxUint64)
	if d.err != nil {
		return d.err
	}
	if len(d.b) != 4 || n != d.records || binary.LittleEndian.Uint32(d.b) != crc {
		return damaged("its end does not fit the rest")
	}

	if _, err := d.r.ReadByte(); err == nil {
		return damaged("something follows its end")
	} else if !isEOF(err) {
		return err
	}

	return nil
}

// body decodes the body of a record. It and the methods below record the first error in d.err.
func (d *decoder) body(r *record) {
	switch r.kind {
	case kindData, kindZero, kindXattr:
	default:
		r.path = d.path()
		if r.path == "" && r.kind != kindAttrs && r.kind != kindFlags && r.kind != kindUnprotect {
			d.fail("the root cannot be made, removed or replaced")
		}
		d.last = r.path
	}

	switch r.kind {
	case kindDir, kindUnprotect:
	case kindFile:
		r.size = int64(d.uint(maxSize))
		r.attrs.Flags, r.attrs.Hints = d.hints()
	case kindSymlink:
		r.target = d.text(maxTarget)
		if r.target == "" || strings.IndexByte(r.target, 0) >= 0 {
			d.fail("a symbolic link to %q", r.target)
		}
	case kindNode:
		r.typ = d.typ(unix.S_IFCHR, unix.S_IFBLK, unix.S_IFIFO, unix.S_IFSOCK)
		major, minor := d.uint(1<<12-1), d.uint(1<<20-1)
		r.rdev = unix.Mkdev(uint32(major), uint32(minor))
	case kindLink:
		r.typ = d.typ(notDirs...)
		if r.target = d.path(); r.target == "" && d.err == nil {
			d.fail("a hard link to the root")
		}
	case kindRemove:
		r.typ = d.typ(append(notDirs, unix.S_IFDIR)...)
	case kindOut, kindIn:
		r.typ = d.typ(append(notDirs, unix.S_IFDIR)...)
		r.slot = d.uint(math.MaxUint32)
	case kindChange:
		r.before, r.size = int64(d.uint(maxSize)), int64(d.uint(maxSize))
	case kindData:
		r.off = int64(d.uint(maxSize))
		if r.data, d.b = d.b, nil; len(r.data) > maxData || len(r.data) == 0 {
			d.fail("%d bytes of content in one piece", len(r.data))
		}
	case kindZero:
		r.off, r.size = int64(d.uint(maxSize)), int64(d.uint(maxSize))
	case kindXattr:
		r.target = d.text(maxName)
		if r.target == "" || strings.IndexByte(r.target, 0) >= 0 {
			d.fail("an attribute called %q", r.target)
		}
		r.data, d.b = d.b, nil
	case kindAttrs, kindFlags:
		d.attributes(r)
	default:
		d.fail("a record of unknown kind %d", r.kind)
	}
}

var notDirs = []uint32{unix.S_IFREG, unix.S_IFLNK, unix.S_IFCHR, unix.S_IFBLK, unix.S_IFIFO, unix.S_IFSOCK}

func (d *decoder) attributes(r *record) {
	a := &r.attrs
	a.Mode = uint32(d.uint(0o177777))
	r.typ = a.Mode & unix.S_IFMT
	if r.kind == kindAttrs {
		a.UID, a.GID = uint32(d.uint(math.MaxUint32-1)), uint32(d.uint(math.MaxUint32-1))
		a.Atime, a.Mtime = d.time(), d.time()
	}
	a.Flags, a.Hints = d.hints()
	a.Project = uint32(d.uint(math.MaxUint32 - 1))
}

func (d *decoder) hints() (flags uint32, h treecopy.Hints) {
	n := func() uint32 { return uint32(d.uint(math.MaxUint32)) }
	return n(), treecopy.Hints{XFlags: n(), ExtentSize: n(), CowExtentSize: n()}
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = damaged(format, args...)
	}
}

func (d *decoder) uint(most uint64) uint64 {
	if d.err != nil {
		return 0
	}
	v, n := binary.Uvarint(d.b)
	if n <= 0 || v > most {
		d.fail("a number that cannot be")
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) time() unix.Timespec {
	if d.err != nil {
		return unix.Timespec{}
	}
	sec, n := binary.Varint(d.b)
	if n <= 0 {
		d.fail("a number that cannot be")
		return unix.Timespec{}
	}
	d.b = d.b[n:]
	return unix.Timespec{Sec: sec, Nsec: int64(d.uint(999_999_999))}
}

func (d *decoder) text(most uint64) string {
	n := d.uint(most)
	if d.err != nil || n > uint64(len(d.b)) {
		d.fail("a text that is cut short")
		return ""
	}
	s := string(d.b[:n])
	d.b = d.b[n:]
	return s
}

func (d *decoder) typ(types ...uint32) uint32 {
	t := uint32(d.uint(15)) << 12
	for _, x := range types {
		if t == x {
			return t
		}
	}
	d.fail("a file of type %#o", t)
	return 0
}

// path reads a path and refuses one that could lead out of the tree.
func (d *decoder) path() string {
	n := d.uint(maxPath)
	if d.err == nil && n > uint64(len(d.last)) {
		d.fail("a path that goes on from nothing")
	}

	rest := d.text(maxPath)
	if d.err != nil {
		return ""
	}

	p := d.last[:n] + rest
	if err := checkPath(p); err != nil {
		d.fail("%v", err)
		return ""
	}

	return p
}

func checkPath(p string) error {
	if p == "" {
		return nil
	}
	if len(p) > maxPath {
		return errors.New("a path that is too long")
	}

	for name := range strings.SplitSeq(p, "/") {
		switch {
		case name == "" || name == "." || name == "..":
			return errors.New("a path with the component " + quote(name))
		case len(name) > maxName:
			return errors.New("a path with a component that is too long")
		case strings.IndexByte(name, 0) >= 0:
			return errors.New("a path with a zero byte")
		}
	}

	return nil
}
