package replicate

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

// headMemory is what this pool remembers of the heads of a repository, by name. It is read before the heads are: pushes
// of other processes in between make the heads newer, never older.
//
// Heads are never deleted, their epochs never decrease, and neither does the number of their next point while the epoch
// stays the same. So a head that is missing, or has lower numbers, was lost or rolled back to an older state. A head
// that another pool took over, or that a repair rebuilt, has a higher epoch. A pool that was killed between writing a
// head and recording it remembers an older state than there is, which does not count as a rollback.
type headMemory map[string]engine.RemoteHead

// witness detects heads of a repository that were lost or rolled back, by what a pool remembers of them. The zero value
// detects nothing.
type witness struct {
	e      *engine.Transfer
	repo   *repo.Repo
	memory headMemory
	own    headWriter // knows which writes this pool has replaced

	accepted map[string]bool // heads whose rollback was accepted
}

// newWitness reads what a pool remembers. A nil e remembers nothing.
func newWitness(ctx context.Context, e *engine.Engine, r *repo.Repo) (w witness, err error) {
	w = witness{repo: r, memory: headMemory{}}
	if e == nil {
		return w, nil
	}
	w.e = e.Transfer()
	w.own = headWriter{repo: r, tokens: newTokenFiles(e.Dir(), r)}
	if w.own.me, err = writerOf(e); err != nil {
		return w, err
	}
	w.memory, err = rememberedHeads(ctx, w.e, r)
	return w, err
}

// rememberedHeads reads what a pool remembers of a repository.
func rememberedHeads(ctx context.Context, e *engine.Transfer, r *repo.Repo) (headMemory, error) {
	out := headMemory{}
	heads, err := e.RemoteHeads(ctx, r.ID().String())
	for _, h := range heads {
		out[h.Name] = h
	}
	return out, err
}

// rollbackReason explains how a head is older than remembered, and returns "" if it is not. there says whether the head
// exists.
func (m headMemory) rollbackReason(h *repo.Head, there bool) string {
	known := m[h.Name]
	switch {
	case known.Epoch == 0:
		return ""
	case !there:
		return fmt.Sprintf("the remote has lost the volume's list of points, last seen by this pool at epoch %d", known.Epoch)
	case h.Epoch < known.Epoch:
		return fmt.Sprintf("%s: the volume is at epoch %d there, but this pool has seen epoch %d",
			wasRolledBack, h.Epoch, known.Epoch)
	case h.Epoch == known.Epoch && h.NextSeq < known.NextSeq:
		return fmt.Sprintf("%s: the volume's next point would be number %d there, but this pool has seen number %d",
			wasRolledBack, h.NextSeq, known.NextSeq)
	}

	return ""
}

// rollback is a head that is older than the one that a pool remembers.
type rollback struct {
	volume string
	object string  // "heads/..."
	lost   bool    // the head is missing
	token  repo.ID // the head's token, which this pool has replaced; zero: its numbers are lower
	reason string
}

// rollbacks lists heads that are missing or older than remembered, by name. A head that cannot be read is not listed.
func (w *witness) rollbacks(ctx context.Context, all headset) ([]rollback, error) {
	r, m := w.repo, w.memory
	out, err := w.retiredRollbacks(ctx, all)
	if err != nil {
		return nil, err
	}

	// Index the heads that exist. Damaged ones are nil.
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

	// Compare those that the pool remembers.
	for _, name := range slices.Sorted(maps.Keys(m)) {
		id, err := r.HeadID(name)
		if err != nil {
			return nil, err
		}

		h, is := there[id]
		if is && h == nil {
			continue // damaged, which is reported elsewhere
		}
		if !is {
			h = &repo.Head{Name: name}
		}

		if why := m.rollbackReason(h, is); why != "" {
			out = slices.DeleteFunc(out, func(b rollback) bool { return b.volume == name })
			out = append(out, rollback{volume: name, object: "heads/" + id.String(), lost: !is, reason: why})
		}
	}

	slices.SortFunc(out, func(a, b rollback) int { return strings.Compare(a.volume, b.volume) })
	return out, nil
}

// acceptHead lets a head count as it is.
func (w *witness) acceptHead(name string) {
	if w.accepted == nil {
		w.accepted = map[string]bool{}
	}
	w.accepted[name] = true
}

