//go:build linux && (amd64 || arm64)

package crash

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/testing/faulttest"

	"golang.org/x/sys/unix"
)

// live is a directory of a live system, which a volume takes the place of.
func (w *world) live() string { return filepath.Join(filepath.Dir(w.source), "live") }

func (w *world) adoptArgs() []string {
	return append([]string{"golden", "import", "g2", w.live(), "--no-progress", "--adopt", "--replace"}, w.kind.size...)
}

func (w *world) asides() []string {
	w.t.Helper()
	found, err := filepath.Glob(w.live() + ".pando-old-*")
	if err != nil {
		w.t.Fatal(err)
	}
	return found
}

// prepareLive makes the live directory, or puts it back where it was.
func (w *world) prepareLive() {
	w.t.Helper()
	w.gone("g2-live")
	w.goldenGone("g2")
	if _, err := os.Lstat(w.live()); err != nil {
		w.write(w.live())
		if err := os.Chmod(w.live(), 0o700); err != nil {
			w.t.Fatal(err)
		}
	}
	for _, aside := range w.asides() {
		// Fails if there is something in it: then nothing was replaced.
		if err := unix.Rmdir(w.live()); err != nil {
			w.t.Fatalf("%s is there, but so is %s: %v", aside, w.live(), err)
		}
		if err := os.Rename(aside, w.live()); err != nil {
			w.t.Fatal(err)
		}
	}
	w.checkLive()
}

// checkLive: whatever happened, the live directory has its content, and is not
// open to others.
func (w *world) checkLive() {
	w.t.Helper()
	for name, want := range map[string]string{"a": "content of a", "sub/link": "content of a",
		"sub/b": strings.Repeat("content of b ", 1000)} {
		if b, err := os.ReadFile(filepath.Join(w.live(), name)); err != nil || string(b) != want {
			w.t.Errorf("%s/%s is %q, %v", w.live(), name, b, err)
		}
	}
	if st, err := os.Stat(w.live()); err != nil || st.Mode().Perm() != 0o700 {
		w.t.Errorf("%s: %v, %v", w.live(), st.Mode(), err)
	}
}

// checkAsides: there is an old directory, whole, if the live one is a volume, and
// else none.
func (w *world) checkAsides() {
	w.t.Helper()
	asides := w.asides()
	want := 0
	if isMounted(w.t, w.live()) {
		want = 1
	}
	if len(asides) != want {
		w.t.Errorf("LEAK: %d old directories: %v, wanted %d", len(asides), asides, want)
	}
	for _, a := range asides {
		if b, err := os.ReadFile(filepath.Join(a, "sub", "b")); err != nil || len(b) != 13000 {
			w.t.Errorf("%s has not the old content: %d bytes, %v", a, len(b), err)
		}
	}
}

// swap is the step that exchanges the directory with the volume.
func (w *world) swap(s faulttest.Step) bool {
	return s.Name == "renameat2" && strings.HasSuffix(s.Detail, " -> "+w.live())
}

// dieBefore runs a command and kills it before the first step that match accepts.
func (w *world) dieBefore(match func(faulttest.Step) bool, args ...string) {
	w.t.Helper()
	if res := w.trace(faulttest.Plan{Mode: faulttest.KillBefore, Match: match}, args...); !res.Fired {
		w.t.Fatalf("pando %s made no such step: %s", strings.Join(args, " "), res.Stderr)
	}
}

// needAdopt makes a world whose pool can be adopted into.
func needAdopt(t *testing.T, k kind) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	w := newWorld(t, k)
	w.initPool()
	t.Cleanup(func() {
		w.t = t
		w.pando("deinit", "--force")
		w.nothingLeft()
	})
	return w
}

