package loopdev_test

import (
	"os"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/run"
	"pando/internal/testing/testfs"
)

// TestAttachedByOthers: a device that losetup attached has no lock, and counts as well.
func TestAttachedByOthers(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	for _, c := range []struct {
		flag    string
		refused []bool // attaching it writable, and read-only
	}{
		{"--show", []bool{true, true}},
		{"--read-only", []bool{true, false}},
	} {
		node, err := run.Program(t.Context(), "losetup", c.flag, "--show", "-f", path)
		if err != nil {
			t.Fatal(err)
		}
		loop := strings.TrimSpace(string(node))
		if on, err := loopdev.Unlocked(path); err != nil || len(on) != 1 || on[0].Path != loop {
			t.Errorf("%s: Unlocked: %+v, %v", c.flag, on, err)
		}
		for i, o := range []loopdev.Options{{}, {ReadOnly: true}} {
			d, err := try(t, path, o)
			refused := errs.Is(err, errs.InUse) && strings.Contains(errs.HintOf(err), "losetup -d "+loop)
			if refused != c.refused[i] || err != nil && !refused {
				t.Errorf("%s: attached with %+v: %v", c.flag, o, err)
			}
			if err == nil {
				d.Close()
				detached(t, path)
			}
		}
		if _, err := run.Program(t.Context(), "losetup", "-d", loop); err != nil {
			t.Fatal(err)
		}
	}

	// Readers and writers of the image are no devices.
	for _, flag := range []int{os.O_RDONLY, os.O_RDWR} {
		open(t, path, flag)
		if on, err := loopdev.Unlocked(path); err != nil || len(on) > 0 {
			t.Errorf("Unlocked: %+v, %v", on, err)
		}
	}
	attach(t, path, loopdev.Options{})
}
