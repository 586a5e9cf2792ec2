package viaservice

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"pando/client"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// fake serves requests as a test wants, and returns the way to them.
func fake(t *testing.T, handler http.HandlerFunc) *Pool {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	must(t, err)
	server := &http.Server{Handler: handler}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	p, err := Open(socket)
	must(t, err)
	t.Cleanup(func() {
		p.Close()
		must(t, server.Close())
		<-ended
	})
	return p
}

// TestInterruptedClone: a clone that is interrupted is either done and named, or undone: the service is asked to cancel
// it, and its answer counts.
func TestInterruptedClone(t *testing.T) {
	for _, status := range []int{http.StatusCreated, 499} {
		ctx, interrupt := context.WithCancel(t.Context())
		var canceled sync.Map // of key to channel
		p := fake(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodDelete {
				w.WriteHeader(http.StatusNoContent)
				if c, ok := canceled.LoadAndDelete(filepath.Base(r.URL.Path)); ok {
					close(c.(chan bool))
				}
				return
			}

			// Answer only after the request was canceled.
			_, _ = io.Copy(io.Discard, r.Body)
			c := make(chan bool)
			canceled.Store(r.Header.Get("Idempotency-Key"), c)
			interrupt()
			select {
			case <-c:
			case <-r.Context().Done():
				t.Error("the connection was broken")
			}
			w.WriteHeader(status)
			answer := map[string]any{"name": "job", "kind": "canceled", "detail": "canceled"}
			_ = json.NewEncoder(w).Encode(answer)
		})

		made, err := p.Clone(ctx, engine.CloneRequest{From: ref.MustName("web").Ref(), Name: ref.MustName("job")})
		if status == http.StatusCreated && (err != nil || len(made) != 1 || made[0].Name != "job") {
			t.Errorf("made: %v, %v", made, err)
		}
		if status != http.StatusCreated && (!errors.Is(err, context.Canceled) || len(made) > 0) {
			t.Errorf("undone: %v, %v", made, err)
		}
	}
}

// TestDestroyRepeated: a destroy whose answer is lost is repeated, and spares a new volume with the same name.
func TestDestroyRepeated(t *testing.T) {
	e, direct := served(t)
	clone := func(name string) string {
		t.Helper()
		v, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.MustName("web").Ref(), Name: ref.MustName(name)})
		must(t, err)
		return v[0].ID
	}
	clone("job")
	clone("other")
	fresh := ""

	// The connection breaks after the service has destroyed them, and another client makes a volume.
	lost := 0
	p := fake(t, func(w http.ResponseWriter, r *http.Request) {
		resp, body := pass(t, direct, r)
		if lost == 0 && fresh == "" && !strings.Contains(body, `"reclaimed":false`) {
			lost++
			fresh = clone("job")
			panic(http.ErrAbortHandler)
		}
		w.WriteHeader(resp.StatusCode)
		_, _ = io.WriteString(w, body)
	})

	report, err := p.Destroy(t.Context(), engine.DestroyRequest{What: []ref.Pattern{{Ref: ref.MustName("job").Ref()},
		{Ref: ref.MustName("other").Ref()}}})
	must(t, err)
	if lost != 1 || len(report.Destroyed) != 2 || len(report.Failed) > 0 {
		t.Errorf("%d lost, %+v", lost, report)
	}
	d, err := e.Show(t.Context(), ref.MustName("job").Ref())
	if err != nil || d.ID != fresh {
		t.Errorf("the new volume: %v, %v", d.ID, err)
	}
}

// pass passes a request on to a service.
func pass(t *testing.T, p *Pool, r *http.Request) (*http.Response, string) {
	t.Helper()
	body, err := io.ReadAll(r.Body)
	must(t, err)
	resp, err := p.client.Do(t.Context(), client.Request{Method: r.Method, Path: r.URL.Path, Query: r.URL.Query(),
		Body: bytes.NewReader(body), ContentType: r.Header.Get("Content-Type")})
	must(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	must(t, err)
	return resp, string(text)
}
