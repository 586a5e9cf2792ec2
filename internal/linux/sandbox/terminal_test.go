package sandbox_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"pando/internal/linux/sandbox"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

func init() {
	// terminal runs a sandbox as `pando run` does, with the standard files that it has.
	roles["terminal"] = func() int {
		s := full(os.Getenv("SANDBOX_TEST_ROOT"), strings.Fields(os.Getenv("SANDBOX_TEST_COMMAND"))...)
		s.Env = append(s.Env, "PS1=ready> ", "TERM=dumb")
		r, err := sandbox.Run(context.Background(), s, sandbox.Options{
			Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Grace: 200 * time.Millisecond,
			Signals: func() (<-chan os.Signal, func()) {
				c := make(chan os.Signal, 16)
				signal.Notify(c, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1,
					syscall.SIGWINCH, syscall.SIGTSTP)
				return c, func() { signal.Stop(c) }
			},
			Suspend: func() { _ = syscall.Kill(os.Getpid(), syscall.SIGSTOP) },
		})
		if err != nil {
			fmt.Println(err)
			return 99
		}
		return r.Exit
	}
}

// console is a terminal with a sandbox in it.
type console struct {
	t      *testing.T
	master *os.File
	slave  *os.File
	cmd    *exec.Cmd
	mu     sync.Mutex
	output string
}

// newTerminal returns both sides of a new terminal.
func newTerminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { slave.Close() })
	return master, slave
}

func newConsole(t *testing.T, root, command string) *console {
	t.Helper()
	master, slave := newTerminal(t)
	c := &console{t: t, master: master, slave: slave, cmd: exec.Command("/proc/self/exe")}
	c.resize(30, 100)
	c.cmd.Env = append(os.Environ(), "SANDBOX_TEST_ROLE=terminal", "SANDBOX_TEST_ROOT="+root,
		"SANDBOX_TEST_COMMAND="+command)
	c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = slave, slave, slave
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.cmd.Process.Kill(); _ = c.cmd.Wait() })

	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			c.mu.Lock()
			c.output += string(buf[:n])
			c.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return c
}

func (c *console) resize(rows, columns uint16) {
	c.t.Helper()
	size := &unix.Winsize{Row: rows, Col: columns}
	if err := unix.IoctlSetWinsize(int(c.master.Fd()), unix.TIOCSWINSZ, size); err != nil {
		c.t.Fatal(err)
	}
}

func (c *console) typed(s string) {
	c.t.Helper()
	if _, err := c.master.WriteString(s); err != nil {
		c.t.Fatal(err)
	}
}

// expect waits until the output contains a text, and forgets the output up to it.
func (c *console) expect(want string) {
	c.t.Helper()
	c.expectMatch("(" + regexp.QuoteMeta(want) + ")")
}

// expectMatch waits until the output matches, forgets the output up to it and returns what the group matched.
func (c *console) expectMatch(pattern string) string {
	c.t.Helper()
	re := regexp.MustCompile(pattern)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		c.mu.Lock()
		got := c.output
		at := re.FindStringSubmatchIndex(got)
		if at != nil {
			c.output = got[at[1]:]
		}
		c.mu.Unlock()
		if at != nil {
			return got[at[2]:at[3]]
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("%q does not come; output: %q", pattern, got)
		}
	}
}

// TestTerminal: the program has a terminal of its own, with the size of the user's, and job control; and the user's
// terminal is as before when it ends.
func TestTerminal(t *testing.T) {
	root := newRoot(t)
	c := newConsole(t, root, "sh -i")
	before, err := term.GetState(int(c.slave.Fd()))
	if err != nil {
		t.Fatal(err)
	}

	c.expect("ready> ")
	c.typed("tty; stty size\r")
	c.expect("/dev/pts/0\r\n30 100\r\n")
	c.expect("ready> ")

	// Resize.
	c.resize(44, 132)
	for size := ""; size != "44 132"; { // it arrives a moment later
		c.typed("echo size=$(stty size)=\r")
		size = c.expectMatch(`size=([0-9 ]+)=`) // the shell may draw the line itself more than once
	}
	c.expect("ready> ")

	// Ctrl-C and Ctrl-Z act inside.
	c.typed("sleep 1000\r")
	time.Sleep(100 * time.Millisecond)
	c.typed("\x03")
	c.expect("ready> ")
	c.typed("echo code-$?\r")
	c.expect("\r\ncode-130\r\n")
	c.typed("sleep 1000\r")
	time.Sleep(100 * time.Millisecond)
	c.typed("\x1a")
	c.expect("Stopped")
	c.typed("jobs; kill %1; fg; echo code-$?\r")
	c.expect("Stopped")
	c.expect("\r\ncode-")
	c.typed("exit 5\r")

	if err := c.cmd.Wait(); c.cmd.ProcessState.ExitCode() != 5 {
		t.Errorf("%v", err)
	}
	after, err := term.GetState(int(c.slave.Fd()))
	if err != nil || *after != *before {
		t.Errorf("the terminal has changed: %v, %v, %v", before, after, err)
	}
}

