package ledger

import (
	"testing"
	"time"

	"pando/internal/driver"
)

// silent is a driver that notes nothing, noting one that does.
type silent struct{ driver.Driver }

type noting struct {
	driver.Driver
	driver.Committer
}

// TestOldStrays: where nothing is noted, what has no row after a reboot is kept however old it
// is: it may have been in use for years, and the catalogue may be an old copy.
func TestOldStrays(t *testing.T) {
	old := driver.Object{ID: driver.NewID(), Whole: true, Identity: driver.Identity{
		Kind: driver.Volume, CreatedAt: time.Now().Add(-2 * 365 * 24 * time.Hour), BootID: "another boot",
	}}
	if New(nil, silent{}, nil).IsGarbage(old, false) {
		t.Error("it is destroyed though nobody can tell whether it was committed")
	}
	l := New(nil, noting{}, nil)
	if !l.IsGarbage(old, false) {
		t.Error("what was never committed stays for good")
	}
	old.Committed = true
	if l.IsGarbage(old, false) {
		t.Error("what was committed is destroyed")
	}
}
