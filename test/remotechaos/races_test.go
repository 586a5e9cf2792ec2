//go:build linux && (amd64 || arm64)

package remotechaos

import "slices"

// racesPerRest is how many races are run between two rounds of work.
const racesPerRest = 14

// race is something that goes wrong only if hosts do things in a certain order: one request of a command is held while
// others work, and then goes on. It reports false if it could not be run.
type race struct {
	name string
	run  func(c *chaos) bool
}

var races = []race{
	{"take-over during a push", (*chaos).raceTakeOver},
	{"push during a take-over", (*chaos).racePushDuringTakeOver},
	{"base removed after it was pinned", (*chaos).raceBasePinned},
	{"base removed before it was pinned", (*chaos).raceBaseUnpinned},
	{"base removed before it was pinned", (*chaos).raceBaseUnpinned}, // twice: it depends on what else the push does then
	{"prune during a push", (*chaos).racePruneDuringPush},
	{"push during a prune", (*chaos).racePushDuringPrune},
	{"anything", (*chaos).raceAnything},
}

// race runs the next race. All are run before any is run again.
func (c *chaos) race() {
	if len(c.deck) == 0 {
		c.deck = sample(c.r, races, -1)
	}
	x := c.deck[0]
	c.deck = c.deck[1:]
	c.note("", "RACE: %s", x.name)
	c.racing.Store(true)
	ran := x.run(c)
	c.racing.Store(false)
	if !ran || c.failed() {
		return
	}
	c.note("race "+x.name, "the race has ended")
	c.reconcile(c.hosts[c.r.IntN(len(c.hosts))])
	c.mustBeClean("after the race: " + x.name)
}

// during runs what a host does in one command, of which a request is held, and what others do in the meantime. If no
// such request is made, they do it after the command.
func (c *chaos) during(g *gate, h *host, does func(), others func()) {
	h.gate = g
	go func() {
		defer close(g.ended)
		does()
	}()
	select {
	case <-g.reached:
		c.note("held", "%s: %s", h.name, g)
	case <-g.ended:
		c.note("not held", "%s: ended without %s", h.name, g)
	}
	h.gate = nil
	others()
	g.open()
	<-g.ended
}

// drawGate draws a gate at one of some moments. In one of eight the command is killed when others have done their work.
func (c *chaos) drawGate(moments ...moment) *gate {
	g := pick(c.r, moments)
	return newGate(g.kind, max(g.nth, 1), g.answer, c.r.IntN(8) == 0)
}

// rival draws another host that can hold the same volumes.
func (c *chaos) rival(h *host) *host {
	return pick(c.r, slices.DeleteFunc(slices.Clone(c.hosts), func(x *host) bool { return x == h || x.trees != h.trees }))
}

// pushes makes a host push a volume that only it may push, and then write into it: what it pushes next is built upon
// that point. ok is false if the push failed.
func (c *chaos) pushes(h *host) (v *volume, base string, ok bool) {
	c.mu.Lock()
	var own []*volume
	for _, v := range h.sorted() {
		if c.m.head(v.name).isWriter(h.id) && c.m.head(v.name).source == v {
			own = append(own, v)
		}
	}
	c.mu.Unlock()
	if v = pick(c.r, own); v == nil {
		if v = h.clone(); v == nil {
			return nil, "", false
		}
	}
	h.grow(v)
	if c.failed() {
		return nil, "", false
	}
	base = h.pushRef(v.name, v.name, "", v, v.content)
	h.grow(v)
	return v, base, base != "" && !c.failed()
}

// pushAgain pushes a volume as it is, sometimes with flags.
func (h *host) pushAgain(v *volume) {
	var flags []string
	switch h.r.IntN(8) {
	case 0:
		flags = append(flags, "--full")
	case 1:
		if h.trees {
			flags = append(flags, "--portable")
		}
	}
	h.pushRef(v.name, v.name, "", v, v.content, flags...)
}

