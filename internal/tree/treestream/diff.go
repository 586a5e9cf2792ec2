package treestream

import (
	"bytes"
	"cmp"
	"context"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"
	"pando/internal/tree/treecopy"
	"pando/internal/tree/treediff"
)

// SendDiff writes the stream that turns a copy of the tree base into the tree root. Nobody may change either tree. how
// are the options of the comparison, in which Times is always set. Its memory depends on the size of the difference. It
// returns the errors of Send. Unsupported may also mean that the difference cannot be encoded, but the whole tree can.
func SendDiff(ctx context.Context, w io.Writer, base, root *os.File, how treediff.Options, o SendOptions) error {
	how.Times = true
	res, err := treediff.Compare(ctx, base, root, how)
	if err != nil {
		return sendErr(err)
	}

	s, err := newSender(ctx, w, root, o, true)
	if err != nil {
		return err
	}

	d := &diffSender{
		sender: s, base: base, changes: res.Changes,
		from: map[string]string{}, to: map[string]string{}, touched: map[string]bool{},
	}
	return sendErr(d.sendAll())
}

// diffSender writes the stream of a difference: the steps of treediff.Apply, in the same order.
type diffSender struct {
	*sender
	base    *os.File
	changes []treediff.Change
	from    map[string]string // old paths of renamed files, by their new one
	to      map[string]string // new paths of renamed files, by their old one
	touched map[string]bool   // paths in the tree of directories in which something changes
	flagged []string          // paths in the tree whose flags are set at the end
}

func (d *diffSender) sendAll() error {
	for i := range d.changes {
		ch := &d.changes[i]
		if ch.Path == "." {
			ch.Path = ""
		}
		if ch.Op == treediff.Renamed {
			d.from[ch.Path], d.to[ch.From] = ch.From, ch.Path
		}
	}

	steps := []func() error{d.unprotect, d.sendRemovals, d.sendAdditions, d.files, d.sendNames, d.contents, d.metadata,
		d.dirs, d.flags, d.enc.end}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}

	return nil
}

// movedTo returns the path in the tree of a file of the base, after it, or a directory above it, was renamed.
func (d *diffSender) movedTo(path string) string { return moved(d.to, path) }

// cameFrom returns the path in the base of a file of the tree.
func (d *diffSender) cameFrom(path string) string { return moved(d.from, path) }

func moved(renames map[string]string, path string) string {
	for p := path; p != ""; p, _ = split(p) {
		if to, ok := renames[p]; ok {
			return to + strings.TrimPrefix(path, p)
		}
	}
	return path
}

// openParent opens the directory of a path.
func openParent(root *os.File, path string) (*os.File, string, error) {
	dirPath, name := split(path)
	dir, err := treewalk.Open(root, dirPath)
	return dir, name, readErr(dirPath, "open", err)
}

// readAttributes reads the attributes of a path of a tree.
func (d *diffSender) readAttributes(root *os.File, path string) (a treecopy.Attributes, st unix.Stat_t, err error) {
	if path == "" {
		return d.attrs.ReadFile(root, path)
	}
	dir, name, err := openParent(root, path)
	if err != nil {
		return a, st, err
	}
	defer dir.Close()
	return d.attrs.Read(dir, name)
}

// unprotect sends the paths whose flags "immutable" and "append-only" must be cleared before any change.
func (d *diffSender) unprotect() error {
	if len(d.changes) == 0 {
		return nil
	}

	seen, held := map[string]bool{}, 0
	look := func(path string) error {
		for p := path; !seen[p]; p, _ = split(p) {
			seen[p] = true
			a, st, err := d.readAttributes(d.base, p)
			if errs.Is(err, errs.Conflict) || err == nil && !a.Protected() {
				continue // it does not exist in the base
			}
			if err != nil {
				return err
			}

			if st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink > 1 {
				if held++; held > maxHeld {
					return errs.New(errs.Unsupported, opSend, "",
						"more than %d protected files with several names have changed", maxHeld)
				}
			}

			if err := d.putRecord(record{kind: kindUnprotect, path: p}); err != nil {
				return err
			}

			d.flagged = append(d.flagged, d.movedTo(p))
		}

		return nil
	}

	for i := range d.changes {
		ch := &d.changes[i]
		for _, p := range []string{ch.Path, d.cameFrom(ch.Path), ch.From, ch.Link, d.cameFrom(ch.Link)} {
			if err := look(p); err != nil {
				return err
			}
		}
	}

	return nil
}

var modes = map[treediff.Type]uint32{
	treediff.File: unix.S_IFREG, treediff.Dir: unix.S_IFDIR, treediff.Symlink: unix.S_IFLNK, treediff.Char: unix.S_IFCHR,
	treediff.Block: unix.S_IFBLK, treediff.Fifo: unix.S_IFIFO, treediff.Socket: unix.S_IFSOCK,
}

