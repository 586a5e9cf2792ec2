package git

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

var drivers = engine.Drivers{reflink.Name: reflink.Open, btrfs.Name: btrfs.Open, plain.Name: plain.Open}

var pools = map[string]func(t testing.TB, size int64) string{
	reflink.Name: testfs.XFS, btrfs.Name: testfs.Btrfs, plain.Name: testfs.Ext4,
}

// world is a pool, and a repository that goldens are made of.
type world struct {
	t  testing.TB
	e  *engine.Engine
	up string // the repository, with a work tree
}

func newWorld(t testing.TB, driver string, size int64) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: volumes are mounted here: run the tests as root")
	}
	for name, value := range map[string]string{"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null",
		"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.com", "GIT_COMMITTER_NAME": "a",
		"GIT_COMMITTER_EMAIL": "a@example.com"} {
		t.Setenv(name, value)
	}

	fs := pools[driver](t, size)
	testfs.LeakCheck(t, fs)
	dir := filepath.Join(fs, "pool")
	_, err := engine.Init(t.Context(), engine.InitRequest{Dir: dir, Driver: driver, MinFreePercent: 1}, drivers)
	must(t, err)
	e, err := engine.Open(t.Context(), dir, drivers)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.Close()
		q := engine.DeinitRequest{Dir: dir, Force: true}
		if _, err := engine.Deinit(context.Background(), q, drivers, nil); err != nil {
			t.Errorf("deinit at the end: %v", err)
		}
	})

	w := &world{t: t, e: e, up: filepath.Join(t.TempDir(), "up")}
	must(t, os.Mkdir(w.up, 0o755))
	w.upstream("init", "-q", "-b", "trunk")
	return w
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%v (%s)", err, errs.HintOf(err))
	}
}

// gitIn runs git in a directory, and returns its output.
func gitIn(t testing.TB, dir string, args ...string) string {
	t.Helper()
	args = append([]string{"-c", "safe.directory=*", "-c", "protocol.file.allow=always", "-c", "core.hooksPath=/dev/null"},
		args...)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // it may be a trap
	defer cancel()
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %q in %s: %v: %s", args, dir, err, out)
	}
	return strings.TrimSpace(string(out))
}

func (w *world) upstream(args ...string) string { w.t.Helper(); return gitIn(w.t, w.up, args...) }

// commit commits a file to the repository.
func (w *world) commit(name, text string) string {
	w.t.Helper()
	must(w.t, os.MkdirAll(filepath.Dir(filepath.Join(w.up, name)), 0o755))
	must(w.t, os.WriteFile(filepath.Join(w.up, name), []byte(text), 0o644))
	w.upstream("add", "-A")
	w.upstream("commit", "-q", "-m", text)
	return w.upstream("rev-parse", "HEAD")
}

func (w *world) source() Source { return Source{URL: "file://" + w.up} }

func (w *world) imports(s Source) Made {
	w.t.Helper()
	out, err := Import(w.t.Context(), w.e, ImportRequest{Golden: ref.MustName("g"), Source: s, Env: os.Environ()})
	must(w.t, err)
	return out
}

func (w *world) refresh() Made {
	w.t.Helper()
	out, err := Refresh(w.t.Context(), w.e, RefreshRequest{Golden: ref.MustName("g"), Env: os.Environ()})
	must(w.t, err)
	return out
}

// tryClone clones the golden at a revision, and mounts the clone.
func (w *world) tryClone(name, revision string, offline bool) (string, error) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute) // git may be in a trap
	defer cancel()
	q := engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName(name), Mount: true}
	var out []api.Object
	var err error
	if revision != "" {
		out, err = Checkout(ctx, w.e, CheckoutRequest{Revision: revision, Offline: offline, Env: os.Environ()}, q)
	} else {
		out, err = w.e.Clone(ctx, q)
	}
	if err != nil {
		return "", err
	}
	return out[0].Mountpoint, nil
}

func (w *world) clone(name, revision string) string {
	w.t.Helper()
	dir, err := w.tryClone(name, revision, false)
	must(w.t, err)
	return dir
}

// is wants a work tree to be clean, complete and at a commit.
func (w *world) is(dir, commit string) {
	w.t.Helper()
	if got := gitIn(w.t, dir, "rev-parse", "HEAD"); got != commit {
		w.t.Errorf("%s is at %s, not %s", dir, got, commit)
	}
	if got := gitIn(w.t, dir, "status", "--porcelain"); got != "" {
		w.t.Errorf("%s is not clean: %s", dir, got)
	}
	gitIn(w.t, dir, "fsck", "--full", "--strict", "--no-dangling")
}

