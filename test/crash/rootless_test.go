//go:build linux && (amd64 || arm64)

package crash

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"pando/internal/testing/testfs"
)

// ofUsers are the verbs of users without root whose work on overlays differs from that on copies.
var ofUsers = []operation{
	{name: "user-clone", command: func(*world) []string { return []string{"clone", "g", "v", "--overlay"} },
		prepare: func(w *world) { w.gone("v") },
		want:    func(before string) string { return before + "volume v from g@1 idle at \n" }},
	{name: "user-run", every: 2, all: true,
		command: func(*world) []string { return []string{"run", "g", "--", "/bin/sh", "-c", "echo x >a; mkdir d"} },
		prepare: func(*world) {},
		want:    func(before string) string { return before }},
	{name: "user-run-keep", every: 2,
		command: func(*world) []string { return []string{"run", "g", "--name", "v", "--keep", "--", "/bin/rm", "a"} },
		prepare: func(w *world) { w.gone("v") },
		want:    func(before string) string { return before + "volume v from g@1 idle at \n" }},
	{name: "user-shell", every: 2, all: true,
		command: func(*world) []string { return []string{"shell", "v", "--", "/bin/sh", "-c", "echo x >>a"} },
		prepare: func(w *world) { w.userOverlay("v") },
		want:    func(before string) string { return before }},
	{name: "user-snapshot", every: 2,
		command: func(*world) []string { return []string{"snapshot", "base2", "s"} },
		prepare: func(w *world) { w.userOverlay("base2"); w.noSnapshots("base2") },
		want:    beforeVolumes("snapshot base2@s clean\n")},
	{name: "user-flatten", every: 4,
		command: func(*world) []string { return []string{"flatten", "v", "--no-progress"} },
		prepare: func(w *world) { w.gone("v"); w.userOverlay("v") },
		want:    func(before string) string { return before }},
	{name: "user-destroy", every: 2,
		command: func(*world) []string { return []string{"destroy", "v"} },
		prepare: func(w *world) { w.userOverlay("v") },
		want:    func(before string) string { return without(before, "volume v ") }},
}

// userOverlay makes a volume that is an overlay in which a program has run, unless it is there.
func (w *world) userOverlay(name string) {
	w.t.Helper()
	if !strings.Contains(w.pando("ls", "-q"), name+"\n") {
		w.pando("clone", "g", name, "--overlay")
	}
	w.pando("shell", name, "--", "/bin/sh", "-c", "echo new >scribble; rm -f sub/b")
}

// aUser is an unused ID.
const aUser = 61235

// TestFaultAtEveryStepOfUser is TestFaultAtEveryStep for the overlays of a user who has no capabilities: it starts
// itself again as one.
func TestFaultAtEveryStepOfUser(t *testing.T) {
	if os.Geteuid() == 0 {
		asUser(t)
		return
	}

	k := kind{name: "plain", init: []string{"--driver", "plain"}, dir: func(t *testing.T) string {
		return filepath.Join(t.TempDir(), "pool")
	}}
	for _, op := range ofUsers {
		t.Run(op.name, func(t *testing.T) {
			w := newWorld(t, k)
			w.initPool()
			w.importGolden("g")
			w.pando("clone", "g", "base")
			w.pando("run", "g", "--", "/bin/true") // makes the template of overlays
			for _, f := range drawnFaults(t) {
				t.Run(f.name, func(t *testing.T) { w.sweep(t, op, f.plan) })
			}
			w.t = t
			w.pando("deinit", "--force")
			w.nothingLeft()
		})
	}
}

// asUser runs the test that calls it again, as a user.
func asUser(t *testing.T) {
	t.Helper()
	top, err := os.MkdirTemp("", "pando-user-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(top); err != nil {
			t.Error(err)
		}
	})

	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for from, to := range map[string]string{own: "test", pando: "pando"} {
		b, err := os.ReadFile(from)
		if err == nil {
			err = testfs.WriteProgram(filepath.Join(top, to), b)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	home := filepath.Join(top, "home")
	for _, err := range []error{os.Chmod(top, 0o755), os.Mkdir(home, 0o755), os.Chown(home, aUser, aUser)} {
		if err != nil {
			t.Fatal(err)
		}
	}

	pattern := flag.Lookup("test.run").Value.String()
	if !strings.Contains(pattern, "/") {
		pattern = "^" + t.Name() + "$"
	}

	cmd := exec.Command(filepath.Join(top, "test"), "-test.run="+pattern, "-test.v")
	cmd.Dir = home
	cmd.Env = append(os.Environ(), "HOME="+home, "TMPDIR="+home, "PANDO_TEST_BINARY="+filepath.Join(top, "pando"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: aUser, Gid: aUser}}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("as a user: %v", err)
	}
}
