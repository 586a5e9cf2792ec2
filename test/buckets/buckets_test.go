// Package buckets uses remotes in buckets as people do: the program itself, and real
// servers of S3 and of Google Cloud Storage.
package buckets

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pando/internal/testing/schematest"
	"pando/internal/testing/servertest"
	"pando/internal/testing/testfs"
)

var program string

func TestMain(m *testing.M) { os.Exit(testfs.WithProgram(&program, m.Run)) }

// host is a pool, and what its commands find in their environment.
type host struct {
	t    *testing.T
	pool string
	env  map[string]string
}

// newHost makes a pool, which is removed when the test ends.
func newHost(t *testing.T, env map[string]string) *host {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: pools of images need root: run the tests as root")
	}
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	h := &host{t: t, pool: filepath.Join(dir, "pool"), env: env}
	h.ok("init", "-q", "--size", "4G")
	t.Cleanup(func() { h.ok("deinit", "--force", "--lose-keys", "-q") })
	return h
}

// run runs a command and returns its standard output, its standard error and its
// exit code.
func (h *host) run(args ...string) (stdout, stderr string, code int) {
	h.t.Helper()
	cmd := exec.Command(program, append([]string{"--pool", h.pool, "--no-progress"}, args...)...)
	cmd.Env = h.environ()
	var out, bad bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &bad
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		h.t.Fatal(err)
	}
	if err := schematest.Check(args, out.Bytes(), bad.Bytes()); err != nil {
		h.t.Error(err)
	}
	return out.String(), bad.String(), cmd.ProcessState.ExitCode()
}

// environ is what commands find in their environment.
func (h *host) environ() []string {
	env := os.Environ()
	for _, k := range slices.Sorted(maps.Keys(h.env)) {
		env = append(env, k+"="+h.env[k])
	}
	return env
}

func (h *host) ok(args ...string) string {
	h.t.Helper()
	stdout, stderr, code := h.run(args...)
	if code != 0 {
		h.t.Fatalf("pando %s: exit code %d\n%s%s", strings.Join(args, " "), code, stdout, stderr)
	}
	return stdout
}

// refused wants a command to fail with an exit code, and words in its complaint, and
// a hint.
func (h *host) refused(code int, words []string, args ...string) {
	h.t.Helper()
	stdout, stderr, got := h.run(args...)
	if got != code || stdout != "" {
		h.t.Errorf("pando %s: exit code %d, not %d\n%s%s", strings.Join(args, " "), got, code, stdout, stderr)
	}
	for _, w := range append(words, "hint: ") {
		if !strings.Contains(stderr, w) {
			h.t.Errorf("pando %s: nothing of %q in\n%s", strings.Join(args, " "), w, stderr)
		}
	}
}

// golden imports a tree of bytes files of a MiB that cannot be compressed.
func (h *host) golden(name string, files int) {
	h.t.Helper()
	dir := h.t.TempDir()
	for i := range files {
		noise(h.t, filepath.Join(dir, fmt.Sprint("file", i)), 1<<20)
	}
	h.ok("golden", "import", name, dir, "--fs", "ext4", "--size", "512M", "-q")
}

// clean is what verify says of a remote that is whole.
var clean = regexp.MustCompile(`(?m)^problems +none$`)

func noise(t *testing.T, path string, n int) {
	t.Helper()
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// tree is what is in a mounted volume, by name.
func (h *host) tree(volume string) map[string]string {
	h.t.Helper()
	out := map[string]string{}
	dir := filepath.Join(h.pool, "mnt", volume)
	entries, err := os.ReadDir(dir)
	if err != nil {
		h.t.Fatal(err)
	}
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			h.t.Fatal(err)
		}
		out[e.Name()] = string(b)
	}
	return out
}

// TestLife is the life of a remote on each kind of server.
func TestLife(t *testing.T) {
	for name, start := range map[string]func(testing.TB) *servertest.Server{
		"gofakes3":  func(t testing.TB) *servertest.Server { return servertest.GoFakeS3(t) },
		"versitygw": func(t testing.TB) *servertest.Server { return servertest.VersityGW(t) },
		"fake-gcs":  func(t testing.TB) *servertest.Server { return servertest.FakeGCS(t) },
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t)
			secret := filepath.Join(t.TempDir(), "passphrase")
			if err := os.WriteFile(secret, []byte("correct horse\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			url := s.URL("some/prefix").String()
			a, b := newHost(t, s.Env()), newHost(t, s.Env())
			a.golden("web", 3)
			a.ok("clone", "web", "job", "--mount", "-q")
			a.ok("remote", "add", "far", url, "--passphrase-file", secret, "-q")
			noise(t, filepath.Join(a.pool, "mnt", "job", "own"), 1<<20)
			a.ok("push", "job", "-q")
			noise(t, filepath.Join(a.pool, "mnt", "job", "file0"), 1<<20)
			a.ok("push", "job", "-q")
			if out := a.ok("verify", "far", "--read-data"); !clean.MatchString(out) {
				t.Errorf("verify: %s", out)
			}

			b.refused(7, nil, "remote", "add", "far", url) // without a key
			b.ok("remote", "add", "far", url, "--passphrase-file", secret, "-q")
			b.ok("pull", "far", "job", "--mount", "-q")
			if !maps.Equal(a.tree("job"), b.tree("job")) {
				t.Error("what was pulled is not what was pushed")
			}
			b.ok("umount", "job", "-q")
			b.ok("pull", "far", "job", "--update", "--take-over", "-q")
			b.ok("mount", "job", "-q")
			noise(t, filepath.Join(b.pool, "mnt", "job", "late"), 1<<20)
			b.ok("push", "job", "-q")
			noise(t, filepath.Join(a.pool, "mnt", "job", "mine"), 1<<20)
			a.refused(9, []string{"epoch 2"}, "push", "job")
			a.ok("push", "job", "--as", "job-a", "-q")
			a.ok("remote", "prune", "far", "--keep-last", "1", "-q")
			if out := a.ok("verify", "far", "--read-data"); !clean.MatchString(out) {
				t.Errorf("verify: %s", out)
			}
			a.ok("pull", "far", "job", "--as", "copy", "--mount", "-q")
			if !maps.Equal(a.tree("copy"), b.tree("job")) {
				t.Error("what was pulled back is not what the other pool pushed")
			}
		})
	}
}

