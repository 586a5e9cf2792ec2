package replicate

import (
	"cmp"
	"context"
	"slices"
	"time"

	"pando/internal/errs"
	"pando/internal/repo"
)

const opList = "remote ls"

// Listed is a volume or golden in a remote.
type Listed struct {
	Name         string        `json:"name"`
	Kind         string        `json:"kind"` // volume, golden
	FS           string        `json:"fs"`
	SizeBytes    int64         `json:"size_bytes"`    // of the newest point
	LogicalBytes int64         `json:"logical_bytes"` // of content in the newest point, zeros left out
	StoredBytes  int64         `json:"stored_bytes"`  // that were stored for its points, compressed
	Writer       string        `json:"writer"`        // host that may push it
	WriterPool   string        `json:"writer_pool"`   // and its pool
	Epoch        uint64        `json:"epoch"`
	Newest       string        `json:"newest"`   // name of the point that is its newest state; "" if there is none
	Points       []ListedPoint `json:"points"`   // in the order in which they were pushed
	Sessions     []ListedWork  `json:"sessions"` // who is at work on it now, or has died at it

	// Problem is why nothing else is known of it: the list of its points cannot be read. Object is that list. Name is
	// "" then, if nothing tells it. With Incomplete it is only a part of the list, with so many points, that cannot be
	// read, and Points are the others.
	Problem string `json:"problem,omitempty"`
	Object  string `json:"object,omitempty"`

	Incomplete int `json:"incomplete,omitempty"`
}

// ListedPoint is a point of a volume in a remote: a snapshot or a generation.
type ListedPoint struct {
	Name         string    `json:"name"`
	CreatedAt    time.Time `json:"created_at"`
	Consistency  string    `json:"consistency,omitempty"`
	Content      string    `json:"content"` // block, stream, tree
	SizeBytes    int64     `json:"size_bytes"`
	LogicalBytes int64     `json:"logical_bytes"`
	StoredBytes  int64     `json:"stored_bytes"`     // that were stored for it, besides what was there
	Origin       string    `json:"origin,omitempty"` // what it was cloned from
	Keep         bool      `json:"keep,omitempty"`   // never pruned
}

// ListedWork is a session that writes or reads a volume. Times are those of the
// worker's own clock.
type ListedWork struct {
	Kind      string    `json:"kind"` // push, pull
	Host      string    `json:"host"`
	Pool      string    `json:"pool"`
	PID       int       `json:"pid"`
	StartedAt time.Time `json:"started_at"`
	RenewedAt time.Time `json:"renewed_at"`
}

// Volumes lists what a remote has, by name, also what cannot be read. Its cost grows with the number of
// volumes, not with that of their points.
func Volumes(ctx context.Context, r *Remote) ([]Listed, error) {
	rp, err := r.Open(ctx)
	if err != nil {
		return nil, err
	}
	defer rp.Close()
	out, err := volumes(ctx, rp)
	if slices.ContainsFunc(out, func(l Listed) bool { return l.Problem != "" }) {
		r.nameDamaged(ctx, rp, func(names map[string]string) {
			for i := range out {
				out[i].Name = cmp.Or(out[i].Name, names[out[i].Object])
			}
		})
	}
	return out, err
}

func volumes(ctx context.Context, r *repo.Repo) ([]Listed, error) {
	sessions, _, err := readSessions(ctx, r) // of one that cannot be read nothing is to be shown
	if err != nil {
		return nil, errs.Wrap(opList, "", err)
	}
	work := map[string][]ListedWork{}
	pins := map[repo.ID][]ListedWork{}
	for _, state := range sessions {
		s := state.Session
		w := workOf(s)
		if s.Kind == repo.Pull { // it commits nothing: it is at what it pins
			for _, id := range s.Pins {
				pins[id] = append(pins[id], w)
			}
			continue
		}
		for _, h := range s.Heads {
			work[h] = append(work[h], w)
		}
	}
	out := []Listed{}
	heads, err := readHeads(ctx, r)
	if err != nil {
		return nil, errs.Wrap(opList, "", err)
	}
	for _, d := range heads.bad {
		out = append(out, Listed{Kind: "volume", Points: []ListedPoint{}, Sessions: []ListedWork{}, Problem: d.Reason, Object: d.Object})
	}
	for _, state := range heads.good {
		h := state.Head
		if h.Gone || h.Count() == 0 {
			continue
		}
		l, err := listed(ctx, r, h, work[h.Name], pins)
		if err != nil {
			return nil, err
		}
		out = append(out, l)
		delete(work, h.Name)
	}
	for name, w := range work { // their first push is under way
		out = append(out, Listed{Name: name, Kind: "volume", Writer: w[0].Host, WriterPool: w[0].Pool, Points: []ListedPoint{}, Sessions: w})
	}
	slices.SortFunc(out, func(a, b Listed) int { return cmp.Compare(a.Name, b.Name) })
	return out, nil
}

func listed(ctx context.Context, r *repo.Repo, h repo.Head, work []ListedWork, pins map[repo.ID][]ListedWork) (Listed, error) {
	l := Listed{
		Name: h.Name, Kind: "volume", Writer: h.Writer.Host, WriterPool: h.Writer.Pool, Epoch: h.Epoch,
		Points: []ListedPoint{}, Sessions: append([]ListedWork{}, work...),
	}
	if h.Golden {
		l.Kind = "golden"
	}
	newest, _, err := newestOf(ctx, r, h)
	if err != nil {
		return l, damagedPage(opList, h.Name, err)
	}
	l.Newest, l.FS, l.SizeBytes, l.LogicalBytes = newest.Name, newest.FS, newest.SizeBytes, newest.Logical
	var bad []*pageFault
	for p, err := range allPoints(ctx, r, h, &bad) {
		if err != nil {
			return l, err
		}
		l.StoredBytes += p.Added
		l.Points = append(l.Points, ListedPoint{
			Name: p.Name, CreatedAt: p.CreatedAt, Consistency: p.Consistency, Content: string(p.Content), SizeBytes: p.SizeBytes,
			LogicalBytes: p.Logical, StoredBytes: p.Added, Origin: p.OriginRef, Keep: p.Keep,
		})
		for _, w := range pins[p.Manifest] {
			if !slices.Contains(l.Sessions, w) {
				l.Sessions = append(l.Sessions, w)
			}
		}
	}
	for _, f := range bad {
		l.Incomplete += f.Page.Count
		l.Problem, l.Object = cmp.Or(l.Problem, f.Error()), cmp.Or(l.Object, f.Page.Object())
	}
	return l, nil
}

func workOf(s repo.Session) ListedWork {
	return ListedWork{Kind: string(s.Kind), Host: s.Writer.Host, Pool: s.Writer.Pool, PID: s.PID, StartedAt: s.Started, RenewedAt: s.Renewed}
}
