package engine

import (
	"context"
	"errors"
	"os"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/linux/run"
)

// RunRequest says which program to run in a clone of what.
type RunRequest struct {
	From    ref.Ref
	Name    ref.Name      // of the volume; zero: generated
	Keep    bool          // keep the volume after the program has ended, unmounted
	May     Rights        // of the mount
	Overlay bool          // as in CloneRequest
	Labels  driver.Labels // of the volume
	Sandbox Sandbox

	KeepOnFailure bool          // keep the volume if the program fails, or if this process is killed
	Publish       ref.Name      // golden that gets the volume as its next generation if the program exits with 0
	Diff          bool          // compare the volume with what it was cloned from, after the program has ended
	Timeout       time.Duration // end the program with SIGTERM, and 10 s later with SIGKILL; 0: none

	GoldenDecides bool // as in CloneRequest
	Empty         bool // run it in an empty volume instead of a clone of From

	// Do is called with the mounted clone, instead of running Command.
	Do func(ctx context.Context, vol Info) error

	hide *content.Hidden // the mount of the clone, if only its sandbox sees that

	// publish is called with the clone once it is unmounted, if Do succeeded; it is not destroyed before.
	publish func(context.Context, catalog.Row) error

	Command []string
	Env     []string // of the program, in addition to PANDO_VOLUME, PANDO_MOUNT and PWD; it inherits no others
	Signals run.Signals
	Suspend func() // of a program in a sandbox: stops this process until it is continued, on SIGTSTP; nil: never
	Stdin   *os.File
	Stdout  *os.File
	Stderr  *os.File
	Tracker *progress.Tracker
}

// RunResult says how a run ended.
type RunResult struct {
	Volume     string
	Mountpoint string // of the volume, while the program ran
	Ran        bool   // the program ran to its end
	Exit       int    // exit status of the program; 128 + signal if a signal ended it, 124 if the timeout did
	Kept       bool   // the volume was kept, as requested

	Published *Published  // with Publish
	Diff      *Difference // with Diff

	// Held is an InUse error that names the processes that still use the volume, which
	// therefore stays mounted. Unless Keep was set, a later command destroys the volume
	// when it is no longer in use.
	Held error
}

// Run clones From, runs a program in the mounted clone, and destroys the clone.
// Without Sandbox, the program gets the mount point as its working directory and in PANDO_MOUNT, and
// the name of the volume in PANDO_VOLUME. Run passes on the signals of q.Signals, and
// destroys the clone once the program has ended. If this process is killed, the next
// command destroys the clone, unless Keep is set. It is not an error if processes that
// the program left behind still use the clone: see RunResult.Held. An error after the
// program has run (RunResult.Ran) is about the clone. Run returns the kinds of Clone, and of Publish and Diff if they
// are wanted; NotFound if there is no such program; Unsupported if this host cannot set a limit; and with Keep, NoSpace
// and IO as Umount.
//
// In a Sandbox, every process that the program has started is dead before the clone is compared, published or
// destroyed, and dies with this process. If the clone cannot be published, it is kept with KeepOnFailure.
func (e *Engine) Run(ctx context.Context, q RunRequest) (RunResult, error) {
	ctx, end := e.ledger.Begin(ctx)
	defer end()

	if q.Sandbox.On() && q.Do == nil && content.CanMount() {
		q.hide = &content.Hidden{}
		defer q.hide.Close()
	}

	do, err := e.whatToDo(q)
	if err != nil {
		return RunResult{}, err
	}

	if q.Name.IsZero() {
		q.Name = ref.MustName("run-" + string(e.newIdentity("").ID[:10]))
	}

	infos, err := e.Clone(ctx, CloneRequest{From: q.From, Name: q.Name, Mount: true, May: q.May,
		Ephemeral: !q.Keep && !q.KeepOnFailure, Overlay: q.Overlay, GoldenDecides: q.GoldenDecides, Labels: q.Labels,
		Tracker: q.Tracker, op: opRun, hide: q.hide, empty: q.Empty, inside: q.Do == nil && !q.Empty})
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
	stays := keep || q.KeepOnFailure && (runErr != nil || result.Exit != 0)
	lost := e.endHidden(context.WithoutCancel(ctx), q, stays, driver.ObjectID(vol.ID))
	if lost != nil {
		keep = keep || q.KeepOnFailure
		end := e.endLost(context.WithoutCancel(ctx), keep, &result, driver.ObjectID(vol.ID))
		return result, errors.Join(runErr, lost, end)
	}

	if result.Ran {
		runErr = e.useResult(ctx, q, vol, &result)
		keep = keep || q.KeepOnFailure && (runErr != nil || result.Exit != 0)
	}

	return result, errors.Join(runErr, e.endRun(context.WithoutCancel(ctx), keep, &result, driver.ObjectID(vol.ID)))
}

