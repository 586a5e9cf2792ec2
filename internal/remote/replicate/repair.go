package replicate

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/durable"
	"pando/internal/remote/repo"
)

const opRepair = "remote repair"

// damagedDir is the directory for copies of damaged heads that a repair has overwritten.
const damagedDir = "damaged"

// repairedPool is the writer of a repaired head whose writer is not known. It is not a pool, so a pool has to take the
// volume over.
const repairedPool = "repaired"

// RepairRequest says what to repair.
type RepairRequest struct {
	DryRun bool // whether it is only reported what would be done
}

// Repaired is the result of Repair. After a dry run it says what Repair would do.
type Repaired struct {
	Volumes []RepairedVolume `json:"volumes"` // volumes that were damaged or missing, by name
	// Lost are manifests that cannot be read. Their points are lost; to which volumes they belonged is not known.
	Lost    []string `json:"lost_manifests"`
	Checked int      `json:"checked_count"` // number of volumes whose lists of points are intact
	DryRun  bool     `json:"dry_run"`       // nothing was written
	// Tables are the tables of moved data that were damaged or lost, and were rebuilt: "moved/...".
	Tables []string `json:"tables"`
	// ConfigRestored: the repository's config was missing or damaged, and was restored from this pool's copy. A dry run
	// that would restore it checks nothing else.
	ConfigRestored bool `json:"config_restored"`
}

// RepairedVolume is a volume or golden whose list of points was rebuilt.
type RepairedVolume struct {
	Volume string `json:"volume,omitempty"` // name of the volume; absent: it is not known
	Object string `json:"object"`           // its list of points: "heads/...", or a part of the list: "points/..."
	// Part: only a part of the list was damaged or missing. The rest is unchanged, including the writer.
	Part     bool     `json:"part,omitempty"`
	Missing  bool     `json:"missing"`          // the list did not exist; otherwise it was damaged
	Repaired bool     `json:"repaired"`         // it exists again; after a dry run: it would
	Points   []string `json:"complete"`         // names of the points that are complete, the oldest first
	Broken   []string `json:"broken"`           // names of the points that are listed, but lack data that they need
	Writer   bool     `json:"writer"`           // this pool may push the volume; otherwise a pool has to take it over
	Reason   string   `json:"reason,omitempty"` // why the list could not be used, or could not be rebuilt
	Copy     string   `json:"copy,omitempty"`   // file with a copy of the damaged list
}

// Repair first restores the config of the repository from this pool's copy, if the config is missing or damaged. Then
// it rebuilds the damaged or missing lists of points of volumes from the existing manifests: all points come back whose
// manifests and segments are intact, including points that were removed but not yet pruned. It needs only a key to the
// remote; e may be nil, if no pool has pushed there.
//
// It makes nothing worse: it writes only objects that do not exist, or that could not be read twice in a row. It writes
// over exactly that state, and keeps a copy of it in the pool. Points that lack data are listed as well, so that no
// prune removes the rest of their data, but the newest point is a complete one. The epoch of a repaired head is above
// all earlier ones. Its writer is this pool if the newest point is of an object in this pool; otherwise a pool has to
// take the volume over.
//
// It may run beside pushes, pulls and prunes. Conflict: another host has written a head in the meantime.
func Repair(ctx context.Context, e *engine.Engine, r *Remote, q RepairRequest) (*Repaired, error) {
	rp, err := r.Open(ctx)
	restored := false
	if configLost(err) {
		var rerr error
		if restored, rerr = r.restoreConfig(ctx, q.DryRun); rerr != nil {
			return nil, rerr
		}
		if restored && q.DryRun {
			return &Repaired{Volumes: []RepairedVolume{}, Lost: []string{}, DryRun: true, ConfigRestored: true}, nil
		}
		if restored {
			rp, err = r.Open(ctx)
		}
	}
	if err != nil {
		return nil, err
	}

	defer rp.Close()

	// Find out as whom this pool writes, and which names heads may have.
	x := &repairer{RepairRequest: q, repo: rp, copyDir: filepath.Join(r.dir, damagedDir)}
	if e != nil {
		x.e = e.Transfer()
		if x.writer, err = writerOf(e); err != nil {
			return nil, err
		}
		if x.names, err = NamesOf(ctx, e, r); err != nil {
			return nil, err
		}
	}

	out, err := x.runRepair(ctx)
	if out != nil {
		out.ConfigRestored = restored
	}

	return out, errs.Wrap(opRepair, r.Name, err)
}

