package engine_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// must fails the test if any of these is an error.
func must(t *testing.T, all ...error) {
	t.Helper()
	if err := errors.Join(all...); err != nil {
		t.Fatal(err)
	}
}

// setImmutable changes the flag of a directory, as somebody does who knows about it.
func setImmutable(t *testing.T, dir string, on bool) {
	t.Helper()
	f, err := os.Open(dir)
	must(t, err)
	defer f.Close()
	_, err = kernel.SetImmutable(f, on)
	must(t, err)
}

// oneKind runs a test on a pool of one driver, where the driver makes no difference.
func oneKind(t *testing.T, test func(t *testing.T, e *engine.Engine, top string)) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	top := testfs.XFS(t, 512<<20)
	test(t, newPool(t, top, engine.InitRequest{Driver: "reflink"}), top)
}

// letOthersIn makes a directory of the test's one that all can get to.
func letOthersIn(t *testing.T, dir string) {
	t.Helper()
	for d := dir; strings.HasPrefix(d, os.TempDir()+"/"); d = filepath.Dir(d) {
		must(t, os.Chmod(d, 0o755))
	}
	if _, err := asNobody("test", "-x", dir); err != nil {
		t.Fatalf("nobody cannot get to %s: %v", dir, err)
	}
}

// unmountByHand unmounts what Pando has mounted, and removes the directory.
func unmountByHand(t *testing.T, dir string) {
	t.Helper()
	must(t, mount.Unmount(dir))
	setImmutable(t, dir, false)
	must(t, unix.Rmdir(dir))
}

// foreigners are what somebody may have put at a mount point. Each returns how to tell
// that it is still there.
var foreigners = map[string]func(t *testing.T, at string) (there func() bool){
	"file": func(t *testing.T, at string) func() bool {
		must(t, os.WriteFile(at, []byte("precious"), 0o600))
		return func() bool { b, err := os.ReadFile(at); return err == nil && string(b) == "precious" }
	},
	"link": func(t *testing.T, at string) func() bool {
		must(t, os.Symlink("/etc", at))
		return func() bool { to, err := os.Readlink(at); return err == nil && to == "/etc" }
	},
	"full directory": func(t *testing.T, at string) func() bool {
		must(t, os.Mkdir(at, 0o700), os.WriteFile(filepath.Join(at, "file"), nil, 0o600))
		return func() bool { _, err := os.Stat(filepath.Join(at, "file")); return err == nil }
	},
	"directory": func(t *testing.T, at string) func() bool {
		must(t, os.Mkdir(at, 0o700))
		return func() bool { _, err := os.Stat(at); return err == nil }
	},
}

// TestUmountKeepsWhatIsNotOurs puts other things where a volume was mounted: they stay
// when it is unmounted, collected, or destroyed.
func TestUmountKeepsWhatIsNotOurs(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		for what, put := range foreigners {
			for _, dir := range []string{"", filepath.Join(top, "point")} {
				if dir == "" && what == "directory" {
					continue // all directories in the pool are Pando's
				}
				for verb, run := range map[string]func() error{
					"umount": func() error {
						_, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
						return err
					},
					"destroy": func() error { destroy(t, e, "v"); return nil },
					"gc":      func() error { _, err := e.GC(t.Context(), engine.GCRequest{}); return err },
				} {
					clone(t, e, "g", "v", false)
					v, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v"), Dir: dir})
					must(t, err)
					unmountByHand(t, v.Mountpoint)
					there := put(t, v.Mountpoint)
					if err := run(); err != nil || !there() {
						t.Errorf("%s of %s, with a %s there: it is there: %v, %v", verb, v.Mountpoint, what, there(), err)
					}
					must(t, os.RemoveAll(v.Mountpoint))
					if verb != "destroy" {
						destroy(t, e, "v")
					}
				}
			}
		}
	})
}

// TestMountKeepsWhatIsNotOurs: a volume is not mounted on, or linked in the place of, what
// somebody else has put at its default mount point. Removing the pool stops there as well.
func TestMountKeepsWhatIsNotOurs(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, _ string) {
		importTree(t, e, "g", source(t))
		clone(t, e, "g", "v", false)
		at := filepath.Join(e.Dir(), "mnt", "v")
		for _, what := range []string{"file", "link"} {
			there := foreigners[what](t, at)
			_, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v")})
			wantKind(t, err, errs.Invalid, "Pando did not make it")
			if !there() {
				t.Errorf("the %s is gone", what)
			}
			must(t, os.Remove(at))
		}
		if _, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v")}); err != nil {
			t.Errorf("with nothing in the way: %v", err)
		}
	})
}

