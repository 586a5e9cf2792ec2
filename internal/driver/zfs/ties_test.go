package zfs_test

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/linux/mount"
	"pando/internal/linux/zfs"
	"pando/internal/testing/faulttest"
)

// TestAnyOrder makes and destroys objects in random orders, while somebody else
// makes and destroys snapshots, holds and clones of them. What is Pando's is listed
// as the model says, what is not is never touched, and in the end nothing is left.
func TestAnyOrder(t *testing.T) {
	p := newPool(t, newZpool(t, 1<<30)+"/ties")
	r := faulttest.Rand(t)
	steps := 25 // an emulated processor is slow
	if faulttest.Full() {
		steps = 400
	}
	content := map[driver.ObjectID]string{} // of the model
	immutable := map[driver.ObjectID]bool{}
	var ids []driver.ObjectID
	foreign := map[string]bool{} // names after the "@", and of datasets in the root
	var history []string
	note := func(format string, args ...any) { history = append(history, fmt.Sprintf(format, args...)) }
	defer func() {
		if t.Failed() {
			t.Log(strings.Join(history, "\n"))
			t.Log(strings.Join(p.names(), "\n"))
		}
	}()
	// others are the things that are not Pando's, wherever they are now.
	others := func() map[string]string {
		out := map[string]string{}
		for _, n := range p.names() {
			last := n[strings.LastIndexAny(n, "/@")+1:]
			if foreign[last] {
				out[last] = p.root + n
			}
		}
		return out
	}
	add := func(id driver.ObjectID, text string) {
		ids = append(ids, id)
		content[id] = text
	}
	for i := range steps {
		if t.Failed() {
			return
		}
		var id driver.ObjectID
		if len(ids) > 0 {
			id = ids[r.IntN(len(ids))]
		}
		switch n := r.IntN(100); {
		case id == "" || n < 8 && len(ids) < 10:
			v := p.create(driver.Native)
			note("create %s", v)
			p.write(v, "a", string(v))
			add(v, string(v))
		case n < 28 && len(ids) < 10:
			c := p.clone(id, driver.Native)
			note("clone %s to %s", id, c)
			add(c, content[id])
		case n < 45 && len(ids) < 10:
			s := p.snapshot(id, driver.Native)
			note("snapshot %s to %s", id, s)
			add(s, content[id])
			immutable[s] = true
		case n < 50 && !immutable[id]:
			note("write %s", id)
			content[id] = fmt.Sprint("step ", i)
			p.write(id, "a", content[id])
		case n < 58:
			name := fmt.Sprint("foreign", i)
			note("foreign snapshot %s of %s", name, id)
			foreign[name] = true
			zdo(t, "snapshot", p.ds(id)+"@"+name)
			if r.IntN(3) == 0 {
				clone := fmt.Sprint("otherclone", i)
				note("foreign clone %s of it", clone)
				foreign[clone] = true
				zdo(t, "clone", p.ds(id)+"@"+name, p.root+"/"+clone)
			}
		case n < 65:
			o := others()
			for _, name := range slices.Sorted(mapKeys(o)) {
				if err := zfs.ZFS.Do(t.Context(), "destroy", o[name]); err == nil {
					note("foreign %s destroyed", o[name])
					delete(foreign, name)
					break
				}
			}
		case n < 70:
			x := p.identity(id)
			if immutable[id] = !immutable[id]; immutable[id] {
				x.Kind = driver.Snapshot
			} else {
				x.Kind = driver.Volume
			}
			note("%s becomes a %s", id, x.Kind)
			p.must(p.d.SetIdentity(p.ctx(), x))
		case n < 73:
			note("reap")
			_, err := p.d.Reap(p.ctx())
			p.must(err)
		default:
			note("destroy %s", id)
			p.must(p.d.Destroy(p.ctx(), id))
			ids = slices.DeleteFunc(ids, func(x driver.ObjectID) bool { return x == id })
			delete(content, id)
		}
		p.wantExactly(history[max(len(history)-1, 0)], ids...)
		if got := slices.Sorted(mapKeys(others())); !slices.Equal(got, slices.Sorted(mapKeys(foreign))) {
			t.Errorf("of what is not Pando's there is %q, wanted %q", got, slices.Sorted(mapKeys(foreign)))
		}
	}
	for _, id := range ids {
		p.wantFile(id, "a", content[id])
	}
	// In the end all go, in a random order, and what somebody else has.
	r.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	for _, id := range ids {
		p.must(p.d.Destroy(p.ctx(), id))
	}
	p.wantExactly("all destroyed")
	for range 2 * (len(foreign) + 1) {
		for _, full := range others() {
			_ = zfs.ZFS.Do(t.Context(), "destroy", full) // in the order in which they can
		}
	}
	if _, err := p.d.Reap(p.ctx()); err != nil {
		t.Fatal(err)
	}
	if ties, err := p.d.Ties(p.ctx()); len(ties) > 0 || err != nil {
		t.Errorf("ties are left: %+v, %v", ties, err)
	}
	if n := slices.DeleteFunc(p.names(), func(n string) bool { return n == "/graveyard" }); len(n) > 0 {
		t.Errorf("LEAK: %q", n)
	}
	p.must(p.d.Unmake(p.ctx()))
	if exists(t, p.root) {
		t.Error("LEAK: the root dataset is there after Unmake")
	}
}

