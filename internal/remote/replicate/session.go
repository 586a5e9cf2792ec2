package replicate

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
)

// beatEvery is how often a session says that it is alive. It is slow: the clock of a
// prune does not matter, and a bucket takes about one write of an object a second.
const beatEvery = 20 * time.Second

// errEnded stops an operation whose session a prune has removed.
var errEnded = errs.New(errs.Conflict, "", "", "a prune ended this session, because it had expired")

// lease is a session that this process keeps alive. While its object is there, what
// was written under it is not garbage, and what it pins stays. Methods may be called
// concurrently.
//
// The rule of pins: pin first, then read the head again; only what it still lists may
// be built upon.
type lease struct {
	repo *repo.Repo
	id   repo.ID
	stop context.CancelCauseFunc
	done chan struct{} // closed when the background work has ended

	begun  chan struct{} // closed when the session is written, or cannot be
	failed error         // why it cannot; set before begun is closed

	mu        sync.Mutex // one write of the object at a time
	s         repo.Session
	noteToken func(repo.ID) error // makes the token of a write durable, before it; nil: writes have none

	emu   sync.Mutex
	ended error
}

// beginSession writes a new session that pins manifests, and keeps it alive until end,
// abandon, or the end of ctx. The context it returns ends with errEnded as its cause
// when the session is found to be gone: nothing that was written under it may be
// committed then.
func beginSession(
	ctx context.Context, r *repo.Repo, kind repo.SessionKind, heads []string, w repo.Writer, pins ...repo.ID,
) (context.Context, *lease, error) {
	s := r.NewSession(kind, heads, w)
	s.Pins = slices.Clone(pins)
	ctx, l := newLease(ctx, r, s)
	if err := l.start(ctx); err != nil {
		l.abandon()
		return nil, nil, err
	}
	return ctx, l, nil
}

// newLease makes the lease of a session that begin writes: of a new one, or of one as it was read that a dead process
// of this pool has left. The context that it returns is as that of begin.
func newLease(ctx context.Context, r *repo.Repo, s repo.Session) (context.Context, *lease) {
	l := &lease{repo: r, id: s.ID, s: s, begun: make(chan struct{}), done: make(chan struct{})}
	ctx, l.stop = context.WithCancelCause(ctx)
	return ctx, l
}

// start writes the session, and keeps it alive until ctx ends. It is called once. errEnded: a session that was left is
// gone.
func (l *lease) start(ctx context.Context) error {
	defer close(l.begun)
	if l.failed = l.beat(ctx); l.failed != nil {
		close(l.done)
		return l.failed
	}
	go l.keepAlive(ctx)
	return nil
}

// waitBegun waits until the session is written: what is written under it must not be there before.
func (l *lease) waitBegun(ctx context.Context) error {
	select {
	case <-l.begun:
		return l.failed
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// keepAlive renews the session until ctx ends.
func (l *lease) keepAlive(ctx context.Context) {
	defer close(l.done)
	t := time.NewTicker(beatEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		// A store that does not answer now may answer next time; only who hears
		// that the session is gone must stop.
		if err := l.beat(ctx); errors.Is(err, errEnded) {
			l.stop(err)
			return
		}
	}
}

// beat writes the session once. errEnded if it is gone.
func (l *lease) beat(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.putSession(ctx)
}

// putSession writes the session; the caller holds mu.
func (l *lease) putSession(ctx context.Context) error {
	if err := l.endedError(); err != nil {
		return err
	}

	if l.noteToken != nil && l.s.Beat > 0 { // the first write has the token of the plan
		id := repo.NewID()
		if err := l.noteToken(id); err != nil {
			return err
		}
		l.s.Token = id
	}

	err := l.repo.PutSession(ctx, &l.s)
	if errs.Is(err, errs.Conflict) && !objstore.Temporary(err) {
		err = errEnded
		l.emu.Lock()
		l.ended = err
		l.emu.Unlock()
	}

	return err
}

// endedError is errEnded if the session is known to be gone.
func (l *lease) endedError() error {
	l.emu.Lock()
	defer l.emu.Unlock()
	return l.ended
}

// pinManifests adds manifests to what the session pins. When it returns they are pinned; the
// caller then reads the head again.
func (l *lease) pinManifests(ctx context.Context, ids ...repo.ID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.s.Pins)
	for _, id := range ids {
		if !slices.Contains(l.s.Pins, id) {
			l.s.Pins = append(l.s.Pins, id)
		}
	}

	if len(l.s.Pins) == n {
		return nil
	}

	err := l.putSession(ctx)
	if err != nil {
		l.s.Pins = l.s.Pins[:n]
	}

	return err
}

// abandon stops renewing and leaves the session where it is, for a resume, or for a
// prune to end. Idempotent.
func (l *lease) abandon() {
	l.stop(context.Canceled)
	<-l.done
}

// endSession removes the session. What was written under it and is not committed is garbage
// from then on. It works also when ctx has ended, for a while.
func (l *lease) endSession(ctx context.Context) error {
	l.abandon()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.endedError() != nil {
		return nil
	}
	return l.repo.EndSession(ctx, &l.s)
}
