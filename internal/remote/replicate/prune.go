package replicate

import (
	"cmp"
	"context"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

const opRemotePrune = "remote prune"

// DefaultPatience is how long a session must have given no sign of life, by the
// clock of who prunes, before it is ended. It is many times what a living one lets
// pass. Nothing depends on it but the patience with others: see [Prune].
const DefaultPatience = 10 * time.Minute

// PruneRequest says what a remote keeps.
type PruneRequest struct {
	Policy Policy   // of points; the zero Policy keeps all of them
	Names  []string // of volumes that it is for; none: all
	DryRun bool     // only say what would go
	// MaxRepack is how many bytes of objects of which little is needed may be rewritten, at most; 0: none; negative: all.
	MaxRepack int64
	Patience  time.Duration // with sessions without a sign of life; 0: DefaultPatience; negative: none
	Tracker   *progress.Tracker

	// Pool is the pool that prunes, which remembers heads: see AcceptRollback. Nil remembers none.
	Pool *engine.Engine
	// AcceptRollback goes on although heads that the pool has seen are missing or were put back to an older state. What
	// only the newer ones named is garbage then, but for that of missing heads, which stays until it is repaired.
	AcceptRollback bool

	remote string // its name, for hints
}

// Pruned is what Prune did, or would do.
type Pruned struct {
	Points    []PrunedPoint `json:"points"` // that are gone, by volume, the oldest first
	Kept      int           `json:"kept"`   // points that stay, of all volumes
	Ended     []ListedWork  `json:"ended"`  // sessions that gave no sign of life
	Working   int           `json:"working"`
	Manifests int           `json:"manifests"` // that nothing needed, removed
	Segments  int           `json:"segments"`  // and segments
	// FreedBytes is what the removed objects took. UsedBytes is what is left, of
	// which PartlyUsedBytes are of no use any more: they lie in segments of
	// which something else is still needed. HeldBytes lie in segments that nothing
	// needs, but that a session which may still be at work has written.
	FreedBytes      int64 `json:"freed_bytes"`
	UsedBytes       int64 `json:"used_bytes"`
	PartlyUsedBytes int64 `json:"partly_used_bytes"`
	HeldBytes       int64 `json:"held_bytes"`
	// NeededBytes are what of UsedBytes is needed. RepackedBytes is what the objects had of which what is needed was moved
	// into packs, of PackedBytes.
	NeededBytes     int64 `json:"needed_bytes"`
	RepackedObjects int   `json:"repacked_objects"`
	RepackedBytes   int64 `json:"repacked_bytes"`
	Packs           int   `json:"packs"`
	PackedBytes     int64 `json:"packed_bytes"`
	DryRun          bool  `json:"dry_run"`

	// Damaged are volumes whose list of points cannot be read, or is lost: none of their points went, and nothing that
	// these need.
	Damaged []DamagedHead `json:"damaged"`
	// KeptAll says why nothing was deleted although it may be of no use; "" if that was not so.
	KeptAll string `json:"kept_all,omitempty"`
	// Unreadable are points whose maps cannot be read in part, so that nobody knows what they need. Then KeptAll says so.
	Unreadable []UnreadablePoint `json:"unreadable,omitempty"`
	// Accepted are volumes whose heads are missing or older than this pool has seen, which was accepted.
	Accepted []string `json:"accepted_rollbacks,omitempty"`
}

// UnreadablePoint is a point of whose map a part cannot be read. Others may share that part.
type UnreadablePoint struct {
	Volume string `json:"volume"` // "" if no list of points names it any more
	Point  string `json:"point"`
	Object string `json:"object"` // in which the part is: "segments/..."
	Reason string `json:"reason"`
}

// PrunedPoint is a point that a prune has removed.
type PrunedPoint struct {
	Volume    string    `json:"volume"`
	Name      string    `json:"name"`
	CreatedAt time.Time `json:"created_at"`
}

// Prune removes points that the policy does not keep, and then what nothing needs
// any more: manifests and segments of removed points, and what pushes have left that
// were interrupted. It may run beside pushes, pulls and other prunes, on any host.
//
// # Why nothing is deleted that is needed
//
// (1) Points go out of the heads. (2) Segments and manifests are listed: only these
// can be deleted. (3) Heads are read, then sessions, then heads again, until the
// heads did not change in between. (4) Manifests that the heads name, or that
// sessions pin, are read. (5) What is in the list of (2) and not needed by these,
// and not written under one of the sessions, is deleted.
//
// Somebody who builds upon a manifest pins it in his session and then finds it in a
// head. If his session is in (3), his pins count. If it had ended before (3), what he
// committed was in the heads. If he began after the sessions were read, he found the
// manifest in a head that was the same as in (3), or he found one that was pushed
// later, all of which is either newer than the list of (2), or found in its turn like
// this. So, by induction, it is not deleted.
//
// A session whose writer is dead would keep what it wrote for ever. Prune remembers
// what it saw of each session, and ends one that has not moved since an earlier prune
// saw it, longer ago than Patience: it writes into every head that the session may
// commit to that it must not any more, and then removes the session. If its writer
// was only slow, it finds that out when it commits, and pushes again. Clocks only
// decide how patient that is.
//
// # Why repacking is safe
//
// What says which segments stay says the same of their frames, and of blocks of frames: a point that is pushed later
// needs what was written for it, and of older frames only what a manifest needed that it has pinned. So what is
// needed of a segment that no living session writes only becomes less, and a copy of that, made after (3), suffices
// for ever.
//
// Copies are packs. A pack counts once its table names it, which is written once. Whoever deletes one that is not named
// writes its table first, without it; so either its prune finds that out and deletes nothing, or the pack is named and
// stays. After that, and having seen that the packs are there, the prune deletes what they were copied from. Sessions
// of prunes only keep others from deleting packs that are about to be named; nothing depends on them.
//
// Two prunes may copy the same segment. Of all its copies the one that is the greatest by generation and name is used,
// and a copy is deleted only if a greater one is named and there, and was read whole if another prune wrote it. The
// object of the segment is the least, and a copy of a copy is greater than that. So whatever prunes do at the same
// time, the greatest stays.
//
// A reader that finds a segment, or a pack, gone reads the tables, again if it has, and finds a greater copy, which was
// named before. Programs that do not know packs refuse the repository: its version is raised before the first one.
//
// # Damage
//
// A head that cannot be read, or is lost, names points that nobody knows. All manifests of its volume that are there
// count as named by it, and what they need stays, until somebody repairs it. If a manifest that no other head names
// cannot be
// read either, it may be of that volume, and nothing is deleted. Nor is anything while a session cannot be read,
// whose pins are not known: it is ended like one that gives no sign of life, as its owner cannot renew it.
//
// A head that is older than one that the pool has seen may name less than it should, and one that it has seen and
// that is missing may have named what no manifest tells. While there is such a head, Prune changes nothing, unless
// AcceptRollback.
//
// # Errors
//
// Any error while it looks deletes nothing. NotFound (a name), Invalid, Conflict
// (others write all the time), Damaged, Permission.
func Prune(ctx context.Context, r *Remote, q PruneRequest) (*Pruned, error) {
	rp, err := r.Open(ctx)
	if err != nil {
		return nil, err
	}

	defer rp.Close()
	q.remote = r.Name
	out, err := prune(ctx, rp, q)
	if err == nil && len(out.Damaged) > 0 {
		r.nameDamaged(ctx, rp, func(names map[string]string) {
			for i := range out.Damaged {
				out.Damaged[i].Volume = cmp.Or(out.Damaged[i].Volume, names[out.Damaged[i].Object])
			}
		})
	}

	return out, err
}

func prune(ctx context.Context, r *repo.Repo, q PruneRequest) (*Pruned, error) {
	if err := q.Policy.Check(opRemotePrune); err != nil {
		return nil, err
	}

	for _, n := range q.Names {
		if err := ref.CheckName(opRemotePrune, n); err != nil {
			return nil, err
		}
	}

	p := &pruner{repo: r, PruneRequest: q, out: &Pruned{Points: []PrunedPoint{}, Ended: []ListedWork{},
		Damaged: []DamagedHead{}, DryRun: q.DryRun}}
	if p.Patience == 0 {
		p.Patience = DefaultPatience
	}

	var err error
	if p.witness, err = newWitness(ctx, p.Pool, r); err != nil {
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
	out     *Pruned
	witness witness

	retired map[repo.ID]bool // dry run: manifests of points that would be gone
}

func (p *pruner) runPrune(ctx context.Context) error {
	p.Tracker.Start("reading lists of points", 0, 0)
	if err := p.retirePoints(ctx); err != nil {
		return err
	}

	if err := p.endSessions(ctx); err != nil {
		return err
	}

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
