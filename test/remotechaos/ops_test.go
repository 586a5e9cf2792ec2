//go:build linux && (amd64 || arm64)

package remotechaos

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/testing/servertest"
)

// maxVolumes is how many volumes a host has at most.
const maxVolumes = 5

// operation is something that a host does, as often as its weight says.
type operation struct {
	weight int
	do     func(h *host)
}

var operations = []operation{
	{20, (*host).write},
	{6, func(h *host) { h.clone() }},
	{5, (*host).destroy},
	{28, (*host).push},
	{8, (*host).pushSnapshot},
	{2, (*host).pushAll},
	{1, (*host).pushEvery},
	{5, (*host).publish},
	{9, (*host).pull},
	{3, (*host).pullGolden},
	{4, (*host).update},
	{10, (*host).takeOver},
	{14, (*host).prune},
	{3, (*host).deletePoint},
	{1, (*host).deleteVolume},
	{4, (*host).verify},
	{2, (*host).repair},
	{2, (*host).keys},
}

// step does one random operation.
func (h *host) step() {
	total := 0
	for _, op := range operations {
		total += op.weight
	}
	n := h.r.IntN(total)
	for _, op := range operations {
		if n -= op.weight; n < 0 {
			op.do(h)
			return
		}
	}
}

// sorted are the volumes by name.
func (h *host) sorted() (all []*volume) {
	for _, name := range slices.Sorted(maps.Keys(h.volumes)) {
		all = append(all, h.volumes[name])
	}
	return all
}

// anyVolume draws a volume, nil if there is none.
func (h *host) anyVolume() *volume { return pick(h.r, h.sorted()) }

func (h *host) write() {
	v := h.anyVolume()
	if v == nil {
		h.clone()
		return
	}
	if !h.mount(v) {
		return
	}
	h.change(v)
	if h.r.IntN(2) == 0 {
		h.umount(v)
	}
}

// mount mounts a volume. False if the test has failed.
func (h *host) mount(v *volume) bool {
	if !v.mounted {
		h.must("mount", v.name)
		v.mounted = true
	}
	return !h.c.failed()
}

func (h *host) umount(v *volume) {
	if v.mounted {
		h.must("umount", v.name)
		v.mounted = false
	}
}

// clone makes a volume of the golden, or of a snapshot.
func (h *host) clone() *volume {
	if len(h.volumes) >= maxVolumes {
		h.destroy()
		return nil
	}
	from := fmt.Sprintf("%s@%d", h.golden, 1+h.r.IntN(h.gens))
	content := h.c.content(from)
	if v := h.anyVolume(); v != nil && len(v.snaps) > 0 && h.r.IntN(2) == 0 {
		s := pick(h.r, v.snaps)
		from, content = v.name+"@"+s, h.c.content(s)
	}
	v := &volume{name: h.fresh("v"), content: content}
	h.must("clone", from, v.name)
	h.volumes[v.name] = v
	return v
}

// content is what a snapshot or generation holds.
func (c *chaos) content(name string) tree {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.m.named[name]
}

// destroy removes a volume here, if there are several.
func (h *host) destroy() {
	if len(h.volumes) > 1 {
		h.drop(h.anyVolume().name)
	}
}

// drop destroys a volume that may be there.
func (h *host) drop(name string) {
	delete(h.volumes, name)
	if strings.Contains("\n"+h.must("ls", "-q"), "\n"+name+"\n") {
		h.must("destroy", name)
	}
}

func (h *host) publish() {
	v := h.anyVolume()
	if v == nil || h.gens > 8 {
		return
	}
	h.must("golden", "publish", h.golden, v.name, "--force")
	h.gens++
	h.c.mu.Lock()
	h.c.m.named[fmt.Sprintf("%s@%d", h.golden, h.gens)] = v.content
	h.c.mu.Unlock()
	if h.r.IntN(2) == 0 {
		return
	}
	h.pushRef(h.golden, h.golden, strconv.Itoa(h.gens), nil, v.content)
}

func (h *host) pushSnapshot() {
	v := h.anyVolume()
	if v == nil {
		return
	}
	if len(v.snaps) == 0 || h.r.IntN(3) > 0 {
		name := h.fresh("s")
		h.must("snapshot", v.name, name)
		v.snaps = append(v.snaps, name)
		h.c.mu.Lock()
		h.c.m.named[name] = v.content
		h.c.mu.Unlock()
	}
	s := pick(h.r, v.snaps)
	h.pushRef(v.name+"@"+s, v.name, s, v, h.c.content(s))
}

