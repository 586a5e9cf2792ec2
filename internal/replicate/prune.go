package replicate

import (
	"cmp"
	"context"
	"slices"
	"time"

	"pando/internal/errs"
	"pando/internal/progress"
	"pando/internal/ref"
	"pando/internal/repo"
)

const opRemotePrune = "remote prune"

// DefaultPatience is how long a session must have given no sign of life, by the
// clock of who prunes, before it is ended. It is many times what a living one lets
// pass. Nothing depends on it but the patience with others: see [Prune].
const DefaultPatience = 10 * time.Minute

// maxFenced is how many ended sessions a head remembers.
const maxFenced = 256

// PruneRequest says what a remote keeps.
type PruneRequest struct {
	Policy   Policy        // of points; the zero Policy keeps all of them
	Names    []string      // of volumes that it is for; none: all
	DryRun   bool          // only say what would go
	Patience time.Duration // with sessions without a sign of life; 0: DefaultPatience; negative: none
	Tracker  *progress.Tracker
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
	// which at most PartlyUsedBytes are of no use any more: they lie in segments of
	// which something else is still needed. HeldBytes lie in segments that nothing
	// needs, but that a session which may still be at work has written.
	FreedBytes      int64 `json:"freed_bytes"`
	UsedBytes       int64 `json:"used_bytes"`
	PartlyUsedBytes int64 `json:"partly_used_bytes"`
	HeldBytes       int64 `json:"held_bytes"`
	DryRun          bool  `json:"dry_run"`

	// Damaged are volumes whose list of points cannot be read, or is lost: none of their points went, and nothing that these need.
	Damaged []DamagedHead `json:"damaged"`
	// KeptAll says why nothing was deleted although it may be of no use; "" if that was not so.
	KeptAll string `json:"kept_all,omitempty"`
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
// # Damage
//
// A head that cannot be read, or is lost, names points that nobody knows. All manifests of its volume that are there
// count as named by it, and what they need stays, until somebody repairs it. If a manifest that no other head names cannot be
// read either, it may be of that volume, and nothing is deleted. Nor is anything while a session cannot be read,
// whose pins are not known: it is ended like one that gives no sign of life, as its owner cannot renew it.
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
	p := &pruner{repo: r, PruneRequest: q, out: &Pruned{Points: []PrunedPoint{}, Ended: []ListedWork{}, Damaged: []DamagedHead{}, DryRun: q.DryRun}}
	if p.Patience == 0 {
		p.Patience = DefaultPatience
	}
	if err := p.run(ctx); err != nil {
		return nil, errs.Wrap(opRemotePrune, "", err)
	}
	return p.out, nil
}

type pruner struct {
	repo *repo.Repo
	PruneRequest
	out *Pruned

	retired map[repo.ID]bool // dry run: manifests of points that would be gone
}

func (p *pruner) run(ctx context.Context) error {
	p.Tracker.Start("looking", 0, 0)
	if err := p.retire(ctx); err != nil {
		return err
	}
	if err := p.endSessions(ctx); err != nil {
		return err
	}
	objects, err := listObjects(ctx, p.repo)
	if err != nil {
		return err
	}
	now, need, err := p.lookForNeeds(ctx)
	if err != nil {
		return err
	}
	if err := p.needOfDamaged(ctx, objects, now, &need); err != nil {
		return err
	}
	manifests, segments, err := p.garbage(ctx, objects, now, need)
	if err != nil {
		return err
	}
	if p.out.KeptAll != "" {
		p.out.HeldBytes += p.out.FreedBytes
		p.out.FreedBytes, p.out.Segments, p.out.Manifests = 0, 0, 0
		return nil
	}
	if p.DryRun {
		return nil
	}
	return p.remove(ctx, manifests, segments)
}

