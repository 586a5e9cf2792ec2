// Package examples runs what is in examples/, with real programs.
package examples

import (
	"bytes"
	"context"
	"crypto/rand"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/testing/testfs"
)

var pando string // the binary

func TestMain(m *testing.M) { os.Exit(testfs.WithProgram(&pando, m.Run)) }

// needDocker skips a test where it cannot start an engine.
func needDocker(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: an engine needs root: run the tests as root")
	}
	for _, p := range []string{"dockerd", "docker", "containerd", "runc", "unshare"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("SKIPPED: %v: run make deps", err)
		}
	}
}

// TestDockerWarmStart runs the example. Its times are only printed, but the bytes that sessions write must not grow
// with the images.
func TestDockerWarmStart(t *testing.T) {
	needDocker(t)
	cmd, _ := warmCommand(t)
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}

	for _, want := range []string{
		`dockerd \(pid \d+\) is running on it, and keeps volumes/metadata.db locked`,
		`left out by preset docker: containers, network, swarm, tmp`,
		`original [\d.]+ s, clone [\d.]+ s: [\d.]+x \(medians of 9\)`,
		`left out by preset docker: build-succeeded, `,
		`the next session has: extra\n.*: shell\n.*: tools\n`,
		`destroyed cloned-5\n.*destroyed next\n`,
		`Left behind: nothing`,
	} {
		if !regexp.MustCompile(want).Match(out) {
			t.Errorf("it does not print %q", want)
		}
	}

	if cloned, copied := mib(t, out, "pando clone"), mib(t, out, "cp -a of a data-root"); cloned > copied/4 {
		t.Errorf("a clone took %v MiB, and a copy %v", cloned, copied)
	}
}

