package engine

import (
	"context"
	"path/filepath"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/pool"
)

const opMovePool = "pool move"

// PoolMoved is the result of MovePool. Its JSON form is stable.
type PoolMoved struct {
	From     string         `json:"from"`
	Dir      string         `json:"dir"`
	Bytes    int64          `json:"bytes"` // copied
	Warnings []errs.Message `json:"warnings,omitempty"`
}

// MovePool moves the pool in dir, which lies in a file of its own and is not in use, to the directory to. See
// pool.Move. If it was interrupted, call it again. NotFound, InUse, Unsupported, NoSpace, Exists, Invalid, Permission.
func MovePool(ctx context.Context, dir, to string, drivers Drivers, tracker *progress.Tracker) (*PoolMoved, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, errs.Wrap(opMovePool, dir, err)
	}
	if to == "" {
		return nil, errs.New(errs.Invalid, opMovePool, `""`, "the path of the directory is empty")
	}
	if to, err = filepath.Abs(to); err != nil {
		return nil, errs.Wrap(opMovePool, to, err)
	}

	// Finish a move that was interrupted after it had been committed.
	out := &PoolMoved{From: dir, Dir: to}
	if done, err := pool.FinishMove(ctx, dir, to); done || err != nil {
		return out, err
	}

	p, err := idlePool(ctx, dir, drivers)
	if err != nil {
		return nil, err
	}

	// Move it.
	tracker.Start("copy", 0, p.DataBytes())
	left, err := p.Move(ctx, to, func(n int64) {
		out.Bytes += n
		tracker.Add(0, n)
	})
	if err != nil {
		return nil, err
	}
	if left != nil {
		out.Warnings = append(out.Warnings, errs.Messagef("the pool was moved, but something is left in %s (%v); remove it "+
			"with %s", dir, left, errs.Run("deinit", errs.Param("pool", dir))))
	}
	return out, nil
}

// idlePool opens the pool in dir, finishes what dead processes left, checks that no volume is mounted, and closes it.
func idlePool(ctx context.Context, dir string, drivers Drivers) (*pool.Pool, error) {
	e, err := Open(ctx, dir, drivers)
	if err != nil {
		return nil, err
	}
	defer e.Close()

	if err := e.needRoot(opMovePool, dir); err != nil {
		return nil, err
	}
	if _, err := e.Maintain(ctx); err != nil {
		return nil, err
	}

	mounted, err := e.mountedVolumes(ctx)
	if err != nil {
		return nil, err
	}
	if len(mounted) > 0 {
		return nil, errs.New(errs.InUse, opMovePool, dir, "mounted: %s", someNames(mounted)).
			WithHint("unmount first: %s", errs.Run("umount", mounted[0]))
	}
	return e.pool, nil
}

// someNames lists names, the first few of them.
func someNames(names []string) string {
	const most = 5
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return strings.Join(names[:most], ", ") + " and " + errs.Plural(len(names)-most, "other volume")
}

// mountedVolumes names the volumes that are mounted, in any namespace.
func (e *Engine) mountedVolumes(ctx context.Context) (names []string, err error) {
	return names, e.cat.View(ctx, func(tx *catalog.Tx) error {
		records, err := tx.MountRecords()
		if err != nil || len(records) == 0 {
			return err
		}
		return tx.Rows(driver.Volume, func(r catalog.Row) error {
			if a, ok := records[r.ID]; ok && e.content.MountState(r, a) != content.NotMounted {
				names = append(names, r.Name)
			}
			return nil
		})
	})
}
