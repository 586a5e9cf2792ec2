package cli

import (
	"context"
	"os"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// argument is a word of the command line that names a volume or a path.
type argument struct {
	op, text     string
	kind         string // what a path must be: "path" or "directory"
	suggestClone bool   // a golden is reported as missing, with the hint to clone it
}

// volumeOrPath returns the volume that an argument names, with the pool that open returned, which the caller closes.
// A word that cannot be the name of a volume, such as one with a slash, is a path: the pool then is nil. So is an
// existing path that no volume has as its name. NotFound, Invalid, and errors of opening the pool.
func (a *App) volumeOrPath(ctx context.Context, arg argument, open func(context.Context) (*engine.Engine, error)) (
	*engine.Engine, api.Object, error) {
	var none api.Object
	if arg.text == "" {
		return nil, none, errs.New(errs.Invalid, arg.op, `""`, "the path is empty")
	}

	name, invalid := ref.ParseName(arg.op, arg.text)
	if invalid != nil {
		return nil, none, nil
	}

	// A path needs no pool.
	_, missing := os.Stat(arg.text)
	e, err := open(ctx)
	switch {
	case err == nil:
	case missing != nil && errs.Is(err, errs.NotFound):
		return nil, none, errs.New(errs.NotFound, arg.op, arg.text,
			"no %s has this name, and %s has no pool with a volume of this name", arg.kind, a.poolDir()).
			WithHint("name a %s", arg.kind)
	case missing != nil:
		return nil, none, err
	case !errs.Is(err, errs.NotFound):
		a.printWarning("%v; measuring the %s %s", err, arg.kind, arg.text)
		return nil, none, nil
	default:
		return nil, none, nil
	}

	// Find the volume.
	found, err := e.Mountpoints(ctx, arg.op, name)
	if err == nil {
		return e, found[0], nil
	}
	e.Close()

	switch {
	case missing == nil:
		return nil, none, nil
	case arg.suggestClone && errs.Is(err, errs.NotFound, errs.Invalid):
		return nil, none, arg.unknown().WithHint("run `pando ls` to list volumes, or clone a golden first: "+
			"`pando clone %s NAME`", shellWord(arg.text))
	case errs.Is(err, errs.NotFound):
		return nil, none, arg.unknown().WithHint("run `pando ls` to list volumes")
	}
	return nil, none, err
}

func (arg argument) unknown() *errs.Error {
	return errs.New(errs.NotFound, arg.op, arg.text, "no volume and no %s has this name", arg.kind)
}