// useResult compares and publishes the clone after the program has ended, as requested.
func (e *Engine) useResult(ctx context.Context, q RunRequest, vol Info, r *RunResult) error {
	if q.publish != nil {
		row, err := e.umountForResult(ctx, driver.ObjectID(vol.ID))
		if err != nil {
			return err
		}
		return q.publish(ctx, row)
	}

	name := ref.MustName(vol.Name)
	if q.Diff && vol.Origin != "" {
		origin, err := ref.Parse(opRun, vol.Origin)
		if err != nil {
			return err
		}
		d, err := e.Diff(ctx, DiffRequest{A: origin, B: ref.Ref{Name: vol.Name}, Tracker: q.Tracker})
		if err != nil {
			return err
		}
		r.Diff = &d
	}

	if q.Publish.IsZero() || r.Exit != 0 {
		return nil
	}

	p, err := e.Publish(ctx, PublishRequest{Golden: q.Publish, Volume: name, Tracker: q.Tracker})
	if err != nil {
		return err
	}
	r.Published = &p
	return nil
}

// whatToDo returns what to do in the clone, and with which exit status that ends. Invalid, NotFound.
func (e *Engine) whatToDo(q RunRequest) (func(context.Context, Info) (int, error), error) {
	if err := q.Sandbox.Check(q.From.String()); err != nil {
		return nil, err
	}
	if q.Timeout < 0 {
		return nil, errs.New(errs.Invalid, opRun, q.From.String(), "the timeout must not be negative (got %s)", q.Timeout)
	}

	switch {
	case q.Do != nil:
		return func(ctx context.Context, vol Info) (int, error) { return 0, q.Do(ctx, vol) }, nil
	case len(q.Command) == 0:
		return nil, errNoCommand(q.From)
	case q.Sandbox.On() && (q.May.Dev || q.May.SUID):
		return nil, errs.New(errs.Invalid, opRun, q.From.String(), "a sandbox never honours device nodes and setuid bits").
			WithHint("remove %s and %s", errs.Param("dev"), errs.Param("suid"))
	case q.Sandbox.On():
		return func(ctx context.Context, vol Info) (int, error) { return e.runSandboxed(ctx, q, vol) }, nil
	}

	p, err := q.program()
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, vol Info) (int, error) { return e.runIn(ctx, p, vol) }, nil
}

// program returns the program to run outside of a sandbox. A path is a path inside the clone. A bare name is searched
// for as a shell would, in the PATH that the program gets, before anything is created. NotFound.
func (q RunRequest) program() (program, error) {
	path, err := findProgram(opRun, q.Command[0], q.Env)
	return program{op: opRun, path: path, args: q.Command, env: q.Env, signals: q.Signals,
		stdin: q.Stdin, stdout: q.Stdout, stderr: q.Stderr, timeout: q.Timeout}, err
}

