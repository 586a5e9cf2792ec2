package listing

import (
	"strings"
	"testing"

	"pando/internal/api"
)

// TestTree: a volume stands below what it was made from as long as that exists, whoever has its name, and nothing is
// left out.
func TestTree(t *testing.T) {
	volume := func(name, origin, golden string) api.Object {
		return api.Object{Kind: api.KindVolume, Ref: name, Name: name, Origin: origin, Golden: golden}
	}
	removed := func(o api.Object) api.Object { o.OriginRemoved = true; return o }
	snapshot := func(volume, name string) api.Object {
		return api.Object{Kind: api.KindSnapshot, Ref: volume + "@" + name, Name: name, Volume: volume, Origin: volume}
	}

	got := draw(Tree([]api.Golden{{Name: "db"}, {Name: "web"}}, []api.Object{
		volume("a", "web@1", "web"), snapshot("a", "s"), snapshot("a", "t"),
		volume("b", "a@s", "web"),
		volume("c", "a", "web"),
		removed(volume("d", "a", "web")),     // its origin was another a
		removed(volume("e", "web@2", "web")), // its origin is a generation that is not kept
		removed(volume("f", "f", "")),        // it has the name of its origin
		volume("g", "g@s", "web"),            // it was rewound
		snapshot("g", "s"),
		removed(volume("h", "1@1", "web")),
		volume("i", "", ""),
		volume("j", "web@1", "web"),
		volume("k", "gone@1", "gone"),
	}), 0)
	want := `db
web
 a
  a@s
   b
  a@t
  c
 e
 g
  g@s
 j
d
f
h
i
k
`
	if got != want {
		t.Errorf("%s\nwanted\n%s", got, want)
	}
}

func draw(nodes []*Node, depth int) string {
	var b strings.Builder
	for _, n := range nodes {
		name := ""
		if n.Golden != nil {
			name = n.Golden.Name
		} else {
			name = n.Object.Ref
		}
		b.WriteString(strings.Repeat(" ", depth) + name + "\n" + draw(n.Below, depth+1))
	}
	return b.String()
}
