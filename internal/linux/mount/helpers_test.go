package mount_test

import (
	"bufio"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// base holds everything that the tests make, so that TestMain can see what they
// left behind.
var base string

// childRoles are what this program does when a test starts it as a child. Each
// prints "ready" through the function that it is given, which then waits until
// the test closes the child's standard input.
var childRoles = map[string]func(args []string, ready func(string)) error{}

func TestMain(m *testing.M) {
	if role := os.Getenv("PANDO_TEST_CHILD"); role != "" {
		err := childRoles[role](os.Args[1:], func(msg string) {
			fmt.Println("ready", msg)
			_, _ = io.Copy(io.Discard, os.Stdin)
		})
		if err != nil {
			fmt.Println("failed", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "pando-mount-")
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err == nil {
		err = os.Chmod(dir, 0o755) // some children are not root
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	base = dir
	code := m.Run()
	if left := leftovers(); os.Geteuid() == 0 && left != "" {
		fmt.Println("left behind by the tests:", left)
		return max(code, 1)
	}
	os.RemoveAll(dir)
	return code
}

func leftovers() string {
	var left []string
	loops, err := loopdev.List()
	if err != nil {
		return err.Error()
	}
	for _, b := range loops {
		if strings.HasPrefix(b.File, base) {
			left = append(left, b.Path)
		}
	}
	table, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(table)) {
		if strings.Contains(line, base) {
			left = append(left, strings.TrimSpace(line))
		}
	}
	return strings.Join(left, "; ")
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root")
	}
}

func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp(base, strings.ReplaceAll(t.Name(), "/", "-")+"-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// newImage makes an image file with a filesystem inside.
func newImage(t *testing.T, fstype string) string {
	t.Helper()
	needRoot(t) // to mount it
	path := filepath.Join(tempDir(t), fstype+".img")
	size := map[string]int64{"ext4": 32 << 20, "xfs": 320 << 20, "none": 32 << 20}[fstype]
	f, err := os.Create(path)
	if err == nil {
		err = f.Truncate(size)
	}
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	if fstype == "none" {
		return path
	}
	out, err := exec.Command("mkfs."+fstype, "-q", path).CombinedOutput()
	if err != nil {
		t.Fatalf("mkfs.%s: %v: %s", fstype, err, out)
	}
	return path
}

// volume is a mounted image.
type volume struct {
	image, dir string
	loop       int
	dev        uint64
}

// mountImage mounts an image at a new directory.
func mountImage(t *testing.T, image, fstype string) volume {
	t.Helper()
	needRoot(t)
	v := volume{image: image, dir: tempDir(t)}
	d := testfs.Loop(t, image, 0, loopdev.Options{})
	v.loop = d.Index
	var options []string
	if fstype == "xfs" {
		options = []string{"nouuid"}
	}
	m, err := mount.Device(fstype, d.Path, options, false)
	if err != nil {
		t.Fatal(err)
	}
	info, err := m.MoveTo(v.dir)
	if err != nil {
		t.Fatal(err)
	}
	v.dev = info.Dev
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	d.Close()
	unmountAtEnd(t, v.dir)
	return v
}

// unmountAtEnd takes away what is mounted at dir when the test ends, whatever
// state a failed test left it in.
func unmountAtEnd(t *testing.T, dir string) {
	t.Cleanup(func() {
		for mount.Unmount(dir) == nil {
		}
	})
}

// gone fails the test unless the loop device of v lets its image go.
func (v volume) gone(t *testing.T) {
	t.Helper()
	free, err := loopdev.WaitDetached(t.Context(), v.image, 10*time.Second)
	if err != nil || !free {
		t.Errorf("loop device %d is still attached to %s (%v)", v.loop, v.image, err)
	}
}

// bound reports whether the loop device of v still has its image.
func (v volume) bound(t *testing.T) bool {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(v.image, &st); err != nil {
		t.Fatal(err)
	}
	b, err := loopdev.Lookup(v.loop)
	return err == nil && b.SameFile(&st)
}

// child is a process that a test started.
type child struct {
	*exec.Cmd
	said string // behind "ready"
	in   io.Closer
	done bool
}

// start starts a program that waits on its standard input; it is there when
// start returns. It dies with the test.
func start(t *testing.T, cmd *exec.Cmd) *child {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &child{Cmd: cmd, in: in}
	t.Cleanup(func() { c.stop() })
	return c
}

// startRole starts this program as a child in a role, and waits until it says
// that it is ready.
func startRole(t *testing.T, role string, prepare func(*exec.Cmd), args ...string) *child {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), "PANDO_TEST_CHILD="+role)
	cmd.Dir = "/"
	if prepare != nil {
		prepare(cmd)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	c := start(t, cmd)
	line, err := bufio.NewReader(out).ReadString('\n')
	word, msg, _ := strings.Cut(strings.TrimSpace(line), " ")
	if err != nil || word != "ready" {
		t.Fatalf("child in role %s: %q, %v", role, line, err)
	}
	c.said = msg
	return c
}

// stop kills the child and waits until it is gone.
func (c *child) stop() {
	if c.done {
		return
	}
	c.done = true
	_ = c.Process.Kill()
	_ = c.Wait()
	_ = c.in.Close()
}

func (c *child) pid() int { return c.Process.Pid }

func (c *child) String() string { return strconv.Itoa(c.pid()) }

func touch(t *testing.T, path string) string {
	t.Helper()
	if err := os.WriteFile(path, make([]byte, 8192), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func checksum(t *testing.T, path string) uint32 {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return h.Sum32()
}

// onThread calls f on a thread that does nothing else, and is not the first of
// the process.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			done <- onThread(f)
			return
		}
		done <- f()
	}()
	return <-done
}

func ptr(p *byte) unsafe.Pointer { return unsafe.Pointer(p) }
