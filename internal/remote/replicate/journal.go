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

// The journal of a push records what a killed push had finished, so that the next push resumes there. It is a file of
// records, written by appending:
//
//	length uint32, CRC-32C of the payload uint32, payload
//
// in little-endian order. The first byte of the payload is the kind of the record. Everything from the first incomplete
// record on is ignored. A running push holds a lock on the file, so that a pool has only one push at a time of a volume
// to a remote.
const (
	recordPlan    = 'P' // JSON of a plan
	recordRun     = 'R' // uint32: number of the first segment of this attempt
	recordSegment = 'S' // see segmentRecord
	recordToken   = 'T' // repo.ID: token of the session's next write

	maxRecord = 256 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// plan is what a push is about to do.
type plan struct {
	Version  int          `json:"v"`
	Snapshot string       `json:"snapshot"`          // reference of the point: VOLUME@push-...
	Took     bool         `json:"took,omitempty"`    // the push took the snapshot itself
	Object   string       `json:"object,omitempty"`  // ID of the point; "": not known yet, nor anything below
	Session  repo.ID      `json:"session,omitzero"`  //
	Token    repo.ID      `json:"token,omitzero"`    // of the session's first write
	Base     string       `json:"base,omitempty"`    // ID of the base's object in this pool
	Head     string       `json:"head,omitempty"`    // that lists the base
	Manifest repo.ID      `json:"manifest,omitzero"` // of the base
	Merge    bool         `json:"merge,omitempty"`   // see mapper
	Origin   *repo.Origin `json:"origin,omitempty"`  // of the volume
}

const planVersion = 1

// interval is a part of the volume that is finished.
type interval struct {
	from, to int64
	items    []item // no freshItem
}

// segmentRecord lists the parts of the volume that a segment finishes.
type segmentRecord struct {
	n        uint32
	bytes    int64 // of the object
	parts    []interval
	afterGap bool // what comes next does not adjoin
}

// addBatch adds the part of the volume that a batch covers. It extends the last part if the two adjoin.
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

// markGap prevents the next batch from extending the last part: something else lies in between.
func (r *segmentRecord) markGap() { r.afterGap = true }

// journal is an open journal, locked.
type journal struct {
	path string

	mu  sync.Mutex
	f   *os.File
	end int64

	// The state that the file recorded when it was opened.
	plan        *plan
	nextSegment uint32 // lowest segment number that is certainly unused
	finished    []finishedSegment

	// Tokens of the session's writes that this pool made or was about to make. A copy of the pool that resumes the
	// push leaves another token in the session.
	tokens []repo.ID
}

// ownsSession reports whether this pool made the last write of the session that the plan names. If not, a copy of this
// pool with the same journal has resumed the push, and the session must be left alone.
func (j *journal) ownsSession(s repo.Session) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return s.Token.IsZero() || slices.Contains(j.tokens, s.Token)
}

// appendToken records the token of the session's next write, durably.
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

// openJournal opens and locks the journal of a head, and creates it if necessary. Errors: InUse if another process is
// pushing that volume.
func openJournal(ctx context.Context, remoteDir, head string) (*journal, error) {
	dir := filepath.Join(remoteDir, journalDir)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, errs.Wrap(opPush, head, err)
	}

	// Open and lock the file that the path names.
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

		// The process that held the lock may have removed the file before this one locked it.
		var mine, there unix.Stat_t
		if unix.Fstat(int(f.Fd()), &mine) == nil && unix.Stat(j.path, &there) == nil && mine.Ino == there.Ino &&
			mine.Dev == there.Dev {
			j.f = f
			break
		}

		_ = f.Close()
	}

	// Read what an earlier push recorded.
	if err := j.loadRecords(); err != nil {
		_ = j.f.Close()
		return nil, errs.Wrap(opPush, head, err)
	}

	return j, nil
}

// journalPath returns the path of a head's journal.
func journalPath(remoteDir, head string) string { return filepath.Join(remoteDir, journalDir, head) }

