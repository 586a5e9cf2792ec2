package examples

import (
	"os"
	"regexp"
	"testing"
)

// TestCIBuild runs the example. Its times are only printed.
func TestCIBuild(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}

	env := []string{"CI_DIR=" + workDir(t), "CI_STEPS=6"}
	out, err := command(t, env, "../../examples/ci-build/run.sh").CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}

	for _, want := range []string{
		`the first time +7 of 7 steps ran +\d+ ms +app@1\n`,
		`nothing has changed +0 of 7 steps ran +\d+ ms +app@1\n`,
		`the program has changed +1 of 7 steps ran +\d+ ms +app@2\n`,
		`a package in the middle has changed +5 of 7 steps ran +\d+ ms +app@3\n`,
		`the command ran 1 time; results: once@1 \n`,
		`exit code 3: pando: build pando.toml: step 8 \(broken\): the command failed with exit status 3\n`,
		`Left behind: nothing`,
	} {
		if !regexp.MustCompile(want).Match(out) {
			t.Errorf("it does not print %q", want)
		}
	}
}
