package replicate

import (
	"context"
	"maps"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/remote/repo"
)

// repairTables rebuilds damaged or lost tables of moved data from the packs. It names a pack only if that has segments
// that exist nowhere else: a second copy is not needed, and the pack may be about to be deleted.
func (x *repairer) repairTables(ctx context.Context) error {
	o, err := listObjects(ctx, x.repo)
	x.objects = o
	if err != nil || len(o.moved.Packs) == 0 {
		return err
	}

	present := o.present()
	lost := map[repo.Table][]repo.MovedPack{}
	for t := range o.moved.Damaged {
		lost[t] = nil
	}

	// Find the packs without a table that have segments which exist nowhere else.
	for _, pk := range slices.SortedFunc(maps.Keys(o.moved.Packs), repo.Pack.Compare) {
		if _, there := o.moved.Tables[pk.Table()]; there {
			continue
		}

		m, err := x.repo.DescribePack(ctx, repo.PackState{Pack: pk, Bytes: o.moved.Packs[pk]})
		if isUnreadable(err) {
			continue
		}
		if err != nil {
			return err
		}

		m.Segments = slices.DeleteFunc(m.Segments, func(s repo.SegmentState) bool {
			_, there := present[s.Segment]
			return there
		})
		if len(m.Segments) > 0 {
			lost[pk.Table()] = append(lost[pk.Table()], m)
		}
	}

	// Write their tables.
	byName := func(a, b repo.Table) int { return repo.Pack(a).Compare(repo.Pack(b)) }
	for _, t := range slices.SortedFunc(maps.Keys(lost), byName) {
		if err := x.repairTable(ctx, t, lost[t], o.moved.Damaged[t] != nil); err != nil {
			return err
		}
	}

	if len(lost) > 0 && !x.DryRun { // segments and manifests stay as they were listed
		x.objects.moved, err = x.repo.MovedAndPacks(ctx)
		x.objects.places = x.objects.moved.Places()
	}

	return err
}

// repairTable writes one table. damaged says that it overwrites a damaged one.
func (x *repairer) repairTable(ctx context.Context, t repo.Table, packs []repo.MovedPack, damaged bool) error {
	if x.DryRun {
		x.out.Tables = append(x.out.Tables, "moved/"+t.String())
		return nil
	}

	var err error
	done := true
	if damaged {
		done, err = x.repo.ReplaceTable(ctx, t, packs)
	} else {
		err = x.repo.PutTable(ctx, t, packs)
	}
	if errs.Is(err, errs.Exists, errs.Conflict, errs.NotFound) {
		return nil // another repair or a prune was faster
	}
	if err == nil && done {
		x.out.Tables = append(x.out.Tables, "moved/"+t.String())
	}

	return err
}
