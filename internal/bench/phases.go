package bench

import (
	"context"
	"errors"
	"path/filepath"
	"strconv"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/durable"
	"pando/internal/linux/treewalk"
)

func itoa(n int) string { return strconv.Itoa(n) }

// timed is one operation that is repeated: its figures so far.
type timed struct {
	op     Operation
	wall   Sample
	synced Sample
	sys    time.Duration
	n      int
}

func (t *timed) add(u Use, synced time.Duration) {
	t.wall.Add(time.Duration(u.WallNano))
	if synced > 0 {
		t.synced.Add(synced)
	}
	t.sys += time.Duration(u.SysNano)
	t.op.MaxRSS = max(t.op.MaxRSS, u.MaxRSS)
	t.n++
}

func (t *timed) done() Operation {
	t.op.Wall, t.op.Synced = t.wall.Dist(), t.synced.Dist()
	if t.n > 0 {
		t.op.Sys = t.sys.Seconds() / float64(t.n)
	}
	return t.op
}

// tail measures what n operations in fn write.
func (r *run) tail(ctx context.Context, op *Operation, fn func() (n int, err error)) (err error) {
	count := 0
	op.Devices, op.Tail, op.NoDevices, err = r.meter.around(ctx, func() (int, error) {
		n, err := fn()
		count = n
		return n, err
	})
	op.TailOf = count
	return err
}

// copies compares an import with `cp -a` of the same tree into the same
// filesystem. Both end with syncfs, which is part of the time.
func (r *run) copies(ctx context.Context) error {
	cp := &timed{op: Operation{Name: OpCopy}}
	im := &timed{op: Operation{Name: OpImport, NotMeasured: r.noImport}}
	for i := range r.Rounds {
		r.tracker.StartOf(progress.RunningBenchmark, "cp -a and import, round "+itoa(i+1)+" of "+itoa(r.Rounds), 0, 0)
		if err := r.copyOnce(ctx, cp, "never", r.source, "copy", true); err != nil {
			return err
		}
		if err := r.importOnce(ctx, im, i, true); err != nil {
			return err
		}
	}

	// Once more, without the sync, to see what is written and when.
	r.tracker.StartOf(progress.RunningBenchmark, "measuring the writes of cp -a and import", 0, 0)

	if cp.op.NotMeasured == "" {
		if err := r.tail(ctx, &cp.op, func() (int, error) {
			return 1, r.copyOnce(ctx, cp, "never", r.source, "copy", false)
		}); err != nil {
			return err
		}
		r.copyDir = filepath.Join(r.scratch.inner, "copy") // reflinks are made of it
	}

	if im.op.NotMeasured == "" {
		if err := r.tail(ctx, &im.op, func() (int, error) { return 1, r.importOnce(ctx, im, r.Rounds, false) }); err != nil {
			return err
		}
	}

	r.rep.Operations = append(r.rep.Operations, cp.done(), im.done())
	return nil
}

// copyOnce copies from to a directory in the pool's filesystem. With timing it
// counts, with a sync at the end, and the copy is removed again.
func (r *run) copyOnce(ctx context.Context, t *timed, reflink, from, to string, timing bool) error {
	if t.op.NotMeasured != "" {
		return nil
	}

	to = filepath.Join(r.scratch.inner, to)
	if timing {
		if err := r.meter.settle(ctx); err != nil {
			return err
		}
	}

	start := time.Now()
	u, err := r.cp(ctx, reflink, from, to)
	if msg, is := isCopyError(err); is {
		t.op.NotMeasured = msg
		return treewalk.Remove(ctx, to)
	}

	if err != nil || !timing {
		return err
	}

	if err := durable.SyncFS(r.scratch.inner); err != nil {
		return err
	}

	t.add(u, time.Since(start))
	return treewalk.Remove(ctx, to)
}