// volumes lists the volumes and goldens.
func (w *world) volumes() (out []string) {
	w.t.Helper()
	volumes, err := w.e.Volumes(w.t.Context(), engine.VolumesRequest{})
	must(w.t, err)
	for _, v := range volumes {
		out = append(out, v.Name)
	}
	goldens, err := w.e.Goldens(w.t.Context())
	must(w.t, err)
	for _, g := range goldens {
		out = append(out, fmt.Sprintf("%s@%d", g.Name, g.Current.Generation))
	}
	return out
}

// TestWorkspaces: a golden follows its repository, whatever happens there, and clones are at what was asked for.
func TestWorkspaces(t *testing.T) {
	for _, driver := range slices.Sorted(maps.Keys(pools)) {
		t.Run(driver, func(t *testing.T) {
			w := newWorld(t, driver, 800<<20)
			one := w.commit("a", "one")
			w.upstream("tag", "v1")
			w.upstream("checkout", "-q", "-b", "feature")
			feature := w.commit("f", "feature")
			w.upstream("checkout", "-q", "trunk")

			made := w.imports(w.source())
			if made.Branch != "trunk" || made.Commit != one || made.Generation != 1 || made.Unchanged {
				t.Errorf("%+v", made)
			}
			if made := w.refresh(); !made.Unchanged || made.Generation != 1 {
				t.Errorf("nothing is new: %+v", made)
			}
			w.is(w.clone("default", ""), one)
			w.is(w.clone("branch", "feature"), feature)
			w.is(w.clone("tag", "v1"), one)
			w.is(w.clone("commit", feature), feature)
			w.is(w.clone("short", feature[:12]), feature)

			// What the golden does not have is fetched, and only into the clone.
			two := w.commit("a", "two")
			w.upstream("update-ref", "refs/pull/7/head", w.commit("p", "pull"))
			pull := w.upstream("rev-parse", "HEAD")
			w.upstream("reset", "-q", "--hard", two)
			w.is(w.clone("newer", "trunk"), two)
			w.is(w.clone("pull", "refs/pull/7/head"), pull)
			if dir, err := w.tryClone("offline", "trunk", true); err != nil {
				t.Error(err)
			} else {
				w.is(dir, one)
			}

			// History is rewritten, a tag moved, a branch deleted, the default branch renamed to one below its name, and a
			// tag named like it.
			w.upstream("commit", "-q", "--amend", "-m", "rewritten")
			rewritten := w.upstream("rev-parse", "HEAD")
			w.upstream("tag", "-f", "v1")
			w.upstream("branch", "-q", "-D", "feature")
			w.upstream("branch", "-q", "-m", "trunk", "main")
			w.upstream("branch", "-q", "-m", "main", "trunk/main")
			w.upstream("tag", "trunk/main", "HEAD~1")
			w.is(w.clone("below", "trunk/main"), rewritten)
			made = w.refresh()
			if made.Branch != "trunk/main" || made.Commit != rewritten || made.Generation != 2 {
				t.Errorf("%+v", made)
			}
			dir := w.clone("after", "")
			w.is(dir, rewritten)
			if got := gitIn(t, dir, "for-each-ref", "--format=%(refname)"); got !=
				"refs/heads/trunk/main\nrefs/remotes/origin/trunk/main\nrefs/tags/trunk/main\nrefs/tags/v1" {
				t.Errorf("references: %s", got)
			}
			w.is(w.clone("moved", "v1"), rewritten)
			w.is(w.clone("both", "trunk/main"), rewritten)
			w.upstream("branch", "-q", "-m", "trunk/main", "trunk") // and back
			w.is(w.clone("above", "trunk"), rewritten)
			w.is(filepath.Join(w.e.Dir(), "mnt", "default"), one)

			// A collection of garbage in one clone breaks no other.
			gitIn(t, dir, "reflog", "expire", "--expire=now", "--all")
			gitIn(t, dir, "gc", "-q", "--prune=now")
			for name, commit := range map[string]string{"default": one, "branch": feature, "pull": pull, "moved": rewritten} {
				w.is(filepath.Join(w.e.Dir(), "mnt", name), commit)
			}
		})
	}
}

