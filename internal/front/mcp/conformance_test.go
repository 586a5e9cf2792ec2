package mcp_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"pando/internal/front/mcp"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
)

// conformance runs commands with the official conformance suite.
const conformance = "../../../scripts/node.sh"

// notHere is why a check of the suite fails at a server that has other tools than the suite's own example, and neither
// resources, prompts, completion nor subscriptions.
var notHere = regexp.MustCompile(`unknown tool "|Tool '.*' not found|Not testable: server|method not found: "(` +
	`prompts|resources|completion|logging)/|Expected InputRequiredResult|` +
	`Prerequisite failed: could not get initial InputRequired`)

// check is the result of one check of the suite.
type check struct {
	ID, Status, ErrorMessage string
}

// TestConformance: the official suite finds nothing wrong with what it can test. It speaks HTTP, and pando does not, so
// the test serves the same server in another way.
func TestConformance(t *testing.T) {
	pool := newPool(t)
	if out, err := exec.Command(conformance, "node", "--version").CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: the conformance suite is missing: run make deps: %v: %s", err, out)
	}

	for _, c := range []struct {
		version   string
		stateless bool
		all       []string // scenarios that must pass
		passed    int      // checks at least
	}{
		{"2025-11-25", false, []string{"server-initialize", "server-session-lifecycle", "ping", "tools-list"}, 35},
		{"2026-07-28", true, []string{"tools-list", "http-header-validation"}, 90},
	} {
		t.Run(c.version, func(t *testing.T) {
			t.Parallel()
			s, err := mcp.New(t.Context(), pool, options())
			must(t, err)
			web := httptest.NewServer(sdk.NewStreamableHTTPHandler(func(*http.Request) *sdk.Server { return s.MCP() },
				&sdk.StreamableHTTPOptions{Stateless: c.stateless}))
			defer web.Close()

			dir := t.TempDir()
			cmd := exec.CommandContext(t.Context(), conformance, "conformance", "server", "--url", web.URL,
				"--requirements", c.version, "-o", dir)
			out, _ := cmd.CombinedOutput() // what does not apply fails
			passed, scenarios := 0, []string{}
			for scenario, checks := range results(t, dir) {
				failed := 0
				for _, k := range checks {
					switch {
					case k.Status == "SUCCESS":
						passed++
					case k.Status == "FAILURE" && !strings.HasPrefix(scenario, "tasks-"): // an extension
						failed++
						if !notHere.MatchString(k.ErrorMessage) || slices.Contains(c.all, scenario) {
							t.Errorf("%s: %s: %s", scenario, k.ID, k.ErrorMessage)
						}
					}
				}
				if failed == 0 {
					scenarios = append(scenarios, scenario)
				}
			}

			for _, want := range c.all {
				if !slices.Contains(scenarios, want) {
					t.Errorf("the scenario %s did not pass", want)
				}
			}
			if passed < c.passed {
				t.Errorf("only %d checks passed: %s", passed, out)
			}
			t.Logf("%d checks passed; without a failure: %s", passed, slices.Sorted(slices.Values(scenarios)))
		})
	}
}

// timeOfRun is at the end of the name of a directory with the results of a scenario.
var timeOfRun = regexp.MustCompile(`-\d{4}-\d\d-\d\dT[-0-9]+Z$`)

// results reads what the suite has written for each scenario.
func results(t *testing.T, dir string) map[string][]check {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*", "checks.json"))
	must(t, err)
	out := map[string][]check{}
	for _, file := range files {
		b, err := os.ReadFile(file)
		must(t, err)
		var checks []check
		must(t, json.Unmarshal(b, &checks))
		name := timeOfRun.ReplaceAllString(filepath.Base(filepath.Dir(file)), "")
		out[strings.TrimPrefix(name, "server-")] = checks
	}
	return out
}
