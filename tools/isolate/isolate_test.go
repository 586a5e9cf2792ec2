//go:build linux

package main

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/testing/testfs"
)

// isolatedCommand is a command that runs a script as if it were a test binary, with its files below top.
func isolatedCommand(t *testing.T, top, script string) *exec.Cmd {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: namespaces need root: run the tests as root")
	}
	isolate := filepath.Join(top, "isolate")
	if text, err := exec.Command("go", "build", "-buildvcs=false", "-o", isolate, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	binary := filepath.Join(top, "test")
	if err := testfs.WriteProgram(binary, []byte("#!/bin/bash\n"+script)); err != nil {
		t.Fatal(err)
	}

	cmd := exec.Command(isolate, binary)
	cmd.Env = append(os.Environ(), "PANDO_TEST_USAGE="+filepath.Join(top, "usage"), "TMPDIR="+top,
		"PANDO_TEST_PATIENCE=200ms")
	return cmd
}

// isolated runs a script, and returns what it printed, its exit status and its usage.
func isolated(t *testing.T, script string) (out string, status int, u usage) {
	t.Helper()
	top := t.TempDir()
	cmd := isolatedCommand(t, top, script)
	text, _ := cmd.CombinedOutput()
	line, err := os.ReadFile(filepath.Join(top, "usage"))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if err := json.Unmarshal(line, &u); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(top, "pando-*")); len(left) > 0 {
		t.Errorf("LEAK: %v", left)
	}
	return string(text), cmd.ProcessState.ExitCode(), u
}

func TestIsolated(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		status int
		says   []string
	}{
		"namespaces": {`findmnt -n -o FSTYPE -T "$TMPDIR"; tr '\0' ' ' </proc/1/cmdline; ls /sys/class/net`,
			0, []string{"ext4", "exe", "lo"}},
		"status":      {`exit 7`, 7, nil},
		"signal":      {`kill -SEGV $$`, 128 + 11, nil},
		"file":        {`touch "$TMPDIR/left"`, 1, []string{"LEAK: file ", "/left"}},
		"mount":       {`mount -t tmpfs tmpfs /mnt`, 1, []string{"LEAK: tmpfs mounted at /mnt"}},
		"mount below": {`mkdir "$TMPDIR/m"; mount -t tmpfs tmpfs "$TMPDIR/m"`, 1, []string{"LEAK: tmpfs mounted at /"}},
		"loop device": {`truncate -s 1M "$TMPDIR/left-behind-loop"; losetup -f "$TMPDIR/left-behind-loop"`, 1,
			[]string{"LEAK: loop"}},
		"process":      {`sleep 1000 & disown`, 1, []string{"LEAK: process ", "sleep 1000"}},
		"leak, status": {`touch "$TMPDIR/left"; exit 3`, 3, []string{"LEAK: file "}},
	} {
		t.Run(name, func(t *testing.T) {
			out, status, u := isolated(t, c.script)
			if status != c.status {
				t.Errorf("exit status %d, want %d", status, c.status)
			}
			for _, want := range c.says {
				if !strings.Contains(out, want) {
					t.Errorf("%q is not in %q", want, out)
				}
			}
			if c.says == nil && out != "" {
				t.Errorf("it says %q", out)
			}
			if u.Package != "tools/isolate" || u.WallSeconds <= 0 {
				t.Errorf("usage %+v", u)
			}
		})
	}
	// Of a device that lost its mount namespace the kernel shows the end of the path only.
	if loops, _ := exec.Command("losetup", "-a").Output(); strings.Contains(string(loops), "left-behind-loop") {
		t.Errorf("LEAK: %s", loops)
	}
}

// TestStaleDirectory: what a killed run has left is not in the way of the next.
func TestStaleDirectory(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	first, err := makeDir()
	if err != nil {
		t.Fatal(err)
	}
	second, err := makeDir()
	if err != nil || second == first {
		t.Errorf("made %s, and then %s, %v", first, second, err)
	}
}

// TestHostMounts: mounts of the host that the tests do not need are not held by the namespace.
func TestHostMounts(t *testing.T) {
	out, _, _ := isolated(t, `cat /proc/self/mountinfo`)
	if !strings.Contains(out, " / ") || !strings.Contains(out, " /proc ") {
		t.Errorf("a system without its mounts:\n%s", out)
	}
	host, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(host)) {
		point := strings.Fields(line)[4]
		if strings.HasPrefix(point, "/mnt/") && strings.Contains(out, " "+point+" ") {
			t.Errorf("%s is held", point)
		}
	}
}

// TestDeadline: a binary gets no more time than is left.
func TestDeadline(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	for _, c := range []struct{ args, deadline, want string }{
		{"./x.test -test.timeout=15m0s", "", "./x.test -test.timeout=15m0s"},
		{"./x.test -test.timeout=15m0s -test.v", "1000660", "./x.test -test.timeout=10m0s -test.v"},
		{"./x.test -test.timeout=15m0s", "1009999", "./x.test -test.timeout=15m0s"},
		{"./x.test -test.timeout=0", "1000660", "./x.test -test.timeout=10m0s"},
		{"./x.test", "1000660", "./x.test -test.timeout=10m0s"},
		{"./x.test -test.timeout=15m0s", "999999", "./x.test -test.timeout=1s"},
	} {
		got, err := withDeadline(strings.Fields(c.args), c.deadline, now)
		if err != nil || strings.Join(got, " ") != c.want {
			t.Errorf("%q until %s: %q, %v; want %q", c.args, c.deadline, got, err, c.want)
		}
	}
	if _, err := withDeadline(nil, "soon", now); err == nil {
		t.Error("a deadline that is not a number")
	}
}

// TestAskedWhereItIs: the binary gets a SIGQUIT that is sent to the process that stands in the directory of those that
// run, and what it starts knows nothing of that directory.
func TestAskedWhereItIs(t *testing.T) {
	top := t.TempDir()
	running := filepath.Join(top, "running")
	if err := os.Mkdir(running, 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := isolatedCommand(t, top, `trap 'echo "asked $PANDO_TEST_RUNNING"; exit 3' QUIT
echo ready
while :; do sleep 0.1; done`) // bash fails to run a trap while it parses a process substitution
	cmd.Env = append(cmd.Env, "PANDO_TEST_RUNNING="+running)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said := bufio.NewScanner(out)
	said.Scan()

	names, err := filepath.Glob(filepath.Join(running, "*"))
	if err != nil || len(names) != 1 || filepath.Base(names[0]) != strconv.Itoa(cmd.Process.Pid) {
		t.Fatalf("in the directory: %q, %v; want %d", names, err, cmd.Process.Pid)
	}
	if err := cmd.Process.Signal(syscall.SIGQUIT); err != nil {
		t.Fatal(err)
	}
	said.Scan()
	if got := said.Text(); got != "asked " {
		t.Errorf("it says %q", got)
	}
	_ = cmd.Wait() // its status says how it went
	if cmd.ProcessState.ExitCode() != 3 {
		t.Errorf("%v", cmd.ProcessState)
	}
	if names, _ := filepath.Glob(filepath.Join(running, "*")); len(names) > 0 {
		t.Errorf("LEAK: %q", names)
	}
}
