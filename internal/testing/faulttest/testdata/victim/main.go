// Victim is the program that the tests of package faulttest trace.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func main() {
	verbs := map[string]func(args []string) error{
		"publish":  publish,
		"parallel": parallel,
		"storm":    storm,
		"spawn":    spawn,
		"child":    child,
		"sleep":    sleep,
		"calls":    calls,
		"getpid":   getpid,
		"echo":     echo,
		"notsteps": notSteps,
		"lock":     lock,
		"become":   become,
		"stopself": stopSelf,
		"exitrace": exitRace,
		"numcpu":   numCPU,
		"eintr":    eintr,
		"odd":      odd,
		"silent":   silent,
		"ioctls":   ioctls,
	}

	verb, ok := verbs[os.Args[1]]
	if !ok {
		fmt.Fprintln(os.Stderr, "no such verb")
		os.Exit(2)
	}

	if err := verb(os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "victim:", err)
		os.Exit(1)
	}

	fmt.Println("done")
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		panic(err)
	}
	return n
}

// publish DIR N: writes DIR/i.tmp and renames it to DIR/i, durably, for i < N.
// Eight steps each.
func publish(args []string) error {
	dir, n := args[0], number(args[1])
	d, err := os.Open(dir)
	if err != nil {
		return err
	}

	defer d.Close()
	for i := range n {
		if err := publishOne(d, filepath.Join(dir, strconv.Itoa(i))); err != nil {
			return err
		}
	}

	return nil
}

func publishOne(dir *os.File, name string) error {
	f, err := os.OpenFile(name+".tmp", os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}

	defer f.Close()

	if _, err := f.WriteString("hello "); err != nil {
		return err
	}

	if _, err := f.WriteAt([]byte("world"), 6); err != nil {
		return err
	}

	if err := f.Truncate(8); err != nil {
		return err
	}

	if err := f.Sync(); err != nil {
		return err
	}

	if err := os.Mkdir(name+".d", 0o700); err != nil {
		return err
	}

	if err := os.Rename(name+".tmp", name); err != nil {
		return err
	}

	return dir.Sync()
}

// parallel DIR N: N goroutines publish in directories of their own.
func parallel(args []string) error {
	n := number(args[1])
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			dir := filepath.Join(args[0], "dir"+strconv.Itoa(i))
			if errs[i] = os.Mkdir(dir, 0o700); errs[i] == nil {
				errs[i] = publish([]string{dir, "3"})
			}
		})
	}

	wg.Wait()
	return errors.Join(errs...)
}

// storm DIR N ROUNDS: N goroutines each write a file of their own line by
// line, and read it back, while others keep the garbage collector and the
// preemption signals busy and threads come and go.
func storm(args []string) error {
	dir, n, rounds := args[0], number(args[1]), number(args[2])
	runtime.GOMAXPROCS(8)
	var stop atomic.Bool
	var busy, wg sync.WaitGroup
	for range 2 {
		busy.Go(func() {
			for !stop.Load() { // no call in the loop: only a signal can preempt it
			}
		})
	}

	busy.Go(func() {
		for !stop.Load() {
			runtime.GC()
			_ = make([]byte, 1<<20)
		}
	})

	busy.Go(func() {
		for !stop.Load() {
			done := make(chan bool)
			go func() {
				runtime.LockOSThread() // not unlocked: the thread ends with the goroutine
				close(done)
			}()
			<-done
		}
	})

	errs := make([]error, n)
	for i := range n {
		wg.Go(func() {
			errs[i] = stormOne(filepath.Join(dir, strconv.Itoa(i)), rounds)
		})
	}

	wg.Wait()
	stop.Store(true)
	busy.Wait()
	return errors.Join(errs...)
}

