package replicate

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"

	"golang.org/x/sys/unix"
)

// The journal of a push says what a killed push had finished, so that the next one
// goes on there. It is a file of records that is appended to:
//
//	length uint32, CRC-32C of the payload uint32, payload
//
// in little-endian order; the first byte of the payload says what it is. What is
// behind the first record that is not whole does not count. While a push runs it holds
// a lock on the file, so that a pool pushes a volume to a remote once at a time.
const (
	recordPlan    = 'P' // JSON of a plan
	recordRun     = 'R' // uint32: number of the first segment that this attempt writes
	recordSegment = 'S' // see segmentRecord
	recordToken   = 'T' // repo.ID: token of the session's next write

	maxRecord = 256 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// plan is what a push has set out to do.
type plan struct {
	Version  int          `json:"v"`
	Snapshot string       `json:"snapshot"`          // reference of the point: VOLUME@push-...
	Took     bool         `json:"took,omitempty"`    // the push took the snapshot itself
	Object   string       `json:"object,omitempty"`  // ID of the point; "": not known yet, and nothing of the below
	Session  repo.ID      `json:"session,omitzero"`  //
	Token    repo.ID      `json:"token,omitzero"`    // of the session's first write
	Base     string       `json:"base,omitempty"`    // ID of the object that it is compared with
	Head     string       `json:"head,omitempty"`    // that lists what is built upon
	Manifest repo.ID      `json:"manifest,omitzero"` // which is this
	Merge    bool         `json:"merge,omitempty"`   // see mapper
	Origin   *repo.Origin `json:"origin,omitempty"`  // of the volume
}

const planVersion = 1

// interval is a part of the volume that is dealt with.
type interval struct {
	from, to int64
	items    []item // without fresh ones
}

// segmentRecord is what a finished segment has dealt with.
type segmentRecord struct {
	n        uint32
	bytes    int64 // of the object
	parts    []interval
	afterGap bool // what comes next does not adjoin
}

// add adds what a batch says.
func (r *segmentRecord) addBatch(b *batch) {
	if b.from == b.to && len(b.items) == 0 {
		return
	}
	if n := len(r.parts); n > 0 && !r.afterGap && r.parts[n-1].to == b.from {
		r.parts[n-1].to = b.to
		r.parts[n-1].items = append(r.parts[n-1].items, b.items...)
		return
	}
	r.afterGap = false
	r.parts = append(r.parts, interval{from: b.from, to: b.to, items: slices.Clone(b.items)})
}

// gap says that something else comes between.
func (r *segmentRecord) markGap() { r.afterGap = true }

// journal is an open journal, locked.
type journal struct {
	path string

	mu  sync.Mutex
	f   *os.File
	end int64

	// As it was found.
	plan        *plan
	nextSegment uint32 // the first number of a segment that nobody can have used
	finished    []finishedSegment

	// Of what this pool has written of the session, or was about to write. A copy of the pool that goes on with it
	// leaves another token there.
	tokens []repo.ID
}

// owns reports whether the last write of the session that the plan names is this pool's. If it is not, a copy of this
// pool that has the same journal has gone on with it, and it is not to be touched.
func (j *journal) ownsSession(s repo.Session) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return s.Token.IsZero() || slices.Contains(j.tokens, s.Token)
}

// token makes a token of the session's next write durable.
func (j *journal) appendToken(id repo.ID) error {
	err := j.appendRecord(recordToken, id[:], true)
	if err == nil {
		j.mu.Lock()
		j.tokens = append(j.tokens, id)
		j.mu.Unlock()
	}
	return err
}

// finishedSegment says where in the journal a segment's record is.
type finishedSegment struct {
	n     uint32
	bytes int64
	parts []finishedPart
}

type finishedPart struct {
	from, to int64
	at       int64 // of its items in the journal
	count    int
}

