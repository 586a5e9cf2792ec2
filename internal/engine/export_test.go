package engine

import (
	"testing"

	"pando/internal/errs"
)

// Warn is warn.
var Warn = warn

// HideProgram makes fsck believe that a program is not installed.
func HideProgram(t *testing.T, name string) {
	look := lookProgram
	t.Cleanup(func() { lookProgram = look })
	lookProgram = func(n string) (string, error) {
		if n == name {
			return "", errs.New(errs.Unsupported, "run", n, "program not found").WithHint("install it: `apt-get install e2fsprogs`")
		}
		return look(n)
	}
}

// AtStep calls fn between the steps of putting a mount in its place, with the name of what
// was done last.
func AtStep(t *testing.T, fn func(step string)) {
	t.Cleanup(func() { atStep = func(string) {} })
	atStep = fn
}
