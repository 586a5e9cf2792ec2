package engine

import (
	"context"
	"errors"
	"os"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/ledger"
	"pando/internal/linux/run"
	"pando/internal/linux/sandbox"
)

const opShell = ledger.OpShell

// ShellRequest says which program to run in an existing volume.
type ShellRequest struct {
	Volume  ref.Name
	Command []string
	Sandbox Sandbox
	Timeout time.Duration // as in RunRequest
	Env     []string      // of the program, in addition to PANDO_VOLUME, PANDO_MOUNT and PWD; it inherits no others
	Signals run.Signals   // nil: in a sandbox, the end of the context ends the program
	Stdin   *os.File
	Stdout  *os.File
	Stderr  *os.File
}

// ShellResult says how a shell ended.
type ShellResult struct {
	Volume     string
	Mountpoint string
	Ran        bool // the program ran to its end
	Exit       int  // as in RunResult
	Stays      bool // the volume was mounted before, and stays mounted

	// Held is an InUse error that names the processes that still use the volume, which therefore stays mounted.
	Held error
}

// Shell runs a program in a volume. A volume that is not mounted is mounted for that time. The overlay of a user is
// mounted in a namespace that only the program is in, so a second Shell of it is refused, and so is everything else
// that needs the volume, until it ends. If this process is killed, the program in such a namespace is killed as well;
// another one goes on, and the volume stays mounted. A program in a Sandbox ends with this process, and so does all
// that it has started. NotFound (the volume, or the program), InUse, Invalid, Permission, Unsupported, and with
// Ran NoSpace and IO as Umount.
func (e *Engine) Shell(ctx context.Context, q ShellRequest) (ShellResult, error) {
	ctx, end := e.ledger.Begin(ctx)
	defer end()

	name := q.Volume.String()
	if len(q.Command) == 0 {
		return ShellResult{}, errs.New(errs.Invalid, opShell, name, "no command to run")
	}

	p, err := q.program()
	if err != nil {
		return ShellResult{}, err
	}

	var row catalog.Row
	if err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		row, err = tx.ResolveVolume(opShell, name)
		return err
	}); err != nil {
		return ShellResult{}, err
	}

	in := runner(func(ctx context.Context, vol Info) (int, error) { return e.runIn(ctx, p, vol) })
	if q.Sandbox.On() {
		in = func(ctx context.Context, vol Info) (int, error) { return e.runSandboxed(ctx, q.sandboxed(), vol) }
	}
	if row.UserXattr {
		return e.shellInside(ctx, q.Volume, in)
	}
	return e.shellMounted(ctx, q.Volume, row, in)
}

// program checks the request, and returns the program. One in a sandbox is searched for there. Invalid, NotFound.
func (q ShellRequest) program() (program, error) {
	p := program{op: opShell, args: q.Command, env: q.Env, signals: q.Signals, stdin: q.Stdin, stdout: q.Stdout,
		stderr: q.Stderr, timeout: q.Timeout}
	if err := q.Sandbox.Check(q.Volume.String()); err != nil || q.Sandbox.On() {
		return p, err
	}

	var err error
	p.path, err = findProgram(opShell, q.Command[0], q.Env)
	return p, err
}

// sandboxed is the request as that of a run.
func (q ShellRequest) sandboxed() RunRequest {
	return RunRequest{Command: q.Command, Env: q.Env, Signals: q.Signals, Sandbox: q.Sandbox, Timeout: q.Timeout,
		Stdin: q.Stdin, Stdout: q.Stdout, Stderr: q.Stderr}
}

// Plan checks a request, and returns how to run its program in the volume, which is mounted, for callers who mount it
// in another way. The sandbox of a user without privileges needs only that, without limits; that of root needs the
// pool. Invalid, NotFound, Unsupported.
func (q ShellRequest) Plan() (func(context.Context, Info) (int, error), error) {
	name := q.Volume.String()
	if len(q.Command) == 0 {
		return nil, errs.New(errs.Invalid, opShell, name, "no command to run")
	}
	p, err := q.program()
	switch {
	case err != nil:
		return nil, err
	case !q.Sandbox.On():
		return func(_ context.Context, vol Info) (int, error) { return p.runMounted(vol) }, nil
	case content.CanMount():
		return nil, errs.New(errs.Unsupported, opShell, name, "as root, a sandbox needs the pool itself").
			WithHint("name the pool in place of its service, or run it as another user")
	case q.Sandbox.Limits.Any():
		return nil, errs.New(errs.Unsupported, opShell, name, "limits of a sandbox need the pool itself").
			WithHint("remove %s, %s and %s", errs.Param("memory"), errs.Param("cpus"), errs.Param("pids"))
	}
	return q.runUnprivileged, nil
}

