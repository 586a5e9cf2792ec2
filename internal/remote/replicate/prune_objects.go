package replicate

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
)

// scene is the state of a remote's heads and sessions at one moment.
type scene struct {
	heads     []repo.HeadState
	damaged   []DamagedHead
	sessions  []repo.SessionState
	manifests []repo.ID // that heads name
}

// hasSession reports whether a session exists.
func (s scene) hasSession(id repo.ID) bool {
	return slices.ContainsFunc(s.sessions, func(x repo.SessionState) bool { return x.Session.ID == id })
}

// same reports whether no head was written between two scenes.
func (s scene) same(o scene) bool {
	return (headset{s.heads, s.damaged}).same(headset{o.heads, o.damaged})
}

// findNeeds reads the scene, and finds the objects that must stay. If one of these is gone, another host
// may have just removed it: findNeeds then tries again, as long as the heads keep changing.
func (p *pruner) findNeeds(ctx context.Context) (scene, need, error) {
	damaged := p.out.Damaged
	for range headTries {
		p.out.Damaged = damaged
		now, err := p.readScene(ctx, !p.DryRun)
		if err != nil {
			return now, need{}, err
		}

		n, err := p.needsOfScene(ctx, now)
		if err == nil || !errs.Is(err, errs.Damaged) {
			return now, n, err
		}
		p.out.Damaged = damaged

		again, lerr := p.readScene(ctx, false)
		if lerr != nil || now.same(again) {
			return now, n, cmp.Or(lerr, err)
		}
	}

	return scene{}, need{}, tooBusyError()
}

// findAllNeeds calls findNeeds, and adds the needs of damaged heads and of maps. If a map cannot be read, another host
// may have just removed it: findAllNeeds then tries again, as long as the heads keep changing. If the map is damaged,
// the data it needs is not known, and everything is kept.
func (p *pruner) findAllNeeds(ctx context.Context, o objects) (scene, need, error) {
	damaged, kept := p.out.Damaged, p.out.KeptAll
	for try := 0; ; try++ {
		p.out.Damaged, p.out.KeptAll = damaged, kept
		now, n, err := p.findNeeds(ctx)
		if err == nil {
			err = p.addNeedsOfDamaged(ctx, o, now, &n)
		}
		if err == nil {
			progress.From(ctx).Start(progress.ReadingMaps, 0, 0)
			err = n.marks.walkMaps(ctx)
		}
		if err != nil {
			return now, n, err
		}

		why := n.marks.checkComplete()
		if why == nil {
			return now, n, nil
		}

		// Some needs are not known. Have the heads changed?
		was := p.out.Damaged
		again, err := p.readScene(ctx, false)
		p.out.Damaged = was
		if err != nil {
			return now, n, err
		}

		if (headset{now.heads, now.damaged}).same(headset{again.heads, again.damaged}) || try == headTries {
			if err := p.nameUnreadable(ctx, now, n.marks.lost); err != nil {
				return now, n, err
			}
			p.out.KeptAll = cmp.Or(p.out.KeptAll, p.out.unreadableReason(why))
			return now, n, nil
		}
	}
}

// nameUnreadable records the points with nodes that cannot be read, one point for each such node.
func (p *pruner) nameUnreadable(ctx context.Context, now scene, lost []lostNode) error {
	owners := map[repo.ID]UnreadablePoint{}
	for _, n := range lost {
		owners[n.of] = UnreadablePoint{}
	}

	// Find the names of their points.
	for _, h := range now.heads {
		for pt, err := range allPoints(ctx, p.repo, h.Head, nil) {
			if err != nil {
				return err
			}
			if _, is := owners[pt.Manifest]; is {
				owners[pt.Manifest] = UnreadablePoint{Volume: h.Head.Name, Point: pt.Name}
			}
		}
	}

	p.out.Unreadable = nil
	for _, n := range lost {
		x := owners[n.of]
		x.Object, x.Reason = "segments/"+n.Frame.Segment.String(), n.why.Error()
		p.out.Unreadable = append(p.out.Unreadable, x)
	}

	slices.SortStableFunc(p.out.Unreadable, func(a, b UnreadablePoint) int {
		return cmp.Or(cmp.Compare(a.Volume, b.Volume), cmp.Compare(a.Point, b.Point))
	})
	return nil
}

