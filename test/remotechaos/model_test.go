//go:build linux && (amd64 || arm64)

package remotechaos

import (
	"maps"
	"slices"
	"strings"
	"time"
)

// state is what is known of a point.
type state int

const (
	sure     state = iota // it must be there
	doubtful              // it may be: a push, prune or delete of it did not say how it ended
	gone                  // it was removed
)

// point is a point of the remote.
type point struct {
	state    state
	contents []tree    // that it may have; one if that is known
	since    time.Time // when the removal of one that is gone began
}

// may reports whether a point can have a content.
func (p *point) may(t tree) bool {
	return slices.ContainsFunc(p.contents, t.is)
}

// head is a volume or golden of the remote.
type head struct {
	name     string
	trees    bool
	golden   bool
	points   map[string]*point
	order    []string        // as last listed
	newest   string          // as last listed
	writers  map[string]bool // pools that may be its writer; empty: any
	source   *volume         // that was pushed to it last
	takes    []*take
	repaired bool // since it was last listed, so that removed points may be back
}

// take is a take-over.
type take struct {
	pool     string
	from, to time.Time // to is zero while it is under way
}

// attempt is a push that may have made a point.
type attempt struct {
	head     string
	snapshot string // its name; "": the time
	from, to time.Time
	content  tree

	pool    string // that pushes
	gate    *gate  // that holds it
	tooLate string // another pool that took the volume over before this could commit
	refused bool
}

// removal is a prune or delete.
type removal struct {
	head     string // "": all
	all      bool   // also the newest point
	from, to time.Time
}

// model is what must be on the remote.
type model struct {
	named    map[string]tree // contents of snapshots and generations, which never change: "s1", "ga@2"
	heads    map[string]*head
	attempts []*attempt
	removals []*removal
}

func (m *model) head(name string) *head {
	h := m.heads[name]
	if h == nil {
		h = &head{name: name, points: map[string]*point{}, writers: map[string]bool{}}
		m.heads[name] = h
	}
	return h
}

// found is a point in the model.
type found struct {
	head *head
	name string
	*point
}

func (f found) ref() string { return f.head.name + "@" + f.name }

// sure are the points that must be there.
func (m *model) sure() []found {
	var out []found
	for _, name := range slices.Sorted(maps.Keys(m.heads)) {
		h := m.heads[name]
		for _, pt := range slices.Sorted(maps.Keys(h.points)) {
			if h.points[pt].state == sure {
				out = append(out, found{h, pt, h.points[pt]})
			}
		}
	}
	return out
}

// begin notes a push that begins.
func (m *model) begin(h *host, head, snapshot string, content tree, g *gate) *attempt {
	a := &attempt{head: head, snapshot: snapshot, content: content, from: time.Now(), pool: h.id, gate: g}
	m.attempts = append(m.attempts, a)
	return a
}

// remove notes a removal that begins.
func (m *model) remove(head string, all bool) *removal {
	r := &removal{head: head, all: all, from: time.Now()}
	m.removals = append(m.removals, r)
	return r
}

// contents are what a point can hold, by its name and by who pushed when.
func (m *model) contents(head, point string) []tree {
	golden, _, _ := strings.Cut(head, ".") // "ga.nas": pulled as what a volume was cloned from, beside another "ga"
	if t, ok := m.named[golden+"@"+point]; ok {
		return []tree{t}
	}
	if t, ok := m.named[point]; ok {
		return []tree{t}
	}
	at, err := time.Parse("20060102T150405.000Z", strings.TrimPrefix(point, "push-"))
	if err != nil {
		return nil
	}
	var out []tree
	for _, a := range m.attempts {
		began := a.from.Truncate(time.Millisecond)
		if a.head == head && a.snapshot == "" && !a.refused && !at.Before(began) && (a.to.IsZero() || !at.After(a.to)) {
			out = append(out, a.content)
		}
	}
	return out
}

// tried reports whether a point may have been pushed after a time: a golden goes before its clones.
func (m *model) tried(h *head, after time.Time) bool {
	return slices.ContainsFunc(m.attempts, func(a *attempt) bool {
		return (a.head == h.name || h.golden) && (a.to.IsZero() || a.to.After(after))
	})
}

// removing reports whether something may have removed a point of a head since a time: not the one that is its newest.
func (m *model) removing(head string, newest bool, since time.Time) bool {
	return slices.ContainsFunc(m.removals, func(r *removal) bool {
		return (r.head == "" || r.head == head) && (r.all || !newest) && (r.to.IsZero() || r.to.After(since))
	})
}