// retiredRollbacks lists heads with a token that this pool has replaced. It reads these heads again, because another
// process of this pool may have replaced the token after they were first read.
func (w *witness) retiredRollbacks(ctx context.Context, all headset) (out []rollback, err error) {
	for _, s := range all.good {
		h := s.Head
		if w.e == nil || w.accepted[h.Name] || h.Token.IsZero() || h.Gone || h.Writer.Pool != w.own.me.Pool {
			continue
		}

		known, err := w.own.tokens.load(h.Name)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(known.retired, h.Token) {
			continue
		}

		// The token is retired. Does the head still have it?
		now, _, err := w.repo.Head(ctx, h.Name)
		if isUnreadable(err) || err == nil && now.Token != h.Token {
			continue
		}
		if err != nil {
			return nil, err
		}

		id, err := w.repo.HeadID(h.Name)
		if err != nil {
			return nil, err
		}

		out = append(out, rollback{volume: h.Name, object: "heads/" + id.String(), token: h.Token, reason: retiredReason})
	}

	return out, nil
}

const (
	wasRolledBack = "the remote was rolled back to an older state"
	retiredReason = wasRolledBack + ": this pool has since written a newer list of points for the volume"
)

// rememberHeads remembers heads that are newer than the remembered ones, in w and in the catalogue of its pool, if any.
func (w *witness) rememberHeads(ctx context.Context, all headset) error {
	id, m := w.repo.ID().String(), w.memory
	var fresh []engine.RemoteHead
	for _, s := range all.good {
		h, known := s.Head, m[s.Head.Name]
		if h.Epoch > known.Epoch || h.Epoch == known.Epoch && h.NextSeq > known.NextSeq {
			known.Repo, known.Name, known.Epoch, known.NextSeq = id, h.Name, h.Epoch, h.NextSeq
			m[h.Name] = known
			fresh = append(fresh, known)
		}
	}

	if w.e == nil {
		return nil
	}

	return w.e.SeeRemoteHeads(ctx, id, fresh)
}

// refuseRollback returns Damaged if a head is missing or older than this pool remembers: objects that only the newer
// head names would be deleted as garbage.
func (p *pruner) refuseRollback(ctx context.Context, all headset) error {
	back, err := p.witness.rollbacks(ctx, all)
	if err != nil || len(back) == 0 {
		return err
	}

	first, more := back[0], ""
	if n := len(back) - 1; n > 0 {
		more = fmt.Sprintf(" (and %d more)", n)
	}

	e := errs.New(errs.Damaged, opRemotePrune, first.volume, "nothing was removed: %s%s", first.reason, more)
	accept := errs.Run("remote prune", p.remoteName(), errs.Param("accept-rollback"))
	if first.lost {
		return e.WithHint("rebuild the list from the points with %s; to accept its loss, run %s",
			errs.Run("remote repair", p.remoteName()), accept)
	}

	return e.WithHint("restore the newer state of the remote if you can; to continue from the older one, "+
		"push the volume with %s, or run %s", errs.Param("accept-rollback"), accept)
}

// acceptRollback accepts the heads as they are: an older head gets an epoch above all that the pool has seen, so that
// no epoch is used twice, and missing heads are forgotten.
func (p *pruner) acceptRollback(ctx context.Context, all headset) error {
	back, err := p.witness.rollbacks(ctx, all)
	if err != nil {
		return err
	}

	for _, b := range back {
		p.out.Accepted = append(p.out.Accepted, b.volume)
		known := p.witness.memory[b.volume]
		delete(p.witness.memory, b.volume)
		p.witness.acceptHead(b.volume)
		switch {
		case p.DryRun:
		case b.lost:
			err = p.witness.e.DropRemoteHead(ctx, known.Repo, b.volume)
		default:
			_, err = changeHead(ctx, p.repo, opRemotePrune, b.volume, func(h *repo.Head) (bool, error) {
				if (headMemory{b.volume: known}).rollbackReason(h, true) == "" && (b.token.IsZero() || h.Token != b.token) {
					return false, nil
				}
				h.Epoch, h.Token = max(h.Epoch, known.Epoch)+1, repo.ID{} // the writer may have replaced the token since
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
