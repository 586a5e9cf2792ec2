package testfs

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// OpenFiles lists, in order, the files that this process has open below a directory, as often as it has each of them
// open; with "" also what has no path, as pipes. The kernel adds " (deleted)" to a path that is gone.
func OpenFiles(t testing.TB, dir string) []string {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}

	var out []string
	for _, fd := range fds {
		to, err := os.Readlink(filepath.Join("/proc/self/fd", fd.Name()))
		if err != nil { // it is closed by now
			continue
		}
		if dir == "" || strings.HasPrefix(to, dir+"/") {
			out = append(out, to)
		}
	}
	slices.Sort(out)
	return out
}
