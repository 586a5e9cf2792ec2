package systemd

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pando/client"
	"pando/internal/testing/testfs"
)

// TestUpdateUnderLoad updates the program again and again, and kills it sometimes, while clients work: what was
// answered is true, and clients see no errors but those that a repetition gets over.
func TestUpdateUnderLoad(t *testing.T) {
	clients, updates := 16, 8
	if testfs.Full() {
		clients, updates = 100, 50
	}
	m := boot(t)
	m.run(script(t, "installed"), "configure")
	m.run("pando", "init", "-q", "--size", "2G")
	m.override("StandardError=append:/var/lib/log", "RestartSec=100ms", "StartLimitIntervalSec=0")
	m.run("systemctl", "start", "pando.socket")
	m.importGolden("web")

	// Let clients work until all updates are done.
	l := &load{m: m, t: t}
	ctx, end := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() { l.work(ctx, i) })
	}
	for i := range updates {
		before := l.answered.Load()
		m.until("clients have got answers", func() bool { return l.answered.Load() > before+int64(clients) || t.Failed() })
		if i%4 == 3 {
			m.run("kill", "-KILL", m.mainPID())
			continue
		}
		m.install(m.path("/usr/bin"))
		m.run(script(t, "installed"), "configure", "1.0")
	}
	before := l.answered.Load()
	m.until("clients have got answers after the last one", func() bool {
		return l.answered.Load() > before+int64(clients) || t.Failed()
	})
	end()
	wg.Wait()
	t.Logf("%d updates and kills, %d clients: %d answers, %d requests repeated after an error", updates, clients,
		l.answered.Load(), l.repeated.Load())

	// What is left is what was kept, and nothing more.
	var left []string
	for v, err := range m.c.Volumes(t.Context(), client.VolumeFilter{}) {
		must(t, err)
		left = append(left, v.Name)
	}
	if len(left) != len(l.kept) {
		t.Errorf("%d volumes were kept, but %d are there", len(l.kept), len(left))
	}
	for name, id := range l.kept {
		l.check(name, id)
		must(t, m.c.Destroy(t.Context(), name, ""))
	}
	must(t, m.c.RemoveGolden(t.Context(), "web", ""))
	m.run("systemctl", "stop", "pando.socket", "pando.service")
	m.run("pando", "fsck")
	m.run("pando", "deinit") // which refuses a pool that still has something
	if b := m.run("cat", "/proc/1/mountinfo"); strings.Contains(b, " /var/lib/pando/") {
		t.Errorf("mounts are left:\n%s", b)
	}
}

// load is what the clients have done.
type load struct {
	m                  *machine
	t                  *testing.T
	answered, repeated atomic.Int64

	mu   sync.Mutex
	kept map[string]string // names of volumes and their IDs
}

// work clones and destroys. It keeps the last volume.
func (l *load) work(ctx context.Context, number int) {
	c, err := client.New(client.Options{Socket: l.m.path("/run/pando/pando.sock")})
	if err != nil {
		l.t.Error(err)
		return
	}
	defer c.Close()

	for n := 0; !l.t.Failed(); n++ {
		name := fmt.Sprintf("v%d-%d", number, n)
		id := l.clone(c, name)
		if id == "" {
			return
		}
		l.check(name, id)
		if ctx.Err() != nil {
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.kept == nil {
				l.kept = map[string]string{}
			}
			l.kept[name] = id
			return
		}
		l.destroy(c, name)
	}
}

// clone clones until there is an answer, and returns the ID of the volume; "": the test has failed.
func (l *load) clone(c *client.Client, name string) (id string) {
	l.until("clone "+name, func() error {
		v, err := c.Clone(context.Background(), client.CloneRequest{From: "web", Name: name, Key: name,
			Make: client.Make{Mount: true}})
		if err == nil {
			id = v.ID
		}
		return err
	})
	return id
}

// destroy destroys until there is an answer: that the volume is gone is one, too.
func (l *load) destroy(c *client.Client, name string) {
	l.until("destroy "+name, func() error {
		err := c.Destroy(context.Background(), name, "")
		if client.IsKind(err, client.NotFound) {
			return nil
		}
		return err
	})
	if _, err := os.Lstat(l.m.path("/var/lib/pando/mnt/" + name)); !errors.Is(err, os.ErrNotExist) {
		l.t.Errorf("%s was destroyed, but its mount point is there: %v", name, err)
	}
}

// check checks that a volume which was answered for is mounted, with its content.
func (l *load) check(name, id string) {
	l.until("show "+name, func() error {
		v, err := l.m.c.Volume(context.Background(), name)
		if err == nil && v.ID != id {
			l.t.Errorf("%s is another volume: %s, not %s", name, v.ID, id)
		}
		return err
	})
	if b, err := os.ReadFile(l.m.path("/var/lib/pando/mnt/" + name + "/file")); string(b) != "v1" {
		l.t.Errorf("%s: %q, %v", name, b, err)
	}
}

// until repeats a request until it is answered. Errors must be such that a client may repeat it: the connection broke,
// the service is ending, or still works on the request before.
func (l *load) until(what string, request func() error) {
	for deadline := time.Now().Add(time.Minute); !l.t.Failed(); time.Sleep(10 * time.Millisecond) {
		err := request()
		if err == nil {
			l.answered.Add(1)
			return
		}
		l.repeated.Add(1)
		var answer *client.Error
		if errors.As(err, &answer) && answer.Status != http.StatusConflict && answer.Kind != client.Canceled {
			l.t.Errorf("%s: status %d, %s: %v", what, answer.Status, answer.Kind, err)
		}
		if time.Now().After(deadline) {
			l.t.Errorf("%s: no answer in a minute: %v", what, err)
		}
	}
}
