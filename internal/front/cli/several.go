package cli

import (
	"context"
	"fmt"

	"pando/internal/api"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// chosen is what the arguments of a verb name.
type chosen struct {
	refs []ref.Ref
	many bool // there are several arguments, or globs: the result is a list
}

// choose finds what words name: all of it, or none. Invalid, NotFound.
func choose(ctx context.Context, e *engine.Engine, op string, words []string, kinds []api.Kind) (chosen, error) {
	what, err := ref.ParsePatterns(op, words...)
	if err != nil {
		return chosen{}, err
	}

	// The operation finds a single name by itself, and may have to wait for what has it.
	one := what[0]
	if len(what) == 1 && one.Glob == "" && one.Ref.At == "" {
		return chosen{refs: []ref.Ref{one.Ref}}, nil
	}
	refs, err := e.Match(ctx, engine.MatchRequest{Op: op, What: what, Kinds: kinds})
	return chosen{refs, len(what) > 1 || one.Glob != ""}, err
}

// nameOf reads the name of something of a kind. NotFound or Invalid if word has an @, as names have none.
func nameOf(ctx context.Context, e *engine.Engine, op, word string, kind []api.Kind) (ref.Name, error) {
	r, err := ref.Parse(op, word)
	if err == nil && r.At != "" {
		_, err = choose(ctx, e, op, []string{word}, kind)
	}
	if err != nil {
		return ref.Name{}, err
	}
	return ref.ParseName(op, word)
}

// volumeName is nameOf for a volume.
func volumeName(ctx context.Context, e *engine.Engine, op, word string) (ref.Name, error) {
	return nameOf(ctx, e, op, word, aVolume)
}

// goldenName is nameOf for a golden.
func goldenName(ctx context.Context, e *engine.Engine, op, word string) (ref.Name, error) {
	return nameOf(ctx, e, op, word, aGolden)
}

// doEach does something with each of what was chosen, and prints the results: with --json as one value, or as a list if
// there may be several. One that fails does not keep the others from being done. failed says what went wrong with it:
// "could not be mounted".
func doEach[T any](
	ctx context.Context, a *App, c chosen, failed string, do func(ref.Ref) (T, error), show func(T) error,
) error {
	if !c.many {
		out, err := do(c.refs[0])
		switch {
		case err != nil:
			return err
		case a.json:
			return a.printJSON(out)
		}
		return show(out)
	}

	all := []T{}
	var errors []error
	for _, r := range c.refs {
		if err := ctx.Err(); err != nil {
			errors = append(errors, err)
			break
		}

		out, err := do(r)
		switch {
		case err != nil:
			errors = append(errors, err)
		case a.json:
			all = append(all, out)
		default:
			if err := show(out); err != nil {
				return err
			}
		}
	}

	if a.json {
		if err := a.printJSON(all); err != nil {
			return err
		}
	}
	return a.allButLastOf(errors, failed)
}

// shownFailures is how many errors people are shown of one command; JSON has all of them.
const shownFailures = 3

// allButLastOf prints errors except the last one, which it returns, as it decides the exit code. failed says what went
// wrong with those that are not shown: "could not be destroyed".
func (a *App) allButLastOf(errors []error, failed string) error {
	if len(errors) == 0 {
		return nil
	}

	last := len(errors) - 1
	shown := errors[:last]
	if !a.json && len(errors) > shownFailures {
		shown = shown[:shownFailures-1]
	}

	for _, err := range shown {
		a.printError(err)
	}

	if more := last - len(shown); more > 0 {
		fmt.Fprintf(a.Stderr, "pando: %d more %s; the last error:\n", more, failed) // with --quiet too
	}
	return errors[last]
}
