package run_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/run"
)

func into(ctx context.Context, script string, r io.Reader) error {
	return run.Into(ctx, r, "sh", "-c", script)
}

func outOf(ctx context.Context, script string, w io.Writer) error {
	return run.OutOf(ctx, w, "sh", "-c", script)
}

func TestInto(t *testing.T) {
	much := func() io.Reader { return bytes.NewReader(make([]byte, 5_000_000)) }
	ctx := t.Context()
	if err := into(ctx, `test "$(wc -c)" = 5000000`, much()); err != nil {
		t.Error(err)
	}
	if err := into(ctx, "head -c 10 >/dev/null", much()); !errors.Is(err, run.ErrMore) {
		t.Errorf("a program that does not want all: %v", err)
	}
	var f *run.Failure
	if err := into(ctx, "cat >/dev/null; echo refused >&2; exit 4", much()); !errs.Is(err, errs.IO) ||
		!errors.As(err, &f) || !strings.Contains(err.Error(), "exit status 4: refused") {
		t.Errorf("a program that fails at the end: %v", err)
	}
	if err := into(ctx, "echo refused >&2; exit 4", much()); !errors.As(err, &f) ||
		!strings.Contains(err.Error(), "refused") {
		t.Errorf("a program that fails at once: %v", err)
	}
	mine := errors.New("mine")
	for _, script := range []string{"cat >/dev/null", "cat >/dev/null; exit 3"} {
		if err := into(ctx, script, io.MultiReader(strings.NewReader("some"), iotest.ErrReader(mine))); err != mine {
			t.Errorf("a reader that fails: %v", err)
		}
	}
	if err := run.Into(ctx, much(), "pando-no-such-program"); !errs.Is(err, errs.Unsupported) {
		t.Error(err)
	}
}

func TestOutOf(t *testing.T) {
	ctx := t.Context()
	var out bytes.Buffer
	if err := outOf(ctx, "head -c 5000000 /dev/zero", &out); err != nil || out.Len() != 5_000_000 {
		t.Errorf("%v, %d bytes", err, out.Len())
	}
	var f *run.Failure
	if err := outOf(ctx, "echo some; echo broken >&2; exit 3", &out); !errors.As(err, &f) ||
		!strings.Contains(err.Error(), "exit status 3: broken") {
		t.Errorf("a program that fails: %v", err)
	}
	mine := errors.New("mine")
	if err := outOf(ctx, "cat /dev/zero", failing{mine}); err != mine {
		t.Errorf("a writer that fails: %v", err)
	}
	if err := run.OutOf(ctx, &out, "pando-no-such-program"); !errs.Is(err, errs.Unsupported) {
		t.Error(err)
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

// Both end with the context, and what they have started.
func TestStreamCanceled(t *testing.T) {
	for name, fn := range map[string]func(ctx context.Context) error{
		"Into": func(ctx context.Context) error {
			r, w := io.Pipe()
			defer context.AfterFunc(ctx, func() { w.CloseWithError(ctx.Err()) })()
			return into(ctx, "sleep 1000", r)
		},
		"Into, all given": func(ctx context.Context) error { return into(ctx, "sleep 1000", strings.NewReader("x")) },
		"OutOf":           func(ctx context.Context) error { return outOf(ctx, "sleep 1000", io.Discard) },
	} {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- fn(ctx) }()
		time.AfterFunc(100*time.Millisecond, cancel)
		select {
		case err := <-done:
			if !errs.Is(err, errs.Canceled) {
				t.Errorf("%s: %v", name, err)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("%s does not end", name)
		}
	}
}