func (h *host) push() {
	v := h.anyVolume()
	if v == nil {
		return
	}
	var flags []string
	name := v.name
	switch h.r.IntN(20) {
	case 0, 1:
		flags = append(flags, "--full")
	case 2, 3:
		if v.as == "" || h.r.IntN(2) == 0 {
			v.as = h.fresh("w")
		}
		name = v.as
		flags = append(flags, "--as", name)
	case 4:
		flags = append(flags, "--no-origin")
	case 5, 6:
		if h.trees {
			flags = append(flags, "--portable")
		}
	}
	h.pushRef(v.name, name, "", v, v.content, flags...)
}

// pushed is what `push --json` says of a point.
type pushed struct {
	Ref, Kind          string
	On                 onRemote `json:"remote_ref"`
	Unchanged, Resumed bool
}

// onRemote is a reference to a point on the remote: VOLUME@POINT.
type onRemote string

func (r onRemote) volume() string { return strings.SplitN(string(r), "@", 2)[0] }
func (r onRemote) point() string  { _, p, _ := strings.Cut(string(r), "@"); return p }

// pushRef pushes something under a name: with a snapshot's name or a generation's number, or a volume as it is now. It
// returns the name of the point, "" if that is not known.
func (h *host) pushRef(ref, name, snapshot string, v *volume, content tree, flags ...string) string {
	c := h.c
	c.mu.Lock()
	hd := c.m.head(name)
	hd.trees, c.hot = h.trees, name
	before := hd.canPush(h.id)
	legitimate := hd.isWriter(h.id) && hd.source == v
	if v == nil {
		legitimate = hd.isWriter(h.id)
	}
	trouble := h.trouble()
	a := c.m.begin(h, name, snapshot, content, trouble.gate)
	c.mu.Unlock()

	o := h.run(trouble, append([]string{"push", ref, "--to", "nas", "--json"}, flags...)...)
	c.mu.Lock()
	a.to = time.Now()
	a.refused = a.tooLate != "" && o.code == codeConflict
	c.mu.Unlock()
	var allowed []int
	if !legitimate {
		allowed = []int{codeConflict}
	}
	if snapshot != "" && v != nil {
		allowed = append(allowed, codeExists)
	}
	if !h.succeeded(o, allowed...) {
		return ""
	}
	var all []pushed
	h.decode(o.stdout, &all)
	for _, complaint := range h.reported(a, all, before, v) {
		c.wrongf("%s: %s: %s\n%s", h.name, o, complaint, o.stdout)
	}
	if len(all) == 0 {
		return ""
	}
	return all[len(all)-1].On.point()
}

// reported takes what a push has said into the model, and returns what is wrong with it.
func (h *host) reported(a *attempt, all []pushed, before bool, v *volume) (wrong []string) {
	c := h.c
	c.mu.Lock()
	defer c.mu.Unlock()
	last := -1
	for i, p := range all {
		if p.On.volume() == a.head {
			last = i
		}
	}
	if last < 0 {
		return []string{"it succeeded, and reports no point"}
	}
	for i, p := range all {
		hd := c.m.head(p.On.volume())
		hd.golden, hd.trees = p.Kind == "generation", h.trees
		contents := c.m.contents(p.On.volume(), p.On.point())
		if i == last {
			contents = []tree{a.content}
		}
		pt := hd.points[p.On.point()]
		switch {
		case pt == nil && len(contents) == 0:
			wrong = append(wrong, "nobody can have pushed "+p.On.volume()+"@"+p.On.point())
			continue
		case pt == nil:
			pt = &point{}
			hd.points[p.On.point()] = pt
		case i == last && !pt.may(a.content):
			how := pt.contents[0].differs(a.content)
			wrong = append(wrong, fmt.Sprintf("%s@%s holds something else: %s", p.On.volume(), p.On.point(), how))
		}
		pt.state = sure
		if i == last || len(pt.contents) == 0 {
			pt.contents = contents
		}
		if i == last && c.damaged {
			c.pushed = append(c.pushed, found{hd, p.On.point(), pt})
		}
		if c.m.removing(p.On.volume(), i == last && !p.Unchanged && p.Kind == "snapshot" && a.snapshot == "", a.from) {
			pt.state = doubtful
		}
	}
	hd := c.m.head(a.head)
	if p := all[last]; a.tooLate != "" && !p.Unchanged && !p.Resumed {
		wrong = append(wrong, "FENCING: "+a.tooLate+" took "+a.head+" over before this push could commit")
	}
	if !before && !hd.canPush(h.id) && !c.damaged {
		wrong = append(wrong, "FENCING: another pool is the writer of "+a.head)
	}
	hd.source = v
	return wrong
}

