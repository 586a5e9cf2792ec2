package pool

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/linux/durable"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/tree/treecopy"

	"golang.org/x/sys/unix"
)

// A loop-backed pool is moved by copying its files, while nothing uses it:
//
//  1. The new directory is prepared as by init: it holds init.inprogress until it is a pool. Durable.
//  2. In the old one, move.inprogress takes the place of pool.json: no command finds a pool there. Durable.
//  3. data/ is unmounted. This fails if any other process has the pool open, as they all keep a directory in it open.
//  4. Everything is copied, and synced.
//  5. pool.json in the new directory commits the move.
//  6. The old directory is removed as by deinit, which can be interrupted and continued.
//
// If the process dies before step 5, Open finds move.inprogress, and init.inprogress in the new directory: it undoes
// the move. If it dies later, Open says where the pool is now, and another Move or Remove finishes it. If the disk of
// the new directory is not mounted, nothing tells which of the two it is, and Open refuses to guess.

const (
	opMovePool = "pool move"
	movingName = "move.inprogress" // Moving
	copyPiece  = 4 << 20           // bytes that are copied between two looks at the context
)

// Moving is the content of move.inprogress.
type Moving struct {
	Config
	To     string `json:"moving_to"` // absolute
	MadeTo bool   `json:"made_to"`   // the move made the directory
}

// readMoving returns what is known of a move that was begun in dir; nil if there is none. Damaged.
func readMoving(dir string) (*Moving, error) {
	b, err := os.ReadFile(filepath.Join(dir, movingName))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, errs.Wrap("open pool", dir, err)
	}

	var m Moving
	if err := json.Unmarshal(b, &m); err != nil || m.ID == "" || m.To == "" {
		return nil, errs.New(errs.Damaged, "open pool", dir, "cannot read %s", movingName).
			WithHint("restore pool.json from a copy, and remove %s", movingName)
	}
	return &m, nil
}

// isMoving reports whether a move was begun in dir.
func isMoving(dir string) bool { return exists(filepath.Join(dir, movingName)) }

// arrived reports whether the move was committed: the pool is in its new directory.
func (m *Moving) arrived() bool {
	p, err := Read(m.To)
	return err == nil && p.Config.ID == m.ID
}

// pending reports whether the move was certainly not committed.
func (m *Moving) pending() bool {
	return exists(filepath.Join(m.To, initingName)) && !exists(filepath.Join(m.To, configName))
}

// arrivingFrom returns the directory of the pool whose move to dir has not finished; "": there is none.
func arrivingFrom(dir string) string {
	b, err := os.ReadFile(filepath.Join(dir, initingName))
	from := string(b)
	if err != nil || from == "" || exists(filepath.Join(from, configName)) {
		return ""
	}

	m, err := readMoving(from)
	if err != nil || m == nil {
		return ""
	}
	to, err := os.Stat(m.To)
	if err != nil {
		return ""
	}
	if here, err := os.Stat(dir); err != nil || !os.SameFile(to, here) {
		return ""
	}
	return from
}

// movingError explains why there is no pool in a directory whose pool is being moved. NotFound, InUse.
func movingError(dir string, m *Moving) error {
	if m.arrived() {
		return errs.New(errs.NotFound, "open pool", dir, "the pool was moved to %s", m.To).
			WithHint("use %s; remove what is left here with %s", errs.Param("pool", m.To), errs.Run("pool move", m.To))
	}
	return errs.New(errs.InUse, "open pool", dir, "moving the pool to %s has not finished", m.To).
		WithHint("if no pando is moving it, mount the disk of %s: the next command then continues; if that directory is "+
			"lost, rename %s to %s", m.To, filepath.Join(dir, movingName), configName)
}

// undoInterruptedMove makes a pool usable again whose move was interrupted. It waits for a move that is under way. The
// errors of movingError.
func undoInterruptedMove(ctx context.Context, dir string) error {
	unlock, err := Lock(ctx, dir)
	if err != nil {
		return err
	}
	defer unlock()

	m, err := readMoving(dir)
	if err != nil || m == nil || exists(filepath.Join(dir, configName)) {
		return err
	}
	if !m.pending() {
		return movingError(dir, m)
	}
	return m.undo(ctx, dir)
}

