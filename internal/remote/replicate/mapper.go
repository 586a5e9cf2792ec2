package replicate

import (
	"context"
	"errors"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// frameAdder stores one frame, and returns where.
type frameAdder func(ctx context.Context, content []byte, codec repo.Codec, plain int) (repo.Frame, error)

// mapper makes the map of a new point, in order of offset: cell by cell, it applies layers to the map of the base, and
// puts the result into a tree.
type mapper struct {
	base     *repo.Manifest  // to merge into, or to compare with; nil: none
	merge    bool            // bytes without a layer are as in base; else they are zero
	ahead    *cellPrefetcher // reads the cells of base; nil without base
	makeTree func(context.Context) (*tree, error)

	tree     *tree // nil until the first layer
	cellOpen bool
	cell     uint32  // number of the open cell
	layers   []layer // changes of the open cell, in order
	at       int64   // without merge: everything before it is in the tree
}

// newMapper begins the map of a volume of size bytes. With scratch, the new map reuses no node of base's map, because
// some of it is damaged.
func newMapper(nodes readNodes, base *repo.Manifest, merge, scratch bool, size int64, ahead *cellPrefetcher) *mapper {
	m := &mapper{base: base, merge: merge, ahead: ahead}
	m.makeTree = func(ctx context.Context) (*tree, error) {
		from := base
		if scratch {
			from = nil
		}
		return newTree(ctx, markBaseDamaged(nodes), from, size)
	}
	return m
}

// markBaseDamaged wraps nodes, so that the error of an unreadable node is errBaseDamaged.
func markBaseDamaged(nodes readNodes) readNodes {
	return func(ctx context.Context, all []repo.NodeAt) ([]repo.ReadNode, error) {
		got, err := nodes(ctx, all)
		for i, n := range got {
			if n.Err != nil {
				got[i].Err = errors.Join(errBaseDamaged, n.Err)
			}
		}
		return got, err
	}
}

// ensureTree makes the tree if there is none.
func (m *mapper) ensureTree(ctx context.Context) (err error) {
	if m.tree == nil {
		m.tree, err = m.makeTree(ctx)
	}
	return err
}

// putLayer applies the next layer, in order of offset.
func (m *mapper) putLayer(ctx context.Context, l layer, add frameAdder) error {
	if err := m.ensureTree(ctx); err != nil {
		return err
	}

	for l.Length > 0 {
		cell := cellOf(l.Offset)
		if m.cellOpen && cell != m.cell {
			if err := m.finishCell(ctx, add); err != nil {
				return err
			}
		}

		// Zero whole cells at once.
		whole := l.end()/repo.CellBytes*repo.CellBytes - l.Offset
		if l.Piece == nil && whole > 0 && l.Offset%repo.CellBytes == 0 {
			if err := m.clearCells(ctx, l.Offset, l.Offset+whole, add); err != nil {
				return err
			}
			l.Offset, l.Length = l.Offset+whole, l.Length-whole
			continue
		}

		// Add the part of the layer in this cell.
		part := l
		part.Length = min(l.Length, cellStart(cell+1)-l.Offset)
		if l.Piece != nil {
			p := cutPiece(*l.Piece, l.Offset, l.Offset+part.Length)
			part.Piece = &p
		}

		m.cellOpen, m.cell = true, cell
		if part.Piece != nil || m.merge {
			m.layers = append(m.layers, part)
		}

		l.Offset, l.Length = l.Offset+part.Length, l.Length-part.Length
	}

	return nil
}

// cellOf returns the number of the cell that an offset lies in.
func cellOf(offset int64) uint32 { return uint32(offset / repo.CellBytes) }

// cellStart returns the offset at which a cell begins.
func cellStart(cell uint32) int64 { return int64(cell) * repo.CellBytes }

// clearCells makes whole cells zero.
func (m *mapper) clearCells(ctx context.Context, from, to int64, add frameAdder) error {
	if !m.merge {
		return nil // bytes without a layer are zero anyway
	}
	if m.base != nil {
		m.ahead.dropCells(cellOf(from), cellOf(to-1))
	}
	if err := m.tree.replace(ctx, from, to, nil); err != nil {
		return err
	}
	return m.flushTree(ctx, to, add)
}

// finishCell puts the open cell, with its layers, into the tree.
func (m *mapper) finishCell(ctx context.Context, add frameAdder) error {
	from, to := cellStart(m.cell), cellStart(m.cell+1)
	if err := m.clearUntil(ctx, from); err != nil {
		return err
	}

	// Read what base has in the cell.
	var old []repo.Piece
	if m.base != nil && m.merge {
		var err error
		if old, err = m.ahead.waitCell(ctx, m.cell); err != nil {
			return err
		}
	}

	if m.base != nil {
		m.ahead.dropCell(m.cell)
	}

	// Replace the cell in the tree.
	now := overlayLayers(old, m.layers)
	m.cellOpen, m.layers, m.at = false, m.layers[:0], to
	if err := m.tree.replace(ctx, from, to, now); err != nil {
		return err
	}

	return m.flushTree(ctx, to, add)
}

// clearUntil makes the range without layers up to an offset zero, unless it is as in base.
func (m *mapper) clearUntil(ctx context.Context, to int64) error {
	if m.merge {
		return nil
	}
	return m.tree.replace(ctx, m.at, to, nil)
}

// flushTree writes the finished part of the tree if much of it is in memory.
func (m *mapper) flushTree(ctx context.Context, before int64, add frameAdder) error {
	if m.tree.held < heldInTree {
		return nil
	}
	return m.tree.flushNodes(ctx, before, add)
}

// finishMap writes the rest of the map, and returns its root.
func (m *mapper) finishMap(ctx context.Context, add frameAdder) (repo.NodeRef, error) {
	if err := m.ensureTree(ctx); err != nil {
		return repo.NodeRef{}, err
	}

	if m.cellOpen {
		if err := m.finishCell(ctx, add); err != nil {
			return repo.NodeRef{}, err
		}
	}

	if err := m.clearUntil(ctx, repo.MaxVolumeBytes); err != nil {
		return repo.NodeRef{}, err
	}

	return m.tree.finishTree(ctx, add)
}

// readCell reads the pieces that a map has in one cell.
func readCell(ctx context.Context, nodes readNodes, m *repo.Manifest, cell uint32) ([]repo.Piece, error) {
	from := cellStart(cell)
	at := m.Root()
	for !at.IsZero() && at.From() <= from && from < at.To() {
		got, err := nodes(ctx, []repo.NodeAt{at})
		if err == nil {
			err = got[0].Err
		}
		if err != nil {
			return nil, err
		}

		if got[0].Children == nil {
			pieces := piecesIn(got[0].Pieces, from, from+repo.CellBytes)
			if n := len(pieces); n > 0 && pieces[n-1].End() > m.SizeBytes {
				return nil, errs.New(
					errs.Damaged,
					"read map",
					m.Volume+"@"+m.Point,
					"the map describes bytes beyond the end of the volume",
				)
			}
			return pieces, nil
		}

		slot := int((from - at.From()) / repo.LevelBytes(at.Level-1))
		at = at.Child(slot, got[0].Children[slot])
	}

	return nil, nil
}