func depth(path string) int { return strings.Count(path, "/") }

// levels returns the number of directories above a path, including the root.
func levels(path string) int {
	if path == "" {
		return 0
	}
	return depth(path) + 1
}

// sendRemovals sends the removal of deleted paths, and moves renamed ones out of their place, the deepest first.
func (d *diffSender) sendRemovals() error {
	var all []record
	for i := range d.changes {
		ch := &d.changes[i]
		typ, replaces := ch.Replaces()
		switch {
		case ch.Op == treediff.Renamed:
			all = append(all, record{kind: kindOut, path: ch.From, typ: modes[ch.Type], slot: uint64(i)})
			d.touch(ch.From)
		case ch.Op == treediff.Deleted:
			all = append(all, record{kind: kindRemove, path: ch.Path, typ: modes[ch.Type]})
			d.touch(ch.Path)
		case replaces:
			all = append(all, record{kind: kindRemove, path: ch.Path, typ: modes[typ]})
			d.touch(ch.Path)
		}
	}

	slices.SortFunc(all, func(x, y record) int {
		return cmp.Or(-cmp.Compare(depth(x.path), depth(y.path)), cmp.Compare(x.path, y.path))
	})
	return d.sendSteps(all)
}

func (d *diffSender) sendSteps(records []record) error {
	for _, r := range records {
		if err := d.putRecord(r); err != nil {
			return err
		}
	}
	return nil
}

// touch records a change in the directory of a path of the base, by its path in the tree.
func (d *diffSender) touch(path string) {
	dir, _ := split(path)
	d.touched[dir], d.touched[d.movedTo(dir)] = true, true
}

// sendAdditions sends new directories, and moves renamed paths to their new place.
func (d *diffSender) sendAdditions() error {
	var all []record
	for i := range d.changes {
		ch := &d.changes[i]
		dir, _ := split(ch.Path)
		switch {
		case ch.Op == treediff.Renamed:
			all = append(all, record{kind: kindIn, path: ch.Path, typ: modes[ch.Type], slot: uint64(i)})
			d.touched[dir], d.touched[""] = true, true // the root as well, which has the stage
		case ch.IsNew() && ch.Type == treediff.Dir:
			all = append(all, record{kind: kindDir, path: ch.Path})
			d.touched[dir], d.touched[ch.Path] = true, true
		}
	}

	slices.SortFunc(all, func(x, y record) int {
		return cmp.Or(cmp.Compare(depth(x.path), depth(y.path)), cmp.Compare(x.path, y.path))
	})
	return d.sendSteps(all)
}

// files sends the new files with their content and attributes.
func (d *diffSender) files() error {
	for i := range d.changes {
		ch := &d.changes[i]
		if !ch.IsNew() || ch.Type == treediff.Dir || ch.Link != "" {
			continue
		}
		if err := d.newFile(ch.Path); err != nil {
			return err
		}
	}
	return nil
}

func (d *diffSender) newFile(path string) error {
	dir, name, err := openParent(d.root, path)
	if err != nil {
		return err
	}

	defer dir.Close()
	a, err := d.sendFile(dir, name, path)
	if err != nil {
		return err
	}

	d.flagged = append(d.flagged, path) // even without flags, because the new file may inherit some
	up, _ := split(path)
	d.touched[up] = true
	d.addProgress(1, 0)
	return d.sendAttributes(path, a.WithoutFlags())
}

// sendNames sends the new names of files that have others.
func (d *diffSender) sendNames() error {
	for i := range d.changes {
		ch := &d.changes[i]
		if !ch.MakesName() {
			continue
		}

		if !ch.IsNew() { // it is still a name of another file
			if err := d.putRecord(record{kind: kindRemove, path: ch.Path, typ: modes[ch.Type]}); err != nil {
				return err
			}
		}

		if err := d.putRecord(record{kind: kindLink, path: ch.Path, typ: modes[ch.Type], target: ch.Link}); err != nil {
			return err
		}

		up, _ := split(ch.Path)
		d.touched[up] = true
	}

	return nil
}

// contents sends the changed content of existing files.
func (d *diffSender) contents() error {
	for i := range d.changes {
		ch := &d.changes[i]
		if !ch.Content || ch.Link != "" || ch.IsNew() || ch.Op == treediff.Deleted || ch.Type == treediff.Dir {
			continue
		}

		if ch.Type == treediff.File {
			if err := d.content(ch); err != nil {
				return err
			}
			continue
		}

		if err := d.putRecord(record{kind: kindRemove, path: ch.Path, typ: modes[ch.Type]}); err != nil {
			return err
		}

		if err := d.newFile(ch.Path); err != nil {
			return err
		}
	}

	return nil
}