// TestMountPointTakesNoWrites: where a volume was mounted and is no more, without Pando's
// doing, nobody writes by mistake. A directory of the user's is left alone.
func TestMountPointTakesNoWrites(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		clone(t, e, "g", "v", false)
		users := filepath.Join(top, "users")
		must(t, os.Mkdir(users, 0o711))
		for _, dir := range []string{"", filepath.Join(top, "made"), users} {
			v, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v"), Dir: dir})
			must(t, err, mount.Unmount(v.Mountpoint))
			bare := filepath.Join(v.Mountpoint, "lost")
			err = os.WriteFile(bare, nil, 0o600)
			if dir != users && !errors.Is(err, unix.EPERM) {
				t.Errorf("%s takes writes: %v", v.Mountpoint, err)
			}
			if dir == users {
				must(t, err, os.Remove(bare))
			}
			if _, err := e.GC(t.Context(), engine.GCRequest{}); err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(v.Mountpoint); (err == nil) != (dir == users) {
				t.Errorf("%s after gc: %v", v.Mountpoint, err)
			}
		}
		if st, err := os.Stat(users); err != nil || st.Mode().Perm() != 0o711 {
			t.Errorf("the user's directory: %v, %v", st, err)
		}
	})
}

// victim is a directory of root's that somebody tries to make Pando work on.
type victim struct {
	t    *testing.T
	path string
	st   unix.Stat_t
}

func newVictim(t *testing.T, path string) *victim {
	t.Helper()
	v := &victim{t: t, path: path}
	must(t, os.Mkdir(path, 0o700), unix.Stat(path, &v.st))
	return v
}

// unharmed checks that nothing is mounted there, and that it belongs to root alone.
func (v *victim) unharmed(when string) {
	v.t.Helper()
	var st unix.Stat_t
	must(v.t, unix.Stat(v.path, &st))
	if st.Dev != v.st.Dev || st.Ino != v.st.Ino || st.Mode != v.st.Mode || st.Uid != v.st.Uid || st.Ctim != v.st.Ctim {
		v.t.Errorf("%s: %s was %+v, is %+v", when, v.path, v.st, st)
	}
}

// detour is a directory that its owner can put something else in the place of.
type detour struct{ dir, aside, to string }

func (d detour) take() error {
	return errors.Join(os.Rename(d.dir, d.aside), os.Symlink(d.to, d.dir))
}

func (d detour) end() error {
	if _, err := os.Lstat(d.aside); err != nil {
		return nil
	}
	return errors.Join(os.Remove(d.dir), os.Rename(d.aside, d.dir))
}

// TestMountIsNotLedAstray: whoever may rename a directory above the mount point does so
// between any two steps, and puts a symbolic link to another place there.
func TestMountIsNotLedAstray(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		clone(t, e, "g", "v", false)
		home := filepath.Join(top, "home")
		d := detour{dir: filepath.Join(home, "sub"), aside: filepath.Join(home, "aside"), to: filepath.Join(top, "root")}
		must(t, os.MkdirAll(d.dir, 0o755), os.Mkdir(d.to, 0o755), os.Chown(home, 12, 34), os.Chown(d.dir, 12, 34))
		target := newVictim(t, filepath.Join(d.to, "m"))
		for _, exists := range []bool{false, true} {
			for _, step := range []string{"target checked", "place opened", "directory made", "directory checked", "mounted"} {
				when := fmt.Sprintf("a link after %q, mount point there: %v", step, exists)
				at := filepath.Join(d.dir, "m")
				if exists {
					must(t, os.Mkdir(at, 0o755))
				}
				taken := false
				engine.AtStep(t, func(s string) {
					if s == step && !taken {
						taken = true
						must(t, d.take())
					}
				})
				_, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v"), Dir: at})
				wantKind(t, err, errs.Conflict)
				target.unharmed(when)
				must(t, d.end())
				if !taken {
					t.Errorf("there is no step %q", step)
				}
				if _, err := os.Stat(at); (err == nil) != exists {
					t.Errorf("%s: left: %v", when, err)
				}
				if exists {
					must(t, os.Remove(at))
				}
			}
		}
		if _, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v"),
			Dir: filepath.Join(d.dir, "m")}); err != nil {
			t.Errorf("without all that: %v", err)
		}
	})
}

// TestMountPointThroughLinks: symbolic links of root's lead to a mount point, those of
// others do not.
func TestMountPointThroughLinks(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		clone(t, e, "g", "v", false)
		home, real := filepath.Join(top, "home"), filepath.Join(top, "real")
		must(t, os.Mkdir(home, 0o755), os.Mkdir(real, 0o755), os.Symlink("real", filepath.Join(top, "link")))
		must(t, os.Symlink(real, filepath.Join(home, "link")), os.Chown(home, 12, 34))
		v, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v"), Dir: filepath.Join(top, "link", "m")})
		if err != nil || v.Mountpoint != filepath.Join(real, "m") {
			t.Errorf("by root's link: %q, %v", v.Mountpoint, err)
		}
		if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")}); err != nil {
			t.Error(err)
		}
		for _, dir := range []string{filepath.Join(home, "link", "m"), filepath.Join(home, "link")} {
			_, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v"), Dir: dir})
			wantKind(t, err, errs.Permission, "users other than root")
		}
	})
}

