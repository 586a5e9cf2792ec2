package replicate

import (
	"context"
	"errors"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// frameAdder stores one frame.
type frameAdder func(ctx context.Context, content []byte, codec repo.Codec, plain int) (repo.Frame, error)

// mapper makes the new map, in order of offset: it lays what is said of the volume over what is known of it, unit by
// unit, and puts the result into a tree. A unit is a cell, or a region, if base is of version 1; all regions of that
// are read then, once after an upgrade, so that the new map is a tree all through.
type mapper struct {
	base     *repo.Manifest  // what is merged into, or compared with; nil: nothing
	merge    bool            // what nobody speaks of is as in base; else it is zero
	ahead    *pagePrefetcher // of base; nil without
	makeTree func(context.Context) (*tree, error)

	tree       *tree // once something was put
	unit       int64 // bytes
	unitOpen   bool
	unitNumber uint32 // of the open unit
	layers     []layer
	at         int64 // all before it is in the tree
	nextPage   int   // of base's pages, the first that is not in the tree
}

// newMapper begins the map of a volume of size bytes. scratch: nothing of base's map is used again, as something of
// it is damaged.
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

// unitOf is how much of a map is read at once to change it.
func unitOf(base *repo.Manifest) int64 {
	if base != nil && base.Version < 2 {
		return repo.RegionBytes
	}
	return repo.CellBytes
}

// intact reports nodes that cannot be read as errBaseDamaged.
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

// prepare makes sure that there is a tree.
func (m *mapper) ensureTree(ctx context.Context) (err error) {
	if m.tree == nil {
		m.tree, err = m.makeTree(ctx)
	}
	return err
}

// put takes the next layer, in order of offset.
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

		if whole := l.end()/m.unit*m.unit - l.Offset; l.Piece == nil && whole > 0 && l.Offset%m.unit == 0 && m.canClearUnits() {
			if err := m.clearUnits(ctx, l.Offset, l.Offset+whole, add); err != nil {
				return err
			}
			l.Offset, l.Length = l.Offset+whole, l.Length-whole
			continue
		}

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

// convertable reports whether whole units can be cleared without a look at base: the pages of version 1 are put into
// the tree one by one.
func (m *mapper) canClearUnits() bool { return m.unit == repo.CellBytes }

// clear makes whole units zero.
func (m *mapper) clearUnits(ctx context.Context, from, to int64, add frameAdder) error {
	if !m.merge {
		return nil // what nobody speaks of is zero
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

// finishUnit puts the open unit into the tree.
func (m *mapper) finishUnit(ctx context.Context, add frameAdder) error {
	from := int64(m.unitNumber) * m.unit
	if err := m.copyUnchanged(ctx, from, add); err != nil {
		return err
	}

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

	now := overlayLayers(old, m.layers)
	m.unitOpen, m.layers, m.at = false, m.layers[:0], from+m.unit
	if err := m.replaceUnit(ctx, from, from+m.unit, now); err != nil {
		return err
	}

	return m.flushTree(ctx, m.at, add)
}

// fill makes pieces all that there is in a range.
func (m *mapper) replaceUnit(ctx context.Context, from, to int64, pieces []repo.Piece) error {
	if to-from == repo.CellBytes {
		return m.tree.replace(ctx, from, to, pieces)
	}
	return fillCells(ctx, m.tree, pieces) // into a new tree
}

// upTo puts into the tree what nobody has spoken of, up to an offset.
func (m *mapper) copyUnchanged(ctx context.Context, to int64, add frameAdder) error {
	switch {
	case !m.merge:
		return m.tree.replace(ctx, m.at, to, nil)
	case m.base == nil || m.base.Version == 2:
		return nil
	}

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

// flush writes what is done of the tree, if it is much.
func (m *mapper) flushTree(ctx context.Context, before int64, add frameAdder) error {
	if m.tree.held < heldInTree {
		return nil
	}
	return m.tree.flushNodes(ctx, before, add)
}

// finish writes what is left of the map, and returns its root.
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

// readCell reads what a map of version 2 has in one cell.
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
