package engine

import (
	"context"
	"errors"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/base/waiting"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/preset"

	"golang.org/x/sys/unix"
)

// goldenLocks is the file in which each golden that is being built has a locked byte: see lockGolden.
func (e *Engine) goldenLocks() string { return filepath.Join(e.pool.Dir, "locks", "goldens") }

// goldenLock is the lock of a golden, on the byte that its name leads to.
func goldenLock(name string) unix.Flock_t {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name))
	return unix.Flock_t{Type: unix.F_WRLCK, Start: int64(h.Sum64() >> 2), Len: 1}
}

// waitForBuild describes a wait for one of the locks of a golden.
func (e *Engine) waitForBuild(name string, locks ...unix.Flock_t) waiting.Wait {
	return waiting.Wait{
		Op: "lock golden", Ref: name, What: "golden " + name + ", which is being built",
		Holders: func() (out []waiting.Process) {
			for _, l := range locks {
				out = append(out, waiting.LockHolders(e.goldenLocks(), l.Start)...)
			}
			return out
		},
	}
}

// lockGolden keeps other processes from building the same golden: one builds, the
// others wait. waited reports whether another process held the lock first. The lock
// is a byte of one file, chosen by the name, and ends with the process. A build can
// take any time, so the wait has no limit; it returns InUse if the holder is a stopped process.
func (e *Engine) lockGolden(ctx context.Context, name string) (unlock func(), waited bool, err error) {
	f, err := os.OpenFile(e.goldenLocks(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, false, errs.Wrap("lock golden", name, err)
	}

	lock := goldenLock(name)
	err = e.waitForBuild(name, lock).Until(ctx, func() (bool, error) {
		l := lock
		err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &l)
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EINTR) {
			return err == nil, errs.Wrap("lock golden", name, err)
		}
		if !waited {
			progress.From(ctx).StartOf(progress.WaitingForBuild, name, 0, 0)
		}
		waited = true
		return false, nil
	})
	if err != nil {
		f.Close()
		return nil, false, err
	}

	return func() {
		// At once, even if a child that is being started has a copy of the file for a moment.
		lock.Type = unix.F_UNLCK
		_ = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lock)
		f.Close()
	}, waited, nil
}

// awaitGolden waits while another process builds the first generation of a golden. It returns when the golden exists,
// or when nobody is building it; at once if a golden or volume has the name. Every verb that makes something of a
// golden, or reads its files or properties, calls awaitGolden before it looks the golden up, never after: a golden that
// is recorded in the meantime is then found, and NotFound means that none was being built. Like lockGolden, it waits
// without a limit. InUse if the builder is a stopped process.
func (e *Engine) awaitGolden(ctx context.Context, name string) error {
	if exists, err := e.nameExists(ctx, name); err != nil || exists {
		return err
	}

	content.AtStep("golden not found")
	f, err := os.Open(e.goldenLocks())
	if errors.Is(err, fs.ErrNotExist) {
		return nil // nothing has been built here yet
	}
	if err != nil {
		return errs.Wrap("lock golden", name, err)
	}
	defer f.Close()

	// A golden that is filled from a source is being built for as long as its source is locked.
	locks := []unix.Flock_t{goldenLock(name)}
	if !e.holdsSource(ctx, name) {
		locks = append(locks, goldenLock(sourceOf(name)))
	}

	waited := false
	return e.waitForBuild(name, locks...).Until(ctx, func() (bool, error) {
		locked, err := anyLocked(f, locks)
		if err != nil || !locked {
			return true, errs.Wrap("lock golden", name, err)
		}

		if !waited {
			waited = true
			progress.From(ctx).StartOf(progress.WaitingForBuild, name, 0, 0)
			content.AtStep("waiting for golden")
		}

		// The golden exists before its builder has released all locks.
		return e.nameExists(ctx, name)
	})
}

// anyLocked reports whether another open file has one of the locks.
func anyLocked(f *os.File, locks []unix.Flock_t) (bool, error) {
	for _, l := range locks {
		if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &l); err != nil {
			return false, err
		}
		if l.Type != unix.F_UNLCK {
			return true, nil
		}
	}
	return false, nil
}

// nameExists reports whether a golden or volume has a name.
func (e *Engine) nameExists(ctx context.Context, name string) (exists bool, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if _, exists, err = tx.Golden(name); err == nil && !exists {
			_, exists, err = tx.Volume(name)
		}
		return err
	})
	return exists, err
}

const (
	opImport  = "import"
	opPublish = "publish"
)

