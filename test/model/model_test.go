// Package model does random operations on a pool and compares it, all the time,
// with a model of what it should hold.
package model

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/driver/zfs"
	"pando/internal/engine"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
)

// defaultOps is the number of random operations, fullOps that with PANDO_TEST_FULL;
// PANDO_TEST_OPS is another.
const (
	defaultOps = 2_000
	fullOps    = 20_000

	// longOps is the number from which a run has to do everything.
	longOps = 2_000
)

// zfsOps is that number in a guest, where one takes about a second.
const zfsOps = 30

// operations is how many there are: PANDO_TEST_OPS, or the standard.
func operations(t *testing.T, standard int) int {
	text := os.Getenv("PANDO_TEST_OPS")
	if text == "" {
		return standard
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("PANDO_TEST_OPS: %v", err)
	}
	return n
}

var drivers = engine.Drivers{reflink.Name: reflink.Open, btrfs.Name: btrfs.Open, plain.Name: plain.Open,
	zfs.Name: zfs.Open}

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
	overlay bool
	labels  driver.Labels
	snaps   map[string]*snapshot
}

type snapshot struct {
	content content
	golden  string
	gen     int
	pinned  bool
	labels  driver.Labels // of a snapshot of a volume
}

// golden is a golden of the model.
type golden struct {
	current, keep int
	gens          map[int]*snapshot
	labels        driver.Labels
}

type model struct {
	renamed map[string]string // the next name by the former one; names of snapshots begin with @

	t        *testing.T
	r        *rand.Rand
	e        *engine.Engine
	dir      string // directory of the pool
	fs       driver.FS
	source   string
	atomic   bool
	overlays bool // whether this kind of pool has overlays
	volumes  map[string]*volume
	goldens  map[string]*golden
	history  []string
	saved    []byte   // bytes of the catalogue some time ago; nil: not saved
	wrong    []string // messages of errorf and fatal
	counts   map[string]int
	serial   int
	kept     *treetest.Kept // hashes of generations and layers, which must not change; nil on ZFS
	follower follower       // reader of the events
}

func TestRandomOperations(t *testing.T) {
	type kind struct {
		dir  func(t *testing.T) string
		init engine.InitRequest
		fs   driver.FS
	}
	kinds := map[string]kind{
		"reflink": {func(t *testing.T) string { return testfs.XFS(t, 4<<30) }, engine.InitRequest{Driver: "reflink"}, ""},
		"btrfs":   {func(t *testing.T) string { return testfs.Btrfs(t, 4<<30) }, engine.InitRequest{Driver: "btrfs"}, ""},
		"plain":   {func(t *testing.T) string { return testfs.Ext4(t, 4<<30) }, engine.InitRequest{Driver: "plain"}, ""},
	}
	standard := defaultOps
	if testfs.Full() {
		standard = fullOps
	}
	if os.Getenv("PANDO_TEST_ZFS") != "" { // in the guest of `make test-zfs`, which is slow
		kinds, standard = map[string]kind{}, zfsOps
		for _, fs := range []driver.FS{driver.Native, driver.Ext4} {
			kinds["zfs-"+string(fs)] = kind{func(t *testing.T) string {
				return t.TempDir()
			}, engine.InitRequest{Driver: "zfs"}, fs}
		}
	}
	for name, pool := range kinds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ops := operations(t, standard)
			dir := pool.dir(t)
			if pool.init.Driver == "zfs" {
				pool.init.Dataset = testfs.ZFS(t, 4<<30) + "/pando"
			}
			m := &model{t: t, r: faulttest.Rand(t), dir: filepath.Join(dir, "pool"), fs: pool.fs,
				source: t.TempDir(), overlays: pool.fs != driver.Native || testfs.ZFSHasOverlays(),
				volumes: map[string]*volume{}, goldens: map[string]*golden{}, counts: map[string]int{},
				follower: follower{has: map[string]string{}},
				renamed:  map[string]string{}}
			pool.init.Dir = m.dir
			if _, err := engine.Init(t.Context(), pool.init, drivers); err != nil {
				t.Fatal(err)
			}
			m.open()
			m.kept = treetest.KeepImmutable(t, m.dir)
			defer m.explain(ops)
			defer func() {
				m.e.Close()
				q := engine.DeinitRequest{Dir: m.dir, Force: true}
				if _, err := engine.Deinit(context.Background(), q, drivers, nil); err != nil {
					m.errorf("deinit: %v", err)
				}
			}()
			m.run(ops)
		})
	}
}