// TestRefusals is what a person meets who has something wrong: nothing is changed,
// and the message says what it is.
func TestRefusals(t *testing.T) {
	reader := servertest.Account{Access: "reader", Secret: "reader-secret-key"}
	s := servertest.VersityGW(t, reader)
	h := newHost(t, s.Env())
	h.env["PANDO_REMOTE_ATTEMPTS"] = "2"
	with := func(access, secret string) *host {
		env := s.Env()
		env["AWS_ACCESS_KEY_ID"], env["AWS_SECRET_ACCESS_KEY"] = access, secret
		return &host{t: t, pool: h.pool, env: env}
	}
	add := func(u string) []string { return []string{"remote", "add", "far", u} }
	h.refused(3, []string{"no-such-bucket"}, add(s.URLOf("no-such-bucket", "p", s.Endpoint()).String())...)
	with("nobody", "x").refused(7, nil, add(s.URL("p").String())...)
	with(s.Access, "wrong").refused(7, nil, add(s.URL("p").String())...)
	with(reader.Access, reader.Secret).refused(7, nil, add(s.URL("p").String())...)
	h.refused(12, nil, add(s.URLOf(servertest.Bucket, "p", servertest.Closed(t)).String())...)
	h.refused(2, nil, add("ftp://host/dir")...)
	if out := h.ok("remote", "ls", "--json"); strings.TrimSpace(out) != "[]" {
		t.Errorf("a refused remote is there: %s", out)
	}

	ahead := servertest.GoFakeS3Ahead(t, 30*time.Minute)
	late := &host{t: t, pool: h.pool, env: ahead.Env()}
	late.refused(7, []string{"clock"}, add(ahead.URL("p").String())...)
}

// TestAway lets the server go away in the middle of a push and of a pull: both say so,
// nothing is lost, and when it is back they go on.
func TestAway(t *testing.T) {
	s := servertest.GoFakeS3(t)
	p := servertest.NewProxy(t, s)
	h, o := newHost(t, s.Env()), newHost(t, s.Env())
	url := s.URLOf(servertest.Bucket, "p", p.URL).String()
	h.ok("remote", "add", "far", url, "-q")
	h.golden("web", 80)
	h.ok("clone", "web", "job", "-q")

	// When the fifth segment of the golden begins, the server goes away.
	var segments atomic.Int32
	p.Add(&servertest.Fault{
		Match: func(r *http.Request) bool {
			return r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/segments/")
		},
		Times: -1,
		Before: func() {
			if segments.Add(1) == 5 {
				p.Down(true)
			}
		},
	})
	h.env["PANDO_REMOTE_ATTEMPTS"] = "3"
	h.refused(12, nil, "push", "job")
	p.Down(false)
	var pushed []struct {
		Ref      string
		Resumed  bool
		Segments int `json:"segment_count"`
	}
	if err := json.Unmarshal([]byte(h.ok("push", "job", "--json")), &pushed); err != nil {
		t.Fatal(err)
	}
	// 80 MiB are six segments or so. The first at least had arrived, and been heard of.
	if len(pushed) < 2 || pushed[0].Ref != "web@1" || !pushed[0].Resumed || pushed[0].Segments < 1 ||
		pushed[0].Segments > 5 {
		t.Errorf("it did not go on where it was: %+v", pushed)
	}
	if out := h.ok("verify", "far", "--read-data"); !clean.MatchString(out) {
		t.Errorf("verify: %s", out)
	}

	key := filepath.Join(h.pool, "remotes", "far", "identity")
	o.ok("remote", "add", "far", url, "--identity", key, "-q")
	var reads atomic.Int32
	p.Add(&servertest.Fault{
		Match: func(r *http.Request) bool {
			return r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/segments/")
		},
		Times: -1,
		After: func() {
			if reads.Add(1) == 3 {
				p.Down(true)
			}
		},
	})
	o.env["PANDO_REMOTE_ATTEMPTS"] = "3"
	o.refused(12, nil, "pull", "far", "job")
	if out := o.ok("ls", "--json"); strings.TrimSpace(out) != "[]" {
		t.Errorf("half a pull has left %s", out)
	}
	p.Down(false)
	o.ok("pull", "far", "job", "--mount", "-q")
	h.ok("mount", "job", "-q")
	if !maps.Equal(h.tree("job"), o.tree("job")) {
		t.Error("what was pulled is not what was pushed")
	}
}
