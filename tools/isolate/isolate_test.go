//go:build linux

package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/testing/testfs"
)

// isolated runs a script as if it were a test binary, and returns what it printed, its exit status and its usage.
func isolated(t *testing.T, script string) (out string, status int, u usage) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: namespaces need root: run the tests as root")
	}
	top := t.TempDir()
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
