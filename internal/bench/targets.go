package bench

import (
	"cmp"
	"fmt"
	"math"
)

// What the targets of the design are: see judge.
const (
	maxCloneRatio     = 1.25
	maxCloneRatioZFS  = 1.5 // where the floor is a program, `zfs clone`
	maxCloneSeconds   = 0.010
	maxFlatness       = 1.2
	maxDestroyRatio   = 1.4
	maxCloneCommand   = 0.020
	maxOverlayCommand = 0.015
	maxLsCommand      = 0.025
	maxCommandRSS     = 40 << 20
	maxImportRSS      = 200 << 20
	maxLsJSONCommand  = 0.300
	maxShowCommand    = 0.020
	minReflinkSpeedup = 1000
	reflinkFiles      = 200_000
	maxNeighbour      = 1.5
	maxNeighbourFloor = 1.3
	minImportRatio    = 0.8
	minFlushes        = 1
)

func (r *Report) operation(name string) *Operation {
	for i := range r.Operations {
		if r.Operations[i].Name == name {
			return &r.Operations[i]
		}
	}
	return nil
}

func (r *Report) command(line string) *Command {
	for i := range r.Commands {
		if r.Commands[i].Line == line {
			return &r.Commands[i]
		}
	}
	return nil
}

func (r *Report) phase(while string) *Phase {
	for i := range r.Neighbour {
		if r.Neighbour[i].While == while {
			return &r.Neighbour[i]
		}
	}
	return nil
}

// full is the series with the most volumes.
func (r *Report) full() *Series {
	var best *Series
	for i := range r.Series {
		if best == nil || r.Series[i].Volumes > best.Volumes {
			best = &r.Series[i]
		}
	}
	return best
}

// flatness is the clone's p50 in the full pool over that in the nearly empty
// one, which was measured before and after: taken together, so that a drift of
// the machine counts little. ok is false if the pools do not differ.
func (r *Report) flatness() (ratio float64, few, many int, ok bool) {
	full := r.full()
	if full == nil {
		return 0, 0, 0, false
	}

	var base Sample
	few = -1
	for i := range r.Series {
		if s := &r.Series[i]; s.Volumes < full.Volumes {
			base.Join(s.pando)
			few = max(few, s.Volumes)
		}
	}

	p50 := base.Dist().P50
	if p50 == 0 {
		return 0, few, full.Volumes, false
	}

	return full.PandoClone.P50 / p50, few, full.Volumes, true
}

// calmDrift is the most that the raw floor may change between series of the
// same number of volumes for a figure of one to be compared with one of another.
const calmDrift = 1.2

// drift is the floor's slowest p50 over its fastest in the series with few
// volumes, between which only time has passed; 0 if there are none.
func (r *Report) drift() float64 {
	full, least, most := r.full(), 0.0, 0.0
	for i := range r.Series {
		s := &r.Series[i]
		if p50 := s.FloorClone.P50; (s != full || len(r.Series) == 1) && p50 > 0 {
			most = max(most, p50)
			if least == 0 || p50 < least {
				least = p50
			}
		}
	}
	return over(most, least)
}

