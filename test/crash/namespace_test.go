//go:build linux && (amd64 || arm64)

package crash

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
)

// These tests are not parallel: their namespaces keep copies of all mounts.

// needNamespaces makes a pool with a golden.
func needNamespaces(t *testing.T, k kind) *world {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mount namespaces need root: run the tests as root")
	}
	w := newWorld(t, k)
	w.initPool()
	w.importGolden("g")
	return w
}

func (w *world) mountpoint(volume string) string { return filepath.Join(w.dir, "mnt", volume) }

// usable fails unless a volume is mounted at its place, and can be written.
func (w *world) usable(volume string) {
	w.t.Helper()
	file := filepath.Join(w.mountpoint(volume), "written")
	if err := os.WriteFile(file, []byte(volume), 0o600); err != nil {
		w.t.Errorf("%s is not usable any more: %v", volume, err)
		return
	}
	if err := os.Remove(file); err != nil {
		w.t.Error(err)
	}
	w.sameTree(w.source, w.mountpoint(volume))
}

// otherBoot runs a command in another mount namespace with another boot ID.
func (w *world) otherBoot(args ...string) (string, error) {
	out, err := testfs.OtherBoot(w.t, pando, append([]string{"--pool", w.dir}, args...)...).CombinedOutput()
	return string(out), err
}

// keepCopies starts a process in a mount namespace that keeps a copy of every mount, whatever is
// unmounted here.
func (w *world) keepCopies() (end func()) {
	w.t.Helper()
	cmd := exec.Command("unshare", "-m", "--propagation", "private", "sh", "-c", "echo ready && read -r line")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	end = sync.OnceFunc(func() {
		stdin.Close()
		_ = cmd.Wait() // read says that it read nothing
	})
	w.t.Cleanup(end)
	if _, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
		w.t.Fatal(err)
	}
	return end
}

// TestOtherBootID: a container that has another boot ID shares the pool. What the host has
// mounted is neither destroyed nor forgotten there, and neither side takes the other's volumes
// for those of an earlier boot.
func TestOtherBootID(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			w := needNamespaces(t, k)
			w.pando("clone", "g", "base", "--mount")
			w.pando("clone", "g", "eph", "--mount", "--ephemeral")
			w.pando("clone", "g", "idle", "--ephemeral")
			open, err := os.Open(filepath.Join(w.mountpoint("eph"), "a"))
			if err != nil {
				t.Fatal(err)
			}
			defer open.Close()
			before := w.state()

			for _, args := range [][]string{{"ls"}, {"gc"}, {"fsck", "--repair", "--no-progress"}} {
				if out, err := w.otherBoot(args...); err != nil {
					t.Fatalf("pando %v there: %v: %s", args, err, out)
				}
				if after := w.peek(); after != before {
					t.Fatalf("after pando %v there:\n%sbefore:\n%s", args, after, before)
				}
			}
			refused := [][]string{{"destroy", "base", "eph"}, {"umount", "base"}, {"mount", "base"},
				{"rewind", "base", "s", "--detach"}}
			w.pando("snapshot", "base", "s")
			before = w.peek()
			for _, args := range refused {
				if out, err := w.otherBoot(args...); err == nil || !strings.Contains(out, "in use") {
					t.Errorf("pando %v there: %v: %s", args, err, out)
				}
			}
			w.pando("gc") // the host's own is harmless too
			if after := w.state(); after != before {
				t.Fatalf("after what was refused there:\n%sbefore:\n%s", after, before)
			}
			w.usable("base")
			w.usable("eph")

			// What is made there outlives its namespace, and is not of an earlier boot here.
			if out, err := w.otherBoot("clone", "g", "there", "--ephemeral"); err != nil {
				t.Fatalf("clone there: %v: %s", err, out)
			}
			w.pando("gc")
			if ls := w.pando("ls", "-q"); !strings.Contains(ls, "there\n") {
				t.Errorf("an ephemeral volume of the other boot ID was destroyed here: %s", ls)
			}
			open.Close()
			w.pando("destroy", "there", "idle", "eph", "base")
			w.check()
			w.pando("deinit", "--force")
			w.nothingLeft()
		})
	}
}