// importOnce imports the source. Without timing the golden stays, as the one
// that clones are made of.
func (r *run) importOnce(ctx context.Context, t *timed, i int, timing bool) error {
	if t.op.NotMeasured != "" {
		return nil
	}

	name := r.name("golden" + itoa(i))
	if timing {
		if err := r.meter.settle(ctx); err != nil {
			return err
		}
	} else {
		r.golden = ref.Ref{Name: name}
	}

	start := time.Now()
	u, err := r.pando(ctx, "golden", "import", name, r.source)
	if err != nil || !timing {
		t.op.MaxRSS = max(t.op.MaxRSS, u.MaxRSS)
		return err
	}

	if err := durable.SyncFS(r.scratch.inner); err != nil {
		return err
	}

	t.add(u, time.Since(start))
	_, err = r.eng.RemoveGolden(ctx, ref.Ref{Name: name})
	return err
}

// reflinks measures copies of the tree, file by file, that share the data. Pando replaces these.
func (r *run) reflinks(ctx context.Context) error {
	t := &timed{op: Operation{Name: OpReflink}}
	if r.copyDir == "" {
		t.op.NotMeasured = "the pool's filesystem has no copy of the source"
	}

	for i := range r.Rounds {
		r.tracker.StartOf(progress.RunningBenchmark, "cp -a --reflink, round "+itoa(i+1)+" of "+itoa(r.Rounds), 0, 0)
		if err := r.copyOnce(ctx, t, "always", r.copyDir, "reflink", true); err != nil {
			return err
		}
	}

	if t.op.NotMeasured == "" {
		r.tracker.StartOf(progress.RunningBenchmark, "measuring the writes of cp -a --reflink", 0, 0)
		if err := r.tail(ctx, &t.op, func() (int, error) {
			return 1, r.copyOnce(ctx, t, "always", r.copyDir, "reflink", false)
		}); err != nil {
			return err
		}
		if err := treewalk.Remove(ctx, filepath.Join(r.scratch.inner, "reflink")); err != nil {
			return err
		}
	}

	r.rep.Operations = append(r.rep.Operations, t.done())
	return nil
}

// pairing measures the floor and Pando in pairs.
type pairing struct {
	*run
	first                                 int // number of the first clone
	floorClone, floorDestroy, floorForget Sample
	pandoClone                            *Sample
	pandoDestroy                          Sample
	steps                                 []*Sample // of the floor's clones
	stepNames                             []string
}

// pairs makes clones of the floor and of Pando in turn, and then destroys them in turn. Which one goes first changes
// every time.
func (r *run) pairs(ctx context.Context) error {
	volumes, err := r.count(ctx)
	if err != nil {
		return err
	}

	if err := r.meter.settle(ctx); err != nil {
		return err
	}

	p := &pairing{run: r, first: r.next, pandoClone: &Sample{}}
	total := r.Clones + warmUps
	r.tracker.StartOf(progress.RunningBenchmark, "cloning in a pool with "+itoa(volumes)+" volumes", int64(total), 0)

	err = r.inTurn(total, func(i int) error { return p.cloneFloor(ctx, i) },
		func(i int) error { return p.clonePando(ctx, i) })
	if err != nil {
		return err
	}

	err = r.inTurn(total, func(i int) error { return p.destroyFloor(ctx, i) },
		func(i int) error { return p.destroyPando(ctx, i) })
	if err != nil {
		return err
	}

	r.next += total
	s := Series{
		Volumes: volumes, pando: p.pandoClone,
		FloorClone: p.floorClone.Dist(), FloorDestroy: p.floorDestroy.Dist(), FloorForget: p.floorForget.Dist(),
		PandoClone: p.pandoClone.Dist(), PandoDestroy: p.pandoDestroy.Dist(),
	}
	for i, n := range p.stepNames {
		s.Steps = append(s.Steps, Step{n, p.steps[i].Dist()})
	}

	r.rep.Series = append(r.rep.Series, s)
	return nil
}

// step returns a function that a clone calls at the end of each step, and counts their times unless it is a warm-up.
func (p *pairing) step(count bool) func(string) {
	last, i := time.Now(), 0
	return func(name string) {
		now := time.Now()
		if i == len(p.steps) {
			p.steps, p.stepNames = append(p.steps, &Sample{}), append(p.stepNames, name)
		}
		if count {
			p.steps[i].Add(now.Sub(last))
		}
		last = now
		i++
	}
}

