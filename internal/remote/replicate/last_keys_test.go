package replicate

import (
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/driver/plain"
	"pando/internal/remote/repo"
)

// TestLastKeyStays: neither CheckOtherKeys nor a forced Remove gives a key up unless another is known to be outside the
// pool; a remote that cannot be reached answers by the pool's copy of its config.
func TestLastKeyStays(t *testing.T) {
	e := newEngine(t, t.TempDir(), plain.Name)
	stores := t.TempDir()
	at := func(store string) string { return filepath.Join(stores, store) }
	move := func(from, to string) {
		t.Helper()
		must(t, os.Rename(at(from), at(to)))
	}
	atStake := func(what string, kind errs.Kind) {
		t.Helper()
		t.Log(what)
		err := CheckOtherKeys(t.Context(), e.Dir(), Access{})
		wantKind(t, err, kind, `parameter "lose-keys"`)
	}
	safe := func(what string) {
		t.Helper()
		if err := CheckOtherKeys(t.Context(), e.Dir(), Access{}); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	refused := func(what string, kind errs.Kind) {
		t.Helper()
		before := files(t, e.Dir(), "remotes")
		wantKind(t, Remove(t.Context(), e, RemoveRequest{Name: "r", Force: true}, Access{}), kind, `parameter "lose-keys"`)
		if files(t, e.Dir(), "remotes") != before {
			t.Errorf("%s: a refused remove has changed something", what)
		}
	}

	// The only key, of a remote that is there and then away.
	_, err := Add(t.Context(), e, AddRequest{Name: "r", URL: "file:" + at("r")}, Access{})
	must(t, err)
	atStake("the only key", errs.Conflict)
	refused("the only key", errs.Conflict)
	move("r", "away")
	atStake("the only key of a remote that is away", errs.NotFound)
	refused("the only key of a remote that is away", errs.NotFound)
	move("away", "r")

	// A passphrase opens it, too, as long as the config is there.
	r, err := Load(e.Dir(), "r", Access{})
	must(t, err)
	_, err = AddKey(t.Context(), r, NewKey{Label: PassphraseLabel, Passphrase: "a few good words"})
	must(t, err)
	move("r", "away")
	safe("a passphrase of a remote that is away")
	wantKind(t, Remove(t.Context(), e, RemoveRequest{Name: "r"}, Access{}), errs.NotFound, "")
	move("away", "r")
	move("r/config", "config")
	atStake("a passphrase without a config", errs.NotFound)
	refused("a passphrase without a config", errs.NotFound)
	move("config", "r/config")

	// A kit brings a config.
	_, recipient, err := repo.NewIdentity()
	must(t, err)
	_, err = ExportKit(t.Context(), r, KitRequest{File: at("kit"), Recipient: recipient},
		func(KitFacts) string { return "" })
	must(t, err)
	move("r/config", "config")
	safe("a kit")
	move("config", "r/config")

	// A key whose remote is not known, and a remote that cannot be read.
	left := filepath.Join(e.Dir(), "remotes", addingPrefix+"half")
	must(t, os.Mkdir(left, 0o700))
	safe("an interrupted add without a key")
	must(t, os.WriteFile(filepath.Join(left, identityName), []byte(r.identity), 0o600))
	atStake("an interrupted add", errs.Conflict)
	must(t, os.RemoveAll(left))
	must(t, os.WriteFile(filepath.Join(r.dir, remoteName), []byte("{"), 0o600))
	atStake("a damaged remote", errs.Damaged)
	refused("a damaged remote", errs.Damaged)
	must(t, Remove(t.Context(), e, RemoveRequest{Name: "r", Force: true, LoseKeys: true}, Access{}))
	safe("no remote")

	// Forced, a remote is forgotten if the copy shows another key.
	q := AddRequest{Name: "r", URL: "file:" + at("words"), Passphrase: "a few good words"}
	_, err = Add(t.Context(), e, q, Access{})
	must(t, err)
	move("words", "away")
	must(t, Remove(t.Context(), e, RemoveRequest{Name: "r", Force: true}, Access{}))
}

// files returns the paths and contents of the files in a directory of a pool.
func files(t *testing.T, pool, name string) (out string) {
	t.Helper()
	must(t, filepath.WalkDir(filepath.Join(pool, name), func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		out += path + ": " + string(b) + "\n"
		return err
	}))
	return out
}
