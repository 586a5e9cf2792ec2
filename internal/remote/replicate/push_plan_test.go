package replicate

import (
	"strings"
	"testing"

	"pando/internal/driver"
)

// TestExpansion: a word is said of a stream only if it may be clearly larger than what it is made of.
func TestExpansion(t *testing.T) {
	const gib = 1 << 30
	for _, c := range []struct {
		bytes, saved int64
		want         string
	}{
		{0, 0, ""},
		{100 * gib, 0, ""},
		{100 * gib, 9 * gib, ""},
		{100 * gib, 70 * gib, "will send about 100 GiB"},
		{100 * gib, 70 * gib, "up to 70 GiB of that"},
		{70 * mib, 65 * mib, "about 70 MiB"},
		{70 * mib, 60 * mib, ""}, // too little to speak of
	} {
		got := expansionWarning(driver.StreamPlan{Bytes: c.bytes, SavedBytes: c.saved})
		if c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%d bytes, of which %d are saved: %q, want %q", c.bytes, c.saved, got, c.want)
		}
	}
}