// mib reads the last column of a row of the table.
func mib(t *testing.T, out []byte, row string) float64 {
	t.Helper()
	m := regexp.MustCompile(row + ` .* ([\d.]+) MiB\n`).FindSubmatch(out)
	if m == nil {
		t.Fatalf("there is no row %q", row)
	}
	f, err := strconv.ParseFloat(string(m[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// unrecorded is an unshare that takes away the file with the PID of the engines cold-*, as if the signal had come
// before it was written, and begins late: clean_up has to find them nevertheless.
const unrecorded = `#!/bin/bash
if [[ $* =~ --pidfile\ ([^ ]*/cold-[0-9])/pid ]]; then
  until rm "${BASH_REMATCH[1]}/unshare" 2>/dev/null; do sleep 0.01; done
  [[ $* == *cold-2* ]] || sleep 2
fi
exec "$REAL_UNSHARE" "$@"
`

// TestDockerWarmStartInterrupted stops the example while an engine runs: the first, and one of a session. It leaves
// nothing behind.
func TestDockerWarmStartInterrupted(t *testing.T) {
	needDocker(t)
	unshare, err := exec.LookPath("unshare")
	if err != nil {
		t.Fatal(err)
	}
	for _, engine := range []string{"original", "cold-2"} {
		t.Run(engine, func(t *testing.T) {
			bin := t.TempDir()
			if err := testfs.WriteProgram(filepath.Join(bin, "unshare"), []byte(unrecorded)); err != nil {
				t.Fatal(err)
			}
			env := []string{"REAL_UNSHARE=" + unshare, "PATH=" + bin + ":" + os.Getenv("PATH")}
			cmd, dir := warmCommand(t, env...)
			interrupt(t, cmd, filepath.Join(dir, "*", "e", engine, "s"), func(socket string) {
				if engine != "original" { // the other one is interrupted as it starts
					dumpStacks(t, socket)
				}
			})
		})
	}
}

// interrupt runs an example until a server has made its socket, prepares, and ends the example with SIGTERM.
func interrupt(t *testing.T, cmd *exec.Cmd, socket string, prepare func(socket string)) {
	t.Helper()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = time.Minute // until what it has started closes its output
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}

	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for sent := false; ; {
		select {
		case err := <-ended:
			t.Logf("%v: %s", err, out.String())
			if !sent || cmd.ProcessState.ExitCode() != 143 || !strings.Contains(out.String(), "Left behind: nothing") {
				t.Errorf("it ended with %v", err)
			}
			return
		case <-time.After(10 * time.Millisecond):
		}

		if found, _ := filepath.Glob(socket); !sent && len(found) == 1 {
			sent = true
			prepare(found[0])
			_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		}
	}
}

// dumpStacks makes the containerd of an engine write its stacks into its temporary directory, as dockerd does when it
// is slow to answer (libcontainerd/supervisor/remote_daemon.go).
func dumpStacks(t *testing.T, socket string) {
	t.Helper()
	waitUntil(t, "docker does not answer on "+socket, func() bool { // before that the signal would end containerd
		return exec.Command("docker", "--host", "unix://"+socket, "version").Run() == nil
	})

	pid, err := exec.Command("pgrep", "-f", "^dockerd .*unix://"+socket).Output()
	if err != nil {
		t.Fatalf("no dockerd has %s: %v", socket, err)
	}
	engine := strings.TrimSpace(string(pid))
	if err := exec.Command("pkill", "-USR1", "-x", "-P", engine, "containerd").Run(); err != nil {
		t.Fatalf("dockerd %s has no containerd: %v", engine, err)
	}

	files := filepath.Join("/proc", engine, "root/run/containerd/containerd.*.stacks.log")
	waitUntil(t, "there is no "+files, func() bool {
		found, _ := filepath.Glob(files)
		return len(found) > 0
	})
}

// killed starts an engine on the volume, and a container that never ends.
const killed = `
mkdir "$1"
unshare --mount --propagation slave --pid --fork --kill-child --mount-proc \
  sh -c 'mkdir -p /run/containerd && mount -t tmpfs none /run/containerd && TMPDIR=/run/containerd exec "$@"' sh \
  dockerd --data-root "$PANDO_MOUNT" --exec-root /run/containerd/docker --pidfile "$1/pid" --host "unix://$1/s" \
  --cgroup-parent "$2" --bridge=none --iptables=false >"$1/log" 2>&1 &
until docker -H "unix://$1/s" version >/dev/null 2>&1; do kill -0 $! || exit 1; sleep 0.05; done
tar -C "$3" -c . | docker -H "unix://$1/s" import - shell >/dev/null || exit 1
docker -H "unix://$1/s" run --detach --network none shell /bin/sleep 1000 >/dev/null || exit 1
echo running
wait
`

// TestDockerKilled kills pando, the engine and its container at once. gc finds everything that is left.
func TestDockerKilled(t *testing.T) {
	needDocker(t)
	dir := workDir(t)
	group := "pando-killed-" + strconv.Itoa(os.Getpid())
	t.Cleanup(func() { removeGroups(group) })
	env := []string{"PANDO_POOL=" + filepath.Join(dir, "pool")}
	must := func(args ...string) string {
		t.Helper()
		out, err := command(t, env, pando, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("pando %s: %v: %s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}

	source := filepath.Join(dir, "source")
	if err := os.MkdirAll(filepath.Join(source, "volumes"), 0o755); err != nil {
		t.Fatal(err)
	}

	must("init", "--size", "1G")
	must("golden", "import", "images", source, "--preset", "docker")

	// Start it in a process group of its own.
	cmd := command(t, env, pando, "run", "images", "--", "bash", "-c", killed, "bash", filepath.Join(dir, "e"), group,
		shellRoot(t))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}

	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}

	line := make([]byte, 8)
	_, err = stdout.Read(line)
	kerr := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	_ = cmd.Wait() // it was killed
	if err != nil || kerr != nil || string(line) != "running\n" {
		log, _ := os.ReadFile(filepath.Join(dir, "e/log"))
		t.Fatalf("no container runs: %q, %v, %v: %s", line, err, kerr, log)
	}

	waitForEnd(t, filepath.Join(dir, "e"))
	t.Log(must("gc"))
	if out := must("ls", "--json"); strings.TrimSpace(out) != "[]" {
		t.Errorf("volumes are left: %s", out)
	}

	if out := must("golden", "import", "images", source, "--preset", "docker", "--update", "-q"); out != "images@2\n" {
		t.Errorf("the next import: %s", out)
	}

	must("fsck")
	must("deinit", "--force")
}

// waitForEnd waits until no process has the directory in its command line: SIGKILL takes a moment.
func waitForEnd(t *testing.T, dir string) {
	t.Helper()
	waitUntil(t, "processes with "+dir+" still run", func() bool {
		files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
		return !slices.ContainsFunc(files, func(f string) bool {
			b, err := os.ReadFile(f)
			return err == nil && bytes.Contains(b, []byte(dir))
		})
	})
}

// waitUntil looks until something that other programs do is done, for a minute. The kernel reports neither the end of
// processes to those that did not start them, nor what happens in another mount namespace.
func waitUntil(t *testing.T, not string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(not)
		}
	}
}

// shellRoot makes the root directory of an image with a program that waits.
func shellRoot(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command("bash", "-ec", `
		mkdir bin; cp -L "$(type -P sleep)" bin
		ldd bin/sleep | grep -o '/[^ ):]*' | while read -r f; do install -D "$f" ".$f"; done`)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return dir
}

// workDir returns a directory that must be empty of mounts, devices and processes in the end. Its path is short enough
// for sockets below it.
func workDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "x")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	testfs.LeakCheck(t, dir)
	return dir
}

// command makes a command that is killed after a while.
func command(t *testing.T, env []string, name string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), append(env, "PANDO="+pando)...)
	return cmd
}

// warmCommand makes the command of the example with an image of 64 MiB, and the directory that it works in.
func warmCommand(t *testing.T, env ...string) (cmd *exec.Cmd, dir string) {
	t.Helper()
	source := t.TempDir()
	content := make([]byte, 64<<20)
	_, _ = rand.Read(content) // it never fails
	if err := os.WriteFile(filepath.Join(source, "file"), content, 0o644); err != nil {
		t.Fatal(err)
	}
	dir = workDir(t)
	return command(t, append(env, "WARM_SOURCE="+source, "WARM_DIR="+dir), "../../examples/docker-warm-start/run.sh"), dir
}

// removeGroups removes the control groups of containers that were killed.
func removeGroups(name string) {
	_ = exec.Command("find", "/sys/fs/cgroup", "-depth", "-type", "d", "-path", "*/"+name+"*", "-exec", "rmdir", "{}",
		"+").Run() // what is left are empty groups
}
