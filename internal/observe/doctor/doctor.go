// Package doctor checks a host for known causes of lost data, leaks and slow storage, and suggests what to do about
// them. It never changes anything.
// A check returns a Report: findings for people (and for programs, by code), each with measurements, the reason why it
// matters and the steps to take. Figures that could not be found out are unknown, and figures known to a few digits or
// from samples are ranges: doctor never guesses.
// To add a check, add a function that fills in a *Report.
package doctor

import (
	"encoding/json"
	"slices"
	"time"
)

// Severity is how much a finding matters, in the words of fsck.
type Severity string

// The severities. OK and Skipped are only the status of a check.
const (
	Skipped  Severity = "skipped"  // the check could not look
	OK       Severity = "ok"       // it found nothing to report
	Note     Severity = "note"     // worth knowing
	Warning  Severity = "warning"  // costs much, or will fail
	Critical Severity = "critical" // loses data, or stops work now
)

// rank orders severities, the worst last.
func rank(s Severity) int {
	return slices.Index([]Severity{Skipped, OK, Note, Warning, Critical}, s)
}

// Unit is the unit of a figure.
type Unit string

// The units.
const (
	Bytes   Unit = "bytes"
	Count   Unit = "count"
	Percent Unit = "percent"
	Ratio   Unit = "ratio"
	Text    Unit = "text" // the figure is words
)

// Report is the result of one check. Its JSON form omits fields that a check does not set: checks of Examine set no
// subject, and ZFS sets no title, status or time.
type Report struct {
	Check    string    `json:"check"`             // its name, stable: see docs/doctor.md; "zfs"
	Title    string    `json:"title,omitempty"`   // what it looks for
	Subject  string    `json:"subject,omitempty"` // what it looked at: the name of a zpool
	Status   Severity  `json:"status,omitempty"`  // the worst of its findings; ok; skipped
	Summary  string    `json:"summary"`           // one sentence: what was checked, or why it was skipped
	Measured []Figure  `json:"measured,omitzero"` // nil is left out, an empty list is not
	Findings []Finding `json:"findings"`          //
	ZFS      *Facts    `json:"zfs,omitempty"`     // what ZFS found
	Seconds  float64   `json:"seconds,omitzero"`  //
}

// find adds a finding, and replaces its nil lists by empty ones, which are not null in JSON.
func (r *Report) find(f Finding) {
	if f.Do == nil {
		f.Do = []Step{}
	}
	if f.Measured == nil {
		f.Measured = []Figure{}
	}
	r.Findings = append(r.Findings, f)
}

func (r *Report) measure(figures ...Figure) { r.Measured = append(r.Measured, figures...) }

// Finding is a fact about the host that a person should know, and what to do about it.
type Finding struct {
	Code string `json:"code"` // stable: see docs/zfs-dedup.md
	// Subject is the affected part of the host, as tools name it: a mount point, a device, a zpool, a dataset, a golden;
	// "" if it is the subject of the check.
	Severity Severity `json:"severity"`
	Subject  string   `json:"subject,omitempty"`
	Title    string   `json:"title"`    // one sentence without a full stop
	Measured []Figure `json:"measured"` //
	Why      string   `json:"why"`      // it matters
	Do       []Step   `json:"do"`       // in this order
}

func (f *Finding) measure(figures ...Figure) { f.Measured = append(f.Measured, figures...) }

// Step is something to do.
type Step struct {
	Text     string   `json:"text"`
	Commands []string `json:"commands,omitempty"` // of a shell
}

func step(text string, commands ...string) Step { return Step{text, commands} }

// Figure is a measurement: one value if Low equals High, otherwise a range. Its JSON form has value, or low and high,
// or the value null if it is unknown.
type Figure struct {
	Name      string  // stable: "ddt_in_core"
	Label     string  // for people
	Unit      Unit    //
	Low, High float64 //
	Known     bool    //
	Text      string  // the value, if Unit is Text
	Note      string  // what the figure is, or why it is unknown
}

