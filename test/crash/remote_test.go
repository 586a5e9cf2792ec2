//go:build linux && (amd64 || arm64)

package crash

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/testing/faulttest"
)

// travel is two pools with one remote, in a directory: a pushes base, b pulls it.
type travel struct {
	t     *testing.T
	a, b  *world
	store string
	round int // of writing, so that contents differ
}

func newTravel(t *testing.T) *travel {
	v := &travel{t: t, a: newWorld(t, kinds[0]), b: newWorld(t, kinds[0]), store: filepath.Join(t.TempDir(), "store")}
	v.a.initPool()
	v.b.initPool()
	v.a.importGolden("g")
	v.a.pando("clone", "g", "base")
	v.a.pando("remote", "add", "nas", "file:"+v.store)
	v.write(v.a, "base")
	v.a.pando("push", "base", "--to", "nas")
	// The other pool gets a key by an identity that is known here, which is quicker
	// than a passphrase.
	v.b.pando("remote", "add", "nas", "file:"+v.store, "--identity", filepath.Join(v.a.dir, "remotes", "nas", "identity"))
	return v
}

// write changes a volume that is not mounted, and leaves it so.
func (v *travel) write(w *world, volume string) {
	v.t.Helper()
	v.round++
	w.pando("mount", volume)
	text := strings.Repeat(fmt.Sprintf("round %d\n", v.round), 3000)
	if err := os.WriteFile(filepath.Join(w.dir, "mnt", volume, "written"), []byte(text), 0o600); err != nil {
		v.t.Fatal(err)
	}
	w.pando("umount", volume)
}

// scatter pushes a file of noise, and then again with three of four of its blocks changed: most of what the first push
// has sent is not needed any more once its point is gone.
func (v *travel) scatter(w *world, volume string) {
	v.t.Helper()
	const block, blocks = 4096, 1024
	v.round++
	noise := rand.NewChaCha8([32]byte{byte(v.round), byte(v.round >> 8)})
	for _, every := range []int{1, 4} {
		w.pando("mount", volume)
		f, err := os.OpenFile(filepath.Join(w.dir, "mnt", volume, "scattered"), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			v.t.Fatal(err)
		}
		b := make([]byte, block)
		for i := range blocks {
			if every > 1 && i%every == 0 {
				continue
			}
			noise.Read(b)
			if _, err := f.WriteAt(b, int64(i)*block); err != nil {
				v.t.Fatal(err)
			}
		}
		if err := f.Close(); err != nil {
			v.t.Fatal(err)
		}
		w.pando("umount", volume)
		w.pando("push", volume, "--to", "nas")
	}
}

// listed is what `remote ls --json` says of a volume.
type listed struct {
	Name       string
	Epoch      uint64
	WriterPool string `json:"writer_pool"`
	Points     []struct{ Name string }
	Operations []struct{ Op string }
}

var pushTime = regexp.MustCompile(`push-[0-9]{8}T[0-9.]+Z`)

// remote is what a person sees of the remote, without what differs between runs.
func (v *travel) remote() string {
	v.t.Helper()
	var all []listed
	v.a.unmarshal(v.a.pando("remote", "ls", "nas", "--json"), &all)
	var b strings.Builder
	for _, l := range all {
		if len(l.Points) == 0 {
			continue // a first push that was killed
		}
		fmt.Fprintf(&b, "%s of %s:", l.Name, v.poolName(l.WriterPool))
		for _, p := range l.Points {
			b.WriteString(" " + pushTime.ReplaceAllString(p.Name, "push"))
		}
		b.WriteString("\n")
	}
	return b.String()
}

func (v *travel) poolName(id string) string {
	for name, w := range map[string]*world{"a": v.a, "b": v.b} {
		if b, err := os.ReadFile(filepath.Join(w.dir, "pool.json")); err == nil && strings.Contains(string(b), `"`+id+`"`) {
			return name
		}
	}
	return "?" + id
}

// local is what is in a pool. Of the snapshots that pushes take, one is needed by the
// next push; another one may be there until then. What a volume was before it was
// brought up to date is left out: it may go only when nothing else can go wrong.
func local(w *world) string {
	var b strings.Builder
	seen := false
	for line := range strings.Lines(w.state()) {
		line = pushTime.ReplaceAllString(line, "push")
		if strings.Contains(line, "@before-pull ") {
			continue
		}
		if strings.HasPrefix(line, "snapshot ") && strings.Contains(line, "@push ") {
			if seen {
				continue
			}
			seen = true
		}
		b.WriteString(line)
	}
	return b.String()
}

