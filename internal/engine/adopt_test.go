package engine_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// eachKind runs a test on a pool of every driver.
func eachKind(t *testing.T, test func(t *testing.T, e *engine.Engine, top string)) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	for _, c := range []struct{ name, fs, driver string }{
		{"reflink", "xfs", "reflink"}, {"btrfs", "btrfs", "btrfs"}, {"plain", "ext4", "plain"},
	} {
		t.Run(c.name, func(t *testing.T) {
			top := testfs.New(t, c.fs, 512<<20).Dir()
			test(t, newPool(t, top, engine.InitRequest{Driver: c.driver}), top)
		})
	}
}

func adopt(t *testing.T, e *engine.Engine, name, dir string, replace bool) (engine.Imported, error) {
	t.Helper()
	q := engine.ImportRequest{Name: ref.MustName(name), Source: dir, Adopt: true, Replace: replace}
	if e.Caps().FS[0].IsImage() {
		q.SizeBytes = 64 << 20
	}
	return e.Import(t.Context(), q)
}

// liveTree makes a directory with a file whose content is of one length always.
func liveTree(t *testing.T, top string) string {
	t.Helper()
	dir := filepath.Join(top, "live system", "dir")
	if err := os.MkdirAll(filepath.Join(dir, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "sub", "file"), []byte("content"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Chown(dir, 12, 34), os.Chmod(dir, 0o2750),
		unix.Setxattr(dir, "user.k", []byte("v"), 0)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func wantKind(t *testing.T, err error, kind errs.Kind, words ...string) {
	t.Helper()
	if errs.KindOf(err) != kind || err == nil {
		t.Errorf("error %v, wanted one of kind %s", err, kind)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %v does not tell of %q", err, w)
		}
	}
	if errs.HintOf(err) == "" {
		t.Errorf("error %v has no hint", err)
	}
}

// entries are the names in a directory.
func entries(t *testing.T, dir string) (out []string) {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range all {
		out = append(out, d.Name())
	}
	return out
}

// TestReplaceLeavesNoGap: while a directory is replaced by a volume and back,
// many times, whoever reads a file in it by its path finds it, with its content.
func TestReplaceLeavesNoGap(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		dir := liveTree(t, top)
		file := filepath.Join(dir, "sub", "file")
		for round := range 8 {
			// A process that is in no directory of it, and holds nothing open for
			// longer than it takes: those are refused.
			var stop atomic.Bool
			reads, done := 0, make(chan struct{})
			go func() {
				defer close(done)
				for !stop.Load() {
					reads++
					if b, err := os.ReadFile(file); err != nil || string(b) != "content" {
						t.Errorf("after %d reads: %q, %v", reads, b, err)
						return
					}
				}
			}()
			q := engine.ImportRequest{Name: ref.MustName("g"), Source: dir, Adopt: true, Replace: true}
			if e.Caps().FS[0].IsImage() {
				q.SizeBytes = 64 << 20
			}
			overlays := round%2 == 1 && os.Geteuid() == 0
			if overlays {
				policy := driver.OverlayDefault
				q.Overlay = &policy
			}
			out, err := e.Import(t.Context(), q)
			stop.Store(true)
			<-done
			if err != nil {
				t.Fatal(err)
			}
			if out.Replaced != dir || out.Volume != "g-live" || out.Passes != 1 || out.Changed != 0 {
				t.Errorf("round %d: %+v", round, out)
			}
			v, err := e.Show(t.Context(), ref.Ref{Name: "g-live"})
			if err != nil || v.Mountpoint != dir || (v.Layers != nil) != overlays {
				t.Fatalf("%+v, %v", v, err)
			}
			var st, old unix.Stat_t
			if err := errors.Join(unix.Stat(dir, &st), unix.Stat(out.Aside, &old)); err != nil {
				t.Fatal(err)
			}
			if st.Dev == old.Dev && st.Ino == old.Ino || st.Mode != old.Mode || st.Uid != 12 || st.Gid != 34 ||
				st.Mtim != old.Mtim {
				t.Errorf("was %+v, is %+v", old, st)
			}
			if b, err := os.ReadFile(filepath.Join(out.Aside, "sub", "file")); err != nil || string(b) != "content" {
				t.Errorf("the old one: %q, %v", b, err)
			}
			// The volume is the volume: what is written goes there and nowhere else.
			if err := os.WriteFile(filepath.Join(dir, "new"), nil, 0o644); err != nil {
				t.Fatal(err)
			}
			if got := entries(t, out.Aside); len(got) != 1 {
				t.Errorf("the old one has %v", got)
			}
			if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("g-live")}); err != nil {
				t.Fatal(err)
			}
			// What is below the mount is like the old one, and empty.
			if err := unix.Stat(dir, &st); err != nil || st.Mode != old.Mode || st.Uid != 12 {
				t.Errorf("below the mount: %+v, %v", st, err)
			}
			xattr := make([]byte, 8)
			if n, err := unix.Getxattr(dir, "user.k", xattr); err != nil || string(xattr[:n]) != "v" {
				t.Errorf("below the mount: attribute %q, %v", xattr[:max(n, 0)], err)
			}
			if err := errors.Join(unix.Rmdir(dir), os.Rename(out.Aside, dir)); err != nil {
				t.Fatal(err)
			}
			destroy(t, e, "g-live")
			if _, err := e.RemoveGolden(t.Context(), ref.Ref{Name: "g"}); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestReplaceRefuses: what cannot be replaced stays as it is, and nothing is
// left beside it.
func TestReplaceRefuses(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		dir := liveTree(t, top)
		beside := filepath.Dir(dir)
		hold := func(script string, args ...string) (end func()) {
			t.Helper()
			cmd := exec.Command("sh", append([]string{"-c", script}, args...)...)
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err == nil {
				err = cmd.Start()
			}
			if err == nil {
				_, err = out.Read(make([]byte, 1))
			}
			if err != nil {
				t.Fatal(err)
			}
			return func() { in.Close(); _ = cmd.Wait() }
		}
		for _, c := range []struct {
			name string
			make func() (undo func())
			dir  string
			kind errs.Kind
			word string
		}{
			{"working directory", func() func() { return hold(`cd "$0/sub" && echo && read x`, dir) }, dir, errs.InUse, "(sh)"},
			{"open file", func() func() { return hold(`exec 5<"$0/sub/file" && echo && read x`, dir) }, dir, errs.InUse, "fd 5"},
			{"mount below", func() func() {
				if err := unix.Mount("tmpfs", filepath.Join(dir, "sub"), "tmpfs", 0, ""); err != nil {
					t.Fatal(err)
				}
				return func() { _ = mount.Unmount(filepath.Join(dir, "sub")) }
			}, dir, errs.InUse, "mounted below"},
			{"bind mount of it", func() func() {
				other := filepath.Join(top, "other")
				if err := errors.Join(os.MkdirAll(other, 0o755), unix.Mount(dir, other, "", unix.MS_BIND, "")); err != nil {
					t.Fatal(err)
				}
				return func() { _ = mount.Unmount(other) }
			}, dir, errs.InUse, "other"},
			{"mount point", func() func() { return func() {} }, top, errs.Invalid, ""},
			{"above the pool", func() func() { return func() {} }, "/", errs.Invalid, ""},
			{"empty", func() func() {
				if err := os.MkdirAll(filepath.Join(top, "empty"), 0o755); err != nil {
					t.Fatal(err)
				}
				return func() {}
			}, filepath.Join(top, "empty"), errs.Invalid, "empty"},
			{"a file", func() func() { return func() {} }, filepath.Join(dir, "sub", "file"), errs.Invalid, ""},
		} {
			undo := c.make()
			_, err := adopt(t, e, "g", c.dir, true)
			undo()
			if errs.KindOf(err) != c.kind || err == nil || !strings.Contains(err.Error(), c.word) {
				t.Errorf("%s: %v, wanted %s with %q", c.name, err, c.kind, c.word)
			}
			if got := entries(t, beside); len(got) != 1 {
				t.Errorf("%s: left %v", c.name, got)
			}
		}
		if _, err := adopt(t, e, "g", dir, true); err != nil {
			t.Errorf("and then: %v", err)
		}
		// Its volume has the name.
		_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("h"), Source: filepath.Join(dir, "sub"),
			Adopt: true, Replace: true, ReplaceVolume: ref.MustName("g-live")})
		wantKind(t, err, errs.Exists, "g-live")
	})
}

