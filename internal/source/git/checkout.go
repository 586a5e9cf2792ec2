package git

import (
	"context"
	"errors"
	"strconv"
	"strings"

	"pando/internal/base/errs"
)

// update brings the repository up to date, and checks out the default branch of the remote. It returns its name.
func (r *repository) update(ctx context.Context) (branch string, err error) {
	r.tracker.Start("fetching", 0, 0)
	if err := r.fetch(ctx); err != nil {
		return "", err
	}

	if branch, err = r.defaultBranch(ctx); err != nil {
		return "", err
	}

	r.tracker.Start("checking out", 0, 0)
	if branch != "" && r.exists(ctx, "refs/remotes/origin/"+branch) {
		if err := r.switchTo(ctx, branch); err != nil {
			return "", err
		}
		return branch, r.forgetBranches(ctx, branch)
	}

	// HEAD is a commit, or a branch without one.
	head, err := r.fetchRevision(ctx, "HEAD")
	if errs.Is(err, errs.NotFound) {
		return "", errs.New(errs.NotFound, r.op, r.name, "%s has no commits", r.source.URL)
	}
	if err != nil {
		return "", err
	}
	return "", r.detach(ctx, head)
}

// checkout checks out a branch, a tag or a commit. It fetches a branch, and what is not here.
func (r *repository) checkout(ctx context.Context, revision string, offline bool) error {
	r.tracker.Start("checking out "+revision, 0, 0)
	local := strings.TrimPrefix(strings.TrimPrefix(revision, "refs/heads/"), "origin/")
	tracking := "refs/remotes/origin/" + local
	isBranch := r.exists(ctx, tracking)
	switch {
	case isBranch && offline:
		return r.switchTo(ctx, local)
	case !isBranch && r.exists(ctx, "refs/tags/"+revision):
		return r.detach(ctx, "refs/tags/"+revision)
	case !isBranch && isHash(revision) && r.exists(ctx, revision):
		return r.detach(ctx, revision)
	case offline:
		return r.unknownError(revision)
	}

	// A branch may have moved, and may be new.
	if !isHash(revision) {
		commit, err := r.fetchRevision(ctx, "refs/heads/"+local)
		if err == nil {
			if err := r.setRef(ctx, tracking, commit); err != nil {
				return err
			}
			return r.switchTo(ctx, local)
		}
		if !errs.Is(err, errs.NotFound) {
			return offlineHint(err)
		}
		if isBranch { // it was deleted on the remote
			return r.unknownError(revision)
		}
	}

	// A tag, another reference such as refs/pull/1/head, or a commit.
	commit, err := r.fetchRevision(ctx, revision)
	if errs.Is(err, errs.NotFound) {
		return r.unknownError(revision)
	}
	if err != nil {
		return offlineHint(err)
	}
	return r.detach(ctx, commit)
}

// offlineHint adds to an error of a remote how to do without.
func offlineHint(err error) error {
	var e *errs.Error
	if !errors.As(err, &e) || e.Hint != "" {
		return err
	}
	return e.WithHint("use what the golden has with %s, or try again", errs.Param("git-offline"))
}

// fetchRevision fetches a reference or commit, and returns its commit. It changes no reference. NotFound.
func (r *repository) fetchRevision(ctx context.Context, revision string) (string, error) {
	args := []string{"fetch", "--progress", "--refmap=", "--no-tags", "--no-recurse-submodules"}
	if r.source.Depth > 0 {
		args = append(args, "--depth", strconv.Itoa(r.source.Depth))
	}
	if _, err := r.git(ctx, append(args, "origin", revision)...); err != nil {
		return "", r.problem("cannot fetch "+revision+" from "+r.source.URL, err)
	}
	out, err := r.git(ctx, "rev-parse", "--verify", "FETCH_HEAD^{commit}")
	if err != nil {
		return "", r.problem("cannot find "+revision, err)
	}
	return out, nil
}

// unknownError says that there is no such branch, tag or commit.
func (r *repository) unknownError(revision string) error {
	return errs.New(errs.NotFound, r.op, revision, "%s has no such branch, tag or commit", r.source.URL).
		WithHint("list them with `git ls-remote %s`", r.source.URL)
}

// isHash reports whether a revision may be the hash of a commit, in full or in part.
func isHash(s string) bool {
	return len(s) >= 7 && len(s) <= 64 && strings.Trim(s, "0123456789abcdef") == ""
}
