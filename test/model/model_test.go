// Package model does random operations on a pool and compares it, all the time,
// with a model of what it should hold.
package model

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/errs"
	"pando/internal/ref"
	"pando/internal/testfs"
)

var (
	seedFlag = flag.Uint64("seed", 0, "seed of the random operations; 0: another one each time")
	opsFlag  = flag.Int("ops", 10_000, "number of random operations")
)

var drivers = engine.Drivers{reflink.Name: reflink.Open, btrfs.Name: btrfs.Open, plain.Name: plain.Open}

// content is a tree: what is in each file, by path.
type content map[string]string

// volume is a volume of the model.
type volume struct {
	content content
	origin  string
	golden  string // base
	gen     int
	mounted bool
	pinned  bool
	snaps   map[string]*snapshot
}

type snapshot struct {
	content content
	golden  string
	gen     int
	pinned  bool
}

// golden is a golden of the model.
type golden struct {
	current, keep int
	gens          map[int]*snapshot
}

type model struct {
	t       *testing.T
	r       *rand.Rand
	e       *engine.Engine
	dir     string // of the pool
	source  string
	atomic  bool
	volumes map[string]*volume
	goldens map[string]*golden
	history []string
	counts  map[string]int
	serial  int
}

func TestRandomOperations(t *testing.T) {
	for name, pool := range map[string]struct {
		dir  func(t *testing.T) string
		init engine.InitRequest
	}{
		"reflink": {func(t *testing.T) string { return testfs.XFS(t, 4<<30) }, engine.InitRequest{Driver: "reflink"}},
		"btrfs":   {func(t *testing.T) string { return testfs.Btrfs(t, 4<<30) }, engine.InitRequest{Driver: "btrfs"}},
		"plain":   {func(t *testing.T) string { return testfs.Ext4(t, 4<<30) }, engine.InitRequest{Driver: "plain"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seed := *seedFlag
			if seed == 0 {
				seed = rand.Uint64()
			}
			t.Logf("repeat with -seed %d -ops %d", seed, *opsFlag)
			dir := pool.dir(t)
			m := &model{t: t, r: rand.New(rand.NewPCG(seed, 0)), dir: filepath.Join(dir, "pool"), source: t.TempDir(),
				volumes: map[string]*volume{}, goldens: map[string]*golden{}, counts: map[string]int{}}
			pool.init.Dir = m.dir
			if _, err := engine.Init(t.Context(), pool.init, drivers); err != nil {
				t.Fatal(err)
			}
			m.open()
			defer func() {
				if t.Failed() {
					for i, h := range m.history[max(0, len(m.history)-60):] {
						t.Logf("%5d %s", max(0, len(m.history)-60)+i, h)
					}
				}
				m.e.Close()
				if _, err := engine.Deinit(context.Background(), m.dir, true, drivers); err != nil {
					t.Errorf("deinit: %v", err)
				}
			}()
			m.run(*opsFlag)
		})
	}
}

func (m *model) open() {
	e, err := engine.Open(m.t.Context(), m.dir, drivers)
	if err != nil {
		m.t.Fatal(err)
	}
	if w := e.Recovery.Warnings; len(w) > 0 || e.Recovery.Undone > 0 {
		m.t.Errorf("there was something to recover: %+v", e.Recovery)
	}
	m.e, m.atomic = e, e.Caps().Atomic
}

