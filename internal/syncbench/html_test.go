package syncbench

import (
	"os"
	"testing"
)

func TestHTML(t *testing.T) {
	b, err := HTML(fixture(t))
	if err != nil {
		t.Fatal(err)
	}
	os.WriteFile("/tmp/sr/a.html", b, 0o644)
}
