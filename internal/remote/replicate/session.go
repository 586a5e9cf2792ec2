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

// beatEvery is the interval at which a session is renewed. It can be long, because a
// prune waits for minutes, and should be: a bucket allows about one write per object
// and second.
const beatEvery = 20 * time.Second

// errEnded stops an operation whose session is gone: a prune has ended it, or someone has deleted its object.
var errEnded = errs.New(errs.Conflict, "", "", "the session of this operation is no longer on the remote")

// lease is a session that this process keeps alive. While its object exists, objects
// that were written under it are not garbage, and the manifests it pins stay. Methods
// may be called concurrently.
//
// The rule of pins: pin first, then read the head again. A push may build only on
// manifests that the head still lists.
type lease struct {
	repo *repo.Repo
	id   repo.ID
	stop context.CancelCauseFunc
	done chan struct{} // closed when the background work has ended

	begun  chan struct{} // closed when the session was written, or could not be
	failed error         // why it could not; set before begun is closed

	mu        sync.Mutex // one write of the object at a time
	s         repo.Session
	noteToken func(repo.ID) error // makes the token of a write durable, before it; nil: writes have none

	emu   sync.Mutex
	ended error
}

// beginSession writes a new session that pins manifests, and keeps it alive until endSession,
// abandon, or the end of ctx. The context it returns ends, with errEnded as its cause, when the
// session is gone: nothing that was written under it may be committed then.
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

// newLease returns a lease of a session that start will write: a new session, or one that a dead process of this pool
// has left, as it was read. The context it returns is like that of beginSession.
func newLease(ctx context.Context, r *repo.Repo, s repo.Session) (context.Context, *lease) {
	l := &lease{repo: r, id: s.ID, s: s, begun: make(chan struct{}), done: make(chan struct{})}
	ctx, l.stop = context.WithCancelCause(ctx)
	return ctx, l
}

// start writes the session, and keeps it alive until ctx ends. It must be called once. errEnded: the session that a
// dead process left is gone.
func (l *lease) start(ctx context.Context) error {
	defer close(l.begun)
	if l.failed = l.beat(ctx); l.failed != nil {
		close(l.done)
		return l.failed
	}
	go l.keepAlive(ctx)
	return nil
}

// waitBegun waits until the session is written. Nothing may be written under it before that.
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
		// A store that does not answer now may answer next time. Stop only if
		// the session is known to be gone.
		if err := l.beat(ctx); errors.Is(err, errEnded) {
			l.stop(err)
			return
		}
	}
}

// beat renews the session once. errEnded: it is gone.
func (l *lease) beat(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.putSession(ctx)
}

// putSession writes the session. The caller holds mu.
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

	return l.noteEnded(l.repo.PutSession(ctx, &l.s))
}

// checkExists returns nil if the session exists, and errEnded if it is gone. A push calls it after it has read the head
// that it is about to replace: see [Prune].
func (l *lease) checkExists(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.endedError(); err != nil {
		return err
	}
	return l.noteEnded(l.repo.CheckSession(ctx, &l.s))
}

// noteEnded turns the error of a session that is gone into errEnded, and remembers it. It returns other errors
// unchanged.
func (l *lease) noteEnded(err error) error {
	if !errs.Is(err, errs.Conflict) || objstore.Temporary(err) {
		return err
	}
	l.emu.Lock()
	defer l.emu.Unlock()
	l.ended = errEnded
	return errEnded
}

// endedError returns errEnded if the session is known to be gone.
func (l *lease) endedError() error {
	l.emu.Lock()
	defer l.emu.Unlock()
	return l.ended
}

// pinManifests adds manifests to those that the session pins. They are pinned when it returns; the
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

// abandon stops renewing the session, and leaves it for a push that resumes it, or for a
// prune that ends it. It may be repeated.
func (l *lease) abandon() {
	l.stop(context.Canceled)
	<-l.done
}

// endSession removes the session. Objects that were written under it and not committed are
// garbage from then on. Even after the end of ctx it tries for up to 30 seconds.
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
