package model

import (
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
)

// someLabels returns labels, often none.
func (m *model) someLabels() driver.Labels {
	l, err := driver.ParseLabels("test", [][]string{nil, nil, {"k=1"}, {"k=2", "note=\"<é>\""}}[m.r.IntN(4)])
	m.must(err)
	return l
}

// selector chooses objects by these labels, or all.
func (m *model) selector() driver.LabelSelector {
	s, err := driver.ParseLabelSelector("test", [][]string{nil, {"k"}, {"k=1"}, {"k=*", "note"}}[m.r.IntN(4)]...)
	m.must(err)
	return s
}

// label changes labels of a volume, of one of its snapshots or of a golden, which need not have those that go.
func (m *model) label(v string, vol *volume) {
	r, of := ref.Ref{Name: v}, &vol.labels
	switch s := pick(m, vol.snaps); {
	case m.r.IntN(3) == 0:
		r.Name = pick(m, m.goldens)
		of = &m.goldens[r.Name].labels
	case s != "" && m.r.IntN(2) == 0:
		r.At, of = s, &vol.snaps[s].labels
	}

	set := m.someLabels().Map()
	var remove []string
	if len(set) == 0 {
		remove = []string{"k", "never"}
	}
	m.note("label", "%s %v without %v", r, set, remove)
	out, err := m.e.SetLabels(m.t.Context(), engine.LabelRequest{Ref: r, Set: set, Remove: remove})
	m.must(err)
	*of, err = of.With("test", set, remove...)
	m.must(err)
	if out.Labels != *of {
		m.errorf("%s has labels %q, wanted %q", r, out.Labels, *of)
	}
}
