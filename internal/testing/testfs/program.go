package testfs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"pando/internal/testing/faulttest"
)

// BuildProgram puts the program under test at path: the one that PANDO_TEST_BINARY
// names, where there may be no Go, or one that it builds.
func BuildProgram(path string) error {
	if ready := os.Getenv("PANDO_TEST_BINARY"); ready != "" {
		return os.Symlink(ready, path)
	}
	build := exec.Command("go", "build", "-o", path, "pando/cmd/pando")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("building pando: %w\n%s", err, out)
	}
	return nil
}

// WithProgram is for a TestMain: it sets path to that of the program under test,
// calls run, and returns the exit code.
func WithProgram(path *string, run func() int) int {
	dir, err := os.MkdirTemp("", "pando-test-")
	if err == nil {
		defer os.RemoveAll(dir)
		*path = filepath.Join(dir, "pando")
		err = BuildProgram(*path)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return run()
}

// WriteProgram writes a file that is to be run, mode 0755. No other goroutine starts a
// program in the meantime: its child would have the file open for writing until it runs
// something else, and who runs the file in that moment is told "text file busy"
// (https://go.dev/issue/22315).
func WriteProgram(path string, content []byte) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(path, content, 0o755)
}

// NotShort leaves a test out of runs with -short, as under the race detector: one
// that is about sizes, say, or that does one thing after the other.
func NotShort(t testing.TB, why string) {
	t.Helper()
	if testing.Short() {
		t.Skip("does not apply to -short: " + why)
	}
}

// Full reports whether a test is to leave nothing out, as in `make test-all`.
func Full() bool { return faulttest.Full() }
