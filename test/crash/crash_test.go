//go:build linux && (amd64 || arm64)

// Package crash kills the real pando at every system call by which each of its
// verbs changes anything, and makes each of these calls fail, and then looks at
// what the next command makes of it: the old state or the new one, and nothing
// left over.
package crash

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/base/ref"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/driver/zfs"
	"pando/internal/engine"
	"pando/internal/front/cli"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/schematest"
	"pando/internal/testing/testfs"
)

var pando string // the binary

var drivers = engine.Drivers{reflink.Name: reflink.Open, btrfs.Name: btrfs.Open, plain.Name: plain.Open,
	zfs.Name: zfs.Open}

func TestMain(m *testing.M) {
	engine.Helper(os.Args) // see try
	if err := testfs.ShareMounts(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(testfs.WithProgram(&pando, m.Run))
}

// kind is a kind of pool to test on.
type kind struct {
	name string
	init []string
	dir  func(t *testing.T) string // of a pool that is to be made; its parent goes with the test
	size []string                  // flags of an import

	more    func(t *testing.T) []string      // more flags of init
	objects func(w *world) map[string]string // nil: they lie in data/objects
	left    func(w *world)                   // what a removed pool must not leave elsewhere
}

var kinds = []kind{
	{name: "reflink", init: []string{"--size", "400M"}, size: []string{"--size", "64M"}, dir: func(t *testing.T) string {
		if os.Geteuid() != 0 {
			t.Skip("SKIPPED: a pool of images needs root: run the tests as root")
		}
		top := t.TempDir()
		testfs.LeakCheck(t, top)
		return filepath.Join(top, "pool")
	}},
	{name: "btrfs", init: []string{"--driver", "btrfs"}, dir: func(t *testing.T) string {
		return filepath.Join(testfs.Btrfs(t, 512<<20), "pool")
	}},
	{name: "plain", init: []string{"--driver", "plain"}, dir: func(t *testing.T) string {
		return filepath.Join(t.TempDir(), "pool")
	}},
}

// world is a pool under test.
type world struct {
	t      testing.TB
	kind   kind
	dir    string
	source string
	more   []string // flags of init
}

func newWorld(t *testing.T, k kind) *world {
	if err := faulttest.Available(); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	w := &world{t: t, kind: k, dir: k.dir(t), source: t.TempDir()}
	w.write(w.source)
	if k.more != nil {
		w.more = k.more(t)
	}
	return w
}

// write makes the small tree that goldens are made of.
func (w *world) write(dir string) {
	w.t.Helper()
	must := func(err error) {
		if err != nil {
			w.t.Fatal(err)
		}
	}
	must(os.MkdirAll(filepath.Join(dir, "sub"), 0o750))
	must(os.WriteFile(filepath.Join(dir, "a"), []byte("content of a"), 0o640))
	must(os.WriteFile(filepath.Join(dir, "sub", "b"), []byte(strings.Repeat("content of b ", 1000)), 0o600))
	must(os.Symlink("../a", filepath.Join(dir, "sub", "link")))
}

// pando runs a command that must succeed.
func (w *world) pando(args ...string) string {
	w.t.Helper()
	out, err := w.try(args...)
	if err != nil {
		w.t.Fatalf("pando %s: %v", strings.Join(args, " "), err)
	}
	return out
}

// try runs a command in this process, which is three times as quick as starting another.
func (w *world) try(args ...string) (string, error) {
	var stdout, stderr strings.Builder
	a := &cli.App{Drivers: drivers, Version: "test", Stdin: os.Stdin, Stdout: &stdout, Stderr: &stderr, Inside: true}
	var err error
	if code := a.Run(context.Background(), append([]string{"--pool", w.dir}, args...)); code != 0 {
		err = fmt.Errorf("exit status %d: %s", code, stderr.String())
	}
	if err := schematest.Check(args, []byte(stdout.String()), []byte(stderr.String())); err != nil {
		w.t.Errorf("%v", err)
	}
	return stdout.String(), err
}

// tryProcess runs a command in a process of its own, as at the same time as others.
func (w *world) tryProcess(args ...string) (string, error) {
	cmd := exec.Command(pando, append([]string{"--pool", w.dir}, args...)...)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, stderr.String())
	}
	return stdout.String(), err
}