// undo removes what was copied, and makes dir the pool again. The caller holds the lock of dir. It may be interrupted
// and called again: the new directory keeps its mark until the old one is a pool.
func (m *Moving) undo(ctx context.Context, dir string) error {
	unlock, err := Lock(ctx, m.To)
	if err != nil {
		return err
	}
	defer unlock()

	// The copy must not be mounted when the pool is: XFS refuses a second filesystem with the same UUID.
	if err := removeRemains(ctx, m.To, nil); err != nil {
		return err
	}

	p := &Pool{Dir: dir, Config: m.Config}
	if err := p.writeConfig(); err != nil {
		return errs.Wrap(opMovePool, dir, err)
	}
	if err := removeEntry(filepath.Join(dir, movingName)); err != nil {
		return err
	}

	// What cannot be removed stays marked as the rest of an init, which the next init or move into it removes.
	if removeMarkers(m.To) == nil && m.MadeTo {
		_ = removeEntry(m.To)
	}
	return nil
}

// withdraw takes back a commit that failed: pool.json may be there, but not be known to be durable.
func (m *Moving) withdraw() error {
	if err := removeEntry(filepath.Join(m.To, configName)); err != nil {
		return err
	}
	return errs.Wrap(opMovePool, m.To, durable.SyncDir(m.To))
}

// FinishMove removes what is left of a pool in dir that was moved to the directory to. It reports false if no such move
// is to be finished.
func FinishMove(ctx context.Context, dir, to string) (bool, error) {
	m, err := readMoving(dir)
	if err != nil || m == nil || m.To != to || exists(filepath.Join(dir, configName)) {
		return false, err
	}

	unlock, err := Lock(ctx, dir)
	if err != nil {
		return false, err
	}
	defer unlock()

	if !m.arrived() {
		return false, nil
	}
	return true, removeMoved(ctx, dir)
}

// removeMoved removes the old directory of a pool that was moved.
func removeMoved(ctx context.Context, dir string) error {
	if err := os.Rename(filepath.Join(dir, movingName), filepath.Join(dir, removingName)); err != nil {
		return errs.Wrap(opMovePool, dir, err)
	}
	if err := durable.SyncDir(dir); err != nil {
		return errs.Wrap(opMovePool, dir, err)
	}
	return Remove(ctx, dir, nil)
}

// Move moves a loop-backed pool, which nothing may use, to the directory to, absolute, which must be missing or empty.
// On return the pool is durable there; left is why something may remain in the old directory. After an error, the pool
// is where it was. progress is called with the number of bytes copied. Unsupported, InUse, NoSpace, Exists, Invalid.
func (p *Pool) Move(ctx context.Context, to string, progress func(bytes int64)) (left, err error) {
	if p.Config.Backing == nil {
		return nil, errs.New(errs.Unsupported, opMovePool, p.Dir, "only a pool in a file can be moved").
			WithHint("make a pool in %s, push the volumes to a remote in a directory, and pull them: this keeps what they "+
				"share", to)
	}

	unlock, err := Lock(ctx, p.Dir)
	if err != nil {
		return nil, err
	}
	defer unlock()

	// Prepare the new directory.
	abs, madeDir, unlockTo, abort, err := Prepare(ctx, to, nil)
	if err != nil {
		return nil, asMoveError(err)
	}
	defer unlockTo()

	m := &Moving{Config: p.Config, To: abs, MadeTo: madeDir}
	if err := p.leave(ctx, m); err != nil {
		abort()
		return nil, err
	}

	// Copy, and commit.
	there := &Pool{Dir: abs, Config: p.Config}
	there.Config.MadeDir = madeDir
	if err := p.arrive(ctx, there, progress); err != nil {
		unlockTo()
		if e := m.withdraw(); e != nil {
			return nil, errors.Join(err, e)
		}
		return nil, errors.Join(err, m.undo(context.WithoutCancel(ctx), p.Dir))
	}

	// The pool is there. Remove the rest here.
	if err := removeEntry(filepath.Join(abs, initingName)); err != nil {
		return err, nil
	}
	return removeMoved(context.WithoutCancel(ctx), p.Dir), nil
}

