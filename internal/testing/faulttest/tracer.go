//go:build linux && (amd64 || arm64)

package faulttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// A tracer runs one program. Except for cancel, which only sends signals,
// everything happens on one locked thread.
type tracer struct {
	opt   Options
	res   Result
	probe bool // kill the program before its first instruction: only see whether tracing works

	pid     int // the program; 0 before it is started and after it was waited for
	threads map[int]*thread
	killed  bool        // the plan's kill was sent
	cpus    unix.CPUSet // that the program believes to have, unless AllCPUs

	mu       sync.Mutex
	pidfds   map[int]int // of each traced process, by its id: safe against reuse of the id
	canceled bool
	cut      bool // something was still there when the context ended
}

// thread is a traced thread.
type thread struct {
	caller
	pid int

	// step is the step that the thread is in, from its entry stop to its exit
	// stop, or to the repetition of a call that a signal interrupted.
	step   *step
	entry  entry
	inStep bool // the call that the thread is in is that step, not one of a signal's handler

	cpuMask uint64 // where the sched_getaffinity that it is in puts its result
}

// step is a Step under way.
type step struct {
	index  int // in res.Steps, and its Step.Index
	struck bool
	spawn  bool
}

// entry is what identifies a call that is repeated after a signal.
type entry struct {
	nr   uint64
	args args
	sp   uint64
}

func newTracer(opt Options) *tracer {
	return &tracer{opt: opt, threads: make(map[int]*thread), pidfds: make(map[int]int)}
}

// run starts the program and drives it to its end.
func (tr *tracer) run(ctx context.Context, path string, cmd []string, files stdio) error {
	if err := tr.start(path, cmd, files); err != nil {
		return err
	}

	stop := context.AfterFunc(ctx, tr.cancel)
	defer stop()

	if tr.probe {
		tr.kill()
	} else if err := tr.resume(tr.pid, 0); err != nil {
		return err
	}

	for !tr.over() {
		tid, status, err := tr.wait()
		if errors.Is(err, unix.ECHILD) {
			break
		}
		if err != nil {
			return err
		}
		if err := tr.handle(tid, status); err != nil && !errors.Is(err, unix.ESRCH) {
			// ESRCH: the thread was killed while it was looked at; its end will be reported.
			return err
		}
	}

	tr.mu.Lock()
	defer tr.mu.Unlock()

	if tr.cut {
		return fmt.Errorf("killed after %d steps: %w", len(tr.res.Steps), ctx.Err())
	}

	return nil
}

// over says whether there is nothing to wait for. When processes are followed
// only wait itself can tell: the first stop of a new one may still be to come.
func (tr *tracer) over() bool { return tr.pid == 0 && !tr.opt.FollowProcesses }

const options = unix.PTRACE_O_TRACESYSGOOD | // tell system call stops from SIGTRAP
	unix.PTRACE_O_EXITKILL | // nothing survives a test that dies
	unix.PTRACE_O_TRACECLONE | // new threads, before their first instruction; not fork and vfork
	unix.PTRACE_O_TRACEEXEC // or exec would send a SIGTRAP

// start starts the program and leaves it stopped, attached, at its first instruction.
func (tr *tracer) start(path string, cmd []string, files stdio) error {
	env := tr.opt.Env
	if env == nil {
		env = os.Environ()
	}

	if !tr.opt.AllCPUs {
		var err error
		if tr.cpus, err = pin(); err != nil {
			return fmt.Errorf("set the CPU: %w", err)
		}
	}

	pidfd := -1
	pid, err := syscall.ForkExec(path, cmd, &syscall.ProcAttr{
		Dir:   tr.opt.Dir,
		Env:   env,
		Files: files.fds(),
		Sys: &syscall.SysProcAttr{
			Ptrace:    true, // stops it when it has executed the program
			Setpgid:   true,
			Pdeathsig: syscall.SIGKILL, // EXITKILL does not cover the moment between detaching and seizing
			PidFD:     &pidfd,
		},
	})
	if err != nil {
		return fmt.Errorf("start: %w", err)
	}

	tr.pid = pid
	tr.res.PID = pid
	tr.addProcess(pid, pidfd)
	if err := tr.awaitStop(unix.SIGTRAP, 0); err != nil {
		return fmt.Errorf("attach: %w", err)
	}

	// PTRACE_TRACEME is the only way to stop a program that early, but only
	// PTRACE_SEIZE tells group stops from signals and lets a stopped program
	// stay stopped. So let go of it with a SIGSTOP and take hold of it again.
	if err := ptrace(unix.PTRACE_DETACH, pid, 0, uintptr(unix.SIGSTOP)); err != nil {
		return fmt.Errorf("detach: %w", err)
	}

	if err := tr.awaitStop(unix.SIGSTOP, 0); err != nil {
		return fmt.Errorf("stop: %w", err)
	}

	opts := uintptr(options)
	if tr.opt.FollowProcesses {
		opts |= unix.PTRACE_O_TRACEFORK | unix.PTRACE_O_TRACEVFORK
	}

	if err := ptrace(unix.PTRACE_SEIZE, pid, 0, opts); err != nil {
		return fmt.Errorf("seize: %w", err)
	}

	if err := tr.awaitStop(unix.SIGSTOP, eventStop); err != nil {
		return fmt.Errorf("seize: %w", err)
	}

	tr.adopt(pid)
	var info syscallInfo
	if err := getSyscallInfo(pid, &info); err != nil {
		return fmt.Errorf("PTRACE_GET_SYSCALL_INFO, of Linux 5.3 and later: %w", err)
	}

	if info.Arch != auditArch {
		return fmt.Errorf("the program is of another architecture (%#x) than this one", info.Arch)
	}

	// The program does not see this: it comes before its first instruction.
	return unix.Kill(pid, unix.SIGCONT)
}

