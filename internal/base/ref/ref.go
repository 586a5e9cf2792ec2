// Package ref knows what names and references look like.
package ref

import (
	"path"
	"strconv"
	"strings"

	"pando/internal/base/errs"
)

// MaxNameBytes is the longest name of a volume, snapshot or golden.
const MaxNameBytes = 128

// Name is a valid name of a volume, golden or snapshot, without what stands behind an @. Only [ParseName]
// makes one, so an invalid name cannot get any further; the zero Name is that of nothing. Its own type
// keeps references, which are a [Ref], from being taken for names. Names can be compared.
type Name struct{ text string }

// ParseName reads a name. Invalid.
func ParseName(op, s string) (Name, error) {
	if err := CheckName(op, s); err != nil {
		return Name{}, err
	}
	return Name{s}, nil
}

// MustName is ParseName of a name that is known to be valid, such as a constant. It panics if it is not.
func MustName(s string) Name {
	n, err := ParseName("name", s)
	if err != nil {
		panic(err)
	}
	return n
}

// String is the written form, "" of the zero Name.
func (n Name) String() string { return n.text }

// IsZero reports whether it is the name of nothing.
func (n Name) IsZero() bool { return n.text == "" }

// Required returns an Invalid error for the zero Name.
func (n Name) Required(op string) error {
	if n.IsZero() {
		return CheckName(op, "")
	}
	return nil
}

// Ref refers to the volume of this name, or to the golden's current generation.
func (n Name) Ref() Ref { return Ref{Name: n.text} }

// At refers to a snapshot of the volume of this name.
func (n Name) At(snapshot Name) Ref { return Ref{n.text, snapshot.text} }

// Ref is a reference as a person writes it: NAME, GOLDEN@N or VOLUME@SNAP.
type Ref struct {
	Name string
	At   string // behind the @; "" if there is none
}

// String is the written form.
func (r Ref) String() string {
	if r.At == "" {
		return r.Name
	}
	return r.Name + "@" + r.At
}

// Generation returns the number behind the @. ok is false if it is not a
// number from 1.
func (r Ref) Generation() (n int, ok bool) {
	n, err := strconv.Atoi(r.At)
	return n, err == nil && n > 0 && strconv.Itoa(n) == r.At
}

// Generation returns the written form of a generation.
func Generation(golden string, n int) string { return golden + "@" + strconv.Itoa(n) }

// Pattern is what names several volumes by the wildcards *, ? and [a-z] over their names, or one
// volume or snapshot by its reference.
type Pattern struct {
	Ref  Ref    // if Glob is ""
	Glob string // "": it has no wildcards
}

// String is the written form.
func (p Pattern) String() string {
	if p.Glob != "" {
		return p.Glob
	}
	return p.Ref.String()
}

// ParsePattern reads a reference, or what has wildcards in it. Invalid.
func ParsePattern(op, s string) (Pattern, error) {
	if IsGlob(s) {
		if _, err := path.Match(s, ""); err != nil {
			return Pattern{}, errs.New(errs.Invalid, op, s, "the pattern is malformed").WithHint("use * ? and [a-z]")
		}
		return Pattern{Glob: s}, nil
	}
	r, err := Parse(op, s)
	return Pattern{Ref: r}, err
}

// ParsePatterns is ParsePattern of several.
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

// Parse reads a reference. Invalid.
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

// CheckName reports what is wrong with a name. Invalid.
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

// IsGlob reports whether s has wildcards for names.
func IsGlob(s string) bool { return strings.ContainsAny(s, "*?[") }
