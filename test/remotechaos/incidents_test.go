//go:build linux && (amd64 || arm64)

package remotechaos

import (
	"bytes"
	"maps"
	"os/exec"
	"path/filepath"
	"strings"
)

// incident happens to a pool or to the remote while nobody else works.
type incident struct {
	name string
	run  func(c *chaos) bool
}

var incidents = []incident{
	{"the remote was put back", (*chaos).remotePutBack},
	{"the pool was copied", (*chaos).poolCopied},
}

// incident runs the next incident. All are run before any is run again.
func (c *chaos) incident() {
	x := incidents[c.incidents%len(incidents)]
	c.incidents++
	c.note("", "INCIDENT: %s", x.name)
	c.racing.Store(true) // nothing else goes wrong
	ran := x.run(c)
	c.racing.Store(false)
	if !ran || c.failed() {
		return
	}
	c.note("incident "+x.name, "the incident is over")
	c.reconcile(c.hosts[c.r.IntN(len(c.hosts))])
	c.mustBeClean("after the incident: " + x.name)
}

// fails runs a command that must fail with an exit code.
func (h *host) fails(code int, args ...string) {
	if o := h.run(trouble{}, args...); o.code != code {
		h.c.wrongf("%s: %s: it should have failed with exit code %d\n%s", h.name, o, code, o.stdout)
	}
}

// remotePutBack puts back a head as it was before a push. Its host notices that, and accepts it in the end: the point
// that only the newer head named is lost, and no other.
func (c *chaos) remotePutBack() bool {
	h := pick(c.r, c.hosts)
	v, _, ok := c.pushes(h)
	if !ok {
		return false
	}
	before := map[string][]byte{}
	for _, key := range c.objects()["heads"] {
		before[key] = c.get(key)
	}
	point := h.pushRef(v.name, v.name, "", v, v.content)
	if point == "" || c.failed() {
		return false
	}
	for key, was := range before {
		if !bytes.Equal(was, c.get(key)) {
			c.note("", "PUT BACK: %s", key)
			c.put(key, was)
		}
	}

	h.grow(v)
	h.fails(codeDamaged, "push", v.name, "--to", "nas", "--json")
	h.fails(codeDamaged, "remote", "prune", "nas", "--json", "--patience", "1ns")
	h.fails(codeDamaged, "verify", "nas", "--json")
	c.mu.Lock()
	hd := c.m.head(v.name)
	hd.points[point].state = gone
	c.mu.Unlock()
	if c.failed() {
		return false
	}
	if h.pushRef(v.name, v.name, "", v, v.content, "--accept-rollback") == "" {
		c.wrongf("%s: it cannot accept that the remote was put back", h.name)
	}
	return true
}

// poolCopied copies a pool, and both copies push a volume. Only the first one can; the other needs an identity of its
// own, and must take the volume over.
func (c *chaos) poolCopied() bool {
	h := c.hosts[0] // in plain files on a filesystem
	v, _, ok := c.pushes(h)
	if !ok {
		return false
	}
	for _, v := range h.sorted() {
		h.umount(v)
	}
	twin := h.twin()
	if c.failed() {
		return false
	}
	first, second := h, twin
	if c.r.IntN(2) == 0 {
		first, second = twin, h
	}
	mine, other := first.volumes[v.name], second.volumes[v.name]
	first.grow(mine)
	if first.pushRef(v.name, v.name, "", mine, mine.content) == "" {
		c.wrongf("%s: the first copy of a pool could not push", first.name)
	}
	second.grow(other)
	second.fails(codeConflict, "push", v.name, "--to", "nas", "--json")
	if c.failed() {
		return false
	}

	second.must("remote", "writer", "--new")
	second.learnID()
	second.fails(codeConflict, "push", v.name, "--to", "nas", "--json")
	second.pullOver(c.headOf(v.name), true)
	if !c.failed() {
		second.grow(second.volumes[v.name])
		second.pushAgain(second.volumes[v.name])
		first.fails(codeConflict, "push", v.name, "--to", "nas", "--json")
	}
	for _, v := range twin.sorted() {
		twin.umount(v)
	}
	twin.must("deinit", "--force", "--lose-keys", "-q")
	return true
}

// twin copies the pool of a host, in which nothing is mounted.
func (h *host) twin() *host {
	twin := *h
	twin.name, twin.pool = h.name+"x", filepath.Join(filepath.Dir(h.pool), h.fresh("copy"))
	if out, err := exec.Command("cp", "-a", "--reflink=auto", h.pool, twin.pool).CombinedOutput(); err != nil {
		h.c.wrongf("%s: %v: %s", h.name, err, out)
	}
	twin.volumes = maps.Clone(h.volumes)
	for name, v := range twin.volumes {
		was := *v
		was.snaps = append([]string(nil), v.snaps...)
		twin.volumes[name] = &was
	}
	return &twin
}

// learnID asks which pool this is on remotes.
func (h *host) learnID() {
	was := h.id
	h.id = strings.TrimSpace(h.must("remote", "writer", "-q"))
	if h.id == "" || h.id == was {
		h.c.wrongf("%s: it has the identity %q, as before", h.name, h.id)
	}
}
