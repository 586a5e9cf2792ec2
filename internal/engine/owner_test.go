package engine_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/principal"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// ownersIn returns whom the files in a directory belong to: "name uid:gid", in order of name.
func ownersIn(t *testing.T, dir string) string {
	t.Helper()
	var out []string
	must(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.Name() == "lost+found" {
			return err
		}
		var st unix.Stat_t
		name, rerr := filepath.Rel(dir, path)
		err = errors.Join(rerr, unix.Lstat(path, &st))
		out = append(out, fmt.Sprintf("%s %d:%d", name, st.Uid, st.Gid))
		return err
	}))
	return strings.Join(out, ", ")
}

// runAs runs a shell script in a directory as another user.
func runAs(t *testing.T, o principal.Owner, dir, script string) error {
	t.Helper()
	open, err := os.Open(dir)
	must(t, err)
	defer open.Close()

	// Others than root cannot reach it by its path.
	cmd := exec.Command("sh", "-c", "cd /proc/self/fd/3 || exit 1; "+script)
	cmd.ExtraFiles = []*os.File{open}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: o.UID, Gid: o.GID}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// TestMountForOwner: a volume can be mounted for somebody who then owns what the owner of its root directory owns, and
// only sees owners exchanged: in the volume, and in all copies of it, nobody's files change hands.
func TestMountForOwner(t *testing.T) {
	overlayPools(t, func(t *testing.T, e *engine.Engine) {
		// A golden with files of several users, one of which is the one that it will be mounted for.
		somebody, another := principal.Owner{UID: 1001, GID: 1002}, principal.Owner{UID: 1003, GID: 1003}
		src := t.TempDir()
		for name, o := range map[string]principal.Owner{
			"": {UID: 7, GID: 8}, "a": {UID: 7, GID: 8}, "other": {UID: 0, GID: 8}, "theirs": somebody,
		} {
			if name != "" {
				must(t, os.WriteFile(filepath.Join(src, name), []byte(name), 0o600))
			}
			must(t, os.Chown(filepath.Join(src, name), int(o.UID), int(o.GID)))
		}
		const stored = ". 7:8, a 7:8, other 0:8, theirs 1001:1002"
		g, err := e.Show(t.Context(), ref.Ref{Name: "g"})
		must(t, err)
		importAs(t, e, "o", src, g.FS)

		for _, overlay := range []bool{false, true} {
			name := ref.MustName("v")
			_, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "o"}, Name: name, Overlay: overlay})
			must(t, err)
			dir := t.TempDir()
			mountFor := func(o *principal.Owner) error {
				_, err := e.Mount(t.Context(), engine.MountRequest{Volume: name, Dir: dir, May: engine.Rights{Owner: o}})
				return err
			}
			must(t, mountFor(&somebody), mountFor(&somebody), mountFor(nil))
			if err := mountFor(&another); !errs.Is(err, errs.InUse) || !strings.Contains(err.Error(), "for another owner") {
				t.Errorf("mounted for another owner as well: %v", err)
			}
			if got := ownersIn(t, dir); got != ". 1001:1002, a 1001:1002, other 0:1002, theirs 7:8" {
				t.Errorf("overlay %v: mounted, it shows %s", overlay, got)
			}
			var st unix.Statfs_t
			must(t, unix.Statfs(dir, &st))
			if st.Flags&unix.ST_NOSUID == 0 || st.Flags&unix.ST_NODEV == 0 {
				t.Errorf("overlay %v: its flags are %#x", overlay, st.Flags)
			}

			// They work with it, and nobody else.
			must(t, runAs(t, somebody, dir, "cat a >new && mkdir sub && mv a sub && echo more >>sub/a"))
			for script, o := range map[string]principal.Owner{
				"echo x >new": another, "cat other": somebody, "cat theirs": somebody,
			} {
				if runAs(t, o, dir, script) == nil {
					t.Errorf("overlay %v: user %d could do %q", overlay, o.UID, script)
				}
			}

			// What is made of it while it is mounted, and itself without an owner, has what is stored.
			const changed = ". 7:8, new 7:8, other 0:8, sub 7:8, sub/a 7:8, theirs 1001:1002"
			if e.Caps().Name == "plain" {
				_, err := e.Umount(t.Context(), engine.UmountRequest{Volume: name})
				must(t, err)
			}
			_, err = e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: name, Name: ref.MustName("s")})
			must(t, err)
			_, err = e.Publish(t.Context(), engine.PublishRequest{Golden: ref.MustName("p"), Volume: name})
			must(t, err)
			d, err := e.Diff(t.Context(), engine.DiffRequest{A: ref.Ref{Name: "o"}, B: ref.Ref{Name: name.String()}})
			must(t, err)
			for _, c := range d.Changes {
				if string(c.Path) == "other" || string(c.Path) == "theirs" {
					t.Errorf("overlay %v: the volume differs in %s %s", overlay, c.Op, c.Path)
				}
			}
			_, err = e.Umount(t.Context(), engine.UmountRequest{Volume: name})
			must(t, err)
			clone(t, e, "p", "published", false)
			_, err = e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: name.String(), At: "s"},
				Name: ref.MustName("copy")})
			must(t, err)
			for _, copied := range []string{name.String(), "published", "copy"} {
				edit(t, e, copied, func(dir string) {
					if got := ownersIn(t, dir); got != changed {
						t.Errorf("overlay %v: %s has %s", overlay, copied, got)
					}
				})
			}
			destroy(t, e, name.String(), "published", "copy")
			_, err = e.RemoveGolden(t.Context(), ref.Ref{Name: "p"})
			must(t, err)
		}
		clone(t, e, "o", "untouched", false)
		edit(t, e, "untouched", func(dir string) {
			if got := ownersIn(t, dir); got != stored {
				t.Errorf("the golden has %s", got)
			}
		})
		destroy(t, e, "untouched")
		wantClean(t, e)
	})
}