// MarshalJSON omits fields that do not apply.
func (f Figure) MarshalJSON() ([]byte, error) {
	m := map[string]any{"name": f.Name, "unit": f.Unit, "label": f.Label}
	switch {
	case f.Unit == Text && f.Known:
		m["value"] = f.Text
	case !f.Known:
		m["value"] = nil
	case f.Low == f.High:
		m["value"] = f.Low
	default:
		m["low"], m["high"] = f.Low, f.High
	}

	if f.Note != "" {
		m["note"] = f.Note
	}

	return json.Marshal(m)
}

// UnmarshalJSON reads what MarshalJSON has written.
func (f *Figure) UnmarshalJSON(b []byte) error {
	var m struct {
		Name, Label, Note string
		Unit              Unit
		Value             any
		Low, High         *float64
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return err
	}
	*f = Figure{Name: m.Name, Label: m.Label, Unit: m.Unit, Note: m.Note}
	switch v := m.Value.(type) {
	case string:
		f.Text, f.Known = v, true
	case float64:
		f.Low, f.High, f.Known = v, v, true
	}
	if m.Low != nil && m.High != nil {
		f.Low, f.High, f.Known = *m.Low, *m.High, true
	}
	return nil
}

// Range is a number of bytes, blocks or entries that lies between two bounds, both included. If they are equal, the
// number is exact.
type Range struct {
	Low  int64 `json:"low"`
	High int64 `json:"high"`
}

// exactly returns the range that holds only n.
func exactly(n int64) Range { return Range{n, n} }

// Exact reports whether the range holds one number only.
func (r Range) Exact() bool { return r.Low == r.High }

// Mid returns the middle, for comparisons that do not need the bounds.
func (r Range) Mid() int64 { return r.Low + (r.High-r.Low)/2 }

func (r Range) plus(o Range) Range { return Range{r.Low + o.Low, r.High + o.High} }

// minus returns the difference, which is never negative.
func (r Range) minus(o Range) Range { return Range{max(r.Low-o.High, 0), max(r.High-o.Low, 0)} }

// overlaps reports whether both can be the same number.
func (r Range) overlaps(o Range) bool { return r.Low <= o.High && o.Low <= r.High }

// known returns a figure between two bounds.
func known(name, label string, unit Unit, low, high float64) Figure {
	return Figure{Name: name, Label: label, Unit: unit, Low: low, High: high, Known: true}
}

// figure returns an exact figure.
func figure(name, label string, unit Unit, n int64) Figure {
	return known(name, label, unit, float64(n), float64(n))
}

// count returns an exact number of things.
func count[N int | int64 | uint64](name, label string, n N) Figure {
	return figure(name, label, Count, int64(n))
}

// percentage returns an exact figure in percent.
func percentage(name, label string, percent float64) Figure {
	return known(name, label, Percent, percent, percent)
}

// microseconds returns a duration as a figure; why says why it is unknown, "" if it is known.
func microseconds(name, label string, d time.Duration, why string) Figure {
	f := count(name, label+", microseconds", d.Microseconds())
	if why != "" {
		return unknown(name, f.Label, Count, why)
	}
	return f
}

// ranged returns a range as a figure.
func ranged(name, label string, unit Unit, r Range) Figure {
	return known(name, label, unit, float64(r.Low), float64(r.High))
}

// unknown returns a figure that could not be found out.
func unknown(name, label string, unit Unit, why string) Figure {
	return Figure{Name: name, Label: label, Unit: unit, Note: why}
}

// words returns a figure that is text; an empty value is unknown.
func words(name, label, value string) Figure {
	return Figure{Name: name, Label: label, Unit: Text, Text: value, Known: value != ""}
}

// noted adds a note.
func (f Figure) noted(note string) Figure {
	f.Note = note
	return f
}
