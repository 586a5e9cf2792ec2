package doctor

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestKernelChecksAreDocumented: every check and every code of a finding is in
// docs/doctor.md.
func TestKernelChecksAreDocumented(t *testing.T) {
	b, err := os.ReadFile("../../../docs/doctor.md")
	if err != nil {
		if os.Getenv("PANDO_TEST_BINARY") != "" {
			t.Skip("SKIPPED: there is no documentation beside this test")
		}
		t.Fatal(err)
	}
	page := string(b)
	for _, c := range kernelChecks() {
		if !strings.Contains(page, "`"+c.name+"`") {
			t.Errorf("check %s is not in docs/doctor.md", c.name)
		}
	}
	code := regexp.MustCompile(`(?:[cC]ode: |\.Code(?:, f\.[A-Z][a-z]+)* = |pressed\(|add\()"([a-z0-9-]+)"`)
	n := 0
	for _, pattern := range []string{"kernelstate*.go", "mounts*.go", "slab*.go", "limits*.go", "programs*.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if strings.HasSuffix(f, "_test.go") {
				continue
			}
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range code.FindAllStringSubmatch(string(text), -1) {
				n++
				if !strings.Contains(page, "`"+m[1]+"`") {
					t.Errorf("%s: %s is not in docs/doctor.md", f, m[1])
				}
			}
		}
	}
	if n < 35 {
		t.Errorf("only %d codes found: this test looks in the wrong place", n)
	}
}
