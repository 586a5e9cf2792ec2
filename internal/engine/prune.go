package engine

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
)

// PruneRequest says what may be removed. Objects that are pinned, mounted or being worked
// on never are, nor is the current generation of a golden, nor one that a volume or
// snapshot was made from.
type PruneRequest struct {
	KeepFreePercent float64              // stop when this much of the pool is free; 0: remove all that the others select
	OlderThan       time.Duration        // age from which on objects may go; 0: any
	Idle            time.Duration        // time since the last use from which on they may go; 0: any
	Labels          driver.LabelSelector // selector of volumes, and of goldens whose generations may go
	DryRun          bool                 // whether it is only reported what would be removed
}

// Candidate is an object that prune would remove, or has removed.
type Candidate struct {
	Ref            string    `json:"ref"`             // reference to the object
	Kind           api.Kind  `json:"kind"`            // kind of the object
	CreatedAt      time.Time `json:"created_at"`      // time when the object was made
	LastUsedAt     time.Time `json:"last_used_at"`    // time when a command last used it
	ExclusiveBytes int64     `json:"exclusive_bytes"` // space of a volume with its snapshots; for trees as last measured
	Destroyed      bool      `json:"destroyed"`       // the object was destroyed
	Kept           string    `json:"kept,omitempty"`  // why it was not destroyed
}

// PruneReport describes what prune did, or would do.
type PruneReport struct {
	Candidates  []Candidate `json:"candidates"`                  // the least recently used first
	TotalBytes  int64       `json:"total_bytes"`                 // size of the pool
	FreeBefore  int64       `json:"free_before_bytes"`           // free space of the pool before
	FreeAfter   int64       `json:"free_after_bytes"`            // free space of the pool after
	TargetBytes int64       `json:"target_free_bytes,omitempty"` // free space that was asked for
	// used space of the pool, before minus after, once settled; includes changes by other writers
	FreedBytes int64 `json:"freed_bytes"`
	Reached    bool  `json:"reached"` // the target was reached, or there was none
	DryRun     bool  `json:"dry_run"` // nothing was destroyed
}

const opPrune = "prune"

// Prune removes the least recently used volumes and unused generations: all that the
// request selects, or as many of them as it takes to free enough space. DryRun lists
// them. Each one is checked again in the transaction that claims it, and kept if it has
// been used since. Invalid.
func (e *Engine) Prune(ctx context.Context, q PruneRequest) (_ *PruneReport, err error) {
	ctx, end := e.ledger.Begin(ctx, opPrune)
	defer end(&err)

	switch {
	case q.KeepFreePercent < 0 || q.KeepFreePercent >= 100 || q.KeepFreePercent != q.KeepFreePercent:
		return nil, errs.New(errs.Invalid, opPrune, "",
			"the percentage to keep free must be more than 0 and less than 100 (got %v)",
			q.KeepFreePercent).WithHint("use for example %s", errs.Param("keep-free", "10%"))
	case q.OlderThan < 0 || q.Idle < 0:
		return nil, errs.New(errs.Invalid, opPrune, "", "an age must not be negative")
	case q.KeepFreePercent == 0 && q.OlderThan == 0 && q.Idle == 0:
		return nil, errs.New(errs.Invalid, opPrune, "", "there is no limit that says what to remove").
			WithHint("use %s, %s or %s", errs.Param("keep-free"), errs.Param("older-than"), errs.Param("idle"))
	}

	if err := e.askForPool(ctx, opPrune); err != nil {
		return nil, err
	}
	if !q.DryRun {
		if err := e.needRoot(opPrune, ""); err != nil {
			return nil, err
		}
	}

	// Return if enough is free already.
	s, err := e.settledSpace(ctx)
	if err != nil {
		return nil, err
	}

	r := &PruneReport{
		Candidates: []Candidate{}, DryRun: q.DryRun,
		TotalBytes: s.TotalBytes, FreeBefore: s.FreeBytes, FreeAfter: s.FreeBytes,
		TargetBytes: int64(float64(s.TotalBytes) * q.KeepFreePercent / 100),
	}

	if r.TargetBytes > 0 && s.FreeBytes >= r.TargetBytes {
		r.Reached = true
		return r, nil
	}

	// Choose what to remove.
	p := &pruning{e: e, q: q, report: r}
	rows, snaps, err := p.listPrunable(ctx)
	if err != nil {
		return nil, err
	}

	if rows, err = p.cutToTarget(ctx, rows, snaps); err != nil || q.DryRun {
		r.Reached = r.TargetBytes == 0
		return r, err
	}

	// Remove it, and measure what that has freed.
	perr := p.pruneList(ctx, rows)
	e.returnToHost()
	after, err := e.settledSpace(ctx)
	if err != nil {
		return r, err
	}

	r.FreeAfter, r.FreedBytes = after.FreeBytes, max(0, s.UsedBytes-after.UsedBytes)
	r.Reached = r.TargetBytes == 0 || r.FreeAfter >= r.TargetBytes
	return r, errors.Join(perr, ctx.Err())
}

