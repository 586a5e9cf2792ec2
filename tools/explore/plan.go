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
	round   int               // how many shards cover what it samples most densely
	of      int               // how many cover everything
	covered map[draw]string   // what runs that ended drew from, and the commit that they tested
	done    map[draw][]string // subtests that ended in runs that did not
	seconds float64           // how long all runs took
	finds   int               // how often this search has seen it fail
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
	i.shards(r.Round, r.Of)
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
	case i.of == 1 || i.round == 0:
		i.kind = seeded
	default:
		i.kind = sharded
	}
}

// shards takes in what one more run has drawn from.
func (i *item) shards(round, of int) {
	i.of = max(i.of, of)
	if round > 0 && (i.round == 0 || round < i.round) {
		i.round = round
	}
}

// turn is what the item draws from in its n-th run: shard after shard, then the same with the next seed.
func (i *item) turn(n int) draw {
	of := max(i.of, 1)
	return draw{uint64(n/of + 1), n % of}
}

// ran returns how many turns are covered, without a gap.
func (i *item) ran() (n int) {
	for i.covered[i.turn(n)] != "" {
		n++
	}
	return n
}

// next is what the item is to draw from.
func (i *item) next() draw { return i.turn(i.ran()) }

// progress orders items of a kind: those that have come farthest come last.
func (i *item) progress() float64 {
	if i.kind == fuzzed {
		return i.seconds
	}
	return float64(i.ran()) / float64(max(i.round, 1))
}

// searched is a package with what is known of its tests.
type searched struct {
	testrun.Package
	opened bool             // its tests are listed, or are being listed
	items  map[string]*item // nil until they are listed
	turn   kind             // kind of the tests that run next
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
		for n := (round - 1) * i.round; i.kind == sharded && n < round*i.round; n++ {
			with[i.covered[i.turn(n)]] = true
		}
	}
	return strings.Join(slices.Sorted(maps.Keys(with)), ", ")
}

// rounds returns how many rounds of all tests are covered, and how far the next one is.
func (p *searched) rounds() (full, shards, of, unseen int) {
	full = -1
	for _, i := range p.items {
		if i.kind == sharded && (full < 0 || i.ran()/i.round < full) {
			full = i.ran() / i.round
		}
		if i.kind == unknown {
			unseen++
		}
	}
	for _, i := range p.items {
		if i.kind != sharded {
			continue
		}
		shards += min(i.ran()-full*i.round, i.round)
		of += i.round
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
