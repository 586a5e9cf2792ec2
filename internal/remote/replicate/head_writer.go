package replicate

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
)

// headWriter writes heads for this pool. Every operation that adds a point to a head, or changes
// which pool may add one, uses it, so that the rules of fencing are in one place:
//
//   - A head has one writer, and an epoch that grows whenever the writer changes.
//   - A push keeps to the epoch at which it first read the head: it commits only while the
//     head has that epoch and this writer. So a take-over ends all pushes under way, even
//     those of a pool that takes the volume back.
//   - A head has a token of its writer's last commit. A pool that has the writer's ID but does
//     not know the token is a copy of the writer, or was rolled back to an older state.
//   - All changes are compare-and-swap.
//
// Methods may be called concurrently.
type headWriter struct {
	repo   *repo.Repo
	remote string // its name, for hints
	me     repo.Writer

	tokens    tokenLog              // tokens of this pool's last writes of heads
	freeNames *sync.Map             // pages of points without a point of that name, by reference on the remote
	replaced  map[string]repo.Point // points that are pushed again and keep their places, by reference on the remote

	memory         headMemory // what this pool remembers of heads
	acceptRollback bool       // accept a head that is older than memory says
}

// headState is a head as it was read.
type headState struct {
	repo.Head
	version objstore.Version // "" if there is no head
	own     ownership        // which pool wrote it last
}

// claim is the right to write a head as it was first read. A later epoch invalidates it.
type claim struct{ epoch uint64 }

func (h headState) claim() claim { return claim{h.Epoch} }

// findListed finds the point of a manifest that was just pushed: a recent one, or one in the place of an older point.
func (w *headWriter) findListed(ctx context.Context, h headState, m *repo.Manifest) (repo.Point, bool, error) {
	seq := w.replaced[h.Name+"@"+m.Point].Seq
	return findPoint(ctx, w.repo, h.Head, pageHolding(seq), func(x repo.Point) bool { return x.Manifest == m.ID })
}

// readHead reads a head. A head that does not exist yields one without points, and with version "".
func (w *headWriter) readHead(ctx context.Context, name string) (headState, error) {
	before, err := w.tokens.load(name)
	if err != nil {
		return headState{}, err
	}

	h, v, err := w.repo.Head(ctx, name)
	if errs.Is(err, errs.NotFound) {
		return headState{Head: repo.Head{Name: name, NextSeq: 1}}, nil
	}
	if errs.Is(err, errs.Damaged) {
		err = damagedVolumeError(opPush, name, err)
	}
	if err != nil {
		return headState{}, err
	}

	own, err := w.judgeOwnership(before, &h)
	return headState{h, v, own}, err
}

// unclaimed reports whether an existing head has no writer: its volume was removed, or a prune created
// the head only to fence a session.
func (h headState) unclaimed() bool { return h.Gone || h.Writer.Pool == "" }

// checkWriter returns nil if this pool may write the head, and Conflict otherwise.
func (w *headWriter) checkWriter(h headState) error {
	if h.version == "" || h.unclaimed() {
		return nil
	}

	if h.Writer.Pool == w.me.Pool {
		if h.own == foreignWrite && w.rollbackReason(h) == "" {
			return w.copiedPoolError(opPush, h.Head)
		}
		return nil
	}

	return errs.New(errs.Conflict, opPush, h.Name,
		"this pool does not write the volume on the remote: pool %s on %s does (epoch %d)",
		h.Writer.Pool, h.Writer.Host, h.Epoch).
		WithHint("push it under another name with `%s`; or, if the other host should stop writing it, take it over "+
			"with %s, which keeps the local state as a snapshot", errs.Param("as", "NAME"),
			errs.Run("pull", h.Name, errs.Param("from", w.remote), errs.Param("take-over"), errs.Param("update")))
}

// copiedPoolError returns the error, of kind Conflict, of a pool that has the ID of a head's writer but did not write
// it last.
func (w *headWriter) copiedPoolError(op string, h repo.Head) error {
	return errs.New(errs.Conflict, op, h.Name,
		"another pool with the same ID as this one has pushed the volume since: "+
			"one is a copy of the other, or this one was restored from a backup").
		WithHint("decide which pool pushes the volume; if it is this one, give it an identity of its own with %s, "+
			"and take the volume over with %s; or push it under another name with `%s`",
			errs.Run("remote writer", errs.Param("new")),
			errs.Run("pull", h.Name, errs.Param("from", w.remote), errs.Param("take-over"), errs.Param("update")),
			errs.Param("as", "NAME"))
}

// checkClaim returns nil if this pool may continue an operation that it began under a claim, and Conflict otherwise.
func (w *headWriter) checkClaim(h headState, c claim) error {
	if err := w.checkWriter(h); err != nil {
		return err
	}
	if h.Epoch == c.epoch {
		return nil
	}
	return errs.New(errs.Conflict, opPush, h.Name, "another pool took over the volume during this push (epoch %d, was %d)",
		h.Epoch, c.epoch).
		WithHint("push again; run %s to list the writer of each volume", errs.Run("remote ls", w.remote))
}

