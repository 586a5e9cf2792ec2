package cgroup_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"pando/internal/linux/cgroup"
)

// TestGroup: limits are set, a process enters, and everything goes away.
func TestGroup(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: control groups need root: run the tests as root")
	}

	name := "pando-test-" + strconv.Itoa(os.Getpid())
	g, err := cgroup.Plan(name, cgroup.Limits{MemoryBytes: 64 << 20, CPUs: 0.5, PIDs: 20})
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range g.Dirs {
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s exists before it is made", dir)
		}
	}
	if err := g.Make(); err != nil {
		t.Fatal(err)
	}
	if err := g.Make(); err == nil {
		t.Error("it was made twice")
	}
	if err := g.Make(); err != nil { // the error before has removed it
		t.Fatal(err)
	}

	want := map[string]string{"pids.max": "20"}
	if g.V2 {
		want["memory.max"], want["cpu.max"] = "67108864", "50000 100000"
	} else {
		want["memory.limit_in_bytes"], want["cpu.cfs_quota_us"] = "67108864", "50000"
	}
	for file, value := range want {
		found := ""
		for _, dir := range g.Dirs {
			if b, err := os.ReadFile(filepath.Join(dir, file)); err == nil {
				found = strings.TrimSpace(string(b))
			}
		}
		if found != value {
			t.Errorf("%s: %q, want %q", file, found, value)
		}
	}

	// A process that is still in the group is killed.
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := g.Enter(cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	waited := make(chan error, 1)
	go func() { waited <- cmd.Wait() }()
	if err := g.Remove(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-waited; err == nil || err.Error() != "signal: killed" {
		t.Errorf("%v", err)
	}
	for _, dir := range g.Dirs {
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s is left", dir)
		}
	}
	if err := g.Remove(t.Context()); err != nil {
		t.Errorf("a second time: %v", err)
	}
}
