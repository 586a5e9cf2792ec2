package replicate

import (
	"cmp"
	"context"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
)

const opRemotePrune = "remote prune"

// DefaultPatience is how long a session must not have been renewed, by the clock of
// the host that prunes, before a prune ends it. It is many times the interval at
// which a live session is renewed. A wrong value costs other hosts work, but never
// loses data: see [Prune].
const DefaultPatience = 10 * time.Minute

// PruneRequest says what a remote keeps.
type PruneRequest struct {
	Policy Policy   // of points; the zero Policy keeps all of them
	Names  []string // of the volumes that Policy applies to; none: all
	DryRun bool     // only report what would be removed
	// MaxRepack is the most bytes of partly needed objects that may be rewritten. 0: none; negative: no limit.
	MaxRepack int64
	Patience  time.Duration // with sessions that are not renewed; 0: DefaultPatience; negative: none

	// AcceptRollback continues although heads that the pool has seen are missing or were rolled back to an older state.
	// Data that only the newer heads named is garbage then. Data of missing heads stays until they are repaired.
	AcceptRollback bool
}

// Pruned is what Prune did, or would do.
type Pruned struct {
	// Points were removed by this prune, or by another that ran at the same time: by volume, the oldest first.
	Points  []PrunedPoint   `json:"removed"`
	Kept    int             `json:"kept_count"`    // number of points of all volumes that stay
	Ended   []api.Operation `json:"ended"`         // operations that had expired, and were ended
	Working int             `json:"working_count"` // number of operations at work
	// number of manifests that were removed, as no point needed them
	Manifests  int   `json:"manifest_count"`
	Segments   int   `json:"segment_count"` // number of segments that were removed, as no point needed them
	FreedBytes int64 `json:"freed_bytes"`   // size of the objects that were removed
	UsedBytes  int64 `json:"used_bytes"`    // size of the objects that are left
	// part of used_bytes that no point needs, but that is in objects with data that is needed
	PartlyUsedBytes int64 `json:"partly_used_bytes"`
	// size of segments that no point needs, but that belong to an operation which may be at work
	HeldBytes   int64 `json:"held_bytes"`
	NeededBytes int64 `json:"needed_bytes"` // part of used_bytes that points need
	// number of objects whose needed data was moved into packs
	RepackedObjects int   `json:"repacked_count"`
	RepackedBytes   int64 `json:"repacked_bytes"` // size of those objects
	Packs           int   `json:"pack_count"`     // number of packs that were written
	PackedBytes     int64 `json:"packed_bytes"`   // size of those packs
	DryRun          bool  `json:"dry_run"`        // nothing was removed

	// Damaged are volumes whose list of points cannot be read, or is lost: the prune kept all their points, and all data
	// that these need.
	Damaged []DamagedHead `json:"damaged"`
	// KeptAll says why no data was deleted, although some may be unneeded. It is "" otherwise.
	KeptAll string `json:"kept_all,omitempty"`
	// Unreadable are points with maps that cannot be read completely, so that the data they need is not known. KeptAll
	// says so, too.
	Unreadable []UnreadablePoint `json:"unreadable,omitempty"`
	// Accepted are volumes whose heads are missing or older than this pool has seen, and were accepted like that.
	Accepted []string `json:"accepted_rollbacks,omitempty"`
}

// UnreadablePoint is a point with a map that cannot be read completely. Other points may share the unreadable part.
type UnreadablePoint struct {
	// name of the volume; absent: no list of points names it any more
	Volume string `json:"volume,omitempty"`
	Point  string `json:"point"`  // name of the point
	Object string `json:"object"` // object of the remote that cannot be read: segments/...
	Reason string `json:"reason"` // why it cannot be read
}

// PrunedPoint is a point that a prune removed.
type PrunedPoint struct {
	Volume    string    `json:"volume"`     // name of the volume
	Name      string    `json:"point"`      // name of the point
	CreatedAt time.Time `json:"created_at"` // time when the point was made
}

