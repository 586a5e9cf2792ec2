package content

import (
	"context"
	"os"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
)

// Member is a volume of a group, and the snapshot to be made of it.
type Member struct {
	Live
	Snapshot driver.Identity
	Others   Freezes

	root *os.File // of its filesystem, if that is to be frozen
}

// freezes reports whether the volume is frozen while the group is copied.
func (m Member) freezes() bool { return m.mounted() && m.freeze != FreezeNever }

// SnapshotGroup makes snapshots of several volumes at one point in time: all mounted filesystems in images are frozen
// before the first volume in use is copied, and thawed after the last. With FreezeNever the copies are only made soon
// after each other. The caller has marked the snapshots; after an error any of them may exist. held is how long
// programs could not write. It returns the kinds of errors of CopyLive; Unsupported if more than one volume in use
// cannot be frozen.
func (acc *Access) SnapshotGroup(ctx context.Context, members []Member) (held time.Duration, err error) {
	if err := acc.checkGroup(members); err != nil {
		return 0, err
	}

	// Nothing writes to idle volumes, nor can they be mounted: they are copied in advance.
	var live []Member
	for _, m := range members {
		if m.InUse() {
			live = append(live, m)
		} else if err := acc.CopyLive(ctx, m.Live, m.Snapshot, true, m.Others); err != nil {
			return 0, err
		}
	}

	// Everything written before the command began is in the copies, and not written during the freeze.
	var volumes []frozen
	for i := range live {
		release, err := acc.flushMember(ctx, &live[i])
		if err != nil {
			return 0, err
		}
		defer release()
		if m := live[i]; m.freezes() {
			volumes = append(volumes, frozen{m.Live, m.root, m.Others})
		}
	}

	// Flush again what was written in the meantime: a freeze writes it while programs wait.
	if len(volumes) > 1 {
		for _, v := range volumes {
			if err := acc.copyWriteBack(ctx, v.Live, v.root); err != nil {
				return 0, err
			}
		}
	}

	// Copy.
	if len(volumes) == 0 {
		return 0, acc.copyTogether(ctx, live, func(take func() error) error { return take() })
	}

	held, err = acc.copyFrozen(ctx, volumes, func(quiet func(func() error) error) error {
		return acc.copyTogether(ctx, live, quiet)
	})
	if err != nil {
		return held, err
	}

	return held, acc.finishFrozen(ctx, live)
}

// checkGroup refuses groups whose snapshots would not be of one point in time. A single volume that cannot be frozen is
// no problem: the moment at which it is copied is that of the group, because all others are frozen then.
func (acc *Access) checkGroup(members []Member) error {
	var loose []Member
	for _, m := range members {
		if m.InUse() && !m.freezes() && m.freeze != FreezeNever {
			loose = append(loose, m)
		}
	}

	if len(loose) == 0 || len(loose) == 1 && acc.caps.Atomic {
		return nil
	}

	e := errs.New(errs.Unsupported, "snapshot", loose[0].Row.Name,
		"in pools of the %s driver, writes to a mounted volume cannot be held back", acc.caps.Name)
	if loose[0].Row.FS == driver.None {
		e = errs.New(errs.Unsupported, "snapshot", loose[0].Row.Name,
			"writes to an attached volume without a filesystem cannot be held back")
	}

	return e.WithHint("unmount it first with %s; or stop the programs that write with %s, start them again with %s, "+
		"and add %s", errs.Run("umount", loose[0].Row.Name), errs.Param("before"), errs.Param("after"),
		errs.Param("no-freeze"))
}

// flushMember writes everything to the pool that programs have written to a volume in use, and opens it if it is to be
// frozen. Call release when the group has been copied.
func (acc *Access) flushMember(ctx context.Context, m *Member) (release func(), err error) {
	none := func() {}
	if !m.freezes() {
		if !m.Row.FS.IsImage() {
			return none, nil
		}
		warnLost(ctx, m.Live)
		return none, acc.flushBeforeCopy(ctx, m.Live)
	}

	warnLost(ctx, m.Live)
	root, release, err := acc.openMounted(ctx, m.Live)
	if err != nil {
		return none, err
	}

	if err := acc.copyWriteBack(ctx, m.Live, root); err != nil {
		release()
		return none, err
	}

	m.root = root
	return release, nil
}

// copyTogether makes the snapshots of volumes in use. It calls quiet once with a func that copies the content of all of
// them; everything else is done before or after.
func (acc *Access) copyTogether(ctx context.Context, live []Member, quiet func(func() error) error) error {
	var takes []func() error
	lc, steps := acc.drv.(driver.LiveCopier)
	steps = steps && acc.caps.Atomic

	// prepare prepares the copies from the i-th on, each within the preparation of the one before.
	var prepare func(i int) error
	prepare = func(i int) error {
		if i == len(live) {
			return quiet(func() error { return inTurn(takes) })
		}

		m := live[i]
		if !steps {
			takes = append(takes, func() error { return acc.CopyLive(ctx, m.Live, m.Snapshot, true, m.Others) })
			return prepare(i + 1)
		}

		return lc.CopyLive(ctx, m.Row.ID, m.Snapshot, true, func(take func() error) error {
			takes = append(takes, take)
			return prepare(i + 1)
		})
	}

	return prepare(0)
}

// inTurn calls steps one after the other, until one fails.
func inTurn(steps []func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
		AtStep("copied one of a group")
	}
	return nil
}

// finishFrozen checks copies that were made during a freeze, and replays the logs in them: a frozen ext4 has nothing in
// its log, but a frozen XFS does.
func (acc *Access) finishFrozen(ctx context.Context, live []Member) error {
	for _, m := range live {
		if !m.freezes() {
			continue
		}
		if err := acc.checkFrozenCopy(ctx, m.Live, m.root); err != nil {
			return err
		}
		if m.Row.FS == driver.Ext4 {
			continue
		}
		if err := acc.replayCopy(ctx, m.Live, m.Snapshot.ID); err != nil {
			return err
		}
	}

	return nil
}
