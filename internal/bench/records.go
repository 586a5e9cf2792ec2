package bench

import (
	"crypto/sha256"
	"hash"
	"io"
	"math/rand/v2"
	"strconv"
)

// records writes lines of JSON as a service writes them about what its users do:
// {"id":1736198400001,"ts":1736198400001,"uid":"u1234","sid":"s56789","act":"click",...}.
// IDs and times count up, users and sessions repeat, actions and pages are of a
// few. zstd makes them some ten times smaller. The same seed gives the same lines.
type records struct {
	rng  *rand.Rand
	id   int64
	sum  hash.Hash // of all lines so far
	size int64     // of all lines so far, bytes
	buf  []byte
}

func newRecords(seed uint64) *records {
	return &records{rng: rand.New(rand.NewPCG(seed, 3)), id: 1736198400000, sum: sha256.New()}
}

var (
	recordActs  = []string{"click", "view", "scroll", "submit", "login", "logout", "search", "share"}
	recordPages = []string{"/dashboard", "/settings", "/profile", "/reports", "/billing", "/", "/search", "/help"}
	recordTags  = []string{`["web","mobile"]`, `["web"]`, `["mobile"]`, `["api"]`, `["web","beta"]`}
)

// next appends one line, its newline included, to b.
func (r *records) next(b []byte) []byte {
	r.id += 1 + r.rng.Int64N(3)
	str := func(name, prefix string, n int64) {
		b = append(b, name...)
		b = append(b, prefix...)
		b = strconv.AppendInt(b, n, 10)
		b = append(b, '"')
	}

	b = append(b, `{"id":`...)
	b = strconv.AppendInt(b, r.id, 10)
	b = append(b, `,"ts":`...)
	b = strconv.AppendInt(b, r.id, 10)
	str(`,"uid":"`, "u", r.rng.Int64N(2000))
	str(`,"sid":"`, "s", 50_000+r.id/600%10_000)
	b = append(b, `,"act":"`...)
	b = append(b, recordActs[r.rng.IntN(len(recordActs))]...)
	b = append(b, `","pg":"`...)
	b = append(b, recordPages[r.rng.IntN(len(recordPages))]...)
	b = append(b, `","dur":`...)
	b = strconv.AppendInt(b, 100*r.rng.Int64N(40), 10)
	b = append(b, `,"ok":`...)
	b = strconv.AppendBool(b, r.rng.IntN(20) > 0)
	b = append(b, `,"tg":`...)
	b = append(b, recordTags[r.rng.IntN(len(recordTags))]...)
	str(`,"ref":"`, "r", r.rng.Int64N(200))
	return append(b, ",\"v\":\"1.0\"}\n"...)
}

// lines calls fn with whole lines of together at least n bytes, in pieces of about
// a MiB; what it gets is valid only during the call.
func (r *records) lines(n int64, fn func([]byte) error) error {
	for n > 0 {
		r.buf = r.buf[:0]
		for int64(len(r.buf)) < min(n, 1<<20) {
			r.buf = r.next(r.buf)
		}
		r.sum.Write(r.buf)
		r.size += int64(len(r.buf))
		n -= int64(len(r.buf))
		if err := fn(r.buf); err != nil {
			return err
		}
	}

	return nil
}

// writeTo writes lines of at least n bytes.
func (r *records) writeTo(w io.Writer, n int64) error {
	return r.lines(n, func(b []byte) error {
		_, err := w.Write(b)
		return err
	})
}

// digest is of all lines so far.
func (r *records) digest() [sha256.Size]byte { return [sha256.Size]byte(r.sum.Sum(nil)) }