// judge compares the figures with the targets.
func (r *Report) judge() {
	r.Targets = nil
	full := r.full()
	if full == nil {
		full = &Series{}
	}

	at := fmt.Sprintf("%d clones in turn, with %d volumes", full.PandoClone.Count, full.Volumes)

	most := maxCloneRatio
	if r.Pool.Driver == "zfs" {
		most = maxCloneRatioZFS
	}

	r.target("clone + mount / raw floor, p50", AtMost, most, Ratio, at,
		over(full.PandoClone.P50, full.FloorClone.P50), r.NoFloor)
	reason := ""
	if !r.Pool.LoopBacked {
		reason = "the target is for a loop-backed pool, and this is none"
	}

	r.target("clone + mount on a loop-backed pool, p50", LessThan, maxCloneSeconds, Seconds, at, full.PandoClone.P50,
		reason)
	ratio, few, many, ok := r.flatness()
	reason = ""
	r.Drift = r.drift()
	switch {
	case !ok:
		reason = "the pool held as many volumes before: use a larger --volumes"
	case r.Drift > calmDrift:
		reason = fmt.Sprintf("the machine was not calm: with few volumes the raw floor took %.2fx as long at one time as "+
			"at another", r.Drift)
	}

	r.target("clone + mount, many volumes / few, p50", AtMost, maxFlatness, Ratio,
		fmt.Sprintf("%d / %d volumes; the target is for 47,000 / 10", many, few), ratio, reason)
	r.target("destroy / umount + unlink + one durable row, p50", AtMost, maxDestroyRatio, Ratio, at,
		over(full.PandoDestroy.P50, full.FloorForget.P50), r.NoFloor)
	r.judgeDurable()
	r.judgeCommands()
	r.judgeCopies(full)
	r.judgeNeighbour()
}

// judgeDurable looks for proof that clones reached the disk: for each at least
// one flush of the cache of the device that the pool is on, and of the disk
// below that. (Others flush the disk too; nobody else flushes the pool's device.)
func (r *Report) judgeDurable() {
	op := r.operation(OpPando)
	if op == nil {
		op = &Operation{NoDevices: "not run"}
	}

	reason, flushes, at := op.NoDevices, math.Inf(1), ""
	for i, d := range op.Devices {
		switch {
		case reason != "":
		case !r.Pool.Devices[i].VolatileCache:
			reason = d.Device + " has no volatile cache, so that there is nothing to flush"
		case d.Flushes < 0:
			reason = "this kernel does not count flushes"
		case d.Flushes < flushes:
			flushes, at = d.Flushes, fmt.Sprintf("flushes of %s for each of %d clones", d.Device, op.TailOf)
		}
	}

	if math.IsInf(flushes, 1) {
		flushes = 0
		if reason == "" {
			reason = "no device was measured"
		}
	}

	r.target("a clone is on the disk when it returns", AtLeast, minFlushes, Count, at, flushes, reason)
}

// cloneCommand is the command that clones.
func (r *Report) cloneCommand() string {
	if r.Overlay {
		return "pando clone GOLDEN VOLUME --mount --overlay"
	}
	return "pando clone GOLDEN VOLUME --mount"
}

func (r *Report) judgeCommands() {
	var rss int64
	volumes, clone := 0, maxCloneCommand
	if r.Overlay {
		clone = maxOverlayCommand
	}
	for i := range r.Commands {
		rss = max(rss, r.Commands[i].MaxRSS)
		volumes = r.Commands[i].Volumes
	}

	for _, t := range []struct {
		line   string
		target float64
		want   int
	}{
		{r.cloneCommand(), clone, 1000},
		{"pando ls", maxLsCommand, 1000},
		{"pando ls --json", maxLsJSONCommand, 47000},
		{"pando show VOLUME", maxShowCommand, 47000},
	} {
		reason, wall := "not run", 0.0
		if c := r.command(t.line); c != nil {
			reason, wall = tooMany(volumes, t.want, c.Wall.P50 < t.target), c.Wall.P50
		}
		r.target("`"+t.line+"`, p50", LessThan, t.target, Seconds, atVolumes(volumes, t.want), wall, reason)
	}

	reason := tooMany(volumes, 1000, rss < maxCommandRSS)
	if len(r.Commands) == 0 {
		reason = "not run"
	}

	r.target("peak memory of a command", LessThan, maxCommandRSS, Bytes, atVolumes(volumes, 1000), float64(rss), reason)
}

// tooMany is the reason why a figure that misses its target says nothing of it.
func tooMany(n, want int, good bool) string {
	if good || n <= want+want/10 {
		return ""
	}
	return "more volumes than the target is meant for"
}