// cloneFloor makes the i-th clone by hand.
func (p *pairing) cloneFloor(ctx context.Context, i int) error {
	if p.floor == nil {
		return nil
	}

	start := time.Now()
	if err := p.floor.clone(ctx, p.first+i, p.step(i >= warmUps)); err != nil {
		return errs.Wrap("bench", "raw floor", err)
	}
	if i >= warmUps {
		p.floorClone.Add(time.Since(start))
	}
	return nil
}

// clonePando makes the i-th clone with Pando.
func (p *pairing) clonePando(ctx context.Context, i int) error {
	defer p.tracker.Add(1, 0)
	name := p.name("clone" + itoa(p.first+i))
	start := time.Now()
	if _, err := p.clone(ctx, name); err != nil {
		return err
	}
	if i >= warmUps {
		p.pandoClone.Add(time.Since(start))
	}
	return ctx.Err()
}

// destroyFloor destroys the i-th clone that was made by hand.
func (p *pairing) destroyFloor(ctx context.Context, i int) error {
	if p.floor == nil {
		return nil
	}

	start := time.Now()
	if err := p.floor.destroy(p.first + i); err != nil {
		return errs.Wrap("bench", "raw floor", err)
	}

	destroyed := time.Since(start)
	if err := p.floor.forget(ctx, p.first+i); err != nil {
		return errs.Wrap("bench", "raw floor", err)
	}

	if i >= warmUps {
		p.floorDestroy.Add(destroyed)
		p.floorForget.Add(time.Since(start))
	}

	p.floor.sweep(p.first + i)
	return nil
}

// destroyPando destroys the i-th clone that Pando made.
func (p *pairing) destroyPando(ctx context.Context, i int) error {
	name := p.name("clone" + itoa(p.first+i))
	start := time.Now()
	if err := p.destroy(ctx, name); err != nil {
		return err
	}
	if i >= warmUps {
		p.pandoDestroy.Add(time.Since(start))
	}
	return ctx.Err()
}

// inTurn runs a and b n times each; which one goes first changes every time.
func (r *run) inTurn(n int, a, b func(int) error) error {
	for i := range n {
		if i%2 == 1 {
			a, b = b, a
		}
		if err := a(i); err != nil {
			return err
		}
		if err := b(i); err != nil {
			return err
		}
		if i%2 == 1 {
			a, b = b, a
		}
	}

	return nil
}

// tails measures what clones write, during and after, and their processor time.
func (r *run) tails(ctx context.Context) error {
	n := min(r.Clones, tailBatch)
	first := r.next
	r.next += n
	name := func(i int) string { return r.name("tail" + itoa(first+i)) }
	for _, b := range []struct {
		op    string
		floor bool
		each  func(i int) error
	}{
		{OpFloor, true, func(i int) error { return r.floor.clone(ctx, first+i, func(string) {}) }},
		{OpFloorDestroy, true, func(i int) error {
			defer r.floor.sweep(first + i)
			return r.floor.destroy(first + i)
		}},
		{OpPando, false, func(i int) error { _, err := r.clone(ctx, name(i)); return err }},
		{OpPandoDestroy, false, func(i int) error { return r.destroy(ctx, name(i)) }},
	} {
		t := &timed{op: Operation{Name: b.op}}
		if b.floor && r.floor == nil {
			t.op.NotMeasured = r.rep.NoFloor
		} else {
			r.tracker.StartOf(progress.RunningBenchmark, "measuring the writes of "+b.op, int64(n), 0)
			err := r.tail(ctx, &t.op, func() (int, error) {
				for i := range n {
					start, sys := time.Now(), selfSys()
					if err := b.each(i); err != nil {
						return i, err
					}
					t.add(Use{WallNano: int64(time.Since(start)), SysNano: int64(selfSys() - sys)}, 0)
					r.tracker.Add(1, 0)
				}
				return n, ctx.Err()
			})
			if err != nil {
				return err
			}
		}

		r.rep.Operations = append(r.rep.Operations, t.done())
	}

	return nil
}