// TestTerminalOfOutput: input that is no terminal stays as it is, though output is one.
func TestTerminalOfOutput(t *testing.T) {
	root := newRoot(t)
	master, slave := newTerminal(t)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "SANDBOX_TEST_ROLE=terminal", "SANDBOX_TEST_ROOT="+root, "SANDBOX_TEST_COMMAND=sh")
	cmd.Stdin, cmd.Stdout = strings.NewReader("test -t 0 || test -t 1 && echo 'only output'; exit 3\n"), slave
	if err := cmd.Run(); cmd.ProcessState.ExitCode() != 3 {
		t.Errorf("%v", err)
	}
	buf := make([]byte, 100)
	n, err := master.Read(buf)
	if !strings.Contains(string(buf[:n]), "only output") {
		t.Errorf("%q, %v", buf[:n], err)
	}
}

// TestSignals: signals reach the program; one that stops this process stops the program, too.
func TestSignals(t *testing.T) {
	root := newRoot(t)
	writeProgram(t, root+"/bin/traps", []byte(`#!/bin/sh
for s in INT HUP TERM USR1; do trap "echo $s" $s; done
trap 'exit 9' TERM
echo ready
while :; do sleep 0.02; echo beat; done
`))
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "SANDBOX_TEST_ROLE=terminal", "SANDBOX_TEST_ROOT="+root, "SANDBOX_TEST_COMMAND=traps")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill() }()

	lines := make(chan string, 10000)
	go func() {
		defer close(lines)
		buf := make([]byte, 4096)
		rest := ""
		for {
			n, err := out.Read(buf)
			rest += string(buf[:n])
			for {
				line, after, ok := strings.Cut(rest, "\n")
				if !ok {
					break
				}
				rest = after
				lines <- line
			}
			if err != nil {
				return
			}
		}
	}()
	await := func(want string) {
		t.Helper()
		for deadline := time.After(20 * time.Second); ; {
			select {
			case line, ok := <-lines:
				if line == want {
					return
				}
				if !ok {
					t.Fatalf("the program ended before %s", want)
				}
			case <-deadline:
				t.Fatalf("no %s", want)
			}
		}
	}

	await("ready")
	for name, s := range map[string]syscall.Signal{"INT": syscall.SIGINT, "HUP": syscall.SIGHUP, "USR1": syscall.SIGUSR1} {
		if err := cmd.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
		await(name)
	}

	// Stop and continue.
	if err := cmd.Process.Signal(syscall.SIGTSTP); err != nil {
		t.Fatal(err)
	}
	var ws syscall.WaitStatus
	if _, err := syscall.Wait4(cmd.Process.Pid, &ws, syscall.WUNTRACED, nil); err != nil || !ws.Stopped() {
		t.Fatalf("%v, %v", ws, err)
	}
	time.Sleep(100 * time.Millisecond)
	for len(lines) > 0 {
		<-lines
	}
	time.Sleep(300 * time.Millisecond)
	if n := len(lines); n > 0 {
		t.Errorf("a stopped program has written %d lines", n)
	}
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	await("beat")

	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for range lines {
	}
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 9 {
		t.Errorf("%v", err)
	}
}

// TestTimeout: a program is asked to end, and then killed with all that it has started.
func TestTimeout(t *testing.T) {
	root := newRoot(t)
	for script, want := range map[string]string{
		"trap 'echo asked; exit 1' TERM; while :; do sleep 0.01; done": "asked\n",
		"trap '' TERM; while :; do sleep 0.01; done":                   "",
	} {
		out, r := output(t, full(root, "sh", "-c", script),
			sandbox.Options{Timeout: 200 * time.Millisecond, Grace: 200 * time.Millisecond})
		if r.Exit != 124 || !r.TimedOut || !strings.HasPrefix(out, want) {
			t.Errorf("%s: %+v, %q", script, r, out)
		}
	}
	_, r := output(t, full(root, "sh", "-c", "exit 4"), sandbox.Options{Timeout: time.Minute})
	if r.Exit != 4 || r.TimedOut {
		t.Errorf("%+v", r)
	}
}

// TestNothingSurvives: when the process that runs a sandbox is killed, at any moment, every process of it dies; and
// what a program leaves in the background dies with it.
func TestNothingSurvives(t *testing.T) {
	root := newRoot(t)
	if _, r := output(t, full(root, "sh", "-c", "setsid sleep 98765 & exit 0"), sandbox.Options{}); r.Exit != 0 {
		t.Errorf("exit %d", r.Exit)
	}
	if n := countSleeps(); n != 0 {
		t.Errorf("%d processes are left", n)
	}

	for delay := time.Duration(0); delay < 60*time.Millisecond; delay += 3 * time.Millisecond {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), "SANDBOX_TEST_ROLE=terminal", "SANDBOX_TEST_ROOT="+root,
			"SANDBOX_TEST_COMMAND=sleep 98765")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(delay)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		deadline := time.Now().Add(10 * time.Second)
		for countSleeps() > 0 {
			if time.Now().After(deadline) {
				t.Fatalf("killed after %v: a process is left", delay)
			}
			time.Sleep(2 * time.Millisecond)
		}
	}
}

// countSleeps counts the processes of sandboxes.
func countSleeps() (n int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		b, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if s := string(b); strings.HasPrefix(s, "sleep\x0098765") || strings.HasPrefix(s, "pando-sandbox-init") {
			n++
		}
	}
	return n
}
