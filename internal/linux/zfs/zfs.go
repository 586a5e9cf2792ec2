// Package zfs runs the programs zfs and zpool, and finds the block devices of zvols.
// It is the only package that parses the output of these programs: tables by columns
// (-Hp), and error messages by one table, which turns them into errors with a kind, a
// hint and a [Reason]. It knows nothing about Pando's pools.
//
// It finds out what a version of OpenZFS supports by trying, or from the features that
// the pool lists, never by comparing versions; see [Features].
package zfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/run"
)

// Tool is one of the two programs.
type Tool string

// The programs.
const (
	ZFS   Tool = "zfs"
	Zpool Tool = "zpool"
)

// How long a program may take. If a pool has lost its disks, programs wait in the
// kernel forever, and cannot be killed.
var (
	changeLimit = 5 * time.Minute
	readLimit   = time.Minute
	killWait    = 5 * time.Second // after a program was killed
)

const suspendedHint = "check with `zpool status` whether the pool is suspended"

var runs atomic.Int64

// Runs returns how many programs this process has run so far, which determines most of
// the cost of an operation.
func Runs() int64 { return runs.Load() }

// Do runs a command that changes something. It passes args unchanged: names must have
// been checked (CheckDataset). It takes at most 5 minutes. The kinds of errors are those
// of the table in errors.go. Canceled: ctx ended; the change may have happened anyway.
func (t Tool) Do(ctx context.Context, args ...string) error {
	_, err := t.runTool(ctx, changeLimit, args)
	return err
}

// Output runs a read-only command and returns its output. It takes at most one minute.
func (t Tool) Output(ctx context.Context, args ...string) ([]byte, error) {
	return t.runTool(ctx, readLimit, args)
}

// Rows runs a read-only command that prints rows of columns separated by tabs, which
// takes -H or -Hp in args. Names of datasets may contain spaces. Damaged: a row has
// another number of columns.
func (t Tool) Rows(ctx context.Context, columns int, args ...string) ([][]string, error) {
	out, err := t.Output(ctx, args...)
	if err != nil {
		return nil, err
	}
	return parseRows(t.opName(args), string(out), columns)
}

// TextRows is Rows for a last column that may contain tabs and line breaks, such as a
// user property.
func (t Tool) TextRows(ctx context.Context, columns int, args ...string) ([][]string, error) {
	out, err := t.Output(ctx, args...)
	if err != nil {
		return nil, err
	}
	return parseTextRows(t.opName(args), string(out), columns)
}

func parseRows(op, out string, columns int) ([][]string, error) {
	var rows [][]string
	for line := range strings.Lines(out) {
		row := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(row) != columns {
			return nil, errs.New(errs.Damaged, op, "", "unexpected output: a row has %d columns instead of %d: %q",
				len(row), columns, line)
		}
		rows = append(rows, row)
	}
	return rows, nil
}

func parseTextRows(op, out string, columns int) ([][]string, error) {
	var rows [][]string
	for line := range strings.Lines(out) {
		line = strings.TrimSuffix(line, "\n")
		row := strings.SplitN(line, "\t", columns)
		switch {
		case len(row) == columns:
			rows = append(rows, row)
		case len(rows) > 0: // continues the text of the previous row
			rows[len(rows)-1][columns-1] += "\n" + line
		default:
			return nil, errs.New(errs.Damaged, op, "", "unexpected output: a row has %d columns instead of %d: %q",
				len(row), columns, line)
		}
	}

	return rows, nil
}

// Number parses a number of bytes or a date, as -p prints it; "-" and "none" are 0.
// Damaged: s is not a number.
func Number(s string) (int64, error) {
	if s == "-" || s == "none" || s == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 {
		return 0, errs.New(errs.Damaged, "zfs", "", "%q is not a number", s)
	}
	return n, nil
}

// opName returns the operation for errors: "zfs destroy".
func (t Tool) opName(args []string) string {
	if len(args) == 0 {
		return string(t)
	}
	return string(t) + " " + args[0]
}

