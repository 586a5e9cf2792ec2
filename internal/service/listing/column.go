package listing

import (
	"strconv"
	"strings"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine"
)

// Column is a property of volumes that lists can show, sort and filter by. Exactly one of Text, Flag, Bytes, Number and
// Moment is set.
type Column struct {
	Name   string
	Text   func(*api.Object) string
	Flag   func(*api.Object) bool
	Bytes  func(*api.Object) int64
	Number func(*api.Object) int64
	Moment func(*api.Object) time.Time // zero: never

	order engine.VolumeOrder       // how the catalogue calls the order by this column; "": it does not have it
	also  func(*api.Object) string // other word for Text that filters find, too; nil: none
}

// Columns returns the columns.
func Columns() []Column {
	at := func(t *time.Time) time.Time {
		if t == nil {
			return time.Time{}
		}
		return *t
	}

	pinnedUntil := func(v *api.Object) time.Time {
		if v.Pinned && v.PinnedUntil == nil {
			return driver.Forever
		}
		return at(v.PinnedUntil)
	}

	return []Column{
		{Name: "name", Text: func(v *api.Object) string { return v.Ref }, order: engine.ByName},
		{Name: "origin", Text: func(v *api.Object) string { return v.Origin }},
		{Name: "fs", Text: func(v *api.Object) string { return string(v.FS) }},
		{Name: "state", Text: func(v *api.Object) string { return string(v.State) }},
		{Name: "logical", Bytes: func(v *api.Object) int64 { return v.LogicalBytes }, order: engine.ByLogical},
		{Name: "exclusive", Bytes: func(v *api.Object) int64 { return v.ExclusiveBytes }, order: engine.ByExclusive},
		{Name: "shared", Bytes: func(v *api.Object) int64 { return v.SharedBytes }, order: engine.ByShared},
		{Name: "created", Moment: func(v *api.Object) time.Time { return v.CreatedAt }, order: engine.ByCreated},
		{Name: "mountpoint", Text: func(v *api.Object) string { return v.Mountpoint }},

		{Name: "id", Text: func(v *api.Object) string { return v.ID }},
		{Name: "kind", Text: func(v *api.Object) string { return string(v.Kind) }},
		{Name: "golden", Text: func(v *api.Object) string { return v.Golden }},
		{Name: "generation", Number: func(v *api.Object) int64 { return int64(v.Generation) }},
		{Name: "size", Bytes: func(v *api.Object) int64 { return v.SizeBytes }, order: engine.BySize},
		{Name: "extents", Number: func(v *api.Object) int64 { return v.Extents }, order: engine.ByExtents},
		{Name: "used", Moment: func(v *api.Object) time.Time { return v.LastUsedAt }, order: engine.ByUsed},
		{Name: "measured", Moment: func(v *api.Object) time.Time { return at(v.MeasuredAt) }, order: engine.ByMeasured},
		{Name: "expires", Moment: func(v *api.Object) time.Time { return at(v.ExpiresAt) }, order: engine.ByExpires},
		{Name: "pinned", Moment: pinnedUntil},
		{Name: "ephemeral", Flag: func(v *api.Object) bool { return v.Ephemeral }},
		{Name: "overlay", Flag: func(v *api.Object) bool { return v.Overlay }},
		{Name: "labels", Text: func(v *api.Object) string { return v.Labels.String() }},
		{Name: "owner", Text: func(v *api.Object) string { return OwnerName(v.OwnerUID) },
			also: func(v *api.Object) string { return strconv.FormatUint(uint64(v.OwnerUID), 10) }},
	}
}

// ColumnNames returns the names of the columns, in their order.
func ColumnNames() []string {
	var out []string
	for _, c := range Columns() {
		out = append(out, c.Name)
	}
	return out
}

// FindColumn returns the column with a name, in any case. what names what the column is for, in errors. Invalid.
func FindColumn(what, name string) (Column, error) {
	for _, c := range Columns() {
		if strings.EqualFold(c.Name, name) {
			return c, nil
		}
	}
	return Column{}, errs.New(errs.Invalid, op, what, "unknown column %q", name).
		WithHint("choose %s", strings.Join(ColumnNames(), ", "))
}

// FindColumns returns the columns with these names, at least one. what is as in FindColumn. It returns Invalid.
func FindColumns(what string, names []string) (columns []Column, err error) {
	if len(names) == 0 {
		return nil, errs.New(errs.Invalid, op, what, "the list of columns is empty").
			WithHint("choose from %s", strings.Join(ColumnNames(), ", "))
	}
	for _, name := range names {
		c, err := FindColumn(what, strings.TrimSpace(name))
		if err != nil {
			return nil, err
		}
		columns = append(columns, c)
	}
	return columns, nil
}

// key is what a column's order goes by: first the number, then the text.
type key struct {
	Number int64  `json:"n,omitempty"`
	Text   string `json:"t,omitempty"`
}

// keyOf returns the key of a volume. A time that is not set is greater than all others.
func (c *Column) keyOf(v *api.Object) key {
	switch {
	case c.Text != nil:
		return key{Text: c.Text(v)}
	case c.Flag != nil && c.Flag(v):
		return key{Number: 1}
	case c.Flag != nil:
		return key{}
	case c.Bytes != nil:
		return key{Number: c.Bytes(v)}
	case c.Number != nil:
		return key{Number: c.Number(v)}
	case c.Moment(v).IsZero():
		return key{Number: engine.Never}
	}
	return key{Number: c.Moment(v).UnixNano()}
}