// ownDir is a mount point of the user.
func (w *world) ownDir() string { return filepath.Join(filepath.Dir(w.source), "own") }

func (w *world) initArgs() []string { return slices.Concat([]string{"init"}, w.kind.init, w.more) }

func (w *world) initPool() {
	w.t.Helper()
	w.pando(w.initArgs()...)
}

func (w *world) importGolden(name string) {
	w.t.Helper()
	w.pando(w.importArgs(name)...)
}

func (w *world) importArgs(name string) []string {
	return append([]string{"golden", "import", name, w.source, "--no-progress"}, w.kind.size...)
}

// state is what a user sees, in one line a thing, without what differs between
// runs. The first command is the real program, which cleans up behind a dead one;
// the rest is read in this process, which is several times quicker.
func (w *world) state() string {
	w.t.Helper()
	w.pando("ls", "-q")
	return w.peek()
}

// peek is state where nothing is to be cleaned up.
func (w *world) peek() string {
	w.t.Helper()
	e, err := engine.Open(w.t.Context(), w.dir, drivers)
	if err != nil {
		w.t.Fatal(err)
	}
	defer e.Close()

	var b strings.Builder
	goldens, err := e.Goldens(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, g := range goldens {
		fmt.Fprintf(&b, "golden %s@%d of %d", g.Name, g.Current.Generation, g.GenerationCount)
		if g.OverlayPolicy != "allowed" {
			fmt.Fprintf(&b, " overlays %s", g.OverlayPolicy)
		}
		b.WriteString(labelled(g.Current.Object) + "\n")
	}

	volumes, err := e.Volumes(w.t.Context(), engine.VolumesRequest{})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, v := range volumes {
		if !strings.HasPrefix(v.Name, "base") { // the others get no snapshots that matter
			continue
		}
		d, err := e.Show(w.t.Context(), ref.Ref{Name: v.Name})
		if err != nil {
			w.t.Fatal(err)
		}
		for _, s := range d.Snapshots {
			fmt.Fprintf(&b, "snapshot %s %s%s\n", beforeTime.ReplaceAllString(s.Ref, "$1"), s.Consistency, labelled(s))
		}
	}
	for _, v := range volumes {
		pinned := ""
		if v.Pinned {
			pinned = "pinned "
		}
		expires := ""
		if v.ExpiresAt != nil {
			expires = "expires "
		}
		fmt.Fprintf(&b, "volume %s from %s %s%s%s at %s%s%s\n", v.Name, v.Origin, pinned, expires, v.State,
			strings.TrimPrefix(v.Mountpoint, w.dir), w.resized(v), labelled(v))
	}
	return b.String()
}

// beforeTime finds the time in the name of a snapshot that a rewind made.
var beforeTime = regexp.MustCompile(`(@before-[a-z]+)-[0-9TZ.]+`)

func (w *world) snapshots(volume string) []struct{ Ref string } {
	w.t.Helper()
	var d struct{ Snapshots []struct{ Ref string } }
	w.unmarshal(w.pando("show", volume, "--json"), &d)
	return d.Snapshots
}

func (w *world) unmarshal(s string, v any) {
	w.t.Helper()
	if err := json.Unmarshal([]byte(s), v); err != nil {
		w.t.Fatalf("%v in %q", err, s)
	}
}

// fault is a way in which a step goes wrong.
type fault struct {
	name string
	plan faulttest.Plan
}

var faults = []fault{
	{"kill", faulttest.Plan{Mode: faulttest.KillBefore}},
	{"ENOSPC", faulttest.Plan{Mode: faulttest.Fail, Errno: syscall.ENOSPC}},
	{"EIO", faulttest.Plan{Mode: faulttest.Fail, Errno: syscall.EIO}},
}

// operation is a verb under test. From the state that prepare makes, command
// leads to another; revert leads back so that prepare can be called again.
type operation struct {
	name    string
	command func(w *world) []string
	prepare func(w *world) // idempotent: makes the old state
	every   int            // it is slow: strike only every n-th step by default
	always  func(w *world) // what must hold also before anything is cleaned up
	root    bool           // it is for root only

	want   func(before string) string           // the new state; nil: see outcome
	wantOf func(w *world, before string) string // want, where it depends on the kind of pool
	middle func(before, after string) bool      // a third state that is allowed
	all    bool                                 // a kill strikes the processes that it started too
}

var operations = []operation{
	{name: "clone", command: func(*world) []string { return []string{"clone", "g", "v"} },
		prepare: func(w *world) { w.gone("v") }},
	{name: "clone-mount", command: func(*world) []string { return []string{"clone", "g", "v", "--mount"} },
		prepare: func(w *world) { w.gone("v") }},
	{name: "clone-many", command: func(*world) []string { return []string{"clone", "g", "v", "--count", "3"} },
		prepare: func(w *world) { w.gone("v-*") }},
	{name: "mount", command: func(*world) []string { return []string{"mount", "base"} },
		prepare: func(w *world) { w.pando("umount", "base") }},
	{name: "mount-own-dir", command: func(w *world) []string {
		return []string{"mount", "base", w.ownDir()}
	},
		prepare: func(w *world) { w.pando("umount", "base") }},
	{name: "umount", command: func(*world) []string { return []string{"umount", "base"} },
		prepare: func(w *world) { w.pando("mount", "base") }},
	{name: "destroy", command: func(*world) []string { return []string{"destroy", "v"} },
		prepare: func(w *world) { w.there("v") }},
	{name: "destroy-mounted", command: func(*world) []string { return []string{"destroy", "v"} },
		prepare: func(w *world) { w.there("v"); w.pando("mount", "v") }},
	{name: "import", command: func(w *world) []string { return w.importArgs("g2") },
		prepare: func(w *world) { w.goldenGone("g2") }},
	{name: "import-update", command: func(w *world) []string { return append(w.importArgs("g"), "--update") },
		prepare: func(*world) {}},
	{name: "adopt", command: func(w *world) []string { return append(w.importArgs("g2"), "--adopt") },
		prepare: func(w *world) { w.goldenGone("g2") }},
	{name: "adopt-replace", root: true, command: func(w *world) []string { return w.adoptArgs() },
		prepare: (*world).prepareLive, always: (*world).checkLive, every: 6},
	{name: "publish", command: func(*world) []string {
		return []string{"golden", "publish", "g2", "base", "--no-progress"}
	},
		prepare: func(w *world) { w.goldenGone("g2") }},
	{name: "import-preset", command: func(w *world) []string { return append(w.importArgs("g2"), "--preset", w.rules()) },
		prepare: func(w *world) { w.goldenGone("g2") }, every: 2},
	{name: "publish-preset", command: func(w *world) []string {
		return []string{"golden", "publish", "g2", "base", "--no-progress", "--preset", w.rules()}
	},
		prepare: func(w *world) { w.goldenGone("g2") }, every: 2},
	{name: "golden-rm", command: func(*world) []string { return []string{"golden", "rm", "g2"} },
		prepare: func(w *world) {
			if !strings.Contains(w.pando("golden", "ls", "-q"), "g2\n") {
				w.pando("golden", "publish", "g2", "base", "--no-progress")
			}
		}},
	{name: "run", command: func(*world) []string { return []string{"run", "g", "--", "/bin/true"} },
		prepare: func(*world) {}},
	{name: "gc", command: func(*world) []string { return []string{"gc"} },
		prepare: func(*world) {}},
}

func init() { operations = slices.Concat(operations, lifecycle, overlays, gits) }

// rules returns the path of a preset that removes something from the small tree.
func (w *world) rules() string {
	w.t.Helper()
	path := filepath.Join(filepath.Dir(w.source), "small.rules")
	if err := os.WriteFile(path, []byte("needs sub\nlocked a\nunmounted\nremove sub\n"), 0o600); err != nil {
		w.t.Fatal(err)
	}
	return path
}

func (w *world) gone(pattern string) {
	w.t.Helper()
	if out, err := w.try("destroy", pattern); err != nil &&
		!strings.Contains(err.Error(), "exit status 3:") {
		w.t.Fatalf("%s: %v", out, err)
	}
}

func (w *world) goldenGone(name string) {
	w.t.Helper()
	if out, err := w.try("golden", "rm", name); err != nil &&
		!strings.Contains(err.Error(), "exit status 3:") {
		w.t.Fatalf("%s: %v", out, err)
	}
}

func (w *world) there(name string) {
	w.t.Helper()
	if !strings.Contains(w.pando("ls", "-q"), name+"\n") {
		w.pando("clone", "g", name)
	}
}

// TestFaultAtEveryStep is the heart of it: for each kind of pool, each verb,
// each fault and each state-changing system call. By default each verb is tested
// on the first kind of pool and on one of the others, whose protocol is the same.
func TestFaultAtEveryStep(t *testing.T) {
	t.Parallel()
	others := len(kinds) - 1
	draw := faulttest.DrawInside(t, others, 12*sparsely) // below the samples: see sweepOf
	for turn, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			for i, op := range drawn(t, operations) {
				if turn > 0 && turn != 1+(i+draw)%others && !testfs.Full() {
					continue
				}
				t.Run(op.name, func(t *testing.T) {
					t.Parallel()
					if op.root && os.Geteuid() != 0 {
						t.Skip("SKIPPED: mounting needs root: run the tests as root")
					}
					w := newWorld(t, k)
					w.initPool()
					w.importGolden("g")
					w.pando("clone", "g", "base")
					w.sweepFaults(t, op, "")
					w.pando("deinit", "--force")
					w.nothingLeft()
				})
			}
		})
	}
}

