package service

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/client"
	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/front/tasks"
	"pando/internal/remote/replicate"
	"pando/internal/source/git"
	"pando/internal/testing/testfs"

	"filippo.io/age"
)

// plan returns the tasks of a file with a text.
func plan(t testing.TB, text string) *tasks.Config {
	t.Helper()
	name := filepath.Join(t.TempDir(), "tasks.toml")
	must(t, os.WriteFile(name, []byte(text), 0o600))
	return must2[*tasks.Config](t)(tasks.ReadFile(name))
}

// until waits until a task is as it should be, and returns it.
func (s *served) until(name string, as func(client.Task) bool) client.Task {
	s.t.Helper()
	var last client.Task
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		all, err := s.c.Tasks(context.Background())
		must(s.t, err)
		for _, last = range all {
			if last.Name == name && as(last) {
				return last
			}
		}
	}
	s.t.Fatalf("task %s does not become as it should: %+v", name, last)
	return last
}

// ran is a task that has run n times without a failure.
func ran(n int) func(client.Task) bool {
	return func(t client.Task) bool { return t.Runs >= n && t.LastError == nil }
}

// happened returns the events of a verb in the pool of a service, but for those of goldens themselves.
func (s *served) happened(verb string) (out []engine.HistoryEvent) {
	s.t.Helper()
	h, err := engine.ReadHistory(s.e.Dir(), engine.HistoryQuery{})
	must(s.t, err)
	for _, e := range h.Events {
		if e.Verb == verb && e.Kind != "golden" {
			out = append(out, e)
		}
	}
	return out
}

// eachDriver runs a test on a pool of each kind.
func eachDriver(t *testing.T, test func(t *testing.T, driverName string)) {
	for _, d := range []string{plain.Name, reflink.Name} {
		t.Run(d, func(t *testing.T) { test(t, d) })
	}
}

// TestExpiresOnTime: a service destroys volumes within a second or so of their time, whoever made them, although nobody
// asks it anything.
func TestExpiresOnTime(t *testing.T) {
	eachDriver(t, func(t *testing.T, driverName string) {
		s := withGolden(t, driverName)
		other, err := engine.Open(t.Context(), s.e.Dir(), drivers) // as a command does
		must(t, err)
		defer other.Close()

		clone := func(name string, ttl time.Duration) time.Time {
			out, err := other.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "web"}, Name: ref.MustName(name),
				TTL: ttl, Mount: driverName == reflink.Name})
			must(t, err)
			return *out[0].ExpiresAt
		}
		due := map[string]time.Time{"a": clone("a", 1200*time.Millisecond), "b": clone("b", 3*time.Second),
			"c": clone("c", time.Nanosecond)}
		clone("later", time.Hour)

		for len(s.happened("expire")) < len(due) && time.Since(due["b"]) < 20*time.Second {
			time.Sleep(20 * time.Millisecond)
		}
		events := s.happened("expire")
		if len(events) != len(due) {
			t.Fatalf("expired: %+v", events)
		}
		for _, e := range events {
			if late := e.Time.Sub(due[e.Name]); late < 0 || late > 2*time.Second {
				t.Errorf("%s was destroyed %v after its time", e.Name, late)
			}
			if e.Command != "pando serve: task expire" || e.Why == "" {
				t.Errorf("the event says %q, %q", e.Command, e.Why)
			}
		}
		if names, err := other.VolumeNames(t.Context()); err != nil || !slices.Equal(names, []string{"later"}) {
			t.Errorf("left: %v, %v", names, err)
		}
		s.until("expire", func(x client.Task) bool {
			return x.Runs > 0 && strings.HasPrefix(x.LastResult, "destroyed ") && x.NextAt != nil && x.EverySeconds == 0
		})
	})
}

