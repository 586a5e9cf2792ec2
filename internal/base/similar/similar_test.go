package similar

import (
	"slices"
	"testing"
)

func TestWords(t *testing.T) {
	all := []string{"web", "wep2", "database", "agent-8", "agent-80", "a"}
	for word, want := range map[string][]string{
		"wbe":      {"web"},
		"weeb":     {"web", "wep2"},
		"we":       {"web"},
		"databse":  {"database"},
		"datebasa": {"database"},
		"dataset":  nil,
		"agent-7":  nil,
		"agnet-8":  {"agent-8", "agent-80"},
		"b":        nil,
		"":         nil,
	} {
		if got := Words(word, all); !slices.Equal(got, want) {
			t.Errorf("%q: %q, wanted %q", word, got, want)
		}
	}
}
