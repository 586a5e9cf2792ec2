package buckets

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"pando/internal/testing/servertest"
)

// TestOutageIsSeen: whoever waits for a server that does not answer as it should sees what is waited for, whether the
// command shows progress or not.
func TestOutageIsSeen(t *testing.T) {
	s := servertest.GoFakeS3(t)
	p := servertest.NewProxy(t, s)
	h := newHost(t, s.Env())
	h.ok("remote", "add", "far", s.URLOf(servertest.Bucket, "p", p.URL).String(), "-q")

	p.Add(&servertest.Fault{Status: http.StatusServiceUnavailable, Times: 5})
	want := regexp.MustCompile(
		`^pando: server answers 503, attempt [45] of 10, next in [1-4] s\n`,
	) // pauses differ by chance
	if got := h.progress("remote", "key", "ls", "far"); !want.MatchString(got) {
		t.Errorf("nothing of %s in\n%s", want, got)
	}
	// A verb that shows progress says it there.
	p.Add(&servertest.Fault{Drop: true, Times: 6})
	if got, want := h.progress("verify", "far"), "pando: connection broke off, attempt "; !strings.Contains(got, want) {
		t.Errorf("nothing of %q in\n%s", want, got)
	}
}

// progress is what a command that succeeds says on standard error.
func (h *host) progress(args ...string) string {
	h.t.Helper()
	cmd := exec.Command(program, append([]string{"--pool", h.pool}, args...)...)
	cmd.Env = h.environ()
	var bad strings.Builder
	cmd.Stderr = &bad
	if err := cmd.Run(); err != nil {
		h.t.Fatalf("pando %s: %v\n%s", strings.Join(args, " "), err, bad.String())
	}
	return bad.String()
}

// TestDeadPort: who mistypes an address is told so in less than ten seconds.
func TestDeadPort(t *testing.T) {
	s := servertest.GoFakeS3(t)
	h := newHost(t, s.Env())
	_, stderr, code := h.run("remote", "add", "far", s.URLOf(servertest.Bucket, "p", servertest.Closed(t)).String())
	m := regexp.MustCompile(`tried (\d+) times in ([0-9.]+)s\)`).FindStringSubmatch(stderr)
	if code != 12 || m == nil {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	if n, _ := strconv.Atoi(m[1]); n < 3 {
		t.Errorf("tried %d times only: %s", n, stderr)
	}
	// It says itself how long that was: no attempt begins after the eighth second.
	if seconds, err := strconv.ParseFloat(m[2], 64); err != nil || seconds > 8 {
		t.Errorf("%v: %s", err, stderr)
	}
}

// TestOneAttempt: PANDO_REMOTE_ATTEMPTS=1 means one request, also to the libraries of stores.
func TestOneAttempt(t *testing.T) {
	var requests atomic.Int32
	busy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		requests.Add(1)
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	t.Cleanup(busy.Close)
	host, _ := strings.CutPrefix(busy.URL, "http://")
	s := &servertest.Server{Access: "any", Secret: "anything"}
	env := s.Env()
	env["STORAGE_EMULATOR_HOST"] = host
	env["PANDO_REMOTE_ATTEMPTS"] = "1"
	h := newHost(t, env)
	for _, url := range []string{
		"s3://bucket/p?endpoint=" + busy.URL, "s3://bucket/p?region=r&endpoint=" + busy.URL, "gs://bucket/p",
	} {
		requests.Store(0)
		_, stderr, code := h.run("remote", "add", "far", url)
		if n := requests.Load(); code != 12 || n != 1 {
			t.Errorf("%s: exit code %d after %d requests: %s", url, code, n, stderr)
		}
	}

	// And one connection, to a server that closes it.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var connections atomic.Int32
	var done sync.WaitGroup
	done.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			connections.Add(1)
			_ = c.Close() // which is the test
		}
	})
	_, stderr, code := h.run("remote", "add", "far", "s3://bucket/p?endpoint=http://"+l.Addr().String())
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	done.Wait()
	if n := connections.Load(); code != 12 || n != 1 {
		t.Errorf("exit code %d after %d connections: %s", code, n, stderr)
	}
}

// TestOutageOfDays: continuous protection says once that the remote does not answer, once that it does again, and
// goes on.
func TestOutageOfDays(t *testing.T) {
	s := servertest.GoFakeS3(t)
	p := servertest.NewProxy(t, s)
	h := newHost(t, s.Env())
	h.ok("remote", "add", "far", s.URLOf(servertest.Bucket, "p", p.URL).String(), "-q")
	h.golden("web", 1)
	h.env["PANDO_REMOTE_ATTEMPTS"] = "2"

	cmd := exec.Command(program, "--pool", h.pool, "push", "web", "--every", "1s")
	cmd.Env = h.environ()
	var bad strings.Builder
	out, said := &lineWaiter{lines: make(chan string, 100)}, &lineWaiter{lines: make(chan string, 100)}
	cmd.Stdout, cmd.Stderr = out, io.MultiWriter(&bad, said)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-out.lines
	// Three rounds of two requests each fail in three ways.
	var failed atomic.Int32
	enough := make(chan struct{})
	count := func() {
		if failed.Add(1) == 6 {
			close(enough)
		}
	}
	p.Add(&servertest.Fault{Status: 503, Times: 2, Before: count},
		&servertest.Fault{Drop: true, Times: 2, Before: count}, &servertest.Fault{Status: 500, Times: 2, Before: count})
	<-enough
	for !strings.Contains(<-said.lines, "pushing works again after") {
		continue // it says first that it does not
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v: %s", err, bad.String())
	}
	want := regexp.MustCompile(
		`\Apando: warning: .*503.*; retrying at least every 15 min, and reporting when pushing works again\n` +
			`pando: pushing works again after \d+ s and 3 failed rounds\n\z`,
	)
	if !want.MatchString(bad.String()) {
		t.Errorf("it said\n%s", bad.String())
	}
}

// lineWaiter passes on the lines that are written.
type lineWaiter struct {
	rest  string
	lines chan string
}

func (w *lineWaiter) Write(b []byte) (int, error) {
	w.rest += string(b)
	for {
		line, rest, found := strings.Cut(w.rest, "\n")
		if !found {
			return len(b), nil
		}
		w.rest = rest
		w.lines <- line
	}
}
