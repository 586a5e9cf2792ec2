// Package web uses the web page of the service as people do, in a real browser.
package web

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/client"
	"pando/internal/testing/testfs"
)

// pando is the program under test.
var pando string

func TestMain(m *testing.M) {
	os.Exit(testfs.WithProgram(&pando, func() int {
		status := m.Run()
		if shared.end != nil {
			if err := shared.end(); err != nil {
				fmt.Fprintln(os.Stderr, "the browser:", err)
				return 1
			}
		}
		return status
	}))
}

func must(t testing.TB, all ...error) {
	t.Helper()
	if err := errors.Join(all...); err != nil {
		t.Fatal(err)
	}
}

// site is a running service with its page, of a pool of its own.
type site struct {
	t                       *testing.T
	dir, pool, socket, port string
	c                       *client.Client
}

// newPool makes a pool that is removed at the end of the test.
func newPool(t *testing.T) *site { t.Helper(); return newPoolIn(t, t.TempDir()) }

func newPoolIn(t *testing.T, dir string) *site {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	s := &site{t: t, dir: dir, pool: filepath.Join(dir, "pando"), socket: filepath.Join(dir, "sock")}
	s.pando("init", "-q", "--driver", "reflink", "--size", "2G")
	t.Cleanup(func() { s.pando("deinit", "--force") })
	return s
}

// pando runs a command on the pool.
func (s *site) pando(arguments ...string) string {
	s.t.Helper()
	var stderr bytes.Buffer
	cmd := exec.Command(pando, append([]string{"--pool", s.pool}, arguments...)...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		s.t.Fatalf("%v: %v: %s", arguments, err, stderr.String())
	}
	return strings.TrimSpace(string(out))
}

// serve serves the pool until the end of the test.
func (s *site) serve(flags ...string) {
	s.t.Helper()
	var log bytes.Buffer
	s.port = freePort(s.t)
	cmd := exec.Command(pando, append([]string{"--pool", s.pool, "serve", "--socket", s.socket,
		"--web=127.0.0.1:" + s.port}, flags...)...)
	cmd.Stderr = &log
	must(s.t, cmd.Start())
	var err error
	s.c, err = client.New(client.Options{Socket: s.socket})
	must(s.t, err)
	s.t.Cleanup(func() {
		s.c.Close()
		must(s.t, cmd.Process.Signal(syscall.SIGTERM), cmd.Wait())
		if strings.Contains(log.String(), "panic") || s.t.Failed() {
			s.t.Errorf("log of the service: %s", log.String())
		}
	})

	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		c, err := net.Dial("tcp", "127.0.0.1:"+s.port)
		if err == nil {
			_ = c.Close()
			return
		}
		if time.Now().After(end) {
			s.t.Fatalf("the service does not listen: %s", log.String())
		}
	}
}

// freePort returns a port that nobody listens on. In the network namespace of the test nobody will.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

// login returns a URL that works once.
func (s *site) login() string {
	s.t.Helper()
	out, err := exec.Command(pando, "ui", "--socket", s.socket).Output()
	must(s.t, err)
	return strings.TrimSpace(string(out))
}

// signIn signs a browser in, and returns the origin of the page.
func (s *site) signIn(b *browser) (origin string) {
	s.t.Helper()
	url := s.login()
	b.open(url)
	origin = url[:strings.Index(url, "/open/")]
	b.until("location.pathname === '/' && document.querySelector('#facts')")
	return origin
}

// source makes a directory with a file of so many bytes, for a golden.
func (s *site) source(name string, size int) string {
	s.t.Helper()
	dir := filepath.Join(s.dir, "src", name)
	must(s.t, os.MkdirAll(dir, 0o755))
	content := make([]byte, size)
	for i := range content {
		content[i] = byte(i*7 + i>>9) // not zeroes, which need no space
	}
	must(s.t, os.WriteFile(filepath.Join(dir, "data"), content, 0o644))
	return dir
}

// withVolumes makes goldens, volumes and snapshots.
func (s *site) withVolumes() {
	s.t.Helper()
	s.pando("golden", "import", "web", s.source("web", 6<<20), "-q")
	s.pando("golden", "import", "postgres", s.source("postgres", 12<<20), "-q")
	s.pando("clone", "web", "review-1", "--label", "team=web", "-q")
	s.pando("clone", "web", "review-2", "--label", "team=web", "--ttl", "4h", "-q")
	s.pando("clone", "web", "build", "--mount", "-q")
	s.pando("clone", "postgres", "orders", "--mount", "--label", "team=data", "-q")
	s.pando("snapshot", "orders", "nightly", "-q")
	s.pando("clone", "postgres", "billing", "-q")
	s.pando("pin", "billing", "-q")
}
