package pool

import (
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
)

// TestLockIsBounded: who waits for the lock of a pool gives up, and says what for.
func TestLockIsBounded(t *testing.T) {
	defer func(was time.Duration) { lockLimit = was }(lockLimit)
	lockLimit = 20 * time.Millisecond
	dir := t.TempDir()
	unlock, err := Lock(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(t.Context(), dir); !errs.Is(err, errs.InUse) || errs.HintOf(err) == "" ||
		!strings.Contains(err.Error(), "the lock of the pool") {
		t.Errorf("got %v (hint %q)", err, errs.HintOf(err))
	}
	unlock()
	unlock, err = Lock(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	unlock()
}
