package mcp_test

import (
	"bytes"
	"context"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/ref"
	"pando/internal/front/mcp"
)

// TestEndWhileRunning: the end of the input ends a command, and its volume is destroyed.
func TestEndWhileRunning(t *testing.T) {
	e := newPool(t)
	s := serve(t, e)
	s.do(nil, "clone", args{"from": "web", "name": "a-v"})
	go s.call(context.Background(), nil, "run", shell("a-v", "touch running; sleep 1000"))
	await(t, func() bool { return exists(filepath.Join(at(t, e, "a-v"), "running")) })
	begin := time.Now()
	end := s.end()
	if took := time.Since(begin); len(volumes(t, e)) > 0 || len(end.Destroyed) != 1 || took > 20*time.Second {
		t.Errorf("%+v after %s, volumes %q", end, took, volumes(t, e))
	}
}

// TestKeep: volumes stay, unmounted, and are named; with a time to live, they expire.
func TestKeep(t *testing.T) {
	e := newPool(t)
	s := serve(t, e, func(o *mcp.Options) { o.Keep, o.TTL = true, time.Hour })
	for _, name := range []string{"a-2", "a-1", "a-gone"} {
		s.do(nil, "clone", args{"from": "web", "name": name})
	}
	s.do(nil, "destroy", args{"ref": "a-gone"})
	end := s.end()
	if !slices.Equal(end.Kept, []string{"a-1", "a-2"}) || len(end.Destroyed)+len(end.InUse)+len(end.Failed) > 0 {
		t.Errorf("%+v", end)
	}
	d, err := e.Show(t.Context(), ref.MustName("a-1").Ref())
	must(t, err)
	if d.Mounted() || d.Ephemeral || d.ExpiresAt == nil || time.Until(*d.ExpiresAt) < 50*time.Minute {
		t.Errorf("%+v", d)
	}
}

// TestLease: volumes expire soon if the server is killed, later and later as long as it lives, and after the time to
// live in any case.
func TestLease(t *testing.T) {
	e := newPool(t)
	s := serve(t, e, func(o *mcp.Options) { o.Lease = 600 * time.Millisecond })
	short := serve(t, e, func(o *mcp.Options) { o.Lease, o.TTL = time.Hour, time.Second })
	s.do(nil, "clone", args{"from": "web", "name": "a-v"})
	s.do(nil, "snapshot", args{"volume": "a-v", "name": "s"})
	s.do(nil, "rewind", args{"volume": "a-v", "snapshot": "s"}) // it is another object now
	short.do(nil, "clone", args{"from": "web", "name": "a-short"})

	seen := map[time.Time]bool{}
	await(t, func() bool {
		_, err := e.Maintain(t.Context())
		must(t, err)
		d, err := e.Show(t.Context(), ref.MustName("a-v").Ref())
		must(t, err)
		seen[*d.ExpiresAt] = true
		return len(seen) > 4 && !slices.Contains(volumes(t, e), "a-short")
	})
	s.do(nil, "write_file", args{"volume": "a-v", "path": "x", "content": ""})

	// A server that is killed renews nothing.
	killed, err := mcp.New(t.Context(), e, options(func(o *mcp.Options) { o.Lease = 300 * time.Millisecond }))
	must(t, err)
	k := connect(t, killed)
	k.do(nil, "clone", args{"from": "web", "name": "a-killed"})
	await(t, func() bool {
		_, err := e.Maintain(t.Context())
		must(t, err)
		return !slices.Contains(volumes(t, e), "a-killed")
	})
	if got := volumes(t, e); !slices.Equal(got, []string{"a-v"}) {
		t.Errorf("volumes %q", got)
	}
}

// TestHostileInput: whatever arrives in place of messages, the server ends cleanly, and its volumes are destroyed.
func TestHostileInput(t *testing.T) {
	e := newPool(t)
	hello := `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},` +
		`"clientInfo":{"name":"x","version":"1"}}}` + "\n" + `{"jsonrpc":"2.0","method":"notifications/initialized"}` + "\n"
	clone := `{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"clone","arguments":{"from":"web"}}}` + "\n"
	call := func(params string) string {
		return `{"jsonrpc":"2.0","id":3,"method":"tools/call","params":` + params + "}\n"
	}
	for what, input := range map[string]string{
		"nothing":             "",
		"no JSON":             hello + clone + "}{\n",
		"half a message":      hello + clone + `{"jsonrpc":"2.0","id":`,
		"no method":           hello + clone + `{"jsonrpc":"2.0","id":9}` + "\n",
		"an unknown method":   hello + clone + `{"jsonrpc":"2.0","id":9,"method":"x/y"}` + "\n",
		"an array":            hello + clone + `[1,2,[3]]` + "\n",
		"nesting":             hello + clone + strings.Repeat("[", 100_000) + "\n",
		"a long line":         hello + clone + `"` + strings.Repeat("x", 20<<20) + "\"\n",
		"binary":              hello + clone + "\x00\xff\xfe\n",
		"no hello":            clone,
		"an unknown tool":     hello + clone + call(`{"name":"rm -rf"}`),
		"other arguments":     hello + clone + call(`{"name":"destroy","arguments":{"ref":["a"],"force":true}}`),
		"null arguments":      hello + clone + call(`{"name":"list","arguments":null}`),
		"arguments in a list": hello + clone + call(`{"name":"list","arguments":[]}`),
		"the same ID":         hello + clone + clone,
	} {
		server, err := mcp.New(t.Context(), e, options())
		must(t, err)
		out := &buffer{}
		if end, err := server.Serve(io.NopCloser(strings.NewReader(input)), out); len(end.Failed)+len(end.InUse) > 0 {
			t.Errorf("%s: %+v, %v", what, end, err)
		}
		if got := volumes(t, e); len(got) > 0 {
			t.Errorf("%s: volumes %q", what, got)
		}
		for line := range strings.Lines(out.String()) {
			if !strings.HasPrefix(line, `{"jsonrpc":"2.0"`) {
				t.Errorf("%s: the server wrote %q", what, line)
			}
		}
	}
}

type buffer struct{ bytes.Buffer }

func (*buffer) Close() error { return nil }
