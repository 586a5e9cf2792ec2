package catalog

import (
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"pando/internal/base/errs"
)

// VolumeOrder is a property by which volumes can be read in order.
type VolumeOrder string

// The orders.
const (
	ByName      VolumeOrder = "name"
	ByCreated   VolumeOrder = "created_at"
	ByUsed      VolumeOrder = "used_at"
	ByExpires   VolumeOrder = "expires_at"
	ByMeasured  VolumeOrder = "measured_at"
	BySize      VolumeOrder = "size"
	ByLogical   VolumeOrder = "logical"
	ByExclusive VolumeOrder = "exclusive"
	ByShared    VolumeOrder = "shared"
	ByExtents   VolumeOrder = "extents"
)

// Never is the place of a time that is not set: after all others.
const Never int64 = 1<<63 - 1

// expression is what the order is by, in SQL.
func (o VolumeOrder) expression() (string, bool) {
	switch o {
	case ByName:
		return "0", true
	case ByCreated, BySize, ByLogical, ByExclusive, ByShared, ByExtents:
		return string(o), true
	case ByUsed, ByExpires, ByMeasured:
		return fmt.Sprintf("CASE %s WHEN 0 THEN %d ELSE %s END", o, Never, o), true
	}
	return "", false
}

// VolumePlace is a place in a list of volumes.
type VolumePlace struct {
	Key  int64  // value of what the list is ordered by: bytes, or nanoseconds since 1970; 0 by name
	Name string // name of the volume
}

// VolumeScan says which volumes to read, and in which order. Volumes with the same value are in order of name.
type VolumeScan struct {
	By    VolumeOrder
	Desc  bool         // whether the largest comes first
	After *VolumePlace // place behind which the scan begins; nil: the beginning

	// Only volumes that meet these conditions are read.
	NamePrefix string  // beginning of the name
	Golden     string  // golden that the volume descends from, if its row names one; "": any
	Owner      *uint32 // user ID of the owner; nil: anybody
	Label      string  // label that the volume has, as in the JSON of labels; "": any
	Mounted    bool    // whether the volume must have a mount record

	until string // name of the last volume that a scan by name looks at; "": all
}

const (
	scanFirst = 256  // volumes that a scan reads at first, in an order that needs all of them to be sorted
	walkMost  = 3000 // volumes that a scan in order of name looks at before it searches for the few that it wants
)

// ScanVolumes calls fn for volumes in order, until it returns false or an error. It also tells fn whether a volume has
// a mount record. In order of name or creation, the cost is that of the volumes that are read; in another order, or if
// few meet the conditions, all are looked at, and sorted as far as fn wants them.
func (t *Tx) ScanVolumes(q VolumeScan, fn func(r Row, mounted bool) (more bool, err error)) error {
	key, ok := q.By.expression()
	if !ok {
		return errs.New(errs.Invalid, "list", string(q.By), "there is no such order")
	}

	n, wanted := 0, true
	count := func(r Row, mounted bool, key int64) (_ bool, err error) {
		n, q.After = n+1, &VolumePlace{key, r.Name}
		wanted, err = fn(r, mounted)
		return wanted, err
	}

	// Walk through the index of names: as far as that is quicker, if only some volumes meet the conditions.
	if q.By == ByName && !q.Mounted {
		walk := q
		if q.Golden != "" || q.Label != "" {
			var err error
			if walk.until, err = t.nameAhead(q); err != nil {
				return err
			}
		}
		where, args := walk.conditions("kind = 'volume'", key)
		err := t.eachScanned(`SELECT 0, `+hasMountRecord+`, `+rowText+` FROM objects WHERE `+where+`
			ORDER BY `+q.order("name"), args, count)
		if err != nil || !wanted || walk.until == "" {
			return err
		}
	}

	// Find the first ones, then more. The index of names would take ten times as long.
	kind := "+kind = 'volume'"
	if q.By == ByCreated || q.Owner != nil && *q.Owner > 0 { // there are indexes of their own
		kind = "kind = 'volume'"
	}
	order := q.order("k") + ", name"
	if q.By == ByName {
		order = q.order("name")
	}
	for limit := scanFirst; ; limit *= 8 {
		n = 0
		where, args := q.conditions(kind, key)
		err := t.eachScanned(`SELECT k, `+hasMountRecord+`, `+rowText+` FROM objects JOIN
			(SELECT id AS i, `+key+` AS k FROM objects WHERE `+where+` ORDER BY `+order+` LIMIT ?)
			ON id = i ORDER BY `+order, append(args, limit), count)
		if err != nil || !wanted || n != limit {
			return err
		}
	}
}

