package service

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"pando/client"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/front/policy"
	"pando/internal/testing/testfs"
)

// Users of the tests, whom no list of users has.
var (
	alice    = driver.Owner{UID: 64_711, GID: 64_712}
	bob      = driver.Owner{UID: 64_721, GID: 64_722}
	outsider = driver.Owner{UID: 64_731, GID: 64_732}
)

// members is the supplementary group of alice and bob.
const members = 64_800

// call is a request, and answer what comes back.
type call struct {
	Method, Path, Body, Type, Key, IfMatch string
}

type answer struct {
	Status int
	Body   string
}

// problem is the answer as an error.
func (a answer) problem(t *testing.T) Problem {
	t.Helper()
	var p Problem
	if err := json.Unmarshal([]byte(a.Body), &p); err != nil {
		t.Fatalf("%d %s: %v", a.Status, a.Body, err)
	}
	return p
}

// callForTest sends the requests that it reads from standard input, and writes the answers. It is a process of its own,
// of another user.
func callForTest(socket string) int {
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	c := overSocket(socket)
	for {
		var q call
		if err := in.Decode(&q); err != nil {
			return 0
		}
		a, err := q.send(c)
		if err != nil {
			a = answer{-1, err.Error()}
		}
		_ = out.Encode(a)
	}
}

// send sends a request. The answer with an operation is replaced by the end of the operation, and a stream of events
// ends when it has been silent for a moment.
func (q call) send(c *http.Client) (answer, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, q.Method, "http://pando"+q.Path, strings.NewReader(q.Body))
	if err != nil {
		return answer{}, err
	}
	for name, value := range map[string]string{"Content-Type": q.Type, "Idempotency-Key": q.Key, "If-Match": q.IfMatch} {
		if value != "" {
			r.Header.Set(name, value)
		}
	}
	resp, err := c.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()

	if resp.Header.Get("Content-Type") == "text/event-stream" {
		time.AfterFunc(time.Second/2, cancel)
		b, _ := io.ReadAll(resp.Body)
		return answer{resp.StatusCode, string(b)}, nil
	}
	b, err := io.ReadAll(resp.Body)
	if at := resp.Header.Get("Location"); err == nil && resp.StatusCode == accepted && q.Method == http.MethodPost {
		return call{Method: "GET", Path: at + "/wait?timeout_seconds=60"}.send(c)
	}
	var op Operation
	if strings.Contains(q.Path, "/wait") && json.Unmarshal(b, &op) == nil && op.Error != nil {
		p, _ := json.Marshal(op.Error)
		return answer{op.Error.Status, string(p)}, err
	}
	return answer{resp.StatusCode, string(b)}, err
}

// person is a process of a user who sends requests.
type person struct {
	t   testing.TB
	mu  sync.Mutex
	in  *json.Encoder
	out *json.Decoder
}

// person starts a process of a user, in the supplementary groups.
func (u *usersTest) person(o driver.Owner, groups ...uint32) *person {
	u.t.Helper()
	cmd := exec.Command(u.exe)
	cmd.Env = append(os.Environ(), "SERVICE_TEST_CALL="+u.socket)
	cmd.Stderr = os.Stderr
	if o.UID != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: o.UID, Gid: o.GID, Groups: groups}}
	}
	in, err := cmd.StdinPipe()
	must(u.t, err)
	out, err := cmd.StdoutPipe()
	must(u.t, err)
	must(u.t, cmd.Start())
	u.t.Cleanup(func() {
		_ = in.Close()
		must(u.t, cmd.Wait())
	})
	return &person{t: u.t, in: json.NewEncoder(in), out: json.NewDecoder(bufio.NewReader(out))}
}

// do sends a request.
func (p *person) do(q call) (a answer) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if q.Type == "" && q.Body != "" {
		q.Type = "application/json"
	}
	must(p.t, p.in.Encode(q), p.out.Decode(&a))
	if a.Status < 0 {
		p.t.Fatalf("%s %s: %s", q.Method, q.Path, a.Body)
	}
	return a
}

