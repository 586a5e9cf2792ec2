package engine

import (
	"context"

	"pando/internal/base/waiting"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/ledger"
)

// freezes gives access to the marks of processes that freeze a volume in order to copy it. It implements
// [content.Freezes].
type freezes struct {
	e      *Engine
	volume driver.ObjectID
	making driver.ObjectID // the copy, whose mark is this call's own
}

// Note implements [content.Freezes].
func (f freezes) Note(ctx context.Context) error {
	return f.e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.MarkFreezes(f.making) })
}

// Processes implements [content.Freezes].
func (f freezes) Processes(ctx context.Context) []waiting.Process {
	marks, err := f.otherMarks(ctx)
	if err != nil {
		return nil
	}
	return ledger.Processes(marks)
}

// CleanUp implements [content.Freezes].
func (f freezes) CleanUp(ctx context.Context) (ours bool, err error) {
	marks, err := f.otherMarks(ctx)
	if err != nil || len(marks) == 0 {
		return false, err
	}
	_, err = f.e.ledger.CleanUp(ctx, marks)
	return true, err
}

// otherMarks returns the marks of other copies that may have frozen the volume.
func (f freezes) otherMarks(ctx context.Context) (out []catalog.Mark, err error) {
	err = f.e.cat.View(ctx, func(tx *catalog.Tx) error {
		marks, err := tx.Marks()
		for _, m := range marks {
			if m.Freezes && m.Reads == f.volume && m.ID != f.making {
				out = append(out, m)
			}
		}
		return err
	})
	return out, err
}

// copyLive makes an object with the content of a volume, snapshot or generation, even while programs write to it. The
// caller has marked id.ID. It returns the errors of [content.Access.CopyLive].
func (e *Engine) copyLive(ctx context.Context, l content.Live, id driver.Identity, immutable bool) error {
	return e.content.CopyLive(ctx, l, id, immutable, freezes{e, l.Row.ID, id.ID})
}

// Thaw implements [ledger.Work].
func (w work) Thaw(ctx context.Context, id driver.ObjectID) error {
	e := w.e
	var l content.Live
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		row, ok, err := tx.Object(id)
		if err == nil && ok {
			l, err = e.content.FindLive(tx, row, FreezeAlways)
		}
		return err
	})
	if err != nil {
		return err
	}

	return e.content.Thaw(ctx, l)
}
