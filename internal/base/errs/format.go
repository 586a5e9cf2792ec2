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