// checkNotOlder returns nil if a head is at least as new as this pool remembers, or a rollback is accepted, and Damaged
// otherwise.
func (w *headWriter) checkNotOlder(h headState) error {
	why := w.rollbackReason(h)
	if why == "" || w.acceptRollback {
		return nil
	}

	e := errs.New(errs.Damaged, opPush, h.Name, "%s", why)
	if h.version == "" {
		return e.WithHint(
			"rebuild the list from the points with %s; to start a new list without them, push with %s",
			errs.Run("remote repair", w.remote),
			errs.Param("accept-rollback"),
		)
	}

	return e.WithHint("restore the newer state of the remote if you can; to continue from the older one, push with %s",
		errs.Param("accept-rollback"))
}

// rollbackReason explains how a head is older than this pool remembers, and returns "" if it is not.
func (w *headWriter) rollbackReason(h headState) string {
	why := w.memory.rollbackReason(&h.Head, h.version != "")
	if why == "" && h.own == retiredWrite {
		why = retiredReason
	}
	return why
}

// checkFits returns nil if a point can be added to a head. Errors: Conflict, Exists, Damaged.
func (w *headWriter) checkFits(ctx context.Context, h headState, pt engine.Point) error {
	if err := cmp.Or(w.checkWriter(h), w.checkNotOlder(h)); err != nil {
		return err
	}

	if h.version == "" || h.unclaimed() {
		return nil
	}

	// The name must stand for the same thing there and here.
	if h.Golden != pt.Golden {
		return errs.New(errs.Conflict, opPush, pt.Ref, "%s is a %s on the remote, but a %s here",
			h.Name, kindOfHead(h.Golden), kindOfHead(pt.Golden)).
			WithHint("push it under another name with `%s`", errs.Param("as", "NAME"))
	}

	if h.Lineage != "" && h.Lineage != string(pt.Lineage) {
		return errs.New(errs.Conflict, opPush, pt.Ref,
			"the remote already has a different %s named %s, which this pool pushed before", kindOfHead(h.Golden), h.Name).
			WithHint("push this one under another name with `%s`, or give it another name with %s", errs.Param("as", "NAME"),
				errs.Run("rename", pt.Volume, "NEW"))
	}

	// So must the name of the point.

	another := func(x repo.Point) bool { return x.Name == pt.Name && x.Source != string(pt.ID) }
	_, taken, err := findPoint(ctx, w.repo, h.Head, w.pagesThatMayName(h.Name, pt.Name), another)
	if taken {
		return errs.New(errs.Exists, opPush, pt.Ref, "the remote already has a different point named %s@%s",
			h.Name, pt.Name).
			WithHint("push it under another name with `%s`", errs.Param("as", "NAME"))
	}

	if err == nil && w.freeNames != nil {
		w.freeNames.Store(h.Name+"@"+pt.Name, h.Pages)
	}

	return err
}

// kindOfHead returns the word for a head: golden or volume.
func kindOfHead(golden bool) string {
	if golden {
		return "golden"
	}
	return "volume"
}

// pagesThatMayName selects the pages of a head that may contain a point with the given name. Names that pushes generate
// contain a time, so that an ordinary push reads no page. For other names each page is read once.
func (w *headWriter) pagesThatMayName(head, name string) pageFilter {
	made, auto := pushTime(name)
	var free []repo.PointPage
	if w.freeNames != nil {
		known, _ := w.freeNames.Load(head + "@" + name)
		free, _ = known.([]repo.PointPage)
	}

	return func(p repo.PointPage) bool {
		if auto && p.To.Before(made.Add(-time.Second)) {
			return false
		}
		return !slices.ContainsFunc(free, func(x repo.PointPage) bool { return x.ID == p.ID })
	}
}

// commitPoint adds a manifest to the head, if this session and this pool may still do so. h is the head
// as it was read after the session had begun, c the claim from when it was first read. If the manifest
// is already listed, an earlier commit succeeded and only its answer was lost. Errors: errEnded, and
// those of checkClaim and checkFits.
//
// The session must exist after the head was read that this commit replaces. So a prune that no longer found the session
// makes the commit fail: it rewrites all heads before it deletes anything. A head that does not exist is created first,
// without points, so that a prune finds it.
func (w *headWriter) commitPoint(
	ctx context.Context, l *lease, c claim, h headState, pt engine.Point, m *repo.Manifest,
) (headState, repo.Point, error) {
	for again := false; ; again = true {
		if again {
			var err error
			if h, err = w.readHead(ctx, h.Name); err != nil {
				return h, repo.Point{}, err
			}
			if at, ok, err := w.findListed(ctx, h, m); ok || err != nil {
				return h, at, err
			}
		}

		// This pool must still be the writer, the point must fit, and no prune may have fenced the session.
		if err := w.checkClaim(h, c); err != nil {
			return h, repo.Point{}, err
		}

		if err := w.checkFits(ctx, h, pt); err != nil {
			return h, repo.Point{}, err
		}

		if slices.Contains(h.Fenced, l.id) {
			return h, repo.Point{}, errEnded
		}

		// Write the head with the point. After a lost race, begin again.
		next, at, err := w.tryCommit(ctx, l, h, pt, m)
		if err == nil {
			return next, at, nil
		}
		if errors.Is(err, errEnded) || !errs.Is(err, errs.Conflict) || objstore.Temporary(err) {
			return h, repo.Point{}, err
		}
	}
}

