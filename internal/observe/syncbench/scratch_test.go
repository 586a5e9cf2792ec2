package syncbench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/extent"
	"pando/internal/testing/testfs"
)

// start measures in a process of its own.
func start(t *testing.T, c Config) *exec.Cmd {
	t.Helper()
	config, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+string(config))
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Its fio ends a moment after it, and uses the filesystem until then.
		fio := children(t, cmd.Process.Pid, "pfio-")
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		for _, pid := range fio {
			wait(t, "fio has ended", func() bool { _, _, runs := process(pid); return !runs })
		}
	})
	return cmd
}

// children finds the processes that a process has started and that run a program whose name begins so.
func children(t *testing.T, of int, program string) []int {
	t.Helper()
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", of))
	if err != nil {
		t.Fatal(err)
	}
	var out []int
	for _, l := range lists {
		text, err := os.ReadFile(l)
		if err != nil {
			continue
		}
		for p := range strings.FieldsSeq(string(text)) {
			pid, err := strconv.Atoi(p)
			if err != nil {
				t.Fatal(err)
			}
			if comm, _, _ := process(pid); strings.HasPrefix(comm, program) {
				out = append(out, pid)
			}
		}
	}
	return out
}

// process tells the name of a process, and whether it runs: until its last thread has ended, its files are open.
func process(pid int) (name, args string, runs bool) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", "", false
	}
	_, rest, _ := strings.Cut(string(stat), "(")
	name, rest, _ = strings.Cut(rest, ") ")
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	threads, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	return name, string(cmdline), err == nil && (!strings.HasPrefix(rest, "Z") || len(threads) > 1)
}

// measuring waits until fio measures, and returns its process and the files.
func measuring(t *testing.T, cmd *exec.Cmd, dir string) (fio int, scratch string) {
	t.Helper()
	wait(t, "fio runs", func() bool {
		for _, pid := range children(t, cmd.Process.Pid, "pfio-") {
			if _, args, runs := process(pid); runs && strings.Contains(args, "--status-interval") {
				fio = pid
			}
		}
		return fio != 0
	})
	found, err := filepath.Glob(filepath.Join(dir, Prefix+"*"))
	if err != nil || len(found) != 1 {
		t.Fatalf("%v, %v", found, err)
	}
	return fio, found[0]
}

func TestInterrupted(t *testing.T) {
	need(t, "fio")
	dir := testfs.Ext4(t, 64<<20)
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		c := quick(dir, "postgres")
		c.Duration = 10 * time.Second
		cmd := start(t, c)
		fio, _ := measuring(t, cmd, dir)
		if err := cmd.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != errs.Canceled.Codes().Exit {
			t.Errorf("%v: exit code %d", s, code)
		}
		if _, _, runs := process(fio); runs {
			t.Errorf("%v: fio still runs", s)
		}
		empty(t, dir)
	}
}

