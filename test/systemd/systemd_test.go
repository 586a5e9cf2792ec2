package systemd

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"pando/client"
)

// TestUnitsAreGood: systemd-analyze finds no mistake in the units, and how much they leave open is known.
func TestUnitsAreGood(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("SKIPPED: there is no systemd here: run make deps")
	}
	dir := t.TempDir()
	service := filepath.Join(dir, "pando.service")
	for _, f := range []string{"pando.service", "pando.socket"} {
		b, err := os.ReadFile(filepath.Join(units, f))
		must(t, err)
		b = bytes.ReplaceAll(b, []byte("/usr/bin/pando"), []byte(pando))
		must(t, os.WriteFile(filepath.Join(dir, f), b, 0o644))
	}
	out, err := exec.Command("systemd-analyze", "verify", "--man=no", service, filepath.Join(dir, "pando.socket")).
		CombinedOutput()
	if err != nil || len(out) > 0 {
		t.Errorf("verify: %v: %s", err, out)
	}

	// Half of the points are for settings that no service can have that mounts for the host.
	out, err = exec.Command("systemd-analyze", "security", "--offline=true", "--threshold=70", service).CombinedOutput()
	if err != nil {
		t.Errorf("security: %v: %s", err, out)
	}
}

// TestService follows the service through its life under systemd: the socket starts it, what it mounts is in process
// 1's namespace, and mounts and processes that it has started survive its end.
func TestService(t *testing.T) {
	m := boot(t)
	ctx := t.Context()
	m.run(script(t, "installed"), "configure")
	m.run("pando", "init", "-q", "--size", "1G")
	m.override("StandardError=append:/var/lib/log")
	m.run("systemctl", "start", "pando.socket")

	t.Run("socket", func(t *testing.T) {
		if got := m.run("stat", "-c", "%U:%G %a", "/run/pando/pando.sock", "/run/pando"); got !=
			"root:pando 660\nroot:root 755" {
			t.Errorf("the socket and its directory: %s", got)
		}
		if m.property("ActiveState") != "inactive" {
			t.Error("the service runs, and nobody has connected")
		}
		m.importGolden("web")
		if m.property("ActiveState") != "active" || !strings.HasPrefix(m.property("StatusText"), "serving /var/lib/pando") {
			t.Errorf("%s: %s", m.property("ActiveState"), m.property("StatusText"))
		}
	})

	t.Run("mounts are the host's", func(t *testing.T) {
		_, err := m.c.Clone(ctx, client.CloneRequest{From: "web", Name: "job", Make: client.Make{Mount: true}})
		must(t, err)
		m.checkMounted("job")
		main := m.mainPID()
		for _, ns := range []string{"mnt", "user", "net", "pid"} {
			if a, b := m.namespace("1", ns), m.namespace(main, ns); a != b {
				t.Errorf("the service has a namespace of its own: %s is %s, and %s of process 1", ns, b, a)
			}
		}
		state := m.run("cat", "/proc/"+main+"/status")
		for _, line := range []string{"NoNewPrivs:\t1", "Seccomp:\t2"} {
			if !strings.Contains(state, line) {
				t.Errorf("not hardened: no line %q", line)
			}
		}
	})

	t.Run("verbs", m.verbs)

	t.Run("reload", func(t *testing.T) {
		before := m.mainPID()
		m.run("systemctl", "reload", "pando.service")
		m.until("the service has reloaded", func() bool { return m.property("StatusText") == "has read its files again" })
		if after := m.mainPID(); after != before {
			t.Errorf("the reload has ended the process: %s, then %s", before, after)
		}
	})

	t.Run("update", func(t *testing.T) {
		before := m.mainPID()
		m.install(m.path("/usr/bin"))
		m.run(script(t, "installed"), "configure", "1.0")
		if m.mainPID() == before {
			t.Error("the process is the same")
		}
		m.checkMounted("job")
	})

	t.Run("kill", func(t *testing.T) {
		before := m.mainPID()
		m.run("kill", "-KILL", before)
		m.until("systemd has started it again", func() bool {
			return m.mainPID() != before && m.property("ActiveState") == "active"
		})
		m.checkMounted("job")
	})

	t.Run("watchdog", func(t *testing.T) {
		m.override("StandardError=append:/var/lib/log", "WatchdogSec=1s")
		m.run("systemctl", "restart", "pando.service")
		before := m.mainPID()
		m.until("the service has sent a sign of life", func() bool {
			return m.property("WatchdogTimestampMonotonic") != m.property("ExecMainStartTimestampMonotonic") &&
				strings.HasPrefix(m.property("StatusText"), "serving /var/lib/pando: 0 operations")
		})
		m.run("kill", "-STOP", before)
		m.until("systemd has replaced a service that gives no sign of life", func() bool {
			return m.mainPID() != before && m.property("ActiveState") == "active"
		})
	})

	t.Run("stop", m.stop)
	m.run("pando", "destroy", "job")
	m.run("pando", "deinit", "--force")
}

