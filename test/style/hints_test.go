package style

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// destroys finds hints that name something to destroy, and such as give files to another owner. A verb without a name,
// as in "free space with `pando destroy`", leaves the choice to the user.
var destroys = regexp.MustCompile(`errs\.Run\("(destroy|deinit|golden rm|remote rm|remote delete)",` +
	`|errs\.Run\("prune"|\bchown .*%|\brm -`)

// mayDestroy are the places of hints for users who have just asked for a removal, and named the wrong verb or object.
var mayDestroy = map[string]string{
	"internal/engine/goldens.go":          "golden rm of a volume, and of the current generation",
	"internal/engine/deinit.go":           "deinit of a pool with remotes",
	"internal/engine/catalog/unknown.go":  "destroy of a golden, golden rm of a volume",
	"internal/engine/check/inside.go":     "what an earlier repair kept",
	"internal/remote/replicate/keys.go":   "remote key rm of the pool's own key",
	"internal/front/cli/golden_rm.go":     "golden rm of the golden whose generation was to be removed",
	"internal/front/cli/golden_import.go": "the directory that a golden has replaced, once it is no longer needed",
	"internal/observe/doctor/findings.go": "a copy that the steps before have made",
	"internal/bench/replicate_pando.go":   "a pool that a benchmark made and could not remove",
}

// TestHintsDestroyNothing: whoever follows a hint loses no data.
func TestHintsDestroyNothing(t *testing.T) {
	seen := map[string]bool{}
	for _, path := range sourceFiles(t, ".go") {
		rel := strings.TrimPrefix(path, "../../")
		if !strings.HasPrefix(rel, "internal/") || strings.HasSuffix(rel, "_test.go") ||
			strings.HasPrefix(rel, "internal/testing/") {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			code, _, _ := strings.Cut(line, " // ")
			if !destroys.MatchString(code) {
				continue
			}
			if seen[rel] = true; mayDestroy[rel] == "" {
				t.Errorf("%s: %q: whoever follows this hint may lose data", rel, strings.TrimSpace(line))
			}
		}
	}
	for rel, why := range mayDestroy {
		if !seen[rel] {
			t.Errorf("%s has no such hint any more (%s): remove it from the list", rel, why)
		}
	}
}