// sweepOf is which steps a plan strikes: by default a sample, of which kills on the
// first kind of pool get the most. On the others, whose protocol is the same, it is a
// third of that, and of each error a quarter. Of a slow operation each gets every n-th.
func (w *world) sweepOf(plan faulttest.Plan, every int) faulttest.Sweep {
	s := faulttest.Sweep{Plan: plan, MaxRuns: 3000, Every: max(every, 1) * sparsely, Of: w.struck(),
		Turn: slices.IndexFunc(kinds, func(k kind) bool { return k.name == w.kind.name })}
	if s.Turn > 0 {
		s.Every *= 3
	}
	if plan.Mode == faulttest.Fail {
		s.Every *= 4
	}
	return s
}

// commits reports whether a step decides between the old and the new state, or makes one durable: a rename, or a sync
// of a file, a directory or the catalogue.
func commits(s faulttest.Step) bool {
	return strings.HasPrefix(s.Name, "rename") || s.Name == "linkat" || strings.HasSuffix(s.Name, "sync") ||
		s.Name == "syncfs"
}

// struck names what is struck, on whatever kind of pool and in whatever way.
func (w *world) struck() string {
	return strings.Join(slices.DeleteFunc(strings.Split(w.t.Name(), "/"), func(name string) bool {
		return name == w.kind.name || slices.ContainsFunc(faults, func(f fault) bool { return f.name == name })
	}), "/")
}