// raceTakeOver: while a push is under way, another host takes the volume over, and perhaps pushes it, or the first one
// takes it back.
func (c *chaos) raceTakeOver() bool {
	a := pick(c.r, c.hosts)
	b := c.rival(a)
	v, _, ok := c.pushes(a)
	if !ok {
		return false
	}
	g := c.drawGate(
		moment{kind: "GET heads", answer: true}, moment{kind: "PUT sessions"}, moment{kind: "PUT sessions", answer: true},
		moment{kind: "PUT segments"}, moment{kind: "PUT manifests"}, moment{kind: "PUT manifests", answer: true},
		moment{kind: "PUT heads"},
	)
	c.during(g, a, func() { a.pushAgain(v) }, func() {
		b.takesOver(v.name)
		switch mine := b.volumes[v.name]; {
		case mine == nil || c.failed():
		case c.r.IntN(2) == 0:
			a.pullOver(c.headOf(v.name), true)
		case c.r.IntN(2) == 0:
			b.grow(mine)
			b.pushAgain(mine)
		}
	})
	if g.kill && !c.failed() {
		a.pushAgain(v)
	}
	return true
}

// takesOver makes a host take a volume over. It makes room for it.
func (h *host) takesOver(name string) {
	if h.volumes[name] == nil && len(h.volumes) >= maxVolumes {
		h.destroy()
	}
	h.pullOver(h.c.headOf(name), true)
}

// racePushDuringTakeOver: a host has taken a volume over, and has not restored it yet, when pushes of the other go on:
// one that was under way before, and one that begins then.
func (c *chaos) racePushDuringTakeOver() bool {
	a := pick(c.r, c.hosts)
	b := c.rival(a)
	v, _, ok := c.pushes(a)
	if !ok {
		return false
	}
	push := c.drawGate(
		moment{kind: "PUT sessions", answer: true}, moment{kind: "PUT manifests"}, moment{kind: "PUT heads"},
	)
	take := newGate("PUT heads", 2, false, c.r.IntN(8) == 0)
	c.during(push, a, func() { a.pushAgain(v) }, func() {
		c.during(take, b, func() { b.takesOver(v.name) }, func() {
			if take.isHeld() {
				c.tookOver(b, v.name)
			}
			push.open()
			<-push.ended
			if !c.failed() {
				a.pushAgain(v)
			}
		})
	})
	return true
}

// tookOver notes that a take-over that is still under way has become the writer.
func (c *chaos) tookOver(h *host, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	hd := c.m.head(name)
	hd.writers = map[string]bool{h.id: true}
	c.m.outrun(hd, h)
}

func (c *chaos) headOf(name string) *head {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.m.head(name)
}

// raceBasePinned: a push has pinned what it builds upon, which another host removes, and prunes.
func (c *chaos) raceBasePinned() bool {
	return c.raceBase(pick(c.r, c.hosts),
		moment{kind: "PUT segments", answer: true}, moment{kind: "PUT manifests"},
		moment{kind: "PUT manifests", answer: true}, moment{kind: "PUT heads"},
	)
}

// raceBaseUnpinned: a push has read what it builds upon; before it pins that, another host removes it, and prunes.
func (c *chaos) raceBaseUnpinned() bool {
	a := pick(c.r, c.hosts)
	if a.trees && c.r.IntN(2) == 0 { // which find it out in another way, too: when they read the manifest
		a = c.hosts[0]
	}
	late := moment{kind: "PUT sessions"}
	return c.raceBase(a, late, late, late, late, moment{kind: "PUT sessions", answer: true},
		moment{kind: "GET heads", answer: true})
}

func (c *chaos) raceBase(a *host, moments ...moment) bool {
	b := pick(c.r, c.hosts)
	if a == b {
		b = c.rival(a)
	}
	v, base, ok := c.pushes(a)
	if !ok {
		return false
	}
	g := c.drawGate(moments...)
	c.during(g, a, func() { a.pushRef(v.name, v.name, "", v, v.content) }, func() {
		b.delete(c.headOf(v.name), base)
		c.prunes(b)
	})
	if g.kill && !c.failed() {
		a.pushAgain(v)
	}
	return true
}

