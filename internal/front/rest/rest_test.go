package rest_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"pando/internal/base/principal"
	"pando/internal/base/ref"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/front/rest"
	"pando/internal/service/policy"
	"pando/internal/service/users"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

var drivers = engine.Drivers{reflink.Name: reflink.Open, btrfs.Name: btrfs.Open, plain.Name: plain.Open}

func must(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Users of the tests. Nobody on this host has these IDs.
const (
	root     = 0
	alice    = 2000001 // may clone web, and have two volumes for a day
	bob      = 2000002 // has the same rights as alice
	outsider = 2000003 // no policy names them
)

const policyText = `
[[allow]]
users = ["2000001", "2000002"]
goldens = ["web"]
volumes = 2
ttl = "1d"
`

// service is a pool that is served, with goldens web and secret.
type service struct {
	t      *testing.T
	socket string
	mounts string
	log    *bytes.Buffer
}

// serve serves a pool until the end of the test.
func serve(t *testing.T, policyText string) *service {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: serving other users needs root: run the tests as root")
	}
	dir := testfs.XFS(t, 1<<30)
	testfs.LeakCheck(t, dir)
	own := pooltest.New(t, drivers, reflink.Name, dir)
	s := &service{t: t, socket: filepath.Join(t.TempDir(), "socket"), mounts: t.TempDir(), log: &bytes.Buffer{}}
	must(t, os.Chmod(s.mounts, 0o755))

	ctx := principal.With(t.Context(), principal.Process())
	src := t.TempDir()
	must(t, os.WriteFile(filepath.Join(src, "file"), []byte("content"), 0o644), os.Chmod(src, 0o755))
	for _, golden := range []string{"web", "secret"} {
		_, err := own.Import(ctx, engine.ImportRequest{Name: ref.MustName(golden), Source: src})
		must(t, err)
	}

	e, err := engine.Open(ctx, own.Dir(), drivers)
	must(t, err)
	var p *policy.Policy
	if policyText != "" {
		file := filepath.Join(t.TempDir(), "policy.toml")
		must(t, os.WriteFile(file, []byte(policyText), 0o644))
		p, err = policy.Load(ctx, file)
		must(t, err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: s.socket, Net: "unix"})
	must(t, err, os.Chmod(s.socket, 0o666), os.Chmod(filepath.Dir(s.socket), 0o755),
		os.Chmod(filepath.Dir(filepath.Dir(s.socket)), 0o755))
	server := rest.New(users.New(e, p, s.mounts), slog.New(slog.NewTextHandler(s.log, nil)))
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		ctx := principal.With(context.Background(), principal.Process())
		all, err := e.Volumes(ctx, engine.VolumesRequest{})
		must(t, err)
		for _, v := range all {
			_, err := e.Destroy(ctx, engine.DestroyRequest{What: []ref.Pattern{{Ref: ref.Ref{Name: v.Name}}}})
			must(t, err)
		}
		must(t, server.Shutdown(ctx), <-served, e.Shutdown(ctx))
		if strings.Contains(s.log.String(), "internal error") {
			t.Errorf("the service has logged: %s", s.log)
		}
	})
	return s
}

// as is a client that is another user.
func (s *service) as(uid uint32) *http.Client {
	tr := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return testfs.DialAs(s.socket, uid, uid)
	}}
	s.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// reply is an answer.
type reply struct {
	status int
	kind   string // kind of the error, "" if it is none
	text   string
	json   map[string]any
}

// ask makes a request of a user.
func (s *service) ask(uid uint32, method, path, body string) reply {
	s.t.Helper()
	r, err := s.try(s.as(uid), method, path, body)
	must(s.t, err)
	return r
}

