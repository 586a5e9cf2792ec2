package model

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
)

func (m *model) importGolden() {
	name := m.fresh("g")
	c := content{}
	must := func(err error) {
		if err != nil {
			m.fatal(err)
		}
	}
	must(os.RemoveAll(m.source))
	must(os.MkdirAll(filepath.Join(m.source, "sub"), 0o755))
	for i := range 1 + m.r.IntN(4) {
		p := fmt.Sprintf("sub/f%d", i)
		c[p] = m.text()
		must(os.WriteFile(filepath.Join(m.source, p), []byte(c[p]), 0o644))
	}
	m.note("import", "%s", name)
	q := engine.ImportRequest{Name: ref.MustName(name), Source: m.source, FS: m.fs}
	if cmp.Or(m.fs, m.e.Caps().FS[0]).IsImage() {
		q.SizeBytes = 64 << 20
	}
	_, err := m.e.Import(m.t.Context(), q)
	m.must(err)
	m.goldens[name] = &golden{current: 1, gens: map[int]*snapshot{1: {content: c, golden: name, gen: 1}}}
}

// text is random, and sometimes some blocks long.
func (m *model) text() string {
	b := make([]byte, []int{10, 100, 5000, 40_000}[m.r.IntN(4)])
	for i := range b {
		b[i] = byte('a' + m.r.IntN(26))
	}
	return string(b)
}

// origin chooses what to clone: any kind of thing.
func (m *model) origin() (string, *snapshot) {
	if v := pick(m, m.volumes); v != "" && m.r.IntN(3) == 0 && !m.volumes[v].cannotBeCopied(m) {
		vol := m.volumes[v]
		if s := pick(m, vol.snaps); s != "" && m.r.IntN(2) == 0 {
			return v + "@" + s, vol.snaps[s]
		}
		return v, &snapshot{content: vol.content, golden: vol.golden, gen: vol.gen}
	}
	g := pick(m, m.goldens)
	gold := m.goldens[g]
	if m.r.IntN(2) == 0 {
		return g, gold.gens[gold.current]
	}
	n := slices.Sorted(maps.Keys(gold.gens))[m.r.IntN(len(gold.gens))]
	return ref.Generation(g, n), gold.gens[n]
}

func (m *model) clone() {
	from, c := m.origin()
	r, err := ref.Parse("", from)
	if err != nil {
		m.fatal(err)
	}
	golden := m.goldens[r.Name] != nil
	name, mount, overlay := m.fresh("v"), m.r.IntN(3) == 0, golden && m.overlays && m.r.IntN(3) == 0
	labels := m.someLabels()
	verb := "clone"
	if overlay {
		verb = "clone overlay"
	}
	m.note(verb, "%s %s mount=%v", from, name, mount)
	out, err := m.e.Clone(m.t.Context(), engine.CloneRequest{From: r, Name: ref.MustName(name), Mount: mount,
		Overlay: overlay, Labels: labels})
	m.must(err)
	if err == nil && r.At == "" && m.goldens[from] != nil {
		from = ref.Generation(from, m.goldens[from].current)
	}
	if err == nil && out[0].Origin != from {
		m.errorf("origin %s", out[0].Origin)
	}
	if o := m.volumes[r.Name]; o != nil {
		overlay = o.overlay
	}
	m.volumes[name] = &volume{content: maps.Clone(c.content), origin: from, golden: c.golden, gen: c.gen, mounted: mount,
		overlay: overlay, labels: labels, snaps: map[string]*snapshot{}}
}

// freeze chooses whether the writes to a volume are stopped while it is copied.
func (m *model) freeze() engine.Freeze {
	return []engine.Freeze{engine.FreezeIfNeeded, engine.FreezeIfNeeded, engine.FreezeAlways,
		engine.FreezeNever}[m.r.IntN(4)]
}