type repairer struct {
	RepairRequest
	e       *engine.Transfer // nil: no pool
	repo    *repo.Repo
	writer  repo.Writer
	names   []string // names that heads may have
	copyDir string   // directory for copies; "": none

	objects   objects                // objects as they were listed, once
	segments  map[repo.Segment]int64 // bytes of the segments that exist
	faults    []pointsFault          // pages of points that cannot be read
	manifests map[repo.ID]*repo.Manifest
	whole     map[repo.ID]bool // manifests that lack no data
	out       *Repaired
}

// runRepair repairs tables, then pages and heads, from what manifests and packs say.
func (x *repairer) runRepair(ctx context.Context) (*Repaired, error) {
	x.out = &Repaired{Volumes: []RepairedVolume{}, Lost: []string{}, Tables: []string{}, DryRun: x.DryRun}

	// Read sessions before and after manifests: a push whose session existed when its manifest was found may still be at
	// work, and will list the manifest itself.
	sessions, _, err := readSessions(ctx, x.repo)
	if err != nil {
		return nil, err
	}

	heads, err := readHeads(ctx, x.repo)
	if err != nil {
		return nil, err
	}

	x.out.Checked = len(heads.good)
	if err := x.repairTables(ctx); err != nil {
		return nil, err
	}

	if err := x.readUnnamedManifests(ctx, heads); err != nil {
		return nil, err
	}

	later, _, err := readSessions(ctx, x.repo)
	if err != nil {
		return nil, err
	}

	// Rebuild pages of heads that can be read, then whole heads.
	now := scene{sessions: append(sessions, later...)}
	for _, f := range x.faults {
		done, err := x.repairPages(ctx, f, now)
		if err != nil {
			return nil, err
		}
		x.out.Volumes = append(x.out.Volumes, done)
	}

	volumes := x.findLostHeads(heads, now)
	for _, v := range volumes {
		done, is, err := x.repairHead(ctx, v)
		if err != nil {
			return nil, err
		}
		if !is {
			x.out.Checked++
			continue
		}
		x.out.Volumes = append(x.out.Volumes, done)
	}

	return x.out, nil
}

// readUnnamedManifests reads the listed manifests that no readable head names, and finds out which of them are
// complete.
func (x *repairer) readUnnamedManifests(ctx context.Context, heads headset) error {
	progress.From(ctx).Start(progress.ReadingManifests, 0, 0)
	named := map[repo.ID]bool{}
	for _, h := range heads.good {
		var bad []*pageFault
		for pt, err := range allPoints(ctx, x.repo, h.Head, &bad) {
			if err != nil {
				return err
			}
			named[pt.Manifest] = true
		}
		x.notePageFaults(h.Head, bad)
	}

	// Read the others.
	o := x.objects
	x.segments, x.manifests, x.whole = o.present(), map[repo.ID]*repo.Manifest{}, map[repo.ID]bool{}
	unnamed := slices.DeleteFunc(o.manifests, func(id repo.ID) bool { return named[id] })
	err := readManifests(ctx, x.repo, unnamed, func(m repo.Manifest) {
		progress.From(ctx).Add(1, 0)
		x.whole[m.ID] = x.hasStream(&m)
		m.Stream, m.Uses = nil, nil // a million of them fit into memory without these
		x.manifests[m.ID] = &m
	}, func(id repo.ID, err error) error {
		if errs.Is(err, errs.NotFound) {
			return nil // pruned in the meantime
		}
		if isUnreadable(err) {
			x.out.Lost = append(x.out.Lost, "manifests/"+id.String())
			return nil
		}
		return err
	})
	if err == nil {
		err = x.wholeMaps(ctx)
	}

	slices.Sort(x.out.Lost)

	// Points also need other points.
	for id, m := range x.manifests {
		x.whole[id] = x.whole[id] && x.hasNeeds(m, named)
	}

	return err
}

