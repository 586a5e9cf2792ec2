package model

import (
	"strings"

	"pando/internal/api"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// rename gives a volume, one of its snapshots or its golden another name, which everything that comes from it follows.
func (m *model) rename(v string, vol *volume) {
	switch s := pick(m, vol.snaps); {
	case m.goldens[vol.golden] != nil && m.r.IntN(3) == 0:
		m.renameGolden(vol.golden)
	case s != "" && m.r.IntN(2) == 0:
		to := m.fresh("s")
		m.renameTo(ref.Ref{Name: v, At: s}, to)
		vol.snaps[to] = vol.snaps[s]
		delete(vol.snaps, s)
		m.renamed["@"+s] = "@" + to
	default:
		to := m.fresh("v")
		m.renameTo(ref.Ref{Name: v}, to)
		m.volumes[to] = vol
		delete(m.volumes, v)
		m.renamed[v] = to
	}
}

func (m *model) renameTo(r ref.Ref, to string) {
	m.note("rename", "%s to %s", r, to)
	out, err := m.e.Rename(m.t.Context(), engine.RenameRequest{Ref: r, Name: ref.MustName(to)})
	m.must(err)
	want := to
	if r.At != "" {
		want = r.Name + "@" + to
	}
	if now, _, _ := strings.Cut(out.Ref, "@"); out.Ref != want && (out.Kind != api.KindGeneration || now != want) ||
		out.Before != r.String() {
		m.errorf("renamed %s to %s: %+v", r, to, out)
	}
}

func (m *model) renameGolden(g string) {
	to := m.fresh("g")
	m.renameTo(ref.Ref{Name: g}, to)
	m.goldens[to] = m.goldens[g]
	delete(m.goldens, g)
	for _, s := range m.goldens[to].gens {
		s.golden = to
	}

	for _, vol := range m.volumes {
		if vol.golden == g {
			vol.golden = to
		}
		for _, s := range vol.snaps {
			if s.golden == g {
				s.golden = to
			}
		}
	}
	m.renamed[g] = to
}

// now returns what an origin is called now. The engine shows an origin that no longer exists as it was called when it
// was copied.
func (m *model) now(origin string) string {
	name, at, _ := strings.Cut(origin, "@")
	for m.renamed[name] != "" {
		name = m.renamed[name]
	}
	for m.renamed["@"+at] != "" {
		at = strings.TrimPrefix(m.renamed["@"+at], "@")
	}
	return name + "@" + at
}

// mountpoint returns where a mounted volume is: below its former name if it was renamed since.
func (m *model) mountpoint(v string) string {
	out, err := m.e.Mountpoints(m.t.Context(), "write", ref.MustName(v))
	m.must(err)
	if err != nil || !out[0].Mounted() {
		m.errorf("%s is not mounted: %+v", v, out)
		return ""
	}
	return out[0].Mountpoint
}
