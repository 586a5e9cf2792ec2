// Package run runs other programs and turns what goes wrong into errors that
// tell the person what to install or do.
package run

import (
	"bytes"
	"context"
	"errors"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"pando/internal/base/errs"
)

// packages names the Debian package that holds a program.
var packages = map[string]string{
	"mkfs.ext4":  "e2fsprogs",
	"e2fsck":     "e2fsprogs",
	"mkfs.xfs":   "xfsprogs",
	"resize2fs":  "e2fsprogs",
	"xfs_repair": "xfsprogs",
	"mkfs.btrfs": "btrfs-progs",
	"git":        "git",
	"fio":        "fio",
	"zfs":        "zfsutils-linux",
	"zpool":      "zfsutils-linux",
}

// sbin is searched besides PATH: a user's PATH often lacks it.
var sbin = []string{"/usr/sbin/", "/sbin/"}

// Look finds a program. Unsupported, with the package to install, if it is not
// there.
func Look(name string) (string, error) {
	p, err := exec.LookPath(name)
	if err == nil {
		return p, nil
	}

	for _, dir := range sbin {
		if p, err := exec.LookPath(dir + name); err == nil {
			return p, nil
		}
	}

	e := errs.New(errs.Unsupported, "run", name, "program not found")
	if pkg := packages[name]; pkg != "" {
		e = e.WithHint("install it: `apt-get install %s`", pkg)
	}

	return "", e
}

// killWait is how long Program waits, once the program has ended or was killed,
// for what it left running in the background to close its output.
const killWait = 2 * time.Second

// Failure is why a program that ran did not succeed.
type Failure struct {
	Err    error  // its exit status, or the signal
	Stderr string // all that it wrote there
}

// Error returns the exit status and the last lines of standard error.
func (f *Failure) Error() string {
	if tail := lastLines(f.Stderr, 4); tail != "" {
		return f.Err.Error() + ": " + tail
	}
	return f.Err.Error()
}

// Unwrap returns the cause.
func (f *Failure) Unwrap() error { return f.Err }

// Program runs a program to its end and returns its standard output. It has no
// standard input and no terminal, so it cannot wait for anybody. It dies with
// ctx, and its children with it; and it dies with this process. An exit status
// other than 0 is an error that wraps a *Failure.
func Program(ctx context.Context, name string, args ...string) ([]byte, error) {
	stdout, _, err := Output(ctx, name, args...)
	return stdout, err
}

// Output is Program that returns standard error as well, even of a program that
// succeeded.
func Output(ctx context.Context, name string, args ...string) (_, _ []byte, err error) {
	path, err := Look(name)
	if err != nil {
		return nil, nil, err
	}

	cmd := exec.CommandContext(ctx, path, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = killWait

	// The death signal comes when the thread ends that started the program.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	cmd.Env = append(cmd.Environ(), "LC_ALL=C")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		if ctx.Err() != nil {
			return nil, nil, errs.Wrap(name, "", ctx.Err())
		}
		kind := errs.IO
		var exit *exec.ExitError
		if !errors.As(err, &exit) {
			kind = errs.KindOf(err)
		}
		return stdout.Bytes(), stderr.Bytes(), &errs.Error{Kind: kind, Op: name,
			Err: &Failure{Err: err, Stderr: stderr.String()}}
	}

	return stdout.Bytes(), stderr.Bytes(), nil
}

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	if len(lines) > n {
		lines = lines[len(lines)-n:]
	}
	return strings.Join(lines, "; ")
}