func stormOne(name string, rounds int) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}

	defer f.Close()
	var want strings.Builder
	for r := range rounds {
		fmt.Fprintf(&want, "line %d\n", r)
		if _, err := fmt.Fprintf(f, "line %d\n", r); err != nil {
			return err
		}
		got, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		if string(got) != want.String() {
			return fmt.Errorf("%s: round %d: read %q", name, r, got)
		}
	}

	return nil
}

// spawn FILE: runs "child" and waits for it.
func spawn(args []string) error {
	cmd := exec.Command("/proc/self/exe", append([]string{"child"}, args...)...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return cmd.Run()
}

// silent FILE: runs "child" by a clone that is no vfork and signals no SIGCHLD
// when the child ends, which looks to a tracer like the making of a thread.
func silent(args []string) error {
	argv, err := syscall.SlicePtrFromStrings(append([]string{"/proc/self/exe", "child"}, args...))
	if err != nil {
		return err
	}

	env := make([]*byte, 1)
	syscall.ForkLock.Lock()
	pid, _, errno := unix.RawSyscall(unix.SYS_CLONE, 0, 0, 0)
	if pid == 0 && errno == 0 { // a copy of this thread only: raw system calls and nothing else
		_, _, _ = unix.RawSyscall(unix.SYS_EXECVE, uintptr(unsafe.Pointer(argv[0])),
			uintptr(unsafe.Pointer(&argv[0])), uintptr(unsafe.Pointer(&env[0])))
		for {
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 1, 0, 0)
		}
	}

	syscall.ForkLock.Unlock()
	if errno != 0 {
		return errno
	}

	for {
		var status unix.WaitStatus
		_, err := unix.Wait4(int(pid), &status, unix.WALL, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil && status != 0 {
			err = fmt.Errorf("the child ended with status %#x", uint32(status))
		}
		return err
	}
}

// child FILE [wait]: writes who traces it to FILE, in three writes; with
// "wait", after a byte came from the FIFO at FILE.fifo.
func child(args []string) error {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}

	_, tracer, _ := strings.Cut(string(status), "\nTracerPid:\t")
	tracer, _, _ = strings.Cut(tracer, "\n")
	if len(args) > 1 {
		fifo, err := os.Open(args[0] + ".fifo")
		if err != nil {
			return err
		}
		if _, err := fifo.Read(make([]byte, 1)); err != nil {
			return err
		}
	}

	f, err := os.Create(args[0])
	if err != nil {
		return err
	}

	defer f.Close()

	for _, s := range []string{"traced by ", tracer, "\n"} {
		if _, err := f.WriteString(s); err != nil {
			return err
		}
	}

	return nil
}

// sleep FILE: starts a child that sleeps, writes both ids to FILE, and sleeps.
func sleep(args []string) error {
	if len(args) > 0 {
		cmd := exec.Command("/proc/self/exe", "sleep")
		if err := cmd.Start(); err != nil {
			return err
		}
		ids := fmt.Sprint(os.Getpid(), " ", cmd.Process.Pid)
		if err := os.WriteFile(args[0]+".tmp", []byte(ids), 0o600); err != nil {
			return err
		}
		if err := os.Rename(args[0]+".tmp", args[0]); err != nil {
			return err
		}
	}

	time.Sleep(time.Hour)
	return nil
}

// calls FILE N: writes to FILE N times.
func calls(args []string) error {
	f, err := os.Create(args[0])
	if err != nil {
		return err
	}
	defer f.Close()
	for range number(args[1]) {
		if _, err := f.WriteAt([]byte("x"), 0); err != nil {
			return err
		}
	}
	return nil
}

// getpid N: makes N system calls that are no steps.
func getpid(args []string) error {
	for range number(args[0]) {
		syscall.Getpid()
	}
	return nil
}

// echo: copies its standard input to its output, and one line to its errors.
func echo([]string) error {
	if _, err := io.Copy(os.Stdout, os.Stdin); err != nil {
		return err
	}
	_, err := fmt.Fprintln(os.Stderr, os.Getenv("VICTIM"))
	return err
}

