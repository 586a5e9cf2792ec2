package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"pando/internal/engine"
	"pando/internal/front/cli"
	"pando/internal/linux/zfs"
	"pando/internal/testing/schematest"
	"pando/internal/testing/testfs"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	engine.Helper(os.Args) // pando is this program here, and starts it again
	testscript.Main(m, map[string]func(){"pando": func() { os.Exit(runChecked()) }})
}

// runChecked is main that holds what a command prints with --json to its schema.
func runChecked() int {
	var stdout, stderr bytes.Buffer
	endOut, endErr := tee(&os.Stdout, &stdout), tee(&os.Stderr, &stderr)
	code := cli.Main(drivers, newService, version)
	endOut()
	endErr()
	if err := schematest.Check(os.Args[1:], stdout.Bytes(), stderr.Bytes()); err != nil {
		fmt.Fprintln(os.Stderr, "SCHEMA:", err)
		return 99
	}
	return code
}

// tee makes a file a pipe, and copies what is written to it to the file that it was, and to a buffer. end waits for
// the last of it, but not for children that keep the pipe.
func tee(f **os.File, to *bytes.Buffer) (end func()) {
	was := *f
	r, w, err := os.Pipe()
	if err != nil || !slices.Contains(os.Args, "--json") {
		return func() {}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(io.MultiWriter(was, to), r) // who reads it may have gone
	}()
	*f = w
	return func() {
		*f = was
		_ = w.Close()
		select {
		case <-done:
		case <-time.After(3 * time.Second):
		}
	}
}

// TestScripts runs testdata/script: the command line as a person uses it. Each
// script has a pool directory of its own in $PANDO_POOL, removed at the end with
// a check that nothing is left.
func TestScripts(t *testing.T) { runScripts(t, "testdata/script/*.txtar") }

// TestScriptsAlone runs, one after the other, scripts that disturb others (one
// changes the boot ID that all see) or that others would disturb (one must see
// that no mount namespace but its own has its directories in it).
func TestScriptsAlone(t *testing.T) {
	scripts, err := filepath.Glob("testdata/alone/*.txtar")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, s := range scripts {
		t.Run("", func(t *testing.T) { runScripts(t, s) }) // ends when its script has
	}
}

func runScripts(t *testing.T, pattern string) {
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts in %s: %v", pattern, err)
	}
	// Some scripts give up root, and must still reach what is theirs.
	root, err := os.MkdirTemp("", "pando-script-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	publicCopy := sync.OnceValues(func() (string, error) {
		exe, err := exec.LookPath("pando")
		if err != nil {
			return "", err
		}
		b, err := os.ReadFile(exe)
		if err != nil {
			return "", err
		}
		to := filepath.Join(root, "pando")
		return to, testfs.WriteProgram(to, b)
	})
	testscript.Run(t, testscript.Params{
		Files:       files,
		WorkdirRoot: root,
		Setup: func(e *testscript.Env) error {
			dir := e.WorkDir
			pool := filepath.Join(dir, "pool")
			e.Setenv("PANDO_POOL", pool)
			e.Setenv("HOME", dir)
			e.Defer(func() {
				// Some scripts make further ones beside it.
				pools, _ := filepath.Glob(filepath.Join(dir, "pool*", "pool.json")) // the pattern is good
				for _, p := range pools {
					p = filepath.Dir(p)
					_ = os.Chmod(p, 0o700)
					cmd := exec.Command("pando", "--pool", p, "deinit", "--force", "--lose-keys")
					if out, err := cmd.CombinedOutput(); err != nil {
						t.Errorf("deinit of %s at the end: %v: %s", p, err, out)
					}
				}
				for _, l := range testfs.Leaks(dir, 5e9) {
					t.Errorf("LEAK: %s", l)
				}
			})
			return nil
		},
		Condition: func(cond string) (bool, error) {
			switch cond {
			case "root":
				return os.Geteuid() == 0, nil
			case "zfs":
				return zfs.Available() == nil, nil
			}
			return false, fmt.Errorf("unknown condition %q", cond)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code":  code,
			"mktar": mktar,
			"nobody": func(ts *testscript.TestScript, _ bool, args []string) {
				exe, err := publicCopy()
				ts.Check(err)
				nobody(ts, exe, args)
			},
			"modes": modes,
			"lines": lines,
			"flip":  flip,
		},
	})
}