// hasNeeds reports whether all manifests that m needs, directly or through others, are named by a head or complete.
func (x *repairer) hasNeeds(m *repo.Manifest, named map[repo.ID]bool) bool {
	seen := map[repo.ID]bool{m.ID: true}
	for todo := m.Needs(); len(todo) > 0; {
		id := todo[0]
		todo = todo[1:]
		if named[id] || seen[id] {
			continue
		}

		seen[id] = true
		need := x.manifests[id]
		if need == nil || !x.whole[id] {
			return false
		}
		todo = append(todo, need.Needs()...)
	}

	return true
}

// hasStream reports whether all segments of a manifest's stream exist, and are long enough. See wholeMaps for maps.
func (x *repairer) hasStream(m *repo.Manifest) bool {
	return !slices.ContainsFunc(m.Stream, func(f repo.Frame) bool { return !x.hasFrame(f) })
}

// hasFrame reports whether the segment of a frame exists and is long enough.
func (x *repairer) hasFrame(f repo.Frame) bool {
	return x.segments[f.Segment] >= int64(f.Offset)+int64(f.Stored)
}

// wholeMaps finds out for which manifests all data that their maps need exists. It compares each map with
// that of an earlier complete point of the volume, and reads only the differences.
func (x *repairer) wholeMaps(ctx context.Context) error {
	// Order the manifests by volume and age.
	var all []*repo.Manifest
	for _, m := range x.manifests {
		if m.Content == repo.Block {
			all = append(all, m)
		}
	}

	slices.SortFunc(all, func(a, b *repo.Manifest) int {
		return cmp.Or(cmp.Compare(a.Volume, b.Volume), compareStates(a, b))
	})

	// Compare each map with that of the last complete point of its volume.
	var last *repo.Manifest
	for _, m := range all {
		if last != nil && last.Volume != m.Volume {
			last = nil
		}

		whole := m.Map.IsZero() || x.hasFrame(m.Map.Frame)
		d := &treeDiff{
			nodes: x.repo.ReadNodes, old: last, now: m, wantLeaf: noLeaf,
			onBroken: func(_ repo.NodeAt, old bool, _ error) error {
				whole = whole && old
				return nil
			},
		}

		err := d.eachPart(ctx, func(p part) error {
			for _, y := range p.now {
				whole = whole && x.hasFrame(y.Frame)
			}
			return nil
		})
		if err != nil {
			return err
		}

		if x.whole[m.ID] = whole; whole {
			last = m
		}
	}

	return nil
}

// lostHead is a head that is damaged or missing, with the manifests to rebuild it from.
type lostHead struct {
	id        repo.ID
	name      string // "" if it is not known
	damaged   error  // nil: the head is missing
	manifests []*repo.Manifest
}

// findLostHeads finds the heads that are to be rebuilt, by name.
func (x *repairer) findLostHeads(heads headset, now scene) []lostHead {
	lost := map[repo.ID]*lostHead{}
	for _, d := range heads.bad {
		if errs.Is(d.err, errs.TooNew) {
			x.out.Volumes = append(x.out.Volumes, RepairedVolume{Object: d.Object, Points: []string{}, Broken: []string{},
				Reason: d.Reason})
			continue // a newer pando can read it
		}
		lost[d.id] = &lostHead{id: d.id, damaged: d.err}
	}

	// Heads that need no repair.
	there := map[repo.ID]bool{}
	for _, h := range heads.good {
		if id, err := x.repo.HeadID(h.Head.Name); err == nil {
			there[id] = true
		}
	}

	for _, d := range heads.bad {
		there[d.id] = lost[d.id] == nil
	}

	// Heads without manifests can be named only by what the pool knows.
	for _, n := range x.names {
		if id, err := x.repo.HeadID(n); err == nil && lost[id] != nil {
			lost[id].name = n
		}
	}

	// The others are named by their manifests, and so are missing heads.
	for _, m := range x.manifests {
		id, err := x.repo.HeadID(m.Volume)
		if err != nil || there[id] {
			continue
		}
		if lost[id] == nil {
			if now.hasSession(m.Session) {
				continue // the first push of a volume is about to create its head
			}
			lost[id] = &lostHead{id: id}
		}
		lost[id].name = m.Volume
		lost[id].manifests = append(lost[id].manifests, m)
	}

	var out []lostHead
	for _, h := range lost {
		out = append(out, *h)
	}

	slices.SortFunc(out, func(a, b lostHead) int {
		return cmp.Or(cmp.Compare(a.name, b.name), slices.Compare(a.id[:], b.id[:]))
	})
	return out
}

