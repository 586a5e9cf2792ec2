package web

import (
	"net/url"
	"strings"
	"unicode/utf8"
)

// maxPrefix is in bytes. With a key it stays below the 1,024 that buckets permit.
const maxPrefix = 256

// Prefix is the beginning of all names in a bucket that the path of a URL stands
// for: "" or words, with a slash at the end. The second result is what is wrong with
// the path, "" if nothing.
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
		if word == "" || word == "." || word == ".." || strings.ContainsFunc(word, func(r rune) bool { return r < ' ' || r == 0x7f || r == '\\' }) {
			return "", "its prefix has a word that is empty, \".\", \"..\", or has control characters or backslashes"
		}
	}
	return path + "/", ""
}

// Name is what a URL is called that may be wrong: without what could be a secret.
func Name(u *url.URL) string {
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}
