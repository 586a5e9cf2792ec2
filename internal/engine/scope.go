package engine

import (
	"context"
	"path/filepath"

	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
)

// Scope limits what a user reaches through a front end: see [catalog.Scope].
type Scope = catalog.Scope

// Within returns a context for calls in the name of a user. Names lead only to what the scope admits, also those in
// globs and lists; everything else is NotFound, as if it did not exist. What the calls make counts against its limits.
// Goldens returns all goldens, and ReadHistory all events: front ends choose from these.
func Within(ctx context.Context, s Scope) context.Context { return catalog.Within(ctx, s) }

// WithinSame returns a context with the scope of another one.
func WithinSame(as, ctx context.Context) context.Context {
	if s := catalog.ScopeOf(as); s != nil {
		return Within(ctx, *s)
	}
	return ctx
}

// Finds reports whether the scope of ctx admits what a reference names: a front end shows it only then. A generation
// that was removed still shows in what was cloned from it.
func (e *Engine) Finds(ctx context.Context, r ref.Ref) (found bool, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		if _, err := tx.Resolve("show", r); err == nil {
			found = true
			return nil
		}
		_, number := r.Generation()
		_, isVolume, err := tx.Volume(r.Name)
		found = number && !isVolume && catalog.ScopeOf(ctx).SeesGolden(r.Name)
		return err
	})
	return found, err
}

// PlaceForUser returns where a volume of a user is mounted: dir, which must be below one of the directories in below,
// or without a dir the one with the name of the volume in the first of these. "" stands for the place where Mount puts
// volumes of users by itself. It changes nothing but making the user's directory there. Invalid, Permission, NotFound
// (a directory in below).
func PlaceForUser(op string, o driver.Owner, name string, below []string, dir string) (string, error) {
	if dir == "" && len(below) > 0 {
		if below[0] == content.UserDir(o) {
			return "", nil
		}
		dir = filepath.Join(below[0], name)
	}
	return content.CheckUserPlace(op, o, below, dir)
}
