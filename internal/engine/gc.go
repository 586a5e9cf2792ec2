package engine

import (
	"cmp"
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/ledger"
	"pando/internal/engine/pool"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// Freed is something that gc removed.
type Freed struct {
	Ref string `json:"ref"` // reference to what was removed
	ID  string `json:"id"`  // ID of what was removed
	Why string `json:"why"` // reason to remove it
	// Bytes is the difference of the pool's used space before and after, once settled; absent: it was not measured.
	Bytes *int64 `json:"returned_bytes,omitempty"`
}

// Kept is something that gc left, and why.
type Kept struct {
	Ref  string         `json:"ref"`  // reference to what stays
	Kind api.Kind       `json:"kind"` // kind of what stays
	Why  []errs.Message `json:"why"`  // reasons to keep it

	Bytes int64 `json:"tied_bytes,omitempty"` // space that would return without a tie
}

// GCReport describes what gc did.
type GCReport struct {
	Sweep
	// number of objects that were destroyed earlier, and whose space was returned now
	Reclaimed int `json:"reclaimed_count"`
	Undone    int `json:"undone_count"`  // number of interrupted operations that were cleaned up
	Expired   int `json:"expired_count"` // number of expired volumes and snapshots that were destroyed
	// number of objects that the driver kept because others depended on them, and that were removed now
	Untied int `json:"untied_count"`
	// number of generations that were removed, as their goldens do not keep them
	Retired int `json:"retired_count"`
	// used space of the pool before, minus that after, once settled; other writers change it as well
	FreedBytes int64 `json:"freed_bytes"`
	// free ranges that were reported to the file below a loop-backed pool
	TrimmedBytes int64 `json:"trimmed_bytes"`
	// disk space that the file of a loop-backed pool gave back
	HostFreed  int64          `json:"host_freed_bytes"`
	Decided    float64        `json:"decided_seconds"`       // time to compare the pool with the catalogue
	Duration   float64        `json:"duration_seconds"`      // time that all of it took
	Freed      []Freed        `json:"freed,omitempty"`       // what was removed
	KeptThings []Kept         `json:"kept_things,omitempty"` // what stays, and why, if it is to be explained
	Warnings   []errs.Message `json:"warnings,omitempty"`    // what could not be cleaned up
}

// freedMost limits how many objects are measured one by one, as each measurement takes a moment.
const freedMost = 100

// freed collects the objects that a gc removes.
type freed struct {
	mu      sync.Mutex
	things  []Freed
	measure bool
}

// settlePatience is how long a measurement of free space waits for the filesystem
// to free space in the background.
const settlePatience = 5 * time.Second

// settledSpace measures the pool's space once the filesystem has freed what was removed, or after settlePatience.
func (e *Engine) settledSpace(ctx context.Context) (pool.Space, error) {
	return e.pool.WaitFreed(ctx, settlePatience)
}

// removeObject makes the driver remove an object that no longer has a name. During a
// gc it records why, and how much space that returned to the pool.
func (e *Engine) removeObject(ctx context.Context, id driver.ObjectID, ref, why string) error {
	f := callOf(ctx).freed
	destroy := func() error { return e.drv.Destroy(ctx, id) }
	if f == nil {
		return e.destroyObject(ctx, destroy)
	}

	f.mu.Lock()
	defer f.mu.Unlock()

	measure := f.measure && len(f.things) < freedMost
	var before, after pool.Space
	var err error
	if measure {
		if before, err = e.settledSpace(ctx); err != nil {
			return err
		}
	}

	if err := e.destroyObject(ctx, destroy); err != nil {
		return err
	}

	thing := Freed{Ref: ref, ID: string(id), Why: why}
	if measure {
		if after, err = e.settledSpace(ctx); err == nil {
			bytes := max(0, before.UsedBytes-after.UsedBytes)
			thing.Bytes = &bytes
		}
	}

	f.things = append(f.things, thing)
	return nil
}

// GCRequest says how to clean up.
type GCRequest struct {
	Explain bool // measure what each removal returns, and say why each remaining object stays
}

// GC cleans up the pool completely: it does the work of Maintain without
// a time limit, compares the whole pool with the catalogue, applies the retention of
// goldens and, on a loop-backed pool, returns free space to the filesystem below.
func (e *Engine) GC(ctx context.Context, q GCRequest) (_ *GCReport, err error) {
	ctx, end := e.ledger.Begin(ctx, "gc")
	defer end(&err)

	if err := e.askForPool(ctx, "gc"); err != nil {
		return nil, err
	}

	// Collect what is removed, and the warnings; remove without a time limit.
	start := time.Now()
	c := callOf(ctx)
	said := &warnings.List{}
	c.freed = &freed{measure: q.Explain}
	ctx = warnings.Collect(withCall(ctx, c), said)
	ctx = ledger.ReclaimUntil(mayUseReserve(ctx), time.Time{})
	defer e.refillReserve()

	before, err := e.settledSpace(ctx)
	if err != nil {
		return nil, err
	}

	// Finish or undo what was interrupted, and destroy what has expired.
	recovered, err := e.Maintain(ctx, start)
	if err != nil {
		return nil, err
	}

	if err := e.cat.LostError(); err != nil {
		return nil, err
	}

	// Destroy what retention does not keep, and what no longer has dependents.
	r := &GCReport{}
	if r.Retired, err = e.applyAllRetention(ctx); err != nil {
		return nil, err
	}

	if t, ok := e.drv.(driver.Tied); ok {
		if r.Untied, err = t.Reap(ctx); err != nil {
			return nil, err
		}
	}

	// Compare the pool with the catalogue, and remove the garbage.
	deciding := time.Now()
	if err := e.sweepLocked(ctx, r); err != nil {
		return nil, err
	}

	r.Decided = time.Since(deciding).Seconds()
	r.Reclaimed, r.Undone, r.Expired = recovered.Reclaimed, recovered.Undone, recovered.Expired
	r.Sweep.addEarlier(recovered.Swept)
	r.Freed = c.freed.things
	r.Warnings = append(recovered.Warnings, said.Messages()...)
	if err := e.trimBacking(r); err != nil {
		return nil, err
	}

	// Explain what remains, if requested.
	if q.Explain {
		if r.KeptThings, err = e.explainKept(ctx); err != nil {
			return nil, err
		}
	}

	after, err := e.settledSpace(ctx)
	if err != nil {
		return nil, err
	}

	r.FreedBytes = max(0, before.UsedBytes-after.UsedBytes, sumFreed(r.Freed))
	r.Duration = time.Since(start).Seconds()
	return r, nil
}

// sumFreed adds up the space that single removals returned. The sum also counts data that reached the pool only after
// GC had measured it the first time.
func sumFreed(things []Freed) int64 {
	var sum int64
	for _, f := range things {
		if f.Bytes != nil {
			sum += *f.Bytes
		}
	}
	return sum
}

// sweepLocked sweeps with the pool's lock held, so that nobody creates, mounts or removes the pool.
func (e *Engine) sweepLocked(ctx context.Context, r *GCReport) error {
	unlock, err := pool.Lock(ctx, e.pool.Dir)
	if err != nil {
		return err
	}
	defer unlock()
	s, err := e.sweep(ctx)
	if err == nil {
		r.Sweep = *s
	}
	return err
}

// addEarlier adds the counts of an earlier sweep of the same command; o may be nil.
func (s *Sweep) addEarlier(o *Sweep) {
	if o != nil {
		s.Garbage += o.Garbage
		s.StaleMounts += o.StaleMounts
		s.Loops += o.Loops
	}
}

// applyAllRetention removes the generations that no golden keeps, and returns their number.
func (e *Engine) applyAllRetention(ctx context.Context) (n int, err error) {
	var goldens []catalog.Golden
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		goldens, err = tx.Goldens()
		return err
	}); err != nil {
		return 0, err
	}

	for _, g := range goldens {
		if g.Keep == 0 {
			continue
		}
		unlock, _, err := e.lockGolden(ctx, g.Name)
		if err != nil {
			return n, err
		}
		gone, err := e.removeOldGenerations(ctx, g.Name)
		unlock()
		n += len(gone)
		if err != nil {
			return n, err
		}
	}

	return n, nil
}

