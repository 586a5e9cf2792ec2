package iostat

import "testing"

func TestParseDirty(t *testing.T) {
	const stats = "BdiWriteback:          4 kB\nBdiReclaimable:      128 kB\nBdiDirtyThresh:    99999 kB\n"
	if got := parseDirty(stats, "BdiWriteback", "BdiReclaimable"); got != 132<<10 {
		t.Errorf("got %d, want %d", got, 132<<10)
	}
}
