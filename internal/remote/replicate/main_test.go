package replicate

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/engine"
)

// childVariable, if it is set, makes the test binary run one of children instead of
// tests: what shall be killed, or measured, alone in its process.
const childVariable = "PANDO_REPLICATE_CHILD"

// children are what the test binary can be besides tests; args are behind its name.
var children = map[string]func(args []string) error{}

func TestMain(m *testing.M) {
	engine.Helper(os.Args)
	if name := os.Getenv(childVariable); name != "" {
		if err := children[name](os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// runChild runs a child to its end, and returns its output.
func runChild(t *testing.T, name string, args ...string) (string, error) {
	t.Helper()
	c := exec.CommandContext(t.Context(), os.Args[0], args...)
	c.Env = append(os.Environ(), childVariable+"="+name, "GOGC=100") // as users have it: some measure its memory
	var out strings.Builder
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	return out.String(), err
}

// toDestroy is a request to destroy what words name.
func toDestroy(words ...string) engine.DestroyRequest {
	what, err := ref.ParsePatterns("destroy", words...)
	if err != nil {
		panic(err)
	}
	return engine.DestroyRequest{What: what}
}
