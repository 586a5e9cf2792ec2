//go:build linux

package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"pando/tools/testrun"
)

// draw is what a test draws from.
type draw struct {
	seed  uint64
	shard int
}

// kind is how a test is searched.
type kind int

const (
	unknown kind = iota // it has not run yet
	sharded             // shard after shard, then the same with the next seed
	seeded              // seed after seed
	fuzzed
	drawsNothing
	kinds
)

// item is a test or a fuzz target.
type item struct {
	name    string
	kind    kind
	of      int               // how many shards cover everything
	covered map[draw]string   // with which commit
	done    map[draw][]string // subtests that ended in runs that did not
	seconds float64           // that it ran
	finds   int               // in this search
	busy    bool              // it is running
	left    bool              // out of this search: it has failed often enough, or could not run
}

func newItem(name string) *item {
	i := &item{name: name, covered: map[draw]string{}, done: map[draw][]string{}}
	if strings.HasPrefix(name, "Fuzz") {
		i.kind = fuzzed
	}
	return i
}

// add takes in a record.
func (i *item) add(r record) {
	i.seconds += r.Seconds
	i.of = max(i.of, r.Of)
	if i.kind == fuzzed {
		return
	}
	d := draw{r.Seed, r.Shard}
	if len(r.Done) > 0 {
		i.done[d] = append(i.done[d], r.Done...)
	} else {
		i.covered[d] = r.Commit
	}

	switch {
	case len(i.covered) == 0:
	case i.of == 0:
		i.kind = drawsNothing
	case i.of == 1:
		i.kind = seeded
	default:
		i.kind = sharded
	}
}

// rounds returns with how many seeds everything is covered, and how many shards with the next seed.
func (i *item) rounds() (full, shards int) {
	for {
		shards = 0
		for s := range max(i.of, 1) {
			if i.covered[draw{uint64(full + 1), s}] != "" {
				shards++
			}
		}
		if shards < max(i.of, 1) {
			return full, shards
		}
		full++
	}
}

// next is what the item is to draw from.
func (i *item) next() draw {
	full, _ := i.rounds()
	d := draw{seed: uint64(full + 1)}
	for i.covered[d] != "" {
		d.shard++
	}
	return d
}

// progress orders items of a kind: those that have come farthest come last.
func (i *item) progress() float64 {
	if i.kind == fuzzed {
		return i.seconds
	}
	full, shards := i.rounds()
	return float64(full) + float64(shards)/float64(max(i.of, 1))
}

// searched is a package with what is known of its tests.
type searched struct {
	testrun.Package
	opened bool             // its tests are listed, or are being listed
	items  map[string]*item // nil until they are listed
	turn   kind             // which comes next
	told   int              // how many full rounds have been reported

	building sync.Mutex // its fuzz targets
}

// unit is what runs at once. Without items it is the package that is opened.
type unit struct {
	pkg   *searched
	items []*item
	draw  draw
}

func (u unit) String() string {
	first := u.items[0]
	switch {
	case first.kind == unknown:
		return fmt.Sprintf("%s: first look at %d tests, from %s on", u.pkg.Name(), len(u.items), first.name)
	case first.kind == fuzzed:
		return u.pkg.Name() + " " + first.name
	}
	return fmt.Sprintf("%s %s: seed %d, shard %d of %d", u.pkg.Name(), first.name, u.draw.seed, u.draw.shard, first.of)
}

// together is how many tests run at once of which nothing is known yet: most of them take no time and draw nothing.
const together = 20

// take returns what to run next of a package, or false if there is nothing. Kinds take turns.
func (p *searched) take() (u unit, ok bool) {
	if !p.opened {
		p.opened = true
		return unit{pkg: p}, true
	}

	for range kinds {
		now, n := p.turn, 1
		p.turn = (p.turn + 1) % kinds
		if now == unknown {
			n = together
		}
		if free := p.free(now); len(free) > 0 {
			free = free[:min(len(free), n)]
			for _, i := range free {
				i.busy = true
			}
			return unit{p, free, free[0].next()}, true
		}
	}
	return unit{}, false
}

// free returns the items of a kind that can run, least progress first.
func (p *searched) free(k kind) (free []*item) {
	for _, name := range slices.Sorted(maps.Keys(p.items)) {
		if i := p.items[name]; i.kind == k && k != drawsNothing && !i.busy && !i.left {
			free = append(free, i)
		}
	}
	slices.SortStableFunc(free, func(a, b *item) int { return cmp.Compare(a.progress(), b.progress()) })
	return free
}

// commits lists those with which a round was covered.
func (p *searched) commits(round int) string {
	with := map[string]bool{}
	for _, i := range p.items {
		for d, commit := range i.covered {
			if i.kind == sharded && d.seed == uint64(round) {
				with[commit] = true
			}
		}
	}
	return strings.Join(slices.Sorted(maps.Keys(with)), ", ")
}

// rounds returns of how many rounds all shards of all tests are covered, and how far the next one is.
func (p *searched) rounds() (full, shards, of, unseen int) {
	full = -1
	for _, i := range p.items {
		if n, _ := i.rounds(); i.kind == sharded && (full < 0 || n < full) {
			full = n
		}
		if i.kind == unknown {
			unseen++
		}
	}
	for _, i := range p.items {
		if i.kind != sharded {
			continue
		}
		n, s := i.rounds()
		if n > full {
			s = i.of
		}
		shards, of = shards+s, of+i.of
	}
	return max(full, 0), shards, of, unseen
}

// String says what has been covered.
func (p *searched) String() string {
	full, shards, of, unseen := p.rounds()
	var parts []string
	if of > 0 {
		parts = append(parts, fmt.Sprintf("%d of %d shards in round %d", shards, of, full+1))
	}

	seeds, seconds, targets := 0, 0.0, 0
	for _, i := range p.items {
		switch i.kind {
		case seeded:
			seeds += len(i.covered)
		case fuzzed:
			seconds += i.seconds
			targets++
		}
	}
	if seeds > 0 {
		parts = append(parts, fmt.Sprintf("%d seeds", seeds))
	}
	if targets > 0 {
		parts = append(parts, fmt.Sprintf("%.0f s of fuzzing %d targets", seconds, targets))
	}
	if unseen > 0 {
		parts = append(parts, fmt.Sprintf("tests still unknown: %d", unseen))
	}
	return p.Name() + ": " + strings.Join(parts, ", ")
}
