package file_test

import (
	"context"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/file"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

func withTimeout(t *testing.T, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(t.Context(), d)
}

func setLockPatience(t *testing.T, d time.Duration) {
	old := file.SetLockPatience(d)
	t.Cleanup(func() { file.SetLockPatience(old) })
}

// holdLock takes the lock of a store as another process would.
func holdLock(t *testing.T, dir string) (release func()) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, ".pando/lock"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		t.Fatal(err)
	}
	return func() { f.Close() }
}

func TestURLs(t *testing.T) {
	dir := t.TempDir()
	for text, want := range map[string]errs.Kind{
		"file:" + dir:                        "",
		"file://" + dir:                      "",
		"file://localhost" + dir:             "",
		"file:" + dir + "/../":               "",
		"file:" + dir + "/none":              errs.NotFound,
		"file:" + dir + "/plain":             errs.Invalid,
		"file:relative/path":                 errs.Invalid,
		"file:":                              errs.Invalid,
		"file://otherhost" + dir:             errs.Invalid,
		"file://user:secret@localhost" + dir: errs.Invalid,
		"file:" + dir + "?mode=0700":         errs.Invalid,
		"file:" + dir + "#x":                 errs.Invalid,
		"file:" + dir + "%00":                errs.Invalid,
		"s3://bucket/prefix":                 errs.Invalid,
	} {
		if err := os.WriteFile(filepath.Join(dir, "plain"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		u, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		s, err := file.Open(t.Context(), u)
		if errs.KindOf(err) != want {
			t.Errorf("Open %s: %v, want kind %q", text, err, want)
		}
		if err != nil {
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("Open %s: the error has the password in it: %v", text, err)
			}
			if want == errs.NotFound && errs.HintOf(err) == "" {
				t.Errorf("Open %s: no hint", text)
			}
			continue
		}
		if got := s.String(); !strings.HasPrefix(got, "file:///") {
			t.Errorf("%s is called %s", text, got)
		}
		closeStore(t, s)
	}
}

// TestOpenWritesNothing: reading from a wrong directory leaves no trace in it.
func TestOpenWritesNothing(t *testing.T) {
	dir := t.TempDir()
	s, err := file.Open(t.Context(), &url.URL{Scheme: "file", Path: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer closeStore(t, s)
	if got := contents(t, s); len(got) > 0 {
		t.Errorf("in it are %q", got)
	}
	if _, _, err := s.Get(t.Context(), "config", 0, -1); !errs.Is(err, errs.NotFound) {
		t.Error(err)
	}
	if err := s.Delete(t.Context(), "config"); err != nil {
		t.Error(err)
	}
	if _, err := s.Put(t.Context(), "config", []byte("x"), objstore.IfVersion("v")); !errs.Is(err, errs.Conflict) {
		t.Error(err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("in the directory are %v, %v", entries, err)
	}
}

func TestCreate(t *testing.T) {
	top := t.TempDir()
	u := &url.URL{Scheme: "file", Path: filepath.Join(top, "store")}
	for range 2 { // the second time it is there
		s, err := file.Create(t.Context(), u)
		if err != nil {
			t.Fatal(err)
		}
		closeStore(t, s)
	}
	if st, err := os.Stat(u.Path); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", st, err)
	}
	_, err := file.Create(t.Context(), &url.URL{Scheme: "file", Path: filepath.Join(top, "not-mounted/store")})
	if !errs.Is(err, errs.NotFound) || errs.HintOf(err) == "" {
		t.Errorf("below what does not exist: %v, hint %q", err, errs.HintOf(err))
	}
	plain := filepath.Join(top, "plain")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := file.Create(t.Context(), &url.URL{Scheme: "file", Path: plain}); !errs.Is(err, errs.Invalid) {
		t.Errorf("a file: %v", err)
	}
	if _, err := file.Create(t.Context(), &url.URL{Scheme: "file", Path: filepath.Join(plain, "x")}); err == nil {
		t.Error("a directory was made in a file")
	}
}

// TestModes: what is made can be used by those who can use the directory.
func TestModes(t *testing.T) {
	for _, mode := range []os.FileMode{0o700, 0o750, 0o770 | os.ModeSetgid} {
		dir := filepath.Join(t.TempDir(), "store")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
		s := openStore(t, dir)
		if _, err := s.Put(t.Context(), "a/b/c", []byte("x"), objstore.IfAbsent); err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string]os.FileMode{
			"a": mode.Perm(), "a/b": mode.Perm(), ".pando": mode.Perm(), ".pando/tmp": mode.Perm(),
			"a/b/c": mode.Perm() & 0o666, ".pando/lock": mode.Perm() & 0o666,
		} {
			st, err := os.Stat(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			if st.Mode().Perm() != want {
				t.Errorf("in a directory of mode %v %s has %v", mode, name, st.Mode())
			}
			if st.IsDir() && st.Mode()&os.ModeSetgid != mode&os.ModeSetgid {
				t.Errorf("in a directory of mode %v %s has %v", mode, name, st.Mode())
			}
		}
	}
}

// refuses checks that nothing can be written, and all be read.
func refuses(t *testing.T, s objstore.Store, v objstore.Version, want string) {
	t.Helper()
	check := func(what string, err error) {
		t.Helper()
		if !errs.Is(err, errs.Permission) || objstore.Temporary(err) || errs.HintOf(err) == "" {
			t.Errorf("%s: %v, hint %q; want a permanent error of kind permission with a hint", what, err, errs.HintOf(err))
		}
	}
	for key, c := range map[string]objstore.Condition{
		"heads/new": objstore.IfAbsent, "heads/h": objstore.IfVersion(v), "top": objstore.Always,
		"new/dir": objstore.IfAbsent,
	} {
		_, err := s.Put(t.Context(), key, []byte("x"), c)
		check("Put "+key, err)
	}
	check("Delete", s.Delete(t.Context(), "heads/h"))
	check("Probe", objstore.Probe(t.Context(), s))
	if got := contents(t, s); len(got) != 1 || got["heads/h"] != want {
		t.Errorf("it has %d objects, or they differ", len(got))
	}
}

func TestReadOnlyFilesystem(t *testing.T) {
	top := testfs.Tmpfs(t, 16<<20)
	dir := filepath.Join(top, "store")
	s := openStore(t, dir)
	v, err := s.Put(t.Context(), "heads/h", []byte("h"), objstore.Always)
	if err != nil {
		t.Fatal(err)
	}
	closeStore(t, s)
	if err := unix.Mount("", top, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, dir)
	refuses(t, s, v, "h")
	closeStore(t, s)
}

// TestOtherUser uses a store of root as nobody. Only this thread is nobody, and only
// to filesystems.
func TestOtherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: becoming another user needs root: run the tests as root")
	}
	dir := filepath.Join(t.TempDir(), "store")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Dir(filepath.Dir(dir)), 0o755); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, dir)
	v, err := s.Put(t.Context(), "heads/h", []byte("h"), objstore.Always)
	if err != nil {
		t.Fatal(err)
	}
	closed := filepath.Join(t.TempDir(), "closed")
	closeStore(t, openStore(t, closed)) // mode 0700
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // not unlocked: the thread ends as nobody
		if _, err := unix.SetfsuidRetUid(65534); err != nil {
			t.Error(err)
			return
		}
		s, err := file.Open(t.Context(), &url.URL{Scheme: "file", Path: dir})
		if err != nil {
			t.Error(err)
			return
		}
		defer closeStore(t, s)
		for _, what := range []struct {
			op  string
			err error
		}{
			{"Put", second(s.Put(t.Context(), "heads/h", []byte("x"), objstore.IfVersion(v)))},
			{"Put of a new object", second(s.Put(t.Context(), "new/x", []byte("x"), objstore.IfAbsent))},
			{"Delete", s.Delete(t.Context(), "heads/h")},
			{"Open of a closed directory", second(file.Open(t.Context(), &url.URL{Scheme: "file", Path: closed}))},
		} {
			if !errs.Is(what.err, errs.Permission) || errs.HintOf(what.err) == "" {
				t.Errorf("%s: %v, hint %q", what.op, what.err, errs.HintOf(what.err))
			}
		}
		if data, _, err := s.Get(t.Context(), "heads/h", 0, -1); err != nil || string(data) != "h" {
			t.Errorf("Get: %q, %v", data, err)
		}
	}()
	<-done
	if got := contents(t, s); len(got) != 1 || got["heads/h"] != "h" {
		t.Errorf("it has %q", got)
	}
}