func (m *model) fork(v string, vol *volume) {
	name, freeze := m.fresh("v"), m.freeze()
	m.note("fork", "%s %s freeze=%v", v, name, freeze)
	_, err := m.e.Fork(m.t.Context(), engine.CloneRequest{From: ref.Ref{Name: v}, Name: ref.MustName(name),
		Freeze: freeze})
	if vol.cannotBeFrozen(m, freeze) {
		m.refused(errs.Unsupported, err)
		return
	}
	if vol.cannotBeCopied(m) {
		m.refused(errs.InUse, err)
		return
	}
	m.must(err)
	m.volumes[name] = &volume{content: maps.Clone(vol.content), origin: v, golden: vol.golden, gen: vol.gen,
		overlay: vol.overlay, snaps: map[string]*snapshot{}}
}

// cannotBeFrozen: nothing stops the writes to a tree of files while it is copied.
func (v *volume) cannotBeFrozen(m *model, f engine.Freeze) bool {
	caps := m.e.Caps()
	return v.mounted && f == engine.FreezeAlways && !cmp.Or(m.fs, caps.FS[0]).IsImage() && !caps.Unsynced
}

// cannotBeCopied: a driver that copies files one by one does not copy an overlay that is mounted.
func (v *volume) cannotBeCopied(m *model) bool { return v.overlay && v.mounted && !m.atomic }

// write changes files of a volume that is mounted.
func (m *model) write(v string, vol *volume) {
	if !vol.mounted {
		return
	}
	m.note("write", "%s", v)
	at := m.mountpoint(v)
	for range 1 + m.r.IntN(3) {
		p := fmt.Sprintf("f%d", m.r.IntN(8))
		if m.r.IntN(3) == 0 {
			p = "sub/" + p
		}
		if _, ok := vol.content[p]; ok && m.r.IntN(3) == 0 {
			delete(vol.content, p)
			m.must(os.Remove(filepath.Join(at, p)))
			continue
		}
		vol.content[p] = m.text()
		m.must(os.WriteFile(filepath.Join(at, p), []byte(vol.content[p]), 0o644))
	}
}

func (m *model) snapshot(v string, vol *volume) {
	if len(vol.snaps) >= 5 {
		return
	}
	name, freeze := m.fresh("s"), m.freeze()
	m.note("snapshot", "%s %s freeze=%v", v, name, freeze)
	info, err := m.e.Snapshot(m.t.Context(), engine.SnapshotRequest{Volume: ref.MustName(v), Name: ref.MustName(name),
		Freeze: freeze})
	if vol.cannotBeFrozen(m, freeze) {
		m.refused(errs.Unsupported, err)
		return
	}
	if vol.cannotBeCopied(m) {
		m.refused(errs.InUse, err)
		return
	}
	m.must(err)
	want := driver.Clean
	if vol.mounted && freeze == engine.FreezeNever {
		if m.atomic && cmp.Or(m.fs, m.e.Caps().FS[0]).IsImage() {
			want = driver.Crash
		}
	}
	if info.Consistency != want {
		m.errorf("consistency %q, wanted %q", info.Consistency, want)
	}
	vol.snaps[name] = &snapshot{content: maps.Clone(vol.content), golden: vol.golden, gen: vol.gen}
}

func (m *model) rewind(v string, vol *volume) {
	s := pick(m, vol.snaps)
	if s == "" || len(vol.snaps) >= 6 {
		return
	}
	detach := m.r.IntN(2) == 0
	m.note("rewind", "%s %s detach=%v", v, s, detach)
	out, err := m.e.Rewind(m.t.Context(), engine.RewindRequest{Volume: ref.MustName(v), Snapshot: ref.MustName(s),
		Detach: detach})
	if vol.mounted && !detach {
		m.refused(errs.InUse, err)
		return
	}
	m.must(err)
	before, ok := strings.CutPrefix(out.Before, v+"@before-rewind-")
	if !ok {
		m.errorf("the state before is %q", out.Before)
		return
	}
	snap := vol.snaps[s]
	vol.snaps["before-rewind-"+before] = &snapshot{content: vol.content, golden: vol.golden, gen: vol.gen}
	vol.content, vol.golden, vol.gen, vol.origin = maps.Clone(snap.content), snap.golden, snap.gen, v+"@"+s
}