// TestKeepFree: a pool that is nearly full is pruned, the volume used longest ago first, and a task that cannot free
// enough says so.
func TestKeepFree(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	dir := filepath.Join(testfs.New(t, "ext4", 256<<20).Dir(), "pool")
	_, err := engine.Init(t.Context(), engine.InitRequest{Dir: dir, Driver: plain.Name}, drivers)
	must(t, err)
	s := serve(t, dir)
	data := make([]byte, 20<<20)
	_, err = rand.Read(data)
	must(t, err)
	_, err = s.c.Import(t.Context(), "web", archive(t, map[string]string{"data": string(data)}), client.ImportOptions{})
	must(t, err)
	for i := range 7 {
		_, err := s.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: fmt.Sprint("v", i)})
		must(t, err)
	}

	s.SetTasks(plan(t, `keep_free = "50%"`))
	x := s.until("keep_free", ran(1))
	if !strings.HasPrefix(x.LastResult, "removed ") || x.Verb != "prune" {
		t.Errorf("got %+v", x)
	}
	events := s.happened("prune")
	if len(events) == 0 || events[0].Name != "v0" || events[0].Command != "pando serve: task keep_free" ||
		!strings.Contains(events[0].Why, "of the pool was free, less than 50 %") {
		t.Errorf("events: %+v", events)
	}
	free, total, err := s.e.FreeSpace(t.Context())
	must(t, err)
	if free < total/2 || len(events) == 7 {
		t.Errorf("%d of %d bytes are free, after %d volumes were removed", free, total, len(events))
	}
	ops, err := s.c.Operations(t.Context())
	if err != nil || !slices.ContainsFunc(ops, func(o client.Operation) bool { return o.By == "task keep_free" }) {
		t.Errorf("operations: %+v, %v", ops, err)
	}

	// More than there can be.
	s.SetTasks(plan(t, `keep_free = "99%"`))
	x = s.until("keep_free", func(x client.Task) bool { return x.Failures > 0 })
	if x.LastError.Kind != client.NoSpace || x.LastError.Hint == "" ||
		!strings.Contains(x.LastError.Detail, "less than 99 %") {
		t.Errorf("got %+v", x.LastError)
	}
	must(t, s.removePool(dir))
}

// removePool ends the service, and removes its pool.
func (s *served) removePool(dir string) error {
	s.stop()
	_, err := engine.Deinit(context.Background(), dir, true, drivers)
	return err
}

// TestSnapshotTask: snapshots are taken of all volumes that match, and retention removes only those of the task.
func TestSnapshotTask(t *testing.T) {
	eachDriver(t, func(t *testing.T, driverName string) {
		s := withGolden(t, driverName)
		for _, v := range []string{"db-1", "db-2", "other"} {
			_, err := s.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: v})
			must(t, err)
		}
		_, err := s.c.Snapshot(t.Context(), "db-1", client.SnapshotRequest{Name: "mine"})
		must(t, err)

		s.SetTasks(plan(t, "[[task]]\nname = \"often\"\nevery = \"1s\"\nsnapshot = \"db-*\"\nkeep_last = 2\n"))
		x := s.until("often", ran(4))
		if x.LastResult != "took 2 snapshots, destroyed 2" || x.Ref != "db-*" || x.EverySeconds != 1 {
			t.Errorf("got %+v", x)
		}
		s.SetTasks(nil)
		s.endTasks(t)

		for v, want := range map[string]int{"db-1": 3, "db-2": 2, "other": 0} {
			d, err := s.c.Volume(t.Context(), v)
			must(t, err)
			var names []string
			for _, sn := range d.Snapshots {
				names = append(names, sn.Name)
				if sn.Name != "db-1@mine" && sn.Labels[tasks.Label] != "often" {
					t.Errorf("%s has the labels %v", sn.Name, sn.Labels)
				}
			}
			if len(names) != want || v == "db-1" && !slices.Contains(names, "db-1@mine") {
				t.Errorf("%s has %q, want %d", v, names, want)
			}
		}
		for _, e := range s.happened("snapshot")[1:] {
			if e.Command != "pando serve: task often" || e.Why != "every 1s" {
				t.Errorf("event: %+v", e)
			}
		}
	})
}

// endTasks waits until no operation runs any more.
func (s *served) endTasks(t *testing.T) {
	t.Helper()
	for {
		info, err := s.c.Service(t.Context())
		must(t, err)
		if info.Running == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// addRemote adds a remote in a directory to the pool of a service, and returns its store for other pools.
func (s *served) addRemote(store remoteStore) remoteStore {
	s.t.Helper()
	q := replicate.AddRequest{Name: "backup", URL: "file://" + store.dir}
	if store.identity == nil {
		store.identity = must2[*age.X25519Identity](s.t)(age.GenerateX25519Identity())
		q.Recipients = []string{store.identity.Recipient().String()}
	} else {
		q.Identity = store.identity.String()
	}
	_, err := replicate.Add(context.Background(), s.e, q)
	must(s.t, err)
	return store
}

// remoteStore is the place of a remote, and what opens it.
type remoteStore struct {
	dir      string
	identity *age.X25519Identity // nil: nobody has used it
}

// TestPrewarm: one service pushes each generation of a golden, and another one pulls them.
func TestPrewarm(t *testing.T) {
	eachDriver(t, func(t *testing.T, driverName string) {
		from, to := withGolden(t, driverName), serve(t, newPool(t, driverName))
		to.addRemote(from.addRemote(remoteStore{dir: t.TempDir()}))
		from.SetTasks(plan(t, "[[task]]\nname = \"out\"\nevery = \"1s\"\npush = [\"web\"]\nremote = \"backup\"\n"))
		from.until("out", ran(1))
		to.SetTasks(plan(t, "[[task]]\nname = \"in\"\nevery = \"1s\"\npull = \"web\"\nremote = \"backup\"\n"))
		to.until("in", ran(2))

		_, err := from.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: "job"})
		must(t, err)
		op, err := from.c.Publish(t.Context(), "web", client.PublishRequest{Volume: "job"})
		done[client.Object](from, op, err)
		to.until("in", func(client.Task) bool {
			g, err := to.c.Golden(t.Context(), "web")
			return err == nil && g.Generation == 2
		})
		if e := to.happened("pull"); len(e) != 2 || e[1].Name != "web@2" || e[1].Command != "pando serve: task in" {
			t.Errorf("events: %+v", e)
		}
		if e := from.happened("push"); len(e) != 2 || e[0].Why != "every 1s" {
			t.Errorf("events: %+v", e)
		}
		x := to.until("in", func(x client.Task) bool { return x.LastResult == "web@2 is up to date" })
		if x.Verb != "pull" || x.Ref != "web from backup" {
			t.Errorf("got %+v", x)
		}
		_, err = to.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: "warm"})
		must(t, err)
	})
}

