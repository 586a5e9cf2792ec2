package catalog

import (
	"cmp"
	"context"
	"strings"
	"time"

	"pando/internal/driver"
)

// ChangeKind is what has happened to an object.
type ChangeKind string

const (
	Made      ChangeKind = "made"    // it has a row now
	Updated   ChangeKind = "updated" // its identity was changed; a golden: its properties
	Destroyed ChangeKind = "destroyed"
	Renamed   ChangeKind = "renamed"
	Mounted   ChangeKind = "mounted"
	Unmounted ChangeKind = "unmounted"
	Pinned    ChangeKind = "pinned" // Until zero: unpinned
	Expires   ChangeKind = "expires"
	Pushed    ChangeKind = "pushed"
)

// GoldenKind is the kind of a Change of a golden itself, which has no object of its own.
const GoldenKind driver.Kind = "golden"

// Change is a change that a transaction has committed, for the history of the pool. Every method of Tx that changes
// what users see of an object notes one, so no operation can forget it.
type Change struct {
	Kind       ChangeKind
	Op         string // of the newest mark of the operation that made it; "" if it has none
	Object     driver.Kind
	ID         driver.ObjectID
	Lineage    driver.ObjectID // of the volume, or of a snapshot's volume
	Ref        string          // as users write it
	RefBefore  string          // Renamed
	Origin     string          // Made
	Mountpoint string          // Mounted
	SizeBytes  int64           // Updated
	Until      time.Time       // Pinned, Expires
	Remote     string          // Pushed; Made: pulled
	Owner      driver.Owner    // of the volume, or of a snapshot's volume
}

// Noting says how changes are noted. The zero value changes nothing.
type Noting struct {
	Op     string // instead of that of the newest mark
	Remote string // of objects that are made: where they were pulled from
	Not    bool   // they are not noted: they only serve another change, which is
}

type notingKey struct{}

// NoteAs returns a context whose transactions note their changes in this way.
func NoteAs(ctx context.Context, n Noting) context.Context {
	if outer, ok := ctx.Value(notingKey{}).(Noting); ok {
		n.Not = n.Not || outer.Not
	}
	return context.WithValue(ctx, notingKey{}, n)
}

// OnChange sets a function that Update calls after a commit with everything that it has changed.
func (c *Catalog) OnChange(fn func(context.Context, []Change)) { c.onChange = fn }

// note adds a change of the object in a row.
func (t *Tx) note(kind ChangeKind, r Row, with func(*Change)) {
	if t.c.onChange == nil || r.Kind == driver.Layer || r.Kind == driver.Scratch {
		return
	}

	ch := Change{Kind: kind, Object: r.Kind, ID: r.ID, Lineage: r.Volume}
	ch.Ref, ch.Owner = t.refForNote(r)
	if r.Kind == driver.Volume {
		ch.Lineage = r.Lineage()
	}
	if with != nil {
		with(&ch)
	}
	t.addNote(ch)
}

func (t *Tx) addNote(ch Change) {
	how, _ := t.ctx.Value(notingKey{}).(Noting)
	if t.c.onChange == nil || how.Not {
		return
	}

	ch.Op = cmp.Or(how.Op, t.op())
	if ch.Kind == Made {
		ch.Remote = how.Remote
	}
	t.changes = append(t.changes, ch)
}

// refForNote is RefOf, with the owner of the volume. A snapshot that is destroyed together with its volume has the name
// that this had.
func (t *Tx) refForNote(r Row) (string, driver.Owner) {
	if r.Kind != driver.Snapshot {
		return t.RefOf(r), r.Owner
	}
	vol, ok := t.gone[r.Volume]
	if !ok {
		var err error
		if vol, ok, err = t.LineageHolder(r.Volume); err != nil || !ok {
			return t.RefOf(r), driver.Owner{}
		}
	}
	return vol.Name + "@" + r.Name, vol.Owner
}

// noteDestroyed notes that an object no longer exists.
func (t *Tx) noteDestroyed(r Row) {
	if r.Kind == driver.Volume && t.c.onChange != nil {
		if t.gone == nil {
			t.gone = map[driver.ObjectID]Row{}
		}
		t.gone[r.Lineage()] = r
	}
	t.note(Destroyed, r, nil)
}

// noteID is note for an object that has a row.
func (t *Tx) noteID(kind ChangeKind, id driver.ObjectID, with func(*Change)) error {
	if t.c.onChange == nil {
		return nil
	}

	// An object that was noted last needs no query: many are made and mounted in one transaction.
	if n := len(t.changes); n > 0 && t.changes[n-1].ID == id {
		last := t.changes[n-1]
		ch := Change{Kind: kind, Object: last.Object, ID: id, Lineage: last.Lineage, Ref: last.Ref, Owner: last.Owner}
		with(&ch)
		t.addNote(ch)
		return nil
	}

	r, ok, err := t.Object(id)
	if err == nil && ok {
		t.note(kind, r, with)
	}
	return err
}

// noteGolden notes that the properties of a golden were set, unless one of its generations was made in the same
// transaction: then that is the change.
func (t *Tx) noteGolden(name string) {
	for _, ch := range t.changes {
		if ch.Kind == Made && ch.Object == driver.Generation && strings.HasPrefix(ch.Ref, name+"@") {
			return
		}
	}
	t.addNote(Change{Kind: Updated, Object: GoldenKind, Ref: name})
}

// noteRename notes a new name of a volume or snapshot, before it is recorded.
func (t *Tx) noteRename(r Row, name string) {
	before, _ := t.refForNote(r)
	r.Name = name
	t.note(Renamed, r, func(ch *Change) { ch.RefBefore = before })
}

// NotePush notes that the content of an object is in a remote now.
func (t *Tx) NotePush(id driver.ObjectID, remote string) error {
	return t.noteID(Pushed, id, func(ch *Change) { ch.Remote = remote })
}

// lastOp returns the operation of the newest mark.
func (o *Operation) lastOp() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.op
}

// setOp records the operation of the newest mark.
func (o *Operation) setOp(op string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.op = op
}

func (g *Orphan) lastOp() string { return "" }
func (g *Orphan) setOp(string)   {}
