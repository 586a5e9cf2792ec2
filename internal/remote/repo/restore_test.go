package repo

import (
	"bytes"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/testing/testfs"
)

// configOf is the config that is in a store, nil if none is.
func configOf(t *testing.T, m *memory) []byte {
	t.Helper()
	raw, _, err := m.Get(t.Context(), configKey, 0, -1)
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	must(t, err)
	return raw
}

func putConfig(t *testing.T, m *memory, raw []byte) {
	t.Helper()
	_, err := m.Put(t.Context(), configKey, raw, objstore.Always)
	must(t, err)
}

// TestRestoreConfig: a copy is put back where config is missing, or where any bit of it has flipped or bytes of it are
// missing.
func TestRestoreConfig(t *testing.T) {
	r, m := made(t)
	must(t, r.AddSlot(t.Context(), newHost(t, "other").slot()))
	good, me := r.Config(), identity(t, testIdentity)
	_, err := m.Put(t.Context(), "heads/x", []byte("x"), objstore.Always)
	must(t, err)

	restore := func(what string) {
		t.Helper()
		plan, err := PlanRestore(t.Context(), m, good, r.Mark(), me)
		if err != nil || plan == nil {
			t.Fatalf("%s: %v, %v", what, plan, err)
		}
		must(t, plan.Do(t.Context()))
		if !bytes.Equal(configOf(t, m), good) {
			t.Fatalf("%s: it was not put back", what)
		}
	}
	if plan, err := PlanRestore(t.Context(), m, good, r.Mark(), me); plan != nil || err != nil {
		t.Fatalf("a good one: %v, %v", plan, err)
	}
	must(t, m.Delete(t.Context(), configKey))
	restore("missing")
	for i := 0; i < len(good); i += 1 + i/64 { // all of the header, and then some
		bad := bytes.Clone(good)
		bad[i] ^= 1 << (i % 8)
		putConfig(t, m, bad)
		restore("flipped")
	}
	for _, n := range []int{0, 1, configFixed, len(good) / 2, len(good) - 1} {
		putConfig(t, m, good[:n])
		restore("cut")
	}

	// One that really is of a newer version.
	putConfig(t, m, newerConfig())
	if plan, err := PlanRestore(t.Context(), m, good, Mark{}, me); plan != nil || err == nil {
		t.Errorf("of a newer version: %v, %v", plan, err)
	}
}

// TestRestoreConfigRefuses: nothing that may be good is written over, whatever has changed since the copy was made.
func TestRestoreConfigRefuses(t *testing.T) {
	r, m := made(t)
	old, me, mark := r.Config(), identity(t, testIdentity), r.Mark()
	other := newHost(t, "other")
	refused := func(what string, known Mark, kinds ...errs.Kind) {
		t.Helper()
		before := configOf(t, m)
		plan, err := PlanRestore(t.Context(), m, old, known, me)
		if plan != nil {
			t.Errorf("%s: there is a plan", what)
		}
		if len(kinds) == 0 {
			must(t, err)
		} else {
			kind(t, err, kinds...)
		}
		if !bytes.Equal(configOf(t, m), before) {
			t.Errorf("%s: it was changed", what)
		}
	}

	must(t, r.AddSlot(t.Context(), other.slot()))
	refused("a key was added", mark)
	refused("a key was added, and seen", r.Mark(), errs.Damaged)
	must(t, r.Rotate(t.Context(), nil))
	refused("rotated", mark)
	theirs, err := openRepo(t.Context(), m, testEnv(), other.secret)
	must(t, err)
	defer theirs.Close()
	must(t, theirs.RemoveSlot(t.Context(), slotOf(t, theirs, "test")))
	refused("rotated, and this key was removed", mark)
	refused("another repository", Mark{ID: NewID(), Serial: 1}, errs.Conflict)

	m = newMemory()
	refused("nothing at all", mark, errs.NotFound)
	if _, err := PlanRestore(t.Context(), m, old, mark, other.secret); !errs.Is(err, errs.Permission) {
		t.Errorf("with a secret that does not fit: %v", err)
	}
	if _, err := PlanRestore(t.Context(), m, old[:100], mark, me); !errs.Is(err, errs.Damaged) {
		t.Errorf("half a copy: %v", err)
	}
}