// asMoveError makes an error of Prepare one of this operation.
func asMoveError(err error) error {
	var e *errs.Error
	if !errors.As(err, &e) || e.Op != "init" {
		return err
	}
	moved := *e
	moved.Op = opMovePool
	return moved.WithHint("choose a new or empty directory, on the disk to move the pool to")
}

// leave makes sure that nothing uses the pool, and that nothing will until the move is over. After an error the pool is
// as before.
func (p *Pool) leave(ctx context.Context, m *Moving) error {
	if err := os.WriteFile(filepath.Join(m.To, initingName), []byte(p.Dir), 0o600); err != nil {
		return errs.Wrap(opMovePool, m.To, err)
	}
	for _, dir := range []string{m.To, filepath.Dir(m.To)} {
		if err := durable.SyncDir(dir); err != nil {
			return errs.Wrap(opMovePool, dir, err)
		}
	}

	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return errs.Wrap(opMovePool, p.Dir, err)
	}
	if err := durable.WriteFile(filepath.Join(p.Dir, movingName), append(b, '\n')); err != nil {
		return errs.Wrap(opMovePool, p.Dir, err)
	}

	err = os.Remove(filepath.Join(p.Dir, configName))
	if err == nil {
		err = durable.SyncDir(p.Dir)
	}
	if err == nil {
		err = p.detachData(ctx)
	}
	if err == nil {
		return nil
	}

	return errors.Join(errs.Wrap(opMovePool, p.Dir, err), p.writeConfig(), removeEntry(filepath.Join(p.Dir, movingName)))
}

// detachData unmounts data/ and waits until the backing file is no block device. InUse.
func (p *Pool) detachData(ctx context.Context) error {
	inUse := errs.New(errs.InUse, opMovePool, p.Dir, "another process uses the pool").
		WithHint("wait until other pando commands have ended, and leave %s in shells", p.DataDir())

	if p.isMounted() {
		if err := mount.Unmount(p.DataDir()); errs.Is(err, errs.InUse) {
			return inUse
		} else if err != nil {
			return err
		}
	}

	gone, err := loopdev.WaitDetached(ctx, p.BackingFile(), detachWait)
	if err != nil || gone {
		return err
	}
	return inUse
}

// arrive makes there, a prepared directory, this pool. On return it is durable.
func (p *Pool) arrive(ctx context.Context, there *Pool, progress func(bytes int64)) error {
	if err := p.checkRoom(there.Dir); err != nil {
		return err
	}

	for _, d := range slices.Concat(runtimeDirs, []string{"data"}) {
		if err := os.Mkdir(filepath.Join(there.Dir, d), 0o700); err != nil {
			return errs.Wrap(opMovePool, there.Dir, err)
		}
	}

	// Copy.
	if err := p.copyFiles(ctx, there.Dir); err != nil {
		return err
	}
	if err := p.copyBacking(ctx, there.BackingFile(), progress); err != nil {
		return errs.Wrap(opMovePool, there.Dir, err)
	}
	if err := syncFilesystem(there.Dir); err != nil {
		return errs.Wrap(opMovePool, there.Dir, err)
	}

	// Check that it is a pool.
	if err := there.mountData(ctx); err != nil {
		return err
	}
	if !there.isMounted() {
		return errs.New(errs.Damaged, opMovePool, there.Dir, "the copy of the pool cannot be read").
			WithHint("check the disk: %s", errs.Run("doctor"))
	}
	if err := there.MakeReserve(); err != nil {
		return err
	}

	if err := ctx.Err(); err != nil {
		return errs.Wrap(opMovePool, p.Dir, err)
	}
	return errs.Wrap(opMovePool, there.Dir, there.writeConfig())
}

