package cli

import (
	"context"

	"pando/internal/engine"
	"pando/internal/front/viaservice"
	"pando/internal/remote/replicate"
)

// remoteCalls are what verbs do with a remote, by themselves or through a service.
type remoteCalls interface {
	Name() string
	Push(context.Context, replicate.PushRequest) ([]replicate.Pushed, error)
	Pull(context.Context, replicate.PullRequest) (replicate.Pulled, error)
	Verify(ctx context.Context, q replicate.VerifyRequest, repair bool) (*replicate.Verified, error)
}

// remoteOf finds a remote of an open pool by its name; "" is the only one. NotFound, Invalid.
func (a *App) remoteOf(ctx context.Context, e calls, op, name string) (remoteCalls, error) {
	if p, ok := e.(*viaservice.Pool); ok {
		name, err := chooseRemote(op, name, func() ([]string, error) { return p.Remotes(ctx) })
		return servedRemote{p, name}, err
	}

	pool, err := opened(e, op, name)
	if err != nil {
		return nil, err
	}
	r, err := a.findRemote(op, name)
	return ownRemote{pool, r}, err
}

// ownRemote is a remote of a pool that this process has opened.
type ownRemote struct {
	e *engine.Engine // nil: the pool cannot be opened, and Verify does without it
	r *replicate.Remote
}

func (o ownRemote) Name() string { return o.r.Name }

func (o ownRemote) Push(ctx context.Context, q replicate.PushRequest) ([]replicate.Pushed, error) {
	return replicate.Push(ctx, o.e, o.r, q)
}

func (o ownRemote) Pull(ctx context.Context, q replicate.PullRequest) (replicate.Pulled, error) {
	return replicate.Pull(ctx, o.e, o.r, q)
}

func (o ownRemote) Verify(ctx context.Context, q replicate.VerifyRequest, repair bool) (*replicate.Verified, error) {
	q.Pool = o.e
	if repair {
		return replicate.VerifyRepair(ctx, o.e, o.r, q)
	}
	return replicate.Verify(ctx, o.r, q)
}

// servedRemote is a remote of a pool that a service has opened.
type servedRemote struct {
	p    *viaservice.Pool
	name string
}

func (s servedRemote) Name() string { return s.name }

func (s servedRemote) Push(ctx context.Context, q replicate.PushRequest) ([]replicate.Pushed, error) {
	return s.p.Push(ctx, s.name, q)
}

func (s servedRemote) Pull(ctx context.Context, q replicate.PullRequest) (replicate.Pulled, error) {
	return s.p.Pull(ctx, s.name, q)
}

func (s servedRemote) Verify(ctx context.Context, q replicate.VerifyRequest, repair bool) (*replicate.Verified, error) {
	return s.p.Verify(ctx, s.name, q, repair)
}