// TestRefusedKeepsMount: another mount namespace has copies of the mounts. Whatever would take
// them away is refused, and they stay as they are.
func TestRefusedKeepsMount(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			w := needNamespaces(t, k)
			volumes := []string{"base1", "base2", "base3", "expired"}
			for _, v := range volumes[:3] {
				w.pando("clone", "g", v, "--mount")
				w.pando("snapshot", v, "s")
			}
			w.pando("clone", "g", "expired", "--mount", "--ttl", "1h")
			w.pando("clone", "g", "free", "--mount")
			end := w.keepCopies()
			w.sql("UPDATE objects SET expires_at = 1 WHERE name = 'expired'")
			before := w.state()

			var wg sync.WaitGroup
			for _, args := range [][]string{{"umount", "base1"}, {"destroy", "base2"}, {"rewind", "base3", "s", "--detach"},
				{"ls"}, {"gc"}} {
				wg.Go(func() {
					_, err := w.tryProcess(args...)
					if looks := len(args) == 1; looks == (err != nil) || !looks &&
						!strings.Contains(err.Error(), "in mount namespace") {
						t.Errorf("pando %v: %v", args, err)
					}
				})
			}
			wg.Wait()
			if after := w.state(); after != before {
				t.Errorf("after what was refused:\n%sbefore:\n%s", after, before)
			}
			for _, v := range volumes {
				w.usable(v)
			}

			// Killed while the mount is down, it leaves the volume in use, to be mounted when the copies end.
			if k.name == "reflink" {
				w.dieBefore(func(s faulttest.Step) bool { return s.Name == "move_mount" }, "umount", "base1")
				for _, args := range [][]string{{"destroy", "base1"}, {"gc"}} {
					if _, err := w.try(args...); args[0] == "destroy" && err == nil {
						t.Error("destroyed although another namespace has a copy")
					}
				}
				if after := w.state(); after != before {
					t.Errorf("after a kill:\n%sbefore:\n%s", after, before)
				}
			}

			// They are found to be in use wherever the host's own mount is, and free when the copies end.
			end()
			w.pando("mount", "base1")
			w.usable("base1")
			w.pando("umount", "base1")
			w.pando("rewind", "base3", "s", "--detach")
			w.pando("destroy", "base*", "free")
			if ls := w.pando("ls", "-q"); ls != "" {
				t.Errorf("the copies have ended, but there is %s", ls)
			}
			w.check()
			w.pando("deinit", "--force")
			w.nothingLeft()
		})
	}
}

// TestRunUnderOtherBootID: a pando that lives in another PID namespace, with another boot ID, is not
// taken for dead, whatever its number says here.
func TestRunUnderOtherBootID(t *testing.T) {
	k := kinds[len(kinds)-1]
	w := needNamespaces(t, k)
	other := testfs.OtherBoot(t, pando, "--pool", w.dir, "run", "g", "--", "sh", "-c", "echo ready; read -r line; cat a")
	cmd := exec.Command("unshare", append([]string{"--pid", "--fork"}, other.Args...)...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	out := bufio.NewReader(stdout)
	if line, err := out.ReadString('\n'); line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
	w.pando("gc")
	if ls := w.pando("ls", "-q"); !strings.Contains(ls, "run-") {
		t.Errorf("the volume of a living run is gone: %q", ls)
	}
	if out, err := w.otherBoot("gc"); err != nil {
		t.Errorf("gc under a third boot ID: %v: %s", err, out)
	}
	if _, err := stdin.Write([]byte("go on\n")); err != nil {
		t.Fatal(err)
	}
	rest, _ := io.ReadAll(out)
	if err := cmd.Wait(); err != nil || string(rest) != "content of a" {
		t.Errorf("the run came to %q, %v", rest, err)
	}
	if ls := w.pando("ls", "-q"); ls != "" {
		t.Errorf("it is over, but there is %q", ls)
	}
	w.check()
	w.pando("deinit", "--force")
	w.nothingLeft()
}