// notSteps FILE: does what looks like a step and is none.
func notSteps(args []string) error {
	f, err := os.Open(args[0]) // no O_CREAT
	if err != nil {
		return err
	}

	defer f.Close()

	r, w, err := os.Pipe()
	if err != nil {
		return err
	}

	defer r.Close()
	defer w.Close()

	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return err
	}

	defer null.Close()

	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		return err
	}

	socket := os.NewFile(uintptr(pair[0]), "socket")
	defer socket.Close()

	for _, to := range []*os.File{w, null, socket, os.Stdout, os.Stderr} {
		if _, err := to.WriteString("x\n"); err != nil {
			return err
		}
	}

	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return err
	}

	// A regular file as the standard output is still the standard output.
	out, err := os.OpenFile(args[0], os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}

	if err := syscall.Dup3(int(out.Fd()), 1, 0); err != nil {
		return err
	}

	fmt.Println("to the file")
	return nil
}

// lock FILE: takes a lock on FILE, and waits for it a second time while
// signals interrupt the waiting. Four steps with Locks: lock, wait, unlock, lock.
func lock(args []string) error {
	a, err := os.Open(args[0])
	if err != nil {
		return err
	}

	defer a.Close()

	b, err := os.Open(args[0])
	if err != nil {
		return err
	}

	defer b.Close()

	if err := syscall.Flock(int(a.Fd()), syscall.LOCK_EX); err != nil {
		return err
	}

	tid := make(chan int)
	got := make(chan error)
	go func() {
		runtime.LockOSThread()
		tid <- syscall.Gettid()
		got <- syscall.Flock(int(b.Fd()), syscall.LOCK_EX)
	}()

	waiter := <-tid
	for range 20 {
		time.Sleep(time.Millisecond)
		if err := syscall.Tgkill(syscall.Getpid(), waiter, syscall.SIGURG); err != nil {
			return err
		}
	}

	if err := syscall.Flock(int(a.Fd()), syscall.LOCK_UN); err != nil {
		return err
	}

	return <-got
}

// become FILE: replaces itself by "child FILE", from a thread that is not the first.
func become(args []string) error {
	failed := make(chan error)
	runtime.LockOSThread() // main is on the first thread: the goroutine is not
	go func() {
		failed <- syscall.Exec("/proc/self/exe", append([]string{"victim", "child"}, args...), os.Environ())
	}()
	return <-failed
}

// stopSelf: stops itself with SIGSTOP, to be continued by a child a while
// later, and prints whether it did stand still until then.
func stopSelf([]string) error {
	script := fmt.Sprintf("while sleep 0.2; do kill -CONT %d; done", os.Getpid())
	cmd := exec.Command("/bin/sh", "-c", script)
	if err := cmd.Start(); err != nil {
		return err
	}

	// To this very thread: a signal to the process may be another thread's to
	// take, and this one would run on until it has.
	runtime.LockOSThread()
	start := time.Now()
	if err := unix.Tgkill(os.Getpid(), unix.Gettid(), unix.SIGSTOP); err != nil {
		return err
	}

	stopped := time.Since(start) > 100*time.Millisecond
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	fmt.Println("stopped:", stopped)
	return nil
}

// numCPU: prints how many CPUs it sees.
func numCPU([]string) error {
	fmt.Println(runtime.NumCPU(), runtime.GOMAXPROCS(0))
	return nil
}

// exitRace FIFO: opens a FIFO with O_CREAT, which waits for ever, and ends in the meantime.
func exitRace(args []string) error {
	go func() { _, _ = os.OpenFile(args[0], os.O_CREATE|os.O_WRONLY, 0o600) }()
	time.Sleep(50 * time.Millisecond)
	return nil
}

