package client_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"testing"

	"pando/client"
)

// TestDestroyRepeated: a destroy whose answer is lost is repeated, and spares a new volume with the same name.
func TestDestroyRepeated(t *testing.T) {
	direct, err := client.New(client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer direct.Close()
	if _, err := direct.Import(t.Context(), "repeated", tarball("file", "v1"), client.ImportOptions{}); err != nil {
		t.Fatal(err)
	}
	clone := func() string {
		t.Helper()
		v, err := direct.Clone(t.Context(), client.CloneRequest{From: "repeated", Name: "again"})
		if err != nil {
			t.Fatal(err)
		}
		return v.ID
	}

	for _, way := range []string{"one", "many"} {
		clone()

		// The connection breaks after the service has destroyed it, and another client makes a volume.
		fresh := ""
		lost := lossy(t, func(r *http.Request, answer string) bool {
			if fresh != "" || r.Method != http.MethodDelete && !strings.Contains(answer, "reclaimed\":true") {
				return false
			}
			fresh = clone()
			return true
		})
		if way == "one" {
			err = lost.Destroy(t.Context(), "again", "")
		} else {
			_, err = lost.DestroyMany(t.Context(), []string{"aga*"}, nil)
		}
		d, serr := direct.Volume(t.Context(), "again")
		if err != nil || serr != nil || fresh == "" || d.ID != fresh {
			t.Fatalf("%s: %v, the new volume %q is %+v, %v", way, err, fresh, d, serr)
		}
		if err := direct.Destroy(t.Context(), "again", ""); err != nil {
			t.Fatal(err)
		}
	}
}

// lossy returns a client whose connection breaks before those answers of the service for which lose returns true.
func lossy(t *testing.T, lose func(r *http.Request, answer string) bool) *client.Client {
	t.Helper()
	errLost := errors.New("lost")
	to, err := url.Parse("http://pando")
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) },
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", os.Getenv(client.SocketVariable))
		}},
		ModifyResponse: func(resp *http.Response) error {
			b, err := httputil.DumpResponse(resp, true)
			if err == nil && lose(resp.Request, string(b)) {
				err = errLost
			}
			return err
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	})
	t.Cleanup(server.Close)
	c, err := client.New(client.Options{URL: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}
