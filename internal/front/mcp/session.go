package mcp

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// leaseFraction is the part of a lease after which it is renewed, so that some attempts may fail.
const leaseFraction = 3

// ttl is for how long a volume shall exist from now on unless this is renewed; 0: for good. Unless they are kept,
// volumes have a lease: if this process is killed, the service or the next pando command destroys them.
func (s *Server) ttl(expires time.Time) time.Duration {
	left := time.Duration(0)
	if !expires.IsZero() {
		left = max(time.Until(expires), time.Second)
	}
	switch {
	case s.o.Keep:
		return left
	case left == 0:
		return s.o.Lease
	}
	return min(left, s.o.Lease)
}

// renewLeases renews leases until stop is called.
func (s *Server) renewLeases() (stop func()) {
	if s.o.Keep {
		return func() {}
	}

	ctx, cancel := context.WithCancel(context.WithoutCancel(s.ctx))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(s.o.Lease / leaseFraction)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				s.renewAll(engine.Unrecorded(ctx))
			}
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

// renewAll renews the lease of each volume that still is the server's. What fails is tried again at the next tick.
func (s *Server) renewAll(ctx context.Context) {
	s.mu.Lock()
	made := maps.Clone(s.made)
	s.mu.Unlock()

	for name, expires := range made {
		labels, err := s.pool.Labels(ctx, name.Ref())
		switch {
		case errs.Is(err, errs.NotFound), err == nil && !s.isMine(labels):
			s.forget(name)
		case err == nil && (expires.IsZero() || time.Now().Before(expires)):
			_, _ = s.pool.SetTTL(ctx, name, s.ttl(expires))
		}
	}
}

// forget removes a volume from those that were made.
func (s *Server) forget(name ref.Name) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.made, name)
}

// End says what became of what the server has made. Names are sorted.
type End struct {
	Destroyed []string
	Kept      []string         // as requested
	InUse     map[string]error // are destroyed when nothing uses them any more
	Failed    map[string]error // still exist, until their lease ends
	Published []string         // generations
}

// End waits for calls that are under way and refuses others, then destroys all volumes that were made, or unmounts
// those that are kept.
func (s *Server) End() End {
	s.mu.Lock()
	s.ending = true
	s.mu.Unlock()
	s.calls.Wait()
	s.cancel()

	s.mu.Lock()
	names := slices.SortedFunc(maps.Keys(s.made), func(a, b ref.Name) int { return cmp.Compare(a.String(), b.String()) })
	out := End{InUse: map[string]error{}, Failed: map[string]error{}, Published: slices.Clone(s.published)}
	s.mu.Unlock()

	ctx := context.WithoutCancel(s.ctx)
	for _, name := range names {
		err := s.endVolume(ctx, name)
		switch text := name.String(); {
		case errs.Is(err, errs.NotFound): // it has expired, or somebody else has destroyed it
		case s.o.Keep:
			out.Kept = append(out.Kept, text)
			if errs.Is(err, errs.InUse) {
				out.InUse[text] = err
			} else if err != nil {
				out.Failed[text] = err
			}
		case err == nil:
			out.Destroyed = append(out.Destroyed, text)
		case errs.Is(err, errs.InUse):
			out.InUse[text] = err
			_, _ = s.pool.SetTTL(ctx, name, time.Second) // its lease ends anyway
		default:
			out.Failed[text] = err
		}
	}
	return out
}

// endVolume destroys a volume of the server, or unmounts it if it is kept. NotFound, InUse.
func (s *Server) endVolume(ctx context.Context, name ref.Name) error {
	if s.o.Keep {
		labels, err := s.pool.Labels(ctx, name.Ref())
		if err != nil || !s.isMine(labels) {
			return err
		}
		_, err = s.pool.Umount(ctx, engine.UmountRequest{Volume: name})
		return err
	}

	return s.destroy(ctx, name.Ref(), true)
}

// destroy destroys a volume or a snapshot; with mine only if this server has made it.
func (s *Server) destroy(ctx context.Context, r ref.Ref, mine bool) error {
	q := engine.DestroyRequest{What: []ref.Pattern{{Ref: r}}}
	if mine {
		var err error
		if q.Labels, err = s.mine(); err != nil {
			return err
		}
	}

	report, err := s.pool.Destroy(ctx, q)
	if err != nil {
		return err
	}
	return errors.Join(report.Failed...)
}