// TestKillInRecoveryOfAdopt kills adopt on either side of the exchange, and then
// the command that cleans up behind it, at every step.
func TestKillInRecoveryOfAdopt(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			w := needAdopt(t, k)
			golden := "golden g2@1 of 1\n"
			for _, c := range []struct {
				name string
				die  func()
				want string
			}{
				{"before the exchange", func() { w.dieBefore(w.swap, w.adoptArgs()...) }, golden},
				{"after it", func() {
					w.dieAt(w.swap, w.adoptArgs()...)
				}, golden + "volume g2-live from g2@1 mounted at " + w.live() + "\n"},
			} {
				t.Run(c.name, func(t *testing.T) {
					w.t = t
					// Each step costs an adoption; taking a volume back is swept elsewhere.
					w.sweepOf(faulttest.Plan{Mode: faulttest.KillBefore}, 2).Each(t, func(p faulttest.Plan) faulttest.Result {
						w.prepareLive()
						c.die()
						return w.trace(p, "ls")
					}, func(faulttest.Result) {
						w.checkLive()
						if s := w.state(); s != c.want {
							t.Errorf("it came to:\n%swanted:\n%s", s, c.want)
						}
						w.checkLive()
						w.check()
					})
					w.prepareLive()
				})
			}
		})
	}
}

// TestRebootInAdopt: the power goes on either side of the exchange. The volume
// is kept if it had taken the place of the directory, and only then. It is not parallel: while another test's process
// has a mount namespace of its own, as it has to exchange directories or to mount overlays, a copy of this mount in it
// keeps the volume, which no reboot leaves.
func TestRebootInAdopt(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			w := needAdopt(t, k)
			golden := "golden g2@1 of 1\n"
			cut := func(at string) { // what a reboot does to a mount
				if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
					t.Fatal(err)
				}
			}
			w.prepareLive()
			w.dieBefore(w.swap, w.adoptArgs()...)
			cut(w.asides()[0])
			out := w.afterReboot("ls")
			w.checkLive()
			if s := w.state(); s != golden {
				t.Errorf("before the exchange, it came to:\n%s\nand said %s", s, out)
			}
			w.check()

			w.prepareLive()
			w.dieAt(w.swap, w.adoptArgs()...)
			cut(w.live())
			out = w.afterReboot("ls")
			if !strings.Contains(out, "pando mount g2-live "+w.live()) {
				t.Errorf("it does not say what to do: %s", out)
			}
			if s := w.state(); s != golden+"volume g2-live from g2@1 idle at \n" {
				t.Errorf("after the exchange, it came to:\n%s", s)
			}
			w.pando("mount", "g2-live", w.live())
			w.checkLive()
			w.check()

			// In doubt nothing is destroyed: something has been written to the empty
			// directory before the next command.
			w.prepareLive()
			w.dieAt(w.swap, w.adoptArgs()...)
			cut(w.live())
			early := filepath.Join(w.live(), "early")
			if err := os.WriteFile(early, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			w.afterReboot("ls")
			if s := w.state(); s != golden+"volume g2-live from g2@1 idle at \n" {
				t.Errorf("with a new file in its place, it came to:\n%s", s)
			}
			if err := os.Remove(early); err != nil {
				t.Errorf("the new file is gone: %v", err)
			}
			w.prepareLive()
		})
	}
}

// TestClonesDoNotWaitForReplace: clones that are asked for while the golden is
// adopted wait until it is there, and not until it has replaced its source.
func TestClonesDoNotWaitForReplace(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			w := needAdopt(t, k)
			w.prepareLive()
			var clones []*cloning
			res := w.trace(faulttest.Plan{Mode: faulttest.KillAfter, Match: func(s faulttest.Step) bool {
				// The program stands still while it is asked about a step.
				switch {
				case clones == nil && strings.Contains(s.Detail, "/objects/"): // it is being built
					for _, n := range []string{"v1", "v2", "v3", "v4", "v5"} {
						clones = append(clones, w.startClone("g2", n))
					}
					for _, c := range clones {
						if !c.until(func() bool { return w.looksForBuilder(c.cmd.Process) }) {
							t.Error("a clone does not wait for the golden")
						}
					}
				case w.swap(s):
					for _, c := range clones {
						if c.until(func() bool { return false }); !c.hasEnded() {
							t.Error("a clone waits for the replacement")
						}
					}
				}
				return false
			}}, w.adoptArgs()...)
			if res.ExitCode != 0 || len(clones) == 0 {
				t.Fatalf("adopt: exit code %d, %d clones: %s", res.ExitCode, len(clones), res.Stderr)
			}
			for _, c := range clones {
				if <-c.ended; c.err != nil {
					t.Error(c.err)
				}
			}
			if s := w.state(); strings.Count(s, "volume v") != 5 ||
				!strings.Contains(s, "g2-live from g2@1 mounted at "+w.live()) {
				t.Errorf("it came to:\n%s", s)
			}
			w.checkLive()
			w.check()
			w.gone("v*")
			w.prepareLive()
		})
	}
}

