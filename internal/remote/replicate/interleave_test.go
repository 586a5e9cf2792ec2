package replicate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
)

// This is a model checker: hosts run the code that pushes and takes over, and each waits before
// every operation on the head until it is its turn. All orders of these operations are tried,
// and in each of them one write whose answer is lost, as a network may. Orders that lead to a
// state that was seen before, in the store and in what each host has seen, are not tried twice.
//
// Other objects belong to one host each, so that the order of operations on them makes no
// difference. The store is in memory: there are thousands of runs.

const modelHead = "v"

// hosts are the repositories as they see them, and a store that steps.
type hosts struct {
	t     *testing.T
	start map[string]modelObject // what is there at first
	key   string                 // of the head
	repos []*repo.Repo
	run   *modelRun // at present
	seen  map[string]bool
	runs  int
}

type modelObject struct {
	data    []byte
	version objstore.Version
}

// modelStore is the store as one host sees it.
type modelStore struct {
	h    *hosts
	host int // observer: nothing waits
}

const observer = -1

// modelTokens are the tokens of a pool, in memory. Processes of one pool share them; a copy of a pool has its own.
type modelTokens struct {
	run *modelRun
	mu  sync.Mutex
	is  tokens
}

// copied is what a copy of the pool has.
func (l *modelTokens) copied(r *modelRun) *modelTokens {
	c := &modelTokens{run: r, is: tokens{l.is.current, slices.Clone(l.is.pending), slices.Clone(l.is.retired)}}
	r.logs = append(r.logs, c)
	return c
}

func (l *modelTokens) load(string) (tokens, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return tokens{l.is.current, slices.Clone(l.is.pending), slices.Clone(l.is.retired)}, nil
}

func (l *modelTokens) pend(string) (repo.ID, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	id := repo.NewID()
	l.is.apply(tokenPending, id)
	return id, nil
}

func (l *modelTokens) confirm(_ string, id repo.ID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if slices.Contains(l.is.pending, id) {
		l.is.apply(tokenCurrent, id)
	}
	return nil
}

// String tells states apart.
func (l *modelTokens) String() string {
	return fmt.Sprintf("%d pending, %d retired", len(l.is.pending), len(l.is.retired))
}

// modelRun is one run.
type modelRun struct {
	objects map[string]modelObject
	writes  int
	tags    map[objstore.Version]string // of the head: what it is, whatever the random numbers in it

	mu      sync.Mutex
	turn    []chan choice // of each host: what its operation, which waits, is to do
	waiting []bool
	puts    []bool // the operation that waits is a write
	arrived chan int
	trace   []string // of each host: what it has seen
	lost    int      // answers that may be lost
	history []repo.Head
	logs    []*modelTokens
}

// choice is who goes on, and whether the answer is lost.
type choice struct {
	host int
	lost bool
}

func (s modelStore) String() string { return "model" }

// wait waits for its turn. Only operations on the head do.
func (s modelStore) wait(ctx context.Context, key string, put bool) (choice, error) {
	r := s.h.run
	if s.host == observer || key != s.h.key {
		return choice{}, ctx.Err()
	}
	r.mu.Lock()
	r.waiting[s.host], r.puts[s.host] = true, put
	r.mu.Unlock()
	r.arrived <- s.host
	select {
	case c := <-r.turn[s.host]:
		return c, nil
	case <-ctx.Done():
		return choice{}, ctx.Err()
	}
}

// saw notes what a host has seen, by which states are told apart.
func (s modelStore) saw(key, format string, v ...any) {
	if s.host != observer && key == s.h.key {
		s.h.run.trace[s.host] += fmt.Sprintf(format, v...) + ";"
	}
}