// nameAhead returns the name of the volume that is the walkMost-th from where a scan by name begins; "" if there are
// not as many.
func (t *Tx) nameAhead(q VolumeScan) (name string, err error) {
	where, args := VolumeScan{By: ByName, Desc: q.Desc, After: q.After, NamePrefix: q.NamePrefix}.
		conditions("kind = 'volume'", "0")
	err = t.queryRow(`SELECT name FROM objects WHERE `+where+` ORDER BY `+q.order("name")+` LIMIT 1 OFFSET ?`,
		append(args, walkMost-1)...).Scan(&name)
	if errors.Is(err, sql.ErrNoRows) {
		return "", nil
	}
	return name, wrap("read catalogue", t.c.path, err)
}

// order is the order by an expression, in SQL.
func (q VolumeScan) order(by string) string {
	if q.Desc {
		return by + " DESC"
	}
	return by
}

// HasMoreVolumes reports whether there are more volumes than that.
func (t *Tx) HasMoreVolumes(than int) (more bool, err error) {
	err = t.queryRow(`SELECT EXISTS (SELECT 1 FROM objects WHERE kind = 'volume' LIMIT 1 OFFSET ?)`, than).Scan(&more)
	return more, wrap("read catalogue", t.c.path, err)
}

// hasMountRecord tells whether an object has a mount record.
const hasMountRecord = `EXISTS (SELECT 1 FROM attachments a WHERE a.id = objects.id)`

func (t *Tx) eachScanned(query string, args []any, fn func(Row, bool, int64) (bool, error)) error {
	return t.eachRow(query, args, func(s scanner) error {
		var key int64
		var mounted bool
		var text string
		if err := s.Scan(&key, &mounted, &text); err != nil {
			return wrap("read catalogue", t.c.path, err)
		}
		return t.callWithRow(text, func(r Row) error {
			more, err := fn(r, mounted, key)
			if err == nil && !more {
				err = errEnough
			}
			return err
		})
	})
}

// conditions returns the condition for the volumes to read, in SQL, given that for volumes and the expression that the
// order goes by.
func (q VolumeScan) conditions(kind, key string) (where string, args []any) {
	all := []string{kind}
	add := func(condition string, values ...any) {
		all, args = append(all, condition), append(args, values...)
	}

	if a := q.After; a != nil {
		beyond := ">"
		if q.Desc {
			beyond = "<"
		}
		if q.By == ByName {
			add("name "+beyond+" ?", a.Name)
		} else { // the first condition can be looked up in an index
			add("("+key+") "+beyond+"= ? AND (("+key+") "+beyond+" ? OR name > ?)", a.Key, a.Key, a.Name)
		}
	}

	if q.until != "" && q.Desc {
		add("name >= ?", q.until)
	} else if q.until != "" {
		add("name <= ?", q.until)
	}
	if q.NamePrefix != "" {
		add("name >= ? AND name < ?", q.NamePrefix, q.NamePrefix+"\x7f") // names are ASCII
	}
	if q.Golden != "" {
		add("golden IN (?, '')", q.Golden) // without one, the origin tells
	}
	if q.Owner != nil {
		add("owner = ?", *q.Owner)
		if *q.Owner > 0 { // which the index needs to know
			add("owner > 0")
		}
	}
	if q.Mounted {
		add("id IN (SELECT id FROM attachments)")
	}
	if q.Label != "" {
		add("instr(labels, ?) > 0", q.Label)
	}
	return strings.Join(all, " AND "), args
}