// TestAdoptOfBusyDirectory: a directory that is written to all the time is not
// adopted, and nothing of it is left; the error says what and who.
func TestAdoptOfBusyDirectory(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		dir := liveTree(t, top)
		log := filepath.Join(dir, "sub", "log")
		cmd := exec.Command("sh", "-c", `exec 3>>"$0"; while read -r line; do echo "$line" >&3; echo; done`, log)
		lines, err := cmd.StdinPipe()
		must(t, err)
		answers, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		end := func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
		defer end()

		// It writes between any two looks.
		engine.AtStep(t, func(step string) {
			if !strings.HasPrefix(step, "copying") || cmd.ProcessState != nil {
				return
			}
			_, err := io.WriteString(lines, "x\n")
			must(t, err)
			_, err = io.ReadFull(answers, make([]byte, 1))
			must(t, err)
		})
		_, err = adopt(t, e, "g", dir, false)
		wantKind(t, err, errs.Conflict, log, fmt.Sprintf("pid %d (sh)", cmd.Process.Pid))
		end()
		if all, err := e.Goldens(t.Context()); err != nil || len(all) != 0 {
			t.Errorf("left: %v, %v", all, err)
		}
		if _, err := adopt(t, e, "g", dir, false); err != nil {
			t.Errorf("at rest: %v", err)
		}
	})
}

// TestAdoptImmutable: a directory that cannot be renamed is refused before it is copied.
func TestAdoptImmutable(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		dir := liveTree(t, top)
		for _, d := range []string{dir, filepath.Dir(dir)} {
			setImmutable(t, d, true)
			_, err := adopt(t, e, "g", dir, true)
			setImmutable(t, d, false)
			if !errs.Is(err, errs.Permission) || !strings.Contains(errs.HintOf(err), "chattr -ia") ||
				!strings.Contains(err.Error(), d+" is immutable") {
				t.Errorf("%s immutable: %v (%s)", d, err, errs.HintOf(err))
			}
			if _, err := e.Show(t.Context(), ref.Ref{Name: "g"}); !errs.Is(err, errs.NotFound) {
				t.Errorf("%s immutable: the golden was made: %v", d, err)
			}
		}
	})
}
