package service

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"testing"

	"pando/client"
)

// overSocket returns a plain client of a unix socket. Each request has its own connection.
func overSocket(socket string) *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}}}
}

// archive returns a tar archive with these files.
func archive(t testing.TB, files map[string]string) io.Reader {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, text := range files {
		must(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(text)), Typeflag: tar.TypeReg}))
		_, err := io.WriteString(w, text)
		must(t, err)
	}
	must(t, w.Close())
	return &b
}

// want checks that an error is of a kind and has a status.
func want(t testing.TB, what string, err error, kind string, status int) {
	t.Helper()
	var e *client.Error
	if !errors.As(err, &e) || e.Kind != kind || e.Status != status {
		t.Errorf("%s: got %v (%+v), want %s with status %d", what, err, e, kind, status)
	}
}

// must2 returns a value, unless there is an error.
func must2[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		must(t, err)
		return v
	}
}

// done waits for an operation, and returns its result.
func done[T any](s *served, op *client.Operation, err error) T {
	s.t.Helper()
	var out T
	must(s.t, err)
	_, err = s.c.Wait(context.Background(), op.ID, &out)
	must(s.t, err)
	return out
}