// retire takes points out of the heads. A dry run only notes them.
func (p *pruner) retire(ctx context.Context) error {
	all, err := readHeads(ctx, p.repo)
	if err != nil {
		return err
	}
	heads := all.good
	for _, n := range p.Names {
		if all.isBad(p.repo, n) {
			return damagedVolume(opRemotePrune, n, errs.New(errs.Damaged, "", "", "it is damaged"))
		}
		if !slices.ContainsFunc(heads, func(h repo.HeadState) bool { return h.Head.Name == n && !h.Head.Gone }) {
			return noVolume(errs.New(errs.NotFound, "", "", ""), p.repo, opRemotePrune, n)
		}
	}
	p.retired = map[repo.ID]bool{}
	going := p.plan(heads)
	for _, s := range heads {
		h := s.Head
		if h.Gone {
			continue
		}
		gone := going[h.Name]
		if len(gone) == 0 {
			p.out.Kept += len(h.Recent)
			continue
		}
		left := h
		if !p.DryRun {
			left, err = changeHead(ctx, p.repo, opRemotePrune, h.Name, func(h *repo.Head) (bool, error) {
				// Others may have removed points meanwhile: what is the newest now stays.
				var left []repo.Point
				for i, keep := range p.Policy.keeps(*h) {
					if keep || !gone[h.Recent[i].Manifest] {
						left = append(left, h.Recent[i])
					}
				}
				less := len(left) < len(h.Recent)
				h.Recent = left
				return less, nil
			})
			if err != nil {
				return err
			}
		}
		for _, pt := range h.Recent {
			if gone[pt.Manifest] && (p.DryRun || !lists(left, pt.Manifest)) {
				p.out.Points = append(p.out.Points, PrunedPoint{h.Name, pt.Name, pt.CreatedAt})
				p.retired[pt.Manifest] = true
			}
		}
		p.out.Kept += len(left.Recent)
		if p.DryRun {
			p.out.Kept -= len(gone)
		}
	}
	return nil
}

