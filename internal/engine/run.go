package engine

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/run"
)

// RunRequest says which program to run in a clone of what.
type RunRequest struct {
	From    ref.Ref
	Object  string        // ID of the object that From must name, as in CloneRequest
	Name    ref.Name      // name of the volume; zero: generated
	Keep    bool          // whether the volume is kept after the program has ended, unmounted
	May     Rights        // what the mount allows
	Overlay bool          // whether the volume is an overlay, as in CloneRequest
	Labels  driver.Labels // labels of the volume

	GoldenDecides bool // whether the golden may make it an overlay, as in CloneRequest
	Empty         bool // whether the volume is empty instead of a clone of From

	Command []string
	Env     []string // environment of the program, in addition to PANDO_VOLUME, PANDO_MOUNT and PWD; it inherits no others
}

// Terminal is what a program in the foreground reads and writes, and the signals that it gets. nil: nothing.
type Terminal struct {
	Stdin, Stdout, Stderr *os.File
	Signals               run.Signals
}

// RunResult says how a run ended.
type RunResult struct {
	Volume     string
	Mountpoint string // of the volume, while the program ran
	Ran        bool   // the program ran to its end
	Exit       int    // exit status of the program; 128 + signal if a signal ended it
	Kept       bool   // the volume was kept, as requested

	// Held is an InUse error that names the processes that still use the volume, which
	// therefore stays mounted. Unless Keep was set, a later command destroys the volume
	// when it is no longer in use.
	Held error
}

// Run clones From, runs a program in the mounted clone, and destroys the clone.
// The program gets the mount point as its working directory and in PANDO_MOUNT, and
// the name of the volume in PANDO_VOLUME. Run passes on the signals of t, and
// destroys the clone once the program has ended. If this process is killed, the next
// command destroys the clone, unless Keep is set. It is not an error if processes that
// the program left behind still use the clone: see RunResult.Held. An error after the
// program has run (RunResult.Ran) is about the clone. Run returns the kinds of Clone;
// a StartError if the program cannot be started; and with Keep, NoSpace and IO as Umount.
func (e *Engine) Run(ctx context.Context, q RunRequest, t Terminal) (RunResult, error) {
	path, err := q.findProgram()
	if err != nil {
		return RunResult{}, err
	}
	return e.inClone(ctx, q, func(_ context.Context, vol api.Object) (int, error) { return runIn(q, path, t, vol) })
}

// RunFunc is Run of a function instead of a program: q has no Command. The errors of do are those of the function.
func (e *Engine) RunFunc(
	ctx context.Context, q RunRequest, do func(ctx context.Context, vol api.Object) error,
) (RunResult, error) {
	return e.inClone(ctx, q, func(ctx context.Context, vol api.Object) (int, error) { return 0, do(ctx, vol) })
}

// inClone makes a clone, does something in it, and destroys it. What is done has an exit status.
func (e *Engine) inClone(
	ctx context.Context, q RunRequest, do func(context.Context, api.Object) (int, error),
) (_ RunResult, err error) {
	ctx, end := e.ledger.Begin(ctx, opRun)
	defer end(&err)

	if q.Name.IsZero() {
		q.Name = ref.MustName("run-" + string(driver.NewID()[:10]))
	}

	clone := cloning{e: e, op: opRun, empty: q.Empty, CloneRequest: CloneRequest{
		From: q.From, Object: q.Object, Name: q.Name, Mount: true, May: q.May, Ephemeral: !q.Keep, Overlay: q.Overlay,
		GoldenDecides: q.GoldenDecides, Labels: q.Labels,
	}}
	infos, err := clone.clone(ctx)
	if err != nil {
		return RunResult{}, err
	}

	// Run the program in the clone, then destroy the clone.
	vol := infos[0]
	result := RunResult{Volume: vol.Name, Mountpoint: vol.Mountpoint}
	runErr := ctx.Err() // a signal that arrived before the program started
	keep := q.Keep && runErr == nil
	if runErr == nil {
		result.Exit, runErr = do(ctx, vol)
	}

	result.Ran = runErr == nil
	return result, errors.Join(runErr, e.endRun(context.WithoutCancel(ctx), keep, &result, driver.ObjectID(vol.ID)))
}

