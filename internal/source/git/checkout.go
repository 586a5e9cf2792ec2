package git

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/linux/run"
)

// update brings the repository up to date, and checks out the default branch of the remote. It returns its name.
func (r *repository) update(ctx context.Context) (branch string, err error) {
	progress.From(ctx).Start(progress.Fetching, 0, 0)
	if err := r.fetch(ctx); err != nil {
		return "", err
	}

	if branch, err = r.defaultBranch(ctx); err != nil {
		return "", err
	}

	progress.From(ctx).Start(progress.CheckingOut, 0, 0)
	if branch != "" && r.exists(ctx, "refs/remotes/origin/"+branch) {
		if err := r.switchTo(ctx, branch); err != nil {
			return "", err
		}
		return branch, r.forgetBranches(ctx, branch)
	}

	// HEAD is a commit, or a branch without one.
	head, found, err := r.fetchRevision(ctx, "HEAD")
	switch {
	case err != nil:
		return "", err
	case !found && branch != "":
		return "", errs.New(errs.NotFound, r.op, r.name, "the default branch of %s, %s, has no commits", r.source.URL,
			branch).
			WithHint("make another branch the default there")
	case !found:
		return "", errs.New(errs.NotFound, r.op, r.name, "%s has no commits", r.source.URL)
	}
	if err := r.detach(ctx, head); err != nil {
		return "", err
	}
	return "", r.forgetBranches(ctx, "")
}

// checkout checks out a branch, a tag or a commit. It fetches a branch, and what is not here.
func (r *repository) checkout(ctx context.Context, revision string, offline bool) error {
	progress.From(ctx).StartOf(progress.CheckingOut, revision, 0, 0)
	branches, tag := readings(revision)

	// A branch that is here may have moved.
	for _, branch := range branches {
		switch tracking := "refs/remotes/origin/" + branch; {
		case !r.exists(ctx, tracking):
		case offline:
			return r.switchTo(ctx, branch)
		default:
			found, err := r.fetchBranch(ctx, branch)
			if err == nil && !found { // it was deleted on the remote
				err = r.unknownError(revision)
			}
			return err
		}
	}

	// Tags and commits do not move.
	switch {
	case tag != "" && r.exists(ctx, tag):
		return r.detach(ctx, tag)
	case isHash(revision) && r.exists(ctx, revision):
		return r.detach(ctx, revision)
	case offline:
		return r.unknownError(revision)
	}

	for _, branch := range branches {
		if found, err := r.fetchBranch(ctx, branch); err != nil || found {
			return err
		}
	}

	// A tag, another reference such as refs/pull/1/head, or a commit.
	others := []string{tag, revision}
	if !strings.HasPrefix(revision, "refs/") && !isHash(revision) {
		others = []string{tag, "refs/" + revision}
	}
	for _, other := range others {
		if other == "" {
			continue
		}
		commit, found, err := r.fetchRevision(ctx, other)
		if err != nil {
			return offlineHint(err)
		}
		if found {
			return r.detach(ctx, commit)
		}
	}
	return r.unknownError(revision)
}

// readings returns the branches that a revision may name, the likeliest first, and the full name of the tag; "": none.
func readings(revision string) (branches []string, tag string) {
	if branch, is := strings.CutPrefix(revision, "refs/heads/"); is {
		return []string{branch}, ""
	}
	if strings.HasPrefix(revision, "refs/tags/") {
		return nil, revision
	}
	if strings.HasPrefix(revision, "refs/") {
		return nil, ""
	}

	branches = []string{revision}
	for _, prefix := range []string{"origin/", "heads/"} {
		if branch, is := strings.CutPrefix(revision, prefix); is {
			branches = append(branches, branch)
		}
	}
	return branches, "refs/tags/" + strings.TrimPrefix(revision, "tags/")
}

// fetchBranch fetches a branch and checks it out. found: the remote has it.
func (r *repository) fetchBranch(ctx context.Context, branch string) (found bool, err error) {
	commit, found, err := r.fetchRevision(ctx, "refs/heads/"+branch)
	if err != nil || !found {
		return false, offlineHint(err)
	}
	if err := r.setRef(ctx, "refs/remotes/origin/"+branch, commit); err != nil {
		return true, err
	}
	return true, r.switchTo(ctx, branch)
}

// offlineHint adds to an error of a remote how to do without.
func offlineHint(err error) error {
	var e *errs.Error
	if !errors.As(err, &e) || e.Hint != "" {
		return err
	}
	return e.WithHint("use what the golden has with %s, or try again", errs.Param("git-offline"))
}

// fetchRevision fetches a commit, or what a reference names in full, and returns its commit. It changes no reference.
// found: the remote has it.
func (r *repository) fetchRevision(ctx context.Context, revision string) (commit string, found bool, err error) {
	args := []string{"fetch", "--progress", "--refmap=", "--no-tags", "--no-recurse-submodules"}
	if r.source.Depth > 0 {
		args = append(args, "--depth", strconv.Itoa(r.source.Depth))
	}
	if _, err := r.git(ctx, append(args, "origin", revision)...); isMissing(err) {
		return "", false, nil
	} else if err != nil {
		return "", false, r.problem("cannot fetch "+revision+" from "+r.source.URL, err)
	}
	if commit, err = r.git(ctx, "rev-parse", "--verify", "FETCH_HEAD^{commit}"); err != nil {
		return "", false, r.problem("cannot find "+revision, err)
	}
	return commit, true, nil
}

// isMissing reports whether git failed because a remote that it reached has no such reference or commit.
func isMissing(err error) bool {
	var failed *run.Failure
	if !errors.As(err, &failed) {
		return false
	}
	return slices.ContainsFunc([]string{"couldn't find remote ref", "not our ref", "not found in upstream"},
		func(text string) bool { return strings.Contains(failed.Stderr, text) })
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
