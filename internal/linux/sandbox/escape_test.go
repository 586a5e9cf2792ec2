package sandbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"pando/internal/base/errs"
	"pando/internal/linux/sandbox"

	"golang.org/x/sys/unix"
)

// capabilities are those that `pando run` leaves user 0.
var capabilities = []int{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_FSETID, unix.CAP_KILL,
	unix.CAP_SETGID, unix.CAP_SETUID, unix.CAP_NET_BIND_SERVICE}

func init() {
	roles["escape"] = func() int { return tryToEscape() }
	roles["overwrite"] = overwriteExecutable
	roles["euid"] = func() int { fmt.Println(os.Geteuid()); return 0 }
}

// attempt is a way out of a sandbox. It returns nil if it has succeeded.
type attempt struct {
	name string
	try  func() error
}

// call is an attempt that is one system call.
func call(name string, number uintptr, args ...uintptr) attempt {
	return attempt{name, func() error {
		var a [6]uintptr
		copy(a[:], args)
		r, _, e := unix.Syscall6(number, a[0], a[1], a[2], a[3], a[4], a[5])
		if e != 0 {
			return e
		}
		return succeeded(int(r))
	}}
}

func succeeded(int) error { return nil }

// open is an attempt to open a file.
func open(path string, flags int) attempt {
	return attempt{fmt.Sprintf("open %s (%#x)", path, flags), func() error {
		fd, err := unix.Open(path, flags|unix.O_NONBLOCK, 0)
		if err == nil {
			unix.Close(fd)
		}
		return err
	}}
}

func text(s string) uintptr { return uintptr(unsafe.Pointer(unsafe.StringData(s + "\x00"))) }

