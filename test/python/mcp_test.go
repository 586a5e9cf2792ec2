package python

import (
	"os"
	"path/filepath"
	"testing"
)

// TestMCP has the client library of the Model Context Protocol drive pando mcp.
func TestMCP(t *testing.T) {
	dir := t.TempDir()
	report := filepath.Join(dir, "report.xml")
	cmd := python(t, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest",
		"-p", "no:schemathesis", "--basetemp", filepath.Join(dir, "tmp"), "--junitxml", report, "agent")
	cmd.Env = append(os.Environ(), "PANDO_TEST_BINARY="+pando, "PANDO_POOL=", "PANDO_SOCKET=")
	if n := subtests(t, cmd, report); n < 3 {
		t.Errorf("only %d tests ran", n)
	}
}
