package engine_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/engine/content"
	"pando/internal/testing/testfs"
)

// alice is a user whom no list of users has.
var alice = driver.Owner{UID: 64_711, GID: 64_712}

// as runs a shell command as a user without any capability, and returns its output.
func as(o driver.Owner, command string) (string, error) {
	cmd := exec.Command("sh", "-c", command)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: o.UID, Gid: o.GID}}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// mustAs is as for a command that must succeed.
func mustAs(t *testing.T, o driver.Owner, command string) string {
	t.Helper()
	out, err := as(o, command)
	if err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
	return strings.TrimSpace(out)
}

// usersDir makes the default mount points of users directories of the test.
func usersDir(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	for d := dir; d != "/tmp" && d != "/"; d = filepath.Dir(d) { // others may pass
		must(t, os.Chmod(d, 0o755))
	}
	before := content.UsersDir
	t.Cleanup(func() { content.UsersDir = before })
	content.UsersDir = filepath.Join(dir, "users")
}

// TestOwner: a user works with the files of a volume that belongs to him, another user cannot reach it, and on disk all
// has the owners of the golden.
func TestOwner(t *testing.T) {
	usersDir(t)
	for _, kind := range []string{"clone", "overlay"} {
		t.Run(kind, func(t *testing.T) {
			overlayPools(t, func(t *testing.T, e *engine.Engine) { testOwner(t, e, kind == "overlay") })
		})
	}
}

func testOwner(t *testing.T, e *engine.Engine, overlay bool) {
	out, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Mount: true,
		Overlay: overlay, Owner: alice})
	if err != nil {
		t.Fatalf("%v (hint: %s)", err, errs.HintOf(err))
	}
	dir := out[0].Mountpoint
	if want := fmt.Sprintf("/users/%d/v", alice.UID); !strings.HasSuffix(dir, want) || *out[0].Owner != alice {
		t.Fatalf("%s of %v is mounted at %s", out[0].Name, out[0].Owner, dir)
	}

	// Alice owns what the owner of the golden's root directory, 7, owns on disk, and uses it as she likes.
	if got, want := mustAs(t, alice, "stat -c %u:%g "+dir), alice.String(); got != want {
		t.Errorf("the root directory belongs to %s, wanted %s", got, want)
	}
	mustAs(t, alice, "cd "+dir+" && umask 077 && echo new >new && mkdir d && mv new d && ln d/new hard && rm d/new")

	// Setuid programs and devices are ignored, and others cannot enter.
	if opts := mustAs(t, alice, "findmnt -no OPTIONS "+dir); !strings.Contains(opts, "nosuid") ||
		!strings.Contains(opts, "nodev") {
		t.Errorf("mounted with %s", opts)
	}
	if out, err := as(driver.Owner{UID: 64_713, GID: 64_713}, "ls "+dir); err == nil {
		t.Errorf("another user sees %s", out)
	}

	// Mounted again, and after a rewind, it is still hers.
	_, err = e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
	must(t, err)
	snapshot(t, e, "v", "s")
	if _, err := os.Lstat(dir); err == nil {
		t.Errorf("%s is left", dir)
	}
	_, err = e.Rewind(t.Context(), engine.RewindRequest{Volume: ref.MustName("v"), Snapshot: ref.MustName("s")})
	must(t, err)
	again, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v")})
	must(t, err)
	if again.Owner == nil || *again.Owner != alice {
		t.Errorf("after the rewind it belongs to %v", again.Owner)
	}
	if got := mustAs(t, alice, "cat "+again.Mountpoint+"/hard"); got != "new" {
		t.Errorf("after the rewind, the file has %q", got)
	}

	// What is published from it has the owners that the golden had.
	_, err = e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
	must(t, err)
	_, err = e.Publish(t.Context(), engine.PublishRequest{Golden: ref.MustName("h"), Volume: ref.MustName("v")})
	must(t, err)
	plain := clone(t, e, "h", "w", true)
	for name, want := range map[string][2]uint32{".": {7, 8}, "hard": {7, 8}, "file": {0, 0}} {
		st, err := os.Stat(filepath.Join(plain.Mountpoint, name))
		must(t, err)
		sys := st.Sys().(*syscall.Stat_t)
		if got := [2]uint32{sys.Uid, sys.Gid}; got != want {
			t.Errorf("%s of the published golden belongs to %d, wanted %d", name, got, want)
		}
	}

	// The owner is in the identity.
	if r := fsck(t, e.Dir(), false); len(r.Findings) > 0 {
		t.Errorf("%+v", r.Findings)
	}
	destroy(t, e, "v", "w")
}

// TestOwnerStaysAfterRefusedUmount: a volume that cannot be unmounted, as a mount namespace has a copy of the mount, is
// mounted again for the same user.
func TestOwnerStaysAfterRefusedUmount(t *testing.T) {
	usersDir(t)
	e := newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{Driver: "reflink"})
	importTree(t, e, "g", source(t))
	out, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Mount: true,
		Owner: alice})
	must(t, err)

	holder := exec.Command("unshare", "-m", "--propagation", "private", "sh", "-c", "echo; exec sleep 60")
	ready, err := holder.StdoutPipe()
	must(t, err)
	must(t, holder.Start())
	defer func() {
		_ = holder.Process.Kill()
		_ = holder.Wait()
	}()
	_, err = ready.Read(make([]byte, 1))
	must(t, err)

	if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")}); !errs.Is(err, errs.InUse) {
		t.Errorf("umount: %v", err)
	}
	if got := mustAs(t, alice, "touch "+out[0].Mountpoint+"/new; stat -c %u:%g "+out[0].Mountpoint+"/new"); got != alice.
		String() {
		t.Errorf("what alice has made belongs to %s", got)
	}
	if opts := mustAs(t, alice, "findmnt -no OPTIONS "+out[0].Mountpoint); !strings.Contains(opts, "nosuid") {
		t.Errorf("mounted with %s", opts)
	}
}

// TestOwnerRefused: what would give a user rights on the host, or cannot be, is refused and changes nothing.
func TestOwnerRefused(t *testing.T) {
	usersDir(t)
	e := newPool(t, t.TempDir(), engine.InitRequest{Driver: "plain"})
	importTree(t, e, "g", source(t))
	for name, q := range map[string]engine.CloneRequest{
		"suid": {May: engine.Rights{SUID: true}},
		"dev":  {May: engine.Rights{Dev: true}},
	} {
		q.From, q.Name, q.Mount, q.Owner = ref.Ref{Name: "g"}, ref.MustName("v"), true, alice
		if _, err := e.Clone(t.Context(), q); !errs.Is(err, errs.Invalid) || errs.HintOf(err) == "" {
			t.Errorf("%s: %v (hint: %s)", name, err, errs.HintOf(err))
		}
	}

	_, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Owner: alice})
	must(t, err)
	_, err = e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v"), May: engine.Rights{SUID: true}})
	if !errs.Is(err, errs.Invalid) {
		t.Errorf("mounting it with setuid programs: %v", err)
	}
	if v, err := e.VolumeNames(t.Context()); err != nil || len(v) != 1 {
		t.Errorf("volumes: %v, %v", v, err)
	}
}
