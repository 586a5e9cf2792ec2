package catalog

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"sync"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/driver"

	"golang.org/x/sys/unix"
)

// schemaNames finds the tables and indexes of the schema.
var schemaNames = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`(?m)^CREATE (?:UNIQUE )?(?:TABLE|INDEX) (\w+)`)
})

// Check reads the whole database and returns what is wrong with it, in SQLite's words; nil if nothing is. An error
// means that it could not be checked.
func (c *Catalog) Check(ctx context.Context) ([]string, error) {
	var out []string
	err := c.View(ctx, func(tx *Tx) error {
		if err := tx.eachRow(`PRAGMA integrity_check(20)`, nil, func(s scanner) error {
			var line string
			err := s.Scan(&line)
			if err == nil && line != "ok" {
				out = append(out, line)
			}
			return wrap("check catalogue", c.path, err)
		}); err != nil {
			return err
		}

		have := map[string]bool{}
		if err := tx.eachRow(`SELECT name FROM sqlite_schema`, nil, func(s scanner) error {
			var name string
			err := s.Scan(&name)
			have[name] = true
			return wrap("check catalogue", c.path, err)
		}); err != nil {
			return err
		}

		for _, m := range schemaNames().FindAllStringSubmatch(schema, -1) {
			if !have[m[1]] {
				out = append(out, m[1]+" is missing in the schema")
			}
		}

		return nil
	})
	if errs.Is(err, errs.Damaged) {
		return append(out, err.Error()), nil
	}

	return out, err
}

// SetIdentity makes the row of an object match id. Without such an object it does nothing.
func (t *Tx) SetIdentity(id driver.Identity) error {
	before, ok, err := t.Object(id.ID)
	if err != nil || !ok || before.Identity == id {
		return err
	}

	ref := t.RefOf(before)
	if _, err := t.exec(`UPDATE objects SET kind=?, name=?, golden=?, generation=?, volume=?, fs=?, size=?, sector=?,
		origin=?, origin_id=?,
		created_at=?, expires_at=?, ephemeral=?, boot=?, pinned=?, consistency=?, lower=?, mirror=?, labels=?,
		ord=?, owner=?
		WHERE id=?`,
		id.Kind, id.Name, id.Golden, id.Generation, id.Volume, id.FS, id.SizeBytes, id.Sector, id.Origin, id.OriginID,
		toNano(id.CreatedAt), toNano(id.ExpiresAt), id.Ephemeral, id.BootID, toNano(id.Pinned), id.Consistency,
		id.Lower, id.Mirror, storedLabels(id), id.Order, id.Owner, id.ID); err != nil {
		return err
	}

	// Say what has changed.
	now := Row{Identity: id}
	switch {
	case before.Kind != now.Kind:
		if err := t.noteObject(api.EventDestroy, before, ref, ""); err != nil {
			return err
		}
		return t.noteObject(api.EventCreate, now, t.RefOf(now), ref)
	case ref != t.RefOf(now):
		return t.noteObject(api.EventRename, now, t.RefOf(now), ref)
	}
	return t.noteIdentity(before, now, ref)
}

// noteIdentity writes the events of an object that has another size or base than before.
func (t *Tx) noteIdentity(before, now Row, ref string) error {
	if before.SizeBytes != now.SizeBytes {
		if err := t.noteObject(api.EventChange, now, ref, fmt.Sprintf("size=%d", now.SizeBytes)); err != nil {
			return err
		}
	}
	if before.Golden != now.Golden || before.Generation != now.Generation {
		return t.noteObject(api.EventChange, now, ref, "base="+baseText(now.Golden, now.Generation))
	}
	return nil
}

// IsLive reports whether the operation that owns marks is alive. It changes nothing.
func (c *Catalog) IsLive(owner string) (bool, error) {
	path := filepath.Join(c.dir, "live", owner)
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, errs.Wrap("check", path, err)
	}

	defer f.Close()
	err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return true, nil
	}

	return false, errs.Wrap("check", path, err)
}

// StaleOwners lists the live files of dead processes that no mark names.
func (c *Catalog) StaleOwners(marks []Mark) ([]string, error) {
	named := map[string]bool{}
	for _, m := range marks {
		named[m.Owner] = true
	}

	live := filepath.Join(c.dir, "live")
	entries, err := os.ReadDir(live)
	if err != nil {
		return nil, errs.Wrap("check", live, err)
	}

	var out []string
	for _, e := range entries {
		if named[e.Name()] || isSpare(e.Name()) {
			continue
		}
		if living, err := c.IsLive(e.Name()); err != nil {
			return nil, err
		} else if !living {
			out = append(out, e.Name())
		}
	}

	return out, nil
}
