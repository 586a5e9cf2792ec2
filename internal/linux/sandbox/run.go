package sandbox

import (
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// ExitTimedOut is the exit status of a program that a timeout ended, as of timeout(1).
const ExitTimedOut = 124

// opSandbox is the operation in errors.
const opSandbox = "sandbox"

// Files of the init besides the standard ones.
const (
	controlFD = 3 // channel
	specFD    = 4 // the spec
	exeFD     = 5 // the program, which the init closes
	givenFD   = 6 // Options.Given, if there is one
)

// Comm is the name of a sandbox's init in /proc/PID/comm.
const Comm = "pando-init"

// initName is the init's argv[0].
const initName = "pando-sandbox-init"

// served is set when the main function of this program has called Init.
var served atomic.Bool

// Run runs a program in a sandbox and returns when it and every other process of the sandbox has ended. If ctx ends,
// it kills them. An error means that the program did not run, or that it is unknown how it ended. NotFound: no such
// program, user or directory. Permission: the caller may not make such a sandbox; the hint names what forbids it.
// Unsupported: the kernel lacks something. Invalid: the spec, or a symbolic link where a mount should be. Internal:
// this program has not called Init.
//
// The calling goroutine stays on one thread, because the kernel kills the init when the thread that started it ends.
func Run(ctx context.Context, s Spec, o Options) (Result, error) {
	if !served.Load() {
		return Result{}, errs.New(errs.Internal, opSandbox, "", "this program cannot start the first process of a sandbox").
			WithHint("call engine.Helper(os.Args) first in the main function of this program")
	}

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	var arriving <-chan os.Signal
	if o.Signals != nil {
		var stop func()
		arriving, stop = o.Signals()
		defer stop()
	}

	stdio, err := newStdio(o)
	if err != nil {
		return Result{}, errs.Wrap(opSandbox, "", err)
	}

	defer stdio.close()

	p, err := startInit(s, o, stdio)
	if err != nil {
		return Result{}, errs.Wrap(opSandbox, "", err)
	}

	r, err := p.supervise(ctx, o, stdio, arriving)
	return r, errs.Wrap(opSandbox, "", err)
}

// process is the init of a sandbox, seen from outside.
type process struct {
	cmd     *exec.Cmd
	control channel
}

// initSpec is what the init gets.
type initSpec struct {
	Spec
	Terminal [3]bool // which standard files are the sandbox's terminal
}

// startInit starts the init, and lets it begin after everything outside is ready.
func startInit(s Spec, o Options, stdio *stdio) (_ *process, err error) {
	spec, err := specFile(initSpec{s, stdio.terminal})
	if err != nil {
		return nil, err
	}

	defer spec.Close()

	exe, err := protectedExecutable()
	if err != nil {
		return nil, err
	}

	defer exe.Close()

	ours, theirs, err := newChannel()
	if err != nil {
		return nil, err
	}

	defer func() {
		if err != nil {
			unix.Close(ours.fd)
		}
	}()

	// Start it. It waits for a message. Any other descriptor of this process may be overwritten before the child runs its
	// program, which is why the program has a number of its own there.
	control := os.NewFile(uintptr(theirs.fd), "control")
	cmd := &exec.Cmd{
		Path: fmt.Sprintf("/proc/self/fd/%d", exeFD), Args: []string{initName}, Env: []string{"GOMAXPROCS=2"}, Dir: "/",
		Stdin: stdio.files[0], Stdout: stdio.files[1], Stderr: stdio.files[2],
		ExtraFiles: []*os.File{control, spec, exe}, SysProcAttr: attributes(s),
	}

	if o.Given != nil {
		cmd.ExtraFiles = append(cmd.ExtraFiles, o.Given)
	}

	err = cmd.Start()
	control.Close()
	stdio.closeInner()
	if err != nil {
		return nil, explainStart(s, err)
	}

	// Prepare what only this process can.
	p := &process{cmd, ours}
	if s.UserNS != nil && s.UserNS.Helpers {
		err = mapIDs(cmd.Process.Pid, s.UserNS)
	}
	if err == nil && o.Enter != nil {
		err = o.Enter(cmd.Process.Pid)
	}
	if err == nil {
		err = ours.send(message{Go: true}, -1)
	}
	if err != nil {
		p.kill()
		_ = cmd.Wait()
		return nil, err
	}

	return p, nil
}

// specFile returns a file in memory with the spec. It is not JSON, which cannot hold arguments and paths that are no
// UTF-8.
func specFile(s initSpec) (*os.File, error) {
	fd, err := unix.MemfdCreate("pando-sandbox", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}

	f := os.NewFile(uintptr(fd), "spec")
	if err = gob.NewEncoder(f).Encode(s); err == nil {
		_, err = f.Seek(0, 0)
	}
	if err != nil {
		f.Close()
		return nil, err
	}

	return f, nil
}

// attributes says in which namespaces the init starts.
func attributes(s Spec) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{
		Setsid: true, Pdeathsig: syscall.SIGKILL,
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
	}
	if !s.HostNet {
		a.Cloneflags |= unix.CLONE_NEWNET
	}

	if u := s.UserNS; u != nil {
		a.Cloneflags |= unix.CLONE_NEWUSER

		// Running a program would take the capabilities from a user that is not 0 in the namespace.
		for c := range uintptr(unix.CAP_LAST_CAP + 1) {
			a.AmbientCaps = append(a.AmbientCaps, c)
		}

		if !u.Helpers {
			a.UidMappings, a.GidMappings = sysMaps(u.UIDs, os.Getuid()), sysMaps(u.GIDs, os.Getgid())
			a.GidMappingsEnableSetgroups = os.Geteuid() == 0
		}
	}

	return a
}

