package preset

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
)

// TestEmbedded: all presets that are part of the program can be read, and say what they are for.
func TestEmbedded(t *testing.T) {
	if len(Names()) == 0 {
		t.Fatal("no presets")
	}
	for _, name := range Names() {
		r, err := Load(name)
		if err != nil {
			t.Fatal(err)
		}
		if r.About == "" || r.owner == "" || len(r.removals) == 0 {
			t.Errorf("%s: incomplete: %+v", name, r)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, text := range []string{
		"remove", "remove /etc", "remove ..", "remove a/../b", "remove a/", "remove .", "remove [", "remove a//b",
		"unmounted x", "overlay sometimes", "delete x", "needs ../x", "locked /x", "about",
	} {
		_, err := parse("x", []byte("# a comment\n\n"+text+"\n"))
		if !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), "line 3: ") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// TestCleanFollowsNoLinks: a link in the place of a directory in a pattern leads to nothing outside.
func TestCleanFollowsNoLinks(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	write(t, filepath.Join(outside, "x.log"))
	write(t, filepath.Join(dir, "real/x.log"))
	write(t, filepath.Join(dir, "real/x.txt"))
	write(t, filepath.Join(dir, "real/dir.log/file"))
	for link, to := range map[string]string{"logs": outside, "abs.log": outside + "/x.log", "real/up": "../real"} {
		if err := os.Symlink(to, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}

	r, err := parse("x", []byte("remove-files */*.log\nremove *.log\nremove-files */*/*.log\n"))
	if err != nil {
		t.Fatal(err)
	}

	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}

	defer root.Close()
	removed, err := r.Clean(t.Context(), root)
	if got := strings.Join(removed, " "); err != nil || got != "abs.log real/x.log" {
		t.Errorf("removed %q, %v", got, err)
	}

	for _, there := range []string{outside + "/x.log", dir + "/logs", dir + "/real/x.txt", dir + "/real/dir.log/file"} {
		if _, err := os.Lstat(there); err != nil {
			t.Error(err)
		}
	}
}

func write(t *testing.T, name string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(name), 0o600); err != nil {
		t.Fatal(err)
	}
}
