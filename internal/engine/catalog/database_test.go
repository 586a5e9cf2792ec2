package catalog

import (
	"os"
	"path/filepath"
	"testing"

	"pando/internal/api"
)

// TestIfClosed: nobody opens the database's files beside SQLite while this process has them open, by whatever
// path it has.
func TestIfClosed(t *testing.T) {
	dir := t.TempDir()
	if err := Create(t.Context(), dir, "p", api.EventInit); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, other); err != nil {
		t.Fatal(err)
	}
	closed := func() (yes bool) {
		ifClosed(other, func() { yes = true })
		return yes
	}
	if !closed() {
		t.Error("it counts as open after it was made")
	}

	a, err := Open(t.Context(), dir, "p")
	if err != nil {
		t.Fatal(err)
	}
	b, err := OpenReadOnly(t.Context(), other, "p")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []*Catalog{a, a, b} { // closing one twice does not close the other
		if closed() {
			t.Error("it counts as closed while it is open")
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if !closed() {
		t.Error("it counts as open after it was closed")
	}

	if _, err := Open(t.Context(), dir, "of another pool"); err == nil || !closed() {
		t.Errorf("after a failure (%v) it counts as open", err)
	}
}