// attempts are the ways out that are tried.
func attempts() []attempt {
	buf := make([]byte, 4096)
	p := uintptr(unsafe.Pointer(&buf[0]))
	big := uintptr(len(buf))
	all := []attempt{
		// Mounts.
		{"mount a tmpfs", func() error { return unix.Mount("x", "/tmp", "tmpfs", 0, "") }},
		{"mount proc", func() error { return unix.Mount("x", "/tmp", "proc", 0, "") }},
		{"bind /", func() error { return unix.Mount("/", "/tmp", "", unix.MS_BIND, "") }},
		{"remount / with devices", func() error { return unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND, "") }},
		{"remount /proc/sys", func() error { return unix.Mount("", "/proc/sys", "", unix.MS_REMOUNT|unix.MS_BIND, "") }},
		{"umount /proc/sys", func() error { return unix.Unmount("/proc/sys", 0) }},
		{"umount /proc", func() error { return unix.Unmount("/proc", unix.MNT_DETACH) }},
		{"mount a control group", func() error { return unix.Mount("x", "/tmp", "cgroup", 0, "memory") }},
		{"mount control groups", func() error { return unix.Mount("x", "/tmp", "cgroup2", 0, "") }},
		call("fsopen", unix.SYS_FSOPEN, text("tmpfs"), 0),
		call("open_tree", unix.SYS_OPEN_TREE, 0, text("/"), unix.OPEN_TREE_CLONE),
		call("mount_setattr", unix.SYS_MOUNT_SETATTR, 0, text("/"), 0, p, 32),
		call("move_mount", unix.SYS_MOVE_MOUNT, 0, text("/proc"), 0, text("/tmp"), 0),
		{"pivot_root", func() error { return unix.PivotRoot("/", "/tmp") }},
		{"chroot", func() error { return unix.Chroot("/tmp") }},

		// Namespaces.
		call("unshare a user namespace", unix.SYS_UNSHARE, unix.CLONE_NEWUSER),
		call("unshare mounts", unix.SYS_UNSHARE, unix.CLONE_NEWNS),
		call("clone a user namespace", unix.SYS_CLONE, unix.CLONE_NEWUSER|uintptr(unix.SIGCHLD), 0, 0, 0, 0),
		{"clone with high bits set", func() error {
			_, _, e := unix.RawSyscall6(unix.SYS_CLONE, unix.CLONE_NEWUSER|uintptr(unix.SIGCHLD)|1<<40, 0, 0, 0, 0, 0)
			return errno(e)
		}},
		call("clone3", unix.SYS_CLONE3, p, 88),
		{"setns", func() error {
			fd, err := unix.Open("/proc/1/ns/mnt", unix.O_RDONLY, 0)
			if err != nil {
				return err
			}
			return unix.Setns(fd, 0)
		}},

		// Devices.
		{"mknod a disk", func() error { return unix.Mknod("/tmp/disk", unix.S_IFBLK|0o666, int(unix.Mkdev(7, 0))) }},
		{"mknod mem", func() error { return unix.Mknod("/tmp/mem", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 1))) }},
		open("/node-kmsg", unix.O_RDONLY),
		open("/node-loop", unix.O_RDONLY),
		open("/node-fuse", unix.O_RDWR),
		open("/dev/kmsg", unix.O_RDONLY), open("/dev/mem", unix.O_RDONLY), open("/dev/fuse", unix.O_RDWR),
		open("/dev/loop-control", unix.O_RDWR), open("/dev/net/tun", unix.O_RDWR), open("/dev/kvm", unix.O_RDWR),
		{"chmod of the host's /dev/null", func() error { return unix.Chmod("/dev/null", 0o600) }},
		{"chown of the host's /dev/null", func() error { return unix.Chown("/dev/null", 1, 1) }},
		{"create in /dev", func() error { return os.WriteFile("/dev/file", nil, 0o644) }},

		// /proc and /sys.
		open("/proc/sysrq-trigger", unix.O_WRONLY), open("/proc/sys/kernel/core_pattern", unix.O_WRONLY),
		open("/proc/sys/kernel/modprobe", unix.O_WRONLY), open("/proc/sys/vm/drop_caches", unix.O_WRONLY),
		open("/proc/sys/fs/binfmt_misc/register", unix.O_WRONLY), open("/proc/sys/kernel/hostname", unix.O_WRONLY),
		open("/proc/irq/default_smp_affinity", unix.O_WRONLY), open("/proc/bus/pci/00/00.0", unix.O_WRONLY),
		open("/sys/kernel/uevent_helper", unix.O_WRONLY), open("/sys/kernel/mm/ksm/run", unix.O_WRONLY),
		open("/sys/power/state", unix.O_WRONLY), open("/sys/module/loop/uevent", unix.O_WRONLY),
		open("/sys/fs/cgroup/release_agent", unix.O_WRONLY), open("/sys/fs/cgroup/memory/release_agent", unix.O_WRONLY),
		open("/sys/kernel/security/lsm", unix.O_RDONLY), open("/sys/kernel/debug/tracing", unix.O_RDONLY),
		empty("/proc/kcore"), empty("/proc/keys"), empty("/proc/timer_list"), empty("/proc/kallsyms"),
		empty("/proc/slabinfo"),
		open("/proc/1/environ", unix.O_RDONLY), open("/proc/1/mem", unix.O_RDWR), open("/proc/1/maps", unix.O_RDONLY),
		open("/proc/1/root", unix.O_PATH|unix.O_DIRECTORY), open("/proc/1/cwd", unix.O_PATH|unix.O_DIRECTORY),
		open("/proc/1/exe", unix.O_RDONLY), open("/proc/1/fd/3", unix.O_RDONLY), open("/proc/1/ns/mnt", unix.O_RDONLY),
		{"list the files of process 1", func() error {
			_, err := os.Readlink("/proc/1/fd/3") // the numbers are no secret
			return err
		}},
		open("/proc/1/root/etc/shadow", unix.O_RDONLY),
		{"lower oom_score_adj", func() error { return os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0) }},

		// Other processes.
		{"ptrace process 1", func() error { return unix.PtraceAttach(1) }},
		{"seize process 1", func() error { return unix.PtraceSeize(1) }},
		{"read the memory of process 1", func() error {
			local := []unix.Iovec{{Base: &buf[0], Len: 8}}
			_, err := unix.ProcessVMReadv(1, local, []unix.RemoteIovec{{Base: 0x400000, Len: 8}}, 0)
			return err
		}},
		{"see a process of the host", func() error {
			lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
			for _, line := range lines {
				if b, err := os.ReadFile(line); err == nil && strings.HasPrefix(string(b), "sleep\x00") {
					return nil
				}
			}
			return errors.Join(err, errors.New("none of them"))
		}},
		{"kill process 1", func() error { // allowed or not, it has no effect: or this process ends
			_ = unix.Kill(1, unix.SIGKILL)
			_ = unix.Kill(1, unix.SIGSTOP)
			_ = unix.Kill(1, unix.SIGQUIT)
			_ = unix.Kill(1, unix.SIGTERM)
			return errors.New("it still runs")
		}},
		{"pidfd_getfd of process 1", func() error {
			fd, err := unix.PidfdOpen(1, 0)
			if err != nil {
				return err
			}
			_, err = unix.PidfdGetfd(fd, 3, 0)
			return err
		}},

		// Sockets.
		dial("unix", "@"+os.Getenv("SANDBOX_TEST_ABSTRACT")),
		dial("tcp", os.Getenv("SANDBOX_TEST_TCP")),
		dial("unix", os.Getenv("SANDBOX_TEST_SOCKET")),
		dial("unix", "/run/docker.sock"), dial("unix", "/run/dbus/system_bus_socket"),
		socket("vsock", unix.AF_VSOCK, unix.SOCK_STREAM, 0), socket("alg", unix.AF_ALG, unix.SOCK_SEQPACKET, 0),
		socket("packet", unix.AF_PACKET, unix.SOCK_RAW, 0), socket("raw", unix.AF_INET, unix.SOCK_RAW, 1),
		call("socket with high bits set", unix.SYS_SOCKET, unix.AF_VSOCK|1<<32, unix.SOCK_STREAM, 0),

		// The kernel.
		call("bpf", unix.SYS_BPF, 0, p, 120), call("io_uring_setup", unix.SYS_IO_URING_SETUP, 8, p),
		call("userfaultfd", unix.SYS_USERFAULTFD, 0),
		call("perf_event_open", unix.SYS_PERF_EVENT_OPEN, p, 0, 0, ^uintptr(0), 0),
		call("keyctl", unix.SYS_KEYCTL, unix.KEYCTL_GET_KEYRING_ID, ^uintptr(2), 0),
		call("add_key", unix.SYS_ADD_KEY, text("user"), text("x"), p, 1, ^uintptr(2)),
		call("request_key", unix.SYS_REQUEST_KEY, text("user"), text("x"), 0, 0),
		{"open_by_handle_at", func() error {
			h := unix.NewFileHandle(1, []byte{2, 0, 0, 0, 0, 0, 0, 0})
			_, err := unix.OpenByHandleAt(unix.AT_FDCWD, h, unix.O_RDONLY)
			return err
		}},
		call("init_module", unix.SYS_INIT_MODULE, p, 0, text("")),
		call("finit_module", unix.SYS_FINIT_MODULE, 0, text(""), 0),
		call("kexec_load", unix.SYS_KEXEC_LOAD, 0, 0, 0, 0), call("syslog", unix.SYS_SYSLOG, 3, p, big),
		call("reboot", unix.SYS_REBOOT, unix.LINUX_REBOOT_MAGIC1, unix.LINUX_REBOOT_MAGIC2, 0),
		call("swapon", unix.SYS_SWAPON, text("/tmp/x"), 0), call("acct", unix.SYS_ACCT, text("/tmp/x")),
		call("quotactl", unix.SYS_QUOTACTL, 0, 0, 0, 0), call("fanotify_init", unix.SYS_FANOTIFY_INIT, 0, 0),
		{"sethostname", func() error { return unix.Sethostname([]byte("x")) }},
		{"set the clock", func() error { return unix.ClockSettime(unix.CLOCK_REALTIME, &unix.Timespec{Sec: 1}) }},
		call("personality", unix.SYS_PERSONALITY, 0x0040000),
		{"type on the terminal", func() error { return unix.IoctlSetPointerInt(0, unix.TIOCSTI, 'x') }},
		call("type on the terminal, high bits set", unix.SYS_IOCTL, 0, unix.TIOCSTI|1<<32, p),
		{"raise a limit", func() error {
			var l unix.Rlimit
			if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
				return err
			}
			l.Max++
			return unix.Setrlimit(unix.RLIMIT_NOFILE, &l)
		}},

		// Privileges.
		{"gain a capability", func() error {
			h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			return unix.Capset(&h, &[]unix.CapUserData{{Permitted: 1 << unix.CAP_SYS_ADMIN}, {}}[0])
		}},
		{"lose no_new_privs", func() error { return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0) }},
		{"run a setuid program as its owner", func() error {
			if os.Getuid() == 0 {
				return errors.New("it is user 0 already")
			}
			cmd := exec.Command("/setuid")
			cmd.Env = []string{"SANDBOX_TEST_ROLE=euid"}
			out, err := cmd.Output()
			if err == nil && strings.TrimSpace(string(out)) == strconv.Itoa(os.Getuid()) {
				return errors.New("it was run as " + strings.TrimSpace(string(out)))
			}
			return err
		}},

		// Files.
		{"inherit a descriptor", func() error {
			for fd := 3; fd < 200; fd++ {
				path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
				if err == nil && !strings.HasPrefix(path, "anon_inode:") && !strings.HasPrefix(path, "/sys/") {
					fmt.Println("inherited", fd, path)
					return nil
				}
			}
			return errors.New("none")
		}},
		{"leave by ..", func() error {
			var before, after unix.Stat_t
			if err := errors.Join(unix.Stat("/", &before), unix.Stat("/../../../..", &after)); err != nil {
				return err
			}
			if before.Ino == after.Ino && before.Dev == after.Dev {
				return errors.New("the same directory")
			}
			return nil
		}},
		open("/link-out/etc/shadow", unix.O_RDONLY),
	}
	return append(all, archAttempts()...)
}