// explainKept lists everything in the pool with the reasons why it stays.
func (e *Engine) explainKept(ctx context.Context) ([]Kept, error) {
	var u *uses
	var tombstones []catalog.Tombstone
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if u, err = readUses(e, tx); err != nil {
			return err
		}
		tombstones, err = tx.Unreclaimed(0)
		return err
	}); err != nil {
		return nil, err
	}

	refs := u.refs()
	clones := map[driver.ObjectID]int{}
	for _, r := range u.rows {
		clones[r.OriginID]++
	}

	// Explain objects that have a name.
	out := []Kept{}
	for _, r := range u.rows {
		k := Kept{Ref: refs[r.ID], Kind: api.Kind(r.Kind)}
		if r.Pinned.After(time.Now()) {
			k.Why = append(k.Why, errs.Messagef("pinned%s", pinnedUntil(r.Pinned)))
		}

		switch r.Kind {
		case driver.Volume:
			k.Why = append(k.Why, u.whyVolume(ctx, r)...)
		case driver.Snapshot:
			k.Why = append(k.Why, "a snapshot stays as long as its volume")
		case driver.Generation:
			k.Why = append(k.Why, whyGeneration(u, r)...)
		case driver.Layer:
			k.Why = append(k.Why, u.whyLayer(r))
		}

		if n := clones[r.ID]; n > 0 && e.caps.Sharing {
			k.Why = append(k.Why, errs.Messagef("origin of %s; these share its blocks, and can exist without it",
				countOf(int64(n), "clone", "clones")))
		}

		out = append(out, k)
	}

	slices.SortStableFunc(out, func(a, b Kept) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Ref, b.Ref))
	})

	// Explain destroyed objects that still use space.
	for _, g := range tombstones {
		why := "destroyed, but the driver could not remove it yet"
		if who := e.content.MountHolders(ctx, g.ID); who != "" {
			why += ": " + who
		}
		out = append(out, Kept{Ref: g.Ref, Kind: api.KindTrash, Why: []errs.Message{errs.Messagef("%s", why)}})
	}

	ties, err := u.keptTies(ctx)
	return append(out, ties...), err
}