func (s *service) try(c *http.Client, method, path, body string) (reply, error) {
	req, err := http.NewRequest(method, "http://pando"+path, strings.NewReader(body))
	if err != nil {
		return reply{}, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	r := reply{status: resp.StatusCode, text: string(raw)}
	if err == nil {
		err = json.Unmarshal(raw, &r.json)
	}
	if resp.Header.Get("Content-Type") == "application/problem+json" {
		r.kind = fmt.Sprint(r.json["kind"])
	}
	return r, err
}

// volume is the first volume of an answer.
func (r reply) volume() map[string]any {
	list, _ := r.json["volumes"].([]any)
	if len(list) == 0 {
		return nil
	}
	v, _ := list[0].(map[string]any)
	return v
}

// TestWhoMayWhat asks for every route as root, as the owner of a volume, as another user with a policy, and as somebody
// without one.
func TestWhoMayWhat(t *testing.T) {
	s := serve(t, policyText)
	asked := map[string]bool{}
	for _, c := range []struct {
		method, path, body string
		want               [4]int // status for root, the owner, another user, an outsider
	}{
		{"GET", "/v1/volumes", "", [4]int{200, 200, 200, 403}},
		{"POST", "/v1/volumes", `{"from": "web", "name": "new"}`, [4]int{201, 201, 201, 403}},
		{"POST", "/v1/volumes", `{"from": "secret", "name": "new"}`, [4]int{201, 404, 404, 403}},
		{"POST", "/v1/volumes", `{"from": "mine", "name": "new"}`, [4]int{201, 201, 404, 403}},
		{"POST", "/v1/volumes", `{"from": "web", "name": "new", "mount": true, "dir": "/tmp/x"}`, [4]int{201, 403, 403, 403}},
		{"GET", "/v1/volumes/mine", "", [4]int{200, 200, 404, 403}},
		{"GET", "/v1/volumes/web", "", [4]int{400, 400, 400, 403}},
		{"GET", "/v1/volumes/secret", "", [4]int{400, 404, 404, 403}},
		{"PUT", "/v1/volumes/mine/mount", "", [4]int{200, 200, 404, 403}},
		{"PUT", "/v1/volumes/mine/mount", `{"dir": "/tmp/y"}`, [4]int{200, 403, 403, 403}},
		{"DELETE", "/v1/volumes/mine/mount", "", [4]int{200, 200, 404, 403}},
		{"GET", "/v1/goldens", "", [4]int{200, 200, 200, 403}},
		{"GET", "/v1/goldens/web", "", [4]int{200, 200, 200, 403}},
		{"GET", "/v1/goldens/secret", "", [4]int{200, 404, 404, 403}},
		{"GET", "/v1/goldens/mine", "", [4]int{400, 400, 404, 403}},
		{"GET", "/v1/pool", "", [4]int{200, 403, 403, 403}},
		{"PUT", "/v1/volumes/mine/mount", `{"dir": "relative"}`, [4]int{400, 400, 400, 403}},
		{"DELETE", "/v1/volumes/mine", "", [4]int{200, 200, 404, 403}},
		{"DELETE", "/v1/volumes/web", "", [4]int{400, 403, 403, 403}},
		{"DELETE", "/v1/volumes/secret", "", [4]int{400, 404, 404, 403}},
		{"GET", "/v1/openapi.json", "", [4]int{200, 200, 200, 200}},
		{"GET", "/v1/other", "", [4]int{404, 404, 404, 404}},
		{"DELETE", "/v1/pool", "", [4]int{405, 405, 405, 405}},
	} {
		asked[c.method+" "+strings.NewReplacer("mine", "{name}", "web", "{name}", "secret", "{name}").Replace(c.path)] = true
		for i, uid := range []uint32{root, alice, bob, outsider} {
			if r := s.ask(alice, "POST", "/v1/volumes", `{"from": "web", "name": "mine"}`); r.status != 201 {
				t.Fatalf("a volume for %s %s: %s", c.method, c.path, r.text)
			}
			if strings.HasSuffix(c.path, "/mount") && c.method == "DELETE" {
				if r := s.ask(root, "PUT", "/v1/volumes/mine/mount", ""); r.status != 200 {
					t.Fatal(r.text)
				}
			}
			if r := s.ask(uid, c.method, c.path, c.body); r.status != c.want[i] || r.kind == "internal" {
				t.Errorf("%s %s %s as %d: %d, want %d: %s", c.method, c.path, c.body, uid, r.status, c.want[i], r.text)
			}
			for _, name := range []string{"mine", "new"} {
				s.ask(root, "DELETE", "/v1/volumes/"+name, "")
			}
		}
	}
	for _, r := range rest.Routes() {
		if !asked[r.Method+" "+r.Path] {
			t.Errorf("nobody asks for %s %s", r.Method, r.Path)
		}
	}
}

// TestHidden: what belongs to others is as if it were not there.
func TestHidden(t *testing.T) {
	s := serve(t, policyText)
	s.ask(alice, "POST", "/v1/volumes", `{"from": "web", "name": "mine"}`)
	s.ask(root, "POST", "/v1/volumes", `{"from": "web", "name": "roots"}`)
	for _, path := range []string{"/v1/volumes/%s", "/v1/goldens/%s"} {
		missing := s.ask(bob, "GET", fmt.Sprintf(path, "nothing"), "")
		for _, name := range []string{"mine", "roots", "secret"} {
			got := s.ask(bob, "GET", fmt.Sprintf(path, name), "")
			if strings.ReplaceAll(got.text, name, "nothing") != missing.text || got.status != missing.status {
				t.Errorf(path+": %s, but what is not there: %s", name, got.text, missing.text)
			}
		}
	}
	for uid, want := range map[uint32]int{root: 2, alice: 1, bob: 0} {
		r := s.ask(uid, "GET", "/v1/volumes", "")
		if list, _ := r.json["volumes"].([]any); len(list) != want {
			t.Errorf("%d sees %s", uid, r.text)
		}
	}
	r := s.ask(bob, "GET", "/v1/goldens", "")
	if list, _ := r.json["goldens"].([]any); len(list) != 1 || strings.Contains(r.text, "secret") {
		t.Errorf("goldens of bob: %s", r.text)
	}
}

// TestMountForUsers: volumes of a user are theirs, where nobody else can reach them.
func TestMountForUsers(t *testing.T) {
	s := serve(t, policyText)
	r := s.ask(alice, "POST", "/v1/volumes", `{"from": "web", "name": "mine", "mount": true}`)
	dir := filepath.Join(s.mounts, fmt.Sprint(alice), "mine")
	if r.volume()["mountpoint"] != dir || r.volume()["owner_uid"] != float64(alice) {
		t.Fatalf("made %s, want it at %s", r.text, dir)
	}
	top, err := os.Open(s.mounts)
	must(t, err)
	defer top.Close()
	act := func(uid uint32, script string) error {
		cmd := exec.Command("sh", "-c", "cd /proc/self/fd/3 && "+script)
		cmd.ExtraFiles = []*os.File{top}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}

	in := fmt.Sprintf("cd %d/mine && ", alice)
	must(t, act(alice, in+"cat file && touch new && chmod 4755 new && rm file"))
	for _, c := range []struct {
		uid    uint32
		script string
	}{
		{bob, in + "cat new"}, {bob, "ls " + fmt.Sprint(alice)}, {alice, fmt.Sprintf("mkdir %d/other", alice)},
		{alice, fmt.Sprintf("mv %d/mine %d/moved", alice, alice)}, {alice, fmt.Sprintf("chmod 0777 %d", alice)},
		{alice, "mkdir other"},
	} {
		if act(c.uid, c.script) == nil {
			t.Errorf("%d could %s", c.uid, c.script)
		}
	}
	var st unix.Statfs_t
	must(t, unix.Statfs(dir, &st))
	if st.Flags&unix.ST_NOSUID == 0 || st.Flags&unix.ST_NODEV == 0 {
		t.Errorf("it is mounted with flags %#x", st.Flags)
	}

	// It can be unmounted and mounted again, and goes with its mount point.
	for _, c := range []struct{ method, path string }{
		{"DELETE", "/v1/volumes/mine/mount"}, {"PUT", "/v1/volumes/mine/mount"}, {"PUT", "/v1/volumes/mine/mount"},
		{"DELETE", "/v1/volumes/mine"},
	} {
		if r := s.ask(alice, c.method, c.path, ""); r.status != 200 {
			t.Errorf("%s %s: %s", c.method, c.path, r.text)
		}
	}
	if left, err := os.ReadDir(filepath.Dir(dir)); err != nil || len(left) > 0 {
		t.Errorf("left are %v, %v", left, err)
	}
}

// TestLimits: nobody gets more, or for longer, than the policy says, also not by asking for several at once.
func TestLimits(t *testing.T) {
	s := serve(t, policyText)
	var wait sync.WaitGroup
	var mu sync.Mutex
	statuses := map[int]int{}
	for i := range 8 {
		wait.Go(func() {
			r, err := s.try(s.as(alice), "POST", "/v1/volumes", fmt.Sprintf(`{"from": "web", "name": "v%d"}`, i))
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			statuses[r.status]++
		})
	}
	wait.Wait()
	if statuses[201] != 2 || statuses[507] != 6 {
		t.Errorf("of eight requests at once: %v", statuses)
	}

	day := 24 * time.Hour
	for _, c := range []struct {
		body string
		want int
		ttl  time.Duration // time that the volume stays; 0: there is none
	}{
		{`{"from": "web", "name": "b", "ttl_seconds": 3600}`, 201, time.Hour},
		{`{"from": "web", "name": "b"}`, 201, day},
		{`{"from": "web", "name": "b", "ttl_seconds": 86401}`, 400, 0},
		{`{"from": "web", "name": "b", "ttl_seconds": -1}`, 400, 0},
		{`{"from": "web", "name": "b", "ttl_seconds": 9223372036854775807}`, 400, 0},
		{`{"from": "web", "name": "b", "count": 3}`, 507, 0},
		{`{"from": "web", "name": "b", "count": -2}`, 400, 0},
	} {
		begin := time.Now()
		r := s.ask(bob, "POST", "/v1/volumes", c.body)
		if r.status != c.want {
			t.Errorf("%s: %d %s", c.body, r.status, r.text)
		}
		if c.ttl > 0 {
			at, err := time.Parse(time.RFC3339Nano, fmt.Sprint(r.volume()["expires_at"]))
			if err != nil || at.Before(begin.Add(c.ttl)) || at.After(time.Now().Add(c.ttl)) {
				t.Errorf("%s: it stays until %v, %v", c.body, at, err)
			}
		}
		s.ask(bob, "DELETE", "/v1/volumes/b", "")
	}
}

// TestNoPolicy: without a policy only root may use the service.
func TestNoPolicy(t *testing.T) {
	s := serve(t, "")
	for _, r := range rest.Routes() {
		path := strings.ReplaceAll(r.Path, "{name}", "web")
		if got := s.ask(alice, r.Method, path, ""); got.status != 403 && got.status != 400 {
			t.Errorf("%s %s: %s", r.Method, path, got.text)
		}
	}
	if r := s.ask(root, "GET", "/v1/volumes", ""); r.status != 200 {
		t.Errorf("root: %s", r.text)
	}
}

// TestBadRequests: what is no request is an error that says so, and changes nothing.
func TestBadRequests(t *testing.T) {
	s := serve(t, policyText)
	for _, c := range []struct {
		method, path, body string
		want               int
	}{
		{"POST", "/v1/volumes", "", 400},
		{"POST", "/v1/volumes", "{", 400},
		{"POST", "/v1/volumes", "[]", 400},
		{"POST", "/v1/volumes", `{"from": "web", "name": "v"} {}`, 400},
		{"POST", "/v1/volumes", `{"from": "web", "name": "v", "uid": 0}`, 400},
		{"POST", "/v1/volumes", `{"from": "web", "name": "../v"}`, 400},
		{"POST", "/v1/volumes", `{"from": "", "name": "v"}`, 400},
		{"POST", "/v1/volumes", `{"from": "web", "name": "v", "labels": {"a b": ""}}`, 400},
		{"POST", "/v1/volumes", `{"from": "web", "name": "v", "dir": "/tmp"}`, 400},
		{"POST", "/v1/volumes", `{"from": "web", "name": "v", "size_bytes": -1}`, 400},
		{"POST", "/v1/volumes", strings.Repeat(" ", 2<<20) + `{"from": "web", "name": "v"}`, 400},
		{"POST", "/v1/volumes?x=1", `{"from": "web", "name": "v"}`, 400},
		{"GET", "/v1/volumes?limit=many", "", 400},
		{"GET", "/v1/volumes?limit=-1", "", 400},
		{"GET", "/v1/volumes?limit=1&limit=2", "", 400},
		{"GET", "/v1/volumes?after=x", "", 400},
		{"GET", "/v1/volumes?filter=x", "", 400},
		{"GET", "/v1/volumes?a;b", "", 400},
		{"GET", "/v1/volumes", "{}", 400},
		{"GET", "/v1/volumes/a%2Fb", "", 400},
		{"GET", "/v1/volumes/" + strings.Repeat("x", 5000), "", 400},
		{"DELETE", "/v1/volumes/v/mount?discard=maybe", "", 400},
		{"PATCH", "/v1/volumes", "", 405},
		{"GET", "/", "", 404},
	} {
		r := s.ask(alice, c.method, c.path, c.body)
		if r.status != c.want || r.json["detail"] == "" || r.json["title"] == "" || r.json["status"] != float64(c.want) {
			t.Errorf("%s %.80s %.80s: %d %s", c.method, c.path, c.body, r.status, r.text)
		}
	}
	if r := s.ask(root, "GET", "/v1/volumes", ""); r.volume() != nil {
		t.Errorf("there are volumes: %s", r.text)
	}
}

// TestSlowAndMany: who sends slowly, or opens many connections, keeps nobody else from being served.
func TestSlowAndMany(t *testing.T) {
	s := serve(t, policyText)
	var open []net.Conn
	defer func() {
		for _, c := range open {
			c.Close()
		}
	}()
	for range 600 {
		c, err := testfs.DialAs(s.socket, bob, bob)
		must(t, err)
		open = append(open, c)
		_, _ = c.Write([]byte("GET /v1/volumes HTTP/1.1\r\nHost: x\r\nX-Slow: ")) // refused connections are closed
	}
	if r := s.ask(alice, "GET", "/v1/volumes", ""); r.status != 200 {
		t.Errorf("beside them: %s", r.text)
	}
	_ = open[len(open)-1].SetReadDeadline(time.Now().Add(5 * time.Second))
	if n, err := open[len(open)-1].Read(make([]byte, 1)); n > 0 || os.IsTimeout(err) {
		t.Errorf("the last connection is open: %d, %v", n, err)
	}
}
