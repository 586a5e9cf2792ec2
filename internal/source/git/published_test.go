package git

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

func (w *world) publish(volume string) {
	w.t.Helper()
	_, err := w.e.Publish(w.t.Context(), engine.PublishRequest{Golden: ref.MustName("g"), Volume: ref.MustName(volume),
		Force: true})
	must(w.t, err)
}

// same wants the work tree of a volume to have exactly the files of a commit, whatever its repository says.
func (w *world) same(dir, commit string) {
	w.t.Helper()
	want := map[string]string{}
	for name := range strings.Lines(w.upstream("ls-tree", "-r", "--name-only", commit)) {
		name = strings.TrimSpace(name)
		want[name] = w.upstream("show", commit+":"+name)
	}
	got := map[string]string{}
	must(w.t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		switch {
		case err != nil:
		case d.Name() == ".git" || d.Name() == "lost+found":
			return filepath.SkipDir
		case !d.IsDir():
			b, err := os.ReadFile(path)
			got[strings.TrimPrefix(path, dir+"/")] = strings.TrimSpace(string(b))
			return err
		}
		return err
	}))
	if !maps.Equal(got, want) {
		w.t.Errorf("%s has %q, the commit %q", dir, got, want)
	}
}

// sabotage does to a repository what could make git, run by root, write to the files of a host or run a program.
func sabotage(t *testing.T, dir, host, program string) {
	t.Helper()
	gitIn(t, dir, "update-index", "--assume-unchanged", "a") // git sees no difference
	at := func(name string) string { return filepath.Join(dir, ".git", name) }
	config, err := os.OpenFile(at("config"), os.O_APPEND|os.O_WRONLY, 0)
	must(t, err)
	for _, c := range [][3]string{
		{"core", "fsmonitor", program}, {"core", "sshCommand", program}, {`remote "origin"`, "uploadpack", program},
		{`filter "x"`, "smudge", program}, {`filter "x"`, "process", program}, {"core", "hooksPath", filepath.Dir(program)},
		{"core", "worktree", host}, {"alias", "fetch", "!" + program}, {"credential", "helper", program},
		{"include", "path", program}, {"core", "gitProxy", program}, {"core", "pager", program},
	} {
		fmt.Fprintf(config, "[%s]\n\t%s = %s\n", c[0], c[1], c[2])
	}
	must(t, config.Close())

	// It is not what it says.
	must(t, os.WriteFile(filepath.Join(dir, "a"), []byte("evil"), 0o644))
	must(t, os.WriteFile(at("info/exclude"), []byte("left*\n"), 0o644))
	must(t, os.WriteFile(filepath.Join(dir, "left-behind"), []byte("evil"), 0o644))
	must(t, os.WriteFile(at("info/attributes"), []byte("* filter=x\n"), 0o644))
	must(t, os.Symlink(program, at("hooks/post-checkout")))

	// Links lead out of the volume, and nobody writes to a pipe.
	for _, name := range []string{"config.new", "FETCH_HEAD", "logs/HEAD", "packed-refs", "shallow", "objects/pack",
		"logs/refs/remotes/origin", "refs/remotes/origin"} {
		must(t, os.MkdirAll(filepath.Dir(at(name)), 0o755))
		must(t, os.RemoveAll(at(name)))
		must(t, os.Symlink(filepath.Join(host, "file"), at(name)))
	}
	must(t, os.Remove(at("HEAD")))
	must(t, unix.Mkfifo(at("HEAD"), 0o644))
}