// TestWorkspaceErrors: what cannot be done is said, and changes nothing.
func TestWorkspaceErrors(t *testing.T) {
	w := newWorld(t, reflink.Name, 800<<20)
	w.commit("a", "one")
	importOf := func(s Source) func() error {
		return func() error {
			_, err := Import(t.Context(), w.e, ImportRequest{Golden: ref.MustName("h"), Source: s, Env: os.Environ()})
			return err
		}
	}
	refreshOf := func(name string) func() error {
		return func() error {
			_, err := Refresh(t.Context(), w.e, RefreshRequest{Golden: ref.MustName(name), Env: os.Environ()})
			return err
		}
	}
	cloneAt := func(revision string, offline bool) func() error {
		return func() error { _, err := w.tryClone("x", revision, offline); return err }
	}
	empty := filepath.Join(t.TempDir(), "empty")
	must(t, os.Mkdir(empty, 0o755))
	gitIn(t, empty, "init", "-q")
	if _, err := w.e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("dir"), Source: empty}); err != nil {
		t.Fatal(err)
	}
	w.imports(w.source())
	before := w.volumes()

	wrong := func(kind errs.Kind, hint string, do func() error) {
		t.Helper()
		err := do()
		if !errs.Is(err, kind) || !strings.Contains(errs.HintOf(err), hint) {
			t.Errorf("%v (%s, hint %q), wanted %s with a hint of %q", err, errs.KindOf(err), errs.HintOf(err), kind, hint)
		}
		if after := w.volumes(); !slices.Equal(before, after) {
			t.Errorf("there was %v, and is %v", before, after)
		}
	}
	wrong(errs.Invalid, "https://", importOf(Source{URL: w.up}))
	wrong(errs.Invalid, "https://", importOf(Source{URL: "ext::sh -c whoami"}))
	wrong(errs.Invalid, "https://", importOf(Source{URL: "--upload-pack=x"}))
	for _, u := range []string{"https://user:secret@example.com/x", "https://secret@example.com/x",
		"https://example.com/x?private_token=secret", "ssh://git:secret@example.com/x", "https://user:sec%ret@host/x",
		"https://user:/secret@example.com/x", "user:secret@example.com:x.git", "user:secret/x@host:y", "user:secret@h::x"} {
		hint := "git help credentials"
		if strings.Contains(u, "%") || strings.Contains(u, "::x") {
			hint = "https://HOST/PATH" // not a URL
		}
		wrong(errs.Invalid, hint, importOf(Source{URL: u}))
		if err := importOf(Source{URL: u})(); strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "%") {
			t.Errorf("an error shows a secret: %v", err)
		}
	}
	wrong(errs.Invalid, "", importOf(Source{URL: w.source().URL, PrepareKey: []string{"a"}}))
	wrong(errs.Invalid, "", importOf(Source{URL: w.source().URL, Prepare: "true", PrepareKey: []string{"../a"}}))
	wrong(errs.NotFound, "", importOf(Source{URL: "file://" + w.up + "-none"}))
	wrong(errs.NotFound, "", importOf(Source{URL: "file://" + empty}))
	if _, err := exec.LookPath("git-lfs"); err != nil {
		wrong(errs.Unsupported, "apt-get install git-lfs", importOf(Source{URL: w.source().URL, LFS: true}))
	}
	wrong(errs.CommandFailed, "in a clone of the repository",
		importOf(Source{URL: w.source().URL, Prepare: "echo reason >&2; exit 3"}))
	wrong(errs.Exists, "golden refresh", func() error {
		_, err := Import(t.Context(), w.e, ImportRequest{Golden: ref.MustName("g"), Source: w.source()})
		return err
	})
	wrong(errs.NotFound, "", refreshOf("none"))
	wrong(errs.Invalid, "golden import", refreshOf("dir"))
	wrong(errs.NotFound, "ls-remote", cloneAt("none", false))
	wrong(errs.NotFound, "ls-remote", cloneAt("none", true))
	wrong(errs.NotFound, "ls-remote", cloneAt("0123456789012345678901234567890123456789", false))
	wrong(errs.Invalid, "", cloneAt("--orphan", false))
	wrong(errs.Invalid, "", cloneAt("a..b c", false))

	// Without the repository.
	must(t, os.Rename(w.up, w.up+"-away"))
	wrong(errs.NotFound, "", refreshOf("g"))
	wrong(errs.NotFound, "", cloneAt("trunk", false))
	if _, err := w.tryClone("offline", "trunk", true); err != nil {
		t.Error(err)
	}
}

