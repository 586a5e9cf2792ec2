package engine

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/extent"
)

// physicalBytes adds up the space that objects use, counting each shared block once, by
// merging all their extents. ok is false if there are no extent maps, or if the driver
// shares nothing.
func (e *Engine) physicalBytes(ctx context.Context, rows []catalog.Row) (total int64, ok bool, err error) {
	if !e.caps.Sharing {
		return 0, false, nil
	}

	s := &spaceSum{inline: map[inlineFile]struct{}{}}
	for _, r := range rows {
		if err := ctx.Err(); err != nil {
			return 0, false, err
		}
		w, err := e.drv.Attachment(ctx, r.ID)
		switch {
		case errs.Is(err, errs.NotFound):
			continue // just destroyed
		case err != nil, w.Block, w.Source != "":
			return 0, false, nil
		}
		if err := s.addObject(ctx, w); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return 0, false, err
		}
	}

	return s.total(), true, nil
}

// spaceSum adds up the blocks of many files.
type spaceSum struct {
	blocks      []diskRange
	merged      int // length of blocks after the last merge
	inline      map[inlineFile]struct{}
	inlineBytes int64
}

// inlineFile is a file whose data is stored in metadata. Until it changes, all copies share
// the metadata, at least until they change something next to it.
type inlineFile struct {
	ino     uint64
	changed time.Time
}

// addObject adds the blocks of one object.
func (s *spaceSum) addObject(ctx context.Context, w driver.Attachment) error {
	if w.Tree != "" {
		_, err := extent.MeasureTree(ctx, w.Tree, extent.TreeOptions{Nested: true, Each: s.addTreeExtent})
		return err
	}

	f, err := os.Open(w.Image)
	if err != nil {
		return err
	}

	defer f.Close()
	return extent.Scan(f, false, func(x extent.Extent) error {
		s.addExtent(x)
		return nil
	})
}

func (s *spaceSum) addTreeExtent(x extent.TreeExtent) {
	if x.Flags&extent.Inline == 0 {
		s.addExtent(x.Extent)
		return
	}
	id := inlineFile{x.Inode, x.Changed}
	if _, again := s.inline[id]; !again {
		s.inline[id] = struct{}{}
		s.inlineBytes += x.Length
	}
}

func (s *spaceSum) addExtent(x extent.Extent) {
	if x.Flags&(extent.Delalloc|extent.Unknown|extent.Inline) != 0 {
		return
	}
	s.blocks = append(s.blocks, diskRange{x.Physical, x.Physical + x.Length})
	if len(s.blocks) > 2*s.merged+1<<20 { // merge now and then, to bound memory
		s.blocks = mergeRanges(s.blocks)
		s.merged = len(s.blocks)
	}
}

func (s *spaceSum) total() int64 {
	total := s.inlineBytes
	for _, r := range mergeRanges(s.blocks) {
		total += r.end - r.start
	}
	return total
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
