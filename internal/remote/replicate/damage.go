package replicate

import (
	"cmp"
	"context"
	"hash/fnv"
	"slices"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

// DamagedHead is a head that cannot be read. Its points are unknown, but their manifests may be intact: see [Repair].
type DamagedHead struct {
	// Object is its key on the remote: "heads/...", or "points/..." if only a part of it cannot be read.
	Object string `json:"object"`
	Volume string `json:"volume,omitempty"` // its name, if this pool or an object on the remote knows it
	Reason string `json:"reason"`           // why it cannot be read

	id  repo.ID
	err error
}

// String names the volume, or the object if its name is not known.
func (d DamagedHead) String() string { return cmp.Or(d.Volume, d.Object) }

// headset holds all heads of a remote.
type headset struct {
	good []repo.HeadState // by name
	bad  []DamagedHead    // by ID
}

// readHeads reads all heads. Heads that cannot be read do not hide the others.
func readHeads(ctx context.Context, r *repo.Repo) (headset, error) {
	var ids []repo.ID
	for id, err := range r.HeadIDs(ctx) {
		if err != nil {
			return headset{}, err
		}
		ids = append(ids, id)
	}

	// Read the heads, several at once, and keep the damaged ones apart.
	var mu sync.Mutex
	var out headset
	err := eachOf(ctx, ids, func(ctx context.Context, id repo.ID) error {
		h, err := r.HeadByID(ctx, id)
		mu.Lock()
		defer mu.Unlock()
		switch {
		case isUnreadable(err):
			out.bad = append(out.bad, DamagedHead{Object: "heads/" + id.String(), Reason: err.Error(), id: id, err: err})
		case err != nil:
			return err
		default:
			out.good = append(out.good, h)
		}

		return nil
	})

	slices.SortFunc(out.good, func(a, b repo.HeadState) int { return cmp.Compare(a.Head.Name, b.Head.Name) })
	slices.SortFunc(out.bad, func(a, b DamagedHead) int { return slices.Compare(a.id[:], b.id[:]) })
	return out, err
}

// same reports whether no head was written between two readings.
func (s headset) same(o headset) bool {
	return slices.EqualFunc(s.good, o.good, func(a, b repo.HeadState) bool {
		return a.Head.Name == b.Head.Name && a.Head.WriteID == b.Head.WriteID
	}) && slices.EqualFunc(s.bad, o.bad, func(a, b DamagedHead) bool { return a.id == b.id })
}

// isBad reports whether the head of a volume is one of those that cannot be read.
func (s headset) isBad(r *repo.Repo, volume string) bool {
	if len(s.bad) == 0 {
		return false
	}
	id, err := r.HeadID(volume)
	return err == nil && slices.ContainsFunc(s.bad, func(d DamagedHead) bool { return d.id == id })
}

// damagedVolumeError returns the error of a command that needs a head that cannot be read.
func damagedVolumeError(op, name string, err error) error {
	return errs.New(errs.KindOf(err), op, name, "cannot read its list of points on the remote: %w", err).
		WithHint("rebuild the list from the points with %s", errs.Run("remote repair", "REMOTE"))
}

// readSessions reads all sessions. Those that cannot be read are in bad: only their IDs are known, and a Beat that
// stays the same until they are written again.
func readSessions(ctx context.Context, r *repo.Repo) (good, bad []repo.SessionState, err error) {
	var ids []repo.ID
	for id, err := range r.SessionIDs(ctx) {
		if err != nil {
			return nil, nil, err
		}
		ids = append(ids, id)
	}

	// Read the sessions, several at once.
	var mu sync.Mutex
	err = eachOf(ctx, ids, func(ctx context.Context, id repo.ID) error {
		s, err := r.Session(ctx, id)
		unread := errs.Is(err, errs.Damaged, errs.TooNew)
		if unread {
			s, err = r.RawSession(ctx, id)
		}
		if err != nil {
			if errs.Is(err, errs.NotFound) {
				return nil // it has just ended
			}
			return err
		}

		mu.Lock()
		defer mu.Unlock()
		if unread {
			s.Session.Beat = stateNumber(string(s.Version))
			bad = append(bad, s)
		} else {
			good = append(good, s)
		}

		return nil
	})

	for _, all := range [][]repo.SessionState{good, bad} {
		slices.SortFunc(all, func(a, b repo.SessionState) int { return slices.Compare(a.Session.ID[:], b.Session.ID[:]) })
	}

	return good, bad, err
}

// stateNumber returns a substitute for the beat of a session that cannot be read: it changes only when the session is
// written.
func stateNumber(version string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(version))
	return h.Sum64()
}

// KnowNames sets the function that lists the names of volumes and goldens that may be on the remote. It is called only
// to find the name of a damaged object.
func (r *Remote) KnowNames(names func(context.Context) ([]string, error)) { r.names = names }

// NamesOf returns the names under which volumes and goldens of this pool may be on a remote: their own names, and those
// under which the pool remembers pushing or pulling them.
func NamesOf(ctx context.Context, e *engine.Engine, r *Remote) ([]string, error) {
	var out []string

	// Names that the pool remembers.
	heads, err := e.Transfer().RemoteHeads(ctx, r.Mark.ID.String())
	if err != nil {
		return nil, err
	}

	for _, h := range heads {
		out = append(out, h.Name)
	}

	// Names of volumes and goldens in the pool.
	volumes, err := e.Volumes(ctx, engine.VolumesRequest{})
	if err != nil {
		return nil, err
	}

	for _, v := range volumes {
		out = append(out, v.Name)
	}

	goldens, err := e.Goldens(ctx)
	if err != nil {
		return nil, err
	}

	for _, g := range goldens {
		out = append(out, g.Name)
	}

	slices.Sort(out)
	return slices.Compact(out), nil
}

// nameDamaged calls set with the names of heads by the keys of their objects. Names are only a help for people: without
// them, objects are named by their keys.
func (r *Remote) nameDamaged(ctx context.Context, rp *repo.Repo, set func(byObject map[string]string)) {
	if r.names == nil {
		return
	}

	names, err := r.names(ctx)
	if err != nil {
		return
	}

	out := map[string]string{}
	for _, n := range names {
		if id, err := rp.HeadID(n); err == nil {
			out["heads/"+id.String()] = n
		}
	}

	set(out)
}