// diff compares a volume, which may be in use, with something else.
func (m *model) diff(v string, vol *volume) {
	other, c := m.origin()
	if s := pick(m, vol.snaps); s != "" && m.r.IntN(2) == 0 {
		other, c = v+"@"+s, vol.snaps[s]
	} else if g := m.goldens[vol.golden]; g != nil && g.gens[vol.gen] != nil && m.r.IntN(2) == 0 {
		other, c = ref.Generation(vol.golden, vol.gen), g.gens[vol.gen]
	}
	a, err := ref.Parse("", other)
	m.must(err)
	m.note("diff", "%s %s", other, v)
	d, err := m.e.Diff(m.t.Context(), engine.DiffRequest{A: a, B: ref.Ref{Name: v}})
	if vol.cannotBeCopied(m) {
		m.refused(errs.InUse, err)
		return
	}
	m.must(err)
	if err != nil {
		return
	}
	got, want := map[string]bool{}, map[string]bool{}
	for _, x := range d.Changes {
		switch {
		case x.Type != "file":
		case x.Op == "renamed":
			got["deleted "+string(x.From)], got["added "+string(x.Path)] = true, true
		case x.Op != "modified" || x.Content:
			got[x.Op+" "+string(x.Path)] = true
		}
	}
	for p, b := range vol.content {
		if a, ok := c.content[p]; !ok {
			want["added "+p] = true
		} else if a != b {
			want["modified "+p] = true
		}
	}
	for p := range c.content {
		if _, ok := vol.content[p]; !ok {
			want["deleted "+p] = true
		}
	}
	if !maps.Equal(got, want) {
		m.errorf("diff %s %s (%s): %v\nwanted %v", other, v, d.Method, sorted(got), sorted(want))
	}
}

// rebase moves a volume to another generation of its golden.
func (m *model) rebase(v string, vol *volume) {
	g := m.goldens[vol.golden]
	if g == nil || len(vol.snaps) >= 6 {
		return
	}
	gens := slices.Sorted(maps.Keys(g.gens))
	n := gens[m.r.IntN(len(gens))]
	mode := m.r.IntN(3)
	q := engine.RebaseRequest{Volume: ref.MustName(v), Onto: ref.Ref{Name: vol.golden, At: fmt.Sprint(n)}, Ours: mode == 1,
		Theirs: mode == 2}
	m.note("rebase", "%s %s ours=%v theirs=%v", v, q.Onto, q.Ours, q.Theirs)
	out, err := m.e.Rebase(m.t.Context(), q)
	switch {
	case vol.mounted:
		m.refused(errs.InUse, err)
		return
	case n == vol.gen:
		m.must(err)
		if out.Before != "" {
			m.errorf("there was nothing to do, but: %+v", out)
		}
		return
	case g.gens[vol.gen] == nil:
		m.refused(errs.NotFound, err)
		return
	}
	base, theirs := g.gens[vol.gen].content, g.gens[n].content
	merged, conflicts := content{}, []string{}
	paths := map[string]bool{}
	for _, c := range []content{base, theirs, vol.content} {
		for p := range c {
			paths[p] = true
		}
	}
	for p := range paths {
		b, inBase := base[p]
		mine, inMine := vol.content[p]
		their, inTheirs := theirs[p]
		sameMine, sameTheirs := inMine == inBase && mine == b, inTheirs == inBase && their == b
		take, in := mine, inMine
		switch {
		case sameMine:
			take, in = their, inTheirs
		case !sameTheirs && (inMine != inTheirs || mine != their):
			conflicts = append(conflicts, p)
			if q.Theirs {
				take, in = their, inTheirs
			}
		}
		if in {
			merged[p] = take
		}
	}
	slices.Sort(conflicts)
	var told []string
	for _, c := range out.Conflicts {
		told = append(told, string(c.Path))
	}
	slices.Sort(told)
	if !slices.Equal(told, conflicts) {
		m.errorf("conflicts %v, wanted %v", told, conflicts)
	}
	if len(conflicts) > 0 && mode == 0 {
		m.refused(errs.Conflict, err)
		return
	}
	m.must(err)
	name, ok := strings.CutPrefix(out.Before, v+"@")
	if !ok {
		m.errorf("the state before is %q", out.Before)
		return
	}
	vol.snaps[name] = &snapshot{content: vol.content, golden: vol.golden, gen: vol.gen}
	vol.content, vol.gen, vol.origin = merged, n, ref.Generation(vol.golden, n)
}

