package errs

import (
	"fmt"
	"slices"
	"strings"
)

// FormatBytes formats a number of bytes for users, rounded down.
func FormatBytes(n int64) string {
	switch {
	case n >= 10<<40:
		return fmt.Sprintf("%d TiB", n>>40)
	case n >= 10<<30:
		return fmt.Sprintf("%d GiB", n>>30)
	case n >= 10<<20:
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d bytes", n)
}

// TypedSize returns the largest size of at most n bytes that users would type, in bytes and as they would type it:
// "12G" from 10 GiB on, "500M" from 10 MiB on.
func TypedSize(n int64) (bytes int64, text string) {
	switch {
	case n >= 10<<30:
		return n >> 30 << 30, fmt.Sprintf("%dG", n>>30)
	case n >= 10<<20:
		return n >> 20 << 20, fmt.Sprintf("%dM", n>>20)
	}
	return n, fmt.Sprint(n)
}

// Plural returns n and a noun, in the plural unless n is 1: "1 volume", "2 volumes", "2 processes".
func Plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	if strings.HasSuffix(noun, "s") {
		noun += "e"
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// JoinSet joins the parts that are not empty.
func JoinSet(separator string, parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(p string) bool { return p == "" }), separator)
}
