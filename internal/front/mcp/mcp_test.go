package mcp_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/engine"
	"pando/internal/front/mcp"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
)

// TestMain can be a program that pando starts.
func TestMain(m *testing.M) {
	engine.Helper(os.Args)
	os.Exit(m.Run())
}

func must(t testing.TB, all ...error) {
	t.Helper()
	if err := errors.Join(all...); err != nil {
		t.Fatal(err)
	}
}

// newPool makes a pool with the golden web, which has some files, and opens it. Its clones are directories.
func newPool(t *testing.T) *engine.Engine {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	drivers := engine.Drivers{plain.Name: plain.Open}
	dir := filepath.Join(t.TempDir(), "pool")
	_, err := engine.Init(t.Context(), engine.InitRequest{Dir: dir, Driver: plain.Name}, drivers)
	must(t, err)
	e, err := engine.Open(t.Context(), dir, drivers)
	must(t, err)
	t.Cleanup(func() {
		e.Close()
		if _, err := engine.Deinit(context.Background(), dir, true, drivers); err != nil {
			t.Errorf("deinit at the end: %v", err)
		}
	})

	src := t.TempDir()
	must(t, os.Mkdir(filepath.Join(src, "sub"), 0o755),
		os.WriteFile(filepath.Join(src, "greeting"), []byte("hello\n"), 0o640))
	golden(t, e, "web", src)
	return e
}

func golden(t *testing.T, e *engine.Engine, name, src string) {
	t.Helper()
	_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName(name), Source: src})
	must(t, err)
}

// volumes lists the names of volumes in a pool.
func volumes(t *testing.T, e *engine.Engine) []string {
	t.Helper()
	names, err := e.VolumeNames(context.Background())
	must(t, err)
	slices.Sort(names)
	return names
}

// session is a client with its server.
type session struct {
	*sdk.ClientSession
	t      *testing.T
	server *mcp.Server
	in     io.Closer // what the server reads
	end    func() mcp.End
}

// options are those of most tests.
func options(change ...func(*mcp.Options)) mcp.Options {
	o := mcp.Options{Version: "test", Prefix: "a", Goldens: []string{"web"}, MaxVolumes: 10, Timeout: time.Minute,
		Sandbox: engine.Sandbox{Bind: "/work"}, Env: []string{"PATH=/usr/bin:/bin"}}
	for _, c := range change {
		c(&o)
	}
	return o
}

// serve starts a server, and connects a client to it. The session ends with the test, if not before.
func serve(t *testing.T, p mcp.Pool, change ...func(*mcp.Options)) *session {
	t.Helper()
	server, err := mcp.New(context.Background(), p, options(change...))
	must(t, err)

	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	ended := make(chan mcp.End, 1)
	go func() {
		end, err := server.Serve(inR, outW)
		if err != nil {
			t.Errorf("the server ended: %v", err)
		}
		ended <- end
	}()
	c, err := sdk.NewClient(&sdk.Implementation{Name: "test"}, nil).Connect(t.Context(),
		&sdk.IOTransport{Reader: outR, Writer: inW}, nil)
	must(t, err)

	s := &session{ClientSession: c, t: t, server: server, in: inW}
	s.end = sync.OnceValue(func() mcp.End {
		inW.Close()
		end := <-ended
		c.Close()
		return end
	})
	t.Cleanup(func() { s.end() })
	return s
}

// connect connects a client to a server that does not serve: it renews no leases and ends nothing.
func connect(t *testing.T, server *mcp.Server) *session {
	t.Helper()
	one, two := sdk.NewInMemoryTransports()
	_, err := server.MCP().Connect(t.Context(), one, nil)
	must(t, err)
	c, err := sdk.NewClient(&sdk.Implementation{Name: "test"}, nil).Connect(t.Context(), two, nil)
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return &session{ClientSession: c, t: t, server: server}
}

// call calls a tool, whose result is decoded into out unless that is nil. Its error is returned as text.
func (s *session) call(ctx context.Context, out any, tool string, args map[string]any) string {
	s.t.Helper()
	r, err := s.CallTool(ctx, &sdk.CallToolParams{Name: tool, Arguments: args})
	if err != nil {
		return err.Error()
	}
	if r.IsError {
		return r.Content[0].(*sdk.TextContent).Text
	}
	text, err := json.Marshal(r.StructuredContent)
	must(s.t, err)
	if out != nil {
		must(s.t, json.Unmarshal(text, out))
	}
	if got := r.Content[0].(*sdk.TextContent).Text; !json.Valid([]byte(got)) {
		s.t.Errorf("%s: the text is not the JSON of the result: %s", tool, got)
	}
	return ""
}

// do calls a tool that must succeed.
func (s *session) do(out any, tool string, args map[string]any) {
	s.t.Helper()
	if text := s.call(s.t.Context(), out, tool, args); text != "" {
		s.t.Fatalf("%s %v: %s", tool, args, text)
	}
}

