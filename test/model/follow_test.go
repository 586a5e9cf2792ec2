package model

import (
	"maps"
	"slices"
	"strings"

	"pando/internal/api"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// follower knows what is in the pool only from its events.
type follower struct {
	last int64             // number of the last event that it has read
	has  map[string]string // references of volumes, snapshots, goldens and generations; of a mounted volume, where
}

// follow reads the events since the last call, and compares what they say with the model.
func (m *model) follow() {
	m.t.Helper()
	want := m.references()
	q := engine.HistoryRequest{After: m.follower.last}
	if q.After == 0 {
		q.Limit = 1
	}
	h, err := m.e.History(m.t.Context(), q)
	m.must(err)
	for _, v := range h.Events {
		if v.Seq <= m.follower.last && v.Event != api.EventGap {
			m.errorf("event %+v after number %d", v, m.follower.last)
		}
		m.follower.apply(v, want)
	}
	m.follower.last = h.Next

	mounts, err := m.e.Mountpoints(m.t.Context(), "ls")
	m.must(err)
	for _, i := range mounts {
		want[i.Name] = i.Mountpoint
	}
	if !maps.Equal(m.follower.has, want) {
		m.errorf("a reader of the events has\n%v, wanted\n%v; the last ones are %+v", m.follower.has, want, h.Events)
	}
}

// references are those of everything in the model.
func (m *model) references() map[string]string {
	out := map[string]string{}
	for v, vol := range m.volumes {
		out[v] = ""
		for s := range vol.snaps {
			out[v+"@"+s] = ""
		}
	}
	for g, gold := range m.goldens {
		out[g] = ""
		for n := range gold.gens {
			out[ref.Generation(g, n)] = ""
		}
	}
	return out
}

// apply does what an event says. Where events are missing, the reader looks at what is there now.
func (f *follower) apply(v api.Event, now map[string]string) {
	switch v.Event {
	case api.EventCreate:
		f.has[v.Ref] = ""
	case api.EventDestroy:
		delete(f.has, v.Ref)
	case api.EventMount:
		f.has[v.Ref] = v.Detail
	case api.EventUmount:
		f.has[v.Ref] = ""
	case api.EventRename:
		for _, was := range slices.Collect(maps.Keys(f.has)) {
			if was == v.Detail || strings.HasPrefix(was, v.Detail+"@") {
				f.has[v.Ref+strings.TrimPrefix(was, v.Detail)] = f.has[was]
				delete(f.has, was)
			}
		}
	case api.EventReplace, api.EventChange:
		if _, has := f.has[v.Ref]; !has {
			f.has[v.Ref+" does not exist"] = string(v.Event)
		}
	default: // a gap, a rebuild, another boot
		f.has = maps.Clone(now)
	}
}