// commands measures whole commands in the full pool, from before the process is started until it has ended.
func (r *run) commands(ctx context.Context) error {
	// Prepare the pool and the commands.
	n := min(max(r.Clones/5, 3), maxCommands)
	volumes, err := r.count(ctx)
	if err != nil {
		return err
	}

	if err := r.fill(ctx, 1); err != nil { // so that there is one to show
		return err
	}

	vols, err := r.eng.Volumes(ctx, engine.VolumesRequest{})
	if err != nil {
		return err
	}

	shown := vols[len(vols)/2].Name
	name := r.name("command")
	lines := [][]string{
		{"version"},
		{"clone", r.golden.String(), name, "--mount", "--overlay=" + strconv.FormatBool(r.Overlay)},
		{"ls"},
		{"ls", "--json"},
		{"show", shown},
		{"destroy", name},
	}

	labels := []string{"pando version", r.rep.cloneCommand(), "pando ls", "pando ls --json",
		"pando show VOLUME", "pando destroy VOLUME"}
	type figures struct {
		wall      Sample
		user, sys int64
	}
	got := make([]figures, len(lines))
	cmds := make([]Command, len(lines))
	r.tracker.StartOf(progress.RunningBenchmark, "measuring commands in a pool with "+itoa(volumes)+" volumes",
		int64(n), 0)

	// Measure them in turn.
	for i := range n + 1 { // the first does not count
		for j, l := range lines {
			u, err := r.pando(ctx, l...)
			if err != nil {
				return err
			}
			if i == 0 {
				continue
			}
			got[j].wall.Add(time.Duration(u.WallNano))
			got[j].user += u.UserNano
			got[j].sys += u.SysNano
			cmds[j].MaxRSS = max(cmds[j].MaxRSS, u.MaxRSS)
		}

		r.tracker.Add(1, 0)
	}

	for j := range lines {
		cmds[j].Line, cmds[j].Volumes, cmds[j].Wall = labels[j], volumes, got[j].wall.Dist()
		cmds[j].User, cmds[j].Sys = seconds(got[j].user)/float64(n), seconds(got[j].sys)/float64(n)
	}

	r.rep.Commands = cmds
	return nil
}

// Names of the neighbour's phases.
const (
	WhileIdle    = "nothing else happens"
	WhilePando   = "Pando makes clones"
	WhileSnapped = "Pando snapshots this very volume"
	WhileFrozen  = "the same with --freeze"
	WhileThawed  = "the same with --no-freeze"
	WhileFloor   = "the raw floor makes clones"
	WhileReflink = "cp -a --reflink runs"
	WhileCopy    = "cp -a runs"
)

// nbSnapshots are made in a row, with a pause after each.
const nbSnapshots = 20

// neighbours measures how a database in another volume is affected. Each round has all phases in turn, each after a
// phase in which the neighbour is alone.
func (r *run) neighbours(ctx context.Context) (err error) {
	// Start the neighbour.
	vol := r.name("neighbour")
	dir, err := r.clone(ctx, vol)
	if err != nil {
		return err
	}

	nb, err := startNeighbour(dir)
	if err != nil {
		return errs.Wrap("bench", dir, err)
	}

	defer func() {
		if nb != nil {
			_ = nb.close() // another error is on its way
		}
	}()

	// Measure the phases.
	phases := r.neighbourPhases(ctx, vol)
	samples := make([]Sample, len(phases))
	for round := range r.Rounds {
		for i := range phases {
			p := &phases[i]
			if p.missing != "" || p.once && round > 0 {
				continue
			}

			r.tracker.StartOf(progress.RunningBenchmark, "measuring a neighbour's writes while "+p.while, 0, 0)
			if err := r.neighbourPhase(ctx, nb, p, &samples[0], &samples[i]); err != nil {
				return err
			}
		}
	}

	// End the neighbour, and report.
	err = nb.close()
	nb = nil
	if err != nil {
		return errs.Wrap("bench", dir, err)
	}

	for i, p := range phases {
		if p.missing == "" && samples[i].seen == 0 {
			p.missing = "it was over before a single write was"
		}
		r.rep.Neighbour = append(r.rep.Neighbour, Phase{While: p.while, NotMeasured: p.missing, Write: samples[i].Dist()})
	}

	return r.destroy(ctx, vol)
}

// neighbourPhase measures one phase, after one in which the neighbour is alone, and undoes it.
func (r *run) neighbourPhase(ctx context.Context, nb *neighbour, p *nbPhase, alone, during *Sample) error {
	if err := sleep(ctx, 500*time.Millisecond); err != nil { // until the previous phase has no effect any more
		return err
	}

	err := nb.during(alone, func() error { return sleep(ctx, r.Idle) })
	if err == nil {
		start := time.Now()
		err = nb.during(during, p.do)
		p.once = p.once || time.Since(start) > 10*time.Second
	}

	if msg, is := isCopyError(err); is {
		p.missing, err = msg, nil
	}
	if err == nil {
		err = p.after()
	}

	return err
}

