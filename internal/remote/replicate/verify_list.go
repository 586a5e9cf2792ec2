package replicate

import (
	"context"
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// listing is what a verification finds when it lists a remote, besides segments.
type listing struct {
	sessions  map[repo.ID]bool
	manifests map[repo.ID]int64 // bytes
	pages     map[repo.ID]int64 // of points: bytes
	packs     map[repo.Pack]int64
	tables    int
}

// listAndCount lists all objects, and counts those that no volume needs.
func (v *verifier) listAndCount(ctx context.Context) error {
	l, err := v.listRemote(ctx)
	if err != nil {
		return err
	}

	if err := v.listMoved(ctx, l.tables); err != nil {
		return err
	}

	if len(v.Names) > 0 || len(v.problems) > 0 || len(v.unreadableNodes) > 0 {
		return nil // the needs of other volumes, or of damaged ones, are not known
	}

	return v.countUnneeded(ctx, l)
}

// listRemote lists all objects. Sessions come first: objects that they write later are not garbage.
func (v *verifier) listRemote(ctx context.Context) (listing, error) {
	l := listing{sessions: map[repo.ID]bool{}, manifests: map[repo.ID]int64{}, pages: map[repo.ID]int64{},
		packs: map[repo.Pack]int64{}}
	if err := v.addSessions(ctx, l.sessions); err != nil {
		return l, err
	}

	v.listed = map[repo.Segment]int64{}
	for o, err := range v.repo.Objects(ctx) {
		if err != nil {
			return l, err
		}

		switch o.Kind {
		case repo.SegmentObject:
			v.listed[o.Segment] = o.Bytes
		case repo.ManifestObject:
			l.manifests[o.ID] = o.Bytes
		case repo.PointsObject:
			l.pages[o.ID] = o.Bytes
		case repo.PackObject:
			l.packs[o.Pack] = o.Bytes
		case repo.TableObject:
			l.tables++
		case "":
			v.out.Unknown = append(v.out.Unknown, o.Key)
		case repo.ProbeObject:
			v.countGarbage(o.Bytes)
		}
	}

	return l, nil
}

// countGarbage counts an object that the next prune removes.
func (v *verifier) countGarbage(bytes int64) {
	v.out.GarbageCount++
	v.out.GarbageBytes += bytes
}

// countUnneeded counts the listed objects that no volume needs, and reports lost heads.
func (v *verifier) countUnneeded(ctx context.Context, l listing) error {
	used := map[repo.Segment]bool{}
	for _, s := range v.segments {
		used[s.Segment] = true
	}

	// Add the needs of points that were pushed since the heads were read.
	now, fresh, err := v.freshManifests(ctx, l.sessions)
	if err != nil {
		return err
	}

	more, err := v.needsOfFresh(ctx, fresh)
	if err != nil {
		return err
	}

	for s := range more {
		used[s] = true
	}

	// Count pages, packs and segments.
	named := map[repo.ID]bool{}
	for _, h := range now.good {
		for _, p := range h.Head.Pages {
			named[p.ID] = true
		}
	}

	for id, n := range l.pages {
		if !named[id] && len(l.sessions) == 0 {
			v.countGarbage(n)
		}
	}

	v.countPackGarbage(l.packs, used, l.sessions)

	for s, n := range v.listed {
		_, moved := v.moved[s]
		switch {
		case used[s] || moved:
		case l.sessions[s.Session]:
			v.out.WorkingBytes += n
		default:
			v.countGarbage(n)
		}
	}

	// Count manifests. Those that no head names may belong to a lost one.
	isFresh := map[repo.ID]bool{}
	for _, id := range fresh {
		isFresh[id] = true
	}

	var unnamed []repo.ID
	for id, n := range l.manifests {
		if v.named[id] || isFresh[id] {
			continue
		}
		unnamed = append(unnamed, id)
		if len(l.sessions) == 0 {
			v.countGarbage(n)
		}
	}

	return v.lostHeads(ctx, unnamed, now, l.sessions)
}

// freshManifests reads the heads again, and returns the manifests that were pushed since they were first read, and
// those that sessions pin. It adds new sessions to sessions.
func (v *verifier) freshManifests(
	ctx context.Context, sessions map[repo.ID]bool,
) (now headset, fresh []repo.ID, err error) {
	if now, err = readHeads(ctx, v.repo); err != nil {
		return now, nil, err
	}

	for _, h := range now.good {
		for pt, err := range allPoints(ctx, v.repo, h.Head, nil) {
			if err != nil {
				return now, nil, err
			}
			if !v.named[pt.Manifest] {
				fresh = append(fresh, pt.Manifest)
			}
		}
	}

	if err := v.addSessions(ctx, sessions); err != nil {
		return now, nil, err
	}

	for s := range sessions {
		st, err := v.repo.Session(ctx, s)
		if errs.Is(err, errs.NotFound) {
			continue
		}
		if err != nil {
			return now, nil, err
		}
		fresh = append(fresh, st.Session.Pins...)
	}

	return now, fresh, nil
}

// needsOfFresh returns the segments that manifests need. It skips those that cannot be read: the next verify reports
// them if they are still needed.
func (v *verifier) needsOfFresh(ctx context.Context, fresh []repo.ID) (map[repo.Segment]bool, error) {
	var read []*repo.Manifest
	err := readManifests(ctx, v.repo, fresh, func(m repo.Manifest) {
		read = append(read, &m)
	}, func(_ repo.ID, err error) error {
		if isUnreadable(err) {
			return nil
		}
		return err
	})
	if err != nil {
		return nil, err
	}

	return needsOf(ctx, v.repo, read...)
}

// lostHeads reports the volumes that have manifests but no head. Heads are never deleted, so these are lost, unless a
// push is about to create them.
func (v *verifier) lostHeads(ctx context.Context, unnamed []repo.ID, now headset, sessions map[repo.ID]bool) error {
	there := map[repo.ID]bool{}
	for _, h := range now.good {
		if id, err := v.repo.HeadID(h.Head.Name); err == nil {
			there[id] = true
		}
	}

	for _, d := range now.bad {
		there[d.id] = true
	}

	return readManifests(ctx, v.repo, unnamed, func(m repo.Manifest) {
		id, err := v.repo.HeadID(m.Volume)
		if err != nil || there[id] || sessions[m.Session] {
			return
		}
		there[id] = true // report it once
		v.report(Problem{Volume: m.Volume, Object: "heads/" + id.String(),
			Message: "the volume's list of points is missing, but some of its points still exist"})
	}, func(_ repo.ID, err error) error {
		if isUnreadable(err) {
			return nil // no volume with a head needs it
		}
		return err
	})
}

// addSessions adds the existing sessions to found, and reports those that cannot be read.
func (v *verifier) addSessions(ctx context.Context, found map[repo.ID]bool) error {
	for id, err := range v.repo.SessionIDs(ctx) {
		if err != nil {
			return err
		}
		if found[id] {
			continue
		}

		_, err := v.repo.Session(ctx, id)
		switch {
		case errs.Is(err, errs.NotFound):
		case isUnreadable(err):
			v.report(Problem{Object: "sessions/" + id.String(),
				Message: fmt.Sprintf("prunes delete nothing, because they cannot tell which data this session needs: %v", err)})
		case err != nil:
			return err
		default:
			found[id] = true
		}
	}

	return nil
}
