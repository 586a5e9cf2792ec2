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

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/linux/run"
	"pando/internal/linux/treewalk"
)

// repository is a work tree with its repository, in a volume that is mounted. No session can have written to either:
// the volume is empty, or a clone of a generation that was made here. git obeys what is in a repository, whatever its
// environment is, so nothing else is safe.
type repository struct {
	op     string // operation that errors name
	name   string // golden or volume that errors name
	dir    string // path of the work tree, without symbolic links
	source Source
	env    []string // environment of the user
}

// openRepository returns a repository at the place that dir leads to.
func openRepository(r repository) (*repository, error) {
	dir, err := filepath.EvalSymlinks(r.dir)
	r.dir = dir
	return &r, errs.Wrap(r.op, r.name, err)
}

// safely are settings with which git runs nothing that a repository contains, and does nothing in the background.
var safely = []string{
	"-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "safe.directory=*",
	"-c", "protocol.ext.allow=never", "-c", "gc.auto=0", "-c", "maintenance.auto=false", "-c", "advice.detachedHead=false",
	"-c", "remote.origin.followRemoteHEAD=never",
}

// local are the variables that lead git to another repository, or to other objects, than those of its directory:
// `git rev-parse --local-env-vars`, and some that it does not list. Those that configure git stay.
var local = []string{
	"GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_ATTR_SOURCE", "GIT_CEILING_DIRECTORIES", "GIT_COMMON_DIR", "GIT_CONFIG",
	"GIT_DIR", "GIT_DISCOVERY_ACROSS_FILESYSTEM", "GIT_GRAFT_FILE", "GIT_IMPLICIT_WORK_TREE", "GIT_INDEX_FILE",
	"GIT_INTERNAL_SUPER_PREFIX", "GIT_NAMESPACE", "GIT_NO_REPLACE_OBJECTS", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX",
	"GIT_QUARANTINE_PATH", "GIT_REPLACE_REF_BASE", "GIT_SHALLOW_FILE", "GIT_WORK_TREE",
}

// environment returns the environment of git and of the command to prepare it: that of the user, without questions to
// the user, and without other repositories. git never looks for one above the volume, which may lie in a work tree.
func (r *repository) environment() []string {
	env := slices.DeleteFunc(slices.Clone(r.env), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.Contains(local, name)
	})
	env = append(env, "GIT_TERMINAL_PROMPT=0", "LC_ALL=C", "GIT_NO_REPLACE_OBJECTS=1",
		"GIT_CEILING_DIRECTORIES="+filepath.Dir(r.dir))
	if !r.source.LFS {
		env = append(env, "GIT_LFS_SKIP_SMUDGE=1")
	}
	return env
}

// git runs git in the repository, and returns its output.
func (r *repository) git(ctx context.Context, args ...string) (string, error) {
	env := append(r.environment(), "GIT_DIR="+filepath.Join(r.dir, ".git"), "GIT_WORK_TREE="+r.dir)
	o := run.Options{Dir: r.dir, Env: env, OnLine: func(line string) { showProgress(ctx, line) }}
	out, _, err := o.Output(ctx, "git", append(slices.Clone(safely), args...)...)
	return strings.TrimRight(string(out), "\n"), err
}

// percentage matches the lines in which git reports progress, with what it does, and how much of it is done.
var percentage = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(?:remote: )?([A-Z][a-z ]+): +\d+% \((\d+)/(\d+)\)`)
})

// showProgress passes the progress that git reports on.
func showProgress(ctx context.Context, line string) {
	m := percentage().FindStringSubmatch(line)
	if m == nil || progress.From(ctx) == nil {
		return
	}
	done, _ := strconv.ParseInt(m[2], 10, 64)
	total, _ := strconv.ParseInt(m[3], 10, 64)
	progress.From(ctx).StartOf(progress.Git, strings.ToLower(m[1]), total, 0)
	progress.From(ctx).Set(done, 0, 0)
}

// problem returns an error of git as one of this operation.
func (r *repository) problem(what string, err error) error {
	var failed *run.Failure
	if !errors.As(err, &failed) {
		return errs.Wrap(r.op, r.name, err)
	}

	text := reason(failed.Stderr)
	e := errs.New(kindOf(failed.Stderr), r.op, r.name, "%s: %s", what, cmp.Or(text, failed.Err.Error()))
	switch {
	case strings.Contains(text, "transport 'file' not allowed"):
		return e.WithHint("a submodule is a repository on this host; if whoever can change %s may read it, run "+
			"`git config --global protocol.file.allow always`", r.source.URL)
	case e.Kind == errs.Permission:
		return e.WithHint("give git access to %s: `git help credentials`", r.source.URL)
	case e.Kind == errs.NoSpace:
		return e.WithHint("free space in the pool, or choose a larger %s", errs.Param("size"))
	}
	return e
}

// prepareFailed returns an error of the command that prepares the work tree, with the end of what it printed.
func (r *repository) prepareFailed(err error) error {
	var failed *run.Failure
	if !errors.As(err, &failed) || kindOf(failed.Stderr) == errs.NoSpace {
		return r.problem("the command to prepare it failed", err)
	}

	const shown = 10 // lines
	said := run.LastLines(failed.Stderr, shown)
	if said == "" {
		said = "it printed nothing"
	}
	return errs.New(errs.CommandFailed, r.op, r.name, "the command to prepare it failed: %w: %s", failed.Err, said).
		WithHint("run `%s` in a clone of the repository", r.source.Prepare)
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

// configure writes the configuration of the repository, which is what its source says.
// In some clones, files have other inode numbers. With these settings, git compares only the size and the modification
// time of a file. Otherwise it would read all files again.
func (r *repository) configure(ctx context.Context) error {
	config := fmt.Sprintf(`[core]
	repositoryformatversion = 0
	filemode = true
	bare = false
	logallrefupdates = true
	checkStat = minimal
	trustctime = false
