package gcs_test

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/gcs"
	"pando/internal/testing/servertest"
)

// TestTokens: the key of a service account becomes a token, which every request has;
// and what is said if there is none.
func TestTokens(t *testing.T) {
	server := servertest.FakeGCS(t)
	server.Setenv(t)
	t.Setenv("STORAGE_EMULATOR_HOST", "")
	t.Setenv("HOME", t.TempDir())
	var asked atomic.Int32
	var refuse func(http.ResponseWriter)
	tokens := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		if err := r.ParseForm(); err != nil || len(strings.Split(r.Form.Get("assertion"), ".")) != 3 {
			t.Errorf("the request for a token has no signed assertion: %v", r.Form)
		}
		w.Header().Set("Date", time.Now().Add(time.Hour).UTC().Format(http.TimeFormat))
		if refuse != nil {
			refuse(w)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{"access_token": "the-token", "token_type": "Bearer", "expires_in": 3600})
	}))
	defer tokens.Close()
	private, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(map[string]string{
		"type": "service_account", "client_email": "pando@example.org", "private_key_id": "1", "token_uri": tokens.URL,
		"private_key": string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY",
			Bytes: x509.MarshalPKCS1PrivateKey(private)})),
	})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "key.json")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", file)

	proxy := servertest.NewProxy(t, server, &servertest.Fault{
		Match: func(r *http.Request) bool { return r.Header.Get("Authorization") != "Bearer the-token" },
		Times: -1, Status: http.StatusUnauthorized,
	})
	u := server.URLOf(servertest.Bucket, prefix(t), proxy.URL)
	s := open(t, u)
	// What the process has in its environment is used only if the front end says so.
	for _, c := range []struct {
		access objstore.Access
		kind   errs.Kind
	}{
		{objstore.Access{}, errs.Permission},
		{objstore.Access{Setting: os.Getenv}, ""},
	} {
		given, err := gcs.Open(t.Context(), u, c.access)
		if err != nil {
			t.Fatal(err)
		}
		if err := calls["list"](t.Context(), given); errs.KindOf(err) != c.kind {
			t.Errorf("with only what is given: %v, want %q", err, c.kind)
		}
	}
	asked.Store(0)
	for _, name := range []string{"put", "put if absent", "list", "delete"} {
		if err := calls[name](t.Context(), s); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("%d tokens were fetched for four requests", n)
	}

	answer := func(status int, body string) func(http.ResponseWriter) {
		return func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			_, _ = w.Write([]byte(body))
		}
	}
	for name, c := range map[string]struct {
		refuse func(http.ResponseWriter)
		want   want
	}{
		"revoked": {answer(400, `{"error":"invalid_grant","error_description":"Invalid JWT Signature."}`),
			want{kind: errs.Permission, hint: "revoked"}},
		"clock": {answer(400,
			`{"error":"invalid_grant","error_description":"Invalid JWT: Token must be a short-lived token (60 minutes) `+
				`and in a reasonable timeframe. Check your iat and exp values in the JWT claim."}`),
			want{kind: errs.Permission, hint: "behind the server's"}},
		"not well": {answer(503, `{}`), want{kind: errs.IO, temporary: true}},
		"no JSON":  {answer(200, `<html>`), want{kind: errs.IO, temporary: true}},
	} {
		t.Run(name, func(t *testing.T) {
			refuse = c.refuse
			for name, call := range calls {
				t.Run(name, func(t *testing.T) {
					err := call(t.Context(), open(t, u))
					c.want.check(t, err)
					if err != nil && strings.Contains(err.Error(), "assertion") {
						t.Errorf("too much is said: %v", err)
					}
				})
			}
		})
	}
	tokens.Close()
	t.Run("gone", func(t *testing.T) {
		want{kind: errs.IO, temporary: true}.check(t, calls["get"](t.Context(), open(t, u)))
	})
	for name, path := range map[string]string{"no such file": filepath.Join(t.TempDir(), "none"), "no key": os.DevNull} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", path)
			want{kind: errs.Permission, hint: "GOOGLE_APPLICATION_CREDENTIALS"}.check(t, calls["get"](t.Context(), open(t, u)))
		})
	}
}