func (m *model) destroy(v string, vol *volume) {
	m.note("destroy", "%s", v)
	r, err := m.e.Destroy(m.t.Context(), toDestroy(v))
	m.must(err)
	pinned := vol.pinned
	for _, s := range vol.snaps {
		pinned = pinned || s.pinned
	}
	if pinned {
		m.refused(errs.InUse, errors.Join(r.Failed...))
		// What could not go may have been unmounted? No: nothing has changed.
		return
	}
	m.must(errors.Join(r.Failed...))
	delete(m.volumes, v)
}

func (m *model) destroySnapshot(v string, vol *volume) {
	s := pick(m, vol.snaps)
	if s == "" {
		return
	}
	m.note("destroy snapshot", "%s@%s", v, s)
	r, err := m.e.Destroy(m.t.Context(), toDestroy(v+"@"+s))
	m.must(err)
	if vol.snaps[s].pinned {
		m.refused(errs.InUse, errors.Join(r.Failed...))
		return
	}
	m.must(errors.Join(r.Failed...))
	delete(vol.snaps, s)
}

func (m *model) publish(v string, vol *volume) {
	g, force := pick(m, m.goldens), m.r.IntN(3) == 0
	if m.r.IntN(2) == 0 && m.goldens[vol.golden] != nil {
		g = vol.golden
	}
	gold := m.goldens[g]
	stale := vol.golden == g && vol.gen != gold.current
	m.note("publish", "%s %s force=%v stale=%v", g, v, force, stale)
	out, err := m.e.Publish(m.t.Context(), engine.PublishRequest{Golden: ref.MustName(g), Volume: ref.MustName(v),
		Force: force})
	if stale && !force {
		m.refused(errs.Conflict, err)
		return
	}
	if vol.cannotBeCopied(m) {
		m.refused(errs.InUse, err)
		return
	}
	m.must(err)
	gold.current = out.Generation
	gold.gens[out.Generation] = &snapshot{content: maps.Clone(vol.content), golden: g, gen: out.Generation}
	if vol.golden == "" || vol.golden == g {
		vol.golden, vol.gen = g, out.Generation
	}
	m.retain(gold)
}

// retain applies a golden's retention to the model.
func (m *model) retain(g *golden) {
	if g.keep == 0 {
		return
	}
	all := slices.Sorted(maps.Keys(g.gens))
	for i, n := range all {
		if i < len(all)-g.keep && n != g.current && !g.gens[n].pinned {
			delete(g.gens, n)
		}
	}
}

func (m *model) keep() {
	g := pick(m, m.goldens)
	n := m.r.IntN(4)
	m.note("keep", "%s %d", g, n)
	_, err := m.e.Keep(m.t.Context(), engine.KeepRequest{Golden: ref.MustName(g), Generations: n})
	m.must(err)
	m.goldens[g].keep = n
	m.retain(m.goldens[g])
}

func (m *model) removeGolden() {
	g := pick(m, m.goldens)
	gold := m.goldens[g]
	m.note("golden rm", "%s", g)
	r, err := m.e.RemoveGolden(m.t.Context(), ref.Ref{Name: g})
	m.must(err)
	for _, s := range gold.gens {
		if s.pinned {
			m.refused(errs.InUse, errors.Join(r.Failed...))
			return // and nothing has gone
		}
	}
	m.must(errors.Join(r.Failed...))
	delete(m.goldens, g)
}

func (m *model) pin(what string, on bool) error {
	r, err := ref.Parse("", what)
	if err != nil {
		return err
	}
	if on {
		_, err = m.e.Pin(m.t.Context(), engine.PinRequest{Ref: r, For: []time.Duration{0, time.Hour}[m.r.IntN(2)]})
	} else {
		_, err = m.e.Unpin(m.t.Context(), r)
	}
	return err
}

