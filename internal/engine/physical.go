package engine

import (
	"cmp"
	"context"
	"os"
	"slices"

	"pando/internal/catalog"
	"pando/internal/extent"
)

// physicalBytes adds up the space that images take, each shared block once, by
// merging all their extents. ok is false where there is no map: for trees.
func (e *Engine) physicalBytes(ctx context.Context, rows []catalog.Row) (total int64, ok bool, err error) {
	var all []diskRange
	for _, r := range rows {
		if err := ctx.Err(); err != nil {
			return 0, false, err
		}
		w, err := e.drv.Attachment(ctx, r.ID)
		if err != nil || w.Image == "" || w.Block {
			return 0, false, nil // a tree or a device, or destroyed meanwhile
		}
		f, err := os.Open(w.Image)
		if err != nil {
			return 0, false, nil
		}
		err = extent.Scan(f, false, func(x extent.Extent) error {
			if x.Flags&(extent.Delalloc|extent.Unknown|extent.Inline) == 0 {
				all = append(all, diskRange{x.Physical, x.Physical + x.Length})
			}
			return nil
		})
		f.Close()
		if err != nil {
			return 0, false, err
		}
		if len(all) > 1<<20 { // keep memory bounded: merge what is there
			all = mergeRanges(all)
		}
	}
	for _, s := range mergeRanges(all) {
		total += s.end - s.start
	}
	return total, true, nil
}

// diskRange is a range of bytes on the device.
type diskRange struct{ start, end int64 }

// mergeRanges sorts ranges in place and joins those that overlap or touch.
func mergeRanges(in []diskRange) []diskRange {
	slices.SortFunc(in, func(a, b diskRange) int { return cmp.Compare(a.start, b.start) })
	out := in[:0]
	for _, r := range in {
		if n := len(out); n > 0 && r.start <= out[n-1].end {
			out[n-1].end = max(out[n-1].end, r.end)
			continue
		}
		out = append(out, r)
	}
	return out
}