// doubt is for a removal that did not say how it ended: what it may have removed, but for what keep reports.
func (h *head) doubt(keep func(name string) bool) {
	for name, p := range h.points {
		if p.state == sure && (keep == nil || !keep(name)) {
			p.state = doubtful
		}
	}
}

// took notes a take-over that succeeded: from now on its pool is the writer, or one that took over at the same time.
func (h *head) took(t *take) {
	h.writers = map[string]bool{t.pool: true}
	for _, other := range h.takes {
		if other != t && (other.to.IsZero() || other.to.After(t.from)) {
			h.writers[other.pool] = true
		}
	}
}

// outrun notes the pushes of a head that another pool has taken over while they were held before they could commit.
func (m *model) outrun(h *head, by *host) {
	for _, a := range m.attempts {
		if a.head == h.name && a.pool != by.id && a.to.IsZero() && a.gate.beforeCommit() {
			a.tooLate = by.name
		}
	}
}

// canPush reports whether a pool may be the writer of a head, as far as is known.
func (h *head) canPush(pool string) bool { return len(h.writers) == 0 || h.writers[pool] }

// isWriter reports whether it certainly is.
func (h *head) isWriter(pool string) bool { return len(h.writers) == 1 && h.writers[pool] }

// listed is what `remote ls --json` says of a volume.
type listed struct {
	Name       string
	Kind, FS   string
	WriterPool string `json:"writer_pool"`
	Newest     string
	Points     []struct{ Name string }
	Problem    string
}

// list is what the remote holds, by name.
func (h *host) list() map[string]listed {
	var all []listed
	h.decode(h.must("remote", "ls", "nas", "--json"), &all)
	out := map[string]listed{}
	for _, l := range all {
		out[l.Name] = l
	}
	return out
}

// reconcile compares what is listed, while nobody works, with the model, and takes from it what was in doubt.
func (c *chaos) reconcile(h *host) {
	if c.failed() {
		return
	}
	all := h.list()
	for _, complaint := range c.compare(all) {
		c.wrongf("%s", complaint)
	}
}

// compare is reconcile of a list: it returns what is wrong.
func (c *chaos) compare(all map[string]listed) (wrong []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		wrong = append(wrong, c.compareHead(all[name])...)
	}
	for _, f := range c.m.sure() {
		l := all[f.head.name]
		if !slices.ContainsFunc(l.Points, func(p struct{ Name string }) bool { return p.Name == f.name }) {
			wrong = append(wrong, "LOST: "+f.ref()+" was pushed, was not removed, and is not listed")
			f.state = gone
		}
	}
	for name, h := range c.m.heads {
		for _, p := range h.points {
			if _, is := all[name]; p.state == doubtful && !is {
				p.state, p.since = gone, time.Now()
			}
		}
		h.takes, h.repaired = nil, false
		if _, is := all[name]; !is { // whoever pushes it next is its writer
			h.writers, h.source = map[string]bool{}, nil
		}
	}
	c.m.removals = nil
	return wrong
}

// compareHead compares one head that is listed.
func (c *chaos) compareHead(l listed) (wrong []string) {
	if l.Problem != "" {
		return []string{l.Name + " cannot be read: " + l.Problem}
	}
	h := c.m.head(l.Name)
	h.golden, h.trees, h.newest, h.order = l.Kind == "golden", l.FS == "native", l.Newest, nil
	there := map[string]bool{}
	for _, lp := range l.Points {
		if there[lp.Name] {
			wrong = append(wrong, h.name+"@"+lp.Name+" is listed twice")
		}
		there[lp.Name] = true
		h.order = append(h.order, lp.Name)
		p := h.points[lp.Name]
		switch {
		case p == nil:
			p = &point{contents: c.m.contents(h.name, lp.Name)}
			if h.points[lp.Name] = p; len(p.contents) == 0 {
				wrong = append(wrong, h.name+"@"+lp.Name+" is listed, and nobody pushed it")
			}
		case p.state == gone && !h.repaired && !c.m.tried(h, p.since):
			wrong = append(wrong, h.name+"@"+lp.Name+" was removed, and is listed again")
		}
		p.state = sure
	}
	for name, p := range h.points {
		if p.state == doubtful && !there[name] {
			p.state, p.since = gone, time.Now()
		}
	}
	if len(l.Points) == 0 { // a first push is under way, or has died: nobody is the writer yet
		h.writers = map[string]bool{}
		return wrong
	}
	if !h.canPush(l.WriterPool) {
		want := strings.Join(slices.Sorted(maps.Keys(h.writers)), " or ")
		wrong = append(wrong, "FENCING: "+h.name+" has the writer "+l.WriterPool+", which should be "+want)
	}
	h.writers = map[string]bool{l.WriterPool: true}
	return wrong
}
