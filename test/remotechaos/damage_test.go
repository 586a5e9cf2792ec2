//go:build linux && (amd64 || arm64)

package remotechaos

import (
	"bytes"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/testing/testfs"
)

// wound is a damage: what some objects were, and what they are now; nil if they are not there.
type wound struct {
	kind   string
	key    string
	before map[string][]byte
	after  map[string][]byte
}

func (w wound) String() string { return w.kind + " " + w.key }

// prefix is the kind of an object: all to the first slash.
func prefix(key string) string {
	p, _, _ := strings.Cut(key, "/")
	return p
}

// keys are those of all objects, by prefix: whatever kinds there are.
func (c *chaos) objects() map[string][]string {
	out := map[string][]string{}
	for info, err := range c.store.List(c.t.Context(), "") {
		if err != nil {
			c.wrongf("listing the store: %v", err)
			return nil
		}
		out[prefix(info.Key)] = append(out[prefix(info.Key)], info.Key)
	}
	return out
}

// get reads an object; nil if it is not there.
func (c *chaos) get(key string) []byte {
	b, _, err := c.store.Get(c.t.Context(), key, 0, -1)
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	if err != nil {
		c.wrongf("%v", err)
	}
	return b
}

// put writes an object; nil removes it.
func (c *chaos) put(key string, content []byte) {
	var err error
	if content == nil {
		err = c.store.Delete(c.t.Context(), key)
	} else {
		_, err = c.store.Put(c.t.Context(), key, content, objstore.Always)
	}
	if err != nil {
		c.wrongf("%v", err)
	}
}

// remember keeps the contents of objects that are written over, for damage that puts them back.
func (c *chaos) remember() {
	for p, keys := range c.objects() {
		if p == "segments" || p == "manifests" {
			continue
		}
		for _, key := range keys {
			b := c.get(key)
			known := c.older[key]
			if len(known) == 0 || !bytes.Equal(known[len(known)-1], b) {
				c.older[key] = append(known[max(0, len(known)-4):len(known):len(known)], b)
			}
		}
	}
}

// draw draws a damage. ok is false if there is nothing that it could be done to.
func (c *chaos) draw() (w wound, ok bool) {
	all := c.objects()
	keys := all[pick(c.r, slices.Sorted(maps.Keys(all)))]
	slices.Sort(keys)
	key := pick(c.r, keys)
	if key == "" {
		return w, false
	}
	was := c.get(key)
	w = wound{key: key, before: map[string][]byte{key: was}, after: map[string][]byte{}}
	switch kind := c.r.IntN(5); kind {
	case 0:
		w.kind = "flip"
		b := bytes.Clone(was)
		if len(b) == 0 {
			return w, false
		}
		b[c.r.IntN(len(b))] ^= 1 << c.r.IntN(8)
		w.after[key] = b
	case 1:
		w.kind = "truncate"
		if len(was) == 0 {
			return w, false
		}
		w.after[key] = was[:c.r.IntN(len(was))]
	case 2:
		w.kind = "delete"
		w.after[key] = nil
	case 3:
		w.kind = "put back"
		older := pick(c.r, c.older[key])
		w.after[key] = older
		return w, older != nil && !bytes.Equal(older, was)
	default:
		w.kind = "swap"
		other := pick(c.r, keys)
		w.before[other] = c.get(other)
		w.after[key], w.after[other] = w.before[other], was
		return w, other != key && !bytes.Equal(w.before[other], was)
	}
	return w, true
}

// damage damages something: verify must notice it, unless nothing is affected. Then hosts may go on working; what is
// not damaged must not be lost by it. At the end it is mended, and all is as it was.
func (c *chaos) damage() {
	w, ok := c.draw()
	if !ok {
		return
	}
	c.note("damage "+w.kind+" "+prefix(w.key), "DAMAGE: %s", w)
	c.damaged = true
	for key, b := range w.after {
		c.put(key, b)
	}
	noticed := c.notices(w)
	c.note("", "noticed: %v", noticed)
	if !noticed {
		c.harmless(w)
	}
	if c.failed() {
		return
	}

	// A host that has forgotten what was there cannot know.
	if w.kind != "put back" && prefix(w.key) != "config" {
		for range c.r.IntN(5) {
			c.hosts[c.r.IntN(len(c.hosts))].step()
		}
	}
	c.mend(w)
	c.damaged, c.pushed = false, nil
	if !c.failed() {
		c.reconcile(c.hosts[c.r.IntN(len(c.hosts))])
		c.mustBeClean("after " + w.String() + " was mended")
		c.remember()
	}
}