// awaitStop waits for the program to stop, for the reason given.
func (tr *tracer) awaitStop(sig unix.Signal, event int) error {
	var status unix.WaitStatus
	for {
		_, err := unix.Wait4(tr.pid, &status, unix.WALL|unix.WNOTHREAD|unix.WUNTRACED, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		break
	}

	if status.Exited() || status.Signaled() {
		tr.ended(tr.pid, status)
		return fmt.Errorf("the program ended early (status %#x)", uint32(status))
	}

	if !status.Stopped() || status.StopSignal() != sig || int(status)>>16 != event {
		return fmt.Errorf("the program stopped with status %#x, not for %v", uint32(status), sig)
	}

	return nil
}

// wait returns the next event of a traced thread. It must not take the
// children of others in this process. WNOTHREAD leaves out those of other
// threads. But this thread may have children that are not traced: it can have
// run os/exec for somebody before it became a tracer, and when a thread ends, the
// kernel gives its children to any other. WCLONE leaves those out too: it stands
// for children that signal no SIGCHLD when they end, and for whatever is traced.
func (tr *tracer) wait() (int, unix.WaitStatus, error) {
	for {
		var status unix.WaitStatus
		tid, err := unix.Wait4(-1, &status, unix.WCLONE|unix.WNOTHREAD, nil)
		if !errors.Is(err, unix.EINTR) {
			return tid, status, err
		}
	}
}

// addProcess registers a process by its pidfd; -1 opens one.
func (tr *tracer) addProcess(pid, pidfd int) {
	if pidfd < 0 {
		var err error
		if pidfd, err = unix.PidfdOpen(pid, 0); err != nil {
			return // it ended just now
		}
	}

	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.pidfds[pid] = pidfd
	if tr.canceled || tr.killed {
		_ = unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
	}
}

// kill sends SIGKILL to every traced process. Whatever the program is doing,
// none of its threads begins another system call after this: the kernel drops
// calls that are being entered.
func (tr *tracer) kill() {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for _, pidfd := range tr.pidfds {
		_ = unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0) // may have ended already
	}
}

// cancel kills everything that belongs to the program. It runs on another
// goroutine, when the context ends.
func (tr *tracer) cancel() {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.canceled = true
	tr.cut = len(tr.pidfds) > 0
	if _, alive := tr.pidfds[tr.res.PID]; alive {
		_ = unix.Kill(-tr.res.PID, unix.SIGKILL) // the group is there, as its leader is
	}
	for _, pidfd := range tr.pidfds {
		_ = unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
	}
}

// abandon makes sure that nothing is left, however run ended.
func (tr *tracer) abandon() {
	tr.cancel()
	for !tr.over() {
		tid, status, err := tr.wait()
		if err != nil {
			break // ECHILD
		}
		if status.Exited() || status.Signaled() {
			tr.ended(tid, status)
		} else if tr.threads[tid] == nil {
			tr.adopt(tid) // and so kill, if it is a new process
		}
	}

	tr.mu.Lock()
	defer tr.mu.Unlock()
	for pid, pidfd := range tr.pidfds {
		_ = unix.Close(pidfd)
		delete(tr.pidfds, pid)
	}
}