func (m *model) run(ops int) {
	start := m.free()
	began := time.Now()
	for looked := 0; len(m.history) < ops; {
		m.step()
		if len(m.history) >= looked+500 {
			looked = len(m.history)
			m.compare()
		}
		if m.t.Failed() {
			return
		}
	}
	m.compare()
	took := time.Since(began)
	m.end()
	end := m.free()
	allowed := max(start.TotalBytes/100, 64<<20)
	if lost := start.FreeBytes - end.FreeBytes; lost > allowed {
		m.t.Errorf("LEAK: %d MiB less are free than at the start", lost>>20)
	}
	m.t.Logf("%d operations in %v: %v; free space at the start %d MiB, at the end %d MiB", ops, took.Round(time.Second), m.counts, start.FreeBytes>>20, end.FreeBytes>>20)
	for _, verb := range []string{"import", "clone", "fork", "mount", "umount", "write", "snapshot", "rewind", "destroy", "destroy snapshot",
		"publish", "keep", "golden rm", "pin", "prune", "gc", "reopen", "refused"} {
		if ops >= 2000 && m.counts[verb] == 0 {
			m.t.Errorf("no %s was done: this run shows nothing of it", verb)
		}
	}
}

func (m *model) free() engine.PoolInfo {
	m.t.Helper()
	if _, err := m.e.GC(m.t.Context(), false); err != nil {
		m.t.Fatal(err)
	}
	p, err := m.e.Pool(m.t.Context(), false)
	if err != nil {
		m.t.Fatal(err)
	}
	return p
}

// end destroys everything.
func (m *model) end() {
	for _, n := range sorted(m.volumes) {
		for _, s := range sorted(m.volumes[n].snaps) {
			m.must(m.pin(n+"@"+s, false))
		}
		m.must(m.pin(n, false))
	}
	if len(m.volumes) > 0 {
		r, err := m.e.Destroy(m.t.Context(), []string{"*"}, nil)
		m.must(err)
		m.must(errors.Join(r.Failed...))
	}
	for _, g := range sorted(m.goldens) {
		for n := range m.goldens[g].gens {
			m.must(m.pin(ref.Generation(g, n), false))
		}
		_, err := m.e.RemoveGolden(m.t.Context(), ref.Ref{Name: g})
		m.must(err)
	}
	m.volumes, m.goldens = map[string]*volume{}, map[string]*golden{}
	m.compare()
}

func (m *model) must(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Errorf("%v (hint: %s)", err, errs.HintOf(err))
	}
}

// refused checks that something was refused, as it must be.
func (m *model) refused(kind errs.Kind, err error) {
	m.t.Helper()
	m.counts["refused"]++
	if !errs.Is(err, kind) || errs.HintOf(err) == "" {
		m.t.Errorf("wanted an error of kind %s with a hint, got %v", kind, err)
	}
}

func (m *model) note(verb, format string, args ...any) {
	m.counts[verb]++
	m.history = append(m.history, verb+" "+fmt.Sprintf(format, args...))
}

func sorted[V any](in map[string]V) []string { return slices.Sorted(maps.Keys(in)) }

// pick returns a random key, "" if there is none.
func pick[V any](m *model, in map[string]V) string {
	if len(in) == 0 {
		return ""
	}
	return sorted(in)[m.r.IntN(len(in))]
}

func (m *model) fresh(prefix string) string {
	m.serial++
	return fmt.Sprintf("%s%d", prefix, m.serial)
}

