package replicate

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/linux/durable"
	"pando/internal/remote/repo"

	"golang.org/x/sys/unix"
)

// A copy of a pool (a restored image of a virtual machine, or one of two machines made from the same template) has the
// same ID as the original, so that both look like the writer of a head. Tokens distinguish them: before each write of a
// head by which this pool adds a point or becomes the writer, it draws a random token, records it durably as pending,
// and writes it into the head. From then on only a pool that knows this token may write the head. Of two copies, the
// one that writes first draws a token that the other does not know.
//
// A token is current if the write with it is known to have succeeded, and no later write is. It is pending while the
// result of the write is not known: the answer may be lost, or the process killed. A token that this pool has replaced
// by another is retired: a head with a retired token was rolled back to an older state.

// tokens are the tokens of one head that a pool knows.
type tokens struct {
	current repo.ID // zero: none
	pending []repo.ID
	retired []repo.ID // the newest last
}

// isLive reports whether the head may have this token now.
func (t *tokens) isLive(id repo.ID) bool { return t.current == id || slices.Contains(t.pending, id) }

// isOwn reports whether a token was made by this pool.
func (t *tokens) isOwn(id repo.ID) bool { return t.isLive(id) || slices.Contains(t.retired, id) }

// apply adds a record.
func (t *tokens) apply(kind byte, id repo.ID) {
	if kind == tokenPending {
		t.pending = append(t.pending, id)
		return
	}

	// All other pending writes have failed: each depended on a version of the head that this write replaced.
	if !t.current.IsZero() && t.current != id {
		t.retired = append(t.retired, t.current)
	}

	for _, p := range t.pending {
		if p != id {
			t.retired = append(t.retired, p)
		}
	}

	t.current, t.pending = id, nil
}

// tokenLog keeps tokens of heads. Methods may be called concurrently, by several processes.
type tokenLog interface {
	// load reads the tokens of a head.
	load(head string) (tokens, error)
	// pend makes a new token pending. It is durable on return.
	pend(head string) (repo.ID, error)
	// confirm makes a pending token the current one, and ignores other tokens. It is not durable on return: after a
	// power failure the token may be pending again.
	confirm(head string, id repo.ID) error
}

// tokenFiles is a tokenLog in a directory. It has a file for each head, and appends records to it:
//
//	header: "PNDO", 'T', version 1, two zero bytes
//	record: kind 'P' (pending) or 'C' (current), token (16 bytes), CRC-32C of these 17 bytes
//
// in little-endian order. The first incomplete record and everything after it are ignored. A file that has become long
// is replaced by a short one.
type tokenFiles struct {
	dir  string                       // of the repository
	name func(string) (string, error) // of the file of a head
}

const (
	tokenPending = 'P'
	tokenCurrent = 'C'

	tokenHeader  = "PNDOT\x01\x00\x00"
	tokenRecord  = 1 + 16 + 4
	maxTokens    = 8192 // records in a file before it is shortened
	maxRetired   = 1024 // records of retired tokens in a shortened file
	writerDir    = "writer"
	identityFile = "identity"
)

// newTokenFiles returns the tokenLog of a pool for a repository.
func newTokenFiles(pool string, r *repo.Repo) tokenFiles {
	return tokenFiles{dir: filepath.Join(pool, writerDir, r.ID().String()), name: func(head string) (string, error) {
		id, err := r.HeadID(head)
		return id.String(), err
	}}
}

func (l tokenFiles) path(head string) (string, error) {
	name, err := l.name(head)
	return filepath.Join(l.dir, name), err
}

func (l tokenFiles) load(head string) (tokens, error) {
	path, err := l.path(head)
	if err != nil {
		return tokens{}, err
	}

	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return tokens{}, nil
	}
	if err != nil {
		return tokens{}, errs.Wrap(opPush, head, err)
	}

	t, _, err := decodeTokens(b)
	return t, errs.Wrap(opPush, head, err)
}

func (l tokenFiles) pend(head string) (repo.ID, error) {
	id := repo.NewID()
	return id, l.addRecord(head, func(tokens) (byte, repo.ID) { return tokenPending, id }, true)
}

func (l tokenFiles) confirm(head string, id repo.ID) error {
	return l.addRecord(head, func(t tokens) (byte, repo.ID) {
		if !slices.Contains(t.pending, id) {
			return 0, id
		}
		return tokenCurrent, id
	}, false)
}

// addRecord appends the record that the callback returns for the tokens in the file; kind 0 appends none. It holds the
// lock of the file. With sync, the record is durable on return.
func (l tokenFiles) addRecord(head string, record func(tokens) (byte, repo.ID), sync bool) (err error) {
	path, err := l.path(head)
	if err != nil {
		return err
	}

	defer func() { err = errs.Wrap(opPush, head, err) }()

	// Read the file under its lock.
	f, err := l.openLocked(path)
	if err != nil {
		return err
	}

	defer f.Close()

	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}

	t, end, err := decodeTokens(b)
	if err != nil {
		return err
	}

	// Append the record, or replace a long file.
	kind, id := record(t)
	switch {
	case kind == 0:
		return nil
	case end > maxTokens*tokenRecord:
		t.apply(kind, id)
		return durable.WriteFile(path, encodeTokens(t)) // processes that wait for the lock notice the new file
	}

	fresh := []byte{}
	if end == 0 {
		fresh = append(fresh, tokenHeader...)
	}

	fresh = appendToken(fresh, kind, id)
	if err := f.Truncate(int64(end)); err != nil {
		return err
	}

	_, err = f.WriteAt(fresh, int64(end))
	if err == nil && sync {
		err = f.Sync()
	}
	if err != nil {
		_ = f.Truncate(int64(end)) // a record that may not be on disk must not look as if it were
		return err
	}

	if !sync || !t.current.IsZero() {
		return nil
	}

	return l.syncDirs() // it is known to have been done only once a write has succeeded
}