// anyPoint draws a point of the remote that this host can hold.
func (h *host) anyPoint(want func(f found) bool) (f found, ok bool) {
	h.c.mu.Lock()
	defer h.c.mu.Unlock()
	all := slices.DeleteFunc(h.c.m.sure(), func(f found) bool {
		return f.head.trees != h.trees || want != nil && !want(f)
	})
	if len(all) == 0 {
		return found{}, false
	}
	if h.c.together() && h.r.IntN(2) == 0 {
		here := slices.DeleteFunc(slices.Clone(all), func(f found) bool { return f.head.name != h.c.hot })
		if len(here) > 0 {
			all = here
		}
	}
	return pick(h.r, all), true
}

// pulled is what `pull --json` says.
type pulled struct {
	On        onRemote `json:"remote_ref"`
	Unchanged bool
}

// pull makes a volume of a point, and compares it.
func (h *host) pull() {
	f, ok := h.anyPoint(func(f found) bool { return !f.head.golden })
	if !ok {
		return
	}
	v := &volume{name: h.fresh("p")}
	o := h.run(h.trouble(), "pull", "nas", f.ref(), "--as", v.name, "--json")
	if !h.succeeded(o) {
		h.drop(v.name)
		return
	}
	h.compare(v, f, o)
	if h.r.IntN(2) == 0 || len(h.volumes) >= maxVolumes {
		h.drop(v.name)
		return
	}
	h.volumes[v.name] = v
}

// compare mounts a volume that was pulled and compares it with what it should hold. It leaves it mounted.
func (h *host) compare(v *volume, f found, o outcome) {
	if !v.mounted {
		h.must("mount", v.name)
		v.mounted = true
	}
	if h.c.failed() {
		return
	}
	v.content = h.read(h.mountpoint(v.name))
	h.c.mu.Lock()
	same, want := f.may(v.content), f.contents
	if same {
		f.contents = []tree{v.content}
	}
	h.c.mu.Unlock()
	if !same {
		how := v.content.differs(want[0])
		h.c.wrongf("%s: %s restored something else than was pushed (%d candidates): %s", h.name, o, len(want), how)
	}
}

// update brings a volume that is here to the newest point.
func (h *host) update() { h.pullHere(false) }

// takeOver makes this host the writer of a volume.
func (h *host) takeOver() { h.pullHere(true) }

// pullHere pulls a volume under its own name: over the one that is here, if there is one.
func (h *host) pullHere(takeOver bool) {
	f, ok := h.anyPoint(func(f found) bool {
		return !f.head.golden && (takeOver || h.volumes[f.head.name] != nil)
	})
	if !ok {
		return
	}
	h.pullOver(f.head, takeOver)
}

// pullOver pulls the newest point of a head under its name.
func (h *host) pullOver(hd *head, takeOver bool) {
	c, name := h.c, hd.name
	args := []string{"pull", "nas", name, "--json"}
	v := h.volumes[name]
	if v != nil {
		h.umount(v)
		args = append(args, "--update")
	}
	t := &take{pool: h.id, from: time.Now()}
	if takeOver {
		args = append(args, "--take-over")
		c.mu.Lock()
		hd.takes = append(hd.takes, t)
		if len(hd.writers) > 0 {
			hd.writers[h.id] = true // from some time on
		}
		c.mu.Unlock()
	}
	o := h.run(h.trouble(), args...)
	ok := h.succeeded(o, codeConflict, codeExists)
	c.mu.Lock()
	t.to = time.Now()
	if ok && takeOver {
		hd.took(t)
		c.m.outrun(hd, h)
	}
	c.mu.Unlock()
	if !ok {
		h.afterFailedUpdate(name, v)
		return
	}
	var is pulled
	h.decode(o.stdout, &is)
	h.updated(name, v, is, o)
}

