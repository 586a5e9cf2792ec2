package replicate

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"pando/internal/driver/plain"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

// TestLastKeys: a pool has the only key of a remote unless another is known to be outside the pool.
func TestLastKeys(t *testing.T) {
	e := newEngine(t, t.TempDir(), plain.Name)
	stores := t.TempDir()
	add := func(name, store, passphrase string) *Remote {
		t.Helper()
		q := AddRequest{Name: name, URL: "file:" + filepath.Join(stores, store), Passphrase: passphrase}
		added, err := Add(t.Context(), e, q)
		must(t, err)
		return &added.Remote
	}
	want := func(what string, names ...string) {
		t.Helper()
		if got, err := LastKeys(t.Context(), e.Dir(), Access{}); err != nil || !slices.Equal(got, names) {
			t.Errorf("%s: the only keys are those of %q, %v, want %q", what, got, err, names)
		}
	}
	move := func(from, to string) {
		t.Helper()
		must(t, os.Rename(filepath.Join(stores, from), filepath.Join(stores, to)))
	}

	// Two names of one repository have two keys, which go together.
	first := add("a", "a", "")
	_, err := Add(t.Context(), e, AddRequest{Name: "twin", URL: first.URL, Identity: first.identity})
	must(t, err)
	want("two names", "a", "twin")
	add("words", "words", "a few good words")
	want("a passphrase", "a", "twin")

	// The pool's copy of the config answers for a store that is away.
	move("words", "away")
	move("a", "a-away")
	want("no store", "a", "twin")
	move("a-away", "a")
	move("away", "words")

	// If the store has lost its config, a passphrase opens nothing; a kit brings a copy.
	move("words/config", "config")
	want("no config", "a", "twin", "words")
	move("config", "words/config")
	_, recipient, err := repo.NewIdentity()
	must(t, err)
	kit := func(r *Remote) {
		t.Helper()
		_, err := ExportKit(t.Context(), r, KitRequest{File: filepath.Join(stores, r.Name+"-kit"), Recipient: recipient,
			Instructions: func(KitFacts) string { return "" }})
		must(t, err)
	}
	kit(first)
	want("a kit of one name")
	words, err := Load(e.Dir(), "words", Access{})
	must(t, err)
	kit(words)
	move("words/config", "config")
	want("no config, but a kit")
	move("config", "words/config")

	// A key whose remote is not known counts.
	left := filepath.Join(e.Dir(), "remotes", addingPrefix+"half")
	must(t, os.Mkdir(left, 0o700))
	must(t, os.WriteFile(filepath.Join(left, identityName), []byte(first.identity), 0o600))
	want("an interrupted add", "half")
	must(t, os.Remove(filepath.Join(e.Dir(), "remotes", "words", remoteName)))
	want("a damaged remote", "half", "words")

	q := engine.DeinitRequest{Dir: e.Dir(), Force: true}
	q.LastKeys = func(ctx context.Context, dir string) ([]string, error) { return LastKeys(ctx, dir, Access{}) }
	if _, err := engine.Deinit(t.Context(), q, testDrivers); err == nil {
		t.Error("the pool was removed")
	}
}