// step does one random operation.
func (m *model) step() {
	ctx := m.t.Context()
	v := pick(m, m.volumes)
	vol := m.volumes[v]
	if len(m.goldens) == 0 {
		m.importGolden()
		return
	}
	n := m.r.IntN(1000)
	if vol == nil && n >= 120 {
		n = 40
	}
	switch {
	case n < 10:
		if len(m.goldens) < 4 {
			m.importGolden()
		}
	case n < 120:
		if len(m.volumes) < 20 {
			m.clone()
		}
	case n < 180:
		if len(m.volumes) < 20 {
			m.fork(v, vol)
		}
	case n < 270:
		m.note("mount", "%s", v)
		_, err := m.e.Mount(ctx, v, "")
		m.must(err)
		vol.mounted = true
	case n < 350:
		m.note("umount", "%s", v)
		_, err := m.e.Umount(ctx, v)
		m.must(err)
		vol.mounted = false
	case n < 560:
		m.write(v, vol)
	case n < 640:
		m.snapshot(v, vol)
	case n < 700:
		m.rewind(v, vol)
	case n < 760:
		m.destroy(v, vol)
	case n < 800:
		m.destroySnapshot(v, vol)
	case n < 850:
		m.publish(v, vol)
	case n < 865:
		m.keep()
	case n < 875:
		m.removeGolden()
	case n < 910:
		m.pinSomething(v, vol)
	case n < 920:
		m.prune()
	case n < 930:
		m.note("gc", "")
		r, err := m.e.GC(ctx, m.r.IntN(4) == 0)
		m.must(err)
		if err == nil && (r.Garbage > 0 || len(r.Kept) > 0 || len(r.Missing) > 0) {
			m.t.Errorf("gc found something: %+v", r)
		}
		for _, g := range m.goldens { // what was pinned when the others went
			m.retain(g)
		}
	case n < 945:
		m.note("reopen", "")
		m.e.Close()
		m.open()
	default:
		m.nonsense(v, vol)
	}
}