func sysMaps(maps []IDMap, own int) []syscall.SysProcIDMap {
	if len(maps) == 0 {
		maps = []IDMap{{Inside: 0, Host: own, Size: 1}}
	}
	out := make([]syscall.SysProcIDMap, len(maps))
	for i, m := range maps {
		out[i] = syscall.SysProcIDMap{ContainerID: m.Inside, HostID: m.Host, Size: m.Size}
	}
	return out
}

// kill kills every process of the sandbox.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // the kernel kills the rest of its namespace
}

// received is a message of the init, or the end of its messages.
type received struct {
	message
	file *os.File
	err  error
}

// supervise relays between this process and the sandbox until the sandbox has ended.
func (p *process) supervise(
	ctx context.Context, o Options, stdio *stdio, arriving <-chan os.Signal,
) (r Result, err error) {
	// Whatever happens, no process of the sandbox outlives this call. The channel is closed after its last reader has
	// ended: another sandbox may get the number of its descriptor.
	arrived := p.listen()
	defer func() {
		p.kill()
		_ = p.cmd.Wait() // all of its namespace is dead then
		for m := range arrived {
			m.file.Close()
		}
		unix.Close(p.control.fd)
		stdio.finish()
	}()

	var timeout <-chan time.Time
	for {
		select {
		case m := <-arrived:
			switch {
			case m.err != nil:
				return r, p.died(ctx, r)
			case m.Error != nil:
				return r, m.Error.error()
			case m.Master:
				if err := stdio.relayTerminal(m.file); err != nil {
					return r, err
				}
			case m.Started && o.Timeout > 0:
				timeout = time.After(o.Timeout)
			case m.Ended && r.TimedOut:
				return Result{Exit: ExitTimedOut, TimedOut: true}, nil
			case m.Ended:
				return Result{Exit: m.Exit}, nil
			}

		case s := <-arriving:
			p.pass(s, o, stdio)

		case <-timeout:
			if r.TimedOut { // it did not end when it was asked to
				return Result{Exit: ExitTimedOut, TimedOut: true}, nil
			}
			r.TimedOut, timeout = true, time.After(o.Grace)
			p.signal(syscall.SIGTERM, false)
			p.signal(syscall.SIGCONT, false)

		case <-ctx.Done():
			return r, ctx.Err()
		}
	}
}

