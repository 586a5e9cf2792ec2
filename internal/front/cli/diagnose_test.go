package cli

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"pando/internal/base/errs"
)

// started calls a function at the first line of progress.
type started struct {
	bytes.Buffer
	call func()
}

func (s *started) Write(b []byte) (int, error) {
	if strings.Contains(string(b), "watching") {
		s.call()
	}
	return s.Buffer.Write(b)
}

// TestDiagnoseInterrupted: an interruption ends the watch, what was found is printed, and
// the exit code says so.
func TestDiagnoseInterrupted(t *testing.T) {
	t.Setenv("PANDO_POOL", t.TempDir())
	for _, args := range [][]string{{"diagnose", t.TempDir(), "--for", "1h"},
		{"diagnose", t.TempDir(), "--for", "1h", "--json"}} {
		ctx, cancel := context.WithCancel(t.Context())
		var out bytes.Buffer
		progress := &started{call: cancel}
		a := &App{Version: "test", Stdout: &out, Stderr: progress}
		if code := a.Run(ctx, args); code != errs.Canceled.Codes().Exit {
			t.Errorf("exit code %d: %s", code, progress.String())
		}
		if got := out.String(); !strings.Contains(got, "interrupted after") || strings.Contains(progress.String(), "error") {
			t.Errorf("%q: it printed %s, and %s", args, got, progress.String())
		}
	}
}
