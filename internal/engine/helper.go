package engine

import (
	"pando/internal/linux/freeze"
	"pando/internal/linux/sandbox"
	"pando/internal/linux/usermount"
)

// Helper makes this process a helper if the engine has started it as one, and then never
// returns. The engine must undo a freeze even if its own process is killed, and only another
// process can do that: it starts the same program again. The first process of a sandbox is
// this program too. The main function of each program
// that uses the engine calls Helper with [os.Args] before anything else. Without that call,
// operations that need a helper fail before they do anything, with an error that says so.
func Helper(args []string) {
	sandbox.Init(args)
	freeze.Guard(args)
	usermount.Helper(args)
}
