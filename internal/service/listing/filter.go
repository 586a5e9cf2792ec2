package listing

import (
	"cmp"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/units"
	"pando/internal/driver"
	"pando/internal/engine"
)

// LabelFilter is the key of filters for single labels.
const LabelFilter = "label"

// filters are the filters of a request, which a volume must pass.
type filters struct {
	columns map[string][]func(*api.Object) bool // tests by column, of which one of each must hold
	labels  driver.LabelSelector
	words   map[string][]string // values of the filters, by column or "label"
}

// parseFilters reads filters of the form KEY=VALUE. now is when ages count from. Invalid.
func parseFilters(words []string, now time.Time) (f filters, err error) {
	f.columns, f.words = map[string][]func(*api.Object) bool{}, map[string][]string{}
	for _, w := range words {
		name, value, ok := strings.Cut(w, "=")
		if !ok {
			return f, errs.New(errs.Invalid, op, w, "a filter must be KEY=VALUE").WithHint("use for example %s",
				errs.Param("filter", "state=mounted"))
		}

		if name == LabelFilter {
			f.words[name] = append(f.words[name], value)
			continue
		}

		c, err := FindColumn(w, name)
		if err != nil {
			return f, err
		}
		test, err := c.filter(value, now)
		if err != nil {
			return f, err
		}
		f.columns[c.Name], f.words[c.Name] = append(f.columns[c.Name], test), append(f.words[c.Name], value)
	}

	f.labels, err = driver.ParseLabelSelector(op, f.words[LabelFilter]...)
	return f, err
}

// narrow makes a scan leave out volumes that the filters would not let pass, as far as the catalogue can tell.
func (f *filters) narrow(q *engine.VolumeScan) {
	only := func(name string) (word string, plain bool) {
		if len(f.words[name]) != 1 {
			return "", false
		}
		word = f.words[name][0]
		return word, word != "" && !strings.ContainsAny(word, globs)
	}

	if word, _ := only("name"); word != "" {
		q.NamePrefix = word
		if i := strings.IndexAny(word, globs); i >= 0 {
			q.NamePrefix = word[:i]
		}
	}
	if word, plain := only("golden"); plain {
		q.Golden = word
	}
	if word, _ := only("state"); word == string(api.StateMounted) {
		q.Mounted = true
	}
	if word, plain := only("owner"); plain {
		q.Owner = ownerCalled(word)
	}

	if word, _ := only(LabelFilter); word != "" {
		name, value, valued := strings.Cut(word, "=")
		q.Label = `"` + name + `":`
		if one, err := driver.NewLabels(op, map[string]string{name: value}); err == nil && valued &&
			!strings.ContainsAny(value, globs) {
			q.Label = strings.Trim(one.Text(), "{}")
		}
	}
}

// globs are the characters that mean something in a pattern.
const globs = `*?[\`

// pass reports whether a volume passes the filters.
func (f *filters) pass(v *api.Object) bool {
	for _, tests := range f.columns {
		if !slices.ContainsFunc(tests, func(test func(*api.Object) bool) bool { return test(v) }) {
			return false
		}
	}
	return f.labels.Matches(v.Labels)
}

// filter returns the test for a value of the column: a glob, true or false, or a size, number or age that may begin
// with < or >. now is when ages count from. Invalid.
func (c *Column) filter(value string, now time.Time) (func(*api.Object) bool, error) {
	bad := func(format string, args ...any) error {
		return errs.New(errs.Invalid, op, c.Name+"="+value, "not a value of this column").WithHint(format, args...)
	}

	if c.Text != nil {
		if _, err := path.Match(value, ""); err != nil {
			return nil, bad("use a name, or a pattern such as 'agent-*'")
		}
		return func(v *api.Object) bool {
			ok, _ := path.Match(value, c.Text(v)) // the pattern is good
			if !ok && c.also != nil {
				ok, _ = path.Match(value, c.also(v))
			}
			return ok
		}, nil
	}

	if c.Flag != nil {
		want, err := strconv.ParseBool(value)
		if err != nil {
			return nil, bad("use %s=true or %s=false", c.Name, c.Name)
		}
		return func(v *api.Object) bool { return c.Flag(v) == want }, nil
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
	case c.Bytes != nil:
		want, err := units.ParseSize(op, number)
		if number == "0" {
			want, err = 0, nil
		}
		return func(v *api.Object) bool { return cmp.Compare(c.Bytes(v), want) == sign }, orBad(err,
			bad("use a size: '%s=>1G', '%s=<64M'", c.Name, c.Name))
	case c.Number != nil:
		want, err := strconv.ParseInt(number, 10, 64)
		return func(v *api.Object) bool { return cmp.Compare(c.Number(v), want) == sign }, orBad(err,
			bad("use a number: '%s=>1', '%s=3'", c.Name, c.Name))
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
func (c *Column) filterMoment(
	age string, sign int, now time.Time, bad func(string, ...any) error,
) (func(*api.Object) bool, error) {
	if sign == 0 {
		want, err := strconv.ParseBool(age)
		return func(v *api.Object) bool { return !c.Moment(v).IsZero() == want }, orBad(err,
			bad("use an age with < or >, or true or false: '%s=>2h', %s=true", c.Name, c.Name))
	}

	d, err := units.ParseDuration(op, age)
	return func(v *api.Object) bool {
		t := c.Moment(v)
		return !t.IsZero() && cmp.Compare(now.Sub(t).Abs(), d) == sign
	}, orBad(err, bad("use an age: '%s=>2h', '%s=<7d'", c.Name, c.Name))
}