// build is a generation that is being built.
type build struct {
	e       *Engine
	op      string
	golden  catalog.Golden
	fresh   bool              // the golden does not exist yet
	scratch driver.Identity   // the object that is filled; Kind Scratch
	gen     driver.Identity   // the generation that it becomes
	ids     []driver.ObjectID // marked
	reads   content.Live      // the volume that it is published from
	preset  *preset.Rules     // what its content must not have; nil: no rules
}

// buildRequest describes the generation to build.
type buildRequest struct {
	op, name  string
	reads     *catalog.Row          // volume that it is published from; nil: imported
	mustBeNew bool                  // the golden must not exist
	force     bool                  // publish even if reads is based on an older generation
	freeze    Freeze                // if reads is in use: whether its writes are stopped
	keep      *int                  // generations to keep from now on; nil: as before
	overlay   *driver.OverlayPolicy // of the golden from now on; nil: as before
	filled    *Filled               // see PublishRequest
	labels    map[string]string     // added to those of the golden
}

// startBuild reserves the number of the next generation of a golden and marks
// the work. The caller holds the golden's lock.
func (e *Engine) startBuild(ctx context.Context, q buildRequest) (*build, error) {
	op, name := q.op, q.name
	b := &build{e: e, op: op, scratch: e.newIdentity(ctx, driver.Scratch), gen: e.newIdentity(ctx, driver.Generation)}

	// A scratch volume is worthless after a power loss, so nothing waits for the disk.
	b.scratch.Ephemeral = true
	b.ids = []driver.ObjectID{b.scratch.ID, b.gen.ID}
	err := e.ledger.Claim(ctx, op, false, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		g, exists, err := tx.ResolveGolden(op, name)
		if err != nil {
			return nil, err
		}

		if !exists {
			if err := tx.CheckFree(op, name); err != nil {
				return nil, err
			}
			g = catalog.Golden{Name: name, Next: 1, CreatedAt: time.Now(), Owner: asker(ctx).UID}
		} else if q.mustBeNew {
			return nil, errs.New(errs.Exists, op, name, "golden %q already exists", name).
				WithHint("add a generation with %s or %s", errs.Run("golden import", errs.Param("update"), name, "..."),
					errs.Run("golden publish", name, "VOLUME"))
		}

		if q.keep != nil {
			g.Keep = *q.keep
		}
		if q.overlay != nil {
			g.Overlay = *q.overlay
		}
		if g.Labels, err = g.Labels.With(op, q.labels); err != nil {
			return nil, errs.Wrap(op, name, err)
		}
		if q.filled != nil {
			if err := q.filled.check(tx, op, name, g, exists); err != nil {
				return nil, err
			}
			g.Source, b.gen.Mirror = q.filled.Source, true
		}

		// Number the generation, and mark it and the scratch volume.
		b.golden, b.fresh = g, !exists
		b.gen.Golden, b.gen.Generation, b.gen.GoldenProperties, b.gen.Owner = name, g.Next, g.GoldenProperties, g.Owner
		marks := []catalog.Mark{{ID: b.scratch.ID, Op: op, Name: name}, {ID: b.gen.ID, Op: op}}
		if q.reads != nil {
			row, ok, err := tx.Object(q.reads.ID)
			if err != nil {
				return nil, err
			}
			if !ok {
				return nil, errs.New(errs.NotFound, op, q.reads.Name, "it has just been destroyed")
			}

			if exists && row.Golden == name && row.Generation != g.Current && !q.force && q.filled == nil {
				return nil, errs.New(errs.Conflict, op, name,
					"volume %s is based on generation %d, but the current generation is %d", row.Name, row.Generation, g.Current).
					WithHint("bring it up to date with %s, or publish it anyway with %s", errs.Run("rebase", row.Name, name),
						errs.Param("force"))
			}

			if b.reads, err = e.content.FindLive(tx, row, q.freeze); err != nil {
				return nil, err
			}

			marks[0].Reads, marks[0].Freezes = row.ID, b.reads.Freezes()
		}

		return marks, nil
	})

	return b, err
}

// undoBuild removes everything the build has made.
func (b *build) undoBuild(ctx context.Context) { b.e.ledger.DestroyUnfinished(ctx, b.ids...) }

