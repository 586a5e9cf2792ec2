package run

import (
	"errors"
	"io/fs"
	"os/exec"
	"path/filepath"
	"strings"
)

// defaultPath is searched if an environment has no PATH.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Find returns the path of the program name, which has no slash, in the PATH of env, the environment
// of a program to be started. It ignores relative directories in PATH, because the program may
// start in another directory. Without an executable file of this name, it returns the error of the
// first file that cannot be executed, or [exec.ErrNotFound].
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
