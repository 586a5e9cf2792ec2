package driver

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"pando/internal/base/errs"
)

// Limits of labels. The last one keeps an identity with labels within what a ZFS user property can hold.
const (
	MaxLabels          = 64   // how many labels an object may have
	MaxLabelKeyBytes   = 63   //
	MaxLabelValueChars = 253  //
	MaxLabelsBytes     = 4096 // length of all labels of an object as JSON
)

// Labels are keys with values that users have given an object. The zero value has none, and equal labels are ==. Labels
// from NewLabels and With keep the limits.
type Labels struct {
	text string // a JSON object in the order of its keys; "": none
}

// NewLabels makes labels of keys and values. Invalid.
func NewLabels(op string, values map[string]string) (Labels, error) {
	return Labels{}.With(op, values)
}

// ParseLabels reads labels of the form KEY=VALUE. Invalid.
func ParseLabels(op string, words []string) (Labels, error) {
	values := map[string]string{}
	for _, w := range words {
		key, value, ok := strings.Cut(w, "=")
		if !ok {
			return Labels{}, errs.New(errs.Invalid, op, w, "a label must be KEY=VALUE").
				WithHint("use for example team=search")
		}
		if before, twice := values[key]; twice && before != value {
			return Labels{}, errs.New(errs.Invalid, op, w, "label %q is given twice", key).WithHint("give it once")
		}
		values[key] = value
	}
	return NewLabels(op, values)
}

// With returns the labels with values added, each in place of the value that its key had, and without the keys in
// remove. Invalid.
func (l Labels) With(op string, values map[string]string, remove ...string) (Labels, error) {
	all := l.Map()
	for _, k := range remove {
		delete(all, k)
	}

	for k, v := range values {
		if err := CheckLabelKey(op, k); err != nil {
			return Labels{}, err
		}
		if err := checkLabelValue(op, k, v); err != nil {
			return Labels{}, err
		}
		all[k] = v
	}

	out := labelsOf(all)
	if len(all) > MaxLabels {
		return Labels{}, errs.New(errs.Invalid, op, "", "an object can have at most %d labels (got %d)", MaxLabels, len(all)).
			WithHint("remove labels that are not needed with %s", errs.Run("label rm", "REF", "KEY"))
	}

	// Identities are written with the escapes of HTML, which are longer.
	if escaped, err := json.Marshal(all); err != nil || len(escaped) > MaxLabelsBytes {
		return Labels{}, errs.New(errs.Invalid, op, "", "the labels of an object can have at most %d bytes of JSON (got %d)",
			MaxLabelsBytes, len(escaped)).WithHint("use shorter values")
	}

	return out, nil
}

// CheckLabelKey checks the key of a label. Invalid.
func CheckLabelKey(op, key string) error {
	good := key != "" && len(key) <= MaxLabelKeyBytes
	for i := range len(key) {
		c := key[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		good = good && (letter || i > 0 && strings.IndexByte("._/-", c) >= 0)
	}
	if good {
		return nil
	}
	return errs.New(errs.Invalid, op, key, "%q is not a label key", key).
		WithHint("use 1 to %d of the characters a-z, A-Z, 0-9, '.', '_', '/' and '-', the first a letter or digit",
			MaxLabelKeyBytes)
}

func checkLabelValue(op, key, value string) error {
	if n := utf8.RuneCountInString(value); n > MaxLabelValueChars {
		return errs.New(errs.Invalid, op, key, "the value of a label must have at most %d characters (got %d)",
			MaxLabelValueChars, n).WithHint("use a shorter value")
	}

	bad := func(r rune) bool { return !unicode.IsPrint(r) }
	if !utf8.ValidString(value) || strings.ContainsFunc(value, bad) {
		return errs.New(errs.Invalid, op, key, "%q is not a value of a label", value).
			WithHint("use printable characters of UTF-8: no line breaks, tabs or other control characters")
	}
	return nil
}

// labelsOf returns the labels in all, whatever they are.
func labelsOf(all map[string]string) Labels {
	if len(all) == 0 {
		return Labels{}
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(all) // strings can always be encoded
	return Labels{strings.TrimSuffix(b.String(), "\n")}
}

// StoredLabels returns the labels of which Text returned text.
func StoredLabels(text string) Labels { return Labels{text} }

// Text returns the labels as JSON, without control characters; "" if there are none. StoredLabels reads it.
func (l Labels) Text() string { return l.text }

// Map returns a copy of the labels. Those of a damaged text are none.
func (l Labels) Map() map[string]string {
	out := map[string]string{}
	if l.text != "" && json.Unmarshal([]byte(l.text), &out) != nil {
		return map[string]string{}
	}
	return out
}

// Keys returns the keys in order.
func (l Labels) Keys() []string { return slices.Sorted(maps.Keys(l.Map())) }

// String returns the labels as KEY=VALUE in the order of their keys, with commas in between.
func (l Labels) String() string {
	var out []string
	all := l.Map()
	for _, k := range l.Keys() {
		out = append(out, k+"="+all[k])
	}
	return strings.Join(out, ", ")
}

// MarshalJSON returns a JSON object with a field for each label.
func (l Labels) MarshalJSON() ([]byte, error) {
	if l.text == "" {
		return []byte("{}"), nil
	}
	return []byte(l.text), nil
}

// UnmarshalJSON reads what MarshalJSON returned. It accepts labels beyond the limits.
func (l *Labels) UnmarshalJSON(b []byte) error {
	var all map[string]string
	if err := json.Unmarshal(b, &all); err != nil {
		return err
	}
	*l = labelsOf(all)
	return nil
}