func (v *travel) state() string {
	v.t.Helper()
	return "remote\n" + v.remote() + "a\n" + local(v.a) + "b\n" + local(v.b)
}

// clean checks that the remote is whole, data and all, and that the pools are.
func (v *travel) clean() {
	v.t.Helper()
	if out, err := v.a.try("verify", "nas", "--read-data", "--no-progress"); err != nil {
		v.t.Errorf("verify: %s%v", out, err)
	}
	v.a.check()
	v.b.check()
}

// nothingOver checks that after pruning nothing is left of what was killed.
func (v *travel) nothingOver() {
	v.t.Helper()
	for range 2 { // the first one sees the sessions of the dead, the second ends them
		v.a.pando("remote", "prune", "nas", "--patience", "1ns")
	}
	var found struct {
		GarbageCount int   `json:"garbage_count"`
		WorkingBytes int64 `json:"working_bytes"`
		Unknown      []string
	}
	v.a.unmarshal(v.a.pando("verify", "nas", "--json"), &found)
	if found.GarbageCount != 0 || found.WorkingBytes != 0 || len(found.Unknown) != 0 {
		v.t.Errorf("LEAK: on the remote: %+v", found)
	}
	var all []listed
	v.a.unmarshal(v.a.pando("remote", "ls", "nas", "--json"), &all)
	for _, l := range all {
		if len(l.Operations) > 0 {
			v.t.Errorf("LEAK: sessions on %s: %v", l.Name, l.Operations)
		}
	}
	for _, w := range []*world{v.a, v.b} {
		journals, err := filepath.Glob(filepath.Join(w.dir, "remotes", "*", "push", "*"))
		if err != nil || len(journals) > 0 {
			v.t.Errorf("LEAK: journals %v, %v", journals, err)
		}
	}
	left, err := filepath.Glob(filepath.Join(v.store, ".pando", "tmp", "*"))
	if err != nil || len(left) > 0 {
		v.t.Errorf("LEAK: temporary files %v, %v", left, err)
	}
}

// forget removes volumes from the remote, if they are there.
func (v *travel) forget(names ...string) {
	v.t.Helper()
	for _, n := range names {
		if _, err := v.a.try("remote", "delete", "nas", n); err != nil &&
			!strings.Contains(err.Error(), "no volume with this name") && !strings.Contains(err.Error(), "has been removed") {
			v.t.Fatal(err)
		}
	}
}

// pushThin pushes an overlay on g, which is the only point of its volume then.
func (v *travel) pushThin() {
	v.t.Helper()
	v.forget("thin")
	v.a.gone("thin")
	v.a.pando("clone", "g", "thin", "--overlay")
	v.write(v.a, "thin")
	v.a.pando("push", "thin", "--to", "nas")
}

// sameOnBoth mounts a volume in both pools, and wants it to show the same.
func (v *travel) sameOnBoth(volume string) {
	v.t.Helper()
	v.a.pando("mount", volume)
	v.b.pando("mount", volume)
	v.a.sameTree(filepath.Join(v.a.dir, "mnt", volume), filepath.Join(v.b.dir, "mnt", volume))
}

// transport is a verb under test that changes a remote, or reads it.
type transport struct {
	name    string
	prepare func(v *travel)            // idempotent: makes the old state
	pool    func(v *travel) *world     // where it runs
	command []string                   //
	want    func(before string) string // the new state
	// middle is a state in between that is allowed, until the command is repeated.
	middle func(before, after string) bool
	after  func(v *travel) // what must hold at the end
}

func onA(v *travel) *world { return v.a }
func onB(v *travel) *world { return v.b }

