package replicate

import (
	"context"
	"slices"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// maxFenced is the number of fenced sessions that a head remembers.
const maxFenced = 256

// endSessions ends the sessions that have not changed since an earlier prune saw them, longer ago than
// Patience, and records the state of the others for the next prune.
func (p *pruner) endSessions(ctx context.Context) error {
	if p.DryRun {
		return nil
	}

	// Read what earlier prunes saw.
	before, v, err := p.repo.Seen(ctx)
	if errs.Is(err, errs.Damaged) {
		// Without it, sessions only live longer: start with an empty record.
		before, v, err = repo.Seen{}, "", p.repo.DropSeen(ctx)
	}
	if err != nil {
		return err
	}

	// Read the sessions, including those that are damaged.
	sessions, unread, err := readSessions(ctx, p.repo)
	if err != nil {
		return err
	}

	damaged := map[repo.ID]bool{}
	for _, s := range unread {
		damaged[s.Session.ID] = true
		sessions = append(sessions, s)
	}

	// Compare, and end those that have expired.
	now := time.Now().UTC()
	var seen repo.Seen
	for _, s := range sessions {
		first, expired := p.firstSeen(before, repo.SeenSession{ID: s.Session.ID, Beat: s.Session.Beat, At: now})
		if !expired {
			seen.Sessions = append(seen.Sessions, first)
			continue
		}

		if damaged[s.Session.ID] { // it may commit to any head
			if s.Session.Heads, err = headNames(ctx, p.repo); err != nil {
				return err
			}
		}

		if ended, err := p.fenceSession(ctx, s, sessions); err != nil {
			return err
		} else if !ended {
			seen.Sessions = append(seen.Sessions, first)
			continue
		}

		ended := workOf(s.Session)
		if damaged[s.Session.ID] {
			ended = api.Operation{Unreadable: true}
		}
		p.out.Ended = append(p.out.Ended, ended)
	}

	// Another prune may have written a newer record in the meantime, which then counts.
	if _, err := p.repo.PutSeen(ctx, seen, v); err != nil && !errs.Is(err, errs.Conflict) {
		return err
	}

	return nil
}

// firstSeen returns when a prune first saw a session in the state that it has now. expired reports whether an earlier
// prune did so, Patience ago or longer.
func (p *pruner) firstSeen(before repo.Seen, now repo.SeenSession) (first repo.SeenSession, expired bool) {
	i := slices.IndexFunc(before.Sessions, func(o repo.SeenSession) bool { return o.ID == now.ID && o.Beat == now.Beat })
	if i < 0 {
		return now, false
	}

	first = before.Sessions[i]
	if first.At.After(now.At.Add(max(0, p.Patience))) {
		first.At = now.At // the clock of the host that wrote it was ahead
	}

	return first, now.At.Sub(first.At) >= p.Patience
}

// headNames returns the names of all heads that can be read.
func headNames(ctx context.Context, r *repo.Repo) (out []string, err error) {
	all, err := readHeads(ctx, r)
	for _, h := range all.good {
		out = append(out, h.Head.Name)
	}
	return out, err
}

// fenceSession makes sure that a session never commits again, and removes it. It creates
// heads that do not exist yet, so that the session cannot create them. It returns false,
// and keeps the session, if one of the heads is damaged or lost and cannot be fenced.
func (p *pruner) fenceSession(ctx context.Context, s repo.SessionState, all []repo.SessionState) (bool, error) {
	add := func(h *repo.Head) bool {
		if slices.Contains(h.Fenced, s.Session.ID) {
			return false
		}
		h.Fenced = append(h.Fenced, s.Session.ID)
		if n := len(h.Fenced) - maxFenced; n > 0 {
			h.Fenced = slices.Delete(h.Fenced, 0, n)
		}
		return true
	}

	// Fence it in each head that it may commit to.
	for _, name := range s.Session.Heads {
		for try := 0; ; try++ {
			_, err := changeHead(ctx, p.repo, opRemotePrune, name, func(h *repo.Head) (bool, error) { return add(h), nil })
			if errs.Is(err, errs.NotFound) {
				if lost, err := p.isLost(ctx, name, all); err != nil || lost {
					return false, err
				}
				h := repo.Head{Name: name, NextSeq: 1, Gone: true}
				add(&h)
				_, err = p.repo.PutHead(ctx, h, "")
				if errs.Is(err, errs.Conflict) && try < headTries {
					continue // it has just been created
				}
			}
			if errs.Is(err, errs.Damaged, errs.TooNew) {
				return false, nil
			}
			if err != nil {
				return false, err
			}

			break
		}
	}

	return true, p.repo.DropSession(ctx, s)
}

// isLost reports whether a volume without a head has lost it: a manifest that none of the sessions wrote belongs to the
// volume, or may belong to it because it cannot be read. A head that a prune created for such a volume would say that
// the volume has no points.
func (p *pruner) isLost(ctx context.Context, volume string, sessions []repo.SessionState) (lost bool, err error) {
	var all []repo.ID
	for id, err := range p.repo.Manifests(ctx) {
		if err != nil {
			return false, err
		}
		all = append(all, id)
	}

	now := scene{sessions: sessions}
	err = readManifests(ctx, p.repo, all, func(m repo.Manifest) {
		lost = lost || m.Volume == volume && !now.hasSession(m.Session)
	}, func(_ repo.ID, err error) error {
		if !isUnreadable(err) {
			return err
		}
		lost = lost || !errs.Is(err, errs.NotFound)
		return nil
	})

	return lost, err
}