// repairHead rebuilds one head. is is false if the head can be read by now, for example because a push that was under
// way has created it.
func (x *repairer) repairHead(ctx context.Context, l lostHead) (out RepairedVolume, is bool, err error) {
	out = RepairedVolume{
		Volume: l.name, Object: "heads/" + l.id.String(), Missing: l.damaged == nil, Reason: "missing",
		Points: []string{}, Broken: []string{},
	}
	if l.damaged != nil {
		out.Reason = l.damaged.Error()
	}

	if l.name == "" {
		out.Reason = "no manifest or name is left to rebuild it from: " + out.Reason
		return out, true, nil
	}

	// Rebuild it in memory.
	head := x.rebuildHead(ctx, l, &out)
	if err := x.raiseEpoch(ctx, &head); err != nil {
		return out, true, err
	}

	if x.DryRun {
		out.Repaired = true
		return out, true, nil
	}

	// Overwrite only a head that still cannot be read, and exactly that state of it.
	object, version, err := x.repo.RawHead(ctx, l.id)
	switch {
	case errs.Is(err, errs.NotFound):
		version = ""
	case err != nil:
		return out, true, err
	default:
		if _, err := x.repo.HeadByID(ctx, l.id); !errs.Is(err, errs.Damaged) {
			return out, false, err
		}
		if out.Copy, err = x.keepCopy(l.id, object); err != nil {
			return out, true, err
		}
	}

	// Write it, with pages for older points.
	pages := newPageWriter(x.repo, l.name)
	defer pages.endSession(ctx)

	if err := pages.pagePutter().Shrink(ctx, &head); err != nil {
		return out, true, err
	}

	_, err = x.repo.PutHead(ctx, head, version)
	pages.noteOutcome(err)
	if err != nil {
		return out, true, err
	}

	out.Repaired = true
	return out, true, nil
}

// keepCopy saves a damaged head in copyDir, and returns the path of the copy.
func (x *repairer) keepCopy(id repo.ID, object []byte) (string, error) {
	if x.copyDir == "" {
		return "", nil
	}
	path := filepath.Join(x.copyDir, "head-"+id.String()+"-"+strconv.FormatInt(time.Now().Unix(), 10))
	if err := os.MkdirAll(x.copyDir, 0o700); err != nil {
		return "", errs.Wrap(opRepair, x.copyDir, err)
	}
	return path, errs.Wrap(opRepair, path, durable.WriteFile(path, object))
}

