package loopdev_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/loopdev"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// As the test's children:
//
//	attach FILE...   attaches all, says the numbers, waits
//	nocontrol FILE   attaches where there is no /dev/loop-control
//	nonodes FILE     attaches where there is a /dev/loop-control only
func TestMain(m *testing.M) {
	role := os.Getenv("PANDO_TEST_CHILD")
	if role == "" {
		os.Exit(m.Run())
	}
	if err := child(role, os.Args[1:]); err != nil {
		fmt.Printf("failed %s %q %s\n", errs.KindOf(err), errs.HintOf(err), err)
		os.Exit(1)
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
}

func child(role string, files []string) error {
	if role != "attach" {
		if err := hideDevices(role); err != nil {
			return fmt.Errorf("hiding devices: %v", err)
		}
	}
	var wg sync.WaitGroup
	devices := make([]*loopdev.Device, len(files))
	failures := make([]error, len(files))
	for i, path := range files {
		wg.Go(func() {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				failures[i] = err
				return
			}
			defer f.Close()
			devices[i], failures[i] = loopdev.Attach(context.Background(), f, loopdev.Options{})
		})
	}
	wg.Wait()
	if err := errors.Join(failures...); err != nil {
		return err
	}
	said := "ready"
	for _, d := range devices {
		said += " " + strconv.Itoa(d.Index)
	}
	fmt.Println(said)
	_, _ = io.Copy(io.Discard, os.Stdin)
	return nil
}

func hideDevices(role string) error {
	if err := unix.Mount("tmpfs", "/dev", "tmpfs", 0, ""); err != nil {
		return err
	}
	if role == "nonodes" {
		return unix.Mknod("/dev/loop-control", unix.S_IFCHR|0o600, int(unix.Mkdev(10, 237)))
	}
	return nil
}

type process struct {
	*exec.Cmd
	in   io.WriteCloser
	said []string
}

func startChild(t *testing.T, role string, prepare func(*exec.Cmd), files ...string) *process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, files...)
	cmd.Env = append(os.Environ(), "PANDO_TEST_CHILD="+role)
	cmd.Stderr = os.Stderr
	if prepare != nil {
		prepare(cmd)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{Cmd: cmd, in: in}
	t.Cleanup(p.kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("child %s: %v", role, err)
	}
	p.said = strings.Fields(line)
	return p
}

func (p *process) kill() {
	_ = p.Process.Kill()
	_ = p.Wait()
	_ = p.in.Close()
}

// All ask the kernel for the same free device at the same time.
func TestAttachersRace(t *testing.T) {
	needRoot(t)
	const processes, each = 8, 5
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	var files [processes][]string
	for i := range processes {
		for j := range each {
			files[i] = append(files[i], image(t, dir, fmt.Sprintf("%d%d_", i, j)))
		}
	}
	var children [processes]*process
	var wg sync.WaitGroup
	for i := range processes {
		wg.Go(func() { children[i] = startChild(t, "attach", nil, files[i]...) })
	}
	wg.Wait()
	taken := map[string]string{}
	for i, c := range children {
		if c == nil || c.said[0] != "ready" || len(c.said) != 1+each {
			t.Fatalf("child %d: %+v", i, c)
		}
		for j, n := range c.said[1:] {
			path := files[i][j]
			if other, twice := taken[n]; twice {
				t.Errorf("device %s was given to %s and %s", n, path, other)
			}
			taken[n] = path
			got, err := os.ReadFile("/dev/loop" + n)
			if err != nil || !bytes.Equal(got, content(fmt.Sprintf("%d%d_", i, j))) {
				t.Errorf("device %s does not show %s: %.16q, %v", n, path, got, err)
			}
		}
	}
	for i, c := range children {
		c.kill() // SIGKILL: nobody detaches
		for _, path := range files[i] {
			detached(t, path)
		}
	}
}

func TestKilledBetweenAttachAndMount(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	c := startChild(t, "attach", nil, path)
	if c.said[0] != "ready" {
		t.Fatal(c.said)
	}
	if attached, err := loopdev.Attached(path); err != nil || !attached {
		t.Fatalf("the child attached nothing: %v, %v", attached, err)
	}
	n, _ := strconv.Atoi(c.said[1])
	c.kill()
	detached(t, path)
	if b, err := loopdev.Lookup(n); err == nil && b.SameFile(stat(t, path)) {
		t.Errorf("%+v", b)
	}
}

func TestWithoutLoopDevices(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	for role, hint := range map[string]string{"nocontrol": "modprobe loop", "nonodes": "mknod /dev/loop"} {
		t.Run(role, func(t *testing.T) {
			c := startChild(t, role, func(cmd *exec.Cmd) {
				cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
			}, path)
			said := strings.Join(c.said, " ")
			if !strings.HasPrefix(said, "failed "+string(errs.Unsupported)+" ") || !strings.Contains(said, hint) {
				t.Errorf("the child says %q, want kind unsupported and the hint %q", said, hint)
			}
		})
	}
}

func TestNotRoot(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	path := image(t, dir, "abc")
	c := startChild(t, "attach", func(cmd *exec.Cmd) {
		cmd.Path = "/proc/self/exe" // whatever directory this program is in
		cmd.Args[1] = "/proc/self/fd/3"
		cmd.ExtraFiles = []*os.File{open(t, path, os.O_RDWR)}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1234, Gid: 1234}}
	}, path)
	if said := strings.Join(c.said, " "); !strings.HasPrefix(said, "failed "+string(errs.Permission)+" ") {
		t.Errorf("the child says %q, want kind permission", said)
	}
}
