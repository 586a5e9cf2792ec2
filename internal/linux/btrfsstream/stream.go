// Package btrfsstream reads send streams of btrfs subvolumes (BTRFS_IOC_SEND) and
// applies them. It supports versions 1 and 2 of the format.
//
// A stream is a list of commands, each with a checksum: "make a file", "write
// these bytes to it", "rename it". Others may have tampered with a stream, so the package
// trusts nothing in it: violations of the format are Damaged, no path leads out of the tree,
// only regular files are opened, and memory is bounded.
//
// btrfs-receive(8) searches the whole filesystem for the subvolume that a stream is based
// on; this package uses the one that the caller passes.
package btrfsstream

import (
	"bufio"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"strings"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

const (
	magic     = "btrfs-stream\x00"
	headBytes = 10 // of a command: length u32, type u16, checksum u32

	// maxBody is the size in bytes of the longest accepted command. The kernel's commands have at
	// most 64 KiB in version 1, and in version 2 at most 80 KiB and 128 KiB of compressed data.
	maxBody = 1 << 20

	// MaxVersion is the newest supported version.
	MaxVersion = 2

	readBuffer = 1 << 20
)

// Types of commands, from fs/btrfs/send.h.
const (
	cmdSubvol       = 1
	cmdSnapshot     = 2
	cmdMkfile       = 3
	cmdMkdir        = 4
	cmdMknod        = 5
	cmdMkfifo       = 6
	cmdMksock       = 7
	cmdSymlink      = 8
	cmdRename       = 9
	cmdLink         = 10
	cmdUnlink       = 11
	cmdRmdir        = 12
	cmdSetXattr     = 13
	cmdRemoveXattr  = 14
	cmdWrite        = 15
	cmdClone        = 16
	cmdTruncate     = 17
	cmdChmod        = 18
	cmdChown        = 19
	cmdUtimes       = 20
	cmdEnd          = 21
	cmdUpdateExtent = 22
	cmdFallocate    = 23 // from here on, version 2
	cmdFileattr     = 24
	cmdEncodedWrite = 25
)

var cmdNames = [...]string{"", "subvol", "snapshot", "mkfile", "mkdir", "mknod", "mkfifo", "mksock", "symlink",
	"rename", "link", "unlink",
	"rmdir", "set_xattr", "remove_xattr", "write", "clone", "truncate", "chmod", "chown", "utimes", "end", "update_extent",
	"fallocate", "fileattr", "encoded_write"}

// Attributes of commands.
const (
	attrUUID            = 1
	attrCtransid        = 2
	attrSize            = 4
	attrMode            = 5
	attrUID             = 6
	attrGID             = 7
	attrRdev            = 8
	attrMtime           = 10
	attrAtime           = 11
	attrXattrName       = 13
	attrXattrData       = 14
	attrPath            = 15
	attrPathTo          = 16
	attrPathLink        = 17
	attrFileOffset      = 18
	attrData            = 19
	attrCloneUUID       = 20
	attrCloneCtransid   = 21
	attrClonePath       = 22
	attrCloneOffset     = 23
	attrCloneLen        = 24
	attrFallocateMode   = 25
	attrFileattr        = 26
	attrUnencodedFile   = 27
	attrUnencodedLen    = 28
	attrUnencodedOffset = 29
	attrCompression     = 30
	attrEncryption      = 31
	attrs               = 32
)

// Reader reads a stream command by command.
type Reader struct {
	r       *bufio.Reader
	version uint32
	body    []byte
	cmd     command
}

// command is one command of a stream, valid until the next one is read.
type command struct {
	typ  uint16
	have uint32 // bit a is set if attribute a is present
	attr [attrs][]byte
	err  error // of the first requested attribute that was missing or invalid
}

// damaged returns the error for a violation of the format. The caller adds the name of the
// stream and the operation.
func damaged(format string, args ...any) error {
	return errs.New(errs.Damaged, "", "", "damaged stream: "+format, args...)
}

// unknown returns the error for a stream that a newer version of Pando may support.
func unknown(format string, args ...any) error {
	return errs.New(errs.Unsupported, "", "", format, args...).WithHint("upgrade pando")
}

// readError returns the error for a failed read. A premature end is Damaged.
func readError(err error) error {
	if errs.IsAny(err, io.EOF, io.ErrUnexpectedEOF) {
		if errs.KindOf(err) == errs.Internal { // an error of Pando's is more specific
			return damaged("unexpected end")
		}
	}
	return err
}

// NewReader returns a Reader of the stream r, whose header it reads. Damaged: r is not a send
// stream. Unsupported: its version is not supported. Errors of r.
func NewReader(r io.Reader) (*Reader, error) {
	s := &Reader{r: bufio.NewReaderSize(r, readBuffer)}
	var head [len(magic) + 4]byte
	if _, err := io.ReadFull(s.r, head[:]); err != nil {
		return nil, readError(err)
	}

	if string(head[:len(magic)]) != magic {
		return nil, damaged("not a btrfs send stream")
	}

	s.version = binary.LittleEndian.Uint32(head[len(magic):])
	if s.version < 1 || s.version > MaxVersion {
		return nil, unknown("the stream is of version %d, this Pando knows up to %d", s.version, MaxVersion)
	}

	return s, nil
}

// Drain reads the rest of the stream and checks its format.
func (s *Reader) Drain() error {
	for {
		c, err := s.next()
		if err != nil {
			return err
		}
		if c.typ == cmdEnd {
			return s.end()
		}
	}
}

// end checks that nothing follows the last command.
func (s *Reader) end() error {
	switch _, err := s.r.ReadByte(); {
	case err == nil:
		return damaged("unexpected data after the end")
	case !errors.Is(err, io.EOF):
		return err
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checksum computes CRC-32C like the kernel's crc32c(0, b), without inverting the value before
// and after.
func checksum(crc uint32, b []byte) uint32 { return ^crc32.Update(^crc, castagnoli, b) }

// next reads the next command. It is valid until the next call.
func (s *Reader) next() (*command, error) {
	typ, err := s.readBody()
	if err != nil {
		return nil, err
	}
	s.cmd = command{typ: typ}
	return &s.cmd, s.parseAttributes()
}

// readBody reads a command into s.body, checks its checksum and returns its type.
func (s *Reader) readBody() (uint16, error) {
	var head [headBytes]byte
	if _, err := io.ReadFull(s.r, head[:]); err != nil {
		return 0, readError(err)
	}

	n := binary.LittleEndian.Uint32(head[0:])
	typ := binary.LittleEndian.Uint16(head[4:])
	want := binary.LittleEndian.Uint32(head[6:])
	if n > maxBody {
		return 0, damaged("a command has %d bytes", n)
	}
	if int(n) > cap(s.body) {
		s.body = make([]byte, n)
	}

	s.body = s.body[:n]
	if _, err := io.ReadFull(s.r, s.body); err != nil {
		return 0, readError(err)
	}

	clear(head[6:])
	if checksum(checksum(0, head[:]), s.body) != want {
		return 0, damaged("the checksum of a command does not match")
	}
	if typ == 0 || int(typ) >= len(cmdNames) || s.version < 2 && typ >= cmdFallocate {
		return 0, unknown("the stream has a command of type %d, which is not known", typ)
	}

	return typ, nil
}

// parseAttributes splits s.body into the attributes of s.cmd.
func (s *Reader) parseAttributes() error {
	c := &s.cmd
	for b := s.body; len(b) > 0; {
		if len(b) < 2 {
			return damaged("truncated attribute")
		}

		a := binary.LittleEndian.Uint16(b)
		b = b[2:]
		var value []byte
		if a == attrData && s.version >= 2 {
			value, b = b, nil // the last attribute, without a length field
		} else {
			if len(b) < 2 || len(b)-2 < int(binary.LittleEndian.Uint16(b)) {
				return damaged("truncated attribute")
			}
			n := int(binary.LittleEndian.Uint16(b))
			value, b = b[2:2+n], b[2+n:]
		}

		if a == 0 || a >= attrs {
			return unknown("the stream has an attribute of type %d, which is not known", a)
		}
		if c.have&(1<<a) != 0 {
			return damaged("a command has attribute %d twice", a)
		}

		c.have |= 1 << a
		c.attr[a] = value
	}

	return nil
}

func (c *command) name() string { return cmdNames[c.typ] }

// bytes returns the value of an attribute. It and the methods below record the first missing or invalid
// attribute in c.err, and return a zero value for it.
func (c *command) bytes(a int) []byte {
	if c.have&(1<<a) == 0 && c.err == nil {
		c.err = damaged("%s lacks attribute %d", c.name(), a)
	}
	return c.attr[a]
}

// fixed returns the value of an attribute of n bytes.
func (c *command) fixed(a, n int) []byte {
	b := c.bytes(a)
	if len(b) == n {
		return b
	}
	if c.err == nil {
		c.err = damaged("attribute %d of %s has %d bytes, expected %d", a, c.name(), len(b), n)
	}
	return make([]byte, n)
}

func (c *command) u64(a int) uint64 { return binary.LittleEndian.Uint64(c.fixed(a, 8)) }

// u32 returns an attribute that has 4 bytes in some versions and 8 in others.
func (c *command) u32(a int) uint32 {
	if len(c.attr[a]) == 8 {
		v := c.u64(a)
		if v > 1<<32-1 && c.err == nil {
			c.err = damaged("attribute %d of %s has the invalid value %d", a, c.name(), v)
		}
		return uint32(v)
	}
	return binary.LittleEndian.Uint32(c.fixed(a, 4))
}

// offset returns an offset or a length in a file.
func (c *command) offset(a int) int64 {
	v := c.u64(a)
	if v > 1<<63-1 && c.err == nil {
		c.err = damaged("attribute %d of %s has the invalid value %d", a, c.name(), v)
	}
	return int64(v)
}

func (c *command) uuid(a int) (u [16]byte) {
	copy(u[:], c.fixed(a, 16))
	return u
}

func (c *command) time(a int) unix.Timespec {
	b := c.fixed(a, 12)
	t := unix.Timespec{Sec: int64(binary.LittleEndian.Uint64(b)), Nsec: int64(binary.LittleEndian.Uint32(b[8:]))}
	if t.Nsec >= 1e9 && c.err == nil {
		c.err = damaged("a timestamp of %s has %d nanoseconds", c.name(), t.Nsec)
	}
	return t
}

// text returns a name or the target of a link, which has no NUL byte.
func (c *command) text(a int) string {
	s := string(c.bytes(a))
	if strings.IndexByte(s, 0) >= 0 && c.err == nil {
		c.err = damaged("a name of %s contains a NUL byte", c.name())
	}
	return s
}

// root is the path of the root of the tree.
const root = ""

// path returns a path in the tree, possibly root.
func (c *command) path(a int) string {
	p := c.text(a)
	if p == root {
		return p
	}
	for name := range strings.SplitSeq(p, "/") {
		if (name == "" || name == "." || name == "..") && c.err == nil {
			c.err = damaged("%s has path %q, which is outside the tree", c.name(), p)
		}
	}
	return p
}

// entry returns a path in the tree other than root.
func (c *command) entry(a int) string {
	p := c.path(a)
	if p == root && c.err == nil {
		c.err = damaged("%s is applied to the root", c.name())
	}
	return p
}

// Begin is the first command of a stream, which identifies its subvolume.
type Begin struct {
	UUID    [16]byte // of the sent subvolume or, if that was received itself, of its original
	TransID uint64   // transaction of its last change
	Diff    bool     // the stream is the difference to Parent
	Parent  [16]byte // UUID of the base, in the same sense as UUID
}

// Begin reads the first command. It must be called once, before Apply or Drain.
func (s *Reader) Begin() (Begin, error) {
	c, err := s.next()
	if err != nil {
		return Begin{}, err
	}

	b := Begin{UUID: c.uuid(attrUUID), TransID: c.u64(attrCtransid)}
	switch c.typ {
	case cmdSubvol:
	case cmdSnapshot:
		b.Diff, b.Parent = true, c.uuid(attrCloneUUID)
	default:
		return Begin{}, damaged("it begins with %s instead of a subvolume", c.name())
	}
	if c.err != nil {
		return Begin{}, c.err
	}
	if b.UUID == [16]byte{} || b.Diff && b.Parent == [16]byte{} {
		return Begin{}, damaged("it does not name a subvolume")
	}

	return b, nil
}