// verbs uses what could break under the restrictions of the unit.
func (m *machine) verbs(t *testing.T) {
	ctx := t.Context()
	_, err := m.c.Snapshot(ctx, "job", client.SnapshotRequest{Name: "first"})
	must(t, err)
	must(t, os.WriteFile(m.path("/var/lib/pando/mnt/job/new"), []byte("new"), 0o644))
	owned, err := m.c.Clone(ctx, client.CloneRequest{From: "web", Name: "owned", Make: client.Make{Mount: true,
		Owner: &client.Owner{UID: 1000, GID: 1000}}})
	must(t, err)
	var st syscall.Stat_t
	must(t, syscall.Stat(m.path(owned.Mountpoint+"/file"), &st))
	if st.Uid != 1000 {
		t.Errorf("a file of the owner belongs to %d", st.Uid)
	}
	info, err := os.Stat(m.path(owned.Mountpoint + "/program"))
	must(t, err)
	if info.Mode()&fs.ModeSetuid == 0 {
		t.Errorf("the import has lost the set-user-ID bit: %v", info.Mode())
	}
	_, err = m.c.Unmount(ctx, "owned") // growing a mounted ext4 takes a capability that containers lack
	must(t, err)
	_, err = m.c.Resize(ctx, "owned", 96<<20)
	must(t, err)
	must(t, m.c.Destroy(ctx, "owned", ""))

	for name, begin := range map[string]func() (*client.Operation, error){
		"publish": func() (*client.Operation, error) {
			return m.c.Publish(ctx, "next", client.PublishRequest{Volume: "job"})
		},
		"doctor": func() (*client.Operation, error) { return m.c.Doctor(ctx) },
		"fsck":   func() (*client.Operation, error) { return m.c.Fsck(ctx, nil, false) },
		"gc":     func() (*client.Operation, error) { return m.c.GC(ctx) },
	} {
		op, err := begin()
		if err == nil {
			op, err = m.c.Wait(ctx, op.ID, nil)
		}
		if err != nil || op.State != "done" {
			t.Errorf("%s: %v, %+v", name, err, op)
		}
	}
	r, err := m.c.Export(ctx, "next", "")
	must(t, err)
	defer r.Close()
	if n, err := io.Copy(io.Discard, r); err != nil || n == 0 {
		t.Errorf("export: %d bytes, %v", n, err)
	}
}

// stop ends the service and its socket.
func (m *machine) stop(t *testing.T) {
	// A server of FUSE or a process that thaws is like this one.
	group := m.property("ControlGroup")
	top := "/sys/fs/cgroup"
	for _, hierarchy := range []string{"/systemd", "/unified"} { // of version 1, and of both at once
		if _, err := os.Stat(m.path("/sys/fs/cgroup" + hierarchy)); err == nil {
			top = "/sys/fs/cgroup" + hierarchy
		}
	}
	m.run("sh", "-c", "echo $$ >"+top+group+"/cgroup.procs && { setsid sleep 987 >/dev/null 2>&1 & }")
	m.until("it is in the group", func() bool {
		return strings.Count(m.run("cat", top+group+"/cgroup.procs"), "\n") > 0
	})

	m.run("systemctl", "enable", "pando.service")
	if got := m.run("systemctl", "is-enabled", "pando.service", "pando.socket"); got != "enabled\nenabled" {
		t.Errorf("enabled: %q", got)
	}
	m.run(script(t, "remove"), "upgrade")
	if m.property("ActiveState") != "active" {
		t.Error("an update has stopped the service before the new program is there")
	}
	m.run(script(t, "remove"), "remove")
	if got, _ := m.try("systemctl", "is-enabled", "pando.service", "pando.socket"); got != "disabled\ndisabled" {
		t.Errorf("after the removal: %q", got)
	}
	if _, err := os.Lstat(m.path("/run/pando/pando.sock")); !os.IsNotExist(err) {
		t.Errorf("the socket is still there: %v", err)
	}
	if m.property("Result") != "success" {
		t.Errorf("the end was: %s", m.property("Result"))
	}
	if _, err := m.try("pkill", "-x", "-f", "sleep 987"); err != nil {
		t.Error("a process that the service had started did not survive it")
	}
	m.checkMounted("job")
}

// checkMounted checks that a volume with the golden's files is mounted in the namespace of process 1.
func (m *machine) checkMounted(name string) {
	m.t.Helper()
	at := "/var/lib/pando/mnt/" + name
	if !strings.Contains(m.run("cat", "/proc/1/mountinfo"), " "+at+" ") {
		m.t.Errorf("process 1 has no mount %s", at)
	}
	if b, err := os.ReadFile(m.path(at + "/file")); err != nil || string(b) != "v1" {
		m.t.Errorf("%s: %q, %v", at, b, err)
	}
}

func (m *machine) mainPID() string { return m.property("MainPID") }

func (m *machine) namespace(pid, name string) string {
	m.t.Helper()
	return m.run("readlink", "/proc/"+pid+"/ns/"+name)
}

// importGolden imports a small archive through the service.
func (m *machine) importGolden(name string) {
	m.t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range []tar.Header{{Name: "file", Mode: 0o644}, {Name: "program", Mode: 0o4755}} {
		f.Size = 2
		must(m.t, w.WriteHeader(&f))
		_, err := w.Write([]byte("v1"))
		must(m.t, err)
	}
	must(m.t, w.Close())
	_, err := m.c.Import(context.Background(), name, &b, client.ImportOptions{SizeBytes: 64 << 20})
	must(m.t, err)
}

// script returns the path of a script of the packages.
func script(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("../../scripts/package", name+".sh"))
	must(t, err)
	return path
}
