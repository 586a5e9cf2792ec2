// Package restore brings volumes and goldens back from a remote, ready for use: pulled, labeled and mounted.
package restore

import (
	"context"
	"errors"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/replicate"
)

// Request says what to restore, and what becomes of it.
type Request struct {
	Pull     replicate.PullRequest
	Labels   driver.Labels // labels to add to what was pulled; for a generation, to its golden
	Mount    bool          // whether the volume is mounted
	MountDir string        // directory to mount it at; "": below the pool
}

// Pull pulls from a remote, adds the labels, and mounts the volume; one that is mounted there already stays so. An
// error that comes after the pull is returned with what was pulled, and out.Ref then is not empty. It returns the
// kinds of replicate.Pull, SetLabels and Mount, and Invalid if a golden was pulled that was to be mounted.
func Pull(ctx context.Context, e *engine.Engine, from *replicate.Remote, q Request) (out replicate.Pulled, err error) {
	if out, err = replicate.Pull(ctx, e, from, q.Pull); err != nil {
		return replicate.Pulled{}, err
	}

	err = addLabels(ctx, e, &out.Object, q.Labels)
	if q.Mount {
		err = errors.Join(err, mount(ctx, e, &out.Object, q.MountDir))
	}
	return out, err
}

// addLabels adds labels to what was pulled.
func addLabels(ctx context.Context, e *engine.Engine, v *api.Object, labels driver.Labels) error {
	if labels == (driver.Labels{}) {
		return nil
	}

	r, err := ref.Parse("label", labelled(v))
	if err != nil {
		return err
	}
	out, err := e.SetLabels(ctx, engine.LabelRequest{Ref: r, Set: labels.Map()})
	if err == nil {
		v.Labels = out.Labels
	}
	return err
}

// labelled returns what has the labels of an object: a volume, or the golden of a generation.
func labelled(v *api.Object) string {
	if v.Kind == api.KindGeneration {
		return v.Golden
	}
	return v.Name
}

// mount mounts what was pulled.
func mount(ctx context.Context, e *engine.Engine, v *api.Object, dir string) error {
	if v.Kind != api.KindVolume {
		return errs.New(errs.Invalid, "mount", v.Ref, "pulled, but a golden cannot be mounted").
			WithHint("clone it: %s", errs.Run("clone", v.Golden, "NEW", errs.Param("mount")))
	}

	name, err := ref.ParseName("mount", v.Name)
	if err != nil {
		return err
	}
	m, err := e.Mount(ctx, engine.MountRequest{Volume: name, Dir: dir})
	if err == nil {
		*v = m
	}
	return err
}
