package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"pando/internal/base/errs"
	runs "pando/internal/linux/run"
)

// Use is what a program took, from before its process was made until it had
// been waited for.
type Use struct {
	WallNano int64  `json:"wall_nano"`
	UserNano int64  `json:"user_nano"`
	SysNano  int64  `json:"sys_nano"`
	MaxRSS   int64  `json:"max_rss"` // bytes
	Exit     int    `json:"exit"`
	Stderr   string `json:"stderr"` // its last lines
}

// Measure runs a program to its end and returns what it took. Its output goes
// nowhere. An exit status other than 0 is in Use, not an error. If ctx ends, the
// program is asked to end, and waited for.
//
// The kernel counts the memory of the process that starts a program as the
// program's (until exec it is), so Measure is for small processes: bench starts
// this program once more only to call it.
func Measure(ctx context.Context, argv []string) (Use, error) {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return Use{}, errs.New(errs.Unsupported, "bench", argv[0], "program not found").WithHint("install it")
	}

	cmd := exec.CommandContext(ctx, path, argv[1:]...)
	defer gentle(cmd)()
	cmd.Env = append(cmd.Environ(), "LC_ALL=C")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	start := time.Now()
	err = cmd.Run()
	wall := time.Since(start)
	if ctx.Err() != nil {
		return Use{}, ctx.Err()
	}

	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return Use{}, errs.Wrap("bench", argv[0], err)
	}

	ru, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	if !ok {
		return Use{}, errs.New(errs.Unsupported, "bench", argv[0], "the kernel reported no resource usage of the process")
	}

	return Use{
		WallNano: int64(wall), UserNano: ru.Utime.Nano(), SysNano: ru.Stime.Nano(), MaxRSS: ru.Maxrss << 10,
		Exit: cmd.ProcessState.ExitCode(), Stderr: runs.LastLines(stderr.String(), 3),
	}, nil
}

// gentle makes the program end when this process does or its context ends, with
// time to clean up, and not by a Ctrl-C that is meant for this process. The caller calls what it returns when the
// program has ended: until then the goroutine stays on its thread, as the kernel ends the program with the thread that
// started it.
func gentle(cmd *exec.Cmd) (ended func()) {
	runtime.LockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = time.Minute
	return runtime.UnlockOSThread
}

// child runs a program through a process of its own: `PROGRAM bench exec -- ARGV`.
func (r *run) child(ctx context.Context, argv ...string) (Use, error) {
	cmd := exec.CommandContext(ctx, r.Program, append([]string{"bench", "exec", "--"}, argv...)...)
	defer gentle(cmd)()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if ctx.Err() != nil {
		return Use{}, ctx.Err()
	}

	var u Use
	if err == nil {
		err = json.Unmarshal(stdout.Bytes(), &u)
	}
	if err != nil {
		return Use{}, errs.New(errs.Internal, "bench", strings.Join(argv, " "), "%w: %s", err,
			runs.LastLines(stderr.String(), 3))
	}

	return u, nil
}

// pando runs a command of this program on the pool. An exit status other than 0
// is an error.
func (r *run) pando(ctx context.Context, args ...string) (Use, error) {
	argv := append([]string{r.Program, "--pool", r.eng.Dir(), "--no-progress"}, args...)
	u, err := r.child(ctx, argv...)
	if err == nil && u.Exit != 0 {
		err = errs.New(errs.Internal, "bench", "pando "+strings.Join(args, " "), "exit status %d: %s", u.Exit, u.Stderr)
	}
	return u, err
}

// output runs a command of this program on the pool and returns what it prints.
func (r *run) output(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, r.Program, append([]string{"--pool", r.eng.Dir(), "--no-progress"}, args...)...)
	defer gentle(cmd)()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, errs.New(errs.Internal, "bench", "pando "+strings.Join(args, " "), "%w: %s", err,
			runs.LastLines(stderr.String(), 3))
	}
	return out, nil
}

// errCopy is a copy that cp could not make: a figure that is missing, not a
// failure of the benchmark.
type errCopy struct{ msg string }

func (e *errCopy) Error() string { return e.msg }

// cp copies a tree with the system's cp.
func (r *run) cp(ctx context.Context, reflink, from, to string) (Use, error) {
	u, err := r.child(ctx, "cp", "-a", "--reflink="+reflink, from, to)
	if errs.Is(err, errs.Unsupported) {
		return u, &errCopy{err.Error()}
	}
	if err == nil && u.Exit != 0 {
		return u, &errCopy{fmt.Sprintf("cp: exit status %d: %s", u.Exit, u.Stderr)}
	}
	return u, err
}

// selfSys is the processor time that this process has used in the kernel.
func selfSys() time.Duration {
	var ru syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &ru); err != nil {
		return 0
	}
	return time.Duration(ru.Stime.Nano())
}