// notices reports whether a host finds the damage.
func (c *chaos) notices(w wound) bool {
	for _, h := range sample(c.r, c.hosts, -1) {
		o := h.run(trouble{}, "verify", "nas", "--read-data", "--json")
		switch {
		case o.code == 0:
			continue
		case o.code != codeDamaged && prefix(w.key) != "config":
			c.wrongf("%s: after %s: %s", h.name, w, o)
		}
		return true
	}
	return false
}

// harmless fails the test if a damage that nobody noticed has changed anything.
func (c *chaos) harmless(w wound) {
	wrong := c.compare(c.hosts[0].list())
	for _, s := range wrong {
		c.wrongf("verify did not notice %s: %s", w, s)
	}
	n := 8
	if testfs.Full() {
		n = -1
	}
	c.audit(n)
	if c.failed() {
		c.wrongf("verify did not notice %s", w)
	}
}

// shows reports whether a push must notice a damage: all segments and manifests that it needs are there, with their
// sizes, before it says that it has succeeded.
func (w wound) shows() bool {
	p := prefix(w.key)
	return (p == "segments" || p == "manifests") && (w.kind == "delete" || w.kind == "truncate")
}

// mend undoes a damage, by the means that pando has or by putting back what was there.
func (c *chaos) mend(w wound) {
	h := c.hosts[c.r.IntN(len(c.hosts))]
	by := c.r.IntN(2)
	switch {
	case w.kind == "put back" || by == 0:
	case prefix(w.key) == "heads":
		c.note("mend by repair", "MEND by repair")
		o := h.run(trouble{}, "remote", "repair", "nas", "--json")
		if h.succeeded(o); o.code == 0 {
			c.repaired()
		}
	case prefix(w.key) != "config" && c.r.IntN(3) == 0:
		c.note("mend by verify", "MEND by verify --repair")
		for _, h := range c.hosts {
			h.succeeded(h.run(h.trouble(), "verify", "nas", "--repair", "--read-data", "--json"))
		}
		c.repaired()
	case prefix(w.key) == "segments" || prefix(w.key) == "manifests":
		c.note("mend by push", "MEND by pushing")
		for _, h := range c.hosts {
			for _, name := range slices.Sorted(maps.Keys(h.volumes)) {
				v := h.volumes[name]
				h.pushRef(name, name, "", v, v.content, [][]string{nil, {"--full"}}[c.r.IntN(2)]...)
			}
		}
	}
	if w.shows() && !c.failed() {
		c.reconcile(h)
		c.note("during", "AUDIT of %d points that were pushed during %s", len(c.pushed), w)
		c.restoreAll(slices.DeleteFunc(c.pushed, func(f found) bool { return f.state != sure }))
	}
	for key, before := range w.before {
		now, after := c.get(key), w.after[key]
		if (now == nil) == (after == nil) && bytes.Equal(now, after) {
			c.put(key, before)
		}
	}
}

// lastWounds is how many objects are damaged at the end.
const lastWounds = 3

// auditDamaged restores all points while several objects are damaged: verify must have named those that cannot be
// restored, and all others must be what was pushed. When what was damaged is put back, the rest must be, too.
func (c *chaos) auditDamaged() {
	wounds := c.woundData(lastWounds)
	affected := c.affected(c.hosts[c.r.IntN(len(c.hosts))])
	c.mu.Lock()
	all := sample(c.r, c.m.sure(), -1)
	c.mu.Unlock()
	var whole, damaged []found
	for _, f := range all {
		if affected[f.ref()] {
			damaged = append(damaged, f)
		} else {
			whole = append(whole, f)
		}
	}

	c.note("audit", "AUDIT of %d points that %v should not affect", len(whole), wounds)
	c.restoreAll(whole)
	for _, w := range wounds {
		for key, b := range w.before {
			c.put(key, b)
		}
	}
	if c.failed() {
		return
	}
	c.mustBeClean("after all damage was mended")
	c.note("audit", "AUDIT of %d points that were damaged", len(damaged))
	c.restoreAll(damaged)
	c.t.Logf("%d points restored at the end, %d of them when %v was mended; %v", len(all), len(damaged), wounds, c.counts)
}

