package sandbox

import (
	"encoding/gob"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"unsafe"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Init is the main function of the init if Run has started this process as one, and then never returns; otherwise it
// only enables Run. The main function of each program that uses Run must call it with [os.Args] before anything else.
func Init(args []string) {
	if len(args) == 1 && args[0] == initName {
		runtime.LockOSThread()
		os.Exit(initMain(channel{controlFD}))
	}
	served.Store(true)
}

// initMain sets the sandbox up, runs the program and reaps what it leaves behind. When it returns, the kernel kills
// every other process of the sandbox.
func initMain(control channel) int {
	// Show the user of a sandbox what this process is.
	_ = unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(unsafe.StringData(Comm+"\x00"))), 0, 0, 0)

	// Signals from the sandbox must not end the init. A handler, unlike SIG_IGN, is not inherited.
	signal.Notify(make(chan os.Signal, 1))

	program, ready := &target{}, make(chan struct{}, 1)
	go obey(control, program, ready)
	<-ready

	pid, err := setUp(control)
	if err != nil {
		_ = control.send(message{Error: toWire(err)}, -1)
		return 1
	}

	program.start(pid)
	_ = control.send(message{Started: true}, -1)
	_ = control.send(message{Ended: true, Exit: reap(pid)}, -1)
	return 0
}

// obey follows the messages of Run. If that process ends, so does the init.
func obey(control channel, program *target, ready chan<- struct{}) {
	for {
		m, _, err := control.receive()
		if err != nil {
			os.Exit(1) // and every process of the sandbox with it
		}

		if m.Go {
			ready <- struct{}{}
			continue
		}
		program.signal(m)
	}
}

// target is the program, which signals may reach before it has started.
type target struct {
	mu      sync.Mutex
	pid     int // 0: not yet
	waiting []message
}

func (t *target) signal(m message) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.pid == 0:
		t.waiting = append(t.waiting, m)
	case m.Group:
		_ = unix.Kill(-t.pid, m.Signal)
	default:
		_ = unix.Kill(t.pid, m.Signal)
	}
}

func (t *target) start(pid int) {
	t.mu.Lock()
	waiting := t.waiting
	t.pid = pid
	t.mu.Unlock()
	for _, m := range waiting {
		t.signal(m)
	}
}

// reap waits for the program, and for all orphans in the meantime. It returns the program's exit status.
func reap(program int) int {
	for {
		var st syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &st, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return 126
		case pid == program && st.Signaled():
			return 128 + int(st.Signal())
		case pid == program && st.Exited():
			return st.ExitStatus()
		}
	}
}

// setUp makes the sandbox around this process, and starts the program in it.
func setUp(control channel) (pid int, err error) {
	unix.Close(exeFD)
	s, err := readSpec()
	if err != nil {
		return 0, err
	}

	// Nothing in the sandbox may look into this process, or inherit its files.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return 0, fmt.Errorf("prctl: %w", err)
	}
	if err := unix.CloseRange(controlFD, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return 0, fmt.Errorf("close_range: %w", err)
	}

	if err := becomeRootInside(s); err != nil {
		return 0, err
	}

	// What it sees.
	umask := unix.Umask(0o022)
	err = makeTree(s.Spec)
	unix.Umask(umask)
	if err != nil {
		return 0, err
	}

	if s.Hostname != "" {
		if err := unix.Sethostname([]byte(s.Hostname)); err != nil {
			return 0, fmt.Errorf("sethostname: %w", err)
		}
	}

	if !s.HostNet {
		if err := loopbackUp(); err != nil {
			return 0, err
		}
	}

	// Who it is.
	who, err := findUser(s.Spec)
	if err != nil {
		return 0, err
	}

	tty, err := openTerminal(control, s.Terminal, who)
	if err != nil {
		return 0, err
	}

	return startProgram(s, who, tty)
}

func readSpec() (s initSpec, err error) {
	f := os.NewFile(specFD, "spec")
	defer f.Close()
	if err := gob.NewDecoder(f).Decode(&s); err != nil {
		return s, fmt.Errorf("reading the spec: %w", err)
	}
	if len(s.Command) == 0 {
		return s, errs.New(errs.Invalid, opSandbox, "", "no command to run")
	}
	return s, nil
}

// becomeRootInside makes the init user 0 of its user namespace, if there is one and it has such a user: helpers map
// users after the init has started as one that is not mapped.
func becomeRootInside(s initSpec) error {
	if s.UserNS == nil || !s.UserNS.Helpers || !maps0(s.UserNS.UIDs) || !maps0(s.UserNS.GIDs) {
		return nil
	}
	if err := unix.Setresgid(0, 0, 0); err != nil {
		return fmt.Errorf("setresgid: %w", err)
	}
	if err := unix.Setresuid(0, 0, 0); err != nil {
		return fmt.Errorf("setresuid: %w", err)
	}
	return nil
}

