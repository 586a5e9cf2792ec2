package replicate

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/engine"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
)

// TestRemoteAdd: adding, reading, listing and removing remotes, and what the pool keeps
// of them, with which modes.
func TestRemoteAdd(t *testing.T) {
	dir := t.TempDir()
	e := newEngine(t, t.TempDir(), plain.Name)
	url := "file:" + filepath.Join(dir, "store")
	if names, err := List(e.Dir()); err != nil || len(names) != 0 {
		t.Fatalf("%v, %v", names, err)
	}
	added, err := Add(t.Context(), e, AddRequest{Name: "one", URL: url, Passphrase: "a few good words"}, Access{})
	if err != nil || !added.Created || !strings.HasPrefix(added.Recipient, "age1") {
		t.Fatalf("%+v, %v", added, err)
	}
	for path, mode := range map[string]os.FileMode{"": 0o700, "one": 0o700, "one/identity": 0o600,
		"one/remote.json": 0o600} {
		st, err := os.Stat(filepath.Join(e.Dir(), "remotes", path))
		if err != nil || st.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", path, st.Mode(), err)
		}
	}
	key, err := os.ReadFile(added.Opened.IdentityFile())
	if err != nil || !strings.Contains(string(key), "AGE-SECRET-KEY-1") {
		t.Fatalf("%s, %v", key, err)
	}
	config, err := os.ReadFile(filepath.Join(added.Opened.dir, remoteName))
	if err != nil || strings.Contains(string(config), "SECRET") {
		t.Errorf("%s, %v", config, err)
	}
	r, err := Load(e.Dir(), "one", Access{})
	if err != nil || r.URL != url || r.Recipient != added.Recipient || r.Mark != added.Opened.Mark {
		t.Fatalf("%+v, %v", r, err)
	}
	rp, err := r.Open(t.Context())
	if err != nil || rp.ID() != r.Mark.ID {
		t.Fatal(err)
	}
	slots, err := rp.Slots(t.Context())
	rp.Close()
	if err != nil || len(slots) != 2 {
		t.Errorf("%+v, %v", slots, err)
	}

	// What is refused.
	add := func(q AddRequest) error {
		_, err := Add(t.Context(), e, q, Access{})
		return err
	}
	wantKind(t, add(AddRequest{Name: "one", URL: url}), errs.Exists, "another name")
	wantKind(t, add(AddRequest{Name: "a/b", URL: url}), errs.Invalid, "names have")
	for _, bad := range []string{"", "store", "file:store", "ftp://host/x", "s3:///x", "https://host/x", "file:/a#b",
		"gs://"} {
		wantKind(t, add(AddRequest{Name: "two", URL: bad}), errs.Invalid, "")
	}
	err = add(AddRequest{Name: "two", URL: "s3://key:secret@bucket/x"})
	wantKind(t, err, errs.Invalid, "")
	if strings.Contains(err.Error(), "secret") {
		t.Errorf("an error shows a secret: %v", err)
	}
	wantKind(t, add(AddRequest{Name: "two", URL: url}), errs.Permission, `parameter "identity"`)
	wantKind(t, add(AddRequest{Name: "two", URL: url, Passphrase: "others"}), errs.Permission, "")
	wantKind(t, add(AddRequest{Name: "two", URL: url, Identity: "AGE-SECRET-KEY-1X"}), errs.Invalid, "AGE-SECRET-KEY-1")
	none := "file:" + filepath.Join(dir, "none")
	wantKind(t, add(AddRequest{Name: "two", URL: none, MustExist: true}), errs.NotFound, "")
	if left, _ := filepath.Glob(filepath.Join(e.Dir(), "remotes", ".*")); len(left) > 0 {
		t.Errorf("a refused add leaves %v", left)
	}

	// A second way to it, by passphrase and by key.
	if added, err = Add(t.Context(), e, AddRequest{Name: "two", URL: url, Passphrase: "a few good words"},
		Access{}); err != nil ||
		added.Created {
		t.Fatalf("%+v, %v", added, err)
	}
	if added, err = Add(t.Context(), e, AddRequest{Name: "three", URL: url, Identity: string(key)},
		Access{}); err != nil ||
		added.Created || added.Opened.Mark.ID != r.Mark.ID {
		t.Fatalf("%+v, %v", added, err)
	}
	if kept, err := os.ReadFile(added.Opened.IdentityFile()); err != nil || string(kept) == string(key) {
		t.Errorf("the key that opened it was kept: %v", err)
	}
	_, err = Add(t.Context(), e, AddRequest{Name: "four", URL: url, MustCreate: true}, Access{})
	wantKind(t, err, errs.Exists, `remove parameter "create"`)
	if names, err := List(e.Dir()); err != nil || !slices.Equal(names, []string{"one", "three", "two"}) {
		t.Errorf("%v, %v", names, err)
	}
	// The pool is not removed while it has keys.
	_, err = engine.Deinit(t.Context(), engine.DeinitRequest{Dir: e.Dir()}, testDrivers, nil)
	wantKind(t, err, errs.InUse, `operation "remote rm"`)

	// Without a name, only the one that there is is meant.
	find := func(op, name string, kind errs.Kind, hint string) {
		t.Helper()
		_, err := Find(op, e.Dir(), name, Access{})
		wantKind(t, err, kind, hint)
	}
	find(opPush, "", errs.Invalid, `choose one with parameter "to": one, three, two`)
	find(opVerify, "", errs.Invalid, "choose one: one, three, two")
	find(opVerify, "a/b", errs.Invalid, "")
	find(opVerify, "four", errs.NotFound, "pool: one, three, two")
	if r, err := Find(opVerify, e.Dir(), "two", Access{}); err != nil || r.Name != "two" {
		t.Errorf("%+v, %v", r, err)
	}

	// Who names a remote that is gone learns which others there are.
	hints := []string{"pool: three, two", "pool: three", `operation "remote ls"`}
	for i, n := range []string{"one", "two", "three"} {
		if err := Remove(t.Context(), e, RemoveRequest{Name: n}, Access{}); err != nil {
			t.Fatal(err)
		}
		_, err := Load(e.Dir(), n, Access{})
		wantKind(t, err, errs.NotFound, hints[i])
		wantKind(t, Remove(t.Context(), e, RemoveRequest{Name: n}, Access{}), errs.NotFound, hints[i])
	}
	find(opVerify, "", errs.NotFound, `operation "remote add"`)

	// The only key.
	if added, err = Add(t.Context(), e, AddRequest{Name: "only", URL: none}, Access{}); err != nil || !added.Created {
		t.Fatal(err)
	}
	wantKind(t, Remove(t.Context(), e, RemoveRequest{Name: "only"}, Access{}), errs.Conflict, `operation "remote key add"`)

	// Keys that go together with the pool.
	atStake := func() error { return CheckOtherKeys(t.Context(), e.Dir(), Access{}) }
	wantKind(t, atStake(), errs.Conflict, `operation "remote key export" of only`)
	key, err = os.ReadFile(added.Opened.IdentityFile())
	must(t, err)
	if _, err := Add(t.Context(), e, AddRequest{Name: "same", URL: none, Identity: string(key)}, Access{}); err != nil {
		t.Fatal(err)
	}
	wantKind(t, atStake(), errs.Conflict, `operation "remote key export" of only`) // both keys are in the pool
	r, err = Load(e.Dir(), "only", Access{})
	must(t, err)
	_, err = AddKey(t.Context(), r, NewKey{Label: "people", Passphrase: "a few good words"})
	must(t, err)
	must(t, atStake())
	sole := AddRequest{Name: "sole", URL: "file:" + filepath.Join(dir, "sole")}
	if _, err := Add(t.Context(), e, sole, Access{}); err != nil {
		t.Fatal(err)
	}
	wantKind(t, atStake(), errs.Conflict, `operation "remote key export" of sole`)
	must(t, Remove(t.Context(), e, RemoveRequest{Name: "sole", Force: true, LoseKeys: true}, Access{}))
	if err := Remove(t.Context(), e, RemoveRequest{Name: "only", Force: true}, Access{}); err != nil {
		t.Fatal(err)
	}
}