// plan says which points go, by volume. The newest never does, so what a push adds
// meanwhile makes no difference but to be kept.
func (p *pruner) plan(heads []repo.HeadState) map[string]map[repo.ID]bool {
	going := map[string]map[repo.ID]bool{}
	parent := map[repo.ID]repo.ID{}
	needed := map[repo.ID]bool{} // by a point that stays
	for _, h := range heads {
		for _, pt := range h.Head.Recent {
			if pt.Content.Chained() && !pt.Parent.IsZero() {
				parent[pt.Manifest] = pt.Parent
			}
		}
	}
	for _, s := range heads {
		h := s.Head
		keep := p.Policy.keeps(h)
		for i, pt := range h.Recent {
			if !keep[i] && (len(p.Names) == 0 || slices.Contains(p.Names, h.Name)) {
				if going[h.Name] == nil {
					going[h.Name] = map[repo.ID]bool{}
				}
				going[h.Name][pt.Manifest] = true
				continue
			}
			for id := parent[pt.Manifest]; !id.IsZero() && !needed[id]; id = parent[id] {
				needed[id] = true
			}
		}
	}
	for _, ids := range going {
		for id := range ids {
			if needed[id] {
				delete(ids, id)
			}
		}
	}
	return going
}

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
		if ended, err := p.fence(ctx, s); err != nil {
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

// fence makes sure that a session never commits again, and removes it. A head that
// is not there yet is made, so that the session cannot make it. False: one of its heads
// is damaged and cannot tell it, so that it stays.
func (p *pruner) fence(ctx context.Context, s repo.SessionState) (bool, error) {
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

// scene is what the remote's heads and sessions were at one moment.
type scene struct {
	heads    []repo.HeadState
	damaged  []DamagedHead
	sessions []repo.SessionState
}

// works reports whether a session is there.
func (s scene) works(id repo.ID) bool {
	return slices.ContainsFunc(s.sessions, func(x repo.SessionState) bool { return x.Session.ID == id })
}

// lookForNeeds finds what is there and what of it must stay. If something that must stay is
// gone, somebody may have removed it just then: it looks again, as long as the heads change.
func (p *pruner) lookForNeeds(ctx context.Context) (scene, need, error) {
	damaged := p.out.Damaged
	now, err := p.look(ctx)
	for range headTries {
		if err != nil {
			return now, need{}, err
		}
		n, err := p.needed(ctx, now)
		if err == nil || !errs.Is(err, errs.Damaged) {
			return now, n, err
		}
		p.out.Damaged = damaged
		again, lerr := p.look(ctx)
		if lerr != nil || (headset{now.heads, now.damaged}).same(headset{again.heads, again.damaged}) {
			return now, n, cmp.Or(lerr, err)
		}
		now = again
	}
	return now, need{}, tooBusy()
}

// tooBusy is why a prune gives up.
func tooBusy() error {
	return errs.New(errs.Conflict, opRemotePrune, "", "volumes are being pushed all the time, so nothing was deleted").
		WithHint("points have been removed; run it again for the space")
}

// look reads sessions between two readings of the heads that are the same.
func (p *pruner) look(ctx context.Context) (scene, error) {
	heads, err := readHeads(ctx, p.repo)
	if err != nil {
		return scene{}, err
	}
	for range headTries {
		sessions, unread, err := readSessions(ctx, p.repo)
		if err != nil {
			return scene{}, err
		}
		again, err := readHeads(ctx, p.repo)
		if err != nil {
			return scene{}, err
		}
		if heads.same(again) {
			if len(unread) > 0 {
				p.out.KeptAll = "a session cannot be read, so that nobody knows what it needs"
			}
			p.out.Damaged = append(p.out.Damaged, again.bad...)
			sessions = append(sessions, unread...)
			p.out.Working = len(sessions)
			return scene{again.good, again.bad, sessions}, nil
		}
		heads = again
	}
	return scene{}, tooBusy()
}

// objects are those that a prune may delete, as they were listed.
type objects struct {
	segments  map[repo.Segment]int64 // bytes
	manifests []repo.ID
}

func listObjects(ctx context.Context, r *repo.Repo) (objects, error) {
	o := objects{segments: map[repo.Segment]int64{}}
	for s, err := range r.Segments(ctx) {
		if err != nil {
			return o, err
		}
		o.segments[s.Segment] = s.Bytes
	}
	for id, err := range r.Manifests(ctx) {
		if err != nil {
			return o, err
		}
		o.manifests = append(o.manifests, id)
	}
	return o, nil
}

// need is what must stay.
type need struct {
	manifests map[repo.ID]bool
	segments  map[repo.Segment]int64 // at least so many bytes of it are needed

	todo []repo.ID // manifests whose own needs are not yet noted
}

// add adds a manifest that must stay.
func (n *need) add(id repo.ID) {
	if !id.IsZero() && !n.manifests[id] {
		n.manifests[id] = true
		n.todo = append(n.todo, id)
	}
}

// uses notes what a manifest needs.
func (n *need) uses(m *repo.Manifest) {
	for _, u := range m.Uses {
		n.segments[u.Segment] = max(n.segments[u.Segment], u.Bytes)
	}
	if m.Content.Chained() {
		n.add(m.Parent)
	}
}

// needed reads the manifests that must stay and notes the segments that they name:
// those in heads, those that sessions pin, and whatever a stream among them is the
// difference from.
func (p *pruner) needed(ctx context.Context, now scene) (need, error) {
	n := need{manifests: map[repo.ID]bool{}, segments: map[repo.Segment]int64{}}
	p.Tracker.Start("reading manifests", 0, 0)

	// What heads name must be there.
	for _, h := range now.heads {
		for _, pt := range h.Head.Recent {
			if !p.DryRun || !p.retired[pt.Manifest] {
				n.add(pt.Manifest)
			}
		}
	}
	if err := p.readNeeds(ctx, &n, func(id repo.ID, err error) error { return p.unreadable(now, id, err) }); err != nil {
		return n, err
	}

	// What only sessions have pinned may be gone already, and so may what that was the difference
	// from: who has pinned it finds that out.
	for _, s := range now.sessions {
		for _, id := range s.Session.Pins {
			n.add(id)
		}
	}
	return n, p.readNeeds(ctx, &n, func(id repo.ID, err error) error {
		if errs.Is(err, errs.NotFound) {
			return nil
		}
		return p.unreadable(now, id, err)
	})
}

// readNeeds reads the manifests that were added, and notes what they need, also of others.
func (p *pruner) readNeeds(ctx context.Context, n *need, failed func(repo.ID, error) error) error {
	for len(n.todo) > 0 {
		batch := n.todo
		n.todo = nil
		err := readManifests(ctx, p.repo, batch, func(m repo.Manifest) {
			p.Tracker.Add(1, 0)
			n.uses(&m)
		}, failed)
		if err != nil {
			return err
		}
	}
	return nil
}

// needOfDamaged adds what volumes need whose heads cannot be read, or are lost: all manifests of them that are there.
// Heads are never deleted, so one is lost if a manifest names its volume and nobody is about to make it.
func (p *pruner) needOfDamaged(ctx context.Context, o objects, now scene, n *need) error {
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

	unnamed := slices.DeleteFunc(slices.Clone(o.manifests), func(id repo.ID) bool { return n.manifests[id] || p.retired[id] })
	kept := ""
	unread := func(id repo.ID, err error) error {
		if broken(err) {
			kept = "manifest " + id.String() + " cannot be read, and may be of a volume whose list of points is damaged or lost"
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
		if !is && now.works(m.Session) {
			return // the first push of a volume, which is about to make its head
		}
		if !is {
			i = len(p.out.Damaged)
			damaged[id] = i
			p.out.Damaged = append(p.out.Damaged, DamagedHead{Object: "heads/" + id.String(), Reason: "it is missing", id: id})
		}
		p.out.Damaged[i].Volume = m.Volume
		n.manifests[m.ID] = true
		n.uses(&m)
	}, unread)
	if err != nil {
		return err
	}
	if err := p.readNeeds(ctx, n, unread); err != nil {
		return err
	}
	if len(damaged) > 0 {
		p.out.KeptAll = cmp.Or(p.out.KeptAll, kept)
	}
	return nil
}

// unreadable words why nothing is deleted.
func (p *pruner) unreadable(now scene, id repo.ID, err error) error {
	what := id.String()
	for _, h := range now.heads {
		for _, pt := range h.Head.Recent {
			if pt.Manifest == id {
				what = h.Head.Name + "@" + pt.Name
			}
		}
	}
	if k := errs.KindOf(err); k != errs.NotFound && k != errs.Damaged {
		return err
	}
	return errs.New(errs.Damaged, opRemotePrune, what, "its manifest cannot be read, so nobody knows what it needs, and nothing was deleted: %w", err).
		WithHint("see %s; if the point is lost, remove it with %s, and prune again", errs.Run("verify"), errs.Run("remote delete"))
}

// garbage says what of the listed objects goes.
func (p *pruner) garbage(ctx context.Context, o objects, now scene, n need) (manifests []repo.ID, segments []repo.Segment, err error) {
	writing := slices.ContainsFunc(now.sessions, func(s repo.SessionState) bool { return s.Session.Kind == repo.Push })
	var maybe []repo.ID
	for _, id := range o.manifests {
		if n.manifests[id] {
			continue
		}
		if writing {
			maybe = append(maybe, id) // a session may be about to commit it
		} else {
			manifests = append(manifests, id)
		}
	}
	err = readManifests(ctx, p.repo, maybe, func(m repo.Manifest) {
		if !now.works(m.Session) {
			manifests = append(manifests, m.ID)
		}
	}, func(_ repo.ID, err error) error {
		if k := errs.KindOf(err); k == errs.NotFound || k == errs.Damaged {
			return nil // gone, or nobody knows whose it is: it stays until nobody is at work
		}
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	for s, size := range o.segments {
		used, is := n.segments[s]
		switch {
		case is:
			p.out.UsedBytes += size
			p.out.PartlyUsedBytes += max(0, size-used)
		case now.works(s.Session):
			p.out.HeldBytes += size
		default:
			segments = append(segments, s)
			p.out.Segments++
			p.out.FreedBytes += size
		}
	}
	p.out.Manifests = len(manifests)
	return manifests, segments, nil
}

// remove deletes manifests first, so that none is there whose segments are not.
func (p *pruner) remove(ctx context.Context, manifests []repo.ID, segments []repo.Segment) error {
	p.Tracker.Start("deleting", int64(len(manifests)+len(segments)), 0)
	err := eachOf(ctx, manifests, func(ctx context.Context, id repo.ID) error {
		p.Tracker.Add(1, 0)
		return p.repo.DeleteManifest(ctx, id)
	})
	if err != nil {
		return err
	}
	return eachOf(ctx, segments, func(ctx context.Context, s repo.Segment) error {
		p.Tracker.Add(1, 0)
		return p.repo.DeleteSegment(ctx, s)
	})
}
