// Package ref parses names and references.
package ref

import (
	"path"
	"strconv"
	"strings"

	"pando/internal/base/errs"
)

// MaxNameBytes is the longest name of a volume, snapshot or golden.
const MaxNameBytes = 128

// Name is a valid name of a volume, golden or snapshot, without an @ and what follows it. Only [ParseName]
// creates one, so invalid names are caught there; the zero Name names nothing. The separate type keeps
// references, which are a [Ref], from being used as names. Names can be compared.
type Name struct{ text string }

// ParseName parses a name. Invalid.
func ParseName(op, s string) (Name, error) {
	if err := CheckName(op, s); err != nil {
		return Name{}, err
	}
	return Name{s}, nil
}

// MustName parses a name that is known to be valid, such as a constant. It panics if the name is invalid.
func MustName(s string) Name {
	n, err := ParseName("name", s)
	if err != nil {
		panic(err)
	}
	return n
}

// String returns the written form, "" for the zero Name.
func (n Name) String() string { return n.text }

// IsZero reports whether n is the zero Name.
func (n Name) IsZero() bool { return n.text == "" }

// MarshalText returns the written form.
func (n Name) MarshalText() ([]byte, error) { return []byte(n.text), nil }

// UnmarshalText reads the written form. Invalid.
func (n *Name) UnmarshalText(b []byte) (err error) {
	if *n = (Name{}); len(b) > 0 {
		*n, err = ParseName("name", string(b))
	}
	return err
}

// Required returns an Invalid error for the zero Name.
func (n Name) Required(op string) error {
	if n.IsZero() {
		return CheckName(op, "")
	}
	return nil
}

// Ref returns a reference to the volume with this name, or to the golden's current generation.
func (n Name) Ref() Ref { return Ref{Name: n.text} }

// At returns a reference to a snapshot of the volume with this name.
func (n Name) At(snapshot Name) Ref { return Ref{n.text, snapshot.text} }

// Ref is a reference as a user writes it: NAME, GOLDEN@N or VOLUME@SNAP.
type Ref struct {
	Name string
	At   string // the part after the @; "" without one
}

// String returns the written form.
func (r Ref) String() string {
	if r.At == "" {
		return r.Name
	}
	return r.Name + "@" + r.At
}

// Generation returns the number after the @. ok is false unless that is a number from 1.
func (r Ref) Generation() (n int, ok bool) {
	n, err := strconv.Atoi(r.At)
	return n, err == nil && n > 0 && strconv.Itoa(n) == r.At
}

// Generation returns the written form of a reference to a generation.
func Generation(golden string, n int) string { return golden + "@" + strconv.Itoa(n) }

// MarshalText returns the written form; of the zero Ref, nothing.
func (r Ref) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads the written form. Invalid.
func (r *Ref) UnmarshalText(b []byte) (err error) {
	if *r = (Ref{}); len(b) > 0 {
		*r, err = Parse("ref", string(b))
	}
	return err
}

// Pattern names several volumes by a name with the wildcards *, ? and [a-z], or one volume or
// snapshot by its reference.
type Pattern struct {
	Ref  Ref    // if Glob is ""
	Glob string // "" without wildcards
}

// String returns the written form.
func (p Pattern) String() string {
	if p.Glob != "" {
		return p.Glob
	}
	return p.Ref.String()
}

// MarshalText returns the written form; of the zero Pattern, nothing.
func (p Pattern) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads the written form. Invalid.
func (p *Pattern) UnmarshalText(b []byte) (err error) {
	if *p = (Pattern{}); len(b) > 0 {
		*p, err = ParsePattern("ref", string(b))
	}
	return err
}

// ParsePattern parses a reference, or a name with wildcards. Invalid.
func ParsePattern(op, s string) (Pattern, error) {
	if IsGlob(s) {
		if _, err := path.Match(s, ""); err != nil {
			return Pattern{}, errs.New(errs.Invalid, op, s, "the pattern is malformed").
				WithHint("use the wildcards *, ? and [a-z]")
		}
		return Pattern{Glob: s}, nil
	}
	r, err := Parse(op, s)
	return Pattern{Ref: r}, err
}

// ParsePatterns parses several patterns.
func ParsePatterns(op string, words ...string) ([]Pattern, error) {
	out := make([]Pattern, 0, len(words))
	for _, s := range words {
		p, err := ParsePattern(op, s)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

// Parse parses a reference. Invalid.
func Parse(op, s string) (Ref, error) {
	name, at, has := strings.Cut(s, "@")
	if err := CheckName(op, name); err != nil {
		return Ref{}, err
	}
	if has {
		if err := CheckName(op, at); err != nil {
			return Ref{}, err
		}
	}
	return Ref{name, at}, nil
}

// CheckName returns an Invalid error that says what is wrong with a name, or nil.
func CheckName(op, name string) error {
	bad := func(format string, args ...any) error {
		return errs.New(errs.Invalid, op, strconv.Quote(shorten(name)), format, args...).
			WithHint("names have 1 to %d characters of A-Z a-z 0-9 . _ - and start with a letter or digit", MaxNameBytes)
	}
	switch {
	case name == "":
		return bad("a name cannot be empty")
	case len(name) > MaxNameBytes:
		return bad("a name of %d bytes is too long", len(name))
	case strings.Contains(name, ".."):
		return bad("a name cannot contain %q", "..")
	}

	for i, c := range []byte(name) {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if letter || i > 0 && (c == '.' || c == '_' || c == '-') {
			continue
		}
		if i == 0 && (c == '.' || c == '_' || c == '-') {
			return bad("a name cannot start with %q", string(rune(c)))
		}
		if c >= 0x80 {
			return bad("a name cannot contain non-ASCII characters")
		}
		return bad("a name cannot contain %q", string(rune(c)))
	}

	return nil
}

func shorten(s string) string {
	if len(s) > 40 {
		return s[:40] + "..."
	}
	return s
}

// IsGlob reports whether s contains wildcards.
func IsGlob(s string) bool { return strings.ContainsAny(s, "*?[") }