// TestRemoteInterruptedAdd: an add that fails after the repository was made is repeated,
// with the key that the repository is for.
func TestRemoteInterruptedAdd(t *testing.T) {
	dir := t.TempDir()
	e := newEngine(t, t.TempDir(), plain.Name)
	url := "file:" + filepath.Join(dir, "store")
	added, err := Add(t.Context(), e, AddRequest{Name: "r", URL: url}, Access{})
	if err != nil {
		t.Fatal(err)
	}
	// As a kill before the rename leaves it.
	adding := filepath.Join(e.Dir(), "remotes", addingPrefix+"r")
	if err := os.Rename(filepath.Join(e.Dir(), "remotes", "r"), adding); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(adding, remoteName)); err != nil {
		t.Fatal(err)
	}
	again, err := Add(t.Context(), e, AddRequest{Name: "r", URL: url}, Access{})
	if err != nil || again.Created || again.Recipient != added.Recipient {
		t.Fatalf("%+v, %v", again, err)
	}
	// Removing is no better interrupted.
	if err := os.Rename(filepath.Join(e.Dir(), "remotes", "r"),
		filepath.Join(e.Dir(), "remotes", removePrefix+"r")); err != nil {
		t.Fatal(err)
	}
	if names, err := List(e.Dir()); err != nil || len(names) != 0 {
		t.Errorf("%v, %v", names, err)
	}
	fresh := AddRequest{Name: "r", URL: "file:" + filepath.Join(dir, "new")}
	if _, err := Add(t.Context(), e, fresh, Access{}); err != nil {
		t.Fatal(err)
	}
	if err := Remove(t.Context(), e, RemoveRequest{Name: "r", Force: true, LoseKeys: true}, Access{}); err != nil {
		t.Fatal(err)
	}
	// Of several that add one name at once, one does.
	var all sync.WaitGroup
	var mu sync.Mutex
	ok := 0
	for range 4 {
		all.Go(func() {
			_, err := Add(context.Background(), e, AddRequest{Name: "r", URL: "file:" + filepath.Join(dir, "many")}, Access{})
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				ok++
			} else if errs.KindOf(err) != errs.Exists {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if ok != 1 {
		t.Errorf("%d of 4 adds of one name succeeded", ok)
	}
}

// TestRemoteReplaced: a remote in whose place another repository is, or the same one
// with older keys, is refused.
func TestRemoteReplaced(t *testing.T) {
	dir := t.TempDir()
	e := newEngine(t, t.TempDir(), plain.Name)
	store := filepath.Join(dir, "store")
	if _, err := Add(t.Context(), e, AddRequest{Name: "r", URL: "file:" + store}, Access{}); err != nil {
		t.Fatal(err)
	}
	old, err := os.ReadFile(filepath.Join(store, "config"))
	if err != nil {
		t.Fatal(err)
	}
	r, err := Load(e.Dir(), "r", Access{})
	if err != nil {
		t.Fatal(err)
	}
	rp, err := r.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := rp.Rotate(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	rp.Close()
	// The next open remembers that.
	if rp, err = r.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	rp.Close()
	if r, err = Load(e.Dir(), "r", Access{}); err != nil || r.Mark.Serial != 2 {
		t.Fatalf("%+v, %v", r, err)
	}
	s, err := OpenStore(t.Context(), r.URL, Access{}, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Put(t.Context(), "config", old, objstore.Always); err != nil {
		t.Fatal(err)
	}
	_, err = r.Open(t.Context())
	wantKind(t, err, errs.Damaged, "")

	if err := os.RemoveAll(store); err != nil {
		t.Fatal(err)
	}
	_, err = r.Open(t.Context())
	wantKind(t, err, errs.NotFound, "")
	id, err := repo.Identity(r.identity)
	if err != nil {
		t.Fatal(err)
	}
	if s, err = OpenStore(t.Context(), r.URL, Access{}, true); err != nil {
		t.Fatal(err)
	}
	if rp, err = repo.Create(t.Context(), s, repo.NewSlot{Label: "x", Recipient: r.Recipient}); err != nil {
		t.Fatal(err)
	}
	rp.Close()
	if rp, err = repo.Open(t.Context(), s, id); err != nil {
		t.Fatal(err)
	}
	rp.Close()
	_, err = r.Open(t.Context())
	wantKind(t, err, errs.Conflict, "")
	_, err = Push(t.Context(), e, r, PushRequest{Refs: []ref.Ref{{Name: "x"}}})
	wantKind(t, err, errs.NotFound, "")

	// Files that are broken.
	for file, content := range map[string]string{
		remoteName:   "{",
		identityName: "nothing",
	} {
		path := filepath.Join(r.dir, file)
		good, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err = Load(e.Dir(), "r", Access{})
		wantKind(t, err, errs.Damaged, "restore")
		if strings.Contains(err.Error(), "nothing") {
			t.Errorf("an error shows a secret: %v", err)
		}
		if err := os.WriteFile(path, good, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	newer, err := json.Marshal(map[string]any{"format": 2})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(r.dir, remoteName), newer, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = Load(e.Dir(), "r", Access{})
	wantKind(t, err, errs.TooNew, "upgrade")
}
