package repo

import (
	"bytes"
	"context"
	"encoding/binary"
	"iter"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// Tables list the moved frames. The packs of a session belong to tables by their numbers: table n has packs 16n to
// 16n+15. A table tells which of its packs are valid, and which segments each has frames of. Without a table its packs
// are not valid. A table is written once: before a prune removes a pack that no table names, it writes an empty table,
// and the process that is moving frames then notices that the table exists.
//
// Several packs may hold frames of one segment. Readers use the one of the highest generation, and among several of
// these the one with the greatest name. This orders all packs, so that a process that removes a pack because a greater
// one exists, and another that removes that one because of a still greater one, always leave the greatest.

// PacksPerTable is the number of packs that belong to one table.
const PacksPerTable = 16

// Limits of tables.
const (
	maxMovedBytes = 32 << 20 // content, before compression
	maxGeneration = 1<<32 - 1
)

// MovedPack is the entry of a pack in its table.
type MovedPack struct {
	Pack
	Generation uint64         // from 1; higher than those of all packs that its frames come from
	Bytes      int64          // of the object
	Segments   []SegmentState // segments that it has frames of, in order, with the sizes of their original objects
}

// Place is a location of the frames of a segment. The zero Place is the segment's own object.
type Place struct {
	Pack       Pack
	Generation uint64
	PackBytes  int64 // of the pack's object
	Bytes      int64 // of the segment's original object
}

// Compare orders the places of one segment: the greatest is the one to read.
func (p Place) Compare(o Place) int {
	switch {
	case p.Generation < o.Generation:
		return -1
	case p.Generation > o.Generation:
		return 1
	}
	return p.Pack.Compare(o.Pack)
}

// Table names a table of moved frames: the N-th of a session.
type Table struct {
	Session ID
	N       uint32
}

// String returns "<session>/<n>".
func (t Table) String() string { return Segment(t).String() }

func (t Table) key() string { return movedPrefix + t.String() }

// Table returns the table that a pack belongs to.
func (p Pack) Table() Table { return Table{p.Session, p.N / PacksPerTable} }

// encodeMoved encodes the content of a table. Packs and their segments must be in order.
func encodeMoved(packs []MovedPack) []byte {
	b := binary.AppendUvarint(nil, uint64(len(packs)))
	next := uint32(0)
	for _, p := range packs {
		b = binary.AppendUvarint(b, uint64(p.N%PacksPerTable-next))
		next = p.N%PacksPerTable + 1
		b = binary.AppendUvarint(b, p.Generation)
		b = binary.AppendUvarint(b, uint64(p.Bytes))
		table := newSegmentTable(func(yield func(Segment)) {
			for _, s := range p.Segments {
				yield(s.Segment)
			}
		})
		b = table.appendTo(b)
		for _, s := range p.Segments {
			b = binary.AppendUvarint(b, uint64(s.Bytes))
		}
	}

	return b
}

// decodeMoved decodes the content of a table.
func decodeMoved(t Table, b []byte) ([]MovedPack, error) {
	if t.N > (1<<32-1)/PacksPerTable {
		return nil, damaged("the table number is out of range")
	}

	r := &reader{b: b}
	n := r.uvarint("the number of packs", PacksPerTable)
	out := make([]MovedPack, 0, n)
	next := uint64(0)
	for range n {
		slot := next + r.uvarint("the number of a pack", PacksPerTable)
		if r.err == nil && slot >= PacksPerTable {
			r.fail("pack slot %d is out of range", slot)
		}

		// Decode the pack.
		next = slot + 1
		p := MovedPack{Pack: Pack{Session: t.Session, N: t.N*PacksPerTable + uint32(slot)}}
		p.Generation = r.uvarint("a generation", maxGeneration)
		p.Bytes = int64(r.uvarint("the bytes of a pack", MaxSegment))
		segments := r.segmentTable(maxPackFrames)
		if r.err == nil && (p.Generation == 0 || len(segments) == 0) {
			r.fail("pack %s declares generation %d and %d segments", p.Pack, p.Generation, len(segments))
		}
		if r.err != nil {
			return nil, r.err
		}

		// Decode the sizes of its segments.
		p.Segments = make([]SegmentState, 0, len(segments))
		for _, s := range segments {
			n := r.uvarint("the bytes of a segment", MaxSegment)
			p.Segments = append(p.Segments, SegmentState{Segment: s, Bytes: int64(n)})
		}

		out = append(out, p)
	}

	return out, r.finish()
}

// PutTable writes a table of existing packs; an empty table means that its packs will never be valid. Exists: the table
// was already written with other content. If it has the same content, because a response was lost, PutTable succeeds.
// Durable on return.
func (r *Repo) PutTable(ctx context.Context, t Table, packs []MovedPack) error {
	return errs.Wrap("write table", t.String(), r.putTable(ctx, t, packs))
}

func (r *Repo) putTable(ctx context.Context, t Table, packs []MovedPack) error {
	object, err := r.sealTable(t, packs)
	if err != nil {
		return err
	}

	err = r.putIfAbsent(ctx, t.key(), object)
	if !errs.Is(err, errs.Exists) {
		return err
	}

	was, _, rerr := r.getContent(ctx, typeMoved, t.key(), maxMovedBytes)
	want, uerr := r.unseal(ctx, typeMoved, t.key(), object, maxMovedBytes)
	if rerr == nil && uerr == nil && bytes.Equal(was, want) {
		return nil
	}

	return err
}

// sealTable encodes the object of a table.
func (r *Repo) sealTable(t Table, packs []MovedPack) ([]byte, error) {
	packs = slices.SortedFunc(slices.Values(packs), func(a, b MovedPack) int { return a.Pack.Compare(b.Pack) })
	for i := range packs {
		if packs[i].Table() != t || i > 0 && packs[i].Pack == packs[i-1].Pack {
			return nil, badInput("", "", "pack %s does not belong to this table, or is listed twice", packs[i].Pack)
		}
		packs[i].Segments = slices.SortedFunc(slices.Values(packs[i].Segments), func(a, b SegmentState) int {
			return compareSegments(a.Segment, b.Segment)
		})
	}

	content := encodeMoved(packs)
	if _, err := decodeMoved(t, content); err != nil {
		return nil, asInvalid(err)
	}

	return r.seal(typeMoved, t.key(), content, maxMovedBytes)
}

// ReplaceTable overwrites a damaged table, in exactly the state that was read. False: the table is not damaged.
func (r *Repo) ReplaceTable(ctx context.Context, t Table, packs []MovedPack) (bool, error) {
	const op = "replace table"
	_, info, err := r.store.Get(ctx, t.key(), 0, 0)
	if err != nil {
		return false, errs.Wrap(op, t.String(), err)
	}

	if _, err := r.ReadTable(ctx, t); !errs.Is(err, errs.Damaged) {
		return false, err
	}

	object, err := r.sealTable(t, packs)
	if err == nil {
		_, err = r.store.Put(ctx, t.key(), object, objstore.IfVersion(info.Version))
	}

	return err == nil, errs.Wrap(op, t.String(), err)
}

// DescribePack reads the table entry of a pack from the pack itself. NotFound, Damaged, TooNew.
func (r *Repo) DescribePack(ctx context.Context, p PackState) (MovedPack, error) {
	m := MovedPack{Pack: p.Pack, Bytes: p.Bytes}
	err := r.readPackTwice(Place{Pack: p.Pack}, func() error {
		x, err := r.packIndex(ctx, p.Pack, p.Bytes)
		if err != nil {
			return err
		}
		m.Generation, m.Segments = x.generation, nil
		for _, s := range x.segments {
			m.Segments = append(m.Segments, SegmentState{Segment: s.Segment, Bytes: int64(s.bytes)})
		}
		return nil
	})

	return m, err
}

// ReadTable reads a table. NotFound, Damaged, TooNew.
func (r *Repo) ReadTable(ctx context.Context, t Table) ([]MovedPack, error) {
	content, _, err := r.getContent(ctx, typeMoved, t.key(), maxMovedBytes)
	if err != nil {
		return nil, errs.Wrap("read table", t.String(), err)
	}
	packs, err := decodeMoved(t, content)
	return packs, errs.Wrap("read table", t.String(), err)
}

// Tables yields all tables in the order of their keys. An error ends it.
func (r *Repo) Tables(ctx context.Context) iter.Seq2[Table, error] {
	return listSegments(ctx, r, "list the tables in", movedPrefix, func(s Segment, _ int64) Table { return Table(s) })
}

// DeleteTable removes a table whose packs have all been removed. Absent is success. Durable on return.
func (r *Repo) DeleteTable(ctx context.Context, t Table) error {
	return errs.Wrap("delete table", t.String(), r.store.Delete(ctx, t.key()))
}

// Moved is the content of all tables of a repository.
type Moved struct {
	Tables  map[Table][]MovedPack // tables that can be read
	Damaged map[Table]error       // tables that cannot be read
	Packs   map[Pack]int64        // sizes in bytes of the packs that exist
}

// Moved reads all tables and, if there are any, lists the packs. It starts over if a table, or a pack that a table
// names, disappears in the meantime, because another process replaces them.
func (r *Repo) Moved(ctx context.Context) (Moved, error) {
	var last Moved
	for try := 0; ; try++ {
		m, err := r.readTables(ctx)
		if err != nil {
			return Moved{}, err
		}

		if len(m.Tables)+len(m.Damaged) > 0 {
			if err := r.listPacks(ctx, &m); err != nil {
				return Moved{}, err
			}
		}

		lacks := m.countMissingPacks()
		if lacks == 0 || try > 0 && sameTables(last, m) || try == 4 {
			return m, nil
		}

		last = m
	}
}

// MovedAndPacks is Moved, but lists the packs even if there are no tables: a process may have begun to write packs.
func (r *Repo) MovedAndPacks(ctx context.Context) (Moved, error) {
	m, err := r.Moved(ctx)
	if err == nil && len(m.Tables)+len(m.Damaged) == 0 {
		err = r.listPacks(ctx, &m)
	}
	return m, err
}

func (r *Repo) listPacks(ctx context.Context, m *Moved) error {
	for p, err := range r.Packs(ctx) {
		if err != nil {
			return err
		}
		m.Packs[p.Pack] = p.Bytes
	}
	return nil
}

func sameTables(a, b Moved) bool {
	for t := range a.Tables {
		if _, there := b.Tables[t]; !there {
			return false
		}
	}
	return len(a.Tables) == len(b.Tables)
}

// countMissingPacks returns how many packs in the tables do not exist, or have another size.
func (m *Moved) countMissingPacks() (n int) {
	for _, packs := range m.Tables {
		for _, p := range packs {
			if bytes, there := m.Packs[p.Pack]; !there || bytes != p.Bytes {
				n++
			}
		}
	}
	return n
}

// readTables reads all tables; those that were read before come from memory.
func (r *Repo) readTables(ctx context.Context) (Moved, error) {
	for try := 0; ; try++ {
		m := Moved{Tables: map[Table][]MovedPack{}, Damaged: map[Table]error{}, Packs: map[Pack]int64{}}
		removed := false // a table disappeared after it was listed
		for t, err := range r.Tables(ctx) {
			if err != nil {
				return Moved{}, err
			}

			packs, known := r.moves.knownTable(t)
			if !known {
				packs, err = r.ReadTable(ctx, t)
			}

			switch {
			case errs.Is(err, errs.NotFound):
				removed = true
			case errs.Is(err, errs.Damaged, errs.TooNew):
				m.Damaged[t] = err
			case err != nil:
				return Moved{}, err
			default:
				m.Tables[t] = packs
			}
		}

		if !removed || try == 8 {
			r.moves.setTables(m)
			return m, nil
		}
	}
}

// Places returns the place to read each moved segment from: the greatest of the packs that exist with the recorded
// size.
func (m *Moved) Places() map[Segment]Place {
	out := map[Segment]Place{}
	for _, packs := range m.Tables {
		for _, p := range packs {
			if bytes, there := m.Packs[p.Pack]; !there || bytes != p.Bytes {
				continue
			}
			for _, s := range p.Segments {
				at := Place{p.Pack, p.Generation, p.Bytes, s.Bytes}
				if was, known := out[s.Segment]; !known || was.Compare(at) < 0 {
					out[s.Segment] = at
				}
			}
		}
	}

	return out
}