// unreadableReason names up to three of the points whose maps cannot be read, and says why.
func (out *Pruned) unreadableReason(why error) string {
	var points []string
	for _, x := range out.Unreadable {
		if name := x.Volume + "@" + x.Point; x.Volume != "" && !slices.Contains(points, name) {
			points = append(points, name)
		}
	}

	whose := "a point"
	if len(points) > 0 {
		whose = strings.Join(points[:min(len(points), 3)], ", ")
	}

	if n := len(points) - 3; n > 0 {
		whose += fmt.Sprintf(" and %d more", n)
	}

	return fmt.Sprintf("cannot tell which data %s needs: a part of its map cannot be read (%v)", whose, why)
}

// tooBusyError returns the error of a prune that gives up because the heads keep changing.
func tooBusyError() error {
	return errs.New(errs.Conflict, opRemotePrune, "", "no data was deleted, because pushes kept changing the remote").
		WithHint("run the prune again to free the space: the points themselves have been removed")
}

// readScene reads the sessions between two readings of the heads that are the same. With fence, it then rewrites the
// heads: see [Prune].
func (p *pruner) readScene(ctx context.Context, fence bool) (scene, error) {
	heads, err := readHeads(ctx, p.repo)
	if err != nil {
		return scene{}, err
	}

	for range headTries {
		// Sessions, then heads again.
		sessions, unread, err := readSessions(ctx, p.repo)
		if err != nil {
			return scene{}, err
		}

		again, err := readHeads(ctx, p.repo)
		if err != nil {
			return scene{}, err
		}

		if err := p.refuseRollback(ctx, again); err != nil {
			return scene{}, err
		}

		// If no head has changed, this is the scene.
		same := heads.same(again)
		if same && fence {
			if same, err = p.rewriteHeads(ctx, again.good); err != nil {
				return scene{}, err
			}
		}

		now := scene{heads: again.good, damaged: again.bad, sessions: append(sessions, unread...)}
		if same {
			if same, err = p.readPoints(ctx, &now); err != nil {
				return scene{}, err
			}
		}

		if same {
			if len(unread) > 0 {
				p.out.KeptAll = "cannot tell which data a session needs: the session cannot be read"
			}
			p.out.Damaged = append(p.out.Damaged, now.damaged...)
			p.out.Working = len(now.sessions)
			return now, nil
		}

		heads = again
	}

	return scene{}, tooBusyError()
}

// rewriteHeads writes heads over the states that they were read from, without a change, so that no push can commit over
// these states any more. It returns false if another writer has changed a head.
func (p *pruner) rewriteHeads(ctx context.Context, heads []repo.HeadState) (bool, error) {
	var changed atomic.Bool
	all := make([]*repo.HeadState, len(heads))
	for i := range heads {
		all[i] = &heads[i]
	}

	err := eachOf(ctx, all, func(ctx context.Context, h *repo.HeadState) (err error) {
		*h, err = p.repo.RewriteHead(ctx, *h)
		if errs.Is(err, errs.Conflict) && !objstore.Temporary(err) {
			changed.Store(true)
			return nil
		}
		return err
	})
	return !changed.Load(), err
}

// need is the set of objects that must stay.
type need struct {
	manifests map[repo.ID]bool
	marks     *marker // the parts of segments that are needed

	todo []repo.ID // manifests whose own needs have not been added
}

// addManifest adds a manifest that must stay.
func (n *need) addManifest(id repo.ID) {
	if !id.IsZero() && !n.manifests[id] {
		n.manifests[id] = true
		n.todo = append(n.todo, id)
	}
}

// addNeeds adds the segments and manifests that a manifest needs.
func (n *need) addNeeds(m *repo.Manifest) {
	n.marks.addManifest(m)
	for _, id := range m.Needs() {
		n.addManifest(id)
	}
}