// TestRestoreNewerConfig: an older config than the one that was seen gives way to that, and whoever has seen either
// takes what is there then; unless it has keys that the newer one lacks.
func TestRestoreNewerConfig(t *testing.T) {
	r, m := made(t)
	me, other := identity(t, testIdentity), newHost(t, "other")
	old := r.Config()
	must(t, r.AddSlot(t.Context(), other.slot()))
	must(t, r.Rotate(t.Context(), nil))
	newest, seen := r.Config(), r.Mark()
	put := func(config []byte) *Repo {
		t.Helper()
		putConfig(t, m, config)
		host, err := openRepo(t.Context(), m, testEnv(), me)
		must(t, err)
		t.Cleanup(host.Close)
		return host
	}

	host := put(old) // as with a recovery kit, and used since
	for range 5 {
		must(t, host.AddSlot(t.Context(), newHost(t, NewID().String()).slot()))
	}
	if plan, err := PlanRestore(t.Context(), m, newest, Mark{}, me); plan != nil || err != nil {
		t.Errorf("nobody has seen a newer one: %v, %v", plan, err)
	}
	plan, err := PlanRestore(t.Context(), m, newest, seen, me)
	must(t, err)
	if plan == nil || !bytes.Equal(plan.Damaged, configOf(t, m)) {
		t.Fatalf("the plan is %+v", plan)
	}
	must(t, plan.Do(t.Context()))
	for _, secret := range []Secret{me, other.secret} {
		now, err := openRepo(t.Context(), m, testEnv(), secret)
		must(t, err)
		must(t, now.Check(seen))
		must(t, now.Check(host.Mark()))
		now.Close()
	}

	host = put(old)
	must(t, host.Rotate(t.Context(), nil))
	if plan, err := PlanRestore(t.Context(), m, newest, seen, me); plan != nil || err != nil {
		t.Errorf("what was written under a key that only the older one has would be lost: %v, %v", plan, err)
	}
}

// TestRestoreConfigRace: what somebody writes in between stays.
func TestRestoreConfigRace(t *testing.T) {
	r, m := made(t)
	good, me := r.Config(), identity(t, testIdentity)
	_, err := m.Put(t.Context(), "heads/x", []byte("x"), objstore.Always)
	must(t, err)
	for _, bad := range [][]byte{nil, good[:50]} {
		must(t, m.Delete(t.Context(), configKey))
		if bad != nil {
			putConfig(t, m, bad)
		}
		plan, err := PlanRestore(t.Context(), m, good, Mark{}, me)
		must(t, err)
		putConfig(t, m, []byte("of somebody else"))
		if err := plan.Do(t.Context()); !errs.Is(err, errs.Conflict) {
			t.Errorf("%v", err)
		}
		if string(configOf(t, m)) != "of somebody else" {
			t.Error("it was written over")
		}
	}
}

func TestSealText(t *testing.T) {
	testfs.NotShort(t, "it derives keys from passphrases, one after the other")
	h := newHost(t, "h")
	for _, c := range []struct {
		to   NewSlot
		with Secret
	}{{h.slot(), h.secret}, {NewSlot{Label: "p", Passphrase: "words"}, Passphrase("words")}} {
		sealed, err := SealText("secret text", c.to)
		must(t, err)
		if bytes.Contains(sealed, []byte("secret text")) {
			t.Error("it is not encrypted")
		}
		if got, err := OpenText(sealed, newHost(t, "x").secret, c.with); err != nil || got != "secret text" {
			t.Errorf("%q, %v", got, err)
		}
		_, err = OpenText(sealed, newHost(t, "x").secret, Passphrase("other"))
		kind(t, err, errs.Permission)
		_, err = OpenText(sealed[:len(sealed)-1], c.with)
		kind(t, err, errs.Damaged, errs.Permission)
	}
	if _, err := SealText("x", NewSlot{Label: "p"}); !errs.Is(err, errs.Invalid) {
		t.Errorf("for nobody: %v", err)
	}
}