// TestUmountIsNotLedAstray: the same while a volume is unmounted. What is mounted at the
// other place stays.
func TestUmountIsNotLedAstray(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		d := detour{dir: filepath.Join(top, "home"), aside: filepath.Join(top, "aside"), to: filepath.Join(top, "root")}
		must(t, os.Mkdir(d.dir, 0o755), os.Mkdir(d.to, 0o755))
		for name, dir := range map[string]string{"v": d.dir, "w": d.to} {
			clone(t, e, "g", name, false)
			_, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName(name), Dir: filepath.Join(dir, "m")})
			must(t, err)
		}
		engine.AtStep(t, func(s string) {
			if s == "unmounting" {
				must(t, d.take())
			}
		})
		_, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
		must(t, err, d.end())
		if w, err := e.Show(t.Context(), ref.Ref{Name: "w"}); err != nil || w.Mountpoint != filepath.Join(d.to, "m") {
			t.Errorf("the other one is mounted at %q, %v", w.Mountpoint, err)
		}
	})
}

// TestReplaceIsNotLedAstray: the owner of the directory above an adopted one puts something
// else in the place of the directory that Pando has just made there.
func TestReplaceIsNotLedAstray(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		dir := liveTree(t, top)
		above := filepath.Dir(dir)
		target := newVictim(t, filepath.Join(above, "root"))
		must(t, os.Mkdir(filepath.Join(target.path, "secret"), 0o700), unix.Stat(target.path, &target.st))
		for what, put := range map[string]func(aside string) (undo func() error){
			"a link to a directory of root's": func(aside string) func() error {
				must(t, os.Symlink(target.path, aside))
				return func() error { return os.Remove(aside) }
			},
			"a directory of root's": func(aside string) func() error {
				must(t, os.Rename(target.path, aside))
				return func() error { return os.Rename(aside, target.path) }
			},
			"a link in the place of the directory above": func(aside string) func() error {
				must(t, os.Mkdir(aside, 0o700))
				d := detour{dir: above, aside: above + ".aside", to: target.path}
				must(t, d.take())
				return func() error { _ = os.Remove(aside); return d.end() }
			},
		} {
			undo := func() error { return nil }
			engine.AtStep(t, func(s string) {
				if s != "aside made" {
					return
				}
				found, err := filepath.Glob(dir + ".pando-old-*")
				if err != nil || len(found) != 1 {
					t.Fatalf("%v, %v", found, err)
				}
				must(t, os.Remove(found[0]))
				undo = put(found[0])
			})
			_, err := adopt(t, e, "g", dir, true)
			if err == nil {
				t.Errorf("%s: it went on", what)
			}
			must(t, undo())
			var st unix.Stat_t
			must(t, unix.Stat(target.path, &st))
			if st.Uid != 0 || st.Gid != 0 || st.Mode != target.st.Mode || st.Ino != target.st.Ino {
				t.Errorf("%s: %s belongs to %d:%d, mode %o", what, target.path, st.Uid, st.Gid, st.Mode)
			}
			if b, err := os.ReadFile(filepath.Join(dir, "sub", "file")); err != nil || string(b) != "content" {
				t.Errorf("%s: the directory has %q, %v", what, b, err)
			}
			engine.AtStep(t, func(string) {})
			if _, err := e.RemoveGolden(t.Context(), ref.Ref{Name: "g"}); err != nil {
				t.Error(err)
			}
			if _, err := e.Show(t.Context(), ref.Ref{Name: "g-live"}); !errs.Is(err, errs.NotFound) {
				t.Errorf("%s: the volume: %v", what, err)
			}
		}
	})
}

// hostile is a tree with what gives somebody the host: a program that runs as root, and a
// device that everybody may write to. Where a device cannot be made, it has none.
func hostile(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	program, err := os.ReadFile("/usr/bin/id")
	must(t, err, testfs.WriteProgram(filepath.Join(dir, "id"), program))
	must(t, os.Chmod(filepath.Join(dir, "id"), 0o755|os.ModeSetuid))
	must(t, unix.Mknod(filepath.Join(dir, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))),
		os.Chmod(filepath.Join(dir, "null"), 0o666))
	return dir
}

// asNobody runs a program as a user without any rights.
func asNobody(args ...string) (string, error) {
	out, err := exec.Command("setpriv", append([]string{"--reuid=65534", "--regid=65534", "--clear-groups", "--"},
		args...)...).Output()
	return strings.TrimSpace(string(out)), err
}

