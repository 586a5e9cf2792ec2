package style

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// writesByPath finds functions that write to a path, following every link in it.
var writesByPath = regexp.MustCompile(`\bos\.(WriteFile|Mkdir|MkdirAll|MkdirTemp|CreateTemp|Create|OpenFile|Symlink|` +
	`Remove|RemoveAll|Rename|Chmod|Chown|Chtimes|Truncate|Link|CopyFS)\(`)

// insideVolumes are the packages that write to volumes, in which sessions can have left links.
var insideVolumes = []string{"internal/source/", "internal/tree/", "internal/engine/preset/"}

// TestVolumesAreWrittenByDescriptor: what is written into volumes goes through descriptors, by package treewalk, the
// functions of unix with AT_SYMLINK_NOFOLLOW, or os.Root: no link of a session leads out of its volume.
func TestVolumesAreWrittenByDescriptor(t *testing.T) {
	seen := 0
	for _, path := range sourceFiles(t, ".go") {
		rel := strings.TrimPrefix(path, "../../")
		inside := false
		for _, dir := range insideVolumes {
			inside = inside || strings.HasPrefix(rel, dir)
		}
		if !inside || strings.HasSuffix(rel, "_test.go") {
			continue
		}

		seen++
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			code, _, _ := strings.Cut(line, "//")
			if writesByPath.MatchString(code) {
				t.Errorf("%s: %q: write by descriptor, for example with treewalk.ReplaceFile", rel, strings.TrimSpace(line))
			}
		}
	}
	if seen < 10 {
		t.Errorf("only %d files of %q seen", seen, insideVolumes)
	}
}
