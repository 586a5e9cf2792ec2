package replicate

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/repo"
	"pando/internal/testing/storetest"
)

func tokenFilesIn(dir string) tokenFiles {
	name := func(head string) (string, error) { return head, nil }
	return tokenFiles{dir: filepath.Join(dir, "pool", "writer", "repo"), name: name}
}

func sameTokens(t *testing.T, got, want tokens) {
	t.Helper()
	same := got.current == want.current && slices.Equal(got.pending, want.pending)
	if !same || !slices.Equal(got.retired, want.retired) {
		t.Errorf("%+v, wanted %+v", got, want)
	}
}

// TestTokenFiles: what is read is what was written, and of a file that is cut or damaged anywhere what came before.
func TestTokenFiles(t *testing.T) {
	l := tokenFilesIn(t.TempDir())
	load := func() tokens {
		t.Helper()
		is, err := l.load("v")
		if err != nil {
			t.Fatal(err)
		}
		return is
	}
	sameTokens(t, load(), tokens{})
	var ids []repo.ID
	var states []tokens // after each record
	pend := func() {
		t.Helper()
		id, err := l.pend("v")
		if err != nil {
			t.Fatal(err)
		}
		ids, states = append(ids, id), append(states, load())
	}
	confirm := func(i int) {
		t.Helper()
		if err := l.confirm("v", ids[i]); err != nil {
			t.Fatal(err)
		}
		states = append(states, load())
	}
	pend()
	sameTokens(t, load(), tokens{pending: ids})
	confirm(0)
	sameTokens(t, load(), tokens{current: ids[0]})
	pend()
	pend()
	sameTokens(t, load(), tokens{current: ids[0], pending: ids[1:3]})
	confirm(2)
	sameTokens(t, load(), tokens{current: ids[2], retired: ids[:2]})
	for _, i := range []int{0, 1, 2} { // which a slower process confirms: nothing changes
		if err := l.confirm("v", ids[i]); err != nil {
			t.Fatal(err)
		}
		sameTokens(t, load(), states[len(states)-1])
	}
	pend()
	if err := l.confirm("w", ids[3]); err != nil {
		t.Fatal(err)
	}
	sameTokens(t, load(), tokens{current: ids[2], pending: ids[3:], retired: ids[:2]})

	path := filepath.Join(l.dir, "v")
	b, err := os.ReadFile(path)
	if err != nil || len(b) != len(tokenHeader)+len(states)*tokenRecord {
		t.Fatalf("%d bytes, %v", len(b), err)
	}
	after := func(n int) tokens {
		if n == 0 {
			return tokens{}
		}
		return states[n-1]
	}
	for n := range len(b) {
		got, end, err := decodeTokens(b[:n])
		if err != nil {
			t.Fatal(err)
		}
		whole := max(0, n-len(tokenHeader)) / tokenRecord
		sameTokens(t, got, after(whole))
		if n >= len(tokenHeader) && end != len(tokenHeader)+whole*tokenRecord || n < len(tokenHeader) && end != 0 {
			t.Errorf("cut at %d it ends at %d", n, end)
		}
	}
	for i := range b {
		bad := bytes.Clone(b)
		bad[i] ^= 0x10
		got, _, err := decodeTokens(bad)
		if i == 5 {
			if !errs.Is(err, errs.TooNew) {
				t.Errorf("another version: %v", err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		sameTokens(t, got, after(max(0, i-len(tokenHeader))/tokenRecord))
	}

	// What was not whole is written over.
	if err := os.Truncate(path, int64(len(b)-5)); err != nil {
		t.Fatal(err)
	}
	pend()
	sameTokens(t, load(), tokens{current: ids[2], pending: ids[4:], retired: ids[:2]})
}

// TestTokenFileStaysShort: a file that has become long is replaced by a short one, in which the tokens that matter are.
func TestTokenFileStaysShort(t *testing.T) {
	l := tokenFilesIn(t.TempDir())
	if _, err := l.pend("v"); err != nil {
		t.Fatal(err)
	}
	var want tokens
	long := []byte(tokenHeader)
	for range maxTokens {
		id := repo.NewID()
		want.apply(tokenCurrent, id)
		long = appendToken(long, tokenCurrent, id)
	}
	path := filepath.Join(l.dir, "v")
	if err := os.WriteFile(path, long, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		id, err := l.pend("v")
		if err != nil {
			t.Fatal(err)
		}
		want.apply(tokenPending, id)
	}
	got, err := l.load("v")
	if err != nil {
		t.Fatal(err)
	}
	want.retired = want.retired[len(want.retired)-maxRetired:]
	sameTokens(t, got, want)
	if st, err := os.Stat(path); err != nil || st.Size() > int64(len(tokenHeader)+(maxRetired+4)*tokenRecord) {
		t.Errorf("%v, %v", st, err)
	}
}

// TestTokenFilesOfSeveral: processes that write at once lose nothing of each other, even when a file is replaced.
func TestTokenFilesOfSeveral(t *testing.T) {
	dir := t.TempDir()
	if _, err := tokenFilesIn(dir).pend("v"); err != nil {
		t.Fatal(err)
	}
	long := []byte(tokenHeader)
	for range maxTokens - 20 {
		long = appendToken(long, tokenCurrent, repo.NewID())
	}
	if err := os.WriteFile(filepath.Join(tokenFilesIn(dir).dir, "v"), long, 0o600); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var made []repo.ID
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 10 {
				id, err := tokenFilesIn(dir).pend("v")
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				made = append(made, id)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	is, err := tokenFilesIn(dir).load("v")
	if err != nil || len(is.pending) != len(made) {
		t.Fatalf("%d of %d tokens are there, %v", len(is.pending), len(made), err)
	}
	for _, id := range made {
		if !is.isLive(id) {
			t.Errorf("%s is lost", id)
		}
	}
}

// copied is a copy of a pool, made while nobody uses it. Its store is its own.
func (w *world) copied(t *testing.T) *world {
	t.Helper()
	to := filepath.Join(filepath.Dir(w.dir), "copy-"+repo.NewID().String())
	w.e.Close()
	if out, err := exec.Command("cp", "-a", "--reflink=auto", w.dir, to).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	w.e = openEngine(t, w.dir)
	t.Cleanup(func() { w.e.Close() })
	o := &world{t: t, e: openEngine(t, to), dir: to}
	t.Cleanup(func() {
		o.e.Close()
		q := engine.DeinitRequest{Dir: to, Force: true}
		if _, err := engine.Deinit(context.Background(), q, testDrivers, nil); err != nil {
			t.Errorf("deinit of a copy: %v", err)
		}
	})
	o.load()
	return o
}

// TestLateConfirmation: a process that confirms its token only after another of this pool has written the head again
// does not make it look as if the remote were put back.
func TestLateConfirmation(t *testing.T) {
	w := &headWriter{me: repo.Writer{Pool: "p"}, tokens: tokenFilesIn(t.TempDir())}
	pend := func() repo.Head {
		t.Helper()
		id, err := w.tokens.pend("v")
		if err != nil {
			t.Fatal(err)
		}
		return repo.Head{Name: "v", Writer: w.me, Token: id}
	}
	judge := func(before tokens, h repo.Head) {
		t.Helper()
		if own, err := w.judgeOwnership(before, &h); own != ownWrite || err != nil {
			t.Errorf("judged %v, %v", own, err)
		}
	}

	before := tokens{} // loaded by the second, before the first has written
	first := pend()
	judge(before, first)
	second := pend()
	for _, h := range []repo.Head{second, first} {
		if err := w.tokens.confirm("v", h.Token); err != nil {
			t.Fatal(err)
		}
	}
	now, err := w.tokens.load("v")
	if err != nil {
		t.Fatal(err)
	}
	judge(now, second)
}

// TestCopiedPools: of two copies of a pool that push at once exactly one succeeds. The other takes an identity of
// its own and takes the volume over, and then the first is refused.
func TestCopiedPools(t *testing.T) {
	a := newWorld(t)
	a.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	a.clone("g", "v")
	a.push("v")
	rp := a.open()
	b := a.copied(t)

	worlds, failed := []*world{a, b}, make([]error, 2)
	var done sync.WaitGroup
	var here atomic.Int32
	both := make(chan struct{})
	open := sync.OnceFunc(func() { close(both) })
	for k, w := range worlds {
		w.edit("v", func(f *os.File) { noise(t, f, uint64(10+k), 10*mib, mib) })
		w.store.Add(storetest.Fault{Match: func(c storetest.Call) bool {
			return c.Op == storetest.Put && strings.HasPrefix(c.Key, "heads/")
		}, Do: func(storetest.Call) {
			if here.Add(1) == 2 {
				open()
			}
			<-both
		}})
		done.Go(func() {
			defer open()
			_, failed[k] = Push(t.Context(), w.e, w.r, PushRequest{Refs: []ref.Ref{{Name: "v"}}})
		})
	}
	done.Wait()
	a.store.Heal()
	b.store.Heal()
	won, lost := a, b
	if failed[0] != nil {
		won, lost = b, a
	}
	if failed[0] == nil == (failed[1] == nil) {
		t.Fatalf("%v, %v", failed[0], failed[1])
	}
	wantKind(t, failed[slices.Index(worlds, lost)], errs.Conflict, `"remote writer" with parameter "new"`)
	won.checkPoint(rp, "v", won.image("v"))

	// It stays so, and nothing on the remote changes.
	_, err := lost.tryPush("v")
	wantKind(t, err, errs.Conflict, "remote writer")
	_, err = Pull(t.Context(), lost.e, lost.r, PullRequest{Ref: ref.Ref{Name: "v"}, TakeOver: true, Update: true})
	wantKind(t, err, errs.Conflict, "remote writer")
	won.pushChange(t, "v", 20)
	won.wantNoRollback(t, "pushed by the other copy")
	lost.wantNoRollback(t, "pushed by the other copy")

	// What the loser has it can push under another name.
	fork := PushRequest{Refs: []ref.Ref{{Name: "v"}}, As: ref.MustName("v-fork")}
	if _, err := Push(t.Context(), lost.e, lost.r, fork); err != nil {
		t.Fatal(err)
	}
	lost.checkPoint(rp, "v-fork", lost.image("v"))

	id, err := NewWriter(t.Context(), lost.e)
	if err != nil || id.ID == id.Previous || id.Previous != lost.e.PoolID() || !id.New {
		t.Fatalf("%+v, %v", id, err)
	}
	if again, err := Writer(lost.e); err != nil || again.ID != id.ID || again.New {
		t.Errorf("%+v, %v", again, err)
	}
	_, err = lost.tryPush("v")
	wantKind(t, err, errs.Conflict, `"take-over"`)
	out, err := Pull(t.Context(), lost.e, lost.r, PullRequest{Ref: ref.Ref{Name: "v"}, TakeOver: true, Update: true})
	if err != nil || !out.TookOver {
		t.Fatalf("%+v, %v", out, err)
	}
	lost.pushChange(t, "v", 30)
	if h := lost.checkPoint(rp, "v", lost.image("v")); h.Writer.Pool != id.ID || h.Epoch != 2 {
		t.Errorf("%+v", h)
	}
	won.edit("v", func(f *os.File) { noise(t, f, 40, 40*mib, mib) })
	_, err = won.tryPush("v")
	wantKind(t, err, errs.Conflict, `"take-over"`)
	a.noSessions(rp)
}

// TestRestoredPool: a pool that was put back to before its last pushes is refused as a copy is.
func TestRestoredPool(t *testing.T) {
	a := newWorld(t)
	a.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	a.clone("g", "v")
	a.pushChange(t, "v", 2)
	old := a.copied(t)
	a.pushChange(t, "v", 3)
	old.edit("v", func(f *os.File) { noise(t, f, 4, 4*mib, mib) })
	_, err := old.tryPush("v")
	wantKind(t, err, errs.Conflict, "remote writer")
	if !strings.Contains(err.Error(), "restored from a backup") {
		t.Error(err)
	}
	a.pushChange(t, "v", 5)
}

// TestLostAnswerOfCommit: a push whose head was written and whose answer was lost, for good, is recognised by the next.
func TestLostAnswerOfCommit(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	w.push("v")
	rp := w.open()
	for seed := range uint64(3) {
		w.edit("v", func(f *os.File) { noise(t, f, seed+2, 10*mib, mib) })
		put := func(c storetest.Call) bool { return strings.HasPrefix(c.Key, "heads/") && c.Op == storetest.Put }
		w.store.Add(storetest.Fault{Match: put, When: storetest.After}, storetest.Fault{Match: put, At: 1, Times: -1})
		if _, err := w.tryPush("v"); err == nil {
			t.Fatal("a push without an answer succeeded")
		}
		w.store.Heal()
		before := len(headNow(t, rp, "v").Recent)
		out := w.push("v")
		if h := w.checkPoint(rp, "v", w.image("v")); len(h.Recent) != before || !out[0].Resumed {
			t.Errorf("%d points, there were %d: %+v", len(h.Recent), before, out)
		}
	}
	w.wantNoRollback(t, "pushed")
}

// TestRollbackOfRewrittenPoint: a head with the same epoch and next point, which this pool has replaced, is noticed.
func TestRollbackOfRewrittenPoint(t *testing.T) {
	w := newWorld(t)
	rp := w.open()
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	w.pushChange(t, "v", 2)
	old := headNow(t, rp, "v")
	again := PushRequest{Refs: []ref.Ref{{Name: "v", At: w.pushSnapshots("v")[0]}}, Full: true}
	if _, err := Push(t.Context(), w.e, w.r, again); err != nil {
		t.Fatal(err)
	}
	if h := headNow(t, rp, "v"); h.NextSeq != old.NextSeq || h.Epoch != old.Epoch || h.Token == old.Token {
		t.Fatalf("%+v after %+v", h, old)
	}
	putBack(t, rp, old)
	w.wantRollback(t, rp, "v", "accept-rollback")
	_, err := w.tryPush("v")
	wantKind(t, err, errs.Damaged, "accept-rollback")
	w.accept(t, PruneRequest{DryRun: true}, "v")
	out, err := Push(t.Context(), w.e, w.r, PushRequest{Refs: []ref.Ref{{Name: "v"}}, AcceptRollback: true, Full: true})
	if err != nil || out[0].Epoch != old.Epoch+1 {
		t.Fatalf("%+v, %v", out, err)
	}
	w.wantNoRollback(t, "pushed")
	w.pushChange(t, "v", 3)
	w.checkPoint(rp, "v", w.image("v"))
}

// TestNewWriterWaitsForPushes: an identity is not changed while a push is under way, and then pushes begin afresh.
func TestNewWriterWaitsForPushes(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	j, err := openJournal(t.Context(), w.r.dir, "v")
	if err != nil {
		t.Fatal(err)
	}
	if err := j.beginPlan(plan{Snapshot: "v@push-20260102T030405.678Z", Session: repo.NewID()}, true); err != nil {
		t.Fatal(err)
	}
	_, err = NewWriter(t.Context(), w.e)
	wantKind(t, err, errs.InUse, "wait")
	if me, err := Writer(w.e); err != nil || me.ID != w.e.PoolID() {
		t.Errorf("%+v, %v", me, err)
	}
	j.releaseLock()
	if _, err := NewWriter(t.Context(), w.e); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(journalPath(w.r.dir, "v")); err == nil {
		t.Error("the journal of the old identity is still there")
	}
	w.push("v")

	path := filepath.Join(w.dir, writerDir, identityFile)
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = w.tryPush("v")
	wantKind(t, err, errs.Damaged, "remote writer")
	if err := os.WriteFile(path, []byte(`{"format": 2, "id": "x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = w.tryPush("v")
	wantKind(t, err, errs.TooNew, "upgrade")
	_, err = NewWriter(t.Context(), w.e)
	wantKind(t, err, errs.TooNew, "upgrade")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}

// frozenTokens is what testdata/tokens-v1 has.
func frozenTokens() tokens {
	id := func(b byte) (out repo.ID) {
		for i := range out {
			out[i] = b + byte(i)
		}
		return out
	}
	return tokens{current: id(0x20), pending: []repo.ID{id(0x40), id(0x50)}, retired: []repo.ID{id(0x10), id(0x30)}}
}

// TestFrozenTokens: version 1 is read for ever.
func TestFrozenTokens(t *testing.T) {
	b, err := os.ReadFile("testdata/tokens-v1")
	if err != nil {
		t.Fatal(err)
	}
	got, end, err := decodeTokens(b)
	if err != nil || end != len(b) {
		t.Fatalf("%d of %d bytes, %v", end, len(b), err)
	}
	sameTokens(t, got, frozenTokens())
}

// FuzzTokens: whatever is in a file, it is read without harm, and what was read is read again from a short file.
func FuzzTokens(f *testing.F) {
	if b, err := os.ReadFile("testdata/tokens-v1"); err == nil {
		f.Add(b)
	}
	f.Add([]byte(tokenHeader))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, end, err := decodeTokens(b)
		if err != nil || end > len(b) {
			return
		}
		again, _, err := decodeTokens(encodeTokens(got))
		if err != nil || again.current != got.current || !slices.Equal(again.pending, got.pending) {
			t.Errorf("%+v became %+v, %v", got, again, err)
		}
	})
}