// rebuildHead rebuilds a head as far as its manifests tell.
func (x *repairer) rebuildHead(ctx context.Context, l lostHead, out *RepairedVolume) repo.Head {
	h := repo.Head{Name: l.name, NextSeq: 1, Golden: len(l.manifests) > 0, Epoch: uint64(time.Now().Unix()),
		Gone: len(l.manifests) == 0}
	for _, m := range l.manifests {
		if _, ok := (ref.Ref{Name: l.name, At: m.Point}).Generation(); !ok || m.Consistency != "" { // of snapshots only
			h.Golden = false
		}
	}

	// List the points.
	var newest repo.StateOrder
	for _, m := range x.inStateOrder(l.manifests) {
		pt := pointFrom(m, h.NextSeq)
		h.NextSeq++
		h.Epoch = max(h.Epoch, m.Epoch+1) // whatever the clock of this host says
		h.Recent = append(h.Recent, pt)
		if !x.whole[m.ID] {
			out.Broken = append(out.Broken, pt.Name)
			continue
		}
		out.Points = append(out.Points, pt.Name)
		if pt.Compare(newest) >= 0 {
			h.Latest, newest = pt.Seq, pt.StateOrder
		}
	}

	// This pool is the writer if it has the object of the newest point.
	h.Writer = repo.Writer{Pool: repairedPool, Host: "nobody (repaired)"}
	if i := slices.IndexFunc(h.Recent, func(p repo.Point) bool { return p.Seq == h.Latest }); x.e != nil &&
		len(h.Recent) > 0 {
		if i < 0 {
			i = len(h.Recent) - 1
		}
		if o, err := x.e.PointByID(ctx, driver.ObjectID(h.Recent[i].Source)); err == nil {
			h.Writer, h.Lineage, out.Writer = x.writer, string(o.Lineage), true
		}
	}

	return h
}

// raiseEpoch raises the epoch of a head above the one that this pool has seen.
func (x *repairer) raiseEpoch(ctx context.Context, h *repo.Head) error {
	if x.e == nil {
		return nil
	}
	seen, err := x.e.RemoteHeads(ctx, x.repo.ID().String())
	for _, s := range seen {
		if s.Name == h.Name {
			h.Epoch = max(h.Epoch, s.Epoch+1)
		}
	}
	return err
}

// pointFrom returns a point as a head lists it, from its manifest.
func pointFrom(m *repo.Manifest, seq uint64) repo.Point {
	at := repo.Point{
		Seq: seq, Name: m.Point, Manifest: m.ID, Source: m.Source, Content: m.Content, FS: m.FS, SizeBytes: m.SizeBytes,
		CreatedAt: m.CreatedAt, StateOrder: m.StateOrder, Consistency: m.Consistency, Logical: m.Logical, Added: m.Added,
	}
	if m.Content.Chained() {
		at.Parent = m.Parent
	}
	if o := m.Origin; o != nil {
		at.OriginRef, at.OriginVol, at.OriginID = o.Ref, o.Volume, o.Manifest
	}
	return at
}

// compareStates orders manifests of one volume, the oldest state first.
func compareStates(a, b *repo.Manifest) int {
	return cmp.Or(a.Compare(b.StateOrder), a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.Point, b.Point),
		slices.Compare(a.ID[:], b.ID[:]))
}

// inStateOrder returns the manifests of one volume, each point once, the oldest state first, but each stream after what
// it is the difference from.
func (x *repairer) inStateOrder(all []*repo.Manifest) []*repo.Manifest {
	slices.SortFunc(all, compareStates)

	// Choose one manifest for each point: a push that was interrupted after it wrote its manifest has written
	// a second one. Complete ones are better than others, and then those on which others build.
	type key struct{ point, source string }
	children := map[repo.ID]int{}
	for _, m := range all {
		children[m.Parent]++
	}

	best := map[key]*repo.Manifest{}
	rank := func(m *repo.Manifest) int {
		n := min(children[m.ID], 1)
		if x.whole[m.ID] {
			n += 2
		}
		return n
	}

	for _, m := range all {
		k := key{m.Point, m.Source}
		if was := best[k]; was == nil || rank(m) > rank(was) {
			best[k] = m
		}
	}

	// Put parents first.
	byID := map[repo.ID]*repo.Manifest{}
	for _, m := range best {
		byID[m.ID] = m
	}

	done := map[repo.ID]bool{}
	var out []*repo.Manifest
	for _, m := range all {
		var line []*repo.Manifest // m and its parents, the youngest first
		for p := byID[m.ID]; p != nil && !done[p.ID] && !slices.Contains(line, p); p = byID[p.Parent] {
			line = append(line, p)
			if !p.Content.Chained() {
				break // it needs no other point, and has an order of its own
			}
		}
		for _, p := range slices.Backward(line) {
			done[p.ID] = true
			out = append(out, p)
		}
	}

	return out
}