// sparsely is of how many steps one is struck; more where everything is slow.
var sparsely = 10

// slow is whether all is emulated, and removing takes longer than other commands may spend on it.
var slow = false

// initEvery is how much fewer of init and deinit, in which ZFS does most.
var initEvery = 2

// drawn leaves out operations where everything is slow.
var drawn = func(_ *testing.T, all []operation) []operation { return all }

// sweepFaults runs an operation undisturbed, and then with each of the faults, in subtests.
func (w *world) sweepFaults(t *testing.T, op operation, prefix string) {
	w.t = t
	op.prepare(w)
	before := w.peek()
	undisturbed := w.strike(op, faulttest.Plan{})
	if undisturbed.ExitCode != 0 {
		t.Fatalf("undisturbed, it failed: %s", undisturbed.Stderr)
	}
	if after, wanted := w.state(), w.outcome(op, before); after != wanted {
		t.Fatalf("undisturbed, it came to:\n%swanted:\n%s", after, wanted)
	}
	w.check()

	for _, f := range faults {
		t.Run(prefix+f.name, func(t *testing.T) { w.sweep(t, op, f.plan, undisturbed.Steps) })
	}
	w.t = t
}

// strike runs the command of an operation with a fault.
func (w *world) strike(op operation, p faulttest.Plan) faulttest.Result {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	res, err := faulttest.Run(ctx, append([]string{pando, "--pool", w.dir}, op.command(w)...),
		faulttest.Options{Plan: p, KillGroup: true, FollowProcesses: op.all})
	if err != nil {
		w.t.Fatal(err)
	}
	return res
}