// TestMountForOwnerAgain: a volume that is mounted again by an operation keeps whom it is for.
func TestMountForOwnerAgain(t *testing.T) {
	e := newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{})
	importTree(t, e, "g", source(t))
	clone(t, e, "g", "v", false)
	somebody := principal.Owner{UID: 1001, GID: 1002}
	v, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v"), May: engine.Rights{Owner: &somebody}})
	must(t, err)
	_, err = e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("v"), Name: ref.MustName("s")})
	must(t, err)
	const shown = ". 1001:1002, file 1001:1002"
	_, err = e.Rewind(t.Context(), engine.RewindRequest{Volume: ref.MustName("v"), Snapshot: ref.MustName("s"),
		Detach: true})
	must(t, err)
	if got := ownersIn(t, v.Mountpoint); got != shown {
		t.Errorf("after a rewind it shows %s", got)
	}

	// Another namespace has a copy of the mount: an umount is refused, and mounts it again.
	_, end := copyMounts(t)
	_, err = e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")})
	if !errs.Is(err, errs.InUse) {
		t.Errorf("an umount beside another namespace: %v", err)
	}
	if got := ownersIn(t, v.Mountpoint); got != shown {
		t.Errorf("after a refused umount it shows %s", got)
	}
	end()
	destroy(t, e, "v")
	wantClean(t, e)
}

// TestCloneForOwner: what prepares a clone writes for the owner of the volume, wherever the clone is mounted then.
func TestCloneForOwner(t *testing.T) {
	e := newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{})
	importTree(t, e, "g", source(t))
	for _, dir := range []string{"", t.TempDir()} {
		q := engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Mount: true, MountDir: dir,
			May: engine.Rights{Owner: &principal.Owner{UID: 1001, GID: 1002}}}
		v, err := e.CloneAndPrepare(t.Context(), q, func(_ context.Context, _, dir string) error {
			return os.WriteFile(filepath.Join(dir, "prepared"), nil, 0o600)
		})
		must(t, err)
		if got := ownersIn(t, v[0].Mountpoint); got != ". 1001:1002, file 1001:1002, prepared 1001:1002" {
			t.Errorf("mounted at %q, it shows %s", dir, got)
		}
		destroy(t, e, "v")
	}
	wantClean(t, e)
}

// TestOwnerRefused: what a mount for another owner cannot be.
func TestOwnerRefused(t *testing.T) {
	e := newPool(t, testfs.XFS(t, 1<<30), engine.InitRequest{})
	importTree(t, e, "g", source(t))
	image := filepath.Join(t.TempDir(), "image")
	must(t, os.WriteFile(image, make([]byte, 1<<20), 0o600))
	importAs(t, e, "raw", image, driver.None)
	clone(t, e, "g", "v", false)
	clone(t, e, "raw", "r", false)
	for _, c := range []struct {
		volume string
		may    engine.Rights
		want   errs.Kind
	}{
		{"v", engine.Rights{Dev: true}, errs.Invalid}, {"v", engine.Rights{SUID: true}, errs.Invalid},
		{"r", engine.Rights{}, errs.Unsupported},
	} {
		c.may.Owner = &principal.Owner{UID: 1001, GID: 1002}
		v, err := e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName(c.volume), May: c.may})
		if !errs.Is(err, c.want) {
			t.Errorf("%s with %+v: %+v, %v", c.volume, c.may, v, err)
		}
	}
	destroy(t, e, "v", "r")
	wantClean(t, e)
}