func second[T any](_ T, err error) error { return err }

// TestRemovedDirectory: a store that is gone is not an empty one. Who deletes what
// nothing names would take the word of an empty listing.
func TestRemovedDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := openStore(t, dir)
	if _, err := s.Put(t.Context(), "heads/h", []byte("h"), objstore.Always); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	check := func(what string, err error) {
		t.Helper()
		if !errs.Is(err, errs.IO) {
			t.Errorf("%s: %v, want an error of kind io", what, err)
		}
	}
	_, _, err := s.Get(t.Context(), "heads/h", 0, -1)
	check("Get", err)
	_, err = s.Stat(t.Context(), "heads/h")
	check("Stat", err)
	_, err = s.Put(t.Context(), "heads/h", []byte("x"), objstore.Always)
	check("Put", err)
	_, err = s.Put(t.Context(), "top", []byte("x"), objstore.IfAbsent)
	check("Put at the top", err)
	check("Delete", s.Delete(t.Context(), "heads/h"))
	for _, prefix := range []string{"", "heads/", "x/y/"} {
		n := 0
		for _, err := range s.List(t.Context(), prefix) {
			n++
			check("List "+prefix, err)
		}
		if n != 1 {
			t.Errorf("List %q yields %d times", prefix, n)
		}
	}
}

