package service

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/client"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/testing/testfs"
)

// callAsOther sends requests to a service, and prints the statuses of the answers. It is a process of its own, of
// another user.
func callAsOther(socket string) int {
	for _, call := range strings.Fields(os.Getenv("SERVICE_TEST_PATHS")) {
		method, path, _ := strings.Cut(call, ":")
		r, _ := http.NewRequest(method, "http://pando"+path, strings.NewReader("{}")) // a good URL
		r.Header.Set("Content-Type", "application/json")
		resp, err := overSocket(socket).Do(r)
		if err != nil {
			fmt.Println(err)
			return 1
		}
		b, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		fmt.Println(resp.StatusCode, strings.TrimSpace(string(b)))
	}
	return 0
}

// TestOthersAreRefused: without a policy no other user may use any route, whoever let them connect.
func TestOthersAreRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can become another user: run the tests as root")
	}
	s := serve(t, newPool(t, plain.Name))
	must(t, os.Chmod(s.socket, 0o777))
	for d := filepath.Dir(s.socket); strings.HasPrefix(d, os.TempDir()+"/"); d = filepath.Dir(d) {
		must(t, os.Chmod(d, 0o755))
	}

	// All routes of the document, and those that are not in it.
	var calls []string
	for path, item := range s.api.OpenAPI().Paths {
		path = strings.NewReplacer("{number}", "1", "{", "", "}", "").Replace(path)
		for method, op := range map[string]any{"GET": item.Get, "POST": item.Post, "PUT": item.Put, "PATCH": item.Patch,
			"DELETE": item.Delete} {
			if fmt.Sprint(op) != "<nil>" {
				calls = append(calls, method+":"+path)
			}
		}
	}
	if len(calls) < 40 {
		t.Fatalf("only %d routes", len(calls))
	}

	exe := filepath.Join(filepath.Dir(s.socket), "test")
	b, err := os.ReadFile("/proc/self/exe")
	must(t, err)
	must(t, testfs.WriteProgram(exe, b))
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "SERVICE_TEST_CALL="+s.socket, "SERVICE_TEST_PATHS="+strings.Join(calls, " "))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) != len(calls) {
		t.Fatalf("%d answers to %d calls: %s", len(lines), len(calls), out)
	}
	for i, line := range lines {
		if !strings.HasPrefix(line, "403 ") || !strings.Contains(line, "without a policy, only root may") {
			t.Errorf("%s: %s", calls[i], line)
		}
	}
}

// TestSocket: the socket of a dead service is replaced, that of a live one is not, and other files are not either.
func TestSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sub", "s")
	l, group, err := ListenUnix(path)
	must(t, err)
	info, err := os.Stat(path)
	must(t, err)
	if _, lerr := user.LookupGroup(Group); lerr != nil && (group || info.Mode().Perm() != 0o600) {
		t.Errorf("mode %v, group %v", info.Mode(), group)
	}
	if _, _, err := ListenUnix(path); !errs.Is(err, errs.InUse) {
		t.Errorf("a live one: %v", err)
	}

	// Its process dies.
	l.Listener.(*net.UnixListener).SetUnlinkOnClose(false)
	must(t, l.Close())
	again, _, err := ListenUnix(path)
	must(t, err)
	must(t, again.Close())
	if _, err := os.Lstat(path); err == nil {
		t.Error("the socket is left behind")
	}

	must(t, os.WriteFile(path, []byte("x"), 0o600))
	if _, _, err := ListenUnix(path); !errs.Is(err, errs.Exists) {
		t.Errorf("a file: %v", err)
	}
	if b, _ := os.ReadFile(path); string(b) != "x" {
		t.Error("the file was replaced")
	}
	if _, _, err := ListenUnix("/tmp/" + strings.Repeat("x", 120)); !errs.Is(err, errs.Invalid) {
		t.Errorf("a long path: %v", err)
	}
}

// TestSocketOfGroup: a group gets the socket, and others do not.
func TestSocketOfGroup(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can give a socket to a group: run the tests as root")
	}
	path := filepath.Join(t.TempDir(), "s")
	must(t, os.WriteFile(path, nil, 0o600))
	ok, err := openToGroup(path, "daemon")
	must(t, err)
	info, err := os.Stat(path)
	must(t, err)
	g, err := user.LookupGroup("daemon")
	must(t, err)
	if gid := info.Sys().(*syscall.Stat_t).Gid; !ok || info.Mode().Perm() != 0o660 || strconv.Itoa(int(gid)) != g.Gid {
		t.Errorf("%v, mode %v, group %d", ok, info.Mode(), gid)
	}
	if ok, err := openToGroup(path, "no-such-group"); ok || err != nil {
		t.Errorf("a group that does not exist: %v, %v", ok, err)
	}
}

// certificate makes a certificate for host.test and 127.0.0.1, and returns its files and a pool that trusts it.
func certificate(t *testing.T) (cert, key string, roots *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour),
		DNSNames: []string{"host.test"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true,
		BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, c, c, private.Public(), private)
	must(t, err)
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	must(t, err)

	cert, key = filepath.Join(t.TempDir(), "cert.pem"), filepath.Join(t.TempDir(), "key.pem")
	roots = x509.NewCertPool()
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	roots.AppendCertsFromPEM(text)
	must(t, os.WriteFile(cert, text, 0o600),
		os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}), 0o600))
	return cert, key, roots
}

