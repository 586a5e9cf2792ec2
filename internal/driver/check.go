package driver

import (
	"cmp"
	"context"
	"strings"

	"pando/internal/base/errs"
)

// Ref returns the name by which errors call an object.
func (id Identity) Ref() string { return cmp.Or(id.Name, id.Golden, string(id.ID)) }

// Check refuses, before anything is done, identities that cannot become an object of a driver: Invalid, Unsupported, or
// the error of ctx.
func (c Caps) Check(ctx context.Context, op string, id Identity) error {
	if err := ctx.Err(); err != nil {
		return errs.Wrap(op, id.Ref(), err)
	}

	if !ValidID(string(id.ID)) {
		return errs.New(errs.Invalid, op, id.Ref(), "%q is not an object's ID", id.ID)
	}

	if !c.Supports(id.FS) {
		var kinds []string
		for _, f := range c.FS {
			kinds = append(kinds, string(f))
		}
		return errs.New(errs.Unsupported, op, id.Ref(), "a %s pool cannot hold %s volumes", c.Name, id.FS).
			WithHint("this pool holds: %s", strings.Join(kinds, ", "))
	}

	return nil
}