func maps0(maps []IDMap) bool {
	for _, m := range maps {
		if m.Inside == 0 && m.Size > 0 {
			return true
		}
	}
	return false
}

// loopbackUp turns on the loopback device, which is down in a new network namespace.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}

	defer unix.Close(fd)

	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}

	request.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request); err != nil {
		return fmt.Errorf("turning on the loopback device: %w", err)
	}

	return nil
}

// openTerminal opens a terminal of the sandbox if the program needs one, and passes its other side to Run. nil: none.
func openTerminal(control channel, wanted [3]bool, who user) (*os.File, error) {
	if wanted == [3]bool{} {
		return nil, nil
	}

	const path = "/dev/ptmx"
	master, err := unix.Open(path, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errs.Wrap(opSandbox, path, fmt.Errorf("open: %w", err))
	}

	defer unix.Close(master)

	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return nil, fmt.Errorf("unlocking the terminal: %w", err)
	}

	flags := uintptr(unix.O_RDWR | unix.O_NOCTTY | unix.O_CLOEXEC)
	slave, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, flags)
	if e != 0 {
		return nil, fmt.Errorf("opening the terminal: %w", e)
	}

	tty := os.NewFile(slave, "terminal")
	if err := unix.Fchown(int(slave), who.uid, -1); err != nil && who.uid != os.Geteuid() {
		tty.Close()
		return nil, fmt.Errorf("chown of the terminal: %w", err)
	}

	return tty, control.send(message{Master: true}, master)
}

// startProgram starts the program from a thread that has given up every privilege, and that ends then.
func startProgram(s initSpec, who user, tty *os.File) (pid int, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlock: the thread ends with the goroutine
		if err = who.become(s.Spec); err == nil {
			s.Env = who.environment(s.Env)
			pid, err = execProgram(s, tty)
		}
	}()
	<-done

	if tty != nil {
		tty.Close()
	}
	for fd := range 3 {
		closeStandard(fd) // or a program at the other end of a pipe would not see that ours has closed it
	}
	return pid, err
}

// closeStandard replaces a standard file of the init with nothing.
func closeStandard(fd int) {
	if null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
		_ = unix.Dup3(null, fd, 0)
		unix.Close(null)
		return
	}
	unix.Close(fd)
}

// execProgram starts the program with the privileges of this thread.
func execProgram(s initSpec, tty *os.File) (pid int, err error) {
	path, err := lookUp(s.Command[0], s.Env, s.Dir)
	if err != nil {
		return 0, err
	}

	attr := &syscall.ProcAttr{Dir: s.Dir, Env: s.Env, Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true}}
	if attr.Dir == "" {
		attr.Dir = "/"
	}
	for i := 2; i >= 0; i-- {
		if s.Terminal[i] {
			attr.Files[i], attr.Sys.Setctty, attr.Sys.Ctty = tty.Fd(), true, i
		}
	}

	pid, err = syscall.ForkExec(path, s.Command, attr)
	if err == nil {
		return pid, nil
	}

	// Tell a missing directory from a missing program.
	var st unix.Stat_t
	if e := unix.Stat(attr.Dir, &st); e != nil {
		return 0, errs.Wrap(opSandbox, attr.Dir, fmt.Errorf("working directory in the sandbox: %w", e))
	}
	return 0, programError(s.Command[0], err)
}

// lookUp returns the path of a program in the sandbox, in the PATH that the program gets.
func lookUp(name string, env []string, dir string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}

	path := "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	for _, entry := range env {
		if value, found := strings.CutPrefix(entry, "PATH="); found {
			path = value
		}
	}

	denied := error(unix.ENOENT)
	for dir := range strings.SplitSeq(path, ":") {
		if !strings.HasPrefix(dir, "/") {
			continue
		}

		var st unix.Stat_t
		file := dir + "/" + name
		if err := unix.Stat(file, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
			continue
		}
		if err := unix.Access(file, unix.X_OK); err != nil {
			denied = err
			continue
		}
		return file, nil
	}

	return "", programError(name, denied)
}

func programError(name string, err error) error {
	switch {
	case errors.Is(err, unix.ENOENT):
		return errs.New(errs.NotFound, opSandbox, name, "no such program in the sandbox").
			WithHint("install it in the golden; a script also needs its interpreter, and a program its libraries")
	case errors.Is(err, unix.ENOEXEC):
		return errs.New(errs.Invalid, opSandbox, name, "not a program for this machine: %w", err).
			WithHint("start a script with #!, such as #!/bin/sh")
	}
	return errs.Wrap(opSandbox, name, err)
}