func (d *diffSender) content(ch *treediff.Change) error {
	dir, name, err := openParent(d.root, ch.Path)
	if err != nil {
		return err
	}

	defer dir.Close()

	f, err := treecopy.OpenFile(dir, name, ch.Path)
	if err != nil {
		return err
	}

	defer f.Close()

	st, err := kernel.Stat(int(f.Fd()))
	if err != nil {
		return readErr(ch.Path, "stat", err)
	}

	if st.Size != ch.SizeAfter {
		return treecopy.Changed(ch.Path)
	}

	if err := d.putRecord(record{kind: kindChange, path: ch.Path, before: ch.SizeBefore, size: ch.SizeAfter}); err != nil {
		return err
	}

	ranges, known := ch.Ranges()
	if !known {
		err = d.compared(f, ch)
	}

	for _, r := range ranges {
		if err == nil {
			err = d.sendRanges(f, ch.Path, r.From, min(r.To, ch.SizeAfter), ch.SizeAfter, true)
		}
	}
	if err != nil {
		return err
	}

	return unchanged(f, ch.Path, &st)
}

// blockSize is the unit of differences in bytes.
const blockSize = 4096

// compared sends the changed ranges of a file for which treediff has no list, because there are too many. It reads
// both versions again.
func (d *diffSender) compared(f *os.File, ch *treediff.Change) error {
	was := d.cameFrom(ch.Path)
	dir, name, err := openParent(d.base, was)
	if err != nil {
		return err
	}

	defer dir.Close()

	old, err := treecopy.OpenFile(dir, name, was)
	if err != nil {
		return err
	}

	defer old.Close()

	x, y := make([]byte, maxData), make([]byte, maxData)
	common := min(ch.SizeBefore, ch.SizeAfter)
	for off := int64(0); off < common; {
		n := min(int64(len(x)), common-off)
		if err := readFull(old, was, x[:n], off); err != nil {
			return err
		}
		if err := readFull(f, ch.Path, y[:n], off); err != nil {
			return err
		}
		for _, r := range differing(x[:n], y[:n]) {
			if err := d.sendRanges(f, ch.Path, off+int64(r[0]), off+int64(r[1]), ch.SizeAfter, true); err != nil {
				return err
			}
		}
		off += n
	}

	return d.sendRanges(f, ch.Path, common, ch.SizeAfter, ch.SizeAfter, false)
}

// differing returns the ranges of blocks in which two pieces of the same length differ.
func differing(x, y []byte) (out [][2]int) {
	for i := 0; i < len(x); i += blockSize {
		to := min(len(x), i+blockSize)
		if bytes.Equal(x[i:to], y[i:to]) {
			continue
		}
		if n := len(out); n > 0 && out[n-1][1] == i {
			out[n-1][1] = to
			continue
		}
		out = append(out, [2]int{i, to})
	}

	return out
}

// metadata sends the attributes of existing files that have changed.
func (d *diffSender) metadata() error {
	for i := range d.changes {
		ch := &d.changes[i]
		if ch.Op == treediff.Deleted || ch.Link != "" || ch.IsNew() || !ch.Metadata && !ch.Times && !ch.Content {
			continue
		}

		d.flagged = append(d.flagged, ch.Path)
		if ch.Type == treediff.Dir {
			d.touched[ch.Path] = true
			continue
		}

		a, _, err := d.readAttributes(d.root, ch.Path)
		if err != nil {
			return err
		}

		if err := d.sendAttributes(ch.Path, a.WithoutFlags()); err != nil {
			return err
		}

		d.addProgress(1, 0)
	}

	return nil
}

// dirs sends the attributes of all directories in which something changed, because that has changed their times, the
// deepest first.
func (d *diffSender) dirs() error {
	var all []string
	for path := range d.touched {
		all = append(all, path)
	}

	slices.SortFunc(all, func(x, y string) int {
		return cmp.Or(-cmp.Compare(levels(x), levels(y)), cmp.Compare(x, y))
	})
	for _, path := range all {
		a, st, err := d.readAttributes(d.root, path)
		if errs.Is(err, errs.Conflict) || err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			continue // the directory of the base no longer exists
		}
		if err != nil {
			return err
		}
		d.flagged = append(d.flagged, path)
		if err := d.sendAttributes(path, a.WithoutFlags()); err != nil {
			return err
		}
	}

	return nil
}

// flags sends the flags of all files that have, or had, any.
func (d *diffSender) flags() error {
	slices.Sort(d.flagged)
	for _, path := range slices.Compact(d.flagged) {
		a, _, err := d.readAttributes(d.root, path)
		if errs.Is(err, errs.Conflict) {
			continue // it no longer exists
		}
		if err != nil {
			return err
		}
		if typ := a.Mode & unix.S_IFMT; typ != unix.S_IFREG && typ != unix.S_IFDIR && !a.HasFlags() {
			continue
		}
		if err := d.putRecord(record{kind: kindFlags, path: path, attrs: a}); err != nil {
			return err
		}
	}

	return nil
}
