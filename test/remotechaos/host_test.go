//go:build linux && (amd64 || arm64)

package remotechaos

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"pando/internal/testing/faulttest"
	"pando/internal/testing/schematest"
	"pando/internal/testing/servertest"

	"golang.org/x/sys/unix"
)

// Exit codes of pando, which are its interface.
const (
	codeInternal  = 1
	codeNotFound  = 3
	codeExists    = 4
	codeInUse     = 5
	codeNoSpace   = 6
	codeConflict  = 9
	codeDamaged   = 10
	codeIO        = 12
	codeCancelled = 130
)

// patience is how long a command may take before it counts as hanging.
const patience = 2 * time.Minute

// host is a pool, and what the model knows to be in it. One goroutine at a time uses it.
type host struct {
	c     *chaos
	n     int
	name  string
	pool  string
	id    string // of the pool
	env   []string
	url   string            // of the remote
	proxy *servertest.Proxy // before it; nil: a directory
	gate  *gate             // that holds its next command; nil: none
	trees bool              // its volumes are trees, not images
	r     *rand.Rand

	volumes map[string]*volume
	golden  string // its own
	gens    int    // of that
	serial  int
}

// volume is a volume of a host, with its content as it is now.
type volume struct {
	name    string
	content tree
	mounted bool
	snaps   []string
	as      string // another name under which it was pushed
}

// connect finds out where the remote is for this host: a server of objects is behind a proxy of its own.
func (h *host) connect() {
	c := h.c
	h.url = "file:" + c.dir
	if !c.s3 {
		return
	}
	h.proxy = servertest.NewProxy(c.t, c.server)
	h.url = c.server.URLOf(servertest.Bucket, "chaos", h.proxy.URL).String()
	c.weather.proxies = append(c.weather.proxies, h.proxy)
}

// start makes the pool with a golden and two volumes, and its remote.
func (h *host) start(loop bool) {
	args := []string{"init", "-q"}
	switch {
	case loop:
		args = append(args, "--loop", "--size", "4G")
	case h.trees:
		args = append(args, "--driver", "btrfs")
	default:
		args = append(args, "--driver", "reflink")
	}
	h.must(args...)
	b, err := os.ReadFile(filepath.Join(h.pool, "pool.json"))
	if err != nil {
		h.c.t.Fatal(err)
	}
	var is struct{ ID string }
	h.decode(string(b), &is)
	h.id = is.ID

	src := h.c.t.TempDir()
	for i := range 3 {
		h.writeFile(filepath.Join(src, fmt.Sprint("base", i)), 20_000+h.r.IntN(100_000))
	}
	h.golden = "g" + h.name
	args = []string{"golden", "import", h.golden, src, "-q", "--keep", "all"}
	if !h.trees {
		args = append(args, "--size", "64M")
	}
	h.must(args...)
	h.gens = 1
	h.c.m.named[h.golden+"@1"] = h.read(src)

	if h.n == 0 {
		h.must("remote", "add", "nas", h.url, "-q", "--create")
	} else {
		h.must("remote", "add", "nas", h.url, "-q", "--no-create", "--identity", h.c.hosts[0].identity())
	}
	h.clone()
	h.clone()
}

func (h *host) identity() string { return filepath.Join(h.pool, "remotes", "nas", "identity") }

func (h *host) fresh(prefix string) string {
	h.serial++
	return fmt.Sprintf("%s%s%d", prefix, h.name, h.serial)
}

// trouble is what is done to a command.
type trouble struct {
	after time.Duration   // it is killed after this time
	plan  *faulttest.Plan // or this happens at one of its system calls
	gate  *gate           // or one of its requests is held, and then perhaps it is killed
}

func (b trouble) String() string {
	switch {
	case b.gate != nil:
		return b.gate.String()
	case b.plan != nil:
		return b.plan.String()
	case b.after > 0:
		return fmt.Sprintf("killed after %v", b.after)
	}
	return ""
}

// trouble draws what goes wrong in a command: mostly nothing.
func (h *host) trouble() trouble {
	if h.c.racing.Load() {
		g := h.gate
		h.gate = nil
		return trouble{gate: g}
	}
	n := h.r.IntN(100)
	if n >= 30 {
		return trouble{}
	}
	if n < 8 && h.c.atOnce { // in turn it would not be the same again
		return trouble{after: time.Duration(5+h.r.IntN(250)) * time.Millisecond}
	}
	p := &faulttest.Plan{At: h.r.IntN(80)}
	if !h.c.s3 && h.r.IntN(2) == 0 {
		p.PathPrefix, p.At = []string{h.c.dir}, h.r.IntN(25)
	}
	switch {
	case n < 16:
		p.Mode = faulttest.KillBefore
	case n < 24 || p.PathPrefix == nil:
		p.Mode = faulttest.KillAfter
	default:
		p.Mode, p.Errno = faulttest.Fail, []syscall.Errno{unix.EIO, unix.ENOSPC}[h.r.IntN(2)]
	}
	return trouble{plan: p}
}

