package replicate

import (
	"os"
	"slices"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/remote/repo"
)

// pushChange changes a volume and pushes it.
func (w *world) pushChange(t *testing.T, name string, seed uint64) Pushed {
	t.Helper()
	w.edit(name, func(f *os.File) { noise(t, f, seed, int64(seed)*mib, 64<<10) })
	out := w.push(name)
	return out[len(out)-1]
}

// verified is what a verify by this pool says.
func (w *world) verified(t *testing.T) *Verified {
	t.Helper()
	out, err := Verify(t.Context(), w.e, w.r, VerifyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (w *world) tryPrune(q PruneRequest) (*Pruned, error) {
	q.Patience = -1
	return Prune(w.t.Context(), w.e, w.r, q)
}

// accept prunes and wants that rollbacks of these volumes are accepted.
func (w *world) accept(t *testing.T, q PruneRequest, volumes ...string) *Pruned {
	t.Helper()
	q.AcceptRollback = true
	out, err := w.tryPrune(q)
	if err != nil || !slices.Equal(out.Accepted, volumes) {
		t.Fatalf("%+v, %v", out, err)
	}
	return out
}

// headNow reads a head and its version.
func headNow(t *testing.T, rp *repo.Repo, name string) headState {
	t.Helper()
	h, v, err := rp.Head(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return headState{Head: h, version: v}
}

// putBack puts a head back to an older state.
func putBack(t *testing.T, rp *repo.Repo, old headState) {
	t.Helper()
	if _, err := rp.PutHead(t.Context(), old.Head, headNow(t, rp, old.Name).version); err != nil {
		t.Fatal(err)
	}
}

// wantRollback wants that push, verify and prune of a pool notice that a head is older than the pool has seen, and
// change nothing.
func (w *world) wantRollback(t *testing.T, rp *repo.Repo, name, hint string) {
	t.Helper()
	before, err := listObjects(t.Context(), rp)
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range []PruneRequest{{}, {DryRun: true}, {Policy: Policy{Last: 1}}} {
		_, err := w.tryPrune(q)
		wantKind(t, err, errs.Damaged, hint)
	}
	after, err := listObjects(t.Context(), rp)
	if err != nil || len(after.segments) != len(before.segments) || len(after.manifests) != len(before.manifests) {
		t.Errorf("a refused prune leaves %d segments and %d manifests of %d and %d, %v",
			len(after.segments), len(after.manifests), len(before.segments), len(before.manifests), err)
	}
	out := w.verified(t)
	found := slices.DeleteFunc(slices.Clone(out.Problems), func(p Problem) bool { return p.Volume != name })
	if out.TotalProblems != 1 || len(found) != 1 || !strings.HasPrefix(found[0].Object, "heads/") {
		t.Errorf("verify finds %v", out.Problems)
	}
	one, err := Verify(t.Context(), w.e, w.r, VerifyRequest{Names: []string{name}})
	if err != nil || one.TotalProblems != 1 {
		t.Errorf("verify of %s: %+v, %v", name, one, err)
	}
}

// wantNoRollback wants no complaint.
func (w *world) wantNoRollback(t *testing.T, when string) {
	t.Helper()
	if out := w.verified(t); out.TotalProblems != 0 || len(out.Warnings) != 0 {
		t.Errorf("%s: verify finds %v, %v", when, out.Problems, out.Warnings)
	}
	if _, err := w.tryPrune(PruneRequest{}); err != nil {
		t.Errorf("%s: %v", when, err)
	}
}

// TestRollbackWithinEpoch: a head that was put back to an older state of the same epoch is noticed by the pool that
// wrote it, and by one that has only read it; a prune can accept it.
func TestRollbackWithinEpoch(t *testing.T) {
	a := newWorld(t)
	b := a.another(t)
	rp := a.open()
	a.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	a.clone("g", "v")
	a.pushChange(t, "v", 2)
	old := headNow(t, rp, "v")
	a.pushChange(t, "v", 3)
	b.wantNoRollback(t, "at first")

	putBack(t, rp, old)
	for _, w := range []*world{a, b} {
		w.wantRollback(t, rp, "v", `"remote prune" of r with parameter "accept-rollback"`)
	}
	if v := a.verified(t); !v.Problems[0].Rollback || !strings.Contains(errs.HintOf(v.Err()), "accept-rollback") {
		t.Errorf("%+v, %v", v.Problems, errs.HintOf(v.Err()))
	}
	if v, err := Verify(t.Context(), nil, a.r, VerifyRequest{}); err != nil || v.TotalProblems != 0 {
		t.Errorf("without a pool: %+v, %v", v, err)
	}
	_, err := a.tryPush("v")
	wantKind(t, err, errs.Damaged, `parameter "accept-rollback"`)

	b.accept(t, PruneRequest{DryRun: true}, "v")
	b.wantRollback(t, rp, "v", "accept-rollback")
	b.accept(t, PruneRequest{}, "v")
	if h := headNow(t, rp, "v"); h.Epoch != old.Epoch+1 || len(h.Recent) != 1 {
		t.Errorf("an accepted head has epoch %d and %d points", h.Epoch, len(h.Recent))
	}
	b.wantNoRollback(t, "accepted")
	a.wantNoRollback(t, "accepted by another")
	a.pushChange(t, "v", 4)
	a.checkPoint(rp, "v", a.image("v"))
	a.wantNoRollback(t, "pushed again")
}

// TestRollbackAcceptedByPush: the push that goes on uses no epoch twice, and others that have seen the newer state
// do not complain.
func TestRollbackAcceptedByPush(t *testing.T) {
	a := newWorld(t)
	b := a.another(t)
	rp := a.open()
	a.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	a.clone("g", "v")
	a.pushChange(t, "v", 2)
	old := headNow(t, rp, "v")
	a.pushChange(t, "v", 3)
	a.pushChange(t, "v", 4)
	b.wantNoRollback(t, "at first")

	putBack(t, rp, old)
	a.wantRollback(t, rp, "v", "accept-rollback")
	out, err := Push(t.Context(), a.e, a.r, PushRequest{Refs: []ref.Ref{{Name: "v"}}, AcceptRollback: true})
	if err != nil || out[0].Epoch != old.Epoch+1 {
		t.Fatalf("%+v, %v", out, err)
	}
	a.checkPoint(rp, "v", a.image("v"))
	a.wantNoRollback(t, "pushed")
	b.wantNoRollback(t, "pushed by the other")
	a.pushChange(t, "v", 5)
}

// TestRollbackOfLostHead: a head that is missing is noticed, even if none of its points is left, and comes back by
// a repair.
func TestRollbackOfLostHead(t *testing.T) {
	a := newWorld(t)
	b := a.another(t)
	rp := a.open()
	a.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	a.clone("g", "v")
	a.pushChange(t, "v", 2)
	b.wantNoRollback(t, "at first")
	id, err := rp.HeadID("v")
	if err != nil {
		t.Fatal(err)
	}
	remove := func() {
		t.Helper()
		if err := rp.Store().Delete(t.Context(), "heads/"+id.String()); err != nil {
			t.Fatal(err)
		}
	}
	remove()
	for _, w := range []*world{a, b} {
		w.wantRollback(t, rp, "v", `"remote repair" of r`)
	}
	out, err := Repair(t.Context(), a.e, a.r, RepairRequest{})
	if err != nil || len(out.Volumes) != 1 || !out.Volumes[0].Writer {
		t.Fatalf("%+v, %v", out, err)
	}
	for _, w := range []*world{a, b} {
		w.wantNoRollback(t, "repaired")
	}
	a.pushChange(t, "v", 3)
	b.wantNoRollback(t, "pushed after the repair")

	remove()
	if out := b.accept(t, PruneRequest{}, "v"); len(out.Damaged) != 1 {
		t.Errorf("%+v", out)
	}
	if out, err := b.tryPrune(PruneRequest{}); err != nil || len(out.Damaged) != 1 || out.FreedBytes != 0 {
		t.Errorf("after it was accepted: %+v, %v", out, err)
	}
	a.wantRollback(t, rp, "v", "remote repair")
	if _, err := Repair(t.Context(), a.e, a.r, RepairRequest{}); err != nil {
		t.Fatal(err)
	}
	a.checkPoint(rp, "v", a.image("v"))
}

// TestNoFalseRollback: what hosts do to heads in the ordinary way is no rollback.
func TestNoFalseRollback(t *testing.T) {
	a := newWorld(t)
	b := a.another(t)
	a.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	both := func(when string) {
		t.Helper()
		a.wantNoRollback(t, when)
		b.wantNoRollback(t, when)
	}
	a.clone("g", "v")
	for seed := range uint64(3) {
		a.pushChange(t, "v", seed+2)
		both("pushed")
	}
	if _, err := b.tryPrune(PruneRequest{Policy: Policy{Last: 1}}); err != nil {
		t.Fatal(err)
	}
	both("pruned by the other")
	a.pushChange(t, "v", 5)
	if _, err := RemoveVolume(t.Context(), b.r, ref.Ref{Name: "v", At: a.pushSnapshots("v")[0]}); err != nil {
		t.Fatal(err)
	}
	both("a point deleted")
	if _, err := RemoveVolume(t.Context(), b.r, ref.Ref{Name: "v"}); err != nil {
		t.Fatal(err)
	}
	both("deleted")
	a.pushChange(t, "v", 6)
	both("pushed again")

	for i, w := range []*world{b, a, b} {
		q := PullRequest{Ref: ref.Ref{Name: "v"}, TakeOver: true, Update: true}
		if _, err := Pull(t.Context(), w.e, w.r, q); err != nil {
			t.Fatal(err)
		}
		both("taken over")
		w.pushChange(t, "v", 7+uint64(i))
		both("pushed by another writer")
	}

	// An older generation that is pushed later, and one under another name.
	a.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 20, 0, mib) })
	a.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 21, 0, mib) })
	for _, r := range []string{"g@3", "g@2", "g@3"} {
		a.push(r)
		both("pushed " + r)
	}

	// A pool that was killed before it recorded what it pushed.
	if err := a.e.Transfer().DropRemoteHead(t.Context(), a.r.Mark.ID.String(), "g"); err != nil {
		t.Fatal(err)
	}
	both("forgotten")
	a.push("g@1")
	both("pushed what was there")
}