// publishGeneration turns the filled scratch volume into a generation, and makes it
// the current one. Durable on return.
func (b *build) publishGeneration(ctx context.Context) (api.Object, error) {
	b.gen = b.gen.WithContentOf(b.scratch)
	if b.reads.Row.ID == "" {
		b.gen.CreatedAt = time.Now().UTC()
	}

	if b.fresh {
		b.golden.CreatedAt = b.gen.CreatedAt
	} else {
		b.gen.Since = b.golden.CreatedAt // its first generation, which records it too, may be destroyed
	}

	if err := b.makeGeneration(ctx); err != nil {
		return api.Object{}, err
	}

	row, err := b.measureGeneration(ctx)
	if err != nil {
		return api.Object{}, err
	}

	return b.recordGeneration(ctx, row)
}

// makeGeneration makes the object of the generation, in the way the driver prefers, and destroys the scratch volume
// unless it has become that object.
func (b *build) makeGeneration(ctx context.Context) error {
	e, from := b.e, b.scratch.ID
	var err error
	switch d := e.drv.(type) {
	case driver.Sealer:
		progress.From(ctx).Start(progress.Sealing, 0, 0)
		err = d.Seal(ctx, from, b.gen, func(done, total int64) { progress.From(ctx).Set(0, done, total) })
	case driver.Finisher:
		progress.From(ctx).Start(progress.WritingToDisk, 0, 0)
		b.gen.ID = from
		err = d.Finish(ctx, b.gen)
	default:
		progress.From(ctx).Start(progress.WritingToDisk, 0, 0)
		err = e.drv.Snapshot(ctx, from, b.gen)
	}
	if err != nil || b.gen.ID == from {
		return err
	}

	return e.drv.Destroy(ctx, from)
}

// measureGeneration returns the row of the generation, with the space it uses. A tree, which would have to be walked,
// gets the figures of the volume that it was published from.
func (b *build) measureGeneration(ctx context.Context) (catalog.Row, error) {
	e, now := b.e, time.Now()
	var err error
	if b.gen, err = e.fillSector(ctx, b.gen); err != nil {
		return catalog.Row{}, err
	}

	row := catalog.Row{Identity: b.gen, UsedAt: now}
	if e.cheapUsage(row.FS) || b.reads.Row.ID == "" {
		if row.Usage, err = e.drv.Usage(ctx, row.ID); err != nil {
			return catalog.Row{}, err
		}
		row.MeasuredAt = now
	} else {
		row = cloneRow(e.caps, b.reads.Row, b.gen, now)
	}

	return row, nil
}

// recordGeneration records the generation and makes it the current one, in one durable commit.
func (b *build) recordGeneration(ctx context.Context, row catalog.Row) (api.Object, error) {
	e, g := b.e, b.golden
	g.Current, g.Next = b.gen.Generation, b.gen.Generation+1
	based := driver.ObjectID("")
	err := e.cat.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error {
		if err := tx.PutGolden(g); err != nil {
			return err
		}

		if err := tx.PutObject(row); err != nil {
			return err
		}

		// The volume it was published from has the same content, so it is now based on it.
		if from := b.reads.Row; from.ID != "" && (from.Golden == "" || from.Golden == g.Name) {
			if err := tx.SetBase(from.ID, g.Name, g.Current); err != nil {
				return err
			}
			based = from.ID
		}

		for _, id := range b.ids {
			if err := tx.Unmark(id); err != nil {
				return err
			}
		}

		return nil
	})
	if err != nil {
		return api.Object{}, err
	}

	if based != "" {
		b.recordBase(context.WithoutCancel(ctx), based)
	}

	return generationOf(row, g, e.caps.Name), nil
}

// recordBase writes the new base of a published volume to the pool, unless another
// process is working on the volume. Without it, the base can be derived from the
// origin of the generation for as long as that exists.
func (b *build) recordBase(ctx context.Context, id driver.ObjectID) {
	e := b.e
	if err := e.ledger.ClaimNow(ctx, opPin, false, func(*catalog.Tx) ([]catalog.Mark, error) {
		return []catalog.Mark{{ID: id, Op: opPin}}, nil
	}); err != nil {
		return
	}
	if err := e.matchIdentity(ctx, id); err != nil && !errs.Is(err, errs.NotFound) {
		warnings.Add(ctx, "could not yet record the new base of %s in its identity: %v", e.cat.RefOf(ctx, id), err)
		return // the mark stays, and the next command writes it
	}
	_ = e.ledger.Unmark(ctx, id) // on error the next command does it
}

