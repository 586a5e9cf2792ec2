package replicate

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/storetest"
)

// stepper lets one process wait before an operation on the store.
type stepper struct {
	n, stop        int // operations so far; the one to wait before
	paused, resume chan struct{}
}

// step is called before each operation.
func (s *stepper) step() {
	if s == nil {
		return
	}
	if s.n++; s.n-1 == s.stop {
		s.paused <- struct{}{}
		<-s.resume
	}
}

// vanishing is a remote in memory with a push, a prune, and somebody who deletes the session of the push.
type vanishing struct {
	b          *bench
	h          *hosts
	start      map[string]modelObject
	push       *stepper
	pruneStep  func()
	pusher     *repo.Repo
	pruner     *repo.Repo
	base       *made
	policy     Policy
	head       string
	committed  int
	ended, all int
}

// newVanishing makes the remote. first: the pushed volume has no head yet, and is a clone of a point that the prune
// removes.
func newVanishing(t *testing.T, first bool) *vanishing {
	t.Helper()
	identity, recipient, err := repo.NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	secret, err := repo.Identity(identity)
	if err != nil {
		t.Fatal(err)
	}
	h := &hosts{t: t, run: &modelRun{objects: map[string]modelObject{}}}
	store := modelStore{h, observer}
	r, err := repo.Create(t.Context(), store, repo.NewSlot{Label: "test", Recipient: recipient})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	x := &vanishing{h: h, head: "v", b: &bench{t: t, store: store, secret: secret, repo: r,
		truth: map[string]map[string]*made{}, blocks: 8, frames: 4}}
	x.base = x.b.must("v", "p1", 1<<20, nil, change{0: block(1), 4096: block(2)}, false)
	if first {
		x.head, x.policy = "w", Policy{Last: 1}
		x.b.must("v", "p2", 1<<20, nil, change{0: block(3)}, false)
	}
	x.start = h.run.objects
	hook := func(step func()) *repo.Repo {
		r, _ := x.b.faulty(storetest.Fault{Times: -1, Match: func(storetest.Call) bool {
			step()
			return false
		}})
		return r
	}
	x.pusher, x.pruner = hook(func() { x.push.step() }), hook(func() { x.pruneStep() })
	return x
}

// tryPush does on the remote what a push does, and returns its manifest.
func (x *vanishing) tryPush(ctx context.Context) (repo.ID, error) {
	r, me := x.pusher, repo.Writer{Pool: "pool", Host: "host"}
	p := &pusher{headWriter: headWriter{repo: r, remote: "r", me: me, tokens: &modelTokens{run: x.h.run}}}
	h, err := p.readHead(ctx, x.head)
	if err != nil {
		return repo.ID{}, err
	}
	y := &pointPush{name: x.head, claim: h.claim()}
	y.pt = engine.Point{Ref: x.head + "@new", Volume: x.head, Name: "new", ID: "id", Lineage: "id"}
	ctx, l, err := beginSession(ctx, r, repo.Push, []string{x.head}, me, x.base.manifest.ID)
	if err != nil {
		return repo.ID{}, err
	}
	defer func() { _ = l.endSession(ctx) }()
	at := base{head: "v", point: repo.Point{Seq: 1, Manifest: x.base.manifest.ID}}
	h, listed, err := p.confirmListed(ctx, y, at)
	if err == nil && !listed {
		err = errBaseGone
	}
	if err != nil {
		return repo.ID{}, err
	}
	m := &made{volume: x.head, point: "new", content: maps.Clone(x.base.content)}
	m.manifest = repo.Manifest{ID: repo.NewID(), Volume: x.head, Point: "new", Content: repo.Block, FS: "none",
		SizeBytes: 1 << 20, Sector: 512, CreatedAt: x.base.manifest.CreatedAt, Source: "id", Session: l.id}
	if err := x.b.write(ctx, r, l.id, m, x.base, change{8192: block(4)}); err != nil {
		return repo.ID{}, err
	}
	_, _, err = p.commitPoint(ctx, l, y.claim, h, y.pt, &m.manifest)
	return m.manifest.ID, err
}

// order is one order of steps. The push stops before its operation push, and the prune runs up to its operation prune.
// Then the push takes another more operations, the prune ends, and the push ends.
type order struct {
	push, prune, more int
	vanish            int // the session is deleted: 0 never, 1 before the prune begins, 2 when it stops, 3 when it goes on
}

