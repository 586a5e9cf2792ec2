package doctor

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"pando/internal/testing/testfs"
)

// nobodyElse is a user that nobody is: limits of users are its own.
const nobodyElse = 54321

func asNobodyElse(c *exec.Cmd) {
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobodyElse, Gid: nobodyElse}}
}

// TestLimitOfInotify: a user that has nearly all the instances that it may.
func TestLimitOfInotify(t *testing.T) {
	rootOnly(t)
	who := fmt.Sprintf("uid %d", nobodyElse)
	top, ok := sysctl("fs.inotify.max_user_instances")
	if !ok || top > 10_000 {
		t.Skipf("SKIPPED: %d inotify instances are too many to make", top)
	}
	if s, text := checkNow(t, limitsCheck(0.8), nil).about("", who); s != "" {
		t.Errorf("beforehand: %s", text)
	}
	few := startRole(t, "inotify", asPublic(t, asNobodyElse), strconv.FormatInt(top/2, 10))
	if s, text := checkNow(t, limitsCheck(0.8), nil).about("", who); s != "" {
		t.Errorf("half of them: %s", text)
	}
	few.end()
	c := startRole(t, "inotify", asPublic(t, asNobodyElse), strconv.FormatInt(top*9/10, 10))
	r := checkNow(t, limitsCheck(0.8), nil)
	s, text := r.about("limit-inotify-instances", who)
	if s != Warning || !strings.Contains(text, "sysctl -w fs.inotify.max_user_instances=") {
		t.Errorf("%q %s", s, text)
	}
	for _, f := range r.Findings {
		if f.Subject == who && value(f.Measured, "used") != float64(top*9/10) {
			t.Errorf("counted %v, not %d", f.Measured, top*9/10)
		}
	}
	if s, text := r.about("limit-inotify-watches", who); s != "" {
		t.Errorf("watches: %s", text)
	}
	c.end()
	// Watches are counted one by one.
	w := startRole(t, "inotify-watches", asPublic(t, asNobodyElse), "25")
	all, _, err := processLimits(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range all {
		if l.subject == who && l.code == "limit-inotify-watches" && l.used != 25 {
			t.Errorf("%d watches, not 25", l.used)
		}
		if l.subject == who && l.code == "limit-inotify-instances" && l.used != 1 {
			t.Errorf("%d instances, not the one that two processes share", l.used)
		}
	}
	w.end()
}

// TestLimitsOfProcesses: open files and memory mappings of one process.
func TestLimitsOfProcesses(t *testing.T) {
	rootOnly(t)
	about := func(r told, c *roleChild) (Severity, string) {
		for _, f := range r.Findings {
			if strings.HasPrefix(f.Subject, fmt.Sprintf("pid %d ", c.pid())) {
				return f.Severity, f.Code + " " + f.Title
			}
		}
		return "", ""
	}
	idle := startRole(t, "wait", nil)
	files := startRole(t, "files", nil, "100", "90")
	top, ok := sysctl("vm.max_map_count")
	if !ok || top > 2_000_000 {
		t.Skipf("SKIPPED: %d memory mappings are too many to make", top)
	}
	maps := startRole(t, "maps", nil, strconv.FormatInt(top*85/100, 10))
	r := checkNow(t, limitsCheck(0.8), nil)
	if s, text := about(r, idle); s != "" {
		t.Errorf("idle: %s", text)
	}
	if s, text := about(r, files); s != Warning || !strings.HasPrefix(text, "limit-open-files ") {
		t.Errorf("files: %q %s", s, text)
	}
	if s, text := about(r, maps); s != Warning || !strings.HasPrefix(text, "limit-maps ") {
		t.Errorf("mappings: %q %s", s, text)
	}
}

// TestLimitOfAIO: asynchronous I/O of the whole host is counted, and found when it is
// more than a share that fits.
func TestLimitOfAIO(t *testing.T) {
	rootOnly(t)
	before, ok := sysctl("fs.aio-nr")
	top, ok2 := sysctl("fs.aio-max-nr")
	if !ok || !ok2 {
		t.Skip("SKIPPED: the kernel has no asynchronous I/O")
	}
	c := startRole(t, "aio", nil, "2000")
	r := checkNow(t, limitsCheck(float64(before+1500)/float64(top)), nil)
	if s, text := r.about("limit-aio", ""); s != Warning {
		t.Errorf("%q %s: %+v", s, text, r.Measured)
	}
	if got := value(r.Measured, "limit-aio"); got < 2000 {
		t.Errorf("%v are set up, not 2,000 and more", got)
	}
	c.end()
	for _, name := range []string{"limit-files", "limit-pids", "limit-threads", "limit-mounts"} {
		if value(r.Measured, name) <= 0 {
			t.Errorf("%s is not known: %+v", name, r.Measured)
		}
	}
}

// asPublic runs the test program from where anybody may run it.
func asPublic(t *testing.T, prepare func(*exec.Cmd)) func(*exec.Cmd) {
	t.Helper()
	dir, err := os.MkdirTemp("", "pando-doctor-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return func(c *exec.Cmd) {
		b, err := os.ReadFile(c.Path)
		if err == nil {
			err = testfs.WriteProgram(dir+"/test", b)
		}
		if err != nil {
			t.Fatal(err)
		}
		c.Path = dir + "/test"
		prepare(c)
	}
}

func init() {
	number := func(args []string, i int) int {
		n, err := strconv.Atoi(args[i])
		if err != nil {
			panic(err)
		}
		return n
	}
	roles["inotify"] = func(args []string, ready func(string)) error {
		for i := range number(args, 0) {
			if _, err := unix.InotifyInit1(unix.IN_CLOEXEC); err != nil {
				return fmt.Errorf("%d: %w", i, err)
			}
		}
		ready("")
		return nil
	}
	roles["inotify-watches"] = func(args []string, ready func(string)) error {
		fd, err := unix.InotifyInit1(0)
		if err != nil {
			return err
		}
		programs, err := os.ReadDir("/usr/bin")
		if err != nil {
			return err
		}
		seen := map[int]bool{} // several names may be one file, which is one watch
		for _, p := range programs {
			if len(seen) < number(args, 0) {
				if wd, err := unix.InotifyAddWatch(fd, "/usr/bin/"+p.Name(), unix.IN_MODIFY); err == nil {
					seen[wd] = true
				}
			}
		}
		if len(seen) != number(args, 0) {
			return fmt.Errorf("only %d files to watch", len(seen))
		}
		// A child that has the same instance under the same number.
		sleep := exec.Command("sleep", "600")
		for i := 3; i < fd; i++ {
			sleep.ExtraFiles = append(sleep.ExtraFiles, os.Stdin)
		}
		sleep.ExtraFiles = append(sleep.ExtraFiles, os.NewFile(uintptr(fd), "inotify"))
		runtime.LockOSThread() // for good: the child dies with its thread
		sleep.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := sleep.Start(); err != nil {
			return err
		}
		ready("")
		_ = sleep.Process.Kill()
		_ = sleep.Wait()
		return nil
	}
	roles["files"] = func(args []string, ready func(string)) error {
		top := uint64(number(args, 0))
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: top, Max: top}); err != nil {
			return err
		}
		for range number(args, 1) - 10 {
			if _, err := unix.Open("/dev/null", unix.O_RDONLY, 0); err != nil {
				return err
			}
		}
		ready("")
		return nil
	}
	roles["maps"] = func(args []string, ready func(string)) error {
		n := number(args, 0)
		page := os.Getpagesize()
		// Neighbours with different rights are mappings of their own.
		b, err := unix.Mmap(-1, 0, n*page, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
		if err != nil {
			return err
		}
		for i := 0; i < n; i += 2 {
			if err := unix.Mprotect(b[i*page:(i+1)*page], unix.PROT_NONE); err != nil {
				return fmt.Errorf("%d: %w", i, err)
			}
		}
		ready("")
		return nil
	}
	roles["aio"] = func(args []string, ready func(string)) error {
		var ctx uintptr
		if _, _, errno := unix.Syscall(unix.SYS_IO_SETUP, uintptr(number(args, 0)), uintptr(unsafe.Pointer(&ctx)),
			0); errno != 0 {
			return errno
		}
		ready("")
		_, _, _ = unix.Syscall(unix.SYS_IO_DESTROY, ctx, 0, 0)
		return nil
	}
}