// archAttempts are for machines with several interfaces for system calls.
func archAttempts() []attempt {
	if runtime.GOARCH != "amd64" {
		return nil
	}
	return []attempt{
		call("an x32 call", 0x40000000|unix.SYS_GETPID),
		call("mount as an x32 call", 0x40000000|165, text("x"), text("/tmp"), text("tmpfs"), 0, 0),
		{"a 32-bit call", func() error {
			out, err := exec.Command("/int80").CombinedOutput()
			if err == nil {
				fmt.Printf("%s", out)
			}
			return err
		}},
		call("iopl", 172, 3), call("ioperm", 173, 0, 1024, 1), call("modify_ldt", 154, 0, 0, 0),
	}
}

func errno(e unix.Errno) error {
	if e == 0 {
		return nil
	}
	return e
}

// empty is an attempt to read a file that is hidden.
func empty(path string) attempt {
	return attempt{"read " + path, func() error {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		n, err := unix.Read(fd, make([]byte, 16))
		if err == nil && n == 0 {
			return errors.New("empty")
		}
		return err
	}}
}

func dial(network, address string) attempt {
	return attempt{"connect to " + network + " " + address, func() error {
		c, err := net.Dial(network, address)
		if err == nil {
			c.Close()
		}
		return err
	}}
}

