package sandbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/sandbox"
	"pando/internal/testing/testfs"

	"golang.org/x/sync/errgroup"
)

func TestMain(m *testing.M) {
	sandbox.Init(os.Args)
	if role := os.Getenv("SANDBOX_TEST_ROLE"); role != "" {
		os.Exit(roles[role]())
	}
	os.Exit(m.Run())
}

// needRoot skips a test that makes sandboxes as root does.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: sandboxes of other users need root: run the tests as root")
	}
}

// newRoot makes a root filesystem with busybox.
func newRoot(t *testing.T) string {
	t.Helper()
	needRoot(t)
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal("busybox is missing: apt-get install busybox-static")
	}

	root := t.TempDir()
	for dir := root; dir != "/tmp" && dir != "/"; dir = filepath.Dir(dir) {
		_ = os.Chmod(dir, 0o755) // other users look into it
	}
	for _, dir := range []string{"bin", "etc", "tmp"} {
		if err := os.Mkdir(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(root, "tmp"), 0o1777); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(busybox)
	if err == nil {
		writeProgram(t, filepath.Join(root, "bin/busybox"), b)
		err = exec.Command(busybox, "--install", "-s", filepath.Join(root, "bin")).Run()
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(root, "etc/passwd"),
			[]byte("root:x:0:0::/root:/bin/sh\nalice:x:1234:1235::/tmp:/bin/sh\nminus:x:-1:-1::/:\nwrap:x:4294967296:7::/:\n"),
			0o644)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(root, "etc/group"), []byte("staff:x:50:bob,alice\nalice:x:1235:\n"), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}

	// Links lead to the host's busybox: make them lead to the sandbox's.
	entries, err := os.ReadDir(filepath.Join(root, "bin"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Type()&os.ModeSymlink != 0 {
			link := filepath.Join(root, "bin", e.Name())
			if err := os.Remove(link); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink("busybox", link); err != nil {
				t.Fatal(err)
			}
		}
	}
	return root
}

// writeProgram writes a file that everybody may run.
func writeProgram(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := errors.Join(testfs.WriteProgram(path, content), os.Chmod(path, 0o755)); err != nil {
		t.Fatal(err)
	}
}

// full is what `pando run --root` uses.
func full(root string, command ...string) sandbox.Spec {
	return sandbox.Spec{
		Command: command, Env: []string{"PATH=/bin"}, Root: root, Hostname: "box", Seccomp: true,
		Mounts: []sandbox.Mount{
			{Kind: sandbox.Proc, Target: "/proc"}, {Kind: sandbox.Sys, Target: "/sys"}, {Kind: sandbox.Dev, Target: "/dev"},
		},
	}
}

// output runs a sandbox and returns its output and exit status.
func output(t *testing.T, s sandbox.Spec, o sandbox.Options) (string, sandbox.Result) {
	t.Helper()
	out, r, err := tryOutput(t, s, o)
	if err != nil {
		t.Fatalf("%q: %v (%s)\n%s", s.Command, err, errs.HintOf(err), out)
	}
	return out, r
}

func tryOutput(t *testing.T, s sandbox.Spec, o sandbox.Options) (string, sandbox.Result, error) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()

	o.Stdout, o.Stderr = w, w
	var out bytes.Buffer
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = io.Copy(&out, r)
	}()

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	result, err := sandbox.Run(ctx, s, o)
	w.Close()
	<-read
	return out.String(), result, err
}

// shell runs a script in a sandbox and returns its output.
func shell(t *testing.T, root, script string) string {
	t.Helper()
	out, _ := output(t, full(root, "sh", "-c", script), sandbox.Options{})
	return out
}

// TestRun: exit statuses, and what the program sees of itself.
func TestRun(t *testing.T) {
	root := newRoot(t)
	for script, want := range map[string]int{"true": 0, "exit 7": 7, "kill -9 $$": 137, "kill -TERM $$": 143} {
		if _, r := output(t, full(root, "sh", "-c", script), sandbox.Options{}); r.Exit != want {
			t.Errorf("%s: %d, want %d", script, r.Exit, want)
		}
	}

	got := shell(t, root, `[ $$ -lt 50 ] && hostname; id -u; cat /proc/sys/kernel/hostname; ls /; pwd
[ $(ls /proc | grep -c '^[0-9]') -lt 9 ] && echo few
grep -E 'NoNewPrivs|Seccomp:|CapEff|CapBnd' /proc/self/status
ip link | grep -c '^[0-9]'; ls /proc/self/fd | wc -l; ls /dev`)
	want := "box\n0\nbox\nbin\ndev\netc\nproc\nsys\ntmp\n/\nfew\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000000\n" +
		"NoNewPrivs:\t1\nSeccomp:\t2\n1\n4\n" +
		"fd\nfull\nmqueue\nnull\nptmx\npts\nrandom\nshm\nstderr\nstdin\nstdout\ntty\nurandom\nzero\n"
	if got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}

