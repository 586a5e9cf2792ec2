package model

import (
	"cmp"
	"maps"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// snapshotGroup takes snapshots of some volumes at one point in time.
func (m *model) snapshotGroup() {
	var volumes []string
	for range 1 + m.r.IntN(3) {
		v := pick(m, m.volumes)
		if v != "" && !slices.Contains(volumes, v) && len(m.volumes[v].snaps) < 5 {
			volumes = append(volumes, v)
		}
	}
	if len(volumes) == 0 {
		return
	}

	name, freeze := m.fresh("s"), m.freeze()
	m.note("snapshot group", "%v %s freeze=%v", volumes, name, freeze)
	q := engine.SnapshotGroupRequest{Name: ref.MustName(name), Freeze: freeze}
	for _, v := range volumes {
		q.Volumes = append(q.Volumes, ref.MustName(v))
	}

	out, err := m.e.SnapshotGroup(m.t.Context(), q)
	if kind := m.groupRefused(volumes, freeze); kind != "" {
		m.refused(kind, err)
		return
	}
	m.must(err)
	if len(out.Snapshots) != len(volumes) {
		m.errorf("%d snapshots of %d volumes", len(out.Snapshots), len(volumes))
	}
	for _, v := range volumes {
		vol := m.volumes[v]
		vol.snaps[name] = &snapshot{content: maps.Clone(vol.content), golden: vol.golden, gen: vol.gen}
	}
}

// groupRefused returns the kind of error of a group that must be refused: of its volumes in use, only images can be
// frozen, and of the others a driver copies at most one in one step.
func (m *model) groupRefused(volumes []string, freeze engine.Freeze) errs.Kind {
	image := cmp.Or(m.fs, m.e.Caps().FS[0]).IsImage()
	loose := 0
	for _, v := range volumes {
		vol := m.volumes[v]
		switch {
		case freeze == engine.FreezeNever && vol.cannotBeCopied(m):
			return errs.InUse
		case vol.mounted && !image && freeze != engine.FreezeNever:
			loose++
		}
	}

	if loose > 1 || loose > 0 && !m.atomic {
		return errs.Unsupported
	}

	return ""
}