// TestTokens: over TCP a token is needed, the host name must be the service's, and there is no TLS before 1.3.
func TestTokens(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tokens")
	token, err := AddToken(file, ref.MustName("ci"))
	must(t, err)
	other, err := AddToken(file, ref.MustName("other"))
	must(t, err)
	if _, err := AddToken(file, ref.MustName("ci")); !errs.Is(err, errs.Exists) {
		t.Errorf("the same name: %v", err)
	}
	if b, _ := os.ReadFile(file); strings.Contains(string(b), token[8:]) || other == token {
		t.Errorf("the file has the token: %s", b)
	}
	tokens, err := ReadTokens(file)
	must(t, err)

	cert, key, roots := certificate(t)
	for _, secure := range []bool{false, true} {
		t.Run(fmt.Sprint("tls ", secure), func(t *testing.T) {
			var l *Listener
			scheme := "http://"
			config := &tls.Config{RootCAs: roots}
			if secure {
				l, err = ListenTCP("127.0.0.1:0", cert, key)
				scheme = "https://"
			} else {
				l, err = ListenTCP("127.0.0.1:0", "", "")
			}
			must(t, err)
			s := serve(t, newPool(t, plain.Name), func(o *Options) { o.Tokens = tokens })
			go http.Serve(l, s.authenticate(l, s.handler))
			defer l.Close()
			at := scheme + l.Addr().String()

			c := must2[*client.Client](t)(client.New(client.Options{URL: at, Token: token, TLS: config}))
			defer c.Close()
			if who, err := c.Service(t.Context()); err != nil || who.Caller != "token ci" {
				t.Errorf("%+v, %v", who, err)
			}
			bad := must2[*client.Client](t)(client.New(client.Options{URL: at, Token: token + "x", TLS: config}))
			defer bad.Close()
			_, err := bad.Service(t.Context())
			want(t, "a wrong token", err, client.Permission, http.StatusUnauthorized)
			if strings.Contains(fmt.Sprint(err), token) {
				t.Errorf("the error has the token: %v", err)
			}

			// Another host name, as of a page in a browser whose name was rebound.
			r, _ := http.NewRequest("GET", at+"/v1/service", nil) // a good URL
			r.Host = "evil.example:80"
			r.Header.Set("Authorization", "Bearer "+token)
			h := &http.Client{Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}}
			resp, err := h.Do(r)
			must(t, err)
			resp.Body.Close()
			if resp.StatusCode != http.StatusMisdirectedRequest {
				t.Errorf("another host: %s", resp.Status)
			}

			if secure {
				old := &tls.Config{RootCAs: roots, MaxVersion: tls.VersionTLS12}
				if _, err := tls.Dial("tcp", l.Addr().String(), old); err == nil {
					t.Error("TLS 1.2 is accepted")
				}
			}
		})
	}

	// No plain HTTP to other hosts.
	if l, err := ListenTCP("0.0.0.0:0", "", ""); !errs.Is(err, errs.Invalid) {
		t.Errorf("%v, %v", l, err)
	}
	if _, err := client.New(client.Options{URL: "http://10.0.0.1:1", Token: token}); err == nil {
		t.Error("the client would send a token in the clear")
	}
	if _, err := ListenTCP("127.0.0.1:0", file, key); !errs.Is(err, errs.Invalid) {
		t.Errorf("a bad certificate: %v", err)
	}
	for _, bad := range []string{"ci\n", "ci sha256:00\n", "a b c\n"} {
		must(t, os.WriteFile(file, []byte(bad), 0o600))
		if _, err := ReadTokens(file); !errs.Is(err, errs.Invalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	must(t, os.Chmod(file, 0o644))
	if _, err := ReadTokens(file); !errs.Is(err, errs.Permission) {
		t.Errorf("a file that others can read: %v", err)
	}
}

// TestTokensReload: a service learns of new and removed tokens, and a file with mistakes changes nothing.
func TestTokensReload(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens")
	old, err := AddToken(path, ref.MustName("old"))
	must(t, err)
	tokens, err := ReadTokens(path)
	must(t, err)
	known := func(token string) bool { _, ok := tokens.find(token); return ok }

	first, err := os.ReadFile(path)
	must(t, err)
	added, err := AddToken(path, ref.MustName("new"))
	must(t, err)
	if known(added) {
		t.Error("a token is known before the file is read again")
	}
	must(t, tokens.Reload())
	if !known(added) || !known(old) {
		t.Error("the new token is not known, or the old one no longer")
	}

	must(t, os.WriteFile(path, []byte("nonsense\n"), 0o600))
	if err := tokens.Reload(); !errs.Is(err, errs.Invalid) || !known(added) {
		t.Errorf("a bad file: %v, known: %v", err, known(added))
	}
	must(t, os.WriteFile(path, first, 0o600))
	must(t, tokens.Reload())
	if known(added) || !known(old) {
		t.Error("a token that was removed is known, or the other one no longer")
	}
}
