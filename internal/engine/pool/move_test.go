package pool

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
)

// TestInitKeepsInterruptedMove: init in the directory that a pool was being moved to would take away what tells that
// the move was not committed.
func TestInitKeepsInterruptedMove(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	b, err := json.Marshal(Moving{Config: Config{Format: Format, ID: "id", Driver: "reflink"}, To: to})
	if err != nil {
		t.Fatal(err)
	}
	for path, text := range map[string]string{
		filepath.Join(from, movingName): string(b), filepath.Join(to, initingName): from,
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	if _, err := Read(to); !errs.Is(err, errs.NotFound) || !strings.Contains(errs.HintOf(err), from) {
		t.Errorf("reading: %v; hint: %s", err, errs.HintOf(err))
	}
	if _, _, _, _, err := Prepare(t.Context(), to, nil); !errs.Is(err, errs.InUse) {
		t.Errorf("preparing: %v", err)
	}
	if !exists(filepath.Join(to, initingName)) {
		t.Error("the mark of the move was removed")
	}

	// Without the pool, it is the rest of an init.
	if err := os.Remove(filepath.Join(from, movingName)); err != nil {
		t.Fatal(err)
	}
	_, _, unlock, abort, err := Prepare(t.Context(), to, nil)
	if err != nil {
		t.Fatal(err)
	}
	abort()
	unlock()
}