var transports = []transport{
	{name: "push", pool: onA, command: []string{"push", "base@s", "--to", "nas", "--no-progress"},
		prepare: func(v *travel) {
			if _, err := v.a.try("remote", "delete", "nas", "base@s"); err != nil &&
				!strings.Contains(err.Error(), "no point \"s\"") {
				v.t.Fatal(err)
			}
			if _, err := v.a.try("destroy", "base@s"); err != nil && !strings.Contains(err.Error(), "no snapshot") {
				v.t.Fatal(err)
			}
			v.write(v.a, "base")
			v.a.pando("snapshot", "base", "s")
		},
		want: func(before string) string {
			return strings.Replace(before, "base of a: push\n", "base of a: push s\n", 1)
		}},
	{name: "push-volume", pool: onA, command: []string{"push", "base", "--to", "nas", "--no-progress"},
		prepare: func(v *travel) { v.onePoint(); v.write(v.a, "base") },
		want: func(before string) string {
			return strings.Replace(before, "base of a: push\n", "base of a: push push\n", 1)
		}},
	{name: "push-clone", pool: onA, command: []string{"push", "fresh", "--to", "nas", "--no-progress"},
		prepare: func(v *travel) {
			v.forget("fresh", "h")
			v.a.gone("fresh")
			v.a.goldenGone("h")
			v.a.pando("golden", "publish", "h", "base", "--no-progress")
			v.a.pando("clone", "h", "fresh")
			v.write(v.a, "fresh")
		},
		want: func(before string) string {
			return strings.Replace(before, "g of a: 1\n", "fresh of a: push\ng of a: 1\nh of a: 1\n", 1)
		},
		middle: func(before, after string) bool { // the golden goes first
			return after == strings.Replace(before, "g of a: 1\n", "g of a: 1\nh of a: 1\n", 1)
		}},
	{name: "push-overlay", pool: onA, command: []string{"push", "thin", "--to", "nas", "--no-progress"},
		prepare: func(v *travel) {
			v.forget("thin", "h")
			v.a.gone("thin")
			v.a.goldenGone("h")
			v.a.pando("golden", "publish", "h", "base", "--no-progress")
			v.a.pando("clone", "h", "thin", "--overlay")
			v.write(v.a, "thin")
		},
		want: func(before string) string {
			return strings.Replace(before, "g of a: 1\n", "g of a: 1\nh of a: 1\nthin of a: push\n", 1)
		},
		middle: func(before, after string) bool { // the golden goes first
			return after == strings.Replace(before, "g of a: 1\n", "g of a: 1\nh of a: 1\n", 1)
		}},
	{name: "pull-overlay", pool: onB, command: []string{"pull", "nas", "thin", "--no-progress"},
		prepare: func(v *travel) {
			v.pushThin()
			v.b.gone("thin")
			v.b.goldenGone("g")
		},
		want: func(before string) string {
			return before + "golden g@1 of 1\nvolume thin from g@1 idle at \n"
		},
		middle: func(before, after string) bool { return after == before+"golden g@1 of 1\n" },
		after:  func(v *travel) { v.sameOnBoth("thin") }},
	{name: "pull-overlay-update", pool: onB, command: []string{"pull", "nas", "thin", "--update", "--no-progress"},
		prepare: func(v *travel) {
			v.pushThin()
			v.b.gone("thin")
			v.b.pando("pull", "nas", "thin")
			v.write(v.a, "thin")
			v.a.pando("push", "thin")
		},
		want:  updated,
		after: func(v *travel) { v.sameOnBoth("thin") }},
	{name: "pull", pool: onB, command: []string{"pull", "nas", "base", "--as", "base2", "--no-progress"},
		prepare: func(v *travel) { v.b.gone("base2"); v.b.goldenGone("g") },
		want: func(before string) string {
			return before + "golden g@1 of 1\nsnapshot base2@push clean\nvolume base2 from g@1 idle at \n"
		},
		// what it was cloned from comes first
		middle: func(before, after string) bool { return after == before+"golden g@1 of 1\n" },
		after: func(v *travel) {
			v.a.pando("mount", "base")
			v.b.pando("mount", "base2")
			v.a.sameTree(filepath.Join(v.a.dir, "mnt", "base"), filepath.Join(v.b.dir, "mnt", "base2"))
		}},
	{name: "pull-update", pool: onB, command: []string{"pull", "nas", "base", "--update", "--no-progress"},
		prepare: func(v *travel) {
			v.onePoint()
			v.b.gone("base")
			v.b.pando("pull", "nas", "base")
			v.write(v.a, "base")
			v.a.pando("push", "base")
		},
		want: updated,
		after: func(v *travel) {
			v.sameOnBoth("base")
		}},
	{name: "remote-prune", pool: onA, command: []string{"remote", "prune", "nas", "--keep-last", "1"},
		prepare: func(v *travel) { v.onePoint(); v.write(v.a, "base"); v.a.pando("push", "base") },
		want: func(before string) string {
			return strings.Replace(before, "base of a: push push\n", "base of a: push\n", 1)
		}},
	{name: "remote-repack", pool: onA, command: []string{"remote", "prune", "nas", "--max-repack", "1G"},
		prepare: func(v *travel) {
			v.scatter(v.a, "base")
			v.a.pando("remote", "prune", "nas", "--keep-last", "1", "--max-repack", "0")
		},
		want: func(before string) string { return before },
		after: func(v *travel) {
			if packs, err := filepath.Glob(filepath.Join(v.store, "packs", "*")); err != nil || len(packs) == 0 {
				v.t.Errorf("nothing was repacked: %v", err)
			}
			v.b.gone("base")
			v.b.pando("pull", "nas", "base")
			v.sameOnBoth("base")
		}},
	{name: "key-rotate", pool: onA, command: []string{"remote", "key", "rotate", "nas"},
		prepare: func(*travel) {},
		want:    func(before string) string { return before },
		after: func(v *travel) {
			v.write(v.a, "base")
			v.a.pando("push", "base")
			v.b.pando("verify", "nas", "--read-data")
		}},
	{name: "take-over", pool: onB, command: []string{"pull", "nas", "base", "--update", "--take-over", "--no-progress"},
		prepare: func(v *travel) {
			v.b.gone("base")
			v.a.pando("pull", "nas", "base", "--update", "--take-over")
			v.onePoint()
			v.b.pando("pull", "nas", "base")
			v.write(v.a, "base")
			v.a.pando("push", "base")
		},
		want:   func(before string) string { return updated(taken(before)) },
		middle: func(before, after string) bool { return after == taken(before) }, // the right to write comes first
		after: func(v *travel) {
			v.write(v.a, "base")
			if out, err := v.a.try("push", "base"); err == nil || !strings.Contains(err.Error(), "--as") {
				v.t.Errorf("whose volume was taken over can push: %s, %v", out, err)
			}
			v.write(v.b, "base")
			v.b.pando("push", "base")
		}},
	{name: "remote-writer", pool: onB, command: []string{"remote", "writer", "--new"},
		prepare: func(*travel) {},
		want:    func(before string) string { return before },
		after: func(v *travel) {
			v.b.gone("base")
			v.b.pando("pull", "nas", "base", "--take-over")
			v.write(v.b, "base")
			v.b.pando("push", "base")
			v.write(v.a, "base")
			if out, err := v.a.try("push", "base"); err == nil || !strings.Contains(err.Error(), "--as") {
				v.t.Errorf("whose volume was taken over can push: %s, %v", out, err)
			}
		}},
	{name: "remote-add", pool: onB, command: []string{"remote", "add", "two", "file:STORE.two"},
		prepare: func(v *travel) {
			if out, err := v.b.try("remote", "rm", "two", "--force", "--lose-keys"); err != nil &&
				!strings.Contains(err.Error(), "no such remote") {
				v.t.Fatal(out, err)
			}
			if err := os.RemoveAll(v.store + ".two"); err != nil {
				v.t.Fatal(err)
			}
		},
		want:  func(before string) string { return before },
		after: func(v *travel) { v.b.pando("verify", "two") }},
}

