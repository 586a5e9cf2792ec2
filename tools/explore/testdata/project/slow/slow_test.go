//go:build linux

// Package slow has a test that does not come to its end while there is a file "slow".
package slow

import (
	"os"
	"testing"
	"time"

	"pando/internal/testing/faulttest"
)

func TestSlow(t *testing.T) {
	faulttest.Draw(t, 3)
	t.Run("first", func(t *testing.T) { note(t, "first\n") })
	t.Run("second", func(t *testing.T) {
		note(t, "second\n")
		if _, err := os.Stat("slow"); err == nil {
			time.Sleep(time.Hour)
		}
	})
}

// note appends to a file in the package's directory.
func note(t *testing.T, line string) {
	f, err := os.OpenFile("ran", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString(line); err != nil {
		t.Fatal(err)
	}
}
