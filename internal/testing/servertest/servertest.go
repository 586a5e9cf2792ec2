// Package servertest starts real servers of object stores for tests: gofakes3 (S3
// from memory, knows no users), versitygw (S3 from a directory, with signatures,
// accounts and policies) and fake-gcs-server (Google Cloud Storage from memory). They
// are programs of the module in test/servers, which Go builds at the first use, in
// about a minute and a half on two cores, and keeps in its cache. They listen on
// 127.0.0.1 only, and end with the test, also with one that is killed.
package servertest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// Bucket is there on every server.
const Bucket = "pando-test"

// Server is a running server.
type Server struct {
	Addr   string // host:port
	Access string // key of the user who may do everything; "" where there are no users
	Secret string
	Dir    string // with the buckets, of versitygw

	scheme string
	cmd    *exec.Cmd
	stdin  io.Closer
	log    *tail
	stop   *sync.Once
}

// Account is a user of versitygw, who may do nothing until a policy permits it.
type Account struct {
	Access string `json:"access"`
	Secret string `json:"secret"`
}

// GoFakeS3 starts gofakes3 with Bucket and others.
func GoFakeS3(t testing.TB, buckets ...string) *Server {
	t.Helper()
	s := &Server{scheme: "s3", Access: "any", Secret: "anything"}
	s.start(t, "gofakes3", append([]string{Bucket}, buckets...)...)
	return s
}

// GoFakeS3Ahead starts gofakes3 with Bucket, and a clock that is ahead of this host's.
func GoFakeS3Ahead(t testing.TB, ahead time.Duration) *Server {
	t.Helper()
	s := &Server{scheme: "s3", Access: "any", Secret: "anything"}
	s.start(t, "gofakes3", "-ahead", ahead.String(), Bucket)
	return s
}

// FakeGCS starts fake-gcs-server with Bucket and others.
func FakeGCS(t testing.TB, buckets ...string) *Server {
	t.Helper()
	s := &Server{scheme: "gs"}
	s.start(t, "fakegcs", append([]string{Bucket}, buckets...)...)
	return s
}

// VersityGW starts versitygw with Bucket.
func VersityGW(t testing.TB, accounts ...Account) *Server {
	t.Helper()
	dir := t.TempDir()
	s := &Server{scheme: "s3", Access: "pandoroot", Secret: "correct-horse-battery", Dir: filepath.Join(dir, "data")}
	users := filepath.Join(dir, "users")
	known := map[string]any{}
	for _, a := range accounts {
		known[a.Access] = map[string]string{"access": a.Access, "secret": a.Secret, "role": "user"}
	}

	text, err := json.Marshal(map[string]any{"accessAccounts": known})
	if err == nil {
		err = errors.Join(os.MkdirAll(filepath.Join(s.Dir, Bucket), 0o755), os.Mkdir(users, 0o700),
			os.WriteFile(filepath.Join(users, "users.json"), text, 0o600))
	}
	if err != nil {
		t.Fatal(err)
	}

	s.start(t, "versitygw", s.Dir, users, s.Access, s.Secret)
	return s
}

// Endpoint is its URL.
func (s *Server) Endpoint() string { return "http://" + s.Addr }

// URL is that of a remote in Bucket.
func (s *Server) URL(prefix string) *url.URL { return s.URLOf(Bucket, prefix, s.Endpoint()) }

// URLOf is that of a remote in any bucket, reached by an endpoint that may be that of
// a Proxy.
func (s *Server) URLOf(bucket, prefix, endpoint string) *url.URL {
	return &url.URL{Scheme: s.scheme, Host: bucket, Path: "/" + prefix,
		RawQuery: url.Values{"endpoint": {endpoint}}.Encode()}
}

// Env are the variables under which a program has this server's credentials and no
// others.
func (s *Server) Env() map[string]string {
	if s.scheme == "gs" {
		return map[string]string{"STORAGE_EMULATOR_HOST": s.Addr, "GOOGLE_APPLICATION_CREDENTIALS": ""}
	}
	return map[string]string{
		"AWS_ACCESS_KEY_ID": s.Access, "AWS_SECRET_ACCESS_KEY": s.Secret, "AWS_SESSION_TOKEN": "",
		"AWS_PROFILE": "", "AWS_CONFIG_FILE": os.DevNull, "AWS_SHARED_CREDENTIALS_FILE": os.DevNull,
		"AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "", "AWS_DEFAULT_REGION": "", "AWS_CA_BUNDLE": "",
	}
}