// code runs a program that must exit with a given code, or one of some: code 3 pando show x; code 0,21 pando doctor.
func code(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: code N[,N...] program [args...]")
	}
	err := ts.Exec(args[1], args[2:]...)
	got := 0
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if !slices.Contains(strings.Split(args[0], ","), strconv.Itoa(got)) {
		ts.Fatalf("exit code %d, wanted %s", got, args[0])
	}
}

// mktar makes a tar: mktar FILE ENTRY..., each entry "name=content",
// "name->symlink target" or "name=>hard link target".
func mktar(ts *testscript.TestScript, neg bool, args []string) {
	f, err := os.Create(ts.MkAbs(args[0]))
	ts.Check(err)
	defer f.Close()
	w := tar.NewWriter(f)
	for _, a := range args[1:] {
		h := &tar.Header{Mode: 0o644, Format: tar.FormatPAX}
		content := ""
		if n, to, ok := strings.Cut(a, "->"); ok {
			h.Name, h.Linkname, h.Typeflag = n, to, tar.TypeSymlink
		} else if n, to, ok := strings.Cut(a, "=>"); ok {
			h.Name, h.Linkname, h.Typeflag = n, to, tar.TypeLink
		} else {
			h.Name, content, _ = strings.Cut(a, "=")
			h.Typeflag, h.Size = tar.TypeReg, int64(len(content))
		}
		ts.Check(w.WriteHeader(h))
		_, err := w.Write([]byte(content))
		ts.Check(err)
	}
	ts.Check(w.Close())
}

// nobody runs a program without root: nobody CODE program args... Its output is
// in the file output. exe is a pando that everybody may run.
func nobody(ts *testscript.TestScript, exe string, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	path := exe
	if args[1] != "pando" {
		path, err = exec.LookPath(args[1])
		ts.Check(err)
	}
	cmd := exec.Command(path, args[2:]...)
	cmd.Dir = ts.MkAbs(".")
	// The testscript package tells by the name of the program which one to be.
	cmd.Env = append(os.Environ(), "PANDO_POOL="+ts.Getenv("PANDO_POOL"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	ts.Logf("%s", out)
	got := cmd.ProcessState.ExitCode()
	if got != want {
		ts.Fatalf("exit code %d (%v), wanted %d", got, err, want)
	}
	ts.Check(os.WriteFile(ts.MkAbs("output"), out, 0o644))
}

// modes checks that below a directory nothing but symbolic links, which have no
// permissions, can be read by others.
func modes(ts *testscript.TestScript, neg bool, args []string) {
	ts.Check(filepath.WalkDir(ts.MkAbs(args[0]), func(p string, d os.DirEntry, err error) error {
		if err != nil || d.Type()&os.ModeSymlink != 0 {
			return err
		}
		i, err := d.Info()
		if err != nil {
			return err
		}
		if i.Mode().Perm()&0o077 != 0 {
			return fmt.Errorf("%s has mode %v", p, i.Mode())
		}
		return nil
	}))
}

// lines waits until a file has so many lines that begin with a text: lines FILE N TEXT.
func lines(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: lines FILE N TEXT")
	}
	want, err := strconv.Atoi(args[1])
	ts.Check(err)
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		b, err := os.ReadFile(ts.MkAbs(args[0]))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			ts.Check(err)
		}
		n := 0
		for l := range strings.Lines(string(b)) {
			if strings.HasSuffix(l, "\n") && strings.HasPrefix(l, args[2]) {
				n++
			}
		}
		if n >= want {
			return
		}
		if time.Now().After(end) {
			ts.Fatalf("%s has %d such lines after a minute, and not %d:\n%s", args[0], n, want, b)
		}
	}
}

// flip changes one bit in the middle of the largest file below a directory.
func flip(ts *testscript.TestScript, neg bool, args []string) {
	largest, bytes := "", int64(0)
	ts.Check(filepath.WalkDir(ts.MkAbs(args[0]), func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		i, err := d.Info()
		if err == nil && i.Size() > bytes {
			largest, bytes = p, i.Size()
		}
		return err
	}))
	if largest == "" {
		ts.Fatalf("there is no file below %s", args[0])
	}
	b, err := os.ReadFile(largest)
	ts.Check(err)
	b[len(b)/2] ^= 1
	ts.Check(os.WriteFile(largest, b, 0o600))
}