func (s modelStore) Put(ctx context.Context, key string, data []byte, c objstore.Condition) (objstore.Version, error) {
	turn, err := s.wait(ctx, key, true)
	if err != nil {
		return "", err
	}
	r := s.h.run
	r.mu.Lock()
	was, there := r.objects[key]
	if c.Absent() && there || c.Version() != "" && was.version != c.Version() {
		r.mu.Unlock()
		s.saw(key, "conflict")
		return "", errs.New(errs.Conflict, "put", key, "the condition does not hold")
	}
	r.writes++
	v := objstore.Version(fmt.Sprint("v", r.writes))
	r.objects[key] = modelObject{bytes.Clone(data), v}
	r.mu.Unlock()
	if key == s.h.key && s.host != observer {
		r.tags[v] = fmt.Sprintf("(%d after %s)", s.host, r.trace[s.host])
		h, _, err := s.h.observe().Head(context.Background(), modelHead)
		if err != nil {
			s.h.t.Error(err)
		}
		r.history = append(r.history, h)
	}
	if turn.lost {
		s.saw(key, "lost")
		return "", objstore.Transient(errs.New(errs.IO, "put", key, "the answer was lost"))
	}
	s.saw(key, "put")
	return v, nil
}

func (s modelStore) Get(ctx context.Context, key string, offset, length int64) ([]byte, objstore.Info, error) {
	if _, err := s.wait(ctx, key, false); err != nil {
		return nil, objstore.Info{}, err
	}
	r := s.h.run
	r.mu.Lock()
	defer r.mu.Unlock()
	o, there := r.objects[key]
	s.saw(key, "%s", r.tags[o.version])
	if !there {
		return nil, objstore.Info{}, errs.New(errs.NotFound, "get", key, "it is not there")
	}
	end := int64(len(o.data))
	offset = min(offset, end)
	if length >= 0 {
		end = min(end, offset+length)
	}
	return bytes.Clone(o.data[offset:end]), objstore.Info{Key: key, Bytes: int64(len(o.data)), Version: o.version}, nil
}

func (s modelStore) Stat(ctx context.Context, key string) (objstore.Info, error) {
	_, info, err := s.Get(ctx, key, 0, 0)
	return info, err
}

func (s modelStore) List(_ context.Context, prefix string) iter.Seq2[objstore.Info, error] {
	return func(yield func(objstore.Info, error) bool) {
		r := s.h.run
		r.mu.Lock()
		var keys []string
		for k := range r.objects {
			if strings.HasPrefix(k, prefix) {
				keys = append(keys, k)
			}
		}
		r.mu.Unlock()
		slices.Sort(keys)
		for _, k := range keys {
			if !yield(objstore.Info{Key: k}, nil) {
				return
			}
		}
	}
}

func (s modelStore) Delete(_ context.Context, key string) error {
	r := s.h.run
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.objects, key)
	return nil
}

func (h *hosts) observe() *repo.Repo { return h.repos[len(h.repos)-1] }

// newHosts makes a repository, with what prepare writes into it, and n hosts that open it.
func newHosts(t *testing.T, n int, prepare func(*repo.Repo)) *hosts {
	t.Helper()
	h := &hosts{t: t, seen: map[string]bool{}}
	h.run = &modelRun{objects: map[string]modelObject{}, tags: map[objstore.Version]string{}}
	identity, recipient, err := repo.NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	secret, err := repo.Identity(identity)
	if err != nil {
		t.Fatal(err)
	}
	first, err := repo.Create(t.Context(), modelStore{h, observer}, repo.NewSlot{Label: "test", Recipient: recipient})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(first.Close)
	// The head of the name, to find its key: it is the only one.
	v, err := first.PutHead(t.Context(), repo.Head{Name: modelHead, NextSeq: 1}, "")
	if err != nil {
		t.Fatal(err)
	}
	for k, o := range h.run.objects {
		if o.version == v {
			h.key = k
		}
	}
	delete(h.run.objects, h.key)
	if prepare != nil {
		prepare(first)
	}
	h.start = h.run.objects
	for i := range n + 1 {
		host := i
		if i == n {
			host = observer
		}
		store := objstore.Retry(modelStore{h, host}, objstore.RetryOptions{First: 1, Longest: 1})
		r, err := repo.Open(t.Context(), store, secret)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(r.Close)
		h.repos = append(h.repos, r)
	}
	return h
}

