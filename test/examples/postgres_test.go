package examples

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
)

const postgresBranch = "../../examples/postgres-branch/run.sh"

// needPostgres skips a test where the example cannot run.
func needPostgres(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	if found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/pg_amcheck"); len(found) == 0 {
		if _, err := exec.LookPath("pg_amcheck"); err != nil {
			t.Skip("SKIPPED: there is no PostgreSQL: run make deps")
		}
	}
	if err := exec.Command("id", "postgres").Run(); err != nil {
		t.Skip("SKIPPED: there is no user postgres: run make deps")
	}
}

// postgresCommand runs the example with a small database and few branches, in a directory that the user of the servers
// can pass through.
func postgresCommand(t *testing.T) (cmd *exec.Cmd, dir string) {
	t.Helper()
	dir = workDir(t)
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	return command(t, []string{"BRANCH_DIR=" + dir, "BRANCH_SCALE=2", "BRANCH_COUNT=3"}, postgresBranch), dir
}

// TestPostgresBranch runs the example. Its times are only printed, but a branch after a checkpoint must not cost as
// much as a copy.
func TestPostgresBranch(t *testing.T) {
	needPostgres(t)
	cmd, _ := postgresCommand(t)
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}

	for _, want := range []string{
		`pando golden publish shop prod\n   shop@2\n`,
		`pando clone shop@1 +3 `,
		`pg_amcheck finds no damage in 6 of 6 branches`,
		`PostgreSQL does not accept the directory of older:\n +FATAL: .*incompatible with server\n +DETAIL: .* 9\.6`,
		`destroyed older\n`,
		`Left behind: nothing`,
	} {
		if !regexp.MustCompile(want).Match(out) {
			t.Errorf("it does not print %q", want)
		}
	}

	if cloned, copied := mib(t, out, "pando clone shop@2"), mib(t, out, "pg_basebackup"); cloned > copied/2 {
		t.Errorf("a branch took %v MiB, and a copy %v", cloned, copied)
	}
}

// TestPostgresBranchInterrupted stops the example while a server starts: the first, and one of a branch. It leaves
// nothing behind.
func TestPostgresBranchInterrupted(t *testing.T) {
	needPostgres(t)
	for _, server := range []string{"prod", "branch-2"} {
		t.Run(server, func(t *testing.T) {
			cmd, dir := postgresCommand(t)
			interrupt(t, cmd, filepath.Join(dir, "*", "s", server, ".s.PGSQL.5432"), func(string) {})
		})
	}
}
