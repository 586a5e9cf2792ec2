package policy_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/principal"
	"pando/internal/engine"
	"pando/internal/service/policy"
)

// write writes the file of a policy.
func write(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "policy.toml")
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return name
}

const example = `
[[allow]]
users = ["nobody", "1005"]
goldens = ["web", "ci-*"]
volumes = 2
space = "1G"
ttl = "7d"

[[allow]]
groups = ["1007", "daemon"]
goldens = ["*"]
`

func TestPolicy(t *testing.T) {
	p, err := policy.Load(t.Context(), write(t, example))
	if err != nil {
		t.Fatal(err)
	}

	// The first entry that names somebody holds.
	r, ok := p.For(principal.Principal{UID: 1005, GIDs: []uint32{1007}})
	if !ok || r.MaxVolumes != 2 || r.MaxBytes != 1<<30 || r.MaxTTL != 7*24*time.Hour ||
		!r.MayClone("ci-1") || r.MayClone("other") {
		t.Errorf("user 1005 has %+v", r)
	}

	user := func(uid uint32, gids ...uint32) principal.Principal { return principal.Principal{UID: uid, GIDs: gids} }
	golden := func(op, name string) engine.Access { return engine.Access{Op: op, Ref: name, Kind: api.KindGolden} }
	generation := func(name string) engine.Access {
		return engine.Access{Op: "clone", Ref: name, Kind: api.KindGeneration}
	}
	of := func(uid uint32, kind api.Kind) engine.Access {
		return engine.Access{Op: "destroy", Ref: "v", Kind: kind, OwnerUID: uid}
	}
	for name, c := range map[string]struct {
		who  principal.Principal
		what engine.Access
		want errs.Kind // "": allowed
	}{
		"root":                        {user(0), engine.Access{Op: "prune"}, ""},
		"outsider":                    {user(1006), golden("clone", "web"), errs.Permission},
		"member by a further group":   {user(1006, 5, 1007), generation("other@3"), ""},
		"by name":                     {user(65534), generation("web@1"), ""},
		"a golden that is not theirs": {user(1005), golden("clone", "db"), errs.NotFound},
		"changing a golden":           {user(1005), golden("publish", "web"), errs.Permission},
		"own volume":                  {user(1005), of(1005, api.KindVolume), ""},
		"own snapshot":                {user(1005), of(1005, api.KindSnapshot), ""},
		"volume of root":              {user(1005), of(0, api.KindVolume), errs.NotFound},
		"snapshot of another":         {user(1005), of(65534, api.KindSnapshot), errs.NotFound},
		"free name":                   {user(1005), engine.Access{Op: "clone", Ref: "new"}, ""},
		"the pool":                    {user(1005), engine.Access{Op: "prune"}, errs.Permission},
	} {
		c.what.Who = c.who
		if err := p.Ask(c.what); errs.KindOf(err) != c.want && (err != nil || c.want != "") {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// TestNoPolicy: without a file, only root may do anything.
func TestNoPolicy(t *testing.T) {
	p, err := policy.Load(t.Context(), filepath.Join(t.TempDir(), "none"))
	if err != nil || p != nil {
		t.Fatal(p, err)
	}
	if err := p.Ask(engine.Access{Op: "destroy"}); err != nil {
		t.Error(err)
	}
	who := principal.Principal{UID: 1, GIDs: []uint32{0}}
	own := engine.Access{Who: who, Op: "ls", Ref: "v", Kind: api.KindVolume, OwnerUID: 1}
	if err := p.Ask(own); !errs.Is(err, errs.Permission) {
		t.Error(err)
	}
}

func TestLoadErrors(t *testing.T) {
	for text, want := range map[string]string{
		"x":                                             "expected",
		"[[allow]]\nuser = [\"nobody\"]":                `unknown key "allow.user"`,
		"[[allow]]\ngoldens = [\"a\"]":                  "entry 1: it names neither users nor groups",
		"[[allow]]\nusers = [\"who-is-it\"]":            "who-is-it",
		"[[allow]]\ngroups = [\"who-is-it\"]":           "who-is-it",
		"[[allow]]\nusers = [\"-1\"]":                   "-1",
		"[[allow]]\nusers = [\"1\"]\nvolumes = -1":      "negative",
		"[[allow]]\nusers = [\"1\"]\nspace = \"much\"":  "not a size",
		"[[allow]]\nusers = [\"1\"]\nttl = \"long\"":    "not a duration",
		"[[allow]]\nusers = [\"1\"]\ngoldens = [\"[\"]": "not a pattern",
	} {
		p, err := policy.Load(t.Context(), write(t, text))
		if !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %+v, %v, want %q", text, p, err, want)
		}
	}

	if os.Geteuid() != 0 {
		return // their own file is never trusted: what follows needs root
	}
	name := write(t, example)
	if err := os.Chmod(name, 0o664); err != nil {
		t.Fatal(err)
	}
	if _, err := policy.Load(t.Context(), name); !errs.Is(err, errs.Permission) {
		t.Errorf("a file that a group can write: %v", err)
	}
}
