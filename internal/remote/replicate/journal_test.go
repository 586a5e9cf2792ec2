package replicate

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
)

func drawRecord(r *rand.Rand, n uint32) segmentRecord {
	s := segmentRecord{n: n, bytes: int64(r.Uint32())}
	at := int64(n) * 1000
	for range 1 + r.IntN(3) {
		p := interval{from: at, to: at + 100}
		for range r.IntN(5) {
			it := item{kind: zeroItem, offset: at, length: int64(r.IntN(50))}
			if r.IntN(2) == 0 {
				it.kind = placedItem
				it.piece = repo.Piece{
					Offset: it.offset, Length: it.length, Within: r.Uint32(), Sum: repo.Sum{byte(r.IntN(256)), 2},
					Frame: repo.Frame{Segment: repo.Segment{Session: repo.NewID(), N: r.Uint32()}, Index: r.Uint32(),
						Offset: r.Uint32(), Stored: r.Uint32(), Plain: r.Uint32(), Codec: repo.Zstd},
				}
			}
			p.items = append(p.items, it)
		}
		s.parts = append(s.parts, p)
		at += 300
	}
	return s
}

// TestJournal: what is written is read again; cut off anywhere, or with any byte
// changed, what stands before that is, and no more.
func TestJournal(t *testing.T) {
	dir := t.TempDir()
	r := faulttest.Rand(t)
	open := func() *journal {
		t.Helper()
		j, err := openJournal(t.Context(), dir, "v")
		if err != nil {
			t.Fatal(err)
		}
		return j
	}
	j := open()
	_, err := openJournal(t.Context(), dir, "v")
	wantKind(t, err, errs.InUse, "retry after")
	want := plan{Version: planVersion, Snapshot: "v@push-1", Took: true, Object: "o", Session: repo.NewID(), Base: "b",
		Head: "h", Manifest: repo.NewID(), Merge: true,
		Origin: &repo.Origin{Ref: "g@1", Volume: "g", Manifest: repo.NewID()}}
	if err := j.beginPlan(want, true); err != nil {
		t.Fatal(err)
	}
	if err := j.appendRun(100); err != nil {
		t.Fatal(err)
	}
	var records []segmentRecord
	ends := []int64{}
	for n := range uint32(6) {
		ends = append(ends, j.end)
		records = append(records, drawRecord(r, n))
		if err := j.appendSegment(records[n], n%2 == 0); err != nil {
			t.Fatal(err)
		}
	}
	whole := j.end
	j.releaseLock()
	path := journalPath(dir, "v")
	good, err := os.ReadFile(path)
	if err != nil || int64(len(good)) != whole {
		t.Fatal(err)
	}
	check := func(count int) {
		t.Helper()
		j := open()
		defer j.releaseLock()
		if j.plan == nil || !reflect.DeepEqual(*j.plan, want) {
			t.Fatalf("plan %+v, wanted %+v", j.plan, want)
		}
		if len(j.finished) != count || j.nextSegment < 100 {
			t.Fatalf("%d segments, wanted %d; next %d", len(j.finished), count, j.nextSegment)
		}
		for i, f := range j.finished {
			for k, p := range f.parts {
				items, err := j.readItems(p)
				if err != nil {
					t.Fatal(err)
				}
				q := records[i].parts[k]
				if p.from != q.from || p.to != q.to || len(items) != len(q.items) || len(items) > 0 &&
					!reflect.DeepEqual(items, q.items) {
					t.Fatalf("segment %d, part %d: %+v, wanted %+v", i, k, items, q.items)
				}
			}
		}
	}
	check(6)
	for range 300 {
		cut := ends[0] + r.Int64N(whole-ends[0])
		count := 0
		for _, e := range ends[1:] {
			if e <= cut {
				count++
			}
		}
		bad := bytes.Clone(good)
		if r.IntN(2) == 0 {
			bad = bad[:cut]
		} else {
			bad[cut] ^= 1 << r.IntN(8)
		}
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		check(count)
		if st, err := os.Stat(path); err != nil || st.Size() > int64(len(good)) || count < 6 && st.Size() != ends[count] {
			t.Fatalf("what does not count is kept: %d, %v", st.Size(), err)
		}
	}
	// A new plan forgets the segments of the one before; other remotes see the snapshot.
	j = open()
	want.Object = "other"
	if err := j.replacePlan(want, true); err != nil {
		t.Fatal(err)
	}
	j.releaseLock()
	check2 := open()
	if len(check2.finished) != 0 || check2.plan.Object != "other" {
		t.Errorf("%+v", check2.plan)
	}
	check2.releaseLock()
	pool := filepath.Join(dir, "pool")
	if err := os.MkdirAll(filepath.Join(pool, "remotes"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(dir, filepath.Join(pool, "remotes", "r")); err != nil {
		t.Fatal(err)
	}
	if p, err := plannedSnapshots(pool); err != nil || !p["v@push-1"] || !p["other"] || len(p) != 2 {
		t.Errorf("%v, %v", p, err)
	}
	// An empty one goes away.
	j = open()
	if err := j.reset(); err != nil {
		t.Fatal(err)
	}
	j.releaseLock()
	if _, err := os.Stat(path); err == nil {
		t.Error("an empty journal stays")
	}
}

// TestPlannedSnapshotsWhileOthersPush: whoever looks at the journals of other pushes, which begin and end in the
// meantime, finds what was planned before.
func TestPlannedSnapshotsWhileOthersPush(t *testing.T) {
	pool := t.TempDir()
	open := func(remote string) *journal {
		dir := filepath.Join(remotesDir(pool), remote)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		j, err := openJournal(t.Context(), dir, "v")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(j.releaseLock)
		return j
	}
	if err := open("still").replacePlan(plan{Version: planVersion, Snapshot: "v@push-still"}, false); err != nil {
		t.Fatal(err)
	}

	j, ended := open("busy"), make(chan error)
	stop := make(chan struct{})
	go func() {
		for {
			select {
			case <-stop:
				ended <- j.reset()
				return
			default:
			}
			err := j.replacePlan(plan{Version: planVersion, Snapshot: "v@push-busy"}, false)
			for range 20 {
				err = errors.Join(err, j.appendRun(1))
			}
			if err = errors.Join(err, j.reset()); err != nil {
				ended <- err
				return
			}
		}
	}()
	for range 3000 {
		if p, err := plannedSnapshots(pool); err != nil || !p["v@push-still"] {
			t.Errorf("%v, %v", p, err)
			break
		}
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func FuzzJournal(f *testing.F) {
	f.Add([]byte{})
	f.Add(encodeSegment(drawRecord(rand.New(rand.NewPCG(1, 1)), 3)))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, ok := scanSegment(b, 0)
		if !ok {
			return
		}
		for _, p := range s.parts {
			if p.at < 0 || p.at+int64(p.count)*itemBytes > int64(len(b)) {
				t.Fatalf("items outside of the record: %+v", p)
			}
		}
	})
}