// TestPullVolume: a volume that is pulled at intervals follows the one of its writer.
func TestPullVolume(t *testing.T) {
	from, to := withGolden(t, plain.Name), serve(t, newPool(t, plain.Name))
	to.addRemote(from.addRemote(remoteStore{dir: t.TempDir()}))
	_, err := from.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: "db"})
	must(t, err)
	from.SetTasks(plan(t, "[[task]]\nname = \"out\"\nevery = \"1s\"\npush = [\"d*\"]\nremote = \"backup\"\n"))
	from.until("out", ran(1))
	to.SetTasks(plan(t, "[[task]]\nname = \"in\"\nevery = \"1s\"\npull = \"db\"\nas = \"copy\"\nremote = \"backup\"\n"))
	to.until("in", ran(2))
	if _, err := to.c.Volume(t.Context(), "copy"); err != nil {
		t.Error(err)
	}
}

// TestFailures: a task that fails says why, is tried again soon, and works when the cause is gone.
func TestFailures(t *testing.T) {
	s := withGolden(t, plain.Name)
	s.SetTasks(plan(t, "[[task]]\nname = \"out\"\nevery = \"1s\"\npush = [\"web\"]\nremote = \"backup\"\n"))
	x := s.until("out", func(x client.Task) bool { return x.Failures == 2 })
	wait := x.NextAt.Sub(*x.LastFinishedAt)
	if x.LastError.Kind != client.NotFound || x.LastError.Hint == "" || x.LastResult != "" || wait < 2*time.Second {
		t.Errorf("next in %v: %+v, %+v", wait, x, x.LastError)
	}
	info, err := s.c.Service(t.Context())
	must(t, err)
	if i := slices.IndexFunc(info.Tasks, func(x client.Task) bool { return x.Name == "out" }); i < 0 ||
		info.Tasks[i].LastError == nil {
		t.Errorf("the service shows %+v", info.Tasks)
	}

	s.addRemote(remoteStore{dir: t.TempDir()})
	x = s.until("out", func(x client.Task) bool { return x.LastError == nil && x.Runs > 2 })
	if x.Failures != 0 || !strings.HasPrefix(x.LastResult, "pushed 1, ") {
		t.Errorf("got %+v", x)
	}
}

// TestTwoServices: services of one pool with the same tasks do them once, and each is ready to if the other ends.
func TestTwoServices(t *testing.T) {
	a := withGolden(t, plain.Name)
	b := serve(t, a.e.Dir())
	_, err := a.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: "db"})
	must(t, err)
	c := plan(t, "[[task]]\nname = \"often\"\nevery = \"2s\"\nsnapshot = \"db\"\n")
	a.SetTasks(c)
	b.SetTasks(c)
	count := func() int { return len(a.happened("snapshot")) }
	for count() < 4 {
		time.Sleep(20 * time.Millisecond)
	}
	a.stop()
	for n := count(); count() < n+2; {
		time.Sleep(20 * time.Millisecond)
	}
	b.stop()

	events := a.happened("snapshot")
	for i, e := range events[1:] {
		if apart := e.Time.Sub(events[i].Time); apart < 1500*time.Millisecond {
			t.Errorf("two snapshots are %v apart", apart)
		}
	}
}