// openLocked opens and locks a file, and creates it if it does not exist.
func (l tokenFiles) openLocked(path string) (*os.File, error) {
	if err := os.MkdirAll(l.dir, 0o700); err != nil {
		return nil, err
	}

	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, err
		}

		for err = unix.EINTR; err == unix.EINTR; {
			err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
		}
		if err != nil {
			_ = f.Close()
			return nil, err
		}

		if isStill(f, path) {
			return f, nil
		}

		_ = f.Close()
	}
}

// isStill reports whether path still names the open file.
func isStill(f *os.File, path string) bool {
	var mine, there unix.Stat_t
	return unix.Fstat(int(f.Fd()), &mine) == nil && unix.Stat(path, &there) == nil &&
		mine.Ino == there.Ino && mine.Dev == there.Dev
}

// syncDirs makes the name of a new file, and those of the directories above it, durable.
func (l tokenFiles) syncDirs() error {
	top := filepath.Dir(l.dir)
	return errors.Join(durable.SyncDir(l.dir), durable.SyncDir(top), durable.SyncDir(filepath.Dir(top)))
}

// decodeTokens decodes a file. end is the end of its last complete record, or 0 if even the header is incomplete.
// TooNew.
func decodeTokens(b []byte) (t tokens, end int, err error) {
	if len(b) < len(tokenHeader) {
		return tokens{}, 0, nil
	}

	if string(b[:5]) == tokenHeader[:5] && b[5] > tokenHeader[5] {
		return tokens{}, 0, errs.New(errs.TooNew, "", "", "a newer pando wrote this pool's record of its own writes").
			WithHint("upgrade pando")
	}

	if string(b[:len(tokenHeader)]) != tokenHeader {
		return tokens{}, 0, nil // as if the file were lost: the head's token is not known
	}

	end = len(tokenHeader)
	for ; len(b)-end >= tokenRecord; end += tokenRecord {
		r := b[end:][:tokenRecord]
		kind, sum := r[0], binary.LittleEndian.Uint32(r[17:])
		if crc32.Checksum(r[:17], castagnoli) != sum || kind != tokenPending && kind != tokenCurrent {
			break
		}
		t.apply(kind, repo.ID(r[1:17]))
	}

	return t, end, nil
}

// encodeTokens returns a short file with the same tokens, except the oldest retired ones.
func encodeTokens(t tokens) []byte {
	b := []byte(tokenHeader)
	for _, id := range t.retired[max(0, len(t.retired)-maxRetired):] {
		b = appendToken(b, tokenCurrent, id)
	}
	if !t.current.IsZero() {
		b = appendToken(b, tokenCurrent, t.current)
	}
	for _, id := range t.pending {
		b = appendToken(b, tokenPending, id)
	}
	return b
}

func appendToken(b []byte, kind byte, id repo.ID) []byte {
	r := append([]byte{kind}, id[:]...)
	return append(b, binary.LittleEndian.AppendUint32(r, crc32.Checksum(r, castagnoli))...)
}

// ownership says which pool wrote a head last.
type ownership int

const (
	ownWrite     ownership = iota // this pool, or another pool that is the head's writer, or an unknown one
	retiredWrite                  // this pool, which has replaced that write since
	foreignWrite                  // another pool with the ID of this one
)

// judgeOwnership says which pool wrote a head last. The head must be read after the tokens. Other processes of this
// pool may have written it in between.
func (w *headWriter) judgeOwnership(before tokens, h *repo.Head) (ownership, error) {
	if h.Token.IsZero() || h.Gone || h.Writer.Pool != w.me.Pool {
		return ownWrite, nil
	}

	switch {
	case slices.Contains(before.pending, h.Token): // a write whose answer was lost
		return ownWrite, w.tokens.confirm(h.Name, h.Token)
	case before.current == h.Token:
		return ownWrite, nil
	case slices.Contains(before.retired, h.Token):
		return retiredWrite, nil
	}

	// Another process of this pool may have written it since. That token is confirmed here, too: a confirmation after the
	// next write of this process would retire the token of that write.
	after, err := w.tokens.load(h.Name)
	switch {
	case err != nil:
		return ownWrite, err
	case slices.Contains(after.pending, h.Token):
		return ownWrite, w.tokens.confirm(h.Name, h.Token)
	case after.isOwn(h.Token):
		return ownWrite, nil
	}

	return foreignWrite, nil
}

// putHead writes a head with a new token over the state that h was read from. If that fails, the token stays pending,
// and the next read of the head decides.
func (w *headWriter) putHead(ctx context.Context, h headState) (headState, error) {
	var err error
	if h.Token, err = w.tokens.pend(h.Name); err != nil {
		return h, err
	}
	if h.version, err = w.repo.PutHead(ctx, h.Head, h.version); err != nil {
		return h, err
	}
	h.own = ownWrite
	_ = w.tokens.confirm(h.Name, h.Token) // on failure it stays pending, which is as good
	return h, nil
}
