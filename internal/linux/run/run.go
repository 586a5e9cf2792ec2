// Package run runs other programs, and returns errors that tell the user what to
// install or do.
package run

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
)

// packages maps programs to the Debian packages that contain them.
var packages = map[string]string{
	"mkfs.ext4":  "e2fsprogs",
	"e2fsck":     "e2fsprogs",
	"mkfs.xfs":   "xfsprogs",
	"resize2fs":  "e2fsprogs",
	"xfs_repair": "xfsprogs",
	"mkfs.btrfs": "btrfs-progs",
	"git":        "git",
	"git-lfs":    "git-lfs",
	"fio":        "fio",
	"zfs":        "zfsutils-linux",
	"zpool":      "zfsutils-linux",
}

// sbin is searched after PATH, because a user's PATH often lacks it.
var sbin = []string{"/usr/sbin/", "/sbin/"}

// Look returns the path of a program. Unsupported, with the package to install: it is not
// installed.
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

// killWait is how long Program waits, after the program has ended or was killed,
// until the background processes that it started close its output.
const killWait = 2 * time.Second

// Failure is the error of a program that ran but did not succeed.
type Failure struct {
	Err    error  // exit status, or the signal that ended it
	Stderr string // everything that it wrote to standard error
}

// Error returns the exit status and the last lines of standard error.
func (f *Failure) Error() string {
	if tail := LastLines(f.Stderr, 4); tail != "" {
		return f.Err.Error() + ": " + tail
	}
	return f.Err.Error()
}

// Unwrap returns the cause.
func (f *Failure) Unwrap() error { return f.Err }

// Program runs a program to its end and returns its standard output. The program has no
// standard input and no terminal, so it cannot wait for user input. It is killed, with its
// children, when ctx ends, and when this process dies. An exit status
// other than 0 is an error that wraps a *Failure.
func Program(ctx context.Context, name string, args ...string) ([]byte, error) {
	stdout, _, err := Output(ctx, name, args...)
	return stdout, err
}

// Output is Program, but also returns standard error, even if the program succeeds.
func Output(ctx context.Context, name string, args ...string) (_, _ []byte, err error) {
	return Options{}.Output(ctx, name, args...)
}

// Options says in which surroundings a program runs.
type Options struct {
	Dir string   // working directory; "": that of this process
	Env []string // its environment, as of exec.Cmd, but with LC_ALL=C; nil: that of this process

	// OnLine is called with each line that the program writes to standard error, even one that ends with a carriage
	// return, as soon as it is written. It must return soon.
	OnLine func(line string)
}

// Output is Output with these options.
func (o Options) Output(ctx context.Context, name string, args ...string) (_, _ []byte, err error) {
	runtime.LockOSThread() // see Pipe
	defer runtime.UnlockOSThread()

	cmd, stderr, err := command(ctx, append([]string{name}, args...))
	if err != nil {
		return nil, nil, err
	}

	var stdout bytes.Buffer
	cmd.Stdout, cmd.Dir = &stdout, o.Dir
	if o.Env != nil {
		cmd.Env = append(slices.Clone(o.Env), "LC_ALL=C")
	}
	if o.OnLine != nil {
		cmd.Stderr = io.MultiWriter(stderr, &lines{on: o.OnLine})
	}

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

// lines calls on with each line that is written to it.
type lines struct {
	on   func(string)
	rest []byte // of a line that has not ended
}

func (l *lines) Write(b []byte) (int, error) {
	l.rest = append(l.rest, b...)
	for {
		i := bytes.IndexAny(l.rest, "\r\n")
		if i < 0 {
			return len(b), nil
		}
		if i > 0 {
			l.on(string(l.rest[:i]))
		}
		l.rest = l.rest[i+1:]
	}
}

// LastLines joins the last n lines of the output of a program that are not empty, for an error.
func LastLines(s string, n int) string {
	var lines []string
	for line := range strings.Lines(s) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-n):], "; ")
}