// TestTakeOverOfRollback: a pool does not take over a head that is older than it has seen, as the new epoch would hide
// that. It can read it, and is told.
func TestTakeOverOfRollback(t *testing.T) {
	a := newWorld(t)
	b := a.another(t)
	rp := a.open()
	a.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	a.clone("g", "v")
	a.pushChange(t, "v", 2)
	old := headNow(t, rp, "v")
	a.pushChange(t, "v", 3)
	b.wantNoRollback(t, "at first")
	putBack(t, rp, old)

	pull := func(q PullRequest) (Pulled, error) {
		q.Ref = ref.Ref{Name: "v"}
		return Pull(t.Context(), b.e, b.r, q)
	}
	out, err := pull(PullRequest{As: ref.MustName("look")})
	if err != nil || !strings.Contains(strings.Join(out.Notes, "\n"), "older state") {
		t.Errorf("%v, %v", out.Notes, err)
	}
	_, err = pull(PullRequest{TakeOver: true})
	wantKind(t, err, errs.Damaged, "accept-rollback")
	if h := headNow(t, rp, "v"); h.Epoch != old.Epoch || h.Writer != old.Writer {
		t.Errorf("a refused take-over leaves %+v", h)
	}
	if _, err := b.tryPrune(PruneRequest{AcceptRollback: true}); err != nil {
		t.Fatal(err)
	}
	if out, err := pull(PullRequest{TakeOver: true}); err != nil || !out.TookOver || out.Epoch != old.Epoch+2 {
		t.Errorf("%+v, %v", out, err)
	}
	b.pushChange(t, "v", 4)
}
