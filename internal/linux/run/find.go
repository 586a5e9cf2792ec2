package run

import (
	"errors"
	"io/fs"
	"os/exec"
	"path/filepath"
	"strings"
)

// defaultPath is searched for programs of an environment that has no PATH.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Find looks for the program name, which has no slash, in the PATH of an environment: the
// one that a program is to get, not that of this process. Words of PATH that are not
// absolute are left out: they would mean other directories in another place.
// An error is that of the first program that cannot be run, or [exec.ErrNotFound].
func Find(name string, env []string) (string, error) {
	path := defaultPath
	for _, entry := range env {
		if value, found := strings.CutPrefix(entry, "PATH="); found {
			path = value // the last one counts
		}
	}

	var unusable error
	for _, dir := range filepath.SplitList(path) {
		if !filepath.IsAbs(dir) {
			continue
		}
		found, err := exec.LookPath(filepath.Join(dir, name))
		if err == nil {
			return found, nil
		}
		if !errors.Is(err, fs.ErrNotExist) && unusable == nil {
			unusable = err
		}
	}

	if unusable == nil {
		unusable = &exec.Error{Name: name, Err: exec.ErrNotFound}
	}

	return "", unusable
}
