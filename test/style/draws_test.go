package style

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// ownDraw finds what makes a test draw differently in each run, or whatever the seed: global random numbers, a seed of
// its own, and a look at the pattern of -run, with which a test that is repeated alone would be another test.
var ownDraw = regexp.MustCompile(`\brand\.(Uint|Int|N\(|Perm|Shuffle|Float|Exp|Norm)|NewPCG\(uint64\(time\.|` +
	`"PANDO_(SEED|SHARD)"|"test\.run"`)

// drawsByItself reports whether a line of a test does so.
func drawsByItself(line string) bool {
	code, _, _ := strings.Cut(line, "//")
	return ownDraw.MatchString(code)
}

// TestTestsDrawTheSame: tests draw by faulttest.Draw and faulttest.Rand only, so that every run draws the same.
func TestTestsDrawTheSame(t *testing.T) {
	for _, path := range sourceFiles(t, ".go") {
		isSupport := strings.Contains(path, "/testing/") || strings.Contains(path, "/drivertest/")
		if !isSupport && !strings.HasSuffix(path, "_test.go") || strings.HasSuffix(path, "/faulttest/draw.go") {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if drawsByItself(line) {
				t.Errorf("%s: %q: draw with faulttest.Draw or faulttest.Rand", strings.TrimPrefix(path, "../../"),
					strings.TrimSpace(line))
			}
		}
	}
}

func TestOwnDrawsAreFound(t *testing.T) {
	for line, want := range map[string]bool{
		"seed := rand.Uint64()":                              true,
		"for _, i := range rand.Perm(9) {":                   true,
		"time.Sleep(rand.N(time.Second))":                    true,
		`r := rand.New(rand.NewPCG(uint64(time.Now().Unix()`: true,
		`os.Getenv("PANDO_SEED")`:                            true,
		`flag.Lookup("test.run").Value`:                      true,
		"r := rand.New(rand.NewPCG(1, 2))":                   false,
		"_, _ = rand.Read(b)":                                false,
		"n := rnd.IntN(4) // as rand.IntN(4)":                false,
	} {
		if drawsByItself(line) != want {
			t.Errorf("%q: %v", line, !want)
		}
	}
}