// waitJournal is openJournal, but waits for the process that holds the lock.
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

// releaseLock closes the journal, and removes it if it has no records.
func (j *journal) releaseLock() {
	// Try twice: a file that stays is empty, but nobody looks at that of a golden again.
	for try := 0; j.end == 0 && try < 2; try++ {
		if err := os.Remove(j.path); err == nil || errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	_ = j.f.Close()
}

// reset deletes all records: the push is finished, or cannot be resumed.
func (j *journal) reset() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.plan, j.finished, j.tokens, j.nextSegment, j.end = nil, nil, nil, 0, 0
	return j.f.Truncate(0)
}

// loadRecords reads all records, and truncates the file before the first broken one.
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

// readRecord reads the record at an offset. n is its length with its header, 0 if there is no complete record: also
// when the file was size bytes long and its push, whose lock the caller lacks, has truncated it in the meantime.
func (j *journal) readRecord(at, size int64) (payload []byte, n int64, err error) {
	var head [8]byte
	if at+8 > size {
		return nil, 0, nil
	}

	if _, err := j.f.ReadAt(head[:], at); err != nil {
		return nil, 0, ignoreEOF(err)
	}

	length := int64(binary.LittleEndian.Uint32(head[:]))
	if length == 0 || length > maxRecord || at+8+length > size {
		return nil, 0, nil
	}

	payload = make([]byte, length)
	if _, err := j.f.ReadAt(payload, at+8); err != nil {
		return nil, 0, ignoreEOF(err)
	}

	if crc32.Checksum(payload, castagnoli) != binary.LittleEndian.Uint32(head[4:]) {
		return nil, 0, nil
	}

	return payload, 8 + length, nil
}

func ignoreEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// applyRecord applies a record to the state; at is the offset of its payload in the file. It reports whether the record
// is valid.
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

// markSegmentUsed records that segment n may exist. Up to as many segments as are uploaded at once may exist without a
// record, and so may those after them that were already sealed.
func (j *journal) markSegmentUsed(n uint32) { j.nextSegment = max(j.nextSegment, n+2*uploads+2) }

// appendRecord appends a record. With sync, it is durable on return.
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

// beginPlan deletes all records and writes a plan.
func (j *journal) beginPlan(p plan, sync bool) error {
	if err := j.reset(); err != nil {
		return errs.Wrap(opPush, filepath.Base(j.path), err)
	}
	return j.replacePlan(p, sync)
}

// replacePlan replaces the plan before any segment is finished.
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

// appendRun records, durably, the number of the first segment that this attempt writes.
func (j *journal) appendRun(first uint32) error {
	return j.appendRecord(recordRun, binary.LittleEndian.AppendUint32(nil, first), true)
}

// appendSegment records that a segment is on the remote.
func (j *journal) appendSegment(r segmentRecord, sync bool) error {
	return j.appendRecord(recordSegment, encodeSegment(r), sync)
}

// Items have a fixed size: kind, offset, length, within, sum, and the frame.
const itemBytes = 1 + 8 + 8 + 4 + repo.SumBytes + frameBytes
const frameBytes = 16 + 4 + 4 + 4 + 4 + 4 + 1

// encodeSegment encodes the payload of a segment's record.
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

// scanSegment decodes a segment's record except for the items. at is the offset of b in the file. ok is false if the
// record is malformed.
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

// readItems reads the items of a finished part.
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

// finishedParts lists the finished parts of the volume, in order of offset.
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

// plannedSnapshots returns the references of the snapshots that unfinished pushes of a pool, to any of its remotes, are
// pushing, and their IDs as far as these are recorded: a volume may have been renamed since.
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

		// Read the plan without the lock: the push may be running.
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
			if j.plan.Object != "" {
				out[j.plan.Object] = true
			}
		}
	}

	return out, nil
}

// escapeGlob quotes the characters of s that have a meaning in a glob pattern.
func escapeGlob(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(s)
}