// Prune removes points that the policy does not keep, and then objects that no point
// needs any more: manifests and segments of removed points, and those that interrupted
// pushes have left. It may run beside pushes, pulls and other prunes, on any host.
//
// # Why no needed object is deleted
//
// (1) Remove points from the heads. (2) List segments and manifests: only listed ones
// can be deleted. (3) Read the heads, then the sessions, then the heads again, until
// the heads did not change in between. (4) Read the manifests that the heads name or
// that sessions pin. (5) Delete the listed objects of (2) that these manifests do not
// need and that were not written under one of the sessions.
//
// A push that builds on a manifest pins it in its session, and then finds it in a
// head. If the session is among those of (3), its pins count. If the session had ended
// before (3), its commits were in the heads. If it began after the sessions were read,
// the push found the manifest in a head that was the same as in (3), or it found one
// that was pushed later; all objects of that one are either newer than the list of (2),
// or were found in turn in this way. So, by induction, they are not deleted.
//
// # Why a session that vanished does no harm
//
// The object of a session may be deleted although the push is still at work: by a lifecycle rule, an operator, or a
// restore of the bucket. (3) then does not find it, and (5) deletes what the push is about to name. So that the push
// cannot commit, (3) ends by rewriting every head, without a change, over the state that it has just read; if a head
// has changed by then, (3) begins again. A push commits only over a head that it read before it found its session to
// exist. If it read the head before it was rewritten, its commit fails. If it read the head later, its session existed
// after (3) read the sessions, so that the argument above holds. A push creates a missing head, without points, before
// it looks for its session: so either (3) rewrites that head, too, or the push finds its session gone.
//
// This holds for every store that keeps the promises of [objstore.Store]. A session that was deleted and then put back
// as it was cannot be distinguished from one that has always existed, where versions are hashes of the content.
//
// # Expired sessions
//
// A session whose process has died would keep its objects forever. Prune remembers the
// state in which it saw each session, and ends a session that has not changed since an
// earlier prune saw it, longer ago than Patience: it adds the session to the fenced ones
// in every head that the session may commit to, and then removes the session. If the
// push was only slow, it notices that when it commits, and pushes again. Clocks only
// decide how long that takes.
//
// # Why repacking is safe
//
// The argument above holds for frames, and for blocks of frames, as it does for segments: a point that is pushed later
// needs the data that was written for it, and of older frames only data that a manifest it pinned needed. So the needed
// part of a segment that no live session writes can only shrink, and a copy of that part, made after (3), suffices
// forever.
//
// Copies are packs. A pack counts once its table names it, and a table is written only once. A prune that deletes an
// unnamed pack writes its table first, without the pack; so either the prune that wrote the pack notices that and
// deletes nothing, or the pack is named and stays. Only then, and after checking that the packs exist, does a prune
// delete the objects they were copied from. Sessions of prunes only keep others from deleting packs that are about to
// be named; no safety depends on them.
//
// Two prunes may copy the same segment. Readers use the greatest of its copies by generation and name, and a copy is
// deleted only if a greater one is named and exists, and was read completely if another prune wrote it. The object of
// the segment itself is the least, and a copy of a copy is greater than that copy. So whatever prunes do at the same
// time, the greatest copy stays.
//
// A reader that finds a segment or a pack gone reads the tables, a second time if necessary, and finds a greater copy,
// which was named before. Programs that do not know packs refuse the repository: its version is raised before the first
// pack is written.
//
// # Damage
//
// The points of a head that cannot be read, or is lost, are not known. All existing manifests of its volume count as
// named by it, and the data they need stays until the head is repaired. If a manifest that no other head names cannot
// be read either, it may belong to that volume, and nothing is deleted. Nothing is deleted while a session cannot be
// read, because its pins are not known; such a session is ended like an expired one, since its owner cannot renew it.
//
// A head that is older than the pool has seen may name fewer points than it should, and a missing head that the pool
// has seen may have named points of which no manifest tells. While such a head exists, Prune changes nothing, unless
// AcceptRollback.
//
// # Errors
//
// Prune deletes nothing after an error in steps (2) to (4). Errors: NotFound (a name), Invalid, Conflict (others keep
// writing), Damaged, Permission.
//
// e is the pool that prunes, and remembers heads: see AcceptRollback. nil remembers none.
func Prune(ctx context.Context, e *engine.Engine, r *Remote, q PruneRequest) (*Pruned, error) {
	rp, err := r.Open(ctx)
	if err != nil {
		return nil, err
	}
	defer rp.Close()

	// A remote that is full must be able to get room: its reserve is for this.
	ctx = objstore.WithReserve(ctx)
	p := &pruner{repo: rp, PruneRequest: q, pool: e, remote: r.Name}
	out, err := p.prune(ctx)
	if err == nil && !q.DryRun {
		keepReserve(ctx, rp)
	}
	if err == nil && len(out.Damaged) > 0 {
		r.nameDamaged(ctx, rp, func(names map[string]string) {
			for i := range out.Damaged {
				out.Damaged[i].Volume = cmp.Or(out.Damaged[i].Volume, names[out.Damaged[i].Object])
			}
		})
	}

	return out, err
}