// tryCommit replaces a head by one with the point, if the session still exists. Errors: errEnded, and Conflict if
// another writer was faster.
func (w *headWriter) tryCommit(
	ctx context.Context, l *lease, h headState, pt engine.Point, m *repo.Manifest,
) (headState, repo.Point, error) {
	if h.version == "" {
		if err := l.checkExists(ctx); err != nil { // an empty head would hide that the real one is lost
			return h, repo.Point{}, err
		}

		var err error
		h.Gone = true
		if h.version, err = w.repo.PutHead(ctx, h.Head, ""); err != nil {
			return h, repo.Point{}, err
		}
	}

	next, at, err := w.addPoint(ctx, l, h, pt, m)
	if err != nil {
		return h, repo.Point{}, err
	}

	if err := l.checkExists(ctx); err != nil {
		return h, repo.Point{}, err
	}

	next, err = w.putHead(ctx, next)
	return next, at, err
}

// addPoint returns the head with one more point. Points for which the head has no room are written into pages. The head
// gets a new writer only if it had none: see checkClaim.
func (w *headWriter) addPoint(
	ctx context.Context, l *lease, h headState, pt engine.Point, m *repo.Manifest,
) (headState, repo.Point, error) {
	// A head without a writer becomes this pool's.
	h.Epoch = w.epochOfCommit(h)
	if h.version == "" || h.unclaimed() {
		h.Writer = w.me
	}

	h.Gone, h.Golden, h.Lineage = false, pt.Golden, string(pt.Lineage)
	h.NextSeq = max(h.NextSeq, 1)

	// A point that is pushed again stays in its place.
	at := pointFrom(m, h.NextSeq)
	pages := repo.PagePutter{Repo: w.repo, Session: func(context.Context) (repo.ID, error) { return l.id, nil }}
	if is, err := w.replacePoint(ctx, pages, &h, &at); is || err != nil {
		return h, at, err
	}

	h.NextSeq++

	// An older generation or snapshot that is pushed later is not the current state of the golden or volume.
	now, any, err := newestOf(ctx, w.repo, h.Head)
	if err != nil {
		return h, at, err
	}

	if h.Latest = 0; any && at.StateOrder.Compare(now.StateOrder) < 0 {
		h.Latest = now.Seq
	}

	h.Recent = append(slices.Clone(h.Recent), at)
	return h, at, pages.Shrink(ctx, &h.Head)
}

// epochOfCommit returns the epoch that a head has once this pool has added a point to it.
func (w *headWriter) epochOfCommit(h headState) uint64 {
	epoch := h.Epoch
	switch {
	case h.Gone:
		epoch++
	case h.version == "" || h.unclaimed():
		epoch = max(epoch, 1)
	}

	if w.rollbackReason(h) != "" { // the rollback was accepted; no epoch may be used twice
		epoch = max(epoch, w.memory[h.Name].Epoch) + 1
	}
	return epoch
}

// takeOver makes this pool the writer of a head, unless it already is. admit returns an error if the
// head cannot be taken over; it may be called several times. took reports whether another pool was the
// writer before. Errors: NotFound, Conflict (others keep writing the head, or this pool is a copy of the
// writer), Damaged (the head is older than this pool remembers, which a new epoch would hide), and those
// of admit.
func (w *headWriter) takeOver(
	ctx context.Context, name string, admit func(repo.Head) error,
) (h repo.Head, took bool, err error) {
	before, err := w.tokens.load(name)
	if err != nil {
		return repo.Head{}, false, err
	}

	h, err = changeHead(ctx, w.repo, opPull, name, func(h *repo.Head) (bool, error) {
		if err := admit(*h); err != nil {
			return false, err
		}

		if why := w.memory.rollbackReason(h, true); why != "" {
			return false, errs.New(errs.Damaged, opPull, name, "%s", why).
				WithHint("restore the newer state of the remote if you can; to continue from the older one, run %s",
					errs.Run("remote prune", w.remote, errs.Param("accept-rollback")))
		}

		if h.Writer.Pool == w.me.Pool {
			own, err := w.judgeOwnership(before, h)
			if err == nil && own == foreignWrite {
				err = w.copiedPoolError(opPull, *h)
			}
			return false, err // even if an earlier attempt took effect and only its answer was lost
		}

		// The lineage is known only once the volume is in this pool.
		h.Epoch, h.Writer, h.Lineage = h.Epoch+1, w.me, ""
		h.Token, err = w.tokens.pend(name)
		took = true
		return true, err
	})
	if err == nil && took {
		_ = w.tokens.confirm(name, h.Token) // on failure it stays pending, which is as good
	}

	return h, took, err
}
