// Package similar finds the word that somebody may have meant.
package similar

import (
	"slices"
	"strings"
)

// Words returns those of all that word may be a misspelling of, the most similar first. Words that differ only in their
// digits are left out: agent-7 is not a misspelling of agent-8.
func Words(word string, all []string) []string {
	most := 2
	if len(word) < 4 {
		most = 1
	}

	type candidate struct {
		word     string
		distance int
	}
	var found []candidate
	for _, w := range all {
		if d := distance(word, w, most); d <= most && d < len(word) && withoutDigits(w) != withoutDigits(word) {
			found = append(found, candidate{w, d})
		}
	}

	slices.SortStableFunc(found, func(a, b candidate) int { return a.distance - b.distance })
	out := make([]string, len(found))
	for i, c := range found {
		out[i] = c.word
	}
	return out
}

func withoutDigits(s string) string {
	return strings.Map(func(r rune) rune {
		if '0' <= r && r <= '9' {
			return -1
		}
		return r
	}, s)
}

// distance is the number of bytes to insert, remove, replace or swap with the next one to turn a into b, as in the
// "optimal string alignment" distance, or more than most if it is more.
func distance(a, b string, most int) int {
	if max(len(a)-len(b), len(b)-len(a)) > most {
		return most + 1
	}

	// The rows are those of the table of distances between the beginnings of a and of b.
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			differ := 1
			if a[i-1] == b[j-1] {
				differ = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+differ)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(b)]
}