func socket(name string, family, kind, protocol int) attempt {
	return attempt{"a socket of " + name, func() error {
		_, err := unix.Socket(family, kind, protocol)
		return err
	}}
}

// tryToEscape tries every way out, and prints each that works.
func tryToEscape() int {
	out, tried := 0, 0
	for _, a := range attempts() {
		tried++
		if err := a.try(); err == nil {
			fmt.Println("ESCAPED:", a.name)
			out++
		} else if os.Getenv("SANDBOX_TEST_VERBOSE") != "" {
			fmt.Println(a.name, "-", err)
		}
	}
	fmt.Println("tried", tried)
	return out
}

// overwriteExecutable makes /bin/sh, which replaces this process, write to this program's file.
func overwriteExecutable() int {
	fd, err := unix.Open("/proc/self/exe", unix.O_PATH, 0)
	if err == nil {
		script := fmt.Sprintf("echo overwritten >/proc/self/fd/%d && echo ESCAPED", fd)
		err = syscall.Exec("/bin/busybox", []string{"sh", "-c", script}, []string{"PATH=/bin"})
	}
	fmt.Println(err)
	return 1
}

// int80 is a program that calls the 32-bit getpid and exits with 0: an ELF header, one segment, and the code.
var int80 = append([]byte{
	0x7f, 'E', 'L', 'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 62, 0, 1, 0, 0, 0, 0x78, 0, 0x40, 0, 0, 0, 0, 0,
	64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0,
	1, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 0,
	0x90, 0, 0, 0, 0, 0, 0, 0, 0x90, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0,
}, 0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0x31, 0xff, 0xb8, 60, 0, 0, 0, 0x0f, 0x05, 0x90, 0x90, 0x90, 0x90,
	0x90, 0x90, 0x90, 0x90)

