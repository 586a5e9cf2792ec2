package layers

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// A program that a test has just written can't be run while another goroutine starts one ("text file
// busy", now and then): see testfs.WriteProgram.
func TestNobodyWritesProgramsByHand(t *testing.T) {
	byHand := regexp.MustCompile(`(WriteFile|OpenFile)\(([^()]|\([^()]*\))*, 0o[0-7]?[1357][0-7]{2}\)`)
	imports, err := readImports("../..")
	if err != nil {
		t.Fatal(err)
	}

	seen := map[string]bool{}
	for _, i := range imports {
		if seen[i.file] || !i.test {
			continue
		}
		seen[i.file] = true

		text, err := os.ReadFile(filepath.Join("../..", i.file))
		if err != nil {
			t.Fatal(err)
		}
		for line := range bytes.Lines(text) {
			if byHand.Match(line) {
				t.Errorf("%s has %q: use testfs.WriteProgram, or a mode that nobody can run", i.file, bytes.TrimSpace(line))
			}
		}
	}
	if len(seen) < 100 {
		t.Errorf("only %d files with tests were found", len(seen))
	}
}