func (m *model) pinSomething(v string, vol *volume) {
	on := m.r.IntN(3) == 0
	what, flag := v, &vol.pinned
	switch s := pick(m, vol.snaps); m.r.IntN(3) {
	case 0:
		if s != "" {
			what, flag = v+"@"+s, &vol.snaps[s].pinned
		}
	case 1:
		g := pick(m, m.goldens)
		gold := m.goldens[g]
		n := slices.Sorted(maps.Keys(gold.gens))[m.r.IntN(len(gold.gens))]
		what, flag = ref.Generation(g, n), &gold.gens[n].pinned
	}
	m.note("pin", "%s %v", what, on)
	m.must(m.pin(what, on))
	*flag = on
}

// prune removes all that may go, which the model knows too. It leaves little to go on with, so it is seldom.
func (m *model) prune() {
	var selector driver.LabelSelector
	verb := "prune"
	if m.counts[verb] > 0 && m.r.IntN(2) == 0 { // both come in every run
		selector, verb = m.selector(), "prune labels"
	}
	if m.counts[verb] > 0 && m.r.IntN(4) > 0 {
		return
	}
	dry := m.r.IntN(2) == 0
	m.note(verb, "dry=%v %s", dry, selector)
	want := map[string]bool{}
	used := map[string]bool{}
	for v, vol := range m.volumes {
		stays := vol.pinned || vol.mounted || !selector.Matches(vol.labels)
		for _, s := range vol.snaps {
			stays = stays || s.pinned
		}
		if !stays {
			want[v] = true
			continue
		}

		// It keeps what it was made from.
		used[ref.Generation(vol.golden, vol.gen)] = true
		for _, s := range vol.snaps {
			used[ref.Generation(s.golden, s.gen)] = true
		}
	}
	for g, gold := range m.goldens {
		for n, s := range gold.gens {
			if name := ref.Generation(g, n); n != gold.current && !s.pinned && !used[name] &&
				selector.Matches(gold.labels) {
				want[name] = true
			}
		}
	}
	r, err := m.e.Prune(m.t.Context(), engine.PruneRequest{Idle: time.Nanosecond, DryRun: dry, Labels: selector})
	m.must(err)
	if err != nil {
		return
	}
	got := map[string]bool{}
	for _, c := range r.Candidates {
		got[c.Ref] = true
		if c.Destroyed == dry {
			m.errorf("%+v of a dry=%v run", c, dry)
		}
	}
	if !maps.Equal(got, want) {
		m.errorf("prune: %v, wanted %v", sorted(got), sorted(want))
	}
	if dry {
		return
	}
	for what := range want {
		r, _ := ref.Parse("", what)
		if r.At == "" {
			delete(m.volumes, what)
		} else if n, ok := r.Generation(); ok {
			delete(m.goldens[r.Name].gens, n)
		}
	}
}

// nonsense asks for what cannot be.
func (m *model) nonsense(v string, vol *volume) {
	ctx := m.t.Context()
	m.note("nonsense", "%s", v)
	var err error
	switch m.r.IntN(6) {
	case 0:
		_, err = m.e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: pick(m, m.goldens)}, Name: ref.MustName(v)})
		m.refused(errs.Exists, err)
	case 1:
		_, err = m.e.Destroy(ctx, toDestroy("nobody", v))
		m.refused(errs.NotFound, err)
	case 2:
		_, err = m.e.Rewind(ctx, engine.RewindRequest{Volume: ref.MustName(v), Snapshot: ref.MustName("never")})
		m.refused(errs.NotFound, err)
	case 3:
		if s := pick(m, vol.snaps); s != "" {
			_, err = m.e.Snapshot(ctx, engine.SnapshotRequest{Volume: ref.MustName(v), Name: ref.MustName(s)})
			m.refused(errs.Exists, err)
		}
	case 4:
		_, err = m.e.Fork(ctx, engine.CloneRequest{From: ref.Ref{Name: pick(m, m.goldens)}, Name: ref.MustName(m.fresh("v"))})
		m.refused(errs.Invalid, err)
	case 5:
		_, err = m.e.Prune(ctx, engine.PruneRequest{KeepFreePercent: 100})
		m.refused(errs.Invalid, err)
	}
}
