package viaservice

import (
	"context"
	"errors"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
)

// runLease is the ttl of the volume of a run, which is renewed as long as this process lives: if it is killed, the
// service destroys the volume when nothing uses it any more, at the latest after this time.
const runLease = 5 * time.Minute

// leaseFraction is the part of the ttl after which it is renewed, so that some attempts may fail.
const leaseFraction = 3

// Run is as that of the engine, without a sandbox. The service runs nothing: this process runs the program, as its own
// user, in a clone that the service makes, mounts and destroys.
func (p *Pool) Run(ctx context.Context, q engine.RunRequest) (engine.RunResult, error) {
	do, err := q.Plan()
	if err != nil {
		return engine.RunResult{}, err
	}
	if q.Name.IsZero() {
		q.Name = ref.MustName("run-" + string(driver.NewID()[:10]))
	}

	// Make the clone. One that stays if this process is killed needs no lease.
	temporary := !q.Keep && !q.KeepOnFailure
	c := engine.CloneRequest{From: q.From, Name: q.Name, Mount: true, May: q.May, Ephemeral: temporary, Overlay: q.Overlay,
		GoldenDecides: q.GoldenDecides, Labels: q.Labels, Tracker: q.Tracker}
	if temporary {
		c.TTL = p.lease
	}
	made, err := p.Clone(ctx, c)
	if e, ok := errors.AsType[*Error](err); ok && e.cause.Op == "clone" {
		err = e.during("run")
	}
	if err != nil {
		return engine.RunResult{}, err
	}

	// Run the program in it.
	vol := made[0]
	r := engine.RunResult{Volume: vol.Name, Mountpoint: vol.Mountpoint}
	stop := func() {}
	if temporary {
		stop = p.renew(context.WithoutCancel(ctx), q.Name)
	}
	runErr := ctx.Err() // a signal that arrived before the program started
	keep := q.Keep && runErr == nil
	if runErr == nil {
		r.Exit, runErr = do(vol)
	}

	// Use its result, and end with the volume.
	if r.Ran = runErr == nil; r.Ran {
		runErr = p.useResult(ctx, q, vol, &r)
		keep = keep || q.KeepOnFailure && (runErr != nil || r.Exit != 0)
	}
	stop()
	return r, errors.Join(runErr, p.endRun(context.WithoutCancel(ctx), vol, q.Name, keep, &r))
}

// Shell is as that of the engine. The service runs nothing: this process runs the program, as its own user, in the
// volume that the service has mounted.
func (p *Pool) Shell(ctx context.Context, q engine.ShellRequest) (engine.ShellResult, error) {
	do, err := q.Plan()
	if err != nil {
		return engine.ShellResult{}, err
	}
	before, err := p.Show(ctx, q.Volume.Ref())
	if err != nil {
		return engine.ShellResult{}, err
	}
	vol, err := p.Mount(ctx, engine.MountRequest{Volume: q.Volume, Dir: before.Mountpoint})
	if err != nil {
		return engine.ShellResult{}, err
	}

	r := engine.ShellResult{Volume: vol.Name, Mountpoint: vol.Mountpoint, Stays: before.Mounted()}
	r.Exit, err = do(ctx, vol)
	if r.Ran = err == nil; r.Stays {
		return r, err
	}

	_, uerr := p.Umount(context.WithoutCancel(ctx), engine.UmountRequest{Volume: q.Volume})
	if errs.Is(uerr, errs.InUse) {
		r.Held, uerr = uerr, nil
	}
	return r, errors.Join(err, uerr)
}

// renew renews the ttl of a volume until stop is called, which waits until no request is under way. If the service
// cannot be reached, it goes on trying.
func (p *Pool) renew(ctx context.Context, volume ref.Name) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(p.lease / leaseFraction)
		defer tick.Stop()
		for ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-tick.C:
				_, _ = p.SetTTL(context.WithoutCancel(ctx), volume, p.lease) // tried again at the next tick
			}
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

// useResult compares and publishes the clone after the program has ended, as requested.
func (p *Pool) useResult(ctx context.Context, q engine.RunRequest, vol engine.Info, r *engine.RunResult) error {
	if q.Diff && vol.Origin != "" {
		origin, err := ref.Parse("run", vol.Origin)
		if err != nil {
			return err
		}
		d, err := p.Diff(ctx, engine.DiffRequest{A: origin, B: q.Name.Ref(), Tracker: q.Tracker})
		if err != nil {
			return err
		}
		r.Diff = &d
	}

	if q.Publish.IsZero() || r.Exit != 0 {
		return nil
	}
	out, err := p.Publish(ctx, engine.PublishRequest{Golden: q.Publish, Volume: q.Name, Tracker: q.Tracker})
	if err != nil {
		return err
	}
	r.Published = &out
	return nil
}

// endRun unmounts the volume of a run that is kept, and destroys any other. One that is in use is left to the service.
func (p *Pool) endRun(
	ctx context.Context, vol engine.Info, name ref.Name, keep bool, r *engine.RunResult,
) error {
	if keep {
		r.Kept = true
		_, err := p.Umount(ctx, engine.UmountRequest{Volume: name})
		if errs.Is(err, errs.InUse) {
			r.Held, err = err, nil
		}
		return err
	}

	err := p.destroyMade(ctx, vol)
	if errs.Is(err, errs.InUse) {
		r.Held = err
		_, err = p.SetTTL(ctx, name, time.Second)
	}
	return err
}