func mapKeys[V any](m map[string]V) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// TestTies: the bytes of what is destroyed and cannot go are named.
func TestTies(t *testing.T) {
	p := newPool(t, newZpool(t, 1<<30)+"/ties")
	const mib = 1 << 20
	random := func(n int) string {
		b := make([]byte, n)
		_, _ = rand.Read(b) // never fails
		return string(b)
	}
	vol := p.create(driver.Native)
	p.write(vol, "a", random(4*mib))
	snap := p.snapshot(vol, driver.Native)
	clone := p.clone(snap, driver.Native)
	if ties, err := p.d.Ties(p.ctx()); len(ties) > 0 || err != nil {
		t.Errorf("with nothing destroyed: %+v, %v", ties, err)
	}
	p.write(vol, "a", "little")
	p.write(clone, "a", "little")
	u, err := p.d.Usage(p.ctx(), snap)
	if err != nil || u.LogicalBytes < 4*mib || u.ExclusiveBytes != 0 {
		t.Errorf("usage %+v, %v", u, err)
	}
	// The snapshot is destroyed, but volume and clone come from it.
	p.must(p.d.Destroy(p.ctx(), snap))
	p.must(p.d.Sync(p.ctx()))
	ties, err := p.d.Ties(p.ctx())
	if err != nil || len(ties) != 1 || ties[0].ID != snap || ties[0].Bytes < 4*mib || ties[0].Bytes > 5*mib ||
		len(ties[0].HeldBy) != 1 || len(ties[0].Foreign) > 0 {
		t.Fatalf("ties %+v, %v", ties, err)
	}
	holder, other := ties[0].Holder, ties[0].HeldBy[0]
	if pair := []driver.ObjectID{holder, other}; !slices.Contains(pair, vol) || !slices.Contains(pair, clone) {
		t.Errorf("ties %+v", ties)
	}
	if u, err := p.d.Usage(p.ctx(), holder); err != nil || u.TiedBytes < 4*mib || u.TiedBytes > 5*mib {
		t.Errorf("usage of the holder %+v, %v", u, err)
	}
	if all, err := p.d.Usages(p.ctx()); err != nil || len(all) != 2 || all[holder].TiedBytes < 4*mib ||
		all[other].TiedBytes != 0 {
		t.Errorf("usages %+v, %v", all, err)
	}
	if n, err := p.d.Reap(p.ctx()); n != 0 || err != nil {
		t.Errorf("reaped %d, %v", n, err)
	}
	// With the last that needs it, it goes by itself.
	p.must(p.d.Destroy(p.ctx(), other))
	if ties, err := p.d.Ties(p.ctx()); len(ties) > 0 || err != nil {
		t.Errorf("ties %+v, %v", ties, err)
	}
	if n := p.names(); len(n) != 1 {
		t.Errorf("left: %q", n)
	}

	// Somebody else's snapshot keeps what is destroyed, and is named.
	zdo(t, "snapshot", p.ds(holder)+"@sanoid")
	p.write(holder, "b", random(2*mib))
	p.must(p.d.Destroy(p.ctx(), holder))
	p.wantExactly("destroyed")
	p.must(p.d.Sync(p.ctx()))
	ties, err = p.d.Ties(p.ctx())
	if err != nil || len(ties) != 1 || ties[0].ID != holder || ties[0].Holder != "" || ties[0].Bytes > mib ||
		!slices.Equal(ties[0].Foreign, []string{p.root + "/graveyard/" + string(holder) + "@sanoid"}) {
		t.Fatalf("ties %+v, %v", ties, err)
	}
	if err := p.d.Unmake(p.ctx()); !errs.Is(err, errs.InUse) || !strings.Contains(err.Error(), "@sanoid") &&
		!strings.Contains(err.Error(), "graveyard") || errs.HintOf(err) == "" {
		t.Errorf("Unmake with somebody else's snapshot: %v", err)
	}
	if n, err := p.d.Reap(p.ctx()); n != 0 || err != nil {
		t.Errorf("reaped %d, %v", n, err)
	}
	zdo(t, "destroy", p.root+"/graveyard/"+string(holder)+"@sanoid")
	if n, err := p.d.Reap(p.ctx()); n != 1 || err != nil {
		t.Errorf("reaped %d, %v", n, err)
	}
	p.must(p.d.Unmake(p.ctx()))
	p.must(p.d.Unmake(p.ctx()))
	if exists(t, p.root) {
		t.Error("LEAK: the root is there")
	}
}