// checkRoom checks that the files of the pool fit into another filesystem. NoSpace.
func (p *Pool) checkRoom(to string) error {
	var file unix.Stat_t
	if err := unix.Stat(p.BackingFile(), &file); err != nil {
		return errs.Wrap(opMovePool, p.Dir, err)
	}
	var room unix.Statfs_t
	if err := unix.Statfs(to, &room); err != nil {
		return errs.Wrap(opMovePool, to, err)
	}

	const rest = 64 << 20 // for the catalogue, the reserve and metadata
	need, free := file.Blocks*512+rest, int64(room.Bavail)*room.Bsize
	if free >= need {
		return nil
	}
	return errs.New(errs.NoSpace, opMovePool, to, "the pool needs %s, but only %s is free there", errs.FormatBytes(need),
		errs.FormatBytes(free)).WithHint("return unused space of the pool with %s, or choose another disk", errs.Run("gc"))
}

// copyFiles copies everything of the pool but its data, and what only running commands need.
func (p *Pool) copyFiles(ctx context.Context, to string) error {
	src, err := os.Open(p.Dir)
	if err != nil {
		return errs.Wrap(opMovePool, p.Dir, err)
	}
	defer src.Close()
	dst, err := os.Open(to)
	if err != nil {
		return errs.Wrap(opMovePool, to, err)
	}
	defer dst.Close()

	old, err := filepath.Glob(filepath.Join(escapeGlob(p.Dir), damagedCatalogs))
	if err != nil {
		return errs.Wrap(opMovePool, p.Dir, err)
	}
	names := slices.Clone(recordFiles)
	for _, path := range old {
		names = append(names, filepath.Base(path))
	}
	for _, name := range names {
		if !exists(filepath.Join(p.Dir, name)) {
			continue
		}
		if err := treecopy.CopyEntry(ctx, src, dst, name); err != nil {
			return err
		}
	}

	for _, name := range recordDirs {
		if err := copyRecordDir(ctx, filepath.Join(p.Dir, name), filepath.Join(to, name)); err != nil {
			return err
		}
	}
	return nil
}

// copyRecordDir copies a directory, if there is one.
func copyRecordDir(ctx context.Context, from, to string) error {
	if !exists(from) {
		return nil
	}
	if err := os.Mkdir(to, 0o700); err != nil {
		return errs.Wrap(opMovePool, to, err)
	}
	dst, err := os.Open(to)
	if err != nil {
		return errs.Wrap(opMovePool, to, err)
	}
	defer dst.Close()
	_, err = treecopy.CopyDir(ctx, from, dst, treecopy.Options{})
	return err
}

// copyBacking copies the backing file, and leaves out its holes.
func (p *Pool) copyBacking(ctx context.Context, to string, progress func(bytes int64)) error {
	src, err := os.Open(p.BackingFile())
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer dst.Close()

	st, err := src.Stat()
	if err != nil {
		return err
	}
	if err := dst.Truncate(st.Size()); err != nil {
		return err
	}

	for off := int64(0); off < st.Size(); {
		from, end, err := treecopy.NextData(src, off, st.Size())
		if err != nil {
			return err
		}
		for off = from; off < end; {
			if err := ctx.Err(); err != nil {
				return err
			}
			piece := min(copyPiece, end-off)
			if err := copyPart(dst, src, off, piece); err != nil {
				return err
			}
			off += piece
			progress(piece)
		}
		off = end
	}
	return dst.Close()
}

// copyPart copies size bytes at off. Where both files are on one filesystem that can share blocks, they share them.
func copyPart(dst, src *os.File, off, size int64) error {
	if _, err := dst.Seek(off, io.SeekStart); err != nil {
		return err
	}
	if _, err := src.Seek(off, io.SeekStart); err != nil {
		return err
	}
	_, err := io.CopyN(dst, src, size)
	return err
}

// DataBytes returns how many bytes a move copies, roughly.
func (p *Pool) DataBytes() int64 {
	var st unix.Stat_t
	if p.Config.Backing == nil || unix.Stat(p.BackingFile(), &st) != nil {
		return 0
	}
	return st.Blocks * 512
}