// Plan checks a request, and returns what Run does with it once there is a volume: it runs the program in the volume,
// which is mounted, and returns the exit status. It is for callers who make the volume in another way. Invalid,
// NotFound, Unsupported (a sandbox needs the pool).
func (q RunRequest) Plan() (func(vol Info) (int, error), error) {
	ref := q.From.String()
	switch {
	case q.Sandbox.On():
		return nil, errs.New(errs.Unsupported, opRun, ref, "a sandbox needs the pool itself").
			WithHint("run it as root, for example with sudo")
	case len(q.Command) == 0:
		return nil, errNoCommand(q.From)
	case q.Timeout < 0:
		return nil, errs.New(errs.Invalid, opRun, ref, "the timeout must not be negative (got %s)", q.Timeout)
	}

	p, err := q.program()
	if err != nil {
		return nil, err
	}
	return func(vol Info) (int, error) { return p.runMounted(vol) }, nil
}

func errNoCommand(from ref.Ref) error {
	return errs.New(errs.Invalid, opRun, from.String(), "no command to run").
		WithHint("add a command: %s", errs.Run("run", from, "--", "COMMAND"))
}

// endHidden unmounts the clone of a run whose sandbox has ended, if only that has seen it; see Access.HiddenWriteBack.
// If something else uses it, its mount record stays. stays: it is not about to be destroyed.
func (e *Engine) endHidden(ctx context.Context, q RunRequest, stays bool, id driver.ObjectID) error {
	if !q.hide.Mounted() {
		return nil
	}

	row, att, exists, err := e.mountedRow(ctx, id)
	if err != nil || !exists {
		q.hide.Close()
		return err
	}

	if stays || q.Diff || !q.Publish.IsZero() {
		err := e.content.HiddenWriteBack(mayUseReserve(ctx), row, &att, q.hide)
		if err != nil || !q.hide.Mounted() {
			return errs.Wrap(opRun, row.Name, err)
		}
	}

	_, err = e.content.EndHidden(ctx, row, att, q.hide, stays)
	return errs.Wrap(opRun, row.Name, err)
}

// mountedRow reads the row and the mount record of an object.
func (e *Engine) mountedRow(
	ctx context.Context, id driver.ObjectID,
) (row catalog.Row, att catalog.MountRecord, exists bool, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if row, exists, err = tx.Object(id); err != nil {
			return err
		}
		att, _, err = tx.MountRecord(id)
		return err
	})
	return row, att, exists, err
}

// endLost is endRun of a run of whose volume data was lost, as its error says: a volume that is kept stays mounted.
func (e *Engine) endLost(ctx context.Context, keep bool, r *RunResult, id driver.ObjectID) error {
	if !keep {
		return e.endRun(ctx, false, r, id)
	}
	r.Kept = true
	return e.ledger.Unmark(ctx, id)
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
		_, err = e.umount(ctx, row.Name, true)
		if err != nil {
			e.ledger.UnmarkFailed(ctx, id, err)
		}
		if errs.Is(err, errs.InUse) {
			r.Held, err = err, nil
		}
		return err
	}

	err = e.destroyRow(ctx, row, att, has)
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
func (e *Engine) finishRun(ctx context.Context, row catalog.Row, att catalog.MountRecord, has bool) error {
	if err := e.removeGroup(ctx, string(row.ID)); err != nil {
		return err
	}

	// A mount that only the program had is gone with it, and so is the directory that was made for it.
	own := has && (att.Hidden() || row.UserXattr)
	gone := own && e.content.WaitHiddenGone(ctx, row, att)
	if gone {
		if err := e.content.RemoveTarget(ctx, row.Name, att); err != nil {
			return err
		}
	}

	if !row.Ephemeral {
		return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
			if gone {
				if err := tx.ForgetMount(row.ID); err != nil {
					return err
				}
			}
			return tx.Unmark(row.ID)
		})
	}
	err := e.destroyRow(ctx, row, att, has)
	if errs.Is(err, errs.InUse) {
		return e.destroyWhenFree(ctx, row.ID)
	}
	return err
}
