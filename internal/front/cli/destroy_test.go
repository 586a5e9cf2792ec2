package cli

import (
	"bytes"
	"io"
	"strconv"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/engine"
)

// TestManyFailures: people are shown a few errors and a count; with --json there is each of them.
func TestManyFailures(t *testing.T) {
	for _, c := range []struct {
		json          bool
		failed, lines int
		more          string
	}{
		{failed: 3, lines: 2},
		{failed: 43, lines: 3, more: "pando: 40 more could not be destroyed"},
		{json: true, failed: 43, lines: 42},
	} {
		var r engine.DestroyReport
		for i := range c.failed {
			r.Failed = append(r.Failed, errs.New(errs.InUse, "destroy", "v"+strconv.Itoa(i), "it is in use"))
		}
		var out bytes.Buffer
		err := (&App{Stdout: io.Discard, Stderr: &out, json: c.json}).printDestroyed(&r)
		if err != r.Failed[c.failed-1] {
			t.Errorf("%d: the error is %v", c.failed, err)
		}
		if n := strings.Count(out.String(), "\n"); n != c.lines || !strings.Contains(out.String(), c.more) {
			t.Errorf("%d failed: %d lines:\n%s", c.failed, n, &out)
		}
	}
}