func (w *world) sweep(t *testing.T, op operation, plan faulttest.Plan, known []faulttest.Step) {
	w.t = t
	s := w.sweepOf(plan, op.every)
	s.Known = known
	// Kills on the first kind of pool strike each step that commits, whatever the sample.
	if s.Turn == 0 && plan.Mode != faulttest.Fail && op.every <= 1 && !slow {
		s.Always = commits
	}
	var before string
	runs := 0
	start := time.Now()
	s.Each(t, func(p faulttest.Plan) faulttest.Result {
		op.prepare(w)
		before = w.peek()
		runs++
		return w.strike(op, p)
	}, func(res faulttest.Result) {
		if op.always != nil {
			op.always(w)
		}
		after := w.state()
		if plan.Mode == faulttest.Fail && res.Signal != 0 {
			t.Errorf("it died of signal %v: %s", res.Signal, res.Stderr)
		}
		switch wanted := w.outcome(op, before); {
		case after == before, after == wanted:
		case plan.Mode != faulttest.Fail && w.between(op, before, after):
		case plan.Mode == faulttest.Fail && res.ExitCode != 0 && w.between(op, before, after):
		default:
			t.Errorf("before:\n%safter:\n%swanted that or:\n%s\nexit %d: %s", before, after, wanted, res.ExitCode, res.Stderr)
		}
		if plan.Mode == faulttest.Fail && res.ExitCode == 0 && after != w.outcome(op, before) {
			t.Errorf("it said that it had succeeded, but:\n%s%s", after, res.Stderr)
		}
		if slow {
			w.pando("gc")
		}
		w.check()
	})
	t.Logf("%d runs in %v", runs, time.Since(start).Round(time.Millisecond))
}

// outcome is the state that an operation leads to from the state before it.
func (w *world) outcome(op operation, before string) string {
	if op.wantOf != nil {
		return op.wantOf(w, before)
	}
	if op.want != nil {
		return op.want(before)
	}
	own := "volume base from g@1 mounted at " + w.ownDir() + "\n"
	idle := "volume base from g@1 idle at \n"
	mounted := "volume base from g@1 mounted at /mnt/base\n"
	var n int
	fmt.Sscanf(before, "golden g@%d", &n)
	vol := fmt.Sprintf("volume v from g@%d ", n)
	switch op.name {
	case "clone":
		return before + vol + "idle at \n"
	case "clone-mount":
		return before + vol + "mounted at /mnt/v\n"
	case "clone-many":
		for i := 1; i <= 3; i++ {
			before += fmt.Sprintf("volume v-%d from g@%d idle at \n", i, n)
		}
		return before
	case "mount":
		return strings.Replace(before, idle, mounted, 1)
	case "mount-own-dir":
		return strings.Replace(before, idle, own, 1)
	case "umount":
		return strings.Replace(before, mounted, idle, 1)
	case "destroy":
		return strings.Replace(before, vol+"idle at \n", "", 1)
	case "destroy-mounted":
		return strings.Replace(before, vol+"mounted at /mnt/v\n", "", 1)
	case "import", "import-preset", "publish", "publish-preset", "adopt", "adopt-replace":
		if op.name == "adopt-replace" {
			before += "volume g2-live from g2@1 mounted at " + w.live() + "\n"
		}
		lines := strings.SplitAfterN(before, "\n", 2)
		return lines[0] + "golden g2@1 of 1\n" + lines[1]
	case "import-update":
		return strings.Replace(before, fmt.Sprintf("golden g@%d of %d\n", n, n), fmt.Sprintf("golden g@%d of %d\n", n+1, n+1),
			1)
	case "golden-rm":
		return strings.Replace(before, "golden g2@1 of 1\n", "", 1)
	}
	return before
}

// between says whether a state that is neither old nor new is allowed: a volume
// that was to be destroyed may be found unmounted, and a golden is made before
// its source is replaced.
func (w *world) between(op operation, before, after string) bool {
	if op.name == "adopt-replace" {
		return after == w.outcome(operation{name: "adopt"}, before)
	}
	if op.middle != nil && op.middle(before, after) {
		return true
	}
	return op.name == "destroy-mounted" && after == strings.Replace(before, "mounted at /mnt/v\n", "idle at \n", 1)
}