// outcome is how a command ended.
type outcome struct {
	args           []string
	trouble        string
	stdout, stderr string
	code           int
	killed         bool
	struck         bool // something was done to it, so that it may fail
}

func (o outcome) String() string {
	s := "pando " + strings.Join(o.args, " ")
	if o.trouble != "" {
		s += " (" + o.trouble + ")"
	}
	switch {
	case o.killed:
		return s + ": killed"
	case o.code == 0:
		return s
	}
	return fmt.Sprintf("%s: exit code %d: %s", s, o.code, strings.TrimSpace(o.stderr))
}

// run runs a command.
func (h *host) run(b trouble, args ...string) outcome {
	o := outcome{args: args, trouble: b.String()}
	argv := append([]string{program, "--pool", h.pool, "--no-progress"}, args...)
	env := append(os.Environ(), h.env...)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()

	if b.plan != nil {
		res, err := faulttest.Run(ctx, argv, faulttest.Options{Plan: *b.plan, Env: env, KillGroup: true})
		if err != nil {
			h.c.wrongf("%s: %v", o, err)
		}
		o.stdout, o.stderr, o.code = string(res.Stdout), string(res.Stderr), res.ExitCode
		o.killed, o.struck = res.Signal == unix.SIGKILL, res.Fired
		if res.Signal != 0 && !o.killed {
			h.c.wrongf("%s: signal %v: %s", o, res.Signal, o.stderr)
		}
	} else {
		h.runPlain(ctx, &o, env, argv, b)
	}
	o.struck = o.struck || h.c.weather.bad()
	h.c.note(args[0], "%s: %s", h.name, o)
	if err := schematest.Check(args, []byte(o.stdout), []byte(o.stderr)); err != nil && !o.killed {
		h.c.wrongf("%s: %v", o, err)
	}
	return o
}

// runPlain runs a command without a tracer.
func (h *host) runPlain(ctx context.Context, o *outcome, env, argv []string, b trouble) {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	kill := func() { _ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	if b.gate != nil {
		b.gate.begin(h.proxy, kill)
		defer b.gate.end()
	}
	if err := cmd.Start(); err != nil {
		h.c.t.Error(err)
		return
	}
	stop := context.AfterFunc(ctx, kill)
	defer stop()
	if b.after > 0 {
		timer := time.AfterFunc(b.after, kill)
		defer timer.Stop()
	}
	err := cmd.Wait()
	o.stdout, o.stderr, o.code = stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()
	var ended *exec.ExitError
	if err != nil && !errors.As(err, &ended) {
		h.c.wrongf("%s: %v", o, err)
	}
	if ctx.Err() != nil {
		h.c.wrongf("%s: it hangs", o)
	}
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		o.killed, o.struck = true, true
		if ws.Signal() != unix.SIGKILL || b == (trouble{}) {
			h.c.wrongf("%s: signal %v: %s", o, ws.Signal(), o.stderr)
		}
	}
}

// must runs a command that succeeds.
func (h *host) must(args ...string) string {
	h.c.t.Helper()
	o := h.run(trouble{}, args...)
	if o.code != 0 {
		h.c.wrongf("%s: %s", h.name, o)
	}
	return o.stdout
}

func (h *host) decode(s string, v any) {
	h.c.t.Helper()
	if err := json.Unmarshal([]byte(s), v); err != nil && !h.c.failed() {
		h.c.wrongf("%s: %v in %q", h.name, err, s)
	}
}

// succeeded reports whether a command did, and fails the test if it had no reason not to: allowed are exit codes
// that it may have besides.
func (h *host) succeeded(o outcome, allowed ...int) bool {
	h.c.t.Helper()
	switch {
	case o.killed:
	case o.code == 0:
		return true
	case slices.Contains(allowed, o.code):
	case o.code == codeInternal || o.code == codeCancelled:
		h.c.wrongf("%s: %s", h.name, o)
	case h.c.damaged:
	case o.struck && slices.Contains([]int{codeIO, codeNoSpace}, o.code):
	case h.c.together() && slices.Contains([]int{codeConflict, codeInUse, codeNotFound}, o.code):
	default:
		h.c.wrongf("%s: it has no reason to fail: %s\n%s", h.name, o, o.stdout)
	}
	return false
}

// weather is what the network does to requests.
type weather struct {
	proxies []*servertest.Proxy

	mu sync.Mutex
	r  *rand.Rand
	is bool
}

// turn makes it bad, or good.
func (w *weather) turn(bad bool) {
	if w == nil {
		return
	}
	w.mu.Lock()
	w.is = bad
	w.mu.Unlock()
	for _, p := range w.proxies {
		p.Heal()
		if bad {
			p.Add(w.faults()...)
		}
	}
}

func (w *weather) bad() bool {
	if w == nil {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.is
}