// PublishRequest says what to publish.
type PublishRequest struct {
	Golden  ref.Name // created if it does not exist
	Volume  ref.Name
	Freeze  Freeze                // if it is in use: whether its writes are stopped
	Force   bool                  // publish even if the volume is based on an older generation
	Keep    *int                  // of the golden: newest generations to keep from now on, 0: all; nil: as before
	Overlay *driver.OverlayPolicy // of the golden from now on; nil: as before
	Preset  string                // see ImportRequest
	Filled  *Filled               // nil: a session may have written to the volume
	Labels  map[string]string     // labels to add to those of the golden
}

// Published is the result of Publish.
type Published struct {
	api.Object
	// references to older generations that the golden no longer keeps
	Removed []string `json:"removed,omitempty"`
	Cleaned []string `json:"cleaned,omitempty"` // what the preset left out of the golden, relative to its root
}

// Publish makes the next generation of a golden from a volume, which may be in
// use (see Snapshot). The volume stays, and is released as soon as it has been
// copied. Clones get either the old generation or the whole new one. Durable on
// return. NotFound, Exists (a volume has the golden's name), Conflict (the volume is
// based on an older generation, and a newer one has been published since), InUse, NoSpace.
func (e *Engine) Publish(ctx context.Context, q PublishRequest) (_ Published, err error) {
	ctx, end := e.ledger.Begin(ctx, opPublish)
	defer end(&err)

	if err := q.Golden.Required(opPublish); err != nil {
		return Published{}, err
	}

	golden := q.Golden.String()
	if err := e.needRoot(opPublish, golden); err != nil {
		return Published{}, err
	}

	rules, err := loadPreset(opPublish, golden, q.Preset, &q.Overlay)
	if err != nil {
		return Published{}, err
	}

	// Find the volume, and check that there is enough free space.
	var vol catalog.Row
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		vol, err = tx.ResolveVolume(opPublish, q.Volume.String())
		return err
	}); err != nil {
		return Published{}, err
	}

	if err := e.pool.Admit(ctx, opPublish, golden, 0); err != nil {
		return Published{}, err
	}

	// Build the generation with the golden locked.
	unlock, _, err := e.lockGolden(ctx, golden)
	if err != nil {
		return Published{}, err
	}

	defer unlock()

	b, err := e.startBuild(ctx, buildRequest{op: opPublish, name: golden, reads: &vol, force: q.Force, freeze: q.Freeze,
		keep: q.Keep, overlay: q.Overlay, filled: q.Filled, labels: q.Labels})
	if err != nil {
		return Published{}, err
	}

	b.preset = rules
	out, err := b.publishVolume(ctx, q)
	if err != nil {
		b.undoBuild(ctx)
		return Published{}, errs.Wrap(opPublish, golden, err)
	}

	out.Removed = e.removeOldOrWarn(ctx, golden)
	return out, nil
}

// publishVolume copies the volume that a build reads, and publishes the copy.
func (b *build) publishVolume(ctx context.Context, q PublishRequest) (out Published, err error) {
	e := b.e
	vol := b.reads.Row
	b.scratch = b.scratch.WithContentOf(vol.Identity)
	b.scratch.Origin, b.scratch.OriginID = vol.Name, vol.ID
	b.gen.Origin, b.gen.OriginID = vol.Name, vol.ID
	if q.Filled != nil {
		b.gen.Origin = q.Filled.Origin
	}

	// The generation has the time at which the copy began, not when it ended: later
	// writes to the volume are not in the generation, and diff relies on that.
	b.gen.CreatedAt = time.Now().UTC()
	if err := b.checkOwner(ctx); err != nil {
		return out, err
	}

	if vol.IsOverlay() {
		return b.publishOverlay(ctx)
	}

	if err := e.copyLive(ctx, b.reads, b.scratch, false); err != nil {
		return out, err
	}

	if err := b.checkOwner(ctx); err != nil { // in case it has started since
		return out, err
	}

	// Only the copy is needed from here on: release the volume.
	if err := e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		return tx.StopReading(b.scratch.ID)
	}); err != nil {
		return out, err
	}

	switch {
	case vol.FS == driver.Ext4 || vol.FS == driver.XFS:
		// Mounting replays the log once instead of in every clone, and trimming
		// keeps deleted data out of the golden.
		err = e.content.WithImage(ctx, b.scratch.ID, content.ImageOptions{}, func(root *os.File) error {
			out.Cleaned, err = b.clean(ctx, root)
			content.Trim("/proc/self/fd/" + itoa(int(root.Fd())))
			return err
		})
	default:
		out.Cleaned, err = b.cleanScratch(ctx)
	}
	if err != nil {
		return out, err
	}

	out.Object, err = b.publishGeneration(ctx)
	return out, err
}
