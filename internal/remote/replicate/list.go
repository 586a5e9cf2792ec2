package replicate

import (
	"cmp"
	"context"
	"iter"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

const opList = "remote ls"

// Listed describes a volume or golden on a remote.
type Listed struct {
	Name         string        `json:"name"`
	Kind         engine.Kind   `json:"kind"` // KindVolume, KindGolden
	FS           driver.FS     `json:"fs"`
	SizeBytes    int64         `json:"size_bytes"`    // size of the newest point
	LogicalBytes int64         `json:"logical_bytes"` // bytes of data in the newest point, without zeros
	StoredBytes  int64         `json:"stored_bytes"`  // bytes uploaded for its points, compressed
	Writer       string        `json:"writer"`        // host that may push it
	WriterPool   string        `json:"writer_pool"`   // pool that may push it
	Epoch        uint64        `json:"epoch"`
	Newest       string        `json:"newest"`   // name of the newest point; "" if there is none
	Points       []ListedPoint `json:"points"`   // points in the order in which they were pushed: see [Listing.Points]
	Sessions     []ListedWork  `json:"sessions"` // pushes and pulls at work on it, or killed while at work

	// Problem is why the list of its points, Object, cannot be read. Nothing else is known then, and Name may be "".
	// With Incomplete, only a part of the list with that many points cannot be read, and Points has the others.
	Problem string `json:"problem,omitempty"`
	Object  string `json:"object,omitempty"`

	Incomplete int `json:"incomplete,omitempty"`

	Count       int         `json:"-"` // number of its points
	NewestPoint ListedPoint `json:"-"`
}

// ListedPoint describes a point of a volume on a remote: a snapshot or a generation.
type ListedPoint struct {
	Name         string             `json:"name"`
	CreatedAt    time.Time          `json:"created_at"`
	Consistency  driver.Consistency `json:"consistency,omitempty"`
	Content      repo.Content       `json:"content"`
	SizeBytes    int64              `json:"size_bytes"`
	LogicalBytes int64              `json:"logical_bytes"`
	StoredBytes  int64              `json:"stored_bytes"`     // uploaded for it, without what was already there
	Origin       string             `json:"origin,omitempty"` // what it was cloned from
	Keep         bool               `json:"keep,omitempty"`   // never pruned
}

// ListedWork describes a session that writes or reads a volume. Times are from the clock of the session's host.
type ListedWork struct {
	Kind      repo.SessionKind `json:"kind"`
	Host      string           `json:"host"`
	Pool      string           `json:"pool"`
	PID       int              `json:"pid"`
	StartedAt time.Time        `json:"started_at"`
	RenewedAt time.Time        `json:"renewed_at"`
}

// Listing lists the volumes of a remote.
type Listing struct {
	Volumes []Listed // by name, unreadable ones included; without their points

	repo  *repo.Repo
	heads map[string]repo.Head
}

// Volumes lists the volumes of a remote. Its cost grows with the number of volumes, not with the number of points,
// which the caller can read afterwards from the listing. The caller closes the listing.
func Volumes(ctx context.Context, r *Remote) (*Listing, error) {
	rp, err := r.Open(ctx)
	if err != nil {
		return nil, err
	}

	l, err := listVolumes(ctx, rp)
	if err != nil {
		rp.Close()
		return nil, err
	}

	if slices.ContainsFunc(l.Volumes, func(v Listed) bool { return v.Problem != "" }) {
		r.nameDamaged(ctx, rp, func(names map[string]string) {
			for i := range l.Volumes {
				l.Volumes[i].Name = cmp.Or(l.Volumes[i].Name, names[l.Volumes[i].Object])
			}
		})
	}

	return l, nil
}

// Close closes the listing. It may be called again.
func (l *Listing) Close() { l.repo.Close() }

// Points yields the points of a listed volume in the order in which they were pushed. It skips pages that cannot be
// read, and records them in v at the end. An error ends the sequence.
func (l *Listing) Points(ctx context.Context, v *Listed) iter.Seq2[ListedPoint, error] {
	return func(yield func(ListedPoint, error) bool) {
		var bad []*pageFault
		h, ok := l.heads[v.Name]
		if !ok {
			return
		}

		for p, err := range allPoints(ctx, l.repo, h, &bad) {
			if err != nil {
				yield(ListedPoint{}, err)
				return
			}
			if !yield(listedPoint(p), nil) {
				return
			}
		}

		for _, f := range bad {
			v.Incomplete += f.Page.Count
			v.Problem, v.Object = cmp.Or(v.Problem, f.Error()), cmp.Or(v.Object, f.Page.Object())
		}
	}
}

func listedPoint(p repo.Point) ListedPoint {
	return ListedPoint{
		Name: p.Name, CreatedAt: p.CreatedAt, Consistency: driver.Consistency(p.Consistency), Content: p.Content,
		SizeBytes:    p.SizeBytes,
		LogicalBytes: p.Logical, StoredBytes: p.Added, Origin: p.OriginRef, Keep: p.Keep,
	}
}

// listVolumes is Volumes in a repository that is open. The names of damaged heads are missing.
func listVolumes(ctx context.Context, r *repo.Repo) (*Listing, error) {
	work, pins, err := listSessions(ctx, r)
	if err != nil {
		return nil, errs.Wrap(opList, "", err)
	}

	// List the heads, the damaged ones first.
	out := []Listed{}
	all := map[string]repo.Head{}
	heads, err := readHeads(ctx, r)
	if err != nil {
		return nil, errs.Wrap(opList, "", err)
	}

	for _, d := range heads.bad {
		out = append(out, Listed{Kind: engine.KindVolume, Points: []ListedPoint{}, Sessions: []ListedWork{},
			Problem: d.Reason,
			Object:  d.Object})
	}

	for _, state := range heads.good {
		h := state.Head
		if h.Gone || h.Count() == 0 {
			continue
		}

		l, err := listedVolume(ctx, r, h, work[h.Name], pins)
		if err != nil {
			return nil, err
		}

		for _, p := range h.Recent {
			delete(pins, p.Manifest)
		}

		out = append(out, l)
		all[h.Name] = h
		delete(work, h.Name)
	}

	// Add volumes without a head: their first push is running.
	for name, w := range work {
		out = append(out, Listed{Name: name, Kind: engine.KindVolume, Writer: w[0].Host, WriterPool: w[0].Pool,
			Points: []ListedPoint{}, Sessions: w})
	}

	slices.SortFunc(out, func(a, b Listed) int { return cmp.Compare(a.Name, b.Name) })
	if err := addPageSessions(ctx, r, out, all, pins); err != nil {
		return nil, err
	}

	return &Listing{Volumes: out, repo: r, heads: all}, nil
}

// listSessions returns the sessions of pushes by the names of heads, and those of pulls by the manifests that they pin:
// a pull commits to no head, but its pins tell which points it reads. Damaged sessions are missing.
func listSessions(
	ctx context.Context, r *repo.Repo,
) (work map[string][]ListedWork, pins map[repo.ID][]ListedWork, err error) {
	sessions, _, err := readSessions(ctx, r)
	if err != nil {
		return nil, nil, err
	}

	work, pins = map[string][]ListedWork{}, map[repo.ID][]ListedWork{}
	for _, state := range sessions {
		s := state.Session
		w := workOf(s)
		if s.Kind == repo.Pull {
			for _, id := range s.Pins {
				pins[id] = append(pins[id], w)
			}
			continue
		}
		for _, h := range s.Heads {
			work[h] = append(work[h], w)
		}
	}

	return work, pins, nil
}

// listedVolume describes the volume of a head.
func listedVolume(
	ctx context.Context, r *repo.Repo, h repo.Head, work []ListedWork, pins map[repo.ID][]ListedWork,
) (Listed, error) {
	l := Listed{
		Name: h.Name, Kind: engine.KindVolume, Writer: h.Writer.Host, WriterPool: h.Writer.Pool, Epoch: h.Epoch,
		Points: []ListedPoint{}, Sessions: append([]ListedWork{}, work...),
	}
	if h.Golden {
		l.Kind = engine.KindGolden
	}

	newest, _, err := newestOf(ctx, r, h)
	if err != nil {
		return l, damagedPageError(opList, h.Name, err)
	}

	l.Newest, l.FS, l.SizeBytes, l.LogicalBytes = newest.Name, driver.FS(newest.FS), newest.SizeBytes, newest.Logical
	l.Count, l.NewestPoint = h.Count(), listedPoint(newest)
	for _, p := range h.Pages {
		l.StoredBytes += p.Added
	}

	for _, p := range h.Recent {
		l.StoredBytes += p.Added
		l.addSessions(pins[p.Manifest])
	}

	return l, nil
}

// addPageSessions adds the sessions that read points in pages, to the volumes that their manifests name.
func addPageSessions(
	ctx context.Context, r *repo.Repo, out []Listed, heads map[string]repo.Head, pins map[repo.ID][]ListedWork,
) error {
	for id, work := range pins {
		m, err := r.Manifest(ctx, id)
		if isUnreadable(err) {
			continue
		}
		if err != nil {
			return errs.Wrap(opList, "", err)
		}
		i := slices.IndexFunc(out, func(l Listed) bool { return l.Name == m.Volume })
		if i >= 0 && len(heads[m.Volume].Pages) > 0 {
			out[i].addSessions(work)
		}
	}

	return nil
}

// addSessions adds sessions that read a point of the volume.
func (l *Listed) addSessions(all []ListedWork) {
	for _, w := range all {
		if !slices.Contains(l.Sessions, w) {
			l.Sessions = append(l.Sessions, w)
		}
	}
}

func workOf(s repo.Session) ListedWork {
	return ListedWork{Kind: s.Kind, Host: s.Writer.Host, Pool: s.Writer.Pool, PID: s.PID, StartedAt: s.Started,
		RenewedAt: s.Renewed}
}