// hostileRoot makes a root filesystem with traps, and with this test program.
func hostileRoot(t *testing.T) string {
	t.Helper()
	root := newRoot(t)
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	writeProgram(t, root+"/escape", self)
	writeProgram(t, root+"/setuid", self)
	writeProgram(t, root+"/int80", int80)
	if err := errors.Join(
		os.Chmod(root+"/setuid", 0o755|os.ModeSetuid|os.ModeSetgid),
		unix.Mknod(root+"/node-kmsg", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 11))),
		unix.Mknod(root+"/node-loop", unix.S_IFBLK|0o666, int(unix.Mkdev(7, 0))),
		unix.Mknod(root+"/node-fuse", unix.S_IFCHR|0o666, int(unix.Mkdev(10, 229))),
		os.Symlink("../../../../../../../..", root+"/link-out"),
	); err != nil {
		t.Fatal(err)
	}
	return root
}

// TestEscape: no attempt to leave a sandbox succeeds, as user 0 with the capabilities that pando leaves it, and as
// another user.
func TestEscape(t *testing.T) {
	root := hostileRoot(t)

	// What a sandbox must not reach.
	abstract, err := net.Listen("unix", fmt.Sprintf("@pando-test-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	defer abstract.Close()
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	path := filepath.Join(t.TempDir(), "socket")
	named, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer named.Close()
	inherited, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY, 0) // without O_CLOEXEC
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(inherited)
	before, err := os.Stat("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	victim := exec.Command("sleep", "1000")
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = victim.Process.Kill(); _ = victim.Wait() }()

	for _, user := range []string{"0", "alice"} {
		s := full(root, "/escape")
		s.User, s.Capabilities = user, capabilities
		s.Env = append(s.Env, "SANDBOX_TEST_ROLE=escape", "SANDBOX_TEST_TCP="+tcp.Addr().String(),
			"SANDBOX_TEST_ABSTRACT="+strings.TrimPrefix(abstract.Addr().String(), "@"),
			"SANDBOX_TEST_SOCKET="+path, "SANDBOX_TEST_VERBOSE="+os.Getenv("SANDBOX_TEST_VERBOSE"))
		out, r := output(t, s, sandbox.Options{})
		if r.Exit != 0 || strings.Contains(out, "ESCAPED") || !strings.Contains(out, "tried ") {
			t.Errorf("user %s: exit %d\n%s", user, r.Exit, out)
		}
		t.Logf("user %s: %s", user, out)
	}

	// The sandboxes that an ordinary user makes without root, as that user and as user 0 of them.
	for _, inside := range []string{"own", "0"} {
		out := asUser(t, "escape-as-user", "SANDBOX_TEST_ROOT="+root, "SANDBOX_TEST_INSIDE="+inside,
			"SANDBOX_TEST_TCP="+tcp.Addr().String(),
			"SANDBOX_TEST_ABSTRACT="+strings.TrimPrefix(abstract.Addr().String(), "@"), "SANDBOX_TEST_SOCKET="+path)
		if strings.Contains(out, "ESCAPED") || !strings.Contains(out, "tried ") {
			t.Errorf("a user's sandbox, as %s: %s", inside, out)
		}
		t.Logf("a user's sandbox, as %s: %s", inside, out)
	}

	// A signal to every process reaches those of the sandbox only.
	s := full(root, "sh", "-c", "sleep 100 & kill -9 -1; wait $!")
	s.Capabilities = capabilities
	if out, r := output(t, s, sandbox.Options{}); r.Exit != 137 {
		t.Errorf("a signal to every process: %d\n%s", r.Exit, out)
	}
	if err := victim.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("a process of the host: %v", err)
	}

	after, err := os.Stat("/dev/null")
	if err != nil || after.Mode() != before.Mode() {
		t.Errorf("/dev/null: %v, %v", after, err)
	}

	// The attempts are real: outside a sandbox, those that harm nothing succeed.
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "SANDBOX_TEST_ROLE=outside", "SANDBOX_TEST_TCP="+tcp.Addr().String(),
		"SANDBOX_TEST_ABSTRACT="+strings.TrimPrefix(abstract.Addr().String(), "@"), "SANDBOX_TEST_SOCKET="+path)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("outside a sandbox, attempts fail too: %v\n%s", err, out)
	}
}