// explain says what led to a failure, and last what failed and how to repeat it: of a long
// log the end is what is looked at first.
func (m *model) explain(ops int) {
	if !m.t.Failed() {
		return
	}
	first := max(0, len(m.history)-60)
	for i, h := range m.history[first:] {
		m.t.Logf("%5d %s", first+i, h)
	}
	m.t.Logf("repeat with PANDO_SEED=%d PANDO_TEST_OPS=%d, which after these operations said:\n%s", faulttest.Seed(), ops,
		strings.Join(m.wrong, "\n"))
}

// errorf is that of testing.T; explain repeats it.
func (m *model) errorf(format string, args ...any) {
	m.t.Helper()
	m.wrong = append(m.wrong, fmt.Sprintf(format, args...))
	m.t.Errorf(format, args...)
}

func (m *model) fatal(err error) {
	m.t.Helper()
	m.errorf("%v", err)
	m.t.FailNow()
}

func (m *model) open() {
	e, err := engine.Open(m.t.Context(), m.dir, drivers)
	if err != nil {
		m.fatal(err)
	}
	r, err := e.Maintain(m.t.Context(), time.Now())
	if err != nil {
		m.fatal(err)
	}
	if len(r.Warnings) > 0 || r.Undone > 0 {
		m.errorf("there was something to recover: %+v", r)
	}
	m.e, m.atomic = e, e.Caps().Atomic
}

func (m *model) run(ops int) {
	start := m.free()
	began := time.Now()
	m.follow()
	for looked := 0; len(m.history) < ops || ops >= longOps && len(m.history) < 2*ops && m.notDone() != ""; {
		m.step()
		m.follow()
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
		m.errorf("LEAK: %d MiB less are free than at the start", lost>>20)
	}
	m.t.Logf("%d operations in %v: %v; free space at the start %d MiB, at the end %d MiB", ops, took.Round(time.Second),
		m.counts, start.FreeBytes>>20, end.FreeBytes>>20)
	if verb := m.notDone(); verb != "" && ops >= longOps {
		m.errorf("no %s was done: this run shows nothing of it", verb)
	}
}

// notDone is a verb of which nothing was done yet, or "". Rare ones need luck: so a long run goes on until it has done
// all.
func (m *model) notDone() string {
	for _, verb := range []string{"import", "clone", "fork", "mount", "umount", "write", "snapshot", "rewind", "destroy",
		"destroy snapshot", "publish", "diff", "rebase", "keep", "golden rm", "pin", "prune", "gc", "reopen", "refused",
		"went back", "clone overlay", "resize", "export", "rename", "label", "prune labels"} {
		if m.counts[verb] == 0 {
			return verb
		}
	}
	return ""
}

func (m *model) free() api.Pool {
	m.t.Helper()
	if _, err := m.e.GC(m.t.Context(), engine.GCRequest{}); err != nil {
		m.fatal(err)
	}
	p, err := m.e.Pool(m.t.Context(), engine.PoolRequest{})
	if err != nil {
		m.fatal(err)
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
		r, err := m.e.Destroy(m.t.Context(), toDestroy("*"))
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
	m.volumes, m.goldens, m.renamed = map[string]*volume{}, map[string]*golden{}, map[string]string{}
	m.compare()
}

func (m *model) must(err error) {
	m.t.Helper()
	if err != nil {
		m.errorf("%v (hint: %s)", err, errs.HintOf(err))
	}
}

// refused checks that something was refused, as it must be.
func (m *model) refused(kind errs.Kind, err error) {
	m.t.Helper()
	m.counts["refused"]++
	if !errs.Is(err, kind) || errs.HintOf(err) == "" {
		m.errorf("wanted an error of kind %s with a hint, got %v", kind, err)
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
		_, err := m.e.Mount(ctx, engine.MountRequest{Volume: ref.MustName(v)})
		m.must(err)
		vol.mounted = true
	case n < 350:
		m.note("umount", "%s", v)
		_, err := m.e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName(v)})
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
	case n < 900:
		m.pinSomething(v, vol)
	case n < 910:
		m.label(v, vol)
	case n < 920:
		m.prune()
	case n < 945 && n >= 925:
		m.diff(v, vol)
	case n < 965 && n >= 945:
		m.rebase(v, vol)
	case n < 925:
		m.note("gc", "")
		r, err := m.e.GC(ctx, engine.GCRequest{Explain: m.r.IntN(4) == 0})
		m.must(err)
		if err == nil && (r.Garbage > 0 || len(r.Kept) > 0 || len(r.Missing) > 0) {
			m.errorf("gc found something: %+v", r)
		}
		for _, g := range m.goldens { // what was pinned when the others went
			m.retain(g)
		}
	case n < 975:
		m.note("reopen", "")
		m.e.Close()
		m.open()
	case n < 977:
		m.otherBoot(v, vol)
	case n < 980:
		m.saveCatalogue()
	case n < 982:
		m.goBack()
	case n < 986:
		m.resize(v, vol)
	case n < 990:
		m.export(v, vol)
	case n < 994:
		m.rename(v, vol)
	default:
		m.nonsense(v, vol)
	}
}