// eintr FILE DIR: waits for a lock until a signal makes the call return EINTR,
// which needs a handler without SA_RESTART, and then makes DIR.
func eintr(args []string) error {
	var action struct{ handler, flags, restorer, mask uint64 }
	const restart = 0x10000000
	for _, set := range []bool{false, true} {
		var in, out unsafe.Pointer
		if out = unsafe.Pointer(&action); set {
			in, out = out, nil
			action.flags &^= restart
		}
		_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGURG), uintptr(in), uintptr(out), 8, 0, 0)
		if errno != 0 {
			return errno
		}
	}

	a, err := os.Open(args[0])
	if err != nil {
		return err
	}

	defer a.Close()

	b, err := os.Open(args[0])
	if err != nil {
		return err
	}

	defer b.Close()

	if err := unix.Flock(int(a.Fd()), unix.LOCK_EX); err != nil {
		return err
	}

	runtime.LockOSThread()
	waiter := unix.Gettid()
	interrupted := make(chan struct{})
	go func() {
		for {
			select {
			case <-interrupted:
				return
			case <-time.After(10 * time.Millisecond):
				_ = unix.Tgkill(os.Getpid(), waiter, unix.SIGURG)
			}
		}
	}()

	err = unix.Flock(int(b.Fd()), unix.LOCK_EX)
	close(interrupted)
	if !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("flock returned %v, not EINTR", err)
	}

	return unix.Mkdir(args[1], 0o700)
}

// odd DIR: one of each call whose arguments are unusual, in DIR, which is also
// the working directory.
func odd(args []string) error {
	dir := args[0]
	d, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}

	var errs []error
	add := func(err error) { errs = append(errs, err) }
	open := func(fd int, err error) {
		add(err)
		if err == nil {
			add(unix.Close(fd))
		}
	}

	open(unix.Openat2(d, "openat2", &unix.OpenHow{Flags: unix.O_CREAT | unix.O_WRONLY, Mode: 0o600}))
	open(unix.Openat2(d, "openat2", &unix.OpenHow{Flags: unix.O_RDONLY})) // no step
	open(unix.Open(dir, unix.O_TMPFILE|unix.O_WRONLY, 0o600))
	open(unix.Open("openat2", unix.O_WRONLY|unix.O_TRUNC, 0))
	open(unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)) // no step
	add(unix.Mkdir("sub", 0o700))
	add(unix.Symlinkat("target", d, "sub/../link"))
	add(unix.Linkat(d, "openat2", d, "hard", 0))
	add(unix.Renameat2(d, "hard", unix.AT_FDCWD, "harder", unix.RENAME_NOREPLACE))
	add(unix.Setxattr("openat2", "user.x", []byte("1"), 0))
	add(unix.UtimesNanoAt(d, "harder", make([]unix.Timespec, 2), 0))
	add(unix.Unlinkat(d, "sub", unix.AT_REMOVEDIR))
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	add(err)
	add(unix.Bind(s, &unix.SockaddrUnix{Name: "socket"}))
	a, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	add(err)
	add(unix.Bind(a, &unix.SockaddrUnix{Name: "@pando-faulttest-" + strconv.Itoa(os.Getpid())})) // no step
	m, err := unix.MemfdCreate("memory", 0)
	add(err)
	_, err = unix.Write(m, []byte("x")) // no step
	add(err)

	// Not sync(2): it waits for every filesystem of the host, also for one that hangs.
	return errors.Join(errs...)
}

// ioctls FROM TO: requests of which some count; whether they work depends on
// the file system.
func ioctls(args []string) error {
	from, err := os.Open(args[0])
	if err != nil {
		return err
	}

	defer from.Close()
	to, err := os.OpenFile(args[1], os.O_RDWR, 0)
	if err != nil {
		return err
	}

	defer to.Close()
	const getBlockSize = 2 // FIGETBSZ
	_, _ = unix.IoctlGetInt(int(to.Fd()), getBlockSize)
	_ = unix.IoctlFileClone(int(to.Fd()), int(from.Fd()))
	_ = unix.IoctlFileCloneRange(int(to.Fd()), &unix.FileCloneRange{Src_fd: int64(from.Fd())})
	return nil
}
