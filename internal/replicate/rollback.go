package replicate

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"pando/internal/engine"
	"pando/internal/errs"
	"pando/internal/repo"
)

// headMemory is what this pool remembers of the heads of a repository, by name. It is read before the heads are: what
// another process pushes in between makes them newer, never older.
//
// Heads are never deleted, their epochs never go back, and neither does the number of their next point while the epoch
// stays the same. So a head that is missing, or has lower numbers, was lost or put back to an older state. A head that
// another pool has taken over, or that was made anew by a repair, has a higher epoch. A pool that was killed between the
// write of a head and its own record remembers less than there is, which is no rollback.
type headMemory map[string]engine.RemoteHead

// remembered reads what a pool remembers of a repository; a nil engine remembers nothing.
func remembered(ctx context.Context, e *engine.Engine, r *repo.Repo) (headMemory, error) {
	out := headMemory{}
	if e == nil {
		return out, nil
	}
	heads, err := e.RemoteHeads(ctx, r.ID().String())
	for _, h := range heads {
		out[h.Name] = h
	}
	return out, err
}

// older says in which way a head is older than the one that is remembered; "" if it is not. there: the head exists.
func (m headMemory) older(h *repo.Head, there bool) string {
	known := m[h.Name]
	switch {
	case known.Epoch == 0:
		return ""
	case !there:
		return fmt.Sprintf("the remote has lost its list of points, which this pool has seen with epoch %d", known.Epoch)
	case h.Epoch < known.Epoch:
		return fmt.Sprintf("the remote was put back to an older state: the volume has epoch %d there, and this pool has seen epoch %d", h.Epoch, known.Epoch)
	case h.Epoch == known.Epoch && h.NextSeq < known.NextSeq:
		return fmt.Sprintf("the remote was put back to an older state: the next point of the volume would be number %d there, and this pool has seen number %d", h.NextSeq, known.NextSeq)
	}
	return ""
}

// rollback is a head that is older than the one that a pool remembers.
type rollback struct {
	volume string
	object string // "heads/..."
	lost   bool   // it is missing
	reason string
}

// rollbacks lists heads that are missing or older than remembered, by name. One that cannot be read is neither.
func (m headMemory) rollbacks(r *repo.Repo, all headset) ([]rollback, error) {
	there := map[repo.ID]*repo.Head{}
	for i := range all.good {
		h := &all.good[i].Head
		id, err := r.HeadID(h.Name)
		if err != nil {
			return nil, err
		}
		there[id] = h
	}
	for _, d := range all.bad {
		there[d.id] = nil
	}
	var out []rollback
	for _, name := range slices.Sorted(maps.Keys(m)) {
		id, err := r.HeadID(name)
		if err != nil {
			return nil, err
		}
		h, is := there[id]
		if is && h == nil {
			continue // damaged, which is said of it
		}
		if !is {
			h = &repo.Head{Name: name}
		}
		if why := m.older(h, is); why != "" {
			out = append(out, rollback{volume: name, object: "heads/" + id.String(), lost: !is, reason: why})
		}
	}
	return out, nil
}

// see remembers heads that were read and are newer than what is remembered, also in the pool unless that is nil.
func (m headMemory) see(ctx context.Context, e *engine.Engine, r *repo.Repo, all headset) error {
	id := r.ID().String()
	var fresh []engine.RemoteHead
	for _, s := range all.good {
		h, known := s.Head, m[s.Head.Name]
		if h.Epoch > known.Epoch || h.Epoch == known.Epoch && h.NextSeq > known.NextSeq {
			known.Repo, known.Name, known.Epoch, known.NextSeq = id, h.Name, h.Epoch, h.NextSeq
			m[h.Name] = known
			fresh = append(fresh, known)
		}
	}
	if e == nil {
		return nil
	}
	return e.SeeRemoteHeads(ctx, id, fresh)
}

// refuseRollback is Damaged if a head is missing or older than this pool remembers: what only the newer one names would
// be deleted as garbage.
func (p *pruner) refuseRollback(all headset) error {
	back, err := p.memory.rollbacks(p.repo, all)
	if err != nil || len(back) == 0 {
		return err
	}
	first, more := back[0], ""
	if n := len(back) - 1; n > 0 {
		more = fmt.Sprintf(" (and %d more)", n)
	}
	e := errs.New(errs.Damaged, opRemotePrune, first.volume, "%s%s, so nothing was removed", first.reason, more)
	accept := errs.Run("remote prune", p.remoteName(), errs.Param("accept-rollback"))
	if first.lost {
		return e.WithHint("rebuild it from what its points say: %s; to forget that it was there: %s", errs.Run("remote repair", p.remoteName()), accept)
	}
	return e.WithHint("restore the remote if you can; to go on with what is there, push the volume with %s, or accept what is lost with %s", errs.Param("accept-rollback"), accept)
}

// acceptRollback makes what is there the state that counts: a head that is older gets an epoch above all that were seen,
// so that no epoch is used twice, and heads that are missing are forgotten.
func (p *pruner) acceptRollback(ctx context.Context, all headset) error {
	back, err := p.memory.rollbacks(p.repo, all)
	if err != nil {
		return err
	}
	for _, b := range back {
		p.out.Accepted = append(p.out.Accepted, b.volume)
		known := p.memory[b.volume]
		delete(p.memory, b.volume)
		switch {
		case p.DryRun:
		case b.lost:
			err = p.Pool.DropRemoteHead(ctx, known.Repo, b.volume)
		default:
			_, err = changeHead(ctx, p.repo, opRemotePrune, b.volume, func(h *repo.Head) (bool, error) {
				if (headMemory{b.volume: known}).older(h, true) == "" {
					return false, nil
				}
				h.Epoch = known.Epoch + 1
				return true, nil
			})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *pruner) remoteName() string {
	if p.remote == "" {
		return "REMOTE"
	}
	return p.remote
}
