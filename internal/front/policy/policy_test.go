package policy

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, text string, mode os.FileMode) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "policy.toml")
	must(t, os.WriteFile(name, []byte(text), mode))
	must(t, os.Chmod(name, mode))
	return name
}

const example = `
# An administrator.
[[rule]]
users = ["root", "2001"]
goldens = ["*"]
publish = ["web-*", "base"]
import = true
see_all = true

[[rule]]
groups = ["daemon", "3001"]
goldens = ["web"]
max_volumes = 20
max_bytes = "100G"
max_ttl = "2d"
mounts = ["/data/{user}/pando", "/run/pando/{uid}"]

[[rule]]
users = ["*"]
goldens = ["public-?"]
`

// TestRules: the first rule that names a user applies, and no other.
func TestRules(t *testing.T) {
	p, err := Read(write(t, example, 0o644))
	must(t, err)
	if p.Rules() != 3 {
		t.Errorf("%d rules", p.Rules())
	}
	for _, c := range []struct {
		u    User
		rule int
	}{
		{User{UID: 2001}, 1}, {User{UID: 2001, GIDs: []uint32{3001}}, 1}, {User{UID: 5, GIDs: []uint32{7, 3001}}, 2},
		{User{UID: 5, GIDs: []uint32{1}}, 2}, {User{UID: 3001, GIDs: []uint32{2001}}, 3}, {User{UID: 5}, 3},
	} {
		if g := p.For(c.u); g == nil || g.Rule != c.rule {
			t.Errorf("%+v: %+v, wanted rule %d", c.u, g, c.rule)
		}
	}

	g := p.For(User{UID: 5, Name: "ann", GIDs: []uint32{3001}})
	if g.MaxVolumes != 20 || g.MaxBytes != 100<<30 || g.MaxTTL != 48*time.Hour || g.SeeAll || g.Import ||
		!slices.Equal(g.Mounts, []string{"/data/ann/pando", "/run/pando/5"}) {
		t.Errorf("%+v", g)
	}
	for _, name := range []string{"", ".", "..", "a/b", "../root"} {
		if g := p.For(User{UID: 5, Name: name, GIDs: []uint32{3001}}); !slices.Equal(g.Mounts, []string{"/run/pando/5"}) {
			t.Errorf("%q: %v", name, g.Mounts)
		}
	}
	g = p.For(User{UID: 2001})
	for name, want := range map[string][2]bool{"web-1": {true, true}, "web": {true, false}, "base": {true, true}} {
		if g.Sees(name) != want[0] || g.MayPublish(name) != want[1] {
			t.Errorf("%s: %v, %v", name, g.Sees(name), g.MayPublish(name))
		}
	}
	g = p.For(User{UID: 9})
	if !g.Sees("public-1") || g.Sees("public-12") || g.Sees("web") || g.MayPublish("public-1") ||
		g.Mounts[0] != "/run/pando/9" {
		t.Errorf("%+v", g)
	}

	empty, err := Read(write(t, "# nothing\n", 0o644))
	must(t, err)
	if g := empty.For(User{UID: 5}); g != nil {
		t.Errorf("%+v", g)
	}
}

// TestExample: the example for users has no mistake, whatever users the host has.
func TestExample(t *testing.T) {
	text, err := os.ReadFile("../../../examples/policy/policy.toml")
	must(t, err)
	numbers := strings.NewReplacer(`"alice"`, `"2001"`, `"bob"`, `"2002"`, `"ci"`, `"3001"`).Replace(string(text))
	p, err := Read(write(t, numbers, 0o644))
	must(t, err)
	if g := p.For(User{UID: 5, Name: "agent", GIDs: []uint32{3001}}); p.Rules() != 3 || g.Rule != 2 ||
		g.Mounts[0] != "/srv/agents/agent" {
		t.Errorf("%d rules, %+v", p.Rules(), g)
	}
}

