package treecopy

import (
	"encoding/binary"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// This file writes headers of tar archives. archive/tar cannot write sparse files, nor attributes whose names
// are not valid there.

// The types of entries, as in POSIX.1 pax. GNU.sparse.* is the format 1.0 of GNU tar.
const (
	typeRegular = '0'
	typeLink    = '1'
	typeSymlink = '2'
	typeChar    = '3'
	typeBlock   = '4'
	typeDir     = '5'
	typeFifo    = '6'
	typePAX     = 'x'
)

// maxTarRecords is the size of the largest header with records that Go's reader accepts, with some room.
const maxTarRecords = 1<<20 - 64<<10

// tarRange is a range of a file, in bytes.
type tarRange struct{ from, to int64 }

// tarEntry is the header of an entry.
type tarEntry struct {
	name, link   string
	typ          byte
	mode         uint32 // of st_mode; the type is ignored
	uid, gid     uint32
	size         int64 // of the data that follows
	mtime, atime unix.Timespec
	major, minor uint32

	records []byte // PAX records
	sparse  []byte // a map of the data, which precedes it
}

// record adds a PAX record: its length in decimal, including the length itself, a blank, KEY=VALUE and a newline.
func (e *tarEntry) record(key, value string) {
	rest := len(key) + len(value) + 3
	n := rest + len(strconv.Itoa(rest))
	if len(strconv.Itoa(n)) > len(strconv.Itoa(rest)) {
		n++
	}
	e.records = fmt.Appendf(e.records, "%d %s=%s\n", n, key, value)
}

// recordACL adds the record of a POSIX ACL, and reports whether x is one that has a text.
func (e *tarEntry) recordACL(x Xattr) bool {
	key := map[string]string{aclAccess: "SCHILY.acl.access", aclDefault: "SCHILY.acl.default"}[x.Name]
	if key == "" {
		return false
	}
	text, ok := decodeACL(x.Value)
	if ok {
		e.record(key, text)
	}
	return ok
}

// setSparse makes e a file with holes, with data only in these ranges.
func (e *tarEntry) setSparse(ranges []tarRange) {
	// GNU tar ends the map with an empty range if the file ends with a hole.
	if len(ranges) == 0 || ranges[len(ranges)-1].to < e.size {
		ranges = append(ranges[:len(ranges):len(ranges)], tarRange{e.size, e.size})
	}

	e.sparse = fmt.Appendf(nil, "%d\n", len(ranges))
	stored := int64(0)
	for _, r := range ranges {
		e.sparse = fmt.Appendf(e.sparse, "%d\n%d\n", r.from, r.to-r.from)
		stored += r.to - r.from
	}

	e.sparse = append(e.sparse, make([]byte, padding(int64(len(e.sparse))))...)
	e.record("GNU.sparse.major", "1")
	e.record("GNU.sparse.minor", "0")
	e.record("GNU.sparse.name", e.name)
	e.record("GNU.sparse.realsize", strconv.FormatInt(e.size, 10))
	e.size = stored + int64(len(e.sparse))
	e.name = path.Join(path.Dir(e.name), "GNUSparseFile.0", path.Base(e.name))
}

// padding returns how many bytes are missing to whole blocks.
func padding(n int64) int { return int(-n & (tarBlock - 1)) }

// tarWriter writes blocks of an archive.
type tarWriter struct {
	w       io.Writer
	written int64
}

func (w *tarWriter) write(p []byte) error {
	n, err := w.w.Write(p)
	w.written += int64(n)
	return err
}

// pad completes the last block.
func (w *tarWriter) pad() error { return w.write(zeros[:padding(w.written)]) }

// end writes the marker of the end.
func (w *tarWriter) end() error { return w.write(zeros[:2*tarBlock]) }

// putHeader writes the headers of an entry, and the map of a sparse file. Its data follows.
func (w *tarWriter) putHeader(e tarEntry) error {
	// Put what the fields cannot hold into records. Times always are there, for their nanoseconds.
	if !fits(e.name) {
		e.record("path", e.name)
	}
	if !fits(e.link) {
		e.record("linkpath", e.link)
	}
	if e.uid > maxOctal7 {
		e.record("uid", strconv.FormatUint(uint64(e.uid), 10))
	}
	if e.gid > maxOctal7 {
		e.record("gid", strconv.FormatUint(uint64(e.gid), 10))
	}
	if e.size > maxOctal11 {
		e.record("size", strconv.FormatInt(e.size, 10))
	}

	e.record("mtime", paxTime(e.mtime))
	e.record("atime", paxTime(e.atime))

	x := tarEntry{name: "PaxHeaders/" + path.Base(e.name), typ: typePAX, mode: 0o644, size: int64(len(e.records)),
		mtime: e.mtime}
	for _, b := range [][]byte{x.block(), e.records, zeros[:padding(int64(len(e.records)))], e.block(), e.sparse} {
		if err := w.write(b); err != nil {
			return err
		}
	}

	return nil
}

// The largest numbers that fit into fields of 8 and of 12 bytes.
const (
	maxOctal7  = 1<<21 - 1
	maxOctal11 = 1<<33 - 1
)

// nameField is the length of the fields for names.
const nameField = 100

// fits reports whether a name fits into the header, where only ASCII is portable.
func fits(s string) bool {
	return len(s) <= nameField && !strings.ContainsFunc(s, func(r rune) bool { return r >= 0x80 })
}

// block returns the header in the format of ustar.
func (e *tarEntry) block() []byte {
	b := make([]byte, tarBlock)
	copy(b[0:nameField], e.name)
	octal(b[100:108], uint64(e.mode&0o7777))
	octal(b[108:116], uint64(e.uid))
	octal(b[116:124], uint64(e.gid))
	octal(b[124:136], uint64(e.size))
	octal(b[136:148], uint64(max(e.mtime.Sec, 0)))
	b[156] = e.typ
	copy(b[157:157+nameField], e.link)
	copy(b[257:265], "ustar\x0000")
	octal(b[329:337], uint64(e.major))
	octal(b[337:345], uint64(e.minor))

	// The checksum counts itself as blanks.
	copy(b[148:156], "        ")
	sum := uint64(0)
	for _, c := range b {
		sum += uint64(c)
	}
	copy(b[148:156], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

// octal writes a number into a field; 0 if it does not fit, because a record has it then.
func octal(field []byte, n uint64) {
	if s := fmt.Sprintf("%0*o", len(field)-1, n); len(s) < len(field) {
		copy(field, s)
		return
	}
	octal(field, 0)
}

// paxTime formats a time as decimal seconds.
func paxTime(t unix.Timespec) string {
	sign, sec, nsec := "", t.Sec, t.Nsec
	if sec < 0 { // the fraction counts in the direction of the sign
		sign = "-"
		if nsec > 0 {
			sec, nsec = sec+1, 1e9-nsec
		}
		sec = -sec
	}
	if nsec == 0 {
		return sign + strconv.FormatInt(sec, 10)
	}
	return sign + strings.TrimRight(fmt.Sprintf("%d.%09d", sec, nsec), "0")
}

// decodeACL returns the text from which encodeACL makes the value of an attribute. ok is false if there is none.
func decodeACL(value []byte) (text string, ok bool) {
	if len(value) < 4 || (len(value)-4)%8 != 0 {
		return "", false
	}

	var entries []string
	names := map[uint16]string{aclUserObj: "user::", aclUser: "user:", aclGroupObj: "group::", aclGroup: "group:",
		aclMask: "mask::", aclOther: "other::"}
	for b := value[4:]; len(b) > 0; b = b[8:] {
		tag, perm := binary.LittleEndian.Uint16(b), binary.LittleEndian.Uint16(b[2:])
		s, known := names[tag]
		if !known {
			return "", false
		}
		if tag == aclUser || tag == aclGroup {
			s += strconv.FormatUint(uint64(binary.LittleEndian.Uint32(b[4:])), 10) + ":"
		}
		for i, c := range []byte("rwx") {
			if perm&(4>>i) == 0 {
				c = '-'
			}
			s += string(rune(c))
		}
		entries = append(entries, s)
	}

	// Archives have texts only of values that are the same after a round trip.
	text = strings.Join(entries, ",")
	again, err := encodeACL(text)
	return text, err == nil && string(again) == string(value)
}