// whyLayer explains why a layer stays.
func (u *uses) whyLayer(r catalog.Row) errs.Message {
	n := 0
	for _, x := range u.rows {
		if x.Lower == r.ID {
			n++
		}
	}
	if n == 0 {
		return "the empty upper layer that overlays are cloned from"
	}
	return errs.Messagef("removed, and stays for %s", countOf(int64(n), "overlay", "overlays"))
}

// refs returns the references of all rows.
func (u *uses) refs() map[driver.ObjectID]string {
	volumes := map[driver.ObjectID]string{}
	for _, r := range u.rows {
		if r.Kind == driver.Volume {
			volumes[r.Lineage()] = r.Name
		}
	}

	out := make(map[driver.ObjectID]string, len(u.rows))
	for _, r := range u.rows {
		switch {
		case r.Kind == driver.Generation, r.Kind == driver.Layer && r.Name == "":
			out[r.ID] = ref.Generation(r.Golden, r.Generation)
		case r.Kind == driver.Snapshot:
			out[r.ID] = volumes[r.Volume] + "@" + r.Name
		default:
			out[r.ID] = r.Name
		}
	}

	return out
}

// keptTies lists the destroyed objects that the driver must keep, with the space they
// use and the objects that depend on them.
func (u *uses) keptTies(ctx context.Context) ([]Kept, error) {
	e := u.e
	t, ok := e.drv.(driver.Tied)
	if !ok {
		return nil, nil
	}

	all, err := t.Ties(ctx)
	if err != nil {
		return nil, err
	}

	// Explain for each where its blocks are, and which objects need them.
	refs := u.refs()
	out := make([]Kept, 0, len(all))
	for _, tie := range all {
		k := Kept{Ref: tie.Name, Kind: api.KindTie, Bytes: tie.Bytes}
		why := "destroyed; its blocks are still needed"
		if tie.Holder != "" {
			why += ", and are stored with " + cmp.Or(refs[tie.Holder], string(tie.Holder))
		}

		k.Why = append(k.Why, errs.Messagef("%s", why))
		var by []string
		for _, id := range tie.HeldBy {
			by = append(by, cmp.Or(refs[id], string(id)))
		}

		if n := len(by); n > 0 {
			slices.Sort(by)
			if n > tiesNamed {
				by = append(by[:tiesNamed], itoa(n-tiesNamed)+" more")
			}
			k.Why = append(k.Why, errs.Messagef("it stays until these are destroyed or flattened (%s): %s", errs.Run("flatten"),
				strings.Join(by, ", ")))
		}

		if len(tie.Foreign) > 0 {
			k.Why = append(k.Why, errs.Messagef("it stays until these, which are not Pando's, are removed: %s",
				strings.Join(tie.Foreign, ", ")))
		}

		out = append(out, k)
	}

	slices.SortFunc(out, func(a, b Kept) int { return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Ref, b.Ref)) })
	return out, nil
}