// prune is Prune in a repository that is open.
func (p *pruner) prune(ctx context.Context) (*Pruned, error) {
	if err := p.Policy.Check(opRemotePrune); err != nil {
		return nil, err
	}

	for _, n := range p.Names {
		if err := ref.CheckName(opRemotePrune, n); err != nil {
			return nil, err
		}
	}

	p.out = &Pruned{Points: []PrunedPoint{}, Ended: []api.Operation{}, Damaged: []DamagedHead{}, DryRun: p.DryRun}
	if p.Patience == 0 {
		p.Patience = DefaultPatience
	}

	var err error
	if p.witness, err = newWitness(ctx, p.pool, p.repo); err != nil {
		return nil, err
	}

	if err := p.runPrune(ctx); err != nil {
		return nil, errs.Wrap(opRemotePrune, "", err)
	}

	return p.out, nil
}

type pruner struct {
	repo *repo.Repo
	PruneRequest
	pool    *engine.Engine // remembers heads; nil: nobody does
	remote  string         // name of the remote, for hints; "": not known
	out     *Pruned
	witness witness

	retired map[repo.ID]bool // dry run: manifests of points that would be gone
}

// runPrune removes points, ends expired sessions, and removes the objects that nothing needs then.
func (p *pruner) runPrune(ctx context.Context) error {
	progress.From(ctx).Start(progress.ReadingPointLists, 0, 0)
	if err := p.retirePoints(ctx); err != nil {
		return err
	}

	if err := p.endSessions(ctx); err != nil {
		return err
	}

	return p.collectGarbage(ctx)
}

// collectGarbage deletes the objects that nothing needs, and moves needed frames out of wasteful objects. A dry run
// only counts them.
func (p *pruner) collectGarbage(ctx context.Context) error {
	// List what can be deleted, then find out what is needed: see Prune.
	objects, err := listObjects(ctx, p.repo)
	if err != nil {
		return err
	}

	pages, err := listPages(ctx, p.repo)
	if err != nil {
		return err
	}

	now, need, err := p.findAllNeeds(ctx, objects)
	if err != nil {
		return err
	}

	if err := p.checkCopies(ctx, &objects, need); err != nil {
		return err
	}

	// The difference is garbage.
	manifests, segments, err := p.findGarbage(ctx, objects, now, need)
	if err != nil {
		return err
	}

	named, unnamed := p.findPackGarbage(objects, now, need)
	p.out.NeededBytes = p.out.UsedBytes - p.out.PartlyUsedBytes
	if p.out.KeptAll != "" {
		p.out.HeldBytes += p.out.FreedBytes
		p.out.FreedBytes, p.out.Segments, p.out.Manifests = 0, 0, 0
		return nil
	}

	if p.DryRun {
		return p.repack(ctx, objects, now, need)
	}

	// Delete it, and move what is needed out of wasteful objects.
	if err := p.removePages(ctx, pages, now); err != nil {
		return err
	}

	if err := p.deleteGarbage(ctx, manifests, segments); err != nil {
		return err
	}

	if err := p.removePacks(ctx, named, unnamed); err != nil {
		return err
	}

	if err := p.repack(ctx, objects, now, need); err != nil {
		return err
	}

	if len(objects.moved.Tables)+p.out.Packs == 0 {
		return nil
	}

	return p.deleteStaleTables(ctx, objects, need)
}
