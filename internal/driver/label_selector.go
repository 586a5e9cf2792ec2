package driver

import (
	"encoding/json"
	"path"
	"slices"
	"strings"

	"pando/internal/base/errs"
)

// LabelSelector chooses objects by their labels: an object must have, of each key, one of the values that the selector
// has for it. The zero value chooses all objects.
type LabelSelector struct {
	tests []labelTest
}

// labelTest is a KEY=VALUE or KEY of a selector.
type labelTest struct {
	key, value string
	any        bool // whatever the value
}

// ParseLabelSelector reads a selector from words of the form KEY=VALUE, in which VALUE may be a glob, or KEY, which
// stands for any value. Invalid.
func ParseLabelSelector(op string, words ...string) (LabelSelector, error) {
	var s LabelSelector
	for _, w := range words {
		key, value, ok := strings.Cut(w, "=")
		if err := CheckLabelKey(op, key); err != nil {
			return s, err
		}
		if _, err := path.Match(value, ""); err != nil {
			return s, errs.New(errs.Invalid, op, w, "the pattern is malformed").WithHint("use *, ? and [a-z]")
		}
		s.tests = append(s.tests, labelTest{key, value, !ok})
	}
	return s, nil
}

// Words returns the words that ParseLabelSelector reads the selector from.
func (s LabelSelector) Words() []string {
	words := []string{}
	for _, t := range s.tests {
		if t.any {
			words = append(words, t.key)
		} else {
			words = append(words, t.key+"="+t.value)
		}
	}
	return words
}

// IsZero reports whether the selector chooses all objects.
func (s LabelSelector) IsZero() bool { return len(s.tests) == 0 }

// Matches reports whether the selector chooses an object with these labels.
func (s LabelSelector) Matches(l Labels) bool {
	if s.IsZero() || l == (Labels{}) {
		return s.IsZero()
	}

	all := l.Map()
	holds := func(t labelTest) bool {
		v, has := all[t.key]
		like, _ := path.Match(t.value, v) // the pattern is good
		return has && (t.any || v == t.value || like)
	}
	for _, t := range s.tests {
		if !slices.ContainsFunc(s.tests, func(o labelTest) bool { return o.key == t.key && holds(o) }) {
			return false
		}
	}

	return true
}

// MarshalJSON returns the words of the selector.
func (s LabelSelector) MarshalJSON() ([]byte, error) { return json.Marshal(s.Words()) }

// UnmarshalJSON reads the words of a selector. Invalid.
func (s *LabelSelector) UnmarshalJSON(b []byte) error {
	var words []string
	err := json.Unmarshal(b, &words)
	if err == nil {
		*s, err = ParseLabelSelector("labels", words...)
	}
	return err
}

// String returns the words of the selector, with commas in between.
func (s LabelSelector) String() string {
	return strings.Join(s.Words(), ", ")
}