// TestPublishedBySessions: git does not run in what a session could write to. A refresh makes a generation of the
// repository, with nothing of a session.
func TestPublishedBySessions(t *testing.T) {
	for _, driver := range []string{reflink.Name, plain.Name} {
		t.Run(driver, func(t *testing.T) {
			w := newWorld(t, driver, 800<<20)
			one := w.commit("a", "good")
			w.imports(w.source())
			host := t.TempDir()
			program, ran := filepath.Join(t.TempDir(), "program"), filepath.Join(t.TempDir(), "ran")
			must(t, testfs.WriteProgram(program, []byte("#!/bin/sh\necho $0 $* >> "+ran+"\n")))
			must(t, os.WriteFile(filepath.Join(host, "file"), []byte("precious"), 0o644))
			sabotage(t, w.clone("session", ""), host, program)
			w.publish("session")

			// The published generation can be cloned, and git does not run in it.
			_, err := w.tryClone("at", "trunk", false)
			if !errs.Is(err, errs.Invalid) || !strings.Contains(errs.HintOf(err), "g@1") {
				t.Errorf("git in a generation of a session: %v, %s", err, errs.HintOf(err))
			}
			if b, err := os.ReadFile(filepath.Join(w.clone("plain", ""), "left-behind")); err != nil || string(b) != "evil" {
				t.Errorf("a clone has not what was published: %q, %v", b, err)
			}

			// Nothing is new in the repository, and the next generation is one of the repository again.
			if made := w.refresh(); made.Unchanged || made.Generation != 3 || made.Commit != one {
				t.Fatalf("%+v", made)
			}
			dir := w.clone("again", "")
			w.is(dir, one)
			w.same(dir, one)
			if _, err := os.Stat(filepath.Join(dir, ".git/hooks/post-checkout")); err == nil {
				t.Error("a hook of the session is in it")
			}
			w.is(w.clone("at", "trunk"), one)

			// So it is with a session that started from the new one, and with a new commit.
			w.publish("session")
			two := w.commit("b", "two")
			w.refresh()
			dir = w.clone("after", "")
			w.is(dir, two)
			w.same(dir, two)

			if b, err := os.ReadFile(ran); err == nil {
				t.Errorf("it ran:\n%s", b)
			}
			entries, err := os.ReadDir(host)
			must(t, err)
			if b, err := os.ReadFile(filepath.Join(host, "file")); len(entries) != 1 || string(b) != "precious" {
				t.Errorf("the host has %v, %q, %v", entries, b, err)
			}
		})
	}
}

// TestMirror: the generation that the next refresh continues stays, whatever sessions publish. If a user removes it,
// the next refresh begins anew.
func TestMirror(t *testing.T) {
	w := newWorld(t, reflink.Name, 800<<20)
	w.commit("lock", "1")
	w.commit(".gitignore", "deps")
	s := w.source()
	s.Prepare, s.PrepareKey = "mkdir -p deps && echo prepared >> deps/log", []string{"lock"}
	w.imports(s)
	one := 1
	_, err := w.e.SetGolden(t.Context(), engine.SetRequest{Golden: ref.MustName("g"), Keep: &one})
	must(t, err)

	w.clone("v", "")
	w.publish("v")
	w.publish("v")
	_, err = w.e.Prune(t.Context(), engine.PruneRequest{OlderThan: 1})
	must(t, err)
	goldens := func() (out []string) {
		for _, name := range w.volumes() {
			if strings.HasPrefix(name, "g@") {
				out = append(out, name)
			}
		}
		return out
	}
	current, err := w.e.Show(t.Context(), ref.Ref{Name: "g"})
	must(t, err)
	d, err := w.e.Golden(t.Context(), current)
	must(t, err)
	if len(d.Generations) != 2 || !d.Generations[0].Mirror || d.Generations[1].Mirror || d.Generations[1].Generation != 3 {
		t.Errorf("generations %+v", d.Generations)
	}

	// It is continued: what the command made is there.
	if made := w.refresh(); made.Prepared || made.Generation != 4 {
		t.Errorf("%+v", made)
	}
	if got := goldens(); len(got) != 1 {
		t.Errorf("the golden keeps one generation, and has %v", got)
	}

	// Without it, the next begins anew, and an older one counts as what it is.
	_, err = w.e.SetGolden(t.Context(), engine.SetRequest{Golden: ref.MustName("g"), Keep: new(int)})
	must(t, err)
	w.commit("lock", "2")
	if made := w.refresh(); !made.Prepared || made.Generation != 5 {
		t.Errorf("%+v", made)
	}
	w.clone("x", "")
	w.publish("x")
	w.remove("g@5")
	if made := w.refresh(); !made.Prepared || made.Generation != 7 {
		t.Errorf("the older generation is not that of the last command: %+v", made)
	}
	w.publish("v")
	w.remove("g@7")
	w.remove("g@4")
	if made := w.refresh(); !made.Prepared || made.Generation != 9 {
		t.Errorf("%+v", made)
	}
	b, err := os.ReadFile(filepath.Join(w.clone("y", ""), "deps", "log"))
	if err != nil || string(b) != "prepared\n" {
		t.Errorf("%q, %v", b, err)
	}
}

