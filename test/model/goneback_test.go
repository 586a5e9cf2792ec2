package model

import (
	"os"
	"path/filepath"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// saveCatalogue remembers the catalogue as it is now.
func (m *model) saveCatalogue() {
	m.note("save", "")
	m.e.Close() // writes the log back, so that it is one file
	b, err := os.ReadFile(filepath.Join(m.dir, "catalog.db"))
	m.must(err)
	m.saved = b
	m.open()
}

// goBack puts back the catalogue that was saved. If that has lost anything for which
// somebody waited, no command resumes it, and a rebuild brings everything back.
func (m *model) goBack() {
	if m.saved == nil {
		return
	}
	m.note("go back", "")
	m.e.Close()
	path := filepath.Join(m.dir, "catalog.db")
	now, err := os.ReadFile(path)
	m.must(err)
	m.must(os.WriteFile(path, m.saved, 0o600))
	m.saved = nil

	e, err := engine.Open(m.t.Context(), m.dir, drivers)
	if err != nil {
		m.t.Fatal(err)
	}
	r, err := e.Maintain(m.t.Context(), time.Now())
	m.must(err)
	if len(r.Warnings) == 0 {
		// Nothing was waited for since. What was mounted is not known any more: go on where it was.
		e.Close()
		m.must(os.WriteFile(path, now, 0o600))
		m.open()
		return
	}
	m.counts["went back"]++
	_, err = e.Clone(m.t.Context(), engine.CloneRequest{From: ref.Ref{Name: pick(m, m.goldens)},
		Name: ref.MustName("back")})
	m.refused(errs.Damaged, err)
	e.Close()

	_, err = engine.Rebuild(m.t.Context(), m.dir, drivers)
	m.must(err)
	for _, v := range m.volumes { // a rebuild unmounts what is not in use
		v.mounted = false
	}
	m.open()
	m.compare()
}
