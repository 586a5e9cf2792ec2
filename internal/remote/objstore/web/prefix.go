package web

import (
	"net/url"
	"strings"
	"unicode/utf8"

	"pando/internal/base/errs"
)

// Scheme describes the URLs of one kind of store.
type Scheme struct {
	Name        string // before the "://"
	Of          string // the kind of store, for people
	Write       string // hint: how to write such a URL
	Credentials string // hint: where to put credentials
	Bucket      func(name string) error
	// Set sets a parameter. known: there is one with this name; wrong: what is wrong
	// with its value.
	Set func(name, value string) (known bool, wrong string)
}

// Location is the part of a bucket's URL that all kinds of stores share.
type Location struct {
	Bucket string
	Prefix string // "" or with a slash at the end
	Text   string // the URL for people
}

// Parse parses SCHEME://BUCKET/PREFIX?PARAMETERS. Errors are of kind Invalid, and do not
// contain parts of the URL that may be secret.
func (s Scheme) Parse(u *url.URL) (Location, error) {
	invalid := func(hint, format string, args ...any) (Location, error) {
		return Location{}, errs.New(errs.Invalid, "open remote", Name(u), format, args...).WithHint("%s", hint)
	}

	// Check what comes before the path.
	switch {
	case u.Scheme != s.Name:
		return invalid(s.Write, "it is not a URL of %s", s.Of)
	case u.User != nil:
		return invalid(s.Credentials, "a remote's URL must not contain credentials")
	case u.Opaque != "" || u.Host == "":
		return invalid(s.Write, "it names no bucket")
	case u.Fragment != "" || u.RawFragment != "":
		return invalid(s.Write, "it must not have a part after #")
	}

	if err := s.Bucket(u.Host); err != nil {
		return invalid(s.Write, "%q is not a valid bucket name: %w", u.Host, err)
	}

	// Parse the prefix and the parameters.
	prefix, wrong := Prefix(u.Path)
	if wrong != "" {
		return invalid(s.Write, "%s", wrong)
	}

	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return invalid(s.Write, "%w", err)
	}

	for name, values := range query {
		if len(values) != 1 {
			return invalid(s.Write, "its parameter %s is given more than once", name)
		}
		known, wrong := s.Set(name, values[0])
		if !known {
			return invalid(s.Write, "unknown parameter %q", name)
		}
		if wrong != "" {
			return invalid(s.Write, "invalid parameter %s: %s", name, wrong)
		}
	}

	text := url.URL{Scheme: s.Name, Host: u.Host, RawQuery: u.RawQuery}
	if prefix != "" {
		text.Path = "/" + strings.TrimSuffix(prefix, "/")
	}

	return Location{Bucket: u.Host, Prefix: prefix, Text: text.String()}, nil
}

// maxPrefix is in bytes. With a key it stays below the 1,024 that buckets permit.
const maxPrefix = 256

// Prefix returns the prefix of keys in a bucket for the path of a URL: "" or words, with
// a slash at the end. wrong says what is wrong with the path, and is "" if nothing is.
func Prefix(path string) (prefix, wrong string) {
	path = strings.Trim(path, "/")
	if path == "" {
		return "", ""
	}
	if len(path) > maxPrefix {
		return "", "its prefix is too long"
	}
	if !utf8.ValidString(path) {
		return "", "its prefix is not UTF-8"
	}

	for word := range strings.SplitSeq(path, "/") {
		if word == "" || word == "." || word == ".." || strings.ContainsFunc(word, func(r rune) bool {
			return r < ' ' || r == 0x7f || r == '\\'
		}) {
			return "", "a word of its prefix is empty, \".\" or \"..\", or contains control characters or backslashes"
		}
	}

	return path + "/", ""
}

// Name returns a URL, which may be invalid, without the parts that could be secret.
func Name(u *url.URL) string {
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}
