package treecopy

import (
	"archive/tar"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"
)

const nobody = 65534

// TestUnprivileged builds what an unprivileged caller cannot copy as it is and
// runs the rest of itself as nobody.
func TestUnprivileged(t *testing.T) {
	if dir := os.Getenv("TREECOPY_UNPRIVILEGED"); dir != "" {
		t.Run("own tree", testOwnTree)
		t.Run("other's tree", func(t *testing.T) { testOthersTree(t, dir+"/src") })
		t.Run("modes", testClosedModes)
		t.Run("untar", testUntarUnprivileged)
		return
	}
	needRoot(t)
	dir, err := os.MkdirTemp("", "treecopy")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	must(t, os.Chmod(dir, 0o755))
	must(t, os.Mkdir(dir+"/tmp", 0o700))
	must(t, os.Chown(dir+"/tmp", nobody, nobody))

	src := dir + "/src"
	write(t, src+"/roots", "x")
	write(t, src+"/mine", "x")
	must(t, os.Chown(src+"/mine", nobody, nobody))
	write(t, src+"/my-group", "x")
	must(t, os.Chown(src+"/my-group", nobody, 4711)) // nobody is in it
	write(t, src+"/other-group", "x")
	must(t, os.Chown(src+"/other-group", nobody, 4712))
	write(t, src+"/setuid", "x")
	must(t, unix.Chmod(src+"/setuid", 0o6755))
	write(t, src+"/capable", "x")
	must(t, os.Chown(src+"/capable", nobody, nobody))
	must(t, unix.Setxattr(src+"/capable", "security.capability",
		[]byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0))
	must(t, unix.Setxattr(src+"/capable", "user.colour", []byte("red"), 0))
	must(t, unix.Mknod(src+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(t, os.Link(src+"/null", src+"/null2"))
	must(t, os.Symlink("x", src+"/link"))
	must(t, os.Mkdir(src+"/sub", 0o755))

	self, err := os.Executable()
	must(t, err)
	exe := dir + "/test"
	program, err := os.ReadFile(self)
	must(t, err)
	must(t, testfs.WriteProgram(exe, program))
	cmd := exec.Command(exe, "-test.run=^TestUnprivileged$", "-test.v")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "TREECOPY_UNPRIVILEGED="+dir, "TMPDIR="+dir+"/tmp")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody,
		Groups: []uint32{4711}}}
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: TestUnprivileged/untar")) {
		t.Errorf("as nobody: %v\n%s", err, out)
	}
}

// What belongs to the caller is copied whole.
func testOwnTree(t *testing.T) {
	noLeaks(t)
	src, dst := build(t), mkdir(t, "dst")
	t.Cleanup(func() { openUp(src); openUp(dst) })
	n := copyDir(t, src, dst, Options{Unprivileged: true, Staging: true})
	if n.Skipped.Any() {
		t.Errorf("skipped %+v", n.Skipped)
	}
	treetest.Compare(t, src, dst, treetest.RootMode)
	checkRoot(t, dst)
}

// openUp lets the caller remove a tree.
func openUp(dir string) {
	filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if d.IsDir() {
			os.Chmod(p, 0o700)
		}
		return nil
	})
}

func testOthersTree(t *testing.T, src string) {
	noLeaks(t)
	dst := mkdir(t, "dst")
	_, err := CopyDir(bg, src, openFile(t, dst), Options{})
	wantErr(t, err, errs.Permission, src, "run it as root")

	dst = mkdir(t, "dst")
	n := copyDir(t, src, dst, Options{Unprivileged: true})
	// Root's are: the root directory, roots, setuid, link, sub; and there is other-group.
	if want := (Skipped{Owners: 6, Devices: 2, Xattrs: 1}); n.Skipped != want {
		t.Errorf("skipped %+v, want %+v", n.Skipped, want)
	}
	f, err := treetest.Fingerprint(dst)
	must(t, err)
	if _, ok := f["null"]; ok || len(f) != 9 {
		t.Errorf("%d files: %s", len(f), listing(t, dst))
	}
	if f["capable"].Xattrs["user.colour"] != "red" {
		t.Error("an attribute of the user's is lost")
	}
	if f["my-group"].GID != 4711 || f["other-group"].GID != nobody || f["roots"].UID != nobody {
		t.Errorf("owners are %+v, %+v, %+v", f["my-group"], f["other-group"], f["roots"])
	}
	if f["setuid"].Mode != 0o100755 {
		t.Errorf("root's setuid program became one of the caller's: mode %o", f["setuid"].Mode)
	}
}

