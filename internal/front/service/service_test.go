package service

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/client"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/remote/replicate"
	"pando/internal/testing/testfs"

	"github.com/danielgtaylor/huma/v2"
)

var drivers = engine.Drivers{reflink.Name: reflink.Open, plain.Name: plain.Open}

// TestMain can be a program that pando starts.
func TestMain(m *testing.M) {
	engine.Helper(os.Args)
	if socket := os.Getenv("SERVICE_TEST_CALL"); socket != "" {
		if os.Getenv("SERVICE_TEST_PATHS") == "" {
			os.Exit(callForTest(socket))
		}
		os.Exit(callAsOther(socket))
	}
	os.Exit(m.Run())
}

func must(t testing.TB, all ...error) {
	t.Helper()
	if err := errors.Join(all...); err != nil {
		t.Fatal(err)
	}
}

// served is a service that runs in this process.
type served struct {
	*Service
	t      testing.TB
	socket string
	c      *client.Client
	stop   func() // ends it, and waits for its end
}

// newPool makes a pool, removed at the end of the test, and returns its directory. Pools of the driver plain need no
// root.
func newPool(t testing.TB, driverName string) string {
	t.Helper()
	top := t.TempDir()
	if driverName == reflink.Name {
		if os.Geteuid() != 0 {
			t.Skip("SKIPPED: mounting needs root: run the tests as root")
		}
		top = testfs.XFS(t, 1<<30)
	}
	dir := filepath.Join(top, "pool")
	_, err := engine.Init(context.Background(), engine.InitRequest{Dir: dir, Driver: driverName}, drivers)
	must(t, err)
	t.Cleanup(func() {
		if _, err := engine.Deinit(context.Background(), dir, true, drivers); err != nil {
			t.Errorf("deinit at the end: %v", err)
		}
	})
	return dir
}

// serve serves a pool until the end of the test. It checks each answer against the OpenAPI document.
func serve(t testing.TB, dir string, more ...func(*Options)) *served {
	t.Helper()
	e, err := engine.Open(context.Background(), dir, drivers)
	must(t, err)
	_, err = e.Maintain(context.Background())
	must(t, err)

	o := Options{Version: "test", Drivers: drivers, Grace: 10 * time.Second, Log: t.Logf,
		Access: func() (replicate.Access, error) { return replicate.Access{}, nil }}
	for _, change := range more {
		change(&o)
	}
	s, err := New(e, o)
	must(t, err)
	s.handler = documented(t, s, s.handler)

	socket := filepath.Join(t.TempDir(), "s")
	l, _, err := ListenUnix(socket)
	must(t, err)
	c, err := client.New(client.Options{Socket: socket})
	must(t, err)

	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- s.Serve(ctx, l) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the service ended: %v", err)
		}
		c.Close()
		e.Close()
	})
	t.Cleanup(stop)
	return &served{Service: s, t: t, socket: socket, c: c, stop: stop}
}

// served and golden: a service of a new pool with the golden web.
func withGolden(t testing.TB, driverName string) *served {
	t.Helper()
	s := serve(t, newPool(t, driverName))
	_, err := s.c.Import(context.Background(), "web", archive(t, map[string]string{"file": "v1"}), client.ImportOptions{
		SizeBytes: 64 << 20 * sized(driverName)})
	must(t, err)
	return s
}

// sized is 1 if volumes of a driver have a size.
func sized(driverName string) int64 {
	if driverName == plain.Name {
		return 0
	}
	return 1
}

// documented checks that the answers of a handler are as its OpenAPI document says.
func documented(t testing.TB, s *Service, next http.Handler) http.Handler {
	registry := s.api.OpenAPI().Components.Schemas
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen := &copied{ResponseWriter: w, status: http.StatusOK}
		next.ServeHTTP(seen, r)
		if !strings.HasSuffix(w.Header().Get("Content-Type"), "json") || r.URL.Path == documentPath {
			return
		}

		schema := &huma.Schema{Ref: "#/components/schemas/Problem"}
		if op := operationOf(s, r); op != nil && seen.status < 400 {
			answer := op.Responses[strconv.Itoa(seen.status)]
			if answer == nil {
				t.Errorf("%s %s: status %d is not documented", r.Method, r.URL.Path, seen.status)
				return
			}
			schema = answer.Content["application/json"].Schema
		}

		var v any
		if err := json.Unmarshal(seen.body.Bytes(), &v); err != nil {
			t.Errorf("%s %s: %v", r.Method, r.URL.Path, err)
			return
		}
		res := &huma.ValidateResult{}
		huma.Validate(registry, schema, huma.NewPathBuffer(nil, 0), huma.ModeReadFromServer, v, res)
		if len(res.Errors) > 0 {
			t.Errorf("%s %s: the answer is not as documented: %v\n%s", r.Method, r.URL.Path, res.Errors, seen.body.Bytes())
		}
	})
}

// operationOf finds the operation of a request in the document; nil: none.
func operationOf(s *Service, r *http.Request) *huma.Operation {
	for path, item := range s.api.OpenAPI().Paths {
		op := map[string]*huma.Operation{"GET": item.Get, "POST": item.Post, "PUT": item.Put, "PATCH": item.Patch,
			"DELETE": item.Delete}[r.Method]
		want, have := strings.Split(path, "/"), strings.Split(r.URL.Path, "/")
		if op != nil && slices.EqualFunc(want, have, func(a, b string) bool { return a == b || strings.HasPrefix(a, "{") }) {
			return op
		}
	}
	return nil
}

// copied keeps a copy of a response.
type copied struct {
	http.ResponseWriter
	status int
	body   bytes.Buffer
}

func (c *copied) WriteHeader(status int) {
	c.status = status
	c.ResponseWriter.WriteHeader(status)
}

func (c *copied) Write(b []byte) (int, error) {
	if strings.HasSuffix(c.Header().Get("Content-Type"), "json") {
		c.body.Write(b)
	}
	return c.ResponseWriter.Write(b)
}

func (c *copied) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// raw sends a request without the client, and returns status and body.
func (s *served) raw(method, path, body string, headers ...string) (int, string) {
	s.t.Helper()
	h := http.Header{}
	if body != "" {
		h.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(headers); i += 2 {
		h.Set(headers[i], headers[i+1])
	}
	r, err := http.NewRequest(method, "http://pando"+path, strings.NewReader(body))
	must(s.t, err)
	r.Header = h
	resp, err := overSocket(s.socket).Do(r)
	must(s.t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	must(s.t, err)
	return resp.StatusCode, string(b)
}
