package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/tree/treediff"
)

const (
	opDiff = "diff"
	opLook = "look" // of marks: an object is read, in a copy if necessary
)

// Path is a path in a volume: any bytes but NUL. In JSON, bytes that are not UTF-8
// are written as \xHH and a backslash as \\, so that nothing is lost.
type Path string

// MarshalJSON implements json.Marshaler.
func (p Path) MarshalJSON() ([]byte, error) { return json.Marshal(p.Escaped()) }

// Escaped returns the path as it is written in JSON.
func (p Path) Escaped() string {
	if utf8.ValidString(string(p)) && !strings.Contains(string(p), `\`) {
		return string(p)
	}

	var b strings.Builder
	for s := string(p); s != ""; {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case r == '\\':
			b.WriteString(`\\`)
		default:
			b.WriteString(s[:n])
		}
		s = s[n:]
	}

	return b.String()
}

// DiffChange is one changed path. Its JSON form is stable.
type DiffChange struct {
	Op           string `json:"change"`                // what happened: added, modified, deleted, renamed
	Path         Path   `json:"path"`                  // path that has changed
	From         Path   `json:"from,omitempty"`        // path that a renamed file had
	Type         string `json:"type"`                  // file, directory, symlink, fifo, socket, char device, block device
	TypeBefore   string `json:"type_before,omitempty"` // if the type has changed
	Link         Path   `json:"link,omitempty"`        // another name of the same file; its change describes the content
	SizeBefore   int64  `json:"size_before_bytes"`     // size before
	SizeAfter    int64  `json:"size_after_bytes"`      // size after
	ChangedBytes int64  `json:"changed_bytes"`         // size of the data that differs
	Content      bool   `json:"content"`               // the content has changed
	Metadata     bool   `json:"metadata"`              // owner, mode, times or extended attributes have changed
}

// DiffStat counts changes.
type DiffStat struct {
	Added        int   `json:"added_count"`    // number of paths that were added
	Modified     int   `json:"modified_count"` // number of paths that were modified
	Deleted      int   `json:"deleted_count"`  // number of paths that were deleted
	Renamed      int   `json:"renamed_count"`  // number of paths that were renamed
	ChangedBytes int64 `json:"changed_bytes"`  // size of the data that differs
}

// DiffCost is the work that a comparison took.
type DiffCost struct {
	Directories int64 `json:"directory_count"` // number of directories that were read
	Inodes      int64 `json:"inode_count"`     // number of inodes that were asked for
	Files       int64 `json:"file_count"`      // number of files that were read
	Bytes       int64 `json:"read_bytes"`      // size of the data that was read
}

// DiffRange is a range of a raw volume that differs, in bytes.
type DiffRange struct {
	Offset int64 `json:"offset_bytes"` // begin of the range
	Length int64 `json:"length_bytes"` // length of the range
}

// Difference is the result of Diff. Its JSON form is stable.
type Difference struct {
	A       string       `json:"a"`                // reference to what it was
	B       string       `json:"b"`                // reference to what it is
	Changes []DiffChange `json:"changes"`          // paths that differ
	Ranges  []DiffRange  `json:"ranges,omitempty"` // ranges of raw volumes that differ
	Stat    DiffStat     `json:"stat"`             // numbers of changes
	Method  string       `json:"method"`           // how differences were found: walk, ext4, btrfs, extents
	Cost    DiffCost     `json:"cost"`             // work that the comparison took
}

// DiffRequest says what to compare.
type DiffRequest struct {
	A, B   ref.Ref // volumes, snapshots or generations to compare
	Freeze Freeze  // whether writes to volumes in use are stopped while they are copied
}

// Diff reports how B differs from A. It changes neither, and both stay while it runs;
// of a volume in use it compares a copy of one moment. Where the filesystem can tell
// what has changed, the cost depends on the changes only. Diff waits for a golden like
// Clone. NotFound, Invalid (a raw volume and one with files), InUse, NoSpace.
func (e *Engine) Diff(ctx context.Context, q DiffRequest) (_ Difference, err error) {
	ctx, end := e.ledger.Begin(ctx, opDiff)
	defer end(&err)

	out := Difference{A: q.A.String(), B: q.B.String(), Changes: []DiffChange{}}
	if err := e.needRoot(opDiff, out.A); err != nil {
		return out, err
	}

	for _, r := range []ref.Ref{q.A, q.B} {
		if err := e.awaitGolden(ctx, r.Name); err != nil {
			return out, err
		}
	}

	v, err := e.openSides(ctx, opDiff, q.Freeze, q.A, q.B)
	if err != nil {
		return out, err
	}

	defer v.close(ctx)

	a, b := v.sides[0], v.sides[1]
	if (a.row().FS == driver.None) != (b.row().FS == driver.None) {
		return out, errs.New(errs.Invalid, opDiff, out.B, "a raw volume cannot be compared with a volume that holds files").
			WithHint("compare two volumes of the same kind; check the fs of each with %s", errs.Run("show"))
	}

	progress.From(ctx).Start(progress.Comparing, 0, 0)
	if a.row().FS == driver.None {
		err = v.diffRaw(ctx, &out)
		return out, errs.Wrap(opDiff, out.A, err)
	}

	res, err := v.compareSides(ctx, a, b, false)
	if err != nil {
		return out, errs.Wrap(opDiff, out.A+" "+out.B, err)
	}

	out.Method = res.Stats.Method
	out.Cost = DiffCost{res.Stats.DirsRead, res.Stats.Statted, res.Stats.FilesRead, res.Stats.BytesRead}
	for _, c := range res.Changes {
		out.Changes = append(out.Changes, diffChange(c))
		out.Stat.count(c)
	}

	return out, nil
}

func (s *DiffStat) count(c treediff.Change) {
	switch c.Op {
	case treediff.Added:
		s.Added++
	case treediff.Modified:
		s.Modified++
	case treediff.Deleted:
		s.Deleted++
	case treediff.Renamed:
		s.Renamed++
	}
	s.ChangedBytes += c.ChangedBytes
}

func diffChange(c treediff.Change) DiffChange {
	return DiffChange{
		Op: string(c.Op), Path: Path(c.Path), From: Path(c.From), Link: Path(c.Link),
		Type: string(c.Type), TypeBefore: string(c.TypeBefore),
		SizeBefore: c.SizeBefore, SizeAfter: c.SizeAfter, ChangedBytes: c.ChangedBytes,
		Content: c.Content, Metadata: c.Metadata,
	}
}

// side is one of the objects that are compared.
type side struct {
	ref  ref.Ref
	live content.Live
	copy driver.Identity // the scratch copy, if made is set; its ID is always that of the mark
	made bool
}

func (s *side) row() catalog.Row { return s.live.Row }

// id returns the object to read: the copy, if there is one.
func (s *side) id() driver.ObjectID { return s.identity().ID }

// identity returns that of the object to read.
func (s *side) identity() driver.Identity {
	if s.made {
		return s.copy
	}
	return s.row().Identity
}

// view is a set of objects opened for reading.
type view struct {
	e     *Engine
	sides []*side
}

// openSides finds objects and keeps them from being destroyed until close. Objects
// with a filesystem in an image, or in use, are copied and the copy is read: this
// disturbs nobody, and the log of the filesystem can be replayed.
func (e *Engine) openSides(ctx context.Context, op string, freeze Freeze, refs ...ref.Ref) (*view, error) {
	v := &view{e: e}
	err := e.ledger.Claim(ctx, op, false, func(tx *catalog.Tx) ([]catalog.Mark, error) {
		v.sides = nil
		var marks []catalog.Mark
		for _, r := range refs {
			row, err := tx.Resolve(op, r)
			if err != nil {
				return nil, err
			}

			l, err := e.content.FindLive(tx, row, freeze)
			if err != nil {
				return nil, err
			}

			s := &side{ref: r, live: l, copy: e.newIdentity(ctx, driver.Scratch)}
			s.copy.Ephemeral = true
			s.copy = s.copy.WithContentOf(row.Identity)
			s.copy.Origin, s.copy.OriginID = tx.RefOf(row), row.ID
			v.sides = append(v.sides, s)
			marks = append(marks, catalog.Mark{ID: s.copy.ID, Op: opLook, Reads: row.ID, Freezes: l.Freezes()})
		}

		return marks, nil
	})
	if err != nil {
		return nil, err
	}

	// Copy those that cannot be read in place.
	for _, s := range v.sides {
		l := s.live
		hasFiles := l.Row.FS == driver.Ext4 || l.Row.FS == driver.XFS
		if !hasFiles && (!l.InUse() || !e.caps.Atomic && !l.Row.IsOverlay()) {
			continue
		}
		if err := e.copyLive(ctx, l, s.copy, false); err != nil {
			v.close(ctx)
			return nil, errs.Wrap(op, s.ref.String(), err)
		}
		s.made = true
	}

	return v, nil
}

// close removes the copies and releases the objects. Copies that it cannot remove are
// left to the next command.
func (v *view) close(ctx context.Context) {
	for _, s := range v.sides {
		v.e.ledger.DestroyUnfinished(ctx, s.copy.ID)
	}
}

// withRoot calls fn with the root of a side's files, mounted read-only.
func (v *view) withRoot(ctx context.Context, s *side, fn func(root *os.File) error) error {
	if s.row().IsOverlay() {
		return v.e.content.WithOverlay(ctx, s.identity(), true, func(r content.OverlayRoots) error { return fn(r.Merged) })
	}
	if s.row().FS.IsImage() {
		return v.e.content.WithImage(ctx, s.id(), content.ImageOptions{}, fn)
	}
	return v.e.content.WithTree(ctx, s.id(), true, fn)
}

// compareSides compares the files of two sides.
func (v *view) compareSides(ctx context.Context, a, b *side, times bool) (treediff.Result, error) {
	if b.row().Lower == a.row().ID {
		return v.compareWithLower(ctx, b, times)
	}

	o, done, release, err := v.imageHints(ctx, a, b)
	if err != nil {
		return treediff.Result{}, err
	}

	defer release()
	if done {
		return treediff.Result{Stats: treediff.Stats{Method: o.Hints.Method}}, nil
	}

	o.Times, o.Progress = times, progress.From(ctx).Add
	var res treediff.Result
	err = v.withRoots(ctx, func(roots []*os.File) (err error) {
		if !a.row().FS.IsImage() && !a.row().IsOverlay() && !b.row().IsOverlay() {
			if err := v.treeHints(ctx, a, b, roots[0], roots[1], &o); err != nil {
				return err
			}
		}
		res, err = treediff.Compare(ctx, roots[0], roots[1], o)
		return err
	}, a, b)

	return res, err
}

// compareWithLower compares an overlay with the golden that it is on. It reads only what was changed.
func (v *view) compareWithLower(
	ctx context.Context, s *side, times bool,
) (res treediff.Result, err error) {
	err = v.e.content.WithOverlay(ctx, s.identity(), true, func(r content.OverlayRoots) (err error) {
		res, err = treediff.CompareOverlay(ctx, r.Lower, r.Upper, r.Merged,
			treediff.Options{Times: times, Progress: progress.From(ctx).Add})
		return err
	})
	return res, err
}

// withRoots calls fn with the roots of several sides, in their order.
func (v *view) withRoots(ctx context.Context, fn func(roots []*os.File) error, sides ...*side) error {
	var open func(i int, roots []*os.File) error
	open = func(i int, roots []*os.File) error {
		if i == len(sides) {
			return fn(roots)
		}
		return v.withRoot(ctx, sides[i], func(root *os.File) error { return open(i+1, append(roots, root)) })
	}
	return open(0, nil)
}

// imageHints finds out what two sides have in common before their files are read: it
// compares their origins and the extents of their images. done reports that they are
// the same. The images stay open until release is called.
func (v *view) imageHints(ctx context.Context, a, b *side) (o treediff.Options, done bool, release func(), err error) {
	release = func() {}
	if a.row().IsOverlay() || b.row().IsOverlay() {
		return o, false, release, nil // their files are not all in their images
	}

	_, since, same, err := v.e.commonOrigin(ctx, a.row(), b.row())
	if err != nil {
		return o, false, release, err
	}

	if o.SameOrigin = same && v.e.caps.Sharing; o.SameOrigin {
		o.Younger = since
	}

	if !a.row().FS.IsImage() || !b.row().FS.IsImage() {
		return o, false, release, nil
	}

	// Compare the extents of the images.
	var files []*os.File
	release = func() {
		for _, f := range files {
			f.Close()
		}
	}

	for _, s := range []*side{a, b} {
		w, err := v.e.drv.Attachment(ctx, s.id())
		if err != nil || w.Block { // a device has no map of its extents
			return o, false, release, err
		}
		f, err := os.Open(w.Image)
		if err != nil {
			return o, false, release, errs.Wrap(opDiff, s.ref.String(), err)
		}
		files = append(files, f)
	}

	delta, ok, err := treediff.CompareImages(files[0], files[1])
	if err != nil || !ok {
		return o, false, release, err
	}

	if delta.Empty() {
		o.Hints = &treediff.Hints{Method: "extents"}
		return o, true, release, nil
	}

	// In ext4, the changed blocks tell which inodes have changed.
	if a.row().FS == driver.Ext4 && b.row().FS == driver.Ext4 {
		h, err := treediff.Ext4Hints(ctx, files[0], files[1], delta, o.Younger)
		if err != nil || h == nil {
			// No hints, also because mounting may replay the log, which writes into files.
			return o, false, release, err
		}
		if o.SameOrigin {
			o.Hints, done = h, len(h.Changed) == 0
		}
	}

	o.SameBlocks = delta.SameBlocks
	return o, done, release, nil
}

// treeHints adds to o what the filesystem knows about the differences of two trees.
func (v *view) treeHints(ctx context.Context, a, b *side, rootA, rootB *os.File, o *treediff.Options) error {
	o.SameBlocks = func(x, y, n int64) (bool, int64) { return x == y, n }
	if !o.SameOrigin {
		return nil
	}

	common, _, _, err := v.e.commonOrigin(ctx, a.row(), b.row())
	if err != nil {
		return err
	}

	var origin *os.File
	if w, err := v.e.drv.Attachment(ctx, common); err == nil && w.Tree != "" {
		if f, err := os.Open(w.Tree); err == nil {
			defer f.Close()
			origin = f
		}
	}

	o.Hints, err = treediff.BtrfsHints(ctx, rootA, rootB, origin)
	return err
}

// commonOrigin reports whether two objects descend from the same object, and returns
// the ID of the nearest such object. since is when the first of the two lines was
// copied from it, or a little earlier.
func (e *Engine) commonOrigin(
	ctx context.Context, a, b catalog.Row,
) (common driver.ObjectID, since time.Time, same bool, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		as, err := ancestry(tx, a)
		if err != nil {
			return err
		}

		bs, err := ancestry(tx, b)
		if err != nil {
			return err
		}

		// Find the first object that is in both lines.
		for i, x := range as {
			for j, y := range bs {
				if x.ID != y.ID || x.ID == "" {
					continue
				}
				for _, l := range [][]catalog.Row{as[:i], bs[:j]} {
					if len(l) == 0 {
						continue
					}
					if at := copiedAt(l[len(l)-1], x); since.IsZero() || at.Before(since) {
						since = at
					}
				}
				common, same = x.ID, true
				return nil
			}
		}

		return nil
	})

	return common, since, same, err
}

// copiedAt returns when an object was copied from its origin, or an earlier time. A
// volume that was rewound or rebased keeps its creation time, but cannot have been
// copied before its origin existed.
func copiedAt(r, origin catalog.Row) time.Time {
	successor := r.Kind == driver.Volume && r.Lineage() != r.ID
	if successor && origin.CreatedAt.After(r.CreatedAt) {
		return origin.CreatedAt
	}
	return r.CreatedAt
}

// ancestry lists an object and the objects it descends from, as far as they are known.
// The last one may no longer exist: then only its ID is set.
func ancestry(tx *catalog.Tx, r catalog.Row) ([]catalog.Row, error) {
	out := []catalog.Row{r}
	for seen := map[driver.ObjectID]bool{r.ID: true}; r.OriginID != "" && !seen[r.OriginID]; {
		seen[r.OriginID] = true
		next, ok, err := tx.Object(r.OriginID)
		if err != nil {
			return nil, err
		}
		if !ok {
			next = catalog.Row{Identity: driver.Identity{ID: r.OriginID}}
		}
		out = append(out, next)
		r = next
	}

	return out, nil
}

// diffRaw compares the sides as raw block images.
func (v *view) diffRaw(ctx context.Context, out *Difference) error {
	var ranges []treediff.Range
	var changed int64
	var stats treediff.Stats
	var open func(i int, files []*os.File) error
	open = func(i int, files []*os.File) (err error) {
		if i == len(v.sides) {
			ranges, changed, stats, err = treediff.CompareFiles(ctx, files[0], files[1])
			return err
		}

		return v.e.content.WithPath(ctx, v.sides[i].id(), func(path string) error {
			f, err := os.Open(path)
			if err != nil {
				return errs.Wrap(opDiff, v.sides[i].ref.String(), err)
			}
			defer f.Close()
			return open(i+1, append(files, f))
		})
	}

	if err := open(0, nil); err != nil {
		return err
	}

	for _, r := range ranges {
		out.Ranges = append(out.Ranges, DiffRange{r.From, r.To - r.From})
	}

	out.Method, out.Cost = stats.Method, DiffCost{Files: stats.FilesRead, Bytes: stats.BytesRead}
	out.Stat.ChangedBytes = changed
	a, b := v.sides[0].row(), v.sides[1].row()
	if changed > 0 || a.SizeBytes != b.SizeBytes {
		out.Stat.Modified = 1
	}

	return nil
}
