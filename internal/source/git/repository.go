package git

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/mask"
	"pando/internal/base/progress"
	"pando/internal/linux/run"
)

// repository is a work tree with its repository, in a volume that is mounted.
type repository struct {
	op      string // of errors
	name    string // of the golden or volume, for errors
	dir     string
	source  Source
	env     []string // of the user
	tracker *progress.Tracker
}

// safely are settings with which git runs nothing that a repository contains.
var safely = []string{
	"-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "safe.directory=*",
	"-c", "protocol.ext.allow=never", "-c", "gc.auto=0", "-c", "maintenance.auto=false", "-c", "advice.detachedHead=false",
}

// environment returns the environment of git: that of the user, but for variables that lead git to another repository,
// and without questions to the user.
func (r *repository) environment() []string {
	env := slices.DeleteFunc(slices.Clone(r.env), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.Contains([]string{"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY",
			"GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_CONFIG"}, name)
	})
	env = append(env, "GIT_TERMINAL_PROMPT=0", "LC_ALL=C")
	if !r.source.LFS {
		env = append(env, "GIT_LFS_SKIP_SMUDGE=1")
	}
	return env
}

// git runs git in the repository, and returns its output.
func (r *repository) git(ctx context.Context, args ...string) (string, error) {
	o := run.Options{Dir: r.dir, Env: r.environment(), OnLine: r.showProgress}
	safe := slices.Clone(safely)
	if strings.HasPrefix(r.source.URL, "file:") {
		safe = append(safe, "-c", "protocol.file.allow=always") // submodules of a repository on this host
	}
	out, _, err := o.Output(ctx, "git", append(safe, args...)...)
	return strings.TrimRight(string(out), "\n"), err
}

// percentage matches the lines in which git reports progress, with what it does, and how much of it is done.
var percentage = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(?:remote: )?([A-Z][a-z ]+): +\d+% \((\d+)/(\d+)\)`)
})

// showProgress passes the progress that git reports on.
func (r *repository) showProgress(line string) {
	m := percentage().FindStringSubmatch(line)
	if m == nil || r.tracker == nil {
		return
	}
	done, _ := strconv.ParseInt(m[2], 10, 64)
	total, _ := strconv.ParseInt(m[3], 10, 64)
	r.tracker.Start(strings.ToLower(m[1]), total, 0)
	r.tracker.Set(done, 0, 0)
}

// problem returns an error of git as one of this operation.
func (r *repository) problem(what string, err error) error {
	var failed *run.Failure
	if !errors.As(err, &failed) {
		return errs.Wrap(r.op, r.name, err)
	}

	text := mask.Text(reason(failed.Stderr))
	e := errs.New(kindOf(failed.Stderr), r.op, r.name, "%s: %s", what, cmp.Or(text, failed.Err.Error()))
	switch {
	case e.Kind == errs.Permission:
		return e.WithHint("give git access to %s: `git help credentials`", r.source.URL)
	case e.Kind == errs.NoSpace:
		return e.WithHint("free space in the pool, or choose a larger %s", errs.Param("size"))
	}
	return e
}

// reason returns what git wrote about the cause of a failure.
func reason(stderr string) string {
	var out []string
	for line := range strings.Lines(stderr) {
		if text, is := strings.CutPrefix(strings.TrimSpace(line), "fatal: "); is {
			out = append(out, text)
		}
	}
	if len(out) == 0 {
		return run.LastLines(stderr, 3)
	}
	return strings.Join(out[:min(len(out), 3)], "; ")
}

// kindOf returns the kind of an error from what git wrote.
func kindOf(stderr string) errs.Kind {
	for text, kind := range map[string]errs.Kind{
		"No space left on device": errs.NoSpace, "Authentication failed": errs.Permission,
		"could not read Username": errs.Permission, "Permission denied (": errs.Permission,
		"does not appear to be a git repository": errs.NotFound, "repository not found": errs.NotFound,
		"Repository not found": errs.NotFound, "not found in upstream": errs.NotFound,
		"couldn't find remote ref": errs.NotFound, "not our ref": errs.NotFound,
	} {
		if strings.Contains(stderr, text) {
			return kind
		}
	}
	return errs.IO
}

// create makes an empty repository in a directory that is empty.
func (r *repository) create(ctx context.Context) error {
	if _, err := r.git(ctx, "init", "-q", "-b", "main", "."); err != nil {
		return r.problem("cannot make a repository", err)
	}
	return r.configure(ctx)
}

// configure replaces the configuration of the repository, which a session may have changed, with what its source says.
// In some clones, files have other inode numbers. With these settings, git compares only the size and the modification
// time of a file. Otherwise it would read all files again.
func (r *repository) configure(ctx context.Context) error {
	if err := r.refuseTraps(); err != nil {
		return err
	}

	config := fmt.Sprintf(`[core]
	repositoryformatversion = 0
	filemode = true
	bare = false
	logallrefupdates = true
	checkStat = minimal
	trustctime = false