// updated compares a volume that was pulled under its own name.
func (h *host) updated(name string, v *volume, is pulled, o outcome) {
	if v != nil && is.Unchanged { // the point is here, and what was written since stays
		h.unchanged(v, o)
		return
	}
	if v == nil {
		v = &volume{name: name}
		h.volumes[name] = v
	}
	h.c.mu.Lock()
	p := h.c.m.head(name).points[is.On.point()]
	if p == nil { // pushed by somebody who has not yet heard of it
		p = &point{state: doubtful, contents: h.c.m.contents(name, is.On.point())}
		h.c.m.head(name).points[is.On.point()] = p
	}
	h.c.mu.Unlock()
	h.compare(v, found{h.c.m.head(name), is.On.point(), p}, o)
}

// unchanged wants a volume to hold what it did.
func (h *host) unchanged(v *volume, o outcome) {
	h.must("mount", v.name)
	v.mounted = true
	if h.c.failed() {
		return
	}
	if now := h.read(h.mountpoint(v.name)); !now.is(v.content) {
		h.c.wrongf("%s: %s: it says that nothing has changed: %s", h.name, o, now.differs(v.content))
	}
}

// afterFailedUpdate finds out what a volume is after a pull that did not say how it ended: what it was, or a point.
func (h *host) afterFailedUpdate(name string, v *volume) {
	if v == nil {
		h.drop(name)
		return
	}
	h.must("mount", name)
	v.mounted = true
	if h.c.failed() {
		return
	}
	now := h.read(h.mountpoint(name))
	h.c.mu.Lock()
	ok := now.is(v.content)
	for _, p := range h.c.m.head(name).points {
		ok = ok || p.may(now)
	}
	for _, a := range h.c.m.attempts {
		ok = ok || a.head == name && a.content.is(now)
	}
	h.c.mu.Unlock()
	if !ok {
		how := now.differs(v.content)
		h.c.wrongf("%s: after a pull that failed %s is neither what it was nor a point: %s", h.name, name, how)
	}
	v.content = now
}

// prune removes points by a policy.
func (h *host) prune() {
	last := h.r.IntN(4)
	args := []string{"--patience", pick(h.r, []string{"1ns", "20ms", "1s", "10m"})}
	if h.r.IntN(2) == 0 {
		args = append(args, "--max-repack", pick(h.r, []string{"0", "64K", "1G"}))
	}
	h.pruneBut(last, args...)
}

// pruneBut prunes all but the last points of each volume, or no points if last is 0.
func (h *host) pruneBut(last int, flags ...string) {
	c := h.c
	args := append([]string{"remote", "prune", "nas", "--json"}, flags...)
	if last > 0 {
		args = append(args, "--keep-last", strconv.Itoa(last))
	}
	c.mu.Lock()
	r := c.m.remove("", false)
	c.mu.Unlock()
	o := h.run(h.trouble(), args...)
	ok := h.succeeded(o)
	var is struct {
		Removed []struct{ Volume, Point string }
	}
	if ok {
		h.decode(o.stdout, &is)
	}

	c.mu.Lock()
	r.to = time.Now()
	var wrong []string
	if ok {
		for _, p := range is.Removed {
			hd := c.m.head(p.Volume)
			if !c.together() && !c.damaged && !hd.mayGo(p.Point, last) {
				wrong = append(wrong, hd.name+"@"+p.Point+" was to be kept")
			}
			if pt := hd.points[p.Point]; pt != nil {
				pt.state, pt.since = gone, r.from
			}
		}
	} else if last > 0 {
		for _, hd := range c.m.heads {
			hd.doubt(func(name string) bool { return !c.together() && !c.damaged && !hd.mayGo(name, last) })
		}
	}
	c.mu.Unlock()
	for _, w := range wrong {
		c.wrongf("%s: %s: %s", h.name, o, w)
	}
}