// TestMountGivesNobodyTheHost: what is in a volume gives nobody who can get there the
// rights of root, unless that was asked for.
func TestMountGivesNobodyTheHost(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", hostile(t))
		clone(t, e, "g", "v", false)
		letOthersIn(t, top)
		open := filepath.Join(top, "open")
		must(t, os.Mkdir(open, 0o755))
		for _, may := range []engine.Rights{{}, {SUID: true}, {Dev: true}, {Dev: true, SUID: true}} {
			v, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v"), Dir: filepath.Join(open, "v"),
				May: may})
			must(t, err)
			id, err := asNobody(filepath.Join(v.Mountpoint, "id"), "-u")
			want := "65534"
			if may.SUID {
				want = "0"
			}
			if err != nil || id != want {
				t.Errorf("%+v: the program runs as %q, %v, wanted %s", may, id, err, want)
			}
			if _, err = asNobody("sh", "-c", `: >"$0"`, filepath.Join(v.Mountpoint, "null")); (err == nil) != may.Dev {
				t.Errorf("%+v: the device can be written to: %v", may, err)
			}
			_, err = e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v"), Dir: filepath.Join(open, "v"),
				May: engine.Rights{Dev: true, SUID: true}})
			if (err == nil) != (may == engine.Rights{Dev: true, SUID: true}) || err != nil && !errs.Is(err, errs.InUse) {
				t.Errorf("%+v: asking for more while it is mounted: %v", may, err)
			}
			_, err = e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
			must(t, err)
		}
	})
}

// TestMountForRootAlone: below the pool, and below any directory that is root's alone, a
// volume may what it says, as nobody else gets there. As soon as somebody does, it may not.
func TestMountForRootAlone(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		clone(t, e, "g", "v", false)
		letOthersIn(t, top)
		dir := filepath.Join(top, "dir")
		must(t, os.Mkdir(dir, 0o700))
		at := filepath.Join(dir, "v")
		restricted := func(when, dir string, want bool) {
			t.Helper()
			v, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v"), Dir: dir})
			must(t, err)
			var st unix.Statfs_t
			must(t, unix.Statfs(v.Mountpoint, &st))
			if got := st.Flags&(unix.ST_NOSUID|unix.ST_NODEV) == unix.ST_NOSUID|unix.ST_NODEV; got != want {
				t.Errorf("%s: nosuid and nodev are %v, wanted %v (%#x)", when, got, want, st.Flags)
			}
			_, err = e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
			must(t, err)
		}
		restricted("in the pool", "", false)
		restricted("root's alone", at, false)
		for when, open := range map[string]func() error{
			"open to all":       func() error { return os.Chmod(dir, 0o701) },
			"another group's":   func() error { return errors.Join(os.Chmod(dir, 0o710), os.Chown(dir, 0, 34)) },
			"somebody else's":   func() error { return os.Chown(dir, 12, 0) },
			"somebody's by ACL": func() error { return unix.Setxattr(dir, "system.posix_acl_access", aclForUser(12), 0) },
		} {
			must(t, open())
			restricted(when, at, true)
			must(t, os.Remove(dir), os.Mkdir(dir, 0o700))
		}
	})
}

// aclForUser is an access control list by which a user may enter a directory of root's.
func aclForUser(uid uint32) []byte {
	var b bytes.Buffer
	b.Write([]byte{2, 0, 0, 0})
	for _, entry := range []struct {
		tag, perm uint16
		id        uint32
	}{{1, 7, 1<<32 - 1}, {2, 1, uid}, {4, 0, 1<<32 - 1}, {16, 1, 1<<32 - 1}, {32, 0, 1<<32 - 1}} {
		b.Write([]byte{byte(entry.tag), 0, byte(entry.perm), 0, byte(entry.id), byte(entry.id >> 8), byte(entry.id >> 16),
			byte(entry.id >> 24)})
	}
	return b.Bytes()
}

// TestRewindKeepsRights: a volume that is mounted again while it is rewound may what it
// could before.
func TestRewindKeepsRights(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	top := testfs.XFS(t, 512<<20)
	e := newPool(t, top, engine.InitRequest{})
	importTree(t, e, "g", source(t))
	clone(t, e, "g", "v", false)
	_, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("v"), Name: ref.MustName("s")})
	must(t, err)
	_, err = e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v"), Dir: filepath.Join(top, "v"),
		May: engine.Rights{Dev: true}})
	must(t, err)
	r, err := e.Rewind(t.Context(), engine.RewindRequest{Volume: ref.MustName("v"), Snapshot: ref.MustName("s"),
		Detach: true})
	must(t, err)
	var st unix.Statfs_t
	must(t, unix.Statfs(r.Mountpoint, &st))
	if st.Flags&unix.ST_NODEV != 0 {
		t.Errorf("it is mounted with %#x", st.Flags)
	}
}
