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

// SessionState is a session with its version in the store.
type SessionState struct {
	Session
	Version objstore.Version
}

// sessionWrites is what a process knows about its own writes of a session.
type sessionWrites struct {
	version objstore.Version    // of the last write that is known to have succeeded
	unsure  [][sha256.Size]byte // hashes of later writes that failed, but may have taken effect
	begun   bool                // something may have been written
}

// NewSession returns a new session, which is invisible to others until [Repo.PutSession].
// heads are the names it may commit to.
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

// PutSession writes a session. The first time the session must not exist; later it must
// be as this process left it. Each write increments Beat. Conflict: another process has
// ended or written the session, and nothing may be committed under it any more. After a
// temporary error PutSession can be called again, whether or not the write took effect.
//
// Only one call at a time may run for a session, and always with the same variable,
// which holds the state of earlier writes. Durable on return.
func (r *Repo) PutSession(ctx context.Context, s *Session) error {
	return errs.Wrap("renew session", s.ID.String(), r.putSession(ctx, s))
}

// putSession is PutSession, without the operation in errors.
func (r *Repo) putSession(ctx context.Context, s *Session) error {
	if err := s.check(); err != nil {
		return asInvalid(err)
	}

	if !s.writes.begun {
		// Read config, so that long-running processes notice that keys were rotated.
		if err := r.refreshBeforeSession(ctx); err != nil {
			return err
		}
	}

	// Encode the next beat.
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

	// Write it over the state that this process has left.
	version, err := r.store.Put(ctx, key, object, s.writeCondition())
	if errs.Is(err, errs.Conflict) && len(s.writes.unsure) > 0 {
		// An earlier write may have taken effect although it failed.
		if err := r.adoptUnsureWrite(ctx, key, s); err != nil {
			return err
		}
		version, err = r.store.Put(ctx, key, object, s.writeCondition())
	}

	s.writes.begun = true
	if err != nil {
		if !errs.Is(err, errs.Conflict, errs.NotFound) {
			s.writes.unsure = append(s.writes.unsure, sha256.Sum256(object))
		}
		return goneIsConflict(err)
	}

	s.writes.version, s.writes.unsure = version, nil
	return nil
}

// CheckSession returns nil if a session of this process exists as the process left it, and Conflict if another process
// or the operator of the store has removed or changed it. It may run at the same time as no other call for the session.
func (r *Repo) CheckSession(ctx context.Context, s *Session) error {
	key := sessionPrefix + s.ID.String()
	info, err := r.store.Stat(ctx, key)
	switch {
	case err != nil:
		err = goneIsConflict(err)
	case info.Version != s.writes.version:
		err = r.adoptUnsureWrite(ctx, key, s) // a write that failed may have taken effect
	}
	return errs.Wrap("check session", s.ID.String(), err)
}

func (s *Session) writeCondition() objstore.Condition {
	if s.writes.version == "" {
		return objstore.IfAbsent
	}
	return objstore.IfVersion(s.writes.version)
}

// adoptUnsureWrite continues from the state in the store, if this process wrote it. Conflict otherwise.
func (r *Repo) adoptUnsureWrite(ctx context.Context, key string, s *Session) error {
	object, info, err := r.store.Get(ctx, key, 0, -1)
	if err != nil {
		return goneIsConflict(err)
	}
	if !slices.Contains(s.writes.unsure, sha256.Sum256(object)) {
		return errs.New(errs.Conflict, "", "", "another process has changed it")
	}
	s.writes.version = info.Version
	return nil
}

// refreshBeforeSession reads config again, unless it was read since the last session began.
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

// Session reads one session. NotFound: it has ended, or was ended by a prune. Only the
// owner of the session may continue to renew the result.
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

	s.writes.version = version
	return SessionState{Session: s, Version: version}, nil
}

// Sessions returns all sessions. One that ends while it runs may be missing.
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

// DropSession removes the session of another process. The caller must have made sure
// that the process cannot commit any more. Absent is success. Durable on return.
func (r *Repo) DropSession(ctx context.Context, s SessionState) error {
	return errs.Wrap("drop session", s.Session.ID.String(), r.store.Delete(ctx, sessionPrefix+s.Session.ID.String()))
}

// Seen is the record that a prune leaves for the next one: a session with the same Beat
// at the next prune was not renewed in between.
type Seen struct {
	WriteID  ID            `json:"write"` // of this write
	Sessions []SeenSession `json:"sessions"`
}

// maxSeen is the number of sessions that a prune records, which bounds the size of the record. Later prunes record the
// others.
const maxSeen = 20000

// SeenSession is a session as a prune saw it.
type SeenSession struct {
	ID   ID        `json:"id"`
	Beat uint64    `json:"beat"`
	At   time.Time `json:"at"` // when a prune first saw this Beat, by its own clock, informational
}

// Seen reads the record of the last prune: empty, with version "", if there was none.
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

// PutSeen replaces the state prev of the record, "" for none. Conflict: another prune
// was faster.
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