// updated is a state in which the pool b has brought base to the newest point.
func updated(before string) string {
	rest, b, _ := strings.Cut(before, "\nb\n")
	b = strings.Replace(b, "volume base from g@1 ", "volume base from base@push ", 1)
	return rest + "\nb\n" + strings.Replace(b, "volume thin from g@1 ", "volume thin from thin@push ", 1)
}

// taken is a state in which the pool b writes base.
func taken(before string) string { return strings.Replace(before, "base of a: ", "base of b: ", 1) }

// onePoint leaves of base on the remote the newest point only.
func (v *travel) onePoint() {
	v.t.Helper()
	v.a.pando("remote", "prune", "nas", "--keep-last", "1")
}

// strikeEvery is of how many steps one is struck by default: a verb has some 20 to 200.
var strikeEvery = map[string]int{"kill": 64, "ENOSPC": 128, "EIO": 128}

// commitsRemote reports whether a step commits the head of a volume on the remote, or a change of the catalogue.
func commitsRemote(s faulttest.Step) bool {
	inHeads := func(path string) bool { return strings.Contains(path, "/store/heads") }
	isLog := func(path string) bool { return strings.HasSuffix(path, "-wal") }
	return commits(s) && (slices.ContainsFunc(s.Paths, inHeads) || slices.ContainsFunc(s.Paths, isLog))
}