// pruning is a prune under way.
type pruning struct {
	e      *Engine
	q      PruneRequest
	report *PruneReport

	// waits holds the generations that can be removed only after volumes, and when the last of these was used.
	waits map[driver.ObjectID]time.Time
}

// turn is the time by which rows are ordered.
func (p *pruning) turn(r catalog.Row) time.Time {
	if last, ok := p.waits[r.ID]; ok && last.After(r.UsedAt) {
		return last
	}
	return r.UsedAt
}

// uses holds what is in use according to the catalogue, read once for all objects.
type uses struct {
	e       *Engine
	mounts  map[driver.ObjectID]catalog.MountRecord
	marked  map[driver.ObjectID]bool     // objects that are worked on, or read
	based   map[string][]driver.ObjectID // lineages that descend from a generation, and objects that are part of none
	mirrors map[string]int               // number of a golden's newest mirror: see mirrorOf
	pinned  map[driver.ObjectID]bool     // lineages with a pinned snapshot
	goldens map[string]catalog.Golden
	snaps   map[driver.ObjectID][]catalog.Row // snapshots of a lineage
	rows    []catalog.Row
}

// readUses reads all rows of the catalogue, and what uses them.
func readUses(e *Engine, tx *catalog.Tx) (*uses, error) {
	u := &uses{e: e, marked: map[driver.ObjectID]bool{}, based: map[string][]driver.ObjectID{}, mirrors: map[string]int{},
		pinned: map[driver.ObjectID]bool{}, goldens: map[string]catalog.Golden{}, snaps: map[driver.ObjectID][]catalog.Row{}}
	var err error
	if u.mounts, err = tx.MountRecords(); err != nil {
		return nil, err
	}

	marks, err := tx.Marks()
	if err != nil {
		return nil, err
	}

	for _, m := range marks {
		u.marked[m.ID], u.marked[m.Reads] = true, true
	}

	goldens, err := tx.Goldens()
	if err != nil {
		return nil, err
	}

	for _, g := range goldens {
		u.goldens[g.Name] = g
	}

	now := time.Now()
	return u, tx.Rows("", func(r catalog.Row) error {
		if r.Mirror {
			u.mirrors[r.Golden] = max(u.mirrors[r.Golden], r.Generation)
		}
		if r.Kind != driver.Generation && r.Golden != "" {
			of := ref.Generation(r.Golden, r.Generation)
			u.based[of] = append(u.based[of], lineageOf(r))
		}
		if r.Kind == driver.Snapshot {
			u.snaps[r.Volume] = append(u.snaps[r.Volume], r)
			if r.Pinned.After(now) {
				u.pinned[r.Volume] = true
			}
		}
		u.rows = append(u.rows, r)
		return nil
	})
}

// lineageOf is the lineage of a volume, or of a snapshot's volume; anything else is one by itself.
func lineageOf(r catalog.Row) driver.ObjectID {
	if r.Kind == driver.Snapshot {
		return r.Volume
	}
	return r.Lineage()
}

// mayPrune reports whether prune may remove an object at all, and if not, why.
func (u *uses) mayPrune(r catalog.Row) (bool, string) { return u.mayPruneAfter(r, nil) }

