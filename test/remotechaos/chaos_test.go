//go:build linux && (amd64 || arm64)

// Package remotechaos lets four pools work on one remote, with the real program, while requests fail, answers get
// lost, processes are killed and stored objects are damaged. A model knows which points must be there and what is in
// them:
//
//   - a point that a push reported stays until a prune or a delete removes it, and restores byte for byte;
//   - of a push that was killed, each point that is listed restores as what was pushed;
//   - a volume has one writer, who is the pool that took it over last;
//   - verify finds each damage that changes what can be restored, and nothing where there is none;
//   - whatever is done while something is damaged, nothing else is lost by it.
//
// Each run draws from a seed, which it prints: PANDO_SEED repeats it. PANDO_CHAOS says of how many rounds each test is
// (see [shape.rounds]). Where hosts work in turn, the same seed leads to the same commands; where they work at once,
// only the draws of each host are the same.
package remotechaos

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pando/internal/remote/objstore"
	"pando/internal/remote/replicate"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/servertest"
	"pando/internal/testing/testfs"
)

var program string // the binary

func TestMain(m *testing.M) {
	if err := testfs.ShareMounts(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(testfs.WithProgram(&program, m.Run))
}

// shape is how a test goes: where the remote is, and whether the hosts work at once.
type shape struct {
	s3, atOnce bool
}

func (s shape) String() string {
	how, where := "in-turn", "-file"
	if s.atOnce {
		how = "at-once"
	}
	if s.s3 {
		where = "-s3"
	}
	return how + where
}

// rounds is how many rounds of work and rest a test has: PANDO_CHAOS, or as many as take about half a minute on two
// processors, or with PANDO_TEST_FULL an hour. On S3, rests have races in them, which take longer than the work.
func (s shape) rounds(t *testing.T) int {
	if text := os.Getenv("PANDO_CHAOS"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			t.Fatalf("PANDO_CHAOS is not a number of rounds: %q", text)
		}
		return n
	}

	n := 6
	if s.s3 {
		n = 2
	}
	if testfs.Full() {
		n *= 100
	}
	return n
}

// TestRemoteChaos runs two of the four shapes, drawn so that each kind of store and each way to work is there; all four
// with PANDO_TEST_FULL.
func TestRemoteChaos(t *testing.T) {
	testfs.NotShort(t, "other processes do the work")
	if err := faulttest.Available(); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	draw := faulttest.Draw(t, 2)
	for _, s := range []shape{{false, false}, {true, true}, {true, false}, {false, true}} {
		if drawn := (draw == 0) == (s.s3 == s.atOnce); !drawn && !testfs.Full() {
			continue
		}
		t.Run(s.String(), func(t *testing.T) {
			t.Parallel()
			rounds := s.rounds(t) // before pools are made, which a wrong number would leave behind
			newChaos(t, s).run(rounds)
		})
	}
}

// chaos is one test: four hosts, their remote, and the model of it.
type chaos struct {
	t *testing.T
	shape
	r *rand.Rand // of what happens while the hosts rest

	hosts   []*host
	store   objstore.Store // the remote, without faults
	dir     string         // of the remote, if it is one
	server  *servertest.Server
	weather *weather
	older   map[string][][]byte // earlier contents of objects that are written over

	auditDirs []string // for pools into which points are restored: of images, of trees

	damaged bool    // something is, so that commands may fail
	pushed  []found // points that were pushed since it is

	incidents int         // so far
	deck      []race      // races that are left until all have been run
	racing    atomic.Bool // one is being run

	mu     sync.Mutex // guards the model, and what follows
	hot    string     // the head that was pushed to last: others meet there
	m      model
	log    []string
	wrong  []string
	counts map[string]int
}

func newChaos(t *testing.T, s shape) *chaos {
	c := &chaos{t: t, shape: s, r: faulttest.Rand(t)}
	c.older, c.counts = map[string][][]byte{}, map[string]int{}
	c.m = model{named: map[string]tree{}, heads: map[string]*head{}}
	env := c.openStore()

	dirs := []string{testfs.XFS(t, 4<<30), t.TempDir(), testfs.Btrfs(t, 4<<30), testfs.Btrfs(t, 4<<30)}
	for i, dir := range dirs {
		testfs.LeakCheck(t, dir)
		h := &host{c: c, n: i, name: string(rune('a' + i)), pool: filepath.Join(dir, "pool"), env: env, trees: i >= 2,
			r: faulttest.Rand(t, "host", i), volumes: map[string]*volume{}}
		h.connect()
		c.hosts = append(c.hosts, h)
		h.start(i == 1)
	}
	c.auditDirs = []string{t.TempDir(), testfs.Btrfs(t, 4<<30)}
	for _, dir := range c.auditDirs {
		testfs.LeakCheck(t, dir)
	}
	return c
}

// openStore makes the place of the remote, and returns the environment in which commands reach it.
func (c *chaos) openStore() (env []string) {
	access := replicate.Access{Attempts: 3}
	create := !c.s3
	c.dir = filepath.Join(c.t.TempDir(), "remote")
	direct := "file:" + c.dir
	if c.s3 {
		c.server = servertest.GoFakeS3(c.t)
		c.weather = &weather{r: faulttest.Rand(c.t, "weather")}
		direct = c.server.URL("chaos").String()
		values := c.server.Env()
		access.Setting = func(name string) string { return values[name] }
		for name, value := range values {
			env = append(env, name+"="+value)
		}
	}
	env = append(env, "PANDO_REMOTE_ATTEMPTS=4")

	store, err := replicate.OpenStore(c.t.Context(), direct, access, create)
	if err != nil {
		c.t.Fatal(err)
	}
	c.store = store
	return env
}

