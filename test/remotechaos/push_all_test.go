//go:build linux && (amd64 || arm64)

package remotechaos

import (
	"bufio"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// several is a push of more than one thing: an attempt for each.
type several struct {
	attempts []*attempt
	volumes  []*volume // of the attempts; nil: a golden
	before   []bool    // whether this host could push it
	sure     []bool    // whether it certainly could
}

// beginSeveral notes the push of volumes, and of the host's golden if golden is set.
func (h *host) beginSeveral(volumes []*volume, golden bool) *several {
	c := h.c
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &several{}
	add := func(name, snapshot string, v *volume, content tree) {
		hd := c.m.head(name)
		hd.trees = h.trees
		s.attempts = append(s.attempts, c.m.begin(h, name, snapshot, content, nil))
		s.volumes = append(s.volumes, v)
		s.before = append(s.before, hd.canPush(h.id))
		s.sure = append(s.sure, hd.isWriter(h.id) && hd.source == v)
	}
	if golden {
		n := strconv.Itoa(h.gens)
		add(h.golden, n, nil, c.m.named[h.golden+"@"+n])
	}
	for _, v := range volumes {
		add(v.name, "", v, v.content)
	}
	return s
}

// end takes what was reported into the model. complete: all of it must have been, but for what others write.
func (s *several) end(h *host, o outcome, all []pushed, complete bool) {
	c := h.c
	c.mu.Lock()
	for _, a := range s.attempts {
		a.to = time.Now()
	}
	c.mu.Unlock()
	for i, a := range s.attempts {
		var mine []pushed
		for _, p := range all {
			if p.On.volume() == a.head && (a.snapshot == "" || p.On.point() == a.snapshot) { // else what a clone was made from
				mine = append(mine, p)
			}
		}
		if len(mine) == 0 {
			if complete && s.sure[i] && !c.together() {
				c.wrongf("%s: %s: it does not tell of %s", h.name, o, a.head)
			}
			continue
		}
		for _, complaint := range h.reported(a, mine, s.before[i], s.volumes[i]) {
			c.wrongf("%s: %s: %s\n%s", h.name, o, complaint, o.stdout)
		}
	}
}

// pushAll pushes all that there is.
func (h *host) pushAll() {
	trouble := h.trouble()
	h.dropOrigins()
	s := h.beginSeveral(h.sorted(), true)
	o := h.run(trouble, "push", "--all", "--to", "nas", "--json")
	// What this pool has pulled belongs to others, and is refused.
	ok := h.succeeded(o, codeConflict, codeExists)
	var all []pushed
	if strings.HasPrefix(o.stdout, "[") && !o.killed {
		h.decode(o.stdout, &all)
	}
	s.end(h, o, all, (ok || o.code == codeConflict) && !o.struck && !h.c.damaged)
}

// dropOrigins destroys the volumes that a pull has restored because another one was cloned from them: the model does
// not know their contents.
func (h *host) dropOrigins() {
	for name := range strings.Lines(h.must("ls", "-q")) {
		name = strings.TrimSpace(name)
		if _, known := h.volumes[name]; name != "" && !known {
			h.must("destroy", name)
		}
	}
}

// pushEvery pushes a volume again and again, until it is told to end.
func (h *host) pushEvery() {
	v := h.anyVolume()
	if v == nil || h.c.racing.Load() {
		return
	}
	s := h.beginSeveral([]*volume{v}, false)
	args := []string{"push", v.name, "--to", "nas", "--json", "--every", "1s"}
	o, lines := h.runUntil(2, args...)
	h.c.note("push --every", "%s: %s", h.name, o)
	var all []pushed
	for _, line := range lines {
		var p pushed
		h.decode(line, &p)
		all = append(all, p)
	}
	s.end(h, o, all, false)
	// It ends by itself in the first round only, if waiting makes nothing better.
	if o.code != 0 && !(len(all) == 0 && o.code == codeConflict) {
		h.succeeded(o)
	}
}

// runUntil runs a command until it has written so many lines, or has said what is wrong, and tells it to end.
func (h *host) runUntil(n int, args ...string) (o outcome, lines []string) {
	o = outcome{args: args, struck: h.c.weather.bad()}
	cmd := exec.Command(program, append([]string{"--pool", h.pool, "--no-progress"}, args...)...)
	cmd.Env = append(os.Environ(), h.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		h.c.wrongf("%v", err)
		return o, nil
	}
	said := &firstWrite{wrote: make(chan struct{})}
	cmd.Stderr = said
	if err := cmd.Start(); err != nil {
		h.c.wrongf("%v", err)
		return o, nil
	}
	hangs := time.AfterFunc(patience, func() {
		h.c.wrongf("%s: %s: it hangs", h.name, o)
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
	})
	defer hangs.Stop()

	enough := make(chan struct{})
	read := make(chan []string)
	go func() {
		var all []string
		for in := bufio.NewScanner(out); in.Scan(); {
			if all = append(all, in.Text()); len(all) == n {
				close(enough)
			}
		}
		read <- all
	}()
	var ended bool
	select {
	case <-enough:
	case <-said.wrote:
	case lines = <-read:
		ended = true
	}
	_ = cmd.Process.Signal(unix.SIGTERM)
	if !ended {
		lines = <-read
	}
	_ = cmd.Wait() // the exit code says it
	o.code, o.stdout, o.stderr = cmd.ProcessState.ExitCode(), strings.Join(lines, "\n"), said.text()
	if o.code < 0 {
		h.c.wrongf("%s: %s: %v", h.name, o, cmd.ProcessState)
	}
	return o, lines
}

// firstWrite keeps what is written, and tells when that begins. Only one goroutine writes, until text is called.
type firstWrite struct {
	wrote chan struct{}
	all   []byte
}

func (w *firstWrite) Write(b []byte) (int, error) {
	if len(w.all) == 0 {
		close(w.wrote)
	}
	w.all = append(w.all, b...)
	return len(b), nil
}

func (w *firstWrite) text() string { return string(w.all) }

// pullGolden pulls a generation that another host has published, under its name or another, and makes a clone of it.
func (h *host) pullGolden() {
	f, ok := h.anyPoint(func(f found) bool { return f.head.golden && f.head.name != h.golden })
	if !ok || len(h.volumes) >= maxVolumes {
		return
	}
	args, name := []string{"pull", "nas", f.ref()}, f.head.name
	if h.r.IntN(2) == 0 {
		name = h.fresh("q")
		args = append(args, "--as", name)
	}
	h.c.mu.Lock()
	h.c.m.named[name+"@"+f.name] = f.contents[0] // even if it does not say that it has succeeded
	h.c.mu.Unlock()
	o := h.run(h.trouble(), args...)
	if !h.succeeded(o, codeExists) {
		return
	}
	v := &volume{name: h.fresh("v")}
	h.must("clone", name+"@"+f.name, v.name)
	h.compare(v, f, o)
	h.volumes[v.name] = v
	if !h.c.failed() && h.r.IntN(2) == 0 {
		h.pushRef(v.name, v.name, "", v, v.content)
	}
}