// cloning is a clone that another process makes.
type cloning struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has ended; then err is set
	err   error
}

func (w *world) startClone(from, name string) *cloning {
	var out bytes.Buffer
	c := &cloning{cmd: exec.Command(pando, "--pool", w.dir, "clone", from, name), ended: make(chan struct{})}
	c.cmd.Stdout, c.cmd.Stderr = &out, &out
	if c.err = c.cmd.Start(); c.err != nil {
		close(c.ended)
		return c
	}
	go func() {
		defer close(c.ended)
		if err := c.cmd.Wait(); err != nil {
			c.err = &exec.Error{Name: out.String(), Err: err}
		}
	}()
	return c
}

func (c *cloning) hasEnded() bool {
	select {
	case <-c.ended:
		return true
	default:
		return false
	}
}

// until waits for a condition, and returns false if the clone has ended before, or after a minute.
func (c *cloning) until(met func() bool) bool {
	for limit := time.After(time.Minute); !met(); {
		select {
		case <-c.ended:
			return false
		case <-limit:
			return false
		case <-time.After(time.Millisecond):
		}
	}
	return true
}

// looksForBuilder reports whether a process has found no golden, and looks whether another one builds it.
func (w *world) looksForBuilder(p *os.Process) bool {
	if p == nil {
		return false // it could not be started
	}
	open, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", p.Pid))
	return slices.ContainsFunc(open, func(fd string) bool {
		file, err := os.Readlink(fd)
		return err == nil && file == filepath.Join(w.dir, "locks", "goldens")
	})
}

// TestChangeBeforeReplace: what is written to the directory after it was copied
// keeps it from being replaced; and what is written in the last moment, which
// nothing can prevent, is told of. Nothing is lost.
func TestChangeBeforeReplace(t *testing.T) {
	t.Parallel()
	w := needAdopt(t, kinds[len(kinds)-1])
	write := func(name string) {
		if err := os.WriteFile(filepath.Join(w.live(), "sub", name), nil, 0o600); err != nil {
			t.Error(err)
		}
	}
	changing := func(match func(faulttest.Step) bool, name string) faulttest.Result {
		w.prepareLive()
		done := false
		return w.trace(faulttest.Plan{Mode: faulttest.KillAfter, Match: func(s faulttest.Step) bool {
			if !done && match(s) {
				done = true
				write(name)
			}
			return false
		}}, w.adoptArgs()...)
	}
	beside := func(s faulttest.Step) bool {
		return s.Name == "mkdirat" && strings.HasPrefix(s.Detail, w.live()+".pando-old-")
	}
	res := changing(beside, "early")
	if res.ExitCode != 9 || !strings.Contains(string(res.Stderr), "golden g2@1 is ready") ||
		!strings.Contains(string(res.Stderr), "sub/early") || !strings.Contains(string(res.Stderr), "--update g2 "+w.live()) {
		t.Errorf("exit code %d: %s", res.ExitCode, res.Stderr)
	}
	if s := w.state(); s != "golden g2@1 of 1\n" {
		t.Errorf("it came to:\n%s", s)
	}
	w.checkLive()
	w.check()
	if _, err := os.Stat(filepath.Join(w.live(), "sub", "early")); err != nil {
		t.Error(err)
	}
	// As the hint says.
	w.pando(append(w.adoptArgs(), "--update")...)
	if _, err := os.Stat(filepath.Join(w.live(), "sub", "early")); err != nil {
		t.Error(err)
	}
	w.check()

	res = changing(w.swap, "late")
	if res.ExitCode != 0 || !strings.Contains(string(res.Stderr),
		"are only in the old directory: "+w.asides()[0]+"/sub/late") {
		t.Errorf("exit code %d: %s", res.ExitCode, res.Stderr)
	}
	if _, err := os.Stat(filepath.Join(w.asides()[0], "sub", "late")); err != nil {
		t.Error(err)
	}
	w.check()
	w.prepareLive()
}
