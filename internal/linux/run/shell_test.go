package run_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"pando/internal/linux/run"
)

func TestShell(t *testing.T) {
	var out bytes.Buffer
	if err := run.Shell(t.Context(), `echo "$A" | tr a b; echo two >&2; cat`, []string{"A=aa", "PATH=/usr/bin:/bin"},
		&out); err != nil || out.String() != "bb\ntwo\n" {
		t.Errorf("%q, %v", &out, err)
	}

	var exit *exec.ExitError
	if err := run.Shell(t.Context(), "exit 3", nil, &out); !errors.As(err, &exit) || exit.ExitCode() != 3 {
		t.Errorf("exit 3: %v", err)
	}
}

// TestShellInterrupted: when the context ends, the shell and its children end, even if they ignore SIGTERM.
func TestShellInterrupted(t *testing.T) {
	for name, line := range map[string]string{
		"they end":       `sleep 1000 & echo $!; wait`,
		"they refuse to": `trap "" TERM; sleep 1000 & echo $!; wait`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, interrupt := context.WithCancel(t.Context())
			r, w := io.Pipe()
			ended := make(chan error, 1)
			go func() {
				ended <- run.Shell(ctx, line, nil, w)
				w.Close()
			}()

			text, err := bufio.NewReader(r).ReadString('\n')
			pid, perr := strconv.Atoi(strings.TrimSpace(text))
			if err := errors.Join(err, perr); err != nil {
				t.Fatal(err)
			}
			interrupt()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("interrupted: %v", err)
			}
			for syscall.Kill(pid, 0) == nil { // until it has been reaped, or the test times out
			}
		})
	}

	ctx, interrupt := context.WithCancel(t.Context())
	interrupt()
	if err := run.Shell(ctx, "echo it ran", nil, io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted before: %v", err)
	}
}