func (t Tool) runTool(ctx context.Context, limit time.Duration, args []string) ([]byte, error) {
	return runBounded(ctx, limit, t.opName(args), func(ctx context.Context) ([]byte, error) {
		return run.Program(ctx, string(t), args...)
	})
}

// runBounded calls fn, which runs a program, and returns after limit even if the program
// cannot be killed.
func runBounded(
	ctx context.Context, limit time.Duration, op string, fn func(context.Context) ([]byte, error),
) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, errs.Wrap(op, "", err)
	}

	// Run the program in the background.
	runs.Add(1)
	limited, cancel := context.WithTimeout(ctx, limit)
	type result struct {
		out []byte
		err error
	}
	done := make(chan result, 1)
	go func() {
		defer cancel()
		out, err := fn(limited)
		done <- result{out, err}
	}()

	// Wait for its end or, after the limit, for a moment until it is killed.
	var r result
	select {
	case r = <-done:
	case <-limited.Done():
		// Once a killed program has ended, it cannot change anything any more.
		select {
		case r = <-done:
		case <-time.After(killWait):
			r.err = &errs.Error{Kind: errs.IO, Op: op, Hint: suspendedHint,
				Err: errors.New("it hangs in the kernel and cannot be killed")}
		}
	}
	if r.err == nil {
		return r.out, nil
	}

	// Explain the error.
	var f *run.Failure
	switch {
	case errors.As(r.err, &f):
		return nil, Classify(op, f)
	case ctx.Err() == nil && limited.Err() != nil && errs.Is(r.err, errs.Canceled):
		return nil, errs.New(errs.IO, op, "", "no result after %v", limit).WithHint("%s", suspendedHint)
	case errs.Is(r.err, errs.Canceled) && ctx.Err() != nil:
		return nil, &errs.Error{Kind: errs.Canceled, Op: op, Err: ctx.Err()}
	}

	return nil, r.err
}

// Available returns an error if ZFS cannot be used on this host. Unsupported, with a
// hint: the programs are not installed, or the modules are not loaded. Never NotFound. It
// runs no program.
func Available() error {
	if _, err := run.Look(string(ZFS)); err != nil {
		return err
	}
	if _, err := run.Look(string(Zpool)); err != nil {
		return err
	}
	if _, err := os.Stat("/proc/spl/kstat/zfs"); err != nil {
		return errs.New(errs.Unsupported, "zfs", "", "the ZFS kernel module is not loaded").WithHint(modulesHint)
	}
	return nil
}

// PoolState returns the kernel's state of an imported zpool: "ONLINE", "DEGRADED",
// "SUSPENDED". It runs no program. Unsupported: the modules are not loaded. NotFound: the
// zpool is not imported. Both have a hint.
func PoolState(pool string) (string, error) {
	b, err := os.ReadFile(filepath.Join("/proc/spl/kstat/zfs", pool, "state"))
	if err == nil {
		return strings.TrimSpace(string(b)), nil
	}

	if _, err := os.Stat("/proc/spl/kstat/zfs"); err != nil {
		return "", errs.New(errs.Unsupported, "open zpool", pool, "the ZFS kernel module is not loaded").WithHint(modulesHint)
	}

	if errors.Is(err, os.ErrNotExist) {
		return "", errs.New(errs.NotFound, "open zpool", pool, "not imported").
			WithHint("import it with `zpool import %s`, or list the imported pools with `zpool list`", pool)
	}

	return "", errs.Wrap("open zpool", pool, err)
}

// Version returns the version of the loaded module ("2.3.2-2"), for users; "" if no
// module is loaded.
func Version() string {
	b, err := os.ReadFile("/sys/module/zfs/version")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// Features returns the features of a pool by name, each "disabled", "enabled" or
// "active". This version of ZFS does not have features that are not listed.
func Features(ctx context.Context, pool string) (map[string]string, error) {
	rows, err := Zpool.Rows(ctx, 2, "get", "-Hp", "-o", "property,value", "all", pool)
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, r := range rows {
		if name, ok := strings.CutPrefix(r[0], "feature@"); ok {
			out[name] = r[1]
		}
	}
	return out, nil
}

// Patiently calls fn until it does not fail because something is [Busy], for up to limit: other
// processes, such as probes of udev, may hold a dataset for a moment.
func Patiently(ctx context.Context, limit time.Duration, fn func() error) error {
	deadline := time.Now().Add(limit)
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, 200*time.Millisecond) {
		err := fn()
		if !Is(err, Busy) || time.Now().Add(wait).After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (%w)", err, ctx.Err())
		case <-time.After(wait):
		}
	}
}