// TestRestart: a service that is restarted does not repeat what is not due yet.
func TestRestart(t *testing.T) {
	s := withGolden(t, plain.Name)
	_, err := s.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: "db"})
	must(t, err)
	c := plan(t, "[[task]]\nname = \"rare\"\nevery = \"20s\"\nsnapshot = \"db\"\n"+
		"[[task]]\nname = \"often\"\nevery = \"1s\"\nprune = { idle = \"7d\" }\n")
	s.SetTasks(c)
	s.until("rare", ran(1))
	dir := s.e.Dir()
	s.stop()

	again := serve(t, dir, func(o *Options) { o.Tasks = c })
	before := len(again.happened("snapshot"))
	again.until("often", ran(5)) // the first run of the other is 2 s after the start at the latest
	again.SetTasks(nil)
	if n := len(again.happened("snapshot")); n != before {
		t.Errorf("%d snapshots, %d before the restart", n, before)
	}
}

// TestRefreshTask: a golden of a repository gets the commits that are new.
func TestRefreshTask(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("SKIPPED: git is not installed: run make deps")
	}
	repo := t.TempDir()
	run := func(args ...string) {
		t.Helper()
		cmd := exec.Command("git", append([]string{"-C", repo, "-c", "user.name=a", "-c", "user.email=a@example.com"},
			args...)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
	}
	run("init", "-q")
	run("commit", "-q", "--allow-empty", "-m", "one")
	s := serve(t, newPool(t, plain.Name), func(o *Options) { o.Env = os.Environ() })
	_, err := git.Import(t.Context(), s.e, git.ImportRequest{Golden: ref.MustName("repo"),
		Source: git.Source{URL: "file://" + repo}, Env: os.Environ()})
	must(t, err)

	s.SetTasks(plan(t, "[[task]]\nevery = \"1s\"\nrefresh = \"repo\"\n"))
	x := s.until("refresh repo", ran(1))
	if x.LastResult != "nothing is new" {
		t.Errorf("got %+v", x)
	}
	run("commit", "-q", "--allow-empty", "-m", "two")
	s.until("refresh repo", func(x client.Task) bool { return x.LastResult == "made repo@2" })
}

// slowPush is a service that is pushing at a rate at which it will not end.
func slowPush(t *testing.T) (s *served, operation string) {
	s = serve(t, newPool(t, plain.Name))
	data := make([]byte, 8<<20)
	_, err := rand.Read(data)
	must(t, err)
	_, err = s.c.Import(t.Context(), "web", archive(t, map[string]string{"data": string(data)}), client.ImportOptions{})
	must(t, err)
	s.addRemote(remoteStore{dir: t.TempDir()})
	s.SetTasks(plan(t, "[[task]]\nname = \"out\"\nevery = \"10s\"\npush = [\"web\"]\nremote = \"backup\"\n"+
		"limit_rate = \"50K\"\n"))

	for {
		ops, err := s.c.Operations(t.Context())
		must(t, err)
		for _, o := range ops {
			if o.By == "task out" && o.Running() && o.Progress.Bytes > 0 {
				return s, o.ID
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// TestEndInAPush: the end of a service interrupts a push without waiting for it, and the next service finishes it.
func TestEndInAPush(t *testing.T) {
	s, _ := slowPush(t)
	dir, start := s.e.Dir(), time.Now()
	s.stop()
	if took := time.Since(start); took > s.Grace {
		t.Errorf("the end took %v", took)
	}
	if e := s.happened("push"); len(e) > 0 {
		t.Errorf("it was pushed: %+v", e)
	}

	again := serve(t, dir, func(o *Options) {
		o.Tasks = plan(t, "[[task]]\nname = \"out\"\nevery = \"1s\"\npush = [\"web\"]\nremote = \"backup\"\n")
	})
	again.until("out", ran(1))
	op, err := again.c.Verify(t.Context(), "backup", client.VerifyRequest{ReadPercent: 100})
	if r := done[map[string]any](again, op, err); r["total_problems"] != 0.0 {
		t.Errorf("verify: %v", r)
	}
}

// TestCancelTask: who cancels the operation of a task ends this run, and the next one is not early.
func TestCancelTask(t *testing.T) {
	s, id := slowPush(t)
	must(t, s.c.Cancel(t.Context(), id))
	_, err := s.c.Wait(t.Context(), id, nil)
	if !client.IsKind(err, client.Canceled) {
		t.Errorf("the operation: %v", err)
	}
	x := s.until("out", func(x client.Task) bool { return !x.Running })
	if x.LastError == nil || x.LastError.Kind != client.Canceled || x.Failures != 0 ||
		x.NextAt.Sub(*x.LastStartedAt) < 10*time.Second {
		t.Errorf("got %+v, %+v", x, x.LastError)
	}
	if e := s.happened("push"); len(e) > 0 {
		t.Errorf("it was pushed: %+v", e)
	}
}