func (p *person) get(path string) answer { p.t.Helper(); return p.do(call{Method: "GET", Path: path}) }
func (p *person) post(path, body string) answer {
	p.t.Helper()
	return p.do(call{"POST", path, body, "", "", ""})
}
func (p *person) clone(name, more string) answer {
	p.t.Helper()
	return p.post("/v1/volumes", fmt.Sprintf(`{"from":"web","name":%q%s}`, name, more))
}

// usersTest is a service with a policy, a golden web with files, and a golden secret that no rule shows.
type usersTest struct {
	*served
	t    *testing.T
	exe  string // this program, for others
	dir  string // where users may mount volumes, a directory each
	root *person
}

// withUsers serves a pool under a policy. DIR in it stands for the directory of mount points.
func withUsers(t *testing.T, text string) *usersTest {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can become another user: run the tests as root")
	}
	u := &usersTest{t: t, served: serve(t, newPool(t, reflink.Name)), dir: t.TempDir()}
	must(t, os.Chmod(u.socket, 0o777))
	u.exe = filepath.Join(filepath.Dir(u.socket), "test")
	b, err := os.ReadFile("/proc/self/exe")
	must(t, err, testfs.WriteProgram(u.exe, b))
	for _, o := range []driver.Owner{alice, bob} {
		dir := filepath.Join(u.dir, fmt.Sprint(o.UID))
		must(t, os.Mkdir(dir, 0o700), os.Chown(dir, int(o.UID), int(o.GID)))
	}
	for _, at := range []string{u.socket, u.dir + "/x"} {
		for d := filepath.Dir(at); strings.HasPrefix(d, os.TempDir()+"/"); d = filepath.Dir(d) {
			must(t, os.Chmod(d, 0o755))
		}
	}

	for _, name := range []string{"web", "secret"} {
		_, err = u.c.Import(t.Context(), name, archive(t, map[string]string{"file": "v1"}),
			client.ImportOptions{SizeBytes: 64 << 20, Overlay: "allowed"})
		must(t, err)
	}
	u.setPolicy(text)
	u.root = u.person(driver.Owner{})
	return u
}

// setPolicy replaces the policy.
func (u *usersTest) setPolicy(text string) {
	u.t.Helper()
	file := filepath.Join(u.t.TempDir(), "policy.toml")
	must(u.t, os.WriteFile(file, []byte(strings.ReplaceAll(text, "DIR", u.dir)), 0o644))
	p, err := policy.Read(file)
	must(u.t, err)
	u.SetPolicy(p)
}

// volumeOf makes a volume of a user as root does, with a snapshot s.
func (u *usersTest) volumeOf(o driver.Owner, from, name string) {
	u.t.Helper()
	r, err := ref.Parse("test", from)
	must(u.t, err)
	_, err = u.e.Clone(u.t.Context(), engine.CloneRequest{From: r, Name: ref.MustName(name), Owner: o})
	must(u.t, err)
	_, err = u.e.Snapshot(u.t.Context(), engine.SnapshotRequest{Volume: ref.MustName(name), Name: ref.MustName("s")})
	must(u.t, err)
}

// state is what the pool has, as far as requests change it.
func (u *usersTest) state() string {
	u.t.Helper()
	h, err := engine.ReadHistory(u.e.Dir(), engine.HistoryQuery{})
	must(u.t, err)
	all, err := u.e.Volumes(u.t.Context(), false)
	must(u.t, err)
	out := fmt.Sprintln(len(h.Events), "events")
	for _, v := range all {
		out += fmt.Sprintln(v.Name, v.Tag(), v.Mountpoint, v.SizeBytes)
	}
	return out
}

// as runs a shell command as a user.
func as(o driver.Owner, command string) (string, error) {
	cmd := exec.Command("sh", "-c", command)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: o.UID, Gid: o.GID}}
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}