// run lets the hosts work and rest some times, and then looks at everything.
func (c *chaos) run(rounds int) {
	defer c.close()
	defer c.explain()

	for round := 0; round < rounds && !c.failed(); round++ {
		c.work()
		c.rest(round)
	}
	c.t.Logf("%d rounds: %v", rounds, c.counts)
	if !c.failed() {
		c.finish()
	}
}

func (c *chaos) failed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.wrong) > 0 || c.t.Failed()
}

// together reports whether several hosts work at once now.
func (c *chaos) together() bool { return c.atOnce || c.racing.Load() }

// work is a round of random operations.
func (c *chaos) work() {
	c.weather.turn(true)
	defer c.weather.turn(false)

	if !c.atOnce {
		for range 15 {
			h := c.hosts[c.r.IntN(len(c.hosts))]
			h.step()
			if c.failed() {
				return
			}
			c.weather.turn(false)
			c.reconcile(h)
			c.weather.turn(true)
		}
		return
	}

	var wg sync.WaitGroup
	for _, h := range c.hosts {
		wg.Go(func() {
			for range 10 + h.r.IntN(10) {
				if c.failed() {
					return
				}
				h.step()
			}
		})
	}
	wg.Wait()
}

// rest is when nobody works: what is listed is compared with the model, something may be damaged, points are restored.
func (c *chaos) rest(round int) {
	if c.failed() {
		return
	}
	c.reconcile(c.hosts[c.r.IntN(len(c.hosts))])
	for range racesPerRest {
		if c.s3 && !c.failed() {
			c.race()
		}
	}
	if !c.failed() {
		c.incident()
	}
	if c.failed() {
		return
	}
	c.remember()
	if round%2 == 0 {
		c.damage()
	} else {
		c.audit(4)
	}
}

// finish restores everything that must be there, and looks for what is left over.
func (c *chaos) finish() {
	c.note("finish", "restoring all points")
	c.reconcile(c.hosts[0])
	c.mustBeClean("at the end")
	c.auditDamaged()
	if !c.failed() {
		c.nothingOver()
	}
}

// nothingOver checks that two prunes leave nothing of what was killed.
func (c *chaos) nothingOver() {
	h := c.hosts[0]
	for range 2 { // the first one sees the sessions of the dead, the second ends them
		h.must("remote", "prune", "nas", "--patience", "1ns")
	}
	var found struct {
		GarbageCount int   `json:"garbage_count"`
		WorkingBytes int64 `json:"working_bytes"`
		Unknown      []string
	}
	h.decode(h.must("verify", "nas", "--json"), &found)
	if found.GarbageCount != 0 || found.WorkingBytes != 0 || len(found.Unknown) != 0 {
		c.wrongf("LEAK: on the remote: %+v", found)
	}
}

func (c *chaos) close() {
	for _, h := range c.hosts {
		if o := h.run(trouble{}, "deinit", "--force", "--lose-keys", "-q"); o.code != 0 {
			c.wrongf("deinit of %s: %s", h.name, o)
		}
	}
}

// note writes a line of the log of operations.
func (c *chaos) note(what, format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if what != "" {
		c.counts[what]++
	}
	c.log = append(c.log, time.Now().UTC().Format("15:04:05.000 ")+fmt.Sprintf(format, args...))
}

// wrongf fails the test. The caller does not hold mu.
func (c *chaos) wrongf(format string, args ...any) {
	c.t.Helper()
	c.mu.Lock()
	c.wrong = append(c.wrong, fmt.Sprintf(format, args...))
	c.log = append(c.log, time.Now().UTC().Format("15:04:05.000 ")+"WRONG: "+fmt.Sprintf(format, args...))
	c.mu.Unlock()
	c.t.Errorf(format, args...)
}

// explain says what led to a failure, and last what failed and how to repeat it.
func (c *chaos) explain() {
	if path := os.Getenv("PANDO_CHAOS_LOG"); path != "" {
		_ = os.WriteFile(path+"."+c.String(), []byte(strings.Join(c.log, "\n")+"\n"), 0o600)
	}
	if !c.t.Failed() {
		return
	}
	for _, line := range c.log[max(0, len(c.log)-120):] {
		c.t.Log(line)
	}
	c.t.Logf("repeat with PANDO_SEED=%d RUN=%s, which after these operations said:\n%s",
		faulttest.Seed(), c.t.Name(), strings.Join(c.wrong, "\n"))
}

// pick draws one of a list; the zero value of an empty one.
func pick[V any](r *rand.Rand, all []V) (v V) {
	if len(all) == 0 {
		return v
	}
	return all[r.IntN(len(all))]
}

// sample draws n of a list, all if n is negative.
func sample[V any](r *rand.Rand, all []V, n int) []V {
	all = slices.Clone(all)
	r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	if n < 0 {
		return all
	}
	return all[:min(n, len(all))]
}