// mayPruneAfter is mayPrune once volumes of some lineages are gone, with their snapshots.
func (u *uses) mayPruneAfter(r catalog.Row, gone map[driver.ObjectID]catalog.Row) (bool, string) {
	e := u.e
	switch {
	case r.Pinned.After(time.Now()):
		return false, "pinned" + pinnedUntil(r.Pinned)
	case u.marked[r.ID]:
		return false, "another pando process is working on it"
	}

	switch r.Kind {
	case driver.Volume:
		if u.pinned[r.Lineage()] {
			return false, "one of its snapshots is pinned"
		}
		if a, ok := u.mounts[r.ID]; ok && e.content.MountState(r, a) != content.NotMounted {
			return false, "mounted at " + a.Mountpoint
		}
		return true, ""
	case driver.Generation:
		if g := u.goldens[r.Golden]; g.Current == r.Generation {
			return false, "the current generation"
		}
		if u.mirrors[r.Golden] == r.Generation {
			return false, whyMirror
		}
		for _, lineage := range u.based[ref.Generation(r.Golden, r.Generation)] {
			if _, ok := gone[lineage]; !ok {
				return false, "volumes or snapshots were made from it"
			}
		}
		return true, ""
	}

	return false, "it is removed with its volume"
}

// listPrunable lists the objects that may be removed, the least recently used first. A generation from which volumes
// were made that may be removed stands behind these.
func (p *pruning) listPrunable(
	ctx context.Context,
) (out []catalog.Row, snaps map[driver.ObjectID][]catalog.Row, err error) {
	err = p.e.cat.View(ctx, func(tx *catalog.Tx) error {
		u, err := readUses(p.e, tx)
		if err != nil {
			return err
		}
		snaps, out = u.snaps, p.choose(u, time.Now())
		return nil
	})

	slices.SortStableFunc(out, func(a, b catalog.Row) int {
		return cmp.Or(p.turn(a).Compare(p.turn(b)), -cmp.Compare(a.Kind, b.Kind), a.CreatedAt.Compare(b.CreatedAt),
			cmp.Compare(a.ID, b.ID))
	})
	return out, snaps, err
}

// choose returns the volumes and generations that may be removed, and notes the generations that wait for volumes.
func (p *pruning) choose(u *uses, now time.Time) (out []catalog.Row) {
	q := p.q
	wanted := func(r catalog.Row, labels driver.Labels) bool {
		return q.Labels.Matches(labels) && now.Sub(r.CreatedAt) >= q.OlderThan && now.Sub(r.UsedAt) >= q.Idle
	}

	// Choose volumes by lineage, as that is what keeps a generation.
	volumes := map[driver.ObjectID]catalog.Row{}
	for _, r := range u.rows {
		if ok, _ := u.mayPrune(r); ok && r.Kind == driver.Volume && wanted(r, r.Labels) {
			volumes[r.Lineage()] = r
			out = append(out, r)
		}
	}

	// Add the generations that nothing keeps once these are gone.
	p.waits = map[driver.ObjectID]time.Time{}
	for _, r := range u.rows {
		ok, _ := u.mayPruneAfter(r, volumes)
		if !ok || r.Kind != driver.Generation || !wanted(r, u.goldens[r.Golden].Labels) {
			continue
		}
		out = append(out, r)
		for _, lineage := range u.based[ref.Generation(r.Golden, r.Generation)] {
			if v := volumes[lineage]; p.waits[r.ID].Before(v.UsedAt) {
				p.waits[r.ID] = v.UsedAt
			}
		}
	}
	return out
}

// cutToTarget returns as many rows as are needed to reach the target by their exclusive
// space, measured now, and adds them to the report. Trees are not measured, as that means
// walking them: all of them stay on the list.
func (p *pruning) cutToTarget(
	ctx context.Context, rows []catalog.Row, snaps map[driver.ObjectID][]catalog.Row,
) ([]catalog.Row, error) {
	e, r := p.e, p.report
	expected := r.FreeBefore
	for i, row := range rows {
		if r.TargetBytes > 0 && expected >= r.TargetBytes {
			return rows[:i], nil
		}

		own := []catalog.Row{row}
		if row.Kind == driver.Volume {
			own = append(own, snaps[row.Lineage()]...)
		}

		if e.cheapUsage(row.FS) {
			if err := e.measureRows(ctx, own, false); err != nil {
				return nil, err
			}
		}

		c := Candidate{Ref: row.Name, Kind: api.Kind(row.Kind), CreatedAt: row.CreatedAt, LastUsedAt: row.UsedAt}
		if row.Kind == driver.Generation {
			c.Ref = ref.Generation(row.Golden, row.Generation)
		}

		for _, o := range own {
			c.ExclusiveBytes += o.Usage.ExclusiveBytes
		}

		if e.cheapUsage(row.FS) {
			expected += c.ExclusiveBytes
		}

		r.Candidates = append(r.Candidates, c)
	}

	return rows, nil
}

