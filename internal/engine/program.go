package engine

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/run"
	"pando/internal/linux/sandbox"
	"pando/internal/linux/usermount"
)

// program is a program that runs in a volume, in the foreground.
type program struct {
	op      string // for errors
	path    string // of the program; a relative one begins in the volume
	args    []string
	env     []string // besides PANDO_VOLUME, PANDO_MOUNT and PWD
	signals run.Signals
	timeout time.Duration // 0: none

	stdin, stdout, stderr *os.File
}

// findProgram returns the path of a program: a name without a slash is searched for as a shell would. NotFound.
func findProgram(op, name string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	path, err := run.Find(name, env)
	if err != nil {
		return "", errs.New(errs.NotFound, op, name, "no such program")
	}
	return path, nil
}

// runIn runs a program in a volume, and returns its exit status as a shell would. The volume is mounted, or is a
// user's overlay, which the program has mounted in a namespace of its own.
func (e *Engine) runIn(ctx context.Context, p program, vol Info) (int, error) {
	row, err := e.rowOf(ctx, driver.ObjectID(vol.ID))
	if err != nil {
		return 0, err
	}

	if row.UserXattr {
		return e.runInside(ctx, p, p.envIn(vol), row, vol.Mountpoint)
	}
	return p.runMounted(vol)
}

// envIn returns the environment of the program in a volume.
func (p program) envIn(vol Info) []string {
	return append(slices.Clone(p.env), "PANDO_VOLUME="+vol.Name, "PANDO_MOUNT="+vol.Mountpoint, "PWD="+vol.Mountpoint)
}

// runMounted runs the program in a volume that is mounted, and returns its exit status as a shell would.
func (p program) runMounted(vol Info) (int, error) {
	cmd := &exec.Cmd{
		Path: p.path, Args: p.args, Dir: vol.Mountpoint, Env: p.envIn(vol), Stdin: p.stdin, Stdout: p.stdout,
		Stderr: p.stderr,
	}
	signals, timedOut := run.WithTimeout(p.signals, p.timeout, timeoutGrace)
	exit, err := run.Foreground(cmd, signals)
	if err == nil && timedOut() {
		return sandbox.ExitTimedOut, nil
	}
	return exit, errs.Wrap(p.op, p.args[0], err)
}

// runInside runs a program that has a user's overlay mounted at a directory, in namespaces of its own: of users,
// mounts, processes, IPC and host names. Besides the mount it sees what this process does. When it ends, or this
// process is killed, the kernel ends all processes that it has started.
func (e *Engine) runInside(ctx context.Context, p program, env []string, row catalog.Row, at string) (int, error) {
	if err := usermount.Forbidden(p.op, row.Name); err != nil {
		return 0, err
	}

	layers, err := e.content.UserLayers(ctx, row.Identity)
	if err != nil {
		return 0, err
	}

	ids, err := userNamespace(opRun, "")
	if err != nil {
		return 0, err
	}

	// Signals go to the program, and what it does with them decides when the run ends.
	r, err := sandbox.Run(context.WithoutCancel(ctx), sandbox.Spec{
		Command: p.args, Env: env, Dir: at, HostNet: true, UserNS: ids,
		Mounts: []sandbox.Mount{
			{Kind: sandbox.Overlay, Target: at, Options: layers.MountOptions()},
			{Kind: sandbox.Proc, Target: "/proc"},
		},
	}, sandbox.Options{Stdin: p.stdin, Stdout: p.stdout, Stderr: p.stderr, Signals: p.signals,
		Timeout: p.timeout, Grace: timeoutGrace})
	return r.Exit, errs.Wrap(p.op, p.args[0], err)
}

// rowOf returns the row of an object. NotFound.
func (e *Engine) rowOf(ctx context.Context, id driver.ObjectID) (row catalog.Row, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		var ok bool
		if row, ok, err = tx.Object(id); err == nil && !ok {
			err = errs.New(errs.NotFound, "look up", string(id), "it has just been destroyed")
		}
		return err
	})
	return row, err
}
