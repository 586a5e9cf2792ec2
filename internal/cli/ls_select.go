package cli

import (
	"cmp"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

// column is a property of volumes that ls can show, sort and filter by. One of its functions says what it is; a text
// may have another word, too, that filters find.
type column struct {
	name   string
	text   func(*engine.Info) string
	also   func(*engine.Info) string // other word for the text; may be nil
	flag   func(*engine.Info) bool
	bytes  func(*engine.Info) int64
	number func(*engine.Info) int64
	moment func(*engine.Info) time.Time // zero: never
}

// lsColumns returns the columns, those that ls shows by default first.
func lsColumns() []column {
	at := func(t *time.Time) time.Time {
		if t == nil {
			return time.Time{}
		}
		return *t
	}

	return []column{
		{name: "name", text: func(v *engine.Info) string { return v.Name }},
		{name: "origin", text: func(v *engine.Info) string { return v.Origin }},
		{name: "fs", text: func(v *engine.Info) string { return string(v.FS) }},
		{name: "state", text: func(v *engine.Info) string { return string(v.State) }},
		{name: "logical", bytes: func(v *engine.Info) int64 { return v.LogicalBytes }},
		{name: "exclusive", bytes: func(v *engine.Info) int64 { return v.ExclusiveBytes }},
		{name: "shared", bytes: func(v *engine.Info) int64 { return v.SharedBytes }},
		{name: "created", moment: func(v *engine.Info) time.Time { return v.CreatedAt }},
		{name: "mountpoint", text: func(v *engine.Info) string { return v.Mountpoint }},

		{name: "id", text: func(v *engine.Info) string { return v.ID }},
		{name: "golden", text: func(v *engine.Info) string { return v.Golden }},
		{name: "generation", number: func(v *engine.Info) int64 { return int64(v.Generation) }},
		{name: "size", bytes: func(v *engine.Info) int64 { return v.SizeBytes }},
		{name: "extents", number: func(v *engine.Info) int64 { return v.Extents }},
		{name: "used", moment: func(v *engine.Info) time.Time { return v.LastUsedAt }},
		{name: "measured", moment: func(v *engine.Info) time.Time { return at(v.MeasuredAt) }},
		{name: "expires", moment: func(v *engine.Info) time.Time { return at(v.ExpiresAt) }},
		{name: "pinned", moment: func(v *engine.Info) time.Time { return at(v.PinnedUntil) }},
		{name: "ephemeral", flag: func(v *engine.Info) bool { return v.Ephemeral }},
		{name: "overlay", flag: func(v *engine.Info) bool { return v.Overlay }},
		{name: "labels", text: func(v *engine.Info) string { return v.Labels.String() }},
		{name: "owner", text: func(v *engine.Info) string { return ownerName(v.OwnerUID) },
			also: func(v *engine.Info) string { return itoa(int(v.OwnerUID)) }},
	}
}

// labelFilter is the key of filters for single labels.
const labelFilter = "label"

// defaultColumns is the number of columns that ls shows by default.
const defaultColumns = 9

// findColumn returns the column with a name, in any case.
func findColumn(flag, name string) (column, error) {
	all := lsColumns()
	for _, c := range all {
		if strings.EqualFold(c.name, name) {
			return c, nil
		}
	}
	return column{}, errs.New(errs.Invalid, "ls", "--"+flag, "unknown column %q", name).
		WithHint("choose %s", strings.Join(columnNames(), ", "))
}

func columnNames() []string {
	var out []string
	for _, c := range lsColumns() {
		out = append(out, c.name)
	}
	return out
}

// cell is what the table shows.
func (c *column) cell(v *engine.Info) string {
	switch {
	case c.name == "state":
		return stateWords(*v)
	case c.text != nil:
		return orDash(c.text(v))
	case c.flag != nil:
		if c.flag(v) {
			return "yes"
		}
		return "no"
	case c.bytes != nil:
		return formatBytes(c.bytes(v))
	case c.number != nil:
		return strconv.FormatInt(c.number(v), 10)
	case c.moment(v).IsZero():
		return "-"
	}
	return formatAge(c.moment(v))
}

// compare compares two volumes. A time that is not set is greater than all others.
func (c *column) compare(a, b *engine.Info) int {
	switch {
	case c.text != nil:
		return strings.Compare(c.text(a), c.text(b))
	case c.flag != nil:
		return cmp.Compare(strconv.FormatBool(c.flag(a)), strconv.FormatBool(c.flag(b)))
	case c.bytes != nil:
		return cmp.Compare(c.bytes(a), c.bytes(b))
	case c.number != nil:
		return cmp.Compare(c.number(a), c.number(b))
	}

	x, y := c.moment(a), c.moment(b)
	if x.IsZero() != y.IsZero() {
		return cmp.Compare(strconv.FormatBool(x.IsZero()), strconv.FormatBool(y.IsZero()))
	}
	return x.Compare(y)
}

// filter returns the test for a value of the column: a glob, true or false, or a size, number or age that may begin
// with < or >. now is when ages count from. Invalid.
func (c *column) filter(value string, now time.Time) (func(*engine.Info) bool, error) {
	bad := func(format string, args ...any) error {
		return errs.New(errs.Invalid, "ls", c.name+"="+value, "not a value of this column").WithHint(format, args...)
	}

	if c.text != nil {
		if _, err := path.Match(value, ""); err != nil {
			return nil, bad("use a name, or a pattern such as 'agent-*'")
		}
		return func(v *engine.Info) bool {
			ok, _ := path.Match(value, c.text(v)) // the pattern is good
			if !ok && c.also != nil {
				ok, _ = path.Match(value, c.also(v))
			}
			return ok
		}, nil
	}

	if c.flag != nil {
		want, err := strconv.ParseBool(value)
		if err != nil {
			return nil, bad("use %s=true or %s=false", c.name, c.name)
		}
		return func(v *engine.Info) bool { return c.flag(v) == want }, nil
	}

	// Numbers can be compared.
	number, sign := strings.TrimLeft(value, "<>"), 0
	switch value[:len(value)-len(number)] {
	case "":
	case "<":
		sign = -1
	case ">":
		sign = 1
	default:
		return nil, bad("begin with a single < or >")
	}

	switch {
	case c.bytes != nil:
		want, err := parseSize("ls", number)
		if number == "0" {
			want, err = 0, nil
		}
		return func(v *engine.Info) bool { return cmp.Compare(c.bytes(v), want) == sign }, orBad(err,
			bad("use a size: '%s=>1G', '%s=<64M'", c.name, c.name))
	case c.number != nil:
		want, err := strconv.ParseInt(number, 10, 64)
		return func(v *engine.Info) bool { return cmp.Compare(c.number(v), want) == sign }, orBad(err,
			bad("use a number: '%s=>1', '%s=3'", c.name, c.name))
	}

	return c.filterMoment(number, sign, now, bad)
}

func orBad(err, bad error) error {
	if err != nil {
		return bad
	}
	return nil
}

// filterMoment returns the test for a column of times, which a filter compares by their distance from now.
func (c *column) filterMoment(
	age string, sign int, now time.Time, bad func(string, ...any) error,
) (func(*engine.Info) bool, error) {
	if sign == 0 {
		want, err := strconv.ParseBool(age)
		return func(v *engine.Info) bool { return !c.moment(v).IsZero() == want }, orBad(err,
			bad("use an age with < or >, or true or false: '%s=>2h', %s=true", c.name, c.name))
	}

	d, err := parseTTL("ls", age)
	return func(v *engine.Info) bool {
		t := c.moment(v)
		return !t.IsZero() && cmp.Compare(now.Sub(t).Abs(), d) == sign
	}, orBad(err, bad("use an age: '%s=>2h', '%s=<7d'", c.name, c.name))
}

// lsSelection is what ls shows of the volumes, and in which order.
type lsSelection struct {
	filters []string
	sort    string
	columns []string
}

// addFlags adds the flags that fill s.
func (s *lsSelection) addFlags(c *cobra.Command) {
	f := c.Flags()
	f.StringArrayVar(&s.filters, "filter", nil,
		"list only volumes with `KEY=VALUE`, for example 'name=agent-*', state=mounted or 'exclusive=>1G' (repeatable)")
	f.StringVar(&s.sort, "sort", "", "sort by `COLUMN`, with :desc in descending order")
	f.StringSliceVar(&s.columns, "columns", nil, "show the `COLUMNS`, separated by commas")

	names := columnNames()
	without := cobra.ShellCompDirectiveNoFileComp
	keys := make([]string, len(names))
	for i, n := range names {
		keys[i] = n + "="
	}
	keys = append(keys, labelFilter+"=")

	_ = c.RegisterFlagCompletionFunc("filter", cobra.FixedCompletions(keys, without|cobra.ShellCompDirectiveNoSpace))
	_ = c.RegisterFlagCompletionFunc("sort", cobra.FixedCompletions(names, without))
	_ = c.RegisterFlagCompletionFunc("columns", func(_ *cobra.Command, _ []string, word string) (
		out []string, _ cobra.ShellCompDirective) {
		done := word[:strings.LastIndexByte(word, ',')+1]
		for _, n := range names {
			out = append(out, done+n)
		}
		return out, without | cobra.ShellCompDirectiveNoSpace
	})
}

// lsView is a selection that was checked.
type lsView struct {
	filters map[string][]func(*engine.Info) bool // by column: one of each must hold
	labels  driver.LabelSelector                 // labels that a volume must have as well
	order   *column                              // nil: as they come
	desc    bool
	columns []column
}

// parse checks the flags. Invalid.
func (s *lsSelection) parse(now time.Time) (*lsView, error) {
	view := &lsView{filters: map[string][]func(*engine.Info) bool{}, columns: lsColumns()[:defaultColumns]}
	var labels []string
	for _, f := range s.filters {
		key, value, ok := strings.Cut(f, "=")
		if !ok {
			return nil, errs.New(errs.Invalid, "ls", f, "--filter must be KEY=VALUE").
				WithHint("use for example --filter state=mounted")
		}

		if key == labelFilter {
			labels = append(labels, value)
			continue
		}

		c, err := findColumn("filter", key)
		if err != nil {
			return nil, err
		}

		test, err := c.filter(value, now)
		if err != nil {
			return nil, err
		}

		view.filters[c.name] = append(view.filters[c.name], test)
	}

	var err error
	if view.labels, err = driver.ParseLabelSelector("ls", labels...); err != nil {
		return nil, err
	}

	if s.sort != "" {
		name, order, _ := strings.Cut(s.sort, ":")
		c, err := findColumn("sort", name)
		if err != nil {
			return nil, err
		}
		if view.order, view.desc = &c, order == "desc"; order != "" && order != "desc" && order != "asc" {
			return nil, errs.New(errs.Invalid, "ls", s.sort, "unknown order %q", order).
				WithHint("use --sort %s or --sort %s:desc", c.name, c.name)
		}
	}

	if s.columns != nil {
		view.columns = nil
		if len(s.columns) == 0 {
			return nil, errs.New(errs.Invalid, "ls", "--columns", "the list of columns is empty").
				WithHint("choose from %s", strings.Join(columnNames(), ", "))
		}
	}

	for _, name := range s.columns {
		c, err := findColumn("columns", strings.TrimSpace(name))
		if err != nil {
			return nil, err
		}
		view.columns = append(view.columns, c)
	}

	return view, nil
}

// apply returns the volumes that pass the filters, in their order.
func (view *lsView) apply(vols []engine.Info) []engine.Info {
	if len(view.filters) > 0 || !view.labels.IsZero() {
		vols = slices.DeleteFunc(vols, func(v engine.Info) bool {
			if !view.labels.Matches(v.Labels) {
				return true
			}
			for _, tests := range view.filters {
				if !slices.ContainsFunc(tests, func(test func(*engine.Info) bool) bool { return test(&v) }) {
					return true
				}
			}
			return false
		})
	}

	if view.order != nil {
		slices.SortStableFunc(vols, func(a, b engine.Info) int {
			if view.desc {
				return view.order.compare(&b, &a)
			}
			return view.order.compare(&a, &b)
		})
	}

	return vols
}
