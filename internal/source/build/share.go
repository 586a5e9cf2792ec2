package build

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/replicate"
)

// Sharing shares the results of builds with other hosts through a remote. A result has a volume of its own there, whose
// name is a hash of its golden, of its key, and of the content of what it was built from, as the remote knows that. So
// hosts find each other's results if they have their base from the remote, or have pushed it there.
//
// A build never fails because of the remote: it warns, and goes on without it. It may be nil: then nothing is shared.
type Sharing struct {
	Remote *replicate.Remote

	off bool // the remote has failed
}

// Build is [engine.Engine.Build], but looks for the result on the remote before it runs the command, and pushes a new
// one there. Those that other hosts have pushed in the meantime stay; the result here does, too.
func (s *Sharing) Build(ctx context.Context, e *engine.Engine, q engine.BuildRequest) (engine.Built, error) {
	return s.build(ctx, e, q, q.Key)
}

// build is Build of a result whose key is shared under another name, which does not depend on this pool.
func (s *Sharing) build(
	ctx context.Context, e *engine.Engine, q engine.BuildRequest, shared string,
) (engine.Built, error) {
	if s == nil {
		return e.Build(ctx, q)
	}

	// What is fetched, built and pushed has one base, even if the golden gets another generation in the meantime.
	from, err := e.BuildBase(ctx, q.From)
	if err != nil {
		return engine.Built{}, err
	}
	q.From = from

	if q.In == (ref.Ref{}) && !q.Again { // of a chain, Run has looked already
		q.Fetch = func(ctx context.Context) (bool, error) {
			n, err := s.fetchFirst(ctx, e, []wanted{{q, shared, true}})
			return n == 0, err
		}
	}

	out, err := e.Build(ctx, q)
	if err == nil && !out.Cached {
		s.push(ctx, e, q, shared, out)
	}
	return out, err
}

// wanted is a result to look for.
type wanted struct {
	q      engine.BuildRequest
	shared string
	locked bool // the caller holds the lock of its build
}

// fetchFirst fetches the first of some results that the remote has, publishes it, and returns its position; -1 if there
// is none, or the remote has failed. The error is that of ctx, or one of this pool.
func (s *Sharing) fetchFirst(ctx context.Context, e *engine.Engine, all []wanted) (int, error) {
	if s == nil || s.off {
		return -1, nil
	}

	names := make([]string, len(all))
	for i, w := range all {
		name, err := s.nameOf(ctx, e, w)
		if err != nil || name == "" {
			return -1, err // nobody can have built upon what the remote does not have
		}
		names[i] = name
	}

	n, err := replicate.FirstOf(ctx, s.Remote, names)
	if err == nil && n >= 0 {
		err = s.fetch(ctx, e, all[n], names[n])
	}
	if err == nil || ctx.Err() != nil {
		return n, ctx.Err()
	}
	s.failed(ctx, "could not look for a result on the remote %s, and build it here: %v", s.Remote.Name, err)
	return -1, nil
}

// failed warns of an error of the remote. If it does not answer, it is not asked again.
func (s *Sharing) failed(ctx context.Context, format string, args ...any) {
	warnings.Add(ctx, format, args...)
	for _, a := range args {
		if err, ok := a.(error); ok && (replicate.Outage(err) || errs.Is(err, errs.IO, errs.NotFound, errs.Permission)) {
			s.off = true
		}
	}
}

// nameOf returns the name of a result on the remote; "" if the remote does not have what it is built from.
func (s *Sharing) nameOf(ctx context.Context, e *engine.Engine, w wanted) (string, error) {
	base, err := e.Point(ctx, w.q.From)
	if err != nil {
		return "", err
	}
	manifest, err := e.LinkOf(ctx, s.Remote.RepoID(), base.ID)
	if err != nil || manifest == "" {
		return "", err
	}

	golden := w.q.Golden.String()
	if w.shared != w.q.Key { // a step: the key says all, wherever its result is
		golden = ""
	}
	h := newSum("remote 1")
	h.add("golden", golden)
	h.add("key", w.shared)
	h.add("base", manifest)
	return "build-" + h.hex()[:40], nil
}