[remote "origin"]
	url = %s
	fetch = +refs/heads/*:refs/remotes/origin/*
`, strconv.Quote(r.source.URL))
	path := filepath.Join(r.dir, ".git", "config")
	format, err := r.objectFormat(ctx)
	if err != nil {
		return err
	}
	if format != "" && format != "sha1" {
		config = strings.Replace(config, "repositoryformatversion = 0", "repositoryformatversion = 1", 1) +
			"[extensions]\n\tobjectFormat = " + format + "\n"
	}

	if err := os.WriteFile(path+".new", []byte(config), 0o644); err != nil {
		return errs.Wrap(r.op, r.name, err)
	}
	return errs.Wrap(r.op, r.name, os.Rename(path+".new", path))
}

// objectFormat returns the hash function of the repository, as far as its configuration says.
func (r *repository) objectFormat(ctx context.Context) (string, error) {
	out, err := r.git(ctx, "config", "--file", filepath.Join(".git", "config"), "--no-includes", "--get",
		"extensions.objectFormat")
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 1 {
		return "", nil // it is not set
	}
	if err != nil {
		return "", r.problem("cannot read the configuration of the repository", err)
	}
	if out != "sha1" && out != "sha256" {
		return "", errs.New(errs.Unsupported, r.op, r.name, "the repository uses the unknown hash function %q", out)
	}
	return out, nil
}

// refuseTraps removes what could lead git out of the repository, and refuses what is not the directory of one.
func (r *repository) refuseTraps() error {
	root, err := os.OpenRoot(r.dir)
	if err != nil {
		return errs.Wrap(r.op, r.name, err)
	}
	defer root.Close()

	for _, name := range []string{".git", ".git/objects", ".git/refs"} {
		if i, err := root.Lstat(name); err != nil || !i.IsDir() {
			return errs.New(errs.Invalid, r.op, r.name, "there is no repository: %s is not a directory", name).
				WithHint("import it again")
		}
	}

	for _, name := range []string{".git/config.worktree", ".git/commondir", ".git/objects/info/alternates",
		".git/objects/info/http-alternates", ".git/info/grafts"} {
		if err := root.RemoveAll(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return errs.Wrap(r.op, r.name, err)
		}
	}

	// The configuration is written anew, and must not be a link.
	if i, err := root.Lstat(".git/config"); err == nil && !i.Mode().IsRegular() {
		return errs.Wrap(r.op, r.name, root.RemoveAll(".git/config"))
	}
	return nil
}

// fetch brings all branches and tags up to date with the remote, whatever happened to them there.
func (r *repository) fetch(ctx context.Context) error {
	args := []string{"fetch", "--progress", "--prune", "--force", "--no-recurse-submodules", "--no-write-fetch-head"}
	if r.source.Depth > 0 {
		args = append(args, "--depth", strconv.Itoa(r.source.Depth))
	}
	args = append(args, "origin", "+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")
	if _, err := r.git(ctx, args...); err != nil {
		return r.problem("cannot fetch from "+r.source.URL, err)
	}
	return nil
}

// defaultBranch asks the remote for its default branch. It returns "" if HEAD there is not a branch.
func (r *repository) defaultBranch(ctx context.Context) (string, error) {
	out, err := r.git(ctx, "ls-remote", "--symref", "origin", "HEAD")
	if err != nil {
		return "", r.problem("cannot reach "+r.source.URL, err)
	}
	for line := range strings.Lines(out) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "ref: refs/heads/"); ok {
			name, _, _ = strings.Cut(name, "\t")
			return name, nil
		}
	}
	return "", nil
}

// state returns a text that differs if a branch, a tag or the commit that is checked out does.
func (r *repository) state(ctx context.Context) (string, error) {
	refs, err := r.git(ctx, "for-each-ref", "--format", "%(objectname) %(refname)", "refs/remotes/origin", "refs/tags")
	if err != nil {
		return "", r.problem("cannot list branches", err)
	}
	head, _ := r.git(ctx, "rev-parse", "-q", "--verify", "HEAD") // there is none at first
	name, _ := r.git(ctx, "symbolic-ref", "-q", "HEAD")
	return head + " " + name + "\n" + refs, nil
}

// head returns the commit that is checked out.
func (r *repository) head(ctx context.Context) (string, error) {
	out, err := r.git(ctx, "rev-parse", "--verify", "HEAD")
	if err != nil {
		return "", r.problem("cannot find the commit", err)
	}
	return out, nil
}

// exists reports whether a revision is a commit that is here.
func (r *repository) exists(ctx context.Context, revision string) bool {
	_, err := r.git(ctx, "cat-file", "-e", revision+"^{commit}")
	return err == nil
}

// switchTo checks a branch of the remote out under its own name.
func (r *repository) switchTo(ctx context.Context, branch string) error {
	from := "refs/remotes/origin/" + branch
	if _, err := r.git(ctx, "checkout", "-q", "--force", "--track", "-B", branch, from); err != nil {
		return r.problem("cannot check out "+branch, err)
	}
	return r.complete(ctx)
}

// forgetBranches deletes the local branches but one. They are those of earlier default branches, or of sessions that
// published their work.
func (r *repository) forgetBranches(ctx context.Context, but string) error {
	out, err := r.git(ctx, "for-each-ref", "--format", "%(refname:short)", "refs/heads")
	if err != nil {
		return r.problem("cannot list branches", err)
	}
	for name := range strings.Lines(out) {
		if name = strings.TrimSpace(name); name != but {
			if _, err := r.git(ctx, "branch", "-q", "-D", name); err != nil {
				return r.problem("cannot delete branch "+name, err)
			}
		}
	}
	return nil
}

// detach checks a commit out.
func (r *repository) detach(ctx context.Context, revision string) error {
	if _, err := r.git(ctx, "checkout", "-q", "--force", "--detach", revision); err != nil {
		return r.problem("cannot check out "+revision, err)
	}
	return r.complete(ctx)
}

// clean removes the files that are neither in the repository nor ignored.
func (r *repository) clean(ctx context.Context) error {
	_, err := r.git(ctx, "clean", "-q", "-ffd")
	if err != nil {
		err = r.problem("cannot remove other files", err)
	}
	return err
}

// complete makes the work tree what the commit says, with submodules and the files of Git LFS. Other files stay, such
// as those that the command to prepare it made.
func (r *repository) complete(ctx context.Context) error {
	if r.source.Submodules {
		args := []string{"submodule", "update", "--init", "--recursive", "--force", "--progress"}
		if r.source.Depth > 0 {
			args = append(args, "--depth", strconv.Itoa(r.source.Depth))
		}
		if _, err := r.git(ctx, "submodule", "sync", "-q", "--recursive"); err != nil {
			return r.problem("cannot fetch submodules", err)
		}
		if _, err := r.git(ctx, args...); err != nil {
			return r.problem("cannot fetch submodules", err)
		}
	}

	if r.source.LFS {
		if _, err := r.git(ctx, "lfs", "pull"); err != nil {
			return r.problem("cannot fetch files of Git LFS", err)
		}
	}

	return nil
}

// settle lets git trust its index in all clones. Git reads a file again if it was changed in the second in which the
// index was written ("racy git", Documentation/technical/racy-git.txt): so after a checkout it would read most files in
// each clone. Nothing changes the work tree in the meantime, so the index may count as written in the next second.
func (r *repository) settle(ctx context.Context) error {
	next := time.Now().Truncate(time.Second).Add(time.Second + 10*time.Millisecond) // the clock of files is coarser
	select {
	case <-ctx.Done():
		return errs.Wrap(r.op, r.name, ctx.Err())
	case <-time.After(time.Until(next)):
	}

	return filepath.WalkDir(filepath.Join(r.dir, ".git"), func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
		case d.IsDir() && (d.Name() == "objects" || d.Name() == "refs"):
			return fs.SkipDir
		case d.Type().IsRegular() && d.Name() == "index": // those of submodules, too
			now := time.Now()
			err = os.Chtimes(path, now, now)
		}
		return errs.Wrap(r.op, r.name, err)
	})
}

// forgetSubmodules removes the repositories of submodules, whose configuration a session may have changed: they are
// fetched again.
func (r *repository) forgetSubmodules() error {
	root, err := os.OpenRoot(r.dir)
	if err != nil {
		return errs.Wrap(r.op, r.name, err)
	}
	defer root.Close()
	return errs.Wrap(r.op, r.name, root.RemoveAll(".git/modules"))
}
