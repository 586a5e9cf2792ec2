package cli

import (
	"context"
	"errors"
	"path"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/similar"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

// onRemote finds what words name on a remote: all of it, or none. A single reference is left to the operation. Invalid,
// NotFound.
func (a *App) onRemote(ctx context.Context, r *replicate.Remote, op string, words []string) (chosen, error) {
	what, err := ref.ParsePatterns(op, words...)
	if err != nil {
		return chosen{}, err
	}
	if len(what) == 1 && what[0].Glob == "" {
		return chosen{refs: []ref.Ref{what[0].Ref}}, nil
	}

	l, err := replicate.Volumes(ctx, r)
	if err != nil {
		return chosen{}, err
	}
	defer l.Close()

	out := chosen{many: true}
	for _, p := range what {
		refs, err := a.matchListed(ctx, r, l, op, p)
		if err != nil {
			return chosen{}, err
		}
		for _, one := range refs {
			if !slices.Contains(out.refs, one) {
				out.refs = append(out.refs, one)
			}
		}
	}
	return out, nil
}

// matchListed finds what a pattern names in the listing of a remote. Invalid, NotFound.
func (a *App) matchListed(
	ctx context.Context, r *replicate.Remote, l *replicate.Listing, op string, p ref.Pattern,
) (out []ref.Ref, err error) {
	if strings.Contains(p.Glob, "@") {
		return nil, errs.New(errs.Invalid, op, p.Glob, "a pattern cannot name points").
			WithHint("list them with %s, and name each", errs.Run("remote ls", r.Name, "VOLUME"))
	}

	// Look for names.
	var names []string
	for _, v := range l.Volumes {
		names = append(names, v.Name)
		switch matches, _ := path.Match(p.Glob, v.Name); { // ParsePatterns has checked the pattern
		case p.Glob != "" && matches:
			out = append(out, ref.Ref{Name: v.Name})
		case v.Name == p.Ref.Name && p.Ref.At == "":
			return []ref.Ref{p.Ref}, nil
		case v.Name == p.Ref.Name:
			return []ref.Ref{p.Ref}, a.hasPoint(ctx, r, l, &v, op, p.Ref)
		}
	}
	if len(out) > 0 {
		return out, nil
	}

	// Nothing has the name.
	missing := errs.New(errs.NotFound, op, p.String(), "%s has no volume or golden with this name", r.Name)
	if meant := similar.Words(p.Ref.Name, names); len(meant) > 0 {
		return nil, missing.WithHint("did you mean %s?", meant[0])
	}
	return nil, missing.WithHint("list what it has with %s", errs.Run("remote ls", r.Name))
}

// takeRemote takes the name of a remote from the front of words, if more follow.
func (a *App) takeRemote(words []string) (remote string, rest []string) {
	if len(words) > 1 && a.isRemote(words[0]) {
		return words[0], words[1:]
	}
	return "", words
}

// isRemote reports whether the pool has a remote with a name.
func (a *App) isRemote(name string) bool {
	all, _ := replicate.List(a.poolDir())
	return slices.Contains(all, name)
}

// notRemote says of a word that was not found, but is a remote, with which flag to name it. Invalid.
func (a *App) notRemote(err error, flag string) error {
	var known *errs.Error
	if !errs.Is(err, errs.NotFound) || !errors.As(err, &known) || !a.isRemote(known.Ref) {
		return err
	}
	return errs.New(errs.Invalid, known.Op, known.Ref, "it is a remote, not a volume or golden").
		WithHint("name it with %s, beside what it is to %s", errs.Param(flag, known.Ref), known.Op)
}

// hasPoint checks that a volume of a listing has the point that a reference names. NotFound.
func (a *App) hasPoint(
	ctx context.Context, r *replicate.Remote, l *replicate.Listing, v *replicate.Listed, op string, want ref.Ref,
) error {
	for p, err := range l.Points(ctx, v) {
		if err != nil {
			return err
		}
		if p.Name == want.At {
			return nil
		}
	}
	return errs.New(errs.NotFound, op, want.String(), "%s has no such point", r.Name).
		WithHint("list its points with %s", errs.Run("remote ls", r.Name, want.Name))
}

// completionTime limits how long completion waits for a remote.
const completionTime = 5 * time.Second

// completeOnRemote completes the name of a remote and then its volumes, in the first n arguments (0: all).
func (a *App) completeOnRemote(n int) completer {
	return func(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		if len(args) == 0 {
			return a.completeRemotes(c, args, word)
		}
		if n > 0 && len(args) >= n {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return a.completeListed(c, args[0], word)
	}
}

// completeListed completes volumes of a remote, and behind an @ their points. remote is "" if it is the only one.
func (a *App) completeListed(c *cobra.Command, remote, word string) ([]string, cobra.ShellCompDirective) {
	ctx := c.Context()
	if ctx == nil {
		ctx = context.Background()
	}

	ctx, cancel := context.WithTimeout(ctx, completionTime)
	defer cancel()

	r, err := a.findRemote("complete", remote)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}

	l, err := replicate.Volumes(ctx, r)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	defer l.Close()

	var out []string
	name, _, point := strings.Cut(word, "@")
	for _, v := range l.Volumes {
		out = append(out, v.Name)
		if point && v.Name == name {
			for p, err := range l.Points(ctx, &v) {
				if err != nil {
					break
				}
				out = append(out, v.Name+"@"+p.Name)
			}
		}
	}

	return out, cobra.ShellCompDirectiveNoFileComp
}