// handle deals with one event.
func (tr *tracer) handle(tid int, status unix.WaitStatus) error {
	if status.Exited() || status.Signaled() {
		tr.ended(tid, status)
		return nil
	}

	if !status.Stopped() {
		return nil
	}

	tr.res.Stops++
	th := tr.threads[tid]
	if th == nil {
		th = tr.adopt(tid)
		if !th.isProgram && !tr.opt.FollowProcesses {
			// A child made by a clone that signals no SIGCHLD is attached like a thread.
			delete(tr.threads, tid)
			return ptrace(unix.PTRACE_DETACH, tid, 0, 0)
		}
	}

	sig := status.StopSignal()
	switch event := int(status) >> 16; {
	case event == 0 && sig == unix.SIGTRAP|syscallStopFlag:
		return tr.syscallStop(th)
	case event == 0:
		return tr.resume(tid, sig) // a signal, on its way to the program
	case event == eventStop && sig != unix.SIGTRAP:
		return ptrace(unix.PTRACE_LISTEN, tid, 0, 0) // a group stop: it stays stopped until SIGCONT
	case event == unix.PTRACE_EVENT_EXEC:
		if err := tr.executed(th); err != nil {
			return err
		}
	}

	return tr.resume(tid, 0)
}

func (tr *tracer) resume(tid int, sig unix.Signal) error {
	return ptrace(unix.PTRACE_SYSCALL, tid, 0, uintptr(sig))
}

// adopt registers a thread seen for the first time.
func (tr *tracer) adopt(tid int) *thread {
	pid := tid
	if tid != tr.res.PID {
		pid = threadGroup(tid)
	}
	th := &thread{pid: pid}
	th.caller = caller{tid: tid, isProgram: pid == tr.res.PID, opt: &tr.opt}
	tr.threads[tid] = th
	if tid == pid && !th.isProgram && tr.opt.FollowProcesses {
		tr.addProcess(tid, -1)
	}
	return th
}

// threadGroup returns the process that thread tid belongs to.
func threadGroup(tid int) int {
	status, _ := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/status")
	_, rest, _ := strings.Cut(string(status), "\nTgid:")
	line, _, _ := strings.Cut(rest, "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		return tid // it is just being killed
	}
	return pid
}

// executed: the thread replaced the program of its process, whose other
// threads are gone without further notice, and has the process's id now.
func (tr *tracer) executed(th *thread) error {
	former, err := getEventMsg(th.tid)
	if err != nil {
		return err
	}

	if old := tr.threads[former]; old != nil {
		th.step, th.entry, th.inStep = old.step, old.entry, old.inStep
	}

	for tid, other := range tr.threads {
		if other.pid == th.pid && tid != th.tid {
			delete(tr.threads, tid)
		}
	}

	return nil
}

// ended: a thread is gone, and was waited for. That of a process's first
// thread is reported last.
func (tr *tracer) ended(tid int, status unix.WaitStatus) {
	if th := tr.threads[tid]; th != nil && th.step != nil && th.step.struck {
		tr.fired(th.step) // the program ended by itself before it could be killed
	}

	delete(tr.threads, tid)
	tr.mu.Lock()
	defer tr.mu.Unlock()

	pidfd, isProcess := tr.pidfds[tid]
	if !isProcess {
		return
	}

	_ = unix.Close(pidfd)
	delete(tr.pidfds, tid)
	for other, th := range tr.threads {
		if th.pid == tid {
			delete(tr.threads, other)
		}
	}

	if tid == tr.pid {
		tr.pid = 0
		tr.res.ExitCode = status.ExitStatus() // -1 if by signal
		if status.Signaled() {
			tr.res.Signal = status.Signal()
		}
	}
}

func (tr *tracer) syscallStop(th *thread) error {
	var info syscallInfo
	if err := getSyscallInfo(th.tid, &info); err != nil {
		return err
	}

	if !tr.killed {
		var err error
		switch info.Op {
		case unix.PTRACE_SYSCALL_INFO_ENTRY:
			err = tr.enter(th, &info)
		case unix.PTRACE_SYSCALL_INFO_EXIT:
			err = tr.leave(th, &info)
		}
		if err != nil {
			return err
		}
	}

	return tr.resume(th.tid, 0)
}