// copyLimit is how long a stream may make no progress.
var copyLimit = 5 * time.Minute

// Copy pipes `zfs send` with the arguments send into `zfs receive` with the arguments
// receive, on this host. progress, if not nil, is called with the number of bytes
// transferred. IO: no progress for 5 minutes.
func Copy(ctx context.Context, send, receive []string, progress func(n int64)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stuck := errs.New(errs.IO, "zfs send", "", "no data was sent for %v", copyLimit).WithHint("%s", suspendedHint)
	timer := time.AfterFunc(copyLimit, func() { cancel(stuck) })
	defer timer.Stop()
	runs.Add(1) // runBounded counts the other program
	const op = "zfs send"

	// No time limit: the kernel's work at the end of a stream is finite as well.
	_, err := runBounded(ctx, 1<<62, op, func(ctx context.Context) ([]byte, error) {
		return nil, run.Pipe(ctx, append([]string{string(ZFS), "send"}, send...),
			append([]string{string(ZFS), "receive"}, receive...), func(n int64) {
				timer.Reset(copyLimit)
				if progress != nil {
					progress(n)
				}
			})
	})
	if err != nil && context.Cause(ctx) == error(stuck) {
		return stuck
	}

	return err
}

// Send writes the output of `zfs send` with args to w. An error of w ends it and is
// returned unchanged. IO: no output for 5 minutes.
func Send(ctx context.Context, args []string, w io.Writer) error {
	return runUnlessStuck(ctx, "zfs send", func(ctx context.Context, t *time.Timer) error {
		return run.OutOf(ctx, pausing{w: w, t: t}, append([]string{string(ZFS), "send"}, args...)...)
	})
}

// Receive passes r to `zfs receive` with args. An error of r ends it and is returned
// unchanged. IO: no input was accepted for 5 minutes. Damaged: r continues after the end
// of the stream.
func Receive(ctx context.Context, args []string, r io.Reader) error {
	err := runUnlessStuck(ctx, "zfs receive", func(ctx context.Context, t *time.Timer) error {
		return run.Into(ctx, pausing{r: r, t: t}, append([]string{string(ZFS), "receive"}, args...)...)
	})
	if errors.Is(err, run.ErrMore) {
		return errs.New(errs.Damaged, "zfs receive", "", "unexpected data after the end of the stream")
	}
	return err
}

// pausing stops the timer while its reader or writer works, whose time does not count.
type pausing struct {
	r io.Reader
	w io.Writer
	t *time.Timer
}

func (p pausing) Read(b []byte) (int, error) {
	p.t.Stop()
	defer p.t.Reset(copyLimit)
	return p.r.Read(b)
}

func (p pausing) Write(b []byte) (int, error) {
	p.t.Stop()
	defer p.t.Reset(copyLimit)
	return p.w.Write(b)
}

// runUnlessStuck calls fn, which runs a program, and ends it if there is no progress for copyLimit.
func runUnlessStuck(ctx context.Context, op string, fn func(context.Context, *time.Timer) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stuck := errs.New(errs.IO, op, "", "no data was transferred for %v", copyLimit).WithHint("%s", suspendedHint)
	timer := time.AfterFunc(copyLimit, func() { cancel(stuck) })
	defer timer.Stop()
	_, err := runBounded(ctx, 1<<62, op, func(ctx context.Context) ([]byte, error) { return nil, fn(ctx, timer) })
	if err != nil && context.Cause(ctx) == error(stuck) {
		return stuck
	}
	return err
}
