package pool

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/errs"
)

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestRead(t *testing.T) {
	for content, want := range map[string]errs.Kind{
		`{"version":1,"id":"x","driver":"plain"}`:    "",
		`{"version":99,"id":"x","driver":"plain"}`:   errs.TooNew,
		`{"version":99,"id":17,"driver":{"a":true}}`: errs.TooNew, // a newer format may look like anything
		`{"version":0,"id":"x","driver":"plain"}`:    errs.Damaged,
		`{"version":1,"driver":"plain"}`:             errs.Damaged,
		`{"version":1,"id":"x","driver":7}`:          errs.Damaged,
		`{"format":2,"id":"x","driver":"plain"}`:     errs.Unsupported, // from before there were releases
		`nonsense`:                                   errs.Damaged,
		``:                                           errs.Damaged,
	} {
		dir := t.TempDir()
		write(t, filepath.Join(dir, configName), content)
		if _, err := Read(dir); errs.KindOf(err) != want || err != nil && errs.HintOf(err) == "" {
			t.Errorf("%s: %v (hint %q), wanted %q", content, err, errs.HintOf(err), want)
		}
	}
	if _, err := Read(filepath.Join(t.TempDir(), "missing")); !errs.Is(err, errs.NotFound) || errs.HintOf(err) == "" {
		t.Errorf("missing: %v", err)
	}
}

// TestRemoveStopsAtForeignFiles: removing a pool never removes what is not the
// pool's.
func TestRemoveStopsAtForeignFiles(t *testing.T) {
	for _, foreign := range []string{"data/objects/notes.txt", "data/mine", "mnt/volume/file"} {
		dir := t.TempDir()
		for _, d := range []string{"data/objects", "mnt/volume", "live", "locks"} {
			if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		write(t, filepath.Join(dir, configName), `{"version":1,"id":"x","driver":"plain"}`)
		write(t, filepath.Join(dir, foreign), "precious")
		if err := Remove(context.Background(), dir, nil); !errs.Is(err, errs.InUse) {
			t.Errorf("%s: %v, wanted InUse", foreign, err)
		}
		if b, err := os.ReadFile(filepath.Join(dir, foreign)); err != nil || string(b) != "precious" {
			t.Errorf("%s is lost: %v", foreign, err)
		}
		// Once it is out of the way the removal goes on where it stopped.
		if !DeinitInterrupted(dir) {
			t.Errorf("%s: the removal is not known to be unfinished", foreign)
		}
		if err := os.Remove(filepath.Join(dir, foreign)); err != nil {
			t.Fatal(err)
		}
		if err := Remove(context.Background(), dir, nil); err != nil {
			t.Error(err)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("left: %v %v", left, err)
		}
	}
}

func TestAdmit(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "data"), 0o700); err != nil {
		t.Fatal(err)
	}
	p := &Pool{Dir: dir}
	if err := p.Admit(t.Context(), "clone", "web", 0); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // do not wait for space to be freed
	if err := p.Admit(ctx, "clone", "web", 1<<60); !errs.Is(err, errs.NoSpace) || errs.HintOf(err) == "" {
		t.Errorf("an exbibyte: %v, wanted NoSpace with a hint", err)
	}
	p.Config.MinFreePercent = 99.999
	if err := p.Admit(ctx, "clone", "web", 0); !errs.Is(err, errs.NoSpace) {
		t.Errorf("99.999 %% to be kept free: %v, wanted NoSpace", err)
	}
}