// TestStrangers: what others have put into the directory does no harm, and is not
// followed out of it.
func TestStrangers(t *testing.T) {
	dir := t.TempDir()
	outside := t.TempDir()
	secret := filepath.Join(outside, "secret")
	if err := os.WriteFile(secret, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, dir)
	if _, err := s.Put(t.Context(), "heads/h", []byte("h"), objstore.Always); err != nil {
		t.Fatal(err)
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, err := range []error{
		os.Symlink(secret, at("heads/link")), os.Symlink(outside, at("out")), os.Symlink("heads", at("inside")),
		unix.Mkfifo(at("heads/pipe"), 0o600), os.WriteFile(at("Read me.TXT"), nil, 0o600), os.WriteFile(at(".DS_Store"), nil,
			0o600),
		os.Mkdir(at("lost+found"), 0o700), os.Mkdir(at("empty"), 0o700), os.WriteFile(at("foreign.txt"), []byte("f"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	got := contents(t, s)
	if len(got) != 2 || got["heads/h"] != "h" || got["foreign.txt"] != "f" {
		t.Errorf("listed are %q", got)
	}
	for _, key := range []string{"heads/link", "out/secret", "heads/pipe"} {
		if data, _, err := s.Get(t.Context(), key, 0, -1); err == nil || errs.Is(err, errs.NotFound) {
			t.Errorf("Get %s: %q, %v", key, data, err)
		}
	}
	if _, err := s.Put(t.Context(), "out/new", []byte("x"), objstore.Always); err == nil {
		t.Error("an object was written through a link")
	}
	if err := s.Delete(t.Context(), "out/secret"); err == nil {
		t.Error("a file was deleted through a link, it seems")
	}
	if err := s.Delete(t.Context(), "heads/link"); err != nil { // the link itself
		t.Error(err)
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) != 1 {
		t.Errorf("outside are %v, %v", entries, err)
	}
	// A file of somebody else that is replaced under a condition.
	info, err := s.Stat(t.Context(), "foreign.txt")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(at("foreign.txt"), []byte("g"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Put(t.Context(), "foreign.txt", []byte("x"), objstore.IfVersion(info.Version)); !errs.Is(err,
		errs.Conflict) {
		t.Errorf("a file that was changed in place: %v", err)
	}
	// Keys that are in each other's way.
	if _, err := s.Put(t.Context(), "heads", []byte("x"), objstore.IfAbsent); !errs.Is(err, errs.Invalid) {
		t.Errorf("an object in place of a directory: %v", err)
	}
	if _, err := s.Put(t.Context(), "heads/h/x", []byte("x"), objstore.IfAbsent); !errs.Is(err, errs.Invalid) {
		t.Errorf("an object below an object: %v", err)
	}
	if left := leftovers(t, dir); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
}