// listen receives the init's messages in a goroutine that ends with the init, and closes the channel then.
func (p *process) listen() <-chan received {
	c, arrived := p.control, make(chan received, 4)
	go func() {
		defer close(arrived)
		for {
			m, file, err := c.receive()
			arrived <- received{m, file, err}
			if err != nil {
				return
			}
		}
	}()
	return arrived
}

// died returns the error of a sandbox whose init ended without a word, such as for want of memory.
func (p *process) died(ctx context.Context, r Result) error {
	if err := ctx.Err(); err != nil {
		return err
	}

	_ = p.cmd.Wait()
	how := "unknown"
	if st := p.cmd.ProcessState; st != nil {
		how = st.String()
	}
	return errs.New(errs.Internal, opSandbox, "", "the first process of the sandbox ended early (%s)", how).
		WithHint("check whether it ran out of memory: raise the limit, or read the kernel's log with `dmesg`")
}

// pass passes a signal of this process on to the program.
func (p *process) pass(s os.Signal, o Options, stdio *stdio) {
	number, ok := s.(syscall.Signal)
	switch {
	case !ok:
	case number == syscall.SIGWINCH:
		stdio.resize()
	case number == syscall.SIGTSTP && o.Suspend != nil:
		// Stop the program with certainty: SIGTSTP does not stop a session without a shell above it.
		p.signal(syscall.SIGSTOP, true)
		stdio.suspended(o.Suspend)
		p.signal(syscall.SIGCONT, true)
	default:
		p.signal(number, false)
	}
}

// signal sends a signal to the program. It has no effect if the program has ended.
func (p *process) signal(s syscall.Signal, group bool) {
	_ = p.control.send(message{Signal: s, Group: group}, -1)
}

// mapIDs lets newuidmap and newgidmap write the ID maps of the init.
func mapIDs(pid int, u *UserNS) error {
	for name, m := range map[string][]IDMap{"newuidmap": u.UIDs, "newgidmap": u.GIDs} {
		path, err := exec.LookPath(name)
		if err != nil {
			return errs.New(errs.Unsupported, opSandbox, name, "program not found").
				WithHint("install it: `apt-get install uidmap`, or use only your own user ID")
		}

		args := []string{strconv.Itoa(pid)}
		for _, e := range m {
			args = append(args, strconv.Itoa(e.Inside), strconv.Itoa(e.Host), strconv.Itoa(e.Size))
		}

		if out, err := exec.Command(path, args...).CombinedOutput(); err != nil {
			return errs.New(errs.Permission, opSandbox, name, "%w: %s", err, string(out)).
				WithHint("check your ranges in /etc/subuid and /etc/subgid")
		}
	}

	return nil
}

// explainStart returns the error of creating the namespaces, with what forbids it.
func explainStart(s Spec, err error) error {
	if !errs.IsAny(err, unix.EPERM, unix.EACCES, unix.ENOSPC, unix.EUSERS, unix.EINVAL, unix.ENOSYS) {
		return err
	}

	if s.UserNS == nil {
		return errs.New(errs.KindOf(err), opSandbox, "", "cannot create namespaces: %w", err).
			WithHint("run it as root")
	}

	e := errs.New(errs.Permission, opSandbox, "", "unprivileged user namespaces are forbidden on this host: %w", err)
	for _, limit := range []struct{ file, sysctl, bad, good string }{
		{"/proc/sys/kernel/unprivileged_userns_clone", "kernel.unprivileged_userns_clone", "0", "1"},
		{"/proc/sys/user/max_user_namespaces", "user.max_user_namespaces", "0", "10000"},
		{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "kernel.apparmor_restrict_unprivileged_userns", "1", "0"},
	} {
		if value, err := os.ReadFile(limit.file); err == nil && string(trimSpace(value)) == limit.bad {
			return e.WithHint("as root, run `sysctl -w %s=%s`", limit.sysctl, limit.good)
		}
	}

	if errors.Is(err, unix.ENOSPC) {
		return e.WithHint("as root, raise a limit: `sysctl -w user.max_user_namespaces=10000`")
	}
	return e.WithHint("a container or a security module forbids it: allow it there, or run it as root")
}
