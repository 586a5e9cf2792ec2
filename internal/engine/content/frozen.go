package content

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/waiting"
	"pando/internal/engine/catalog"
	"pando/internal/linux/freeze"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

const (
	// freezeWait is how long a command waits to freeze a volume that others have frozen. Each keeps it frozen for some
	// milliseconds, and there may be many.
	freezeWait = time.Minute

	// foreignWait is how long it waits if no pando process has frozen it.
	foreignWait = 2 * time.Second

	// extentTime is the time that a copy may take for each extent, several times what was measured.
	extentTime = 200 * time.Microsecond

	// freezeTries is how often a copy is made again whose filesystem was thawed too early.
	freezeTries = 3
)

// Freezes is the record of the operations that freeze the volume to be copied.
type Freezes interface {
	// Note records that this copy may freeze the volume from here on.
	Note(ctx context.Context) error

	// Processes returns the processes whose copies may have frozen it, for users.
	Processes(ctx context.Context) []waiting.Process

	// CleanUp thaws filesystems that dead processes may have left frozen, and reports whether another pando process, dead
	// or alive, may have frozen the volume.
	CleanUp(ctx context.Context) (ours bool, err error)
}

// lockFreeze keeps other processes from freezing the same volume: the kernel lets only one freeze a filesystem, and a
// thaw by any of them thaws it for all. The lock is a byte of one file, chosen by the ID, and ends with the process.
func (acc *Access) lockFreeze(ctx context.Context, row catalog.Row) (unlock func(), err error) {
	return acc.lockByte(ctx, byteLock{
		op: "freeze", ref: row.Name, file: "freezes", id: row.ID, what: "the right to freeze " + row.Name, limit: freezeWait})
}

// frozen is a mounted volume that is frozen while it is copied.
type frozen struct {
	Live
	root   *os.File // of its filesystem
	others Freezes
}

// copyFrozen calls copy with a func that keeps mounted volumes frozen while it runs. It waits for others that freeze
// them. If one was thawed before the copy was done, the copy is made again, and after some tries that is Conflict.
// others records from here on that the volumes may be frozen. held is how long the copy kept them frozen.
func (acc *Access) copyFrozen(
	ctx context.Context, volumes []frozen, copy func(quiet func(func() error) error) error,
) (held time.Duration, err error) {
	// In this order processes lock the volumes, so that they do not wait for each other.
	slices.SortFunc(volumes, func(a, b frozen) int { return cmp.Compare(a.Row.ID, b.Row.ID) })
	names := make([]string, len(volumes))
	for i, v := range volumes {
		names[i] = v.Row.Name
		if err := v.others.Note(ctx); err != nil {
			return 0, err
		}
	}

	quiet := func(take func() error) (err error) {
		held, err = acc.freezeAll(ctx, volumes, take)
		return err
	}

	// Copy, until neither others nor an early thaw get in the way.
	broken := 0
	foreign := time.Time{}
	what := strings.Join(names, ", ")
	w := waiting.Wait{
		Op: "freeze", Ref: what, What: what + ", which is frozen", Limit: freezeWait,
		Holders: func() (out []waiting.Process) {
			for _, v := range volumes {
				out = append(out, v.others.Processes(ctx)...)
			}
			return out
		},
	}
	err = w.Until(ctx, func() (bool, error) {
		var busy *freeze.FrozenError
		err := copy(quiet)
		switch {
		case errors.Is(err, freeze.ErrBroken):
			broken++
			return false, errorIf(broken == freezeTries, err)
		case !errors.As(err, &busy):
			return err == nil, err
		}

		// No live pando process has frozen it, or one just did.
		i := slices.IndexFunc(volumes, func(v frozen) bool { return v.root == busy.Dir })
		ours, err := volumes[i].others.CleanUp(ctx)
		if err != nil || ours {
			foreign = time.Time{}
			return false, err
		}

		if foreign.IsZero() {
			foreign = time.Now()
		}

		return false, errorIf(time.Since(foreign) > foreignWait, frozenError(volumes[i].Live))
	})

	return held, err
}

// freezeAll keeps volumes frozen while take runs, and returns for how long. They are in order of their IDs.
func (acc *Access) freezeAll(ctx context.Context, volumes []frozen, take func() error) (time.Duration, error) {
	limit := freeze.Limit
	roots := make([]*os.File, len(volumes))
	for i, v := range volumes {
		unlock, err := acc.lockFreeze(ctx, v.Row)
		if err != nil {
			return 0, err
		}
		defer unlock()
		limit += time.Duration(v.Row.Usage.Extents) * extentTime
		roots[i] = v.root
	}

	return freeze.Do(ctx, roots, limit, func() error {
		AtStep("frozen")
		return take()
	})
}

// frozenError says that something other than Pando has frozen a volume.
func frozenError(l Live) error {
	return errs.New(errs.InUse, "freeze", l.Row.Name, "%w", freeze.ErrFrozen).
		WithHint("thaw it with `fsfreeze --unfreeze %s` if nothing needs it frozen, or copy it as it is with %s",
			l.Record.Mountpoint, errs.Param("no-freeze"))
}

func errorIf(cond bool, err error) error {
	if cond {
		return err
	}
	return nil
}

// Thaw thaws a volume that a dead process may have left frozen while it copied it, if its guard died with it. It waits
// for live processes that keep it frozen now.
func (acc *Access) Thaw(ctx context.Context, l Live) error {
	if !l.mounted() {
		return nil
	}

	unlock, err := acc.lockFreeze(ctx, l.Row)
	if err != nil {
		return err
	}

	defer unlock()

	root, release, err := acc.openMounted(ctx, l)
	if err != nil {
		return err
	}

	defer release()
	if err := kernel.Thaw(root); err != nil && !errors.Is(err, unix.EINVAL) { // not frozen
		return errs.Wrap("thaw", l.Row.Name, err)
	}

	return nil
}
