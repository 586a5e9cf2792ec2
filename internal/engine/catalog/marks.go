package catalog

import (
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
)

const markColumns = `id, op, name, reads, mountpoint, made_dir, freezes, owner, pid, start, boot, at`

func scanMark(s scanner) (Mark, error) {
	var m Mark
	var start, at int64
	err := s.Scan(&m.ID, &m.Op, &m.Name, &m.Reads, &m.Mountpoint, &m.MadeDir, &m.Freezes, &m.Owner, &m.PID, &start,
		&m.BootID, &at)
	m.Start, m.At = uint64(start), fromNano(at)
	return m, err
}

// Mark records that an operation, that of the context (see Operation.In), works on m.ID until Unmark, the end of the
// operation or the death of this process. The caller has searched for conflicting marks with BlockingMarks in the same
// transaction. Owner, Process and At are filled in here.
func (t *Tx) Mark(m Mark) error {
	w, err := t.markOwner()
	if err != nil {
		return err
	}

	token, err := w.ensureLiveFile()
	if err != nil {
		return err
	}

	p := thisProcess()
	_, err = t.exec(`INSERT INTO marks (`+markColumns+`) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)`,
		m.ID, m.Op, m.Name, m.Reads, m.Mountpoint, m.MadeDir, m.Freezes, token, p.PID, int64(p.Start), p.BootID,
		toNano(time.Now()))
	if err == nil {
		t.marked++
	}

	return err
}

// Unmark removes a mark of the context's operation or orphan. Absent is success, and so is a mark of another operation
// that works on the object by now: that one stays.
func (t *Tx) Unmark(id driver.ObjectID) error {
	w, err := t.markOwner()
	if err != nil {
		return err
	}
	n, err := t.exec(`DELETE FROM marks WHERE id = ? AND owner = ?`, id, w.liveFileName())
	t.marked -= int(n)
	return err
}

// markOwner is whom marks belong to that are made and removed in this transaction.
func (t *Tx) markOwner() (markOwner, error) {
	if at, ok := t.ctx.Value(markOwnerKey{}).(markOwnerIn); ok && at.dir == t.c.dir {
		return at.markOwner, nil
	}
	return nil, errs.New(errs.Internal, "mark", "", "no operation has begun")
}

// StopReading records that a mark's origin is no longer needed.
func (t *Tx) StopReading(id driver.ObjectID) error {
	_, err := t.exec(`UPDATE marks SET reads = '', freezes = 0 WHERE id = ?`, id)
	return err
}

// MarkFreezes records that the operation that has marked id is about to freeze the filesystem of the object it reads.
func (t *Tx) MarkFreezes(id driver.ObjectID) error {
	_, err := t.exec(`UPDATE marks SET freezes = 1 WHERE id = ?`, id)
	return err
}

// MoveMark records that the operation that has marked id mounts it at mountpoint from here on.
func (t *Tx) MoveMark(id driver.ObjectID, mountpoint string, made bool) error {
	_, err := t.exec(`UPDATE marks SET mountpoint = ?, made_dir = ? WHERE id = ?`, mountpoint, made, id)
	return err
}

// Marks lists all marks, living or dead.
func (t *Tx) Marks() ([]Mark, error) { return t.queryMarks(`1`) }

// BlockingMarks lists the marks that work on object id, read it, or reserve name.
// Either may be "".
func (t *Tx) BlockingMarks(id driver.ObjectID, name string, readers bool) ([]Mark, error) {
	return t.queryMarks(`(id = ?1 AND ?1 <> '') OR (name = ?2 AND ?2 <> '') OR (?3 AND reads = ?1 AND ?1 <> '')`, id, name,
		readers)
}

func (t *Tx) queryMarks(where string, args ...any) ([]Mark, error) {
	var out []Mark
	err := t.eachRow(`SELECT `+markColumns+` FROM marks WHERE `+where, args, func(s scanner) error {
		m, err := scanMark(s)
		out = append(out, m)
		return wrap("read catalogue", t.c.path, err)
	})
	return out, err
}

// MarksOf lists the marks of one operation.
func (t *Tx) MarksOf(owner string) ([]Mark, error) { return t.queryMarks(`owner = ?`, owner) }

// RemoveStaleOwners removes the live files of dead processes that left no work.
func (c *Catalog) RemoveStaleOwners(marks []Mark) error {
	named := map[string]bool{}
	for _, m := range marks {
		named[m.Owner] = true
	}
	return c.removeStaleOwners(named)
}
