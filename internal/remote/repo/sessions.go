package repo

import (
	"context"
	"crypto/sha256"
	"os"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// SessionState is a session as it was read.
type SessionState struct {
	Session
	Version objstore.Version
}

// lease is what a process knows of its own session in the store.
type lease struct {
	version objstore.Version    // of the last write that is known to be there
	unsure  [][sha256.Size]byte // writes since that failed, but may have had their effect
	begun   bool                // something may have been written
}

// NewSession begins a session, which is not known to anybody until [Repo.PutSession].
// heads are the names that it may commit to.
func (r *Repo) NewSession(kind SessionKind, heads []string, w Writer) Session {
	now := r.env.utcNow()
	return Session{ID: r.env.newID(), Kind: kind, Heads: heads, Writer: w, PID: os.Getpid(), Started: now, Renewed: now}
}

func (s *Session) check() error {
	switch {
	case s.ID.IsZero():
		return damaged("the session has no ID")
	case s.Kind != Push && s.Kind != Pull && s.Kind != Repack:
		return damaged("the session is of unknown kind %q", s.Kind)
	}

	for _, name := range s.Heads {
		if err := checkName(name); err != nil {
			return err
		}
	}

	return nil
}

func decodeSession(b []byte) (Session, error) {
	var fields struct {
		Session
		Pins idList `json:"pins"`
	}
	if err := decodeJSON(b, &fields); err != nil {
		return Session{}, err
	}

	s := fields.Session
	s.Pins = fields.Pins
	if err := s.check(); err != nil {
		return Session{}, err
	}

	return s, nil
}

// PutSession writes a session: the first time it must not be there, later it must be
// as this process has left it. Each write raises Beat. Conflict: somebody has ended
// it, or written it; nothing may be committed under it any more. After a temporary
// error it can be called again, whether or not the write had its effect.
//
// One call at a time for one session, through the same variable: it keeps the state
// of the lease in it. Durable on return.
func (r *Repo) PutSession(ctx context.Context, s *Session) error {
	return errs.Wrap("renew session", s.ID.String(), r.putSession(ctx, s))
}

func (r *Repo) putSession(ctx context.Context, s *Session) error {
	if err := s.check(); err != nil {
		return asInvalid(err)
	}

	if !s.lease.begun {
		// A process that stays for long learns here of rotations.
		if err := r.refreshBeforeSession(ctx); err != nil {
			return err
		}
	}

	s.Beat++
	s.Renewed = r.env.utcNow()
	key := sessionPrefix + s.ID.String()
	content, err := encodeJSON(s)
	if err != nil {
		return err
	}

	object, err := r.seal(typeSession, key, content, maxSessionBytes)
	if err != nil {
		return err
	}

	version, err := r.store.Put(ctx, key, object, s.leaseCondition())
	if errs.Is(err, errs.Conflict) && len(s.lease.unsure) > 0 {
		// An earlier write of ours may have had its effect although it failed.
		if err := r.adoptUnsureWrite(ctx, key, s); err != nil {
			return err
		}
		version, err = r.store.Put(ctx, key, object, s.leaseCondition())
	}

	s.lease.begun = true
	if err != nil {
		if !errs.Is(err, errs.Conflict) && !errs.Is(err, errs.NotFound) {
			s.lease.unsure = append(s.lease.unsure, sha256.Sum256(object))
		}
		return goneIsConflict(err)
	}

	s.lease.version, s.lease.unsure = version, nil
	return nil
}

func (s *Session) leaseCondition() objstore.Condition {
	if s.lease.version == "" {
		return objstore.IfAbsent
	}
	return objstore.IfVersion(s.lease.version)
}

// adoptUnsureWrite takes over the version of what is in the store, if that is what we wrote.
func (r *Repo) adoptUnsureWrite(ctx context.Context, key string, s *Session) error {
	object, info, err := r.store.Get(ctx, key, 0, -1)
	if err != nil {
		return goneIsConflict(err)
	}
	if !slices.Contains(s.lease.unsure, sha256.Sum256(object)) {
		return errs.New(errs.Conflict, "", "", "another process has changed it")
	}
	s.lease.version = info.Version
	return nil
}

// refreshBeforeSession reads config again, unless that was just done.
func (r *Repo) refreshBeforeSession(ctx context.Context) error {
	r.mu.Lock()
	asked := r.asked
	r.asked = false
	r.mu.Unlock()
	if asked {
		return nil
	}

	if err := r.Refresh(ctx); err != nil {
		return err
	}

	r.mu.Lock()
	r.asked = false
	r.mu.Unlock()
	return nil
}

// EndSession removes a session of this process. Absent is success. Durable on return.
func (r *Repo) EndSession(ctx context.Context, s *Session) error {
	return errs.Wrap("end session", s.ID.String(), r.store.Delete(ctx, sessionPrefix+s.ID.String()))
}

// Session reads one session. NotFound: it has ended, or was ended. Whose it is, and
// nobody else, may go on renewing what is returned.
func (r *Repo) Session(ctx context.Context, id ID) (SessionState, error) {
	key := sessionPrefix + id.String()
	content, version, err := r.getContent(ctx, typeSession, key, maxSessionBytes)
	if err != nil {
		return SessionState{}, errs.Wrap("read session", id.String(), err)
	}

	s, err := decodeSession(content)
	if err == nil && s.ID != id {
		err = damaged("the object contains session %s", s.ID)
	}
	if err != nil {
		return SessionState{}, errs.Wrap("read session", id.String(), err)
	}

	s.lease.version = version
	return SessionState{Session: s, Version: version}, nil
}

// Sessions lists all sessions. One that ends meanwhile may be missing.
func (r *Repo) Sessions(ctx context.Context) ([]SessionState, error) {
	var all []SessionState
	for s, err := range readEach(ctx, r, sessionPrefix, func(ctx context.Context, id ID) (SessionState, error) {
		s, err := r.Session(ctx, id)
		if errs.Is(err, errs.NotFound) {
			return SessionState{}, nil
		}
		return s, err
	}) {
		if err != nil {
			return nil, err
		}
		if !s.Session.ID.IsZero() {
			all = append(all, s)
		}
	}

	return all, nil
}

// DropSession removes the session of somebody else. The caller has seen to it that
// they cannot commit any more. Absent is success. Durable on return.
func (r *Repo) DropSession(ctx context.Context, s SessionState) error {
	return errs.Wrap("drop session", s.Session.ID.String(), r.store.Delete(ctx, sessionPrefix+s.Session.ID.String()))
}

// Seen is what a prune leaves for the next: a session whose Beat is then the same has
// not been renewed between the two.
type Seen struct {
	WriteID  ID            `json:"write"` // of this write
	Sessions []SeenSession `json:"sessions"`
}

// maxSeen is how many sessions a prune notes: what it takes must not become too large. Those left out come next.
const maxSeen = 20000

// SeenSession is a session as a prune saw it.
type SeenSession struct {
	ID   ID        `json:"id"`
	Beat uint64    `json:"beat"`
	At   time.Time `json:"at"` // when it was first seen with this Beat, by the clock of that prune, for people
}

// Seen reads what the last prune has left: nothing, and "", if there was none.
func (r *Repo) Seen(ctx context.Context) (Seen, objstore.Version, error) {
	const op = "read the record of sessions in"
	content, version, err := r.getContent(ctx, typeSeen, seenKey, maxSeenBytes)
	if errs.Is(err, errs.NotFound) {
		return Seen{}, "", nil
	}
	if err != nil {
		return Seen{}, "", errs.Wrap(op, r.store.String(), err)
	}
	s, err := decodeSeen(content)
	return s, version, errs.Wrap(op, r.store.String(), err)
}

func decodeSeen(b []byte) (Seen, error) {
	var fields struct {
		Seen
		Sessions seenList `json:"sessions"`
	}
	if err := decodeJSON(b, &fields); err != nil {
		return Seen{}, err
	}
	s := fields.Seen
	s.Sessions = fields.Sessions
	return s, nil
}

// PutSeen writes it over the state prev, "" for none. Conflict: another prune was
// faster.
func (r *Repo) PutSeen(ctx context.Context, s Seen, prev objstore.Version) (objstore.Version, error) {
	const op = "write the record of sessions in"
	s.WriteID = r.env.newID()
	s.Sessions = s.Sessions[:min(len(s.Sessions), maxSeen)]
	content, err := encodeJSON(s)
	if err != nil {
		return "", errs.Wrap(op, r.store.String(), err)
	}

	object, err := r.seal(typeSeen, seenKey, content, maxSeenBytes)
	if err != nil {
		return "", errs.Wrap(op, r.store.String(), err)
	}

	condition := objstore.IfAbsent
	if prev != "" {
		condition = objstore.IfVersion(prev)
	}

	version, err := r.store.Put(ctx, seenKey, object, condition)
	return version, errs.Wrap(op, r.store.String(), goneIsConflict(err))
}