func init() {
	roles["escape-as-user"] = func() int {
		s := full(os.Getenv("SANDBOX_TEST_ROOT"), "/escape")
		s.UserNS = &sandbox.UserNS{}
		if os.Getenv("SANDBOX_TEST_INSIDE") == "own" {
			s.UserNS.UIDs = []sandbox.IDMap{{Inside: os.Getuid(), Host: os.Getuid(), Size: 1}}
			s.UserNS.GIDs = []sandbox.IDMap{{Inside: os.Getgid(), Host: os.Getgid(), Size: 1}}
		}
		s.Capabilities = capabilities
		for _, entry := range os.Environ() {
			if strings.HasPrefix(entry, "SANDBOX_TEST_") && !strings.HasPrefix(entry, "SANDBOX_TEST_ROLE=") {
				s.Env = append(s.Env, entry)
			}
		}
		s.Env = append(s.Env, "SANDBOX_TEST_ROLE=escape")

		r, err := sandbox.Run(context.Background(), s, sandbox.Options{Stdout: os.Stdout, Stderr: os.Stderr})
		if err != nil {
			fmt.Println(errs.KindOf(err), err, errs.HintOf(err))
			return 99
		}
		return r.Exit
	}
	roles["outside"] = func() int {
		succeeds := []string{"connect to tcp", "connect to unix @", "connect to unix " + os.Getenv("SANDBOX_TEST_SOCKET"),
			"see a process of the host", "unshare mounts"}
		tried := 0
		for _, a := range attempts() {
			for _, name := range succeeds {
				if !strings.HasPrefix(a.name, name) {
					continue
				}
				tried++
				if err := a.try(); err != nil {
					fmt.Println(a.name, err)
					return 1
				}
				break
			}
		}
		if tried != len(succeeds) {
			fmt.Println("tried", tried)
			return 1
		}
		return 0
	}
}

