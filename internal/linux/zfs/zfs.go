// Package zfs runs the programs zfs and zpool, and finds the block devices of
// zvols. It is the only place that reads what these programs print: their output
// by columns (-Hp), their complaints by one table, which turns them into errors
// with a kind, a hint and a [Reason]. It knows nothing of Pando's pools.
//
// What a version of OpenZFS can do is found by trying, or by the features that
// the pool lists, not by comparing versions; see [Features].
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

// How long a program may take. A pool that has lost its disks lets programs wait
// in the kernel for ever, where nothing can kill them.
var (
	changeLimit = 5 * time.Minute
	readLimit   = time.Minute
	killWait    = 5 * time.Second // for a program that was told to die
)

const suspendedHint = "check with `zpool status` whether the pool is suspended"

var runs atomic.Int64

// Runs is how many programs this process has run so far: what an operation
// costs is mostly that.
func Runs() int64 { return runs.Load() }

// Do runs a command that changes something. Arguments go to the program as they
// are: names must have been checked (CheckDataset). It takes at most 5 minutes.
// Kinds of errors are those of the table in errors.go; Canceled if ctx ends: the
// change may have happened all the same.
func (t Tool) Do(ctx context.Context, args ...string) error {
	_, err := t.runTool(ctx, changeLimit, args)
	return err
}

// Output runs a command that only looks, and returns what it prints. It takes at
// most one minute.
func (t Tool) Output(ctx context.Context, args ...string) ([]byte, error) {
	return t.runTool(ctx, readLimit, args)
}

// Rows runs a command that only looks and prints rows of a number of columns with
// tabs between them, which needs -H or -Hp among args. Names of datasets may hold
// spaces. Damaged if a row has another number of columns.
func (t Tool) Rows(ctx context.Context, columns int, args ...string) ([][]string, error) {
	out, err := t.Output(ctx, args...)
	if err != nil {
		return nil, err
	}
	return parseRows(t.opName(args), string(out), columns)
}

// TextRows is Rows whose last column is text, which may hold tabs and line
// breaks itself: a user property.
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
		case len(rows) > 0: // the text of the row before goes on
			rows[len(rows)-1][columns-1] += "\n" + line
		default:
			return nil, errs.New(errs.Damaged, op, "", "unexpected output: a row has %d columns instead of %d: %q",
				len(row), columns, line)
		}
	}

	return rows, nil
}

// Number is a number of bytes or a date, as -p prints it; "-" and "none" are 0.
// Damaged if it is none.
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

// opName is what errors say was being done: "zfs destroy".
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

// runBounded runs fn, which runs a program, and comes back after limit even if the
// program cannot be killed.
func runBounded(
	ctx context.Context, limit time.Duration, op string, fn func(context.Context) ([]byte, error),
) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, errs.Wrap(op, "", err)
	}

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

	var r result
	select {
	case r = <-done:
	case <-limited.Done():
		// It is being killed. Once it is dead, it changes nothing any more.
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

// Available reports whether ZFS can be used here at all: NotFound never,
// Unsupported, with what to do, if the programs are not installed or the modules
// are not loaded. It runs nothing.
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

// PoolState is what the kernel says of an imported zpool: "ONLINE", "DEGRADED",
// "SUSPENDED". It runs no program. Unsupported if the modules are not loaded,
// NotFound if the zpool is not imported, each with what to do.
func PoolState(pool string) (string, error) {
	b, err := os.ReadFile(filepath.Join("/proc/spl/kstat/zfs", pool, "state"))
	if err == nil {
		return strings.TrimSpace(string(b)), nil
	}

	if _, err := os.Stat("/proc/spl/kstat/zfs"); err != nil {
		return "", errs.New(errs.Unsupported, "open zpool", pool, "the ZFS kernel module is not loaded").WithHint(modulesHint)
	}

	if errors.Is(err, os.ErrNotExist) {
		return "", errs.New(errs.NotFound, "open zpool", pool,
			"it is not imported").
			WithHint("import it with `zpool import %s`, or list the imported pools with `zpool list`", pool)
	}

	return "", errs.Wrap("open zpool", pool, err)
}

// Version is what the loaded module calls itself ("2.3.2-2"), for people; "" if
// there is none.
func Version() string {
	b, err := os.ReadFile("/sys/module/zfs/version")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// Features are the features that zpool knows of a pool, by name, each
// "disabled", "enabled" or "active". What is not in it this version does not have.
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

// Patiently calls fn until it does not return InUse, for up to limit: something
// else may hold a dataset for a moment, as the probes of udev do.
func Patiently(ctx context.Context, limit time.Duration, fn func() error) error {
	deadline := time.Now().Add(limit)
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, 200*time.Millisecond) {
		err := fn()
		if !errs.Is(err, errs.InUse) || time.Now().Add(wait).After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (%w)", err, ctx.Err())
		case <-time.After(wait):
		}
	}
}

// copyLimit is how long a stream may stand still.
var copyLimit = 5 * time.Minute

// Copy sends a snapshot, with args of `zfs send`, into `zfs receive` with others,
// here. progress, if not nil, is called with the bytes that have gone through. IO
// if nothing has for 5 minutes.
func Copy(ctx context.Context, send, receive []string, progress func(n int64)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stuck := errs.New(errs.IO, "zfs send", "", "no data was sent for %v", copyLimit).WithHint("%s", suspendedHint)
	timer := time.AfterFunc(copyLimit, func() { cancel(stuck) })
	defer timer.Stop()
	runs.Add(1) // bounded counts the other
	const op = "zfs send"

	// Not bounded by time: what the kernel does at the end of a stream ends too.
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

// Send writes what `zfs send` with args prints to w. An error of w ends it and is
// returned as it is. IO if nothing has come for 5 minutes.
func Send(ctx context.Context, args []string, w io.Writer) error {
	return runUnlessStuck(ctx, "zfs send", func(ctx context.Context, t *time.Timer) error {
		return run.OutOf(ctx, pausing{w: w, t: t}, append([]string{string(ZFS), "send"}, args...)...)
	})
}

// Receive gives r to `zfs receive` with args. An error of r ends it and is returned
// as it is. IO if nothing has been taken for 5 minutes, Damaged if r goes on after
// the end of the stream.
func Receive(ctx context.Context, args []string, r io.Reader) error {
	err := runUnlessStuck(ctx, "zfs receive", func(ctx context.Context, t *time.Timer) error {
		return run.Into(ctx, pausing{r: r, t: t}, append([]string{string(ZFS), "receive"}, args...)...)
	})
	if errors.Is(err, run.ErrMore) {
		return errs.New(errs.Damaged, "zfs receive", "", "unexpected data after the end of the stream")
	}
	return err
}

// pausing does not count the time that others take.
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

// runUnlessStuck runs fn, which runs a program, until that has stood still for too long.
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