// nbPhase is a phase of the neighbour.
type nbPhase struct {
	while   string
	missing string // why it is left out
	do      func() error
	after   func() error // undoes it, not measured
	once    bool         // takes long: one round is enough
}

// neighbourPhases lists the phases. vol is the volume of the neighbour.
func (r *run) neighbourPhases(ctx context.Context, vol string) []nbPhase {
	// Clones and copies.
	clones := func(one func(i int) error) func() error {
		return func() error {
			for i := range r.Clones {
				if err := one(i); err != nil {
					return err
				}
			}
			return ctx.Err()
		}
	}

	remove := func(name string) func() error {
		return func() error { return treewalk.Remove(ctx, filepath.Join(r.scratch.inner, name)) }
	}
	first := r.next
	r.next += r.Clones
	name := func(i int) string { return r.name("beside" + itoa(i)) }
	copied := func(reflink, to string) func() error {
		return func() error {
			_, err := r.cp(ctx, reflink, r.copyDir, filepath.Join(r.scratch.inner, to))
			return err
		}
	}

	nothing := func() error { return nil }

	// Find out which phases this pool cannot have.
	noCopy := ""
	if r.copyDir == "" {
		noCopy = "the pool's filesystem has no copy of the source"
	}

	noReflink := noCopy
	if op := r.rep.operation(OpReflink); op != nil && op.NotMeasured != "" {
		noReflink = op.NotMeasured
	}

	noSnapshot := ""
	if !r.eng.Caps().Atomic {
		noSnapshot = "this driver copies, and refuses a volume that does not come to rest"
	}

	noFreeze := noSnapshot
	if caps := r.eng.Caps(); noFreeze == "" && !caps.Unsynced && r.rep.Source.FS == driver.Native {
		noFreeze = "this driver cannot freeze a tree of files"
	}

	snapshots := func(freeze engine.Freeze) func() error {
		return func() error { return r.snapshotNeighbour(ctx, vol, freeze) }
	}

	forget := func() error {
		var names []string
		for i := range nbSnapshots {
			names = append(names, vol+"@s"+itoa(i))
		}
		return r.destroy(ctx, names...)
	}

	return []nbPhase{
		{while: WhileIdle, do: nothing, after: nothing, once: true},
		{while: WhilePando, do: clones(func(i int) error { _, err := r.clone(ctx, name(i)); return err }),
			after: func() error { return r.destroy(ctx, r.name("beside")+"*") }},
		{while: WhileSnapped, missing: noSnapshot, do: snapshots(engine.FreezeIfNeeded), after: forget},
		{while: WhileFrozen, missing: noFreeze, do: snapshots(engine.FreezeAlways), after: forget},
		{while: WhileThawed, missing: noSnapshot, do: snapshots(engine.FreezeNever), after: forget},
		{while: WhileFloor, missing: r.rep.NoFloor,
			do: clones(func(i int) error { return r.floor.clone(ctx, first+i, func(string) {}) }),
			after: clones(func(i int) error {
				defer r.floor.sweep(first + i)
				return errors.Join(r.floor.destroy(first+i), r.floor.forget(ctx, first+i))
			})},
		{while: WhileReflink, missing: noReflink, do: copied("always", "reflink"), after: remove("reflink")},
		{while: WhileCopy, missing: noCopy, do: copied("never", "copy2"), after: remove("copy2")},
	}
}

// snapshotNeighbour takes nbSnapshots snapshots of a volume, with a pause after each.
func (r *run) snapshotNeighbour(ctx context.Context, vol string, freeze engine.Freeze) error {
	for i := range nbSnapshots {
		if _, err := r.eng.Snapshot(ctx, engine.SnapshotRequest{Volume: ref.MustName(vol),
			Name: ref.MustName("s" + itoa(i)), Freeze: freeze}); err != nil {
			return err
		}
		if err := sleep(ctx, 25*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}
