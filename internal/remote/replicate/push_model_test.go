package replicate

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/storetest"

	"golang.org/x/sys/unix"
)

// TestPushModel: random writes, trims, clones, forks, rewinds, new generations and
// pushes, some of which fail and some of which have forgotten what they knew. After each
// push the map on the remote is the image, byte by byte, and so are some older points.
func TestPushModel(t *testing.T) {
	m := &pushModel{r: faulttest.Rand(t), world: newWorld(t), kept: map[string]string{}}
	m.rp = m.open()
	m.importImage("g", modelSize, func(f *os.File) {
		for i := range int64(6) {
			noise(t, f, uint64(i), i*180*mib, 3*mib)
		}
		text(t, f, 3, 1020*mib, 5*mib)
	})
	m.clone("g", "v0")
	m.volumes = []string{"v0"}
	for m.step = range 140 {
		m.one()
	}
	for name, image := range m.kept {
		m.checkKept(name, image)
	}
	t.Logf("%d pushes, %d failed first, %d of whole volumes, %d unchanged; %d MiB read, %d MiB uploaded", m.pushes,
		m.failed, m.full, m.same, m.read/mib, m.up/mib)
	if m.pushes-m.same < 10 {
		t.Error("hardly anything was pushed")
	}
	m.clearLost(m.rp)
}

// modelSize is not a multiple of a block, and more than a region.
const modelSize = 1100*mib + 2048

type pushModel struct {
	*world
	r       *rand.Rand
	rp      *repo.Repo
	step    int
	volumes []string
	kept    map[string]string // HEAD@POINT on the remote -> ID of the object here

	pushes, failed, full, same int
	read, up                   int64
}

func (m *pushModel) volume() string { return m.volumes[m.r.IntN(len(m.volumes))] }

// one does one thing.
func (m *pushModel) one() {
	v := m.volume()
	switch n := m.r.IntN(20); {
	case n < 7:
		m.edit(v, m.scribble)
	case n < 14:
		m.pushOne(ref.Ref{Name: v})
	case n == 14:
		name := fmt.Sprintf("w%d", m.step) // the first volume is v0
		from := []string{"g", v}[m.r.IntN(2)]
		if from == "g" {
			m.clone(from, name)
		} else if _, err := m.e.Fork(m.t.Context(), engine.CloneRequest{From: ref.Ref{Name: v},
			Name: ref.MustName(name)}); err != nil {
			m.t.Fatal(err)
		}
		m.volumes = append(m.volumes, name)
	case n == 15:
		snap := fmt.Sprintf("s%d", m.step)
		if _, err := m.e.Snapshot(m.t.Context(), engine.SnapshotRequest{Volume: ref.MustName(v),
			Name: ref.MustName(snap)}); err != nil {
			m.t.Fatal(err)
		}
		m.edit(v, m.scribble)
		m.pushOne(ref.Ref{Name: v, At: snap})
	case n == 16:
		names, err := pooltest.SnapshotNames(m.t.Context(), m.e, v)
		if err != nil {
			m.t.Fatal(err)
		}
		if len(names) > 0 {
			if _, err := m.e.Rewind(m.t.Context(), engine.RewindRequest{Volume: ref.MustName(v),
				Snapshot: ref.MustName(names[m.r.IntN(len(names))])}); err != nil {
				m.t.Fatal(err)
			}
		}
	case n == 17:
		if _, err := m.e.Publish(m.t.Context(), engine.PublishRequest{Golden: ref.MustName("g"),
			Volume: ref.MustName(v)}); err != nil {
			m.t.Logf("publish: %v", err) // another one is the current generation in the meantime
		}
	case n == 18:
		if err := m.e.Transfer().DropLinks(m.t.Context(), m.rp.ID().String()); err != nil {
			m.t.Fatal(err)
		}
	case n == 19:
		m.pushOne(ref.Ref{Name: "g"})
	}
}

// scribble changes some of an image.
func (m *pushModel) scribble(f *os.File) {
	for range 1 + m.r.IntN(12) {
		at := m.r.Int64N(modelSize/4096) * 4096
		n := min(int64(1+m.r.IntN(300))*4096, modelSize-at)
		switch m.r.IntN(6) {
		case 0:
			punch(m.t, f, at, n)
		case 1: // data that is zero
			if _, err := f.WriteAt(make([]byte, n), at); err != nil {
				m.t.Fatal(err)
			}
		case 2: // allocated, never written
			if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_ZERO_RANGE, at, n); err != nil {
				m.t.Fatal(err)
			}
		case 3:
			n = min(n, 8192)
			fallthrough
		default:
			noise(m.t, f, m.r.Uint64()>>32, at, n)
		}
	}
}

// pushOne pushes, perhaps with a store that fails, and compares.
func (m *pushModel) pushOne(r ref.Ref) {
	if m.r.IntN(4) == 0 {
		when := []storetest.When{storetest.Before, storetest.After}[m.r.IntN(2)]
		m.store.Add(storetest.Fault{At: m.r.IntN(16), Times: -1, When: when})
		m.load()
		_, err := m.tryPush(r.String())
		m.store.Heal()
		if err != nil {
			m.failed++
		}
		if m.r.IntN(2) == 0 && r.At == "" && r.Name != "g" {
			m.edit(r.Name, m.scribble) // before the push is resumed
		}
	}
	m.load()
	out := m.push(r.String())
	m.pushes++
	head := r.Name
	for _, p := range out {
		m.read, m.up = m.read+p.ReadBytes, m.up+p.UploadedBytes
		if p.Full {
			m.full++
		}
		if p.Unchanged {
			m.same++
		}
	}
	if r.At == "" {
		m.checkPoint(m.rp, head, m.image(r.Name))
		return
	}
	h, _, err := m.rp.Head(m.t.Context(), head)
	if err != nil {
		m.t.Fatal(err)
	}
	i := slices.IndexFunc(h.Recent, func(p repo.Point) bool { return p.Name == r.At })
	if i < 0 {
		m.t.Fatalf("%s is not there", r)
	}
	m.check(m.rp, h.Recent[i].Manifest, m.image(r.String()))
	m.kept[r.String()] = h.Recent[i].Manifest.String()
}

// checkKept compares an older point, which later pushes share segments with.
func (m *pushModel) checkKept(name, manifest string) {
	id, err := repo.ParseID(manifest)
	if err != nil {
		m.t.Fatal(err)
	}
	m.check(m.rp, id, m.image(name))
}