// TestOverwriteExecutable: a script whose interpreter is /proc/self/exe runs this program in the sandbox, but nothing
// there can write to its file (CVE-2019-5736).
func TestOverwriteExecutable(t *testing.T) {
	root := newRoot(t)
	if err := os.Symlink("/proc/self/exe", root+"/link"); err != nil {
		t.Fatal(err)
	}
	writeProgram(t, root+"/script", []byte("#!/proc/self/exe\n"))
	before, err := os.Stat("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}

	for _, command := range []string{"/link", "/script", "/proc/self/exe"} {
		s := full(root, command)
		s.Env, s.Capabilities = append(s.Env, "SANDBOX_TEST_ROLE=overwrite"), capabilities
		out, _, err := tryOutput(t, s, sandbox.Options{})
		if strings.Contains(out, "ESCAPED") || err == nil && !strings.Contains(out, "Read-only file system") {
			t.Errorf("%s: %q, %v", command, out, err)
		}
	}

	after, err := os.Stat("/proc/self/exe")
	if err != nil || after.Size() != before.Size() || !after.ModTime().Equal(before.ModTime()) {
		t.Errorf("the program has changed: %v, %v", after, err)
	}
}

// TestLinks: a symbolic link where a mount should be is refused, and what it leads to is not changed.
func TestLinks(t *testing.T) {
	for _, name := range []string{"proc", "sys", "dev"} {
		root := newRoot(t)
		if err := os.Symlink("/etc", filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
		_, _, err := tryOutput(t, full(root, "true"), sandbox.Options{})
		if !errs.Is(err, errs.Invalid) || errs.HintOf(err) == "" {
			t.Errorf("%s: %v", name, err)
		}
	}

	// Targets below a link, and accounts that are not files.
	root := newRoot(t)
	outside := t.TempDir()
	if err := errors.Join(os.Symlink(outside, root+"/srv"), os.Remove(root+"/etc/passwd"),
		unix.Mkfifo(root+"/etc/passwd", 0o644), os.Remove(root+"/etc/group"), os.Symlink("/dev/zero", root+"/etc/group"),
	); err != nil {
		t.Fatal(err)
	}
	s := full(root, "true")
	s.User = "7"
	if _, r := output(t, s, sandbox.Options{}); r.Exit != 0 {
		t.Errorf("exit %d", r.Exit)
	}
	s.Mounts = append(s.Mounts, sandbox.Mount{Kind: sandbox.Tmpfs, Target: "/srv/made"})
	if _, _, err := tryOutput(t, s, sandbox.Options{}); !errs.Is(err, errs.Invalid) {
		t.Errorf("%v", err)
	}
	if left, err := os.ReadDir(outside); err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
}

// TestStandardFiles: a program cannot open a file of the host again with other rights, or get a directory.
func TestStandardFiles(t *testing.T) {
	root := newRoot(t)
	path := filepath.Join(t.TempDir(), "input")
	if err := os.WriteFile(path, []byte("input\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	in, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, _ := output(t, full(root, "sh", "-c", "cat; echo overwritten >/proc/self/fd/0"), sandbox.Options{Stdin: in})
	if b, err := os.ReadFile(path); string(b) != "input\n" || err != nil || !strings.Contains(out, "input\n") {
		t.Errorf("%q, %v; %q", b, err, out)
	}

	// Output to a file arrives whole.
	file, err := os.Create(filepath.Join(t.TempDir(), "output"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	r, err := sandbox.Run(t.Context(), full(root, "sh", "-c", "dd if=/dev/zero bs=1000 count=1000 2>/dev/null; exit 3"),
		sandbox.Options{Stdout: file})
	b, rerr := os.ReadFile(file.Name())
	if err != nil || r.Exit != 3 || rerr != nil || !bytes.Equal(b, make([]byte, 1e6)) {
		t.Errorf("%d bytes, %v, %v", len(b), r, err)
	}

	dir, err := os.Open("/")
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if _, err := sandbox.Run(t.Context(), full(root, "true"), sandbox.Options{Stdin: dir}); !errs.Is(err, errs.Invalid) {
		t.Errorf("%v", err)
	}
}
