package ref

import (
	"slices"
	"strings"
	"testing"

	"pando/internal/base/errs"
)

func TestParse(t *testing.T) {
	for s, want := range map[string]Ref{
		"web":                             {"web", ""},
		"web@3":                           {"web", "3"},
		"A.b_c-9@before-upgrade":          {"A.b_c-9", "before-upgrade"},
		strings.Repeat("x", MaxNameBytes): {strings.Repeat("x", MaxNameBytes), ""},
	} {
		got, err := Parse("test", s)
		if err != nil || got != want || got.String() != s {
			t.Errorf("Parse(%q) = %v, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "@", "web@", "@3", "a@b@c", "a/b", "..", "a..b", ".a", "-a", "_a", "a b", "a\x00b",
		"a\nb", "a\x7f", "ä",
		"a*", "a?", "[a]", "a:b", "a\\b", strings.Repeat("x", MaxNameBytes+1)} {
		if got, err := Parse("test", s); !errs.Is(err, errs.Invalid) || errs.HintOf(err) == "" {
			t.Errorf("Parse(%q) = %v, %v; wanted Invalid with a hint", s, got, err)
		}
	}
}

func TestGeneration(t *testing.T) {
	for at, want := range map[string]int{"1": 1, "42": 42} {
		if n, ok := (Ref{"g", at}).Generation(); !ok || n != want {
			t.Errorf("%q: %d %v", at, n, ok)
		}
	}
	for _, at := range []string{"", "0", "-1", "01", "+1", "x", "1x", "99999999999999999999"} {
		if n, ok := (Ref{"g", at}).Generation(); ok {
			t.Errorf("%q is generation %d", at, n)
		}
	}
	if s := Generation("g", 7); s != "g@7" {
		t.Error(s)
	}
}

// FuzzParse: what is accepted is written back as it was, and is safe as the name
// of a file.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"web", "web@3", "a..b", "a/b", "@", "\x00", "ä@ö"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := Parse("test", s)
		if err != nil {
			return
		}
		if r.String() != s {
			t.Errorf("%q came back as %q", s, r)
		}
		for _, name := range []string{r.Name, r.At} {
			if strings.ContainsAny(name, "/\x00\n@ *?[") || strings.Contains(name, "..") || strings.HasPrefix(name, "-") ||
				len(name) > MaxNameBytes {
				t.Errorf("%q is accepted", name)
			}
		}
		if again, err := Parse("test", r.String()); err != nil || again != r {
			t.Errorf("%v: %v", again, err)
		}
	})
}

func TestPatterns(t *testing.T) {
	got, err := ParsePatterns("destroy", "v", "v@s", "agent-*", "[ab]")
	want := []Pattern{{Ref: Ref{"v", ""}}, {Ref: Ref{"v", "s"}}, {Glob: "agent-*"}, {Glob: "[ab]"}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for i, s := range []string{"v", "v@s", "agent-*", "[ab]"} {
		if got[i].String() != s {
			t.Errorf("%q became %q", s, got[i])
		}
	}
	for _, s := range []string{"", "a/b", "a@", "[a", "v@@s"} {
		if p, err := ParsePatterns("destroy", "v", s); !errs.Is(err, errs.Invalid) || errs.HintOf(err) == "" || p != nil {
			t.Errorf("%q: %v, %v", s, p, err)
		}
	}
}

func TestNames(t *testing.T) {
	n, err := ParseName("mount", "web")
	if err != nil || n.String() != "web" || n != MustName("web") || n.IsZero() || n.Required("mount") != nil {
		t.Errorf("%q, %v", n, err)
	}
	if r := n.Ref(); r != (Ref{Name: "web"}) {
		t.Errorf("%v", r)
	}
	if r := n.At(MustName("before")); r != (Ref{"web", "before"}) {
		t.Errorf("%v", r)
	}
	for _, s := range []string{"", "web@1", "a/b", "..", "-a"} {
		if n, err := ParseName("mount", s); n != (Name{}) || !errs.Is(err, errs.Invalid) {
			t.Errorf("%q is the name %q: %v", s, n, err)
		}
	}
	if err := (Name{}).Required("mount"); !errs.Is(err, errs.Invalid) || errs.HintOf(err) == "" {
		t.Errorf("no name is enough: %v", err)
	}
}
