package engine

import "pando/internal/linux/freeze"

// Helper makes this process a helper, and then never returns, if the engine has started it as
// one: some of what the engine does must be undone even if its process is killed, and only
// another process can do that, which is the same program again. The main function of each
// program that uses the engine calls Helper with [os.Args] before anything else. Without it,
// operations that need a helper fail, with an error that says so; nothing is done without one.
func Helper(args []string) { freeze.Guard(args) }