// fetch pulls a result into a golden of its own, publishes it from there, and removes that golden. A process that dies
// in between leaves that golden, with which the next fetch of the result begins.
func (s *Sharing) fetch(ctx context.Context, e *engine.Engine, w wanted, name string) error {
	if !w.locked {
		unlock, err := e.LockBuild(ctx, w.q)
		if err != nil {
			return err
		}
		defer unlock()
		if _, found, err := e.CachedBuild(ctx, w.q); err != nil || found { // another process was faster
			return err
		}
	}

	from, err := ref.ParseName(op, name)
	if err != nil {
		return err
	}

	pulled, err := replicate.Pull(engine.Unrecorded(ctx), e, s.Remote,
		replicate.PullRequest{Ref: from.Ref(), As: from, Tracker: w.q.Tracker})
	if err != nil {
		return err
	}

	out, err := e.PublishFetched(ctx, w.q, generation(pulled.Info))
	if err != nil {
		return err
	}

	// From now on the result is what the remote has.
	manifest, err := e.LinkOf(ctx, s.Remote.RepoID(), driver.ObjectID(pulled.ID))
	if err == nil && manifest != "" {
		err = e.PutLink(ctx, engine.Link{Repo: s.Remote.RepoID(), Manifest: manifest, Object: driver.ObjectID(out.ID)})
	}
	if err != nil {
		warnings.Add(ctx, "could not record that %s is on the remote: %v", generation(out.Info), err)
	}
	if _, err := e.RemoveGolden(engine.Unrecorded(ctx), from.Ref()); err != nil {
		warnings.Add(ctx, "could not remove %s, which is no longer needed: %v", from, err)
	}
	return nil
}

// push pushes a new result, and before it what it was built from, if the remote does not have that. Failures are
// warnings: the result stays here.
func (s *Sharing) push(
	ctx context.Context, e *engine.Engine, q engine.BuildRequest, shared string, out engine.Built,
) {
	if s.off {
		return
	}

	err := s.pushBase(ctx, e, q)
	name := ""
	if err == nil {
		name, err = s.nameOf(ctx, e, wanted{q, shared, true})
	}
	if err == nil && name != "" {
		var n int
		if n, err = replicate.FirstOf(ctx, s.Remote, []string{name}); err == nil && n == 0 {
			return // another host was faster
		}
	}
	if err == nil && name != "" {
		_, err = replicate.Push(ctx, e, s.Remote, replicate.PushRequest{Refs: []ref.Ref{generation(out.Info)},
			As: ref.MustName(name), NoOrigin: true, Tracker: q.Tracker})
	}
	if err != nil {
		s.failed(ctx, "built %s, but could not push it to the remote %s: %v", generation(out.Info), s.Remote.Name, err)
	}
}

// pushBase pushes what a build began with, unless the remote has it.
func (s *Sharing) pushBase(ctx context.Context, e *engine.Engine, q engine.BuildRequest) error {
	base, err := e.Point(ctx, q.From)
	if err != nil {
		return err
	}
	manifest, err := e.LinkOf(ctx, s.Remote.RepoID(), base.ID)
	if err != nil || manifest != "" {
		return err
	}

	at, err := ref.Parse(op, base.Ref)
	if err != nil {
		return err
	}
	_, err = replicate.Push(ctx, e, s.Remote, replicate.PushRequest{Refs: []ref.Ref{at}, NoOrigin: true,
		Tracker: q.Tracker})
	return err
}

// fetchLast fetches the last step that the remote has of those from first on, and returns the step after it; first if
// there is none.
func (c *chain) fetchLast(ctx context.Context, first int) (int, ref.Ref, error) {
	if c.q.Share == nil || c.q.Again {
		return first, ref.Ref{}, nil
	}

	var all []wanted
	for i := len(c.all) - 1; i >= first; i-- {
		s := c.all[i]
		q := engine.BuildRequest{Golden: c.goldenOf(i), From: c.from, Key: s.key, Tracker: c.q.Tracker}
		all = append(all, wanted{q, s.chain, false})
	}
	n, err := c.q.Share.fetchFirst(ctx, c.e, all)
	if err != nil || n < 0 {
		return first, ref.Ref{}, err
	}

	i := len(c.all) - 1 - n
	found, ok, err := c.e.CachedBuild(ctx, all[n].q)
	if err != nil || !ok {
		return first, ref.Ref{}, err
	}

	r := &c.out.Steps[i]
	r.Result, r.Fetched = generation(found.Info).String(), true
	c.out.Info = found.Info
	for k := first; k <= i; k++ {
		c.done(k)
	}
	return i + 1, generation(found.Info), nil
}
