package check

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"pando/internal/base/progress"
	"pando/internal/driver"
	"pando/internal/engine/catalog"

	"golang.org/x/sync/errgroup"
)

// fsckWorkers is how many filesystems are checked at once.
const fsckWorkers = 2

// imageCheck checks the filesystems in images. Images that lie in the very same blocks are
// checked once: most clones are never written to.
type imageCheck struct {
	*fsck
	names map[driver.ObjectID]string

	mu    sync.Mutex // of found, and the counts of the report
	found []*Finding
}

// checkImages checks the filesystems in images, and returns what is wrong with them.
func (c *fsck) checkImages(
	ctx context.Context, images []catalog.Row, names map[driver.ObjectID]string,
) ([]*Finding, error) {
	k := &imageCheck{fsck: c, names: names}
	groups, err := k.groupByAddress(ctx, images)
	if err != nil {
		return nil, err
	}

	progress.From(ctx).Start(progress.CheckingFilesystems, int64(len(images)), 0)
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(fsckWorkers)
	for _, group := range groups {
		g.Go(func() error { return k.checkGroup(gctx, group) })
	}

	return k.found, g.Wait()
}

// groupByAddress groups images that seem to lie in the same blocks, immutable ones first. An image that is mounted, or
// that an operation works on, is in a group of its own: it may be written to.
func (k *imageCheck) groupByAddress(ctx context.Context, images []catalog.Row) ([][]catalog.Row, error) {
	a, can := k.Driver.(driver.Addresser)
	inUse, err := k.findInUse(ctx)
	if err != nil {
		return nil, err
	}

	progress.From(ctx).Start(progress.ComparingExtents, int64(len(images)), 0)
	var out [][]catalog.Row
	at := map[contentKey]int{} // in out
	for _, row := range images {
		if err := ctx.Err(); err != nil {
			return nil, err
		}

		progress.From(ctx).Add(1, 0)
		address := ""
		if can && !inUse[row.ID] {
			address, _ = a.Address(ctx, row.ID) // its own check says what is wrong
		}

		key := contentKey{row.FS, row.SizeBytes, address}
		if i, ok := at[key]; ok {
			out[i] = append(out[i], row)
			continue
		}

		if address != "" {
			at[key] = len(out)
		}

		out = append(out, []catalog.Row{row})
	}

	for _, group := range out {
		slices.SortStableFunc(group, func(a, b catalog.Row) int { return cmp.Compare(groupOrder(a), groupOrder(b)) })
	}

	return out, nil
}

// findInUse returns the objects that are mounted, or that an operation works on.
func (k *imageCheck) findInUse(ctx context.Context) (map[driver.ObjectID]bool, error) {
	out := map[driver.ObjectID]bool{}
	err := k.Catalog.View(ctx, func(tx *catalog.Tx) error {
		mounts, err := tx.MountRecords()
		if err != nil {
			return err
		}

		for id := range mounts {
			out[id] = true
		}

		marks, err := tx.Marks()
		for _, m := range marks {
			out[m.ID] = true
		}

		return err
	})

	return out, err
}

// contentKey is what images must have in common to share one check.
type contentKey struct {
	fs      driver.FS
	size    int64 // as the catalogue has it
	address string
}

func groupOrder(r catalog.Row) int {
	if r.Kind == driver.Volume {
		return 1
	}
	return 0
}

// checkGroup checks images that seemed to lie in the same blocks.
func (k *imageCheck) checkGroup(ctx context.Context, group []catalog.Row) error {
	for len(group) > 1 {
		rest, done, err := k.checkShared(ctx, group[0], group[1:])
		if err != nil {
			return err
		}
		if done {
			group = rest
			continue
		}
		if err := k.checkOne(ctx, group[0]); err != nil {
			return err
		}
		group = group[1:]
	}

	for _, row := range group {
		if err := k.checkOne(ctx, row); err != nil {
			return err
		}
	}

	return nil
}

// checkOne checks one image by itself.
func (k *imageCheck) checkOne(ctx context.Context, row catalog.Row) error {
	f, checked, err := k.checkImage(ctx, row, k.names[row.ID])
	if err != nil {
		return err
	}
	k.addResult(ctx, f, func(n *Counts) {
		if checked {
			n.Images++
		}
	})
	return nil
}

// checkShared checks one image, and uses the result for all others that still lie in the same blocks. It returns those
// that do not. done is false if the first could not be checked in this way; then nothing was done.
//
// A reference copy, which nothing writes to, keeps the blocks from being reused: an image at the same address has the
// content that was checked. The check itself works on a copy of the reference, as it replays logs.
func (k *imageCheck) checkShared(
	ctx context.Context, first catalog.Row, others []catalog.Row,
) (rest []catalog.Row, done bool, err error) {
	name := k.names[first.ID]
	reference, _, err := k.copyToCheck(ctx, first, name)
	if reference == "" {
		return nil, false, err
	}

	defer k.Ledger.DestroyUnfinished(ctx, reference)

	address, err := k.Driver.(driver.Addresser).Address(ctx, reference)
	if err != nil || address == "" {
		return nil, false, ctx.Err()
	}

	v, err := k.checkReference(ctx, reference, first, name)
	if err != nil || v.err != nil {
		return nil, false, err
	}

	k.addResult(ctx, k.filesystemFinding(first, name, v), func(n *Counts) { n.Images++ })

	for _, row := range others {
		if err := ctx.Err(); err != nil {
			return nil, true, err
		}
		same, err := k.sameAddress(ctx, row, address)
		if err != nil {
			return nil, true, err
		}
		if !same {
			rest = append(rest, row)
			continue
		}
		k.addResult(ctx, k.filesystemFinding(row, k.names[row.ID], v), func(n *Counts) { n.Shared++ })
	}

	return rest, true, nil
}

// sameAddress reports whether an image lies at an address now.
func (k *imageCheck) sameAddress(ctx context.Context, row catalog.Row, address string) (bool, error) {
	got, err := k.Driver.(driver.Addresser).Address(ctx, row.ID)
	return err == nil && got == address, ctx.Err()
}

// checkReference checks the filesystem in a copy of a reference copy. An error ends the whole check.
func (k *imageCheck) checkReference(
	ctx context.Context, reference driver.ObjectID, row catalog.Row, name string,
) (v verdict, err error) {
	scratch := k.scratchIdentity(row, name)
	if err := k.Ledger.ClaimNow(ctx, opFsck, false, func(*catalog.Tx) ([]catalog.Mark, error) {
		return []catalog.Mark{{ID: scratch.ID, Op: opFsck}}, nil
	}); err != nil {
		return v, err
	}
	defer k.Ledger.DestroyUnfinished(ctx, scratch.ID)
	if v.err = k.Driver.Clone(ctx, reference, scratch); v.err != nil {
		return v, ctx.Err()
	}
	return k.checkScratch(ctx, scratch.ID, row.FS)
}

// addResult adds the result for one image to the report.
func (k *imageCheck) addResult(ctx context.Context, f *Finding, count func(*Counts)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	progress.From(ctx).Add(1, 0)
	count(&k.report.Checked)
	if f != nil {
		k.found = append(k.found, f)
	}
}
