package crash

import (
	"context"
	"encoding/json"
	"io"
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

	"golang.org/x/sys/unix"
)

// call is a request.
type call struct{ method, path, body string }

// caller sends one request to a service as soon as it listens, waits for the operation that it begins, if it does, and
// ends the service.
type caller struct {
	socket string
	call

	cancel   context.CancelFunc
	done     sync.WaitGroup
	answered bool // the request was carried out
}

// begin begins to look for the service, in place of the one before.
func (c *caller) begin() {
	c.end()
	ctx, cancel := context.WithCancel(context.Background())
	c.cancel, c.answered = cancel, false
	c.done.Go(func() { c.send(ctx) })
}

// end waits for the request, if the service still lives, and gives up otherwise.
func (c *caller) end() {
	if c.cancel != nil {
		c.cancel()
		c.done.Wait()
	}
}

func (c *caller) send(ctx context.Context) {
	var conn net.Conn
	for conn == nil {
		if ctx.Err() != nil {
			return // the service died before it listened
		}
		conn, _ = net.Dial("unix", c.socket)
		time.Sleep(time.Millisecond)
	}
	peer, err := peerOf(conn)
	if err != nil {
		_ = conn.Close()
		return
	}

	h := &http.Client{Transport: &http.Transport{
		DialContext: func(context.Context, string, string) (net.Conn, error) { return conn, nil }}}
	defer conn.Close()
	status, body := request(h, c.method, c.path, c.body)
	c.answered = status == http.StatusOK || status == http.StatusCreated || status == http.StatusNoContent
	for status == http.StatusAccepted || status == http.StatusOK && strings.Contains(body, `"state":"running"`) {
		var op struct{ ID string }
		_ = json.Unmarshal([]byte(body), &op) // or there is no such operation
		status, body = request(h, http.MethodGet, "/v1/operations/"+op.ID+"/wait", "")
		c.answered = strings.Contains(body, `"state":"done"`)
	}
	_ = syscall.Kill(peer, syscall.SIGTERM) // or it is dead
}

// request returns the status and the body of the answer. The status is 0 if there is none.
func request(h *http.Client, method, path, body string) (int, string) {
	r, _ := http.NewRequest(method, "http://pando"+path, strings.NewReader(body)) // a good URL
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	r.Header.Set("Idempotency-Key", "k")
	resp, err := h.Do(r)
	if err != nil {
		return 0, ""
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, ""
	}
	return resp.StatusCode, string(b)
}

// peerOf returns the process at the other end of a connection.
func peerOf(c net.Conn) (int, error) {
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var u *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { u, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if cerr != nil || err != nil || u.Pid <= 1 {
		return 0, os.ErrInvalid
	}
	return int(u.Pid), nil
}

// TestServiceAtEveryStep kills the service at each step of a request, of its start and of its end: as after a command
// that was killed, the old state is there or the new one. What it has answered is there.
func TestServiceAtEveryStep(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, k)
			w.initPool()
			w.importGolden("g")
			w.pando("clone", "g", "base")
			for _, c := range serviceCalls {
				client := &caller{socket: filepath.Join(t.TempDir(), "s"), call: c.call}
				t.Run(c.name, func(t *testing.T) {
					w.t = t
					w.sweepService(t, c, client)
				})
				client.end()
			}
			w.t = t
			w.pando("deinit", "--force")
			w.nothingLeft()
		})
	}
}

// serviceCall is a request under test, named as the verb that does the same.
type serviceCall struct {
	name    string
	call    call
	prepare func(w *world)
	every   int                        // as in operation
	want    func(before string) string // as in operation
}

var serviceCalls = []serviceCall{
	{name: "clone-mount",
		call:    call{method: "POST", path: "/v1/volumes", body: `{"from":"g","name":"v","mount":true}`},
		prepare: func(w *world) { w.gone("v") }},
	{name: "destroy-mounted", call: call{method: "DELETE", path: "/v1/volumes/v"},
		prepare: func(w *world) { w.there("v"); w.pando("mount", "v") }},
	{name: "mount", call: call{method: "POST", path: "/v1/volumes/base/mount", body: "{}"}, every: 2,
		prepare: func(w *world) { w.gone("v"); w.pando("umount", "base") }},
	{name: "snapshot-mounted", call: call{method: "POST", path: "/v1/volumes/base/snapshots", body: `{"name":"s"}`},
		prepare: func(w *world) { w.noSnapshots("base"); w.scribble("base") },
		want:    beforeVolumes("snapshot base@s clean\n")},
	{name: "publish", call: call{method: "POST", path: "/v1/goldens/g2/publish", body: `{"volume":"base"}`},
		prepare: func(w *world) { w.noSnapshots("base"); w.goldenGone("g2") }},
}

// TestActivatedSocket: systemd opens the socket, keeps it, and passes it to one service after the other.
func TestActivatedSocket(t *testing.T) {
	w := newWorld(t, kinds[2])
	w.initPool()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()

	for range 2 {
		cmd := exec.Command("sh", "-c", `LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" --pool "$1" serve`, pando, w.dir)
		cmd.ExtraFiles = []*os.File{f}
		var stderr strings.Builder
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		h := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
			DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", path) }}}
		resp, err := h.Get("http://pando/v1/service")
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Errorf("%v, %v", resp, err)
		} else {
			_ = resp.Body.Close()
		}
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Errorf("%v: %s", err, stderr.String())
		}
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("the socket is not the service's to remove: %v", err)
		}
	}
	w.pando("deinit", "--force")
}

// sweepService kills the service at steps of a call.
func (w *world) sweepService(t *testing.T, sc serviceCall, c *caller) {
	var before string
	op := operation{name: sc.name, every: max(2, 2*sc.every), want: sc.want,
		command: func(*world) []string { return []string{"serve", "--socket", c.socket, "--grace", "5s"} },
		prepare: func(w *world) {
			sc.prepare(w)
			before = w.peek()
			c.begin()
		}}
	op.always = func(w *world) {
		c.end()
		if c.answered && w.peek() != w.outcome(op, before) {
			w.t.Errorf("the service has answered, but this is there:\n%s", w.peek())
		}
	}
	w.sweep(t, op, faults[0].plan)
	if c.end(); !c.answered {
		t.Error("undisturbed, it did not do what it was asked for")
	}
}
