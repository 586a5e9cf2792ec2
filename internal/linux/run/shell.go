package run

import (
	"context"
	"errors"
	"io"
	"os/exec"
	"syscall"

	"pando/internal/base/errs"
)

// Shell runs a command line with sh, in the environment env, and waits until it ends. out gets its output. It has no
// standard input and no terminal. When ctx ends, the shell and its process group get SIGTERM, and SIGKILL
// when the shell has ended, or after two seconds; the error is then that of ctx. An exit status other than 0 is an
// *exec.ExitError. Processes that it leaves in the background go on.
func Shell(ctx context.Context, line string, env []string, out io.Writer) error {
	if err := ctx.Err(); err != nil {
		return errs.Wrap("run", "sh", err)
	}

	path, err := Look("sh")
	if err != nil {
		return err
	}

	cmd := exec.CommandContext(ctx, path, "-c", line)
	cmd.Env, cmd.Stdout, cmd.Stderr = env, out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = killWait

	err = cmd.Run()
	if ctx.Err() != nil && cmd.Process != nil && err != nil {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // what ignored SIGTERM, or nothing
		return errs.Wrap("run", "sh", ctx.Err())
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		return nil // a process in the background still has its output
	}

	return err
}
