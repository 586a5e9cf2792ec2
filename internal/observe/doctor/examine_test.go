package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/loopdev"

	"golang.org/x/sys/unix"
)

// TestPoolCheck: a pool that can be read, that is damaged, that is only not mounted.
func TestPoolCheck(t *testing.T) {
	pool := &PoolFacts{Dir: "/a pool", Driver: "reflink"}
	q := &host{Pool: pool}
	if r := checkNow(t, poolCheck, q); len(r.Findings) > 0 {
		t.Errorf("%+v", r)
	}
	pool.Trouble = errs.New(errs.Damaged, "open catalogue", "x", "torn")
	if s, text := checkNow(t, poolCheck, q).about("pool-damaged", "/a pool"); s != Critical ||
		!strings.Contains(text, "pando --pool '/a pool' fsck") {
		t.Errorf("%q %s", s, text)
	}
	pool.Trouble = errs.New(errs.Unsupported, "look", "x", "not mounted").WithHint("`pando ls` mounts it")
	if s, text := checkNow(t, poolCheck, q).about("pool-unknown", "/a pool"); s != Note ||
		!strings.Contains(text, "pando ls") {
		t.Errorf("%q %s", s, text)
	}
	var c Report
	if err := poolCheck(t.Context(), &host{}, &c); !errs.Is(err, errs.Unsupported) {
		t.Errorf("no pool: %v", err)
	}
}

