package catalog

import (
	"database/sql"
	"errors"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
)

// RemotePoint says that an object has the content that a manifest in a repository describes. It is a hint: without it
// more is read and compared, and nothing is lost.
type RemotePoint struct {
	Repo     string
	Manifest string
	Object   driver.ObjectID
	At       time.Time
}

// RemoteHead is what the pool remembers of a head in a repository. Without it, a head that is lost or was put back to
// an older state may not be noticed.
type RemoteHead struct {
	Repo     string
	Name     string
	Lineage  driver.ObjectID // of the volume or golden that it is here; "": it was only seen
	Epoch    uint64          // the highest that was seen
	Manifest string          // that was last pushed or pulled; "": it was only seen
	At       time.Time
	NextSeq  uint64 // number of the next point, the highest that was seen with Epoch; 0: not known
}

// PutRemotePoint adds a row, or refreshes its time. NotFound if the object does not exist: the row could then not be
// removed together with the object.
func (t *Tx) PutRemotePoint(p RemotePoint) error {
	n, err := t.exec(`INSERT OR REPLACE INTO remote_points (repo, manifest, object, at) SELECT ?1, ?2, id, ?4
		FROM objects WHERE id = ?3`,
		p.Repo, p.Manifest, p.Object, toNano(p.At))
	if err == nil && n == 0 {
		err = errs.New(errs.NotFound, "write catalogue", string(p.Object), "there is no such object")
	}
	return err
}

// RemotePoints lists what is known of a repository, the oldest first; with repo ""
// of all.
func (t *Tx) RemotePoints(repo string) ([]RemotePoint, error) {
	var out []RemotePoint
	err := t.eachRow(`SELECT repo, manifest, object, at FROM remote_points WHERE repo = ?1 OR ?1 = ''
		ORDER BY at, manifest, object`, []any{repo}, func(s scanner) error {
		var p RemotePoint
		var at int64
		err := s.Scan(&p.Repo, &p.Manifest, &p.Object, &at)
		p.At = fromNano(at)
		out = append(out, p)
		return wrap("read catalogue", t.c.path, err)
	})
	return out, err
}

// DropRemotePoint removes a row. Absent is success.
func (t *Tx) DropRemotePoint(repo, manifest string) error {
	_, err := t.exec(`DELETE FROM remote_points WHERE repo = ? AND manifest = ?`, repo, manifest)
	return err
}

// DropRemote forgets a repository. Absent is success.
func (t *Tx) DropRemote(repo string) error {
	if _, err := t.exec(`DELETE FROM remote_points WHERE repo = ?`, repo); err != nil {
		return err
	}
	if _, err := t.exec(`DELETE FROM remote_heads WHERE repo = ?`, repo); err != nil {
		return err
	}
	return t.forget(pushedToKey(repo))
}

// newest keeps the highest epoch of a row and the new one, and the highest number of a next point that was seen with
// that epoch. Both are unsigned numbers of 64 bits in columns that are signed.
const newest = `
	next = CASE WHEN (excluded.epoch < 0, excluded.epoch) > (epoch < 0, epoch) THEN excluded.next
		WHEN excluded.epoch = epoch AND (excluded.next < 0, excluded.next) > (next < 0, next) THEN excluded.next
		ELSE next END,
	epoch = CASE WHEN (excluded.epoch < 0, excluded.epoch) > (epoch < 0, epoch) THEN excluded.epoch ELSE epoch END`

const insertHead = `INSERT INTO remote_heads (repo, name, lineage, epoch, manifest, at, next) VALUES (?,?,?,?,?,?,?)
	ON CONFLICT (repo, name) DO UPDATE SET `

// MoveRemoteHeads records that the heads of one lineage belong to another from now on.
func (t *Tx) MoveRemoteHeads(from, to driver.ObjectID) error {
	_, err := t.exec(`UPDATE remote_heads SET lineage=? WHERE lineage=?`, to, from)
	return err
}

// PutRemoteHead remembers a head that was pushed or pulled. What was seen of it never becomes older by this: see
// DropRemoteHead.
func (t *Tx) PutRemoteHead(h RemoteHead) error {
	_, err := t.exec(insertHead+`lineage = excluded.lineage, manifest = excluded.manifest, at = excluded.at,`+newest,
		h.Repo, h.Name, h.Lineage, int64(h.Epoch), h.Manifest, toNano(h.At), int64(h.NextSeq))
	return err
}

// PutSeenRemoteHead remembers the epoch and the next point of a head that was only read. What was pushed or pulled of
// it stays.
func (t *Tx) PutSeenRemoteHead(h RemoteHead) error {
	_, err := t.exec(insertHead+newest, h.Repo, h.Name, "", int64(h.Epoch), "", toNano(h.At), int64(h.NextSeq))
	return err
}

// RemoteHeads lists the heads that are remembered of a repository, by name; with
// repo "" of all.
func (t *Tx) RemoteHeads(repo string) ([]RemoteHead, error) {
	var out []RemoteHead
	err := t.eachRow(
		`SELECT repo, name, lineage, epoch, manifest, at, next FROM remote_heads WHERE repo = ?1 OR ?1 = ''
		ORDER BY repo, name`,
		[]any{repo},
		func(s scanner) error {
			var h RemoteHead
			var epoch, at, next int64
			err := s.Scan(&h.Repo, &h.Name, &h.Lineage, &epoch, &h.Manifest, &at, &next)
			h.Epoch, h.At, h.NextSeq = uint64(epoch), fromNano(at), uint64(next)
			out = append(out, h)
			return wrap("read catalogue", t.c.path, err)
		},
	)

	return out, err
}

// DropRemoteHead forgets a head. Absent is success.
func (t *Tx) DropRemoteHead(repo, name string) error {
	_, err := t.exec(`DELETE FROM remote_heads WHERE repo = ? AND name = ?`, repo, name)
	return err
}

// ManifestOf returns a manifest in a repository that describes the content of an object; "" if none is known.
func (t *Tx) ManifestOf(repo string, object driver.ObjectID) (string, error) {
	var manifest string
	err := t.queryRow(`SELECT manifest FROM remote_points WHERE object = ? AND repo = ? ORDER BY at, manifest LIMIT 1`,
		object, repo).Scan(&manifest)
	if errors.Is(err, sql.ErrNoRows) {
		return "", nil
	}
	return manifest, wrap("read catalogue", t.c.path, err)
}
