package viaservice

import (
	"context"
	"net/http"
	"path/filepath"
	"slices"
	"time"

	"pando/client"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine"

	"golang.org/x/sync/errgroup"
)

// clonesAtOnce is how many requests for clones are under way at the same time.
const clonesAtOnce = 4

// Clone is as that of the engine.
func (p *Pool) Clone(ctx context.Context, q engine.CloneRequest) ([]engine.Info, error) {
	return p.makeAll(ctx, q, func(ctx context.Context, name string, m client.Make) (engine.Info, error) {
		body := client.CloneRequest{From: q.From.String(), Name: name, Make: m}
		if !q.GoldenDecides {
			body.Overlay = &q.Overlay
		}
		return making[engine.Info](ctx, p, request{method: http.MethodPost, path: []string{"volumes"}, body: body})
	})
}

// Fork is as that of the engine.
func (p *Pool) Fork(ctx context.Context, q engine.CloneRequest) ([]engine.Info, error) {
	return p.makeAll(ctx, q, func(ctx context.Context, name string, m client.Make) (engine.Info, error) {
		return making[engine.Info](ctx, p, request{method: http.MethodPost,
			path: []string{"volumes", q.From.String(), "fork"}, body: client.ForkRequest{Name: name, Make: m}})
	})
}

// makeAll makes the volumes of a request, one request for each: all of them, or none. Those that exist when one fails
// are destroyed.
func (p *Pool) makeAll(ctx context.Context, q engine.CloneRequest,
	send func(context.Context, string, client.Make) (engine.Info, error),
) ([]engine.Info, error) {
	names, err := q.Names()
	if err != nil {
		return nil, err
	}
	dir, err := absolute(q.MountDir)
	if err != nil {
		return nil, err
	}

	// Make them.
	out := make([]engine.Info, len(names))
	q.Tracker.Start("cloning", int64(len(names)), 0)
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(clonesAtOnce)
	failed := make([]error, len(names))
	for i, name := range names {
		if gctx.Err() != nil {
			break
		}
		g.Go(func() error {
			at := dir
			if at != "" && q.Count > 0 {
				at = filepath.Join(dir, name)
			}
			out[i], failed[i] = send(ctx, name, p.makeOf(q, at))
			q.Tracker.Add(1, 0)
			return failed[i]
		})
	}
	_ = g.Wait() // the error of the first name is reported, not the one that came first
	err = ctx.Err()
	if i := slices.IndexFunc(failed, func(err error) bool { return err != nil }); i >= 0 {
		err = failed[i]
	}
	if err == nil || !slices.ContainsFunc(out, func(v engine.Info) bool { return v.Name == "" }) {
		return out, nil // complete, even if ctx has ended since
	}

	// Destroy those that exist, if there are others.
	out = slices.DeleteFunc(out, func(v engine.Info) bool { return v.Name == "" })
	if len(out) > 0 {
		if uerr := p.destroyMade(context.WithoutCancel(ctx), out...); uerr != nil {
			warnings.AddEach(ctx, "could not destroy the clones that were made before one failed: %v", uerr)
		}
	}
	return nil, err
}

// makeOf returns what a clone or fork is made with.
func (p *Pool) makeOf(q engine.CloneRequest, dir string) client.Make {
	m := client.Make{Mount: q.Mount, MountDir: dir, Dev: q.May.Dev, SUID: q.May.SUID, SizeBytes: q.SizeBytes,
		TTL: q.TTL.Seconds(), Ephemeral: q.Ephemeral, Labels: q.Labels.Map(), Freeze: freezes[q.Freeze]}
	if q.Owner != (driver.Owner{}) {
		m.Owner = &client.Owner{UID: q.Owner.UID, GID: q.Owner.GID}
	}
	return m
}

// freezes are the words of the API.
var freezes = map[engine.Freeze]string{engine.FreezeAlways: "always", engine.FreezeNever: "never"}

// absolute makes a path independent of the working directory, which the service does not share. "" stays as it is.
func absolute(dir string) (string, error) {
	if dir == "" {
		return "", nil
	}
	abs, err := filepath.Abs(dir)
	return abs, errs.Wrap("mount", dir, err)
}

// Mount is as that of the engine.
func (p *Pool) Mount(ctx context.Context, q engine.MountRequest) (engine.Info, error) {
	dir, err := absolute(q.Dir)
	if err != nil {
		return engine.Info{}, err
	}
	return change[engine.Info](ctx, p, request{method: http.MethodPost,
		path: []string{"volumes", q.Volume.String(), "mount"},
		body: client.MountRequest{Dir: dir, Dev: q.May.Dev, SUID: q.May.SUID}, repeat: harmless})
}

// Umount is as that of the engine. It is not repeated: a second one may discard data.
func (p *Pool) Umount(ctx context.Context, q engine.UmountRequest) (engine.Info, error) {
	return change[engine.Info](ctx, p, request{method: http.MethodPost,
		path: []string{"volumes", q.Volume.String(), "unmount"}})
}

// SetTTL is as that of the engine.
func (p *Pool) SetTTL(ctx context.Context, volume ref.Name, ttl time.Duration) (engine.Info, error) {
	return change[engine.Info](ctx, p, request{method: http.MethodPut, path: []string{"volumes", volume.String(), "ttl"},
		body: map[string]any{"seconds": ttl.Seconds()}, repeat: harmless})
}

// Resize is as that of the engine.
func (p *Pool) Resize(ctx context.Context, q engine.ResizeRequest) (engine.Resized, error) {
	return change[engine.Resized](ctx, p, request{method: http.MethodPost,
		path: []string{"volumes", q.Volume.String(), "resize"}, body: map[string]any{"size_bytes": q.SizeBytes}})
}

// Rebase is as that of the engine.
func (p *Pool) Rebase(ctx context.Context, q engine.RebaseRequest) (engine.Rebased, error) {
	if err := q.Check(); err != nil {
		return engine.Rebased{}, err
	}
	body := map[string]any{"onto": q.Onto.String()}
	switch {
	case q.Ours:
		body["keep"] = "ours"
	case q.Theirs:
		body["keep"] = "theirs"
	}
	return operate[engine.Rebased](ctx, p, q.Tracker, request{method: http.MethodPost,
		path: []string{"volumes", q.Volume.String(), "rebase"}, body: body})
}
