//go:build linux && (amd64 || arm64)

package file_test

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"pando/internal/remote/objstore"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// prepare makes a store as it is before the story.
func prepare(t *testing.T, dir string) {
	t.Helper()
	s := openStore(t, dir)
	for key, data := range before {
		if _, err := s.Put(t.Context(), key, []byte(data), objstore.IfAbsent); err != nil {
			t.Fatal(err)
		}
	}
	closeStore(t, s)
}

// checkMoment checks that a store is as it is at some moment of the story.
func checkMoment(t *testing.T, got map[string]string) {
	t.Helper()
	for key, data := range got {
		if data != before[key] && data != after[key] {
			t.Errorf("%s has %d bytes that nobody wrote so", key, len(data))
		}
	}
	_, made := got["manifests/new/m"]
	_, kept := got["segments/old/0"]
	replaced := got["heads/h"] == newHead
	if got["heads/h"] == "" || replaced && !made || !kept && !replaced {
		t.Errorf("this is no moment of the story: head there %v, replaced %v, manifest made %v, old segment kept %v",
			got["heads/h"] != "", replaced, made, kept)
	}
}

// finish tells the story to its end, as the next process would, and checks it.
func finish(t *testing.T, dir string) {
	t.Helper()
	s := openStore(t, dir)
	defer closeStore(t, s)
	checkMoment(t, contents(t, s))
	if err := tell(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	// The story may have been at its end, and then nothing was written.
	if _, err := s.Put(t.Context(), "heads/h", []byte(newHead), objstore.Always); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, s); !maps.Equal(got, after) {
		t.Errorf("at the end there are %d objects, want %d, or they differ", len(got), len(after))
	}
	if left := leftovers(t, dir); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
}

func traced(t *testing.T, what, dir string, n int, plan faulttest.Plan) faulttest.Result {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	plan.PathPrefix = []string{dir}
	match := plan.Match
	plan.Match = func(s faulttest.Step) bool { return len(s.Paths) > 0 && (match == nil || match(s)) }
	res, err := faulttest.Run(t.Context(), []string{exe}, faulttest.Options{Plan: plan, Env: childEnv(what, dir, n)})
	if err != nil {
		t.Fatal(err)
	}
	return res
}

func needTracer(t *testing.T) {
	t.Helper()
	if err := faulttest.Available(); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
}

// TestKilledAtEveryStep kills the story at every system call that changes anything.
func TestKilledAtEveryStep(t *testing.T) {
	needTracer(t)
	for _, mode := range []faulttest.Mode{faulttest.KillBefore, faulttest.KillAfter} {
		t.Run(mode.String(), func(t *testing.T) {
			var dir string
			n := 0
			sweep := faulttest.Sweep{Plan: faulttest.Plan{Mode: mode}}
			last := sweep.Each(t, func(p faulttest.Plan) faulttest.Result {
				dir = filepath.Join(t.TempDir(), "store")
				prepare(t, dir)
				n++
				return traced(t, "story", dir, 0, p)
			}, func(faulttest.Result) { finish(t, dir) })
			if last.ExitCode != 0 {
				t.Errorf("the story itself fails: %s", last.Stderr)
			}
			if n < 15 && !sweep.Sampled() {
				t.Errorf("only %d runs: where are the steps?", n)
			}
		})
	}
}

// TestFailingSteps makes every system call that changes anything fail once. Then
// Put or Delete must say so, or have done what they said.
func TestFailingSteps(t *testing.T) {
	needTracer(t)
	for _, errno := range []syscall.Errno{unix.EIO, unix.ENOSPC, unix.EPERM} {
		t.Run(unix.ErrnoName(errno), func(t *testing.T) {
			var dir string
			failed := 0
			sweep := faulttest.Sweep{Plan: faulttest.Plan{Mode: faulttest.Fail, Errno: errno}}
			sweep.Each(t, func(p faulttest.Plan) faulttest.Result {
				dir = filepath.Join(t.TempDir(), "store")
				prepare(t, dir)
				return traced(t, "story", dir, 0, p)
			}, func(res faulttest.Result) {
				s := openStore(t, dir)
				got := contents(t, s)
				closeStore(t, s)
				if res.ExitCode == 0 {
					if !maps.Equal(got, after) {
						t.Errorf("success is reported, but it is not so")
					}
					if res.FiredAt.Name == "fsync" {
						t.Errorf("a sync failed and nobody was told")
					}
				} else {
					failed++
					kind := map[syscall.Errno]string{unix.EIO: "io:", unix.ENOSPC: "no_space:", unix.EPERM: "permission:"}[errno]
					// A failed sync of a directory is io, whatever the number.
					if !strings.HasPrefix(string(res.Stderr), kind) && res.FiredAt.Name != "fsync" {
						t.Errorf("the error is %q", res.Stderr)
					}
				}
				finish(t, dir)
			})
			if failed < 5 && !sweep.Sampled() {
				t.Errorf("only %d of the failures were reported", failed)
			}
		})
	}
}