// TestPreparedIndex: the files of the next commit are those of the commit, whatever the command to prepare it told git.
func TestPreparedIndex(t *testing.T) {
	w := newWorld(t, reflink.Name, 800<<20)
	w.commit("a", "one")
	s := w.source()
	for _, flag := range []string{"--skip-worktree", "--assume-unchanged"} {
		s.Prepare = "git update-index " + flag + " a; echo local > a; touch .git/index.lock"
		w.imports(s)
		w.same(w.clone("at", "trunk"), w.upstream("rev-parse", "HEAD"))
		two := w.commit("a", "two of "+flag)
		w.refresh()
		w.same(w.clone("after", "trunk"), two)
		w.remove("g")
		w.destroy("at", "after")
	}
}

// TestRevisions: a name means the branch before the tag, and the tag before the commit; a full name only what it says.
func TestRevisions(t *testing.T) {
	w := newWorld(t, reflink.Name, 800<<20)
	one := w.commit("a", "one")
	branch := func(name string) string {
		w.upstream("checkout", "-q", "-b", name, "trunk")
		defer w.upstream("checkout", "-q", "trunk")
		return w.commit("a", name)
	}
	other, nested, hash := branch("other"), branch("origin/other"), branch("deadbee")
	w.upstream("tag", "deadbee", one)
	w.upstream("tag", "origin/other", one)
	w.upstream("tag", "-a", "-m", "x", "v1", other)
	w.upstream("symbolic-ref", "refs/heads/foo/HEAD", "refs/heads/other") // is not HEAD
	w.imports(w.source())
	late, lateHash := branch("late"), branch("0123456789012345678901234567890123456789")

	for name, c := range map[string]struct{ revision, commit, branch string }{
		"a": {"other", other, "other"}, "b": {"origin/other", nested, "origin/other"},
		"c": {"refs/heads/other", other, "other"}, "d": {"refs/heads/origin/other", nested, "origin/other"},
		"e": {"deadbee", hash, "deadbee"}, "f": {"refs/tags/deadbee", one, "HEAD"}, "g": {"v1", other, "HEAD"},
		"h": {"late", late, "late"}, "i": {"origin/late", late, "late"}, "j": {"heads/late", late, "late"},
		"k": {"0123456789012345678901234567890123456789", lateHash, "0123456789012345678901234567890123456789"},
		"l": {"tags/v1", other, "HEAD"}, "m": {one[:9], one, "HEAD"},
	} {
		dir := w.clone("at-"+name, c.revision)
		w.is(dir, c.commit)
		if got := gitIn(t, dir, "rev-parse", "--abbrev-ref", "HEAD"); strings.TrimPrefix(got, "heads/") != c.branch {
			t.Errorf("%s is on %s, not on %s", c.revision, got, c.branch)
		}
	}

	// HEAD becomes a commit, and the repository goes away.
	w.upstream("checkout", "-q", "--detach", other)
	if made := w.refresh(); made.Branch != "" || made.Commit != other {
		t.Errorf("%+v", made)
	}
	if got := gitIn(t, w.clone("detached", ""), "for-each-ref", "--format=%(refname)", "refs/heads"); got != "" {
		t.Errorf("branches that stayed behind: %s", got)
	}
	must(t, os.Rename(w.up, w.up+"-away"))
	_, err := w.tryClone("away", "late", false)
	if err == nil || strings.Contains(err.Error(), "no such branch") ||
		!strings.Contains(errs.HintOf(err), "git-offline") {
		t.Errorf("without the repository: %v (%s)", err, errs.HintOf(err))
	}
}