// TestMistakes: each mistake is reported with its line and what to do.
func TestMistakes(t *testing.T) {
	const rule = "[[rule]]\nusers = [\"2001\"]\n"
	for text, want := range map[string]string{
		rule + "golden = [\"web\"]\n":                      `line 3: there is no key "rule.golden" here`,
		rule + "images = true\n":                           `line 3: there is no key "rule.images" here`,
		"[[rules]]\n":                                      `there is no key "rules" here`,
		"[[rule]]\ngoldens = [\"web\"]\n":                  "line 1: users: the rule names nobody",
		rule + "goldens = [\"[\"]\n":                       `line 3: goldens: the pattern "[" is malformed`,
		rule + "\npublish = [\"web@3\"]\n":                 `line 4: publish: "web@3" cannot be the name of a golden`,
		rule + "goldens = [\"\"]\n":                        "line 3: goldens: the pattern",
		"[[rule]]\nusers = [\"no-such-user\"]\n":           `line 2: users: there is no user "no-such-user" in /etc/passwd`,
		"[[rule]]\nusers = [\"-1\"]\n":                     `line 2: users: there is no user "-1"`,
		"[[rule]]\nusers = [\"4294967295\"]\n":             `line 2: users: there is no user`,
		"[[rule]]\ngroups = [\"no-such-group\"]\n":         `line 2: groups: there is no group "no-such-group" in /etc/group`,
		rule + "max_volumes = 0\n":                         "line 3: max_volumes: it must be at least 1 (got 0)",
		rule + "max_volumes = \"3\"\n":                     "line 3, column 15: ",
		rule + "max_bytes = \"-1G\"\n":                     `line 3: max_bytes: "-1G" is not a size`,
		rule + "max_ttl = \"1 hour\"\n":                    `line 3: max_ttl: "1 hour" is not a duration`,
		rule + "mounts = [\"run\"]\n":                      `line 3: mounts: "run" is not the absolute path`,
		rule + "mounts = [\"/a/../b\"]\n":                  `line 3: mounts: "/a/../b" is not the absolute path`,
		rule + "mounts = [\"/\"]\n":                        `line 3: mounts: "/" is not the absolute path`,
		rule + "mounts = [\"/home/{name}\"]\n":             `line 3: mounts: "/home/{name}" has a pattern`,
		rule + "import = true\n":                           "line 3: import: it allows nothing: publish names no golden",
		"[[rule]]\nusers = [\"*\"]\n" + rule + rule:        "line 4: users: it never applies: rule 1 names everyone",
		"rule = [{users = [\"2001\"], max_ttl = \"x\"}]\n": `rule 1: max_ttl: "x" is not a duration`,
		"[[rule]\n": "line 1, column ",
	} {
		name := write(t, text, 0o600)
		_, err := Read(name)
		if !errs.Is(err, errs.Invalid) || !strings.Contains(fmt.Sprint(err), name) ||
			!strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%q: %v, wanted %s", text, err, want)
		}
		if strings.Contains(want, ": ") && !strings.Contains(want, "column") && !strings.Contains(want, "absolute") &&
			errs.HintOf(err) == "" {
			t.Errorf("%q: no hint: %v", text, err)
		}
	}
}

// TestFile: only root and the user of the service can be able to change a policy.
func TestFile(t *testing.T) {
	for _, mode := range []os.FileMode{0o664, 0o646, 0o622} {
		if _, err := Read(write(t, example, mode)); !errs.Is(err, errs.Permission) ||
			!strings.Contains(errs.HintOf(err), "chmod go-w") {
			t.Errorf("%o: %v (%s)", mode, err, errs.HintOf(err))
		}
	}
	if _, err := Read(filepath.Join(t.TempDir(), "none")); !errs.Is(err, errs.NotFound) || errs.HintOf(err) == "" {
		t.Errorf("no file: %v", err)
	}
	if _, err := Read(t.TempDir()); !errs.Is(err, errs.Invalid) {
		t.Errorf("a directory: %v", err)
	}
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can give a file to another user: run the tests as root")
	}
	name := write(t, example, 0o644)
	must(t, os.Chown(name, 64_711, 0))
	if _, err := Read(name); !errs.Is(err, errs.Permission) || !strings.Contains(fmt.Sprint(err), "user 64711") {
		t.Errorf("another user's: %v", err)
	}
}

// TestSubordinateIDs: rules for groups and for everybody leave out numbers of which one user has thousands.
func TestSubordinateIDs(t *testing.T) {
	before := subordinateFile
	t.Cleanup(func() { subordinateFile = before })
	subordinateFile = filepath.Join(t.TempDir(), "subuid")
	text := "alice:200000:65536\nroot:1000000:1000000000\n0:2000000:10\nbroken\n2001:x:1\n\n2001:300000:1\n"
	must(t, os.WriteFile(subordinateFile, []byte(text), 0o644))
	p, err := Read(write(t, `
[[rule]]
users = ["265535"]
[[rule]]
groups = ["3001"]
[[rule]]
users = ["*"]
`, 0o644))
	must(t, err)

	for uid, want := range map[uint32]int{199_999: 2, 200_000: 0, 265_534: 0, 265_535: 1, 265_536: 2, 300_000: 0,
		300_001: 2, 1_000_000: 2, 2_000_005: 2} {
		got := 0
		if g := p.For(User{UID: uid, GIDs: []uint32{3001}}); g != nil {
			got = g.Rule
		}
		if got != want {
			t.Errorf("user %d: rule %d, wanted %d", uid, got, want)
		}
	}
	if g := p.For(User{UID: 200_000}); g != nil {
		t.Errorf("rule %d", g.Rule)
	}
}
