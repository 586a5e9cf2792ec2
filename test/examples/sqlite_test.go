package examples

import (
	"os"
	"os/exec"
	"regexp"
	"testing"
)

// TestSQLiteBranch runs the example. Its times are only printed, but a branch must not cost as much as a copy.
func TestSQLiteBranch(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	if _, err := exec.LookPath("sqlite3"); err != nil {
		t.Skipf("SKIPPED: %v: run make deps", err)
	}

	env := []string{"BRANCH_DIR=" + workDir(t), "BRANCH_SIZE=24", "BRANCH_COUNT=3"}
	out, err := command(t, env, "../../examples/sqlite-branch/run.sh").CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}

	for _, want := range []string{
		` \d{3,} shop\.db-wal\n`,
		`integrity_check finds no damage in 3 of 3 branches`,
		`Left behind: nothing`,
	} {
		if !regexp.MustCompile(want).Match(out) {
			t.Errorf("it does not print %q", want)
		}
	}

	if cloned, copied := mib(t, out, "pando clone shop"), mib(t, out, "cp, with nobody writing"); cloned > copied/4 {
		t.Errorf("a branch took %v MiB, and a copy %v", cloned, copied)
	}
}