// TestHolds: a hold of somebody else keeps a snapshot, not the name.
func TestHolds(t *testing.T) {
	p := newPool(t, newZpool(t, 1<<30)+"/ties")
	vol := p.create(driver.Native)
	snap := p.snapshot(vol, driver.Native)
	p.must(p.d.Destroy(p.ctx(), vol))
	zdo(t, "hold", "mine", p.ds(snap)+"@"+string(snap))
	p.must(p.d.Destroy(p.ctx(), snap))
	p.wantExactly("destroyed")
	ties, err := p.d.Ties(p.ctx())
	if err != nil || len(ties) != 1 || ties[0].ID != snap || len(ties[0].Foreign) != 1 ||
		!strings.Contains(ties[0].Foreign[0], "hold") {
		t.Errorf("ties %+v, %v", ties, err)
	}
	zdo(t, "release", "mine", ties[0].Name+"@"+string(snap))
	if n, err := p.d.Reap(p.ctx()); n != 1 || err != nil {
		t.Errorf("reaped %d, %v", n, err)
	}
	if n := slices.DeleteFunc(p.names(), func(n string) bool { return n == "/graveyard" }); len(n) > 0 {
		t.Errorf("LEAK: %q", n)
	}
}

// TestDestroyInUse: what somebody works in stays, and so does what is mounted while
// its clones, or what it was cloned from, go.
func TestDestroyInUse(t *testing.T) {
	p := newPool(t, newZpool(t, 1<<30)+"/use")
	vol := p.create(driver.Native)
	p.write(vol, "a", "content")
	snap := p.snapshot(vol, driver.Native)
	clone := p.clone(snap, driver.Native)
	p.must(p.mounted(clone, func(dir string) error {
		f, err := os.Open(filepath.Join(dir, "a"))
		if err != nil {
			return err
		}
		defer f.Close()
		if err := p.d.Destroy(p.ctx(), clone); !errs.Is(err, errs.InUse) {
			t.Errorf("destroying what is in use: %v", err)
		}
		p.must(p.d.Destroy(p.ctx(), vol))
		p.must(p.d.Destroy(p.ctx(), snap)) // its snapshot moves to the mounted clone
		p.wantExactly("mounted", clone)
		if b, err := os.ReadFile(filepath.Join(dir, "a")); err != nil || string(b) != "content" {
			t.Errorf("%q, %v", b, err)
		}
		return os.WriteFile(filepath.Join(dir, "b"), nil, 0o600)
	}))
	p.wantFile(clone, "a", "content")

	// The same with a zvol whose filesystem is mounted.
	img := p.create(driver.Ext4)
	f, err := p.d.Activate(p.ctx(), img)
	p.must(err)
	dir := t.TempDir()
	m, err := mount.Device("ext4", f.Name(), nil, false)
	p.must(err)
	_, err = m.MoveTo(dir)
	p.must(err)
	m.Close()
	f.Close()
	if held, err := p.d.Held(p.ctx(), img); !held || err != nil {
		t.Errorf("held %v, %v", held, err)
	}
	if err := p.d.Destroy(p.ctx(), img); !errs.Is(err, errs.InUse) {
		t.Errorf("destroying a mounted zvol: %v", err)
	}
	if err := p.d.Deactivate(p.ctx(), img); !errs.Is(err, errs.InUse) {
		t.Errorf("deactivating a mounted zvol: %v", err)
	}
	zdo(t, "snapshot", p.ds(img)+"@other")
	if err := p.d.Destroy(p.ctx(), img); !errs.Is(err, errs.InUse) {
		t.Errorf("destroying a mounted zvol with somebody else's snapshot: %v", err)
	}
	p.wantExactly("in use", clone, img)
	if active, err := p.d.Active(p.ctx()); err != nil || !slices.Equal(active, []driver.ObjectID{img}) {
		t.Errorf("active %q, %v", active, err)
	}
	p.must(mount.Unmount(dir))
	if held, err := p.d.Held(p.ctx(), img); held || err != nil {
		t.Errorf("held %v, %v", held, err)
	}
	for range 2 {
		p.must(p.d.Deactivate(p.ctx(), img))
	}
	if active, err := p.d.Active(p.ctx()); err != nil || len(active) > 0 {
		t.Errorf("active %q, %v", active, err)
	}
}