// run runs the push and the prune in one order. It returns false if the push or the prune has fewer operations.
func (x *vanishing) run(t *testing.T, o order) (pushed, pruned bool) {
	t.Helper()
	x.h.run = &modelRun{objects: maps.Clone(x.start), writes: 100}
	x.push = &stepper{stop: o.push, paused: make(chan struct{}), resume: make(chan struct{})}
	var id repo.ID
	var perr error
	done := make(chan struct{})
	go func() {
		defer close(done)
		id, perr = x.tryPush(t.Context())
	}()
	running := x.await(done)
	if !running {
		return false, true
	}
	vanish := func(when int) {
		x.h.run.mu.Lock()
		defer x.h.run.mu.Unlock()
		for k := range x.h.run.objects {
			if o.vanish == when && strings.HasPrefix(k, sessionsPrefix) {
				delete(x.h.run.objects, k)
			}
		}
	}
	vanish(1)
	n := 0
	x.pruneStep = func() {
		x.h.run.mu.Lock() // the prune may use the store from several goroutines
		n++
		here := n-1 == o.prune
		x.h.run.mu.Unlock()
		if !here {
			return
		}
		vanish(2)
		x.push.stop = x.push.n - 1 + o.more
		x.push.resume <- struct{}{}
		running = x.await(done)
		vanish(3)
	}
	if _, err := prune(t.Context(), x.pruner, PruneRequest{Policy: x.policy}); err != nil {
		t.Fatalf("%+v: prune: %v", o, err)
	}
	if running {
		x.push.stop = -1
		x.push.resume <- struct{}{}
		<-done
	}
	x.judge(t, o, id, perr)
	return true, n > o.prune
}

const sessionsPrefix = "sessions/"

// await waits until the push stops or has ended.
func (x *vanishing) await(done chan struct{}) (running bool) {
	select {
	case <-x.push.paused:
		return true
	case <-done:
		return false
	}
}

// judge checks that every listed point has all its data, and that the push says truthfully whether its point is listed.
func (x *vanishing) judge(t *testing.T, o order, id repo.ID, perr error) {
	t.Helper()
	x.all++
	gone := errors.Is(perr, errEnded) || errors.Is(perr, errBaseGone) || errs.Is(perr, errs.NotFound)
	switch {
	case gone && o.vanish != 0:
		x.ended++
	case errors.Is(perr, errBaseGone) && !x.policy.IsZero():
	case perr != nil:
		t.Fatalf("%+v: push: %v", o, perr)
	}
	listed := false
	heads, err := readHeads(t.Context(), x.b.repo)
	if err != nil || len(heads.bad) > 0 {
		t.Fatalf("%+v: %+v, %v", o, heads.bad, err)
	}
	for _, h := range heads.good {
		for _, pt := range h.Recent {
			listed = listed || pt.Manifest == id
			if err := x.checkWhole(t.Context(), pt); err != nil {
				t.Fatalf("%+v: the push ended with %v, and %s@%s is damaged: %v", o, perr, h.Name, pt.Name, err)
			}
		}
	}
	if listed != (perr == nil) {
		t.Fatalf("%+v: the push ended with %v, and its point is listed: %t", o, perr, listed)
	}
	if listed {
		x.committed++
	}
}

// checkWhole returns an error if data of a point is missing.
func (x *vanishing) checkWhole(ctx context.Context, pt repo.Point) error {
	m, err := x.b.repo.Manifest(ctx, pt.Manifest)
	if err != nil {
		return err
	}
	needs, err := needsOf(ctx, x.b.repo, &m)
	for s := range needs {
		if _, serr := x.b.repo.StatSegment(ctx, s); serr != nil {
			err = errors.Join(err, errs.Wrap("find segment", s.String(), serr))
		}
	}
	return err
}

// TestSessionVanishes: the session of a push is deleted, and a prune runs, at any time. Whatever the order, the push
// commits no point whose data the prune deletes, and fails only if its session was deleted. One order in eight is tried
// by default.
func TestSessionVanishes(t *testing.T) {
	const every = 8
	for _, first := range []bool{false, true} {
		t.Run(fmt.Sprint("first push ", first), func(t *testing.T) {
			x := newVanishing(t, first)
			for vanish := range 4 {
				for o := (order{vanish: vanish, push: 1}); ; o.push++ {
					pushed := true
					for o.prune = 0; pushed; o.prune++ {
						more := true
						o.more = 1 + faulttest.Draw(t, every, vanish, o.push, o.prune)
						for ; more && pushed && o.more < 12; o.more += faulttest.DrawStep(every) {
							pushed, more = x.run(t, o)
						}
						if !more {
							break
						}
					}
					if !pushed {
						break
					}
				}
			}
			t.Logf("%d orders: %d pushes committed, %d ended", x.all, x.committed, x.ended)
			if x.committed == 0 || x.ended == 0 {
				t.Error("too little happened for this to tell anything")
			}
		})
	}
}