// tiesNamed limits how many of the objects that hold another are named.
const tiesNamed = 8

// whyVolume returns the reasons why a volume stays.
func (u *uses) whyVolume(ctx context.Context, r catalog.Row) []errs.Message {
	e := u.e
	var why []errs.Message
	if u.pinned[r.Lineage()] {
		why = append(why, "one of its snapshots is pinned")
	}

	a, has := u.mounts[r.ID]
	state := content.NotMounted
	if has {
		state = e.content.MountState(r, a)
	}

	switch state {
	case content.Mounted:
		why = append(why, errs.Messagef("mounted at %s", a.Mountpoint))
	case content.HeldElsewhere:
		why = append(why, errs.Messagef("mounted, but no longer at %s, where Pando mounted it", a.Mountpoint))
	}

	if state != content.NotMounted {
		if who := e.content.Holders(ctx, r, a); who != "" {
			why = append(why, errs.Messagef("%s", who))
		}
	}

	switch {
	case u.marked[r.ID]:
		why = append(why, "another pando process is working on it")
	case r.ExpiresAt.IsZero():
		why = append(why, errs.Messagef("it has no expiry date; last used at %s", r.UsedAt.Local().Format(time.DateTime)))
	case r.ExpiresAt.After(time.Now()):
		why = append(why, errs.Messagef("it expires at %s", r.ExpiresAt.Local().Format(time.DateTime)))
	default:
		why = append(why, "it has expired, and is destroyed as soon as nothing above prevents it")
	}

	return why
}

// whyGeneration returns the reasons why a generation stays.
func whyGeneration(u *uses, r catalog.Row) []errs.Message {
	g := u.goldens[r.Golden]
	switch n := len(u.based[ref.Generation(r.Golden, r.Generation)]); {
	case g.Current == r.Generation:
		return []errs.Message{"the current generation"}
	case u.mirrors[r.Golden] == r.Generation:
		return []errs.Message{whyMirror}
	case n > 0:
		return []errs.Message{errs.Messagef("%s made from it; only their rebase and diff need it",
			countOf(int64(n), "volume or snapshot was", "volumes or snapshots were"))}
	case g.Keep > 0:
		return []errs.Message{errs.Messagef("the golden keeps %s", countOf(int64(g.Keep), "generation", "generations"))}
	}
	return []errs.Message{"the golden keeps all generations; prune can remove it"}
}

// returnToHost returns the free space of a loop-backed pool to the filesystem below
// it. Errors do not matter: the next call does the rest.
func (e *Engine) returnToHost() { _ = e.trimBacking(&GCReport{}) }

// trimBacking returns the pool's free space to the sparse file it lies in.
func (e *Engine) trimBacking(r *GCReport) error {
	if e.pool.Config.Backing == nil {
		return nil
	}

	dir, err := os.Open(e.pool.DataDir())
	if err != nil {
		return errs.Wrap("gc", e.pool.Dir, err)
	}

	defer dir.Close()

	blocks := func() int64 {
		var st unix.Stat_t
		if unix.Stat(e.pool.BackingFile(), &st) != nil {
			return 0
		}
		return st.Blocks * 512
	}

	before := blocks()
	r.TrimmedBytes, err = kernel.Trim(dir, 64<<10)
	if err != nil {
		r.Warnings = append(r.Warnings, errs.Messagef("could not return free space to the host: %v", err))
		return nil
	}

	r.HostFreed = max(0, before-blocks())
	return nil
}
