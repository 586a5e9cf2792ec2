package usermount

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// asUser is an unused ID, of a user who has nothing and no capabilities.
const asUser = 61234

// userEnv makes this program a test of its own as that user.
const userEnv = "PANDO_USERMOUNT_TEST"

func TestMain(m *testing.M) {
	Helper(os.Args)
	os.Exit(m.Run())
}

// inUser runs the test again as a user without capabilities, in a directory of that user's. It returns "" in the test
// that began, and the directory in the one that it has started.
func inUser(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv(userEnv); dir != "" {
		return dir
	}
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: changing the user needs root")
	}

	top, err := os.MkdirTemp("", "pando-usermount-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(top); err != nil {
			t.Error(err)
		}
	})
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	exe := filepath.Join(top, "test")
	for _, err := range []error{exec.Command("cp", own, exe).Run(), os.Chmod(exe, 0o755),
		os.Chmod(top, 0o755), os.Mkdir(filepath.Join(top, "own"), 0o755),
		os.Chown(filepath.Join(top, "own"), asUser, asUser)} {
		if err != nil {
			t.Fatal(err)
		}
	}

	cmd := exec.Command(exe, "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Dir, cmd.Env = "/", append(os.Environ(), userEnv+"="+filepath.Join(top, "own"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: asUser, Gid: asUser}}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("as a user: %v\n%s", err, out)
	}
	return ""
}

// layersIn makes the layers of an overlay, with a file "gone" below.
func layersIn(t *testing.T, dir string) Layers {
	t.Helper()
	l := Layers{Lower: filepath.Join(dir, "lower"), Object: filepath.Join(dir, "object"), Name: "pando:test",
		Options: Options(false)}
	for _, d := range []string{l.Lower, l.Object, l.Object + "/" + mount.UpperDir, l.Object + "/" + mount.WorkDir} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(l.Lower+"/gone", []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	return l
}

func TestUserMountsAnOverlay(t *testing.T) {
	dir := inUser(t)
	if dir == "" {
		return
	}

	l := layersIn(t, dir)
	if err := l.Try(t.Context(), "gone"); err != nil {
		t.Fatal(err)
	}

	// The deletion is in the upper layer, and not in the lower one.
	var st unix.Stat_t
	if err := unix.Lstat(l.Object+"/upper/gone", &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0 {
		t.Errorf("no whiteout: %v, mode %o", err, st.Mode)
	}
	if _, err := os.Lstat(l.Lower + "/gone"); err != nil {
		t.Error(err)
	}

	// It is in use as long as somebody has a file of it open.
	m, err := l.Mount(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []bool{true, true} {
		if used, err := l.InUse(t.Context()); err != nil || used != want {
			t.Errorf("in use: %v, %v", used, err)
		}
	}
	root, err := m.Open()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if used, err := l.InUse(t.Context()); err != nil || !used {
		t.Errorf("with an open file, in use: %v, %v", used, err)
	}
	root.Close()
	if used, err := l.InUse(t.Context()); err != nil || used {
		t.Errorf("after all, in use: %v, %v", used, err)
	}
}

func TestReadOnlyOverlayNeedsNoWorkDirectory(t *testing.T) {
	dir := inUser(t)
	if dir == "" {
		return
	}

	l := layersIn(t, dir)
	if err := os.Remove(l.Object + "/" + mount.WorkDir); err != nil {
		t.Fatal(err)
	}
	l.ReadOnly = true
	m, err := l.Mount(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	root, err := m.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := unix.Unlinkat(int(root.Fd()), "gone", 0); !errors.Is(err, unix.EROFS) {
		t.Errorf("%v", err)
	}
}

// nestedEnv makes this program a test in a user namespace of its own.
const nestedEnv = "PANDO_USERMOUNT_NESTED"

// TestSettingThatForbidsNamespacesIsNamed is in a user namespace that allows no further ones.
func TestSettingThatForbidsNamespacesIsNamed(t *testing.T) {
	dir := inUser(t)
	switch {
	case dir == "":
		return
	case os.Getenv(nestedEnv) == "":
		cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env, cmd.SysProcAttr = append(os.Environ(), nestedEnv+"=1"), OwnNamespaces()
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}

	if err := os.WriteFile(mostNamespaces, []byte("0"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := layersIn(t, dir).Mount(t.Context())
	if !errs.Is(err, errs.Unsupported) || !strings.Contains(err.Error(), "user.max_user_namespaces is 0") ||
		!strings.Contains(errs.HintOf(err), "sysctl user.max_user_namespaces=") {
		t.Errorf("%v (%s)", err, errs.HintOf(err))
	}
}

// TestSettingsAreExplained gives each setting in a file of its own.
func TestSettingsAreExplained(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		setting *string
		value   string
		err     error
		want    string
	}{
		{&cloneSetting, "0", unix.EPERM, "kernel.unprivileged_userns_clone is 0"},
		{&mostNamespaces, "0", unix.ENOSPC, "user.max_user_namespaces is 0"},
		{&mostMounts, "0", unix.ENOSPC, "user.max_mnt_namespaces is 0"},
		{&appArmorSetting, "1", unix.EACCES, "kernel.apparmor_restrict_unprivileged_userns is 1"},
		{&mostNamespaces, "7", unix.ENOSPC, "user.max_user_namespaces is 7"},
		{&cloneSetting, "1", unix.EOPNOTSUPP, "cannot keep a user's changes in this filesystem"},
		{&cloneSetting, "1", unix.ENOSYS, "a seccomp filter"},
	} {
		before := *c.setting
		*c.setting = filepath.Join(dir, "setting")
		if err := os.WriteFile(*c.setting, []byte(c.value+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		err := Explain("mount", "v", &os.PathError{Op: "fork/exec", Path: "x", Err: c.err})
		*c.setting = before
		if !errs.Is(err, errs.Unsupported) || !strings.Contains(err.Error(), c.want) || errs.HintOf(err) == "" {
			t.Errorf("%s=%s, %v: %v (%s)", c.want, c.value, c.err, err, errs.HintOf(err))
		}
	}
}