// Setenv sets them for the rest of the test, which must not be a parallel one.
func (s *Server) Setenv(t testing.TB) {
	t.Helper()
	for name, value := range s.Env() {
		t.Setenv(name, value)
	}
}

// Stop ends the server at once, as a crash does. It may be called again, and by
// several goroutines.
func (s *Server) Stop() {
	s.stop.Do(func() {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		_ = s.stdin.Close()
	})
}

// attempts, because a free port may be taken by somebody else before versitygw has it.
const attempts = 5

func (s *Server) start(t testing.TB, program string, args ...string) {
	t.Helper()
	path := build(t, program)
	var err error
	for range attempts {
		if err = s.run(path, args); err == nil {
			t.Cleanup(s.Stop)
			return
		}
		if !strings.Contains(err.Error(), "address already in use") {
			break
		}
	}

	t.Fatalf("%s does not run: %v", program, err)
}

func (s *Server) run(path string, args []string) error {
	s.cmd, s.log, s.stop = exec.Command(path, args...), &tail{}, &sync.Once{}
	s.cmd.Stderr = s.log
	stdin, err := s.cmd.StdinPipe()
	if err != nil {
		return err
	}

	s.stdin = stdin
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return err
	}

	if err := s.cmd.Start(); err != nil {
		return err
	}

	said := make(chan error, 1)
	go func() {
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			if addr, is := strings.CutPrefix(lines.Text(), "listening "); is {
				s.Addr = addr
				said <- nil
				_, _ = io.Copy(io.Discard, out)
				return
			}
		}
		said <- errors.New("it ended")
	}()

	select {
	case err = <-said:
	case <-time.After(30 * time.Second):
		err = errors.New("it does not say where it listens")
	}
	if err != nil {
		s.Stop()
		return fmt.Errorf("%w\n%s", err, s.log)
	}

	return nil
}

// tail keeps the last of what a program prints.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (l *tail) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, b...)
	l.text = l.text[max(0, len(l.text)-16<<10):]
	return len(b), nil
}

func (l *tail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text)
}

// built has the paths of programs, by name, or why there is none.
var built sync.Map

// noNetwork is what the go command says if it cannot fetch a module.
var noNetwork = regexp.MustCompile(`dial tcp|lookup .*: |i/o timeout|TLS handshake timeout|connection re(fused|set)|` +
	`network is unreachable|module lookup disabled|proxyconnect`)

// build returns the path of a server's program: the one in the directory that
// PANDO_TEST_SERVERS names, where there may be no Go, or one that it builds.
func build(t testing.TB, program string) string {
	t.Helper()
	if ready := os.Getenv("PANDO_TEST_SERVERS"); ready != "" {
		return filepath.Join(ready, program)
	}
	return Tool(t, "servers", program)
}

// Tool returns the path of a tool of the module below test/, which it builds if
// Go's cache does not have it. The test is skipped where that cannot be.
func Tool(t testing.TB, module, program string) string {
	t.Helper()
	once, _ := built.LoadOrStore(module+" "+program,
		sync.OnceValues(func() (string, error) { return toolPath(module, program) }))
	path, err := once.(func() (string, error))()
	switch {
	case errors.Is(err, exec.ErrNotFound):
		t.Skipf("SKIPPED: there is no go to build %s with", program)
	case err != nil && noNetwork.MatchString(err.Error()):
		t.Skipf("SKIPPED: what %s is built from cannot be fetched: %v", program, err)
	case err != nil:
		t.Fatal(err)
	}

	return path
}

// toolPath builds a program, if Go's cache does not have it, and returns its path
// there.
func toolPath(module, program string) (string, error) {
	dir, err := moduleDir(module)
	if err != nil {
		return "", err
	}

	cmd := exec.Command("go", "tool", "-n", program)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-mod=readonly -trimpath -buildvcs=false", "GOWORK=off")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("building %s: %w\n%s", program, err, stderr.String())
	}

	return strings.TrimSpace(string(out)), nil
}

// moduleDir is the directory of a module below test/.
func moduleDir(module string) (string, error) {
	wd, err := os.Getwd()
	if err != nil {
		return "", err
	}

	for dir := wd; ; dir = filepath.Dir(dir) {
		path := filepath.Join(dir, "test", module)
		if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil {
			return path, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("test/%s is not above %s: run the tests where the source is", module, wd)
		}
	}
}

// Closed is the URL of an endpoint of this host where nothing listens.
func Closed(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return "http://" + l.Addr().String()
}
