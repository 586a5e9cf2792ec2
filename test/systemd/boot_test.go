// Package systemd tests the units that the packages contain. A real systemd runs them, as process 1 of namespaces of
// its own.
package systemd

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/client"
	"pando/internal/testing/testfs"
)

var pando string // the program under test

// units is the directory of the units.
const units = "../../contrib/systemd"

func TestMain(m *testing.M) {
	os.Exit(testfs.WithProgram(&pando, m.Run))
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// machine is a system that systemd has booted.
type machine struct {
	t   *testing.T
	pid int    // of systemd, seen from the test
	dir string // what boot.sh takes
	c   *client.Client
}

// boot starts systemd with the units and the program, until the end of the test.
func boot(t *testing.T) *machine {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: systemd mounts filesystems: run the tests as root")
	}
	if _, err := exec.LookPath("systemctl"); err != nil {
		t.Skip("SKIPPED: there is no systemd here: run make deps")
	}

	// Lay out what it needs.
	m := &machine{t: t, dir: t.TempDir()}
	for _, d := range []string{"bin", "units", "lib", "sysusers"} {
		must(t, os.Mkdir(filepath.Join(m.dir, d), 0o755))
	}
	m.install(filepath.Join(m.dir, "bin"))
	for f, to := range map[string]string{"pando.service": "units/pando.service", "pando.socket": "units/pando.socket",
		"pando.sysusers": "sysusers/pando.conf"} {
		b, err := os.ReadFile(filepath.Join(units, f))
		must(t, err)
		must(t, os.WriteFile(filepath.Join(m.dir, to), b, 0o644))
	}

	// Boot.
	script, err := filepath.Abs("testdata/boot.sh")
	must(t, err)
	name := fmt.Sprintf("pando-test-%d", os.Getpid())
	cmd := exec.Command(script, m.dir, name)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC}
	must(t, cmd.Start())
	m.pid = cmd.Process.Pid
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // and with it all of its namespace
		<-ended
		m.removeGroups()
	})
	m.until("systemd has booted", func() bool {
		select {
		case <-ended:
			t.Fatalf("systemd did not boot: %v: %s", cmd.ProcessState, out.String())
		default:
		}
		said, _ := m.try("systemctl", "is-active", "basic.target")
		return said == "active"
	})

	m.c, err = client.New(client.Options{Socket: m.path("/run/pando/pando.sock")})
	must(t, err)
	t.Cleanup(m.c.Close)
	return m
}

// install puts the program into a directory, in place of one that may be running.
func (m *machine) install(dir string) {
	m.t.Helper()
	b, err := os.ReadFile(pando)
	must(m.t, err)
	temporary := filepath.Join(dir, ".pando.new")
	must(m.t, testfs.WriteProgram(temporary, b))
	must(m.t, os.Rename(temporary, filepath.Join(dir, "pando")))
}

// removeGroups removes the control groups that boot.sh has made and what systemd has made below them.
func (m *machine) removeGroups() {
	b, _ := os.ReadFile(filepath.Join(m.dir, "groups"))
	for _, top := range strings.Fields(string(b)) {
		var dirs []string
		_ = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		slices.Reverse(dirs)
		for _, d := range dirs {
			m.until("the group is empty", func() bool { err := syscall.Rmdir(d); return err == nil || err == syscall.ENOENT })
		}
	}
}

// path is a path of the machine, seen from the test.
func (m *machine) path(name string) string { return fmt.Sprintf("/proc/%d/root%s", m.pid, name) }

// try runs a command in the machine, and returns what it prints.
func (m *machine) try(args ...string) (string, error) {
	cmd := exec.Command("nsenter", append([]string{"--target", fmt.Sprint(m.pid), "--mount", "--pid", "--cgroup", "--"},
		args...)...)
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// run is try for commands that must succeed.
func (m *machine) run(args ...string) string {
	m.t.Helper()
	out, err := m.try(args...)
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(m.dir, "lib", "log"))
		m.t.Fatalf("%s: %v: %s\n%s", strings.Join(args, " "), err, out, log)
	}
	return out
}

// property returns a property of pando.service.
func (m *machine) property(name string) string {
	m.t.Helper()
	return m.run("systemctl", "show", "--value", "-p", name, "pando.service")
}

// override sets properties of pando.service until the machine ends.
func (m *machine) override(lines ...string) {
	m.t.Helper()
	dir := m.path("/run/systemd/system/pando.service.d")
	must(m.t, os.MkdirAll(dir, 0o755))
	must(m.t, os.WriteFile(filepath.Join(dir, "test.conf"), []byte("[Service]\n"+strings.Join(lines, "\n")+"\n"), 0o644))
	m.run("systemctl", "daemon-reload")
}

// until waits for something that happens soon.
func (m *machine) until(what string, happened func() bool) {
	m.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !happened(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			m.t.Fatalf("this did not happen in 30 s: %s", what)
		}
	}
}
