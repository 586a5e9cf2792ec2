package engine

import (
	"context"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/principal"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// Access is what somebody asks for.
type Access struct {
	Who      principal.Principal
	Op       string   // operation, as in errors
	Ref      string   // reference to an object, or a name that is free; "": the whole pool
	Kind     api.Kind // kind of the object; "": there is none
	OwnerUID uint32   // user ID of the object's owner
}

// Policy decides whether somebody may do what they ask for. Its error becomes that of the call, which changes nothing
// then; what may not be seen (NotFound, Permission) is left out of lists. The policy is asked in the transaction that
// finds an object, so that nobody can put another one in its place in between. It may be called concurrently, and must
// not use the engine.
type Policy func(Access) error

// SetPolicy makes the pool ask p about all calls from now on; without a policy, everybody may do everything. Then each
// call must say who asks: see [principal.With]. Records of remotes, which have only the IDs of repositories, are not
// asked about, nor is Maintain. SetPolicy must be called before all other methods.
func (e *Engine) SetPolicy(p Policy) {
	e.policy = p
	e.cat.OnFind(func(ctx context.Context, op string, r catalog.Found) error {
		a := Access{Op: op, Ref: r.Ref, OwnerUID: r.Owner}
		if r.Kind != "" {
			a.Kind = kindOf(r.Kind, r.Ref)
		}
		return e.ask(ctx, a)
	})
}

// ask asks the policy on behalf of who asks.
func (e *Engine) ask(ctx context.Context, a Access) (err error) {
	if e.policy == nil {
		return nil
	}

	ok := false
	if a.Who, ok = principal.From(ctx); !ok {
		return errs.New(errs.Internal, a.Op, a.Ref, "the call does not say who asks")
	}
	return e.policy(a)
}

// askForPool asks the policy about an operation on the whole pool.
func (e *Engine) askForPool(ctx context.Context, op string) error { return e.ask(ctx, Access{Op: op}) }

// askForPoint asks the policy about a snapshot or generation. NotFound, Invalid.
func (e *Engine) askForPoint(ctx context.Context, op string, id driver.ObjectID) error {
	return e.cat.View(ctx, func(tx *catalog.Tx) error {
		_, err := tx.ResolvePoint(op, id)
		return err
	})
}

// askForGolden asks the policy about a golden, or about a new one of that name.
func (e *Engine) askForGolden(ctx context.Context, op, name string) error {
	return e.cat.View(ctx, func(tx *catalog.Tx) error {
		_, ok, err := tx.ResolveGolden(op, name)
		if err == nil && !ok {
			err = tx.AskFree(op, name)
		}
		return err
	})
}

// asker returns the user that a call is for: that of its context, or else the one that this process acts as.
func asker(ctx context.Context) principal.Principal {
	if p, ok := principal.From(ctx); ok {
		return p
	}
	return principal.Process()
}

// visibleVolumes calls fn for each volume that who asks may see, in order of name.
func visibleVolumes(tx *catalog.Tx, op string, fn func(catalog.Row) error) error {
	return tx.Rows(driver.Volume, func(r catalog.Row) error {
		if err := tx.Ask(op, r); err != nil {
			return unlessHidden(err)
		}
		return fn(r)
	})
}

// visibleGoldens returns the goldens that who asks may see, in order of name.
func visibleGoldens(tx *catalog.Tx, op string) (out []catalog.Golden, err error) {
	all, err := tx.Goldens()
	for _, g := range all {
		if err := tx.AskGolden(op, g); err == nil {
			out = append(out, g)
		} else if err = unlessHidden(err); err != nil {
			return nil, err
		}
	}
	return out, err
}

// unlessHidden returns an error of a policy, unless it only says that something may not be seen.
func unlessHidden(err error) error {
	if errs.Is(err, errs.NotFound) || errs.Is(err, errs.Permission) {
		return nil
	}
	return err
}
