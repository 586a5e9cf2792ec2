package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/client"
)

// start starts pando through the service, with a pipe as its standard input and output.
func (c commandLine) start(t *testing.T, args ...string) (cmd *exec.Cmd, stdin io.Closer, stdout *bufio.Reader) {
	t.Helper()
	cmd = exec.Command("pando", args...)
	cmd.Dir, cmd.Stderr = c.dir, os.Stderr
	cmd.Env = append(os.Environ(), "PANDO_SOCKET="+c.socket)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
	})
	return cmd, in, bufio.NewReader(out)
}

// must runs pando, which must exit with 0.
func (c commandLine) must(t *testing.T, input string, args ...string) string {
	t.Helper()
	o := c.pando(t, input, args...)
	if o.exit != 0 {
		t.Fatalf("pando %s: %+v", strings.Join(args, " "), o)
	}
	return o.stdout
}

// kill ends a process at once.
func kill(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
}

// waiting is a command of a run that says when it begins, and ends with its standard input.
var waiting = []string{"--", "sh", "-c", "echo begun; read x; touch new && test -e file && exit 9"}

// withGolden starts a service of a pool with a golden.
func withGolden(t *testing.T) (commandLine, *exec.Cmd) {
	t.Helper()
	c := newCommandLine(t, true, "--driver", "plain")
	service := c.startService(t)
	c.must(t, archive(t), "golden", "import", "web", "-")
	return c, service
}

// TestServiceKilledDuringRun: the program of a run goes on without the service, and the next one destroys the volume.
func TestServiceKilledDuringRun(t *testing.T) {
	c, service := withGolden(t)
	cmd, stdin, stdout := c.start(t, append([]string{"run", "web"}, waiting...)...)
	if line, err := stdout.ReadString('\n'); err != nil || line != "begun\n" {
		t.Fatalf("%q, %v", line, err)
	}

	kill(t, service)
	c.startService(t)
	_ = stdin.Close()
	_ = cmd.Wait() // its exit status counts
	if code := cmd.ProcessState.ExitCode(); code != 9 {
		t.Errorf("exit code %d", code)
	}
	if out := c.must(t, "", "ls", "-q"); out != "" {
		t.Errorf("left behind: %s", out)
	}
}

// TestCommandKilledDuringRun: the volume of a run whose pando was killed has a ttl, and goes when that has passed. One
// that was to be kept stays.
func TestCommandKilledDuringRun(t *testing.T) {
	c, _ := withGolden(t)
	cmd, stdin, stdout := c.start(t, append([]string{"run", "web", "--name", "temporary"}, waiting...)...)
	kept, keptIn, keptOut := c.start(t, append([]string{"run", "web", "--keep", "--name", "kept"}, waiting...)...)
	for _, r := range []*bufio.Reader{stdout, keptOut} {
		if line, err := r.ReadString('\n'); err != nil || line != "begun\n" {
			t.Fatalf("%q, %v", line, err)
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := kept.Process.Kill(); err != nil {
		t.Fatal(err)
	}

	// The programs end after their pandos: their output ends with them.
	_, _ = stdin.Close(), keptIn.Close()
	for _, r := range []*bufio.Reader{stdout, keptOut} {
		if _, err := io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}

	// It expires soon.
	var v client.Object
	api, err := client.New(client.Options{Socket: c.socket})
	if err != nil {
		t.Fatal(err)
	}
	defer api.Close()
	all := map[string]client.Object{}
	for v, err = range api.Volumes(context.Background(), client.VolumeFilter{}) {
		if err != nil {
			t.Fatal(err)
		}
		all[v.Name] = v
	}
	at := all["temporary"].ExpiresAt
	if at == nil || time.Until(*at) > 5*time.Minute || all["kept"].ExpiresAt != nil || len(all) != 2 {
		b, _ := json.Marshal(all) // for the message
		t.Fatalf("%s", b)
	}

	// Let that time pass.
	if _, err := api.SetTTL(context.Background(), "temporary", 1e-3); err != nil {
		t.Fatal(err)
	}
	direct := commandLine{dir: c.dir, pool: c.pool}
	direct.must(t, "", "gc")
	if out := c.must(t, "", "ls", "-q"); out != "kept\n" {
		t.Errorf("left: %q", out)
	}
}

// TestServiceRestartsDuringCommand: a command whose service is killed before it answers asks the next one.
func TestServiceRestartsDuringCommand(t *testing.T) {
	c, service := withGolden(t)
	c.must(t, "", "clone", "web", "old")
	if err := service.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	before := connections(t, c.socket)
	clone, _, _ := c.start(t, "clone", "web", "late")
	ls, _, stdout := c.start(t, "golden", "ls", "-q")
	destroy, _, _ := c.start(t, "destroy", "old")
	for end := time.Now().Add(time.Minute); connections(t, c.socket) < before+3; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the commands do not connect")
		}
	}

	kill(t, service)
	c.startService(t)
	if out, err := io.ReadAll(stdout); err != nil || string(out) != "web\n" {
		t.Errorf("%q, %v", out, err)
	}
	_, _, _ = clone.Wait(), ls.Wait(), destroy.Wait() // their exit statuses count
	if a, b, d := clone.ProcessState.ExitCode(), ls.ProcessState.ExitCode(), destroy.ProcessState.ExitCode(); a != 0 ||
		b != 0 || d != 0 {
		t.Errorf("exit codes %d, %d, %d", a, b, d)
	}
	if out := c.must(t, "", "ls", "-q"); out != "late\n" {
		t.Errorf("volumes: %q", out)
	}
}

