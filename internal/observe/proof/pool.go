package proof

import (
	"fmt"

	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"
)

// poolOf finds the zpool that has a device, or a partition of it, as a leaf.
func poolOf(layers []stack.Layer, i int) (int, bool) {
	for k := i - 1; k >= 0; k-- {
		if layers[k].Depth >= layers[i].Depth {
			continue
		}
		switch layers[k].Kind {
		case stack.Zpool:
			return k, true
		case stack.Kind(blockdev.Partition):
			return poolOf(layers, k)
		}
		return 0, false
	}

	return 0, false
}

// leaves returns the vdevs of a pool that receive writes.
func leaves(layers []stack.Layer, pool int) (out []int) {
	for _, i := range children(layers, pool) {
		if r := layers[i].Role; r != "cache" && r != "spare" {
			out = append(out, i)
		}
	}
	return out
}

// countable returns the first devices with counts at or below a layer.
func (j *judge) countable(i int) (out []int) {
	if _, ok := j.evidenceAt(i); ok {
		return []int{i}
	}
	for _, k := range children(j.stack.Layers, i) {
		out = append(out, j.countable(k)...)
	}
	return out
}

// pool judges a zpool of several disks as one. The log of ZFS writes each block to one top-level vdev and flushes all
// its disks: so the flushes that arrived are the sum over these vdevs, counting for each the disk with the fewest. With
// a log device the blocks go there first.
func (j *judge) pool(i int) {
	p := &j.proof.Layers[i]
	disks := leaves(j.stack.Layers, i)
	if len(disks) < 2 {
		return // it is judged by its disk
	}

	all, log, logs := j.arrivedAt(disks, p)

	// Judge the pool.
	p.Needed = j.needed
	what := "flushes and forced writes"
	if !p.VolatileCache {
		what = "writes"
	}

	if all.blind != "" {
		p.Result, p.Words = Unknown, all.blind
	} else {
		p.Result, p.Words = j.enough(all, what)
		p.Words += ", on all vdevs together"
	}

	if logs {
		p.Words += fmt.Sprintf("; %s of them on the log", count(log.total))
		if log.most() < j.needed/2 && p.Result == OK {
			j.words = append(j.words,
				p.Name+": most syncs did not use the log device: logbias=throughput, or larger than it accepts at once")
		}
	}

	// Its disks share the result.
	for _, leaf := range children(j.stack.Layers, i) {
		for _, k := range append([]int{leaf}, below(j.stack.Layers, leaf)...) {
			j.share(&j.proof.Layers[k], p.Result, j.stack.Layers[leaf].Role)
		}
	}
}

// arrivedAt adds up what arrived at the top-level vdevs of a pool: at all, and at those of its log. logs reports
// whether there are any of these. p becomes volatile if a disk is.
func (j *judge) arrivedAt(disks []int, p *LayerProof) (all, log arrived, logs bool) {
	// Take the disk with the fewest in each vdev.
	type sum struct {
		arrived
		role string
		any  bool
	}
	groups := map[string]*sum{}
	for n, leaf := range disks {
		l := j.stack.Layers[leaf]
		key := l.Group
		if key == "" {
			key = fmt.Sprint(n)
		}

		key = l.Role + " " + key
		if groups[key] == nil {
			groups[key] = &sum{role: l.Role}
		}

		for _, k := range j.countable(leaf) {
			x, _ := j.evidenceAt(k)
			a := j.writes(x)
			if x.dev.dev.VolatileCache {
				a = j.flushes(x)
				p.VolatileCache = true
			}
			if g := groups[key]; !g.any || a.most() < g.most() {
				g.arrived, g.any = a, true
			}
		}
	}

	// Add up the vdevs.
	for _, g := range groups {
		for _, to := range []*arrived{&all, &log} {
			if to == &log && g.role != "log" {
				continue
			}
			to.total += g.total
			to.others += g.others
			to.perhaps = max(to.perhaps, g.perhaps) // from the same other programs
			if g.blind != "" {
				to.blind = g.blind
			}
		}
		logs = logs || g.role == "log"
	}

	return all, log, logs
}

// share gives the result of a pool to one of its disks.
func (j *judge) share(d *LayerProof, pool Result, role string) {
	if d.Result != "" || !d.Device {
		return
	}

	switch {
	case role == "cache" || role == "spare":
		d.Result, d.Words = NotNeeded, "not involved in syncs"
		return
	case !d.VolatileCache && pool == OK:
		d.Result = NotNeeded
	default:
		d.Result = pool
	}

	if d.Flushes >= 0 {
		d.Words = fmt.Sprintf("%s flushes and forced writes arrived; see its pool", count(d.Flushes+max(0, d.FUA)))
	} else {
		d.Words = "see its pool"
	}
}