// prunes removes what nobody needs: in one of eight it also ends whoever has given no sign of life.
func (c *chaos) prunes(h *host) {
	flags := []string{"--max-repack", pick(c.r, []string{"0", "64K", "1G"})}
	if c.r.IntN(8) > 0 {
		h.pruneBut(0, append(flags, "--patience", "10m")...)
		return
	}
	for range 2 {
		h.pruneBut(0, append(flags, "--patience", "1ns")...)
	}
}

// racePruneDuringPush: what a push has sent is not named by any head yet when another host prunes.
func (c *chaos) racePruneDuringPush() bool {
	a := pick(c.r, c.hosts)
	b := c.rival(a)
	v, _, ok := c.pushes(a)
	if !ok {
		return false
	}
	g := c.drawGate(
		moment{kind: "PUT segments", answer: true}, moment{kind: "PUT manifests"},
		moment{kind: "PUT manifests", answer: true}, moment{kind: "PUT heads"},
	)
	c.during(g, a, func() { a.pushAgain(v) }, func() { c.prunes(b) })
	if g.kill && !c.failed() {
		a.pushAgain(v)
	}
	return true
}

// racePushDuringPrune: a prune has looked at what is there, and does not hear of what others push and remove then.
func (c *chaos) racePushDuringPrune() bool {
	a, b := pick(c.r, c.hosts), pick(c.r, c.hosts)
	if a == b {
		b = c.rival(a)
	}
	v, base, ok := c.pushes(a)
	if !ok {
		return false
	}
	if c.r.IntN(2) == 0 { // so that there is something to be deleted
		a.delete(c.headOf(v.name), base)
	}
	g := c.drawGate(
		moment{kind: "LIST sessions", answer: true, nth: 1 + c.r.IntN(3)},
		moment{kind: "LIST heads", answer: true, nth: 1 + c.r.IntN(3)},
		moment{kind: "LIST segments", answer: true}, moment{kind: "LIST manifests", answer: true},
		moment{kind: "GET manifests", answer: true, nth: 1 + c.r.IntN(3)}, moment{kind: "PUT heads"},
		moment{kind: "DELETE manifests"}, moment{kind: "DELETE segments"}, moment{kind: "DELETE sessions"},
		moment{kind: "PUT packs"}, moment{kind: "PUT moved"}, moment{kind: "LIST packs", answer: true},
	)
	last := c.r.IntN(3)
	c.during(g, b, func() {
		b.pruneBut(last, "--max-repack", "1G", "--patience", pick(c.r, []string{"1ns", "10m"}))
	}, func() {
		a.pushAgain(v)
		if c.r.IntN(2) == 0 && !c.failed() {
			a.delete(c.headOf(v.name), base)
		}
		if third := c.rival(b); third != a && c.r.IntN(2) == 0 && !c.failed() {
			third.pruneBut(0, "--patience", "10m")
		}
	})
	return true
}

// raceAnything holds any request of any command, while other hosts do whatever they like.
func (c *chaos) raceAnything() bool {
	h := pick(c.r, c.hosts)
	does := pick(c.r, []func(*host){
		(*host).push, (*host).push, (*host).pushSnapshot, (*host).pull, (*host).update, (*host).takeOver, (*host).prune,
		(*host).deletePoint, (*host).verify, (*host).repair, (*host).keys,
	})
	method := pick(c.r, []string{"GET", "PUT", "PUT", "LIST", "DELETE"})
	kind := pick(c.r, []string{"heads", "sessions", "manifests", "segments", "packs", "moved", "points"})
	g := newGate(method+" "+kind, 1+c.r.IntN(2), c.r.IntN(2) == 0, c.r.IntN(8) == 0)
	c.during(g, h, func() { does(h) }, func() {
		for range 1 + c.r.IntN(3) {
			if other := pick(c.r, c.hosts); other != h && !c.failed() {
				other.step()
			}
		}
	})
	return true
}
