package zfs

import (
	"context"
	"iter"
	"strings"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/driver/objdir"
	"pando/internal/linux/zfs"
)

// snap is a snapshot of a node.
type snap struct {
	name     string // after the "@"
	deferred bool
	text     string // of the identity, its own or its dataset's
	used     int64
	written  int64
	created  int64 // transaction group
	holds    int64
	clones   []string // full names
}

// node is a dataset with its snapshots, oldest first.
type node struct {
	name     string // full
	volume   bool   // a zvol
	origin   string
	size     int64 // of a zvol
	readOnly bool
	encRoot  string // "" if not encrypted
	ownKey   bool   // it has the mark keyOwn
	text     string // of the identity
	used     int64
	refer    int64
	inSnaps  int64
	written  int64
	snaps    []*snap
	pool     string // propPool, its own or inherited
	children int    // datasets directly below it
}

// columns of a listing; the last is text.
const columns = "name,type,origin,volsize,readonly,encryptionroot,used,referenced,usedbysnapshots,written,createtxg," +
	"defer_destroy,userrefs,clones," + propPool + "," + propKey + "," + propIdentity

var columnCount = strings.Count(columns, ",") + 1

// listDatasets lists datasets with their snapshots, by `zfs list` with args, in the order
// in which they are printed.
func (d *Driver) listDatasets(ctx context.Context, args ...string) ([]*node, error) {
	rows, err := zfs.ZFS.TextRows(ctx, columnCount,
		append([]string{"list", "-Hp", "-t", "filesystem,volume,snapshot", "-o", columns}, args...)...)
	if err != nil {
		return nil, err
	}

	var out []*node
	byName := map[string]*node{}
	for _, r := range rows {
		var nums [7]int64
		for i, c := range []int{3, 6, 7, 8, 9, 10, 12} {
			if nums[i], err = zfs.Number(r[c]); err != nil {
				return nil, err
			}
		}

		size, used, refer, inSnaps, written, created, holds := nums[0], nums[1], nums[2], nums[3], nums[4], nums[5], nums[6]
		text := r[16]
		if text == "-" {
			text = ""
		}

		if ds, name, ok := strings.Cut(r[0], "@"); ok {
			n := byName[ds]
			if n == nil {
				// Its dataset was destroyed or made during the listing.
				continue
			}
			s := &snap{name: name, deferred: r[11] == "on", text: text, used: used, written: written, created: created,
				holds: holds}
			if r[13] != "" && r[13] != "-" {
				s.clones = strings.Split(r[13], ",")
			}
			n.snaps = append(n.snaps, s)
			continue
		}

		n := &node{
			name:     r[0],
			volume:   r[1] == "volume",
			size:     size,
			readOnly: r[4] == "on",
			text:     text,
			used:     used,
			refer:    refer,
			inSnaps:  inSnaps,
			written:  written,
			pool:     r[14],
			ownKey:   r[15] == keyOwn,
		}

		if r[2] != "-" {
			n.origin = r[2]
		}
		if r[5] != "-" {
			n.encRoot = r[5]
		}

		byName[n.name] = n
		if p := byName[zfs.ParentOf(n.name)]; p != nil {
			p.children++
		}

		out = append(out, n)
	}

	return out, nil
}

// id returns the ID of the object that the dataset belongs to, if its name is an ID.
func (n *node) id() (driver.ObjectID, bool) {
	s := n.name[strings.LastIndexByte(n.name, '/')+1:]
	return driver.ObjectID(s), driver.ValidID(s)
}

// ownSnap returns the snapshot that holds n's object, or nil if the object is not immutable.
func (n *node) ownSnap() *snap {
	id, _ := n.id()
	for _, s := range n.snaps {
		if s.name == string(id) && !s.deferred {
			return s
		}
	}
	return nil
}

// isOwnSnap reports whether a snapshot is Pando's: its name is an ID, and its identity,
// if it has one, does not name another pool.
func (d *Driver) isOwnSnap(s *snap) bool {
	if !driver.ValidID(s.name) {
		return false
	}
	i, err := objdir.Decode([]byte(s.text))
	return err != nil || i.Pool == d.pool
}

// object is an object with the dataset that holds or carries it.
type object struct {
	driver.Object
	node      *node
	immutable bool // it is a snapshot, on node
}

// objectOf returns the object that a dataset in the root holds.
func (d *Driver) objectOf(n *node) object {
	id, _ := n.id()
	o := object{Object: driver.Object{ID: id}, node: n}
	text := n.text
	if s := n.ownSnap(); s != nil {
		text, o.immutable = s.text, true
	}

	if text == "" {
		return o
	}

	i, err := objdir.Decode([]byte(text))
	if err == nil && (i.ID != id || i.Pool != d.pool) {
		err = errs.New(errs.Damaged, "read identity", string(id), "it is that of object %q of pool %q", i.ID, i.Pool)
	}
	if err == nil && i.FS.IsImage() != n.volume {
		err = errs.New(errs.Damaged, "read identity", string(id), "it says %s, but the dataset has the other type", i.FS)
	}
	if err != nil {
		o.Err = errs.Wrap("read identity", string(id), err)
		return o
	}

	o.Whole, o.Identity = true, i
	return o
}

