package doctor

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/linux/run"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// roles are what this program does when a test starts it as a child. Each calls ready,
// which tells the test and waits until the test closes the child's standard input.
var roles = map[string]func(args []string, ready func(string)) error{
	"wait": func(_ []string, ready func(string)) error { ready(""); return nil },
}

const roleVariable = "PANDO_DOCTOR_TEST_ROLE"

// TestRole is no test, but where a child begins.
func TestRole(t *testing.T) {
	role := os.Getenv(roleVariable)
	if role == "" {
		return
	}
	if err := roles[role](strings.Split(os.Getenv(roleVariable+"_ARGS"), "\n"), func(said string) {
		fmt.Println("ready " + said)
		_, _ = io.Copy(io.Discard, os.Stdin)
	}); err != nil {
		fmt.Println("failed", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// roleChild is a child in a role.
type roleChild struct {
	cmd  *exec.Cmd
	in   io.Closer
	said string
}

func (c *roleChild) pid() int { return c.cmd.Process.Pid }

// end lets the child end, and waits until it has.
func (c *roleChild) end() {
	if c.in != nil {
		c.in.Close()
		_ = c.cmd.Wait()
		c.in = nil
	}
}

// startRole starts a child and waits until it is ready.
func startRole(t *testing.T, role string, prepare func(*exec.Cmd), args ...string) *roleChild {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "-test.run=^TestRole$")
	cmd.Env = append(os.Environ(), roleVariable+"="+role, roleVariable+"_ARGS="+strings.Join(args, "\n"))
	cmd.Dir = "/"
	cmd.Stderr = os.Stderr
	if prepare != nil {
		prepare(cmd)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &roleChild{cmd: cmd, in: in}
	t.Cleanup(c.end)
	r := bufio.NewReader(out)
	line, err := r.ReadString('\n')
	said, ok := strings.CutPrefix(line, "ready")
	if err != nil || !ok {
		rest, _ := io.ReadAll(r)
		t.Fatalf("child in role %s: %q %s %v", role, line, rest, err)
	}
	c.said = strings.TrimSpace(said)
	return c
}

// inOwnMounts starts a child in a mount namespace of its own, from which nothing goes
// over into others.
func inOwnMounts(c *exec.Cmd) {
	c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
}

func rootOnly(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: it needs root: run the tests as root")
	}
}

// told is a Report as programs read it.
type told struct {
	Status   Severity
	Summary  string
	Measured []toldFigure
	Findings []struct {
		Code, Subject, Title, Why string
		Severity                  Severity
		Measured                  []toldFigure
		Do                        []Step
	}
}

type toldFigure struct {
	Name  string
	Value any
	Note  string
}

// checkNow does one check and tells its result as JSON does.
func checkNow(t *testing.T, check func(context.Context, *host, *Report) error, q *host) told {
	t.Helper()
	if q == nil {
		q = &host{}
	}
	c := Report{Measured: []Figure{}, Findings: []Finding{}}
	if err := check(t.Context(), q, &c); err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	return decode(t, b)
}

func decode(t *testing.T, b []byte) told {
	t.Helper()
	var out told
	if err := json.Unmarshal(b, &out); err != nil {
		t.Fatalf("%v: %s", err, b)
	}
	for _, f := range out.Findings {
		if f.Code == "" || f.Title == "" || f.Why == "" || rank(f.Severity) < rank(Note) || strings.HasSuffix(f.Title, ".") {
			t.Errorf("a finding lacks something: %+v", f)
		}
	}
	if out.Summary == "" && len(out.Findings) == 0 {
		t.Error("no summary")
	}
	return out
}

// about is the severity of the first finding with a code about a subject (of both "":
// any), and its text; "" if there is none.
func (r told) about(code, subject string) (Severity, string) {
	for _, f := range r.Findings {
		if (code == "" || f.Code == code) && (subject == "" || f.Subject == subject) {
			return f.Severity, fmt.Sprintf("%s %s %v %v", f.Subject, f.Title, f.Measured, f.Do)
		}
	}
	return "", ""
}

// value is a figure of a list; -1 if it is not there or unknown.
func value(list []toldFigure, name string) float64 {
	for _, f := range list {
		if v, ok := f.Value.(float64); ok && f.Name == name {
			return v
		}
	}
	return -1
}

// loopOn attaches an image until the test ends, and gives the device's path.
func loopOn(t *testing.T, image string, o loopdev.Options) string {
	t.Helper()
	d := testfs.Loop(t, image, 0, o)
	if o.KeepOpen {
		d.Close()
	}
	return d.Path
}

// file makes a sparse file.
func file(t *testing.T, path string, size int64) string {
	t.Helper()
	f, err := os.Create(path)
	if err == nil {
		err = f.Truncate(size)
		f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLoopDirectIO(t *testing.T) {
	rootOnly(t)
	dir := testfs.Ext4(t, 64<<20)
	buffered := loopOn(t, file(t, filepath.Join(dir, "buffered"), 8<<20), loopdev.Options{})
	direct := loopOn(t, file(t, filepath.Join(dir, "direct"), 8<<20), loopdev.Options{DirectIO: true})
	memory := loopOn(t, file(t, filepath.Join(testfs.Tmpfs(t, 16<<20), "memory"), 8<<20), loopdev.Options{})
	// What is read through the device is in the cache of its file.
	f, err := os.Open(buffered)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReadAt(make([]byte, 4<<20), 0); err != nil {
		t.Fatal(err)
	}
	f.Close()
	r := checkNow(t, loopDirectIO, nil)
	severity, text := r.about("loop-buffered", buffered)
	if severity != Warning || !strings.Contains(text, "losetup --direct-io=on "+buffered) {
		t.Errorf("a buffered one: %q %s", severity, text)
	}
	for _, f := range r.Findings {
		if f.Subject == buffered && value(f.Measured, "cached") < 4<<20 {
			t.Errorf("cached twice: %v", f.Measured)
		}
	}
	for _, d := range []string{direct, memory} {
		for _, f := range r.Findings {
			if f.Subject == d {
				t.Errorf("%s: %+v", d, f)
			}
		}
	}
	// What it says to do mends it.
	if _, err := run.Program(t.Context(), "losetup", "--direct-io=on", buffered); err != nil {
		t.Fatal(err)
	}
	if severity, text := checkNow(t, loopDirectIO, nil).about("", buffered); severity != "" {
		t.Errorf("after the remedy: %s", text)
	}
}

// TestLoopSector: a device with larger sectors below its file cannot do direct I/O with
// small ones.
func TestLoopSector(t *testing.T) {
	rootOnly(t)
	image := file(t, filepath.Join(t.TempDir(), "below"), 64<<20)
	below := loopOn(t, image, loopdev.Options{SectorBytes: 4096})
	if _, err := run.Program(t.Context(), "mkfs.ext4", "-q", "-F", below); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	m, err := mount.Device("ext4", below, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	_, err = m.MoveTo(dir)
	m.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mount.Unmount(dir); err != nil {
			t.Error(err)
		}
	})
	above := ""
	t.Run("device", func(t *testing.T) {
		above = loopOn(t, file(t, filepath.Join(dir, "above"), 8<<20), loopdev.Options{SectorBytes: 512})
		r := checkNow(t, loopDirectIO, nil)
		if s, text := r.about("loop-sector", above); s != Note || !strings.Contains(text, "--sector-size 4096") {
			t.Errorf("%q %s", s, text)
		}
		if s, _ := r.about("loop-buffered", above); s != "" {
			t.Error("it is said that it can do direct I/O")
		}
	})
}

func TestLoopLeaks(t *testing.T) {
	rootOnly(t)
	dir := t.TempDir()
	idle := loopOn(t, file(t, filepath.Join(dir, "idle"), 1<<20), loopdev.Options{KeepOpen: true})
	deleted := loopOn(t, file(t, filepath.Join(dir, "deleted"), 1<<20), loopdev.Options{KeepOpen: true})
	open := loopOn(t, file(t, filepath.Join(dir, "open"), 1<<20), loopdev.Options{}) // this process has it open
	if err := os.Remove(filepath.Join(dir, "deleted")); err != nil {
		t.Fatal(err)
	}
	pool := &PoolFacts{Dir: filepath.Join(dir, "pool"), Data: filepath.Join(dir, "pool", "data"), Driver: "reflink",
		Attached: map[string]string{}}
	if err := os.MkdirAll(pool.Data, 0o755); err != nil {
		t.Fatal(err)
	}
	lost := loopOn(t, file(t, filepath.Join(pool.Data, "lost.img"), 1<<20), loopdev.Options{KeepOpen: true})
	raw := loopOn(t, file(t, filepath.Join(pool.Data, "raw.img"), 1<<20), loopdev.Options{KeepOpen: true})
	pool.Attached[filepath.Join(pool.Data, "raw.img")] = "raw"
	// Mounted where only a child sees it.
	elsewhere := testfs.Ext4(t, 16<<20)
	used, err := mount.Table("self")
	if err != nil {
		t.Fatal(err)
	}
	e, _ := mount.At(used, elsewhere)

	r := checkNow(t, loopLeaks, &host{Pool: pool})
	for _, want := range []struct {
		device, code string
		severity     Severity
	}{{idle, "loop-unused", Note}, {deleted, "loop-deleted", Warning}, {lost, "loop-lost", Warning}} {
		s, text := r.about(want.code, want.device)
		if s != want.severity || !strings.Contains(text, "losetup -d "+want.device) {
			t.Errorf("%s: %q %s", want.device, s, text)
		}
	}
	for _, d := range []string{open, raw, e.Source} {
		for _, f := range r.Findings {
			if f.Subject == d {
				t.Errorf("%s is in use: %+v", d, f)
			}
		}
	}
	// While commands are at work, what is not recorded yet may be theirs.
	pool.Working = 1
	if s, _ := checkNow(t, loopLeaks, &host{Pool: pool}).about("loop-lost", lost); s != Note {
		t.Errorf("while commands are at work: %q", s)
	}
	pool.Working = 0
	for _, d := range []string{idle, lost} {
		if _, err := run.Program(t.Context(), "losetup", "-d", d); err != nil {
			t.Fatal(err)
		}
	}
	r = checkNow(t, loopLeaks, &host{Pool: pool})
	for _, d := range []string{idle, lost} {
		if s, text := r.about("", d); s != "" && strings.Contains(text, dir) {
			t.Errorf("detached: %s", text)
		}
	}
}

// TestLoopLeaksOpenForAMoment: a program that lists devices has each of them open for a
// moment, and hides no leak by that.
func TestLoopLeaksOpenForAMoment(t *testing.T) {
	rootOnly(t)
	d := loopOn(t, file(t, filepath.Join(t.TempDir(), "image"), 1<<20), loopdev.Options{KeepOpen: true})
	f, err := os.Open(d)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { f.Close() }() // the last one

	for _, look := range []int{1, 2} {
		looks := 0
		r := checkNow(t, loopLeaks, &host{looked: func() {
			if looks++; looks == look {
				f.Close()
			}
		}})
		// A device of another process that comes or goes causes a third look, after the file was closed.
		if s, _ := r.about("loop-unused", d); look == 1 != (s != "") && (look == 1 || looks == 2) {
			t.Errorf("open in %d of %d looks: %q", look, looks, s)
		}
		if f, err = os.Open(d); err != nil {
			t.Fatal(err)
		}
	}
}

// TestLoopUsers: each way to use a device is seen.
func TestLoopUsers(t *testing.T) {
	rootOnly(t)
	dir := t.TempDir()
	uses := func(device string) string {
		t.Helper()
		loops, err := loopDevices()
		if err != nil {
			t.Fatal(err)
		}
		spaces, _, err := namespaces(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		all, _, err := loopUses(t.Context(), loops, spaces)
		if err != nil {
			t.Fatal(err)
		}
		// Whoever lists devices beside this test has it open for a moment.
		others := func(use string) bool {
			return strings.HasPrefix(use, "open in") && !strings.HasPrefix(use, fmt.Sprintf("open in pid %d ", os.Getpid()))
		}
		return strings.Join(slices.DeleteFunc(all[filepath.Base(device)], others), "; ")
	}
	d := loopOn(t, file(t, filepath.Join(dir, "image"), 16<<20), loopdev.Options{KeepOpen: true})
	if got := uses(d); got != "" {
		t.Errorf("idle: %s", got)
	}
	f, err := os.Open(d)
	if err != nil {
		t.Fatal(err)
	}
	if got := uses(d); got != fmt.Sprintf("open in pid %d (%s)", os.Getpid(), commandOf(os.Getpid())) {
		t.Errorf("open: %s", got)
	}
	f.Close()
	over := loopOn(t, d, loopdev.Options{KeepOpen: true})
	if got := uses(d); got != "behind "+over {
		t.Errorf("under another: %s", got)
	}
	n, err := strconv.Atoi(strings.TrimPrefix(over, "/dev/loop"))
	if err != nil {
		t.Fatal(err)
	}
	if err := loopdev.Clear(n); err != nil {
		t.Fatal(err)
	}
	if _, err := run.Program(t.Context(), "mkswap", d); err != nil {
		t.Fatal(err)
	}
	if _, err := run.Program(t.Context(), "swapon", "--priority", "0", d); err != nil {
		t.Skipf("SKIPPED: this kernel does not swap on it: %v", err)
	}
	t.Cleanup(func() { _ = exec.Command("swapoff", d).Run() })
	if got := uses(d); got != "swap space" {
		t.Errorf("swap: %s", got)
	}
	r := checkNow(t, dirtyCheck(dirtyDefaults), nil)
	if s, text := r.about("swap-on-volume", d); s != Warning || !strings.Contains(text, "swapoff "+d) {
		t.Errorf("swap on it: %q %s", s, text)
	}
	if _, err := run.Program(t.Context(), "swapoff", d); err != nil {
		t.Fatal(err)
	}
	if s, _ := checkNow(t, dirtyCheck(dirtyDefaults), nil).about("swap-on-volume", d); s != "" {
		t.Error("no swap on it any more")
	}
	// Only in another namespace.
	if _, err := run.Program(t.Context(), "mkfs.ext4", "-q", "-F", d); err != nil {
		t.Fatal(err)
	}
	c := startRole(t, "mount", inOwnMounts, d, dir)
	if got := uses(d); !strings.Contains(got, "mounted at "+dir+" in mount namespace") ||
		!strings.Contains(got, fmt.Sprintf("pid %d", c.pid())) {
		t.Errorf("in another namespace: %s", got)
	}
	c.end()
}

func init() {
	roles["mount"] = func(args []string, ready func(string)) error {
		if err := unix.Mount(args[0], args[1], "ext4", 0, ""); err != nil {
			return err
		}
		ready("")
		return unix.Unmount(args[1], 0)
	}
}

// testContext is for children, which have no test.
func testContext() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), time.Minute)
}