// TestGoldenReplaced: a golden that was removed and published anew between the look at it and the clone is not the one
// that was looked at.
func TestGoldenReplaced(t *testing.T) {
	w := newWorld(t, plain.Name, 100<<20)
	w.commit("a", "one")
	w.imports(w.source())
	w.clone("v", "")
	q := engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("late")}
	prepare, err := planCheckout(t.Context(), w.e, CheckoutRequest{Revision: "trunk", Env: os.Environ()}, &q)
	must(t, err)
	_, err = w.e.RemoveGolden(t.Context(), ref.Ref{Name: "g"})
	must(t, err)
	w.publish("v")
	if _, err := w.e.CloneAndPrepare(t.Context(), q, prepare); !errs.Is(err, errs.Conflict) {
		t.Errorf("git may have run in what a session published: %v", err)
	}
}

// TestRefreshOfReplacedGolden: a refresh neither begins with, nor reports, nor continues a golden that was removed and
// published anew since the refresh looked it up.
func TestRefreshOfReplacedGolden(t *testing.T) {
	w := newWorld(t, plain.Name, 100<<20)
	w.commit("a", "one")
	replace := func() {
		w.remove("g")
		w.publish("v")
	}
	for _, c := range []struct {
		name        string
		early, news bool // replaced before the refresh clones it; the repository has a new commit
	}{{"before the clone", true, false}, {"nothing is new", false, false}, {"a commit is new", false, true}} {
		w.imports(w.source())
		w.clone("v", "")
		if c.news {
			w.commit("a", "two")
		}
		m, err := refreshMaker(t.Context(), w.e, RefreshRequest{Golden: ref.MustName("g"), Env: os.Environ()})
		must(t, err)
		ran := false
		fill := func(ctx context.Context, vol api.Object) error {
			ran = true
			replace()
			return m.fill(ctx, vol)
		}
		if c.early {
			replace()
			_, err = m.run(t.Context())
		} else {
			_, err = w.e.RunFunc(t.Context(), engine.RunRequest{From: m.from, Object: m.object}, fill)
		}
		if !errs.Is(err, errs.Conflict) || ran == c.early || m.out.Commit != "" && c.early {
			t.Errorf("%s: %v, %+v", c.name, err, m.out)
		}
		if got := w.volumes(); !slices.Equal(got, []string{"v", "g@1"}) {
			t.Errorf("%s: there is %v", c.name, got)
		}
		w.remove("g")
		w.destroy("v")
	}
}

// TestPublishedInTheMeantime: a refresh does not replace what somebody has published since it began, nor an import a
// golden that it did not find.
func TestPublishedInTheMeantime(t *testing.T) {
	w := newWorld(t, plain.Name, 100<<20)
	w.commit("a", "one")
	w.imports(w.source())
	w.clone("v", "")
	before := w.volumes()
	for current, want := range map[string]errs.Kind{"": errs.Exists, "another": errs.Conflict} {
		_, err := w.e.Publish(t.Context(), engine.PublishRequest{Golden: ref.MustName("g"), Volume: ref.MustName("v"),
			Force: true, Filled: &engine.Filled{Source: "{}", Origin: "x#1", Current: &api.Object{ID: current}}})
		if !errs.Is(err, want) {
			t.Errorf("generation 1 is current, and %q was: %v", current, err)
		}
	}
	if after := w.volumes(); !slices.Equal(before, after) {
		t.Errorf("there was %v, and is %v", before, after)
	}
}

func (w *world) remove(generation string) {
	w.t.Helper()
	r, err := ref.Parse("test", generation)
	must(w.t, err)
	_, err = w.e.RemoveGolden(w.t.Context(), r)
	must(w.t, err)
}

func (w *world) destroy(volumes ...string) {
	w.t.Helper()
	what, err := ref.ParsePatterns("test", volumes...)
	must(w.t, err)
	_, err = w.e.Destroy(w.t.Context(), engine.DestroyRequest{What: what})
	must(w.t, err)
}

// TestNoRepositoryAbove: git does not look for a repository above a volume, which may lie in a work tree of the host.
func TestNoRepositoryAbove(t *testing.T) {
	w := newWorld(t, plain.Name, 100<<20)
	w.commit("a", "one")
	below := filepath.Join(w.up, "volume")
	must(t, os.Mkdir(below, 0o755))
	r, err := openRepository(repository{op: "test", name: "g", dir: below, source: w.source(), env: os.Environ()})
	must(t, err)
	if out, err := r.git(t.Context(), "rev-parse", "HEAD"); err == nil {
		t.Errorf("it found %s", out)
	}
}