// refused calls a tool that must fail with an error of a kind.
func (s *session) refused(kind, tool string, args map[string]any) {
	s.t.Helper()
	text := s.call(s.t.Context(), nil, tool, args)
	var e struct {
		Error struct{ Kind, Message string }
	}
	if json.Unmarshal([]byte(text), &e) != nil || e.Error.Kind != kind || e.Error.Message == "" {
		s.t.Errorf("%s %v: %q, want the error %s", tool, args, text, kind)
	}
}

type args = map[string]any

// command is the result of run.
type command struct {
	Notice         string
	Exit           int
	Stdout, Stderr string
	TimedOut       bool `json:"timed_out"`
}

// TestTask is a whole task: clone, change, run, compare, rewind, publish, and clean up.
func TestTask(t *testing.T) {
	e := newPool(t)
	s := serve(t, e, func(o *mcp.Options) { o.Publish = []string{"agent-*"} })

	s.do(nil, "clone", args{"from": "web", "name": "a-job"})
	s.do(nil, "snapshot", args{"volume": "a-job", "name": "clean"})
	s.do(nil, "write_file", args{"volume": "a-job", "path": "new/file", "content": "one\ntwo\n"})
	var ran command
	s.do(&ran, "run", shell("a-job", "wc -l < new/file; pwd; echo bye > greeting; exit 3"))
	if ran.Exit != 3 || ran.Stdout != "2\n/work\n" || !strings.Contains(ran.Notice, "untrusted") {
		t.Errorf("%+v", ran)
	}

	var diff struct {
		A, B    string
		Changes []struct{ Op, Path string }
	}
	s.do(&diff, "diff", args{"volume": "a-job"})
	var changes []string
	for _, c := range diff.Changes {
		changes = append(changes, c.Op+" "+c.Path)
	}
	if got := strings.Join(changes, ", "); diff.A != "web@1" || diff.B != "a-job" ||
		!strings.Contains(got, "modified greeting") || !strings.Contains(got, "added new/file") {
		t.Errorf("%s %s: %s", diff.A, diff.B, got)
	}

	var published struct{ Ref string }
	s.do(&published, "publish", args{"volume": "a-job", "golden": "agent-web"})
	s.do(nil, "rewind", args{"volume": "a-job", "snapshot": "clean"})
	s.do(&diff, "diff", args{"volume": "a-job"})
	if len(diff.Changes) != 0 {
		t.Errorf("after the rewind: %+v", diff)
	}
	s.do(nil, "clone", args{"from": "agent-web", "name": "a-next"}) // it is its own
	var file struct{ Content string }
	s.do(&file, "read_file", args{"volume": "a-next", "path": "greeting"})
	if file.Content != "bye\n" {
		t.Errorf("%q", file.Content)
	}

	s.do(nil, "destroy", args{"ref": "a-job@clean"})
	s.do(nil, "destroy", args{"ref": "a-job"})
	if got := volumes(t, e); !slices.Equal(got, []string{"a-next"}) {
		t.Errorf("volumes %q", got)
	}
	end := s.end()
	if got := volumes(t, e); len(got) > 0 || !slices.Equal(end.Destroyed, []string{"a-next"}) ||
		!slices.Equal(end.Published, []string{"agent-web@1"}) {
		t.Errorf("volumes %q, %+v", got, end)
	}
}

// TestAnnotations: each tool says all four hints, describes its result, and no result has a path of the host.
func TestAnnotations(t *testing.T) {
	s := serve(t, newPool(t))
	tools, err := s.ListTools(t.Context(), nil)
	must(t, err)
	want := "clone destroy diff list list_files publish read_file rewind run snapshot write_file"
	var names []string
	for _, tool := range tools.Tools {
		names = append(names, tool.Name)
		text, err := json.Marshal(tool.Annotations)
		must(t, err)
		var hints map[string]any
		must(t, json.Unmarshal(text, &hints))
		for _, hint := range []string{"readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint"} {
			if _, is := hints[hint].(bool); !is {
				t.Errorf("%s: no %s in %s", tool.Name, hint, text)
			}
		}
		if hints["readOnlyHint"] == true && hints["destructiveHint"] == true {
			t.Errorf("%s: %s", tool.Name, text)
		}
		if tool.OutputSchema == nil || tool.Title == "" || tool.Description == "" {
			t.Errorf("%s: %+v", tool.Name, tool)
		}
	}
	slices.Sort(names)
	if got := strings.Join(names, " "); got != want {
		t.Errorf("tools %s, want %s", got, want)
	}

	r, err := s.CallTool(t.Context(), &sdk.CallToolParams{Name: "clone", Arguments: args{"from": "web"}})
	must(t, err)
	if text := r.Content[0].(*sdk.TextContent).Text; strings.Contains(text, "/") || r.IsError {
		t.Errorf("a path of the host: %s", text)
	}
}