// TestInterruptedThroughService: Ctrl-C cancels the operation that a command waits for, and what it did is undone when
// the command ends.
func TestInterruptedThroughService(t *testing.T) {
	c, _ := withGolden(t)
	c.must(t, "", "clone", "web", "job")
	api, err := client.New(client.Options{Socket: c.socket})
	if err != nil {
		t.Fatal(err)
	}
	defer api.Close()
	running := func(n int) { t.Helper(); waitForRunning(t, api, n) }

	// An import without an end, and a publish that waits for it.
	slow, _, _ := c.start(t, "golden", "import", "web", "-", "--update")
	running(1)
	publish, _, _ := c.start(t, "golden", "publish", "web", "job")
	running(2)
	for _, cmd := range []*exec.Cmd{publish, slow} {
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // its exit status counts
		if code := cmd.ProcessState.ExitCode(); code != 130 {
			t.Errorf("%q: exit code %d", cmd.Args, code)
		}
		if cmd == publish {
			running(1)
		}
	}
	running(0)
	if out := c.must(t, "", "golden", "ls", "--json"); !strings.Contains(out, `"generations": 1,`) {
		t.Errorf("goldens: %s", out)
	}
}

// TestCloneInterruptedThroughService: a clone that is interrupted at any time is done and named, or leaves no volume.
func TestCloneInterruptedThroughService(t *testing.T) {
	c, _ := withGolden(t)
	done, undone := 0, 0
	for i := range 40 {
		name := fmt.Sprintf("v%d", i)
		cmd, _, stdout := c.start(t, "clone", "web", name, "-q")
		time.Sleep(time.Duration(rand.IntN(40)) * time.Millisecond) // a moment to interrupt it, not to wait for anything
		_ = cmd.Process.Signal(syscall.SIGINT)                      // it may have ended
		out, err := io.ReadAll(stdout)
		_ = cmd.Wait() // its exit status counts
		code := cmd.ProcessState.ExitCode()
		exists := c.pando(t, "", "show", name).exit == 0
		switch {
		case err == nil && code == 0 && string(out) == name+"\n" && exists:
			done++
		case err == nil && code != 0 && len(out) == 0 && !exists:
			undone++
		default:
			t.Errorf("%s: exit code %d, %q, %v; it exists: %v", name, code, out, err, exists)
		}
	}
	t.Logf("%d were done, %d undone", done, undone)
}

// waitForRunning waits until a number of operations run.
func waitForRunning(t *testing.T, api *client.Client, n int) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		all, err := api.Operations(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		got := 0
		for _, o := range all {
			if o.Running() {
				got++
			}
		}
		if got == n {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d operations run, not %d", got, n)
		}
	}
}

// TestPushInterruptedThroughService: Ctrl-C cancels a push that the service does, and the next one succeeds.
func TestPushInterruptedThroughService(t *testing.T) {
	c, _ := withGolden(t)
	c.addRemote(t)
	c.must(t, "", "clone", "web", "job", "--mount")
	at := filepath.Join(c.pool, "mnt", "job")
	noise := make([]byte, 4<<20)
	for i := range noise {
		noise[i] = byte(rand.Int())
	}
	if err := os.WriteFile(filepath.Join(at, "noise"), noise, 0o600); err != nil {
		t.Fatal(err)
	}
	api, err := client.New(client.Options{Socket: c.socket})
	if err != nil {
		t.Fatal(err)
	}
	defer api.Close()

	push, _, _ := c.start(t, "push", "job", "--limit-rate", "1K")
	waitForRunning(t, api, 1)
	if err := push.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	_ = push.Wait() // its exit status counts
	waitForRunning(t, api, 0)
	if code := push.ProcessState.ExitCode(); code != 130 {
		t.Errorf("exit code %d", code)
	}
	if out := c.must(t, "", "push", "job"); !strings.Contains(out, "job@push-") {
		t.Errorf("%q", out)
	}
}

// connections returns how many sockets have a path, the listening one among them.
func connections(t *testing.T, path string) int {
	t.Helper()
	b, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), " "+filepath.Clean(path)+"\n")
}
