//go:build linux

package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
)

// frozen is a run with all that outlives processes: filesystems that are mounted and frozen, a loop device that does
// not detach itself, and processes, one in a session of its own. NAME is in the name of every file behind a loop
// device.
const frozen = `
cd "$TMPDIR"
setsid sleep 1000.NAME & disown
for fs in ext4 btrfs; do
  echo $fs; mkdir $fs; truncate -s 200M NAME-$fs; mkfs.$fs -q NAME-$fs >/dev/null 2>&1
  echo made; mount -o loop NAME-$fs $fs; echo mounted; fsfreeze -f $fs
done
truncate -s 1M NAME-own; losetup -f NAME-own; echo done
sleep 1000.NAME`

// TestKilledRun kills a run at a moment drawn at random, in each way in which runs are killed. Nothing of it stays: no
// process, no loop device, hence no mount, and no directory.
func TestKilledRun(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: namespaces need root: run the tests as root")
	}
	isolate := filepath.Join(t.TempDir(), "isolate")
	if text, err := exec.Command("go", "build", "-buildvcs=false", "-o", isolate, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	for name, kill := range map[string]func(parent, isolate int) error{
		"killed":        func(_, isolate int) error { return syscall.Kill(isolate, syscall.SIGKILL) },
		"terminated":    func(_, isolate int) error { return syscall.Kill(isolate, syscall.SIGTERM) },
		"parent killed": func(parent, _ int) error { return syscall.Kill(parent, syscall.SIGKILL) },
	} {
		t.Run(name, func(t *testing.T) {
			steps := 1 + faulttest.Draw(t, 7)
			t.Logf("it is killed after line %d", steps)
			killedAfter(t, isolate, steps, kill)
		})
	}
}

// killedAfter kills a run when it has printed some lines.
func killedAfter(t *testing.T, isolate string, lines int, kill func(parent, isolate int) error) {
	top := t.TempDir()
	word := fmt.Sprintf("%d77%d", os.Getpid(), time.Now().UnixNano()%1e9)
	binary := filepath.Join(top, "test")
	if err := testfs.WriteProgram(binary, []byte("#!/bin/bash\n"+strings.ReplaceAll(frozen, "NAME", word))); err != nil {
		t.Fatal(err)
	}
	// A parent that waits for it, as go test does, and says which process it is.
	cmd := exec.Command("bash", "-c", `"$@" & echo $!; wait`, "parent", isolate, binary)
	cmd.Env = append(os.Environ(), "TMPDIR="+top, "PANDO_TEST_PATIENCE=5s")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said := bufio.NewScanner(out)
	var pid int
	for i := 0; i <= lines && said.Scan(); i++ {
		if i == 0 {
			if _, err := fmt.Sscan(said.Text(), &pid); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := kill(cmd.Process.Pid, pid); err != nil {
		t.Fatal(err)
	}
	for said.Scan() { // until nobody has the pipe
	}
	_ = cmd.Wait() // it was killed

	var left []string
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if left = leftOf(t, word, top); len(left) == 0 {
			return
		}
	}
	t.Errorf("LEAK: %v", left)
}

// leftOf lists processes and loop devices with a word in them, and directories of isolate.
func leftOf(t *testing.T, word, top string) (left []string) {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(top, "pando-*"))
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range append(files, processes...) {
		if b, err := os.ReadFile(path); err == nil && strings.Contains(string(b), word) {
			found = append(found, path+" "+strings.ReplaceAll(strings.TrimSpace(string(b)), "\x00", " "))
		}
	}
	return found
}