// needsOfScene reads the manifests that must stay, and returns them with the segments that they name:
// manifests in heads, those that sessions pin, and those that these need.
func (p *pruner) needsOfScene(ctx context.Context, now scene) (need, error) {
	n := need{manifests: map[repo.ID]bool{}, marks: newMarker(p.repo)}
	progress.From(ctx).Start(progress.ReadingManifests, 0, 0)

	// Manifests that heads name must exist.
	for _, id := range now.manifests {
		if !p.DryRun || !p.retired[id] {
			n.addManifest(id)
		}
	}

	if err := p.readNeededManifests(ctx, &n, func(id repo.ID, err error) error {
		return p.unreadableManifestError(ctx, now, id, err)
	}); err != nil {
		return n, err
	}

	// Manifests that only sessions pin may be gone already, and so may their parents: the sessions that
	// pinned them will notice.
	for _, s := range now.sessions {
		for _, id := range s.Session.Pins {
			n.addManifest(id)
		}
	}

	return n, p.readNeededManifests(ctx, &n, func(id repo.ID, err error) error {
		if errs.Is(err, errs.NotFound) {
			return nil
		}
		return p.unreadableManifestError(ctx, now, id, err)
	})
}

// readNeededManifests reads the manifests in n.todo, and adds what they need, until none are left.
func (p *pruner) readNeededManifests(ctx context.Context, n *need, failed func(repo.ID, error) error) error {
	for len(n.todo) > 0 {
		batch := n.todo
		n.todo = nil
		err := readManifests(ctx, p.repo, batch, func(m repo.Manifest) {
			progress.From(ctx).Add(1, 0)
			n.addNeeds(&m)
		}, failed)
		if err != nil {
			return err
		}
	}

	return nil
}

// addNeedsOfDamaged adds the needs of volumes whose heads cannot be read or are lost: those of all their existing
// manifests. Heads are never deleted, so a head is lost if a manifest names its volume and no push is about to create
// it.
func (p *pruner) addNeedsOfDamaged(ctx context.Context, o objects, now scene, n *need) error {
	damaged := map[repo.ID]int{}
	for i, d := range now.damaged {
		damaged[d.id] = i
	}

	there := map[repo.ID]bool{}
	for _, h := range now.heads {
		if id, err := p.repo.HeadID(h.Head.Name); err == nil {
			there[id] = true
		}
	}

	// Read the manifests that no head names. If one cannot be read, it may belong to a damaged head.
	unnamed := slices.DeleteFunc(
		slices.Clone(o.manifests),
		func(id repo.ID) bool { return n.manifests[id] || p.retired[id] },
	)
	kept := ""
	unread := func(id repo.ID, err error) error {
		if isUnreadable(err) {
			kept = fmt.Sprintf("cannot read manifest %s, which may belong to a volume whose list of points is damaged or lost",
				id)
			return nil
		}
		return err
	}

	err := readManifests(ctx, p.repo, unnamed, func(m repo.Manifest) {
		id, err := p.repo.HeadID(m.Volume)
		if err != nil || there[id] {
			return
		}

		i, is := damaged[id]
		if !is && now.hasSession(m.Session) {
			return // the first push of a volume is about to create its head
		}

		if !is { // the head is lost
			i = len(p.out.Damaged)
			damaged[id] = i
			p.out.Damaged = append(p.out.Damaged, DamagedHead{Object: "heads/" + id.String(), Reason: "missing", id: id})
		}

		p.out.Damaged[i].Volume = m.Volume
		n.manifests[m.ID] = true
		n.addNeeds(&m)
	}, unread)
	if err != nil {
		return err
	}

	// And the manifests that these need.
	if err := p.readNeededManifests(ctx, n, unread); err != nil {
		return err
	}

	if len(damaged) > 0 {
		p.out.KeptAll = cmp.Or(p.out.KeptAll, kept)
	}

	return nil
}

// unreadableManifestError returns the error of a prune that deletes nothing because a needed manifest cannot be read.
// It names the point, if it can.
func (p *pruner) unreadableManifestError(ctx context.Context, now scene, id repo.ID, err error) error {
	what := id.String()
	for _, h := range now.heads {
		pt, is, ferr := findPoint(ctx, p.repo, h.Head, nil, func(x repo.Point) bool { return x.Manifest == id })
		if is && ferr == nil {
			what = h.Head.Name + "@" + pt.Name
		}
	}

	if k := errs.KindOf(err); k != errs.NotFound && k != errs.Damaged {
		return err
	}

	return errs.New(errs.Damaged, opRemotePrune, what,
		"nothing was deleted, because its manifest cannot be read and the data it needs is not known: %w", err).
		WithHint("check the point with %s, and repair it with %s", errs.Run("verify"),
			errs.Run("verify", errs.Param("repair")))
}