// errCut ends hosts of a run that leads to where another has been.
var errCut = errors.New("seen before")

// all runs the hosts in every order. script is what host i does; check looks at the end of
// each run; both are called with a fresh state made by setup.
func (h *hosts) all(
	lost int, setup func() any, script func(ctx context.Context, state any, host int), check func(state any,
		history []repo.Head),
) {
	h.t.Helper()
	todo := [][]choice{nil}
	for len(todo) > 0 && !h.t.Failed() {
		prefix := todo[len(todo)-1]
		todo = append(todo[:len(todo)-1], h.one(prefix, lost, setup, script, check)...)
	}
	h.t.Logf("%d states in %d runs", len(h.seen), h.runs)
}

// one runs a prefix of choices and then the first that there is each time. It returns the
// prefixes that have not been tried.
func (h *hosts) one(
	prefix []choice, lost int, setup func() any, script func(context.Context, any, int), check func(any, []repo.Head),
) (more [][]choice) {
	n := len(h.repos) - 1
	h.runs++
	r := &modelRun{
		objects: map[string]modelObject{}, writes: 100, tags: map[objstore.Version]string{}, turn: make([]chan choice,
			n), waiting: make([]bool, n),
		puts: make([]bool, n), arrived: make(chan int, n), trace: make([]string, n), lost: lost,
	}
	for k, o := range h.start {
		r.objects[k], r.tags[o.version] = o, "start"
	}
	h.run = r
	state := setup()
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	done := make(chan int, n)
	for i := range n {
		r.turn[i] = make(chan choice)
		go func() {
			script(ctx, state, i)
			done <- i
		}()
	}
	var path []choice
	for running, moving := n, n; ; {
		for moving > 0 { // until each waits or has ended
			select {
			case <-r.arrived:
			case i := <-done:
				running--
				r.trace[i] += "done"
			}
			moving--
		}
		if running == 0 {
			check(state, r.history)
			return more
		}
		var can []choice
		for i := range n {
			if !r.waiting[i] {
				continue
			}
			can = append(can, choice{host: i})
			if r.puts[i] && r.lost > 0 {
				can = append(can, choice{i, true})
			}
		}
		c := can[0]
		if at := len(path); at < len(prefix) {
			c = prefix[at]
		} else {
			key := fmt.Sprint(r.tags[r.objects[h.key].version], r.lost, r.trace, r.logs)
			if h.seen[key] {
				cancel(errCut)
				for ; running > 0; running-- {
					<-done
				}
				return more
			}
			h.seen[key] = true
			for _, other := range can[1:] {
				more = append(more, append(slices.Clone(path), other))
			}
		}
		path = append(path, c)
		if c.lost {
			r.lost--
		}
		r.waiting[c.host] = false
		moving = 1
		r.turn[c.host] <- c
	}
}

// modelHost is what one host does in one run.
type modelHost struct {
	w      headWriter
	source string
	copied bool // another host is a copy of its pool, or it of that
	took   bool
	had    []repo.ID // points that its take-over has found, or that were there when its push began
	pushed repo.ID
	err    error
}

// push does to the head what a push does.
func (m *modelHost) push(ctx context.Context) {
	m.err = m.tryPush(ctx)
}

