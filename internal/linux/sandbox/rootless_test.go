package sandbox_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/sandbox"
)

// roles are what the test program does as another user, who has no privileges.
var roles = map[string]func() int{
	"overlay": func() int {
		dir := os.Getenv("SANDBOX_TEST_DIR")
		s := sandbox.Spec{
			Command: []string{"sh", "-c", os.Getenv("SANDBOX_TEST_SCRIPT")}, Env: os.Environ(),
			Dir:     filepath.Join(dir, "merged"),
			HostNet: true, UserNS: &sandbox.UserNS{},
			Mounts: []sandbox.Mount{
				{Kind: sandbox.Overlay, Target: dir + "/merged", Options: []string{"lowerdir=" + dir + "/lower",
					"upperdir=" + dir + "/upper", "workdir=" + dir + "/work", "userxattr"}},
				{Kind: sandbox.Proc, Target: "/proc"},
			},
		}
		if os.Getenv("SANDBOX_TEST_OWN") != "" {
			s.UserNS.UIDs = []sandbox.IDMap{{Inside: os.Getuid(), Host: os.Getuid(), Size: 1}}
			s.UserNS.GIDs = []sandbox.IDMap{{Inside: os.Getgid(), Host: os.Getgid(), Size: 1}}
		}
		r, err := sandbox.Run(context.Background(), s,
			sandbox.Options{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr})
		if err != nil {
			fmt.Println(errs.KindOf(err), err, errs.HintOf(err))
			return 99
		}
		return r.Exit
	},
}

// asUser runs a role as a user without privileges and returns its output.
func asUser(t *testing.T, role string, env ...string) string {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), append(env, "SANDBOX_TEST_ROLE="+role)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4321, Gid: 4321}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v", role, err)
	}
	return string(out)
}

// TestUnprivileged: an ordinary user gets an overlay that nobody else sees, as user 0 or as itself.
func TestUnprivileged(t *testing.T) {
	needRoot(t) // to become an ordinary user
	dir, err := os.MkdirTemp("/tmp", "pando-sandbox-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chown(dir, 4321, 4321); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"lower", "upper", "work", "merged"} {
		path := filepath.Join(dir, name)
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(path, 4321, 4321); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(dir+"/lower/file", []byte("lower\n"), 0o644); err != nil {
		t.Fatal(err)
	}

	if err := os.Chown(dir+"/lower/file", 4321, 4321); err != nil {
		t.Fatal(err)
	}

	script := "SANDBOX_TEST_SCRIPT=cat file; id -u; echo upper >file; cat file; grep CapEff /proc/self/status; " +
		"[ $$ -lt 50 ] && echo own"
	for own, uid := range map[string]string{"": "0", "yes": "4321"} {
		got := asUser(t, "overlay", "SANDBOX_TEST_DIR="+dir, "SANDBOX_TEST_OWN="+own, script)
		want := "lower\n" + uid + "\nupper\nCapEff:\t0000000000000000\nown\n"
		if got != want {
			t.Errorf("own %q: %q, want %q", own, got, want)
		}
		if b, err := os.ReadFile(dir + "/upper/file"); string(b) != "upper\n" {
			t.Errorf("upper: %q, %v", b, err)
		}
		if err := os.Remove(dir + "/upper/file"); err != nil {
			t.Error(err)
		}
	}

	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(table), dir) {
		t.Errorf("the mount is visible outside: %v\n%s", err, table)
	}
}

// TestForbidden: where user namespaces are forbidden, the error names the setting. This one is of a user namespace.
func TestForbidden(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "SANDBOX_TEST_ROLE=forbidden", "SANDBOX_TEST_DIR=/tmp", "SANDBOX_TEST_SCRIPT=true")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	out, _ := cmd.CombinedOutput()
	if !strings.Contains(string(out), "permission") || !strings.Contains(string(out), "are forbidden on this host") ||
		!strings.Contains(string(out), "sysctl -w user.max_user_namespaces=10000") {
		t.Errorf("%s", out)
	}
}

func init() {
	roles["forbidden"] = func() int {
		if err := os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0o644); err != nil {
			fmt.Println(err)
			return 98
		}
		return roles["overlay"]()
	}
}
