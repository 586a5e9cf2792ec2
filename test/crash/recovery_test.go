//go:build linux && (amd64 || arm64)

package crash

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/testing/faulttest"
)

// trace runs a command under a plan.
func (w *world) trace(p faulttest.Plan, args ...string) faulttest.Result {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	res, err := faulttest.Run(ctx, append([]string{pando, "--pool", w.dir}, args...),
		faulttest.Options{Plan: p, KillGroup: true})
	if err != nil {
		w.t.Fatal(err)
	}
	return res
}

// dieAt runs a command and kills it at the first step that match accepts.
func (w *world) dieAt(match func(faulttest.Step) bool, args ...string) {
	w.t.Helper()
	if res := w.trace(faulttest.Plan{Mode: faulttest.KillAfter, Match: match}, args...); !res.Fired {
		w.t.Fatalf("pando %s made no such step", strings.Join(args, " "))
	}
}

// dieAtIdentity runs a command and kills it before it replaces an identity for
// the (n+1)-th time.
func (w *world) dieAtIdentity(n int, args ...string) {
	w.t.Helper()
	match := func(s faulttest.Step) bool {
		return s.Name == "renameat" && strings.Contains(s.Detail, ".meta.new") // a new one has its name by renameat2
	}
	if res := w.trace(faulttest.Plan{Mode: faulttest.KillBefore, At: n, Match: match}, args...); !res.Fired {
		w.t.Fatalf("pando %s made no such step: %s", strings.Join(args, " "), res.Stderr)
	}
}

// TestKillInRecovery kills the command that cleans up behind a killed one, at
// every step.
func TestKillInRecovery(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, k)
			w.initPool()
			w.importGolden("g")
			for _, c := range []struct {
				name  string
				spoil func() // leaves work for recovery; the state stays what it was
				next  string
				want  func(before string) string // nil: the state before
			}{
				{name: "half made", next: "ls", spoil: func() {
					w.dieAt(func(s faulttest.Step) bool { return strings.Contains(s.Detail, ".meta") }, "clone", "g", "v")
				}},
				{name: "half made, gc", next: "gc", spoil: func() {
					w.dieAt(func(s faulttest.Step) bool { return strings.Contains(s.Detail, ".meta") }, "clone", "g", "v")
				}},
				{name: "many half made", next: "ls", spoil: func() {
					steps := 0 // whose marks are cleaned up in one batch
					w.dieAt(func(s faulttest.Step) bool {
						if strings.Contains(s.Detail, ".meta") {
							steps++
						}
						return steps > 8
					}, "clone", "g", "v", "--count", "6")
				}},
				{name: "half mounted", next: "ls", spoil: func() {
					w.dieAt(func(s faulttest.Step) bool { return s.Name == "move_mount" }, "clone", "g", "v", "--mount")
				}},
				{name: "half destroyed", next: "ls", spoil: func() {
					w.pando("clone", "g", "v")
					w.dieAt(func(s faulttest.Step) bool {
						return strings.HasPrefix(s.Name, "unlink") && strings.Contains(s.Detail, "/objects/")
					}, "destroy", "v")
				}},
				{name: "frozen", next: "ls", spoil: func() {
					w.scribble("base")
					res, err := faulttest.Run(t.Context(), []string{pando, "--pool", w.dir, "snapshot", "base", "s", "--freeze"},
						faulttest.Options{
							Plan: faulttest.Plan{Mode: faulttest.KillBefore, Match: func(s faulttest.Step) bool {
								return strings.Contains(s.Detail, "FITHAW")
							}},
							// The guard dies too, or there would be nothing to recover.
							KillGroup: true, FollowProcesses: true})
					if err != nil || !res.Fired {
						t.Fatalf("it did not come to thaw: %v, %s", err, res.Stderr)
					}
				}},
				{name: "half rewound", next: "ls", want: func(string) string {
					return "golden g@1 of 1\nsnapshot base@s clean\nsnapshot base@before-rewind clean\nvolume base from base@s " +
						"idle at \n"
				}, spoil: func() {
					w.onlySnapshot("base", "s")
					w.dieAtIdentity(1, "rewind", "base", "s") // the second: that of what was replaced
				}},
				{name: "half pinned", next: "ls", want: func(before string) string {
					return "golden g@1 of 1\nvolume base from g@1 pinned idle at \n"
				}, spoil: func() {
					w.try("unpin", "base")
					w.gone("base")
					w.pando("clone", "g", "base")
					w.dieAtIdentity(0, "pin", "base")
				}},
				{name: "expired", next: "ls", spoil: func() {
					w.pando("clone", "g", "v", "--ttl", "1ms")
				}},
			} {
				t.Run(c.name, func(t *testing.T) {
					if c.name == "frozen" && k.name != "reflink" {
						t.Skip("only images are frozen")
					}
					if c.name == "half mounted" && os.Geteuid() != 0 {
						t.Skip("SKIPPED: mounting needs root: without it, volumes are linked")
					}
					w.t = t
					w.try("unpin", "base")
					w.gone("*")
					w.pando("clone", "g", "base")
					if c.name == "frozen" {
						w.pando("mount", "base")
					}
					before := w.peek()
					if c.want != nil {
						before = c.want(before)
					}
					w.sweepOf(faulttest.Plan{Mode: faulttest.KillBefore}, 1).Each(t, func(p faulttest.Plan) faulttest.Result {
						c.spoil()
						return w.trace(p, c.next)
					}, func(faulttest.Result) {
						if after := w.state(); after != before {
							t.Errorf("before:\n%safter:\n%s", before, after)
						}
						w.check()
					})
					w.pando("ls")
					w.check()
				})
			}
			w.t = t
			w.pando("deinit", "--force")
			w.nothingLeft()
		})
	}
}

// TestFaultInInit makes init and deinit fail at every step: afterwards init
// works, and deinit leaves nothing.
func TestFaultInInit(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, k)
			initArgs := w.initArgs()
			for _, f := range faults {
				t.Run("init/"+f.name, func(t *testing.T) {
					w.t = t
					w.sweepOf(f.plan, initEvery).Each(t, func(p faulttest.Plan) faulttest.Result {
						res := w.trace(p, initArgs...)
						if !res.Fired {
							w.pando("deinit")
						}
						return res
					}, func(res faulttest.Result) {
						if _, err := os.Stat(filepath.Join(w.dir, "pool.json")); err != nil {
							if res.ExitCode == 0 {
								t.Errorf("init said that it had succeeded: %s", res.Stdout)
							}
							w.pando(initArgs...)
						}
						w.pando("ls") // mounts the pool, if that had not come about
						w.check()
						w.pando("deinit", "--force")
						// A directory that a killed init had made is the user's to the
						// next one, and stays, empty.
						os.Remove(w.dir)
						w.nothingLeft()
					})
				})
				t.Run("deinit/"+f.name, func(t *testing.T) {
					w.t = t
					w.sweepOf(f.plan, initEvery).Each(t, func(p faulttest.Plan) faulttest.Result {
						if _, err := os.Stat(filepath.Join(w.dir, "pool.json")); err != nil {
							w.initPool()
							w.importGolden("g")
							w.pando("clone", "g", "v", "--mount")
						}
						return w.trace(p, "deinit", "--force")
					}, func(res faulttest.Result) {
						if _, err := w.try("deinit", "--force"); err != nil && !strings.Contains(err.Error(), "there is no pool") {
							t.Errorf("deinit after a fault: %v", err)
						}
						os.Remove(w.dir) // as above
						w.nothingLeft()
					})
					w.nothingLeft()
				})
			}
		})
	}
}
