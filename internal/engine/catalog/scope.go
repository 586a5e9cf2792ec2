package catalog

import (
	"context"
	"strconv"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
)

// Scope limits what a user reaches: in its transactions, names lead only to what it admits. Whatever else has a name
// does not exist for the user, and errors do not tell the difference. It does not limit what is found by ID.
type Scope struct {
	UID    uint32                 // its volumes, with their snapshots
	All    bool                   // volumes of others may be seen, but not changed
	Reads  bool                   // the call only tells what it finds: what All admits is found
	Owned  bool                   // the call changes what it names: a golden is refused
	Golden func(name string) bool // which goldens are found

	MaxVolumes int   // that the user may have; 0: any number
	MaxBytes   int64 // that the user's volumes and their snapshots may have, each by its size; 0: any number

	MaxTTL time.Duration // that volumes may live, from when they were made; 0: for ever
}

type scopeKey struct{}

// Within returns a context whose transactions have a scope.
func Within(ctx context.Context, s Scope) context.Context {
	return context.WithValue(ctx, scopeKey{}, &s)
}

// ScopeOf returns the scope of a context; nil: it has none, and everything is found.
func ScopeOf(ctx context.Context) *Scope {
	s, _ := ctx.Value(scopeKey{}).(*Scope)
	return s
}

// SeesGolden reports whether goldens of a name are found.
func (s *Scope) SeesGolden(name string) bool { return s == nil || s.Golden != nil && s.Golden(name) }

// Has reports whether a volume belongs to the user.
func (s *Scope) Has(vol Row) bool { return s == nil || !vol.Owner.IsZero() && vol.Owner.UID == s.UID }

// sees reports whether a volume is found.
func (s *Scope) sees(vol Row) bool { return s.Has(vol) || s.All && s.Reads }

// admitVolume decides whether a volume is found. Permission if the user may see it, but not do this with it.
func (s *Scope) admitVolume(op string, vol Row) (found bool, err error) {
	if s.sees(vol) {
		return true, nil
	}
	if s.All {
		return false, errs.New(errs.Permission, op, vol.Name, "this volume belongs to another user").
			WithHint("list yours with %s", errs.Run("ls"))
	}
	return false, nil
}

// admitGolden decides whether a golden is found. Permission if the user may clone it, but not change it.
func (s *Scope) admitGolden(op, name string) (found bool, err error) {
	if !s.SeesGolden(name) {
		return false, nil
	}
	if s != nil && s.Owned {
		return false, errs.New(errs.Permission, op, name, "only root may change a golden").
			WithHint("use the name of a volume of yours, or ask root")
	}
	return true, nil
}

// shows reports whether the scope admits what a row describes.
func (t *Tx) shows(r Row) bool {
	s := ScopeOf(t.ctx)
	switch r.Kind {
	case driver.Volume:
		return s.sees(r)
	case driver.Snapshot:
		vol, ok, err := t.LineageHolder(r.Volume)
		return s == nil || err == nil && ok && s.sees(vol)
	}
	return s.SeesGolden(r.Golden)
}

// uidOf is the part of the column owner before the group: an index has it.
const uidOf = `substr(owner, 1, instr(owner, ':'))`

// ofUser selects the volumes of a user, given uidKey.
const ofUser = `kind = 'volume' AND owner <> '' AND ` + uidOf + ` = ?`

func uidKey(uid uint32) string { return strconv.FormatUint(uint64(uid), 10) + ":" }

// volumesInScope returns the condition for the volumes that the scope admits, with its arguments.
func (t *Tx) volumesInScope() (where string, args []any) {
	if s := ScopeOf(t.ctx); s != nil && !(s.All && s.Reads) {
		return ofUser, []any{uidKey(s.UID)}
	}
	return `kind = 'volume'`, nil
}

// VisibleVolumes calls fn for every volume that the scope admits, in order of name.
func (t *Tx) VisibleVolumes(fn func(Row) error) error {
	s := ScopeOf(t.ctx)
	if s == nil || s.All && s.Reads {
		return t.Rows(driver.Volume, fn)
	}
	return t.eachRow(`SELECT `+rowText+` FROM objects WHERE `+ofUser+` ORDER BY name`, []any{uidKey(s.UID)},
		func(sc scanner) error {
			var text string
			if err := sc.Scan(&text); err != nil {
				return wrap("read catalogue", t.c.path, err)
			}
			return t.callWithRow(text, fn)
		})
}

