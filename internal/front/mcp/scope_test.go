package mcp_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/front/mcp"
)

func clone(t *testing.T, e *engine.Engine, from, name string) {
	t.Helper()
	_, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.MustName(from).Ref(), Name: ref.MustName(name)})
	must(t, err)
}

// TestScope: a client reaches only volumes with the prefix and the goldens that it may use, and changes only what it
// has made.
func TestScope(t *testing.T) {
	e := newPool(t)
	src := t.TempDir()
	golden(t, e, "secret", src)
	golden(t, e, "a-secret", src)  // a golden with the prefix
	clone(t, e, "web", "ab-other") // begins like the prefix
	clone(t, e, "web", "web-copy") // begins like a golden
	clone(t, e, "secret", "a-theirs")
	before := volumes(t, e)

	s := serve(t, e, func(o *mcp.Options) { o.Goldens = []string{"web*"} })
	s.do(nil, "clone", args{"from": "web", "name": "a-mine"})
	for _, from := range []string{"secret", "secret@1", "a-secret", "a-secret@1", "ab-other", "web-copy", "nothing"} {
		s.refused("permission", "clone", args{"from": from})
		s.refused("permission", "diff", args{"volume": "a-mine", "against": from})
	}
	for _, name := range []string{"b", "ab", "ab-x", "web-x", "a"} {
		s.refused("permission", "clone", args{"from": "web", "name": name})
	}
	for _, name := range []string{"", "-a", "a-*", "a-/x", "../a-x", "a-x@1", "a-\n", "A-é"} {
		if name != "" { // a name is made for none
			s.refused("invalid", "clone", args{"from": "web", "name": name})
		}
		s.refused("invalid", "snapshot", args{"volume": name})
	}

	// What others have made can be seen and cloned, and nothing else.
	s.do(nil, "clone", args{"from": "a-theirs", "name": "a-copy"})
	for _, name := range []string{"a-theirs", "ab-other", "web-copy"} {
		s.refused("permission", "destroy", args{"ref": name})
		s.refused("permission", "destroy", args{"ref": name + "@s"})
		s.refused("permission", "rewind", args{"volume": name, "snapshot": "s"})
		s.refused("permission", "snapshot", args{"volume": name})
		s.refused("permission", "run", args{"volume": name, "command": []string{"true"}})
		s.refused("permission", "read_file", args{"volume": name, "path": "greeting"})
		s.refused("permission", "list_files", args{"volume": name})
		s.refused("permission", "write_file", args{"volume": name, "path": "x", "content": ""})
	}
	s.refused("invalid", "destroy", args{"ref": "a-*"})
	s.refused("permission", "publish", args{"volume": "a-mine", "golden": "web"})
	s.refused("not_found", "destroy", args{"ref": "a-nothing"})

	if text := s.call(t.Context(), nil, "diff", args{"volume": "a-theirs"}); !strings.Contains(text, "not_found") ||
		strings.Contains(text, "secret") {
		t.Errorf("diff with a secret origin: %s", text)
	}

	// The origin of a volume of others may have a secret name.
	var list struct {
		Goldens []struct{ Name string }
		Volumes []struct {
			Name, Origin string
			Mine         bool
		}
	}
	s.do(&list, "list", nil)
	got := fmt.Sprint(list)
	if got != "{[{web}] [{a-copy a-theirs true} {a-mine web@1 true} {a-theirs  false}]}" {
		t.Error(got)
	}

	s.end()
	if got := volumes(t, e); !slices.Equal(got, before) {
		t.Errorf("volumes %q, want %q", got, before)
	}
}

// TestAllowDestroy: with it, volumes of others with the prefix can be destroyed, and still no others.
func TestAllowDestroy(t *testing.T) {
	e := newPool(t)
	for _, name := range []string{"a-theirs", "ab-other", "web-copy"} {
		clone(t, e, "web", name)
	}
	s := serve(t, e, func(o *mcp.Options) { o.AllowDestroy = true })
	golden(t, e, "a-golden", t.TempDir())
	s.do(nil, "write_file", args{"volume": "a-theirs", "path": "x", "content": "y"})
	s.do(nil, "destroy", args{"ref": "a-theirs"})
	for _, ref := range []string{"a-golden", "a-golden@1"} {
		if text := s.call(t.Context(), nil, "destroy", args{"ref": ref}); text == "" {
			t.Errorf("%s was destroyed", ref)
		}
	}
	s.refused("permission", "clone", args{"from": "a-golden"})
	s.refused("permission", "destroy", args{"ref": "ab-other"})
	s.refused("permission", "destroy", args{"ref": "web-copy"})
	s.refused("not_found", "destroy", args{"ref": "a-theirs"})
	s.end()
	if got := volumes(t, e); !slices.Equal(got, []string{"ab-other", "web-copy"}) {
		t.Errorf("volumes %q", got)
	}
}