// TestUsers: a name of the sandbox, with its groups; numbers; names that are not there.
func TestUsers(t *testing.T) {
	root := newRoot(t)
	for name, want := range map[string]string{
		"":            "uid=0(root) gid=0\n",
		"alice":       "uid=1234(alice) gid=1235(alice) groups=50(staff)\n",
		"77":          "uid=77 gid=77\n",
		"77:staff":    "uid=77 gid=50(staff)\n",
		"alice:88":    "uid=1234(alice) gid=88\n",
		"nobody-here": "",
		"1:nogroup":   "",

		// The kernel would take them for "no change", or for 0.
		"minus": "", "wrap": "", "-1": "", "4294967295": "", "4294967296": "", "1:4294967295": "", "1:4294967296": "",
	} {
		s := full(root, "id")
		s.User = name
		out, _, err := tryOutput(t, s, sandbox.Options{})
		if want == "" {
			if !errs.Is(err, errs.NotFound) || errs.HintOf(err) == "" {
				t.Errorf("%q: %v", name, err)
			}
			continue
		}
		if err != nil || out != want {
			t.Errorf("%q: %q, %v, want %q", name, out, err, want)
		}
	}
}

// TestBytes: arguments, variables and directories need not be UTF-8.
func TestBytes(t *testing.T) {
	root := newRoot(t)
	s := full(root, "sh", "-c", `printf '%s|' "$@" "$V" "$PWD"`, "sh", "\xff\xfe", "", "a\nb")
	s.Env, s.Dir = append(s.Env, "V=\xfd"), "/d\xfc"
	if err := os.Mkdir(root+s.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if out, _ := output(t, s, sandbox.Options{}); out != "\xff\xfe||a\nb|\xfd|/d\xfc|" {
		t.Errorf("%q", out)
	}
}

// TestErrors: what cannot start says why, and what to do.
func TestErrors(t *testing.T) {
	root := newRoot(t)
	writeProgram(t, filepath.Join(root, "bin/text"), []byte("text"))
	for name, c := range map[string]struct {
		change func(*sandbox.Spec)
		kind   errs.Kind
		want   string
	}{
		"no program":  {func(s *sandbox.Spec) { s.Command = []string{"no-such"} }, errs.NotFound, "no such program"},
		"no path":     {func(s *sandbox.Spec) { s.Command = []string{"/no/such"} }, errs.NotFound, "no such program"},
		"no script":   {func(s *sandbox.Spec) { s.Command = []string{"text"} }, errs.Invalid, "not a program"},
		"a directory": {func(s *sandbox.Spec) { s.Command = []string{"/bin"} }, errs.Permission, "/bin"},
		"no dir":      {func(s *sandbox.Spec) { s.Dir = "/no/such" }, errs.NotFound, "working directory"},
		"no source": {func(s *sandbox.Spec) {
			s.Mounts = append(s.Mounts, sandbox.Mount{Kind: sandbox.Bind, Source: "/no/such", Target: "/x"})
		}, errs.NotFound, "/no/such"},
	} {
		s := full(root, "true")
		c.change(&s)
		_, _, err := tryOutput(t, s, sandbox.Options{})
		if !errs.Is(err, c.kind) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v (%s)", name, err, errs.KindOf(err))
		}
	}
}

// TestSandboxesDoNotMixUp: sandboxes that begin while others end get their own messages, whatever their descriptors.
func TestSandboxesDoNotMixUp(t *testing.T) {
	root := newRoot(t)
	var all errgroup.Group
	for worker := range 4 {
		all.Go(func() error {
			for i := range 40 {
				want := 1 + (worker*40+i)%200
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				s := full(root, "sh", "-c", fmt.Sprintf("exit %d", want))
				s.HostNet = true // a network takes the kernel longer
				r, err := sandbox.Run(ctx, s, sandbox.Options{Timeout: 50 * time.Second})
				cancel()
				if err != nil || r.Exit != want {
					return fmt.Errorf("worker %d, run %d: %+v, wanted %d: %w", worker, i, r, want, err)
				}
			}
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		t.Error(err)
	}
}