// TestExamine: checks are done by name, in order, and the worst is the worst.
func TestExamine(t *testing.T) {
	e, err := Examine(t.Context(), HostRequest{Only: []string{"clock", "pool", "programs"}}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	worst := OK
	for _, c := range e.Checks {
		names = append(names, c.Check)
		if rank(c.Status) > rank(worst) {
			worst = c.Status
		}
	}
	if !slices.Equal(names, []string{"pool", "programs", "clock"}) || e.Checks[0].Status != Skipped || e.Worst != worst {
		t.Errorf("%v, worst %s: %+v", names, e.Worst, e)
	}
	if _, err := Examine(t.Context(), HostRequest{Only: []string{"clok"}}, nil, nil); !errs.Is(err, errs.Invalid) {
		t.Errorf("an unknown check: %v", err)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Examine(done, HostRequest{}, nil, nil)
	if !errs.Is(err, errs.Canceled) && !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
	seen := map[string]bool{}
	for _, c := range Checks() {
		if seen[c.Name] || c.Title == "" {
			t.Errorf("check %v", c)
		}
		seen[c.Name] = true
	}
}

// TestWithoutRoot: what cannot be seen is not guessed, and the rest works.
func TestWithoutRoot(t *testing.T) {
	rootOnly(t)
	c := startRole(t, "examine", asPublic(t, asNobodyElse))
	defer c.end()
	var raw struct {
		Checks []struct {
			Check   string
			Status  Severity
			Summary string
		}
	}
	if err := json.Unmarshal([]byte(c.said), &raw); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, k := range raw.Checks {
		got[k.Check] = string(k.Status) + ": " + k.Summary
	}
	for _, name := range []string{"loop-leaks", "mount-leaks"} {
		if !strings.HasPrefix(got[name], "skipped: ") || !strings.Contains(got[name], "run it as root") {
			t.Errorf("%s: %s", name, got[name])
		}
	}
	for _, name := range []string{"loop-direct-io", "mount-count", "slab", "limits", "programs", "clock", "dirty-memory",
		"stuck"} {
		if got[name] == "" || strings.HasPrefix(got[name], "skipped") {
			t.Errorf("%s: %s", name, got[name])
		}
	}
	if !strings.Contains(got["limits"], "without root") || !strings.Contains(got["mount-count"], "is unknown") {
		t.Errorf("%s; %s", got["limits"], got["mount-count"])
	}
}

// TestLoopNodes: a child whose /dev lacks what the kernel has.
func TestLoopNodes(t *testing.T) {
	rootOnly(t)
	if found, _ := filepath.Glob("/sys/block/loop*"); len(found) == 0 {
		t.Skip("SKIPPED: the kernel has made no loop device")
	}
	c := startRole(t, "bare-dev", inOwnMounts, t.TempDir())
	defer c.end()
	r := decode(t, []byte(c.said))
	for code, want := range map[string]string{"loop-control-missing": "mknod -m 660 /dev/loop-control c 10 237",
		"loop-nodes-missing": "mknod -m 660 /dev/loop"} {
		if s, text := r.about(code, ""); s != Warning || !strings.Contains(text, want) {
			t.Errorf("%s: %q %s", code, s, text)
		}
	}
	r = checkNow(t, limitsCheck(0.8), nil)
	for _, code := range []string{"loop-control-missing", "loop-nodes-missing"} {
		if s, text := r.about(code, ""); s != "" {
			t.Errorf("here: %s", text)
		}
	}
}

func init() {
	roles["examine"] = func(_ []string, ready func(string)) error {
		ctx, stop := testContext()
		defer stop()
		var names []string
		for _, c := range kernelChecks() {
			names = append(names, c.name)
		}
		e, err := Examine(ctx, HostRequest{Only: names}, nil, nil)
		if err != nil {
			return err
		}
		b, err := json.Marshal(e)
		if err != nil {
			return err
		}
		ready(string(b))
		return nil
	}
	roles["bare-dev"] = func(args []string, ready func(string)) error {
		if err := unix.Mount(args[0], "/dev", "", unix.MS_BIND, ""); err != nil {
			return err
		}
		c := Report{Measured: []Figure{}, Findings: []Finding{}}
		ctx, stop := testContext()
		defer stop()
		if err := limitsCheck(0.8)(ctx, &host{Pool: &PoolFacts{Driver: "reflink"}}, &c); err != nil {
			return err
		}
		b, err := json.Marshal(c)
		if err != nil {
			return err
		}
		ready(string(b))
		return nil
	}
}

// TestInContainer: where the host's processes cannot be seen, that is said, and what
// they may use is not called unused.
func TestInContainer(t *testing.T) {
	rootOnly(t)
	idle := loopOn(t, file(t, filepath.Join(t.TempDir(), "idle"), 1<<20), loopdev.Options{KeepOpen: true})
	c := startRole(t, "contained", func(c *exec.Cmd) {
		c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Cloneflags: syscall.CLONE_NEWPID}
	})
	defer c.end()
	r := decode(t, []byte(c.said))
	if s, text := r.about("loop-unused", idle); s != "" || !strings.Contains(r.Summary, "outside of this container") {
		t.Errorf("%q %s: %s", s, text, r.Summary)
	}
	r = checkNow(t, loopLeaks, nil)
	if s, _ := r.about("loop-unused", idle); s != Note && !contained() {
		t.Errorf("on the host: %q", s)
	}
}

func init() {
	roles["contained"] = func(_ []string, ready func(string)) error {
		if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
			return err
		}
		c := Report{Measured: []Figure{}, Findings: []Finding{}}
		ctx, stop := testContext()
		defer stop()
		if err := loopLeaks(ctx, &host{}, &c); err != nil {
			return err
		}
		b, err := json.Marshal(c)
		if err != nil {
			return err
		}
		ready(string(b))
		return nil
	}
}

// TestHangingCheck: a check that does not end by itself is left behind, and those after
// it are done.
func TestHangingCheck(t *testing.T) { synctest.Test(t, testHangingCheck) }

func testHangingCheck(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	hangs := check{name: "hangs", run: func(_ context.Context, _ *host, c *Report) error {
		c.Summary = "never told"
		<-release
		return nil
	}}
	q := &host{HostRequest: HostRequest{PatienceEach: time.Millisecond}}
	r, err := hangs.runLimited(t.Context(), q, Report{Check: "hangs"})
	if !errs.Is(err, errs.Unsupported) || r.Check != "hangs" || r.Summary != "" {
		t.Errorf("%+v, %v", r, err)
	}
	slow := check{name: "slow", run: func(ctx context.Context, _ *host, c *Report) error {
		<-ctx.Done()
		c.Summary = "some of it"
		return ctx.Err()
	}}
	r, err = slow.runLimited(t.Context(), q, Report{Check: "slow"})
	if !errors.Is(err, context.DeadlineExceeded) || r.Summary != "some of it" {
		t.Errorf("%+v, %v", r, err)
	}
}