// TestPrepare: the command runs when its files have changed, and what it makes is in the golden.
func TestPrepare(t *testing.T) {
	w := newWorld(t, reflink.Name, 800<<20)
	w.commit(".gitignore", "deps")
	w.commit("lock", "1")
	s := w.source()
	s.Prepare, s.PrepareKey = "mkdir -p deps && cat lock >> deps/made", []string{"lock", "none"}
	if made := w.imports(s); !made.Prepared {
		t.Errorf("%+v", made)
	}
	made := func(name string) string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(w.clone(name, ""), "deps", "made"))
		must(t, err)
		return string(b)
	}
	if got := made("first"); got != "1" {
		t.Errorf("it made %q", got)
	}

	w.commit("other", "x")
	if m := w.refresh(); m.Prepared || m.Unchanged || made("second") != "1" {
		t.Errorf("its files are the same: %+v", m)
	}
	w.commit("lock", "2")
	if m := w.refresh(); !m.Prepared || made("third") != "12" {
		t.Errorf("its files have changed: %+v", m)
	}

	// A failure leaves the golden as it is, and the next refresh tries again.
	w.commit("lock", "3")
	w.commit("deps-break", "x")
	s.Prepare = "false"
	before := w.volumes()
	if _, err := Import(t.Context(), w.e, ImportRequest{Golden: ref.MustName("g"), Source: s, Env: os.Environ(),
		Update: true}); err == nil {
		t.Error("it failed, and that was not said")
	}
	if after := w.volumes(); !slices.Equal(before, after) {
		t.Errorf("there was %v, and is %v", before, after)
	}
	if m := w.refresh(); !m.Prepared || made("fourth") != "123" {
		t.Errorf("%+v", m)
	}
}

// TestSubmodulesAndDepth: submodules are there if asked for, also after they moved, and only some commits of a shallow
// golden. Pointers of Git LFS stay pointers.
func TestSubmodulesAndDepth(t *testing.T) {
	w := newWorld(t, reflink.Name, 800<<20)
	sub := &world{t: t, e: w.e, up: filepath.Join(t.TempDir(), "sub")}
	must(t, os.Mkdir(sub.up, 0o755))
	sub.upstream("init", "-q", "-b", "trunk")
	sub.commit("in", "first")
	w.commit("a", "one")
	w.upstream("submodule", "--quiet", "add", "file://"+sub.up, "lib")
	w.commit(".gitattributes", "*.bin filter=lfs diff=lfs merge=lfs -text")
	const pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" +
		"4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
	w.commit("large.bin", pointer)

	s := w.source()
	s.Submodules, s.Depth = true, 2
	_, err := Import(t.Context(), w.e, ImportRequest{Golden: ref.MustName("g"), Source: s, Env: os.Environ()})
	if !errs.Is(err, errs.IO) || !strings.Contains(errs.HintOf(err), "protocol.file.allow") {
		t.Errorf("a submodule names a repository of this host: %v, %s", err, errs.HintOf(err))
	}
	for name, value := range map[string]string{"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "protocol.file.allow",
		"GIT_CONFIG_VALUE_0": "always"} {
		t.Setenv(name, value)
	}
	w.imports(s)
	dir := w.clone("v", "")
	if b, err := os.ReadFile(filepath.Join(dir, "lib", "in")); err != nil || string(b) != "first" {
		t.Errorf("the submodule has %q, %v", b, err)
	}
	if n := gitIn(t, dir, "rev-list", "--count", "HEAD"); n != "2" {
		t.Errorf("%s commits are there, not 2", n)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "large.bin")); err != nil || string(b) != pointer {
		t.Errorf("%q, %v", b, err)
	}

	sub.commit("in", "second")
	gitIn(t, filepath.Join(w.up, "lib"), "pull", "-q", "origin", "trunk")
	w.commit("b", "two")
	w.refresh()
	dir = w.clone("w", "")
	if b, err := os.ReadFile(filepath.Join(dir, "lib", "in")); err != nil || string(b) != "second" {
		t.Errorf("the submodule has %q, %v", b, err)
	}
	if got := gitIn(t, dir, "status", "--porcelain"); got != "" {
		t.Errorf("it is not clean: %s", got)
	}
}
