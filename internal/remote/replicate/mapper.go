package replicate

import (
	"context"
	"errors"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// frameAdder stores one frame, and returns where.
type frameAdder func(ctx context.Context, content []byte, codec repo.Codec, plain int) (repo.Frame, error)

// mapper makes the map of a new point, in order of offset: unit by unit, it applies layers to the map of the base, and
// puts the result into a tree. A unit is a cell, or a region if base is of version 1. The mapper then reads all regions
// of base, once after an upgrade, so that the whole new map is a tree.
type mapper struct {
	base     *repo.Manifest  // to merge into, or to compare with; nil: none
	merge    bool            // bytes without a layer are as in base; else they are zero
	ahead    *pagePrefetcher // of base; nil without
	makeTree func(context.Context) (*tree, error)

	tree       *tree // nil until the first layer
	unit       int64 // bytes
	unitOpen   bool
	unitNumber uint32 // of the open unit
	layers     []layer
	at         int64 // everything before it is in the tree
	nextPage   int   // index of the first of base's pages that is not in the tree
}

// newMapper begins the map of a volume of size bytes. With scratch, the new map reuses no node of base's map, because
// some of it is damaged.
func newMapper(nodes readNodes, base *repo.Manifest, merge, scratch bool, size int64, ahead *pagePrefetcher) *mapper {
	m := &mapper{base: base, merge: merge, ahead: ahead, unit: unitOf(base)}
	m.makeTree = func(ctx context.Context) (*tree, error) {
		from := base
		if from != nil && (from.Version < 2 || scratch) {
			from = nil
		}
		return newTree(ctx, markBaseDamaged(nodes), from, size)
	}
	return m
}

// unitOf returns how many bytes of a volume's map are read at once to change it.
func unitOf(base *repo.Manifest) int64 {
	if base != nil && base.Version < 2 {
		return repo.RegionBytes
	}
	return repo.CellBytes
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
		n := uint32(l.Offset / m.unit)
		if m.unitOpen && n != m.unitNumber {
			if err := m.finishUnit(ctx, add); err != nil {
				return err
			}
		}

		// Zero whole units at once.
		whole := l.end()/m.unit*m.unit - l.Offset
		if l.Piece == nil && whole > 0 && l.Offset%m.unit == 0 && m.canClearUnits() {
			if err := m.clearUnits(ctx, l.Offset, l.Offset+whole, add); err != nil {
				return err
			}
			l.Offset, l.Length = l.Offset+whole, l.Length-whole
			continue
		}

		// Add the part of the layer in this unit.
		part := l
		part.Length = min(l.Length, int64(n+1)*m.unit-l.Offset)
		if l.Piece != nil {
			p := cutPiece(*l.Piece, l.Offset, l.Offset+part.Length)
			part.Piece = &p
		}

		m.unitOpen, m.unitNumber = true, n
		if part.Piece != nil || m.merge {
			m.layers = append(m.layers, part)
		}

		l.Offset, l.Length = l.Offset+part.Length, l.Length-part.Length
	}

	return nil
}

// canClearUnits reports whether whole units can be cleared without reading base. Pages of version 1 cannot: they are
// put into the tree one by one.
func (m *mapper) canClearUnits() bool { return m.unit == repo.CellBytes }

// clearUnits makes whole units zero.
func (m *mapper) clearUnits(ctx context.Context, from, to int64, add frameAdder) error {
	if !m.merge {
		return nil // bytes without a layer are zero anyway
	}
	if m.base != nil {
		m.ahead.dropRegions(uint32(from/m.unit), uint32((to-1)/m.unit))
	}
	m.at = to
	if err := m.tree.replace(ctx, from, to, nil); err != nil {
		return err
	}
	return m.flushTree(ctx, to, add)
}

// finishUnit puts the open unit, with its layers, into the tree.
func (m *mapper) finishUnit(ctx context.Context, add frameAdder) error {
	from := int64(m.unitNumber) * m.unit
	if err := m.copyUnchanged(ctx, from, add); err != nil {
		return err
	}

	// Read what base has in the unit.
	var old []repo.Piece
	if m.base != nil && m.merge {
		var err error
		if old, err = m.ahead.waitRegion(ctx, m.unitNumber); err != nil {
			return err
		}
	}

	if m.base != nil {
		m.ahead.dropRegion(m.unitNumber)
		if m.nextPage < len(m.base.Pages) && m.base.Pages[m.nextPage].Region == m.unitNumber {
			m.nextPage++
		}
	}

	// Replace the unit in the tree.
	now := overlayLayers(old, m.layers)
	m.unitOpen, m.layers, m.at = false, m.layers[:0], from+m.unit
	if err := m.replaceUnit(ctx, from, from+m.unit, now); err != nil {
		return err
	}

	return m.flushTree(ctx, m.at, add)
}

// replaceUnit replaces the content of one unit in the tree with pieces.
func (m *mapper) replaceUnit(ctx context.Context, from, to int64, pieces []repo.Piece) error {
	if to-from == repo.CellBytes {
		return m.tree.replace(ctx, from, to, pieces)
	}
	return fillCells(ctx, m.tree, pieces) // into a new tree
}

// copyUnchanged puts the ranges without layers into the tree, up to an offset.
func (m *mapper) copyUnchanged(ctx context.Context, to int64, add frameAdder) error {
	switch {
	case !m.merge:
		return m.tree.replace(ctx, m.at, to, nil)
	case m.base == nil || m.base.Version == 2:
		return nil
	}

	// Convert the pages of version 1, reading a few ahead.
	for ; m.nextPage < len(m.base.Pages) && regionStart(m.base.Pages[m.nextPage].Region) < to; m.nextPage++ {
		for _, p := range m.base.Pages[m.nextPage:min(m.nextPage+regionAhead/2, len(m.base.Pages))] {
			if regionStart(p.Region) < to {
				m.ahead.prefetchRegion(p.Region)
			}
		}

		region := m.base.Pages[m.nextPage].Region
		pieces, err := m.ahead.waitRegion(ctx, region)
		if err != nil {
			return err
		}

		m.ahead.dropRegion(region)
		if err := fillCells(ctx, m.tree, pieces); err != nil {
			return err
		}

		if err := m.flushTree(ctx, regionStart(region+1), add); err != nil {
			return err
		}
	}

	return nil
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

	if m.unitOpen {
		if err := m.finishUnit(ctx, add); err != nil {
			return repo.NodeRef{}, err
		}
	}

	end := int64(repo.MaxVolumeBytes)
	if err := m.copyUnchanged(ctx, end, add); err != nil {
		return repo.NodeRef{}, err
	}

	return m.tree.finishTree(ctx, add)
}

// readCell reads the pieces that a map of version 2 has in one cell.
func readCell(ctx context.Context, nodes readNodes, m *repo.Manifest, cell uint32) ([]repo.Piece, error) {
	from := int64(cell) * repo.CellBytes
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