func (m *modelHost) tryPush(ctx context.Context) error {
	p := &pusher{headWriter: m.w}
	h, err := p.readHead(ctx, modelHead)
	if err != nil {
		return err
	}
	if err := p.checkWriter(h); err != nil {
		return err
	}
	if why := p.rollbackReason(h); why != "" {
		return errors.New(why)
	}
	if !m.took {
		m.had = manifestsOf(h.Head)
	}
	x := &pointPush{name: modelHead, claim: h.claim()}
	x.pt = engine.Point{Ref: modelHead + "@" + m.source, Volume: modelHead, Name: m.source, Lineage: "lineage-of-v"}
	x.pt.ID = x.pt.Lineage
	ctx, l, err := beginSession(ctx, m.w.repo, repo.Push, []string{modelHead}, m.w.me)
	if err != nil {
		return err
	}
	defer func() { _ = l.endSession(ctx) }()
	if h, _, err = p.confirmListed(ctx, x, base{}); err != nil {
		return err
	}
	man := repo.Manifest{
		ID: repo.NewID(), Volume: modelHead, Point: m.source, Content: repo.Block, FS: "none",
		SizeBytes: 4096, CreatedAt: time.Unix(1, 0).UTC(), Source: string(x.pt.ID), Session: l.id,
	}
	if err := m.w.repo.PutManifest(ctx, man); err != nil {
		return err
	}
	m.pushed = man.ID
	_, _, err = p.commitPoint(ctx, l, x.claim, h, x.pt, &man)
	return err
}

// takeOver does what `pull --take-over` does, and then pushes.
func (m *modelHost) takeOver(ctx context.Context) {
	if m.takeOnly(ctx); m.err == nil {
		m.push(ctx)
	}
}

// takeOnly does what `pull --take-over` does.
func (m *modelHost) takeOnly(ctx context.Context) {
	h, _, err := m.w.takeOver(ctx, modelHead, func(repo.Head) error { return nil })
	if m.err = err; err != nil {
		return
	}
	m.took, m.had = true, manifestsOf(h)
}

func manifestsOf(h repo.Head) (out []repo.ID) {
	for _, x := range h.Recent {
		out = append(out, x.Manifest)
	}
	return out
}

// checkFenced is what must be true at the end of each run.
func checkFenced(t *testing.T, hosts []*modelHost, history []repo.Head) {
	t.Helper()
	var last repo.Head
	for i, h := range history {
		if last = h; i == 0 {
			continue
		}
		was := history[i-1]
		switch {
		case h.Epoch < was.Epoch:
			t.Errorf("the epoch goes back from %d to %d", was.Epoch, h.Epoch)
		case h.Epoch == was.Epoch && h.Writer.Pool != was.Writer.Pool:
			t.Errorf("the writer of epoch %d changes from %s to %s", h.Epoch, was.Writer.Pool, h.Writer.Pool)
		case h.NextSeq < was.NextSeq:
			t.Errorf("the next point goes back from %d to %d", was.NextSeq, h.NextSeq)
		}
	}
	listed := map[repo.ID]int{}
	for _, x := range last.Recent {
		listed[x.Manifest]++
	}
	for i, m := range hosts {
		if m.err != nil && errs.KindOf(m.err) != errs.Conflict {
			t.Errorf("host %d failed with %v", i, m.err)
		}
		want := 1
		if m.err != nil {
			want = 0
		}
		if n := listed[m.pushed]; n != want && !m.pushed.IsZero() {
			t.Errorf("host %d ended with %v, and its point is listed %d times", i, m.err, n)
		}
		// Both succeed only one after the other: who takes over has what the other has pushed.
		for k, o := range hosts {
			if i == k || m.err != nil || o.err != nil || m.pushed.IsZero() || o.pushed.IsZero() {
				continue
			}
			if m.w.me.Pool == o.w.me.Pool && m.w.tokens != o.w.tokens {
				t.Errorf("host %d and host %d, whose pools are copies, have both succeeded", i, k)
			}
			if o.took && !slices.Contains(o.had, m.pushed) && !slices.Contains(m.had, o.pushed) {
				t.Errorf("host %d and host %d have both succeeded", i, k)
			}
		}
	}
}