// woundData damages up to n objects of which points consist: each another one.
func (c *chaos) woundData(n int) (wounds []wound) {
	done := map[string]bool{}
	for range 8 * n {
		w, ok := c.draw()
		p := prefix(w.key)
		if !ok || w.kind == "put back" || w.kind == "swap" || p != "segments" && p != "manifests" && p != "packs" {
			continue
		}
		if done[w.key] || len(wounds) == n {
			continue
		}
		done[w.key] = true
		wounds = append(wounds, w)
		c.note("damage "+w.kind+" "+p, "DAMAGE: %s", w)
		c.put(w.key, w.after[w.key])
	}
	return wounds
}

// affected are the points that verify names as damaged.
func (c *chaos) affected(h *host) map[string]bool {
	o := h.run(trouble{}, "verify", "nas", "--read-data", "--json")
	if o.code != 0 && o.code != codeDamaged {
		c.wrongf("%s: %s", h.name, o)
	}
	var is struct {
		Problems []struct {
			Volume, Point string
			Affected      []string
		}
	}
	h.decode(o.stdout, &is)
	out := map[string]bool{}
	for _, p := range is.Problems {
		out[p.Volume+"@"+p.Point] = true
		for _, ref := range p.Affected {
			out[ref] = true
		}
	}
	c.note("", "%s: %d problems, which affect %d points: %s",
		h.name, len(is.Problems), len(out), o.stdout)
	return out
}

// mustBeClean wants verify to find nothing.
func (c *chaos) mustBeClean(when string) {
	h := c.hosts[c.r.IntN(len(c.hosts))]
	if o := h.run(trouble{}, "verify", "nas", "--read-data", "--json"); o.code != 0 {
		c.wrongf("%s: %s: %s\n%s", when, h.name, o, o.stdout)
	}
}

// audit restores n points, or all if n is negative, into pools that have never seen them, and compares them.
func (c *chaos) audit(n int) {
	c.mu.Lock()
	points := sample(c.r, c.m.sure(), n)
	c.mu.Unlock()
	c.note("audit", "AUDIT of %d points", len(points))
	c.restoreAll(points)
}

// restoreAll restores points into new pools.
func (c *chaos) restoreAll(points []found) {
	for _, trees := range []bool{false, true} {
		mine := slices.DeleteFunc(slices.Clone(points), func(f found) bool { return f.head.trees != trees })
		if len(mine) > 0 && !c.failed() {
			c.auditor(trees, mine)
		}
	}
}

// auditor makes a pool, restores points into it, and removes it.
func (c *chaos) auditor(trees bool, points []found) {
	dir, args := c.auditDirs[0], []string{"init", "-q", "--loop", "--size", "2G"}
	if trees {
		dir, args = c.auditDirs[1], []string{"init", "-q", "--driver", "btrfs"}
	}
	h := &host{c: c, n: -1, name: "auditor", pool: filepath.Join(dir, "pool"), env: c.hosts[0].env, trees: trees, r: c.r}
	h.url, h.volumes = c.hosts[0].url, map[string]*volume{}
	h.must(args...)
	h.must("remote", "add", "nas", h.url, "-q", "--no-create", "--identity", pick(c.r, c.hosts).identity())
	for _, f := range points {
		if c.failed() {
			break
		}
		h.restore(f)
	}
	h.must("remote", "rm", "nas")
	h.must("deinit", "--force", "--lose-keys", "-q")
}

// restore restores a point, compares it, and removes it.
func (h *host) restore(f found) {
	v := &volume{name: h.fresh("r")}
	as, golden := v.name, h.fresh("g")
	if f.head.golden { // a clone may have brought the generation of this number that was pushed before
		as = golden
	}
	o := h.run(trouble{}, "pull", "nas", f.ref(), "--as", as, "-q")
	if o.code != 0 {
		h.c.wrongf("LOST: %s cannot be restored: %s", f.ref(), o)
		return
	}
	if f.head.golden {
		h.must("clone", golden+"@"+f.name, v.name)
	}
	h.compare(v, f, o)
	h.must("destroy", v.name)
}
