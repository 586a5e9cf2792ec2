package replicate

import (
	"os"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/driver/plain"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
)

// TestRepairOfOlderConfig: after a rotation somebody loses config and puts an older one back, as a recovery kit does. A
// pool that has seen the newer one says what to do, and that brings back what only the newer key opens.
func TestRepairOfOlderConfig(t *testing.T) {
	w := worldOn(t, t.TempDir(), plain.Name, "file:"+t.TempDir())
	rp := w.open()
	old := rp.Config()
	if err := rp.Rotate(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	w.importTree("g", 1000)
	w.push("g")

	if _, err := w.store.Put(t.Context(), "config", old, objstore.Always); err != nil {
		t.Fatal(err)
	}
	_, err := w.tryPush("g")
	if !errs.Is(err, errs.Damaged) || !strings.Contains(errs.HintOf(err), "remote repair") {
		t.Fatalf("a push with the older config: %v (hint: %s)", err, errs.HintOf(err))
	}
	for _, dry := range []bool{true, false} {
		out, err := Repair(t.Context(), w.e, w.r, RepairRequest{DryRun: dry})
		if err != nil || !out.ConfigRestored {
			t.Fatalf("%+v, %v", out, err)
		}
	}
	if v, err := Verify(t.Context(), nil, w.r, VerifyRequest{ReadPercent: 100}); err != nil || v.Err() != nil {
		t.Errorf("%v, %+v", err, v)
	}
	kept, err := os.ReadDir(w.r.dir + "/" + damagedDir)
	if err != nil || len(kept) != 1 {
		t.Errorf("the older one is not kept: %v, %v", kept, err)
	}
}

// TestConfigThatMayNotBeReplaced: a pool whose copy cannot replace an older config, as that has a key of its own, does
// not tell people to throw the copy away.
func TestConfigThatMayNotBeReplaced(t *testing.T) {
	w := worldOn(t, t.TempDir(), plain.Name, "file:"+t.TempDir())
	rp := w.open()
	old := rp.Config()
	if err := rp.Rotate(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	w.open() // and remember it
	if _, err := w.store.Put(t.Context(), "config", old, objstore.Always); err != nil {
		t.Fatal(err)
	}
	id, err := repo.Identity(w.r.identity)
	if err != nil {
		t.Fatal(err)
	}
	other, err := repo.Open(t.Context(), w.store, id)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := other.Rotate(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	before := other.Config()
	for what, try := range map[string]func() error{
		"push":   func() error { _, err := w.r.Open(t.Context()); return err },
		"repair": func() error { _, err := Repair(t.Context(), w.e, w.r, RepairRequest{}); return err },
	} {
		if err := try(); !errs.Is(err, errs.Damaged) || !strings.Contains(errs.HintOf(err), "keep "+w.r.configFile()) {
			t.Errorf("%s: %v (hint: %s)", what, err, errs.HintOf(err))
		}
	}
	if now, _, err := w.store.Get(t.Context(), "config", 0, -1); err != nil || string(now) != string(before) {
		t.Errorf("it was changed: %v", err)
	}
}

// TestAddWithoutConfig: a repository that has lost its config is not taken for something else that should be left
// alone.
func TestAddWithoutConfig(t *testing.T) {
	url := "file:" + t.TempDir()
	w := worldOn(t, t.TempDir(), plain.Name, url)
	w.importTree("g", 1000)
	w.push("g")
	if err := w.store.Delete(t.Context(), "config"); err != nil {
		t.Fatal(err)
	}
	before, err := List(w.dir)
	if err != nil {
		t.Fatal(err)
	}

	_, err = Add(t.Context(), w.e, AddRequest{Name: "again", URL: url}, Access{})
	wantKind(t, err, errs.Damaged, "kit")
	wantKind(t, err, errs.Damaged, "remote repair")
	if after, err := List(w.dir); err != nil || len(after) != len(before) {
		t.Errorf("%v, %v", after, err)
	}
	if out, err := Repair(t.Context(), w.e, w.r, RepairRequest{}); err != nil || !out.ConfigRestored {
		t.Errorf("%+v, %v", out, err)
	}
	key, err := os.ReadFile(w.r.IdentityFile())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Add(t.Context(), w.e, AddRequest{Name: "again", URL: url, Identity: string(key)}, Access{}); err != nil {
		t.Error(err)
	}
}