// openJournal opens the journal of a head, makes it if there is none, and locks it.
// InUse: another process is pushing that volume.
func openJournal(ctx context.Context, remoteDir, head string) (*journal, error) {
	dir := filepath.Join(remoteDir, journalDir)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, errs.Wrap(opPush, head, err)
	}

	j := &journal{path: journalPath(remoteDir, head)}
	for {
		if err := ctx.Err(); err != nil {
			return nil, errs.Wrap(opPush, head, err)
		}

		f, err := os.OpenFile(j.path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, errs.Wrap(opPush, head, err)
		}

		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, errs.New(errs.InUse, opPush, head,
					"another pando process is already pushing it to this remote").
					WithHint("retry after that push finishes, or stop it")
			}
			return nil, errs.Wrap(opPush, head, err)
		}

		// Whoever had it may have removed it in between.
		var mine, there unix.Stat_t
		if unix.Fstat(int(f.Fd()), &mine) == nil && unix.Stat(j.path, &there) == nil && mine.Ino == there.Ino &&
			mine.Dev == there.Dev {
			j.f = f
			break
		}

		_ = f.Close()
	}

	if err := j.loadRecords(); err != nil {
		_ = j.f.Close()
		return nil, errs.Wrap(opPush, head, err)
	}

	return j, nil
}

// journalPath is where the journal of a head is.
func journalPath(remoteDir, head string) string { return filepath.Join(remoteDir, journalDir, head) }