// TestTwoServers: two servers with one prefix see each other's volumes, and end only with their own.
func TestTwoServers(t *testing.T) {
	e := newPool(t)
	one, two := serve(t, e), serve(t, e)
	one.do(nil, "clone", args{"from": "web", "name": "a-1"})
	two.refused("exists", "clone", args{"from": "web", "name": "a-1"})
	two.do(nil, "clone", args{"from": "a-1", "name": "a-2"})
	two.refused("permission", "destroy", args{"ref": "a-1"})

	// A volume that was replaced by one of another server is not the first server's any more.
	one.do(nil, "clone", args{"from": "web", "name": "a-3"})
	_, err := e.Destroy(t.Context(), engine.DestroyRequest{What: []ref.Pattern{{Ref: ref.MustName("a-3").Ref()}}})
	must(t, err)
	two.do(nil, "clone", args{"from": "web", "name": "a-3"})
	one.refused("permission", "destroy", args{"ref": "a-3"})

	end := one.end()
	if got := volumes(t, e); !slices.Equal(got, []string{"a-2", "a-3"}) || !slices.Equal(end.Destroyed, []string{"a-1"}) {
		t.Errorf("volumes %q, %+v", got, end)
	}
	two.end()
	if got := volumes(t, e); len(got) > 0 {
		t.Errorf("volumes %q", got)
	}
}

// TestLimits: at most as many volumes at a time as was said, counted without those that are gone.
func TestLimits(t *testing.T) {
	e := newPool(t)
	s := serve(t, e, func(o *mcp.Options) { o.MaxVolumes = 2 })
	s.do(nil, "clone", args{"from": "web", "name": "a-1"})
	s.refused("not_found", "clone", args{"from": "web@7", "name": "a-x"}) // takes no place
	s.do(nil, "clone", args{"from": "web", "name": "a-2"})
	s.refused("no_space", "clone", args{"from": "web", "name": "a-3"})
	s.do(nil, "destroy", args{"ref": "a-1"})
	s.do(nil, "clone", args{"from": "web", "name": "a-3"})
	_, err := e.Destroy(t.Context(), engine.DestroyRequest{What: []ref.Pattern{{Ref: ref.MustName("a-2").Ref()}}})
	must(t, err)
	s.do(nil, "clone", args{"from": "web", "name": "a-4"})
	s.refused("no_space", "clone", args{"from": "web", "name": "a-5"})

	// Also if they come at once.
	all := serve(t, e, func(o *mcp.Options) { o.Prefix, o.MaxVolumes = "b", 3 })
	made := make(chan bool)
	for i := range 8 {
		go func() {
			made <- all.call(t.Context(), nil, "clone", args{"from": "web", "name": fmt.Sprintf("b-%d", i)}) == ""
		}()
	}
	n := 0
	for range 8 {
		if <-made {
			n++
		}
	}
	if n != 3 {
		t.Errorf("%d of 8 clones at once were made, want 3", n)
	}
}

// TestOptions: what a server cannot be started with.
func TestOptions(t *testing.T) {
	for what, change := range map[string]func(*mcp.Options){
		"no golden":       func(o *mcp.Options) { o.Goldens = nil },
		"an empty golden": func(o *mcp.Options) { o.Goldens = []string{""} },
		"a bad pattern":   func(o *mcp.Options) { o.Publish = []string{"["} },
		"no prefix":       func(o *mcp.Options) { o.Prefix = "" },
		"a bad prefix":    func(o *mcp.Options) { o.Prefix = "a/b" },
		"no volumes":      func(o *mcp.Options) { o.MaxVolumes = 0 },
		"no time":         func(o *mcp.Options) { o.Timeout = 0 },
		"no sandbox":      func(o *mcp.Options) { o.Sandbox = engine.Sandbox{} },
		"a bad sandbox":   func(o *mcp.Options) { o.Sandbox.Net = "x" },
	} {
		if _, err := mcp.New(t.Context(), nil, options(change)); err == nil {
			t.Errorf("%s: no error", what)
		}
	}
}