// TestWithoutLinks: a filesystem without hard links will do.
func TestWithoutLinks(t *testing.T) {
	needTracer(t)
	dir := filepath.Join(t.TempDir(), "store")
	prepare(t, dir)
	res := traced(t, "story", dir, 0, faulttest.Plan{Mode: faulttest.Fail, Errno: unix.EPERM, Sticky: true,
		Match: func(s faulttest.Step) bool { return s.Name == "linkat" }})
	if !res.Fired || res.ExitCode != 0 {
		t.Fatalf("fired %v, exit code %d: %s", res.Fired, res.ExitCode, res.Stderr)
	}
	finish(t, dir)
}

// TestKilledThenPowerCut: a writer is killed, the next one looks at what is there
// and writes; then the power fails. What the second one saw must still be there, as
// it relied on it.
func TestKilledThenPowerCut(t *testing.T) {
	testfs.NotShort(t, "it does one thing after the other")
	needTracer(t)
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			var fs *testfs.FS
			var dir string
			cuts := 0
			// The moments at which a name is there and not durable, and those beside.
			match := func(s faulttest.Step) bool {
				return slices.Contains([]string{"linkat", "renameat", "renameat2", "fsync", "unlinkat", "mkdirat"}, s.Name)
			}
			faulttest.Sweep{Plan: faulttest.Plan{Mode: faulttest.KillAfter, Match: match}}.Each(t,
				func(p faulttest.Plan) faulttest.Result {
					fs = testfs.New(t, kind, 128<<20)
					dir = filepath.Join(fs.Dir(), "store")
					prepare(t, dir)
					// The next writer must not make a directory: on btrfs that would make
					// all durable by itself.
					s := openStore(t, dir)
					if _, err := s.Put(t.Context(), "sessions/0", []byte("0"), objstore.IfAbsent); err != nil {
						t.Fatal(err)
					}
					closeStore(t, s)
					return traced(t, "story", dir, 0, p)
				}, func(faulttest.Result) {
					s := openStore(t, dir)
					if _, err := s.Put(t.Context(), "sessions/s", []byte("s"), objstore.IfAbsent); err != nil {
						t.Fatal(err)
					}
					want := contents(t, s)
					closeStore(t, s)
					fs.Cut()
					s = openStore(t, dir)
					got := contents(t, s)
					for key, data := range want {
						if key == "segments/old/0" || key == "heads/h" {
							continue // the deletion, and the head of the dead, were not answered
						}
						if got[key] != data {
							t.Errorf("%s was seen and is not there after the power cut", key)
						}
					}
					delete(got, "sessions/s")
					delete(got, "sessions/0")
					checkMoment(t, got)
					closeStore(t, s)
					cuts++
				})
			if cuts < 10 {
				t.Errorf("only %d cuts", cuts)
			}
		})
	}
}

// TestSyncsOfAPut counts what a small Put costs.
func TestSyncsOfAPut(t *testing.T) {
	needTracer(t)
	syncs := func(n int) int {
		dir := filepath.Join(t.TempDir(), "store")
		closeStore(t, openStore(t, dir))
		res := traced(t, "puts", dir, n, faulttest.Plan{Match: func(s faulttest.Step) bool {
			return strings.Contains(s.Name, "sync")
		}})
		if res.ExitCode != 0 {
			t.Fatalf("%s", res.Stderr)
		}
		return len(res.Steps)
	}
	one, eleven := syncs(1), syncs(11)
	if each := (eleven - one) / 10; each != 2 || (eleven-one)%10 != 0 {
		t.Errorf("ten more Puts cost %d syncs, want two each", eleven-one)
	}
	if one > 3 { // and the directory above
		t.Errorf("the first Put costs %d syncs", one)
	}
}

// TestCleaningSyncs: what a killed writer has left is the sign that names may not be
// durable. The filesystems at hand make them so by themselves in most cases, so the
// calls are looked at: all directories are synced, and only then the sign is removed.
func TestCleaningSyncs(t *testing.T) {
	needTracer(t)
	dir := filepath.Join(t.TempDir(), "store")
	prepare(t, dir)
	sign := filepath.Join(dir, ".pando/tmp/DEAD")
	if err := os.WriteFile(sign, []byte("half of an obj"), 0o600); err != nil {
		t.Fatal(err)
	}
	res := traced(t, "puts", dir, 1, faulttest.Plan{})
	if res.ExitCode != 0 {
		t.Fatalf("%s", res.Stderr)
	}
	synced := map[string]bool{}
	removed := false
	for _, step := range res.Steps {
		if step.Name == "unlinkat" && step.Paths[0] == sign {
			removed = true
			break
		}
		if step.Name == "fsync" {
			synced[step.Paths[0]] = true
		}
	}
	if !removed {
		t.Error("what the dead writer has left is not removed")
	}
	for _, d := range []string{"", "/heads", "/segments", "/segments/old"} {
		if !synced[dir+d] {
			t.Errorf("%s is not synced before that; synced are %v", dir+d, synced)
		}
	}
}
