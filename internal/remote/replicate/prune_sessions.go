package replicate

import (
	"context"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// maxFenced is how many ended sessions a head remembers.
const maxFenced = 256

// endSessions ends what has not moved since an earlier prune saw it, and notes what
// is there now.
func (p *pruner) endSessions(ctx context.Context) error {
	if p.DryRun {
		return nil
	}

	before, v, err := p.repo.Seen(ctx)
	if errs.Is(err, errs.Damaged) {
		// It only makes prunes patient: they begin anew.
		before, v, err = repo.Seen{}, "", p.repo.DropSeen(ctx)
	}
	if err != nil {
		return err
	}

	sessions, unread, err := readSessions(ctx, p.repo)
	if err != nil {
		return err
	}

	damaged := map[repo.ID]bool{}
	for _, s := range unread {
		damaged[s.Session.ID] = true
		sessions = append(sessions, s)
	}

	now := time.Now().UTC()
	var seen repo.Seen
	for _, s := range sessions {
		now := repo.SeenSession{ID: s.Session.ID, Beat: s.Session.Beat, At: now}
		i := slices.IndexFunc(before.Sessions, func(o repo.SeenSession) bool { return o.ID == now.ID && o.Beat == now.Beat })
		if i < 0 {
			seen.Sessions = append(seen.Sessions, now)
			continue
		}

		first := before.Sessions[i]
		if first.At.After(now.At.Add(max(0, p.Patience))) {
			first.At = now.At // the clock of whoever wrote that was ahead
		}

		if now.At.Sub(first.At) < p.Patience {
			seen.Sessions = append(seen.Sessions, first)
			continue
		}

		if damaged[s.Session.ID] { // nobody knows which heads it may commit to
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

		p.out.Ended = append(p.out.Ended, workOf(s.Session))
	}

	// Another prune may have written it meanwhile: then that one's count holds.
	if _, err := p.repo.PutSeen(ctx, seen, v); err != nil && !errs.Is(err, errs.Conflict) {
		return err
	}

	return nil
}

// headNames are the names of all heads that can be read.
func headNames(ctx context.Context, r *repo.Repo) (out []string, err error) {
	all, err := readHeads(ctx, r)
	for _, h := range all.good {
		out = append(out, h.Head.Name)
	}
	return out, err
}

// fenceSession makes sure that a session never commits again, and removes it. A head that
// is not there yet is made, so that the session cannot make it. False: one of its heads
// is damaged or lost and cannot tell it, so that it stays.
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
					continue // it was made just now
				}
			}
			if errs.Is(err, errs.Damaged) || errs.Is(err, errs.TooNew) {
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

// isLost reports whether a volume without a head has lost it: it has a manifest that none of the sessions wrote, or one
// that cannot be read may be. A head that a prune made then would say that the volume has no points.
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