func atVolumes(n, want int) string {
	s := fmt.Sprintf("process start included, with %d volumes", n)
	if n != want {
		s += fmt.Sprintf("; the target is for %d", want)
	}
	return s
}

func (r *Report) judgeCopies(full *Series) {
	files := fmt.Sprintf("%d files", r.Source.Files)
	cp, im, reflink := r.operation(OpCopy), r.operation(OpImport), r.operation(OpReflink)
	rss, speed, faster := 0.0, 0.0, 0.0
	noImport, noSpeed, noReflink := "not run", "not run", "not run"
	if im != nil {
		rss, noImport, noSpeed = float64(im.MaxRSS), im.NotMeasured, im.NotMeasured
		if cp != nil && noSpeed == "" {
			speed, noSpeed = over(cp.Synced.P50, im.Synced.P50), cp.NotMeasured
		}
	}

	if reflink != nil {
		faster, noReflink = over(reflink.Wall.P50, full.PandoClone.P50), reflink.NotMeasured
	}

	at := files
	if r.Source.Files < reflinkFiles {
		at += fmt.Sprintf("; the target is for %d", reflinkFiles)
		if noReflink == "" && faster <= minReflinkSpeedup {
			noReflink = "the source is too small for a verdict"
		}
	}

	r.target("clone + mount, times faster than `cp -a --reflink`", MoreThan, minReflinkSpeedup, Ratio, at, faster,
		noReflink)
	r.target("import, speed over that of `cp -a`", AtLeast, minImportRatio, Ratio, files+", both until synced", speed,
		noSpeed)
	r.target("peak memory of import", LessThan, maxImportRSS, Bytes, files+"; the target is for 1000000", rss, noImport)
}

func (r *Report) judgeNeighbour() {
	clones := r.phase(WhilePando)
	r.judgePhases("a neighbour's p99 sync write, during clones / idle", maxNeighbour, clones, r.phase(WhileIdle))
	r.judgePhases("a neighbour's p99 sync write, during clones / the floor's", maxNeighbourFloor, clones,
		r.phase(WhileFloor))
}

// judgePhases compares what the neighbour felt in two phases.
func (r *Report) judgePhases(name string, most float64, a, b *Phase) {
	reason, ratio, at := "not run", 0.0, ""
	if a != nil && b != nil {
		at = fmt.Sprintf("%d clones, %d rounds, %d and %d writes", r.Clones, r.Rounds, a.Write.Count, b.Write.Count)
		reason, ratio = cmp.Or(a.NotMeasured, b.NotMeasured), over(a.Write.P99, b.Write.P99)
		if reason == "" && min(a.Write.Count, b.Write.Count) < 100 {
			reason = "fewer than 100 writes, too few for a p99: use more --clones or --rounds"
		}
	}
	r.target(name, AtMost, most, Ratio, at, ratio, reason)
}

// target adds a row.
func (r *Report) target(name, relation string, target float64, unit, at string, measured float64, reason string) {
	r.Targets = append(r.Targets, newTarget(name, relation, target, unit, at, measured, reason))
}

// newTarget compares a figure with a target. A reason takes the verdict away, not
// the figure, if there is one.
func newTarget(name, relation string, target float64, unit, at string, measured float64, reason string) Target {
	t := Target{Name: name, Relation: relation, Target: target, Unit: unit, At: at, Verdict: NotMeasured, Reason: reason}
	if measured > 0 || unit == Count && reason == "" {
		t.Measured = &measured
	}

	switch {
	case reason != "":
	case t.Measured == nil:
		t.Reason = "no figure"
	case holds(relation, measured, target):
		t.Verdict = Pass
	default:
		t.Verdict = Fail
	}

	return t
}

func holds(relation string, measured, target float64) bool {
	switch relation {
	case AtMost:
		return measured <= target
	case LessThan:
		return measured < target
	case AtLeast:
		return measured >= target
	}
	return measured > target
}

// over divides; 0 if that is not possible.
func over(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}