// runUnprivileged runs the program in the sandbox of a user without privileges, in a volume that is mounted.
func (q ShellRequest) runUnprivileged(ctx context.Context, vol Info) (int, error) {
	spec := q.Sandbox.spec(q.sandboxed(), vol, vol.Mountpoint, "")
	if err := q.Sandbox.inUserNamespace(&spec); err != nil {
		return 126, err
	}
	r, err := sandbox.Run(ctx, spec, sandbox.Options{Stdin: q.Stdin, Stdout: q.Stdout, Stderr: q.Stderr,
		Signals: q.Signals, Timeout: q.Timeout, Grace: timeoutGrace})
	return r.Exit, err
}

// runner runs a program in a volume that is mounted, and returns its exit status.
type runner func(ctx context.Context, vol Info) (int, error)

// shellMounted runs a program in a volume that is mounted where all can see it.
func (e *Engine) shellMounted(ctx context.Context, name ref.Name, row catalog.Row, in runner) (ShellResult, error) {
	var r ShellResult
	if row.FS == driver.None {
		return r, errs.New(errs.Unsupported, opShell, name.String(), "a raw volume has no files").
			WithHint("mount it as a block device with %s", errs.Run("mount", name))
	}

	// Mount it, unless it is mounted already.
	var att catalog.MountRecord
	var has bool
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		att, has, err = tx.MountRecord(row.ID)
		return err
	}); err != nil {
		return r, err
	}

	vol := volumeInfo(row, e.caps.Name, att.Mountpoint)
	r.Stays = has && e.content.OwnMountState(row, att) == content.Mounted
	if !r.Stays {
		var err error
		if vol, err = e.Mount(ctx, MountRequest{Volume: name}); err != nil {
			return r, err
		}
	}

	r.Volume, r.Mountpoint = vol.Name, vol.Mountpoint
	var err error
	r.Exit, err = in(ctx, vol)
	r.Ran = err == nil
	if r.Stays {
		return r, err
	}

	_, uerr := e.umount(context.WithoutCancel(ctx), vol.Name, false)
	if errs.Is(uerr, errs.InUse) {
		r.Held, uerr = uerr, nil
	}
	return r, errors.Join(err, uerr)
}

// shellInside runs a program that has a user's overlay mounted in a namespace of its own. The mark of the operation
// stays until the program has ended: nobody else may use the upper layer.
func (e *Engine) shellInside(ctx context.Context, name ref.Name, in runner) (r ShellResult, err error) {
	var row catalog.Row
	var att catalog.MountRecord
	t := e.content.Inside(name.String())

	// Mark the work, and record the mount before it is made: the kernel knows whether it is there.
	err = e.ledger.Claim(ctx, opShell, true, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		if row, err = tx.ResolveVolume(opShell, name.String()); err != nil {
			return nil, err
		}

		if err := e.content.CheckOverlayUser(opShell, name.String(), row.Identity); err != nil {
			return nil, err
		}

		l, err := e.content.FindLive(tx, row, FreezeIfNeeded)
		if err != nil {
			return nil, err
		}
		b, err := tx.BlockingMarks(row.ID, "", true)
		if err != nil {
			return nil, err
		}
		if l.InUse() && len(b) == 0 { // else the claim says who works on it
			return nil, e.content.HeldError(ctx, reasonFor(opShell), row, l.Record)
		}

		return []catalog.Mark{{ID: row.ID, Op: opShell, Mountpoint: t.Path}}, nil
	})
	if err != nil {
		return r, err
	}

	if att, err = e.content.Mount(ctx, row, t); err == nil {
		err = e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
			if err := tx.ForgetMount(row.ID); err != nil { // of a shell that ended without us
				return err
			}
			if err := tx.RecordMount(att); err != nil {
				return err
			}
			return tx.SetUsed(row.ID, time.Now())
		})
	}
	if err != nil {
		_ = e.content.RemoveTarget(ctx, row.Name, att)
		_ = e.ledger.Unmark(ctx, row.ID)
		return r, err
	}

	// Run the program, and undo the mount record.
	r.Volume, r.Mountpoint = row.Name, att.Mountpoint
	if err = ctx.Err(); err == nil {
		r.Exit, err = in(ctx, volumeInfo(row, e.caps.Name, att.Mountpoint))
	}
	r.Ran = err == nil

	uerr := e.endShell(context.WithoutCancel(ctx), row, att)
	if errs.Is(uerr, errs.InUse) {
		r.Held, uerr = uerr, nil
	}
	return r, errors.Join(err, uerr)
}

// endShell removes the mount record of a program that has ended, and the mark. InUse: processes that it has left use
// the volume; the record stays then, and the kernel decides.
func (e *Engine) endShell(ctx context.Context, row catalog.Row, att catalog.MountRecord) error {
	err := e.content.Unmount(ctx, reasonFor(opShell), row, att, true)
	if err != nil && !errs.Is(err, errs.InUse) {
		return err
	}
	return errors.Join(err, e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		if err == nil {
			if err := tx.ForgetMount(row.ID); err != nil {
				return err
			}
		}
		if err := tx.SetUsed(row.ID, time.Now()); err != nil {
			return err
		}
		return tx.Unmark(row.ID)
	}))
}