// waitJournal is openJournal that waits for another process to be done.
func waitJournal(ctx context.Context, remoteDir, head string) (*journal, error) {
	for {
		j, err := openJournal(ctx, remoteDir, head)
		if !errs.Is(err, errs.InUse) {
			return j, err
		}
		select {
		case <-ctx.Done():
			return nil, errs.Wrap(opPush, head, ctx.Err())
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// close lets go of it. One in which nothing is written goes away.
func (j *journal) releaseLock() {
	if j.end == 0 {
		_ = os.Remove(j.path)
	}
	_ = j.f.Close()
}

// clear forgets everything: the push is done, or cannot be gone on with.
func (j *journal) reset() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.plan, j.finished, j.tokens, j.nextSegment, j.end = nil, nil, nil, 0, 0
	return j.f.Truncate(0)
}

// load reads what is there. What is broken is as if it had not been written.
func (j *journal) loadRecords() error {
	st, err := j.f.Stat()
	if err != nil {
		return err
	}

	for at := int64(0); ; {
		payload, n, err := j.readRecord(at, st.Size())
		if err != nil {
			return err
		}
		if n == 0 || !j.applyRecord(payload, at+8) {
			j.end = at
			return j.f.Truncate(at)
		}
		at += n
	}
}

// read reads the record at an offset; n is its whole length, 0 if there is no whole
// one.
func (j *journal) readRecord(at, size int64) (payload []byte, n int64, err error) {
	var head [8]byte
	if at+8 > size {
		return nil, 0, nil
	}

	if _, err := j.f.ReadAt(head[:], at); err != nil {
		return nil, 0, err
	}

	length := int64(binary.LittleEndian.Uint32(head[:]))
	if length == 0 || length > maxRecord || at+8+length > size {
		return nil, 0, nil
	}

	payload = make([]byte, length)
	if _, err := j.f.ReadAt(payload, at+8); err != nil {
		return nil, 0, err
	}

	if crc32.Checksum(payload, castagnoli) != binary.LittleEndian.Uint32(head[4:]) {
		return nil, 0, nil
	}

	return payload, 8 + length, nil
}

// take understands a record whose payload is at an offset of the file.
func (j *journal) applyRecord(b []byte, at int64) bool {
	kind, b := b[0], b[1:]
	switch kind {
	case recordPlan:
		p := &plan{}
		if json.Unmarshal(b, p) != nil || p.Version != planVersion {
			return false
		}
		j.plan, j.finished, j.tokens, j.nextSegment = p, nil, []repo.ID{p.Token}, 0
		j.markSegmentUsed(0)
		return true
	case recordToken:
		if len(b) != len(repo.ID{}) || j.plan == nil {
			return false
		}
		j.tokens = append(j.tokens, repo.ID(b))
		return true
	case recordRun:
		if len(b) != 4 || j.plan == nil {
			return false
		}
		j.markSegmentUsed(binary.LittleEndian.Uint32(b))
		return true
	case recordSegment:
		if j.plan == nil {
			return false
		}
		s, ok := scanSegment(b, at+1)
		if ok {
			j.finished = append(j.finished, s)
			j.markSegmentUsed(s.n)
		}
		return ok
	}

	return false
}

// use says that segment n was written. As many as are uploaded at once may have been
// written without a record, those behind it that were already sealed included.
func (j *journal) markSegmentUsed(n uint32) { j.nextSegment = max(j.nextSegment, n+2*uploads+2) }

// append adds a record; sync: it is durable when this returns.
func (j *journal) appendRecord(kind byte, payload []byte, sync bool) error {
	b := make([]byte, 8, 9+len(payload))
	b = append(append(b, kind), payload...)
	binary.LittleEndian.PutUint32(b, uint32(len(b)-8))
	binary.LittleEndian.PutUint32(b[4:], crc32.Checksum(b[8:], castagnoli))
	j.mu.Lock()
	defer j.mu.Unlock()
	_, err := j.f.WriteAt(b, j.end)
	if err == nil && sync {
		err = j.f.Sync()
	}
	if err != nil {
		_ = j.f.Truncate(j.end)
		return errs.Wrap(opPush, filepath.Base(j.path), err)
	}

	j.end += int64(len(b))
	return nil
}

// begin forgets what was, and writes a plan.
func (j *journal) beginPlan(p plan, sync bool) error {
	if err := j.reset(); err != nil {
		return errs.Wrap(opPush, filepath.Base(j.path), err)
	}
	return j.replacePlan(p, sync)
}

// replan replaces the plan, before anything is finished.
func (j *journal) replacePlan(p plan, sync bool) error {
	p.Version = planVersion
	b, err := json.Marshal(p)
	if err == nil {
		err = j.appendRecord(recordPlan, b, sync)
	}
	if err == nil {
		j.mu.Lock()
		j.plan, j.tokens = &p, []repo.ID{p.Token}
		j.mu.Unlock()
	}
	return err
}

// run says from which number on segments will be written.
func (j *journal) appendRun(first uint32) error {
	return j.appendRecord(recordRun, binary.LittleEndian.AppendUint32(nil, first), true)
}

// segment says that a segment is on the remote.
func (j *journal) appendSegment(r segmentRecord, sync bool) error {
	return j.appendRecord(recordSegment, encodeSegment(r), sync)
}

// Items have a fixed size: kind, offset, length, within, sum, and the frame.
const itemBytes = 1 + 8 + 8 + 4 + repo.SumBytes + frameBytes
const frameBytes = 16 + 4 + 4 + 4 + 4 + 4 + 1

func encodeSegment(r segmentRecord) []byte {
	le := binary.LittleEndian
	b := le.AppendUint32(nil, r.n)
	b = le.AppendUint64(b, uint64(r.bytes))
	b = le.AppendUint32(b, uint32(len(r.parts)))
	for _, p := range r.parts {
		b = le.AppendUint64(b, uint64(p.from))
		b = le.AppendUint64(b, uint64(p.to))
		b = le.AppendUint32(b, uint32(len(p.items)))
		for _, it := range p.items {
			b = append(b, byte(it.kind))
			b = le.AppendUint64(b, uint64(it.offset))
			b = le.AppendUint64(b, uint64(it.length))
			b = le.AppendUint32(b, it.piece.Within)
			b = append(b, it.piece.Sum[:]...)
			f := it.piece.Frame
			b = append(b, f.Segment.Session[:]...)
			for _, n := range []uint32{f.Segment.N, f.Index, f.Offset, f.Stored, f.Plain} {
				b = le.AppendUint32(b, n)
			}
			b = append(b, byte(f.Codec))
		}
	}

	return b
}

// scanSegment reads all of a segment's record but the items. at is where b begins in
// the file.
func scanSegment(b []byte, at int64) (s finishedSegment, ok bool) {
	le := binary.LittleEndian
	if len(b) < 16 {
		return s, false
	}

	s.n, s.bytes = le.Uint32(b), int64(le.Uint64(b[4:]))
	parts := int(le.Uint32(b[12:]))
	pos := 16
	for range parts {
		if len(b)-pos < 20 {
			return s, false
		}
		p := finishedPart{from: int64(le.Uint64(b[pos:])), to: int64(le.Uint64(b[pos+8:])), count: int(le.Uint32(b[pos+16:]))}
		pos += 20
		p.at = at + int64(pos)
		if p.count > (len(b)-pos)/itemBytes || p.from > p.to {
			return s, false
		}
		pos += p.count * itemBytes
		s.parts = append(s.parts, p)
	}

	return s, pos == len(b)
}

// items reads what a finished part says.
func (j *journal) readItems(p finishedPart) ([]item, error) {
	b := make([]byte, p.count*itemBytes)
	if _, err := j.f.ReadAt(b, p.at); err != nil {
		return nil, errs.Wrap(opPush, filepath.Base(j.path), err)
	}

	le := binary.LittleEndian
	out := make([]item, p.count)
	r := bytes.NewReader(nil)
	for i := range out {
		r.Reset(b[i*itemBytes:][:itemBytes])
		kind, _ := r.ReadByte()
		var w [itemBytes - 1]byte
		_, _ = io.ReadFull(r, w[:])
		it := item{kind: itemKind(kind), offset: int64(le.Uint64(w[0:])), length: int64(le.Uint64(w[8:]))}
		if it.kind == placedItem {
			q := repo.Piece{Offset: it.offset, Length: it.length, Within: le.Uint32(w[16:])}
			f := w[20:]
			copy(q.Sum[:], f)
			f = f[repo.SumBytes:]
			copy(q.Frame.Segment.Session[:], f)
			q.Frame.Segment.N, q.Frame.Index, q.Frame.Offset = le.Uint32(f[16:]), le.Uint32(f[20:]), le.Uint32(f[24:])
			q.Frame.Stored, q.Frame.Plain, q.Frame.Codec = le.Uint32(f[28:]), le.Uint32(f[32:]), repo.Codec(f[36])
			it.piece = q
		}

		out[i] = it
	}

	return out, nil
}

// finishedParts lists what is dealt with, in order.
func (j *journal) finishedParts() []finishedPart {
	var out []finishedPart
	for _, s := range j.finished {
		out = append(out, s.parts...)
	}

	slices.SortFunc(out, func(a, b finishedPart) int {
		switch {
		case a.from < b.from:
			return -1
		case a.from > b.from:
			return 1
		}
		return 0
	})

	return out
}

// plannedSnapshots lists the snapshots that unfinished pushes of a pool are of, by
// reference, of all its remotes.
func plannedSnapshots(pool string) (map[string]bool, error) {
	out := map[string]bool{}
	paths, err := filepath.Glob(filepath.Join(escapeGlob(remotesDir(pool)), "*", journalDir, "*"))
	if err != nil {
		return nil, err
	}

	for _, path := range paths {
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}

		j := &journal{path: path, f: f}
		st, err := f.Stat()
		for at := int64(0); err == nil; {
			var b []byte
			var n int64
			if b, n, err = j.readRecord(at, st.Size()); err != nil || n == 0 || !j.applyRecord(b, at+8) {
				break
			}
			at += n
		}

		_ = f.Close()
		if err != nil {
			return nil, err
		}
		if j.plan != nil {
			out[j.plan.Snapshot] = true
		}
	}

	return out, nil
}

func escapeGlob(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(s)
}
