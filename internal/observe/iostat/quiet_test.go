package iostat

import "testing"

func TestParseDirty(t *testing.T) {
	const meminfo = "MemTotal:       24685000 kB\nDirty:               128 kB\nWriteback:             4 " +
		"kB\nWritebackTmp:          9 kB\n"
	if got := parseDirty(meminfo, "Dirty", "Writeback"); got != 132<<10 {
		t.Errorf("got %d, want %d", got, 132<<10)
	}
}