// mayGo reports whether a prune that keeps the last n points may remove one: as it was listed before.
func (h *head) mayGo(name string, n int) bool {
	if name == h.newest || n == 0 {
		return false
	}
	order := slices.DeleteFunc(slices.Clone(h.order), func(p string) bool { return p == h.newest })
	if h.golden {
		slices.SortFunc(order, func(a, b string) int { return number(a) - number(b) })
	}
	i := slices.Index(order, name)
	return i < len(order)-(n-1)
}

func number(s string) int { n, _ := strconv.Atoi(s); return n }

func (h *host) deletePoint() {
	f, ok := h.anyPoint(nil)
	if !ok {
		return
	}
	h.delete(f.head, f.name)
}

func (h *host) deleteVolume() {
	f, ok := h.anyPoint(nil)
	if !ok {
		return
	}
	h.delete(f.head, "")
}

// delete removes a point, or a volume.
func (h *host) delete(hd *head, name string) {
	c := h.c
	ref := hd.name
	if name != "" {
		ref += "@" + name
	}
	c.mu.Lock()
	r := c.m.remove(hd.name, true)
	c.mu.Unlock()
	o := h.run(h.trouble(), "remote", "delete", "nas", ref)
	ok := h.succeeded(o)
	c.mu.Lock()
	defer c.mu.Unlock()
	r.to = time.Now()
	for n, p := range hd.points {
		if p.state == gone || name != "" && n != name {
			continue
		}
		if p.state, p.since = doubtful, r.from; ok && !c.m.tried(hd, r.from) {
			p.state = gone
		}
	}
	if name == "" {
		hd.writers, hd.source = map[string]bool{}, nil
	}
}

// verify finds nothing where nothing is damaged.
func (h *host) verify() {
	args := []string{"verify", "nas", "--json"}
	if h.r.IntN(2) == 0 {
		args = append(args, "--read-data")
	}
	mends := h.r.IntN(4) == 0
	if mends {
		args = append(args, "--repair")
	}
	h.succeeded(h.run(h.trouble(), args...))
	if mends && h.c.damaged {
		h.c.repaired()
	}
}

// repair repairs nothing where nothing is damaged.
func (h *host) repair() {
	o := h.run(h.trouble(), "remote", "repair", "nas", "--json")
	if !h.succeeded(o) {
		return
	}
	var is struct{ Volumes []struct{ Volume string } }
	h.decode(o.stdout, &is)
	if len(is.Volumes) > 0 && !h.c.damaged {
		h.c.wrongf("%s: there was nothing to repair: %s\n%s", h.name, o, o.stdout)
	}
	if len(is.Volumes) > 0 {
		h.c.repaired()
	}
}

// repaired notes that removed points may be back, and that any pool may be the writer.
func (c *chaos) repaired() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, hd := range c.m.heads {
		hd.repaired, hd.writers, hd.source = true, map[string]bool{}, nil
	}
}

// keys adds and removes keys, or rotates the one that data is encrypted with.
func (h *host) keys() {
	switch h.r.IntN(3) {
	case 0:
		h.succeeded(h.run(h.trouble(), "remote", "key", "rotate", "nas"))
	case 1:
		add := []string{"remote", "key", "add", "nas", "--recipient", someRecipient, "--label", "spare"}
		h.succeeded(h.run(h.trouble(), add...), codeExists)
	default:
		h.succeeded(h.run(h.trouble(), "remote", "key", "rm", "nas", "spare"), codeNotFound)
	}
}

// someRecipient is a public key whose other half nobody needs.
const someRecipient = "age1ue9m4n9z93fc098ymqnltuw8j5teu0eymxk44jgg87th3ymer5vqssyzus"

// faults are those of bad weather: answers that are lost, requests that do not arrive, busy servers, delays.
func (w *weather) faults() []*servertest.Fault {
	chance := func(percent float64) func(*http.Request) bool {
		return func(*http.Request) bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.r.Float64()*100 < percent
		}
	}
	busy := servertest.S3Error(http.StatusServiceUnavailable, "SlowDown")
	busy.Match, busy.Times = chance(1), -1
	return []*servertest.Fault{
		{Match: chance(2), Times: -1, Lose: true},
		{Match: chance(1), Times: -1, Drop: true},
		{Match: chance(1), Times: -1, Cut: 10},
		busy,
		{Match: chance(4), Times: -1, Before: func() { time.Sleep(50 * time.Millisecond) }},
	}
}