// enter is called when a thread is about to make a system call.
func (tr *tracer) enter(th *thread, info *syscallInfo) error {
	th.inStep = false
	nr := info.nr()
	if nr == unix.SYS_SCHED_GETAFFINITY && !tr.opt.AllCPUs {
		th.cpuMask = info.args()[2]
	}

	if nr >= uint64(len(calls)) || calls[nr] == nil || info.Arch != auditArch {
		// Not in the table. If a step of this thread waits to be repeated, this
		// is a call of the signal's handler, or a restart_syscall.
		return nil
	}

	e := entry{nr: nr, args: info.args(), sp: info.SP}
	if th.step != nil && th.entry == e {
		th.inStep = true
		return nil // the same step once more, after a signal
	}

	if th.step != nil && th.step.struck {
		// The step was interrupted and not repeated, so it came to its end
		// unnoticed. (It is not a Fail's: those end at once.)
		return tr.strikeBefore(th, th.step)
	}

	th.step = nil
	w, ok := calls[nr].decode(&th.caller, e.args)
	if !ok {
		return nil
	}

	s := Step{Index: len(tr.res.Steps), Name: calls[nr].name, Detail: w.String(), Paths: w.paths, PID: th.pid, TID: th.tid}
	if !tr.opt.Plan.wants(s) {
		return nil
	}

	tr.res.Steps = append(tr.res.Steps, s)
	st := &step{index: s.Index, spawn: isSpawn(s.Name)}
	th.step, th.entry, th.inStep = st, e, true

	plan := &tr.opt.Plan
	st.struck = s.Index == plan.At || plan.Sticky && s.Index > plan.At
	if !st.struck {
		return nil
	}

	switch plan.Mode {
	case Observe, KillAfter:
		st.struck = plan.Mode == KillAfter
		return nil
	case KillBefore:
		return tr.strikeBefore(th, st)
	case Fail:
		if err := skipSyscall(th.tid); err != nil {
			return err
		}
		tr.fired(st)
		return nil
	}

	return fmt.Errorf("unknown %v", plan.Mode)
}

// leave is called when a system call has been made, before the program knows.
func (tr *tracer) leave(th *thread, info *syscallInfo) error {
	if th.cpuMask != 0 {
		pretend(th.tid, th.cpuMask, info.result(), &tr.cpus)
		th.cpuMask = 0
	}

	st := th.step
	if st == nil || !th.inStep {
		return nil
	}

	fail := st.struck && tr.opt.Plan.Mode == Fail
	if !fail && willRestart(info.result()) {
		return nil // not made yet; th.step stays
	}

	th.step = nil
	s := &tr.res.Steps[st.index]
	s.Done = true
	switch {
	case fail:
		s.Err = tr.opt.Plan.Errno
		if err := setResult(th.tid, -int64(s.Err)); err != nil {
			return err
		}
	case info.failed():
		s.Err = syscall.Errno(-info.result())
	case st.spawn && info.result() > 0:
		tr.res.Spawned = append(tr.res.Spawned, int(info.result()))
		s.Detail = commandOf(int(info.result()))
	}

	switch {
	case fail:
		tr.fired(st) // again, now with its result
	case st.struck:
		tr.strike(st)
	}

	return nil
}

// fired records the plan's step; the first one, if there are several.
func (tr *tracer) fired(st *step) {
	if !tr.res.Fired || tr.res.FiredAt.Index == st.index {
		tr.res.Fired = true
		tr.res.FiredAt = tr.res.Steps[st.index]
	}
}

// strikeBefore kills the program and makes sure that the call that th is
// about to make has no effect. The kernel drops it because of the signal; this
// does not depend on it.
func (tr *tracer) strikeBefore(th *thread, st *step) error {
	if err := skipSyscall(th.tid); err != nil {
		return err
	}
	tr.strike(st)
	return nil
}

// strike kills what the plan says.
func (tr *tracer) strike(st *step) {
	tr.fired(st)
	tr.killed = true
	tr.kill()
	if tr.opt.KillGroup && tr.pid != 0 {
		_ = unix.Kill(-tr.pid, unix.SIGKILL)
	}
}

func isSpawn(name string) bool {
	switch name {
	case "clone", "clone3", "fork", "vfork":
		return true
	}
	return false
}

// commandOf returns the command line of a process, or its name if that is all
// that is left of it.
func commandOf(pid int) string {
	dir := "/proc/" + strconv.Itoa(pid) + "/"
	line, _ := os.ReadFile(dir + "cmdline")
	if len(line) == 0 {
		line, _ = os.ReadFile(dir + "comm")
	}
	return string(bytes.TrimSpace(bytes.ReplaceAll(line, []byte{0}, []byte{' '})))
}
