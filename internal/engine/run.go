package engine

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"

	"pando/internal/catalog"
	"pando/internal/errs"
	"pando/internal/progress"
	"pando/internal/ref"
	"pando/internal/run"
)

// RunRequest says what to run where.
type RunRequest struct {
	From    ref.Ref
	Name    string // of the volume; "": one is made up
	Keep    bool   // leave the volume, unmounted, when the program has ended
	Command []string
	Env     []string // of the program, besides PANDO_VOLUME and PANDO_MOUNT; nil: this process's
	Stdin   *os.File
	Stdout  *os.File
	Stderr  *os.File
	Tracker *progress.Tracker
}

// RunResult says how a run ended.
type RunResult struct {
	Volume string
	Exit   int // of the program; 128 + signal if one ended it
	Kept   bool
}

// Run clones From, runs a program in the mounted clone, and destroys the clone.
// The program gets the mount point as its working directory and in PANDO_MOUNT,
// the name of the volume in PANDO_VOLUME. Signals that ask this process to end
// are passed on, and the clone is destroyed once the program has ended. If this
// process is killed, the next command destroys the clone. Kinds as Clone;
// NotFound if there is no such program; InUse if something that the program left
// behind still uses the clone, which then stays.
func (e *Engine) Run(ctx context.Context, q RunRequest) (RunResult, error) {
	if len(q.Command) == 0 {
		return RunResult{}, errs.New(errs.Invalid, opRun, q.From.String(), "no command to run").WithHint("pando run %s -- COMMAND", q.From)
	}
	// A path is the program's inside the clone; a bare name is looked for as a
	// shell would, before anything is made.
	path := q.Command[0]
	if !strings.Contains(path, "/") {
		var err error
		if path, err = exec.LookPath(path); err != nil {
			return RunResult{}, errs.New(errs.NotFound, opRun, q.Command[0], "no such program")
		}
	}
	if q.Name == "" {
		q.Name = "run-" + string(e.identity("").ID[:10])
	}
	infos, err := e.Clone(ctx, CloneRequest{From: q.From, Name: q.Name, Mount: true, Ephemeral: !q.Keep, Tracker: q.Tracker, op: opRun})
	if err != nil {
		return RunResult{}, err
	}
	vol := infos[0]
	result := RunResult{Volume: vol.Name}
	exit, runErr := runIn(q, path, vol)
	result.Exit = exit
	ctx = context.WithoutCancel(ctx)
	var row catalog.Row
	var att catalog.Attached
	var has bool
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if row, err = resolveVolume(tx, opRun, vol.Name); err != nil {
			return err
		}
		att, has, err = tx.Attached(row.ID)
		return err
	}); err != nil {
		return result, errors.Join(runErr, err)
	}
	if q.Keep {
		result.Kept = true
		err := e.unmark(ctx, row.ID)
		if err == nil {
			_, err = e.Umount(ctx, vol.Name)
		}
		return result, errors.Join(runErr, err)
	}
	if err := e.destroyRow(ctx, row, att, has); err != nil {
		if errs.Is(err, errs.InUse) { // it stays, as an ordinary volume
			_ = e.unmark(ctx, row.ID)
			result.Kept = true
		} // else the next command destroys it
		return result, errors.Join(runErr, errs.Wrap("destroy", vol.Name, err))
	}
	return result, runErr
}

// runIn runs the program and returns its exit status as a shell would.
func runIn(q RunRequest, path string, vol Info) (int, error) {
	env := q.Env
	if env == nil {
		env = os.Environ()
	}
	cmd := &exec.Cmd{
		Path: path, Args: q.Command, Dir: vol.Mountpoint, Stdin: q.Stdin, Stdout: q.Stdout, Stderr: q.Stderr,
		Env: append(slices.Clone(env), "PANDO_VOLUME="+vol.Name, "PANDO_MOUNT="+vol.Mountpoint, "PWD="+vol.Mountpoint),
	}
	exit, err := run.Foreground(cmd)
	if err != nil {
		return exit, errs.Wrap(opRun, q.Command[0], err)
	}
	return exit, nil
}
