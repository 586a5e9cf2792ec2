package run_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/run"
)

func pipe(t *testing.T, ctx context.Context, from, to string, progress func(int64)) error {
	t.Helper()
	return run.Pipe(ctx, []string{"sh", "-c", from}, []string{"sh", "-c", to}, progress)
}

func TestPipe(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	var last int64
	if err := pipe(t, t.Context(), "head -c 5000000 /dev/zero", "wc -c >"+out, func(n int64) {
		if n <= last {
			t.Errorf("progress from %d to %d", last, n)
		}
		last = n
	}); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(out); err != nil || strings.TrimSpace(string(b)) != "5000000" || last != 5_000_000 {
		t.Errorf("%q, %v, progress %d", b, err, last)
	}
}

func TestPipeFails(t *testing.T) {
	for name, c := range map[string]struct{ from, to, want string }{
		"the first":              {"echo some; echo broken >&2; exit 3", "cat >/dev/null", "sh: exit status 3: broken"},
		"the second, at once":    {"head -c 50000000 /dev/zero", "echo refused >&2; exit 4", "sh: exit status 4: refused"},
		"the second, at the end": {"echo some", "cat >/dev/null; echo refused >&2; exit 4", "sh: exit status 4: refused"},
		"both":                   {"echo one >&2; exit 3", "cat >/dev/null; echo two >&2; exit 4", "sh: exit status 3: one"},
	} {
		err := pipe(t, t.Context(), c.from, c.to, nil)
		var f *run.Failure
		if !errs.Is(err, errs.IO) || !strings.HasPrefix(err.Error(), c.want) || !errors.As(err, &f) {
			t.Errorf("%s: %v, wanted %q", name, err, c.want)
		}
	}
	if err := run.Pipe(t.Context(), []string{"pando-no-such-program"}, []string{"cat"}, nil); !errs.Is(err,
		errs.Unsupported) {
		t.Errorf("%v", err)
	}
	if err := run.Pipe(t.Context(), []string{"sh", "-c", "exit 0"}, []string{"pando-no-such-program"}, nil); !errs.Is(err,
		errs.Unsupported) {
		t.Errorf("%v", err)
	}
}

// Both die with the context, and what they have started.
func TestPipeCanceled(t *testing.T) {
	path, opened := fifo(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- pipe(t, ctx, fmt.Sprintf(withChild, path), fmt.Sprintf("exec 3>%s; cat; sleep 1000", path), nil)
	}()
	r := opened()
	if line, err := r.ReadString('\n'); err != nil {
		t.Fatal(line, err)
	}
	cancel()
	select {
	case err := <-done:
		if !errs.Is(err, errs.Canceled) {
			t.Errorf("%v", err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("it does not end")
	}
	allGone(t, r)
}
