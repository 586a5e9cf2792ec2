package zfs

import (
	"context"
	"time"
)

// TableReasons are the reasons of the rows of the table.
func TableReasons() []Reason {
	var out []Reason
	for _, r := range table {
		out = append(out, r.reason)
	}
	return out
}

var ParseRows, ParseTextRows = parseRows, parseTextRows

// Bounded is bounded, for a function that may not come back.
func Bounded(ctx context.Context, limit, kill time.Duration, fn func(context.Context) ([]byte, error)) error {
	defer func(d time.Duration) { killWait = d }(killWait)
	killWait = kill
	_, err := runBounded(ctx, limit, "zfs test", fn)
	return err
}

// RunTool is Do of any program, with a limit.
func RunTool(ctx context.Context, limit time.Duration, name string, args ...string) error {
	_, err := Tool(name).runTool(ctx, limit, args)
	return err
}