// CheckTTL refuses a time for a volume to expire at that is later than the scope allows; zero is never. Permission.
func (t *Tx) CheckTTL(op string, vol Row, at time.Time) error {
	s := ScopeOf(t.ctx)
	if s == nil || s.MaxTTL == 0 {
		return nil
	}
	if last := vol.CreatedAt.Add(s.MaxTTL); at.IsZero() || at.After(last) {
		return errs.New(errs.Permission, op, vol.Name, "the policy lets your volumes live for %s: this one until %s",
			s.MaxTTL, last.Local().Format(time.DateTime)).WithHint("publish or export what you want to keep")
	}
	return nil
}

// CheckRoom refuses more volumes and bytes than the scope allows, in addition to those that the user has. NoSpace;
// Unsupported for a volume without a size if bytes are limited.
func (t *Tx) CheckRoom(op, name string, volumes int, bytes int64, sized bool) error {
	s := ScopeOf(t.ctx)
	if s == nil || s.MaxVolumes == 0 && s.MaxBytes == 0 {
		return nil
	}
	if s.MaxBytes > 0 && !sized {
		return errs.New(errs.Unsupported, op, name, "the policy limits your bytes, but volumes of this pool have no size").
			WithHint("ask root to remove max_bytes from your rule, or to use a pool whose volumes have a size")
	}

	haveVolumes, haveBytes, err := t.usedBy(s.UID)
	if err != nil {
		return err
	}
	return s.checkRoom(op, name, haveVolumes, haveBytes, volumes, bytes)
}

// checkRoom refuses more than the limits, given what the user has without that.
func (s *Scope) checkRoom(op, name string, haveVolumes int, haveBytes int64, volumes int, bytes int64) error {
	switch {
	case s.MaxVolumes > 0 && volumes > s.MaxVolumes-haveVolumes:
		return errs.New(errs.NoSpace, op, name, "the policy allows you %s, and you have %d",
			errs.Plural(s.MaxVolumes, "volume"), haveVolumes).
			WithHint("destroy one that you no longer need: %s", errs.Run("destroy", "VOLUME"))
	case s.MaxBytes > 0 && bytes > s.MaxBytes-haveBytes:
		return errs.New(errs.NoSpace, op, name, "the policy allows your volumes and snapshots %s, and they have %s",
			errs.FormatBytes(s.MaxBytes), errs.FormatBytes(haveBytes)).
			WithHint("destroy volumes or snapshots that you no longer need: %s", errs.Run("destroy", "VOLUME"))
	}
	return nil
}

// usedBy returns how many volumes a user has, and the sizes of these and their snapshots.
func (t *Tx) usedBy(uid uint32) (volumes int, bytes int64, err error) {
	key := uidKey(uid)
	if err := t.queryRow(`SELECT count(*), coalesce(sum(size), 0) FROM objects WHERE `+ofUser, key).
		Scan(&volumes, &bytes); err != nil {
		return 0, 0, wrap("read catalogue", t.c.path, err)
	}

	var snapshots int64
	err = t.queryRow(`SELECT coalesce(sum(size), 0) FROM objects WHERE kind = 'snapshot' AND volume IN
		(SELECT CASE volume WHEN '' THEN id ELSE volume END FROM objects WHERE `+ofUser+`)`, key).Scan(&snapshots)
	return volumes, bytes + snapshots, wrap("read catalogue", t.c.path, err)
}

// checkPut holds the limits of the scope against what a transaction has made, right before its commit: of several at
// the same time, the later ones see what the earlier ones have made.
func (t *Tx) checkPut() error {
	s := ScopeOf(t.ctx)
	if s == nil || s.MaxVolumes == 0 && s.MaxBytes == 0 {
		return nil
	}

	// Count what it has made for the user. It may also have finished the work of another one.
	var made []Row
	var volumes int
	var bytes int64
	for _, r := range t.limited {
		vol, known := r, true
		if r.Kind == driver.Snapshot {
			var err error
			if vol, known, err = t.LineageHolder(r.Volume); err != nil {
				return err
			}
		}
		if !known || !s.Has(vol) {
			continue
		}
		if s.MaxBytes > 0 && r.SizeBytes == 0 {
			return t.CheckRoom(t.op(), t.RefOf(r), 0, 0, false)
		}
		made, bytes = append(made, r), bytes+r.SizeBytes
		if r.Kind == driver.Volume && r.Volume == "" {
			volumes++ // one with a lineage continues another volume
		}
	}
	if len(made) == 0 {
		return nil
	}

	haveVolumes, haveBytes, err := t.usedBy(s.UID)
	if err != nil {
		return err
	}
	return s.checkRoom(t.op(), t.RefOf(made[0]), haveVolumes-volumes, haveBytes-bytes, volumes, bytes)
}

// op returns the operation that the transaction belongs to.
func (t *Tx) op() string {
	if o, ok := t.ctx.Value(markOwnerKey{}).(markOwnerIn); ok {
		return o.lastOp()
	}
	return ""
}
