package replicate

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

// pushName returns the name for a snapshot that a push takes at t.
func pushName(t time.Time) string { return "push-" + t.UTC().Format("20060102T150405.000Z") }

var pushNames = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^push-[0-9]{8}T[0-9]{6}\.[0-9]{3}Z$`)
})

// pushTime returns the time at which a push made a name, or false if the name is not a push's.
func pushTime(name string) (time.Time, bool) {
	if !pushNames().MatchString(name) {
		return time.Time{}, false
	}
	t, err := time.Parse("20060102T150405.000Z", strings.TrimPrefix(name, "push-"))
	return t, err == nil
}

// cleanSnapshots destroys the snapshots of earlier pushes of a volume. It keeps the newest point of each repository,
// because the next push there uses it as its base; for a tree, which can only use bases of its own head, it keeps the
// newest of each head. It also keeps the snapshots of unfinished pushes.
func (p *pusher) cleanSnapshots(ctx context.Context, pt engine.Point, h headState) error {
	// Find the older snapshots of pushes.
	name, err := ref.ParseName(opPush, pt.Volume)
	if err != nil {
		return err
	}

	points, err := p.e.Points(ctx, name)
	if errs.Is(err, errs.NotFound) {
		return nil // it was renamed during the push: the next one does it
	}
	if err != nil {
		return err
	}

	var old []engine.Point
	for _, x := range points {
		if x.ID != pt.ID && x.Lineage == pt.Lineage && pushNames().MatchString(x.Name) && x.Place < pt.Place {
			old = append(old, x)
		}
	}

	if len(old) == 0 {
		return nil
	}

	// Find those that are still needed. This comes after listing the snapshots: by now, a push that took one of them has
	// recorded it in its journal, or made its link.
	planned, err := plannedSnapshots(p.e.Dir())
	if err != nil {
		return errs.Wrap(opPush, pt.Ref, err)
	}

	needed, err := p.newestBases(ctx, points)
	if err != nil {
		return err
	}

	needed[pt.ID] = true
	if !pt.FS.IsImage() {
		if err := p.addHeadBases(ctx, needed); err != nil {
			return err
		}
	}

	// Destroy the others.
	for _, x := range old {
		if planned[x.Ref] || planned[string(x.ID)] || needed[x.ID] {
			continue
		}
		err = errors.Join(err, p.destroySnapshot(ctx, x.Ref))
	}

	return err
}

// newestBases returns, for each repository of the pool's remotes, the newest of the points that it has.
func (p *pusher) newestBases(ctx context.Context, points []engine.Point) (map[driver.ObjectID]bool, error) {
	out := map[driver.ObjectID]bool{}
	repos, err := repositories(p.e.Dir())
	if err != nil {
		return nil, err
	}

	for _, id := range repos {
		links, err := p.e.Links(ctx, id)
		if err != nil {
			return nil, err
		}

		linked := map[driver.ObjectID]bool{}
		for _, l := range links {
			linked[l.Object] = true
		}

		for i := len(points) - 1; i >= 0; i-- { // the newest is the last
			if linked[points[i].ID] {
				out[points[i].ID] = true
				break
			}
		}
	}

	return out, nil
}

// addHeadBases adds the objects that were last pushed to or pulled from each head of this repository.
func (p *pusher) addHeadBases(ctx context.Context, needed map[driver.ObjectID]bool) error {
	l, err := p.loadLinks(ctx)
	if err != nil {
		return err
	}

	heads, err := p.e.RemoteHeads(ctx, p.repoID)
	if err != nil {
		return err
	}

	for _, h := range heads {
		if id, err := repo.ParseID(h.Manifest); err == nil {
			for _, object := range l.object[id] {
				needed[object] = true
			}
		}
	}

	return nil
}

// repositories returns the IDs of the repositories of a pool's remotes.
func repositories(pool string) ([]string, error) {
	names, err := List(pool)
	if err != nil {
		return nil, err
	}

	var out []string
	for _, n := range names {
		r, err := Load(pool, n, Access{})
		if err != nil {
			return nil, err // without it, the needs of this remote are unknown
		}
		out = append(out, r.Mark.ID.String())
	}

	return out, nil
}

// destroySnapshot destroys a snapshot that a push took. It returns nil if the snapshot does not exist, or is being
// read: the next push destroys it then.
func (p *pusher) destroySnapshot(ctx context.Context, snapshot string) error {
	what, err := ref.ParsePatterns(opPush, snapshot)
	if err != nil {
		return err
	}

	report, err := p.e.Destroy(context.WithoutCancel(ctx), engine.DestroyRequest{What: what})
	if err == nil {
		err = errors.Join(report.Failed...)
	}
	if errs.Is(err, errs.NotFound, errs.InUse) {
		return nil
	}

	return err
}