[remote "origin"]
	url = "%s"
	fetch = +refs/heads/*:refs/remotes/origin/*
`, strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(r.source.URL))
	format, err := r.objectFormat(ctx)
	if err != nil {
		return err
	}
	if format != "" && format != "sha1" {
		config = strings.Replace(config, "repositoryformatversion = 0", "repositoryformatversion = 1", 1) +
			"[extensions]\n\tobjectFormat = " + format + "\n"
	}

	root, err := os.Open(r.dir)
	if err != nil {
		return errs.Wrap(r.op, r.name, err)
	}
	defer root.Close()
	return errs.Wrap(r.op, r.name, treewalk.ReplaceFile(root, ".git/config", []byte(config), 0o644))
}

// distrustIndex makes the next checkout compare each file that the command of --prepare told git not to look at
// (assume-unchanged, skip-worktree, a sparse checkout), and takes a lock away that it left.
func (r *repository) distrustIndex(ctx context.Context) error {
	out, err := r.git(ctx, "ls-files", "-v")
	if err != nil {
		return r.problem("cannot read the index", err)
	}
	remove := []string{"index.lock"}
	for line := range strings.Lines(out) {
		if tag := line[0]; tag == 'S' || 'a' <= tag && tag <= 'z' {
			remove = append(remove, "index")
			break
		}
	}

	root, err := os.Open(r.dir)
	if err != nil {
		return errs.Wrap(r.op, r.name, err)
	}
	defer root.Close()
	dir, err := treewalk.Open(root, ".git")
	if err != nil {
		return errs.Wrap(r.op, r.name, err)
	}
	defer dir.Close()
	for _, name := range remove {
		if err := unix.Unlinkat(int(dir.Fd()), name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return errs.Wrap(r.op, r.name, err)
		}
	}
	return nil
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
		name, of, _ := strings.Cut(strings.TrimSpace(line), "\t")
		if name, ok := strings.CutPrefix(name, "ref: refs/heads/"); ok && of == "HEAD" { // others end in /HEAD
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
	if err := r.detach(ctx, "refs/remotes/origin/"+branch); err != nil {
		return err
	}

	name := "refs/heads/" + branch
	if err := r.setRef(ctx, name, "HEAD"); err != nil {
		return err
	}

	for _, args := range [][]string{
		{"symbolic-ref", "HEAD", name},
		{"config", "branch." + branch + ".remote", "origin"}, {"config", "branch." + branch + ".merge", name},
	} {
		if _, err := r.git(ctx, args...); err != nil {
			return r.problem("cannot check out "+branch, err)
		}
	}
	return nil
}

// forgetBranches deletes the local branches but one. They are those of earlier default branches.
func (r *repository) forgetBranches(ctx context.Context, but string) error {
	return r.deleteRefs(ctx, func(name string) bool { return name != "refs/heads/"+but }, "refs/heads")
}

// setRef sets a reference to a commit. First it deletes those that it cannot exist beside: a/b cannot while there is a,
// or a/b/c. They are of branches that the remote no longer has.
func (r *repository) setRef(ctx context.Context, name, commit string) error {
	in := strings.Join(strings.SplitAfterN(name, "/", 3)[:2], "")
	if err := r.deleteRefs(ctx, func(other string) bool {
		return strings.HasPrefix(name, other+"/") || strings.HasPrefix(other, name+"/")
	}, in); err != nil {
		return err
	}

	if _, err := r.git(ctx, "update-ref", name, commit); err != nil {
		return r.problem("cannot set "+name, err)
	}
	return nil
}

// deleteRefs deletes those references in some of their directories that which selects.
func (r *repository) deleteRefs(ctx context.Context, which func(name string) bool, in ...string) error {
	out, err := r.git(ctx, append([]string{"for-each-ref", "--format", "%(refname)"}, in...)...)
	if err != nil {
		return r.problem("cannot list branches", err)
	}
	for name := range strings.Lines(out) {
		if name = strings.TrimSpace(name); which(name) {
			if _, err := r.git(ctx, "update-ref", "--no-deref", "-d", name); err != nil {
				return r.problem("cannot delete "+name, err)
			}
		}
	}
	return nil
}

// detach checks a commit out. revision is its hash, or the full name of a reference.
func (r *repository) detach(ctx context.Context, revision string) error {
	commit, err := r.git(ctx, "rev-parse", "--verify", "--end-of-options", revision+"^{commit}")
	if err == nil {
		_, err = r.git(ctx, "checkout", "-q", "--force", "--detach", commit, "--")
	}
	if err != nil {
		return r.problem("cannot check out "+revision, err)
	}
	return r.complete(ctx)
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

	root, err := os.Open(r.dir)
	if err != nil {
		return errs.Wrap(r.op, r.name, err)
	}
	defer root.Close()

	return filepath.WalkDir(filepath.Join(r.dir, ".git"), func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
		case d.IsDir() && (d.Name() == "objects" || d.Name() == "refs"):
			return fs.SkipDir
		case d.Type().IsRegular() && d.Name() == "index": // those of submodules, too
			err = touch(root, strings.TrimPrefix(path, r.dir+"/"))
		}
		return errs.Wrap(r.op, r.name, err)
	})
}

// touch sets the times of a file to now.
func touch(root *os.File, name string) error {
	f, err := treewalk.OpenFlags(root, name, unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Futimes(int(f.Fd()), nil)
}