// findProgram returns the path of the program. A path is a path inside the clone. A bare name is searched as a shell
// would, in the PATH that the program gets, before anything is created. Invalid, NotFound.
func (q RunRequest) findProgram() (string, error) {
	if len(q.Command) == 0 {
		return "", errs.New(errs.Invalid, opRun, q.From.String(), "no command to run").
			WithHint("add a command: %s", errs.Run("run", q.From, "--", "COMMAND"))
	}

	name := q.Command[0]
	if strings.Contains(name, "/") {
		return name, nil
	}
	path, err := run.Find(name, q.Env)
	if err != nil {
		return "", &StartError{errs.New(errs.NotFound, opRun, name, "no such program")}
	}
	return path, nil
}

// endRun unmounts the volume of a run that has ended and, unless keep is set, destroys
// it.
func (e *Engine) endRun(ctx context.Context, keep bool, r *RunResult, id driver.ObjectID) error {
	var row catalog.Row
	var att catalog.MountRecord
	var exists, has bool
	err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if row, exists, err = tx.Object(id); err != nil {
			return err
		}
		att, has, err = tx.MountRecord(id)
		return err
	})

	switch {
	case err != nil:
		return err
	case !exists: // the pool was removed by force
		return nil
	case keep:
		r.Kept = true
		if err := e.ledger.Unmark(ctx, id); err != nil {
			return err
		}
		if _, err = e.umount(ctx, row.Name, false); errs.Is(err, errs.InUse) {
			r.Held, err = err, nil
		}
		return err
	}

	err = e.destroyRow(ctx, row, att, has, "its command has ended")
	if errs.Is(err, errs.InUse) {
		r.Held = err
		return e.destroyWhenFree(ctx, id)
	}

	return errs.Wrap("destroy", row.Name, err) // the mark stays, and the next command destroys it
}

// destroyWhenFree leaves a volume that is in use to later commands: from now on it is a
// volume like any other, but expired. Its mark is of this process, or of an orphan that
// this process has locked.
func (e *Engine) destroyWhenFree(ctx context.Context, id driver.ObjectID) error {
	if err := e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		if err := tx.SetExpires(id, time.Now()); err != nil {
			return err
		}
		return tx.Unmark(id)
	}); err != nil {
		return err
	}
	// Write it to the identity, or a rebuild of the catalogue would keep the volume.
	_ = e.matchIdentity(ctx, id)
	return nil
}

// finishRun ends a run whose process was killed. It leaves a volume alone that was to be kept.
func (w work) finishRun(ctx context.Context, row catalog.Row, att catalog.MountRecord, has bool) error {
	e := w.e
	if !row.Ephemeral {
		return e.ledger.Unmark(ctx, row.ID)
	}
	err := e.destroyRow(ctx, row, att, has, "its command has ended")
	if errs.Is(err, errs.InUse) {
		return e.destroyWhenFree(ctx, row.ID)
	}
	return err
}

// runIn runs the program and returns its exit status as a shell would.
func runIn(q RunRequest, path string, t Terminal, vol api.Object) (int, error) {
	cmd := &exec.Cmd{
		Path: path, Args: q.Command, Dir: vol.Mountpoint, Stdin: t.Stdin, Stdout: t.Stdout, Stderr: t.Stderr,
		Env: append(slices.Clone(q.Env), "PANDO_VOLUME="+vol.Name, "PANDO_MOUNT="+vol.Mountpoint, "PWD="+vol.Mountpoint),
	}
	exit, err := run.Foreground(cmd, t.Signals)
	if err != nil {
		return exit, startError(q.Command[0], err)
	}
	return exit, nil
}

// StartError says why the program of a run could not be started: NotFound, or the kind of what the kernel said.
type StartError struct{ Err *errs.Error }

// Error returns the text of the cause.
func (e *StartError) Error() string { return e.Err.Error() }

// Unwrap returns the error with its kind.
func (e *StartError) Unwrap() error { return e.Err }

// startError makes an error of starting a program a StartError.
func startError(program string, err error) error {
	var known *errs.Error
	if errors.As(errs.Wrap(opRun, program, err), &known) {
		return &StartError{known}
	}
	return err
}
