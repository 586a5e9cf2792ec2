package replicate

import (
	"cmp"
	"context"
	"iter"
	"slices"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/remote/repo"
)

const opList = "remote ls"

// Listed is a volume or golden on a remote.
type Listed struct {
	api.RemoteVolume
	Count       int       `json:"-"` // number of its points
	NewestPoint api.Point `json:"-"` // its newest point
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
func (l *Listing) Points(ctx context.Context, v *Listed) iter.Seq2[api.Point, error] {
	return func(yield func(api.Point, error) bool) {
		var bad []*pageFault
		h, ok := l.heads[v.Name]
		if !ok {
			return
		}

		for p, err := range allPoints(ctx, l.repo, h, &bad) {
			if err != nil {
				yield(api.Point{}, err)
				return
			}
			if !yield(pointOf(v.Name, p), nil) {
				return
			}
		}

		for _, f := range bad {
			v.IncompleteCount += f.Page.Count
			v.Problem, v.Object = cmp.Or(v.Problem, f.Error()), cmp.Or(v.Object, f.Page.Object())
		}
	}
}

func pointOf(volume string, p repo.Point) api.Point {
	return api.Point{
		Ref: volume + "@" + p.Name, Name: p.Name, CreatedAt: p.CreatedAt, Consistency: driver.Consistency(p.Consistency),
		Content: string(p.Content), SizeBytes: p.SizeBytes, LogicalBytes: p.Logical, StoredBytes: p.Added,
		Origin: p.OriginRef, Keep: p.Keep,
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
		out = append(out, Listed{RemoteVolume: api.RemoteVolume{Kind: api.KindVolume, Points: []api.Point{},
			Operations: []api.Operation{}, Problem: d.Reason, Object: d.Object}})
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
		out = append(out, Listed{RemoteVolume: api.RemoteVolume{Name: name, Kind: api.KindVolume, Writer: w[0].Host,
			WriterPool: w[0].Pool, Points: []api.Point{}, Operations: w}})
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
) (work map[string][]api.Operation, pins map[repo.ID][]api.Operation, err error) {
	sessions, _, err := readSessions(ctx, r)
	if err != nil {
		return nil, nil, err
	}

	work, pins = map[string][]api.Operation{}, map[repo.ID][]api.Operation{}
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
	ctx context.Context, r *repo.Repo, h repo.Head, work []api.Operation, pins map[repo.ID][]api.Operation,
) (Listed, error) {
	l := Listed{RemoteVolume: api.RemoteVolume{
		Name: h.Name, Kind: api.KindVolume, Writer: h.Writer.Host, WriterPool: h.Writer.Pool, Epoch: h.Epoch,
		Points: []api.Point{}, Operations: append([]api.Operation{}, work...),
	}}
	if h.Golden {
		l.Kind = api.KindGolden
	}

	newest, _, err := newestOf(ctx, r, h)
	if err != nil {
		return l, damagedPageError(opList, h.Name, err)
	}

	l.Newest, l.FS, l.SizeBytes, l.LogicalBytes = newest.Name, driver.FS(newest.FS), newest.SizeBytes, newest.Logical
	l.Count, l.NewestPoint = h.Count(), pointOf(h.Name, newest)
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
	ctx context.Context, r *repo.Repo, out []Listed, heads map[string]repo.Head, pins map[repo.ID][]api.Operation,
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
func (l *Listed) addSessions(all []api.Operation) {
	for _, w := range all {
		if !slices.Contains(l.Operations, w) {
			l.Operations = append(l.Operations, w)
		}
	}
}

func workOf(s repo.Session) api.Operation {
	return api.Operation{Op: string(s.Kind), Host: s.Writer.Host, Pool: s.Writer.Pool, PID: s.PID, StartedAt: s.Started,
		RenewedAt: s.Renewed}
}