// pruneBatch limits how many objects are removed between two measurements of free space.
const pruneBatch = 64

// pruneList removes the rows that have not changed since they were selected, until the
// target is reached.
func (p *pruning) pruneList(ctx context.Context, rows []catalog.Row) (failed error) {
	e, r := p.e, p.report
	used := map[driver.ObjectID]time.Time{}
	at := map[driver.ObjectID]int{}
	for i, row := range rows {
		used[row.ID], at[row.ID] = row.UsedAt, i
	}

	still := func(tx *catalog.Tx, row catalog.Row, attached bool) (bool, error) {
		return p.stillPrunable(tx, row, attached, used[row.ID], &r.Candidates[at[row.ID]])
	}

	// Remove them in batches, and measure after each, until enough is free.
	progress.From(ctx).Start(progress.Pruning, int64(len(rows)), 0)
	free := r.FreeBefore
	for from, n := 0, 1; from < len(rows) && ctx.Err() == nil; from += n {
		n = pruneBatch
		if r.TargetBytes > 0 {
			if n = nextBatch(from, free-r.FreeBefore, r.TargetBytes-free); n == 0 {
				for i := from; i < len(rows); i++ {
					r.Candidates[i].Kept = "enough space is free"
				}
				return failed
			}
		}

		// A generation must not be looked at before the volumes that keep it are gone.
		n = min(n, len(rows)-from)
		for i := from + 1; i < from+n; i++ {
			if _, waits := p.waits[rows[i].ID]; waits {
				n = i - from
			}
		}

		var batch []doomed
		for i := from; i < from+n; i++ {
			batch = append(batch, doomed{row: rows[i], ref: r.Candidates[i].Ref})
		}

		report := e.destroyRows(ctx, batch, destroyOptions{op: opPrune, why: "it was pruned", still: still})
		if err := report.firstFailure(); failed == nil {
			failed = err // continue with the others
		}

		gone := map[string]bool{}
		for _, d := range report.Destroyed {
			gone[d.Ref] = true
		}

		for i := from; i < from+n; i++ {
			c := &r.Candidates[i]
			if c.Destroyed = gone[c.Ref]; !c.Destroyed && c.Kept == "" {
				c.Kept = "it is in use now, or no longer exists"
			}
		}

		progress.From(ctx).Add(int64(n), 0)
		if r.TargetBytes > 0 {
			e.returnToHost()
			s, err := e.settledSpace(ctx)
			if err != nil {
				return cmp.Or(failed, err)
			}
			free = s.FreeBytes
		}
	}

	return failed
}

// stillPrunable decides, in the transaction that claims an object, whether it may still be removed. If not, it records
// why in c. used is when the object was last used when it was selected.
func (p *pruning) stillPrunable(
	tx *catalog.Tx, row catalog.Row, attached bool, used time.Time, c *Candidate,
) (bool, error) {
	e, q := p.e, p.q
	switch {
	case !row.UsedAt.Equal(used):
		c.Kept = "it has been used since"
	case row.Pinned.After(time.Now()):
		c.Kept = "it has been pinned since"
	case row.Kind == driver.Volume && !q.Labels.Matches(row.Labels):
		c.Kept = "its labels have changed since"
	case attached && row.Kind == driver.Volume:
		a, ok, err := tx.MountRecord(row.ID)
		if err != nil {
			return false, err
		}
		if ok && e.content.MountState(row, a) != content.NotMounted {
			c.Kept = "it has been mounted since"
		}
	case row.Kind == driver.Generation:
		g, ok, err := tx.Golden(row.Golden)
		if err != nil {
			return false, err
		}
		n, err := tx.CountDescendants(row.Golden, row.Generation)
		if err != nil {
			return false, err
		}
		if n > 0 || ok && g.Current == row.Generation {
			c.Kept = "it is in use now"
		} else if !q.Labels.Matches(g.Labels) {
			c.Kept = "its labels have changed since"
		}
	}

	return c.Kept == "", nil
}

// nextBatch returns how many objects to remove next, when done objects have freed freed
// bytes and need more bytes are missing: about half of the expected number, so that no
// more are removed than necessary. 0: enough is free.
func nextBatch(done int, freed, need int64) int {
	switch {
	case need <= 0:
		return 0
	case done == 0 || freed <= 0:
		return max(1, min(2*done, pruneBatch))
	}
	each := max(1, freed/int64(done))
	return int(max(1, min(need/(2*each), pruneBatch)))
}