// Directories and files that the caller may not write to, once they are done.
func testClosedModes(t *testing.T) {
	src, dst := mkdir(t, "src"), mkdir(t, "dst")
	for _, p := range []string{"a/b/c/d/e/f", "a/g", "h/i/j"} {
		write(t, src+"/"+p, "x")
		must(t, unix.Setxattr(src+"/"+p, "user.colour", []byte("red"), 0))
		must(t, os.Chmod(src+"/"+p, 0o400))
	}
	for _, p := range []string{"a/b/c/d/e", "a/b/c/d", "a/b/c", "a/b", "a", "h/i", "h", ""} {
		must(t, os.Chmod(src+"/"+p, 0o500))
	}
	t.Cleanup(func() { openUp(src); openUp(dst) })
	must(t, os.Chmod(src, 0o755))
	copyDir(t, src, dst, Options{Unprivileged: true, Staging: true, Workers: 8})
	treetest.Compare(t, src, dst, treetest.RootMode)
}

func testUntarUnprivileged(t *testing.T) {
	root := func(e ent) ent {
		e.Uid, e.Gid = 0, 0
		return e
	}
	own := func(e ent) ent {
		e.Uid, e.Gid = nobody, nobody
		return e
	}
	closed := folder("closed")
	closed.Mode = 0o500
	suid := fileEnt("closed/suid", "x")
	suid.Mode = 0o4755
	archive := tarball(t,
		own(closed), root(suid), own(fileEnt("closed/own", "x")), own(hardlink("l", "closed/own")),
		own(fileEnt("own", "x")),
		ent{tarHeader("null"), ""},
	)
	j := newJail(t)
	t.Cleanup(func() { openUp(j.dst) })
	n, err := j.untar(archive, Options{Unprivileged: true, Staging: true})
	must(t, err)
	if want := (Skipped{Owners: 1, Devices: 1}); n.Skipped != want {
		t.Errorf("skipped %+v, want %+v", n.Skipped, want)
	}
	st, err := os.Lstat(j.dst + "/closed")
	must(t, err)
	if st.Mode().Perm() != 0o500 {
		t.Errorf("mode %o", st.Mode())
	}
	openUp(j.dst)
	if st, err := os.Lstat(j.dst + "/closed/suid"); err != nil || st.Mode() != 0o755 {
		t.Errorf("%v, %v", st, err)
	}
	// A directory that may not be entered any more when it is done.
	dst := mkdir(t, "dst")
	noway, sub := own(folder("noway")), own(folder("noway/sub"))
	noway.Mode, sub.Mode = 0o600, 0o711
	_, err = Untar(bg, bytes.NewReader(tarball(t, noway, sub)), openFile(t, dst), Options{Unprivileged: true})
	must(t, err)
	st, err = os.Lstat(dst + "/noway")
	must(t, err)
	if st.Mode().Perm() != 0o600 {
		t.Errorf("mode %o", st.Mode())
	}
	must(t, os.Chmod(dst+"/noway", 0o700))
	if st, err = os.Lstat(dst + "/noway/sub"); err != nil || st.Mode().Perm() != 0o711 ||
		st.ModTime().Unix() != 1700000000 {
		t.Errorf("%v, %v", st, err)
	}

	_, err = newJail(t).untar(tarball(t, root(fileEnt("f", "x"))), Options{})
	wantErr(t, err, errs.Permission, "f", "run it as root")
	_, err = newJail(t).untar(tarball(t, ent{tarHeader("null"), ""}), Options{})
	wantErr(t, err, errs.Permission, "null", "run it as root")
}

func tarHeader(name string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 3, Uid: nobody, Gid: nobody}
}