// checkCopies: of hosts that only push, of which all are copies of one pool, one has succeeded; if all are of one pool
// itself, all have.
func checkCopies(t *testing.T, hosts []*modelHost) {
	t.Helper()
	if !slices.ContainsFunc(hosts, func(m *modelHost) bool { return m.took || m.w.tokens != hosts[0].w.tokens }) {
		for i, m := range hosts {
			if m.err != nil {
				t.Errorf("host %d, which shares its pool with all others, failed with %v", i, m.err)
			}
		}
		return
	}
	done := 0
	for _, m := range hosts {
		if !m.copied || m.took {
			return
		}
		if m.err == nil {
			done++
		}
	}
	if done != 1 {
		t.Errorf("%d of %d copies have succeeded", done, len(hosts))
	}
}

// firstHead is a head of pool 0 with a point, and with a token that it knows.
func firstHead(t *testing.T, token repo.ID) func(*repo.Repo) {
	return func(r *repo.Repo) {
		h := repo.Head{
			Name: modelHead, Epoch: 1, Writer: repo.Writer{Pool: "pool-0", Host: "host-0"}, NextSeq: 2, Token: token,
			Recent: []repo.Point{
				{Seq: 1, Name: "first", Manifest: repo.NewID(), Content: repo.Block, SizeBytes: 4096, Source: "s"},
			},
		}
		if _, err := r.PutHead(t.Context(), h, ""); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFencingModel: in no order of the operations of two and three hosts do a push and a
// take-over both succeed, unless who takes over has what was pushed.
func TestFencingModel(t *testing.T) {
	type script = func(*modelHost, context.Context)
	push, takeOver, takeOnly := (*modelHost).push, (*modelHost).takeOver, (*modelHost).takeOnly
	for _, c := range []struct {
		name    string
		scripts []script
		pools   []int // of each host
		copies  []int // of each host: which copy of its pool it is on; nil: there are none
		lost    int
	}{
		{"a push and a take-over", []script{push, takeOver}, []int{0, 1}, nil, 1},
		{"two take-overs", []script{takeOver, takeOver}, []int{0, 1}, nil, 1},
		{"a push and two take-overs", []script{push, takeOver, takeOnly}, []int{0, 1, 2}, nil, 0},
		{"a push, a take-over, and one back by another process", []script{push, takeOver, takeOnly}, []int{0, 1, 0}, nil, 0},
		{"two processes of one pool", []script{push, push}, []int{0, 0}, nil, 1},
		{"two copies of a pool", []script{push, push}, []int{0, 0}, []int{0, 1}, 1},
		{"three copies of a pool", []script{push, push, push}, []int{0, 0, 0}, []int{0, 1, 2}, 0},
		{"two copies and a take-over", []script{push, push, takeOver}, []int{0, 0, 1}, []int{0, 1, 0}, 0},
		{"a copy that takes over from itself", []script{push, takeOver}, []int{0, 0}, []int{0, 1}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			token := repo.NewID()
			h := newHosts(t, len(c.scripts), firstHead(t, token))
			setup := func() any {
				var all []*modelHost
				pools := map[[2]int]*modelTokens{}
				for i, pool := range c.pools {
					me := repo.Writer{Pool: fmt.Sprint("pool-", pool), Host: fmt.Sprint("host-", i)}
					which := [2]int{pool, 0}
					if c.copies != nil {
						which[1] = c.copies[i]
					}
					if pools[which] == nil {
						first := &modelTokens{}
						if pool == 0 {
							first.is.current = token
						}
						pools[which] = first.copied(h.run)
					}
					w := headWriter{repo: h.repos[i], remote: "r", me: me, tokens: pools[which]}
					all = append(all, &modelHost{w: w, source: fmt.Sprint("p", i), copied: c.copies != nil && pool == 0})
				}
				return all
			}
			script := func(ctx context.Context, state any, i int) { c.scripts[i](state.([]*modelHost)[i], ctx) }
			h.all(c.lost, setup, script, func(state any, history []repo.Head) {
				checkFenced(t, state.([]*modelHost), history)
				checkCopies(t, state.([]*modelHost))
			})
		})
	}
}