// readObject reads one object. NotFound if nothing of it exists. Damage is in the object's Err.
func (d *Driver) readObject(ctx context.Context, op string, id driver.ObjectID) (object, error) {
	if !driver.ValidID(string(id)) {
		return object{}, errs.New(errs.NotFound, op, string(id), "no such object in the pool")
	}

	nodes, err := d.listDatasets(ctx, "-d", "1", d.dataset(id))
	if zfs.Is(err, zfs.Absent) || err == nil && len(nodes) == 0 {
		return object{}, d.absentError(ctx, op, id)
	}
	if err != nil {
		return object{}, err
	}

	o := d.objectOf(nodes[0])
	if o.Whole {
		d.memo.remember(o)
	}

	return o, nil
}

// readWhole is readObject for objects that must be whole: NotFound if it is incomplete, its Err if it is broken. With
// fresh it reads the object even if the memo has it.
func (d *Driver) readWhole(ctx context.Context, op string, id driver.ObjectID, fresh bool) (object, error) {
	if !fresh {
		if o, ok := d.memo.lookup(id); ok {
			return o, nil
		}
	}

	o, err := d.readObject(ctx, op, id)
	switch {
	case err != nil:
		return o, err
	case o.Err != nil:
		return o, o.Err
	case !o.Whole:
		return o, errs.New(errs.NotFound, op, string(id), "it is incomplete")
	}

	return o, nil
}

// listTries is how often a listing is tried, as it fails if something is destroyed in the meantime.
const listTries = 5

// listNodes lists everything in the root: the datasets in it, and those of the graveyard.
func (d *Driver) listNodes(ctx context.Context) (live, inGraveyard []*node, err error) {
	var nodes []*node
	for range listTries {
		if nodes, err = d.listDatasets(ctx, "-r", "-d", "3", d.root); !zfs.Is(err, zfs.Absent) {
			break
		}
		if err := d.checkRoot(ctx); err != nil {
			return nil, nil, err
		}
	}
	if err != nil {
		return nil, nil, err
	}

	if len(nodes) == 0 || nodes[0].name != d.root || nodes[0].pool != d.pool {
		// It may be another dataset with this name: then an empty listing does not mean that the pool is empty.
		if err := d.checkRoot(ctx); err != nil {
			return nil, nil, err
		}
	}

	for _, n := range nodes {
		switch _, ok := n.id(); {
		case !ok:
		case zfs.ParentOf(n.name) == d.root:
			live = append(live, n)
		case zfs.ParentOf(n.name) == d.graveyardDataset():
			inGraveyard = append(inGraveyard, n)
		}
	}

	return live, inGraveyard, nil
}

// List implements driver.Driver. It runs one program.
func (d *Driver) List(ctx context.Context) iter.Seq2[driver.Object, error] {
	return func(yield func(driver.Object, error) bool) {
		live, inGraveyard, err := d.listNodes(ctx)
		if err != nil {
			yield(driver.Object{}, errs.Wrap("list", d.root, err))
			return
		}

		there := map[string]bool{}
		for _, n := range live {
			o := d.objectOf(n)
			there[string(o.ID)] = true
			if o.Whole {
				d.memo.remember(o)
			}
			if !yield(o.Object, nil) {
				return
			}
		}

		// Add snapshots of objects that were not finished, or not completely destroyed.
		for _, n := range append(live, inGraveyard...) {
			for _, s := range n.snaps {
				if id, _ := n.id(); s.deferred || there[s.name] || s.name == string(id) || !d.isOwnSnap(s) {
					continue
				}
				there[s.name] = true
				if !yield(driver.Object{ID: driver.ObjectID(s.name)}, nil) {
					return
				}
			}
		}
	}
}

// Attachment implements driver.Driver.
func (d *Driver) Attachment(ctx context.Context, id driver.ObjectID) (driver.Attachment, error) {
	o, err := d.readWhole(ctx, "attach", id, false)
	if err != nil {
		return driver.Attachment{}, err
	}
	return d.attachment(o), nil
}

// memo remembers objects that this process has just made or read, so that the next step need not read them again.
// Changes by other processes show when the object is used. The zero value is empty.
type memo struct {
	mu sync.Mutex
	m  map[driver.ObjectID]memoEntry
}

type memoEntry struct {
	o  object
	at time.Time
}

const (
	memoAge  = 3 * time.Second
	memoSize = 256
)

func (m *memo) remember(o object) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.m == nil || len(m.m) >= memoSize {
		m.m = map[driver.ObjectID]memoEntry{}
	}
	m.m[o.ID] = memoEntry{o, time.Now()}
}

func (m *memo) lookup(id driver.ObjectID) (object, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.m[id]
	if !ok || time.Since(e.at) > memoAge {
		return object{}, false
	}
	return e.o, true
}

func (m *memo) forget(id driver.ObjectID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.m, id)
}