// compare holds the whole pool against the model.
func (m *model) compare() {
	m.t.Helper()
	ctx := m.t.Context()
	vols, err := m.e.Volumes(ctx, engine.VolumesRequest{})
	m.must(err)
	var names []string
	for _, i := range vols {
		names = append(names, i.Name)
		vol := m.volumes[i.Name]
		if vol == nil {
			continue
		}
		if i.Overlay != vol.overlay {
			m.errorf("%s: overlay %v, wanted %v", i.Name, i.Overlay, vol.overlay)
		}
		if i.Labels != vol.labels {
			m.errorf("%s: labels %q, wanted %q", i.Name, i.Labels, vol.labels)
		}
		if i.Mounted() != vol.mounted || i.Pinned != vol.pinned || m.now(i.Origin) != m.now(vol.origin) ||
			i.Golden != vol.golden || i.Generation != vol.gen {
			m.errorf("%+v\nwanted %+v", i, *vol)
		}
		if vol.mounted {
			m.same(i.Name, i.Mountpoint, vol.content)
		}
	}
	if want := sorted(m.volumes); !slices.Equal(names, want) {
		m.errorf("volumes %v, wanted %v", names, want)
	}
	goldens, err := m.e.Goldens(ctx)
	m.must(err)
	names = nil
	for _, g := range goldens {
		names = append(names, g.Name)
		if gold := m.goldens[g.Name]; gold != nil && (g.Current.Generation != gold.current ||
			g.GenerationCount != len(gold.gens) ||
			g.Labels != gold.labels) {
			m.errorf("golden %+v, wanted %+v", g, *gold)
		}
	}
	if want := sorted(m.goldens); !slices.Equal(names, want) {
		m.errorf("goldens %v, wanted %v", names, want)
	}
	for v, vol := range m.volumes {
		d, err := m.e.Show(ctx, ref.Ref{Name: v})
		m.must(err)
		var snaps []string
		for _, s := range d.Snapshots {
			name := strings.TrimPrefix(s.Name, v+"@")
			snaps = append(snaps, name)
			want := vol.snaps[name]
			if want != nil && want.labels != s.Labels {
				m.errorf("%s: labels %q, wanted %q", s.Name, s.Labels, want.labels)
			}
			if want != nil && want.pinned != s.Pinned {
				m.errorf("%s: pinned %v", s.Ref, s.Pinned)
			}
		}
		slices.Sort(snaps)
		if want := sorted(vol.snaps); !slices.Equal(snaps, want) {
			m.errorf("snapshots of %s %v, wanted %v", v, snaps, want)
		}
	}
	m.kept.Check(m.t)

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
	out, err := m.e.Clone(m.t.Context(), engine.CloneRequest{From: r, Name: ref.MustName("look"), Mount: true,
		Ephemeral: true})
	if err != nil {
		m.errorf("%s: %v", from, err)
		return
	}
	m.same(from, out[0].Mountpoint, want)
	rep, err := m.e.Destroy(m.t.Context(), toDestroy("look"))
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
			m.errorf("%s: %s should not be there", what, p)
		}
	}
	for p, w := range want {
		if g, ok := got[p]; !ok || !bytes.Equal([]byte(g), []byte(w)) {
			m.errorf("%s: %s holds %d bytes (%.20q), wanted %d (%.20q)", what, p, len(g), g, len(w), w)
		}
	}
}