// TestRemoteFaultAtEveryStep kills each verb that deals with remotes at its system
// calls, those on the remote among them, and makes them fail. After each the remote
// is whole, the old or the new state is there, and the same command leads to the new
// one.
func TestRemoteFaultAtEveryStep(t *testing.T) {
	t.Parallel()
	for _, op := range transports {
		t.Run(op.name, func(t *testing.T) {
			t.Parallel()
			v := newTravel(t)
			start, runs := time.Now(), 0
			v.over(t)
			known := v.undisturbed(op)
			for _, f := range faults {
				t.Run(f.name, func(t *testing.T) { runs += v.sweep(t, op, f.name, f.plan, known) })
			}
			v.over(t)
			if op.after != nil && !t.Failed() {
				op.after(v)
			}
			v.a.pando("deinit", "--force", "--lose-keys")
			v.b.pando("deinit", "--force", "--lose-keys")
			v.a.nothingLeft()
			v.b.nothingLeft()
			t.Logf("%d runs in %v", runs, time.Since(start).Round(time.Millisecond))
		})
	}
}

// over makes t the test that is told.
func (v *travel) over(t *testing.T) { v.t, v.a.t, v.b.t = t, t, t }

// undisturbed runs a verb without a fault, and returns its steps.
func (v *travel) undisturbed(op transport) []faulttest.Step {
	v.t.Helper()
	op.prepare(v)
	wanted := op.want(v.state())
	res := v.strike(op, faulttest.Plan{})
	if after := v.state(); res.ExitCode != 0 || after != wanted {
		v.t.Fatalf("undisturbed, it came to:\n%swanted:\n%sexit %d: %s", after, wanted, res.ExitCode, res.Stderr)
	}
	v.clean()
	v.nothingOver()
	return res.Steps
}

// arguments are those of a verb's command.
func (v *travel) arguments(op transport) (args []string) {
	for _, s := range op.command {
		args = append(args, strings.ReplaceAll(s, "STORE", v.store))
	}
	return args
}

// strike runs the command of a verb with a fault.
func (v *travel) strike(op transport, p faulttest.Plan) faulttest.Result {
	v.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	args := append([]string{pando, "--pool", op.pool(v).dir}, v.arguments(op)...)
	res, err := faulttest.Run(ctx, args, faulttest.Options{Plan: p, KillGroup: true})
	if err != nil {
		v.t.Fatal(err)
	}
	return res
}

func (v *travel) sweep(t *testing.T, op transport, name string, plan faulttest.Plan,
	known []faulttest.Step) (runs int) {
	v.over(t)
	s := faulttest.Sweep{Plan: plan, MaxRuns: 3000, Every: strikeEvery[name], Of: "remote " + op.name, Known: known}
	if plan.Mode != faulttest.Fail {
		s.Always = commitsRemote
	}
	var before, wanted string
	s.Each(t, func(p faulttest.Plan) faulttest.Result {
		op.prepare(v)
		before = v.state()
		wanted = op.want(before)
		runs++
		return v.strike(op, p)
	}, func(res faulttest.Result) {
		after := v.state() // which lets each pool clean up
		v.clean()
		if after != before && after != wanted && (op.middle == nil || !op.middle(before, after)) {
			t.Errorf("before:\n%safter:\n%swanted that or:\n%s\nexit %d: %s", before, after, wanted, res.ExitCode, res.Stderr)
		}
		if plan.Mode == faulttest.Fail {
			switch {
			case res.Signal != 0 && res.Signal != syscall.SIGKILL:
				t.Errorf("it died of signal %v: %s", res.Signal, res.Stderr)
			case res.ExitCode == 0 && after != wanted:
				t.Errorf("it said that it had succeeded, but:\n%s%s", after, res.Stderr)
			}
		}
		v.again(op, wanted)
		v.nothingOver()
	})
	return runs
}

// again repeats the command, which leads to the new state, also from there.
func (v *travel) again(op transport, wanted string) {
	v.t.Helper()
	out, err := op.pool(v).try(v.arguments(op)...)
	if err != nil && !(op.name == "remote-add" && strings.Contains(err.Error(), "already has a remote with this name")) {
		v.t.Errorf("again: %s%v", out, err)
	}
	if after := v.state(); after != wanted {
		v.t.Errorf("done again, it came to:\n%swanted:\n%s", after, wanted)
	}
	v.clean()
}