// TestKilled: fio ends with the process that started it, and the next run removes what was left, but not
// what is in use or of somebody else.
func TestKilled(t *testing.T) {
	need(t, "fio")
	top := testfs.Ext4(t, 64<<20)
	dir, elsewhere := filepath.Join(top, "a"), filepath.Join(top, "b")
	for _, d := range []string{dir, elsewhere} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	long := quick(dir, "sqlite-full")
	long.Duration = 10 * time.Second

	dead := start(t, long)
	fio, left := measuring(t, dead, dir)
	if err := dead.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = dead.Wait()
	wait(t, "fio has ended", func() bool { _, _, runs := process(fio); return !runs })
	if files, err := os.ReadDir(left); err != nil || len(files) < 2 {
		t.Fatalf("nothing is left, so that this shows nothing: %v, %v", files, err)
	}

	other := quick(elsewhere, "sqlite-full")
	other.Duration = 10 * time.Second
	alive := start(t, other)
	_, used := measuring(t, alive, other.Path)
	if err := os.Rename(used, filepath.Join(dir, filepath.Base(used))); err != nil {
		t.Fatal(err)
	}
	used = filepath.Join(dir, filepath.Base(used))
	keep := map[string]bool{used: true}
	for _, name := range []string{
		Prefix + "abcdefg2",    // a directory with something in it and no lock
		Prefix + "tooshort1",   // not such a name
		Prefix + "abcdefg3.go", //
		Prefix + "ABCDEFGH",    //
		"else",
	} {
		keep[filepath.Join(dir, name)] = true
		if err := os.MkdirAll(filepath.Join(dir, name, "mine"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(dir, Prefix+"abcdefg4")
	keep[link] = true
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	half := filepath.Join(dir, Prefix+"abcdefg5") // killed before it had a lock
	if err := os.Mkdir(half, 0o700); err != nil {
		t.Fatal(err)
	}

	measure(t, quick(dir, "sqlite-full"))
	for p := range keep {
		if _, err := os.Lstat(p); err != nil {
			t.Errorf("it was removed: %v", err)
		}
	}
	for _, p := range []string{left, half} {
		if _, err := os.Lstat(p); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s was not removed: %v", p, err)
		}
	}
	if files, err := os.ReadDir(used); err != nil || len(files) < 2 {
		t.Errorf("of a benchmark that lives: %v, %v", files, err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != len(keep) {
		t.Errorf("%v, %v; want %v", entries, err, keep)
	}
}

// TestReuse: files of one plan become those of the next one where that can be.
func TestReuse(t *testing.T) {
	s, err := newScratch(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.remove(); err != nil {
			t.Error(err)
		}
	}()
	number := func(name string) uint64 {
		st, err := os.Stat(s.path(name))
		if err != nil {
			t.Fatal(err)
		}
		return st.Sys().(*syscall.Stat_t).Ino
	}
	lay := func(files ...file) {
		t.Helper()
		if err := s.layout(t.Context(), files); err != nil {
			t.Fatal(err)
		}
		entries, err := os.ReadDir(s.dir)
		if err != nil || len(entries) != len(files)+1 {
			t.Errorf("%v, %v; want %v", entries, err, files)
		}
		for _, f := range files {
			if st, err := os.Stat(s.path(f.name)); err != nil || st.Size() != f.bytes {
				t.Errorf("%+v: %v", f, err)
			}
		}
	}
	lay(file{"a.0", 8192, true}, file{"a.1", 8192, true}, file{"b", 4096, true}, file{"c", 8192, false})
	a0, a1 := number("a.0"), number("a.1")
	lay(file{"a.0", 8192, true}, file{"x", 8192, true}, file{"b", 8192, true}, file{"c", 8192, false})
	if number("a.0") != a0 || number("x") != a1 {
		t.Error("not the same files under their new names")
	}
	b := number("b")
	lay(file{"a.1", 8192, true}, file{"a.0", 4096, true})
	if n := number("a.1"); n != a0 && n != a1 && n != b {
		t.Error("a file was made anew")
	}
}

// TestLaidOut: files are written or only allocated, as their profile says, of all sizes.
func TestLaidOut(t *testing.T) {
	dir := testfs.Ext4(t, 192<<20)
	for _, d := range definitions {
		size := int64(16 << 20)
		if d.Calls.Unwritten {
			size = 48 << 20
		}
		for _, writers := range []int{d.Writers, 3} {
			if d.Calls.Unwritten && writers > 1 {
				continue
			}
			p, err := d.plan(size, writers)
			if err != nil {
				t.Fatal(d.Name, err)
			}
			s, err := newScratch(dir)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.layout(t.Context(), p.files); err != nil {
				t.Fatal(d.Name, err)
			}
			for _, f := range p.files {
				if written, unwritten := blocks(t, s.path(f.name)); written == d.Calls.Unwritten || unwritten != d.Calls.Unwritten {
					t.Errorf("%s: %s: written %v, unwritten %v", d.Name, f.name, written, unwritten)
				}
			}
			if err := s.remove(); err != nil {
				t.Error(err)
			}
			empty(t, dir)
		}
	}
}

// blocks tells whether a file has blocks that were written, and such that were not.
func blocks(t *testing.T, path string) (written, unwritten bool) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := extent.Scan(f, true, func(e extent.Extent) error {
		if e.Flags&extent.Unwritten != 0 {
			unwritten = true
		} else {
			written = true
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return written, unwritten
}

// TestRenewed: a file that its writer has left is made new, and no other one; so in a real run fio never
// finds a file that was written before.
func TestRenewed(t *testing.T) {
	need(t, "fio")
	dir := testfs.Ext4(t, 64<<20)
	smallSegments(t, "etcd")
	d, err := define("etcd")
	if err != nil {
		t.Fatal(err)
	}
	p, err := d.plan(1<<20, 2)
	if err != nil {
		t.Fatal(err)
	}
	s, err := newScratch(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.remove(); err != nil {
			t.Error(err)
		}
	}()
	if err := s.layout(t.Context(), p.files); err != nil {
		t.Fatal(err)
	}
	r, err := newRenewer(s, p)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name string) {
		t.Helper()
		f, err := os.OpenFile(s.path(name), os.O_WRONLY, 0)
		if err == nil {
			_, err = f.Write(make([]byte, 10000))
		}
		if err = errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	look := func(want ...string) {
		t.Helper()
		for i := range r.writers {
			if err := r.follow(&r.writers[i]); err != nil {
				t.Fatal(err)
			}
		}
		var got []string
		for _, f := range p.files {
			if written, _ := blocks(t, s.path(f.name)); written {
				got = append(got, f.name)
			}
			if st, err := os.Stat(s.path(f.name)); err != nil || st.Size() != f.bytes {
				t.Errorf("%s: %v", f.name, err)
			}
		}
		if strings.Join(got, " ") != strings.Join(want, " ") {
			t.Errorf("written: %v, want %v", got, want)
		}
	}
	look()
	write("log.0.0")
	look("log.0.0")
	write("log.0.1")
	look("log.0.1")
	write("log.1.0")
	write("log.1.1")
	write("log.1.2")
	look("log.0.1", "log.1.2")
	write("log.0.2")
	write("log.0.0")
	look("log.0.0", "log.1.2")
}

// TestRenewedWhileFioRuns: more is written than the files hold, and at the end no file is written
// but the one that fio was in.
func TestRenewedWhileFioRuns(t *testing.T) {
	need(t, "fio")
	dir := testfs.Ext4(t, 64<<20)
	smallSegments(t, "etcd")
	c := quick(dir, "etcd")
	c.Duration = time.Second
	d, err := c.complete()
	if err != nil {
		t.Fatal(err)
	}
	p, err := d.plan(2<<20, 1)
	if err != nil {
		t.Fatal(err)
	}
	// Not so fast that it goes round between two looks.
	p.perFile = append(p.perFile, "--rate_iops=1500")
	s, err := newScratch(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.remove(); err != nil {
			t.Error(err)
		}
	}()
	if err := s.layout(t.Context(), p.files); err != nil {
		t.Fatal(err)
	}
	program, _, err := fioVersion(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{Config: c, definition: d, program: program, scratch: s}
	for {
		samples, err := b.start(t.Context(), p, c.Duration, "measure", (*exec.Cmd).Start, nil)
		if err != nil {
			t.Fatal(err)
		}
		bytes := samples[len(samples)-1].bytes
		t.Logf("%d bytes of %d", bytes, p.File)
		if bytes > p.File {
			break
		}
		c.Duration *= 2 // a slow machine
	}
	n := 0
	for _, f := range p.files {
		if written, _ := blocks(t, s.path(f.name)); written {
			n++
		}
	}
	// The one that it was in, and the one before it, if it went on in the last moment.
	if n < 1 || n > 2 {
		t.Errorf("%d of %d files are written", n, len(p.files))
	}
}