func (m *model) importGolden() {
	name := m.fresh("g")
	c := content{}
	must := func(err error) {
		if err != nil {
			m.t.Fatal(err)
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
	q := engine.ImportRequest{Name: name, Source: m.source}
	if m.e.Caps().FS[0].IsImage() {
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
	if v := pick(m, m.volumes); v != "" && m.r.IntN(3) == 0 {
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
		m.t.Fatal(err)
	}
	name, mount := m.fresh("v"), m.r.IntN(3) == 0
	m.note("clone", "%s %s mount=%v", from, name, mount)
	out, err := m.e.Clone(m.t.Context(), engine.CloneRequest{From: r, Name: name, Mount: mount})
	m.must(err)
	if err == nil && r.At == "" && m.goldens[from] != nil {
		from = ref.Generation(from, m.goldens[from].current)
	}
	if err == nil && out[0].Origin != from {
		m.t.Errorf("origin %s", out[0].Origin)
	}
	m.volumes[name] = &volume{content: maps.Clone(c.content), origin: from, golden: c.golden, gen: c.gen, mounted: mount, snaps: map[string]*snapshot{}}
}

func (m *model) fork(v string, vol *volume) {
	name, noFreeze := m.fresh("v"), m.r.IntN(4) == 0
	m.note("fork", "%s %s noFreeze=%v", v, name, noFreeze)
	_, err := m.e.Fork(m.t.Context(), engine.CloneRequest{From: ref.Ref{Name: v}, Name: name, NoFreeze: noFreeze})
	m.must(err)
	m.volumes[name] = &volume{content: maps.Clone(vol.content), origin: v, golden: vol.golden, gen: vol.gen, snaps: map[string]*snapshot{}}
}

// write changes files of a volume that is mounted.
func (m *model) write(v string, vol *volume) {
	if !vol.mounted {
		return
	}
	m.note("write", "%s", v)
	at := filepath.Join(m.dir, "mnt", v)
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
		m.must(os.WriteFile(filepath.Join(at, p), []byte(vol.content[p]), 0o600))
	}
}

func (m *model) snapshot(v string, vol *volume) {
	if len(vol.snaps) >= 5 {
		return
	}
	name, noFreeze := m.fresh("s"), m.r.IntN(4) == 0
	m.note("snapshot", "%s %s noFreeze=%v", v, name, noFreeze)
	info, err := m.e.Snapshot(m.t.Context(), engine.SnapshotRequest{Volume: v, Name: name, NoFreeze: noFreeze})
	m.must(err)
	want := "clean"
	if vol.mounted && noFreeze {
		if m.e.Caps().Name == "reflink" {
			want = "crash"
		}
	}
	if info.Consistency != want {
		m.t.Errorf("consistency %q, wanted %q", info.Consistency, want)
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
	out, err := m.e.Rewind(m.t.Context(), engine.RewindRequest{Volume: v, Snapshot: s, Detach: detach})
	if vol.mounted && !detach {
		m.refused(errs.InUse, err)
		return
	}
	m.must(err)
	before, ok := strings.CutPrefix(out.Before, v+"@before-rewind-")
	if !ok {
		m.t.Errorf("the state before is %q", out.Before)
		return
	}
	snap := vol.snaps[s]
	vol.snaps["before-rewind-"+before] = &snapshot{content: vol.content, golden: vol.golden, gen: vol.gen}
	vol.content, vol.golden, vol.gen, vol.origin = maps.Clone(snap.content), snap.golden, snap.gen, v+"@"+s
}

func (m *model) destroy(v string, vol *volume) {
	m.note("destroy", "%s", v)
	r, err := m.e.Destroy(m.t.Context(), []string{v}, nil)
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
	r, err := m.e.Destroy(m.t.Context(), []string{v + "@" + s}, nil)
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
	out, err := m.e.Publish(m.t.Context(), engine.PublishRequest{Golden: g, Volume: v, Force: force})
	if stale && !force {
		m.refused(errs.Conflict, err)
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
	_, err := m.e.Keep(m.t.Context(), g, n)
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
		_, err = m.e.Pin(m.t.Context(), r, []time.Duration{0, time.Hour}[m.r.IntN(2)])
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

// prune removes all that may go, which the model knows too.
func (m *model) prune() {
	if m.r.IntN(4) > 0 {
		return // it leaves little to go on with
	}
	dry := m.r.IntN(2) == 0
	m.note("prune", "dry=%v", dry)
	want := map[string]bool{}
	used := map[string]bool{}
	for v, vol := range m.volumes {
		pinned := vol.pinned || vol.mounted
		used[ref.Generation(vol.golden, vol.gen)] = true
		for _, s := range vol.snaps {
			pinned = pinned || s.pinned
			used[ref.Generation(s.golden, s.gen)] = true
		}
		if !pinned {
			want[v] = true
		}
	}
	for g, gold := range m.goldens {
		for n, s := range gold.gens {
			if name := ref.Generation(g, n); n != gold.current && !s.pinned && !used[name] {
				want[name] = true
			}
		}
	}
	r, err := m.e.Prune(m.t.Context(), engine.PruneRequest{Idle: time.Nanosecond, DryRun: dry})
	m.must(err)
	if err != nil {
		return
	}
	got := map[string]bool{}
	for _, c := range r.Candidates {
		got[c.Ref] = true
		if c.Destroyed == dry {
			m.t.Errorf("%+v of a dry=%v run", c, dry)
		}
	}
	if !maps.Equal(got, want) {
		m.t.Errorf("prune: %v, wanted %v", sorted(got), sorted(want))
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
		_, err = m.e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: pick(m, m.goldens)}, Name: v})
		m.refused(errs.Exists, err)
	case 1:
		_, err = m.e.Destroy(ctx, []string{"nobody", v}, nil)
		m.refused(errs.NotFound, err)
	case 2:
		_, err = m.e.Rewind(ctx, engine.RewindRequest{Volume: v, Snapshot: "never"})
		m.refused(errs.NotFound, err)
	case 3:
		if s := pick(m, vol.snaps); s != "" {
			_, err = m.e.Snapshot(ctx, engine.SnapshotRequest{Volume: v, Name: s})
			m.refused(errs.Exists, err)
		}
	case 4:
		_, err = m.e.Fork(ctx, engine.CloneRequest{From: ref.Ref{Name: pick(m, m.goldens)}, Name: m.fresh("v")})
		m.refused(errs.Invalid, err)
	case 5:
		_, err = m.e.Prune(ctx, engine.PruneRequest{KeepFreePercent: 100})
		m.refused(errs.Invalid, err)
	}
}

// compare holds the whole pool against the model.
func (m *model) compare() {
	m.t.Helper()
	ctx := m.t.Context()
	vols, err := m.e.Volumes(ctx, false)
	m.must(err)
	var names []string
	for _, i := range vols {
		names = append(names, i.Name)
		vol := m.volumes[i.Name]
		if vol == nil {
			continue
		}
		if i.Mounted() != vol.mounted || (i.PinnedUntil != nil) != vol.pinned || i.Origin != vol.origin || i.Golden != vol.golden || i.Generation != vol.gen {
			m.t.Errorf("%+v\nwanted %+v", i, *vol)
		}
		if vol.mounted {
			m.same(i.Name, i.Mountpoint, vol.content)
		}
	}
	if want := sorted(m.volumes); !slices.Equal(names, want) {
		m.t.Errorf("volumes %v, wanted %v", names, want)
	}
	goldens, err := m.e.Goldens(ctx)
	m.must(err)
	names = nil
	for _, g := range goldens {
		names = append(names, g.Name)
		if gold := m.goldens[g.Name]; gold != nil && (g.Generation != gold.current || g.Generations != len(gold.gens)) {
			m.t.Errorf("golden %+v, wanted %+v", g, *gold)
		}
	}
	if want := sorted(m.goldens); !slices.Equal(names, want) {
		m.t.Errorf("goldens %v, wanted %v", names, want)
	}
	for v, vol := range m.volumes {
		d, err := m.e.Show(ctx, ref.Ref{Name: v})
		m.must(err)
		var snaps []string
		for _, s := range d.Snapshots {
			name := strings.TrimPrefix(s.Name, v+"@")
			snaps = append(snaps, name)
			if want := vol.snaps[name]; want != nil && want.pinned != (s.PinnedUntil != nil) {
				m.t.Errorf("%s: pinned %v", s.Name, s.PinnedUntil)
			}
		}
		slices.Sort(snaps)
		if want := sorted(vol.snaps); !slices.Equal(snaps, want) {
			m.t.Errorf("snapshots of %s %v, wanted %v", v, snaps, want)
		}
	}
	// What is immutable is looked at through a clone: one of each kind.
	if v := pick(m, m.volumes); v != "" {
		if s := pick(m, m.volumes[v].snaps); s != "" {
			m.sameClone(v+"@"+s, m.volumes[v].snaps[s].content)
		}
		if !m.volumes[v].mounted {
			m.sameClone(v, m.volumes[v].content)
		}
	}
	if g := pick(m, m.goldens); g != "" {
		for n, s := range m.goldens[g].gens {
			m.sameClone(ref.Generation(g, n), s.content)
		}
	}
}

func (m *model) sameClone(from string, want content) {
	m.t.Helper()
	r, err := ref.Parse("", from)
	m.must(err)
	out, err := m.e.Clone(m.t.Context(), engine.CloneRequest{From: r, Name: "look", Mount: true, Ephemeral: true})
	if err != nil {
		m.t.Errorf("%s: %v", from, err)
		return
	}
	m.same(from, out[0].Mountpoint, want)
	rep, err := m.e.Destroy(m.t.Context(), []string{"look"}, nil)
	m.must(err)
	m.must(errors.Join(rep.Failed...))
}

// same compares a tree with what it should be.
func (m *model) same(what, at string, want content) {
	m.t.Helper()
	got := content{}
	err := filepath.WalkDir(at, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(p)
		rel, _ := filepath.Rel(at, p)
		got[rel] = string(b)
		return err
	})
	m.must(err)
	for p := range got {
		if _, ok := want[p]; !ok {
			m.t.Errorf("%s: %s should not be there", what, p)
		}
	}
	for p, w := range want {
		if g, ok := got[p]; !ok || !bytes.Equal([]byte(g), []byte(w)) {
			m.t.Errorf("%s: %s holds %d bytes (%.20q), wanted %d (%.20q)", what, p, len(g), g, len(w), w)
		}
	}
}
